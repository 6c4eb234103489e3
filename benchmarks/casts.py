"""What the pass `cancel-casts` is worth: LoRA on a small Llama in bfloat16, with and without it.

    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python -m benchmarks.casts

Writes benchmarks/results/casts.md.
"""

from __future__ import annotations

from pathlib import Path

import torch

import rockplan
import testing  # noqa: F401 (lets transformers be imported beside a CPU build of torch)
from benchmarks.timing import where

RESULTS = Path(__file__).parent / "results" / "casts.md"
WAYS = ("100%", "30%", "min")


def adapted(dropout: float) -> torch.nn.Module:
    """A Llama of 4 layers of width 128 in bfloat16 with LoRA at all layers."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=500, use_cache=False,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=dropout)
    adapters.target_modules = "all-linear"
    return peft.get_peft_model(base, adapters).train()


def row(dropout: float, is_cast: bool, budget: str) -> str:
    ids = torch.randint(0, 500, (4, 128), generator=torch.Generator().manual_seed(0))
    cells = []
    for without in (("cancel-casts",), ()):
        options = rockplan.Options(cache=False, without=without, only_loss=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            batch = {"input_ids": ids, "labels": ids}
            plan = rockplan.plan(adapted(dropout), batch, budget, options=options)
        operations, peak_mib = len(plan.graph.nodes), plan.peak_bytes / 2**20
        cells.append(f"{operations} | {peak_mib:.2f} | {100 * plan.overhead:+.1f} %")
    autocast = "yes" if is_cast else "no"
    return f"| {dropout} | {autocast} | {budget} | {' | '.join(cells)} |"


def main() -> None:
    head = f"""# Casts that cancel

`python -m benchmarks.casts`, {where()}. Of each: operations, peak in MiB, overhead. A share
is one of what each keeps by itself.

| dropout | autocast | budget | without the pass | MiB | overhead | with it | MiB | overhead |
|---|---|---|---|---|---|---|---|---|
"""
    cases = ((0.0, True), (0.0, False), (0.1, True), (0.1, False))
    rows = [row(*case, budget) for case in cases for budget in WAYS]
    RESULTS.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
