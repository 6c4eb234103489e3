"""The view of a recorded run: every fact as a walk over all pairs of calls finds it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.lowering.functionalize import with_versions
from rockplan.graph_builder.recorded.run import Capture, RunView
from rockplan.values.graph import DataKind, Phase
from testing.random_networks import network


class Mixed(nn.Module):
    """Changes in place of what the run makes and of a buffer, views of views, a result that is a
    view, draws, something that nobody reads, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.layer(x).tanh_()
        h.sin().exp()
        h = nn.functional.dropout(self.layer(h), 0.3)
        self.mean.lerp_(h.detach().mean(0), 0.1)
        total = torch.zeros_like(h)
        for row, part in enumerate(h.view(2, 3, 6).unbind(0)):
            total[3 * row : 3 * row + 3] += part * y
        return total.t()[1:], (total * self.mean).sum()


def mixed() -> Capture:
    torch.manual_seed(0)
    return capture(Mixed(), (torch.randn(6, 6, requires_grad=True), torch.randn(6)), {})


def drawn(seed: int) -> Capture:
    model, args = network(random.Random(seed))
    return capture(model, args, {})


RUNS = {
    "mixed": mixed,
    "mixed, functionalized": lambda: with_versions(mixed(), everywhere=True),
    **{f"drawn {seed}": lambda seed=seed: drawn(seed) for seed in (3, 4, 9)},
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def run(request: pytest.FixtureRequest) -> Capture:
    made: Capture = request.param()
    return made


def members(run: Capture, storage: int) -> set[int]:
    """Values of a storage."""
    return {v for v, value in enumerate(run.values) if value.storage == storage}


def storages(run: Capture) -> set[int]:
    return {value.storage for value in run.values}


def first_made(run: Capture, value: int) -> int | None:
    """The first call that returns the value without having read it."""
    making = (p for p, c in enumerate(run.calls) if value in c.call.results)
    return next((p for p in making if value not in run.calls[p].reads), None)


def test_a_run_has_one(run: Capture) -> None:
    assert run.view is run.view
    assert run.view.values is run.values
    assert all(run.view.storage(v) == value.storage for v, value in enumerate(run.values))


def test_what_is_the_callers(run: Capture) -> None:
    view = run.view
    never_made = {v for v in range(len(run.values)) if first_made(run, v) is None}
    used = {v for c in run.calls for v in c.reads} | set(view.outputs)
    assert used & never_made <= view.given.keys() <= never_made
    named = dict.fromkeys((v for _, v in run.parameters), DataKind.PARAMETER)
    assert named.items() <= view.given.items()


def test_kinds_of_storages(run: Capture) -> None:
    view = run.view
    made = {DataKind.ACTIVATION: Phase.FORWARD, DataKind.GRADIENT: Phase.BACKWARD}
    for storage, kind in view.kinds.items():
        given = members(run, storage) & view.given.keys()
        if given:
            assert kind in {view.given[v] for v in given}
        else:
            makers = (c for c in run.calls if members(run, storage) & {*c.call.results})
            assert next(makers).phase is made[kind]


def test_who_makes_and_changes(run: Capture) -> None:
    view = run.view
    for storage in storages(run):
        of = members(run, storage)
        changing = {p for p, c in enumerate(run.calls) if of & {*c.writes}}
        making = {p for v in of if (p := first_made(run, v)) is not None}
        is_callers = bool(of & view.given.keys())
        making = set() if is_callers else {min(making)} if making else set()
        assert view.writers.get(storage, ()) == tuple(sorted(making | changing))
        assert view.last_change.get(storage) == max(changing, default=None)
        assert (storage in view.changed_outside) is (is_callers and bool(changing))
        assert {view.maker(v) for v in of} == ({None} if is_callers else making or {None})
    assert view.next_storage not in storages(run)


def test_views_take_no_memory(run: Capture) -> None:
    view = run.view
    for value, recorded in enumerate(run.values):
        position = first_made(run, value)
        before = range(value if position is None else position)
        of = members(run, recorded.storage)
        is_there = bool(of & view.given.keys()) or any(
            of & {*run.calls[p].call.made} for p in before
        )
        is_derived = position is not None and is_there
        assert view.views.get(value) == (position if is_derived else None)
    for position, recorded_call in enumerate(run.calls):
        made = recorded_call.call.made
        only_views = bool(made) and all(view.views.get(v) == position for v in made)
        assert view.is_view(position) is (only_views and not recorded_call.writes)
        base = view.viewed_by(position)
        assert base is None or (view.is_view(position) and base in recorded_call.reads)


def needed_by_trial(view: RunView) -> set[int]:
    """Grown until nothing is added: calls that act, and those that make or change what is wanted or
    what a call reads that comes later."""
    steps = [p for p in range(len(view.calls)) if not view.is_view(p)]
    changing = {p for s in view.changed_outside for p in steps if s in touched(view, p)}
    running = {p for p in steps if not view.calls[p].is_repeatable} | changing
    while True:
        more = {
            p
            for p in steps
            if made(view, p) & view.wanted
            or any(made(view, p) & view.storages(view.calls[r].reads) for r in running if r > p)
        }
        if more <= running:
            return running
        running |= more


def made(view: RunView, position: int) -> frozenset[int]:
    recorded = view.calls[position]
    return view.storages((*recorded.call.made, *recorded.writes))


def touched(view: RunView, position: int) -> frozenset[int]:
    return view.storages(view.calls[position].writes)


def test_what_is_needed_and_who_reads(run: Capture) -> None:
    view = run.view
    assert view.live == tuple(sorted(needed_by_trial(view)))
    for storage in storages(run):
        reading = [p for p in view.live if members(run, storage) & {*run.calls[p].reads}]
        assert view.readers.get(storage, ()) == tuple(reading)


def test_dead_calls_and_sums_are_told_apart() -> None:
    run = mixed()
    dead = {c.call.op for p, c in enumerate(run.calls) if p not in run.view.live}
    assert "aten.exp.default" in dead
    assert {run.calls[p].call.op for p in run.view.sums} == {"aten.add.Tensor"}
    several = [terms for _, terms in run.view.contributions if len(terms) > 1]
    assert len(several) == 2  # of the weight and of the bias


def test_what_one_call_does_outside(run: Capture) -> None:
    view = run.view
    for recorded in run.calls:
        touched = view.storages((*recorded.reads, *recorded.writes))
        assert view.touched_outside(recorded) == touched & view.changed_outside
        assert view.changes_outside(recorded) is bool(
            view.storages(recorded.writes) & view.changed_outside
        )
        if view.reads_changed(recorded):
            assert view.touched_outside(recorded)
