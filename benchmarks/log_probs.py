"""`rockplan.token_log_probs` beside log-probabilities that are taken of logits.

    OMP_NUM_THREADS=1 python -m benchmarks.log_probs

4 x 1024 tokens, width 896, a vocabulary of 151,936, in bfloat16: forward and backward. Of each way
the peak beyond `.grad`, and CPU time, the median of three steps in turns; and how far gradients are
from those of logits, in float32 with a vocabulary of 40,000. Results:
benchmarks/results/log_probs.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import rockplan
from benchmarks.timing import where

RESULTS = Path(__file__).parent / "results" / "log_probs.md"
TOKENS, WIDTH, VOCABULARY = 4096, 896, 151_936


def by_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


WAYS = {"of logits": by_logits, "token_log_probs": rockplan.token_log_probs}


def head(tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, WIDTH), torch.randn(vocabulary, WIDTH) * 0.02
    ids = torch.randint(vocabulary, (tokens,))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), ids


def rows(is_trained: bool) -> list[str]:
    hidden, weight, ids = head(TOKENS, VOCABULARY, torch.bfloat16)
    weight.requires_grad_(is_trained)

    def step(way: Callable[..., Tensor]) -> None:
        way(hidden, weight, ids).mean().backward()

    peaks, times = {}, {name: [] for name in WAYS}
    for name, way in WAYS.items():
        step(way)
        peaks[name] = rockplan.peak_live_bytes(lambda way=way: step(way)).peak_bytes
    for _ in range(3):
        for name, way in WAYS.items():
            begun = time.process_time()
            step(way)
            times[name].append(time.process_time() - begun)
    first = median(times["of logits"])
    logits_bytes = TOKENS * VOCABULARY * hidden.itemsize
    trained = "trained" if is_trained else "frozen"
    return [
        f"| {trained} | {name} | {peaks[name] / 2**20:,.0f} | {peaks[name] / logits_bytes:.3f} | "
        f"{median(times[name]) / first:.2f} |"
        for name in WAYS
    ]


def distance() -> float:
    hidden, weight, ids = head(256, 40_000, torch.float32)
    weight.requires_grad_()
    of_each = [
        torch.autograd.grad(w(hidden, weight, ids).mean(), (hidden, weight)) for w in WAYS.values()
    ]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*of_each, strict=True))


def main() -> None:
    text = f"""# Log-probabilities without logits

`python -m benchmarks.log_probs`, {where()}. {TOKENS} tokens, width {WIDTH}, a vocabulary of
{VOCABULARY:,}, bfloat16; logits take {TOKENS * VOCABULARY * 2 / 2**20:,.0f} MiB. The peak beyond
`.grad`, also as a share of that (the gradient of a trained weight is in it); CPU time over that of
logits. In float32 gradients are within {distance():.1e} of the largest of those of logits.

| weight | way | peak MiB | of logits | time |
|---|---|---|---|---|
"""
    RESULTS.write_text(text + "\n".join(rows(False) + rows(True)) + "\n")


if __name__ == "__main__":
    main()
