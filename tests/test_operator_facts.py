"""Facts about operators: each is shown by a test that goes through the rows which state it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import flop_registry

from rockplan.graph_builder.costs.estimate import flops_of
from rockplan.graph_builder.operators import facts, layouts
from rockplan.graph_builder.operators.rows import (
    HIGHER_ORDER,
    ROWS,
    OperatorFacts,
    ShapeRule,
    ViewKind,
)
from rockplan.graph_builder.operators.symbols import hints, new_env, new_symbol, printed
from rockplan.graph_builder.tracing.value_shapes import rule_of
from rockplan.values.graph import Call, TensorSpec, ValueRef

aten = torch.ops.aten
TESTS = Path(__file__).parent

ABSENT = {"*.storage_resize_", "*.swap_data", "aten._unsafe_index_put_"}
"""Operators of other versions of PyTorch."""


_OVER = "test_takeover.test_what_overwrites_an_operand_is_bitwise_the_result"
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
    "may_be_constant": "test_results.test_values_and_their_shapes_are_not_remembered",
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
    "casts_inside": "test_effects.test_kernels_cast_inside_as_in_eager",
    "effect": "test_effects.test_effects_of_operators",
}
"""Fact -> the test that goes through the rows which state it."""


def stating(fact: str) -> list[OperatorFacts]:
    return [row for row in ROWS if getattr(row, fact)]


def of_row(row: OperatorFacts) -> list[OpOverload]:
    """The overloads that a row is about."""
    if row.name.endswith(".*"):
        return of_library(row.name.removesuffix(".*"))
    namespace, packet, *overload = row.name.replace("*", "aten").split(".")
    found = getattr(getattr(torch.ops, namespace), packet)
    return [getattr(found, name) for name in overload or found.overloads()]


def of_library(library: str) -> list[OpOverload]:
    names = [
        n.split("::")[1]
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith(f"{library}::")
    ]
    packets = [getattr(getattr(torch.ops, library), name.split(".")[0], None) for name in names]
    return [getattr(p, overload) for p in packets if p for overload in p.overloads()]


def in_torch(rows: list[OperatorFacts]) -> list[OperatorFacts]:
    return [row for row in rows if row.name not in ABSENT and "." in row.name]


def by_name(rows: list[OperatorFacts]) -> Any:
    return pytest.mark.parametrize("row", in_torch(rows), ids=lambda row: row.name)


def test_each_operator_has_one_row_and_states_something() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(replace(row, name="") != OperatorFacts("") for row in ROWS)


def test_each_fact_names_a_test() -> None:
    assert [*SHOWN_BY] == [f.name for f in fields(OperatorFacts) if f.name != "name"]
    for test in SHOWN_BY.values():
        file, function = test.split(".")
        assert f"def {function}(" in (TESTS / f"{file}.py").read_text(), test


def test_rows_are_about_operators_of_pytorch() -> None:
    for row in in_torch(list(ROWS)):
        named = {*row.writes, *row.reads_no_element_of, row.if_argument, row.shape_decided_by}
        for operator in of_row(row):
            assert (named | {row.draws_if}) - {""} <= set(facts.argument_names(operator)), row
            for other in (row.runs_again_as, row.recorded_as, row.sizes_from, row.writes_as):
                assert not other or isinstance(facts.resolve(other), OpOverload), row


@by_name([row for row in stating("refused_because") if row.name.startswith("*.")])
def test_what_exchanges_storages_is_refused(row: OperatorFacts) -> None:
    for operator in of_row(row):
        known = facts.facts_of(operator)
        assert (known.refused_because, known.instead) == (row.refused_because, row.instead)
        assert "self" in known.writes


def test_rows_of_any_library() -> None:
    with torch.library._scoped_library("rockplan_test", "FRAGMENT") as library:
        library.define("set_(Tensor(a!) self) -> ()")
        found = facts.facts_of(torch.ops.rockplan_test.set_.default)
    assert found.refused_because == facts.facts_of(aten.set_.source_Tensor).refused_because


def statistics(row: OperatorFacts, training: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Arguments of a normalization, and its running statistics."""
    torch.manual_seed(0)
    running = [torch.full((3,), 0.5), torch.full((3,), 2.0)]
    known = {
        **dict(zip(("running_mean", "running_var"), running, strict=True)),
        **{name: torch.randn(4, 3, 5) for name in ("input", "grad_out")},
        **{name: torch.rand(3) + 0.5 for name in ("weight", "save_mean", "save_invstd")},
        "bias": torch.zeros(3),
        "training": training,
        "train": training,
        "momentum": 0.1,
        "eps": 1e-5,
        "output_mask": [True, True, True],
    }
    return [known[name] for name in facts.argument_names(facts.resolve(row.name))], running


ON_CPU = [r for r in stating("reads_no_element_of") if "batch_norm" in r.name]
ON_CPU = [r for r in ON_CPU if "cudnn" not in r.name and "miopen" not in r.name]


@pytest.mark.parametrize("training", [True, False])
@by_name([row for row in ON_CPU if "backward" not in row.name])
def test_statistics_are_written(row: OperatorFacts, training: bool) -> None:
    operator = facts.resolve(row.name)
    args, running = statistics(row, training)
    before = [r.clone() for r in running]
    said = facts.written(operator, tuple(args), {})
    operator(*args)
    changed = [not torch.equal(*pair) for pair in zip(running, before, strict=True)]
    always = not row.if_argument
    assert all(changed) == any(changed) == (training or always)
    # What a schema declares is written as autograd counts, be it the same.
    declared = any(a.is_write for a in _aliases(operator))
    assert len(said) == (2 if training or declared else 0)


def _aliases(operator: OpOverload) -> Iterator[Any]:
    return (a.alias_info for a in operator._schema.arguments if a.alias_info is not None)


@by_name([row for row in ON_CPU if row.runs_again_as])
def test_what_runs_again_writes_nothing(row: OperatorFacts) -> None:
    args, running = statistics(row, True)
    before = [r.clone() for r in running]
    again = facts.without_statistics(row.name, tuple(args))
    assert again is not None
    assert again[0] == row.runs_again_as
    results = facts.resolve(again[0])(*again[1])
    assert all(map(torch.equal, running, before))
    expected = facts.resolve(row.name)(*args)
    assert all(map(torch.equal, results, expected))
    args, _ = statistics(row, False)
    assert facts.without_statistics(row.name, tuple(args)) is None


@by_name(ON_CPU)
def test_elements_that_are_not_read(row: OperatorFacts) -> None:
    operator = facts.resolve(row.name)
    results = []
    for content in (0.5, 3.0):
        args, _ = statistics(row, True)
        for position in facts.unread_arguments(row.name, tuple(args)):
            args[position] = torch.full((3,), content)
        results.append(operator(*args))
    assert all(map(torch.equal, *results))
    assert facts.reads_content(operator)


@pytest.mark.parametrize("operator", [aten.bernoulli.p, aten.is_same_size.default])
def test_shapes_are_all_that_is_read(operator: OpOverload) -> None:
    assert not facts.reads_content(operator)
    results = []
    for content in (0.0, 1.0):
        torch.manual_seed(0)
        other = 0.5 if operator is aten.bernoulli.p else torch.zeros(4)
        results.append(torch.as_tensor(operator(torch.full((4,), content), other)))
    assert torch.equal(*results)


def test_what_draws_moves_a_generator() -> None:
    calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
        (aten.native_dropout.default, (torch.ones(8), 0.5, True), {}),
        (aten.native_dropout.default, (torch.ones(8), 0.5, False), {}),
        (aten.native_dropout.default, (torch.ones(8), 0.5, None), {}),
        (aten.bernoulli.p, (torch.ones(8), 0.5), {}),
        (aten.relu.default, (torch.ones(8),), {}),
    ]
    for operator, args, kwargs in calls:
        before = torch.get_rng_state()
        operator(*args, **kwargs)
        is_moved = not torch.equal(before, torch.get_rng_state())
        assert facts.is_random(operator, args, kwargs) == is_moved, (operator, args)
    for row in in_torch(stating("draws")):
        assert all(facts.facts_of(operator).draws for operator in of_row(row))


@by_name(stating("tells_python"))
def test_python_is_told_no_tensor(row: OperatorFacts) -> None:
    (operator,) = of_row(row)
    names = facts.argument_names(operator)
    given = [torch.ones(()) for name in names if name in ("self", "other")]
    assert isinstance(operator(*given), bool | float)
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        operator(*[torch.ones(()) for _ in given])


FILLS = {
    "copy_": lambda t: t.copy_(torch.ones(4, 4)),
    "fill_": lambda t: t.fill_(2.0),
    "zero_": lambda t: t.zero_(),
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "random_": lambda t: t.random_(),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "exponential_": lambda t: t.exponential_(),
    "geometric_": lambda t: t.geometric_(0.5),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "index_put_": lambda t: t.index_put_((torch.arange(4),), torch.ones(4)),
    "_index_put_impl_": lambda t: aten._index_put_impl_(t, [torch.arange(4)], torch.ones(4)),
    "index_copy_": lambda t: t.index_copy_(0, torch.arange(4), torch.ones(4, 4)),
    "index_fill_": lambda t: t.index_fill_(0, torch.arange(4), 2.0),
    "scatter_": lambda t: t.scatter_(0, torch.arange(4)[:, None].expand(4, 4), 2.0),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(4, 4, dtype=torch.bool), 2.0),
    "masked_scatter_": lambda t: t.masked_scatter_(
        torch.ones(4, 4, dtype=torch.bool), torch.ones(16)
    ),
    "put_": lambda t: t.put_(torch.arange(16), torch.ones(16)),
    "fill_diagonal_": lambda t: t[:1, :1].fill_diagonal_(2.0),
    "_foreach_copy_": lambda t: torch._foreach_copy_([t], [torch.ones(4, 4)]),
    "_foreach_zero_": lambda t: torch._foreach_zero_([t]),
}
"""Calls that write all that they look at."""


@by_name(stating("fills"))
def test_fills_read_nothing(row: OperatorFacts) -> None:
    assert not any(facts.reads_first(o) for o in of_row(row) if o.namespace == "aten")
    found = []
    for content in (0.0, float("nan")):
        torch.manual_seed(0)
        tensor = torch.full((4, 4), content)
        FILLS[row.name.removeprefix("aten.")](tensor)
        found.append(tensor[:1, :1] if "diagonal" in row.name else tensor)
    assert torch.equal(*found)


def test_others_that_end_like_fills_read() -> None:
    assert facts.reads_first(aten.add_.Tensor)
    assert facts.reads_first(aten.index_add_.default)


def test_views() -> None:
    x = torch.randn(4, 4, dtype=torch.complex64)
    args = {"aten.view.dtype": (torch.float32,), "aten.as_strided.default": ([2], [1])}
    for row in stating("view"):
        (operator,) = of_row(row)
        rest = args.get(row.name, ([16],) if row.view is ViewKind.BY_STRIDES else ())
        found = operator(x, *rest)
        assert found.untyped_storage()._cdata == x.untyped_storage()._cdata, row.name
        is_same = found.shape == x.shape and torch.equal(found, x) and found.dtype == x.dtype
        same_bits = found.is_conj() == found.is_neg() is False and found.dtype == x.dtype
        assert is_same == (row.view is ViewKind.SAME_VALUE), row.name
        assert same_bits == (row.view is not ViewKind.OTHER_NUMBERS), row.name
    assert facts.facts_of(aten.slice.Tensor).view is ViewKind.PLAIN
    assert facts.facts_of(aten.add_.Tensor).view is ViewKind.NONE


def test_shapes_that_change_in_place() -> None:
    x = torch.randn(1, 4)
    for name in ("squeeze_", "t_"):
        operator = getattr(aten, name).default
        view = facts.out_of_place_view(operator)
        assert view is not None
        assert facts.facts_of(operator).changes_shape_as == str(view)
        changed = operator(x.clone())
        assert torch.equal(view(x), changed)
    assert facts.out_of_place_view(aten.add_.Tensor) is None


@by_name(stating("monotone"))
def test_what_is_monotone(row: OperatorFacts) -> None:
    (operator,) = of_row(row)
    rest = (0.5,) if row.name.endswith("Scalar") else ()
    found = [float(operator(torch.tensor(x), *rest)) for x in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert found in (sorted(found), sorted(found, reverse=True))


@by_name(stating("shape_decided_by"))
def test_sizes_that_values_decide(row: OperatorFacts) -> None:
    (operator,) = of_row(row)
    assert facts.facts_of(operator).shape_by_values == (
        torch.Tag.dynamic_output_shape in operator.tags
    )
    deciding = torch.tensor([1, 0, 2, 2])
    mask = deciding > 0
    known: dict[str, Any] = {"mask": mask, "indices": [mask], "repeats": deciding, "dim": 0}
    known["self"] = deciding if row.shape_decided_by == "self" else torch.arange(4)
    required = [a.name for a in operator._schema.arguments if not a.has_default_value()]
    args = tuple(known[name] for name in required)
    rule = rule_of(operator, args, {})
    assert rule is not None
    real = operator(*args)
    results = [real] if isinstance(real, torch.Tensor) else list(real)
    (size,) = rule.sizes([0], 1)
    environment: dict[int, Any] = {0: rule.deciding[0]}
    for call in size.calls:
        arguments = [environment[a.index] if isinstance(a, ValueRef) else a for a in call.args]
        found = facts.resolve(call.op)(*arguments, **dict(call.kwargs))
        environment[call.results[0] or 0] = found[0] if isinstance(found, tuple) else found
    (ref, *rest) = size.read.args
    assert isinstance(ref, ValueRef)
    assert facts.resolve(size.read.op)(environment[ref.index], *rest) == results[0].shape[0]


def test_the_size_of_consecutive_elements() -> None:
    x = torch.tensor([[1, 1, 2], [3, 3, 4]])
    rule = rule_of(aten.unique_consecutive.default, (x,), {"dim": 1})
    assert rule is not None
    (size,) = rule.sizes([0], 1)
    assert size.read.args == (ValueRef(1), 1)


def test_shape_rules_are_those_of_kernels() -> None:
    large = torch.zeros(8, 4)[:2]
    source = {"slice": torch.ones(2, 4), "select": torch.ones(4), "diagonal": torch.ones(2)}
    for row in stating("shape_rule"):
        (operator,) = of_row(row)
        kind = operator._schema.name.removeprefix("aten::").removesuffix("_scatter")
        args: tuple[Any, ...] = (torch.ones(4, 4), torch.ones(4, 4), torch.tensor([2, 4]))
        if kind in source:
            args = (large, source[kind], *((0, 0) if kind == "select" else ()))
        elif kind == "as_strided":
            args = (large, torch.ones(2), [2], [1])
        elif kind == "_ctc_loss_backward":
            scores = torch.randn(2, 6, 4).log_softmax(-1).transpose(0, 1)
            given = (
                scores,
                torch.tensor([[1, 2], [3, 1]]),
                torch.tensor([6, 5]),
                torch.tensor([2, 1]),
            )
            args = (torch.ones(2), *given, *aten._ctc_loss(*given), 0)
        elif row.shape_rule is ShapeRule.STORAGE_OF_ALL:
            args = (torch.rand(4, 4), torch.ones(4, 4))
        elif kind == "linspace":
            args = (-1.0, 1.0, 5)
        elif kind == "col2im":
            args = (torch.ones(1, 18, 16), [6, 6], [3, 3], [1, 1], [0, 0], [1, 1])
        elif kind == "im2col":
            args = (torch.ones(1, 2, 6, 6), [1, 1], [1, 1], [0, 0], [2, 2])
        elif row.shape_rule is ShapeRule.STORAGES_OF_BAGS:
            offsets = torch.tensor([0, 2, 5])
            args = (args[0], torch.tensor([1, 3, 0, 2, 3]), offsets, False, 1, False, None, True)
        elif "view" in kind:
            args = (args[0], [2, -1])
        elif "upsample" in kind:
            count = int(next(c for c in kind if c.isdigit()))
            corners = () if "nearest" in kind else (False,)
            args = (torch.ones(1, 2, *[8] * count), [8] * count, [1, 2, *[4] * count], *corners)
        args = args if kind != "_grouped_mm" else (args[0], torch.ones(2, 4, 4), args[2].int())
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            found = layouts.fake_result(operator, tuple(fake), {})
        for made, real in zip(facts.tensors(found), facts.tensors(operator(*args)), strict=True):
            assert (made.shape, made.stride()) == (real.shape, real.stride()), row.name
            assert made.untyped_storage().nbytes() == real.untyped_storage().nbytes(), row.name


VIEWED: dict[str, Callable[[Any], list[Any]]] = {
    "windows": lambda n: [n // 4, 4, 2, 4],
    "a size to find": lambda n: [-1, 4],
    "one dimension": lambda n: [8 * n],
    "a dimension of 1": lambda n: [1, n, 8],
}


@pytest.mark.parametrize("name", VIEWED)
def test_views_of_symbols_are_those_of_kernels(name: str) -> None:
    env = new_env()
    n = new_symbol(env, "n", 12)
    with FakeTensorMode(shape_env=env):
        tensor = torch.empty(n, 8)
        found = layouts.fake_result(aten.view.default, (tensor, VIEWED[name](n)), {})
    real = torch.empty(12, 8).view(VIEWED[name](12))
    assert hints(found.shape) == tuple(real.shape) and hints(found.stride()) == real.stride()
    assert found.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    guards = [printed(guard.expr) for guard in env.guards]
    divides = {"windows": 4}.get(name)
    assert any(f"{divides}" in guard for guard in guards) == (divides is not None), guards


def test_calls_that_kernels_refuse_have_no_layouts() -> None:
    """With a TypeError from torch 2.15 on, a RuntimeError before."""
    complex_numbers = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(facts.CALL_ERRORS, match="not implemented for complex"):
        aten.maximum(complex_numbers, complex_numbers)
    arguments = (complex_numbers, complex_numbers)
    assert layouts._real_layouts(aten.maximum.default, arguments, {}, False) == ()


@by_name([*stating("flops_like"), *stating("repeats_heads")])
def test_operations_are_counted(row: OperatorFacts) -> None:
    packet = of_row(row)[0].overloadpacket
    like = facts.resolve(f"{row.flops_like}.default").overloadpacket if row.flops_like else packet
    assert like in flop_registry
    if row.flops_like and torch.__version__ >= "2.15":  # which counts it by that formula itself
        assert flop_registry[packet] is flop_registry[like]
    else:
        assert (packet in flop_registry) == (not row.flops_like)
    if "backward" in row.name:
        return
    query, keys = (2, 8, 16, 4), (2, 2, 16, 4)
    specs = [TensorSpec(s, (1, 1, 1, 1), 0, "torch.float32", "cpu") for s in (query, keys, query)]

    class Graph:
        values = [type("V", (), {"spec": spec}) for spec in specs]

    refs = tuple(map(ValueRef, (0, 1, 1)))
    call = Call(f"{row.name}.default", refs, (), (2,))
    assert flops_of(Graph, call) == 2 * 2 * (2 * 8 * 16 * 16 * 4)  # type: ignore[arg-type]


@by_name(stating("matrix_product"))
def test_matrix_products(row: OperatorFacts) -> None:
    assert of_row(row)[0].overloadpacket in flop_registry


SHOWN = {
    "aten.native_dropout.default": """\
aten.native_dropout.default
  draws                yes
  draws if             train
  function             torch._VF.native_dropout""",
    "aten.native_batch_norm.default": """\
aten.native_batch_norm.default
  writes               running_mean, running_var
  reads no element of  running_mean, running_var
  if argument          training
  runs again as        aten.native_batch_norm.default
  function             torch._VF.native_batch_norm""",
    "aten.add_.Tensor": """\
aten.add_.Tensor
  writes               self
  function             torch.Tensor.add_""",
    "aten.squeeze_.dim": """\
aten.squeeze_.dim
  writes               self
  changes shape as     aten.squeeze.dim""",
    "aten.mish.default": """\
aten.mish.default
  may write into       an operand""",
    "aten.linalg_lu.default": """\
aten.linalg_lu.default
  makes new tensors, and does nothing else""",
    "cond": f"""\
cond
  called               torch.cond
  refused because      {HIGHER_ORDER}
  instead              compute both branches and choose (torch.where), or pass a bool: \
bool(predicate), where that is made of integer arguments""",
}


@pytest.mark.parametrize("name", SHOWN)
def test_facts_print_a_line_each(name: str) -> None:
    assert str(facts.facts_of(name)) == SHOWN[name]
