"""Unwritten: memory that no operator has written to, and that something reads.

takes: calls, as they are recorded. guarantees: who reads what `torch.empty` has made before
anything was written to it is refused: a kernel wrote it that is no operator of PyTorch, or was
skipped under a fake mode, and a plan would train on what happens to be in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch._ops import OpOverload

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.tracing.addresses import maker
from rockplan.graph_builder.tracing.refusals import NAMED


@dataclass(frozen=True, slots=True)
class _Maker:
    """Who has made memory, and where."""

    by: str
    module: str
    source: str


class Unwritten:
    """Memory that no call has written to: what `torch.empty` has made. Storages are ordinals."""

    def __init__(self) -> None:
        self._made: dict[int, _Maker] = {}

    def __bool__(self) -> bool:
        return bool(self._made)

    def makes(
        self, operator: OpOverload, storages: Iterable[int], module: str, source: str
    ) -> None:
        """`operator` has made new memory."""
        if facts.facts_of(operator).makes_unwritten:
            self._made |= dict.fromkeys(storages, _Maker(maker(), module, source))

    def written(self, storages: Iterable[int]) -> None:
        """A call has written to them, to a part at least."""
        for storage in storages:
            self._made.pop(storage, None)

    def refuse(self, storages: Iterable[int], reader: str) -> None:
        """Raise where one of them, which `reader` reads, has been written by nothing."""
        for storage in storages:
            made = self._made.get(storage)
            if made is not None:
                raise NAMED["unwritten memory"].at(
                    made.module, made.source, reader=reader, maker=made.by
                )
