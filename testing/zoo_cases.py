"""Cases of the sweep: architectures of transformers, modules of PyTorch, models of timm.

Configurations are shrunk by the names of their fields, inputs are found by trying what the
forward's signature suggests: the first that eager execution accepts is the case.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from testing.models import Case
from testing.sweep import seed_of

MAX_PARAMETERS = 36_000_000


class NotBuilt(Exception):
    """The case cannot be made: no configuration or no input that eager execution accepts."""


def loss_of(result: Any) -> torch.Tensor:
    """The model's own loss, else a weighted sum of all outputs that require a gradient, each once:
    the sum of two gradients of one tensor would be more memory of the loss."""
    own = getattr(result, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad and own.dim() == 0:
        return own
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    terms = {id(t): t for t in leaves if t.requires_grad and t.numel() > 0}
    if not terms:
        raise NotBuilt("no output requires a gradient")
    return _WeightedSum.apply(*terms.values())


class _WeightedSum(torch.autograd.Function):
    """Sum of outputs times fixed weights, with no memory but its value and the gradients."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.specs = [(t.shape, t.dtype, t.device) for t in outputs]
        return torch.zeros((), dtype=outputs[0].real.dtype, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.linspace(-1, 2, shape.numel(), dtype=dtype, device=device).view(shape)
            for shape, dtype, device in ctx.specs
        )


# --- PyTorch's own modules ----------------------------------------------------------------------

# The longest lists of inputs (lengths, orders, losses) repeat the same operators.
INPUTS_EACH = 12


def module_inputs(kind: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, module information, input) of PyTorch's module database, at most a dozen each;
    kind: of this module alone."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if kind and info.name.removeprefix("nn.") != kind:
            continue
        torch.manual_seed(0)
        found = list(
            info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
            )
        )
        every = max(1, len(found) // INPUTS_EACH)
        for number, one in list(enumerate(found))[::every]:
            yield f"module/{info.name.removeprefix('nn.')}/{number}", info, one


def module_names() -> list[str]:
    names = []
    for name, info, one in module_inputs():
        made = _module(info, one)
        if made is not None and any(True for _ in made.parameters()):
            names.append(name)
    return names


def _module(info: Any, one: Any) -> nn.Module | None:
    arguments = one.constructor_input
    try:
        return info.module_cls(*arguments.args, **arguments.kwargs)
    except (TypeError, ValueError, RuntimeError):
        return None


def module_case(name: str) -> Case:
    for found, info, one in module_inputs(name.split("/")[1]):
        if found == name:
            torch.manual_seed(seed_of(name))
            made = _module(info, one)
            assert made is not None
            forward = one.forward_input
            case = Case(name, made.train(), tuple(forward.args), dict(forward.kwargs), loss_of)
            # Gives lazy modules their parameters.
            try_eager(case)
            return case
    raise NotBuilt(f"no module {name}")


# --- timm -----------------------------------------------------------------------------------------


SMALL_WORDS = (
    *("test", "atto", "femto", "pico", "nano", "xxt", "xxs", "micro", "tiny", "_ti", "mini"),
    *("small", "_xs", "_s", "_t", "b0", "_050"),
)


def timm_names() -> list[str]:
    """One architecture of every module of timm, by its name a small one."""
    import timm

    def rank(name: str) -> tuple[int, int, str]:
        sizes = [i for i, word in enumerate(SMALL_WORDS) if word in name]
        return min(sizes, default=len(SMALL_WORDS)), len(name), name

    smallest = {
        module: min(timm.list_models(module=module), key=rank)
        for module in timm.list_modules()
        if timm.list_models(module=module)
    }
    return [f"timm/{smallest[module]}" for module in sorted(smallest)]


# Without these, most models of timm have no dropout at all.
NOISE: tuple[dict[str, Any], ...] = (
    {"drop_rate": 0.1, "drop_path_rate": 0.1},
    {"drop_rate": 0.1},
    {},
)
DEPTHS: tuple[dict[str, Any], ...] = (
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {"depth": 2},
    {},
)


def timm_case(name: str) -> Case:
    errors = []
    for depth, size, noise in itertools.product(DEPTHS, ({"img_size": 64}, {}), NOISE):
        try:
            model = _timm_model(name, {**depth, **size, **noise})
        except (TypeError, ValueError, RuntimeError, AssertionError, IndexError) as error:
            errors.append(f"{size}: {error}")
            continue
        sides = (64,) if size else (64, 96, model.default_cfg["input_size"][-1])
        for side in sides:
            images = torch.randn(2, 3, side, side)
            case = Case(name, model, (images,), {}, loss_of)
            failure = try_eager(case)
            if failure is None:
                return case
            errors.append(f"{side}: {failure}")
    raise NotBuilt("; ".join(errors)[:600])


def _timm_model(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    torch.manual_seed(seed_of(name))
    return _small(
        lambda: timm.create_model(name.removeprefix("timm/"), num_classes=10, **arguments)
    )


def _parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- transformers ---------------------------------------------------------------------------------

# Encoders with decoders first: most of them can be had as a decoder alone too.
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SEMANTIC_SEGMENTATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "TIME_SERIES_PREDICTION",
    "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "UNIVERSAL_SEGMENTATION",
    "SEQUENCE_CLASSIFICATION",
    "FOR_PRETRAINING",
    "",
)


def transformers_names() -> list[str]:
    """One case of every model type: the first task that it has."""
    first: dict[str, str] = {}
    for task, kind in _transformers_classes():
        first.setdefault(kind, task)
    return [f"transformers/{task}/{kind}" for kind, task in first.items()]


@functools.cache
def _transformers_classes() -> dict[tuple[str, str], str]:
    """(task, model type) -> name of the class."""
    from transformers.models.auto import modeling_auto

    found = {}
    for task in TASKS:
        prefix = "MODEL_" if task.startswith("FOR_") or not task else "MODEL_FOR_"
        table = getattr(modeling_auto, f"{prefix}{task}_MAPPING_NAMES".replace("__", "_"))
        label = task.removeprefix("FOR_").lower().replace("_", "-") or "base"
        for kind, name in table.items():
            found[label, kind] = name if isinstance(name, str) else name[0]
    return found


HEADS, VOCABULARY = 4, 100
# Two layers where a configuration has layers of several kinds, else one.
SEVERAL_KINDS = (
    "layer_types",
    "expert",
    "block_type",
    "interval",
    "sparse",
    "step",
    "attn_layer",
    "every",
)

# Field names of configurations by the largest value that they may have.
_LARGEST = """
128: intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim d_ff d_inner
    ffn_hidden_size dim_feedforward mlp_dim shared_intermediate_size decoder_intermediate_size
    speech_encoder_intermediate_size encoder_feedforward_dim t2u_encoder_ffn_dim
    t2u_decoder_ffn_dim max_position_embeddings n_positions max_seq_len
    context_length
100: vocab_size t2u_vocab_size vocab_size_per_layer_input
64: hidden_size d_model n_embd emb_dim dim embedding_size decoder_hidden_size
    attention_hidden_size encoder_hidden_size projection_dim hidden_dim word_embed_proj_dim
    encoder_hidden_dim lru_width out_hidden_size text_hidden_size output_hidden_size
    backbone_hidden_size hidden_size_global text_embed_dim model_dim
    max_source_positions max_target_positions d_latents qformer_hidden_size
32: image_size moe_intermediate_size shared_expert_intermediate_size
    moe_shared_expert_intermediate_size expert_ffn_hidden_size classifier_proj_size
    tdnn_dim codevector_dim proj_codevector_dim
16: head_dim d_kv d_head kv_channels dim_head v_head_dim q_lora_rank kv_lora_rank index_head_dim
    mamba_d_head linear_key_head_dim linear_value_head_dim linear_head_dim
8: qk_rope_head_dim qk_nope_head_dim rotary_dim sliding_window attention_window local_attention
    attention_chunk_size state_size mamba_d_state mamba_n_heads mamba_dt_rank time_step_rank
    hidden_size_per_layer_input num_conv_pos_embeddings num_queries num_latents num_query_tokens
4: num_frames num_attention_heads n_head n_heads num_heads encoder_attention_heads
    decoder_attention_heads num_key_value_heads attention_heads decoder_num_attention_heads
    encoder_num_attention_heads
    decoder_self_attention_heads decoder_cross_attention_heads speech_encoder_attention_heads
    t2u_encoder_attention_heads t2u_decoder_attention_heads num_experts n_routed_experts
    num_local_experts moe_num_experts linear_num_value_heads num_conv_pos_embedding_groups
2: num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth layers
    num_decoder_layers num_encoder_layers decoder_num_hidden_layers num_block_layers
    speech_encoder_layers t2u_encoder_layers t2u_decoder_layers vision_layers
    memory_attention_num_layers num_blocks encoder_num_hidden_layers
    num_self_attends_per_block max_window_layers num_experts_per_tok num_experts_per_token
    moe_topk moe_k index_n_heads linear_num_key_heads mask_time_length mask_feature_length
1: n_group topk_group num_expert_group
"""


def _by_name(table: str) -> dict[str, int]:
    found: dict[str, int] = {}
    largest = 0
    for word in table.split():
        if word.endswith(":"):
            largest = int(word[:-1])
        else:
            found[word] = largest
    return found


SHRUNK = _by_name(_LARGEST)
LAYERS = frozenset(n for n in SHRUNK if n.endswith(("layer", "layers", "depth", "num_blocks")))
# Training noise that transformers draws from numpy (SpecAugment masks of inputs), and whole layers
# dropped by a draw that Python reads: off, because rockplan refuses both by design. Dropout stays.
OFF = {
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "speech_encoder_layerdrop": 0.0,
    # More than there are small layers.
    "num_kv_shared_layers": 0,
}
TOKEN_ENDINGS = ("token_id", "token_index")
LIST_SCALES = {"conv_dim": 16, "hidden_sizes": 8, "neck_hidden_sizes": 8, "embed_dims": 4}


def _shrunk_fields(default: Any) -> dict[str, Any]:
    """Constructor arguments that replace the large values of a default configuration."""
    found: dict[str, Any] = {}
    token = 3
    fields = [name for name in vars(default) if not name.startswith("_")]
    several = any(kind in name for name in fields for kind in SEVERAL_KINDS)
    for name, value in sorted(vars(default).items()):
        if name in OFF:
            found[name] = OFF[name]
        elif value is None and name in FILLED:
            found[name] = FILLED[name]
        elif isinstance(value, bool):
            continue
        elif isinstance(value, float) and value == 0.0 and _is_dropout(name, type(default)):
            found[name] = 0.1
        elif name.endswith(TOKEN_ENDINGS) and isinstance(value, int) and value >= VOCABULARY:
            found[name] = VOCABULARY - token
            token += 1
        elif name == "patch_size" and isinstance(value, int) and value > 8:
            found[name] = 8
        elif isinstance(value, int) and name in SHRUNK and value > SHRUNK[name]:
            found[name] = SHRUNK[name]
            if name in LAYERS and not several:
                found[name] = 1
        elif name in ("depths", "num_block_repeats") and isinstance(value, list | tuple):
            found[name] = type(value)(min(v, 1) for v in value)
        elif name == "image_size" and isinstance(value, list | tuple):
            found[name] = type(value)(min(v, SHRUNK[name]) for v in value)
        elif name in LIST_SCALES and isinstance(value, list | tuple):
            found[name] = type(value)(max(16, v // LIST_SCALES[name]) for v in value)
    found |= _kinds_of_layers(default, found.get("num_hidden_layers"))
    heads = vars(default).get("num_attention_heads")
    groups = vars(default).get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups < heads:
        found["num_key_value_heads"] = min(groups, HEADS // 2)
    return found


def _kinds_of_layers(default: Any, layers: int | None) -> dict[str, Any]:
    """Lists of one name for each layer, cut to `layers`, every kind of layer first."""
    found = {}
    for name, value in sorted(vars(default).items()):
        named = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        if named and layers and len(value) == default.num_hidden_layers:
            kinds = list(dict.fromkeys(value))
            found[name] = [*kinds, *value[len(kinds) :]][:layers]
    return found


def _is_dropout(name: str, kind: type) -> bool:
    """Dropout of attention probabilities counts for half of all configurations only: where it
    is zero, attention is another kernel."""
    of_attention = "attention" in name or "attn" in name
    noise = "dropout" in name or name.endswith(("_pdrop", "drop_path_rate"))
    return noise and not (of_attention and seed_of(kind.__name__) % 2)


# Values for fields that are None by default and without which some models do not run.
FILLED = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "head_dim": 16,
}

# Names of the fields that change: all; all but widths, heads and images; all but numbers of
# layers; inputs and noise alone.
INPUTS = ("vocab", "token", "position", "mask_", "drop")
CHANGES = (
    ("",),
    ("layer", "depth", "experts", *INPUTS),
    ("hidden_size", "intermediate", "head", "image_size", "experts", *INPUTS),
    ("image_size", *INPUTS),
)


def shrink(kind: type, changes: tuple[str, ...]) -> Any:
    """A configuration of class `kind`, small by the fields whose names contain one of `changes`."""
    default = kind()
    found = _shrunk_fields(default)
    fields = {name: value for name, value in found.items() if any(c in name for c in changes)}
    for name in getattr(kind, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None and not isinstance(inner, dict):
            fields[name] = shrink(type(inner), changes).to_dict()
    if hasattr(default, "use_cache"):
        fields["use_cache"] = False
    return kind(**fields)


def _attribute(config: Any, name: str, default: Any) -> Any:
    """The field of the configuration or of the first of its parts that has it."""
    value = getattr(config, name, None)
    for part in getattr(type(config), "sub_configs", {}):
        inner = getattr(config, part, None)
        if value is None and inner is not None:
            value = _attribute(inner, name, None)
    return default if value is None else value


def _input_candidates(model: nn.Module, task: str) -> Iterator[dict[str, Any]]:
    """Keyword arguments that the forward of `model` may accept, most natural first."""
    config: Any = model.config
    names = set(inspect.signature(model.forward).parameters)
    vocabulary = min(_attribute(config, "vocab_size", VOCABULARY), VOCABULARY)
    ids = torch.randint(5, max(6, vocabulary - 30), (2, 16))
    if hasattr(config, "question_token_id"):
        ids[:, 0] = config.question_token_id
    text: dict[str, Any] = {"input_ids": ids}
    if task in ("causal-lm", "masked-lm", "seq-to-seq-causal-lm") and "labels" in names:
        text["labels"] = ids
    if "decoder_input_ids" in names and "labels" not in text:
        text["decoder_input_ids"] = ids
    side = _attribute(config, "image_size", 64)
    side = side[0] if isinstance(side, list | tuple) else side
    channels = _attribute(config, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    frames = _attribute(config, "num_frames", 4)
    images = [torch.randn(2, channels, s, s) for s in dict.fromkeys((side, 64, 128, 224))]
    videos = [torch.randn(2, f, channels, side, side) for f in dict.fromkeys((frames, 4))]
    mels = _attribute(config, "num_mel_bins", _attribute(config, "feature_size", 80))
    mels = mels if isinstance(mels, int) else 80
    mels = _attribute(config, "feature_projection_input_dim", mels)
    length = 2 * _attribute(config, "max_source_positions", 50)
    spectra = [torch.randn(2, mels, length), torch.randn(2, 64, mels), torch.randn(2, 1, 64, mels)]
    rows = _attribute(config, "max_length", 64)
    waves = [
        torch.randn(2, 4000),
        torch.randn(2, 1, 4000),
        torch.randn(2, rows, mels),
        torch.randn(2, 16000),
    ]
    decoder = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
    width = _attribute(config, "hidden_size", 64)
    if "input_ids" in names:
        yield text
        yield {"input_ids": ids}
        yield {"input_ids": ids, "decoder_input_ids": ids}
        if "decoder_inputs_embeds" in names:
            yield {"input_ids": ids, "labels": ids}
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for image in images if "pixel_values" in names else ():
        yield {"pixel_values": image}
        yield {"pixel_values": image, **decoder}
        if "input_ids" in names:
            yield {"pixel_values": image, "input_ids": ids}
    for video in videos if "pixel_values" in names else ():
        yield {"pixel_values": video}
    for video in videos if "pixel_values_videos" in names else ():
        yield {"pixel_values_videos": video}
    for wave in waves if "input_values" in names else ():
        yield {"input_values": wave}
        yield {"input_values": wave, **decoder}
    for spectrum in spectra if "input_features" in names else ():
        yield {"input_features": spectrum, **decoder}
        if "input_ids" in names:
            yield {"input_features": spectrum, "input_ids": ids}
        if "attention_mask" in names:
            mask = torch.ones(spectrum.shape[0], spectrum.shape[1])
            yield {"input_features": spectrum, "attention_mask": mask, **decoder}
    for series in ("past_values", "past_time_values"):
        if series in names:
            steps = _attribute(config, "context_length", 32)
            inputs = _attribute(config, "num_input_channels", 1)
            yield {series: torch.randn(2, steps, inputs)}
            yield {series: torch.randn(2, steps)}
    if "hidden_states" in names:
        yield {"hidden_states": torch.randn(2, 16, width)}
    if "inputs_embeds" in names:
        yield {"inputs_embeds": torch.randn(2, 16, width)}


def try_eager(case: Case) -> str | None:
    """None if forward and backward run, else the error."""
    try:
        case.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        case.model.zero_grad(set_to_none=True)
    return None


def transformers_case(name: str) -> Case:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _, task, kind = name.split("/")
    class_name = _transformers_classes()[task, kind]
    model_class = getattr(transformers, class_name)
    errors = []
    for changes in CHANGES:
        torch.manual_seed(seed_of(name))
        try:
            config = shrink(CONFIG_MAPPING[kind], changes)
            if task == "causal-lm":
                config = config.get_text_config(decoder=True)
            model = _small(lambda made=config: model_class(made))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        for kwargs in _input_candidates(model, task):
            case = Case(name, model, (), kwargs, loss_of)
            failure = try_eager(case)
            if failure is None:
                return case
            errors.append(failure)
    raise NotBuilt(" | ".join(e.replace("\n", " ")[:160] for e in errors[:4]))


def _small(make: Callable[[], nn.Module]) -> nn.Module:
    """The model, if it is small; counted on the meta device first where that is possible."""
    try:
        with torch.device("meta"):
            size = _parameter_count(make())
    except Exception:
        size = 0
    if size > MAX_PARAMETERS:
        raise NotBuilt(f"{size} parameters")
    return make().train()
