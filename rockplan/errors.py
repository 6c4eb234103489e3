"""Errors. Every one derives from RockplanError and carries its facts as fields.

A message states the fact, the place in the user's own model where one is known
(module path and source line), and the next thing to do.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ParamSpec, Self, TypeVar


class RockplanError(Exception):
    """Root of every error that rockplan raises on purpose."""


class InvalidInput(RockplanError, ValueError):
    """An argument of the public interface cannot be used: model, sample, budget, options."""


class InvalidConstraint(InvalidInput):
    """`Options(keep=..., recompute=...)` asks for something impossible.

    pattern: the pattern that matches nothing, or matches what cannot be kept or recomputed.
    """

    def __init__(self, message: str, pattern: str) -> None:
        super().__init__(message)
        self.pattern = pattern

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.pattern))


class InvalidBudget(InvalidInput):
    """The budget does not parse, or is not positive."""


class MissingLibrary(RockplanError, ImportError):
    """A feature needs an optional library that is not installed."""


class OtherRankFailed(RockplanError, RuntimeError):
    """Another process that plans with this one has failed, or does not answer."""


class CaptureError(RockplanError, RuntimeError):
    """The model cannot be captured as one static graph.

    module_path: dotted path of the submodule in the user's model, '' for the root, None if unknown.
    source: 'file:line' of the user's line, None if unknown.
    """

    def __init__(
        self, message: str, *, module_path: str | None = None, source: str | None = None
    ) -> None:
        super().__init__(message)
        self.module_path = module_path
        self.source = source

    @classmethod
    def at(cls, module_path: str, source: str, message: str) -> Self:
        """Make the error, with the place in the user's model before its message."""
        place = f"in module '{module_path or '(root)'}' at {source or 'an unknown line'}"
        return cls(f"{place}: {message}", module_path=module_path, source=source)


class ForwardRaises(CaptureError):
    """The model's forward itself raises on these arguments (`__cause__` is what it raises)."""


class ValueDependentControlFlow(CaptureError):
    """Python reads the value of an activation or a parameter (`.item()`, `if tensor:`)."""


class DataDependentShape(CaptureError):
    """The shape of a tensor depends on values (boolean indexing, nonzero, unique)."""


class NothingToDifferentiate(CaptureError):
    """No output depends on a parameter or an input that requires a gradient."""


class UnsupportedModel(CaptureError):
    """The model does something that a plan cannot reproduce exactly."""


class StoredByTheFirstCall(UnsupportedModel):
    """The first call stores a tensor that constants alone decide, and later calls read it: after
    one call the model can be planned."""


@dataclass(eq=False, repr=False)
class InfeasibleBudget(RockplanError):
    """No schedule of the model fits the budget.

    budget_bytes: what was asked for; minimum_bytes: the smallest budget that can be planned;
    operation: the operation at the peak of that smallest plan; is_complete: the time limit did not
    cut the search for it short. unplanned_bytes: what the model needs with everything kept, 0 if
    unknown. owner: what owns most of the peak of the smallest plan, as `explain` names it;
    owner_bytes: how much of it; module_path, source: where the largest tensor of the owner is
    computed, as in CaptureError.
    """

    budget_bytes: int
    minimum_bytes: int
    operation: str
    is_complete: bool = True
    unplanned_bytes: int = 0
    owner: str = ""
    owner_bytes: int = 0
    module_path: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self._message())

    @property
    def minimum_share(self) -> float | None:
        """minimum_bytes as a share of unplanned_bytes; None if these are unknown."""
        return self.minimum_bytes / self.unplanned_bytes if self.unplanned_bytes else None

    def _message(self) -> str:
        needed = "that this model needs" if self.is_complete else "found within the time limit"
        longer = "" if self.is_complete else "plan for longer (`time_limit_s`), "
        asked, least = self._percent(self.budget_bytes), self._percent(self.minimum_bytes)
        of_what = f" ({asked} of what is needed with everything kept)" if asked else ""
        in_vain = ", so computing again hardly lowers it" if self._is_in_vain else ""
        as_share = f" ({least}{in_vain})" if least else ""
        or_share = f" or '{least}'" if least else ""
        # A user who writes so few bytes means a share.
        few = self.budget_bytes
        share = f" Or was a share meant? Then write '{few}%'." if few <= 100 else ""
        return (
            f"budget of {self.budget_bytes} bytes{of_what} is below the minimum of "
            f"{self.minimum_bytes} bytes{as_share} {needed}; the peak of the smallest plan is at "
            f"{self.operation}{self._owned()}. Raise the budget to at least {self.minimum_bytes}"
            f"{or_share} (or pass budget='min'), {longer}or shrink the batch.{share}"
        )

    def taken(self, smallest_bytes: int) -> str:
        """Say that the smallest plan, of so many bytes, is taken although it exceeds the budget."""
        asked, least = self._percent(self.budget_bytes), self._percent(smallest_bytes)
        in_vain = ", so computing again hardly lowers it" if self._is_in_vain else ""
        return (
            f"no plan fits the budget of {self.budget_bytes} bytes{f' ({asked})' if asked else ''}"
            f": the smallest that was found needs {smallest_bytes} bytes"
            f"{f' ({least}{in_vain})' if least else ''}, {smallest_bytes - self.budget_bytes} more,"
            f" and runs; its peak is at {self.operation}{self._owned()}. A budget in bytes is a "
            "limit, if Options(on_infeasible=...) says nothing else"
        )

    @property
    def _is_in_vain(self) -> bool:
        return 0 < self.unplanned_bytes <= self.minimum_bytes

    def _percent(self, size_bytes: int) -> str:
        """Rounded up so that it works as a budget; '' if what everything needs is unknown."""
        if not self.unplanned_bytes:
            return ""
        return f"{-(-1000 * size_bytes // self.unplanned_bytes) / 10:g}%"

    def _owned(self) -> str:
        if not self.owner:
            return ""
        place = f" ({self.source})" if self.source else ""
        share = f"{self.owner_bytes / max(self.minimum_bytes, 1):.0%}"
        return f", and {share} of it is {self.owner}{place}"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), tuple(getattr(self, field.name) for field in fields(self)))


class CheckFailed(RockplanError):
    """`Options(check=True)` found that the planned step differs from eager execution."""


class IllegalSchedule(RockplanError):
    """A schedule breaks a rule of `verify`. Always a bug in rockplan, never in the model."""


class IllegalForm(RockplanError):
    """A recorded run or a graph breaks a rule of its table (`graph_builder.recorded.rules`,
    `oracles.graph_rules`). Always a bug in rockplan, never in the model."""


class SolverError(RockplanError):
    """The solver returned something that is neither a solution nor a proof of infeasibility."""


class StalePlan(RockplanError, RuntimeError):
    """The module or the call no longer matches what was planned, and replanning is off."""


class BackwardError(RockplanError, RuntimeError):
    """A backward pass asks for something that the plan does not provide."""


class HostMemoryError(RockplanError, RuntimeError):
    """The host has no room for activations that are to be paged to it, or a copy to or from it
    failed."""


class ResultNotMade(RockplanError, RuntimeError):
    """A leaf of a result was read that a plan with `Options(only_loss=True)` does not make."""


class PlanFormatError(RockplanError, ValueError):
    """A stored plan, profile or cache entry cannot be read: damaged, foreign or another version."""


class PlanMismatch(StalePlan):
    """A stored plan was made for another graph than the one it is to run.

    plan_digests: of the graphs of the stored plans; graph_digest: of the model's graph.
    """

    def __init__(
        self, message: str, *, plan_digests: tuple[str, ...] = (), graph_digest: str = ""
    ) -> None:
        super().__init__(message)
        self.plan_digests = plan_digests
        self.graph_digest = graph_digest


_OURS = (os.path.join(os.path.dirname(__file__), ""), os.sep + os.path.join("torch", ""))
"""Own folder, and the folder of PyTorch in any path."""
P = ParamSpec("P")
R = TypeVar("R")


def at_users_line(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with errors about the user's model and arguments whose traceback has the
    user's frames alone: 15 to 60 of ours would stand before the line in question."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (CaptureError, InvalidInput, InfeasibleBudget, StalePlan) as error:
            if error.__cause__ is not None:
                error.__cause__.__traceback__ = _of_users(error.__cause__.__traceback__)
            raise error.with_traceback(_of_users(error.__traceback__)) from error.__cause__

    return called


def _of_users(traceback: types.TracebackType | None) -> types.TracebackType | None:
    if traceback is None:
        return None
    rest = _of_users(traceback.tb_next)
    name = traceback.tb_frame.f_code.co_filename
    is_ours = name.startswith(_OURS[0]) or _OURS[1] in name
    if is_ours and not name.endswith("examples.py"):
        return rest
    return types.TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
