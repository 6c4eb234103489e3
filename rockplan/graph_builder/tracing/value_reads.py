"""Reads: values of tensors that Python reads while a forward is recorded (`.item()`, `print`).

takes: a recorder, and the real tensors of the caller. guarantees: a read returns what it returns in
eager execution, and a guard compares it before each later call; a value that is not known before
the call is refused, with what it depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import CaptureError
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import row_of
from rockplan.graph_builder.operators.symbols import known_number
from rockplan.graph_builder.recorded import evaluate
from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing import value_shapes
from rockplan.graph_builder.tracing.free_sizes import FreeSizes
from rockplan.graph_builder.tracing.recorder import OUTSIDE, Recorder
from rockplan.graph_builder.tracing.refusals import DECIDED, DRAWN, NAMED
from rockplan.graph_builder.tracing.source_lines import (
    Where,
    frames,
    of_experts,
    of_function,
    torch_function,
)
from rockplan.python_state.contents import is_same
from rockplan.values.graph import Call, Phase, ValueRef, value_refs
from rockplan.values.interface import Guard
from rockplan.values.sizes import Size, texts_in


@dataclass(frozen=True, slots=True)
class _Handed:
    """A tensor whose values Python got: a real copy, and the bits that it had."""

    tensor: torch.Tensor
    bits: torch.Tensor
    where: Where


class ValueReader:
    """Answers Python's reads of tensor values (`.item()`, `bool(tensor)`, `.tolist()`).

    free: makes symbols of counts. inputs: values that are arguments of the call. `_known`: integer
    arguments, `_buffers`: integer buffers, `_numbers`: small floating-point arguments, each value
    -> (position, real tensor).
    """

    def __init__(self, free: FreeSizes | None = None) -> None:
        self._free = free
        self._counts: dict[str, Any] = {}
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        self._buffers: dict[int, tuple[int, torch.Tensor]] = {}
        self._numbers: dict[int, tuple[int, torch.Tensor]] = {}
        self.inputs: frozenset[int] = frozenset()
        self._names: dict[int, str] = {}
        self._handed: list[_Handed] = []

    def start(
        self,
        inputs: dict[int, tuple[int, torch.Tensor]],
        parameters: Iterable[tuple[str, int]],
        buffers: Sequence[tuple[str, int]],
        real_buffers: Sequence[torch.Tensor],
    ) -> None:
        """inputs: value -> (leaf position, real tensor); parameters, buffers: (name, value);
        real_buffers: in the order of `buffers`."""
        for value, (position, tensor) in inputs.items():
            if _is_integer(tensor):
                self._known[value] = position, tensor
            elif tensor.ndim <= 1 and tensor.numel() <= _FEW and not tensor.requires_grad:
                self._numbers[value] = position, tensor
        for position, ((_, value), tensor) in enumerate(zip(buffers, real_buffers, strict=True)):
            if _is_integer(tensor):
                self._buffers[value] = position, tensor
        self.inputs = frozenset(inputs)
        self._names = {v: f"{_ARGUMENT}{i} of the arguments" for v, (i, _) in inputs.items()}
        self._names |= {v: f"{_BUFFER} '{name}'" for name, v in buffers}
        self._names |= {v: f"the parameter '{name}'" for name, v in parameters}

    def read(self, recorder: Recorder, call: Call, where: Where) -> object:
        """Return the Python value that a call reads from a tensor; later calls compare it. Raises
        CaptureError for a value that is not known before the call."""
        read_values = [ref.index for ref in value_refs(call.args)]
        before = evaluate.prefix(recorder.calls, recorder.values, read_values)
        more = ""
        if not before.leaves and any(c.random for c in before.recorded):
            outcomes = _outcomes(before.calls, call)
            if len(set(outcomes)) == 1:
                return outcomes[0]
            more = _ALL_BUT_ONE if len(set(outcomes[1:])) == 1 else ""
        numbers = self._numbers.keys() if _is_question(recorder, call) else frozenset[int]()
        environment = self._environment(recorder, before, where, more, numbers)
        expected = evaluate.execute(call, environment)
        return self._guard(recorder, before.calls, call, expected, before.leaves, where)

    def read_all(self, recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real copy of `tensor`, whose values Python gets. Later calls compare their bits.
        Raises CaptureError if they are not known before the call."""
        where = recorder.place()
        value = recorder.value(recorder.known_tensor(tensor))
        recorder.refuse_unwritten([value], f"Python at {where[1]} reads")
        before = evaluate.prefix(recorder.calls, recorder.values, [value])
        known = self._environment(recorder, before, where, _OF_ARRAYS)[value]
        with _disable_current_modes(), torch.no_grad():
            handed = _Handed(known, _bits(known).clone(), where)
        self._handed.append(handed)
        if before.leaves or texts_in(before.calls):
            kept = recorder.value(recorder.known_tensor(handed.bits))
            as_bits = len(recorder.values)
            bits = Call("aten.view.dtype", (ValueRef(value), handed.bits.dtype), (), (as_bits,))
            equal = Call("aten.equal.default", (ValueRef(as_bits), ValueRef(kept)), (), ())
            leaves = before.leaves | {kept}
            self._guard(recorder, (*before.calls, bits), equal, True, leaves, where)
        return known

    def is_of_constants(self, recorder: Recorder, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` depends only on constants that nothing changes."""
        before = evaluate.prefix(recorder.calls, recorder.values, [recorder.value(tensor)])
        changed = {recorder.values[v].storage for c in before.recorded for v in c.writes}
        kept = {v for v in before.leaves if recorder.values[v].storage not in changed}
        return before.is_repeatable and before.leaves <= dict(recorder.constants).keys() & kept

    def _environment(
        self,
        recorder: Recorder,
        before: evaluate.Prefix,
        where: Where,
        more: str,
        numbers: Set[int] = frozenset(),
    ) -> dict[int, torch.Tensor]:
        """Return value -> real tensor for what the calls of `before` take and make. Raises the
        refusal of the read if these differ between calls and cannot be compared before a call.
        more: a further remedy; numbers: floating-point inputs that are compared."""
        unknown = self._unknown(recorder, before, numbers)
        if unknown is not None:
            is_backward = recorder.phase is Phase.BACKWARD
            calls = before.recorded
            recorder.refuse(_value_read_error(calls, unknown, is_backward, where, more))
        return self._run(recorder, before.calls, before.leaves)

    def _unknown(
        self, recorder: Recorder, before: evaluate.Prefix, numbers: Set[int] = frozenset()
    ) -> list[str] | None:
        """Return names of those leaves that may differ between calls and cannot be compared before
        a call (unnamed ones are left out); None if there are none, and no draws or side effects
        among the calls. numbers: floating-point inputs that are compared."""
        changed = {recorder.values[v].storage for c in before.recorded for v in c.writes}
        known = {v for v in before.leaves if recorder.values[v].storage not in changed}
        known &= self._known.keys() | self._buffers.keys() | numbers | {*dict(recorder.constants)}
        if known == before.leaves and before.is_repeatable:
            return None
        return [self._names[v] for v in sorted(before.leaves - known) if v in self._names]

    def _run(
        self, recorder: Recorder, calls: Sequence[Call], leaves: frozenset[int]
    ) -> dict[int, torch.Tensor]:
        readable = {**self._known, **self._numbers, **self._buffers}
        known = {v: tensor for v, (_, tensor) in readable.items()} | dict(recorder.constants)
        return evaluate.run(calls, _copies(known, leaves))

    def shaped(
        self,
        recorder: Recorder,
        func: OpOverload,
        args: Any,
        kwargs: Any,
        where: Where,
        unsized: Any,
    ) -> Any:
        """Return the fake result of a call whose result shape depends on values that are known
        before the call; guards require the same sizes at each later call, or define them. unsized:
        the result with unknown sizes, None where sizes are no symbols. Raises CaptureError if the
        values are unknown, or it is unknown which values decide."""
        rule = value_shapes.rule_of(func, args, kwargs)
        deciding = [] if rule is None else [recorder.value(t) for t in rule.deciding]
        read_values = deciding or [recorder.value(t) for t in facts.tensors((args, kwargs))]
        before = evaluate.prefix(recorder.calls, recorder.values, read_values)
        unknown = self._unknown(recorder, before)
        if rule is None or not deciding or unknown is not None:
            raise _shape_error(func, before.recorded, unknown or [], where)
        environment = self._run(recorder, before.calls, before.leaves)
        real = {id(t): environment[v] for t, v in zip(rule.deciding, deciding, strict=True)}
        free = max((*deciding, *(v for c in before.calls for v in c.made))) + 1
        counts = []
        for size in rule.sizes(deciding, free):
            expected = evaluate.execute(size.read, evaluate.run(size.calls, environment))
            calls, leaves = (*before.calls, *size.calls), before.leaves
            counts.append(self._guard(recorder, calls, size.read, expected, leaves, where))
        result = value_shapes.result(func, args, kwargs, real)
        return value_shapes.sized(result if unsized is None else unsized, result, counts)

    def _guard(
        self,
        recorder: Recorder,
        calls: tuple[Call, ...],
        read: Call,
        expected: object,
        leaves: frozenset[int],
        where: Where,
    ) -> object:
        """Add a guard to the recorder, unless it has the same: `read` after `calls` must give
        `expected` from `leaves`. Without leaves and sizes nothing can differ: none is added. Return
        `expected`, or the symbol in its place."""
        if not (leaves or texts_in((calls, read))):
            return expected
        given = self._known | self._numbers
        inputs = tuple((v, given[v][0]) for v in sorted(leaves & given.keys()))
        used = tuple((v, i) for i, (v, _) in enumerate(recorder.constants) if v in leaves)
        buffers = tuple((v, self._buffers[v][0]) for v in sorted(leaves & self._buffers.keys()))
        guard = Guard(calls, read, expected, inputs, used, *where, buffers)
        known = next((g for g in recorder.guards if g == guard), None)
        if known is None:
            number = expected
            if self._free is not None and not guard.is_of_sizes:
                place = sum(not g.is_of_sizes for g in recorder.guards)
                number = self._free.count(place, expected)
            known = replace(guard, expected=known_number(number))
            recorder.guards.append(known)
            if isinstance(known.expected, Size):
                self._counts[known.expected.text] = number
        expected = known.expected
        return self._counts[expected.text] if isinstance(expected, Size) else expected

    def refuse_another_call(self, recorder: Recorder) -> None:
        """Raise CaptureError if the run changes a buffer from which Python has read a value, and
        the next call would read another."""
        changed = {recorder.values[v].storage for c in recorder.calls for v in c.writes}
        for guard in recorder.guards:
            written = [v for v, _ in guard.buffers if recorder.values[v].storage in changed]
            if written and not self._is_read_again(recorder, guard, written):
                raise NAMED["another next call"].error(
                    module_path=guard.module,
                    of=f"in module '{guard.module or '(root)'}' at {guard.source}",
                    place=self._names[written[0]],
                )

    def _is_read_again(self, recorder: Recorder, guard: Guard, written: Sequence[int]) -> bool:
        before = evaluate.prefix(recorder.calls, recorder.values, written)
        known = self._known.keys() | self._buffers.keys() | dict(recorder.constants).keys()
        if before.leaves - known or not before.is_repeatable:
            return False
        changed = self._run(recorder, before.calls, before.leaves | frozenset(written))
        others = [v for v, _ in (*guard.inputs, *guard.constants, *guard.buffers)]
        environment = self._run(recorder, (), frozenset(others))
        environment |= {v: changed[v] for v in written}
        return is_same(
            evaluate.execute(guard.read, evaluate.run(guard.calls, environment)), guard.expected
        )

    def refuse_writes(self) -> None:
        """Raise if the forward has written into values that Python got: in eager execution the
        array of a tensor is its memory."""
        for handed in self._handed:
            with _disable_current_modes(), torch.no_grad():
                same = torch.equal(_bits(handed.tensor), handed.bits)
            if not same:
                raise NAMED["memory of an array"].at(*handed.where)

    def samples(self, recorder: Recorder) -> dict[int, torch.Tensor]:
        """Return value -> real tensor for integer inputs, constants and what these determine.
        Values in storages that were later overwritten with unknown content are left out."""
        known = {v: t for v, (_, t) in self._known.items()} | dict(recorder.constants)
        known = _copies(known, frozenset(known))
        computable: list[Call] = []
        available = set(known)
        poisoned: set[int] = set()
        for recorded in recorder.calls:
            read = set(recorded.reads)
            storages = {recorder.values[v].storage for v in (*read, *recorded.writes)}
            is_known = recorded.is_repeatable and read <= available
            if not is_known or storages & poisoned:
                poisoned |= {recorder.values[v].storage for v in recorded.writes}
                continue
            computable.append(recorded.call)
            available.update(recorded.call.made)
        return {
            v: t
            for v, t in evaluate.run(computable, known).items()
            if v in known or recorder.values[v].storage not in poisoned
        }


_FEW = 1024
"""Most elements of a floating-point input on which a bool may depend: it is recomputed before each
call."""


def _is_question(recorder: Recorder, read: Call) -> bool:
    dtypes = {recorder.values[ref.index].spec.dtype for ref in value_refs(read.args)}
    return read.op == "aten.equal.default" or dtypes == {"torch.bool"}


_DRAWS = (0.0, 2.0**-24, 1.0 - 2.0**-24)
"""Smallest, second smallest and largest number that torch.rand draws."""

_ALL_BUT_ONE = (
    ". The outcome is the same for all draws but 0 itself: a share below 0 (`module_dropout=-1.0` "
    "of peft) is never dropped, and planned"
)


def _outcomes(calls: Sequence[Call], read: Call) -> tuple[bool, ...]:
    """Return the outcomes of a comparison of `torch.rand([])` with a number, one for each of
    `_DRAWS`. The comparison is monotone, so these show whether it is the same for every draw (a
    layer drop of zero). Empty for any other read."""
    draw, *rest = calls
    if draw.op != "aten.rand.default" or not all(row_of(c.op).monotone for c in rest):
        return ()
    drawn = draw.results[0]
    assert drawn is not None
    outcomes: list[bool] = []
    for end in _DRAWS:
        with _disable_current_modes():
            value = torch.tensor(end)
        outcomes.append(bool(evaluate.execute(read, evaluate.run(rest, {drawn: value}))))
    return tuple(outcomes)


def _copies(known: dict[int, torch.Tensor], wanted: frozenset[int]) -> dict[int, torch.Tensor]:
    # With equal strides: evaluated calls may write in place.
    with _disable_current_modes(), torch.no_grad():
        return {
            v: t.new_empty(0).set_(
                t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride()
            )
            for v, t in known.items()
            if v in wanted
        }


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, if there are any of that size: NaNs are equal, 0 and -0 are not."""
    return tensor.view(_INTEGERS.get(tensor.element_size(), tensor.dtype))


# Errors: a message names what the value depends on, which code reads it, and a remedy there

# Parts of a message on what a value depends on: words without a name, prefixes, how many names.
_CHANGED = "a value that the forward has changed in place"
_BUFFER = "the buffer"
_ARGUMENT = "leaf "
_NAMED = 3
# Prefix of the name of a function on the stack -> its own remedy.
_REMEDIES = {
    "torch.nn.modules.batchnorm._BatchNorm.forward": (
        "With momentum=None it divides by the number of batches so far: give it a momentum"
    ),
    "torch.distributions.": (
        "torch.distributions checks its arguments like this: pass it validate_args=False"
    ),
    "torchdiffeq._impl.solvers.AdaptiveStepsizeODESolver.": (
        "A method with adaptive steps asks how large its error is: take one with fixed steps "
        "(method='rk4')"
    ),
}
# Further remedy for code that gets an array.
_OF_ARRAYS = (
    "; a function that computes with the array (numpy, scipy, numba) can be planned as an operator "
    "(torch.library.custom_op with register_fake and register_autograd)"
)


def _value_read_error(
    calls: Sequence[RecordedCall],
    names: Sequence[str],
    is_backward: bool,
    where: Where,
    further: str,
) -> CaptureError:
    """calls: those that the value depends on; names: parameters, buffers and inputs that it depends
    on; is_backward: read in the backward pass; further: a remedy."""
    what = f"a value that depends on {_listed(names)}"
    if not names:
        what = "a value of the backward pass (a gradient)" if is_backward else _CHANGED
    function = torch_function()
    who = f"the function of PyTorch {function}" if function else "Python (or a function of PyTorch)"
    remedy = NAMED["value"].remedy
    if function:
        remedy = OUTSIDE
    remedy += _of_the_callers(names)
    is_drawn = not names and any(c.random for c in calls)
    what = (_of_outside(calls) if is_drawn or not any(c.random for c in calls) else "") or what
    if is_drawn:
        remedy += (
            f"; or {DRAWN}; where layers are dropped at random, set their share to 0 (layerdrop)"
        )
    remedy = f"{_known_remedy() or remedy}{further}{of_function()}{of_experts()}"
    return NAMED["value"].at(*where, who=who, what=what, remedy=remedy)


def _of_outside(calls: Sequence[RecordedCall]) -> str:
    # A draw, or the result of an operator with side effects.
    if any(c.random for c in calls):
        return "a random draw"
    acting = next((c.call.op for c in calls if c.effect), "")
    return f"what {acting} returns, which is not called before the step" if acting else ""


def _shape_error(
    operator: OpOverload, calls: Sequence[RecordedCall], names: Sequence[str], where: Where
) -> CaptureError:
    """calls, names: what the values depend on that decide the shape."""
    function = torch_function()
    if function:
        remedy = f"It is called by {function}. {OUTSIDE}"
    else:
        remedy = "Replace it by a masked operation (torch.where, multiplication by the mask)"
    what = f"the values of {_listed(names)}" if names else "the values of its input"
    what = _of_outside(calls) or what
    remedy = f"{remedy}{_of_the_callers(names)}{of_function()}{of_experts()}"
    return NAMED["shape"].at(*where, operator=operator, what=what, remedy=remedy)


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if names[_NAMED:] else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _of_the_callers(names: Sequence[str]) -> str:
    """If all names are arguments, or arguments and buffers; else ''."""
    remedy = ""
    if names and all(name.startswith(_ARGUMENT) for name in names):
        remedy = f"; or decide before the call, and pass in what was decided {DECIDED}"
    if names and all(name.startswith((_ARGUMENT, _BUFFER)) for name in names):
        remedy += (
            "; a table that stays as it is can be a plain attribute of the module in place of "
            "that: its values are compared at every call"
        )
    return remedy


def _known_remedy() -> str:
    for frame in frames():
        called = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
        for prefix, remedy in _REMEDIES.items():
            if called.startswith(prefix):
                return remedy
    return ""
