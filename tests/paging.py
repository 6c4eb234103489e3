"""What tests of paging share: plans that page by hand, links of every speed, poison."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rockplan.oracles.clock import trips
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.paging import files, pages
from rockplan.paging.files import FileArena
from rockplan.paging.pages import Pages
from rockplan.runtime.planned_state import bind_now, programs_of
from rockplan.runtime.program import PlannedProgram, build_program
from rockplan.values.copies import HostLink, paged, with_copies
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.plan import Plan
from rockplan.values.schedule import Compute, Free, Schedule, kept_data, with_frees

LINK = HostLink(1_000_000_000, 1_000_000_000)
POISON = 0xFF
"""In every byte: no number as a float, -1 as an integer."""


# -- plans ---------------------------------------------------------------------------------------


def placings(order: tuple[int, ...], more: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield `order` with all of `more` anywhere, in any order."""
    if not more:
        yield order
        return
    for others in placings(order, more[1:]):
        for place in range(len(others) + 1):
            yield (*others[:place], more[0], *others[place:])


def pageable_of(graph: CDGraph) -> list[int]:
    """Activations that the backward phase reads, none of them the caller's."""
    read = {d for n in graph.backward for d in n.reads}
    made = {d for n in graph.forward for d in n.writes}
    return sorted(made & read - {*graph.outputs, *graph.held})


def pageable(plan: Plan, least_bytes: int) -> list[int]:
    """Storages that the forward phase leaves to the backward phase, and that only the plan has."""
    graph = plan.graph
    alive = kept_data(graph, plan.schedule)
    others = {*graph.held, *graph.outputs, *graph.dropped}
    of = (graph.data[d] for d in sorted(alive - others))
    return [d.index for d in of if d.size_bytes >= least_bytes and d.kind is DataKind.ACTIVATION]


def paged_plan(plan: Plan, storages: Sequence[int], rng: random.Random) -> Plan:
    """`plan`, with copies of `storages` at random places: out anywhere after they are made, in
    anywhere before they are read, some of them twice."""
    graph = with_copies(plan.graph, storages, LINK)
    turn, shift = len(plan.graph.forward), len(graph.nodes) - len(plan.graph.nodes)
    forward = list(plan.schedule.phases[0])
    backward = [i if i < turn else i + shift for i in plan.schedule.phases[1]]
    for page in paged(graph):
        made = max(p for p, i in enumerate(forward) if page.data in graph.nodes[i].writes)
        forward.insert(rng.randint(made + 1, len(forward)), page.store)
        reads = [p for p, i in enumerate(backward) if page.data in graph.nodes[i].reads]
        if len(reads) > 1 and rng.random() < 0.3:
            backward.insert(rng.randint(reads[-2] + 1, reads[-1]), page.fetch)
        backward.insert(rng.randint(0, reads[0]), page.fetch)
    schedule = with_frees(graph, forward, backward)
    verify(graph, schedule)
    found = simulate(graph, schedule)
    return replace(
        plan,
        graph=graph,
        schedule=schedule,
        peak_bytes=found.peak_bytes,
        budget_bytes=found.peak_bytes,
        saved_bytes=found.saved_bytes,
        trips=trips(graph, schedule),
    )


def page(planned: nn.Module, seed: int = 0, least_bytes: int = 1024) -> nn.Module:
    """Have a planned module page all that it can, at random places."""
    (program,) = programs_of(planned)
    storages = pageable(program.plan, least_bytes)
    return with_plan(planned, program, paged_plan(program.plan, storages, random.Random(seed)))


def with_plan(planned: Any, program: PlannedProgram, plan: Plan) -> nn.Module:
    """`planned`, which runs `plan` from now on."""
    of = program
    made = build_program(plan, of.interface, of.constants, of.output_spec, of.hooked, of.call)
    state = planned._rockplan
    (key,) = state.programs
    state.programs[key] = [bind_now(planned, made)]
    state.latest = made
    return planned  # type: ignore[no-any-return]


def dies_where_stored(graph: CDGraph, schedule: Schedule) -> frozenset[int]:
    """Storages that nothing reads between their store and their fetch."""
    of_store = {p.store: p.data for p in paged(graph)}
    events = schedule.events
    dying: set[int] = set()
    for position, event in enumerate(events):
        if isinstance(event, Compute) and event.node in of_store:
            after = [e for e in events[position + 1 :] if e != event]
            following = next((e for e in after if isinstance(e, Compute)), None)
            freed = after[: after.index(following)] if following else after
            if Free(of_store[event.node]) in freed:
                dying.add(of_store[event.node])
    return frozenset(dying)


# -- links ---------------------------------------------------------------------------------------


class LateCopy(Future[None]):
    """Done when somebody waits for it, and not before."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        if not self.done():
            try:
                self._work()
            except Exception as error:
                self.set_exception(error)
            else:
                self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        self.run()
        return super().result(timeout)


def _late(direction: str, work: Callable[[], None]) -> Future[None]:
    return LateCopy(work)


def _at_once(direction: str, work: Callable[[], None]) -> Future[None]:
    copy = LateCopy(work)
    copy.run()
    return copy


def _random(seed: int) -> Callable[[str, Callable[[], None]], Future[None]]:
    """Each copy may be done when another one begins."""
    rng = random.Random(seed)
    begun: list[LateCopy] = []

    def submit(direction: str, work: Callable[[], None]) -> Future[None]:
        begun.append(LateCopy(work))
        waited, begun[:] = begun[:], []
        for copy in waited:
            if rng.random() < 0.3:
                copy.run()
            elif not copy.done():
                begun.append(copy)
        return waited[-1]

    return submit


LINKS: dict[str, Callable[[str, Callable[[], None]], Future[None]]] = {
    "threads": files.submit,
    "at once": _at_once,
    "late": _late,
    "random": _random(3),
}


# -- poison --------------------------------------------------------------------------------------


@contextmanager
def poisoned(module: Any, link: str = "late") -> Iterator[None]:
    """Where something reads memory that a copy has still to fill, or that a store gave back, it
    reads POISON: pages until they are stored, storages after that, and until they are fetched."""
    plan: Plan = module._rockplan.latest.plan
    dying = dies_where_stored(plan.graph, plan.schedule)
    values = plan.graph.values
    names = {v.name for v in values if v.data in dying and v.view is None}
    places: dict[tuple[int, str], tuple[int, int]] = {}
    page_out, paged_out, new_storage = Pages.page_out, Pages.paged_out, pages.new_storage

    def leave(self: Pages, name: str, *tensors: torch.Tensor) -> None:
        storage = tensors[0].untyped_storage()
        places[id(self), name] = storage.data_ptr(), storage.nbytes()
        arena = self._arena
        assert isinstance(arena, FileArena)
        os.pwrite(arena._file.fileno(), bytes([POISON]) * storage.nbytes(), self._offset(name))
        del storage
        page_out(self, name, *tensors)

    def left(self: Pages, name: str) -> None:
        paged_out(self, name)
        if name in names:
            address, size_bytes = places.pop((id(self), name))
            ctypes.memset(address, POISON, size_bytes)

    def poison(size_bytes: int, device: torch.device | str) -> torch.UntypedStorage:
        made = new_storage(size_bytes, device)
        ctypes.memset(made.data_ptr(), POISON, size_bytes)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "submit", LINKS[link])
        patch.setattr(Pages, "page_out", leave)
        patch.setattr(Pages, "paged_out", left)
        patch.setattr(pages, "new_storage", poison)
        yield
