"""Operator facts that the schema does not have, a row each.

A new operator, or a new PyTorch, is a diff of these rows. A row is found by the full name of an
operator ('aten.add.Tensor'), by the name of all its overloads ('aten.copy_'), or by the name that
it has in any library ('*.set_'); 'c10d.*' is for a whole library; higher-order operators have names
without a library ('cond'). `facts.facts_of` adds what the schema says. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from rockplan.graph_builder.operators.effects import Effect

OPAQUE = "rockplan_opaque"
"""The library of operators that stand for functions given to `rockplan.opaque`."""

OPERAND = "an operand"
OPERAND_ON_CPU = "an operand on CPU"
FIRST_OPERAND = "the first operand"


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
    STORAGE_AS_LARGE = "a storage as large as that of the first argument"
    GROUPED_PRODUCT = "a product of matrices a group, of any dtype"
    OF_A_RUN = "what a run has made"


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
    matrix_product: selective checkpoints keep its result. casts: it only changes dtype or device.
    composite: the operators that it calls are recorded instead. effect: its side effect.
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
    casts: bool = False
    composite: bool = False
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


_OVER = "test_takeover.test_what_is_written_over_an_operand_is_bit_for_bit_the_result"
SHOWN_BY = {
    "called": "test_foreign_kernels.test_operators_that_take_functions_are_refused_by_name",
    "refused_because": "test_operator_facts.test_what_exchanges_storages_is_refused",
    "instead": "test_foreign_kernels.test_operators_that_take_functions_are_refused_by_name",
    "writes": "test_operator_facts.test_statistics_are_written",
    "draws": "test_operator_facts.test_what_draws_moves_a_generator",
    "draws_if": "test_operator_facts.test_what_draws_moves_a_generator",
    "tells_python": "test_operator_facts.test_python_is_told_no_tensor",
    "reads_no_element_of": "test_operator_facts.test_elements_that_are_not_read",
    "if_argument": "test_operator_facts.test_statistics_are_written",
    "runs_again_as": "test_operator_facts.test_what_runs_again_writes_nothing",
    "recorded_as": "test_new_tensors.test_the_same_is_made",
    "makes_unwritten": "test_foreign_kernels.test_memory_that_nothing_has_written_is_not_read",
    "fills": "test_operator_facts.test_fills_read_nothing",
    "view": "test_operator_facts.test_views",
    "changes_shape_as": "test_operator_facts.test_shapes_that_change_in_place",
    "may_be_constant": "test_results.test_values_and_shapes_that_depend_on_them_are_not_remembered",
    "monotone": "test_operator_facts.test_what_is_monotone",
    "shape_decided_by": "test_operator_facts.test_sizes_that_values_decide",
    "shape_by_values": "test_operator_facts.test_sizes_that_values_decide",
    "sizes_from": "test_operator_facts.test_sizes_that_values_decide",
    "shape_rule": "test_operator_facts.test_shape_rules_are_those_of_kernels",
    "may_write_into": _OVER,
    "writes_as": _OVER,
    "method": "test_load.test_methods_call_their_operator_alone",
    "function": "test_load.test_functions_call_their_operator_alone",
    "flops_like": "test_operator_facts.test_operations_are_counted",
    "repeats_heads": "test_operator_facts.test_operations_are_counted",
    "matrix_product": "test_operator_facts.test_matrix_products",
    "casts": "test_operator_facts.test_casts",
    "composite": "test_operator_facts.test_what_is_composite_is_not_recorded",
    "effect": "test_effects.test_effects_of_operators",
}
"""Fact -> the test that goes through the rows which state it."""

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

ROWS: tuple[OperatorFacts, ...] = (
    # Refused: operators that exchange storages, and higher-order operators.
    OperatorFacts("*._resize_output_", refused_because=_EXCHANGES, instead=_NEW_TENSOR),
    OperatorFacts("*.resize_", refused_because=_EXCHANGES, instead=_NEW_TENSOR),
    OperatorFacts("*.resize_as_", refused_because=_EXCHANGES, instead=_NEW_TENSOR),
    OperatorFacts("*.set_", refused_because=_EXCHANGES, instead=_NEW_TENSOR),
    OperatorFacts("*.storage_resize_", refused_because=_EXCHANGES, instead=_NEW_TENSOR),
    OperatorFacts("*.swap_data", refused_because=_EXCHANGES, instead=_NEW_TENSOR),
    OperatorFacts(
        "associative_scan",
        called="torch associative_scan",
        refused_because=HIGHER_ORDER,
        instead=_LOOP,
    ),
    OperatorFacts("cond", called="torch.cond", refused_because=HIGHER_ORDER, instead=_BOTH),
    OperatorFacts("flex_attention", called="flex_attention", composite=True),
    OperatorFacts("flex_attention_backward", called="flex_attention", composite=True),
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
    OperatorFacts("_c10d_functional.*", effect=Effect.COMMUNICATES),
    OperatorFacts("_c10d_functional.wait_tensor", writes=("tensor",), effect=Effect.WAITS),
    OperatorFacts("_c10d_functional_autograd.*", effect=Effect.COMMUNICATES),
    OperatorFacts("c10d_functional.*", effect=Effect.COMMUNICATES),
    OperatorFacts("c10d_functional.wait_tensor", writes=("self",), effect=Effect.WAITS),
    OperatorFacts("_dtensor.shard_dim_alltoall", effect=Effect.COMMUNICATES),
    # Operators that return values to Python.
    OperatorFacts("aten._local_scalar_dense.default", tells_python=True),
    OperatorFacts("aten.allclose.default", tells_python=True),
    OperatorFacts("aten.equal.default", tells_python=True),
    OperatorFacts("aten.is_nonzero.default", tells_python=True),
    # Normalization by batch statistics writes running statistics, although few schemas say so, and
    # does not read them. Its backward ignores them; that of cuDNN and MIOpen is for training only.
    # `_batch_norm_no_update` cannot rerun `_batch_norm_with_update`: it reads running statistics.
    OperatorFacts("aten._batch_norm_with_update.default", reads_no_element_of=_STATISTICS),
    OperatorFacts(
        "aten._native_batch_norm_legit.default",
        reads_no_element_of=_STATISTICS,
        if_argument="training",
        runs_again_as="aten._native_batch_norm_legit.no_stats",
    ),
    OperatorFacts(
        "aten.cudnn_batch_norm.default",
        function="torch._VF.cudnn_batch_norm",
        writes=_STATISTICS,
        reads_no_element_of=_STATISTICS,
        if_argument="training",
        runs_again_as="aten.cudnn_batch_norm.default",
    ),
    OperatorFacts("aten.cudnn_batch_norm_backward.default", reads_no_element_of=_STATISTICS),
    OperatorFacts(
        "aten.miopen_batch_norm.default",
        writes=_STATISTICS,
        reads_no_element_of=_STATISTICS,
        if_argument="training",
        runs_again_as="aten.miopen_batch_norm.default",
    ),
    OperatorFacts("aten.miopen_batch_norm_backward.default", reads_no_element_of=_STATISTICS),
    OperatorFacts(
        "aten.native_batch_norm.default",
        function="torch._VF.native_batch_norm",
        writes=_STATISTICS,
        reads_no_element_of=_STATISTICS,
        if_argument="training",
        runs_again_as="aten.native_batch_norm.default",
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
    OperatorFacts("aten.empty", makes_unwritten=True),
    OperatorFacts("aten.empty_like", makes_unwritten=True),
    OperatorFacts("aten.empty_like.default", recorded_as="aten.empty_strided.default"),
    OperatorFacts("aten.empty_permuted", makes_unwritten=True),
    OperatorFacts("aten.empty_quantized", makes_unwritten=True),
    OperatorFacts("aten.empty_strided", makes_unwritten=True),
    OperatorFacts("aten.full_like.default", recorded_as="aten.full.default"),
    OperatorFacts("aten.is_same_size.default", reads_no_element_of=("self", "other")),
    OperatorFacts("aten.new_empty", makes_unwritten=True),
    OperatorFacts("aten.new_empty.default", recorded_as="aten.empty_strided.default"),
    OperatorFacts("aten.new_empty_strided", makes_unwritten=True),
    OperatorFacts("aten.new_empty_strided.default", recorded_as="aten.empty_strided.default"),
    OperatorFacts("aten.new_full.default", recorded_as="aten.full.default"),
    OperatorFacts("aten.new_ones.default", recorded_as="aten.ones.default"),
    OperatorFacts("aten.new_zeros.default", recorded_as="aten.zeros.default"),
    OperatorFacts("aten.ones_like.default", recorded_as="aten.ones.default"),
    OperatorFacts("aten.rand_like.default", recorded_as="aten.rand.default"),
    OperatorFacts("aten.randn_like.default", recorded_as="aten.randn.default"),
    OperatorFacts("aten.zeros_like.default", recorded_as="aten.zeros.default"),
    # Operators that write into their first argument without reading it; other names with a final
    # underscore read it.
    OperatorFacts("aten._foreach_copy_", fills=True),
    OperatorFacts("aten._foreach_zero_", fills=True),
    OperatorFacts("aten._index_put_impl_", fills=True),
    OperatorFacts("aten._unsafe_index_put_", fills=True),
    OperatorFacts("aten.bernoulli_", fills=True),
    OperatorFacts("aten.cauchy_", fills=True),
    OperatorFacts("aten.copy_", fills=True),
    OperatorFacts("aten.exponential_", fills=True),
    OperatorFacts("aten.fill_", fills=True),
    OperatorFacts("aten.fill_diagonal_", fills=True),
    OperatorFacts("aten.geometric_", fills=True),
    OperatorFacts("aten.index_copy_", fills=True),
    OperatorFacts("aten.index_fill_", fills=True),
    OperatorFacts("aten.index_put_", fills=True),
    OperatorFacts("aten.log_normal_", fills=True),
    OperatorFacts("aten.masked_fill_", fills=True),
    OperatorFacts("aten.masked_scatter_", fills=True),
    OperatorFacts("aten.normal_", fills=True),
    OperatorFacts("aten.put_", fills=True),
    OperatorFacts("aten.random_", fills=True),
    OperatorFacts("aten.scatter_", fills=True),
    OperatorFacts("aten.uniform_", fills=True),
    OperatorFacts("aten.zero_", fills=True),
    # Shapes that depend on values, and the operator that computes the sizes.
    OperatorFacts(
        "aten._unique.default", shape_decided_by="self", sizes_from="aten._unique.default"
    ),
    OperatorFacts(
        "aten._unique2.default", shape_decided_by="self", sizes_from="aten._unique2.default"
    ),
    OperatorFacts(
        "aten.bincount.default", shape_decided_by="self", sizes_from="aten.bincount.default"
    ),
    OperatorFacts(
        "aten.index.Tensor", shape_decided_by="indices", sizes_from="aten.count_nonzero.default"
    ),
    OperatorFacts(
        "aten.masked_select.default",
        shape_decided_by="mask",
        sizes_from="aten.count_nonzero.default",
    ),
    OperatorFacts(
        "aten.nonzero.default", shape_decided_by="self", sizes_from="aten.count_nonzero.default"
    ),
    OperatorFacts(
        "aten.nonzero_numpy.default",
        shape_decided_by="self",
        sizes_from="aten.count_nonzero.default",
    ),
    OperatorFacts(
        "aten.repeat_interleave.Tensor", shape_decided_by="repeats", sizes_from="aten.sum.default"
    ),
    OperatorFacts(
        "aten.unique_consecutive.default",
        shape_decided_by="self",
        sizes_from="aten.unique_consecutive.default",
    ),
    OperatorFacts(
        "aten.unique_dim.default", shape_decided_by="self", sizes_from="aten.unique_dim.default"
    ),
    OperatorFacts(
        "aten.unique_dim_consecutive.default",
        shape_decided_by="self",
        sizes_from="aten.unique_dim_consecutive.default",
    ),
    # Of 702 entries of PyTorch's op_db, forward and backward, only scatters make storages whose
    # size depends on that of an argument's storage. Grouped products need bfloat16 only on CUDA.
    OperatorFacts("aten._grouped_mm.default", shape_rule=ShapeRule.GROUPED_PRODUCT),
    OperatorFacts("aten.as_strided_scatter.default", shape_rule=ShapeRule.STORAGE_AS_LARGE),
    OperatorFacts("aten.diagonal_scatter.default", shape_rule=ShapeRule.STORAGE_AS_LARGE),
    OperatorFacts("aten.select_scatter.default", shape_rule=ShapeRule.STORAGE_AS_LARGE),
    OperatorFacts("aten.slice_scatter.default", shape_rule=ShapeRule.STORAGE_AS_LARGE),
    # Views.
    OperatorFacts("aten._conj.default", view=ViewKind.OTHER_NUMBERS),
    OperatorFacts("aten._neg_view.default", view=ViewKind.OTHER_NUMBERS),
    OperatorFacts("aten._unsafe_view.default", method="view", view=ViewKind.BY_STRIDES),
    OperatorFacts("aten.alias.default", view=ViewKind.SAME_VALUE),
    OperatorFacts("aten.as_strided.default", method="as_strided", view=ViewKind.BY_STRIDES),
    OperatorFacts("aten.detach.default", view=ViewKind.SAME_VALUE, monotone=True),
    OperatorFacts("aten.expand.default", method="expand"),
    OperatorFacts("aten.lift", may_be_constant=True),
    OperatorFacts("aten.lift_fresh", may_be_constant=True),
    OperatorFacts("aten.lift_fresh.default", view=ViewKind.SAME_VALUE),
    OperatorFacts("aten.lift_fresh_copy", may_be_constant=True),
    OperatorFacts("aten.permute.default", method="permute"),
    OperatorFacts("aten.select.int", method="select"),
    OperatorFacts("aten.squeeze.dim", method="squeeze"),
    OperatorFacts("aten.t.default", method="t"),
    OperatorFacts("aten.transpose.int", method="transpose"),
    OperatorFacts("aten.unsqueeze.default", method="unsqueeze"),
    OperatorFacts("aten.view.default", method="view", view=ViewKind.BY_STRIDES),
    OperatorFacts("aten.view.dtype", view=ViewKind.OTHER_NUMBERS),
    # Attention on CPU has no formula of its own before torch 2.15; its arguments begin as those
    # of CUDA do.
    OperatorFacts("aten._scaled_dot_product_cudnn_attention", repeats_heads=True),
    OperatorFacts("aten._scaled_dot_product_cudnn_attention_backward", repeats_heads=True),
    OperatorFacts("aten._scaled_dot_product_efficient_attention", repeats_heads=True),
    OperatorFacts("aten._scaled_dot_product_efficient_attention_backward", repeats_heads=True),
    OperatorFacts("aten._scaled_dot_product_flash_attention", repeats_heads=True),
    OperatorFacts("aten._scaled_dot_product_flash_attention_backward", repeats_heads=True),
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
    OperatorFacts("aten.baddbmm.default", function="torch._VF.baddbmm", matrix_product=True),
    OperatorFacts("aten.bmm.default", function="torch._VF.bmm", matrix_product=True),
    OperatorFacts(
        "aten.convolution.default", function="torch._VF.convolution", matrix_product=True
    ),
    OperatorFacts("aten.mm.default", function="torch._VF.mm", matrix_product=True),
    # Elementwise operators whose variant that writes into an operand runs the same kernel in the
    # same order: tests compare their bits. Operators whose variants PyTorch generates are not here:
    # they compute into new memory and copy. `add.Scalar` and the like use variants of overloads
    # for tensors (`mul_.Scalar` swaps its operands, and half precision rounds differently).
    # In the backward of softmax each row of the result depends on the same row of both operands:
    # CPU kernels sum a row, then write each element after reading it. The logits of language
    # models are their largest tensors.
    OperatorFacts(
        "aten._log_softmax_backward_data.default",
        may_write_into=OPERAND_ON_CPU,
        function="torch._VF._log_softmax_backward_data",
    ),
    OperatorFacts(
        "aten._softmax_backward_data.default",
        may_write_into=OPERAND_ON_CPU,
        function="torch._VF._softmax_backward_data",
    ),
    OperatorFacts("aten.abs.default", may_write_into=OPERAND),
    OperatorFacts("aten.add.Scalar", may_write_into=OPERAND, writes_as="aten.add.Tensor"),
    OperatorFacts("aten.add.Tensor", may_write_into=OPERAND, function="torch._VF.add"),
    OperatorFacts("aten.addcdiv.default", may_write_into=OPERAND),
    OperatorFacts("aten.addcmul.default", may_write_into=OPERAND),
    OperatorFacts("aten.clamp.default", may_write_into=OPERAND),
    OperatorFacts("aten.clamp_min.default", may_write_into=OPERAND),
    OperatorFacts("aten.cos.default", may_write_into=OPERAND),
    OperatorFacts("aten.div.Scalar", may_write_into=OPERAND, writes_as="aten.div.Tensor"),
    OperatorFacts("aten.div.Tensor", may_write_into=OPERAND, function="torch._VF.div"),
    OperatorFacts("aten.elu.default", may_write_into=OPERAND),
    OperatorFacts("aten.elu_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.erf.default", may_write_into=OPERAND),
    OperatorFacts("aten.exp.default", may_write_into=OPERAND, function="torch._VF.exp"),
    OperatorFacts("aten.gelu.default", may_write_into=OPERAND, function="torch._C._nn.gelu"),
    OperatorFacts("aten.gelu_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.hardsigmoid.default", may_write_into=OPERAND),
    OperatorFacts("aten.hardsigmoid_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.hardtanh.default", may_write_into=OPERAND),
    OperatorFacts("aten.hardtanh_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.leaky_relu.default", may_write_into=OPERAND),
    OperatorFacts("aten.leaky_relu_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.log.default", may_write_into=OPERAND, function="torch._VF.log"),
    OperatorFacts("aten.masked_fill.Scalar", may_write_into=OPERAND),
    OperatorFacts("aten.maximum.default", may_write_into=OPERAND, function="torch._VF.maximum"),
    OperatorFacts("aten.minimum.default", may_write_into=OPERAND, function="torch._VF.minimum"),
    OperatorFacts("aten.mish.default", may_write_into=OPERAND),
    OperatorFacts("aten.mul.Scalar", may_write_into=OPERAND, writes_as="aten.mul.Tensor"),
    OperatorFacts("aten.mul.Tensor", may_write_into=OPERAND, function="torch._VF.mul"),
    OperatorFacts("aten.neg.default", may_write_into=OPERAND, function="torch._VF.neg"),
    OperatorFacts("aten.pow.Tensor_Scalar", may_write_into=OPERAND, function="torch._VF.pow"),
    OperatorFacts("aten.pow.Tensor_Tensor", may_write_into=OPERAND),
    OperatorFacts("aten.reciprocal.default", may_write_into=OPERAND),
    OperatorFacts("aten.relu.default", may_write_into=OPERAND, function="torch._VF.relu"),
    OperatorFacts("aten.rsqrt.default", may_write_into=OPERAND, function="torch._VF.rsqrt"),
    OperatorFacts("aten.sigmoid.default", may_write_into=OPERAND, function="torch._VF.sigmoid"),
    OperatorFacts("aten.sigmoid_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.silu.default", may_write_into=OPERAND, function="torch._C._nn.silu"),
    OperatorFacts("aten.silu_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.sin.default", may_write_into=OPERAND),
    OperatorFacts("aten.softplus.default", may_write_into=OPERAND),
    OperatorFacts("aten.sqrt.default", may_write_into=OPERAND, function="torch._VF.sqrt"),
    OperatorFacts("aten.sub.Scalar", may_write_into=OPERAND, writes_as="aten.sub.Tensor"),
    OperatorFacts("aten.sub.Tensor", may_write_into=OPERAND, function="torch._VF.sub"),
    OperatorFacts("aten.tanh.default", may_write_into=OPERAND, function="torch._VF.tanh"),
    OperatorFacts("aten.tanh_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.threshold_backward.default", may_write_into=OPERAND),
    OperatorFacts("aten.where.self", may_write_into=OPERAND, function="torch._VF.where"),
    # Functions of PyTorch that take the same arguments in the same order save 0.4 us, that of a
    # convolution 4 us.
    OperatorFacts("aten._log_softmax.default", function="torch._VF._log_softmax"),
    OperatorFacts("aten._safe_softmax.default", function="torch._VF._safe_softmax"),
    OperatorFacts("aten._softmax.default", function="torch._VF._softmax"),
    OperatorFacts("aten._to_copy.default", casts=True),
    OperatorFacts("aten.add_.Tensor", function="torch.Tensor.add_"),
    OperatorFacts("aten.avg_pool2d.default", function="torch._C._nn.avg_pool2d"),
    OperatorFacts("aten.cat.default", function="torch._VF.cat"),
    OperatorFacts("aten.clone.default", function="torch._VF.clone"),
    OperatorFacts("aten.constant_pad_nd.default", function="torch._VF.constant_pad_nd"),
    OperatorFacts("aten.copy_.default", function="torch.Tensor.copy_"),
    OperatorFacts("aten.embedding.default", function="torch._VF.embedding"),
    OperatorFacts("aten.ge.Scalar", monotone=True),
    OperatorFacts("aten.gt.Scalar", monotone=True),
    OperatorFacts("aten.le.Scalar", monotone=True),
    OperatorFacts("aten.lt.Scalar", monotone=True),
    OperatorFacts(
        "aten.max_pool2d_with_indices.default", function="torch._C._nn.max_pool2d_with_indices"
    ),
    OperatorFacts("aten.mean.dim", function="torch._VF.mean"),
    OperatorFacts("aten.mul_.Tensor", function="torch.Tensor.mul_"),
    OperatorFacts("aten.native_group_norm.default", function="torch._VF.native_group_norm"),
    OperatorFacts("aten.native_layer_norm.default", function="torch._VF.native_layer_norm"),
    OperatorFacts("aten.relu_.default", function="torch._VF.relu_"),
    OperatorFacts("aten.sum.dim_IntList", function="torch._VF.sum"),
)


def row_of(name: str) -> OperatorFacts:
    """Return the row of this full name; an empty one if there is none."""
    return _BY_NAME.get(name) or OperatorFacts(name)


_BY_NAME = {row.name: row for row in ROWS}
