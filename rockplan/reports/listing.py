"""Listing: a schedule event by event, with names and live bytes; compiled kernels by operators.

takes: a priced CDGraph and a legal Schedule of it. returns: text. guarantees: bytes are those of
`simulate`.
"""

from __future__ import annotations

from collections import Counter

from rockplan.oracles.lifetimes import taken_over
from rockplan.oracles.simulate import timeline
from rockplan.values.columns import aligned
from rockplan.values.graph import CDGraph, Kernel
from rockplan.values.names import activation_names, operation_names
from rockplan.values.schedule import Compute, Free, Schedule


def schedule_listing(graph: CDGraph, schedule: Schedule) -> str:
    """Return the schedule as text, a line for each event: position, phase, what happens to which
    operation or storage, bytes alive while it runs and after it."""
    nodes, storages = operation_names(graph), activation_names(graph)
    executed: set[int] = set()
    rows = [("", "", "", "", "during", "after")]
    for position, (event, cost) in enumerate(
        zip(schedule.events, timeline(graph, schedule), strict=True)
    ):
        if isinstance(event, Free):
            verb = "hand over" if event.data in graph.handed else "free"
            name = storages[event.data]
        else:
            verb = "recompute" if event.node in executed else "compute"
            name = nodes[event.node]
            executed.add(event.node)
        phase = "forward" if position < schedule.forward_length else "backward"
        live = (f"{cost.during_bytes} B", f"{cost.after_bytes} B")
        rows.append((str(position), phase, verb, name, *live))
    return "\n".join(aligned(rows, numbers=(0, 4, 5)))


def kernel_calls(graph: CDGraph, schedule: Schedule) -> dict[Kernel, int]:
    """Return compiled kernel -> number of its calls in one step of `schedule`, most calls first;
    kernels that are not called are left out."""
    takeovers, calls = taken_over(graph, schedule), Counter[str]()
    executed: set[int] = set()
    for position, event in enumerate(schedule.events):
        if isinstance(event, Compute):
            again, takeover = event.node in executed, takeovers.get(position)
            calls.update(c.op for c in graph.nodes[event.node].called(again, takeover))
            executed.add(event.node)
    counted = {kernel: calls[kernel.op] for kernel in graph.kernels if calls[kernel.op]}
    return dict(sorted(counted.items(), key=lambda one: -one[1]))


def kernel_listing(graph: CDGraph, schedule: Schedule) -> str:
    """Return, for each kernel, the number of calls in a step, and a line for each of its
    operators."""
    calls = kernel_calls(graph, schedule)
    if not calls:
        return "no compiled kernels"
    return "\n\n".join(f"{count} x {kernel}" for kernel, count in calls.items())
