"""The pipeline: what a search is, as two tuples of stages over one incumbent.

Taking a line out of a tuple takes a mechanism out of the product; `Options(without=("name",))` does
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
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.plan import StageTrace

When = Callable[[Goal, Incumbent, Limits], bool]


def always(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return True


def not_near(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return not incumbent.is_near(goal, limits) and not limits.is_over


def may_page(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    """Is there a host, and does something run again? What is proven near is so without one."""
    least = replace(incumbent, bound_ns=goal.graph.time_ns)
    return goal.host is not None and not_near(goal, least, limits)


def nothing_fits(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return incumbent.schedule is None


def is_short(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    """Did what made the incumbent end for want of effort?"""
    return incumbent.is_exhausted


def something_fits(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return incumbent.schedule is not None and not limits.is_over


def improvable(goal: Goal, incumbent: Incumbent, limits: Limits) -> bool:
    return incumbent.schedule is not None and not_near(goal, incumbent, limits)


@dataclass(frozen=True, slots=True)
class Stage:
    """when: whether the stage runs at all, by what is known before it. sees_measured: of the search
    for the least peak, whether it goes by the times of this machine (`minimum_peak`)."""

    name: str
    run: Callable[[Goal, Incumbent, Limits], Incumbent]
    when: When
    sees_measured: bool = False


STAGES = (
    Stage("keep-all", stages.keep_everything, always),
    Stage("relaxation", stages.relax, not_near),
    Stage("eviction", stages.evict, nothing_fits),
    Stage("blocks", stages.combine_blocks, nothing_fits),
    Stage("paging", stages.page, may_page),
    Stage("exchange", stages.exchange, improvable),
    Stage("proof", stages.prove, improvable),
)
"""To the fastest schedule within a budget."""

POLISH = tuple(stage for stage in STAGES if stage.when is improvable)
"""What follows where nothing fits but the schedule with the least peak (`planning`)."""

LEAST_PEAK = (
    Stage("keep-all", stages.keep_everything, always),
    Stage("relaxation", stages.relax, something_fits),
    Stage("eviction", stages.evict, always),
    Stage("blocks", stages.combine_blocks, is_short),
    Stage("exchange", stages.exchange, something_fits),
    Stage("descent", stages.descend, something_fits, sees_measured=True),
)
"""To the schedule with the least peak."""

NAMES = tuple(dict.fromkeys(stage.name for stage in (*STAGES, *LEAST_PEAK)))
"""Of the stages."""


@paused_collection()
def run(
    tuple_of_stages: Sequence[Stage],
    goal: Goal,
    limits: Limits,
    incumbent: Incumbent | None = None,
) -> Incumbent:
    """The incumbent after all stages; of those that did not run for want of time it says so."""
    incumbent = incumbent or Incumbent(bound_ns=goal.graph.time_ns)
    for stage in tuple_of_stages:
        if stage.name in limits.without:
            continue
        if not stage.when(goal, incumbent, limits):
            # Unless the incumbent is as good as it needs to be, the stage had no time.
            is_due = stage.when in (not_near, improvable, something_fits)
            if is_due and limits.is_over and not incumbent.is_near(goal, limits):
                incumbent = replace(incumbent, is_complete=False)
            continue
        since = time.monotonic()
        incumbent = stage.run(goal, incumbent, limits)
        seconds = time.monotonic() - since
        if limits.is_over and stage.when is not always and not incumbent.is_near(goal, limits):
            incumbent = replace(incumbent, is_complete=False)
        incumbent = replace(incumbent, trace=(*incumbent.trace, _trace(stage, incumbent, seconds)))
    return incumbent


def _trace(stage: Stage, incumbent: Incumbent, seconds: float) -> StageTrace:
    is_there = incumbent.schedule is not None
    return StageTrace(
        stage.name,
        incumbent.time_ns if is_there else None,
        incumbent.peak_bytes if is_there else None,
        incumbent.bound_ns,
        seconds,
    )


def diagram(tuple_of_stages: Sequence[Stage]) -> str:
    """The stages from first to last: when each runs, and what it does by its docstring."""
    names = max(len(stage.name) for stage in tuple_of_stages)
    conditions = max(len(stage.when.__name__) for stage in tuple_of_stages)
    return "\n".join(
        f"{stage.name:{names}}  {stage.when.__name__.replace('_', ' '):{conditions}}  "
        f"{_purpose(stage)}"
        for stage in tuple_of_stages
    )


def _purpose(stage: Stage) -> str:
    """What stands before the first colon, comma or full stop of the docstring."""
    return re.split(r"[:.,]", " ".join((stage.run.__doc__ or "").split()))[0]


def check_names(names: Sequence[str]) -> None:
    """Raises InvalidInput for a name that is neither one of a stage nor one of a pass."""
    unknown = sorted(set(names) - {*NAMES, *passes.NAMES})
    if unknown:
        raise InvalidInput(
            f"without names {', '.join(map(repr, unknown))}; the stages are {', '.join(NAMES)}, "
            f"the passes {', '.join(passes.NAMES)}"
        )
