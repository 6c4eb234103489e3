"""Inference: the largest batches of evaluation and of generation.

takes: a question, sizes. returns: a row for each length and way. guarantees: the forward runs under
`no_grad` over fake tensors, whose memory is allocated and freed as Python holds them; the
allocator's model finds memory for the row's batch. Kernels compute nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rockplan.errors import InvalidInput
from rockplan.fitting.changes import Holding, left_alive
from rockplan.fitting.reserved import storage_sizes
from rockplan.fitting.timeline import Timeline
from rockplan.fitting.tracker import Tracker
from rockplan.python_state import trees
from rockplan.runtime.planned_state import original_forward
from rockplan.will_it_fit.answer import FitRow
from rockplan.will_it_fit.captured_sizes import Size, SizedCalls
from rockplan.will_it_fit.question import FitQuestion

EVALUATION, GENERATION = "evaluation", "generation"

Largest = Callable[[Callable[[int], Timeline]], int]
"""Timeline of a batch -> the largest batch that fits."""

Step = tuple[Timeline, int]
"""The memory of a forward, and the bytes of the key-value cache that it returns."""


def inference_rows(question: FitQuestion, calls: SizedCalls, largest: Largest) -> Iterator[FitRow]:
    """Yield what fits in evaluation, and, of models with a key-value cache, in generation. Raises
    InvalidInput for a forward that needs values."""
    accepts = inspect.signature(original_forward(question.model)).parameters
    has_cache = {"use_cache", "logits_to_keep"} <= accepts.keys()
    for length in calls.lengths:
        for way in (EVALUATION, GENERATION) if has_cache else (EVALUATION,):

            @functools.cache
            def step(batch: int, at: tuple[int | None, str] = (length, way)) -> Step:
                return _step(question, (batch, at[0]), generates=at[1] == GENERATION)

            batch = largest(lambda batch: step(batch)[0])  # noqa: B023
            timeline, cache_bytes = step(batch or calls.least)
            capacity_bytes = question.on.usable_bytes if batch else None
            yield FitRow(
                length,
                way,
                batch,
                *question.most_held(timeline, capacity_bytes),
                owners=(),
                is_most=batch == calls.most,
                cache_bytes=cache_bytes // ((batch or calls.least) * (length or 1)),
            )


def _step(question: FitQuestion, size: Size, *, generates: bool) -> Step:
    model = question.model
    args, kwargs = question.resized(size)
    if generates:  # as `generate` reads a prompt
        kwargs = {name: value for name, value in kwargs.items() if name != "labels"}
        kwargs |= {"use_cache": True, "logits_to_keep": 1}
    inputs = storage_sizes(trees.tree_leaves((args, kwargs)))
    tracker = Tracker(Holding.ACTIVATIONS, metered=question.on.is_cpu)
    with (
        _evaluating(model),
        question.on_device(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        given, spec = trees.tree_flatten((args, kwargs))
        there = [
            mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in (*given, *model.parameters(), *model.buffers())
        ]
        own_args, own_kwargs = trees.tree_unflatten(there[: len(given)], spec)
        for number, tensor in enumerate(there):
            if isinstance(tensor, torch.Tensor):
                tracker.know(tensor, ("there", number), Holding.INPUTS)
        try:
            with tracker, torch.no_grad():
                result = original_forward(model)(*own_args, **own_kwargs)
        except Exception as error:
            raise InvalidInput(
                f"in evaluation the forward does not run over tensors without values ({error}): "
                "leave inference out"
            ) from error
        cache = getattr(result, "past_key_values", None)
        del result
        cache_bytes = sum(change.size_bytes for change in left_alive(tracker.changes).values())
        del cache
        changes = tuple(tracker.changes)
    resident = {**question.resident, Holding.INPUTS: inputs}
    return Timeline(resident, (changes, changes)), cache_bytes


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
