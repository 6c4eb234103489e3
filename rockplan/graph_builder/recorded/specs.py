"""Memory of a tensor, derived from its spec, and tensors made from it: the one place that makes
them.

takes: a TensorSpec; the memory, or a function that fills it. returns: bytes, dtypes, tensors (fake
under a FakeTensorMode).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch

from rockplan.values.graph import TensorSpec
from rockplan.values.sizes import Size

# The caching allocator of CUDA hands out multiples of this.
CUDA_GRANULE_BYTES = 512

# Size of caches by spec; a large model has a thousand specs.
_SPECS = 1 << 14


def is_floating(spec: TensorSpec) -> bool:
    dtype = dtype_of(spec)
    return dtype.is_floating_point or dtype.is_complex


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    return dtype


def span(spec: TensorSpec) -> int:
    """Return the number of elements of the smallest storage that holds the tensor at offset 0."""
    return spanned(spec.shape, spec.stride)


def spanned(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return `span` of a shape and strides."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


@functools.lru_cache(_SPECS)
def needed_bytes(spec: TensorSpec) -> int:
    """Return the bytes of the smallest storage that holds the tensor at its offset."""
    size_bytes = _item_bytes(spec) * (spec.offset + span(spec))
    return allocated_bytes(size_bytes, spec.device)


@functools.lru_cache(_SPECS)
def distinct_bytes(spec: TensorSpec) -> int:
    """Return the bytes of the tensor's elements; elements repeated by expansion count once."""
    pairs: Iterable[tuple[int, int]] = zip(spec.shape, spec.stride, strict=True)
    return _item_bytes(spec) * prod(n for n, stride in pairs if stride or not n)


def _item_bytes(spec: TensorSpec) -> int:
    return dtype_of(spec).itemsize


def allocated_bytes(size_bytes: int, device: str) -> int:
    """What the allocator of a device ('cuda:0', or its type) hands out for a storage."""
    if not device.startswith("cuda"):
        return size_bytes
    rounded = -(-size_bytes // CUDA_GRANULE_BYTES) * CUDA_GRANULE_BYTES
    if not isinstance(size_bytes, Size):
        return rounded
    granules = f"-(-({size_bytes.text}) // {CUDA_GRANULE_BYTES})"
    return Size(rounded, f"{granules} * {CUDA_GRANULE_BYTES}")


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


def new_storage(size_bytes: int, device: str) -> torch.UntypedStorage:
    return unwritten(size_bytes, torch.uint8, torch.device(device)).untyped_storage()


def _marked(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    tensor = tensor.conj() if spec.is_conj else tensor
    return torch._neg_view(tensor) if spec.is_neg else tensor
