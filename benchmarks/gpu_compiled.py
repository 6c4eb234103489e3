"""A worker of `benchmarks.gpu`: plans of compiled kernels beside torch.compile.

Llama with 8 layers of width 2048 and GPT-2 large in bfloat16, ResNet-50 with 64 images. First what
needs nobody: eager, `torch.utils.checkpoint` of each block, and rockplan under budgets that are
known. Then torch.compile of checkpointed blocks, plans within its peak, torch.compile, and last its
activation_memory_budget. Each is timed in turns with eager as soon as it is made, and after each of
these groups in turns with all that are there. A way that fails has a row that says why.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn

import rockplan
from benchmarks.compiled import compiled, distance, gradients
from benchmarks.gpu_table import DETAIL
from benchmarks.gpu_worker import Row, Worker, worker
from benchmarks.kernel_record import Record, recorded
from rockplan.runtime.checkpointing import per_block, sharing_copy
from testing.gpu_cases import TIMED, LossCase, case_of

FIRST_ROUNDS, MOST_ROUNDS = 3, 7
TIMING_S = 20.0
"""For steps in turns, each time."""

Make = Callable[[], nn.Module]
Say = Callable[[str, Row], None]
"""Takes of the row of a way what is known of it."""

EAGER, CHECKPOINT = "eager", "checkpoint"
COMPILED, BOTH = "torch.compile", "torch.compile + checkpoint"


class Ways:
    """How modules are made of one model. peaks: of the ways that were measured, which some budgets
    are; made: their modules."""

    def __init__(self, case: LossCase, wanted_mib: tuple[int, ...]) -> None:
        self.case, self.wanted_mib = case, wanted_mib
        self.peaks: dict[str, int] = {}
        self.made: dict[str, nn.Module] = {}
        self.exact: list[torch.Tensor] = []
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    def stages(self) -> tuple[Mapping[str, Make], ...]:
        """By how long they take to make; after each of these, steps are timed in turns."""
        model = self.case.model
        wanted = {f"rockplan compiled, {mib} MiB": mib << 20 for mib in self.wanted_mib}
        return (
            {
                EAGER: lambda: sharing_copy(model),
                CHECKPOINT: lambda: per_block(model),
                "rockplan compiled, all kept": partial(self._planned, "100%"),
                **{way: partial(self._planned, budget) for way, budget in wanted.items()},
                "rockplan compiled, smallest": partial(self._planned, "min"),
                **self._within(CHECKPOINT),
            },
            {BOTH: lambda: compiled(per_block(model)), **self._within(BOTH)},
            {
                COMPILED: lambda: compiled(sharing_copy(model)),
                f"rockplan compiled, half of {COMPILED}'s peak": lambda: self._planned(
                    self._peak_of(COMPILED) // 2
                ),
            },
            {f"{COMPILED}, budget {share}": partial(self._budgeted, share) for share in (0.5, 0.2)},
        )

    def _within(self, way: str) -> dict[str, Make]:
        """Plans within the peak of a way."""
        return {
            f"rockplan compiled, peak of {way}": lambda: self._planned(self._peak_of(way)),
            f"rockplan, peak of {way}": lambda: self._planned(self._peak_of(way), False),
        }

    def _budgeted(self, share: float) -> nn.Module:
        return compiled(sharing_copy(self.case.model), share)

    def _peak_of(self, way: str) -> int:
        if way not in self.peaks:
            raise LookupError(f"no peak of {way} to plan for")
        return self.peaks[way]

    def _planned(self, budget: int | str, is_compiled: bool = True) -> nn.Module:
        case = self.case
        options = rockplan.Options(compile=is_compiled, released=case.released)
        return rockplan.solve(
            case.model, case.args, budget, sample_kwargs=case.kwargs, options=options
        )

    def measured(self, way: str, make: Make, device: torch.device, say: Say) -> Row:
        """Of one way, said as far as it is known. It is timed in turns with eager."""
        case = self.case
        begin = time.perf_counter()
        with recorded() as record:
            module = make()
        case.step(module)
        synchronize(device)
        compile_s = round(time.perf_counter() - begin, 1)
        self.peaks[way] = rockplan.peak_live_bytes(
            partial(case.step, module), device=device
        ).peak_bytes
        self.made[way] = module
        known: Row = {"peak_bytes": self.peaks[way], "predicted_bytes": None}
        known |= _of_plan(module, record) if way.startswith("rockplan") else {}
        say(way, known)
        for _ in range(FIRST_ROUNDS):
            self._round(dict.fromkeys((EAGER, way)), device)
        say(way, {**self._times(way), "compile_s": compile_s})
        found = gradients(case, module)
        self.exact = self.exact or found
        return {"difference": distance(found, self.exact)}

    def timed(self, device: torch.device, say: Say) -> Row:
        """Steps of all ways in turns; each round is said when it is done."""
        self.seconds.clear()
        for _ in range(MOST_ROUNDS):
            self._round(self.made, device)
            for way in self.made:
                say(way, self._times(way))
        return {DETAIL: True}

    def _round(self, ways: Iterable[str], device: torch.device) -> None:
        for way in ways:
            step = partial(self.case.step, self.made[way])
            self.seconds.setdefault(way, []).append(step_seconds(step, device))

    def _times(self, way: str) -> Row:
        device_s, host_s = map(statistics.median, zip(*self.seconds[way], strict=True))
        return {"ms": 1e3 * device_s, "host_ms": 1e3 * host_s, "rounds": len(self.seconds[way])}


def _of_plan(module: nn.Module, record: Record) -> Row:
    """With the kernels that it may use, and why others do not write in place."""
    plan = rockplan.plan_of(module)
    over = sum(bool(kernel.over) for kernel in plan.graph.kernels)
    return {
        "predicted_bytes": plan.peak_bytes,
        "kernels": len(plan.graph.kernels) - over,
        "in_place": over,
        "refused": record.facts()["refused"],
    }


def step_seconds(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Of the device, and of the host until it has asked for everything; on CPU both are the CPU's
    time."""
    if device.type != "cuda":
        begin = time.process_time()
        step()
        return (time.process_time() - begin,) * 2
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    start.record()
    step()
    end.record()
    host_s = time.perf_counter() - begin
    end.synchronize()
    return start.elapsed_time(end) / 1e3, host_s


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(own: Worker, ways: Ways, device: torch.device) -> None:
    """All rows of a model."""
    for stage in ways.stages():
        before = len(ways.made)
        for way, make in stage.items():
            # Others are compared with eager, in a process that goes on after another one, too.
            work = partial(ways.measured, way, make, device, own.add)
            own.tries(way, work, again=way == EAGER)
        if len(ways.made) > before:
            turns = f"steps of {len(ways.made)} ways in turns"
            own.tries(turns, partial(ways.timed, device, own.add), TIMING_S, again=True)


def main() -> None:
    own, given = worker(__doc__, "name")
    device = torch.device("cpu" if own.on_cpu else "cuda")
    case = case_of(given.name, own.on_cpu, device)
    ways = Ways(case, () if own.on_cpu else TIMED[given.name].wanted_mib)
    measure(own, ways, device)
    own.leave()


if __name__ == "__main__":
    main()
