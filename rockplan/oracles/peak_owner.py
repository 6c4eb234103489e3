"""Peak owner: which tensors own most of the bytes that are alive at one event of a schedule."""

from __future__ import annotations

from rockplan.oracles.lifetimes import Lifetime, Owner, alive_at, lifetimes
from rockplan.values.graph import CDGraph, ComputeNode
from rockplan.values.names import activation_names, operation_names, pattern_of
from rockplan.values.schedule import Schedule


def peak_owner(
    graph: CDGraph, schedule: Schedule, event: int
) -> tuple[str, int, ComputeNode | None]:
    """Return the group of tensors that takes most memory at `event` (a position in the schedule):
    what it is called, its bytes, and what makes the largest of it, None for the caller. '' and 0 if
    nothing is alive. Tensors whose names differ only in numbers are one group. The graph needs no
    prices."""
    operations, storages = operation_names(graph), activation_names(graph)
    groups: dict[str, list[tuple[int, str, Lifetime]]] = {}
    for lifetime in alive_at(lifetimes(graph, schedule), event):
        name = (operations if lifetime.is_of_node else storages)[lifetime.index]
        kind = "" if lifetime.owner is Owner.STORAGE else lifetime.owner.value
        entry = (lifetime.size_bytes, marked(name, kind), lifetime)
        groups.setdefault(marked(pattern_of(name), kind), []).append(entry)
    if not groups:
        return "", 0, None
    group_bytes = {name: sum(size_bytes for size_bytes, *_ in groups[name]) for name in groups}
    pattern = max(sorted(groups), key=lambda name: group_bytes[name])
    count, (_, largest, lifetime) = len(groups[pattern]), max(groups[pattern], key=lambda e: e[:2])
    shown = f"{count} tensors of {pattern}" if count > 1 else largest
    return shown, group_bytes[pattern], lifetime.maker(graph)


def marked(name: str, kind: str) -> str:
    """Return the name, with the kind in parentheses unless it is a storage's."""
    is_marked = kind in (Owner.WORKSPACE.value, Owner.COPY.value, Owner.GENERATOR.value)
    return f"{name} ({kind})" if is_marked else name
