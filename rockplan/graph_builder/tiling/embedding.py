"""Tied embeddings: the gradient of an embedding is added to that of the tiled head row by row.

takes: a recorded run whose head is tiled. returns: the run without a second gradient as large as
the weight. guarantees: the same numbers as the addition that it replaces.
The gradient of an embedding is zero except for one row for each distinct token of the batch. So the
rows of equal tokens are summed, by the operator that eager uses, into the position of the token's
first occurrence in the batch; all other positions are zero. Then the rows of the batch are added to
the gradient of the head, which dies there (`reinplace`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch

from rockplan.graph_builder.recorded.new_calls import NewCalls
from rockplan.graph_builder.recorded.run import Capture, RecordedCall
from rockplan.values.graph import Call, ValueRef, refs

GRADIENT = "aten.embedding_dense_backward.default"


def with_rows_added(capture: Capture) -> Capture:
    """Return `capture` in which gradients of embeddings are added by rows to the gradient of a
    tiled head that shares their weight; `capture` itself if there are none."""
    sums = dict(_sums(capture))
    if not sums:
        return capture
    new, gone = NewCalls(capture.view), frozenset(sums.values())
    for position, recorded in enumerate(capture.calls):
        if position in sums:
            _add_rows(new, recorded, capture.calls[sums[position]])
        elif position not in gone:
            new.calls.append(recorded)
    joined = capture.tiles.joined | {r for p in sums for r in capture.calls[p].call.made}
    return replace(
        capture,
        values=tuple(new.values),
        calls=tuple(new.calls),
        tiles=replace(capture.tiles, joined=joined),
    )


def _sums(capture: Capture) -> Iterator[tuple[int, int]]:
    """Yield (position of a call that adds the gradient of an embedding to one that is joined from
    parts of the head, position of the call that makes the gradient of the embedding), where nothing
    else reads the latter."""
    view, joined = capture.view, set(capture.tiles.joined)
    for position in sorted(view.sums):
        before, addend = (ref.index for ref in refs(view.calls[position].call))
        maker, of_embedding = view.maker(before), view.maker(addend)
        if maker is None or of_embedding is None or joined.isdisjoint(view.made(maker)):
            continue
        is_read_once = view.readers[view.storage(addend)] == (position,)
        same = view.spec(before) == view.spec(view.made(position)[0])
        is_gradient = view.calls[of_embedding].call.op == GRADIENT and view.is_plain(of_embedding)
        if is_gradient and is_read_once and same and addend not in view.views:
            joined.update(view.made(position))
            yield position, of_embedding


def _add_rows(new: NewCalls, addition: RecordedCall, embedding: RecordedCall) -> None:
    """Append calls to `new` in place of `addition`, which adds the gradient that `embedding` (a
    call of embedding_dense_backward) makes to another: the rows of the batch's tokens are added to
    that one, and the whole gradient is never made."""
    gradient, tokens, rows, padding, by_frequency = embedding.call.args
    assert isinstance(gradient, ValueRef) and isinstance(tokens, ValueRef)
    assert isinstance(padding, int)
    spec = new.values[tokens.index].spec
    count, integers = prod(spec.shape), {"dtype": torch.int64}
    on_device = {**integers, "device": torch.device(spec.device)}

    def make(op: str, *args: Any, **kwargs: Any) -> ValueRef:
        return ValueRef(*new.add(embedding, op, args, tuple(kwargs.items())))

    token_copy = make(_COPY, tokens, **integers, memory_format=torch.contiguous_format)
    if padding >= 0:  # the row `padding` gets no gradient
        is_none = make("aten.unsqueeze.default", make(_EQUAL, token_copy, padding), len(spec.shape))
        gradient = make("aten.masked_fill.Scalar", gradient, is_none, 0)
    flat = make(_VIEW, token_copy, (count,))
    table = make("aten.full.default", (rows,), count, **on_device)
    places = make("aten.arange.default", count, **on_device)
    table = make("aten.scatter_reduce.two", table, 0, flat, places, "amin")
    first = make(_VIEW, make("aten.gather.default", table, 0, flat), spec.shape)
    summed = make(GRADIENT, gradient, first, count, -1, by_frequency)
    terms = (addition.call.args[0], 0, flat, summed)
    new.write(addition, Call("aten.index_add.default", terms, (), addition.call.results))


_COPY, _VIEW, _EQUAL = "aten._to_copy.default", "aten.view.default", "aten.eq.Scalar"
