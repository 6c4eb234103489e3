"""Free sizes: dimensions of arguments that are symbols while a forward is recorded.

takes: how the arguments of an earlier call lay in memory, and what Python read from its values;
those of this one. returns: fake tensors whose differing dimensions are SymInts of one ShapeEnv, and
SymInts in place of differing counts; afterwards the symbols and what must hold of them
(`values.sizes`). guarantees: a choice by a size that PyTorch sees is a guard; one that it cannot
see (`isinstance(n, int)`, `str(n)`) either makes the size a constant, or is found where the run is
compared with static ones (`solving.open_sizes`).
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch._decomp.decompositions import matmul
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _pop_mode_temporarily

from rockplan.errors import CaptureError
from rockplan.graph_builder.operators.layouts import dense_strides, outermost_first
from rockplan.graph_builder.operators.symbols import new_env, new_symbol, printed
from rockplan.graph_builder.tracing.patches import exchanged
from rockplan.python_state.memory import memory_of
from rockplan.values.sizes import (
    CallSizes,
    Layout,
    Place,
    Sizes,
    Symbol,
    is_count,
    is_usual,
)


class StaticSizes(CaptureError):
    """The sizes in which two calls differ cannot be left open. fixed: those of this call that the
    forward makes constants; ranges: of sizes that this one is recorded for, but not the other;
    is_of_pair: other sizes may be open."""

    def __init__(
        self,
        message: str,
        fixed: tuple[Place, ...] = (),
        ranges: tuple[Sizes, ...] = (),
        is_of_pair: bool = False,
    ) -> None:
        super().__init__(message)
        self.fixed, self.ranges = fixed, ranges
        self.is_of_pair = is_of_pair or bool(fixed or ranges)


class FreeSizes:
    """The symbols of one recording. leaves: of (args, kwargs); earlier: of another call; dimensions
    in which that differs become symbols, one for all that are equal in both calls, and so do
    numbers among the leaves and counts."""

    def __init__(self, leaves: Sequence[Any], earlier: CallSizes) -> None:
        self.env = new_env()
        self._earlier = {id(leaves[i]): (i, layout) for i, layout in earlier.layouts.items()}
        self._numbers, self._read = earlier.numbers, earlier.read
        tensors = {id(t): t for t in leaves if isinstance(t, torch.Tensor)}
        self._storages = collections.Counter(map(memory_of, tensors.values()))
        self._of_pair: dict[object, Any] = {}
        self._symbols: list[tuple[Symbol, Any]] = []

    def fake(self, tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor | None:
        """With symbols for a leaf; None if its sizes are those of the other call."""
        if id(tensor) not in self._earlier:
            return None
        position, before = self._earlier[id(tensor)]
        now: Layout = (tuple(tensor.shape), tuple(tensor.stride()))
        if before == now:
            return None
        if tensor.is_conj() or tensor.is_neg() or isinstance(tensor, torch.nn.Parameter):
            raise StaticSizes("an argument of another size is a parameter or lazily changed")
        pairs = enumerate(zip(before[0], now[0], strict=True))
        shape = [self._size(position, "shape", d, *pair) for d, pair in pairs]
        strides = self._strides(position, shape, before, now)
        if self._storages[memory_of(tensor)] > 1:  # a part of the memory that others are parts of
            whole = mode.from_tensor(tensor.detach(), static_shapes=True)
            made = whole.as_strided(shape, strides, tensor.storage_offset()).detach()
        else:
            with mode:
                made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def _strides(
        self, position: int, shape: Sequence[Any], before: Layout, now: Layout
    ) -> list[Any]:
        order = outermost_first(now[1])
        dense = [dense_strides(sizes, order) for sizes, _ in (before, now)]
        if dense == [before[1], now[1]]:
            return list(dense_strides(shape, order))
        pairs = enumerate(zip(before[1], now[1], strict=True))
        return [self._size(position, "stride", d, *pair) for d, pair in pairs]

    def _size(
        self, position: int, axis: Literal["shape", "stride"], dimension: int, was: int, now: int
    ) -> Any:
        pair = (axis, was, now)
        if pair not in self._of_pair:
            self._of_pair[pair] = self._made(position, axis, dimension, was, now)
        return self._of_pair[pair]

    def number(self, position: int, now: int | float) -> Any:
        """Return what the forward gets for a number among the leaves."""
        return self._made(position, "number", 0, self._numbers.get(position, now), now)

    def count(self, place: int, now: object) -> Any:
        """Return what Python gets where guard `place` of those that depend on values reads `now`:
        a symbol if both calls read numbers there, and others."""
        was = self._read[place] if place < len(self._read) else now
        if not (is_count(was) and is_count(now)):
            return now
        return self._made(place, "count", 0, was, now)

    def _made(self, position: int, axis: Any, dimension: int, was: Any, now: Any) -> Any:
        if was == now:
            return now
        if not (is_usual(was) and is_usual(now)):
            raise StaticSizes("a size of 0 or 1 is a kind of its own", is_of_pair=True)
        made = new_symbol(self.env, f"leaf{position}_{axis}{dimension}", now)
        symbol = made.node.expr
        self._symbols.append((Symbol(str(symbol), position, axis, dimension), symbol))
        return made

    def sizes(self) -> Sizes:
        """Raises StaticSizes if the forward made constants of some symbols."""
        fixed = [s for s, expr in self._symbols if self.env.replace(expr).is_number]
        if fixed:
            listed = ", ".join(s.place for s in fixed)
            raise StaticSizes(
                f"the forward is another one for each value of {listed}",
                tuple((s.position, s.axis, s.dimension) for s in fixed),
            )
        if self.env.deferred_runtime_asserts:
            raise StaticSizes("a size follows from values")
        guards = dict.fromkeys(printed(guard.expr) for guard in self.env.guards)
        return Sizes(tuple(symbol for symbol, _ in self._symbols), tuple(guards))


class _RangesClass(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RANGE)


class _Ranges(metaclass=_RangesClass):
    """In place of `range`, which would make constants of its arguments: of symbols only how many
    numbers there are is one."""

    def __new__(cls, *ends: Any) -> Any:
        if not 1 < len(ends) < 4 or not any(isinstance(end, torch.SymInt) for end in ends):
            return _RANGE(*ends)
        start, stop, step = (*ends, 1)[:3]
        count = -((start - stop) // step)
        return tuple(start + step * number for number in _RANGE(count))


_RANGE = range


def _length(sized: Any) -> Any:
    """In place of `len`, which would make a constant of the size of a tensor."""
    is_tensor = isinstance(sized, torch.Tensor)
    return sized.shape[0] if is_tensor and sized.dim() else _LEN(sized)


_LEN = len


def _index(tensor: torch.Tensor, index: Any) -> Any:
    """As in eager, where a tuple makes no slice of a whole dimension, whose gradient would have
    other strides: of sizes that are symbols C++ makes one, and of a position that is a symbol, a
    constant."""
    parts = index if isinstance(index, tuple) else (index,)
    others = tensor.dim() - sum(map(_dimensions, parts))
    if _selects(parts):
        return _selected(tensor, parts, others)
    if isinstance(index, tuple) and tensor.requires_grad:
        made: list[Any] = []
        dimension = 0
        for part in index:
            is_whole = isinstance(part, slice) and _is_whole(part, tensor.shape[dimension])
            made.append(slice(None) if is_whole else part)
            dimension += others if part is ... else _dimensions(part)
        index = tuple(made)
    return _INDEX(tensor, index)


def _assign(tensor: torch.Tensor, index: Any, value: Any) -> None:
    if _selects(index if isinstance(index, tuple) else (index,)):
        tensor, index = _index(tensor, index), ...
    _ASSIGN(tensor, index, value)


_ASSIGN: Any = torch.Tensor.__setitem__


def _selects(parts: Sequence[Any]) -> bool:
    """Return whether an index has a position that is a symbol, and makes a view."""
    plain = (int, slice, torch.SymInt, type(None), type(...))
    kinds = {type(part) for part in parts}
    return torch.SymInt in kinds and kinds.issubset(plain)


def _selected(tensor: torch.Tensor, parts: Sequence[Any], others: int) -> Any:
    """others: dimensions that an ellipsis stands for."""
    dimension = 0
    for part in parts:
        if type(part) in (int, torch.SymInt):
            tensor = tensor.select(dimension, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(dimension)
        elif isinstance(part, slice) and not _is_whole(part, tensor.shape[dimension]):
            tensor = _INDEX(tensor, (*[slice(None)] * dimension, part))
        dimension += others if part is ... else 1
    return tensor


def _dimensions(part: Any) -> int:
    """How many of its tensor a part of an index stands for: a mask for all of its own."""
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 0 if part is None or part is ... or isinstance(part, bool) else 1


def _is_whole(part: slice, size: Any) -> bool:
    is_read = any(isinstance(end, torch.Tensor) for end in (part.start, part.stop))
    is_from_first = not is_read and part.step in (None, 1) and part.start in (None, 0)
    return is_from_first and size <= (sys.maxsize if part.stop is None else part.stop)


_INDEX: Any = torch.Tensor.__getitem__


def _linspace(start: Any, end: Any, steps: Any, **how: Any) -> Any:
    """As the recorder gets it from C++, which makes a constant of a symbol."""
    if type(steps) is int:
        return _LINSPACE(start, end, steps, **how)
    device = torch.device(how.pop("device", None) or torch.get_default_device())
    how |= {"device": device, "pin_memory": False}
    with _pop_mode_temporarily() as recorder:
        operator = torch.ops.aten.linspace.default
        return recorder.__torch_dispatch__(operator, (), (start, end, steps), how)


_LINSPACE: Any = torch.linspace


def _matmul(left: torch.Tensor, right: torch.Tensor) -> Any:
    """As the kernel in C++ makes it of other operators."""
    most, least = max(left.dim(), right.dim()), min(left.dim(), right.dim())
    if least < 3 or (most == 3 and 1 in (left.shape[0], right.shape[0])):
        return matmul(left, right)
    outer = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    factors = (
        f.expand(*outer, *f.shape[-2:]).reshape(math.prod(outer), *f.shape[-2:])
        for f in (left, right)
    )
    made = torch.bmm(*factors)
    return torch.ops.aten._unsafe_view(made, (*outer, left.shape[-2], right.shape[-1]))


def _unsafe_chunk(tensor: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """As in C++, which asks for all sizes."""
    return torch.unsafe_split(tensor, (tensor.shape[dim] + chunks - 1) // chunks, dim)


def _max_pool1d(
    tensor: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """As the kernel in C++ makes it of another operator, where a gradient may be needed."""
    geometry = (1, *size), (1, *(stride or size)), (0, *padding), (1, *dilation)
    made = torch.ops.aten.max_pool2d_with_indices(tensor.unsqueeze(-2), *geometry, ceil_mode)
    return made[0].squeeze(-2)


def _attention(*args: Any, **kwargs: Any) -> Any:
    """With a bool as `is_causal`, which may be a choice by a size."""
    flags = {name: bool(n) for name, n in kwargs.items() if isinstance(n, torch.SymBool)}
    return _ATTENTION(*args, **kwargs | flags)


_ATTENTION: Any = torch.nn.functional.scaled_dot_product_attention


@contextlib.contextmanager
def known_to_python() -> Iterator[None]:
    """While active, a SymInt or SymFloat as text is its number, which makes it a constant: the text
    of a symbol would be another one than in eager execution, and nothing would say so. Loops over
    parts of a size leave it free."""
    with contextlib.ExitStack() as stack:
        kernels = torch.library.Library("aten", "IMPL")
        stack.callback(kernels._destroy)
        instead: dict[str, Any] = {"unsafe_chunk": _unsafe_chunk, "max_pool1d": _max_pool1d}
        if torch.__version__ < "2.13":  # in C++ it takes the sizes of what it folds for constants
            instead["matmul"] = _matmul
        for name, function in instead.items():
            with warnings.catch_warnings(action="ignore"):  # of an override, which is meant
                kernels.impl(name, function, "CompositeImplicitAutograd", allow_override=True)
        stack.enter_context(exchanged(builtins, "range", _Ranges))
        stack.enter_context(exchanged(builtins, "len", _length))
        stack.enter_context(exchanged(FakeTensor, "__getitem__", _index))
        stack.enter_context(exchanged(FakeTensor, "__setitem__", _assign))
        stack.enter_context(exchanged(torch, "linspace", _linspace))
        functional: Any = torch.nn.functional
        if functional.scaled_dot_product_attention is _ATTENTION:
            place = functional, "scaled_dot_product_attention"
            stack.enter_context(exchanged(*place, _attention))
        for kind, plain in ((torch.SymInt, int), (torch.SymFloat, float)):
            for name in ("__str__", "__repr__", "__format__"):

                def text(number: Any, *args: Any, _name: str = name, _plain: Any = plain) -> Any:
                    return getattr(_plain(number), _name)(*args)

                stack.enter_context(exchanged(kind, name, text))
        yield
