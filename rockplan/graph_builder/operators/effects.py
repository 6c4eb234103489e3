"""Effects: side effects of calls, and the libraries whose operators have none. Does not import
torch."""

from __future__ import annotations

from enum import StrEnum


class Effect(StrEnum):
    """What a call does besides making its results and writing into its arguments.

    A call with an effect runs whether its results are needed or not, as often as in eager execution
    and in eager's order among such calls; it is never recomputed (but for exchanges, with
    `Options.rerun_collectives`), and never run while a step is planned: its cost is estimated.
    """

    NONE = ""
    CHECKS = "has no result, so it is called to raise an error, or to tell somebody"
    COMMUNICATES = "exchanges data between processes"
    WAITS = "waits for data of other processes, in its argument, which it returns"
    UNKNOWN = "nobody knows: its library may raise, count, or exchange data (see rockplan.pure)"

    @property
    def is_exchange(self) -> bool:
        """True for what makes the same of the same data, if all processes call it equally often."""
        return self in (Effect.COMMUNICATES, Effect.WAITS)


_OF_PYTORCH_AND_ROCKPLAN = """
_native _quantized _test aten inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn prim prims
quantization quantized quantized_decomposed rngprims rockplan rockplan_opaque semi_structured sparse
"""
_OF_KERNELS = """
bitsandbytes causal_conv1d cuequivariance fbgemm flash_attn flash_attn_3 liger_kernel mamba_ssm
natten openequivariance pyg quack quanto selective_scan torch_attn torch_cluster torch_scatter
torch_sparse torch_spline_conv torchao torchaudio torchvision transformers transformers_msa xformers
xformers_flash xformers_flash3 xformers_python
"""

PURE_LIBRARIES = frozenset((_OF_PYTORCH_AND_ROCKPLAN + _OF_KERNELS).split())
"""Libraries whose operators have no side effects, if they return something."""

ANNOTATIONS = frozenset(["debug_mode_ops", "profiler"])
"""Libraries whose calls only label regions for a profiler: they are left out of plans."""
