"""Devices: bytes, bandwidth, arithmetic, link, and what PyTorch and its libraries hold on them.

takes: a name ('h100-80'), bytes ('80GiB'), or a device of this machine. returns: Gpu. guarantees:
none about rates: bandwidth and link are a vendor's peaks, written down from memory of data sheets
and white papers, and not compared with them; products are of PyTorch as others measured them
(largest of square ones; zzc0721/torch-performance-test-data on GitHub, database.md), of boards with
SXM where there are others. What steps reach of both is in `rates`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rockplan.budget import parse_budget
from rockplan.errors import InvalidBudget, InvalidInput
from rockplan.machine import total_bytes

_MIB, _GIB = 1 << 20, 1 << 30

CONTEXT_BYTES = 512 * _MIB
"""Bytes of a CUDA context and the kernels of a step, unseen by the caching allocator. 426 MiB
before any kernel is loaded (RTX 6000 Ada, PyTorch 2.10 for CUDA 13: unslothai/unsloth-zoo pull
request 1053), "around 400MB" (pytorch/pytorch issue 109888); the rest is for kernels, which are
loaded as they first run (CUDA_MODULE_LOADING=LAZY). The same for all rows: not measured by us."""


HOST_US = (15.0, 55.0)
"""Microseconds of the host for a call of an operator in eager PyTorch, Python and autograd
included: 14 for a step of GPT-2 large on an idle core of 2026 without a driver, 54 on the host of
our H200 (benchmarks/results/gpu.md, of which a fifth to a third is of CUBLAS_WORKSPACE_CONFIG)."""


@dataclass(frozen=True, slots=True)
class Tflops:
    """Measured rates of dense products, 10^12 operations a second. float32: without TF32."""

    float32: float
    float16: float
    bfloat16: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device; None stands for unknown facts of one that is given in bytes, or is the CPU.

    memory_bytes: all that CUDA gives to programs, its context included. PyTorch states it
    (`total_memory`, and out-of-memory errors: "has a total capacity of"); drivers differ in what
    they keep, and a row has the least that was seen in such errors in public. capability: compute
    capability. bandwidth_gb_s: of its memory, 10^9 bytes a second; link_gb_s: to the host, one way.
    source: of bandwidth, arithmetic and link. at_hand: "cpu", "cuda" or "cuda:1", if it is of this
    machine.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    bandwidth_gb_s: float | None = None
    tflops: Tflops | None = None
    link_gb_s: float | None = None
    at_hand: str = ""
    host_us: tuple[float, float] = HOST_US

    @property
    def is_cpu(self) -> bool:
        """True for the CPU of this machine: it has no caching allocator, and no cuBLAS."""
        return self.at_hand == "cpu"

    @property
    def cublas_bytes(self) -> int:
        """Bytes of the workspace that cuBLAS and cuBLASLt share (TORCH_CUBLASLT_UNIFIED_WORKSPACE,
        on unless set to 0). The first product on a stream takes it from the caching allocator and
        it stays, one for each thread that multiplies: one for forward, one for backward.

        `parseChosenWorkspaceSize` of aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB, or
        ":4096:2:16:8" before Hopper (and, in some releases, on Blackwell: this is the larger one).
        CUBLAS_WORKSPACE_CONFIG sets another size.
        """
        if self.is_cpu:
            return 0
        is_small = self.capability is not None and self.capability < (9, 0)
        return 8 * _MIB + 128 * 1024 if is_small else 32 * _MIB

    @property
    def usable_bytes(self) -> int:
        """Bytes for the caching allocator. (cuDNN takes its workspaces from it, too, for one
        convolution at a time.) On CPU beside as much for Python and its libraries."""
        return max(self.memory_bytes - CONTEXT_BYTES, 0)

    def __str__(self) -> str:
        return f"{self.name} ({self.memory_bytes / _GIB:.2f} GiB)"


def gpu(device: object) -> Gpu:
    """Return what is known of a device (memory, rates, link): of a name in GPUS, in any usual
    spelling ('H100 80GB', 'rtx4090'); of so many bytes (80 * 2**30, '80GiB'), without rates; or of
    one of this machine, with the facts it reports: a `torch.device`, 'cpu', 'cuda' or 'cuda:1'.
    Raises InvalidInput, with the known names."""
    if isinstance(device, Gpu):
        return device
    if isinstance(device, str) and not _OF_THIS_MACHINE.fullmatch(device):
        rows = _named(device)
        if len(rows) == 1:
            return rows[0]
        return _of_bytes(device) if not rows else _raise_unknown(device, rows)
    if isinstance(device, int) and not isinstance(device, bool):
        return _of_bytes(device)
    at_hand = {"cpu": _cpu, "cuda": _cuda}.get(str(device).partition(":")[0])
    return at_hand(device) if at_hand else _raise_unknown(device, GPUS)


def listing() -> str:
    """Return a line of text for each known GPU: name, GiB, GB/s, Tflop/s."""
    lines = (
        f"{row.name:<10} {row.memory_bytes / _GIB:6.2f} GiB  {row.bandwidth_gb_s:6g} GB/s"
        + (f"  {row.tflops.float16:6.0f} Tflop/s at 16 bits" if row.tflops else "")
        for row in GPUS
    )
    return "\n".join(lines)


_NOISE = re.compile(r"nvidia|geforce|tesla|rtx|quadro|sxm\d?|pcie|hbm\d?e?|[^a-z0-9]+")
_SIZE = re.compile(r"(\d+)gi?b")
_BYTES = re.compile(r"\s*[\d._]+\s*[kmgt]i?b\s*", re.IGNORECASE)
_OF_THIS_MACHINE = re.compile(r"cpu|cuda(:\d+)?")


@cache
def _words(name: str) -> frozenset[str]:
    """Return the words that tell a device from others: 'NVIDIA A100-SXM4-80GB' is an a100 of 80."""
    return frozenset(_NOISE.sub(" ", _SIZE.sub(r" \1 ", name.lower())).split())


def _named(name: str) -> tuple[Gpu, ...]:
    """Those with just its words, else those with more. A number alone ('80') means none."""
    asked = _words(name)
    if all(re.fullmatch(r"\d{1,3}", word) for word in asked):
        return ()
    exact = tuple(row for row in GPUS if _words(row.name) == asked)
    return exact or tuple(row for row in GPUS if asked < _words(row.name))


def _of_bytes(text: str | int) -> Gpu:
    if isinstance(text, str) and not _BYTES.fullmatch(text):
        _raise_unknown(text, GPUS)
    try:
        size_bytes = parse_budget(text).size_bytes
    except InvalidBudget as error:
        raise InvalidInput(f"device {text!r}: {error}") from None
    assert size_bytes is not None, "only bytes come here"
    return Gpu(str(text).strip(), size_bytes)


def _cpu(device: Any) -> Gpu:
    memory_bytes = total_bytes()
    if memory_bytes is None:
        raise InvalidInput(
            "nothing says here how much memory the CPU has: give bytes such as '16GiB'"
        )
    return Gpu("cpu", memory_bytes, at_hand="cpu")


def _cuda(device: Any) -> Gpu:
    import torch

    try:
        found = torch.cuda.get_device_properties(device)
    except (AssertionError, RuntimeError) as error:
        raise InvalidInput(
            f"device {str(device)!r} is none of this machine ({str(error).splitlines()[0]}): give "
            "a name that `rockplan fit --gpu list` has, or bytes such as '80GiB'"
        ) from error
    rows = _named(found.name)
    row = rows[0] if len(rows) == 1 else Gpu(found.name, found.total_memory)
    capability = (found.major, found.minor)
    return replace(row, memory_bytes=found.total_memory, capability=capability, at_hand=str(device))


def others_bytes(device: object) -> int:
    """Return how many bytes of a CUDA device of this machine are neither free nor of this process:
    of other processes. 0 if there is none."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free_bytes, all_bytes = torch.cuda.mem_get_info(device)  # type: ignore[arg-type]
    own_bytes = torch.cuda.memory_reserved(device) + CONTEXT_BYTES  # type: ignore[arg-type]
    return max(all_bytes - free_bytes - own_bytes, 0)


def _raise_unknown(device: object, rows: tuple[Gpu, ...]) -> Gpu:
    names = ", ".join(row.name for row in rows)
    which = "is not known" if rows is GPUS else "means more than one"
    raise InvalidInput(
        f"device {device!r} {which}: give one of {names}, bytes such as '80GiB', or a device of "
        "this machine: cpu, cuda, cuda:1"
    )


def _row(
    name: str,
    memory_gib: float,
    capability: tuple[int, int],
    bandwidth_gb_s: float,
    tflops: tuple[float, float, float] | None,
    link_gb_s: float,
) -> Gpu:
    """tflops: in float32, float16, bfloat16, None if nobody has published them."""
    rates = tflops and Tflops(*tflops)
    return Gpu(name, int(memory_gib * _GIB), capability, bandwidth_gb_s, rates, link_gb_s)


_PCIE_3, _PCIE_4, _PCIE_5 = 16.0, 32.0, 64.0
"""GB/s of 16 lanes, one way."""

# fmt: off
GPUS: tuple[Gpu, ...] = (
    _row("t4", 14.56, (7, 5), 320, (4.17, 41.91, 2.46), _PCIE_3),
    _row("v100-16", 15.77, (7, 0), 900, (14.06, 94.84, 10.34), _PCIE_3),
    _row("v100-32", 31.73, (7, 0), 900, (14.06, 94.84, 10.34), _PCIE_3),
    _row("rtx-3090", 23.55, (8, 6), 936, (24.46, 75.64, 76.34), _PCIE_4),
    _row("rtx-4090", 23.52, (8, 9), 1008, (53.84, 168.38, 164.81), _PCIE_4),
    _row("rtx-5090", 31.34, (12, 0), 1792, (69.83, 223.98, 236.99), _PCIE_5),
    _row("rtx-a6000", 47.40, (8, 6), 768, (23.92, 120.49, 123.34), _PCIE_4),
    _row("a10", 21.96, (8, 6), 600, None, _PCIE_4),
    _row("a10g", 21.96, (8, 6), 600, (23.37, 69.47, 69.47), _PCIE_4),
    _row("l4", 22.03, (8, 9), 300, (15.38, 68.83, 70.89), _PCIE_4),
    _row("l40s", 44.31, (8, 9), 864, (46.88, 264.02, 269.15), _PCIE_4),
    _row("a100-40", 39.25, (8, 0), 1555, (18.11, 247.63, 246.33), _PCIE_4),
    _row("a100-80", 79.14, (8, 0), 2039, (19.18, 258.74, 264.53), _PCIE_4),
    _row("h100-80", 79.10, (9, 0), 3350, (52.11, 758.14, 783.66), _PCIE_5),
    _row("h200", 139.71, (9, 0), 4800, (51.34, 759.40, 790.29), _PCIE_5),
    _row("b200", 178.35, (10, 0), 7700, (66.24, 1627.64, 1696.03), _PCIE_5),
)
# fmt: on
