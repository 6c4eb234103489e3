"""Kernels whose results are written over operands that die: what may be, and what that is worth.

Those that are compiled are few and tiny; where nothing is compiled kernels run by their operators.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import rockplan
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.fusion import in_place, kernels
from rockplan.graph_builder.fusion.fuse import fused
from rockplan.graph_builder.pipeline import lower
from rockplan.graph_builder.recorded.run import Capture
from rockplan.options import Options
from rockplan.oracles.lifetimes import taken_over
from rockplan.oracles.simulate import simulate
from rockplan.reports.listing import kernel_calls
from rockplan.store.documents import digest
from rockplan.store.plan_file import dump_plans
from rockplan.values.graph import (
    CDGraph,
    DataKind,
    DataNode,
    Kernel,
    TensorSpec,
    Value,
    ValueRef,
    is_kernel,
    without_takes,
)
from rockplan.values.schedule import Compute
from testing.models import Case, gpt2, mean_square
from testing.random_networks import network
from testing.zoo_cases import loss_of
from tests.kernels import gradients, interpret, run, stack

COMPILED = Options(compile=True, cache=False, time_limit_s=5)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels run by their operators, which need more memory in place: nobody asks for that."""
    monkeypatch.setattr(kernels, "SLIGHT", 0)
    yield interpret(monkeypatch)


def lowered(made: Capture) -> CDGraph:
    return lower(fused(made, keeps_roundings=False), 0).graph


def of(case: Case) -> CDGraph:
    return lowered(capture(case.model, case.args, case.kwargs))


def written(graph: CDGraph) -> list[Kernel]:
    return [kernel for kernel in graph.kernels if kernel.over]


def named(graph: CDGraph, stem: str) -> list[tuple[str, ...]]:
    """What kernels of that name take over."""
    return [
        tuple(graph.data[d].name.rpartition("_")[0] for d in t.operands)
        for n in graph.nodes
        for t in n.takes
        if n.name.startswith(stem) and is_kernel(n.calls[0].op)
    ]


# What may be


Function = Callable[..., torch.Tensor]


def kernel_of(function: Function, *shapes: tuple[int, ...]) -> Kernel:
    """The only kernel of a function of what the caller has."""
    made = fused(run(function, *shapes), keeps_roundings=False)
    return made.kernels[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.exp() * x + 1,
        lambda x: functional.gelu(x.reshape(8, 2, 16)) * 2,
        lambda x: x.reshape(8, 2, 16).to(torch.float64).exp().float() + 1,
        lambda x: torch.where(x > 0, x, x.exp() + 1).unsqueeze(0),
        lambda x: functional.softmax(x * 2, -1),
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1),
        lambda x: x * x.amax(0) + x.sum(),
    ],
    ids=["chain", "reshaped", "cast", "where", "softmax", "norm", "columns"],
)
def test_element_by_element_reads_may_be_written_over(
    function: Function, interpreted: list[str]
) -> None:
    kernel = kernel_of(function, (16, 16))
    assert in_place.KnownKernel(kernel).is_aligned(0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().exp() + 1,
        lambda x: x.reshape(8, 2, 16).transpose(0, 1).exp() * 2,
        lambda x: x.roll(1, 0).exp() + 1,
        lambda x: torch.cat([x[:, 8:].exp(), -x[:, :8]], -1) * 2,
        lambda x: (x.exp() + x[0]) * 2,
        lambda x: (x.exp() + x[3, 5]) * 2,
        lambda x: (x.exp() + x.reshape(4, 4, 16).sum(1).repeat(4, 1)) * 2,
        lambda x: x.exp() + functional.pad(x, (1, 0))[:, :-1],
        lambda x: torch.gather(x.exp(), 1, torch.arange(16).expand(16, 16)) + 1,
    ],
    ids=[
        *("transposed", "dimensions", "rolled", "halves", "row", "element"),
        *("sums of few", "shifted", "gathered"),
    ],
)
def test_what_reads_another_element_is_written_elsewhere(
    function: Function, interpreted: list[str]
) -> None:
    """A sum of few elements is written out by compilers where it is read."""
    kernel = kernel_of(function, (16, 16))
    assert kernel.inputs[0].dtype == "torch.float32"
    assert not in_place.KnownKernel(kernel).is_aligned(0), str(kernel)


def test_a_result_holds_all_of_its_storage() -> None:
    whole = TensorSpec((16, 16), (16, 1), 0, "torch.float32", "cpu")
    looks = {
        "whole": whole,
        "as a row": replace(whole, shape=(1, 256), stride=(256, 1)),
        "half": replace(whole, shape=(8, 16)),
        "transposed": replace(whole, stride=(1, 16)),
        "integers": replace(whole, dtype="torch.int32"),
    }
    for name, spec in looks.items():
        graph = CDGraph(
            data=tuple(DataNode(i, f"d{i}", DataKind.ACTIVATION, 1024) for i in range(2)),
            nodes=(),
            outputs=(),
            values=(Value(0, 0, "operand", spec), Value(1, 1, "result", whole)),
        )
        assert in_place.may_hold(graph, *graph.values) is (name in ("whole", "as a row")), name


def test_only_the_plans_own_memory_is_taken(interpreted: list[str]) -> None:
    graph = of(stack(2))
    outside = {*graph.outputs, *graph.held, *graph.handed}
    taking = [n for n in graph.nodes if n.takes and is_kernel(n.calls[0].op)]
    assert len(taking) > 4
    for node in taking:
        (takeover,) = node.takes
        for operand, result in zip(takeover.operands, takeover.results, strict=True):
            assert graph.data[operand].kind in (DataKind.ACTIVATION, DataKind.GRADIENT)
            assert operand in node.reads and operand not in outside
            assert result in node.writes and result not in (*graph.outputs, *graph.held)
            assert graph.data[operand].size_bytes == graph.data[result].size_bytes
        call = takeover.call
        assert call is not None and call.op in {k.op for k in written(graph)}
        assert (call.args, call.results) == (node.calls[0].args, node.calls[0].results)


def test_a_gated_products_gradients_overwrite_both_factors(
    interpreted: list[str],
) -> None:
    graph = of(stack(2))
    assert ("mm", "mm") in [t for n in ("sigmoid", "neg", "mul") for t in named(graph, n)]
    (kernel, *_) = [k for k in written(graph) if len(k.over) == 2]
    assert "over %" in str(kernel).splitlines()[0]
    assert sum("aten.copy_.default" in line for line in str(kernel).splitlines()) == 2


def test_what_is_read_later_is_not_written_over(interpreted: list[str]) -> None:
    case = stack(2)
    for budget in ("100%", "min"):
        plan = rockplan.plan(case.model, case.args, budget, options=COMPILED)
        graph, events = plan.graph, plan.schedule.events
        taken = taken_over(graph, plan.schedule)
        assert taken
        for position, takeover in taken.items():
            gone = set(takeover.operands)
            for event in events[position + 1 :]:
                if isinstance(event, Compute):
                    assert gone.isdisjoint(graph.nodes[event.node].reads)
                    gone.difference_update(graph.nodes[event.node].writes)


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_kernels_are_listed_once_a_call(budget: str, interpreted: list[str]) -> None:
    case = stack(2)
    planned = rockplan.solve(case.model, case.args, budget, options=COMPILED)
    graph, schedule = planned.plan.graph, planned.plan.schedule
    code = rockplan.code_of(planned)
    calls = {k: code.count(f" = rockplan_{k.name}([") for k in graph.kernels}
    assert kernel_calls(graph, schedule) == {k: count for k, count in calls.items() if count}
    assert any(kernel.over for kernel in kernel_calls(graph, schedule))


def test_a_kernel_that_cannot_be_in_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because it computes other bits, needs more memory, or does not compile."""
    case = stack(2)
    interpret(monkeypatch, fails=lambda kernel: bool(kernel.over))
    none = of(case)
    assert not written(none) and none.kernels
    assert not [t for n in none.nodes for t in n.takes if is_kernel(n.calls[0].op)]
    interpret(monkeypatch)  # by operators they need more
    assert without_takes(of(case)) == without_takes(none)
    monkeypatch.setattr(kernels, "SLIGHT", 0)
    asked = interpret(monkeypatch)
    assert written(of(case))
    assert len(asked) == len(set(asked))
    interpret(monkeypatch)
    monkeypatch.setattr(kernels, "_same_bits", lambda a, b: False)
    assert of(case) == none
    refused = dict(kernels._refused)
    assert refused and set(refused.values()) == {"it computes other bits"}
    assert of(case) == none and kernels._refused == refused


def test_what_is_needed_slightly_more_counts_as_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all executions of the node; what is more than that is refused."""
    case = stack(2)
    asked = interpret(monkeypatch)
    found = {}
    for share in (1 / 64, 1 / 63):
        monkeypatch.setattr(kernels, "_refused", {})
        monkeypatch.setattr(kernels, "measured", _needing(share))
        kernels._functions.clear()
        found[share] = rockplan.plan(case.model, case.args, "100%", options=COMPILED).graph
    assert asked and not written(found[1 / 63])
    taking = [n for n in found[1 / 64].nodes if n.takes and is_kernel(n.calls[0].op)]
    assert taking and all(t.more_bytes > 0 for n in taking for t in n.takes)
    for node in taking:
        before = found[1 / 63].nodes[node.index]
        (takeover,) = node.takes
        assert node.workspace_bytes == before.workspace_bytes + takeover.more_bytes


def _needing(share: float) -> Callable[..., Any]:
    """Measured memory: in place so much of what is written more."""

    def measured(kernel: Kernel, function: Any, inputs: Any) -> tuple[list[torch.Tensor], int]:
        given = [t.clone() for t in inputs]
        results = function(given)
        places = {t.data_ptr() for t in given}
        sizes = [t.untyped_storage().nbytes() for t in results]
        over = sum(n for t, n in zip(results, sizes, strict=True) if t.data_ptr() in places)
        return results, sum(sizes) - over + int(share * over)

    return measured


def test_so_many_kernels_are_compiled_once_more(
    interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "MOST", 2)
    graph = of(stack(2))
    sizes = {n.index: sum(graph.data[d].size_bytes for d in n.writes) for n in graph.nodes}
    assert len(written(graph)) == 2
    taking = [sizes[n.index] for n in graph.nodes if n.takes and is_kernel(n.calls[0].op)]
    assert max(taking) == max(sizes[n.index] for n in graph.nodes if is_kernel(n.calls[0].op))


def test_results_of_other_shapes_overwrite_operands_views(
    interpreted: list[str],
) -> None:
    """Two loops of other shapes are two kernels of Triton, and a tensor more."""
    kernel = kernel_of(lambda x: functional.gelu(x.reshape(8, 2, 16)) * 2, (16, 16))
    *_, looked_at, copied = in_place.KnownKernel(kernel).at_the_end(((0, 0),)).calls
    assert looked_at.op == "aten.view.default" and looked_at.args == (ValueRef(0), (8, 2, 16))
    assert copied.op == "aten.copy_.default" and copied.args[0] == ValueRef(*looked_at.results)


def test_a_softmax_overwrites_its_scores_in_two_steps(interpreted: list[str]) -> None:
    torch.manual_seed(0)
    graph = of(gpt2(layers=1, width=32, heads=2, vocabulary=64, length=32, attention="eager"))
    kernel = next(k for k in graph.kernels if any("exp" in c.op for c in k.calls) and not k.over)
    place = next(p for p, s in enumerate(kernel.result_specs) if s.shape[-1] == 32)
    once = in_place.KnownKernel(kernel).at_once(((place, 0),))
    assert once is not None
    ops = [call.op for call in once.calls]
    copies = [i for i, op in enumerate(ops) if op == "aten.copy_.default"]
    exponential, division = ops.index("aten.exp.default"), ops.index("aten.div.Tensor")
    assert len(copies) == 2 and exponential < copies[0] < division < copies[1]


# By operators: bits, whatever is planned


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_networks_of_many_operators(seed: int, interpreted: list[str]) -> None:
    """The same bits as with nothing in place."""
    torch.manual_seed(seed)
    model, inputs = network(random.Random(seed))
    state = copy.deepcopy(model.state_dict())
    found = []
    for budget, most in (("100%", 0), ("100%", 99), ("min", 99)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_place, "MOST", most)
            model.load_state_dict(state)
            module = rockplan.solve(model, inputs, budget, options=COMPILED)
        model.zero_grad()
        torch.manual_seed(1)
        results = module(*(x.detach().requires_grad_(x.requires_grad) for x in inputs))
        loss_of(results).backward()
        tensors = [t.detach() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        found.append([*tensors, *(p.grad for p in model.parameters() if p.grad is not None)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one.nan_to_num(), two.nan_to_num())


def test_plan_files_say_what_is_taken_over(interpreted: list[str], tmp_path: Path) -> None:
    case = stack(2)
    planned = rockplan.solve(case.model, case.args, "min", options=COMPILED)
    plan = rockplan.plan_of(planned)
    several = [t for t in taken_over(plan.graph, plan.schedule).values() if len(t.operands) > 1]
    assert several
    path = tmp_path / "plan.json"
    rockplan.save_plan(planned, path)
    loaded = rockplan.load(case.model, case.args, path, options=COMPILED)
    assert rockplan.plan_of(loaded).graph == plan.graph
    assert loaded.code == planned.code
    kernels._functions.clear()
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch, fails=lambda kernel: bool(kernel.over))
        with pytest.raises(rockplan.PlanMismatch, match="cannot be written over operands"):
            rockplan.load(case.model, case.args, path, options=COMPILED)


def test_a_file_of_before_holds_as_it_was(interpreted: list[str], tmp_path: Path) -> None:
    """It says nothing of kernels in place: none is."""
    case = stack(2)
    plan = rockplan.plan(case.model, case.args, "100%", options=COMPILED)
    graph = without_takes(plan.graph)
    peak_bytes = simulate(graph, plan.schedule).peak_bytes
    before = replace(plan, graph=graph, peak_bytes=peak_bytes, budget_bytes=peak_bytes)
    document = json.loads(dump_plans([before]))
    for node in document["plans"][0]["graph"]["nodes"]:
        del node["takes"]
    del document["digest"]
    document["digest"] = digest(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    loaded = rockplan.load(case.model, case.args, path, options=COMPILED)
    assert rockplan.plan_of(loaded).peak_bytes == peak_bytes
    assert not taken_over(loaded.plan.graph, loaded.plan.schedule)


def test_calls_of_other_sizes_write_in_place_too(interpreted: list[str]) -> None:
    case = stack(2)
    planned: Any = rockplan.solve(case.model, case.args, "min", options=COMPILED)
    other = replace(case, args=(torch.randn(384, 32),))
    kept = rockplan.solve(case.model, other.args, "100%", options=COMPILED)
    found = gradients(other, planned)
    assert all(map(torch.equal, found, gradients(other, kept)))
    second = planned.plans[1]
    assert any(len(t.operands) > 1 for t in taken_over(second.graph, second.schedule).values())


# Compiled


class Attention(nn.Module):
    """Written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.queries = nn.Linear(width, width), nn.Linear(width, width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            scores = self.queries(x) @ self.keys(x).transpose(-1, -2)
            x = functional.softmax(0.1 * scores, -1) @ self.inner(x)
        return mean_square(x)


def test_bits_and_peaks_of_kernels_in_place(compilers: Path) -> None:
    """Those where nothing is in place, and as predicted; less than without. (Gated products:
    `test_compiled`.)"""
    torch.manual_seed(0)
    case = Case("attention", Attention(8), (torch.randn(64, 8),), {}, lambda r: r)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "MOST", 0)
        without = rockplan.solve(case.model, case.args, "min", options=COMPILED)
    expected = gradients(case, without)
    for budget in ("100%", "min"):
        planned = rockplan.solve(case.model, case.args, budget, options=COMPILED)
        plan = rockplan.plan_of(planned)
        calls = [t.call for t in taken_over(plan.graph, plan.schedule).values()]
        assert any(call is not None and is_kernel(call.op) for call in calls)
        assert all(map(torch.equal, gradients(case, planned), expected))
        measured = rockplan.peak_live_bytes(functools.partial(case.step, planned)).peak_bytes
        assert plan.peak_bytes - 8 <= measured <= plan.peak_bytes
    assert plan.peak_bytes < 0.9 * rockplan.plan_of(without).peak_bytes


def test_compilers_that_take_more_are_found_out(compilers: Path) -> None:
    """What reads transposed, though nobody asked: other bits."""
    kernel = kernel_of(lambda x: (x.t() * 2).contiguous(), (16, 16))
    assert not in_place.KnownKernel(kernel).is_aligned(0)
    careless = in_place.KnownKernel(kernel).at_the_end(((0, 0),))
    failed = kernels.made([careless])
    assert careless.op in failed and kernel.op not in failed
