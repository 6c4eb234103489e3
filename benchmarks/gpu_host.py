"""A worker of `benchmarks.gpu`: plans that page to the host, beside other ways to offload.

First the link: one way, both at once, and beside products. Then a Llama in bfloat16: eager, the
checkpoint of each block, `save_on_cpu` of PyTorch, TRL's offload where it is installed, and plans
within the same bytes without and with paging. Each is timed in turns with eager, and all with one
another at the end; plans that page run again with copies that begin late, for bits and peak.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import rockplan
from benchmarks.compiled import distance, gradients
from benchmarks.gpu_compiled import CHECKPOINT, EAGER, Make, Say, Ways, measure, synchronize
from benchmarks.gpu_worker import Row, worker
from rockplan.paging import files
from rockplan.paging.arenas import pool_of
from rockplan.paging.pages import measured_link, new_storage
from rockplan.paging.pinned import PinnedArena
from rockplan.runtime.checkpointing import per_block, sharing_copy
from rockplan.values.copies import paged
from testing import models
from testing.gpu_cases import LLAMA, LossCase, language, made_on

LINK_GB_S = 55
"""Of PCIe 5 with copies both ways; plans are made for a share of it."""

HOST = "16GiB"

PLANNING_S = 8.0
"""Each of several plans, of minutes."""

CYCLES = 2_000_000
"""Before each late copy: about a millisecond."""


@dataclass(frozen=True, slots=True)
class HostModel:
    """full: on a GPU; small: on CPU. wanted_mib: budgets beside the peak of checkpoints."""

    full: Callable[[], LossCase]
    small: Callable[[], LossCase]
    wanted_mib: tuple[int, ...]


SMALL = partial(language, models.llama, layers=4, width=256, batch=8, length=256)
"""Whose storages are worth a copy."""

MODELS = {
    "llama": HostModel(partial(language, LLAMA), SMALL, (2117,)),
    "wide": HostModel(
        partial(language, LLAMA, layers=4, width=4096, key_value_heads=8, batch=1, length=8192),
        SMALL,
        (3446,),
    ),
}


class Offloaded(nn.Module):
    """A module whose forward runs under hooks on saved tensors."""

    def __init__(self, module: nn.Module, hooks: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self.hooks = module, hooks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.hooks():
            return self.module(*args, **kwargs)


def by_trl(model: nn.Module) -> nn.Module:
    from trl.models.activation_offloading import OffloadActivations

    return Offloaded(per_block(model), OffloadActivations)


class HostWays(Ways):
    """As `Ways`, of plans that page and of what else pages."""

    def stages(self) -> tuple[Mapping[str, Make], ...]:
        model = self.case.model
        saved = partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())
        budgets: dict[str, Callable[[], int]] = {
            f"{mib} MiB": partial(int, mib << 20) for mib in self.wanted_mib
        }
        budgets["peak of checkpoint"] = lambda: self._peak_of(CHECKPOINT)
        return (
            {
                EAGER: lambda: sharing_copy(model),
                CHECKPOINT: lambda: per_block(model),
                **{
                    f"rockplan{kind}, {text}": partial(self._within_bytes, budget, kind)
                    for text, budget in budgets.items()
                    for kind in (" paged", "")
                },
                "save_on_cpu": lambda: Offloaded(sharing_copy(model), saved),
                "TRL": lambda: by_trl(model),
            },
        )

    def _within_bytes(self, budget: Callable[[], int], kind: str) -> nn.Module:
        case = self.case
        paging = {"host": HOST, "link": f"{LINK_GB_S}GB/s"} if kind else {}
        options = rockplan.Options(released=case.released, time_limit_s=PLANNING_S, **paging)
        return rockplan.solve(
            case.model, case.args, budget(), sample_kwargs=case.kwargs, options=options
        )

    def measured(self, way: str, make: Make, device: torch.device, say: Say) -> Row:
        row = super().measured(way, make, device, say)
        if "paged" not in way:
            return row
        case, module = self.case, self.made[way]
        plan = rockplan.plan_of(module)
        row["paged_bytes"] = sum(
            plan.graph.data[page.data].size_bytes for page in paged(plan.graph)
        )
        row["predicted_ms"] = plan.time_ns / 1e6
        say(way, row)
        with late_copies():
            found = gradients(case, module)
            peak_bytes = rockplan.peak_live_bytes(
                partial(case.step, module), device=device
            ).peak_bytes
        return {"late_peak_bytes": peak_bytes, "late_difference": distance(found, self.exact)}


@contextlib.contextmanager
def late_copies() -> Iterator[None]:
    """Copies begin late."""
    submit = files.submit
    with (
        mock.patch.object(PinnedArena, "begin_out", _late(PinnedArena.begin_out, 0)),
        mock.patch.object(PinnedArena, "begin_in", _late(PinnedArena.begin_in, 1)),
        mock.patch.object(files, "submit", lambda way, work: submit(way, partial(_slowly, work))),
    ):
        yield


def _late(begin: Callable[..., Any], number: int) -> Callable[..., Any]:
    def begins(self: PinnedArena, *given: Any) -> Any:
        with torch.cuda.stream(self._streams[number]):
            torch.cuda._sleep(CYCLES)
        return begin(self, *given)

    return begins


def _slowly(work: Callable[[], None]) -> None:
    time.sleep(1e-3)
    work()


def link(device: torch.device) -> Row:
    """GB/s: one way, both at once, and both beside products, and how much these take longer."""
    name = "cuda:0" if device.type == "cuda" else "cpu"
    size_bytes = (512 if device.type == "cuda" else 16) << 20
    lease = pool_of(name).take(2 * size_bytes)
    storages = [new_storage(size_bytes, name) for _ in range(2)]
    # Pages exist when they were written once.
    lease.arena.begin_out(0, storages[0]).wait()
    lease.arena.begin_out(size_bytes, storages[1]).wait()
    begins = {
        "out": lambda: [lease.arena.begin_out(0, storages[0])],
        "in": lambda: [lease.arena.begin_in(size_bytes, storages[1])],
    }
    row: Row = {}
    for way, begin in begins.items():
        seconds = _seconds(lambda begin=begin: [copy.wait() for copy in begin()], device)
        row[f"{way}_gb_a_second"] = size_bytes / seconds / 1e9
    row["both_gb_a_second"] = measured_link(name, page_bytes=size_bytes) / 1e9
    width = 8192 if device.type == "cuda" else 128
    factor = torch.randn(width, width, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(8):
            factor @ factor

    def beside() -> None:
        copies = [*begins["out"](), *begins["in"]()]
        products()
        for copy in copies:
            copy.wait()

    alone_s = _seconds(products, device)
    row["products_ms"] = 1e3 * alone_s
    row["products_beside_copies_ms"] = 1e3 * _seconds(beside, device)
    return row


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of some runs, until the device is done."""
    found = []
    for _ in range(6):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def main() -> None:
    own, given = worker(__doc__, "name")
    device = torch.device("cpu" if own.on_cpu else "cuda")
    own.tries("link", partial(link, device), 15)
    model = MODELS[given.name]
    case = made_on(model.small if own.on_cpu else model.full, device)
    measure(own, HostWays(case, () if own.on_cpu else model.wanted_mib), device)
    own.leave()


if __name__ == "__main__":
    main()
