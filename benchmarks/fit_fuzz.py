"""Optimizers drawn at random: does `fit` say the bytes that they really take?

Each seed is a list of parameters (shapes, one of them of 16 bits or without a gradient) and an
optimizer: a class of torch.optim with options and groups, alone or inside of what people write
around one (masters in float32, an average, slow weights, a step uphill first, state that is
replaced in each step, factored state, buffers that are made late, hooks before and after a step). A
seed ends as

    equal        the peak of the first step, that of four, and what these leave, to the byte
    refused      a rockplan.RockplanError
    wrong        anything else

Command: OMP_NUM_THREADS=1 python -m benchmarks.fit_fuzz --seconds 600 [--first 0] [--seed 17]
Results: benchmarks/results/fit_fuzz.jsonl, one line a run with `--keep`.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import json
import random
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import rockplan
from benchmarks.timing import where
from rockplan.fitting.changes import MemoryChange
from rockplan.fitting.optimizer import optimizer_steps
from rockplan.graph_builder.costs.ruler import memory_events, profiled

RESULTS = Path(__file__).parent / "results" / "fit_fuzz.jsonl"
Make = Callable[[Any], torch.optim.Optimizer]

KINDS: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum=0.9", "nesterov", "foreach", "maximize", "weight_decay=0.1"),
    "Adam": ("amsgrad", "foreach", "capturable", "weight_decay=0.1", "maximize"),
    "AdamW": ("amsgrad", "foreach", "fused", "maximize"),
    "RMSprop": ("momentum=0.9", "centered", "foreach", "weight_decay=0.1"),
    "Adagrad": ("foreach", "weight_decay=0.1", "lr_decay=0.1"),
    "Adadelta": ("foreach", "maximize"),
    "Adamax": ("foreach", "weight_decay=0.1"),
    "NAdam": ("foreach", "decoupled_weight_decay"),
    "RAdam": ("foreach", "decoupled_weight_decay"),
    "ASGD": ("foreach", "weight_decay=0.1"),
    "Rprop": ("foreach", "maximize"),
    "Adafactor": ("foreach", "weight_decay=0.1"),
}


class Around(torch.optim.Optimizer):
    """Another optimizer, and what `kind` does beside its steps."""

    def __init__(self, parameters: Any, make: Make, kind: str) -> None:
        super().__init__(parameters, {})
        self.kind, self.count = kind, 0
        self.own = [p for g in self.param_groups for p in g["params"]]
        self.masters = [p.detach().float().clone() for p in self.own] if kind == "masters" else []
        self.inner = make(self.masters or self.own)
        self.slow = [p.detach().clone() for p in self.own] if kind in ("average", "slow") else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        trained = [p for p in self.own if p.grad is not None]
        if self.kind == "masters":
            for master, p in zip(self.masters, self.own, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
        elif self.kind == "uphill":
            norm = torch.stack([p.grad.norm() for p in trained]).norm()  # type: ignore[union-attr]
            moves = [p.grad * (0.05 / norm) for p in trained]
            for p, move in zip(trained, moves, strict=True):
                p.add_(move).sub_(move)
        elif self.kind == "late":
            for p in trained:
                state = self.state[p]
                if self.count > 1 and "late" not in state:
                    state["late"] = torch.zeros_like(p)
        self.inner.step()
        if self.kind == "masters":
            for master, p in zip(self.masters, self.own, strict=True):
                p.copy_(master)
                master.grad = None
        elif self.kind == "average":
            torch._foreach_lerp_(self.slow, self.own, 0.01)
        elif self.kind == "slow":
            for slow, p in zip(self.slow, self.own, strict=True):
                p.copy_(slow.add_(p - slow, alpha=0.5))
        elif self.kind == "replaced":
            for p in trained:
                before = self.state[p].get("m")
                self.state[p]["m"] = p.grad.clone() if before is None else 0.9 * before + p.grad
        elif self.kind == "factored":
            for p in trained:
                if p.ndim > 1:
                    self.state[p]["rows"] = p.grad.square().mean(-1)
                    self.state[p]["columns"] = p.grad.square().mean(-2)


AROUND = ("masters", "average", "slow", "uphill", "replaced", "factored", "late", "")


def drawn(seed: int) -> tuple[dict[str, torch.nn.Parameter], Make, str]:
    """Return parameters, a function that makes the optimizer, and its name."""
    pick = random.Random(seed)
    kind, around = pick.choice([*KINDS]), pick.choice(AROUND)
    flags = [f for f in KINDS[kind] if pick.random() < 0.35]
    options: dict[str, Any] = {}
    for flag in flags:
        name, _, number = flag.partition("=")
        options[name] = float(number) if number else True
    if options.get("nesterov"):
        options["momentum"] = 0.9
    if options.get("fused"):
        options.pop("foreach", None)
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    parameters: dict[str, torch.nn.Parameter] = {}
    for number in range(pick.randint(1, 6)):
        shape = [pick.choice([1, 3, 16, 65]) for _ in range(pick.randint(0, 3))]
        parameters[str(number)] = torch.nn.Parameter(torch.rand(shape, dtype=dtype))
    groups = len(parameters) > 1 and pick.random() < 0.3
    hooked = pick.random() < 0.2

    def inner(given: Any) -> torch.optim.Optimizer:
        own = [*given]
        split = [{"params": own[:1], "lr": 0.5}, {"params": own[1:]}] if groups else own
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(split, **options)
        if hooked:
            made.register_step_post_hook(lambda o, a, k: torch.zeros(64).add_(1))
        return made

    name = f"{around} {kind} {options} {dtype} {'groups ' * groups}{'hooked' * hooked}"
    return parameters, (lambda p: Around(p, inner, around)) if around else inner, name


def outcome(seed: int) -> tuple[str, str]:
    """Return how a seed ends, and with what."""
    parameters, make, name = drawn(seed)
    for p in parameters.values():
        p.grad = torch.rand_like(p)
    try:
        torch.manual_seed(seed)
        found = optimizer_steps(make, parameters, metered=True)
    except rockplan.RockplanError as error:
        return "refused", f"{name}: {error}"
    said = _training([_changes(found.first), _changes(found.later)])
    real, steps = make([*parameters.values()]), []
    for _ in range(4):
        gc.collect()
        with profiled() as session:
            real.step()
        steps.append([size for _, size in memory_events(session)])
    met = _training(steps)
    return ("equal" if said == met else "wrong"), f"{name}: said {said}, met {met}"


def _changes(changes: Iterable[MemoryChange]) -> list[int]:
    return [-c.size_bytes if c.is_free else c.size_bytes for c in changes]


def _training(steps: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Return the peak of the first step, of all steps, and what they leave, in bytes."""
    first, *_ = steps
    every = [size for step in steps for size in step]
    peaks = (max(itertools.accumulate(sizes, initial=0)) for sizes in (first, every))
    return next(peaks), next(peaks), sum(every)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no seed after that")
    parser.add_argument("--seed", type=int, help="this one only, and print it")
    parser.add_argument("--keep", action="store_true", help="append to the results")
    given = parser.parse_args()
    if given.seed is not None:
        print(*outcome(given.seed))
        return
    counts: collections.Counter[str] = collections.Counter()
    began, seed = time.monotonic(), given.first
    while time.monotonic() - began < given.seconds:
        try:
            how, text = outcome(seed)
        except Exception:
            how, text = "wrong", traceback.format_exc()
        counts[how] += 1
        if how != "equal":
            print(seed, how, text, flush=True)
        seed += 1
    row = {"seeds": f"{given.first} to {seed - 1}", "counts": dict(counts), "where": where()}
    print(json.dumps(row))
    if given.keep:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
