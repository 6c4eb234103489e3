"""From an order of computations to a checked schedule, and which of several fits a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.graph import CDGraph
from rockplan.values.order import without_idle
from rockplan.values.schedule import Schedule, with_frees


def checked_schedule(
    graph: CDGraph,
    forward: Sequence[int],
    backward: Sequence[int],
    kept: frozenset[int] = frozenset(),
) -> Schedule:
    """The schedule that executes `forward`, then `backward` (node indices).

    kept: data that stay alive once made, so that they are not made again.
    """
    schedule = with_frees(graph, *without_idle(graph, forward, backward, kept=kept))
    verify(graph, schedule)
    return schedule


def fastest_within(
    graph: CDGraph, schedules: Iterable[Schedule], budget_bytes: int
) -> Schedule | None:
    """The fastest schedule whose simulated peak is within budget_bytes; the first of equals."""
    best, best_ns = None, 0
    for schedule in schedules:
        found = simulate(graph, schedule)
        if found.peak_bytes <= budget_bytes and (best is None or found.time_ns < best_ns):
            best, best_ns = schedule, found.time_ns
    return best
