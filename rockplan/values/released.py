"""Released: leaves of a result that a plan counts as held by the caller, though the caller may drop
them.

takes: graph and interface of a call. returns: what `Options(released=...)` would name, with its
bytes, and the advice in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from rockplan.values.graph import CDGraph
from rockplan.values.interface import Interface
from rockplan.values.plan import format_bytes

WORTH = 0.05
"""Share of a budget below which no advice is given."""


@dataclass(frozen=True, slots=True)
class Releasable:
    """Leaves of the result that could be released. positions: of the leaves, where backward starts
    from a loss alone; size_bytes: of the storages that only these leaves hold."""

    positions: tuple[int, ...]
    size_bytes: int

    def advice(self, used: tuple[int, ...]) -> str:
        """Return a text that says which leaves of the result take how many bytes, and which options
        release them. used: positions of leaves that the options release already."""
        one = len(self.positions) == 1
        names = f"{'leaf' if one else 'leaves'} {', '.join(map(str, self.positions))}"
        released = tuple(sorted({*self.positions, *used}))
        return (
            f"{names} of the result ({format_bytes(self.size_bytes)}; logits, for instance) "
            f"{'counts' if one else 'count'} as held by the caller until backward is over. Where "
            f"the loss is all that a step keeps (as in trainers), Options(released={released}) "
            "leaves that memory to the plan, and with Options(only_loss=True) it is never made"
        )


def releasable(
    graph: CDGraph, interface: Interface, released: tuple[int, ...]
) -> Releasable | None:
    """Return the leaves of the forward's result that the caller is taken to hold though the
    backward does not start from them, with their bytes. None if there are none, or if the backward
    starts from more than scalars. released: positions already released."""
    values, leaves = graph.values, interface.outputs
    starts = [leaf for leaf in leaves if leaf.tangent is not None]
    if any(values[leaf.value].spec.shape for leaf in starts if leaf.value is not None):
        return None
    needed = {values[leaf.value].data for leaf in starts if leaf.value is not None}
    held: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if leaf.value is None or leaf.tangent is not None or position in released:
            continue
        data = graph.data[values[leaf.value].data]
        if not data.kind.resident and data.index not in needed and data.index in graph.held:
            held[position] = data.index
    size_bytes = sum(graph.data[d].size_bytes for d in set(held.values()))
    return Releasable(tuple(held), size_bytes) if held else None
