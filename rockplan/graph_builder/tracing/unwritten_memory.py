"""Unwritten: uninitialized memory that something reads.

takes: calls, as they are recorded. guarantees: a read of memory that `torch.empty` made and no
operator has written is refused: a kernel outside of PyTorch wrote it, or was skipped under a fake
mode, and a plan would train on random content.
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
    """The function that made memory, and its place."""

    by: str
    module: str
    source: str


class Unwritten:
    """Uninitialized storages (by number): made by `torch.empty`, and not written by a call."""

    def __init__(self) -> None:
        self._made: dict[int, _Maker] = {}

    def __bool__(self) -> bool:
        return bool(self._made)

    def makes(
        self, operator: OpOverload, storages: Iterable[int], module: str, source: str
    ) -> None:
        """Note new storages, if `operator` leaves them uninitialized."""
        if facts.facts_of(operator).makes_unwritten:
            self._made |= dict.fromkeys(storages, _Maker(maker(), module, source))

    def written(self, storages: Iterable[int]) -> None:
        """Note that a call has written to storages, at least to a part of each."""
        for storage in storages:
            self._made.pop(storage, None)

    def refuse(self, storages: Iterable[int], reader: str) -> None:
        """Raise CaptureError if one of the storages that `reader` reads is uninitialized. reader:
        in words, for the message."""
        for storage in storages:
            made = self._made.get(storage)
            if made is not None:
                raise NAMED["unwritten memory"].at(
                    made.module, made.source, reader=reader, maker=made.by
                )
