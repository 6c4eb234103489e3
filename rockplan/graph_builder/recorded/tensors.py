"""Tensors made from a TensorSpec: the one place that makes them.

takes: a spec, and the memory or a function that fills it. returns: a tensor, fake under a
FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rockplan.graph_builder.recorded.run import RecordedValue
from rockplan.graph_builder.recorded.specs import dtype_of, span
from rockplan.values.graph import TensorSpec

Fill = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Makes a flat tensor of so many elements, of a dtype, on a device."""


def unwritten(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, device=device)


def tensor_of(spec: TensorSpec, fill: Fill = unwritten, size_bytes: int = 0) -> torch.Tensor:
    """Return a tensor of this spec in a new storage of `size_bytes`, or of as many as it needs."""
    dtype = dtype_of(spec)
    elements = max(spec.offset + span(spec), -(-size_bytes // dtype.itemsize))
    flat = fill(elements, dtype, torch.device(spec.device))
    return _marked(flat.as_strided(spec.shape, spec.stride, spec.offset), spec)


def tensor_in(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor of this spec in an existing storage."""
    made = torch.empty(0, dtype=dtype_of(spec), device=spec.device)
    return _marked(made.set_(storage, spec.offset, spec.shape, spec.stride), spec)


def memory_of(value: RecordedValue) -> torch.UntypedStorage:
    """Return a new storage as large as the value's."""
    return unwritten(
        value.storage_bytes, torch.uint8, torch.device(value.spec.device)
    ).untyped_storage()


def _marked(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    tensor = tensor.conj() if spec.is_conj else tensor
    return torch._neg_view(tensor) if spec.is_neg else tensor
