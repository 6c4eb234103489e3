"""Rules of rows: which operators compute each row of their results from the same row of their
operands.

takes: a call, and which of its operands are cut along rows. returns: RowWise, how all its operands
and results are cut, or None if the operator mixes rows. guarantees: it looks at shapes and operator
names only; `tile` checks the shapes of parts.
Rows come in `groups`: the product of dimensions `first` to `last` of a tensor is a multiple of the
number of groups, and a part has some of the groups. A group is a single row, over any number of
dimensions ([batch, length]); or a sequence, one index of the first dimension, if a loss leaves out
a row of each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rockplan.graph_builder.operators import facts
from rockplan.values.graph import Call, TensorSpec, ValueRef, refs

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The dimensions `first` to `last` (inclusive) of a tensor that are its rows."""

    first: int
    last: int

    def shape(self, whole: Shape, groups: int, share: int) -> Shape:
        """Return the shape of a part: that of `whole` with the rows of `share` out of `groups`
        groups. Of several dimensions of rows the last gets them all, the others size 1."""
        rows = prod(whole[self.first : self.last + 1]) // groups * share
        ones = (1,) * (self.last - self.first)
        return (*whole[: self.first], *ones, rows, *whole[self.last + 1 :])

    def holds(self, dim: int) -> bool:
        return self.first <= dim <= self.last

    def moved(self, by: int) -> Rows:
        return Rows(self.first + by, self.last + by)


RowsOf = Mapping[int, Rows]
"""Value -> its rows, for operands that are cut."""


@dataclass(frozen=True, slots=True)
class RowWise:
    """How a call is cut. results: rows of each, None if the results of the parts are added up."""

    operands: RowsOf
    results: tuple[Rows | None, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows that stay together. count: number of groups; of_sequences: a group is one index of the
    first dimension, otherwise a single row."""

    count: int
    of_sequences: bool = False


Specs = Callable[[int], TensorSpec]

FIRST = Rows(0, 0)
_SECOND = Rows(1, 1)

SHAPE_OF_RESULT = {
    "aten.view.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.expand.default": 1,
    "aten.slice_backward.default": 1,
    "aten.select_backward.default": 1,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
    "aten.full.default": 0,
}
"""Operators that take the shape of their result -> position of that argument."""

_CREATIONS = frozenset(op for op, place in SHAPE_OF_RESULT.items() if place == 0)
_COPIES = frozenset(["aten._to_copy.default", "aten.clone.default"])

_ALONG = {
    "aten._softmax.default": 1,
    "aten._log_softmax.default": 1,
    "aten._softmax_backward_data.default": 2,
    "aten._log_softmax_backward_data.default": 2,
    "aten.gather.default": 1,
    "aten.scatter.value": 1,
    "aten.scatter.src": 1,
    "aten.scatter_add.default": 1,
    "aten.slice_backward.default": 2,
}
"""Operators that work along one dimension, on tensors with equal numbers of dimensions -> position
of the argument that names it."""

_REDUCTIONS = {
    "aten.sum.dim_IntList": 2,
    "aten.mean.dim": 2,
    "aten.amax.default": 2,
    "aten.amin.default": 2,
    "aten.logsumexp.default": 2,
    "aten.argmax.default": 2,
    "aten.max.dim": 2,
    "aten.min.dim": 2,
}
"""Reductions over the dimensions in the second argument -> position of `keepdim`."""

SUMS = frozenset(["aten.sum.default", "aten.sum.dim_IntList"])
MEANS = frozenset(["aten.mean.default", "aten.mean.dim"])
PRODUCT = "aten.mm.default"
PRODUCTS = frozenset([PRODUCT, "aten.addmm.default"])
NLL = "aten.nll_loss_forward.default"
_NLL_BACKWARD = "aten.nll_loss_backward.default"


def viewed(call: Call, specs: Specs, rows: Rows, groups: Groups) -> Rows | None:
    """Return the rows of the result of a view of a tensor with `rows`; None if rows are not kept
    apart, or the call is no view. specs: value -> spec."""
    op, args = call.op, call.args
    (result,) = call.results if len(call.results) == 1 else (None,)
    if result is None or not isinstance(args[0], ValueRef):
        return None
    whole, made = specs(args[0].index).shape, specs(result).shape
    if op in ("aten.detach.default", "aten.alias.default"):
        return rows
    if op == "aten.t.default":
        return Rows(1 - rows.last, 1 - rows.first) if len(whole) == 2 else None
    if op in ("aten.view.default", "aten._unsafe_view.default"):
        return _reshaped(prod(whole[: rows.first]), made, groups)
    if op == "aten.expand.default":
        moved = rows.moved(len(made) - len(whole))
        is_same = made[moved.first : moved.last + 1] == whole[rows.first : rows.last + 1]
        return moved if is_same else None
    if op == "aten.transpose.int":
        a, b = (_dim(d, len(whole)) for d in args[1:3])
        swapped = {a: b, b: a}
        if rows.first == rows.last:
            dim = swapped.get(rows.first, rows.first)
            return Rows(dim, dim)
        return None if rows.holds(a) or rows.holds(b) else rows
    if op == "aten.unsqueeze.default":
        dim = _dim(args[1], len(made))
        return rows.moved(1) if dim <= rows.first else rows if dim > rows.last else None
    if op in ("aten.slice.Tensor", "aten.squeeze.dim", "aten.select.int"):
        dim = _dim(args[1] if len(args) > 1 else 0, len(whole))
        if rows.holds(dim):
            return None
        return rows.moved(-1) if len(made) < len(whole) and dim < rows.first else rows
    return None


def _dim(given: Any, dims: int) -> int:
    return int(given) % dims if dims else 0


def _reshaped(before: int, made: Shape, groups: Groups) -> Rows | None:
    """before: product of the dimensions before the rows, which reshaping keeps."""
    first = next((i for i in range(len(made)) if prod(made[:i]) == before), None)
    if first is None:
        return None
    if groups.of_sequences:
        while first < len(made) and made[first] == 1:
            first += 1
        is_whole = first < len(made) and made[first] % groups.count == 0
        return Rows(first, first) if is_whole else None
    for last in range(first, len(made)):
        if prod(made[first : last + 1]) == groups.count:
            return Rows(first, last)
    return None


def row_wise(
    call: Call, specs: Specs, known: RowsOf, groups: Groups, result_rows: Rows | None = None
) -> RowWise | None:
    """Return how a call that makes new tensors can be computed by parts; None if it mixes rows.
    specs: value -> spec; result_rows: rows that its result should have if no operand decides."""
    op = call.op
    operands = list(dict.fromkeys(r.index for r in refs(call)))
    by_value = {v: known[v] for v in operands if v in known}
    if not call.results or call.results[0] is None:
        return None
    if op in PRODUCTS:
        return _product(call, specs, by_value)
    if op in (NLL, _NLL_BACKWARD):
        return _nll(call, specs, by_value)
    if op in _CREATIONS:
        return RowWise({}, (result_rows,)) if result_rows and not operands else None
    if op in _ALONG:
        return _along(call, specs, by_value, result_rows)
    if op in _REDUCTIONS or op in ("aten.sum.default", "aten.mean.default"):
        return _reduction(call, specs, by_value)
    if op == "aten.select_backward.default":
        return _select_backward(call, specs, by_value)
    if op in _COPIES or facts.is_pointwise(facts.resolve(op)):
        return _pointwise(call, specs, by_value, result_rows)
    return None


def _product(call: Call, specs: Specs, rows_of: RowsOf) -> RowWise | None:
    """Along rows of the left operand, or along the summed dimension, where parts add up."""
    *bias, left, right = (a.index for a in call.args if isinstance(a, ValueRef))
    rows, columns = rows_of.get(left), rows_of.get(right)
    if rows == FIRST and columns is None:
        operands = {left: FIRST}
        for one in bias:
            if len(specs(one).shape) == 2 and specs(one).shape[0] != 1:
                operands[one] = FIRST
        # An added matrix is cut as the result is; a vector or a single row is not cut.
        is_fit = all(rows_of.get(one) in (None, operands.get(one)) for one in bias)
        is_fit = is_fit and left not in bias and right not in (left, *bias)
        return RowWise(operands, (FIRST,)) if is_fit else None
    if bias or left == right:
        return None
    if _SECOND in (rows, None) and columns == FIRST or rows == _SECOND and columns is None:
        return RowWise({left: _SECOND, right: FIRST}, (None,))
    return None


def _nll(call: Call, specs: Specs, rows_of: RowsOf) -> RowWise | None:
    # The loss of a row needs only its target.
    gradient = () if call.op == NLL else call.args[:1]
    scores, targets, weight, reduction, *_ = call.args[len(gradient) :]
    assert isinstance(scores, ValueRef) and isinstance(targets, ValueRef)
    if len(specs(scores.index).shape) != 2 or rows_of.get(scores.index, FIRST) != FIRST:
        return None
    operands = {scores.index: FIRST, targets.index: FIRST}
    is_by_row = reduction == 0
    if gradient and is_by_row:
        operands[gradient[0].index] = FIRST  # type: ignore[attr-defined]
    others = [a.index for a in (weight, *call.args[-1:]) if isinstance(a, ValueRef)]
    if any(v in rows_of for v in others) or any(
        rows_of.get(v, r) != r for v, r in operands.items()
    ):
        return None
    if gradient:
        return RowWise(operands, (FIRST,))
    return RowWise(operands, (FIRST if is_by_row else None, None))


def _along(call: Call, specs: Specs, rows_of: RowsOf, result_rows: Rows | None) -> RowWise | None:
    """None if that dimension is among the rows, or operands and result differ in rows."""
    rows = _common(rows_of) if rows_of else result_rows
    operands = [r.index for r in refs(call)]
    result = specs(call.results[0] or 0).shape
    if rows is None or any(len(specs(v).shape) != len(result) for v in operands):
        return None
    dim = _dim(call.args[_ALONG[call.op]], len(result))
    of_rows = slice(rows.first, rows.last + 1)
    is_fit = all(specs(v).shape[of_rows] == result[of_rows] for v in operands)
    if rows.holds(dim) or not is_fit:
        return None
    return RowWise(dict.fromkeys(operands, rows), (rows,))


def _common(rows_of: RowsOf) -> Rows | None:
    """None if operands differ."""
    kinds = set(rows_of.values())
    return kinds.pop() if len(kinds) == 1 else None


def _reduction(call: Call, specs: Specs, rows_of: RowsOf) -> RowWise | None:
    """By rows, or, over all rows, as a sum of parts; None if it reduces some dimensions of rows, or
    parts cannot be added up."""
    rows = _common(rows_of)
    (operand,) = (r.index for r in refs(call))
    if rows is None:
        return None
    dims = len(specs(operand).shape)
    named: Any = call.args[1] if len(call.args) > 1 else None
    named = (named,) if isinstance(named, int) else named
    reduced = {_dim(d, dims) for d in named} if named else set(range(dims))
    of_rows = set(range(rows.first, rows.last + 1))
    if of_rows <= reduced:
        can_add = call.op in SUMS | MEANS
        return RowWise({operand: rows}, (None,)) if can_add else None
    if of_rows & reduced:
        return None
    place = _REDUCTIONS[call.op]
    keeps = len(call.args) > place and bool(call.args[place])
    made = rows if keeps else rows.moved(-sum(d < rows.first for d in reduced))
    return RowWise({operand: rows}, (made,) * len(call.results))


def _select_backward(call: Call, specs: Specs, rows_of: RowsOf) -> RowWise | None:
    # The result has one dimension more.
    rows = _common(rows_of)
    if rows is None:
        return None
    (operand,) = (r.index for r in refs(call))
    dim = _dim(call.args[2], len(specs(call.results[0] or 0).shape))
    made = rows.moved(1) if dim <= rows.first else rows
    return RowWise({operand: rows}, (made,)) if not rows.first < dim <= rows.last else None


def _pointwise(
    call: Call, specs: Specs, rows_of: RowsOf, result_rows: Rows | None
) -> RowWise | None:
    # Operands of size 1 along rows are broadcast, not cut.
    result = specs(call.results[0] or 0).shape
    places = {r.moved(len(result) - len(specs(v).shape)) for v, r in rows_of.items()}
    places |= {result_rows} if result_rows else set()
    if len(places) != 1 or len(call.results) != 1:
        return None
    (rows,) = places
    operands: dict[int, Rows] = {}
    for ref in refs(call):
        shape = specs(ref.index).shape
        by = len(shape) - len(result)
        dims = range(max(rows.first + by, 0), rows.last + by + 1)
        sizes = [shape[d] for d in dims]
        is_absent = all(size == 1 for size in sizes)
        missing = result[rows.first : rows.last + 1 - len(sizes)]
        if (
            sizes
            and sizes == list(result[rows.last + 1 - len(sizes) : rows.last + 1])
            and all(size == 1 for size in missing)
            and not is_absent
        ):
            operands[ref.index] = Rows(dims[0], dims[-1])
        elif not is_absent or ref.index in rows_of:
            return None
    return RowWise(operands, (rows,))


def in_part(
    call: Call, tiled: RowWise, specs: Specs, groups: Groups, share: int
) -> tuple[tuple[object, ...], tuple[tuple[str, object], ...]]:
    """Return (args, kwargs) of the call for a part of `share` groups: those of the whole call,
    except for the shape of the result in operators that take one."""
    place = SHAPE_OF_RESULT.get(call.op)
    rows = tiled.results[0]
    if place is None or rows is None:
        return call.args, call.kwargs
    shape = rows.shape(specs(call.results[0] or 0).shape, groups.count, share)
    return (*call.args[:place], shape, *call.args[place + 1 :]), call.kwargs
