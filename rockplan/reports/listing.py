"""Listing: compiled kernels by operators; the passes that made a graph, and the stages of a search.

takes: a priced CDGraph and a legal Schedule of it, or a Plan. returns: text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rockplan.oracles.lifetimes import taken_over
from rockplan.values.columns import aligned
from rockplan.values.graph import CDGraph, Kernel
from rockplan.values.plan import PassTrace, Plan, format_bytes
from rockplan.values.schedule import Compute, Schedule


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


PASSES_HEADING = ("pass", "forward", "backward", "seconds")
HEADING = ("stage", "overhead", "proven", "peak", "seconds")


def passes_trace(passes: Sequence[PassTrace]) -> str:
    """Return a table as text: of each pass, the number of calls (from `lower` on, nodes of the
    graph) in forward and backward after it, a dash if it changed nothing, and its seconds."""
    rows = [PASSES_HEADING]
    for one in passes:
        counts = (str(one.forward), str(one.backward)) if one.is_changed else ("-", "-")
        rows.append((one.name, *counts, f"{one.seconds:.3f}"))
    return _table(rows)


def search_trace(plan: Plan) -> str:
    """Return a table as text: of each stage of the search, the time of the best schedule after it
    and the proven bound (both over one execution of everything), that schedule's peak, and the
    stage's seconds; a dash while there is no schedule."""
    if not plan.trace:
        return "no stage ran: the plan is from the cache or from a file (--no-cache plans anew)"
    once_ns = max(plan.graph.time_ns, 1)
    rows = [HEADING]
    for stage in plan.trace:
        rows.append(
            (
                stage.stage,
                "-" if stage.time_ns is None else _overhead(stage.time_ns, once_ns),
                _overhead(stage.bound_ns, once_ns),
                "-" if stage.peak_bytes is None else format_bytes(stage.peak_bytes),
                f"{stage.seconds:.2f}",
            )
        )
    return _table(rows)


def _overhead(time_ns: int, once_ns: int) -> str:
    return f"{100 * (time_ns / once_ns - 1):+.2f} %"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(aligned(rows, numbers=range(1, len(rows[0]))))
