"""Region: the head of a model, which computes each row separately, among the calls of a recorded
run.

takes: a Capture that changes only storages of the caller in place. returns: Region, or the reason
why there is none. guarantees: nothing outside the region reads a wide result that it makes.
The seed is the largest matrix product of the forward phase, of shape [R, V]. A value is wide if it
has at least half as many elements. Calls after the seed that compute each row separately from wide
rows are in the region. Narrow results are followed only if they lead back to wide ones (a statistic
of each row), and not through products: norms and MLPs of all layers would come in. Calls before the
seed that make wide operands are in the region too (zeros to which a gradient is scattered).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from rockplan.graph_builder.recorded.run import Capture, RunView
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tiling import rules
from rockplan.values.graph import Phase, refs


@dataclass(frozen=True, slots=True)
class Region:
    """The calls of the head. seed: position of the matrix product; calls: position -> how its
    operands and results are cut, in order; rows: value -> its rows, for values that these calls
    make in parts, and views of them; depth: columns of the seed's left operand."""

    run: RunView
    groups: rules.Groups
    seed: int
    calls: Mapping[int, rules.RowWise]
    rows: Mapping[int, rules.Rows]
    depth: int

    @property
    def widening(self) -> int:
        """Largest item size of tiled floating values over that of the seed's result, at least 1."""
        dtypes = [dtype_of(self.run.spec(v)) for v in self.rows]
        (made,) = self.run.made(self.seed)
        floating = [d.itemsize for d in dtypes if d.is_floating_point]
        return max([1, *(n // dtype_of(self.run.spec(made)).itemsize for n in floating)])


def regions_of(capture: Capture) -> Iterator[Region | str]:
    """Yield for each way to group rows the region, or the reason why there is none. The ways:
    single rows, then sequences."""
    run = capture.view
    seed = _seed(run)
    if isinstance(seed, str):
        yield seed
        return
    for groups in _groups_of(run, seed):
        yield _Growth(run, seed, groups).region()


def _seed(run: RunView) -> int | str:
    sizes: dict[int, int] = {}
    for position in run.live:
        recorded = run.calls[position]
        if recorded.phase is Phase.FORWARD and recorded.call.op in rules.PRODUCTS:
            sizes[position] = prod(run.spec(run.made(position)[0]).shape)
    largest = [p for p, size in sizes.items() if size == max(sizes.values())]
    if not largest:
        return "the forward has no matrix product"
    if len(largest) > 1:
        return f"its {len(largest)} largest matrix products are equally large, and none is the head"
    if run.spec(run.made(largest[0])[0]).shape[0] < 2:
        return "its largest matrix product has one row"
    return largest[0]


def _groups_of(run: RunView, seed: int) -> Iterator[rules.Groups]:
    # Sequences: each size of a first dimension in views of the seed's result that divides its rows.
    (made,) = run.made(seed)
    rows = run.spec(made).shape[0]
    yield rules.Groups(rows)
    shapes = [run.spec(v).shape for v in run.views if run.storage(v) == run.storage(made)]
    for size in sorted({s[0] for s in shapes if len(s) > 2 and 1 < s[0] < rows}):
        if rows % size == 0:
            yield rules.Groups(size, of_sequences=True)


@dataclass(frozen=True, slots=True)
class _WideMaker:
    """How a call that makes a wide value is cut. rows: of its result, and of views of it."""

    cut: rules.RowWise
    rows: Mapping[int, rules.Rows]


class _Growth:
    """Collects the calls of a region, down from the seed, and up to the makers of wide operands."""

    def __init__(self, run: RunView, seed: int, groups: rules.Groups) -> None:
        self._run, self._seed, self._groups = run, seed, groups
        (self._made,) = run.made(seed)
        self._left = refs(run.calls[seed].call)[-2].index
        self._elements = prod(run.spec(self._made).shape)
        self._known: dict[int, rules.Rows] = {}
        self._cuts: dict[int, rules.RowWise] = {}
        self._core: set[int] = set()

    def region(self) -> Region | str:
        growth = self._grown(goes_up=True)
        # If a wide operand has other readers too, it stays whole, and parts read its rows.
        without = self._grown(goes_up=False) if isinstance(growth, str) else growth
        return growth if isinstance(without, str) else without

    def _grown(self, goes_up: bool) -> Region | str:
        """goes_up: calls before the seed that make wide operands may join."""
        run, makers = self._run, dict[int, _WideMaker]()
        while True:
            self._start(makers)
            self._go_down()
            calls = self._with_statistics()
            more = self._makers(calls) if goes_up else {}
            if not more:
                break
            makers |= more
        reason = self._open_at(calls)
        if reason:
            return reason
        made = run.storages(v for p in calls for v in run.made(p))
        rows = {v: r for v, r in self._known.items() if run.storage(v) in made}
        depth = run.spec(self._left).shape[1]
        return Region(run, self._groups, self._seed, dict(sorted(calls.items())), rows, depth)

    def _start(self, makers: Mapping[int, _WideMaker]) -> None:
        run, call = self._run, self._run.calls[self._seed].call
        # If the caller gets the result of the seed it stays whole, and parts read its rows.
        self._known = {self._made: rules.FIRST}
        self._cuts = {position: maker.cut for position, maker in makers.items()}
        for maker in makers.values():
            self._known |= maker.rows
        seed = rules.row_wise(call, run.spec, {self._left: rules.FIRST}, self._groups)
        if seed and run.storage(self._made) not in run.wanted and run.is_plain(self._seed):
            self._cuts[self._seed] = seed
        self._core = set(self._cuts)

    def _go_down(self) -> None:
        live = frozenset(self._run.live) - self._run.sums
        for position in range(len(self._run.calls)):
            base = self._run.viewed_by(position)
            if base in self._known:
                recorded = self._run.calls[position]
                view = rules.viewed(recorded.call, self._run.spec, self._known[base], self._groups)
                if view is not None:
                    self._known[self._run.made(position)[0]] = view
            elif position in live and position not in self._cuts and position != self._seed:
                self._add(position)

    def _is_wide(self, value: int) -> bool:
        return 2 * prod(self._run.spec(value).shape) >= self._elements

    def _add(self, position: int) -> None:
        """Add the call at `position` to `_cuts`, and the rows of its results to `_known`, if it
        reads values with rows and computes each row separately. A wide result that the caller gets
        has rows, without its call; a narrow product has none."""
        run = self._run
        recorded = run.calls[position]
        if not any(v in self._known for v in recorded.reads) or not run.is_plain(position):
            return
        row_wise_call = rules.row_wise(recorded.call, run.spec, self._known, self._groups)
        if row_wise_call is None:
            return
        made = {
            v: rows
            for v, rows in zip(recorded.call.results, row_wise_call.results, strict=True)
            if v is not None and rows is not None
        }
        is_wide = any(
            self._is_wide(v) for v in (*made, *row_wise_call.operands.keys() & self._known)
        )
        if not is_wide and recorded.call.op in rules.PRODUCTS:
            return
        self._known |= made
        if any(self._is_wide(v) and run.storage(v) in run.wanted for v in made):
            return
        self._cuts[position] = row_wise_call
        if is_wide:
            self._core.add(position)

    def _with_statistics(self) -> dict[int, rules.RowWise]:
        """Position -> cut for the calls that read or make wide rows, and what makes these."""
        run, needed = self._run, set(self._core)
        for position in sorted(self._cuts, reverse=True):
            if position in needed:
                read = (v for v in self._cuts[position].operands if v in self._known)
                makers = {run.maker(v) for v in read}
                needed |= {m for m in makers if m in self._cuts}
        return {p: kept for p, kept in self._cuts.items() if p in needed}

    def _makers(self, calls: Mapping[int, rules.RowWise]) -> dict[int, _WideMaker]:
        run, makers = self._run, dict[int, _WideMaker]()
        for value, rows in ((v, r) for cut in calls.values() for v, r in cut.operands.items()):
            position = run.maker(value)
            if position is None or position in calls or not run.is_plain(position):
                continue
            base = next(v for v in run.made(position) if run.storage(v) == run.storage(value))
            if not self._is_wide(base) or run.storage(base) in run.wanted:
                continue
            of_views = self._cut_of_base(value, rows)
            call = run.calls[position].call
            cut = of_views and rules.row_wise(
                call, run.spec, {}, self._groups, result_rows=of_views[base]
            )
            if of_views and cut:
                makers[position] = _WideMaker(cut, of_views)
        return makers

    def _cut_of_base(self, value: int, rows: rules.Rows) -> dict[int, rules.Rows] | None:
        """None if `value`, or a tensor that it is a view of, has no such rows."""
        run, cut = self._run, {value: rows}
        while (position := run.views.get(value)) is not None:
            base = run.viewed_by(position)
            if base is None:
                return None
            shape, call = run.spec(base).shape, run.calls[position].call
            dims = range(len(shape))
            tried = (rules.Rows(a, b) for a in dims for b in dims if a <= b)
            even = (r for r in tried if not prod(shape[r.first : r.last + 1]) % self._groups.count)
            fit = (r for r in even if rules.viewed(call, run.spec, r, self._groups) == cut[value])
            of_base = next(fit, None)
            if of_base is None:
                return None
            value, cut[base] = base, of_base
        return cut

    def _open_at(self, calls: Mapping[int, rules.RowWise]) -> str:
        """Return the reason why `calls` (position -> cut) are no region: another call, or the
        caller, reads all rows of a wide result. Return '' if none does."""
        run = self._run
        (seed,) = run.made(self._seed)
        if calls.keys() <= {self._seed}:
            reader = next(iter(run.readers.get(run.storage(seed), ())), None)
            return self._reason(reader) if reader else "its loss is computed by the caller"
        for position in calls:
            for value in run.made(position):
                readers = run.readers.get(run.storage(value), ())
                outside = next((r for r in readers if r not in calls), None)
                if value in self._known and self._is_wide(value) and outside is not None:
                    return self._reason(outside)
        return ""

    def _reason(self, position: int) -> str:
        recorded = self._run.calls[position]
        is_returned = self._run.storages(self._run.made(position)) & self._run.wanted
        what = "makes what the caller gets of all rows" if is_returned else "reads all rows at once"
        return (
            f"{recorded.call.op} in module '{recorded.module or '(root)'}' at "
            f"{recorded.source or 'an unknown line'} {what}"
        )
