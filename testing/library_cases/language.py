"""Texts: attention in its forms, transformers underneath."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from testing.library_cases.building import BUILDERS, Built, case, ids, without_torchaudio

# x-transformers


def _decoder(**settings: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **settings)
    return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)


for _name, _settings in {
    "plain": {},
    "rotary": {"rotary_pos_emb": True, "attn_qk_norm": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "relative positions": {"rel_pos_bias": True},
    "dropout and swiglu": {
        "attn_dropout": 0.1,
        "ff_dropout": 0.1,
        "ff_swish": True,
        "ff_glu": True,
    },
    "one key-value head": {"attn_one_kv_head": True, "use_rmsnorm": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "layer dropout": {"layer_dropout": 0.5},
    "hyper connections": {"num_residual_streams": 2},
    "macaron": {"macaron": True, "sandwich_norm": True},
}.items():
    BUILDERS[f"x-transformers/{_name}"] = lambda settings=_settings: Built(  # type: ignore[misc]
        _decoder(**settings), (ids(2, 16),)
    )


@case("x-transformers/autoregressive wrapper")
def _autoregressive() -> Built:
    from x_transformers import AutoregressiveWrapper

    return Built(AutoregressiveWrapper(_decoder()), (ids(2, 17),))


@case("x-transformers/encoder-decoder")
def _x_transformer() -> Built:
    from x_transformers import XTransformer

    sides = {
        f"{side}_{name}": value
        for side in ("enc", "dec")
        for name, value in {"num_tokens": 50, "depth": 2, "heads": 2, "max_seq_len": 16}.items()
    }
    model = XTransformer(dim=32, tie_token_emb=True, **sides)
    return Built(model, (ids(2, 12), ids(2, 13)), {"mask": torch.ones(2, 12, dtype=torch.bool)})


@case("x-transformers/vision")
def _x_vision() -> Built:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=2)
    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)
    return Built(model, (torch.randn(2, 3, 32, 32),))


# Attention in other forms


def _language(module: str, name: str, length: int = 32, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        kind = getattr(importlib.import_module(module), name)
        return Built(kind(num_tokens=50, dim=32, depth=2, **settings), (ids(2, length),))

    return build


BUILDERS |= {
    "performer-pytorch/PerformerLM": _language(
        "performer_pytorch", "PerformerLM", max_seq_len=32, heads=2, dim_head=16, nb_features=8
    ),
    "linformer/LinformerLM": _language("linformer", "LinformerLM", seq_len=32, k=8, heads=2),
    "reformer-pytorch/ReformerLM": _language(
        "reformer_pytorch", "ReformerLM", max_seq_len=32, heads=2, bucket_size=8, n_hashes=2,
        dim_head=16, ff_chunks=2,
    ),
    "linear-attention-transformer/LM": _language(
        "linear_attention_transformer", "LinearAttentionTransformerLM", max_seq_len=32, heads=2
    ),
    "h-transformer-1d/HTransformer1D": _language(
        "h_transformer_1d", "HTransformer1D", max_seq_len=32, heads=2, dim_head=16, block_size=8
    ),
    "routing-transformer/LM": _language(
        "routing_transformer", "RoutingTransformerLM", max_seq_len=32, heads=2, window_size=8
    ),
    "sinkhorn-transformer/LM": _language(
        "sinkhorn_transformer", "SinkhornTransformerLM", max_seq_len=32, heads=2, bucket_size=8
    ),
    "g-mlp-pytorch/gMLP": _language("g_mlp_pytorch", "gMLP", seq_len=32, ff_mult=2),
}  # fmt: skip


@case("soft-moe-pytorch/SoftMoE")
def _soft_moe() -> Built:
    from soft_moe_pytorch import SoftMoE

    return Built(SoftMoE(dim=16, seq_len=8, num_experts=2), (torch.randn(2, 8, 16),))


# transformers underneath


@case("sentence-transformers/SentenceTransformer")
def _sentences() -> Built:
    without_torchaudio()
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=48, max_position_embeddings=32)  # fmt: skip

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = BertModel(config)

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            names = ("input_ids", "attention_mask")
            result = self.body(**{name: features[name] for name in names})
            features["token_embeddings"] = result.last_hidden_state
            return features

    pooling = models.Pooling(32)
    model = SentenceTransformer(modules=[Body(), pooling, models.Normalize()], device="cpu")
    mask = torch.ones(2, 10, dtype=torch.long)
    return Built(model, ({"input_ids": ids(2, 10), "attention_mask": mask},))


@case("openai-whisper/Whisper")
def _whisper() -> Built:
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(8, 20, 32, 2, 2, 50, 12, 32, 2, 2))
    return Built(model, (torch.randn(2, 8, 40), ids(2, 10)))


@case("open_clip_torch/CLIP")
def _clip() -> Built:
    without_torchaudio()
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=16, vocab_size=50, width=32, heads=2, layers=2)
    return Built(CLIP(32, vision, text), (torch.randn(2, 3, 32, 32), ids(2, 16)))


@case("open_clip_torch/CoCa")
def _coca() -> Built:
    without_torchaudio()
    from open_clip.coca_model import CoCa, MultimodalCfg
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    pooled = {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32, **pooled)
    text = CLIPTextCfg(context_length=16, vocab_size=50, width=32, heads=2, layers=2,
                       embed_cls=True, output_tokens=True)  # fmt: skip
    decoder = MultimodalCfg(context_length=16, vocab_size=50, width=32, heads=2, layers=2)
    return Built(CoCa(32, decoder, text, vision), (torch.randn(2, 3, 32, 32), ids(2, 16)))
