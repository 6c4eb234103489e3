"""The trace of a search: what each stage found, proved and took.

takes: a Plan. returns: text, a line a stage.
"""

from __future__ import annotations

from rockplan.values.plan import Plan, format_bytes

HEADING = ("stage", "overhead", "proven", "peak", "seconds")


def search_trace(plan: Plan) -> str:
    """Overheads of the incumbent after each stage, and those proven of every schedule, as shares of
    one execution of everything; a dash where there is no incumbent yet."""
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
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADING))]
    return "\n".join(_line(row, widths) for row in rows)


def _overhead(time_ns: int, once_ns: int) -> str:
    return f"{100 * (time_ns / once_ns - 1):+.2f} %"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *others = row
    cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
    return "  ".join(cells)
