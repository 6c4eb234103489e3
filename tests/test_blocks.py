"""Blocks of a model planned in place: what they compute, what they need, what is refused."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import random
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rockplan
from benchmarks import blocks as benchmark
from rockplan.blocks import kinds, solve
from rockplan.blocks.find import named_blocks
from rockplan.blocks.outside import Border, measured_step, moments_of
from rockplan.graph_builder.costs.ruler import Stretch, peak_live_bytes
from rockplan.runtime.planned_state import programs_of
from rockplan.runtime.program import ModuleCall
from rockplan.solving.agreement import Agreement
from rockplan.values.block_sequence import BoundedOption
from rockplan.values.names import activation_names
from rockplan.values.plan import recomputations
from rockplan.values.schedule import Schedule, kept_data
from testing.blocks import QUICK, Mixer, Stack, batch, train
from tests.paging import LINKS, poisoned

OPTIONS = rockplan.Options(**QUICK)


def solved(model: Any, budget: Any = "50%", sample: Any = None, **named: Any) -> Any:
    sample = batch() if sample is None else sample
    return rockplan.solve_blocks(model, sample, budget, **{"options": OPTIONS, **named})


@functools.cache
def planned_once(budget: str) -> Any:
    return solved(Stack().train(), budget)


def planned(budget: str) -> Any:
    """A copy, which has plans of its own, of a stack that was planned once."""
    return copy.deepcopy(planned_once(budget))


def step_of(model: Any, call: Callable[[Any], Any]) -> Callable[[], None]:
    def step() -> None:
        call(model)["loss"].backward()

    return step


BATCH = batch()


def plain(model: Any) -> Any:
    return model(BATCH)


def assert_trains_alike(ours: Any, eager: Any, call: Callable[[Any], Any] = plain) -> None:
    assert train(ours, call) == train(eager, call)
    for (name, p), (_, q) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert torch.equal(p, q), name


# What is promised


@pytest.mark.parametrize(("budget", "casts"), [("min", True), ("50%", False), ("75%", True)])
def test_blocks_train_as_eager_within_their_prediction(budget: str, casts: bool) -> None:
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=casts)
    call = autocast(plain)
    eager = Stack().train()
    model = copy.deepcopy(eager)
    names = [*model.state_dict()]
    with autocast:
        assert solved(model, budget) is model
    plan = rockplan.blocks_of(model)
    assert plan.overhead > 0
    found = peak_live_bytes(step_of(model, call))
    assert found.final_bytes == 0
    assert found.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert found.peak_bytes < peak_live_bytes(step_of(eager, call)).peak_bytes
    model.zero_grad(), eager.zero_grad()
    assert_trains_alike(model, eager, call)
    assert [*model.state_dict()] == names
    assert all(isinstance(layer, Mixer) for layer in model.layers)
    assert [len(layer.plans) for layer in model.layers] == [1] * 4


def test_blocks_of_one_kind_run_one_program() -> None:
    model = planned("min")
    codes = {id(p.executable) for layer in model.layers for p in programs_of(layer)}
    assert len(codes) == 1
    assert {block.kind for block in rockplan.blocks_of(model).blocks} == {0}


def test_what_is_measured_beside_the_blocks_is_told() -> None:
    plan = rockplan.blocks_of(planned_once("50%"))
    hidden_bytes = 48 * 32 * 4
    assert plan.first_bytes == hidden_bytes  # what the first layer returned
    assert plan.peak.peak_bytes == plan.peak_bytes == plan.least_peak_bytes
    assert plan.beside.path == "" and plan.beside.outside_bytes > hidden_bytes
    for words in ("beside blocks", "measured", "layers.*  x"):
        assert words in str(plan)


def test_what_kinds_keep_and_recompute_is_named() -> None:
    options = rockplan.Options(**QUICK, keep=["layers.0"])
    said = str(rockplan.blocks_of(solved(Stack().train(), "min", options=options)))
    hidden, wide = 48 * 32 * 4 / 1024, 48 * 128 * 4 / 1024
    largest = f"up/addmm {wide:.1f} KiB, (root)/gelu {wide:.1f} KiB, "
    assert f"keeps       {largest}norm/native_layer_norm:0 {hidden:.1f} KiB" in said
    first, others = re.findall("recomputes  (.*)", said)
    assert first == "nothing" and {"(root)/gelu", "up/addmm"} <= {*others.split(", ")}
    assert re.search(r"keeps .* and \d more\n", said)


def test_the_callers_loss_is_measured_where_given() -> None:
    def loss(result: Any) -> torch.Tensor:
        wide = result["logits"].repeat(1, 200)
        return (wide * wide).sum()

    wide = rockplan.blocks_of(solved(Stack().train(), "min", loss=loss))
    least_bytes = rockplan.blocks_of(planned_once("min")).peak_bytes
    assert wide.peak_bytes > least_bytes + 2 * 48 * 4 * 200 * 4


class Wide(Stack):
    """Results that nothing reads in the backward phase."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        result = super().forward(x)
        return {**result, "logits": result["logits"].repeat(1, 200) + 1}


class Body(Stack):
    """Without a loss of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.first(x))).repeat(1, 40)


def test_gradients_handed_in_are_the_callers() -> None:
    model = solved(Body().train(), "min", blocks=["layers.0", "layers.1"])
    given = torch.ones(len(BATCH), 40 * 32)
    found = peak_live_bytes(lambda: model(BATCH).backward(given))
    assert found.peak_bytes == rockplan.blocks_of(model).peak_bytes


def test_what_is_made_beside_a_block_is_outside() -> None:
    schedule = Schedule((), 0)
    options = [BoundedOption(schedule, 10, 30, 40, 1), BoundedOption(schedule, 5, 20, 25, 1)]
    forward, backward = (Border(1, is_backward, begins=True) for is_backward in (False, True))
    ends = [Border(i, False, begins=False) for i in (0, 1)]
    found = [
        Stretch(ends[0], 17, 17),
        Stretch(forward, 17, 17 + 20 + 100),
        Stretch(ends[1], 22, 22),
        Stretch(backward, 22 + 8, 17 + 25 + 200),
    ]
    moments = [*moments_of(found, options)]
    assert [m.outside_bytes for m in moments] == [7, 7 + 100, 7, 7 + 200]
    assert [m.peak_bytes(options) for m in moments] == [s.peak_bytes for s in found]


class Grows(Stack):
    """Keeps `more` elements beside its blocks until the end of backward."""

    more = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        beside = torch.zeros(self.more)
        h = self.first(x) + (self.first.bias.sum() * beside).sum()
        for layer in self.layers:
            h = layer(h)
        return {"loss": self.head(h).pow(2).mean()}


@pytest.mark.parametrize("more", [400, 4000])
def test_the_chosen_plan_is_measured(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more is beside it than beside the thriftiest one, blocks are chosen again."""
    model = Grows().train()
    before = rockplan.blocks_of(solved(model, "60%"))
    budget_bytes, measures = before.peak_bytes, []

    def measured(*args: Any) -> Any:
        found = measured_step(*args)
        measures.append(found)
        model.more = more
        return found

    model.more = 0
    monkeypatch.setattr(solve, "measured_step", measured)
    plan = rockplan.blocks_of(solved(model, budget_bytes))
    assert plan.options != before.options and len(measures) == 3
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes <= budget_bytes


@pytest.mark.parametrize("budget", ["min", "60%"])
def test_others_above_their_budget_fail_alone(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another process measured more than it has, however often it chooses."""
    plain = rockplan.blocks_of(solved(Stack().train(), budget))

    def gathered(agreed: Agreement, key: object, value: Any) -> dict[int, Any]:
        return {0: value, 1: key == "above" or value}

    monkeypatch.setattr(Agreement, "gathered", gathered)
    assert rockplan.blocks_of(solved(Stack().train(), budget)).options == plain.options


def test_a_too_small_budget_says_who_owns_it() -> None:
    model = Stack().train()
    with pytest.raises(
        rockplan.InfeasibleBudget,
        match=r"beside the blocks \+ .* in the backward of 'layers.3', measured",
    ) as caught:
        solved(model, 20_000)
    least_bytes = caught.value.minimum_bytes
    assert all(type(layer) is Mixer for layer in model.layers)
    assert rockplan.blocks_of(solved(model, least_bytes)).peak_bytes == least_bytes


def test_a_share_below_the_least_takes_the_smallest() -> None:
    smallest = rockplan.blocks_of(planned_once("min"))
    assert rockplan.blocks_of(solved(Stack().train(), "1%")).peak_bytes == smallest.peak_bytes


def test_a_too_small_budget_names_the_models_need() -> None:
    """A head beside the blocks owns the peak of a step; a plan of the whole computes it again."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Mixer(8) for _ in range(3))
            self.wide, self.head = nn.Linear(8, 512), nn.Linear(512, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            h = self.wide(x)
            return (self.head(h.sin().exp()).sin() + x).sum()

    torch.manual_seed(0)
    model, x = Headed().train(), torch.randn(4, 8)
    with pytest.raises(rockplan.InfeasibleBudget, match=r"As a whole \(rockplan.solve\)") as caught:
        rockplan.solve_blocks(model, x, 5_000, options=OPTIONS)
    (needed,) = re.findall(r"the model needs (\d+) bytes", str(caught.value))
    assert int(needed) < caught.value.minimum_bytes
    plan = rockplan.plan(model, x, int(needed), options=OPTIONS)
    assert plan.peak_bytes <= int(needed)


def test_the_smallest_plan_may_run_where_nothing_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = planned("min")
    least_bytes = rockplan.blocks_of(model).peak_bytes
    options = rockplan.Options(**QUICK, on_infeasible="smallest")
    solved(model, 20_000, options=options)
    assert f"needs {least_bytes} bytes" in caplog.text
    plan = rockplan.blocks_of(model)
    assert plan.budget_bytes == 20_000 < plan.peak_bytes == least_bytes
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes


def test_undone_and_planned_again() -> None:
    model, eager = planned("min"), Stack().train()
    first = rockplan.blocks_of(model)
    second = rockplan.blocks_of(solved(model, "80%"))
    assert second.saved_bytes > first.saved_bytes
    assert rockplan.restore_blocks(model) is model
    assert all(type(layer) is Mixer and "_rockplan" not in vars(layer) for layer in model.layers)
    with pytest.raises(rockplan.InvalidInput, match="solve_blocks first"):
        rockplan.blocks_of(model)
    assert_trains_alike(model, eager)


def test_a_second_call_undoes_the_first() -> None:
    model = Stack().train()
    solved(model, "min", blocks=["layers.0", "layers.1"])
    with pytest.raises(rockplan.InvalidInput):
        solved(model, "min", blocks="other.*")
    assert len(rockplan.blocks_of(model).blocks) == 2
    solved(model, "min", blocks="layers.3")
    assert [type(layer) is Mixer for layer in model.layers] == [True, True, True, False]
    plan = rockplan.blocks_of(model)
    assert [block.path for block in plan.blocks] == ["layers.3"]
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes
    solved(model, "min")  # those that are found are found by the class that they had
    assert len(rockplan.blocks_of(model).blocks) == 4


def test_copies_and_pickles_have_plans_of_their_own() -> None:
    model, eager = planned_once("min"), Stack().train()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert rockplan.blocks_of(other) == rockplan.blocks_of(model)
        assert_trains_alike(other, copy.deepcopy(eager))
        assert [len(layer.plans) for layer in other.layers] == [1] * 4


def test_calls_of_other_sizes_stay_within_their_block() -> None:
    model, eager = planned("50%"), Stack().train()
    assert_trains_alike(model, eager, lambda m: m(batch(31)))
    assert [len(layer.plans) for layer in model.layers] == [2] * 4
    kept = [layer.plans[1].saved_bytes for layer in model.layers]
    assert max(kept) <= max(layer.plans[0].saved_bytes for layer in model.layers)


def test_sizes_are_planned_before_training() -> None:
    options = rockplan.Options(**QUICK, sizes={0: (16, 64)}, on_mismatch="error")
    model, eager = solved(Stack().train(), "50%", options=options), Stack().train()
    for rows in (48, 64, 16):
        assert_trains_alike(model, eager, lambda m: m(batch(rows)))  # noqa: B023


def test_larger_calls_grow_with_shares_not_with_bytes() -> None:
    of_share = planned("50%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(of_share, lambda m: m(batch(96)), steps=1)
    for layer in of_share.layers:
        before, larger = (plan.saved_bytes for plan in layer.plans)
        assert before < larger <= 2 * before
    size_bytes = rockplan.blocks_of(of_share).budget_bytes
    of_bytes = solved(Stack().train(), size_bytes)
    with pytest.raises(rockplan.InfeasibleBudget):
        train(of_bytes, lambda m: m(batch(480)), steps=1)


def test_hooks_on_blocks_run_and_plan_nothing_new() -> None:
    model = planned("min")
    seen: list[str] = []
    model.layers[1].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.layers[1].register_forward_hook(lambda module, args, result: seen.append("after"))
    model.layers[1].register_full_backward_hook(lambda module, made, given: seen.append("back"))
    assert_trains_alike(model, Stack().train())
    assert seen == ["before", "after", "back"] * 3
    assert len(model.layers[1].plans) == 1


def test_evaluation_runs_the_original() -> None:
    model, eager = planned("min").eval(), Stack().eval()
    with torch.no_grad():
        assert torch.equal(plain(model)["logits"], plain(eager)["logits"])
    assert [len(layer.plans) for layer in model.layers] == [1] * 4


# Options of a step


def named(model: Any, path: str) -> tuple[set[str], set[str]]:
    """(What a block keeps between its phases, what it computes again), by name."""
    plan = model.get_submodule(path).plans[0]
    names = activation_names(plan.graph)
    again = {names[d] for n in recomputations(plan) for d in plan.graph.nodes[n].writes}
    kept = {names[d] for d in kept_data(plan.graph, plan.schedule)}
    return kept, {name for name in again if "/backward/" not in name}


def test_names_are_kept_and_computed_again() -> None:
    patterns = {"keep": ["layers.*.up", "layers.3"], "recompute": ["layers.[01]/gelu"]}
    options = rockplan.Options(**QUICK, **patterns)
    model = solved(Stack().train(), "min", options=options)
    plan = rockplan.blocks_of(model)
    assert [block.kind for block in plan.blocks] == [0, 0, 1, 2]
    for i in range(4):
        kept, again = named(model, f"layers.{i}")
        assert "up/addmm" in kept and "up/addmm" not in again
        assert ("(root)/gelu" in again) == (i < 3), i
    assert not named(model, "layers.3")[1]
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes
    assert plan.peak_bytes > rockplan.blocks_of(planned_once("min")).peak_bytes
    assert plan.eager_peak_bytes == rockplan.blocks_of(planned_once("min")).eager_peak_bytes
    model.zero_grad()
    assert_trains_alike(model, Stack().train())
    lively = solved(Stack().train(), "100%", options=options)
    assert "(root)/gelu" in named(lively, "layers.0")[1]
    assert not named(lively, "layers.2")[1]


def test_constraints_hold_for_further_calls() -> None:
    options = rockplan.Options(**QUICK, recompute=["layers.*/gelu"], on_mismatch="replan")
    model, eager = solved(Stack().train(), "100%", options=options), Stack().train()
    for rows in (24, 32, 12):
        assert_trains_alike(model, eager, lambda m, rows=rows: m(BATCH[:rows]))
    found = [p for layer in model.layers for p in layer.plans]
    assert len(found) > 4
    assert all(p.graph.dropped and recomputations(p) for p in found)


class Heads(Stack):
    """Two results, of which the second one passes by the last layers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.layers[0](self.first(x)).repeat(1, 1)
        return {"first": self.head(h).sum(), "all": self.layers[1](h).repeat(1, 30)}


def test_a_step_starts_from_what_is_differentiated() -> None:
    options = rockplan.Options(**QUICK, differentiated=(0,))
    paths = ["layers.0", "layers.1"]
    refused(r"no gradient reaches block 'layers.1'", Heads().train(), blocks=paths, options=options)
    options = rockplan.Options(**QUICK, differentiated=(1,))
    model = solved(Heads().train(), "min", blocks=paths, options=options)
    given = torch.ones(len(BATCH), 30 * 32)
    found = peak_live_bytes(lambda: model(BATCH)["all"].backward(given))
    assert found.peak_bytes == rockplan.blocks_of(model).peak_bytes


def test_what_is_released_is_free_in_backward() -> None:
    def loss(result: Any) -> torch.Tensor:
        return result["logits"].repeat(1, 100).pow(2).mean()

    def step(model: Any, lets_go: bool) -> None:
        result = model(BATCH)
        total = loss(result)
        if lets_go:
            del result["logits"]
        total.backward()

    peaks = []
    for released in ((), (1,)):
        options = rockplan.Options(**QUICK, released=released)
        model = solved(Wide().train(), "min", loss=loss, options=options)
        found = peak_live_bytes(functools.partial(step, model, bool(released))).peak_bytes
        assert found == rockplan.blocks_of(model).peak_bytes
        peaks.append(found)
    assert peaks[1] < peaks[0]


# Paging


def wide_batch(rows: int = 1024) -> torch.Tensor:
    return batch(rows)


@functools.cache
def paging_once(host: Any = "1GiB", link: Any = "4GB/s") -> Any:
    options = rockplan.Options(**{**QUICK, "without": ()}, host=host, link=link)
    return solved(Stack(3, 256).train(), "40%", wide_batch(), options=options)


def seeded_step(model: Any, rows: int = 1024) -> Callable[[], None]:
    sample = wide_batch(rows)

    def step() -> None:
        torch.manual_seed(0)
        model(sample)["loss"].backward()

    return step


def assert_steps_alike(ours: Any, eager: Any, rows: int = 1024) -> None:
    for one in (ours, eager):
        one.zero_grad()
        seeded_step(one, rows)()
    for (name, p), (_, q) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), (name, rows)


@pytest.mark.parametrize("link", LINKS)
def test_blocks_page_however_late_copies_are(link: str) -> None:
    model = copy.deepcopy(paging_once())
    plan = rockplan.blocks_of(model)
    with poisoned(model.layers[0], link):
        found = peak_live_bytes(seeded_step(model))
        assert_steps_alike(model, Stack(3, 256).train())
    assert (found.peak_bytes, found.final_bytes) == (plan.peak_bytes, 0)
    assert plan.peak_bytes <= plan.budget_bytes and plan.paged_bytes >= 3 << 20


def test_paging_takes_less_time_and_is_told() -> None:
    plan = rockplan.blocks_of(paging_once())
    assert plan.overhead < rockplan.blocks_of(paging_once(None, None)).overhead / 2
    pages = re.findall(r"^    pages       .*(?:up/addmm|gelu) 4.0 MiB", str(plan), re.MULTILINE)
    assert pages and f"{plan.paged_bytes / 2**20:.1f} MiB to the host and back" in str(plan)


def test_blocks_share_the_memory_of_the_host() -> None:
    for host in (14 << 20, 2 << 20):
        paged = [b.paged_bytes for b in rockplan.blocks_of(paging_once(host)).blocks]
        assert max(paged) <= host // 3 and (sum(paged) > 0) == (host > 2 << 20), host


def test_further_calls_and_copies_of_blocks_page() -> None:
    eager, model = Stack(3, 256).train(), copy.deepcopy(paging_once())
    model = pickle.loads(pickle.dumps(model))
    limit_bytes = rockplan.blocks_of(model).peak_bytes
    for rows in (1024, 768, 640, 512):
        assert peak_live_bytes(seeded_step(model, rows)).peak_bytes <= limit_bytes
        assert_steps_alike(model, eager, rows)
    assert sum(bool(p.trips) for p in model.layers[0].plans) > 1


# What planning leaves alone


def test_gradients_of_before_are_the_same_bits() -> None:
    model, sample = Stack().train(), batch().requires_grad_()
    model(sample)["loss"].backward()
    leaves = [sample, *model.parameters()]
    gradients = [t.grad for t in leaves]
    bits = [g.clone() for g in gradients if g is not None]
    assert len(bits) == len(leaves)
    solved(model, "min", sample)
    assert all(t.grad is g for t, g in zip(leaves, gradients, strict=True))
    assert all(map(torch.equal, [t.grad for t in leaves], bits))


def test_sample_and_targets_get_no_gradient() -> None:
    model, before, judge = Stack().train(), nn.Linear(16, 16), nn.Linear(4, 1)
    sample = before(batch())
    solved(model, "min", sample, loss=lambda result: judge(result["logits"]).sum())
    assert all(p.grad is None for m in (before, judge) for p in m.parameters())
    sample.sum().backward()  # nobody has used it up


def test_hooks_on_parameters_do_not_fire() -> None:
    """An optimizer in the backward pass would step."""
    model, sample = Stack().train(), batch().requires_grad_()
    seen: list[torch.Tensor] = []
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
        parameter.register_hook(seen.append)
    sample.register_hook(seen.append)
    before = copy.deepcopy(model.state_dict())
    solved(model, "100%", sample)
    assert not seen and not any(o.state for o in optimizers.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(sample)["loss"].backward()
    assert len(seen) == 1 + len(optimizers) and all(o.state for o in optimizers.values())


class Counting(Stack):
    """Layers are left out by what Python draws, and numpy draws."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x) + float(numpy.random.rand())
        for layer in self.layers:
            if random.random() >= 0.3:
                h = layer(h)
        return {"loss": self.head(h).pow(2).mean()}


def test_generators_of_python_are_restored() -> None:
    def draws(seed: int) -> list[bool]:
        random.seed(seed)
        return [random.random() >= 0.3 for _ in range(8)]

    seed = next(s for s in range(1000) if all(draws(s)[:4]) and not any(draws(s)[4:]))
    random.seed(seed)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    model = solved(Counting().train(), "min")
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist())
    moments = rockplan.blocks_of(model).moments
    assert {m.running for m in moments if m.is_backward} == {0, 1, 2, 3}


def test_a_forward_wrapped_since_stays_when_undone() -> None:
    model, eager = planned("min"), Stack().train()
    layer, calls = model.layers[1], []
    planned_forward = layer.forward

    def wrapper(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return planned_forward(x)

    layer.forward = wrapper
    rockplan.restore_blocks(model)
    assert layer.forward is wrapper
    assert_trains_alike(model, eager)
    assert len(calls) == 3
    solved(model, "min")
    assert_trains_alike(model, eager)
    assert len(layer.plans) == 1 and layer.forward is wrapper


# Models that are not planned as a whole


class Dropping(Stack):
    """Layers are left out by chance (LayerDrop)."""

    probability = 0.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        for layer in self.layers:
            if float(torch.rand(())) >= self.probability:
                h = layer(h)
        return {"loss": self.head(h).pow(2).mean()}


def test_layers_are_left_out_by_chance() -> None:
    model, eager = solved(Dropping().train(), "min"), Dropping().train()
    model.probability = eager.probability = 0.5
    assert_trains_alike(model, eager)
    assert {len(layer.plans) for layer in model.layers} == {1}


class Routed(nn.Module):
    """A router in Python around experts, a loss of its own, and what it counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(Mixer(16) for _ in range(2))
        self.counts: list[int] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.router(x).softmax(-1)
        first = int((scores[:, 0] > 0.5).sum().clamp(1, len(x) - 1))
        self.counts.append(first)
        parts = [self.experts[0](x[:first]), self.experts[1](x[first:])]
        balance = scores.mean(0).pow(2).sum()
        return {"loss": torch.cat(parts).pow(2).mean() + 0.1 * balance}


def test_a_router_in_python_around_blocks() -> None:
    model, eager = Routed().train(), Routed().train()
    solved(model, "min", blocks="experts.*")
    assert model.counts == []  # as it was
    assert_trains_alike(model, eager)
    assert model.counts == eager.counts


def test_other_blocks_under_checkpoint() -> None:
    model, eager = Stack().train(), Stack().train()
    for one in (model, eager):
        layer = one.layers[3]
        layer.forward = _checkpointed(layer.forward)
    solved(model, "min", blocks=["layers.0", "layers.1", model.layers[2]])
    plan = rockplan.blocks_of(model)
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes
    model.zero_grad()
    assert_trains_alike(model, eager)
    assert [len(layer.plans) for layer in model.layers[:3]] == [1] * 3


def test_the_rest_is_compiled() -> None:
    model, eager = planned("min"), Stack().train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert_trains_alike(model, eager, lambda m: (compiled if m is model else m)(BATCH))
    assert [len(layer.plans) for layer in model.layers] == [1] * 4


def _checkpointed(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def test_checkpointing_of_a_planned_block_is_warned_of() -> None:
    model, eager = planned("min"), Stack().train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.manual_seed(0)
            h = model.first(batch())
            checkpoint(model.layers[0], h, use_reentrant=False).sum().backward()
    assert len([w for w in caught if "again for nothing" in str(w.message)]) == 1
    torch.manual_seed(0)
    eager.layers[0](eager.first(batch())).sum().backward()
    assert torch.equal(2 * eager.first.weight.grad, model.first.weight.grad)


class Pair(nn.Module):
    """A block with several results, of which one may have no gradient, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = Mixer(16), nn.Linear(16, 3)

    def forward(
        self, x: torch.Tensor, *, mask: torch.Tensor, extra: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mix(x) * mask, self.gate(x).softmax(-1)


class Pairs(nn.Module):
    uses_gates = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mask, gates = (x[:, :1] > 0).to(x.dtype), []
        for layer in self.layers:
            x, gate = layer(x, mask=mask)
            gates.append(gate)
        loss = x.pow(2).mean()
        return {"loss": loss + sum(g.pow(2).mean() for g in gates) if self.uses_gates else loss}


@pytest.mark.parametrize("uses_gates", [False, True])
def test_results_that_get_no_gradient_are_planned_for(uses_gates: bool) -> None:
    model, eager = Pairs().train(), Pairs().train()
    model.uses_gates = eager.uses_gates = uses_gates
    solved(model, "min")
    plan = rockplan.blocks_of(model)
    # A gate that is both returned and read in the backward phase counts once while that runs.
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes
    model.zero_grad()
    assert_trains_alike(model, eager)
    assert {len(layer.plans) for layer in model.layers} == {1}


def test_a_measured_step_is_under_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its blocks need is known only then."""
    monkeypatch.setattr(kinds, "option_within", None)
    monkeypatch.setattr(kinds, "thriftiest", None)
    assert rockplan.blocks_of(solved(Pairs().train(), "min")).overhead > 0


def test_a_block_that_must_keep_says_so() -> None:
    block = kinds.captured_block(ModuleCall(Mixer(8).train(), (torch.randn(4, 8),), {}), OPTIONS)
    problem = kinds.block_problem(block, OPTIONS)
    allowance = kinds.Allowance(saved_bytes=-4, peak_bytes=10**6)
    with pytest.raises(rockplan.InfeasibleBudget) as caught:
        kinds.block_option(problem, allowance, OPTIONS)
    assert caught.value.minimum_bytes > caught.value.budget_bytes == 10**6


def test_frozen_blocks_are_another_kind_or_left() -> None:
    model, eager = Stack().train(), Stack().train()
    for one in (model, eager):
        one.first.requires_grad_(False)
        one.layers[0].requires_grad_(False)
        one.layers[1].down.requires_grad_(False)
    solved(model, "min")
    plan = rockplan.blocks_of(model)
    assert [path for path, _ in plan.left] == ["layers.0"]
    assert len({block.kind for block in plan.blocks}) == 2
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert_trains_alike(model, eager)
    assert all(p.grad is None for p in frozen)


# Bad input


def refused(words: str, model: Any = None, **named: Any) -> None:
    model = Stack().train() if model is None else model
    with pytest.raises(rockplan.InvalidInput, match=words):
        solved(model, "min", **named)
    assert not any("_rockplan" in vars(m) for m in model.modules())


def test_blocks_that_there_are_not() -> None:
    refused(r"'layer\.\*' names no module of this model; nearest: 'layers", blocks="layer.*")
    refused("no submodule of this model", blocks=nn.Linear(2, 2))
    refused("blocks is empty", blocks=[])
    refused("a block is a int", blocks=[3])
    refused("blocks is a int", blocks=3)
    refused("no blocks are found", nn.Sequential(nn.Linear(16, 4)), blocks=None)
    model = Stack()
    refused("the whole model; plan it with rockplan.solve", model, blocks=model)


def test_a_list_of_modules_means_its_members() -> None:
    model = Stack()
    expected = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    for blocks in (model.layers, [model.layers], "layers", "layers.*", None):
        assert named_blocks(model, blocks) == expected


def test_blocks_that_overlap() -> None:
    refused("'layers.1.up' lies in block 'layers.1'", blocks=["layers.*", "layers.1.up"])


def test_a_block_that_the_sample_does_not_reach() -> None:
    model = Dropping()
    model.probability = 1.0
    refused(r"'layers.0' and 3 more is not called.*LayerDrop", model, blocks="layers.*")


class Unregistered(Stack):
    """What it returns is no container that is looked into."""

    def forward(self, x: torch.Tensor) -> Any:
        return types.SimpleNamespace(**super().forward(x))


def test_a_block_that_no_gradient_reaches() -> None:
    refused(r"no gradient reaches block 'layers.0' and 3 more.*loss=", Unregistered().train())
    model = Unregistered().train()
    solved(model, "min", loss=operator.attrgetter("loss"))

    def step() -> None:
        result = model(BATCH)  # held, logits and all
        result.loss.backward()

    assert peak_live_bytes(step).peak_bytes == rockplan.blocks_of(model).peak_bytes


def test_planned_without_gradients_where_hooks_replace_results() -> None:
    model, eager = Stack().train(), Stack().train()
    for one in (model, eager):
        one.layers[1].register_forward_hook(lambda module, args, result: 2 * result)
    with torch.no_grad():
        solved(model, "min")
    plan = rockplan.blocks_of(model)
    assert {m.running for m in plan.moments if m.is_backward} == {0, 1, 2, 3}
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes
    model.zero_grad()
    assert_trains_alike(model, eager)


def test_a_block_that_is_called_twice() -> None:
    model = Stack()
    model.layers[2] = model.layers[0]
    refused("'layers.0' is called several times", model, blocks="layers.0")


def test_a_block_that_is_planned_already() -> None:
    model = Stack().train()
    sample = torch.randn(8, 32, requires_grad=True)
    model.layers[0] = rockplan.solve(model.layers[0], sample, "90%", options=OPTIONS)
    with pytest.raises(rockplan.InvalidInput, match="planned already, by solve"):
        solved(model, "min", blocks="layers.*")


def test_options_that_do_not_fit_a_step() -> None:
    def says(words: str, loss: Any = None, **options: Any) -> None:
        refused(words, loss=loss, options=rockplan.Options(**QUICK, **options))

    loss = operator.itemgetter("loss")
    says(r"released=.*lets all results go", released=(1,))
    says(r"released is \(2,\), but the result has 2", loss, released=(2,))
    says(r"differentiated=.*and so does loss=", loss, differentiated=(0,))
    says(r"differentiated is \(2,\)", differentiated=(2,))
    says(r"'layers.*.act' matches no activation of a block.*'layers\.\*", keep=["layers.*.act"])
    says(r"'head' matches no activation of a block", recompute=["head"])
    says(r"'layers.1' matches 'layers.1/add'.*returns it", recompute=["layers.1"])
    says(r"'layers.0/add' matches activations of which.*none", keep=["layers.0/add"])


def test_a_block_that_cannot_be_planned() -> None:
    model, eager = Stack().train(), Stack().train()
    model.layers[2].up.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(rockplan.UnsupportedModel, match=r"block 'layers.2' cannot be .*'leave'"):
        solved(model, "min", blocks="layers.*")
    options = rockplan.Options(**QUICK, on_refused="leave")
    solved(model, "min", blocks="layers.*", options=options)
    plan = rockplan.blocks_of(model)
    assert [path for path, _ in plan.left] == ["layers.2"] and "layers.2  left: " in str(plan)
    assert peak_live_bytes(step_of(model, plain)).peak_bytes == plan.peak_bytes
    model.zero_grad()
    assert_trains_alike(model, eager)
    with pytest.raises(rockplan.InvalidInput, match="on_refused"):
        rockplan.Options(on_refused="skip")  # type: ignore[arg-type]


def test_leaving_all_blocks_is_not_advised() -> None:
    model = Stack().train()
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(
        rockplan.UnsupportedModel, match=r"'layers\.0' .*no other block can be planned"
    ):
        solved(model, "min", blocks="layers.*")


def test_a_model_with_planned_blocks_is_not_planned() -> None:
    model = planned("min")
    with pytest.raises(rockplan.UnsupportedModel, match="planned already"):
        rockplan.solve(model, batch(), "min", options=OPTIONS)


def test_the_benchmarks_page_is_what_it_writes() -> None:
    """Models that a run leaves out stay."""
    page = benchmark.RESULT.read_text()
    known = benchmark.sections(page)
    assert [*known] == [*benchmark.CASES] and benchmark.page(known) == page
    other = benchmark.section("gpt2", ["| a |", "|---|"], 1, "a note")
    written = benchmark.page({**known, "gpt2": other})
    assert benchmark.sections(written) == {**known, "gpt2": other}
    assert "1 round, " in other and ", a note.\n" in other
