"""Gradient sums: which additions of a recorded run the engine of autograd makes.

takes: a Capture. returns: the contributions to the gradient of each target, and where the recorded
run adds them.
"""

from __future__ import annotations

from collections import Counter

from rockplan.graph_builder.recorded.run import Capture
from rockplan.values.graph import Phase, ValueRef, refs

Gradients = tuple[tuple[int, tuple[int, ...]], ...]


def contributions(capture: Capture) -> Gradients:
    """For each target, the gradients that the engine sums up for it, in its order.

    Where a tensor is used several times, the engine adds what arrives to what is there. The sums
    are left to it: with several forwards in flight it sums in another association than any one
    of them alone, and the bits depend on that.
    """
    return _split(capture)[0]


def sums(capture: Capture) -> frozenset[int]:
    """Positions of the calls that add these contributions."""
    return _split(capture)[1]


def _split(capture: Capture) -> tuple[Gradients, frozenset[int]]:
    producer: dict[int, int] = {}
    uses: Counter[int] = Counter()
    for position, recorded in enumerate(capture.calls):
        uses.update(recorded.reads)
        if recorded.phase is Phase.BACKWARD:
            producer |= dict.fromkeys(recorded.call.made, position)
    added: set[int] = set()

    # An `add` of what something else reads as well may be part of a formula for one gradient (the
    # backward of a custom function: g + g * k), which nothing in the record tells from a sum.
    def is_engine_sum(gradient: int) -> bool:
        call = capture.calls[producer[gradient]].call if gradient in producer else None
        if call is None or call.op != "aten.add.Tensor" or call.kwargs or uses[gradient]:
            return False
        terms = [a.index for a in call.args if isinstance(a, ValueRef)]
        spec = capture.values[gradient].spec
        return len(terms) == 2 and all(
            capture.values[t].spec.shape == spec.shape and uses[t] == 1 for t in terms
        )

    def split(gradient: int) -> tuple[int, ...]:
        if not is_engine_sum(gradient):
            return (gradient,)
        position = producer[gradient]
        added.add(position)
        arrived, last = (r.index for r in refs(capture.calls[position].call))
        uses[arrived] -= 1
        return (*split(arrived), last)

    gradients = tuple((t, () if g is None else split(g)) for t, g in capture.gradients)
    return gradients, frozenset(added)
