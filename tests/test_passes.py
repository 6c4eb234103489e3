"""Passes from a module to its graph: none is needed by another, and each result is a legal one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import rockplan
from rockplan import Options
from rockplan.errors import IllegalForm, InvalidInput
from rockplan.graph_builder import pipeline
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import kernels
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.recorded import rules as run_rules
from rockplan.graph_builder.recorded.run import Capture
from rockplan.oracles import graph_rules
from rockplan.oracles.graph_rules import check
from rockplan.runtime.planned_state import HasPlans
from rockplan.search import pipeline as search
from rockplan.values.graph import CDGraph, Phase, Queue, Takeover, ValueRef
from tests.kernels import interpret

QUICK = Options(cache=False, bound_time_limit_s=0.0)


class Classifier(nn.Module):
    """Something for each pass that needs no compiler: changes in place, a buffer that is read and
    changed, a head with its loss, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 32)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = x * 2
        for _ in range(2):
            total += self.down(self.up(x).tanh_())
            self.mean.lerp_(x.detach().mean(0), 0.1)
            x = x - self.mean
        return nn.functional.cross_entropy(self.head(self.dropout(total)), labels)


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 8), torch.randint(32, (12,))


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture(scope="module")
def run() -> Capture:
    return capture(classifier(), sample(), {})


@pytest.fixture(scope="module")
def lowered(run: Capture) -> Lowered:
    return pipeline.lower(run, 0)


def steps(module: nn.Module) -> list[torch.Tensor]:
    """Losses, gradients and buffers of two steps."""
    found: list[torch.Tensor] = []
    torch.manual_seed(2)
    for _ in range(2):
        loss = module(*sample())
        loss.backward()
        found += [loss.detach(), *(b.clone() for b in module.buffers())]
    return found + [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_without_any_one_pass_training_is_eagers(name: str) -> None:
    expected = steps(classifier())
    model = classifier()
    options = replace(QUICK, without=(name,))
    found = steps(rockplan.solve(model, sample(), "80%", options=options))
    assert all(map(torch.equal, found, expected))
    assert name not in [
        one.name for one in rockplan.plan(classifier(), sample(), "80%", options=options).passes
    ]


def test_kernels_without_a_pass_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(kernels, "SLIGHT", 0)  # more by operators
    run = capture(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sigmoid()), (torch.ones(4, 8),), {})
    found = [
        {len(kernel.over) for kernel in pipeline.lower(run, 0, options).graph.kernels}
        for options in (
            replace(QUICK, compile=True),
            replace(QUICK, compile=True, without=("kernels-in-place",)),
            replace(QUICK, compile=True, without=("fuse",)),
        )
    ]
    assert found == [{0, 1}, {0}, set()]


def test_names_are_told_apart_and_unknown_ones_refused() -> None:
    assert not {*pipeline.NAMES} & {*search.NAMES}
    with pytest.raises(InvalidInput, match="functionalise'; .*the passes functionalize, cancel"):
        rockplan.plan(
            classifier(), sample(), "80%", options=replace(QUICK, without=["functionalise"])
        )


def test_the_plan_says_what_passes_did(lowered: Lowered) -> None:
    plan = rockplan.plan(classifier(), sample(), "80%", options=QUICK)
    assert [p.name for p in plan.passes] == [
        *(n for n in pipeline.NAMES[: len(pipeline.RUN_PASSES)]),
        "lower",
        *pipeline.NAMES[len(pipeline.RUN_PASSES) :],
    ]
    by_name = {p.name: p for p in plan.passes}
    assert by_name["lower"].forward == len(plan.graph.forward)
    assert by_name["lower"].backward == len(plan.graph.backward)
    assert not by_name["tile"].is_changed
    assert [p.name for p in lowered.trace] == [p.name for p in plan.passes]


class Adapted(nn.Module):
    """An adapter in float32 beside 16-bit layers, with casts as libraries write them; the second
    result is the end of two casts, the third one of those in whose place something is written."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(32, 32).bfloat16() for _ in range(3))
        self.down, self.up = nn.Linear(32, 4), nn.Linear(4, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.base:
            x = (layer(x) + self.up(self.down(x.float())).to(x.dtype)).tanh()
        wide = x.double().to(x.dtype).mul_(2)
        return x.sin().sum(), x.float().to(x.dtype), wide, x.to(torch.float8_e5m2).to(x.dtype)


def test_casts_up_and_straight_down_take_no_memory() -> None:
    x = torch.randn(256, 32, dtype=torch.bfloat16)
    torch.manual_seed(0)
    eager = Adapted()
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for without in ((), ("cancel-casts",)):
            options = replace(QUICK, without=without)
            fast = rockplan.solve(copy.deepcopy(eager), x, "auto", options=options)
            assert isinstance(fast, HasPlans)
            found.append(fast.plan.eager_peak_bytes)
            for step in range(2):
                results = [module(x) for module in (eager, fast)]
                for of_eager, own in zip(*results, strict=True):
                    assert torch.equal(of_eager, own), (without, step)
                for loss, kept, *others in results:
                    assert all(kept.data_ptr() != other.data_ptr() for other in others)
                    loss.backward()
            for one, other in zip(eager.parameters(), fast.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                assert torch.equal(one.grad, other.grad), without
            eager.zero_grad()
    assert found[0] < found[1]


def test_a_head_without_parts_says_why() -> None:
    with pytest.raises(pipeline.HeadStaysWhole, match="no matrix product"):
        pipeline.lower(
            capture(nn.Tanh(), (torch.ones(4, requires_grad=True),), {}), 0, Options(tile=2)
        )


# -- what is legal -----------------------------------------------------------------------------


def with_call(run: Capture, position: int, **changed: object) -> Capture:
    calls = list(run.calls)
    calls[position] = replace(calls[position], **changed)  # type: ignore[arg-type]
    return replace(run, calls=tuple(calls))


def with_result(run: Capture, position: int, value: int) -> Capture:
    call = replace(run.calls[position].call, results=(value,))
    return with_call(run, position, call=call)


def made_twice(run: Capture) -> Capture:
    """The first product makes a value that the caller has given."""
    return with_result(run, product(run), run.parameters[0][1])


def product(run: Capture) -> int:
    return next(i for i, c in enumerate(run.calls) if c.call.op == "aten.addmm.default")


def elsewhere(run: Capture) -> Capture:
    """A result in a storage that the call does not read."""
    (value,) = run.calls[product(run)].call.results
    values = list(run.values)
    assert value is not None
    storage = run.values[run.buffers[0][1]]
    values[value] = replace(
        values[value], storage=storage.storage, storage_bytes=storage.storage_bytes
    )
    return replace(run, values=tuple(values))


def too_small(run: Capture) -> Capture:
    value = run.calls[-1].call.results[0]
    assert value is not None
    storage = run.values[value].storage
    return replace(
        run,
        values=tuple(
            replace(v, storage_bytes=1) if v.storage == storage else v for v in run.values
        ),
    )


BROKEN_RUNS: dict[run_rules.Rule, Callable[[Capture], Capture]] = {
    run_rules.values_are_there: lambda r: with_result(r, 0, len(r.values)),
    run_rules.reads_are_arguments: lambda r: with_call(r, 0, reads=()),
    run_rules.made_before_read: lambda r: replace(r, calls=r.calls[1:]),
    run_rules.made_once: made_twice,
    run_rules.views_read_what_they_share: elsewhere,
    run_rules.values_fit_their_storage: too_small,
    run_rules.forward_comes_first: lambda r: with_call(r, 0, phase=Phase.BACKWARD),
    run_rules.kernels_are_known: lambda r: with_call(
        replace(r, kernels=(KERNEL,)),
        0,
        call=replace(r.calls[0].call, op="rockplan.other_0.default"),
    ),
}
"""Rule of a run -> a change that breaks it."""


class _Kernel:
    op = "rockplan.known_0.default"


KERNEL = _Kernel()


@pytest.mark.parametrize("rule", run_rules.RULES, ids=lambda r: r.__name__)
def test_a_run_that_breaks_a_rule_is_found(rule: run_rules.Rule, run: Capture) -> None:
    check(run_rules.RULES, run, "as recorded")
    broken = BROKEN_RUNS[rule](run)
    assert [*rule(broken)]
    with pytest.raises(IllegalForm, match="after a test: "):
        check(run_rules.RULES, broken, "after a test")


def with_node(graph: CDGraph, node: int, **changed: object) -> CDGraph:
    nodes = list(graph.nodes)
    nodes[node] = replace(nodes[node], **changed)  # type: ignore[arg-type]
    return replace(graph, nodes=tuple(nodes))


def view_of_another(graph: CDGraph) -> CDGraph:
    value = next(v for v in graph.values if v.view is not None)
    other = next(v.index for v in graph.values if v.data != value.data and v.view is None)
    assert value.view is not None
    moved = replace(value, view=replace(value.view, args=(ValueRef(other),), kwargs=()))
    return replace(graph, values=tuple(moved if v is value else v for v in graph.values))


def foreign_kernel(graph: CDGraph) -> CDGraph:
    call = replace(graph.nodes[0].calls[0], op="rockplan.other_0.default")
    return with_node(replace(graph, kernels=(KERNEL,)), 0, calls=(call,))  # type: ignore[arg-type]


BROKEN_GRAPHS: dict[graph_rules.Rule, Callable[[CDGraph], CDGraph]] = {
    graph_rules.numbered_by_place: lambda g: with_node(g, 0, index=5),
    graph_rules.forward_comes_first: lambda g: with_node(g, 0, phase=Phase.BACKWARD),
    graph_rules.one_maker: lambda g: with_node(g, 1, writes=g.nodes[0].writes),
    graph_rules.what_is_on_the_host_is_copied: lambda g: with_node(g, 0, queue=Queue.OUT),
    graph_rules.made_before_read: lambda g: with_node(g, 0, reads=g.nodes[-1].writes),
    graph_rules.values_are_in_storages: view_of_another,
    graph_rules.roles_are_of_storages: lambda g: replace(g, held=(len(g.data),)),
    graph_rules.takeovers_are_of_the_node: lambda g: with_node(
        g, 0, takes=(Takeover(g.nodes[-1].writes, g.nodes[0].writes, None),)
    ),
    graph_rules.kernels_are_known: foreign_kernel,
    graph_rules.sizes_are_sums_of_bytes: lambda g: with_node(g, 0, time_ns=-1),
    graph_rules.eager_order_is_an_order: lambda g: replace(g, eager_order=(0,)),
}
"""Rule of a graph -> a change that breaks it."""


@pytest.mark.parametrize("rule", graph_rules.RULES, ids=lambda r: r.__name__)
def test_a_graph_that_breaks_a_rule_is_found(rule: graph_rules.Rule, lowered: Lowered) -> None:
    check(graph_rules.RULES, lowered.graph, "as lowered")
    broken = BROKEN_GRAPHS[rule](lowered.graph)
    assert [*rule(broken)]
    with pytest.raises(IllegalForm, match="after a test: "):
        check(graph_rules.RULES, broken, "after a test")


def test_a_pass_that_makes_something_illegal_is_named(
    run: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(run: Capture, options: Options) -> Capture:
        """Drop the first call."""
        return replace(run, calls=run.calls[1:])

    monkeypatch.setattr(pipeline, "RUN_PASSES", (*pipeline.RUN_PASSES, forget))
    with pytest.raises(IllegalForm, match="after forget: Nothing is read before it is made"):
        pipeline.lower(run, 0)
