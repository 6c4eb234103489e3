"""Calls that differ in sizes alone: is one program ever wrong at a size that nobody recorded?

    python -m benchmarks.sizes holes
    python -m benchmarks.sizes fuzz --seconds 3600 [--first SEED]

holes: ways in which Python treats a size, each at seven sizes in orders that are drawn, each with
another special size as the second, which is the one that is recorded; a row has what became of it:
*open* (one program runs them), or why not. fuzz: random networks
(`testing.random_networks`) at sizes drawn at random. Results, gradients of all parameters and
inputs are compared with eager bit by bit at each size, and of networks that return a loss the
measured peak with the plan's. Writes benchmarks/results/sizes.md.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

import rockplan
from benchmarks.fuzz import differentiable, mean_square
from benchmarks.timing import where
from testing.random_networks import network

RESULTS = Path(__file__).parent / "results" / "sizes.md"
OPTIONS = rockplan.Options(
    cache=False, time_limit_s=2, bound_time_limit_s=0, on_infeasible="smallest"
)
SIZES = (67, 97, 128, 231, 64, 2, 96)
SECOND = (97, 64, 128)


@functools.lru_cache
def _doubled(n: int) -> int:
    return n * 2


class Treats(nn.Module):
    """A layer, then what `treat` does with its result and the size of dimension 1."""

    def __init__(self, treat: Callable[[Any, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.treat = treat
        self.table = {64: 2.0}
        self.t64 = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.treat(self, self.layer(x), x.shape[1]).sum()


def _loop(_: Any, h: Tensor, n: int) -> Tensor:
    return torch.stack([h[:, i : i + 32].sum() for i in range(0, n, 32)])


def _padded(_: Any, h: Tensor, n: int) -> Tensor:
    return h if n % 8 == 0 else functional.pad(h, (0, 0, 0, 8 - n % 8))


def _kept(module: Any, h: Tensor, n: int) -> Tensor:
    module.last = n
    return h


def _counted(_: Any, h: Tensor, n: int) -> Tensor:
    return h * sum(torch.arange(n).tolist())


def _in_place(h: Tensor, first: int, end: int) -> Tensor:
    h = h.clone()
    h[:, first:end].mul_(2)
    return h


def _chunks(h: Tensor, n: int) -> Tensor:
    return sum((h[:, i : i + 64].logsumexp(-1).sum() for i in range(0, n, 64)), h.sum())


HOLES: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "isinstance(n, int)": lambda m, h, n: h * 2 if isinstance(n, int) else h * 3,
    "type(n) is int": lambda m, h, n: h * 2 if type(n) is int else h * 3,
    "len(h[0])": lambda m, h, n: h * torch.arange(len(h[0]))[:, None],
    "isinstance(len(h[0]), int)": lambda m, h, n: h * (2 if isinstance(len(h[0]), int) else 3),
    "[0] * len(h[0])": lambda m, h, n: h * len([0] * len(h[0])),
    "mse_loss": lambda m, h, n: h * functional.mse_loss(h, h.detach() + 1),
    "str(n)": lambda m, h, n: h * 2 if str(n) == "67" else h * 3,
    "len(str(n))": lambda m, h, n: h * 2 if len(str(n)) == 2 else h * 3,
    "repr(n)": lambda m, h, n: h * 2 if "s" in repr(n) else h * 3,
    'f"t{n}"': lambda m, h, n: h * getattr(m, f"t{n}", 1.0),
    "format(n, 'd')": lambda m, h, n: h * len(format(n, "05d")),
    "a dictionary": lambda m, h, n: h * m.table.get(n, 1.0),
    "n in a tuple": lambda m, h, n: h * 2 if n in (64, 128, 97) else h * 3,
    "lru_cache": lambda m, h, n: h * _doubled(n),
    "hash(n)": lambda m, h, n: h * (hash(n) % 7),
    "n is 67": lambda m, h, n: h * 2 if id(n) == id(67) else h * 3,
    "numpy": lambda m, h, n: h * float(numpy.zeros(n).size),
    "full of n": lambda m, h, n: h + torch.full((n, 1), float(n)),
    "n ** .5": lambda m, h, n: h / n**0.5,
    "math.sqrt(n)": lambda m, h, n: h / math.sqrt(n),
    "math.log2(n)": lambda m, h, n: h * math.ceil(math.log2(n)),
    "h / n": lambda m, h, n: h / n,
    "torch.tensor(n)": lambda m, h, n: h * torch.tensor(n),
    "torch.tensor([n]).item()": lambda m, h, n: h * torch.tensor([n]).item(),
    "arange(n).tolist()": _counted,
    "arange(n).max().item()": lambda m, h, n: h * torch.arange(n).max().item(),
    "range(0, n, 32)": _loop,
    "n % 8": _padded,
    "n & 1": lambda m, h, n: h * 2 if n & 1 else h * 3,
    "n > 64": lambda m, h, n: h * 2 if n > 64 else h * 3,
    "n == 64": lambda m, h, n: h * 2 if n == 64 else h * 3,
    "min(n, 64)": lambda m, h, n: h[:, : min(n, 64)],
    "h[:, :97]": lambda m, h, n: h[:, :97],
    "h[:, -5:]": lambda m, h, n: h[:, -5:],
    "h[:, -97:]": lambda m, h, n: h[:, -97:],
    "h[:, -97:] - mean": lambda m, h, n: h[:, -97:] - h.mean(1, keepdim=True),
    "h[:, n - 64 :]": lambda m, h, n: h[:, n - 64 :] if n > 64 else h.exp(),
    "h[:, 32:96].exp_()": lambda m, h, n: _in_place(h, 32, 96),
    "narrow(1, n // 2)": lambda m, h, n: h.narrow(1, n // 2, n - n // 2),
    "expand": lambda m, h, n: h[:, :1].expand(-1, n, -1) * h,
    "pad to 128": lambda m, h, n: functional.pad(h, (0, 0, 0, max(0, 128 - n))),
    "chunks of 64": lambda m, h, n: _chunks(h, n),
    "int(n * .7)": lambda m, h, n: h[:, : int(n * 0.7)],
    "round(n / 2)": lambda m, h, n: h[:, : round(n / 2)],
    "n // 3": lambda m, h, n: h[:, : n // 3 + 1],
    "split(32)": lambda m, h, n: torch.cat([c * 2 for c in h.split(32, 1)], 1),
    "chunk(2)": lambda m, h, n: torch.cat([c * 2 for c in h.chunk(2, 1)], 1),
    "unbind": lambda m, h, n: torch.stack([c * 2 for c in h.unbind(1)], 1),
    "rand(n)": lambda m, h, n: h * torch.rand(n, 1),
    "randperm(n)": lambda m, h, n: h[:, torch.randperm(n)],
    "view(-1)": lambda m, h, n: h.view(h.shape[0], -1, 4),
    "reshape(-1, n)": lambda m, h, n: h.transpose(1, 2).reshape(-1, n),
    "is_causal=n > 1": lambda m, h, n: functional.scaled_dot_product_attention(
        h[:, None], h[:, None], h[:, None], is_causal=n > 1
    ),
    "dropout": lambda m, h, n: functional.dropout(h, 0.5),
    "numel": lambda m, h, n: h * (h.numel() // 8),
    "stride": lambda m, h, n: h * h.stride(0),
    "as_strided": lambda m, h, n: h.contiguous().as_strided((2, n), (n * 8, 8)),
    "kept in self": _kept,
    "interpolate": lambda m, h, n: functional.interpolate(h.transpose(1, 2), scale_factor=2.0),
    "cumsum": lambda m, h, n: h.cumsum(1) / torch.arange(1, n + 1)[:, None],
    "tril": lambda m, h, n: torch.ones(n, n).tril() @ h,
    "one_hot": lambda m, h, n: functional.one_hot(torch.arange(n) % 8, 8) * h,
    "takeover at n == 8": lambda m, h, n: (h.transpose(1, 2) @ h).exp() * 2,
    "conv1d": lambda m, h, n: functional.conv1d(h.transpose(1, 2), m.layer.weight[:, :, None]),
    "topk": lambda m, h, n: h.topk(2, 1)[0],
    "sort": lambda m, h, n: h.sort(1)[0],
}


class Reasons(logging.Handler):
    """Keeps why sizes are not open."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "planned by itself" in message:
            why = message.partition(": ")[2]
            self.found.append(why.replace(f"{Path(__file__).parent.parent}/", ""))


def difference(eager: nn.Module, planned: Any, inputs: tuple[Tensor, ...], seed: int) -> str:
    """What differs in one step of both; '' if nothing does."""
    found = []
    for module in (eager, planned):
        own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        module.zero_grad()
        torch.manual_seed(seed)
        results = differentiable(module(*own))
        mean_square(results).backward()
        leaves = (*module.parameters(), *own)
        gradients = (leaf.grad for leaf in leaves)
        found.append([*(r.detach() for r in results), *gradients, torch.get_rng_state()])
    for a, b in zip(*found, strict=True):
        if (a is None) != (b is None):
            return "a gradient is missing"
        if a is not None and not ((a == b) | ((a != a) & (b != b))).all():
            return "bits differ"
    return ""


def verdict(
    module: nn.Module, calls: Iterator[tuple[Tensor, ...]], has_peaks: bool
) -> tuple[str, str]:
    """(what became of the sizes, why not open or what is wrong)."""
    eager = copy.deepcopy(module)
    reasons = Reasons()
    logging.getLogger("rockplan").addHandler(reasons)
    try:
        first = next(calls)
        try:
            planned: Any = rockplan.solve(module, first, "75%", options=OPTIONS)
        except rockplan.RockplanError as error:
            return "refused", str(error)[:80]
        for seed, inputs in enumerate((first, *calls)):
            try:
                expected = copy.deepcopy(eager)(*inputs)
            except Exception:
                continue
            try:
                wrong = difference(eager, planned, inputs, seed)
            except rockplan.RockplanError as error:
                return "refused", str(error)[:80]
            if wrong and difference(eager, copy.deepcopy(eager), inputs, seed):
                return "not repeated", ""
            if wrong:
                return "WRONG", f"{wrong} at {[tuple(x.shape) for x in inputs]}"
            if has_peaks and isinstance(expected, Tensor) and not expected.dim():
                step = functools.partial(_step, planned, inputs)
                peak_bytes, _ = rockplan.peak_live_bytes(step, 1)
                if peak_bytes > planned.plan.peak_bytes:
                    return "ABOVE", f"{peak_bytes} for {planned.plan.peak_bytes}"
                eager.load_state_dict(planned.state_dict())  # buffers that each forward changes
        programs = [b.program for bs in planned._rockplan.programs.values() for b in bs]
        is_open = any(p.open is not None for p in programs)
        return ("open" if is_open else "static"), "; ".join(dict.fromkeys(reasons.found))[:160]
    finally:
        logging.getLogger("rockplan").removeHandler(reasons)


def _step(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    mean_square(differentiable(module(*inputs))).backward()


def holes() -> list[str]:
    """A row for each way to treat a size."""
    drawn = random.Random(0)
    lines = ["| a size in | sizes | why not open |", "|---|---|---|"]
    for name, treat in HOLES.items():
        verdicts = [_in_order(treat, second, drawn) for second in SECOND]
        counts = Counter(found for found, _ in verdicts)
        found = ", ".join(
            f"{what} in {n}" if len(counts) > 1 else what for what, n in counts.items()
        )
        why = next((why for what, why in verdicts if what == "WRONG"), verdicts[0][1])
        lines.append(f"| `{name}` | {found} | {why.replace('|', '/')} |")
        print(lines[-1], flush=True)
    return lines


def _in_order(treat: Any, second: int, drawn: random.Random) -> tuple[str, str]:
    others = [n for n in SIZES if n != second]
    drawn.shuffle(others)
    sizes = others[0], second, *others[1:]
    torch.manual_seed(0)
    return verdict(Treats(treat), ((torch.randn(2, n, 8),) for n in sizes), False)


def fuzz(seconds: float, first: int) -> list[str]:
    """Counts of what became of random networks."""
    counts: Counter[str] = Counter()
    lines = []
    end = time.monotonic() + seconds
    seed = first
    while time.monotonic() < end:
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        module, inputs = network(drawn)

        def calls(given: Any = inputs, rng: random.Random = drawn) -> Iterator[tuple[Tensor, ...]]:
            yield given
            for _ in range(5):
                batch, length = rng.randint(2, 9), rng.randint(2, 40)
                shape = (batch, length, given[0].shape[-1])
                yield tuple(
                    torch.randn(shape, dtype=x.dtype).requires_grad_(x.requires_grad) for x in given
                )

        found, why = verdict(module, calls(), True)
        counts[found] += 1
        if found in ("WRONG", "ABOVE"):
            lines.append(f"- seed {seed}: {found}, {why}")
        print(seed, found, why, flush=True)
        seed += 1
    shown = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    return [f"Seeds {first} to {seed - 1}: {shown}.", "", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("holes", "fuzz"))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rockplan").setLevel(logging.INFO)
    logging.getLogger("rockplan").propagate = False
    head, part = "# Sizes", f"## {arguments.part}"
    text = RESULTS.read_text() if RESULTS.exists() else f"{head}\n"
    before, _, rest = text.partition(f"\n{part}\n")
    after = "\n## " + rest.partition("\n## ")[2] if "\n## " in rest else ""
    rows = holes() if arguments.part == "holes" else fuzz(arguments.seconds, arguments.first)
    said = f"`python -m benchmarks.sizes {' '.join(sys.argv[1:])}`, {where()}"
    RESULTS.write_text("\n".join([before.rstrip(), "", part, "", said, "", *rows, ""]) + after)


if __name__ == "__main__":
    main()
