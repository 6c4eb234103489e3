"""One decision for each tensor: saved after forward, or made again once in backward.

What the partitioner of torch.compile decides under `activation_memory_budget`: a limit on the
sum of saved bytes, and the choice that recomputes least within it. There it is a min-cut and a
knapsack over estimated costs; here it is the exact optimum of the same decision, an integer
program. What is made again is made as late as possible and stays until its last use. The limit
says nothing of the peak, so limits are tried and the peak is simulated.
"""

from __future__ import annotations

from benchmarks.peers.orders import checked_schedule
from rockplan.ilp.highs import TIME_UNIT, ProgramBuilder, solve
from rockplan.values.graph import CDGraph, DataKind, producers
from rockplan.values.schedule import Schedule

LEVELS = 40
"""Limits tried, evenly from nothing saved to everything."""

GAP = 1e-4
"""Share of the iteration time that may stay unproven at one limit."""


def per_tensor_schedules(graph: CDGraph, time_limit_s: float = 10.0) -> tuple[Schedule, ...]:
    """One schedule for each limit on saved bytes; time_limit_s: for each of them."""
    wanted = wanted_storages(graph)
    total_bytes = sum(graph.data[d].size_bytes for d in wanted)
    found: dict[frozenset[int], Schedule] = {}
    for level in range(LEVELS + 1):
        limit_bytes = total_bytes * level // LEVELS
        saved = saved_storages(graph, limit_bytes, time_limit_s)
        if saved is not None and saved not in found:
            found[saved] = recompute_unsaved(graph, saved)
    return tuple(found.values())


def wanted_storages(graph: CDGraph) -> frozenset[int]:
    """Forward storages that backward reads, or that making those again reads."""
    producer = producers(graph)
    pending = [d for node in graph.backward for d in node.reads]
    wanted: set[int] = set()
    while pending:
        d = pending.pop()
        if d in wanted or graph.data[d].kind is not DataKind.ACTIVATION or d in graph.held:
            continue
        wanted.add(d)
        node = graph.nodes[producer[d]]
        if node.recomputable:
            pending += node.reads
    return frozenset(wanted)


def saved_storages(graph: CDGraph, limit_bytes: int, time_limit_s: float) -> frozenset[int] | None:
    """Which wanted storages to save within limit_bytes; None if the solver finds nothing."""
    wanted = sorted(wanted_storages(graph))
    producer = producers(graph)
    builder = ProgramBuilder()
    time_unit_ns = max(graph.time_ns, 1) * TIME_UNIT
    save = {d: builder.binary() for d in wanted}
    again = {
        i: builder.binary(graph.nodes[i].time_ns / time_unit_ns)
        for i in sorted({producer[d] for d in wanted})
        if graph.nodes[i].recomputable
    }

    def there(d: int) -> list[tuple[int, float]]:
        rerun = again.get(producer[d])
        return [(save[d], 1.0)] if rerun is None else [(save[d], 1.0), (rerun, 1.0)]

    for d in sorted({d for node in graph.backward for d in node.reads if d in save}):
        builder.at_least(there(d), 1.0)
    for i, rerun in again.items():
        for d in graph.nodes[i].reads:
            if d in save:
                builder.at_least([*there(d), (rerun, -1.0)], 0.0)
    # What cannot be made again is saved whatever the limit says, as the partitioner does.
    forced = {d for d in wanted if producer[d] not in again}
    unit_bytes = max(limit_bytes, 1) / 1000
    sizes = [(save[d], graph.data[d].size_bytes / unit_bytes) for d in wanted if d not in forced]
    builder.at_most(sizes, limit_bytes / unit_bytes)
    report = solve(builder.build(), time_limit_s=time_limit_s, absolute_gap=GAP / TIME_UNIT)
    if report.values is None:
        return None
    values = report.values
    return frozenset(d for d in wanted if d in forced or values[save[d]] > 0.5)


def recompute_unsaved(graph: CDGraph, saved: frozenset[int]) -> Schedule:
    """Forward once; before each backward node, what it needs, is not saved and not there yet."""
    producer = producers(graph)
    unsaved = wanted_storages(graph) - saved
    there: set[int] = set()
    backward: list[int] = []
    for node in graph.backward:
        again: set[int] = set()
        pending = [d for d in node.reads if d in unsaved - there]
        while pending:
            i = producer[pending.pop()]
            if i not in again:
                again.add(i)
                pending += [d for d in graph.nodes[i].reads if d in unsaved - there]
        backward += [*sorted(again), node.index]
        there.update(d for i in again for d in graph.nodes[i].writes)
    return checked_schedule(graph, [n.index for n in graph.forward], backward, kept=saved)
