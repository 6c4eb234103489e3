"""An editable schedule: computations are inserted and removed, and memory is known after each
change.

takes: a priced CDGraph, an order of computations whose forward phase runs every node once.
guarantees: the bytes at each computation are those that `simulate` finds for the same order with
the frees of `schedule.with_frees`; storages of `graph.dropped` that are alive between the phases
count as more than any budget. A change costs what it touches, not the length of the schedule.

A copy of a storage is alive from the computation that makes it to the last read before the storage
is made again. So an insertion is legal by itself: what it reads stays alive up to it, and what it
makes need not have stayed alive before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from rockplan.oracles.graph_view import GraphView
from rockplan.values.graph import CDGraph

MOST_SLOTS, LEAST_SLOTS, POSITIONS = 64, 8, 1 << 17
"""Positions of the backward phase for each computation that a draft begins with, at most and at
least, and about how many in all: many, so that insertions find an empty one, but in a long order
few enough to sum up fast."""

APART = 2
"""Least distance between two computations, in positions."""

EMPTY = -1
"""Stands for the node of a position at which nothing runs."""

_FORBIDDEN = 1 << 46
"""More than any budget; 2 ** 16 storages at once, and sizes beside them, stay within 64 bits."""
_NOWHERE = -1


class _Gaps:
    """Spans of positions in which a storage is alive and unused, as rows (storage, last use, next
    read). In a free row, the next read is `_NOWHERE`."""

    def __init__(self) -> None:
        self._data: NDArray[np.int64] = np.full(0, _NOWHERE)
        self._last_use, self._next_read = self._data.copy(), self._data.copy()
        self._rows: dict[int, list[int]] = {}
        self._free: list[int] = []

    def replace(self, data: int, gaps: Sequence[tuple[int, int]]) -> None:
        """Set the gaps of the storage `data`, in place of those it had: pairs (position of the last
        use, position of the next read) between which it is alive and unused."""
        rows = self._rows.setdefault(data, [])
        while len(rows) > len(gaps):
            row = rows.pop()
            self._next_read[row] = _NOWHERE
            self._free.append(row)
        while len(rows) < len(gaps):
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._data[row] = data
            rows.append(row)
        for row, (last_use, next_read) in zip(rows, gaps, strict=True):
            self._last_use[row], self._next_read[row] = last_use, next_read

    def around(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the storages with a gap strictly around `position`, ascending, and the position at
        which each is read next. (A storage has at most one such gap.)"""
        rows = ((self._last_use < position) & (self._next_read > position)).nonzero()[0]
        data = self._data[rows]
        ascending = data.argsort()
        return data[ascending], self._next_read[rows[ascending]]

    def move(self, moved: NDArray[np.int64]) -> None:
        used = self._next_read != _NOWHERE
        self._last_use[used] = moved[self._last_use[used]]
        self._next_read[used] = moved[self._next_read[used]]

    def _grow(self) -> None:
        size = len(self._data)
        more = np.full(max(size, 64), _NOWHERE)
        self._data = np.concatenate([self._data, more])
        self._last_use = np.concatenate([self._last_use, more])
        self._next_read = np.concatenate([self._next_read, more])
        self._free += range(size, len(self._data))


@dataclass(frozen=True, slots=True)
class _Change:
    """An undo entry: `node` was inserted at `position`, or removed there."""

    position: int
    node: int
    inserted: bool


@dataclass(frozen=True, slots=True)
class _Going:
    """What leaving out a re-execution would remove: positions of computations, and the copies that
    they read, as (storage, position of its maker)."""

    positions: set[int]
    copies: set[tuple[int, int]]


class Draft:
    """One order of computations at positions, an editable schedule (see the module).

    nodes: the node of each position. Positions before `boundary` are the forward phase; the
    backward phase starts at `boundary`.
    """

    def __init__(
        self,
        graph: CDGraph,
        forward: Sequence[int],
        backward: Sequence[int],
        movable: frozenset[int] = frozenset(),
        slots: int | None = None,
    ) -> None:
        """movable: nodes whose first execution may be moved or replaced by a later one. slots:
        positions for each computation; None: by the number of computations."""
        self.graph = graph
        self.movable = movable
        self.view = view = GraphView(graph)
        self.sizes, self.reads = view.sizes, view.reads
        self._tangents, self._state_bytes = view.tangents, view.state_bytes
        self._held, self._dropped, self._made_bytes = view.held, view.dropped, view.made_bytes
        self._is_optional = [n.optional for n in graph.nodes]
        self._takers = {d for takes in view.takes for t in takes for d in t.operands}
        self._uses = [{d for d in (*n.reads, *n.writes) if d in view.may_go} for n in graph.nodes]
        # Nodes that need the same bytes beside storages at any position, a generator state aside.
        self._is_plain = [
            not view.takes[n.index] and self._held.isdisjoint(n.writes) for n in graph.nodes
        ]
        self._gaps, self._changed = _Gaps(), set(view.may_go)
        self._changes: list[_Change] = []
        many = max(LEAST_SLOTS, min(MOST_SLOTS, POSITIONS // max(len(backward), 1)))
        self._slots = many if slots is None else slots
        self._lay_out(forward, backward)

    def _lay_out(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        """Fill an empty draft with computations (node indices), a phase each: forward ones at
        consecutive positions, backward ones with empty positions between them."""
        graph = self.graph
        self.boundary = len(forward)
        self.end = self.boundary + self._slots * (len(backward) + 1)
        self.nodes = [EMPTY] * self.end
        self.time_ns = 0
        # At each position: bytes of live storages and saved generator states; bytes of the
        # computation beside these.
        self._bytes = np.zeros(self.end, dtype=np.int64)
        self._beside = np.full(self.end, -_FORBIDDEN, dtype=np.int64)
        self._beside[self.boundary] = 0
        # Positions, ascending, at which each storage is made and read, and each node runs.
        self._made: list[list[int]] = [[] for _ in graph.data]
        self._read: list[list[int]] = [[] for _ in graph.data]
        self._runs: list[list[int]] = [[] for _ in graph.nodes]
        for d in graph.outputs:
            self._read[d].append(self.boundary)
        for d in self._tangents:
            self._make(d, self.boundary)
        for position, node in enumerate(forward):
            self.insert(position, node)
        for k, node in enumerate(backward, start=1):
            self.insert(self.boundary + self._slots * k, node)
        self.settle()

    @property
    def orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The computations of the forward and of the backward phase, in order."""
        nodes, boundary = self.nodes, self.boundary
        return (
            tuple(n for n in nodes[:boundary] if n != EMPTY),
            tuple(n for n in nodes[boundary:] if n != EMPTY),
        )

    def worst(self) -> tuple[int, int]:
        """Return the first position at which the most bytes are alive, and these bytes."""
        during = self._bytes + self._beside
        position = int(during.argmax())
        return position, int(during[position])

    def during_bytes(self) -> list[int]:
        """Return the bytes alive during each computation, in order."""
        during = (self._bytes + self._beside).tolist()
        return [b for b, node in zip(during, self.nodes, strict=True) if node != EMPTY]

    def reruns(self) -> list[int]:
        """Return the positions of re-executions, by node."""
        runs_of = zip(self._is_optional, self._runs, strict=True)
        return [p for optional, runs in runs_of for p in (runs if optional else runs[1:])]

    def insert(self, position: int, node: int) -> None:
        """Run `node` at an empty position: bytes at all positions and the time of the draft change
        with it, and the undo log gets an entry. What it reads stays alive up to it."""
        before = self._state_span(node)
        insort(self._runs[node], position)
        if self._state_bytes[node]:
            self._weigh_state(node, before)
        self.nodes[position] = node
        self.time_ns += self.graph.nodes[node].time_ns
        for d in self.reads[node]:
            self._add_read(d, position)
        for d in self.graph.nodes[node].writes:
            self._make(d, position)
        self._weigh(position)
        self._changed |= self._uses[node]
        self._changes.append(_Change(position, node, inserted=True))

    def remove(self, position: int) -> None:
        """Run nothing at a position: bytes and time of the draft change, and the undo log gets an
        entry. What only this computation made must be made elsewhere before it is read, as the
        caller ensures."""
        node = self.nodes[position]
        before = self._state_span(node)
        self._runs[node].remove(position)
        if self._state_bytes[node]:
            self._weigh_state(node, before)
        self.nodes[position] = EMPTY
        self._beside[position] = -_FORBIDDEN
        self.time_ns -= self.graph.nodes[node].time_ns
        for d in self.graph.nodes[node].writes:
            self._unmake(d, position)
        for d in self.reads[node]:
            self._drop_read(d, position)
        self._changed |= self._uses[node]
        self._changes.append(_Change(position, node, inserted=False))

    @property
    def changes(self) -> int:
        """The number of changes that can be undone."""
        return len(self._changes)

    def undo(self, remaining: int) -> None:
        """Take back the latest insertions and removals, the last one first, until `changes` of them
        remain in the log."""
        for change in reversed(self._changes[remaining:]):
            if change.inserted:
                self.remove(change.position)
            else:
                self.insert(change.position, change.node)
        del self._changes[remaining:]

    def settle(self) -> None:
        """Commit: clear the undo log."""
        self._changes.clear()

    def leave_out(self, position: int) -> None:
        """Remove the re-execution at `position`, and then those that made only what it read, if
        they may go and nothing else reads it."""
        pending = [position]
        while pending:
            position = pending.pop()
            node = self.nodes[position]
            if node == EMPTY:
                continue
            makers = [self._maker(d, position) for d in self.reads[node]]
            self.remove(position)
            pending += [p for p in makers if self._is_spare(p) and self._is_idle(p)]

    def delay(self, node: int) -> None:
        """Remove the first execution of a node that runs again, if it may be removed and its
        results are unused: then the node runs later."""
        first = self._runs[node][0]
        if self._is_spare(first) and self._is_idle(first):
            self.leave_out(first)

    def is_delayed(self, node: int, position: int) -> bool:
        """True if, with a re-execution of `node` at `position`, its first execution may go: the
        node may move, and nothing reads the results of the first execution before `position`."""
        first, *others = self._runs[node]
        if node not in self.movable or (others and others[0] < position):
            return False
        made = (self._reads_of(d, first) for d in self.graph.nodes[node].writes)
        return not any(read and read[0] < position for read in made)

    def hasten(self, first: int, position: int) -> None:
        """Move the first execution of a node from position `first` to before `position`."""
        node = self.nodes[first]
        slot = self.slot_before(position)
        self.insert(slot, node)
        self.remove(self._runs[node][1])

    def hastened_bytes(self, first: int, position: int) -> int:
        """Return how many bytes fewer would be alive at `position` if the first execution of a
        node, now at position `first`, came before it: operands that are freed less results. 0 if
        the node may not move, or an operand is made later."""
        node = self.nodes[first]
        if node not in self.movable or self._runs[node][0] != first:
            return 0
        makers = {d: self._maker(d, first) for d in self.reads[node]}
        if any(maker >= position for maker in makers.values()):
            return 0
        made = self.graph.nodes[node].writes
        bytes_ = -sum(self.sizes[d] for d in made if self._reads_of(d, first))
        for d, maker in makers.items():
            later = [p for p in self._reads_of(d, maker) if p >= position]
            if d not in self._held and later == [first]:
                bytes_ += self.sizes[d]
        return bytes_

    def around(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the storages that may be freed, are alive and unused at `position`, and next read
        in the backward phase, ascending; and the position at which each is read next."""
        for d in self._changed:
            self._gaps.replace(d, self._gaps_of(d))
        self._changed.clear()
        return self._gaps.around(position)

    def _gaps_of(self, d: int) -> list[tuple[int, int]]:
        """Return the spans in which storage d is alive and unused, as (position of the last use,
        position of the next read). Only spans that end with a read in the backward phase count."""
        made, read = self._made[d], self._read[d]
        gaps: list[tuple[int, int]] = []
        first = bisect_right(read, self.boundary)
        last_use = read[first - 1] if first else EMPTY
        for next_read in read[first:]:
            last_use = max(made[bisect_left(made, next_read) - 1], last_use)
            if next_read - last_use > 1:
                gaps.append((last_use, next_read))
            last_use = next_read
        return gaps

    def outliving(self, position: int) -> Callable[[int], bool]:
        """Return a predicate of storages: True if the copy of it that is made before `position` is
        alive there and read at or after it; held storages are, once made."""
        made_at, read_at, held = self._made, self._read, self._held

        def outlives(d: int) -> bool:
            """Return True if storage d, made before `position`, is alive there and read at or after
            it."""
            made = made_at[d]
            if not made or made[0] >= position:
                return False
            if d in held:
                return True
            read = read_at[d]
            if not read or read[-1] < position:
                return False
            if made[-1] < position:
                return True
            return read[bisect_left(read, position)] < made[bisect_left(made, position)]

        return outlives

    def slot_before(self, position: int) -> int:
        """Return an empty position between `position` and the computation before it. If there is
        none, all positions are renumbered: those that the caller has are invalid then (the undo log
        is renumbered too)."""
        previous = self._previous(position)
        if position - previous < 2 * APART:
            position = self._spread(position)
            previous = self._previous(position)
        return (previous + position + 1) // 2

    def _previous(self, position: int) -> int:
        position -= 1
        while self.nodes[position] == EMPTY and position > self.boundary:
            position -= 1
        return position

    def _spread(self, position: int) -> int:
        """Renumber all positions so that empty ones lie between the computations of the backward
        phase again, in every part of the draft and in the undo log. Returns the new `position`."""
        known = (*(p for runs in self._runs for p in runs), *(c.position for c in self._changes))
        used = {p for p in known if p > self.boundary}
        old = np.array([*range(self.boundary + 1), *sorted(used)])
        room = np.where(old < self.boundary, 1, self._slots)
        new = np.cumsum(room) - room
        # An empty position has the memory of the one right after the computation before it; APART
        # leaves one such position to copy from.
        before = old.tolist()
        nodes = [self.nodes[p] for p in before]
        after = np.where((np.array(nodes) == EMPTY) & (old != self.boundary), old, old + 1)
        source = np.repeat(after, room)
        source[new] = old
        moved = np.full(self.end, EMPTY)
        moved[old] = new
        self.end = len(source)
        self.nodes = [EMPTY] * self.end
        now: dict[int, int] = dict(zip(before, new.tolist(), strict=True))
        for p, node in zip(now.values(), nodes, strict=True):
            self.nodes[p] = node
        self._bytes, self._beside = self._bytes[source], self._beside[source]
        for positions in (*self._made, *self._read, *self._runs):
            positions[:] = map(now.__getitem__, positions)
        self._gaps.move(moved)
        self._changes = [_Change(now[c.position], c.node, c.inserted) for c in self._changes]
        return now[position]

    def fits_without(self, position: int, budget_bytes: int) -> bool:
        """Guess quickly whether the draft stays within budget_bytes without the re-execution at
        `position`. False is certain: at the position with the most bytes, what it makes does not
        fit in place of what is alive only for it.

        True is mostly right. Of 5679 calls on 2+2 layers of T5 at the smallest budget 47 return
        True, all rightly; of 3763 on BERT 68, ten of them wrongly. Without the look at the position
        with the most bytes 4388 returned True, and trying those took as long as all other
        exchanges.
        """
        going: _Going | None = None
        for d in self.graph.nodes[self.nodes[position]].writes:
            made, read = self._made[d], self._read[d]
            if d in self._held:
                continue
            k, j = bisect_left(made, position), bisect_left(read, position)
            if j == len(read) or (k + 1 < len(made) and made[k + 1] < read[j]):
                continue
            start = max(made[k - 1], read[j - 1] if j else EMPTY) + 1
            if start >= position:
                continue
            during_bytes = self._bytes[start:position] + self._beside[start:position]
            room_bytes = budget_bytes - self.sizes[d]
            if int(during_bytes.max()) <= room_bytes:
                continue
            going = going or self._going(position)
            during_bytes[
                [p - start for p in going.positions if start <= p < position]
            ] = -_FORBIDDEN
            worst = int(during_bytes.argmax())
            if int(during_bytes[worst]) - self._freed(going, start + worst) > room_bytes:
                return False
        return True

    def _going(self, position: int) -> _Going:
        """Return what goes if the re-execution at `position` is left out: that one, re-executions
        whose results only these read, and the copies of storages that these read."""
        positions: set[int] = set()
        copies: set[tuple[int, int]] = set()
        pending = [-position]
        while pending:
            # Latest position first: all readers of its results have been looked at.
            p = -heappop(pending)
            if p in positions or (positions and not self._is_idle(p, positions)):
                continue
            positions.add(p)
            for d in self.reads[self.nodes[p]]:
                if d not in self._held:
                    maker = self._maker(d, p)
                    copies.add((d, maker))
                    if self._is_rerun(maker):
                        heappush(pending, -maker)
        return _Going(positions, copies)

    def _freed(self, going: _Going, position: int) -> int:
        """Return the bytes that are alive at `position` only for the computations that go: copies
        that no other computation reads from there on, and saved generator states."""
        freed_bytes = 0
        for p in going.positions:
            freed_bytes += self._state_bytes[self.nodes[p]]
        for d, maker in going.copies:
            if maker <= position:
                reads = self._reads_of(d, maker)
                if reads[-1] >= position and not any(
                    p > position and p not in going.positions for p in reads
                ):
                    freed_bytes += self.sizes[d]
        return freed_bytes

    def _reads_of(self, d: int, maker: int) -> list[int]:
        made, read = self._made[d], self._read[d]
        k = bisect_right(made, maker)
        j = bisect_left(read, maker)
        return read[j : bisect_left(read, made[k]) if k < len(made) else len(read)]

    def _maker(self, d: int, position: int) -> int:
        return self._made[d][bisect_left(self._made[d], position) - 1]

    def _is_rerun(self, position: int) -> bool:
        node = self.nodes[position]
        return node != EMPTY and (self._is_optional[node] or self._runs[node][0] != position)

    def _is_spare(self, position: int) -> bool:
        """True if the computation at `position` may be removed as far as its node goes: the node is
        optional; or it also runs elsewhere, and this is a re-execution, or a first execution that
        may move. False at an empty position."""
        node = self.nodes[position]
        if node != EMPTY and self._is_optional[node]:
            return True
        if node == EMPTY or len(self._runs[node]) == 1:
            return False
        return node in self.movable or self._is_rerun(position)

    def _is_idle(self, position: int, left_out: set[int] | frozenset[int] = frozenset()) -> bool:
        """True if every reader of the results of this re-execution is in `left_out`."""
        for d in self.graph.nodes[self.nodes[position]].writes:
            if d not in self._held and not left_out.issuperset(self._reads_of(d, position)):
                return False
        return True

    def _make(self, d: int, position: int) -> None:
        made, read = self._made[d], self._read[d]
        if d in self._held:
            if not made:
                made.append(position)
                self._alive(d, position, self.end, 1)
            return
        k, j = bisect_left(made, position), bisect_left(read, position)
        ends = made[k] if k < len(made) else self.end
        made.insert(k, position)
        if k == 0:
            last = bisect_left(read, ends)
            stop = read[last - 1] if j < last else position
            self._alive(d, position, stop + 1, 1)
        elif j < len(read) and read[j] < ends:
            self._settle(d, k - 1, j, position, -1)
        else:
            self._alive(d, position, position + 1, 1)

    def _unmake(self, d: int, position: int) -> None:
        """Remove `position` from those at which storage d is made, and d's bytes from the positions
        at which it was alive for that. If it is still read later, the copy made before lives on up
        to there."""
        made, read = self._made[d], self._read[d]
        if d in self._held:
            return
        k, j = bisect_left(made, position), bisect_left(read, position)
        ends = made[k + 1] if k + 1 < len(made) else self.end
        del made[k]
        if j < len(read) and read[j] < ends:
            self._settle(d, k - 1, j, position, 1)
        else:
            self._alive(d, position, position + 1, -1)

    def _add_read(self, d: int, position: int) -> None:
        k, j, is_last = self._reading(d, position)
        self._read[d].insert(j, position)
        if is_last:
            self._settle(d, k - 1, j, position + 1, 1)

    def _drop_read(self, d: int, position: int) -> None:
        self._read[d].remove(position)
        k, j, is_last = self._reading(d, position)
        if is_last:
            self._settle(d, k - 1, j, position + 1, -1)

    def _reading(self, d: int, position: int) -> tuple[int, int, bool]:
        """Return (number of copies of storage d made before `position`, number of its reads before
        `position`, True if no read of the copy that is alive there remains from `position` on). A
        held storage, or one not made before, gives False."""
        made, read = self._made[d], self._read[d]
        k, j = bisect_left(made, position), bisect_left(read, position)
        if not k or d in self._held:
            return k, j, False
        return k, j, j == len(read) or (k < len(made) and read[j] >= made[k])

    def _settle(self, d: int, k: int, j: int, end: int, sign: int) -> None:
        """Count copy k of d as alive (sign 1), or not (-1), from its last use (its making, or the
        read before read j) up to position `end`."""
        made, read = self._made[d][k], self._read[d]
        last = max(made, read[j - 1] if j else EMPTY)
        self._alive(d, last + 1, end, sign, since=made)
        self._stops(d, last)

    def _alive(self, d: int, start: int, end: int, sign: int, since: int | None = None) -> None:
        """Count d as alive (sign 1), or not (-1), at positions from `start` to before `end`. since:
        where the copy is made, if not at `start`."""
        self._bytes[start:end] += sign * self.sizes[d]
        made = start if since is None else since
        if d in self._dropped and start <= self.boundary < end and made < self.boundary:
            self._bytes[self.boundary] += sign * _FORBIDDEN

    def _stops(self, d: int, position: int) -> None:
        if d in self._takers:
            self._weigh(position)

    def _state_span(self, node: int) -> tuple[int, int]:
        """Return the positions (from, to before) between which the generator state of a node that
        runs more than once is saved; an empty span if it need not be."""
        if not self._state_bytes[node] or not self._runs[node]:
            return 0, 0
        runs = self._runs[node]
        return runs[0], runs[-1] + 1 if len(runs) > 1 else runs[0]

    def _weigh_state(self, node: int, before: tuple[int, int]) -> None:
        """Move the bytes of a node's saved generator state from the span of positions `before` to
        its present one. Touches only where the two differ: they may be as long as the draft."""
        after, size_bytes = self._state_span(node), self._state_bytes[node]
        for (start, end), others, sign in ((before, after, -1), (after, before, 1)):
            low, high = (min(max(o, start), end) for o in others)
            self._bytes[start:low] += sign * size_bytes
            self._bytes[high:end] += sign * size_bytes

    def _weigh(self, position: int) -> None:
        """Set the bytes that the computation at `position` needs beside live storages: workspace,
        the generator's state of a re-execution, second copies of held storages; less operands that
        its results take over. Nothing at an empty position."""
        index = self.nodes[position]
        if index == EMPTY:
            return
        node = self.graph.nodes[index]
        beside_bytes = node.workspace_bytes
        if self._runs[index][0] != position:
            beside_bytes += self._state_bytes[index]
        if self._is_plain[index]:
            self._beside[position] = beside_bytes
            return
        again = [d for d in node.writes if d in self._held and self._made[d][0] != position]
        beside_bytes += sum(self.sizes[d] for d in again)
        self._beside[position] = (
            beside_bytes if again else beside_bytes - self._taken_bytes(index, position)
        )

    def _taken_bytes(self, index: int, position: int) -> int:
        taken = self.view.taken(index, lambda d: self._reading(d, position + 1)[2])
        return self.view.bytes_of(taken.operands) if taken else 0
