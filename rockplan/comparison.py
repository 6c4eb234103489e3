"""Compare: eager, PyTorch's own checkpointing and rockplan on one model, measured in one run.

takes: a module, a sample, budgets. returns: Comparison. guarantees: all variants run the same step
from the same parameters, buffers and generator state; peaks are those of the ruler; times are
interleaved, one of each variant per round; a variant that refuses, fails or computes other values
has a row that says so. All is left as it was (`untouched`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockplan.api import solve
from rockplan.budget import Budget, parse_budget
from rockplan.errors import InvalidInput, RockplanError
from rockplan.graph_builder.costs.ruler import peak_live_bytes
from rockplan.graph_builder.tracing.refusals import refuse_without_memory
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.reports.pictures import Series
from rockplan.runtime import checkpointing
from rockplan.runtime.planned_state import plan_of, unplanned
from rockplan.solving.captured_calls import arguments
from rockplan.solving.free_memory import in_bytes
from rockplan.solving.loss import Loss
from rockplan.solving.side_by_side import (
    device_of,
    interleaved_seconds,
    machine,
    median_ratio,
    step_of,
)
from rockplan.solving.untouched import untouched
from rockplan.values.columns import aligned
from rockplan.values.plan import format_bytes
from rockplan.values.progress import report

OneBudget = int | float | str | Budget

SEED = 0
"""Seed of the step whose gradients and buffers are compared."""
EQUAL = "equal bit for bit"


@dataclass(frozen=True, slots=True)
class Row:
    """One variant.

    budget_bytes, predicted_peak_bytes, predicted_overhead, gap: of a plan, else None. peak_bytes:
    measured by the ruler; None if the variant did not run. times_ns: one per round; overhead:
    median over rounds of time / eager's time of the round, less 1; quartiles: the middle half of
    these overheads. gradients, buffers: of one step from the same state, 'equal bit for bit', or
    what differs from eager; buffers: '' if the model has none. Where eager did not run, the first
    variant that did stands for it. note: why this one did not run.
    """

    name: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None
    gap: float | None = None
    peak_bytes: int | None = None
    times_ns: tuple[int, ...] = ()
    overhead: float | None = None
    quartiles: tuple[float, float] | None = None
    gradients: str = ""
    buffers: str = ""
    note: str = ""
    minimum_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows, eager first; `machine` says where they were measured, `rounds` how often each was
    timed."""

    rows: tuple[Row, ...]
    machine: str
    rounds: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        head = ("variant", "peak", "predicted", "time", "middle half", "gradients, buffers")
        table = [head, *(_cells(row) for row in self.rows)]
        return "\n".join([*aligned(table), f"{self.machine}; {self.rounds} interleaved rounds"])


def _cells(row: Row) -> tuple[str, ...]:

    def size(amount_bytes: int | None) -> str:
        return "" if amount_bytes is None else format_bytes(amount_bytes)

    spread = "" if row.quartiles is None else "{:+.1%} to {:+.1%}".format(*row.quartiles)
    overhead = "" if row.overhead is None else f"{row.overhead:+.1%}"
    differing = [t for t in (row.gradients, row.buffers) if t not in ("", EQUAL)]
    remark = row.note or "; ".join(differing) or row.gradients
    return row.name, size(row.peak_bytes), size(row.predicted_peak_bytes), overhead, spread, remark


def compare(
    model: nn.Module,
    sample_input: object,
    budgets: OneBudget | Sequence[OneBudget] = ("min", "25%", "50%", "75%"),
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    compile_budgets: Sequence[float] = (),
    rounds: int = 7,
    options: Options = DEFAULT_OPTIONS,
) -> Comparison:
    """Measure peak and time of one forward and backward of `model`, planned and with its
    alternatives.

    Arguments as for `solve`; of a planned module, the original is compared. budgets: one, or
    several, each of which has a row. loss: computes the loss from the result, and its memory is
    measured too; None: backward starts from the leaves that a plan assumes (the loss; without one,
    all tensors), with the same random gradients for all variants. compile_budgets: ratios for
    torch.compile with `activation_memory_budget`, which needs its compilers. rounds: how often each
    variant is timed. Raises InvalidInput; an error within a variant is reported in its row, unless
    there is one in each.
    """
    args, kwargs = arguments(model, sample_input, sample_kwargs)
    refuse_without_memory(model)
    model = unplanned(model)
    if not all(0 <= ratio <= 1 for ratio in compile_budgets):
        raise InvalidInput(f"compile_budgets is {compile_budgets!r}; ratios are from 0 to 1")
    wanted = _readable(budgets, model)
    makers = _makers(model, args, kwargs, wanted, compile_budgets, options)
    step = functools.partial(step_of, args=args, kwargs=kwargs, loss=loss, incoming={})
    written = _written(model, args, kwargs, loss)
    with untouched(model, args, kwargs, loss, written) as held:
        rows: dict[str, Row] = {}
        steps: dict[str, Callable[[], object]] = {}
        expected: _StepOutcome | None = None
        for name, make in makers.items():
            report(f"measuring {name}")
            try:
                module = make()
                run = functools.partial(step, module)
                held.put_back()
                state = _state_after(model, (*module.buffers(), *written), run)
                expected = expected or state
                peak_bytes = peak_live_bytes(run, device=device_of(model)).peak_bytes
            except (checkpointing.NotApplicable, RockplanError) as error:
                least_bytes = getattr(error, "minimum_bytes", None)
                rows[name] = Row(name, note=f"does not apply: {error}", minimum_bytes=least_bytes)
            except Exception as error:  # a variant may raise anything: its row reports it
                reason = " ".join(str(error).partition("\n\n")[0].split())
                rows[name] = Row(name, note=f"fails: {type(error).__name__}: {reason}")
            else:
                steps[name] = run
                rows[name] = _row(name, module, peak_bytes, state, expected)
        report("timing")
        times = interleaved_seconds(steps, rounds, device=device_of(model))
    if not times:
        raise InvalidInput(f"no variant runs on these arguments; eager {rows['eager'].note}")
    # Eager may need more memory than there is, which is why people compare.
    reference = next(iter(times.values()))
    timed = [_timed(row, times.get(name), reference) for name, row in rows.items()]
    return Comparison(tuple(timed), machine(device_of(model)), rounds)


def measured_series(comparison: Comparison) -> tuple[Series, ...]:
    """Return the measurements as series for `rockplan.draw_curve`: rockplan's budgets, as a line if
    there are several, and a mark for each other variant that ran."""
    ours: list[tuple[int, float]] = []
    others: list[Series] = []
    for row in comparison.rows:
        if row.peak_bytes is None or row.overhead is None:
            continue
        point = (row.peak_bytes, row.overhead)
        if row.budget_bytes is None:
            others.append(Series(f"{row.name} (measured)", (point,)))
        else:
            ours.append(point)
    return (Series("rockplan (measured)", tuple(sorted(ours)), connected=len(ours) > 1), *others)


def _readable(budgets: OneBudget | Sequence[OneBudget], model: nn.Module) -> tuple[OneBudget, ...]:
    given: Any = budgets
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    several: tuple[OneBudget, ...] = (given,) if is_one else tuple(given)
    for budget in several:
        in_bytes(parse_budget(budget), model)
    return several


def _makers(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    budgets: Sequence[OneBudget],
    compile_budgets: Sequence[float],
    options: Options,
) -> dict[str, Callable[[], nn.Module]]:

    def planned(budget: OneBudget) -> nn.Module:
        return solve(
            checkpointing.sharing_copy(model), args, budget, sample_kwargs=kwargs, options=options
        )

    makers: dict[str, Callable[[], nn.Module]] = {
        "eager": lambda: checkpointing.sharing_copy(model),
        "checkpoint per block": lambda: checkpointing.per_block(model),
        "checkpoint_sequential": lambda: checkpointing.sequential(model),
        "selective, saves matmuls": lambda: checkpointing.selective(model),
    }
    makers |= {f"compile {r}": functools.partial(_Compiled, model, r) for r in compile_budgets}
    return makers | {f"rockplan {b}": functools.partial(planned, b) for b in budgets}


class _Compiled(nn.Module):
    """A copy of a model that is compiled under an activation_memory_budget."""

    def __init__(self, model: nn.Module, ratio: float) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.compiled: Any = torch.compile(checkpointing.sharing_copy(model))
        self.ratio = ratio

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=self.ratio):
            return self.compiled(*args, **kwargs)


def _written(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None
) -> tuple[torch.Tensor, ...]:
    """Codebooks, momentum encoders: found by a step of its own; () if that step fails."""
    with untouched(model, args, kwargs, loss) as watched, contextlib.suppress(Exception):
        step_of(checkpointing.sharing_copy(model), args=args, kwargs=kwargs, loss=loss, incoming={})
    return watched.written


_StepOutcome = Mapping[str, tuple[torch.Tensor | None, ...]]
"""'gradients' of parameters and 'buffers', all else that a step writes to, after it."""


def _state_after(
    model: nn.Module, changing: Iterable[torch.Tensor], run: Callable[[], object]
) -> _StepOutcome:
    """The gradients stay in `.grad`, so that their memory exists."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(SEED)
    run()
    gradients = (parameter.grad for parameter in model.parameters())
    return {
        "gradients": tuple(None if g is None else g.clone() for g in gradients),
        "buffers": tuple(t.detach().clone() for t in changing if t.layout is torch.strided),
    }


def _difference(
    what: str, tensors: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> str:
    different = 0
    largest = 0.0
    for a, b in zip(tensors, expected, strict=True):
        if a is None or b is None:
            different += a is not b
        elif not torch.equal(a, b):
            different += 1
            scale = max(float(b.abs().max()), torch.finfo(torch.float32).tiny)
            largest = max(largest, float((a - b).abs().max()) / scale)
    if not different:
        return EQUAL if expected else ""
    return f"{different} of {len(expected)} {what} differ, by up to {largest:.1e} of the largest"


def _row(
    name: str, module: nn.Module, peak_bytes: int, outcome: _StepOutcome, expected: _StepOutcome
) -> Row:
    gradients, buffers = (_difference(k, outcome[k], expected[k]) for k in ("gradients", "buffers"))
    row = Row(name, peak_bytes=peak_bytes, gradients=gradients, buffers=buffers)
    if not name.startswith("rockplan"):
        return row
    plan = plan_of(module)
    return dataclasses.replace(
        row,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        predicted_overhead=plan.overhead,
        gap=plan.certificate.gap,
    )


def _timed(row: Row, seconds: Sequence[float] | None, eager_seconds: Sequence[float]) -> Row:
    """None if the variant did not run: the row is unchanged."""
    if seconds is None:
        return row
    ratios = [a / b - 1 for a, b in zip(seconds, eager_seconds, strict=True)]
    cuts = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return dataclasses.replace(
        row,
        times_ns=tuple(round(t * 1e9) for t in seconds),
        overhead=median_ratio(seconds, eager_seconds) - 1,
        quartiles=(cuts[0], cuts[2]),
    )
