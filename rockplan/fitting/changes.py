"""Changes: the allocations and frees of a step, in order, with their owners.

takes: changes. returns: the most bytes alive, and whose they are; what the caching allocator holds
for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import NamedTuple

import numpy as np

from rockplan.fitting.allocator import Request, Usage, replay
from rockplan.values.sizes import at_sizes, text_of

REPLAYED_STEPS = 3
"""Steps that are replayed: the first finds no segments, the third mostly takes no new ones."""


class Holding(Enum):
    """The owner of bytes in a training step."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    AVERAGES = "averages"
    ACTIVATIONS = "activations"
    OPTIMIZER_TEMPORARIES = "optimizer temporaries"
    WORKSPACES = "workspaces"
    GATHERED = "gathered parameters"
    BUCKETS = "buckets of gradients"
    CALLER = "caller's scalars"


class MemoryChange(NamedTuple):
    """An allocation of `size_bytes` for `key`, or its free. A key is alive once at a time.

    A tuple, since there are tens of thousands for each batch that is tried.
    """

    key: Hashable
    size_bytes: int
    owner: Holding
    is_free: bool = False

    @property
    def freed(self) -> MemoryChange:
        """The free of what this allocates."""
        return MemoryChange(self.key, self.size_bytes, self.owner, is_free=True)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive, and the bytes of each owner then."""

    size_bytes: int
    owners: Mapping[Holding, int]


class Changes:
    """Changes, of which many calls are asked that differ in sizes. known, in its methods: as for
    `values.sizes.at_sizes`, where sizes are expressions."""

    def __init__(self, changes: Iterable[MemoryChange]) -> None:
        self._rows = [*changes]
        places: dict[str, int] = {}
        # Many sizes are equal, or follow from the same expression.
        self._of = [places.setdefault(text_of(c.size_bytes), len(places)) for c in self._rows]
        self._sizes = [
            *{place: c.size_bytes for place, c in zip(self._of, self._rows, strict=True)}.values()
        ]
        owners = [c.owner for c in self._rows]
        self._owned = {o: np.array([o is owner for owner in owners]) for o in dict.fromkeys(owners)}
        self._signs = np.array([-1 if c.is_free else 1 for c in self._rows], dtype=np.int64)

    def peak(
        self, resident: Mapping[Holding, int], known: Mapping[str, int | float] | None = None
    ) -> Peak:
        """As `peak_of`."""
        numbers = np.array([at_sizes(n, known) for n in self._sizes], dtype=np.int64)
        changed_bytes = self._signs * numbers[self._of] if self._rows else self._signs
        live_bytes = np.cumsum([sum(resident.values()), *changed_bytes])
        position = int(live_bytes.argmax())
        alive = Counter(resident)
        for owner, is_owned in self._owned.items():
            alive[owner] += int((changed_bytes * is_owned)[:position].sum())
        return Peak(int(live_bytes[position]), dict(alive))

    def usage(
        self,
        existing_bytes: Iterable[int],
        *,
        expandable: bool = False,
        capacity_bytes: int | None = None,
        known: Mapping[str, int | float] | None = None,
    ) -> Usage:
        """Replay them through a model of PyTorch's caching allocator: what it allocates and
        reserves, and whether a request fails. existing_bytes: of each storage that exists before,
        allocated one by one. Other arguments as for `replay`."""
        numbers = [at_sizes(n, known) for n in self._sizes]
        requests = (
            Request(change.key, None if change.is_free else numbers[place])
            for change, place in zip(self._rows, self._of, strict=True)
        )
        before = enumerate(existing_bytes)
        existing = (Request(("existing", i), at_sizes(n, known)) for i, n in before)
        return replay(chain(existing, requests), expandable, capacity_bytes)


def peak_of(changes: Iterable[MemoryChange], resident: Mapping[Holding, int] | None = None) -> Peak:
    """Return the most bytes alive after any of the changes: how many, of which owners. resident:
    owner -> bytes alive before the first change."""
    return Changes(changes).peak(resident or {})


def replayed_steps(
    first: Iterable[MemoryChange], later: Iterable[MemoryChange]
) -> tuple[MemoryChange, ...]:
    """Return the changes of REPLAYED_STEPS training steps, by numbers as keys: `first`, then
    `later` again and again.
    Memory that a step leaves, and no step frees (a norm, a factor of a scaler), is freed when the
    next step has allocated its own."""
    again = tuple(later)
    alive: dict[Hashable, MemoryChange] = {}
    changes: list[MemoryChange] = []
    for step in (first, *[again] * (REPLAYED_STEPS - 1)):
        for change in step:
            before = alive.pop(change.key, None)
            if not change.is_free:
                made = MemoryChange(len(changes), change.size_bytes, change.owner)
                alive[change.key] = made
                changes.append(made)
            if before is not None:
                changes.append(before.freed)
    return tuple(changes)


def left_alive(changes: Iterable[MemoryChange]) -> dict[Hashable, MemoryChange]:
    """Return the allocations among `changes` that no later one frees, by key. Frees of memory that
    existed before are ignored."""
    alive: dict[Hashable, MemoryChange] = {}
    for change in changes:
        if change.is_free:
            alive.pop(change.key, None)
        else:
            alive[change.key] = change
    return alive
