"""Operator facts that the schema does not have, a row for each operator.

A new operator, or a new PyTorch, is a diff of these rows. A row is found by the full name of an
operator ('aten.add.Tensor'), by the name of all its overloads ('aten.copy_'), or by the name that
it has in any library ('*.set_'); 'c10d.*' is for a whole library; higher-order operators have names
without a library ('cond'). `facts.facts_of` adds what the schema says. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

OPAQUE = "rockplan_opaque"
"""The library of operators that stand for functions given to `rockplan.opaque`."""

OPERAND = "an operand"
OPERAND_ON_CPU = "an operand on CPU"
FIRST_OPERAND = "the first operand"


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


ANNOTATIONS = frozenset(["debug_mode_ops", "profiler"])
"""Libraries whose calls only label regions for a profiler: they are left out of plans."""

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

_OF_PROCESSES = ("_c10d_functional", "c10d", "c10d_functional", "symm_mem")
OF_PYTORCH = ANNOTATIONS.union(_OF_PYTORCH_AND_ROCKPLAN.split(), _OF_PROCESSES)
"""Libraries whose kernels cast nothing inside under autocast, but for those that a row names."""


class ViewKind(StrEnum):
    """What kind of view of the first argument a result is."""

    NONE = ""
    PLAIN = "of the same elements"
    SAME_VALUE = "the same tensor"
    OTHER_NUMBERS = "of the same bytes as other numbers"
    BY_STRIDES = "by strides, which may be others than those of the shape rule"


class ShapeRule(StrEnum):
    """How fake results are made, where PyTorch's own rule differs from kernels."""

    OF_PYTORCH = ""
    LIKE_SECOND = "a new tensor of the shape of the second argument"
    STORAGE_AS_LARGE = "a storage as large as that of the first argument"
    STORAGE_OF_ALL = "a storage for all elements, of which the sum or mean takes one"
    STORAGES_OF_BAGS = "on CPU, storages for one more index, and for each offset"
    STORAGE_OF_FIRST = "a storage that has room for all elements of the first argument"
    GROUPED_PRODUCT = "a product of matrices a group, of any dtype"
    OF_A_RUN = "what a run has made"
    STEPS = "of as many elements as the third argument says"
    INPUT_SIZE = "of the sizes that it is given"
    OF_DENSE = "of memory without gaps a view without gaps, where sizes are symbols"


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Facts about one operator. Arguments are named as in its schema.

    called: what users call it. refused_because, instead: reason and remedy in a refusal. writes:
    arguments that a call changes. draws: it draws from a generator; draws_if: only if this argument
    is not zero or False. tells_python: it returns a Python value, by which Python may decide.
    reads_no_element_of: arguments of which the result depends on shape and dtype only. if_argument:
    `writes` and `reads_no_element_of` of a row hold only if this argument is true. runs_again_as:
    the operator that makes the same results without changing what this one `writes`: such arguments
    are None, or left out. recorded_as: the operator that makes the same tensor without the first
    argument. makes_unwritten: the result is uninitialized memory. fills: it writes into its first
    argument without reading that.
    view: kind of view that the result is. changes_shape_as: the view operator for a change of shape
    in place. may_be_constant: the result may stand for a known value, not for any tensor of its
    shape. monotone: a larger argument never gives a smaller result, or never a larger one.
    shape_decided_by: the argument whose values determine the shape of the result (masks among them,
    if it is several tensors); shape_by_values: the shape depends on values. sizes_from: the
    operator that computes the sizes from the deciding argument. shape_rule: how fake results are
    made.
    may_write_into: what the result may be written over, bit for bit the same; writes_as: the
    overload whose in-place variant does that. method: of a tensor, function: of PyTorch, that call
    just this operator, faster than its overload. flops_like: the operator whose formula counts its
    operations. repeats_heads: it repeats heads of keys and values if queries have more.
    matrix_product: selective checkpoints keep its result. casts_inside: types of devices where its
    kernel may call operators that autocast casts for. effect: its side effect.
    """

    name: str
    called: str = ""
    refused_because: str = ""
    instead: str = ""
    writes: tuple[str, ...] = ()
    draws: bool = False
    draws_if: str = ""
    tells_python: bool = False
    reads_no_element_of: tuple[str, ...] = ()
    if_argument: str = ""
    runs_again_as: str = ""
    recorded_as: str = ""
    makes_unwritten: bool = False
    fills: bool = False
    view: ViewKind = ViewKind.NONE
    changes_shape_as: str = ""
    may_be_constant: bool = False
    monotone: bool = False
    shape_decided_by: str = ""
    shape_by_values: bool = False
    sizes_from: str = ""
    shape_rule: ShapeRule = ShapeRule.OF_PYTORCH
    may_write_into: str = ""
    writes_as: str = ""
    method: str = ""
    function: str = ""
    flops_like: str = ""
    repeats_heads: bool = False
    matrix_product: bool = False
    casts_inside: tuple[str, ...] = ()
    effect: Effect = Effect.NONE

    def __str__(self) -> str:
        """Return the name, then a line for each fact."""
        stated = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "name")
        lines = [f"  {name.replace('_', ' '):{_WIDTH}}{_shown(f)}" for name, f in stated if f]
        return "\n".join([self.name, *(lines or ["  makes new tensors, and does nothing else"])])


_WIDTH = len("reads no element of") + 2


def _shown(fact: bool | str | tuple[str, ...]) -> str:
    if isinstance(fact, tuple):
        return ", ".join(fact)
    return "yes" if fact is True else str(fact)


HIGHER_ORDER = (
    "is a higher-order operator: it takes functions and calls them where a plan does not see it, "
    "so it cannot be planned"
)
"""Reason to refuse operators that take functions."""

PARTS = "call what it calls directly, or leave it outside of the planned module"
"""Remedy for a higher-order operator that has no row."""

OF_UNKNOWN_SIZES = "whose sizes a plan cannot follow"
PAD = "use padded tensors (to_padded_tensor, pad_sequence)"
"""Remedy for nested tensors; OF_UNKNOWN_SIZES is the end of the reason."""

_BOTH = (
    "compute both branches and choose (torch.where), or pass a bool: bool(predicate), where that "
    "is made of integer arguments"
)
_LOOP = "write a Python loop, of as many steps for each call"
_EXCHANGES = "exchanges the storage of a tensor, which a plan cannot follow"
_NEW_TENSOR = "create a new tensor instead"
IN_PLACE_ON_PROCESSES = "exchanges data between processes in place, where a plan cannot follow it"
_SYMMETRIC = "exchanges data between processes by memory that they share"
FUNCTIONAL = (
    "use the functional form (torch.distributed._functional_collectives, or DTensor), or plan the "
    "blocks beside it with rockplan.solve_blocks"
)
_STATISTICS = ("running_mean", "running_var")


def _alike(names: str, **facts: Any) -> Iterator[OperatorFacts]:
    """Yield a row for each of these names. In texts, '{name}' stands for the operator's own name,
    '{packet}' for that without library and overload."""
    for name in names.split():
        packet = name.split(".")[1]
        texts = {k: v.format(name=name, packet=packet) for k, v in facts.items() if type(v) is str}
        yield OperatorFacts(name, **(facts | texts))


ROWS: tuple[OperatorFacts, ...] = (
    # Refused: operators that exchange storages, and higher-order operators.
    *_alike(
        "*._resize_output_ *.resize_ *.resize_as_ *.set_ *.storage_resize_ *.swap_data",
        refused_because=_EXCHANGES,
        instead=_NEW_TENSOR,
    ),
    OperatorFacts(
        "associative_scan",
        called="torch associative_scan",
        refused_because=HIGHER_ORDER,
        instead=_LOOP,
    ),
    OperatorFacts("cond", called="torch.cond", refused_because=HIGHER_ORDER, instead=_BOTH),
    OperatorFacts(
        "map_impl",
        called="torch map",
        refused_because=HIGHER_ORDER,
        instead=f"{_LOOP}, or one operation on the whole batch",
    ),
    OperatorFacts("scan", called="torch scan", refused_because=HIGHER_ORDER, instead=_LOOP),
    OperatorFacts(
        "while_loop", called="torch.while_loop", refused_because=HIGHER_ORDER, instead=_LOOP
    ),
    # Exchange of data between processes: in place (refused), and by functional operators, each call
    # of which is followed by one that waits.
    OperatorFacts("c10d.*", refused_because=IN_PLACE_ON_PROCESSES, instead=FUNCTIONAL),
    OperatorFacts("symm_mem.*", refused_because=_SYMMETRIC, instead=FUNCTIONAL),
    *_alike(
        "_c10d_functional.* _c10d_functional_autograd.* c10d_functional.* "
        "_dtensor.shard_dim_alltoall",
        effect=Effect.COMMUNICATES,
    ),
    OperatorFacts("_c10d_functional.wait_tensor", writes=("tensor",), effect=Effect.WAITS),
    OperatorFacts("c10d_functional.wait_tensor", writes=("self",), effect=Effect.WAITS),
    # Operators that return values to Python.
    *_alike(
        "aten._local_scalar_dense.default aten.allclose.default aten.equal.default "
        "aten.is_nonzero.default",
        tells_python=True,
    ),
    # Normalization by batch statistics writes running statistics, although few schemas say so, and
    # does not read them. Its backward ignores them; that of cuDNN and MIOpen is for training only.
    # `_batch_norm_no_update` cannot rerun `_batch_norm_with_update`: it reads running statistics.
    *_alike(
        "aten._batch_norm_with_update.default aten.cudnn_batch_norm_backward.default "
        "aten.miopen_batch_norm_backward.default",
        reads_no_element_of=_STATISTICS,
    ),
    OperatorFacts(
        "aten._native_batch_norm_legit.default",
        reads_no_element_of=_STATISTICS,
        if_argument="training",
        runs_again_as="aten._native_batch_norm_legit.no_stats",
    ),
    *_alike(
        "aten.cudnn_batch_norm.default aten.native_batch_norm.default",
        function="torch._VF.{packet}",
        writes=_STATISTICS,
        reads_no_element_of=_STATISTICS,
        if_argument="training",
        runs_again_as="{name}",
    ),
    OperatorFacts(
        "aten.miopen_batch_norm.default",
        writes=_STATISTICS,
        reads_no_element_of=_STATISTICS,
        if_argument="training",
        runs_again_as="aten.miopen_batch_norm.default",
    ),
    OperatorFacts(
        "aten.native_batch_norm_backward.default",
        reads_no_element_of=_STATISTICS,
        if_argument="train",
    ),
    # Operators that draw from a generator although untagged, or only in training.
    OperatorFacts("aten._cudnn_rnn.default", draws=True, draws_if="dropout"),
    OperatorFacts("aten.mkldnn_rnn_layer.default", draws=True),
    OperatorFacts(
        "aten.native_dropout.default", function="torch._VF.native_dropout", draws_if="train"
    ),
    # Operators that make new tensors, some with shape and dtype of an argument.
    OperatorFacts("aten.bernoulli.p", reads_no_element_of=("self",)),
    *_alike(
        "aten.empty aten.empty_like aten.empty_permuted aten.empty_quantized aten.empty_strided "
        "aten.new_empty aten.new_empty_strided",
        makes_unwritten=True,
    ),
    *_alike(
        "aten.empty_like.default aten.new_empty.default aten.new_empty_strided.default",
        recorded_as="aten.empty_strided.default",
    ),
    *_alike("aten.full_like.default aten.new_full.default", recorded_as="aten.full.default"),
    OperatorFacts("aten.is_same_size.default", reads_no_element_of=("self", "other")),
    *_alike("aten.new_ones.default aten.ones_like.default", recorded_as="aten.ones.default"),
    *_alike("aten.new_zeros.default aten.zeros_like.default", recorded_as="aten.zeros.default"),
    OperatorFacts("aten.rand_like.default", recorded_as="aten.rand.default"),
    OperatorFacts("aten.randn_like.default", recorded_as="aten.randn.default"),
    # Operators that write into their first argument without reading it; other names with a final
    # underscore read it.
    *_alike(
        "aten._foreach_copy_ aten._foreach_zero_ aten._index_put_impl_ aten._unsafe_index_put_ "
        "aten.bernoulli_ aten.cauchy_ aten.copy_ aten.exponential_ aten.fill_ aten.fill_diagonal_ "
        "aten.geometric_ aten.index_copy_ aten.index_fill_ aten.index_put_ aten.log_normal_ "
        "aten.masked_fill_ aten.masked_scatter_ aten.normal_ aten.put_ aten.random_ aten.scatter_ "
        "aten.uniform_ aten.zero_",
        fills=True,
    ),
    # Shapes that depend on values, and the operator that computes the sizes.
    *_alike(
        "aten._unique.default aten._unique2.default aten.bincount.default "
        "aten.unique_consecutive.default aten.unique_dim.default "
        "aten.unique_dim_consecutive.default",
        shape_decided_by="self",
        sizes_from="{name}",
    ),
    OperatorFacts(
        "aten.index.Tensor", shape_decided_by="indices", sizes_from="aten.count_nonzero.default"
    ),
    OperatorFacts(
        "aten.masked_select.default",
        shape_decided_by="mask",
        sizes_from="aten.count_nonzero.default",
    ),
    *_alike(
        "aten.nonzero.default aten.nonzero_numpy.default",
        shape_decided_by="self",
        sizes_from="aten.count_nonzero.default",
    ),
    OperatorFacts(
        "aten.repeat_interleave.Tensor", shape_decided_by="repeats", sizes_from="aten.sum.default"
    ),
    # Of 702 entries of PyTorch's op_db, forward and backward, only scatters make storages whose
    # size depends on that of an argument's storage. Grouped products need bfloat16 only on CUDA.
    OperatorFacts("aten._ctc_loss_backward.Tensor", shape_rule=ShapeRule.LIKE_SECOND),
    OperatorFacts("aten._grouped_mm.default", shape_rule=ShapeRule.GROUPED_PRODUCT),
    *_alike(
        "aten.upsample_nearest1d_backward.default aten.upsample_nearest2d_backward.default "
        "aten.upsample_nearest3d_backward.default aten.upsample_linear1d_backward.default "
        "aten.upsample_bilinear2d_backward.default aten.upsample_bicubic2d_backward.default "
        "aten.upsample_trilinear3d_backward.default "
        "aten._upsample_nearest_exact1d_backward.default "
        "aten._upsample_nearest_exact2d_backward.default "
        "aten._upsample_nearest_exact3d_backward.default "
        "aten._upsample_bicubic2d_aa_backward.default "
        "aten._upsample_bilinear2d_aa_backward.default",
        shape_rule=ShapeRule.INPUT_SIZE,
    ),
    *_alike(
        "aten.as_strided_scatter.default aten.diagonal_scatter.default "
        "aten.select_scatter.default aten.slice_scatter.default",
        shape_rule=ShapeRule.STORAGE_AS_LARGE,
    ),
    *_alike(
        "aten.binary_cross_entropy.default aten.mse_loss.default aten.smooth_l1_loss.default "
        "aten.soft_margin_loss.default",
        shape_rule=ShapeRule.STORAGE_OF_ALL,
    ),
    OperatorFacts("aten.linspace.default", shape_rule=ShapeRule.STEPS),
    *_alike("aten._embedding_bag.default", shape_rule=ShapeRule.STORAGES_OF_BAGS),
    *_alike("aten.col2im.default aten.im2col.default", shape_rule=ShapeRule.STORAGE_OF_FIRST),
    # Views.
    *_alike(
        "aten._conj.default aten._neg_view.default aten.view.dtype",
        view=ViewKind.OTHER_NUMBERS,
    ),
    OperatorFacts("aten.alias.default", view=ViewKind.SAME_VALUE),
    OperatorFacts("aten.as_strided.default", method="as_strided", view=ViewKind.BY_STRIDES),
    *_alike(
        "aten.view.default aten._unsafe_view.default",
        method="view",
        view=ViewKind.BY_STRIDES,
        shape_rule=ShapeRule.OF_DENSE,
    ),
    OperatorFacts("aten.detach.default", view=ViewKind.SAME_VALUE, monotone=True),
    *_alike(
        "aten.expand.default aten.permute.default aten.select.int aten.squeeze.dim aten.t.default "
        "aten.transpose.int aten.unsqueeze.default",
        method="{packet}",
    ),
    *_alike("aten.lift aten.lift_fresh aten.lift_fresh_copy", may_be_constant=True),
    OperatorFacts("aten.lift_fresh.default", view=ViewKind.SAME_VALUE),
    # Attention on CPU has no formula of its own before torch 2.15; its arguments begin as those
    # of CUDA do.
    *_alike(
        "aten._scaled_dot_product_cudnn_attention "
        "aten._scaled_dot_product_cudnn_attention_backward "
        "aten._scaled_dot_product_efficient_attention "
        "aten._scaled_dot_product_efficient_attention_backward "
        "aten._scaled_dot_product_flash_attention "
        "aten._scaled_dot_product_flash_attention_backward",
        repeats_heads=True,
    ),
    OperatorFacts(
        "aten._scaled_dot_product_flash_attention_for_cpu",
        flops_like="aten._scaled_dot_product_flash_attention",
        repeats_heads=True,
    ),
    OperatorFacts(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        flops_like="aten._scaled_dot_product_flash_attention_backward",
        repeats_heads=True,
    ),
    # Matrix products.
    # `addmm` copies its first operand into the result, unless they share memory.
    OperatorFacts(
        "aten.addmm.default",
        may_write_into=FIRST_OPERAND,
        function="torch._VF.addmm",
        matrix_product=True,
    ),
    OperatorFacts("aten.index_add.default", may_write_into=FIRST_OPERAND),
    *_alike(
        "aten.baddbmm.default aten.bmm.default aten.convolution.default aten.mm.default",
        function="torch._VF.{packet}",
        matrix_product=True,
    ),
    # Elementwise operators whose variant that writes into an operand runs the same kernel in the
    # same order: tests compare their bits. Operators whose variants PyTorch generates are not here:
    # they compute into new memory and copy. `add.Scalar` and the like use variants of overloads
    # for tensors (`mul_.Scalar` swaps its operands, and half precision rounds differently).
    # In the backward of softmax each row of the result depends on the same row of both operands:
    # CPU kernels sum a row, then write each element after reading it. The logits of language
    # models are their largest tensors.
    *_alike(
        "aten._log_softmax_backward_data.default aten._softmax_backward_data.default",
        may_write_into=OPERAND_ON_CPU,
        function="torch._VF.{packet}",
    ),
    *_alike(
        "aten.abs.default aten.addcdiv.default aten.addcmul.default aten.clamp.default "
        "aten.clamp_min.default aten.cos.default aten.elu.default aten.elu_backward.default "
        "aten.erf.default aten.gelu_backward.default aten.hardsigmoid.default "
        "aten.hardsigmoid_backward.default aten.hardtanh.default aten.hardtanh_backward.default "
        "aten.leaky_relu.default aten.leaky_relu_backward.default aten.masked_fill.Scalar "
        "aten.mish.default aten.pow.Tensor_Tensor aten.reciprocal.default "
        "aten.sigmoid_backward.default aten.silu_backward.default aten.sin.default "
        "aten.softplus.default aten.tanh_backward.default aten.threshold_backward.default",
        may_write_into=OPERAND,
    ),
    *_alike(
        "aten.add.Scalar aten.div.Scalar aten.mul.Scalar aten.sub.Scalar",
        may_write_into=OPERAND,
        writes_as="aten.{packet}.Tensor",
    ),
    *_alike(
        "aten.add.Tensor aten.div.Tensor aten.exp.default aten.log.default aten.maximum.default "
        "aten.minimum.default aten.mul.Tensor aten.neg.default aten.pow.Tensor_Scalar "
        "aten.relu.default aten.rsqrt.default aten.sigmoid.default aten.sqrt.default "
        "aten.sub.Tensor aten.tanh.default aten.where.self",
        may_write_into=OPERAND,
        function="torch._VF.{packet}",
    ),
    *_alike(
        "aten.gelu.default aten.silu.default",
        may_write_into=OPERAND,
        function="torch._C._nn.{packet}",
    ),
    # Functions of PyTorch that take the same arguments in the same order save 0.4 us, that of a
    # convolution 4 us, those with arguments by name (`out`, `dtype`) 1 to 3 us.
    *_alike(
        "aten.add.out aten.div.out aten.empty_strided.default aten.exp.out aten.log.out "
        "aten.maximum.out aten.minimum.out aten.mul.out aten.neg.out aten.ones.default "
        "aten.pow.Tensor_Scalar_out aten.rsqrt.out aten.scalar_tensor.default aten.sigmoid.out "
        "aten.sqrt.out aten.sub.out aten.tanh.out "
        "aten._log_softmax.default aten._safe_softmax.default aten._softmax.default "
        "aten.cat.default aten.clone.default aten.constant_pad_nd.default aten.embedding.default "
        "aten.mean.dim aten.native_group_norm.default aten.native_layer_norm.default "
        "aten.relu_.default aten.sum.dim_IntList",
        function="torch._VF.{packet}",
    ),
    # Of 446 operators of PyTorch's own database and those of its modules, these. (On CUDA autocast
    # casts for `bilinear`, which calls the former.)
    OperatorFacts("aten._trilinear.default", casts_inside=("cpu",)),
    OperatorFacts("aten.affine_grid_generator.default", casts_inside=("cpu", "cuda")),
    *_alike(
        "aten.add_.Tensor aten.bernoulli_.float aten.copy_.default aten.mul_.Tensor",
        function="torch.Tensor.{packet}",
    ),
    *_alike(
        "aten.avg_pool2d.default aten.max_pool2d_with_indices.default",
        function="torch._C._nn.{packet}",
    ),
    *_alike("aten.ge.Scalar aten.gt.Scalar aten.le.Scalar aten.lt.Scalar", monotone=True),
)


def row_of(name: str) -> OperatorFacts:
    """Return the row of this full name; an empty one if there is none."""
    return _BY_NAME.get(name) or OperatorFacts(name)


_BY_NAME = {row.name: row for row in ROWS}
