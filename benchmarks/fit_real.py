"""What fits of real configurations on the meta device, and of a small one with kernels that are
compiled for the CPU at hand, by the command line; and what asking costs.

    OMP_NUM_THREADS=1 python -m benchmarks.fit_real [NAME ...]

Each command runs twice, in processes of their own and with a cache that is empty at first. Writes
benchmarks/results/fit_real.{jsonl,md}; rows of configurations that are not named stay.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import testing  # noqa: F401 (lets transformers be imported beside a CPU build of torch)
from benchmarks.timing import where

RESULTS = Path(__file__).parent / "results"
Made = tuple[torch.nn.Module, tuple[()], dict[str, torch.Tensor]]


def _decoder(kind: str, **config: Any) -> Made:
    import transformers

    made = getattr(transformers, f"{kind}Config")(use_cache=False, **config)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(made).to(torch.bfloat16).train()
        ids = torch.zeros(1, 512, dtype=torch.long)
    return model, (), {"input_ids": ids, "labels": ids}


def llama_8b() -> Made:
    """Llama 3 8B."""
    return _decoder(
        "Llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=16384,
    )  # fmt: skip


def llama_8b_qlora() -> Made:
    """Llama 3 8B in nf4 with double quantization, as bitsandbytes keeps it, with LoRA of rank 16 in
    bfloat16 at all its layers."""
    import peft

    model, args, kwargs = llama_8b()
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                setattr(parent, name, _in_four_bits(child))
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    with torch.device("meta"):
        return peft.get_peft_model(model, adapters).to(torch.bfloat16).train(), args, kwargs


def _in_four_bits(linear: torch.nn.Linear) -> torch.nn.Module:
    """Return the layer with its weights in nf4, of which nothing has memory."""
    import bitsandbytes
    from bitsandbytes.functional import QuantState, get_4bit_type

    block, of_scales = 64, 256
    count = linear.weight.numel()
    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16
        )
        scales = QuantState(
            torch.empty(-(-count // block // of_scales)),
            blocksize=of_scales, code=torch.empty(256), dtype=torch.float32,
        )  # fmt: skip
        state = QuantState(
            torch.empty(count // block, dtype=torch.uint8), linear.weight.shape,
            dtype=torch.bfloat16, blocksize=block, quant_type="nf4",
            code=get_4bit_type("nf4", device="meta"), offset=torch.empty(()), state2=scales,
        )  # fmt: skip
        layer.weight = bitsandbytes.nn.Params4bit(
            torch.empty(count // 2, 1, dtype=torch.uint8), requires_grad=False, quant_state=state,
            quant_type="nf4", compress_statistics=True, blocksize=block, bnb_quantized=True,
            module=layer,
        )  # fmt: skip
    return layer


def llama_70b() -> Made:
    """Llama 3 70B."""
    return _decoder(
        "Llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=16384,
    )  # fmt: skip


def qwen_05b() -> Made:
    """Qwen2.5 0.5B, whose head is its embedding."""
    return _decoder(
        "Qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
        max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip


def vit_h() -> Made:
    """ViT-H/14 in bfloat16, images of 224 x 224."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16,
        image_size=224, patch_size=14, num_labels=1000,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config).to(torch.bfloat16).train()
        images = torch.zeros(2, 3, 224, 224, dtype=torch.bfloat16)
        labels = torch.zeros(2, dtype=torch.long)
    return model, (), {"pixel_values": images, "labels": labels}


def decoder() -> Made:
    """16 layers of a Llama of width 256, in float32."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=16, num_attention_heads=4,
        vocab_size=1024, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(2, 128, dtype=torch.long)
    return transformers.LlamaForCausalLM(config).train(), (), {"input_ids": ids, "labels": ids}


_LENGTHS = "--batch 1:64 --length 512:16384 --only-loss"
COMMANDS = {
    "llama_8b": f"--gpu h200 --optimizer adamw {_LENGTHS}",
    "llama_8b_qlora": "--gpu rtx-4090 --optimizer adamw --batch 1:32 --length 1024:16384 "
    "--only-loss --time-limit 20",
    "qwen_05b": f"--gpu rtx-4090 --optimizer adamw {_LENGTHS} --tile",
    "vit_h": "--gpu a100-80 --optimizer adamw --batch 1:1024 --only-loss",
    "llama_70b": f"--gpu 800GiB --optimizer adamw {_LENGTHS}",
    "decoder": "--gpu cpu --compile --optimizer adamw --batch 2:1024 --only-loss",
}

Row = dict[str, Any]


def row_of(name: str) -> Row:
    words = f"rockplan fit benchmarks.fit_real:{name} --time-limit 300 {COMMANDS[name]}"
    with tempfile.TemporaryDirectory() as folder:
        return {"name": name, "command": words, "where": where(), **_asked(words, folder)}


def _asked(words: str, folder: str) -> Row:
    arguments = [sys.executable, "-m", *shlex.split(words)]
    caches = {"ROCKPLAN_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels"}
    environment = {**os.environ, **caches}
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        said = asked.stdout.read()
        _, status, usage = os.wait4(asked.pid, 0)
        asked.returncode = os.waitstatus_to_exitcode(status)
    assert asked.returncode == 0, said
    seconds = round(usage.ru_utime + usage.ru_stime, 1)
    print(f"{seconds} s, {usage.ru_maxrss / 2**20:.1f} GiB\n{said}", flush=True)
    return {"said": said, "cold_s": seconds, "cold_gib": round(usage.ru_maxrss / 2**20, 2)}


def table(rows: list[Row]) -> str:
    lines = [
        "CPU time of the whole command, imports and the model among it, and the most memory that "
        "it had. Each row and its answer are of the commit named with it: fit has changed since "
        "the earlier ones, which were not run again.",
        "",
        "| model | time | memory | where |",
        "|---|---|---|---|",
    ]
    lines += (
        f"| {row['name']} | {row['cold_s']} s | {_said(row, 'cold_gib', 'GiB')} | {row['where']} |"
        for row in rows
    )
    for row in rows:
        commit = row["where"].split(",")[0]
        lines += ["", f"`{row['command']}`, of commit {commit}:"]
        lines += ["", "```text", row["said"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _said(row: Row, what: str, unit: str) -> str:
    return f"{row[what]} {unit}" if what in row else "not measured"


def main(names: list[str]) -> None:
    file = RESULTS / "fit_real.jsonl"
    for name in names or COMMANDS:
        made = row_of(name)
        before = file.read_text().splitlines() if file.exists() else []
        rows = {row["name"]: row for row in (*map(json.loads, before), made)}
        ordered = [rows[known] for known in COMMANDS if known in rows]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in ordered))
        (RESULTS / "fit_real.md").write_text(table(ordered))


if __name__ == "__main__":
    main(sys.argv[1:])
