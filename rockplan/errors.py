"""Errors. Every one derives from RockplanError and carries its facts as fields.

A message states the fact, the place in the user's own model where one is known
(module path and source line), and the next thing to do.
"""

from __future__ import annotations

from typing import Self


class RockplanError(Exception):
    """Root of every error that rockplan raises on purpose."""


class InvalidInput(RockplanError, ValueError):
    """An argument of the public interface cannot be used: model, sample, budget, options."""


class InvalidConstraint(InvalidInput):
    """What `Options(keep=..., recompute=...)` asks for cannot be.

    pattern: the one that matches nothing, or that matches what cannot be kept or recomputed.
    """

    def __init__(self, message: str, pattern: str) -> None:
        super().__init__(message)
        self.pattern = pattern

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.pattern))


class InvalidBudget(InvalidInput):
    """The budget does not parse, or is not positive."""


class MissingLibrary(RockplanError, ImportError):
    """Something that was asked for needs an optional library that is not installed."""


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
        """The error, with the place in the user's model before its message."""
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


class InfeasibleBudget(RockplanError):
    """No schedule of the model fits the budget.

    budget_bytes: what was asked for; minimum_bytes: the smallest budget that can be planned;
    operation: the operation at the peak of that smallest plan; is_complete: the search for it was
    not cut short by the time limit.
    """

    def __init__(
        self, budget_bytes: int, minimum_bytes: int, operation: str, is_complete: bool = True
    ) -> None:
        needed = "that this model needs" if is_complete else "found within the time limit"
        longer = "" if is_complete else "plan for longer (`time_limit_s`), "
        super().__init__(
            f"budget of {budget_bytes} bytes is below the minimum of {minimum_bytes} bytes "
            f"{needed}; the peak of the smallest plan is at {operation}. "
            f"Raise the budget to at least {minimum_bytes} (or pass budget='min'), {longer}"
            "or shrink the batch."
        )
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.operation = operation
        self.is_complete = is_complete

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.budget_bytes, self.minimum_bytes, self.operation, self.is_complete)
        return (type(self), arguments)


class CheckFailed(RockplanError):
    """`Options(check=True)` found that the planned step differs from eager execution."""


class IllegalSchedule(RockplanError):
    """A schedule breaks a rule of `verify`. Always a bug in rockplan, never in the model."""


class SolverError(RockplanError):
    """The solver returned something that is neither a solution nor a proof of infeasibility."""


class StalePlan(RockplanError, RuntimeError):
    """The module or the call no longer matches what was planned, and replanning is off."""


class BackwardError(RockplanError, RuntimeError):
    """The backward pass was asked for something the plan does not hold."""


class PlanFormatError(RockplanError, ValueError):
    """A stored plan, profile or cache entry cannot be read: damaged, foreign or another version."""


class PlanMismatch(StalePlan):
    """A stored plan was made for another graph than the one that it shall run.

    plan_digests: of the graphs that there are plans for; graph_digest: of the model's graph.
    """

    def __init__(
        self, message: str, *, plan_digests: tuple[str, ...] = (), graph_digest: str = ""
    ) -> None:
        super().__init__(message)
        self.plan_digests = plan_digests
        self.graph_digest = graph_digest
