"""Frozen quantized bases with adapters: library, scheme, adapter and model of each row.

A library is imported where a model of it is built. Models have random weights and a few layers, and
are quantized on the way that users take: by `from_pretrained` where the library has one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SEQUENCE, VOCABULARY, WIDTH, LAYERS = 64, 256, 64, 4


def _language(kind: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    if kind == "Qwen3":
        config.head_dim = 16
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _vision() -> Any:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, image_size=32, patch_size=8, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: _language("Llama"),
    "Qwen3": lambda: _language("Qwen3"),
    "ViT": _vision,
}


def call_of(model: str) -> dict[str, Any]:
    """The arguments of one call, by name."""
    if model == "ViT":
        return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}
    ids = torch.randint(0, VOCABULARY, (4, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


def loss_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result.loss
    return loss


def _loaded(model: str, configuration: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model saved, and loaded by `from_pretrained` with a quantization."""
    original = MODELS[model]()
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(folder)
        return type(original).from_pretrained(
            folder,
            quantization_config=configuration,
            device_map="cpu",
            dtype=dtype,
        )


def _bits(model: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    import transformers

    return _loaded(model, transformers.BitsAndBytesConfig(**settings), dtype)


def _four(model: str, kind: str, is_double: bool = False, dtype: Any = torch.float32) -> Any:
    return _bits(
        model, dtype, load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=is_double,
    )  # fmt: skip


SCHEMES: dict[str, Callable[[str], Any]] = {
    "bitsandbytes/nf4": lambda m: _four(m, "nf4"),
    "bitsandbytes/nf4, double": lambda m: _four(m, "nf4", is_double=True),
    "bitsandbytes/nf4, double, bfloat16": lambda m: _four(m, "nf4", True, torch.bfloat16),
    "bitsandbytes/fp4": lambda m: _four(m, "fp4"),
    "bitsandbytes/int8": lambda m: _bits(m, load_in_8bit=True),
}


def _targets(model: Any) -> list[str]:
    kinds = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    wanted = {"q_proj", "v_proj", "up_proj", "query", "value"}
    return sorted(kinds & wanted)


def _adapted(kind: str, **settings: Any) -> Callable[[Any], Any]:
    def adapt(model: Any) -> Any:
        import peft

        chosen = {"target_modules": _targets(model), **settings}
        return peft.get_peft_model(model, getattr(peft, f"{kind}Config")(**chosen))

    return adapt


def _several(model: Any) -> Any:
    import peft

    targets = _targets(model)
    adapted = _adapted("Lora", target_modules=targets)(model)
    adapted.add_adapter("other", peft.LoraConfig(r=4, target_modules=targets))
    adapted.base_model.set_adapter(["default", "other"])
    return adapted


def _prepared(model: Any) -> Any:
    import peft

    return _adapted("Lora", lora_dropout=0.1)(peft.prepare_model_for_kbit_training(model))


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "LoRA": _adapted("Lora", lora_dropout=0.1),
    "rsLoRA": _adapted("Lora", use_rslora=True),
    "DoRA": _adapted("Lora", use_dora=True),
    "AdaLoRA": _adapted("AdaLora", total_step=10, lora_dropout=0.1),
    "IA3": _adapted("IA3", feedforward_modules=[]),
    "VeRA": _adapted("Vera", target_modules=["up_proj"]),
    "OFT": _adapted("OFT", oft_block_size=16),
    "modules_to_save": _adapted("Lora", modules_to_save=["lm_head"]),
    "several": _several,
    "prepared": _prepared,
}
