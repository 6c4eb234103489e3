"""Results that take over the storage of an operand that dies: not a bit differs, and the peak is
what is predicted."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rockplan
from benchmarks.bounds.prove import lower_bound_ns, peak_lower_bound_bytes
from rockplan.graph_builder.lowering.reinplace import with_takeovers
from rockplan.graph_builder.operators.rows import FIRST_OPERAND, ROWS
from rockplan.graph_builder.partition import partition
from rockplan.oracles.lifetimes import alive_at, lifetimes, taken_over
from rockplan.oracles.simulate import simulate, timeline
from rockplan.oracles.verify import verify
from rockplan.search.local.greedy_eviction import thriftiest, within
from rockplan.store.documents import digest
from rockplan.store.plan_file import dump_plans, parse_plans
from rockplan.values.graph import (
    Call,
    CDGraph,
    ComputeNode,
    DataKind,
    DataNode,
    Phase,
    Takeover,
    TensorSpec,
    Value,
    ValueRef,
    without_takes,
)
from rockplan.values.plan import Certificate, Status
from rockplan.values.schedule import Free, Schedule, keep_all, with_frees
from testing.exhaustive import Exhaustive
from testing.graphs import random_graph, with_random_takes
from testing.models import Case, bert, densenet, gpt2, resnet18
from testing.training import (
    QUICK,
    assert_equal_trees,
    assert_same_state,
    solve_case,
    train_side_by_side,
    twin,
)
from tests.operators import DTYPES, SHAPE, calls, drawn, execute, same_bits

OPERATORS = sorted(row.name for row in ROWS if row.may_write_into not in ("", FIRST_OPERAND))


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        str(tensor.dtype),
        str(tensor.device),
    )


def graph_of(call: Call, tensors: list[torch.Tensor], result: torch.Tensor) -> CDGraph:
    """One operation on activations that nobody else reads."""
    every = [*tensors, result]
    last = len(tensors)
    return CDGraph(
        data=tuple(
            DataNode(i, f"d{i}", DataKind.ACTIVATION, t.untyped_storage().nbytes())
            for i, t in enumerate(every)
        ),
        nodes=(
            ComputeNode(
                index=0,
                name="op",
                phase=Phase.FORWARD,
                reads=tuple(range(last)),
                writes=(last,),
                calls=(call,),
                recalls=(call,),
            ),
        ),
        outputs=(),
        values=tuple(Value(i, i, f"v{i}", spec_of(t)) for i, t in enumerate(every)),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_what_overwrites_an_operand_is_bitwise_the_result(op: str, dtype: torch.dtype) -> None:
    taken = 0
    for call, tensors in calls(op, dtype):
        expected = execute(call, tensors)
        (node,) = with_takeovers(graph_of(call, tensors, expected)).nodes
        for takeover in node.takes:
            (d,), call = takeover.operands, takeover.call
            assert call is not None
            operands = [t.clone() for t in tensors]
            written = execute(call, operands)
            assert written is operands[d]
            assert same_bits(written, expected), (call, [t.stride() for t in tensors])
            others = [i for i in range(len(tensors)) if i != d]
            assert all(same_bits(operands[i], tensors[i]) for i in others)
            taken += 1
    assert taken > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(5, 7, 9), (33, 33, 33), (256, 130, 64), (1, 64, 1000)]
)
def test_a_product_takes_all_that_it_adds_to(
    rows: int, inner: int, columns: int, dtype: torch.dtype
) -> None:
    """Whether the first factor is transposed or not, and where all shapes are equal."""
    added, other = drawn(dtype, (rows, columns), 0), drawn(dtype, (inner, columns), 2)
    for factor in (drawn(dtype, (rows, inner), 1), drawn(dtype, (inner, rows), 1).t()):
        tensors = [added, factor, other]
        call = Call("aten.addmm.default", (ValueRef(0), ValueRef(1), ValueRef(2)), (), (3,))
        expected = execute(call, tensors)
        (node,) = with_takeovers(graph_of(call, tensors, expected)).nodes
        (takeover,) = node.takes
        assert takeover.operands == (0,) and takeover.call is not None
        taken = added.clone()
        assert execute(takeover.call, [taken, factor, other]) is taken
        assert same_bits(taken, expected)


def test_one_tensor_twice_is_taken_over() -> None:
    for dtype in DTYPES:
        x = drawn(dtype, SHAPE, 0)
        call = Call("aten.mul.Tensor", (ValueRef(0), ValueRef(0)), (), (1,))
        expected = execute(call, [x])
        (node,) = with_takeovers(graph_of(call, [x], expected)).nodes
        (takeover,) = node.takes
        assert takeover.operands == (0,) and takeover.call is not None
        assert same_bits(execute(takeover.call, [x.clone()]), expected)


# What a schedule takes over, and what that is worth


def draw(seed: int, nodes: int = 3) -> CDGraph:
    rng = random.Random(seed)
    return with_random_takes(rng, random_graph(rng, nodes))


def schedules(seed: int) -> Iterator[tuple[CDGraph, Schedule]]:
    graph = draw(seed, 4)
    yield graph, keep_all(graph)
    yield graph, thriftiest(graph).schedule


def test_what_is_taken_over_is_freed_first() -> None:
    taken = several = 0
    for seed in range(60):
        for graph, schedule in schedules(seed):
            for position, takeover in taken_over(graph, schedule).items():
                following = itertools.takewhile(
                    lambda e: isinstance(e, Free), schedule.events[position + 1 :]
                )
                assert set(following) >= {Free(d) for d in takeover.operands}
                taken += 1
                several += len(takeover.operands) > 1
    assert taken > 60 and several > 20


def test_lifetimes_add_up_and_nothing_is_larger() -> None:
    smaller = 0
    for seed in range(60):
        for graph, schedule in schedules(seed):
            found = lifetimes(graph, schedule)
            plain = list(timeline(without_takes(graph), schedule))
            for position, step in enumerate(timeline(graph, schedule)):
                alive = alive_at(found, position)
                assert sum(f.size_bytes for f in alive) == step.during_bytes
                assert step.during_bytes <= plain[position].during_bytes
                smaller += step.during_bytes < plain[position].during_bytes
            assert step.after_bytes == plain[-1].after_bytes
    assert smaller > 60


def test_no_schedule_is_below_the_bounds() -> None:
    """The exhaustive search decides by itself what is taken over; it finds what the simulator says
    of evicted schedules, and nothing below the bounds of peak and time."""
    gained = 0
    for seed in range(25):
        graph = draw(seed)
        least = thriftiest(graph).schedule
        verify(graph, least)
        peak = simulate(graph, least)
        fastest = Exhaustive(graph, peak.peak_bytes, None, is_free=True, in_order=True).fastest_ns()
        assert fastest is not None
        bound_ns = lower_bound_ns(graph, peak.peak_bytes, time_limit_s=60)
        assert bound_ns <= fastest <= peak.time_ns
        bound_bytes = peak_lower_bound_bytes(graph, time_limit_s=60)
        below = Exhaustive(graph, bound_bytes - 1, None, is_free=True, in_order=True)
        assert below.fastest_ns() is None
        gained += peak.peak_bytes < simulate(without_takes(graph), least).peak_bytes
    assert gained >= 3


def test_evictions_count_what_is_taken_over() -> None:
    gained = 0
    for seed in range(60):
        graph = draw(seed, 4)
        least = simulate(graph, thriftiest(graph).schedule).peak_bytes
        most = simulate(graph, keep_all(graph)).peak_bytes
        for budget_bytes in (least, (least + most) // 2, most):
            found = within(graph, budget_bytes)
            if found is not None:
                verify(graph, found)
                assert simulate(graph, found).peak_bytes <= budget_bytes
                gained += simulate(without_takes(graph), found).peak_bytes > budget_bytes
    assert gained >= 10


TAKEOVER = Takeover((0,), (1,))


def test_copies_of_live_tensors_take_nothing_over() -> None:
    graph = CDGraph(
        data=(
            DataNode(0, "a", DataKind.ACTIVATION, 4),
            DataNode(1, "b", DataKind.ACTIVATION, 4),
        ),
        nodes=(
            ComputeNode(0, "make", Phase.FORWARD, (), (0,)),
            ComputeNode(1, "use", Phase.FORWARD, (0,), (1,), takes=(TAKEOVER,)),
            ComputeNode(2, "end", Phase.BACKWARD, (1,), ()),
        ),
        outputs=(1,),
        held=(1,),
    )
    once = with_frees(graph, (0, 1), (2,))
    assert taken_over(graph, once) == {1: TAKEOVER}
    assert simulate(graph, once).peak_bytes == 4
    twice = with_frees(graph, (0, 1), (0, 1, 2))
    assert taken_over(graph, twice) == {1: TAKEOVER}
    assert simulate(graph, twice).peak_bytes == 12


# Models

OPTIONS = replace(QUICK, cache=False)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: gpt2(width=32, heads=2, vocabulary=128, batch=2, length=16, attention="eager"),
    "bert": lambda: bert(width=32, heads=2, vocabulary=128, batch=2, length=16),
    "resnet18": lambda: resnet18(8, 2, 32),
    "densenet": lambda: densenet(2, 2, 4, 2, 16),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_training_is_bitwise_eager_and_as_predicted(name: str, budget: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    planned = solve_case(case, budget, options=OPTIONS)
    plan = planned.plan
    assert taken_over(plan.graph, plan.schedule)
    assert any("out=" in line or "grad_input=" in line for line in planned.code.splitlines())
    eager = twin(case)
    train_side_by_side(case, planned, eager, steps=3)
    measured, left = rockplan.peak_live_bytes(lambda: case.step(planned))
    assert left == 0
    assert measured <= plan.peak_bytes
    assert measured >= 0.99 * plan.peak_bytes


def test_language_models_kept_whole_need_less_than_eager() -> None:
    """Measured: at the gradient of the loss, whose operands die."""
    for name in ("gpt2", "bert"):
        case = CASES[name]()
        eager, _ = rockplan.peak_live_bytes(lambda c=case: c.step(c.model))
        planned = solve_case(case, "100%", options=OPTIONS)
        measured, _ = rockplan.peak_live_bytes(lambda c=case, p=planned: c.step(p))
        assert planned.plan.overhead == 0
        assert planned.plan.peak_bytes < planned.plan.eager_peak_bytes
        assert measured < eager


def test_blocks_count_every_result() -> None:
    """What a block takes over is no part of its problem: another block may read it."""
    torch.manual_seed(0)
    case = CASES["gpt2"]()
    plan = rockplan.plan(case.model, case.args, "100%", sample_kwargs=case.kwargs, options=OPTIONS)
    assert any(n.takes for n in plan.graph.nodes)
    blocks = partition(plan.graph)
    assert not any(n.takes for b in blocks for n in b.problem.nodes)
    assert blocks == partition(without_takes(plan.graph))


class Branching(nn.Module):
    """Everything that a takeover could spoil: a value that is read twice, sums of gradients, an
    output that is also used inside, an input that dies at an addition, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x + self.shift
        b = self.first(a).tanh()
        c = (b * 2.0 + a).sigmoid() * b
        d = self.norm(c + b)
        e = nn.functional.gelu(d - 1.0)
        return e + self.second(e * d), c.exp()


def branching() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Branching()
    return copy.deepcopy(model), model, torch.randn(16, 8)


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_retained_graphs_and_forwards_in_flight(budget: str) -> None:
    eager, model, x = branching()
    options = replace(OPTIONS, differentiated=(0, 1))
    planned = rockplan.solve(model, x, budget, options=options)
    assert taken_over(planned.plan.graph, planned.plan.schedule)
    for module in (eager, planned):
        module.inputs = [x.clone().requires_grad_(), (2 * x).requires_grad_()]
    results = []
    for module in (eager, planned):
        first, second = (module(i) for i in module.inputs)
        (first[0].sum() + first[1].sum()).backward(retain_graph=True)
        (second[0].sum() + second[1].sum()).backward()
        (first[0].sum() + first[1].sum()).backward(retain_graph=True)
        first[0].square().sum().backward()
        results.append((first, second))
    assert_equal_trees(results[1], results[0], "results")
    assert_same_state(planned, eager, "after all backward passes")
    for a, b in zip(planned.inputs, eager.inputs, strict=True):
        assert torch.equal(a.grad, b.grad)
        assert torch.equal(a.detach(), b.detach())


def test_what_the_caller_sees_is_never_written_over() -> None:
    """Inputs, results, buffers and parameters keep their content through backward, and hooks see
    the gradients that eager shows."""
    eager, model, x = branching()
    options = replace(OPTIONS, differentiated=(0, 1))
    planned = rockplan.solve(model, x, "100%", options=options)
    seen: dict[str, dict[str, torch.Tensor]] = {"eager": {}, "planned": {}}
    for name, module in (("eager", eager), ("planned", planned)):

        def show(key: str, tensor: torch.Tensor, name: str = name) -> None:
            tensor.register_hook(lambda g: seen[name].update({key: g.clone()}))

        for key, parameter in module.named_parameters():
            show(key, parameter)
        own = x.clone().requires_grad_()
        views = own * 1.0
        results = module(views)
        for position, result in enumerate(results):
            show(f"result {position}", result)
        before = [t.detach().clone() for t in (views, *results, *module.buffers())]
        sum(r.sum() for r in results).backward()
        after = [t.detach() for t in (views, *results, *module.buffers())]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert seen["planned"].keys() == seen["eager"].keys()
    for key, gradient in seen["eager"].items():
        assert torch.equal(seen["planned"][key], gradient), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_and_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Softmax(-1)).to(dtype)
    case = Case("small", model, (torch.randn(4, 8, dtype=dtype),), {}, lambda r: r.square().sum())
    planned = solve_case(case, "100%", options=OPTIONS)
    assert taken_over(planned.plan.graph, planned.plan.schedule)
    train_side_by_side(case, planned, twin(case), steps=3)


def test_plans_on_disk_say_what_is_taken_over(tmp_path: Path) -> None:
    _, model, x = branching()
    planned = rockplan.solve(model, x, "100%", options=OPTIONS)
    path = tmp_path / "plan.json"
    rockplan.save_plan(planned, path)
    loaded = rockplan.load(model, x, path, options=OPTIONS)
    assert loaded.code == planned.code
    assert loaded.plan.peak_bytes == planned.plan.peak_bytes
    assert taken_over(loaded.plan.graph, loaded.plan.schedule)


def test_plans_of_before_hold_as_they_were(tmp_path: Path) -> None:
    """A file that says nothing of takeovers: none is executed, and the peak is what it states."""
    _, model, x = branching()
    plan = rockplan.plan(model, x, "100%", options=OPTIONS)
    graph = without_takes(plan.graph)
    peak_bytes = simulate(graph, plan.schedule).peak_bytes
    assert peak_bytes > plan.peak_bytes
    before = replace(plan, graph=graph, peak_bytes=peak_bytes, budget_bytes=peak_bytes)
    document = json.loads(dump_plans([before]))
    for node in document["plans"][0]["graph"]["nodes"]:
        assert node.pop("takes") == []
    del document["digest"]
    document["digest"] = digest(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    loaded = rockplan.load(model, x, path, options=OPTIONS)
    assert loaded.plan.peak_bytes == peak_bytes
    assert not taken_over(loaded.plan.graph, loaded.plan.schedule)
    assert "out=" not in loaded.code


def test_plans_taking_what_they_never_read_are_refused() -> None:
    _, model, x = branching()
    document = json.loads(dump_plans([rockplan.plan(model, x, "100%", options=OPTIONS)]))
    node = next(n for n in document["plans"][0]["graph"]["nodes"] if n["takes"])
    node["takes"] = list(node["writes"])
    del document["digest"]
    document["digest"] = digest(document)
    with pytest.raises(rockplan.PlanFormatError, match="takes over what it does not read"):
        parse_plans(json.dumps(document))


@pytest.mark.parametrize(
    ("takes", "message"),
    [
        ([[[9, 1]]], "takes over what it does not read"),
        ([[[0, 0]]], "takes over storages for what it does not make"),
        ([[[0, 1], [0, 2]]], "takes over a storage twice"),
        ([[[0, 1], [3, 1]]], "takes over a storage twice"),
        ([[[0, 1, 2]]], "no pairs of an operand and a result"),
        ([[]], "no pairs of an operand and a result"),
        ([0], "no pairs of an operand and a result"),
    ],
)
def test_files_name_pairs_where_an_operation_makes_several(takes: object, message: str) -> None:
    document = json.loads(dump_plans([_of_two_results()]))
    (node,) = [n for n in document["plans"][0]["graph"]["nodes"] if n["takes"]]
    assert node["takes"] == [[[0, 1], [3, 2]], [[0, 1]]]
    assert parse_plans(json.dumps(document))[0].graph == _of_two_results().graph
    node["takes"] = takes
    del document["digest"]
    document["digest"] = digest(document)
    with pytest.raises(rockplan.PlanFormatError, match=message):
        parse_plans(json.dumps(document))


def _of_two_results() -> rockplan.Plan:
    """Data 0 and 3 are read by an operation that makes 1 and 2, over both or over 0."""
    kinds = [DataKind.ACTIVATION] * 4 + [DataKind.GRADIENT]
    graph = CDGraph(
        data=tuple(DataNode(i, f"d{i}", kind, 8) for i, kind in enumerate(kinds)),
        nodes=(
            ComputeNode(0, "a", Phase.FORWARD, (), (0,)),
            ComputeNode(1, "b", Phase.FORWARD, (), (3,)),
            ComputeNode(
                2,
                "both",
                Phase.FORWARD,
                (0, 3),
                (1, 2),
                takes=(Takeover((0, 3), (1, 2)), Takeover((0,), (1,))),
            ),
            ComputeNode(3, "end", Phase.BACKWARD, (1, 2), (4,)),
        ),
        outputs=(1,),
        held=(1, 4),
    )
    schedule = keep_all(graph)
    simulation, eager = simulate(graph, schedule), simulate(without_takes(graph), schedule)
    assert (simulation.peak_bytes, eager.peak_bytes) == (24, 32)
    _, model, x = branching()
    plan = rockplan.plan(model, x, "100%", options=OPTIONS)
    return replace(
        plan,
        graph=graph,
        schedule=schedule,
        blocks=(),
        peak_bytes=simulation.peak_bytes,
        budget_bytes=simulation.peak_bytes,
        saved_bytes=simulation.saved_bytes,
        time_ns=0,
        eager_peak_bytes=eager.peak_bytes,
        eager_time_ns=0,
        certificate=Certificate(Status.OPTIMAL, 0, 0),
    )


class PassedOn(nn.Module):
    """Its operator says that it returns something new, and returns what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((torch.ops.takeover_test.pass_on(x) + 1.0) * self.weight).exp()


def test_what_proves_an_input_is_not_overwritten() -> None:
    library = torch.library.Library("takeover_test", "FRAGMENT")
    library.define("pass_on(Tensor x) -> Tensor")
    library.impl("pass_on", lambda x: x, "CPU")
    library.impl("pass_on", torch.empty_like, "Meta")
    x = torch.randn(4, 8)
    before = x.clone()
    planned = rockplan.solve(PassedOn(), x, "100%", options=OPTIONS)
    planned(x).sum().backward()
    assert torch.equal(x, before)
