"""Rates: what training steps reach of a device's products and memory, and what the host takes.

takes: a Gpu. returns: Rates that price a call; the time of a step with the host's share.
guarantees: none. Shares are fitted to published steps (benchmarks/results/fit_published.md says how
far they are off): vision networks on an RTX 3090, MPT on eight A100 and H100, bert-large on a V100,
ours on an H200. Not in any price: products that are small in one dimension, and copies to other
layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rockplan.fitting.gpus import Gpu, Tflops
from rockplan.graph_builder.costs.estimate import CPU_RATES, CUDA_RATES, Rates
from rockplan.graph_builder.operators import facts
from rockplan.values.graph import Call

OF_PRODUCTS, OF_MEMORY = 0.85, 0.85
"""Shares of a device's best product, and of its memory's peak, over a step."""

_OF_ATTENTION, _OF_CONVOLUTIONS, _OF_TF32 = 0.55, 0.65, 0.25
"""Of the best product: fused attention, convolutions, and of those in TF32 (half of the rate of 16
bits, in all published rows) alone what ResNet-50 on an H200 shows."""

_BATCH_NORM_READS = 1.6
"""Batch norm reads its inputs twice: once for the statistics."""

_KERNEL_NS = 3_000
"""Of each call, until its kernel runs at full speed and after."""

CALLS_A_BLOCK = 25
"""What checkpointing a block costs the host besides the calls that run again, in calls: of three
models on our H200."""


@dataclass(frozen=True, slots=True)
class DeviceRates(Rates):
    """Of a GPU: by kind of operator and dtype. has_tf32: convolutions of float32 use it."""

    tflops: Tflops
    has_tf32: bool

    def ns(self, call: Call, dtype: str, flops: int, moved_bytes: float) -> float:
        operations = 1e12 * getattr(self.tflops, dtype.removeprefix("torch."), self.tflops.float32)
        moved_ns = 1e9 * moved_bytes / self.bytes_per_s
        if "batch_norm" in call.op:
            moved_ns *= _BATCH_NORM_READS
        if "convolution" in call.op:
            share = _OF_CONVOLUTIONS
            if self.has_tf32 and dtype == "torch.float32":
                operations, share = 1e12 * self.tflops.float16 / 2, _OF_TF32
            return _KERNEL_NS + moved_ns + 1e9 * flops / (operations * share)
        if "attention" in call.op:
            return _KERNEL_NS + max(
                moved_ns, 1e9 * flops * _done(call) / (operations * _OF_ATTENTION)
            )
        return _KERNEL_NS + max(moved_ns, 1e9 * flops / (operations * OF_PRODUCTS))

    def __str__(self) -> str:
        return f"{self.bytes_per_s:g} B/s, {self.tflops}"


def _done(call: Call) -> float:
    at = _place_of_is_causal(call.op)
    is_causal = at is not None and len(call.args) > at and call.args[at] is True
    return 0.5 if is_causal or ("is_causal", True) in call.kwargs else 1.0


@cache
def _place_of_is_causal(op: str) -> int | None:
    names = [argument.name for argument in facts.resolve(op)._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else None


def step_ns(on: Gpu, device_ns: float, calls: int) -> tuple[float, float]:
    """Return the time of a step with the quickest and with the slowest host, which calls operators
    while the device runs earlier ones. device_ns: of the kernels alone; calls: of operators."""
    least, most = (1e3 * us * calls if on.tflops else 0 for us in on.host_us)
    return max(device_ns, least), max(device_ns, most)


def rates_of(on: Gpu) -> Rates:
    """Return the rates of a device; usual ones if they are unknown."""
    if on.bandwidth_gb_s is None or on.tflops is None:
        return CPU_RATES if on.is_cpu else CUDA_RATES
    has_tf32 = on.capability is not None and on.capability >= (8, 0)
    memory = on.bandwidth_gb_s * 1e9 * OF_MEMORY
    return DeviceRates(memory, on.tflops.float32 * 1e12, on.tflops, has_tf32)
