"""Gradient sums: which additions of a recorded run are made by the engine of autograd.

takes: the view of a run. returns: contributions to the gradient of each target, and the calls that
add them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rockplan.values.graph import Phase, ValueRef, refs

if TYPE_CHECKING:
    from rockplan.graph_builder.recorded.view import RunView

Gradients = tuple[tuple[int, tuple[int, ...]], ...]


def split(view: RunView) -> tuple[Gradients, frozenset[int]]:
    """Return (for each target the gradients that the engine of autograd sums up for it, in its
    order; the positions of the calls that add these). A target without a gradient has none.

    Where a tensor is used several times, the engine adds each arriving gradient to the sum so far.
    A plan leaves these sums to the engine: with several forwards in flight it associates them in
    another way than for a single one, and the bits depend on that.
    """
    producer: dict[int, int] = {}
    uses: Counter[int] = Counter()
    for position, recorded in enumerate(view.calls):
        uses.update(recorded.reads)
        if recorded.phase is Phase.BACKWARD:
            producer |= dict.fromkeys(recorded.call.made, position)
    added: set[int] = set()

    # An `add` of a term that is also read elsewhere may be part of the formula of one gradient (the
    # backward of a custom function: g + g * k): it does not count as a sum of the engine.
    def is_engine_sum(gradient: int) -> bool:
        """Return whether an `add` of two gradients that nothing else reads made this gradient."""
        call = view.calls[producer[gradient]].call if gradient in producer else None
        if call is None or call.op != "aten.add.Tensor" or call.kwargs or uses[gradient]:
            return False
        added_values = [a.index for a in call.args if isinstance(a, ValueRef)]
        spec = view.spec(gradient)
        return len(added_values) == 2 and all(
            view.spec(t).shape == spec.shape and uses[t] == 1 for t in added_values
        )

    def terms(gradient: int, most: int) -> tuple[int, ...]:
        """Return the contributions that add up to `gradient`, `most` of them, in the engine's
        order; the gradient itself if the engine did not add it up. (What the target was added to
        may have the same gradient, and be read several times: that sum is made inside.) Notes the
        positions of additions in `added`."""
        if most <= 1 or not is_engine_sum(gradient):
            return (gradient,)
        position = producer[gradient]
        added.add(position)
        arrived, last = (r.index for r in refs(view.calls[position].call))
        uses[arrived] -= 1
        return (*terms(arrived, most - 1), last)

    pairs = zip(view.gradients, view.arrivals, strict=True)
    gradients = tuple((t, () if g is None else terms(g, most)) for (t, g), most in pairs)
    return gradients, frozenset(added)
