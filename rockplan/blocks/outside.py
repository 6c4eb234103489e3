"""Outside: the bytes of a step beside what its blocks save and need, measured.

takes: a model whose blocks are planned, and the option of each. returns: the moments of a step.
guarantees: with the same blocks, the peaks that the moments predict are those measured, as the
ruler counts them; the model is left as it was.

The rest of a model runs as ordinary Python, and is known only by this measurement. Predictions
assume that it needs the same whatever the blocks save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rockplan.graph_builder.costs.ruler import Mark, Stretch, stretches
from rockplan.python_state import trees
from rockplan.python_state.distributed import has_others
from rockplan.python_state.sharding import (
    waiting_bytes,
    waits_for_exchange,
    with_exchange,
)
from rockplan.runtime.autograd import ends_of_backward
from rockplan.solving.loss import Loss
from rockplan.solving.untouched import untouched
from rockplan.values.block_sequence import BoundedOption, StepMoment

Step = Callable[[], object]


def measured_step(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    options: Sequence[BoundedOption],
    step: Step,
    call: tuple[tuple[Any, ...], dict[str, Any], Loss | None],
    written: Collection[torch.Tensor],
    device: torch.device,
) -> MeasuredStep:
    """Return the memory beside the blocks in a `step`, measured after a step that is not. Block i
    runs as options[i] says.

    call: (args, kwargs, loss) of the model; written: tensors beside buffers that a step writes to.
    If gradients wait to be exchanged (`set_requires_gradient_sync(False)`), a step that keeps them
    and one that exchanges them are measured, and the larger figures count.
    """
    marked = functools.partial(_marked, model, blocks, step)
    waits, count = waits_for_exchange(model), STEPS_OF_SEVERAL if has_others() else 1
    courses: list[tuple[Stretch, ...]] = []
    with untouched(model, *call, written) as held, torch.enable_grad():

        def run(what: Callable[[], Any], exchanges: bool = True) -> Any:
            with held.draws_restored(), with_exchange(model) if exchanges else nullcontext():
                return what()

        run(step)  # makes gradients, and fills caches of operators
        for _ in range(count):
            if waits:
                run(step, exchanges=False)
            for exchanges in (False, True) if waits else (True,):
                more = waiting_bytes(model)
                seen = run(lambda: stretches(marked, device), exchanges)
                courses.append(
                    tuple(Stretch(s.mark, s.start_bytes + more, s.peak_bytes + more) for s in seen)
                )
    most = _of_all(courses, max)
    returned = next((s.start_bytes for s in most if s.mark == RETURNED), 0)
    kept_bytes = sum(option.saved_bytes for option in options)
    moments, least = (tuple(moments_of(seen, options)) for seen in (most, _of_all(courses, min)))
    return MeasuredStep(moments, least, returned - kept_bytes)


class MeasuredStep(NamedTuple):
    """The moments of a step, and with the least of several steps. returned_bytes: alive when the
    model returns, beside what its blocks save."""

    moments: tuple[StepMoment, ...]
    least: tuple[StepMoment, ...]
    returned_bytes: int


RETURNED = "returned"
"""The mark at which the forward of the model ends."""


STEPS_OF_SEVERAL = 3
"""Steps that are measured if processes exchange data: a collective of gloo frees memory at another
moment in each step."""


def _of_all(
    courses: Sequence[Sequence[Stretch]], of: Callable[[Iterable[int]], int]
) -> list[Stretch]:
    marks = [stretch.mark for stretch in courses[-1]]
    alike = [course for course in courses if [stretch.mark for stretch in course] == marks]
    return [
        Stretch(same[0].mark, of(s.start_bytes for s in same), of(s.peak_bytes for s in same))
        for same in zip(*alike, strict=True)
    ]


def _marked(model: nn.Module, blocks: Sequence[nn.Module], step: Step, mark: Mark) -> None:
    """The mark comes before other hooks on a block's result, since one may replace the result."""
    returned = functools.partial(_marked_at, mark, RETURNED)
    handles: list[RemovableHandle] = [model.register_forward_hook(returned)]
    for number, block in enumerate(blocks):
        begins = Border(number, is_backward=False, begins=True)
        before = functools.partial(_marked_at, mark, begins)
        after = functools.partial(_after, mark, number)
        handles.append(block.register_forward_pre_hook(before))
        handles.append(block.register_forward_hook(after, prepend=True, with_kwargs=True))
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()


class Border(NamedTuple):
    """A mark: block `number` begins or ends a phase."""

    number: int
    is_backward: bool
    begins: bool


# Not compiled: a compiled caller would leave the marks out.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _marked_at(mark: Mark, place: object, *given: object) -> None:
    mark(place)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after(
    mark: Mark, number: int, module: nn.Module, args: object, kwargs: object, result: object
) -> None:
    """Results that are arguments, or that no plan made, have no marks of their backward."""
    mark(Border(number, is_backward=False, begins=False))
    argument_ids = {id(leaf) for leaf in trees.tree_leaves((args, kwargs))}
    for leaf in trees.tree_leaves(result):
        is_own = isinstance(leaf, torch.Tensor) and id(leaf) not in argument_ids
        nodes = ends_of_backward(leaf) if is_own else None
        if nodes is not None:
            first, last = nodes
            first.register_prehook(
                lambda gradients: mark(Border(number, is_backward=True, begins=True))
            )
            last.register_hook(
                lambda made, argument_ids: mark(Border(number, is_backward=True, begins=False))
            )
            return


def moments_of(seen: Sequence[Stretch], options: Sequence[BoundedOption]) -> Iterator[StepMoment]:
    """Yield a moment for each stretch (from one mark to the next): the bytes that are not the
    blocks' own. seen: stretches of a step; options: of each block, by number."""
    keep: set[int] = set()
    for stretch in seen:
        border: Border | None = None if stretch.mark == RETURNED else stretch.mark
        running = border.number if border is not None and border.begins else None
        if border is not None and not border.begins:
            (keep.discard if border.is_backward else keep.add)(border.number)
        kept_bytes = sum(options[i].saved_bytes for i in keep)
        keeping = max((i + 1 for i in keep if i != running), default=0)
        if border is None or running is None:
            yield StepMoment(stretch.peak_bytes - kept_bytes, keeping)
            continue
        option = options[running]
        own_bytes = option.backward_peak_bytes if border.is_backward else option.forward_peak_bytes
        others_bytes = kept_bytes - (option.saved_bytes if running in keep else 0)
        outside_bytes = stretch.peak_bytes - others_bytes - own_bytes
        yield StepMoment(outside_bytes, keeping, running, border.is_backward)
