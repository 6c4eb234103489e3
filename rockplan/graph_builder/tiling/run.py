"""RecordedRun: what calls of a recorded run make, and who reads it.

takes: a Capture. returns: a view of it, with each fact found once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rockplan.graph_builder.recorded.run import Capture
from rockplan.values.graph import TensorSpec, ValueRef


class RecordedRun:
    """written: storages that some call changes in place; roots: those that the caller or autograd
    gets; views: value -> position of the call that derives it; maker: value that is no view ->
    position of the call that makes it; live: positions of calls that something needs, without
    views; readers: storage -> those of them that read it."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.written = self.storages(v for c in capture.calls for v in c.writes)
        self.views: dict[int, int] = {}
        self.maker: dict[int, int] = {}
        roots = [o.value for o in capture.outputs if o.value is not None]
        roots += [g for _, g in capture.gradients if g is not None]
        self.roots = self.storages(roots)
        for position, recorded in enumerate(capture.calls):
            read = self.storages(recorded.reads)
            for result in self.made_by(position):
                if self.storage(result) not in read:
                    self.maker.setdefault(result, position)
                elif result not in recorded.reads:
                    self.views.setdefault(result, position)
        self.live = self._live()
        readers: dict[int, list[int]] = defaultdict(list)
        for position in self.live:
            for storage in self.storages(capture.calls[position].reads):
                readers[storage].append(position)
        self.readers = dict(readers)

    def spec(self, value: int) -> TensorSpec:
        return self.capture.values[value].spec

    def storage(self, value: int) -> int:
        return self.capture.values[value].storage

    def storages(self, values: Iterable[int]) -> frozenset[int]:
        return frozenset(self.capture.values[v].storage for v in values)

    def made_by(self, position: int) -> tuple[int, ...]:
        return self.capture.calls[position].call.made

    def viewed_by(self, position: int) -> int | None:
        """The value that a call does nothing to but look at; None for other calls."""
        made, call = self.made_by(position), self.capture.calls[position].call
        is_view = bool(made) and all(self.views.get(r) == position for r in made)
        base = call.args[0] if call.args else None
        return base.index if is_view and isinstance(base, ValueRef) else None

    def is_view(self, position: int) -> bool:
        return self.viewed_by(position) is not None

    def maker_of(self, value: int) -> int | None:
        """Position of the call that makes what `value` is, or is a view of."""
        while (position := self.views.get(value)) is not None:
            base = self.viewed_by(position)
            if base is None:
                return None
            value = base
        return self.maker.get(value)

    def is_plain(self, position: int) -> bool:
        """True if the call may run at any time, on what nobody writes to."""
        recorded = self.capture.calls[position]
        touched = self.storages((*recorded.reads, *self.made_by(position)))
        return recorded.is_repeatable and not (recorded.writes or touched & self.written)

    def _live(self) -> tuple[int, ...]:
        needed, live = set(self.roots), []
        for position in range(len(self.capture.calls) - 1, -1, -1):
            recorded = self.capture.calls[position]
            touched = self.storages((*self.made_by(position), *recorded.writes))
            has_effect = not recorded.is_repeatable or bool(recorded.writes)
            if not self.is_view(position) and (has_effect or touched & needed):
                needed |= self.storages(recorded.reads)
                live.append(position)
        return tuple(reversed(live))
