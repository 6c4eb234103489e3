"""What the sweep over architectures and other checks agree on; imports no PyTorch."""

from __future__ import annotations

import zlib
from typing import Any

TOLERANCE = 0.02

WHERE_TIME_IS_MEASURED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Settings of a process: an allocator that gives out what is asked for."""

FOR_CUDA = {**WHERE_TIME_IS_MEASURED, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Where bits are compared: results of cuBLAS that repeat themselves, too. torch 2.11 parses that
setting at each product: 25 us of the host's time, 78 with a bias."""


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def tolerance_bytes(plan: Any, device: str) -> float:
    """How far a measured peak may be from the predicted one. The smallest block of CUDA's allocator
    is as large as whole activations of small cases: two of them, the value and the gradient of the
    caller's loss, are counted where they may not be."""
    return TOLERANCE * plan.peak_bytes + (2 * 512 if device.startswith("cuda") else 0)
