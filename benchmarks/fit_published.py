"""What `fit` says of GPUs beside what was measured on them, by us and by others.

    OMP_NUM_THREADS=1 python -m benchmarks.fit_published [NAME ...]

Each model is on the CPU or the meta device, its GPU given by name. Writes
benchmarks/results/fit_published.md. Bytes of rows "activations" are beyond parameters, buffers,
inputs and gradients; of rows "process" all that the process has on the device, without its context.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rockplan
import testing  # noqa: F401 (lets transformers be imported beside a CPU build of torch)
from benchmarks.timing import where
from rockplan.fitting.gpus import Gpu, gpu
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.options import Options
from rockplan.will_it_fit.answer import Fit, FitRow
from testing import gpu_cases, models

RESULTS = Path(__file__).parent / "results" / "fit_published.md"
KEPT, CHECKPOINTED = "kept whole", "checkpoint per block"
MIB, GB = 2.0**20, 1e9


@dataclass(frozen=True, slots=True)
class Published:
    """One figure. way: of a row; figure: 'activations', 'allocated' and 'process' in bytes, 'batch'
    the range of (one that fits, one that does not), 'a second' a rate."""

    way: str
    figure: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of `fit`. made: model, positional and keyword arguments; tokens: of a sample, if
    rates are of tokens."""

    name: str
    device: str | Gpu
    made: Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]
    published: tuple[Published, ...]
    autocast: torch.dtype | None = None
    optimizer: Any = None
    sizes: dict[int, tuple[int, int]] | None = None
    released: tuple[int, ...] = ()
    step: TrainingStep = USUAL
    tokens: int = 1
    gpus: int = 1

    def answer(self) -> Fit:
        model, args, kwargs = self.made()
        on = contextlib.nullcontext() if self.autocast is None else _autocast(self.autocast)
        with on:
            return rockplan.fit(
                model,
                args,
                self.device,
                optimizer=self.optimizer,
                sizes=self.sizes,
                sample_kwargs=kwargs,
                step=self.step,
                gpus=self.gpus,
                options=Options(cache=False, released=self.released, time_limit_s=5),
            )


def _autocast(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype=dtype)


def _of(case: models.Case) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    return case.model, case.args, case.kwargs


def attention_of_2021(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: None,
    scaling: float,
    dropout: float,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as it was, where softmax kept its argument for backward, too: here the product
    with `module.kept` does."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = torch.softmax(scores.float() * module.kept, dim=-1)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def bert_large(batch: int) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("of_2021", attention_of_2021)
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="of_2021",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config).train()
        for layer in model.modules():
            if hasattr(layer, "scaling"):
                layer.kept = torch.nn.Parameter(torch.ones(()))
        ids = torch.zeros(batch, 512, dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": labels}


def one_by_one(parameters: Any) -> torch.optim.Optimizer:
    """AdamW as the Trainer of that year had it."""
    return torch.optim.AdamW(parameters, foreach=False)


def of_timm(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(False)  # as it was when the table was made
    with torch.device("meta"):
        return timm.create_model(name).train(), (torch.zeros(8, 3, 224, 224),), {}


def sgd_one_by_one(parameters: Any) -> torch.optim.Optimizer:
    """SGD as it was in PyTorch 1.12."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=False)


def with_lora(
    kind: str, batch: int, length: int, **config: Any
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    import peft
    import transformers

    made = getattr(transformers, f"{kind}Config")(use_cache=False, **config)
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(made).to(torch.bfloat16).train()
        ids = torch.zeros(batch, length, dtype=torch.long)
        adapted = peft.get_peft_model(model, lora, low_cpu_mem_usage=True).to(torch.bfloat16)
    return adapted, (), {"input_ids": ids, "labels": ids}


def mpt(layers: int, width: int, heads: int, batch: int) -> Any:
    """GPT-2 without dropout in a size of MPT's, whose attention was flash attention, too."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=2048, vocab_size=50368,
        use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        activation_function="gelu", loss_type="ForCausalLM",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        ids = torch.zeros(batch, 2048, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}


CHECK, H200 = "results/gpu_check.md", "results/gpu.md"
HF = "transformers docs, perf_train_gpu_one (2022)"
LITGPT = "litgpt, resource tables"
TIMM = "timm, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
MPT = "llm-foundry, scripts/train/benchmarking (exchange included)"
LLAMA_13B = {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
    "num_attention_heads": 40,
}  # fmt: skip
PHI = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "vocab_size": 51200, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
CONTEXT_MIB = 1343  # of the V100 rows, as their source says
OUR_HOST = replace(gpu("h200"), host_us=(77.5, 77.5))
"""What the host of our H200 took for each of 1823 calls of GPT-2 large, kept whole (141.3 ms), in
an environment with CUBLAS_WORKSPACE_CONFIG, which some releases of PyTorch parse at each
product."""

ASKED = (
    Asked(
        "GPT-2, 12 layers, 8 x 1024, autocast, dropout .1",
        "h100-80",
        lambda: _of(
            models.gpt2(layers=12, width=768, heads=12, vocabulary=50257, batch=8, length=1024)
        ),
        (
            Published(KEPT, "activations", 11187.3 * MIB, CHECK),
            Published(CHECKPOINTED, "activations", 5115.3 * MIB, CHECK),
        ),
        autocast=torch.bfloat16,
        released=(1,),
    ),
    Asked(
        "Llama, 8 layers, 8 x 1024, autocast",
        "h100-80",
        lambda: _of(
            models.llama(
                layers=8,
                width=1024,
                heads=16,
                key_value_heads=4,
                vocabulary=32000,
                batch=8,
                length=1024,
            )
        ),  # fmt: skip
        (
            Published(KEPT, "activations", 6711.5 * MIB, CHECK),
            Published(CHECKPOINTED, "activations", 3399.0 * MIB, CHECK),
        ),
        autocast=torch.bfloat16,
        released=(1,),
    ),
    Asked(
        "ResNet-50, 64 images",
        "h100-80",
        lambda: _of(gpu_cases.RESNET()),
        (Published(KEPT, "activations", 5255.5 * MIB, CHECK),),
    ),
    Asked(
        "Llama, 8 layers of width 2048, 4 x 2048, bfloat16",
        OUR_HOST,
        lambda: _of(gpu_cases.TIMED["llama"].full()),
        (
            Published(KEPT, "activations", 8577.04 * MIB, H200),
            Published(CHECKPOINTED, "activations", 3384.55 * MIB, H200),
            Published(KEPT, "a second", 4 * 2048 / 0.0654, H200),
            Published(CHECKPOINTED, "a second", 4 * 2048 / 0.0980, H200),
        ),
        released=(1,),
        tokens=2048,
    ),
    Asked(
        "GPT-2 large, 4 x 1024, bfloat16, dropout .1",
        OUR_HOST,
        lambda: _of(gpu_cases.TIMED["gpt2-large"].full()),
        (
            Published(KEPT, "activations", 12834.37 * MIB, H200),
            Published(CHECKPOINTED, "activations", 2740.84 * MIB, H200),
            Published(KEPT, "a second", 4 * 1024 / 0.1413, H200),
            Published(CHECKPOINTED, "a second", 4 * 1024 / 0.2724, H200),
        ),
        released=(1,),
        tokens=1024,
    ),
    Asked(
        "ResNet-50, 64 images",
        OUR_HOST,
        lambda: _of(gpu_cases.RESNET()),
        (
            Published(KEPT, "a second", 64 / 0.0371, H200),
            Published(CHECKPOINTED, "a second", 64 / 0.0660, H200),
        ),
    ),
    Asked(
        "bert-large, 4 x 512",
        "v100-16",
        lambda: bert_large(4),
        (
            Published(KEPT, "process", (14949 - CONTEXT_MIB) * MIB, HF),
            Published(KEPT, "a second", 8.86, HF),
        ),
        optimizer=one_by_one,
        step=TrainingStep(set_to_none=False),
    ),
    Asked(
        "bert-large, 1 x 512",
        "v100-16",
        lambda: bert_large(1),
        (
            Published(KEPT, "process", (8681 - CONTEXT_MIB) * MIB, f"{HF}, accumulating"),
            Published(CHECKPOINTED, "process", (6775 - CONTEXT_MIB) * MIB, f"{HF}, accumulating"),
            Published(KEPT, "a second", 7.75, f"{HF}, accumulating"),
            Published(CHECKPOINTED, "a second", 5.99, f"{HF}, accumulating"),
        ),
        optimizer=one_by_one,
        step=TrainingStep(accumulate=4, set_to_none=False),
    ),
    Asked(
        "bert-large, 4 x 512, autocast",
        "v100-16",
        lambda: bert_large(4),
        (
            Published(KEPT, "process", (13939 - CONTEXT_MIB) * MIB, HF),
            Published(KEPT, "a second", 18.64, HF),
        ),
        autocast=torch.float16,
        optimizer=one_by_one,
        step=TrainingStep(set_to_none=False, grad_scaler=True),
    ),
    Asked(
        "bert-large, 1 x 512, autocast",
        "v100-16",
        lambda: bert_large(1),
        (
            Published(CHECKPOINTED, "process", (7275 - CONTEXT_MIB) * MIB, f"{HF}, accumulating"),
            Published(CHECKPOINTED, "a second", 10.09, f"{HF}, accumulating"),
        ),
        autocast=torch.float16,
        optimizer=one_by_one,
        step=TrainingStep(accumulate=4, set_to_none=False, grad_scaler=True),
    ),
    Asked(
        "Llama 2 7B, LoRA of 8, 1 x 1304, bfloat16",
        "a100-40",
        lambda: with_lora("Llama", 1, 1304),
        (Published(KEPT, "allocated", 21.30 * GB, LITGPT),),
        optimizer="adamw",
    ),
    Asked(
        "Llama 2 7B, LoRA of 8, 2 x 1304, bfloat16",
        "a100-40",
        lambda: with_lora("Llama", 2, 1304),
        (Published(KEPT, "allocated", 29.07 * GB, LITGPT),),
        optimizer="adamw",
    ),
    Asked(
        "Llama 2 7B, LoRA of 8, 1304 tokens, bfloat16",
        "a100-40",
        lambda: with_lora("Llama", 1, 1304),
        (Published(KEPT, "batch", (2, 4), LITGPT),),
        optimizer="adamw",
        sizes={0: (1, 8)},
    ),
    Asked(
        "Llama 2 13B, LoRA of 8, 1304 tokens, bfloat16",
        "a100-40",
        lambda: with_lora("Llama", 1, 1304, **LLAMA_13B),
        (Published(KEPT, "allocated", 38.12 * GB, LITGPT),),
        optimizer="adamw",
    ),
    Asked(
        "Llama 2 13B, LoRA of 8, 1304 tokens, bfloat16",
        "a100-40",
        lambda: with_lora("Llama", 1, 1304, **LLAMA_13B),
        (Published(KEPT, "batch", (1, 2), LITGPT),),
        optimizer="adamw",
        sizes={0: (1, 4)},
    ),
    *(
        Asked(
            f"Phi 1.5, LoRA of 8, {batch} x 1044, bfloat16",
            "a100-40",
            partial(with_lora, "Phi", batch, 1044, **PHI),
            (Published(KEPT, "allocated", value * GB, LITGPT),),
            optimizer="adamw",
        )
        for batch, value in ((1, 4.82), (2, 6.76), (4, 10.68))
    ),
    *(
        Asked(
            f"{name}, 224 pixels, autocast",
            "rtx-3090",
            partial(of_timm, name),
            (
                Published(KEPT, "batch", batch, TIMM),
                Published(KEPT, "a second", rate, TIMM),
            ),
            autocast=torch.float16,
            optimizer=sgd_one_by_one,
            step=TrainingStep(set_to_none=False),  # the default of that release
            sizes={0: (1, 512)},
        )
        for name, batch, rate in (
            ("vit_large_patch16_224", (64, 96), 117.1),
            ("vit_base_patch16_224", (192, 256), 390.86),
            ("vit_small_patch16_224", (384, 512), 1052.92),
            ("mixer_b16_224", (256, 384), 528.02),
            ("resnet152", (192, 256), 370.08),
            ("vgg16_bn", (256, 384), 388.69),
        )
    ),
    *(
        Asked(
            f"GPT-2 in the size of MPT {name}, {batch} x 2048, autocast, of 8",
            device,
            partial(mpt, *sizes, batch),
            (Published(KEPT, "a second", rate, MPT),),
            autocast=torch.bfloat16,
            optimizer="adamw",
            tokens=2048,
            gpus=8,
        )
        for device, name, sizes, batch, rate in (
            ("h100-80", "7B", (32, 4096, 32), 6, 10643),
            ("h100-80", "1B", (24, 2048, 16), 14, 45455),
            ("a100-80", "7B", (32, 4096, 32), 6, 4641),
            ("a100-80", "1B", (24, 2048, 16), 14, 20513),
        )
    ),
)


def rows_of(asked: Asked) -> Iterator[str]:
    """Yield a row of the table for each published figure."""
    found = {row.way: row for row in asked.answer().rows}
    for published in asked.published:
        said, ratio = _beside(found[published.way], published, asked.tokens)
        value = published.value
        text = f"{value[0]}, not {value[1]}" if published.figure == "batch" else _text(published)
        what = f"{asked.name} | {gpu(asked.device).name} | {published.way} | {published.figure}"
        yield f"| {what} | {text} | {said} | {ratio} | {published.source} |"


def _text(published: Published) -> str:
    in_bytes = published.figure in ("activations", "allocated", "process")
    return f"{published.value / MIB:.1f} MiB" if in_bytes else f"{published.value:,.2f}"


def _beside(row: FitRow, published: Published, tokens: int) -> tuple[str, str]:
    """Return (what is said, its ratio to what is published)."""
    if published.figure == "batch":
        fits, not_any_more = published.value
        is_right = fits <= row.batch < not_any_more
        return str(row.batch), "agrees" if is_right else "**differs**"
    if published.figure == "a second":
        rates = [(rate or 0.0) * tokens for rate in (row.slow_tokens_per_s, row.tokens_per_s)]
        ratios = [f"{rate / published.value:.2f}" for rate in rates]
        return " to ".join(dict.fromkeys(f"{r:,.1f}" for r in rates)), " to ".join(
            dict.fromkeys(ratios)
        )
    sizes = {"allocated": row.allocated_bytes, "process": row.reserved_bytes}
    size_bytes = sizes.get(published.figure) or dict(row.owners)["activations"]
    return f"{size_bytes / MIB:.1f} MiB", f"{size_bytes / published.value:.3f}"


HEAD = f"""# `fit` beside what was measured on GPUs

`OMP_NUM_THREADS=1 python -m benchmarks.fit_published`, {where()}.
Nothing ran on a GPU here: models are on the CPU or the meta device, the GPU is a name.
"activations": bytes beyond parameters, buffers, inputs, gradients; "allocated": at the peak;
"process": all but the context;
"batch": one that fits, and the next of the source's list, which does not; "a second": tokens or
samples, from a slow host to a quick one. bert-large is of PyTorch to 1.10, whose softmax kept its
argument, too (pytorch/pytorch issue 64000, pull request 65242): with eager attention 16 MiB of each
layer and sample, which the model that is asked for here has. Under autocast 4 x 512 lacks 340 MiB,
of which 66 as in float32: the other 274 are 2.9 MiB of each of 24 layers and 4 samples, as three
16-bit tensors of the width (512 x 1024) would be. Which they were is not known: weights' 16-bit
copies (577 MiB), masks and float32 copies for softmax and norms are in what is said, and the
checkpointed row, which keeps one layer, lacks nothing. resnet152 is too low by the workspaces that
cuDNN takes inside of convolutions. litgpt's rows are of transformers' code in its place: they lack
592, 1293 and 1026 MiB, and two 16-bit tensors of the width of each layer and sample are 652, 1304
and 1019; Phi's, whose norms are others, lack none. Where a range is wide the host decides, whose
speed a name of a GPU does not say.
MPT is 1.19 and 1.21 on H100, 1.01 and 1.03 on A100, the same code in two sizes: eight H100 reached
less of their best product there than eight A100. One H200 did not (Llama of width 2048, compiled:
45.7 ms of results/gpu.md, of which products and attention are said to take 35.6): no rule is made.

| model | GPU | way | figure | published | said | ratio | source |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    names = sys.argv[1:]
    asked = [a for a in ASKED if not names or any(n in a.name for n in names)]
    lines = []
    for one in asked:
        for line in rows_of(one):
            print(line, flush=True)
            lines.append(line)
    if not names:
        RESULTS.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
