"""Index ranges: check indices with known values against the size of what they index.

takes: a CDGraph, real tensors for some of its values. PyTorch's shape rules do not look at indices,
but the kernels of a step will: for example at positions beyond the last one that a model has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rockplan.errors import ForwardRaises
from rockplan.values.graph import Call, CDGraph, ValueRef

_LOOKUPS = {
    "aten.embedding.default": (None, 1),
    "aten.gather.default": (1, 2),
    "aten.index.Tensor": (None, 1),
    "aten.index_select.default": (1, 2),
}
"""Operator -> (position of the argument that names the indexed dimension, None if dimension i is
indexed by the i-th index; position of the indices). The first argument is the indexed tensor."""


def check_index_ranges(graph: CDGraph, values: Mapping[int, torch.Tensor]) -> None:
    """Raise ForwardRaises, which names module and line, if a call looks up an index that is out of
    range. values: value -> real tensor, for the indices that are known."""
    for node in graph.nodes:
        for call in node.calls:
            for size, index in _lookups(graph, call, values):
                if index.numel() and not -size <= int(index.min()) <= int(index.max()) < size:
                    raise ForwardRaises.at(
                        node.module,
                        node.source,
                        f"index {int(index.max())} is out of range: {call.op} looks it up among "
                        f"{size}",
                    )


def _lookups(
    graph: CDGraph, call: Call, values: Mapping[int, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    if call.op not in _LOOKUPS:
        return
    dimension, position = _LOOKUPS[call.op]
    table, indices = call.args[0], call.args[position]
    assert isinstance(table, ValueRef)
    shape = graph.values[table.index].spec.shape
    first = 0 if dimension is None else call.args[dimension]
    for number, index in enumerate(indices if isinstance(indices, tuple) else (indices,)):
        known = values.get(index.index) if isinstance(index, ValueRef) else None
        if known is not None and not known.dtype.is_floating_point and known.dtype != torch.bool:
            assert isinstance(first, int)
            yield shape[first + number], known
