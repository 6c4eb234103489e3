"""What the spec of a tensor says of its memory.

takes: a TensorSpec. returns: bytes, dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import prod

import torch

from rockplan.values.graph import TensorSpec

# The caching allocator of CUDA hands out multiples of this.
CUDA_GRANULE_BYTES = 512

# Of which something is remembered; a large model has a thousand.
_SPECS = 1 << 14


def is_floating(spec: TensorSpec) -> bool:
    dtype = dtype_of(spec)
    return dtype.is_floating_point or dtype.is_complex


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype.removeprefix("torch."))
    return dtype


def span(spec: TensorSpec) -> int:
    """Elements of the smallest storage that holds the tensor at offset 0."""
    return spanned(spec.shape, spec.stride)


def spanned(shape: Sequence[int], strides: Sequence[int]) -> int:
    """As `span`."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


@functools.lru_cache(_SPECS)
def needed_bytes(spec: TensorSpec) -> int:
    """Of the smallest storage that holds the tensor where it is."""
    size_bytes = _item_bytes(spec) * (spec.offset + span(spec))
    return allocated_bytes(size_bytes, spec.device)


@functools.lru_cache(_SPECS)
def distinct_bytes(spec: TensorSpec) -> int:
    """Bytes of the elements that the tensor holds, those repeated by expansion once."""
    pairs: Iterable[tuple[int, int]] = zip(spec.shape, spec.stride, strict=True)
    return _item_bytes(spec) * prod(n for n, stride in pairs if stride or not n)


def _item_bytes(spec: TensorSpec) -> int:
    return dtype_of(spec).itemsize


def allocated_bytes(size_bytes: int, device: str) -> int:
    """What the allocator of a device ('cuda:0', or its type) gives out for a storage."""
    granule = CUDA_GRANULE_BYTES if device.startswith("cuda") else 1
    return -(-size_bytes // granule) * granule
