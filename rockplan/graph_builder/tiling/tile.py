"""Tile: a recorded run -> the same run, in which the head works on a part of its rows at a time.

takes: a Capture. returns: a Capture that has the calls of the head (`region`) once for each part,
one part after the other in each phase; or a reason why that is impossible. guarantees: every other
call stays as it is, in its order, with all draws and writes; each result of the head has eager's
numbers, except for the rounding of sums over rows.
Parts read slices, which take no memory. A value that only parts read is in one storage for each
part, so that the planner decides for each part what is kept and what is recomputed. A value that
others read is concatenated (`cat`). A sum over rows (the gradient of the weight, the loss) is a
chain of additions, for products by `addmm`, which may be written over the sum before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.recorded.new_calls import NewCalls
from rockplan.graph_builder.recorded.run import Capture, RecordedCall, Tiles
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tiling.region import Region, regions_of
from rockplan.graph_builder.tiling.rules import MEANS, NLL, PRODUCT, Groups, Rows, RowWise, in_part
from rockplan.values.graph import Call, Phase, ValueRef, with_each_ref

LEAST_ROWS, LEAST_SHORT_ROWS = 128, 64
"""Least rows of a part, in general and if elements of some row are wider than the weight's (fewer
rows make matrix products slower by more than they save)."""

SHARE_OF_DEPTH = 8
"""A part has one row for so many columns of the head's operand, fewer if elements of a row are
wider than the weight's: then the rows of a part and their gradient take a fraction of the gradient
of the weight, which is needed anyway."""

MOST_PARTS = 32
"""Each part adds some ten operations to plan."""


def tiled(capture: Capture, parts: int | None = None) -> Capture | str:
    """Return `capture` with its head in parts, or the reason why that is impossible. parts: how
    many; None: chosen by size."""
    reason = ""
    for region in regions_of(capture):
        result = region if isinstance(region, str) else _written(capture, region, parts)
        if not isinstance(result, str):
            return result
        reason = reason or result
    return reason


def _written(capture: Capture, region: Region, parts: int | None) -> Capture | str:
    (seed,) = region.run.made(region.seed)
    rows = region.run.spec(seed).shape[0]
    size = _size(region.groups, rows, region.depth, region.widening, parts)
    if size >= region.groups.count:
        kind = "sequences" if region.groups.of_sequences else "rows"
        return f"its head has {region.groups.count} {kind}, which are one part"
    try:
        return _TiledRun(capture, region, size).capture()
    except _NotTiled as reason:
        return str(reason)


def _size(groups: Groups, rows: int, depth: int, widening: int, parts: int | None) -> int:
    """Return how many groups of rows a part has. parts: how many parts; None: chosen by size. rows:
    of the head; depth, widening: as in `Region`."""
    if parts is not None:
        return -(-groups.count // parts)
    least = LEAST_ROWS if widening == 1 else LEAST_SHORT_ROWS
    part_rows = max(depth // (SHARE_OF_DEPTH * widening * least), 1) * least
    size = max(part_rows * groups.count // rows, 1)
    return max(size, -(-groups.count // MOST_PARTS))


class _NotTiled(Exception):
    """Raised with the reason why the head cannot be tiled."""


@dataclass(frozen=True, slots=True)
class _RowsPart:
    """One part: `size` groups from `begin` on. made: (value, rows) -> the value for this part."""

    begin: int
    size: int
    made: dict[tuple[int, Rows], int]


class _TiledRun:
    """Writes the tiled run. Recorded values keep their numbers; those of parts are new. `_merged`:
    views of whole values with their rows in one dimension; `_sums`: result -> sum of the parts so
    far; `_sliced`, `_joined`: as `Tiles.whole` and `Tiles.joined`; `_whole`: values that others
    read."""

    def __init__(self, recorded: Capture, region: Region, size: int) -> None:
        self._region, self._run, self._groups = region, region.run, region.groups
        self._recorded = recorded
        self._new = NewCalls(self._run)
        self._values = self._new.values
        self._merged: dict[tuple[int, Rows], int] = {}
        self._sums: dict[int, int] = {}
        self._sliced: set[int] = set()
        self._joined: set[int] = set()
        count = self._groups.count
        self._parts = [_RowsPart(b, min(size, count - b), {}) for b in range(0, count, size)]
        made = {v for p in region.calls for v in self._run.made(p) if v in region.rows}
        wanted, readers = self._run.wanted, self._run.readers
        storages = ((v, self._run.storage(v)) for v in made)
        self._whole = {
            v
            for v, s in storages
            if s in wanted or not region.calls.keys() >= {*readers.get(s, ())}
        }
        self._in_parts = self._run.storages(made - self._whole)

    def capture(self) -> Capture:
        """Return the tiled run: level by level, calls outside the head, then those of the head part
        by part. Raises _NotTiled if a part cannot be computed as the whole is."""
        for outside, head in self._levels():
            for position in sorted(outside):
                self._new.calls.append(self._recorded.calls[position])
            for part in self._parts:
                for position in head:
                    self._add(position, part)
            for position in head:
                self._complete(position)
        return replace(
            self._recorded,
            values=tuple(self._values),
            calls=tuple(self._new.calls),
            tiles=Tiles(len(self._parts), frozenset(self._sliced), frozenset(self._joined)),
        )

    # -- order -----------------------------------------------------------------------------

    def _levels(self) -> list[tuple[list[int], list[int]]]:
        """Return levels in execution order: (positions of calls outside the head, positions of
        calls of the head that run after them, for each part). A call that needs all rows of a
        result of the head is in a later level than that. Others but views keep their order."""
        levels: list[tuple[list[int], list[int]]] = []
        for phase in Phase:
            by_level: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
            parts: dict[int, int] = {}  # storage made in parts -> level of its calls
            ready: dict[int, int] = {}  # whole storage -> the first level that may read it
            now = 0
            for position, is_view in self._running(phase):
                cut = self._region.calls.get(position)
                read = self._run.storages(self._recorded.calls[position].reads)
                made = self._run.storages(self._run.made(position))
                if cut is None:
                    level = max((ready.get(s, 0) for s in read), default=0)
                    if not is_view:
                        level = now = max(now, level)
                        ready |= dict.fromkeys(made, level)
                    by_level[level][0].append(position)
                    continue
                level = max((parts.get(s, ready.get(s, 0)) for s in read), default=0)
                by_level[level][1].append(position)
                for result in self._run.made(position):
                    place = ready if result not in self._region.rows else parts
                    storage = self._run.storage(result)
                    place[storage] = level + (place is ready)
                    if result in self._whole:
                        ready[storage] = level + 1
            levels += [by_level[level] for level in sorted(by_level)]
        return levels

    def _running(self, phase: Phase) -> Iterator[tuple[int, bool]]:
        """Yield (position, whether it is a view), but of views of what exists in parts only."""
        live = frozenset(self._run.live)
        of_dead = (p for p in range(len(self._run.calls)) if p not in live)
        dead = self._run.storages(
            v for p in of_dead if not self._run.is_view(p) for v in self._run.made(p)
        )
        without = self._in_parts | dead
        for position, recorded in enumerate(self._recorded.calls):
            if recorded.phase is not phase:
                continue
            is_view = self._run.is_view(position)
            if not is_view and position in live:
                yield position, False
            elif is_view and not self._run.storages(recorded.reads) & without:
                yield position, True

    # -- one call --------------------------------------------------------------------------

    def _add(self, position: int, part: _RowsPart) -> None:
        """Write the call of the head at `position` for a part, on rows and with shapes of the part.
        Results with rows go into `part.made`; one summed over rows is added to that of the parts
        before, in `_sums`: a product by `addmm`, a mean weighted by the part's share of the
        rows."""
        recorded, cut = self._recorded.calls[position], self._region.calls[position]
        args, kwargs = in_part(recorded.call, cut, self._run.spec, self._groups, part.size)

        def own(value: int) -> ValueRef:
            rows = cut.operands.get(value)
            return ValueRef(value if rows is None else self._part_of(value, rows, part, recorded))

        args = with_each_ref(args, own)
        kwargs = tuple((name, with_each_ref(a, own)) for name, a in kwargs)
        call = recorded.call
        if call.op == NLL and cut.results[0] is None:
            made = self._loss(recorded, args)
        elif call.op == PRODUCT and cut.results == (None,) and call.results[0] in self._sums:
            before = ValueRef(self._sums[call.results[0]])
            made = self._call(recorded, "aten.addmm.default", (before, *args))
            self._sums[call.results[0]] = made[0]
            self._joined.add(made[0])
            return
        else:
            made = self._call(recorded, call.op, args, kwargs)
        if call.op in MEANS and cut.results == (None,):
            share = part.size / self._groups.count
            made = self._call(recorded, "aten.mul.Scalar", (ValueRef(made[0]), share))
        for result, rows, own_result in zip(call.results, cut.results, made, strict=True):
            if result is not None and rows is not None:
                self._check(own_result, result, rows, part)
                part.made[result, rows] = own_result
            elif result is not None:
                self._sum(recorded, result, own_result)

    def _loss(self, recorded: RecordedCall, args: tuple[Any, ...]) -> tuple[int, ...]:
        # As a sum, with the sum of the weights by which the total is divided at the end; both in
        # float32 at least, since 16 bits are too few.
        scores, targets, weight, _, ignored = args
        if self._values[scores.index].spec.dtype in _SHORT:
            scores = self._as(recorded, scores, torch.float32)
            weight = None if weight is None else self._as(recorded, weight, torch.float32)
        return self._call(recorded, NLL, (scores, targets, weight, _SUM, ignored))

    def _as(self, recorded: RecordedCall, value: ValueRef, dtype: torch.dtype) -> ValueRef:
        (made,) = self._call(recorded, "aten._to_copy.default", (value,), (("dtype", dtype),))
        return ValueRef(made)

    def _sum(self, recorded: RecordedCall, result: int, addend: int) -> None:
        before = self._sums.get(result)
        if before is not None:
            terms = (ValueRef(before), ValueRef(addend))
            (addend,) = self._call(recorded, "aten.add.Tensor", terms)
            self._joined.add(addend)
        self._sums[result] = addend

    def _part_of(self, value: int, rows: Rows, part: _RowsPart, recorded: RecordedCall) -> int:
        """Return the value that holds the rows of `value` of a part: made by the part, a view of
        such a value, or a slice of the whole one. New calls are placed like `recorded`."""
        if (value, rows) in part.made:
            return part.made[value, rows]
        if value in self._region.rows:
            view = self._recorded.calls[self._run.views[value]]
            base = view.call.args[0]
            assert isinstance(base, ValueRef)
            of_base = self._region.rows[base.index]
            own = ValueRef(self._part_of(base.index, of_base, part, recorded))
            cut = RowWise({base.index: of_base}, (rows,))
            args, kwargs = in_part(view.call, cut, self._run.spec, self._groups, part.size)
            (made,) = self._call(recorded, view.call.op, (own, *args[1:]), kwargs)
        else:
            made = self._slice(value, rows, part, recorded)
        self._check(made, value, rows, part)
        part.made[value, rows] = made
        return made

    def _slice(self, value: int, rows: Rows, part: _RowsPart, recorded: RecordedCall) -> int:
        """A slice of a value that exists whole, made by a new call that is placed like `recorded`.
        Rows of several dimensions are first viewed as one, once for all parts."""
        self._sliced.add(value)
        shape = self._run.spec(value).shape
        one = rows.shape(shape, self._groups.count, self._groups.count)
        if one != shape:
            if (value, rows) not in self._merged:
                (merged,) = self._call(recorded, _VIEW, (ValueRef(value), one))
                self._merged[value, rows] = merged
            value = self._merged[value, rows]
        each = one[rows.last] // self._groups.count
        begin, end = part.begin * each, (part.begin + part.size) * each
        (made,) = self._call(recorded, _SLICE, (ValueRef(value), rows.last, begin, end))
        return made

    def _check(self, made: int, whole: int, rows: Rows, part: _RowsPart) -> None:
        shape = rows.shape(self._run.spec(whole).shape, self._groups.count, part.size)
        spec = self._values[made].spec
        if (spec.shape, spec.dtype) != (shape, self._run.spec(whole).dtype):
            raise _NotTiled(f"a part of {shape} is made as {spec.shape} of {spec.dtype}")

    # -- whole values ------------------------------------------------------------------------

    def _complete(self, position: int) -> None:
        """Write calls that put the results of the head's call at `position` together from parts,
        for readers of all rows: sums are complete, others are concatenated."""
        recorded, cut = self._recorded.calls[position], self._region.calls[position]
        if recorded.call.op == NLL and cut.results[0] is None:
            self._divide(recorded)
        for result, rows in zip(recorded.call.results, cut.results, strict=True):
            if result is None:
                continue
            if rows is None:
                self._is_now(recorded, result, self._sums[result])
            elif result in self._whole:
                parts = tuple(ValueRef(part.made[result, rows]) for part in self._parts)
                (made,) = self._call(recorded, "aten.cat.default", (parts, rows.last))
                self._joined.add(made)
                shape = self._run.spec(result).shape
                whole = made
                if self._values[made].spec.shape != shape:
                    (whole,) = self._call(recorded, _VIEW, (ValueRef(made), shape))
                self._is_now(recorded, result, whole)

    def _divide(self, recorded: RecordedCall) -> None:
        loss, weights = recorded.call.results
        if loss is None or weights is None:
            raise _NotTiled("the loss has no weights")
        is_mean = recorded.call.args[3] == _MEAN
        if is_mean:
            terms = tuple(ValueRef(self._sums[r]) for r in (loss, weights))
            (self._sums[loss],) = self._call(recorded, "aten.div.Tensor", terms)
        for result in (loss, weights):
            dtype = dtype_of(self._run.spec(result))
            if self._values[self._sums[result]].spec.dtype != str(dtype):
                made = self._as(recorded, ValueRef(self._sums[result]), dtype)
                self._sums[result] = made.index

    def _is_now(self, recorded: RecordedCall, result: int, made: int) -> None:
        # An alias of `made`, in the recorded storage.
        if self._values[made].spec != self._run.spec(result):
            raise _NotTiled(
                f"{self._values[made].spec} is made of parts, where eager makes "
                f"{self._run.spec(result)}"
            )
        storage = self._values[made].storage
        for value, fakes in enumerate(self._values):
            if fakes.storage == storage:
                self._values[value] = replace(fakes, storage=self._run.storage(result))
        self._new.write(recorded, Call("aten.alias.default", (ValueRef(made),), (), (result,)))

    def _call(self, like: RecordedCall, op: str, *arguments: tuple[Any, ...]) -> tuple[int, ...]:
        try:
            return self._new.add(like, op, *arguments)
        except facts.CALL_ERRORS as error:
            raise _NotTiled(f"{op} cannot run on a part of the rows ({error})") from error


_VIEW, _SLICE = "aten.view.default", "aten.slice.Tensor"
_MEAN, _SUM = 1, 2
"""Numbers of the reductions of a loss in PyTorch's operators."""

_SHORT = ("torch.bfloat16", "torch.float16")
