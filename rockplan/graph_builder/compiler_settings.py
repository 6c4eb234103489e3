"""Settings: how Inductor is to make kernels, whatever the caller has set for code of their own.

returns: Inductor's settings, for `torch._inductor.config.patch`. guarantees: one kernel has one
code, wherever it is compiled: nothing that decides what it computes, or what it needs, is left to
globals, environment variables or measured times. Where files lie and what is logged is the
caller's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rockplan.graph_builder.digests import digest

_OURS: dict[str, Any] = {
    # One configuration of each reduction: of several the fastest would be taken when it first runs,
    # which sums in another order on another day.
    "deterministic": True,
    "batch_invariant": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_kernel": False,
    "benchmark_combo_kernel": False,
    "combo_kernels": False,
    "triton.multi_kernel": 0,
    # A row in several programs: none of them may write over it (`in_place`).
    "triton.cooperative_reductions": False,
    "triton.force_cooperative_reductions": False,
    "triton.persistent_reductions": True,
    "triton.mix_order_reduction": True,
    "split_reductions": True,
    "loop_ordering_after_fusion": True,
    # Numbers are those of the operators, but for roundings in between.
    "use_fast_math": False,
    "emulate_precision_casts_on_saved_tensors": True,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
    # What looks at arguments in each call: planning has done so.
    "size_asserts": False,
    "nan_asserts": False,
    "scalar_asserts": False,
    "alignment_asserts": False,
    "runtime_triton_nan_asserts": False,
    "assume_aligned_inputs": False,
    # One function of tensors, in Python, on the stream that is current.
    "cpp_wrapper": False,
    "graph_partition": False,
    "freezing": False,
    "memory_planning": False,
    "generate_intermediate_hooks": False,
    "profile_bandwidth": False,
    "triton.cudagraphs": False,
    "triton.debug_sync_graph": False,
    "triton.debug_sync_kernel": False,
    "cpu_backend": "cpp",
    "cuda_backend": "triton",
}
"""Named because environment variables set their defaults, or to be other than by default."""

FINGERPRINT = digest(["called by function", *_OURS.items()])[:8]
"""Changes where kernels that have the same names may cost other times, or bytes."""

_CALLERS = (
    "aot_inductor",
    "autotune_local",
    "autotune_remote",
    "bundle",
    "bundled",
    "cache",
    "compile_threads",
    "cpp.cxx",
    "cutlass",
    "debug",
    "disable_progress",
    "enable_caching",
    "file_lock",
    "force_disable_caches",
    "fx_graph",
    "quiesce_async",
    "rocm",
    "save_args",
    "strict_static",
    "trace",
    "unsafe_",
    "use_static",
    "verbose_progress",
    "worker_",
)
"""What names of settings begin with that decide nothing of a kernel: processes, caches, logs."""


def settings_for(keeps_roundings: bool) -> dict[str, Any]:
    """Of those that this torch knows."""
    from torch._inductor import config

    ours = {name: value for name, value in _OURS.items() if _is_known(config, name)}
    return _defaults(config) | ours | {"emulate_precision_casts": keeps_roundings}


def _is_known(config: Any, name: str) -> bool:
    for part in name.split("."):
        config = getattr(config, part, _UNKNOWN)
    return config is not _UNKNOWN


_UNKNOWN = object()


def _defaults(config: Any) -> dict[str, Any]:
    """Of all that the caller has set."""
    entries = getattr(config, "_config", {})
    return {
        name: entry.default
        for name, entry in entries.items()
        if entry.alias is None and not name.startswith(_CALLERS) and not config._is_default(name)
    }


@contextlib.contextmanager
def without_deterministic_algorithms() -> Iterator[None]:
    """Which change what Inductor writes (it fills new memory): what is fused has one order."""
    is_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
