"""Large vocabularies: the smallest plans of models of transformers as they are configured.

    OMP_NUM_THREADS=1 python -m benchmarks.vocabulary [--time-limit 120]

Two models, 2 x 512 tokens, labels passed: Qwen2.5-0.5B (24 layers of width 896, vocabulary 151936,
whose head is its embedding, bfloat16), planned in prices of a roofline and not run; and Llama with
4 layers of width 128 and a vocabulary of 30000 in float32, whose peaks are measured. Ways: the
logits released, not made (`only_loss`), and not made with the head in parts (`tile`). Writes
benchmarks/results/vocabulary.{jsonl,md}.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import rockplan
from benchmarks.timing import mebibytes, where
from rockplan.budget import Budget
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.pipeline import lower
from rockplan.options import Options
from rockplan.search import planning, problem
from testing.models import llama

RESULTS = Path(__file__).parent / "results"

WAYS: dict[str, dict[str, Any]] = {
    "logits released": {"released": (1,)},
    "only_loss": {"only_loss": True},
    "only_loss, head in parts": {"only_loss": True, "tile": True},
}

Row = dict[str, str | float | int | None]
Batch = dict[str, torch.Tensor]


def qwen() -> tuple[nn.Module, Batch]:
    """Qwen2.5-0.5B, of numbers that nobody has drawn."""
    config = transformers.Qwen2Config(
        num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    ids = torch.randint(config.vocab_size, (2, 512))
    return model.train(), {"input_ids": ids, "labels": ids}


def small() -> tuple[nn.Module, Batch]:
    case = llama(layers=4, width=128, vocabulary=30000, batch=2, length=512)
    return case.model, case.kwargs


def least_bytes(model: nn.Module, batch: Batch, options: Options) -> int:
    """The peak of the smallest plan, in prices of a roofline."""
    run = capture(model, (), batch, only_loss=options.only_loss)
    graph = lower(run, 0, options).graph
    goal = problem.problem_of(graph, roofline(graph, Rates(1e11, 2e10)), options)
    return planning.plan_within(goal, Budget(is_minimum=True), options).peak_bytes


def rows_of(time_limit_s: float) -> Iterator[Row]:
    torch.manual_seed(0)
    model, batch = qwen()
    for way, changes in WAYS.items():
        options = Options(cache=False, time_limit_s=time_limit_s, **changes)
        least = least_bytes(model, batch, options)
        yield {"model": "Qwen2.5-0.5B", "way": way, "predicted_bytes": least, "peak_bytes": None}
    model, batch = small()
    for way, changes in WAYS.items():
        options = Options(cache=False, time_limit_s=time_limit_s, **changes)
        fast = rockplan.solve(model, batch, "min", options=options)
        train = partial(step, fast, batch)
        yield {
            "model": "Llama, 4 layers",
            "way": way,
            "predicted_bytes": rockplan.plan_of(fast).peak_bytes,
            "peak_bytes": rockplan.peak_live_bytes(train).peak_bytes,
        }


def step(module: nn.Module, batch: Batch) -> None:
    module(**batch).loss.backward()


def table(rows: list[Row], time_limit_s: float) -> str:
    lines = [
        f"{where()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"at most {time_limit_s:g} s for each plan",
        "",
        "| model | way | predicted MiB | measured MiB |",
        "|---|---|---|---|",
    ]
    for row in rows:
        peak = row["peak_bytes"]
        sizes = mebibytes(int(row["predicted_bytes"] or 0)), mebibytes(int(peak)) if peak else ""
        lines.append(f"| {row['model']} | {row['way']} | {' | '.join(sizes)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=120)
    seconds = parser.parse_args().time_limit
    rows = []
    for row in rows_of(seconds):
        print(row, flush=True)
        rows.append(row)
    (RESULTS / "vocabulary.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (RESULTS / "vocabulary.md").write_text(table(rows, seconds))
    print(table(rows, seconds))


if __name__ == "__main__":
    main()
