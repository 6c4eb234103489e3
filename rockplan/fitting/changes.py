"""Changes: the allocations and frees of a step, in order, with their owners.

takes: changes. returns: the most bytes alive, and whose they are; what the caching allocator holds
for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rockplan.fitting.allocator import Request, Usage, replay
from rockplan.values.sizes import at_sizes

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
    def change_bytes(self) -> int:
        return -self.size_bytes if self.is_free else self.size_bytes

    @property
    def freed(self) -> MemoryChange:
        """The free of what this allocates."""
        return MemoryChange(self.key, self.size_bytes, self.owner, is_free=True)

    @property
    def request(self) -> Request:
        """The request to the caching allocator."""
        return Request(self.key, None if self.is_free else self.size_bytes)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive, the bytes of each owner then, and the number of changes before."""

    size_bytes: int
    owners: Mapping[Holding, int]
    position: int


def peak_of(
    changes: Iterable[MemoryChange],
    resident: Mapping[Holding, int] | None = None,
    known: Mapping[str, int | float] | None = None,
) -> Peak:
    """Return the most bytes alive after any of the changes: how many, of which owners, after how
    many changes. resident: owner -> bytes alive before the first change. known: as for
    `values.sizes.at_sizes`, for changes of sizes that are expressions."""
    alive = Counter(resident or {})
    live_bytes = most_bytes = sum(alive.values())
    position, so_far = 0, []
    for _, size_bytes, owner, is_free in changes:
        if type(size_bytes) is not int:
            size_bytes = at_sizes(size_bytes, known)
        change_bytes = -size_bytes if is_free else size_bytes
        so_far.append((owner, change_bytes))
        live_bytes += change_bytes
        if live_bytes > most_bytes:
            most_bytes, position = live_bytes, len(so_far)
    for owner, change_bytes in so_far[:position]:
        alive[owner] += change_bytes
    return Peak(most_bytes, dict(alive), position)


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


def usage(
    held: Iterable[int], changes: Iterable[MemoryChange], *, expandable: bool = False
) -> Usage:
    """Return what PyTorch's caching allocator reserves for `changes`. held: bytes of each storage
    that exists before, allocated one by one; expandable: as for `replay`."""
    existing = (Request(("held", number), size_bytes) for number, size_bytes in enumerate(held))
    return replay((*existing, *(change.request for change in changes)), expandable)


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
