"""Listing: a schedule event by event, with names and live bytes.

takes: a priced CDGraph and a legal Schedule of it. returns: text. guarantees: bytes are those of
`simulate`, the only oracle of them.
"""

from __future__ import annotations

from rockplan.oracles.simulate import timeline
from rockplan.values.columns import aligned
from rockplan.values.graph import CDGraph
from rockplan.values.names import activation_names, operation_names
from rockplan.values.schedule import Free, Schedule


def schedule_listing(graph: CDGraph, schedule: Schedule) -> str:
    """A line an event: position, phase, what happens, bytes while it runs, bytes alive after it."""
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
