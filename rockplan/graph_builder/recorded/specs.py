"""Memory of a tensor, derived from its spec.

takes: a TensorSpec. returns: bytes, dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
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
    """Return the bytes that the allocator of a device ('cuda:0', or its type) hands out for a
    storage of `size_bytes`."""
    if not device.startswith("cuda"):
        return size_bytes
    rounded = -(-size_bytes // CUDA_GRANULE_BYTES) * CUDA_GRANULE_BYTES
    if not isinstance(size_bytes, Size):
        return rounded
    granules = f"-(-({size_bytes.text}) // {CUDA_GRANULE_BYTES})"
    return Size(rounded, f"{granules} * {CUDA_GRANULE_BYTES}")
