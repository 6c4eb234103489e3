"""Settings: how Inductor compiles our kernels, whatever the caller has set for other code.

returns: Inductor's settings, for `torch._inductor.config.patch`. guarantees: one kernel has one
code, wherever it is compiled: nothing that decides its results or its memory is left to globals,
environment variables or measured times. Paths of files and logging stay as the caller set them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rockplan.graph_builder.digests import digest

_OURS: dict[str, Any] = {
    # One configuration for each reduction: of several, the fastest at the first run would be
    # used, and that may sum in another order on another day.
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
    # No row in several programs: otherwise none of them may write over it (`in_place`).
    "triton.cooperative_reductions": False,
    "triton.force_cooperative_reductions": False,
    "triton.persistent_reductions": True,
    "triton.mix_order_reduction": True,
    "split_reductions": True,
    "loop_ordering_after_fusion": True,
    # Results equal those of the operators, except for roundings in between.
    "use_fast_math": False,
    "emulate_precision_casts_on_saved_tensors": True,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
    # No checks of arguments in each call: planning has checked them.
    "size_asserts": False,
    "nan_asserts": False,
    "scalar_asserts": False,
    "alignment_asserts": False,
    "runtime_triton_nan_asserts": False,
    "assume_aligned_inputs": False,
    # One Python function of tensors, on the current stream.
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
"""Settings whose default we change, or whose default an environment variable may change."""

FINGERPRINT = digest(["called by function", *_OURS.items()])[:8]
"""Changes when kernels of the same names may have other times or bytes."""

_CALLERS = (
    "aot_inductor autotune_local autotune_remote bundle bundled cache compile_threads cpp.cxx "
    "cutlass debug disable_progress enable_caching file_lock force_disable_caches fx_graph "
    "quiesce_async rocm save_args strict_static trace unsafe_ use_static verbose_progress worker_"
)
"""Prefixes, a blank between, of settings that do not affect a kernel: processes, caches, logs."""


def settings_for(keeps_roundings: bool) -> dict[str, Any]:
    """Return the settings for a kernel, as far as this version of torch knows them.
    keeps_roundings: round where eager's operators would."""
    from torch._inductor import config as inductors

    config: Any = inductors

    def is_known(name: str) -> bool:
        owner = config
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        return hasattr(owner, last)

    entries, callers = getattr(config, "_config", {}), tuple(_CALLERS.split())
    defaults = {
        name: entry.default
        for name, entry in entries.items()
        if entry.alias is None and not name.startswith(callers) and not config._is_default(name)
    }
    ours = {name: value for name, value in _OURS.items() if is_known(name)}
    return defaults | ours | {"emulate_precision_casts": keeps_roundings}


@contextlib.contextmanager
def without_deterministic_algorithms() -> Iterator[None]:
    """Switch torch.use_deterministic_algorithms off inside the `with` block: it changes the code
    that Inductor writes (it fills new memory), and fused code has a fixed order anyway."""
    is_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
