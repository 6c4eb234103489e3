"""Sizes as the solver sees them: small integers (units), with tiny storages left out.

takes: a CDGraph. returns: Units. guarantees: sizes are rounded up and limits down, so that a
schedule that fits in units fits in bytes; nothing is rounded if the sizes of storages have a large
common divisor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.schedule import keep_all

MAX_UNITS = 1 << 16
"""About the largest sum of all sizes. HiGHS may leave each binary 1e-6 from an integer, which adds
up to less than one unit; rounding one size up costs 1/65536 of all memory at most."""

TINY_SHARE = 1e-3
"""Storages that together stay within this share of the keep-all peak are left out (statistics
of a norm, generator states). Shares from 0 to 0.02 give the same schedules of 12 layers of GPT-2
at ten budgets; without any the solver treats every norm as a choice of its own."""

UNLIMITED = 1 << 62
"""Bytes: a budget that no problem reaches."""


@dataclass(frozen=True, slots=True)
class Units:
    """A problem with sizes in units. view: of the problem, in bytes, in which tiny storages weigh
    nothing.

    `count` units are `size_bytes` bytes. tiny: storages that a solver may take as always alive;
    they and their copies never need more than reserve_bytes.
    """

    view: GraphView
    count: int
    size_bytes: int
    tiny: frozenset[int]
    reserve_bytes: int

    @property
    def graph(self) -> CDGraph:
        return self.view.graph

    def up(self, amount_bytes: int) -> int:
        """Convert bytes to units, rounded up."""
        return -(-amount_bytes * self.count // self.size_bytes)

    def down(self, amount_bytes: int) -> int:
        """Convert bytes to units, rounded down."""
        return amount_bytes * self.count // self.size_bytes


def in_units(problem: CDGraph, tiny_share: float = TINY_SHARE) -> Units:
    """Return the problem with sizes in integer units, and without tiny storages (up to `tiny_share`
    of keep-all's peak). The unit divides all sizes if MAX_UNITS of them suffice (nothing is rounded
    then); else it divides the sizes of activations; else it is 1/MAX_UNITS of memory."""
    tiny, tiny_states, reserve_bytes = _tiny(problem, tiny_share)
    graph = replace(
        problem,
        data=tuple(replace(d, size_bytes=0) if d.index in tiny else d for d in problem.data),
        rng_state_bytes=0 if tiny_states else problem.rng_state_bytes,
    )
    view = GraphView(graph)
    sizes = [view.sizes[d] for d in _activations(graph)]
    others = [*view.sizes, *view.state_bytes, *(n.workspace_bytes for n in graph.nodes)]
    total_bytes = max(sum(sizes) + max(others, default=0), 1)
    for divisor in (math.gcd(*sizes, *others), math.gcd(*sizes)):
        count = divisor * MAX_UNITS // total_bytes
        if count > 0:
            return Units(view, count, divisor, tiny, reserve_bytes)
    return Units(view, 1, -(-total_bytes // MAX_UNITS), tiny, reserve_bytes)


def _tiny(problem: CDGraph, tiny_share: float) -> tuple[frozenset[int], bool, int]:
    """(Storages, whether the states of generators are tiny too, the most bytes that they need
    together.) The smallest ones, up to `tiny_share` of keep-all's peak."""
    limit_bytes = tiny_share * simulate(problem, keep_all(problem)).peak_bytes
    view = GraphView(problem)
    # Generator states: one for each random node, and one during a replay.
    states = view.state_bytes[: len(problem.forward)]
    weights = [(sum(states) + max(states, default=0), -1)]
    # Twice: a re-execution may make a second copy of a storage that is held.
    weights += [(2 * view.sizes[d], d) for d in _activations(problem) if d not in view.dropped]
    chosen: set[int] = set()
    reserve_bytes = 0
    for weight_bytes, index in sorted(weights):
        if reserve_bytes + weight_bytes > limit_bytes:
            break
        reserve_bytes += weight_bytes
        chosen.add(index)
    return frozenset(chosen - {-1}), -1 in chosen, reserve_bytes


def _activations(problem: CDGraph) -> list[int]:
    return [d.index for d in problem.data if d.kind is DataKind.ACTIVATION]
