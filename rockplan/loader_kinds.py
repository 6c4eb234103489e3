"""Kinds: which kinds of step a data loader makes, before training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import enable_grad, nn

from rockplan.api import solve
from rockplan.budget import Budget
from rockplan.captures.captured_calls import arguments
from rockplan.captures.loss import Loss
from rockplan.errors import InvalidInput, RockplanError, at_users_line
from rockplan.fitting.optimizer import OptimizerLike
from rockplan.fitting.training_step import USUAL, TrainingStep
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.runtime.planned_module import planned_for
from rockplan.runtime.planned_state import HasPlans


@dataclass(slots=True)
class Kind:
    """One kind of step. why: how it differs from those before, '' of the first; advice: how to
    avoid it, '' if nothing is known; planning_s: seconds that planning took; is_of_all_sizes: other
    sizes of its tensors run the same program."""

    why: str
    advice: str
    is_of_all_sizes: bool
    steps: int = 0
    planning_s: float = 0.0

    def __str__(self) -> str:
        of_sizes = "; one program for other sizes" if self.is_of_all_sizes else ""
        advice = f"; {self.advice}" if self.advice and not of_sizes else ""
        return f"{self.why or 'the first'}{of_sizes}{advice}"


@dataclass(frozen=True, slots=True)
class Kinds:
    """What `kinds` found. each: in the order in which they came; unplanned: steps that run the
    original."""

    each: tuple[Kind, ...]
    unplanned: int = 0

    @property
    def planning_s(self) -> float:
        """Seconds that planning took, all kinds together."""
        return sum(kind.planning_s for kind in self.each)

    def __str__(self) -> str:
        steps = self.unplanned + sum(kind.steps for kind in self.each)
        lines = [f"{steps} steps, {len(self.each)} kinds, planned in {self.planning_s:.1f} s"]
        lines += [f"{k.steps:>6} steps, {k.planning_s:>5.1f} s: {k}" for k in self.each]
        if self.unplanned:
            lines.append(f"{self.unplanned:>6} steps run the original")
        return "\n".join(lines)


@at_users_line
def kinds(
    model: nn.Module,
    loader: Iterable[object],
    budget: int | float | str | Budget = "auto",
    *,
    steps: int = 100,
    optimizer: OptimizerLike = None,
    step: TrainingStep = USUAL,
    loss: Loss | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Kinds:
    """Plan, and run none of, the first `steps` batches of `loader`; return which kinds of step they
    are, by which arguments they differ, and what planning them takes.

    loader: yields samples as `solve` takes them; a pair of input and target is
    `(x for x, _ in loader)`. Others: as for `solve`. Plans are kept in the cache: training that
    follows finds them. Raises as `solve` does, with the number of the batch as a note.
    """
    if type(steps) is not int or steps < 1:
        raise InvalidInput(f"steps is {steps!r}; pass how many batches to look at, at least 1")
    planned = solve(model, None, budget, optimizer=optimizer, step=step, loss=loss, options=options)
    assert isinstance(planned, HasPlans)
    planned._rockplan.watch.end()  # nobody calls it
    found: list[tuple[object, Kind]] = []
    unplanned = 0
    for number, sample in enumerate(itertools.islice(loader, steps)):
        started = time.monotonic()
        try:
            with enable_grad():
                program, changes = planned_for(planned, *arguments(planned, sample, None))
        except RockplanError as error:
            error.add_note(f"rockplan: at batch {number} of the loader")
            raise
        if program is None:
            unplanned += 1
            continue
        # Programs of one family, each for other sizes, share what operators were seen to take.
        family = program if program.open is None else program.open.workspaces
        kind = next((k for other, k in found if other is family), None)
        if kind is None:
            why, advice = (str(changes), changes.advice) if changes else ("", "")
            kind = Kind(why, advice, program.open is not None)
            found.append((family, kind))
        kind.steps += 1
        kind.planning_s += time.monotonic() - started
    return Kinds(tuple(kind for _, kind in found), unplanned)
