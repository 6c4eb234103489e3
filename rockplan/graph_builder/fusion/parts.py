"""Parts: recorded calls as the operators that the compiler gets.

takes: a Capture. returns: Parts, in the order of the calls. guarantees: a call that can be fused
becomes pointwise operators, reductions and views, by the compiler's own decompositions, and its
results have the recorded specs and storages; every other call is one opaque part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import ViewKind, row_of
from rockplan.graph_builder.operators.symbols import Symbols, known_number
from rockplan.graph_builder.recorded.evaluate import flat_results, substitute
from rockplan.graph_builder.recorded.run import Capture, RecordedCall, RecordedValue, tensor_spec
from rockplan.graph_builder.recorded.specs import new_storage, tensor_in
from rockplan.values.graph import Call, Phase, ValueRef, refs, renamed
from rockplan.values.sizes import text_of, texts_in

_LOGGER = logging.getLogger("rockplan")

Table = Mapping[Any, Callable[..., Any]]
"""Operator -> the function that computes it by simpler ones."""


class PartKind(Enum):
    OPAQUE = "opaque"
    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class OperatorPart:
    """One operator of a run. call: on recorded values, and on further ones between the parts of one
    call; owner: position of the recorded call; is_trigonometric: a sine or cosine, which takes
    long; writes: values that it changes in place."""

    call: Call
    kind: PartKind
    owner: int
    phase: Phase
    is_trigonometric: bool = False
    writes: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(r.index for r in refs(self.call)))

    @property
    def makes(self) -> tuple[int, ...]:
        """Values that the operator makes or changes."""
        return tuple(dict.fromkeys((*self.call.made, *self.writes)))


@dataclass(frozen=True, slots=True)
class Parts:
    """parts: in execution order; values: those of the capture, then those between parts; guards:
    what decompositions decide by sizes."""

    parts: tuple[OperatorPart, ...]
    values: tuple[RecordedValue, ...]
    guards: tuple[str, ...] = ()


def parts_of(capture: Capture, opaque: frozenset[int], table: Table) -> Parts:
    """opaque: positions of calls that must stay unfused; table: operator -> its decomposition."""
    expansion = _Expansion(capture, table)
    for position, recorded in enumerate(capture.calls):
        expansion.add(position, recorded, is_opaque=position in opaque)
    return Parts(tuple(expansion.parts), tuple(expansion.values), expansion.symbols.guards)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# -- the whole run -----------------------------------------------------------------------------


class _Expansion:
    """One walk over the calls; parts of equal calls are computed once."""

    def __init__(self, capture: Capture, table: Table) -> None:
        self.parts: list[OperatorPart] = []
        self.values = list(capture.values)
        self._table = table
        self.symbols = Symbols(capture.numbers_of_symbols)
        is_open = bool(self.symbols.numbers)
        self._fakes = FakeTensorMode(shape_env=self.symbols.env if is_open else None)
        self._run = capture.view
        self._storages = self._run.next_storage
        self._templates: dict[Hashable, _Template | None] = {}

    def add(self, position: int, recorded: RecordedCall, is_opaque: bool) -> None:
        """Append the parts of the call at `position`: those of its template, with values of the run
        in place of local numbers. A call that cannot or must not be fused (`is_opaque`) becomes one
        opaque part."""
        template = None if is_opaque else self._template(position, recorded)
        if template is None:
            kind, phase, writes = PartKind.OPAQUE, recorded.phase, recorded.writes
            self.parts.append(OperatorPart(recorded.call, kind, position, phase, writes=writes))
            return
        names = dict(enumerate(_arguments_of(recorded.call)))
        leaves = zip(template.leaves, recorded.call.results, strict=True)
        names |= {n: r for n, r in leaves if n is not None and r is not None}
        storages = {template.tensors[n].storage: self.values[v].storage for n, v in names.items()}
        for number, made in template.tensors.items():
            if number not in names:
                if made.storage not in storages:
                    storages[made.storage] = self._storages
                    self._storages += 1
                names[number] = len(self.values)
                self.values.append(
                    RecordedValue(made.spec, storages[made.storage], made.storage_bytes)
                )
        for part in template.parts:
            call = renamed(part.call, names.__getitem__, names.__getitem__)
            self.parts.append(
                OperatorPart(call, part.kind, position, recorded.phase, part.is_trigonometric)
            )

    def _template(self, position: int, recorded: RecordedCall) -> _Template | None:
        """None if it cannot be fused."""
        if recorded.writes or not recorded.is_repeatable:
            return None
        # A kernel may read the arguments at any later time: neither they nor the results may be
        # changed in place at or after `position`, and no argument be what the run changes.
        looked_at = _looked_at(recorded.call)
        touched = self._run.storages((*looked_at, *recorded.call.made))
        late = any(self._run.last_change.get(storage, -1) >= position for storage in touched)
        if late or not touched.isdisjoint(self._run.changed_outside):
            return None
        if not self._is_plain(recorded.call):
            return None
        key = self._key(recorded.call)
        if key not in self._templates:
            call = recorded.call
            self._templates[key] = None
            try:
                tracing = _Tracing(self._fakes, self.symbols, self._table, self.values, call)
                traced = tracing.template()
                self._templates[key] = traced
            except _NotFused as reason:
                _LOGGER.debug("not fused: %s: %s", call.op, reason)
            except Exception as error:  # unexpected, but it only costs speed
                what = f"{type(error).__name__}: {error}"
                _LOGGER.warning("%s is not fused: its decomposition raises %s", call.op, what)
        return self._templates[key]

    def _is_plain(self, call: Call) -> bool:
        # For compilers all have elements, are on one device and of supported dtypes, and no result
        # is an argument or another result.
        arguments, made = _arguments_of(call), call.made
        specs = [self.values[v].spec for v in (*arguments, *made)]
        is_new = bool(made) and not set(arguments) & set(made) and len(set(made)) == len(made)
        is_new = is_new and len({s.device for s in specs}) == 1
        unusual = (s.is_conj or s.is_neg or 0 in s.shape or s.dtype not in _DTYPES for s in specs)
        return is_new and not any(unusual)

    def _key(self, call: Call) -> Hashable:
        local = {v: i for i, v in enumerate((*_arguments_of(call), *call.made))}
        storages = [self.values[v].storage for v in local]
        return (
            _typed(renamed(call, local.__getitem__, local.__getitem__)),
            tuple(self.values[v].spec for v in local),
            tuple(text for v in local for text in texts_in(self.values[v].spec)),
            tuple(storages.index(s) for s in storages),
        )


def _arguments_of(call: Call) -> list[int]:
    return list(dict.fromkeys(r.index for r in refs(call)))


def _looked_at(call: Call) -> list[int]:
    ignored = facts.unread_arguments(call.op, call.args)
    args = tuple(a for i, a in enumerate(call.args) if i not in ignored)
    return _arguments_of(Call(call.op, args, call.kwargs, call.results))


def _typed(argument: Any) -> Hashable:
    """Return a hashable key of a call or an argument, which keeps types of numbers: equal numbers
    of different types (1, 1.0, True) promote differently."""
    if isinstance(argument, Call):
        kwargs = tuple((k, _typed(a)) for k, a in argument.kwargs)
        return (argument.op, _typed(argument.args), kwargs, argument.results)
    if isinstance(argument, tuple):
        return tuple(map(_typed, argument))
    is_number = isinstance(argument, int | float)
    return (type(argument), text_of(argument) if is_number else argument)


# -- one call ----------------------------------------------------------------------------------

_POINTWISE = words(
    "_to_copy arange cat clone constant_pad_nd convert_element_type eye fill flip full "
    "full_like gather index iota masked_fill ones repeat scalar_tensor select_scatter "
    "slice_scatter tril triu where zeros"
)
"""Operators that kernels compute element by element, besides those tagged as pointwise."""

REDUCTIONS = words("all amax amin any argmax argmin max mean min prod sum var var_mean")
_TRIGONOMETRIC = words("cos sin")

_DTYPES = frozenset(
    f"torch.{name}"
    for name in words("float32 float64 bfloat16 float16 int64 int32 int16 int8 uint8 bool")
)


class _NotFused(Exception):
    """Raised with the reason why a call cannot be fused."""


@dataclass(frozen=True, slots=True)
class _LocalPart:
    """A part of a template."""

    call: Call
    kind: PartKind
    is_trigonometric: bool


@dataclass(frozen=True, slots=True)
class _Template:
    """Parts of equal calls, with local numbers: first the arguments, then what the parts make.
    leaves: numbers of the results of the call."""

    parts: tuple[_LocalPart, ...]
    tensors: Mapping[int, RecordedValue]
    leaves: tuple[int | None, ...]


class _Tracing:
    """Runs one call on fake tensors, under decompositions."""

    def __init__(
        self,
        fakes: FakeTensorMode,
        symbols: Symbols,
        table: Table,
        values: Sequence[RecordedValue],
        call: Call,
    ) -> None:
        self._fakes = fakes
        self._symbols = symbols
        self._values = values
        self._call = call
        self._arguments = _arguments_of(call)
        # The forward has checked these labels, so a comparison may replace the scatter in the
        # backward of a loss; other indices must be checked by the operator.
        if call.op in _BY_LABEL:
            table = {**table, torch.ops.aten.scatter.value: _compared}
        self._mode = _Decomposing(table, symbols)

    def template(self) -> _Template:
        """Return the parts of the call, recorded while its decomposition runs on fake tensors.
        Raises _NotFused if the call cannot be fused."""
        call, mode = self._call, self._mode
        storages: dict[int, torch.UntypedStorage] = {}
        # The fake mode has to be active: decompositions make scalars. Casts of the caller's
        # autocast were recorded as calls.
        with torch.no_grad(), torch._C._DisableAutocast(), self._fakes:
            fakes = {v: self._fake(v, storages) for v in self._arguments}
            for fake in fakes.values():
                mode.number(fake)
            literals = self._symbols.symbolic((call.args, call.kwargs))
            args = [substitute(a, fakes.__getitem__) for a in literals[0]]
            kwargs = {k: substitute(a, fakes.__getitem__) for k, a in literals[1]}
            with mode:
                made = facts.resolve(call.op)(*args, **kwargs)
            results = flat_results(made)
            if len(results) != len(call.results):
                raise _NotFused("other results than recorded")
            leaves = tuple(
                None if r is None else self._leaf(r, t)
                for r, t in zip(call.results, results, strict=True)
            )
        return _Template(tuple(mode.parts), dict(mode.tensors), leaves)

    def _fake(self, value: int, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        recorded = self._symbols.symbolic(self._values[value])
        if recorded.storage not in storages:
            made = new_storage(recorded.storage_bytes, recorded.spec.device)
            storages[recorded.storage] = made
        return tensor_in(storages[recorded.storage], recorded.spec)

    def _leaf(self, result: int, made: Any) -> int:
        """Return the local number of the tensor that is the call's result `result` (a value of the
        run), with the recorded spec and sharing of storage. made: what the decomposition returned;
        an alias or a clone of it is added if needed. Raises _NotFused if that does not help."""
        if not isinstance(made, torch.Tensor):
            raise _NotFused("a result that is no tensor")
        mode, values = self._mode, self._values
        place = values[result].storage
        bases = [i for i, v in enumerate(self._arguments) if values[v].storage == place]
        number = mode.number(made)
        in_place_of = mode.tensors[number].storage
        if bases and in_place_of != mode.tensors[bases[0]].storage:
            raise _NotFused("no view, where a view was recorded")
        is_shared = any(
            t.storage == in_place_of for n, t in mode.tensors.items() if n < len(self._arguments)
        )
        if bases and number < len(self._arguments):
            with mode:
                number = mode.number(torch.ops.aten.alias.default(made))
        elif not bases and (is_shared or number in mode.leaves):
            with mode:
                number = mode.number(torch.ops.aten.clone.default(made))
        mode.leaves.add(number)
        if mode.tensors[number].spec != values[result].spec:
            raise _NotFused(f"{mode.tensors[number].spec} where {values[result].spec} was recorded")
        return number


class _Decomposing(TorchDispatchMode):
    """Records the operators that calls decompose into. tensors: all tensors met, by number."""

    def __init__(self, table: Table, symbols: Symbols) -> None:
        super().__init__()
        self._symbols = symbols
        self.parts: list[_LocalPart] = []
        self.tensors: dict[int, RecordedValue] = {}
        self.leaves: set[int] = set()
        self._table = table
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []
        self._storages: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        number = self._numbers[id(tensor)] = len(self.tensors)
        storage = tensor.untyped_storage()
        self._alive += [tensor, storage]
        place = self._storages.setdefault(storage._cdata, len(self._storages))
        made = RecordedValue(tensor_spec(tensor), place, known_number(storage.nbytes()))
        self.tensors[number] = self._symbols.recorded(made)
        return number

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator by its decomposition, whose operators come here in turn; record it as a
        part if it has none. Raises _NotFused."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload) or func._schema.is_mutable:
            raise _NotFused(f"{func} changes something, or takes functions")
        if row_of(str(func)).view is ViewKind.SAME_VALUE:
            func, kwargs = torch.ops.aten.alias.default, {}
        if func in self._table and not facts.facts_of(func).matrix_product:
            with self:
                result = self._table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._can_decompose() and func is not torch.ops.aten.alias.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._record(func, args, kwargs)

    def _record(self, func: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> Any:
        # If not, it need not run on fake tensors, for which operators of other libraries may have
        # no rule.
        is_view = any(r.alias_info is not None for r in func._schema.returns)
        if not (is_view or _is_pointwise(func) or _packet(func) in REDUCTIONS):
            raise _NotFused(f"{func}")
        operands = [self._known(t) for t in facts.tensors((args, kwargs))]
        with self._symbols.dispatched():
            result = func(*args, **kwargs)
        made = [m for m in flat_results(result) if isinstance(m, torch.Tensor)]
        if len(made) != len(flat_results(result)):
            raise _NotFused(f"{func} makes no tensor")
        numbers = [self.number(m) for m in made]
        if set(numbers) & set(operands):
            raise _NotFused(f"{func} returns an argument")
        shared = {self.tensors[n].storage for n in operands}
        kind = self._kind(
            func, args, operands, [self.tensors[n].storage in shared for n in numbers]
        )

        def named(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                return ValueRef(self.number(argument))
            is_sequence = isinstance(argument, list | tuple)
            known = tuple(map(named, argument)) if is_sequence else known_number(argument)
            return self._symbols.recorded(known)

        by_name = tuple((k, named(a)) for k, a in kwargs.items())
        call = Call(str(func), named(args), by_name, tuple(numbers))
        self.parts.append(_LocalPart(call, kind, _packet(func) in _TRIGONOMETRIC))
        return result

    def _known(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            raise _NotFused("a tensor that no operator made")
        return self._numbers[id(tensor)]

    def _kind(
        self, func: OpOverload, args: facts.Args, operands: Sequence[int], is_shared: Sequence[bool]
    ) -> PartKind:
        """Return whether an operator is a view, a reduction or pointwise. Raises _NotFused for one
        that kernels do not compute as eager does. operands: local numbers of its tensor arguments;
        is_shared: for each result whether it shares the storage of an operand."""
        if any(is_shared):
            is_other = row_of(str(func)).view is ViewKind.OTHER_NUMBERS
            if not all(is_shared) or is_other or _packet(func) in _BY_MEMORY:
                raise _NotFused(f"{func} depends on memory")
            return PartKind.VIEW
        packet = _packet(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NotFused(f"{func} draws")
        if packet == "index" and any(
            t.dtype in (torch.bool, torch.uint8) for t in facts.tensors(args[1])
        ):
            raise _NotFused("an index by a mask")
        if packet in _EXACT and len(set(operands)) == 2 and _are_floating(args):
            raise _NotFused(f"{func} of numbers that a kernel rounds otherwise than what is stored")
        if packet == "nextafter":
            raise _NotFused(f"{func}, which is of the digits that are stored")
        if packet in _ANY and args[0].dtype is torch.uint8:
            raise _NotFused(f"{func} of uint8, which compilers make of bool")
        is_whole = packet in _DIVISIONS and not (isinstance(args[1], float) or _are_floating(args))
        if is_whole and (isinstance(args[1], torch.Tensor) or args[1] == 0):
            raise _NotFused(f"{func}, which eager refuses for zero")
        if packet in REDUCTIONS:
            return PartKind.REDUCTION
        if _is_pointwise(func):
            return PartKind.POINTWISE
        raise _NotFused(f"{func}")


_EXACT = frozenset(["eq", "ne"])
"""Comparisons by which gradients find the position of a maximum: a kernel that recomputes one of
the two operands without its rounding, or sums in another order, finds none."""

_ANY = frozenset(["all", "any"])

_DIVISIONS = frozenset(["div", "floor_divide", "fmod", "remainder"])

_BY_MEMORY = frozenset(["as_strided", "view_as_complex", "view_as_real", "real", "imag"])
"""Views that depend on the memory layout of the viewed tensor, not only on its elements."""


def _is_pointwise(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags or _packet(func) in _POINTWISE


_BY_LABEL = frozenset(["aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"])


def _compared(table: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> Any:
    """Replace `aten.scatter.value` (`table.scatter(dim, index, value)`) by a comparison of
    positions with the index, which needs no table in memory. Return NotImplemented unless the index
    has size 1 in `dim` and the table's size elsewhere."""
    dim %= table.dim()
    shape = [1] * table.dim()
    shape[dim] = -1
    if [*index.shape] != [*table.shape[:dim], 1, *table.shape[dim + 1 :]]:
        return NotImplemented
    places = torch.arange(table.shape[dim], device=table.device).view(shape)
    return torch.where(index == places, value, table)


def _are_floating(arguments: Any) -> bool:
    return any(t.is_floating_point() for t in facts.tensors(arguments))


def _packet(operator: OpOverload) -> str:
    return str(operator.name()).split("::")[-1].split(".")[0]
