"""Sounds, series, tables, codebooks, processes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from testing.library_cases.building import BUILDERS, Built, Wrapped, case, without_torchaudio

# Sounds and series


@case("encodec/EncodecModel")
def _encodec() -> Built:
    without_torchaudio()
    from encodec.model import EncodecModel
    from encodec.modules import SEANetDecoder, SEANetEncoder
    from encodec.quantization import ResidualVectorQuantizer

    settings: dict[str, Any] = {"dimension": 8, "n_filters": 2, "ratios": [4, 2], "lstm": 0}
    settings["norm"] = "none"  # modules with weight_norm are not copied once they have run
    model = EncodecModel(
        SEANetEncoder(**settings), SEANetDecoder(**settings),
        ResidualVectorQuantizer(dimension=8, n_q=2, bins=16, kmeans_init=False),
        target_bandwidths=[1.5], sample_rate=1600, channels=1,
    )  # fmt: skip
    return Built(model, (torch.randn(2, 1, 64),))


@case("speechbrain/ECAPA_TDNN")
def _ecapa() -> Built:
    without_torchaudio()
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    model = ECAPA_TDNN(8, channels=[16] * 5, attention_channels=8, lin_neurons=8, res2net_scale=4)
    return Built(model, (torch.randn(2, 20, 8),))


@case("asteroid/ConvTasNet")
def _tasnet() -> Built:
    without_torchaudio()
    from asteroid.models import ConvTasNet

    model = ConvTasNet(n_src=2, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8,
                       n_filters=16)  # fmt: skip
    return Built(model, (torch.randn(2, 256),))


@case("conformer/Conformer")
def _conformer() -> Built:
    from conformer import Conformer

    model = Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5, attn_dropout=0.1)
    return Built(model, (torch.randn(2, 12, 16),))


@case("pytorch-tcn/TCN")
def _tcn() -> Built:
    from pytorch_tcn import TCN

    return Built(TCN(4, [8, 8], kernel_size=3), (torch.randn(2, 4, 16),))


for _name in ("InceptionTime", "ResNet", "XceptionTime", "TST"):

    def _series(name: str = _name) -> Built:
        kind = getattr(importlib.import_module(f"tsai.models.{name}"), name)
        more = {"d_model": 16, "n_heads": 2, "d_ff": 16} if name == "TST" else {"nf": 4}
        if name == "ResNet":
            more = {}
        return Built(kind(3, 2, 16, **more) if name == "TST" else kind(3, 2, **more),
                     (torch.randn(2, 3, 16),))  # fmt: skip

    BUILDERS[f"tsai/{_name}"] = _series


# Tables, codebooks, processes


@case("pytorch-tabnet/TabNet")
def _tabnet() -> Built:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(8, 3, virtual_batch_size=4, group_attention_matrix=torch.eye(8))
    return Built(model, (torch.randn(8, 8),))


for _name, _settings in {
    "VectorQuantize": {"codebook_size": 8},
    "VectorQuantize of cosines": {"codebook_size": 8, "use_cosine_sim": True},
    "ResidualVQ": {"codebook_size": 8, "num_quantizers": 2},
    "FSQ": {"levels": [4, 3, 3]},
    "LFQ": {"codebook_size": 8},
}.items():

    def _quantizer(name: str = _name, settings: Any = _settings) -> Built:
        import vector_quantize_pytorch as quantizers

        quantizer = getattr(quantizers, name.split()[0])(dim=8, **settings)

        class Autoencoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encode, self.decode, self.quantizer = (
                    *(nn.Linear(8, 8), nn.Linear(8, 8)), quantizer,
                )  # fmt: skip

            def forward(self, x: Tensor) -> Any:
                quantized, *rest = self.quantizer(self.encode(x))
                losses = [t for t in rest if isinstance(t, Tensor) and t.requires_grad]
                return self.decode(quantized), losses

        return Built(Autoencoder(), (torch.randn(2, 6, 8),))

    BUILDERS[f"vector-quantize-pytorch/{_name}"] = _quantizer


@case("gpytorch/variational")
def _gaussian_process() -> Built:
    import gpytorch

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.linspace(0, 1, 6).unsqueeze(-1)
            learned = gpytorch.variational.CholeskyVariationalDistribution(6)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, learned))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            mean, covariance = self.mean_module(x), self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    def run(process: Any, x: Tensor) -> Tensor:
        found = process(x)
        return torch.stack([found.mean, found.variance])

    return Built(Wrapped(Process(), run), (torch.rand(10, 1),))


@case("gpytorch/deep kernel")
def _deep_kernel() -> Built:
    import gpytorch

    kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=2)

    def run(parts: Any, x: Tensor) -> Any:
        net, kernel = parts
        return kernel(net(x)).to_dense()

    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return Built(Wrapped(nn.ModuleList([net, kernel]), run), (torch.randn(6, 3),))
