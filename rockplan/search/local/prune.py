"""Leave out re-executions one by one, where what they make may as well have stayed alive.

takes: a priced CDGraph, a legal schedule within a budget. returns: a schedule. guarantees: legal,
within the budget as `simulate` finds it, no slower; the same on every run that has the time.

What eviction drops for want of memory at one moment is often made again where it would by then
have fitted in between. Over one execution of every node, at the smallest budgets (roofline
prices): 2 layers of GPT-2 with fused attention +128 -> +100 %, ResNet-18 +116 -> +97 %, UNet with 4
skips +29 -> +25 %, and at 45 % of keep-all's peak, from its chain, UNet +265 -> +17 %.
"""

from __future__ import annotations

import math
import time

from rockplan.oracles.verify import verify
from rockplan.search.local.editable_schedule import EMPTY, Draft
from rockplan.values.graph import CDGraph
from rockplan.values.schedule import Schedule, with_frees


def pruned(
    graph: CDGraph, schedule: Schedule, budget_bytes: int, *, deadline: float = math.inf
) -> Schedule:
    """`schedule` without re-executions that the budget does not ask for, most expensive first.
    deadline: as of time.monotonic."""
    if time.monotonic() >= deadline:
        return schedule
    draft = Draft(graph, *schedule.phases)
    while prune(draft, budget_bytes, deadline):
        pass
    found = with_frees(graph, *draft.orders)
    verify(graph, found)
    return found


def prune(draft: Draft, budget_bytes: int, deadline: float = math.inf) -> bool:
    """One attempt to leave out each re-execution; was any, and is there time for another?"""
    times_ns = [n.time_ns for n in draft.graph.nodes]
    is_shorter = False
    for position in sorted(draft.reruns(), key=lambda p: (-times_ns[draft.nodes[p]], p)):
        if time.monotonic() >= deadline:
            return False
        if draft.nodes[position] == EMPTY or not draft.fits_without(position, budget_bytes):
            continue
        before = draft.changes
        draft.leave_out(position)
        if draft.worst()[1] > budget_bytes:
            draft.undo(before)
        else:
            is_shorter = True
    return is_shorter
