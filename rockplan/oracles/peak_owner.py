"""Peak owner: which tensors own most of the bytes that are alive at one event of a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from rockplan.oracles.lifetimes import Lifetime, Owner, alive_at, lifetimes
from rockplan.values.graph import CDGraph
from rockplan.values.names import activation_names, operation_names, pattern_of
from rockplan.values.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PeakOwner:
    """The group of tensors that owns the most bytes at a peak, as in `reports.explain.Share`.

    pattern: what their names have in common; tenants: how many they are. largest: name of the
    largest of them; module, source: where the largest is made, '' if the caller makes it.
    """

    pattern: str
    tenants: int
    size_bytes: int
    largest: str
    module: str
    source: str

    @property
    def shown(self) -> str:
        return f"{self.tenants} tensors of {self.pattern}" if self.tenants > 1 else self.largest


def peak_owner(graph: CDGraph, schedule: Schedule, event: int) -> PeakOwner | None:
    """Return which group of tensors takes most memory at `event` (a position in the schedule), and
    its largest member; None if nothing is alive. Tensors whose names differ only in numbers are one
    group. The graph needs no prices."""
    operations, storages = operation_names(graph), activation_names(graph)
    groups: dict[str, list[tuple[int, str, Lifetime]]] = {}
    for lifetime in alive_at(lifetimes(graph, schedule), event):
        name = (operations if lifetime.is_of_node else storages)[lifetime.index]
        kind = "" if lifetime.owner is Owner.STORAGE else lifetime.owner.value
        entry = (lifetime.size_bytes, marked(name, kind), lifetime)
        groups.setdefault(marked(pattern_of(name), kind), []).append(entry)
    if not groups:
        return None

    def total_bytes(pattern: str) -> int:
        return sum(size_bytes for size_bytes, *_ in groups[pattern])

    pattern = max(sorted(groups), key=total_bytes)
    _, largest, lifetime = max(groups[pattern], key=lambda entry: entry[:2])
    node = lifetime.maker(graph)
    return PeakOwner(
        pattern=pattern,
        tenants=len(groups[pattern]),
        size_bytes=total_bytes(pattern),
        largest=largest,
        module=node.module if node else "",
        source=node.source if node else "",
    )


def marked(name: str, kind: str) -> str:
    """Return the name, with the kind in parentheses unless it is a storage's."""
    is_marked = kind in (Owner.WORKSPACE.value, Owner.COPY.value, Owner.GENERATOR.value)
    return f"{name} ({kind})" if is_marked else name
