"""Paged: where generated code has storages copied to the host and back (docs/paging.md).

A store frees room where it stands in the schedule, and its copy begins as soon as the storage is
made; a fetch takes room and begins its copy where it stands, and is waited for by the first read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rockplan.values.copies import FETCH, STORE
from rockplan.values.graph import Call, CDGraph, ComputeNode
from rockplan.values.schedule import Compute, Schedule


def copy_of(node: ComputeNode) -> Call | None:
    """The call of a node that copies a storage to the host or back, None of others."""
    return node.calls[0] if node.calls and node.calls[0].op in (STORE, FETCH) else None


def leaving(graph: CDGraph, schedule: Schedule) -> Mapping[int, Sequence[Call]]:
    """Position of a computation -> calls that store what it makes, in the order of their nodes."""
    made: dict[int, int] = {}
    stores: defaultdict[int, dict[int, Call]] = defaultdict(dict)
    for position, event in enumerate(schedule.events):
        if not isinstance(event, Compute):
            made.pop(event.data, None)
            continue
        node = graph.nodes[event.node]
        call = copy_of(node)
        if call is not None and call.op == STORE:
            stores[made[node.reads[0]]][node.index] = call
        for data in node.writes:  # a re-execution drops its copy of what is alive
            made.setdefault(data, position)
    return {position: [of[i] for i in sorted(of)] for position, of in stores.items()}
