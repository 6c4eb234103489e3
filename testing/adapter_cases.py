"""Frozen quantized bases with adapters: library, scheme, adapter and model of each row.

A library is imported where a model of it is built. Models have random weights and a few layers, and
are quantized on the way that users take: by `from_pretrained` where the library has one.
"""

from __future__ import annotations

import copy
import functools
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


def _unet() -> Any:
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(32, WIDTH), cross_attention_dim=WIDTH, attention_head_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: _language("Llama"),
    "Qwen3": lambda: _language("Qwen3"),
    "ViT": _vision,
    "UNet": _unet,
}


def call_of(model: str) -> dict[str, Any]:
    """The arguments of one call, by name."""
    if model == "ViT":
        return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}
    if model == "UNet":
        names = {"sample": (2, 4, 16, 16), "encoder_hidden_states": (2, 8, WIDTH)}
        return {"timestep": torch.arange(2)} | {n: torch.randn(shape) for n, shape in names.items()}
    ids = torch.randint(0, VOCABULARY, (4, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


def loss_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result.sample.square().mean() if "sample" in result else result.loss
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


def _quantized(model: str, kind: str, **settings: Any) -> Any:
    """A model of transformers quantized by torchao, by `kind` of its configurations."""
    import torchao.quantization
    import transformers

    if "group" in settings:
        settings["granularity"] = torchao.quantization.PerGroup(settings.pop("group"))
    configuration = getattr(torchao.quantization, f"{kind}Config")(**settings)
    return _loaded(model, transformers.TorchAoConfig(quant_type=configuration))


def _replaced(model: str, of: Callable[[nn.Linear], nn.Module]) -> Any:
    """The model, frozen, with `of` each linear layer but the head in its place."""
    made = MODELS[model]().requires_grad_(False)
    for name, layer in [*made.named_modules()]:
        if type(layer) is nn.Linear and name != "lm_head":
            made.set_submodule(name, of(layer).requires_grad_(False))
    return made


def _normal_float(layer: nn.Linear) -> nn.Module:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    weight = nf4_tensor.to_nf4(layer.weight, 64, min(32, layer.weight.numel() // 64))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _four_bits(layer: nn.Linear) -> nn.Module:
    """What diffusers makes of a layer; on a CPU it refuses to."""
    import bitsandbytes

    has_bias = layer.bias is not None
    made = bitsandbytes.nn.LinearNF4(layer.in_features, layer.out_features, bias=has_bias)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def _trained(model: str, kind: str) -> Any:
    """The model, all of which is trained, with torchao's layers for float8 or for training that
    knows of a later quantization, or with weights of its classes."""
    from torchao import float8, quantization

    made = MODELS[model]()
    if kind == "float8":
        configuration = float8.Float8LinearConfig(emulate=True)
        return float8.convert_to_float8_training(made, config=configuration)
    if kind in ("int8 products", "BitNet"):
        from torchao.prototype import quantized_training

        of = {"int8 products": "int8_mixed_precision_training", "BitNet": "bitnet_training"}
        quantization.quantize_(made.model, getattr(quantized_training, of[kind])())
        return made
    later = {
        "int4": lambda: quantization.Int4WeightOnlyConfig(group_size=32),
        "int8 and int4": lambda: quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(32)
        ),
    }[kind]()
    quantization.quantize_(made, quantization.qat.QATConfig(later, step="prepare"))
    _keep_in_copies(quantization.qat.IntxFakeQuantizer)
    return made


@functools.cache
def _keep_in_copies(kind: Any) -> None:
    """What a refusal says of a class whose forward keeps a tensor at each call."""
    run = kind.forward
    kind.forward = lambda self, *args: run(copy.copy(self), *args)


def _quanto(model: str, kind: str) -> Any:
    from optimum import quanto

    made = MODELS[model]()
    quanto.quantize(made, weights=getattr(quanto, kind), exclude="lm_head")
    quanto.freeze(made)
    return made


def _hqq(model: str, bits: int) -> Any:
    from hqq.core import quantize

    settings: Any = quantize.BaseQuantizeConfig(nbits=bits, group_size=64)
    kind: Any = {"compute_dtype": torch.float32, "device": "cpu"}
    return _replaced(model, lambda layer: quantize.HQQLinear(layer, settings, **kind))


SCHEMES: dict[str, Callable[[str], Any]] = {
    "bitsandbytes/nf4": lambda m: _four(m, "nf4"),
    "bitsandbytes/nf4, double": lambda m: _four(m, "nf4", is_double=True),
    "bitsandbytes/nf4, double, bfloat16": lambda m: _four(m, "nf4", True, torch.bfloat16),
    "bitsandbytes/fp4": lambda m: _four(m, "fp4"),
    "bitsandbytes/nf4, by layer": lambda m: _replaced(m, _four_bits),
    "bitsandbytes/int8": lambda m: _bits(m, load_in_8bit=True),
    "torchao/int8": lambda m: _quantized(m, "Int8WeightOnly"),
    "torchao/int8, groups": lambda m: _quantized(m, "Int8WeightOnly", group=32),
    "torchao/int4": lambda m: _quantized(m, "IntxWeightOnly", weight_dtype=torch.int4, group=32),
    "torchao/float8": lambda m: _quantized(m, "Float8WeightOnly"),
    "torchao/nf4": lambda m: _replaced(m, _normal_float),
    "torchao/float8 training": lambda m: _trained(m, "float8"),
    "torchao/int8 products training": lambda m: _trained(m, "int8 products"),
    "torchao/BitNet training": lambda m: _trained(m, "BitNet"),
    "torchao/int4 in training": lambda m: _trained(m, "int4"),
    "torchao/int8 and int4 in training": lambda m: _trained(m, "int8 and int4"),
    "quanto/int8": lambda m: _quanto(m, "qint8"),
    "quanto/int4": lambda m: _quanto(m, "qint4"),
    "quanto/float8": lambda m: _quanto(m, "qfloat8"),
    "hqq/4 bits": lambda m: _hqq(m, 4),
    "hqq/8 bits": lambda m: _hqq(m, 8),
}

FROZEN = [scheme for scheme in SCHEMES if not scheme.endswith("training")]


def _targets(model: Any) -> list[str]:
    kinds = {n.rpartition(".")[2] for n, m in model.named_modules() if hasattr(m, "in_features")}
    wanted = {"q_proj", "v_proj", "up_proj", "query", "value", "to_q", "to_v"}
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


class UnderAutocast(nn.Module):
    """As a trainer with `bf16=True` calls a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**kwargs)


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
    "LoHa": _adapted("LoHa", r=4, module_dropout=0.1),
    "LoKr": _adapted("LoKr", r=4, module_dropout=-1.0),  # what a refusal of 0.0 says
    "BOFT": _adapted("BOFT", boft_block_size=16),
    "FourierFT": _adapted("FourierFT", n_frequency=100),
    "MiSS": _adapted("Miss", r=4),
    "LoRA under autocast": lambda model: UnderAutocast(_prepared(model)),
    "none": lambda model: model,
}
