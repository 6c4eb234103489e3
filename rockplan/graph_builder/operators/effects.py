"""Effects: what calls do beside their results, and which libraries are known to do nothing else.

Text only: torch is not needed to read it.
"""

from __future__ import annotations

from enum import StrEnum


class Effect(StrEnum):
    """What a call does beside making its results and writing into its arguments.

    One that does something runs whether anything needs its results or not, as often as in eager
    execution and in eager's order among those that do, never again, and never while a step is
    planned: what it costs is estimated."""

    NONE = ""
    CHECKS = "has no result, so it is called to raise an error, or to tell somebody"
    COMMUNICATES = "exchanges data between processes"
    WAITS = "waits for data of other processes, in its argument, which it returns"
    UNKNOWN = "nobody knows: its library may raise, count, or exchange data (see rockplan.pure)"


_OF_PYTORCH_AND_ROCKPLAN = """
_native _quantized _test aten inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn prim prims
quantization quantized quantized_decomposed rngprims rockplan rockplan_opaque semi_structured sparse
"""
_OF_KERNELS = """
bitsandbytes causal_conv1d cuequivariance fbgemm flash_attn flash_attn_3 liger_kernel mamba_ssm
natten openequivariance pyg quack selective_scan torch_attn torch_cluster torch_scatter torch_sparse
torch_spline_conv torchao torchaudio torchvision transformers transformers_msa xformers
xformers_flash xformers_flash3 xformers_python
"""

PURE_LIBRARIES = frozenset((_OF_PYTORCH_AND_ROCKPLAN + _OF_KERNELS).split())
"""Libraries whose operators do nothing beside their results, where they have any."""

ANNOTATIONS = frozenset(["debug_mode_ops", "profiler"])
"""Libraries whose calls name what runs for a profiler: a plan has none of them."""
