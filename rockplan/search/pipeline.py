"""The pipeline: a search as two tuples of stages over one incumbent.

Removing a line of a tuple removes a mechanism from the product; `Options(without=("name",))` does
so for one call. What each is worth: benchmarks/results/ablation.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rockplan.errors import InvalidInput
from rockplan.graph_builder import pipeline as passes
from rockplan.search import stages
from rockplan.search.incumbent import Incumbent
from rockplan.search.limits import Limits
from rockplan.search.problem import Goal
from rockplan.values.columns import aligned
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.plan import StageTrace

When = Callable[[Goal, Incumbent, Limits], bool]


def always(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return True


def not_near(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return not incumbent.is_near(goal, limits) and not limits.is_over


def may_page(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    """True if there is a host and the incumbent re-executes much: paging can be faster only down to
    the time without re-executions."""
    least = replace(incumbent, bound_ns=goal.graph.time_ns)
    return goal.host is not None and not_near(goal, least, limits)


def nothing_fits(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return incumbent.schedule is None


def is_short(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    """True if the last construction ran out of effort."""
    return incumbent.is_exhausted


def not_enough(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    """True unless a peak as small as the incumbent's ends the search for the least one."""
    return incumbent.schedule is None or incumbent.peak_bytes > limits.enough_bytes


def lowerable(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return something_fits(goal, incumbent, limits) and not_enough(goal, incumbent, limits)


def something_fits(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return incumbent.schedule is not None and not limits.is_over


def improvable(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return incumbent.schedule is not None and not_near(goal, incumbent, limits)


def unproven(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    """Return whether the bound is to be proven: one without a host does not hold with one."""
    if goal.host is None:
        return improvable(goal, incumbent, limits)
    is_there = incumbent.schedule is not None or incumbent.paged is not None
    return is_there and may_page(goal, incumbent, limits)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a search. when: tells from the incumbent before it whether the stage runs."""

    name: str
    run: Callable[[Goal, Incumbent, Limits], Incumbent]
    when: When


STAGES = (
    Stage("keep-all", stages.keep_everything, always),
    Stage("relaxation", stages.relax, not_near),
    Stage("eviction", stages.evict, nothing_fits),
    Stage("blocks", stages.combine_blocks, nothing_fits),
    Stage("paging", stages.page, may_page),
    Stage("exchange", stages.exchange, improvable),
    Stage("proof", stages.prove, unproven),
)
"""The search for the fastest schedule within a budget."""

POLISH = tuple(stage for stage in STAGES if stage.when in (improvable, unproven))
"""The stages that follow if only the schedule with the least peak fits (`planning`)."""

LEAST_PEAK = (
    Stage("keep-all", stages.keep_everything, always),
    Stage("relaxation", stages.relax, something_fits),
    Stage("eviction", stages.evict, not_enough),
    Stage("blocks", stages.combine_blocks, is_short),
    Stage("exchange", stages.exchange, lowerable),
)
"""The search for the schedule with the least peak."""

NAMES = tuple(stage.name for stage in STAGES)
"""Names of all stages."""


@paused_collection()
def run(
    stages_in_order: Sequence[Stage], goal: Goal, limits: Limits, incumbent: Incumbent | None = None
) -> Incumbent:
    """Run the stages whose condition holds, each from the incumbent that the one before left, and
    return the last one. None begins with no schedule. `is_complete` of the result is False if a
    stage lacked time to run, or to finish; `trace` has a line for each that ran."""
    incumbent = incumbent or Incumbent(bound_ns=goal.graph.time_ns)
    for stage in stages_in_order:
        if stage.name in limits.without:
            continue
        if not stage.when(goal, incumbent, limits):
            # If the incumbent is not near the bound, the stage did not run for lack of time.
            is_due = stage.when in (not_near, improvable, unproven, something_fits, lowerable)
            if is_due and limits.is_over and not incumbent.is_near(goal, limits):
                incumbent = replace(incumbent, is_complete=False)
            continue
        since = time.monotonic()
        incumbent = stage.run(goal, incumbent, limits)
        seconds = time.monotonic() - since
        if (
            limits.is_over
            and stage.when not in (always, not_enough)
            and not incumbent.is_near(goal, limits)
        ):
            incumbent = replace(incumbent, is_complete=False)
        incumbent = replace(incumbent, trace=(*incumbent.trace, _trace(stage, incumbent, seconds)))
    return incumbent


def _trace(stage: Stage, incumbent: Incumbent, seconds: float) -> StageTrace:
    """Return the line of a stage that just ran: name, time (ns) and peak of the incumbent (None
    without a schedule), its bound (ns), and the seconds it took."""
    has_schedule = incumbent.schedule is not None
    return StageTrace(
        stage.name,
        incumbent.time_ns if has_schedule else None,
        incumbent.peak_bytes if has_schedule else None,
        incumbent.bound_ns,
        seconds,
    )


def diagram(stages_in_order: Sequence[Stage]) -> str:
    """Return a line of text for each stage: its name, the condition under which it runs, and its
    docstring up to the first colon, comma or full stop."""
    whens = [stage.when.__name__.replace("_", " ") for stage in stages_in_order]
    said = (" ".join((stage.run.__doc__ or "").split()) for stage in stages_in_order)
    purposes = (re.split(r"[:.,]", text)[0] for text in said)
    names = (stage.name for stage in stages_in_order)
    return "\n".join(aligned(zip(names, whens, purposes, strict=True)))


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidInput for names that are neither of a stage nor of a pass. names: what
    `Options.without` leaves out."""
    unknown = sorted(set(names) - {*NAMES, *passes.NAMES})
    if unknown:
        raise InvalidInput(
            f"without names {', '.join(map(repr, unknown))}; the stages are {', '.join(NAMES)}, "
            f"the passes {', '.join(passes.NAMES)}"
        )
