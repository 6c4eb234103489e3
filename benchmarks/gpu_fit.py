"""A worker of `benchmarks.gpu`: bytes of whole steps of training, predicted and measured.

Of a model kept whole, with `torch.utils.checkpoint` of each block, and by the smallest plan, with
AdamW and SGD: the most that the caching allocator gives out, and takes from the device, over three
steps from the start, beside what the timeline of `rockplan.fitting` and its model of the allocator
say. `NAME-expandable` is the same with segments that expand. `NAME-largest`: on a part of the
device, the largest batches that `rockplan.fit` finds, and whether these and the next ones train.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import rockplan
from benchmarks.gpu_worker import Row, Worker, worker
from rockplan.fitting import ways
from rockplan.fitting.changes import (
    REPLAYED_STEPS,
    Changes,
    MemoryChange,
    peak_of,
    replayed_steps,
)
from rockplan.fitting.gpus import CONTEXT_BYTES, gpu
from rockplan.fitting.optimizer import optimizer_steps
from rockplan.fitting.reserved import storage_sizes
from rockplan.fitting.scheduled import first_gradients
from rockplan.fitting.timeline import passes_of, timeline_of
from rockplan.runtime.checkpointing import per_block, repeated_blocks, sharing_copy
from rockplan.runtime.planned_state import programs_of
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule
from rockplan.will_it_fit.captured_sizes import resized
from testing.gpu_cases import LossCase, case_of

EXPANDABLE, LARGEST = "-expandable", "-largest"
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
PLANNING_S = 10.0

PART_BYTES = 24 << 30
PART_ON_CPU_BYTES = 68 << 20
"""Of the device, for the largest batches; on CPU most is for workspaces that are not there."""

MOST = 64
"""Batches, at most."""


def options_of(case: LossCase) -> rockplan.Options:
    return rockplan.Options(released=case.released, time_limit_s=PLANNING_S, cache=False)


def smallest(case: LossCase) -> nn.Module:
    return rockplan.solve(
        case.model, case.args, "min", sample_kwargs=case.kwargs, options=options_of(case)
    )


MODULES: dict[str, Callable[[LossCase], nn.Module]] = {
    "kept whole": lambda case: sharing_copy(case.model),
    "checkpoint per block": lambda case: per_block(case.model),
    "rockplan": smallest,
}
"""Ways, as rows of `rockplan.fit` call them -> modules that run them."""


def train(case: LossCase, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(REPLAYED_STEPS):
        optimizer.zero_grad()
        case.step(module)
        optimizer.step()


def forget(case: LossCase) -> None:
    """What steps before have left with the allocator."""
    case.model.zero_grad()
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass(slots=True)
class Steps:
    """Of one model. Its plan is made first: others are predicted by the graph of it."""

    case: LossCase
    device: torch.device
    is_expandable: bool
    planned: nn.Module

    def scheduled(self, way: str) -> tuple[CDGraph, Schedule]:
        plan = rockplan.plan_of(self.planned)
        if way == "rockplan":
            return plan.graph, plan.schedule
        if way == "kept whole":
            return ways.kept_whole(plan.graph)
        return ways.per_block(plan.graph, repeated_blocks(self.case.model))

    def changes(self, way: str, optimizer: str) -> tuple[MemoryChange, ...]:
        graph, schedule = self.scheduled(way)
        interface = programs_of(self.planned)[0].interface
        named = dict(self.case.model.named_parameters(remove_duplicate=False))
        trained = {name: named[name] for name in first_gradients(graph, interface)}
        steps = optimizer_steps(optimizer, trained)
        passes = passes_of(graph, schedule, interface, steps)
        return replayed_steps(*timeline_of({}, passes, steps).steps)

    def predicted(self, way: str, optimizer: str) -> Row:
        changes = self.changes(way, optimizer)
        if self.device.type != "cuda":
            return {"allocated_predicted_bytes": peak_of(changes).size_bytes}
        found = Changes(changes).usage(self.held_bytes(), expandable=self.is_expandable)
        return {
            "allocated_predicted_bytes": found.allocated_peak_bytes,
            "reserved_predicted_bytes": found.reserved_peak_bytes,
        }

    def held_bytes(self) -> list[int]:
        """Of storages that are there before a step, and of workspaces of cuBLAS."""
        model, sample = self.case.model, (*self.case.args, *self.case.kwargs.values())
        tensors = [*model.parameters(), *model.buffers(), *sample]
        return [*storage_sizes(tensors), *[gpu(self.device).cublas_bytes] * 2]

    def measured(self, way: str, optimizer: str) -> Row:
        case = self.case
        module = self.planned if way == "rockplan" else MODULES[way](case)
        forget(case)
        made: Any = OPTIMIZERS[optimizer](module.parameters(), lr=1e-4)
        if self.device.type != "cuda":
            steps = partial(train, case, module, made)
            return {"allocated_bytes": rockplan.peak_live_bytes(steps, warmup=0).peak_bytes}
        train(case, module, made)
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def row(self, way: str, optimizer: str) -> Row:
        said, found = self.predicted(way, optimizer), self.measured(way, optimizer)
        off = {
            f"{what}_off": f"{said[f'{what}_predicted_bytes'] / found[f'{what}_bytes'] - 1:+.2%}"
            for what in ("allocated", "reserved")
            if f"{what}_bytes" in found
        }
        return {**said, **found, **off}


def compare(own: Worker, name: str, device: torch.device) -> None:
    """Predicted and measured, of all ways and optimizers."""
    is_expandable = name.endswith(EXPANDABLE)
    found: list[Steps] = []

    def prepare() -> Row:
        case = case_of(name.removesuffix(EXPANDABLE), own.on_cpu, device)
        if device.type == "cuda":
            # As the parameters of a model lie that is moved to the device.
            case = compacted(case, device)
        found.append(Steps(case, device, is_expandable, smallest(case)))
        return {"parameters": sum(p.numel() for p in case.model.parameters())}

    own.tries("planned", prepare, again=True)
    for optimizer, way in itertools.product(OPTIMIZERS, MODULES) if found else ():
        own.tries(f"{way}, {optimizer}", partial(found[0].row, way, optimizer))


def compacted(case: LossCase, device: torch.device) -> LossCase:
    away: Any = case.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    back: LossCase = away.to(device)
    return back


def find_largest(own: Worker, name: str, device: torch.device) -> None:
    """Batches that fit by `rockplan.fit`, and by training with them on as many bytes."""
    case = case_of(name, own.on_cpu, device)
    fits: list[rockplan.Fit] = []

    def predict() -> Row:
        options = options_of(case)
        if device.type == "cuda":
            part: Any = replace(gpu(device), memory_bytes=PART_BYTES + CONTEXT_BYTES)
        else:
            part = CONTEXT_BYTES + PART_ON_CPU_BYTES
        fits.append(
            rockplan.fit(
                case.model,
                case.args,
                part,
                sizes={0: (1, MOST)},
                sample_kwargs=case.kwargs,
                options=options,
            )  # fmt: skip
        )
        return {row.way: row.batch for row in fits[0].rows}

    own.tries("batches by rockplan.fit", predict, again=True)
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(PART_BYTES / total_bytes)
    for row in fits[0].rows if fits else ():
        for batch in (row.batch, row.batch + 1):
            if batch and (batch <= row.batch or batch <= MOST):
                own.tries(f"{row.way}, batch {batch}", partial(trains, case, row.way, batch))


def trains(case: LossCase, way: str, batch: int) -> Row:
    """Whether three steps of a batch find memory. The smallest plan of it is made with all of the
    device."""
    args, kwargs = resized(case.model, (case.args, case.kwargs), {0: batch})
    own = replace(case, args=args, kwargs=kwargs)
    module = MODULES[way](own)
    forget(own)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    if not torch.cuda.is_initialized():
        train(own, module, optimizer)
        return {"trains": True}
    try:
        train(own, module, optimizer)
    except torch.OutOfMemoryError:
        return {"trains": False}
    return {"trains": True, "reserved_bytes": torch.cuda.max_memory_reserved()}


def main() -> None:
    own, given = worker(__doc__, "name")
    device = torch.device("cpu" if own.on_cpu else "cuda")
    if device.type == "cuda":
        is_expandable = given.name.endswith(EXPANDABLE)
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")
    if given.name.endswith(LARGEST):
        find_largest(own, given.name.removesuffix(LARGEST), device)
    else:
        compare(own, given.name, device)
    own.leave()


if __name__ == "__main__":
    main()
