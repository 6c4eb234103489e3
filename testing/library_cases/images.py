"""Images and volumes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from testing.library_cases.building import (
    BUILDERS,
    Built,
    Wrapped,
    case,
    ids,
    without_torchaudio,
)

# vit-pytorch

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2}

for _name, _module, _settings in (
    ("ViT", "vit_pytorch", {"mlp_dim": 48, "dropout": 0.1, "emb_dropout": 0.1}),
    ("SimpleViT", "vit_pytorch", {"mlp_dim": 48}),
    ("DeepViT", "vit_pytorch.deepvit", {"mlp_dim": 48, "dropout": 0.1}),
    ("CaiT", "vit_pytorch.cait", {"mlp_dim": 48, "cls_depth": 1, "layer_dropout": 0.0}),
):

    def _vit(name: str = _name, module: str = _module, settings: Any = _settings) -> Built:
        kind = getattr(importlib.import_module(module), name)
        return Built(kind(**_VIT, **settings), (torch.randn(2, 3, 32, 32),))

    BUILDERS[f"vit-pytorch/{_name}"] = _vit


@case("vit-pytorch/CCT")
def _cct() -> Built:
    from vit_pytorch.cct import CCT

    model = CCT(img_size=(32, 32), embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=2,
                mlp_ratio=2.0, num_classes=5, positional_embedding="learnable")  # fmt: skip
    return Built(model, (torch.randn(2, 3, 32, 32),))


@case("vit-pytorch/CvT")
def _cvt() -> Built:
    from vit_pytorch.cvt import CvT

    sizes = {f"s{i}_emb_dim": 16 * i for i in (1, 2, 3)} | {f"s{i}_depth": 1 for i in (1, 2, 3)}
    heads = {f"s{i}_heads": i for i in (1, 2, 3)}
    return Built(CvT(num_classes=5, **sizes, **heads), (torch.randn(2, 3, 64, 64),))


@case("perceiver-pytorch/Perceiver")
def _perceiver() -> Built:
    from perceiver_pytorch import Perceiver

    model = Perceiver(num_freq_bands=2, depth=2, max_freq=4.0, num_latents=8, latent_dim=32,
                      latent_heads=2, cross_dim_head=16, latent_dim_head=16, num_classes=5,
                      weight_tie_layers=True)  # fmt: skip
    return Built(model, (torch.randn(2, 8, 8, 3),))


@case("perceiver-pytorch/PerceiverIO")
def _perceiver_io() -> Built:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(dim=16, queries_dim=16, depth=2, num_latents=8, latent_dim=32,
                        latent_heads=2, cross_dim_head=16, latent_dim_head=16)  # fmt: skip
    return Built(model, (torch.randn(2, 24, 16),), {"queries": torch.randn(6, 16)})


# denoising-diffusion-pytorch


@case("denoising-diffusion-pytorch/Unet")
def _ddpm_unet() -> Built:
    from denoising_diffusion_pytorch import Unet

    model = Unet(dim=8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2)
    return Built(model, (torch.randn(2, 3, 16, 16), ids(2)))


for _name, _settings in (("GaussianDiffusion", False), ("self conditioning", True)):

    def _gaussian(self_condition: bool = _settings) -> Built:
        from denoising_diffusion_pytorch import GaussianDiffusion, Unet

        unet = Unet(dim=8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2,
                    self_condition=self_condition)  # fmt: skip
        return Built(
            GaussianDiffusion(unet, image_size=16, timesteps=20), (torch.rand(2, 3, 16, 16),)
        )

    BUILDERS[f"denoising-diffusion-pytorch/{_name}"] = _gaussian


# monai


def _monai(name: str, *args: Tensor, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        from monai.networks import nets

        return Built(getattr(nets, name)(**settings), args)

    return build


_VOLUME = torch.linspace(-1, 1, 2 * 16**3).reshape(2, 1, 16, 16, 16)
_IMAGE = torch.linspace(-1, 1, 2 * 32**2).reshape(2, 1, 32, 32)
BUILDERS |= {
    "monai/UNet": _monai("UNet", _VOLUME, spatial_dims=3, in_channels=1, out_channels=2,
                         channels=(4, 8, 16), strides=(2, 2), num_res_units=1, dropout=0.1),
    "monai/SegResNet": _monai("SegResNet", _VOLUME, spatial_dims=3, init_filters=8),
    "monai/DynUNet": _monai("DynUNet", _IMAGE, spatial_dims=2, in_channels=1, out_channels=2,
                            kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2],
                            filters=[4, 8, 16], deep_supervision=True),
    "monai/AttentionUnet": _monai("AttentionUnet", _IMAGE, spatial_dims=2, in_channels=1,
                                  out_channels=2, channels=(4, 8, 16), strides=(2, 2)),
    "monai/UNETR": _monai("UNETR", _VOLUME, in_channels=1, out_channels=2, img_size=(16, 16, 16),
                          feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2),
    "monai/SwinUNETR": _monai("SwinUNETR", torch.randn(1, 1, 64, 64), in_channels=1,
                              out_channels=2, feature_size=12, depths=(1, 1, 1, 1),
                              num_heads=(1, 1, 2, 2), spatial_dims=2),
    "monai/VQVAE": _monai("VQVAE", _IMAGE, spatial_dims=2, in_channels=1, out_channels=1,
                          channels=(8, 8), num_res_layers=1, num_res_channels=(8, 8),
                          downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
                          upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
                          num_embeddings=8, embedding_dim=8),
    "monai/DenseNet": _monai("DenseNet", _IMAGE, spatial_dims=2, in_channels=1, out_channels=3,
                             init_features=8, growth_rate=4, block_config=(2, 2), dropout_prob=0.1),
}  # fmt: skip


# Images


def _segmentation(name: str, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        import segmentation_models_pytorch as smp

        kind = getattr(smp, name)
        model = kind("resnet18", encoder_weights=None, encoder_depth=3, classes=2, **settings)
        return Built(model, (torch.randn(2, 3, 32, 32),))

    return build


BUILDERS |= {
    "segmentation-models-pytorch/Unet": _segmentation(
        "Unet", decoder_channels=(32, 16, 16), decoder_attention_type="scse"
    ),
    "segmentation-models-pytorch/UnetPlusPlus": _segmentation(
        "UnetPlusPlus", decoder_channels=(16, 8, 8)
    ),
    "segmentation-models-pytorch/Linknet": _segmentation("Linknet"),
    "segmentation-models-pytorch/PSPNet": _segmentation("PSPNet", psp_out_channels=16),
}


@case("kornia/SOSNet")
def _sosnet() -> Built:
    from kornia.feature import SOSNet

    return Built(SOSNet(pretrained=False), (torch.rand(2, 1, 32, 32),))


@case("kornia/losses of blurred images")
def _kornia() -> Built:
    import kornia

    def run(net: Any, x: Tensor) -> Any:
        y = kornia.filters.gaussian_blur2d(net(x).sigmoid(), (3, 3), (1.0, 1.0))
        return kornia.losses.ssim_loss(y, x, 5) + kornia.losses.total_variation(y).mean()

    return Built(Wrapped(nn.Conv2d(3, 3, 3, padding=1), run), (torch.rand(2, 3, 16, 16),))


def _diffusers(name: str, *args: Any, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        without_torchaudio()
        import diffusers

        return Built(getattr(diffusers, name)(**settings), args)

    return build


_UNET = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1,
         "norm_num_groups": 4}  # fmt: skip
BUILDERS |= {
    "diffusers/UNet2DModel": _diffusers(
        "UNet2DModel", torch.randn(2, 3, 16, 16), 7, **_UNET, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers/UNet2DConditionModel": _diffusers(
        "UNet2DConditionModel", torch.randn(2, 4, 16, 16), torch.tensor([3, 5]),
        torch.randn(2, 6, 16), **_UNET, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "diffusers/AutoencoderKL": _diffusers(
        "AutoencoderKL", torch.randn(1, 3, 16, 16), block_out_channels=(8,), norm_num_groups=4,
    ),
    "diffusers/DiTTransformer2DModel": _diffusers(
        "DiTTransformer2DModel", torch.randn(2, 4, 8, 8), torch.tensor([3, 5]),
        torch.tensor([1, 2]), num_attention_heads=2, attention_head_dim=8, num_layers=2,
        sample_size=8, num_embeds_ada_norm=10, norm_num_groups=4,
    ),
}  # fmt: skip


@case("mlp-mixer-pytorch/MLPMixer")
def _mixer() -> Built:
    from mlp_mixer_pytorch import MLPMixer

    model = MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=5)
    return Built(model, (torch.randn(2, 3, 32, 32),))
