"""Calls of other sizes: times are those of a known plan, scaled, and the search begins with its
schedule; what they promise holds as if it had been planned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockplan
from rockplan.budget import Budget
from rockplan.graph_builder.costs.estimate import CPU_RATES, roofline
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.oracles.simulate import simulate
from rockplan.runtime.program import ModuleCall
from rockplan.search import planning
from rockplan.search.adapt import problem_like
from rockplan.search.problem import Problem, problem_of
from rockplan.solving.captured_calls import captured_call
from testing import models
from testing.models import Case
from testing.training import assert_same_state, assert_same_tensor, train_side_by_side
from tests.planning import heard, set_times

OPTIONS = rockplan.Options(cache=False, time_limit_s=2, bound_time_limit_s=0)

CASES = {
    "llama": lambda: models.llama(layers=1, width=32, batch=4, length=64),
    "gpt2": lambda: models.gpt2(layers=1, width=32, batch=4, length=64),
    "bert": lambda: models.bert(layers=1, width=32, batch=4, length=64),
    "t5": lambda: models.t5(layers=1, width=32, batch=4, length=64),
    "vit": lambda: models.vit(layers=1, width=32, batch=8),
}
SAMPLE = (3, 32)
"""Batch and length."""

OTHERS = ((3, 48), (2, 20), (4, 64))


def of_size(case: Case, batch: int, length: int) -> Case:
    """The call of `case`, on a part of its batch and of its tokens; of images on a part of the
    batch."""
    if "pixel_values" in case.kwargs:
        return replace(case, kwargs={k: t[: length // 8] for k, t in case.kwargs.items()})
    kwargs = {k: t[:batch, :length].contiguous() for k, t in case.kwargs.items()}
    return replace(case, kwargs=kwargs)


@pytest.fixture(autouse=True)
def _times_of_a_set_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch)


@pytest.mark.parametrize("name", ["llama", "vit", "t5"])
def test_other_sizes_run_the_known_plan(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    sample = of_size(case, *SAMPLE)
    planned: Any = rockplan.solve(
        copy.deepcopy(case.model), (), "70%", sample_kwargs=sample.kwargs, options=OPTIONS
    )
    eager = copy.deepcopy(case.model)
    for size in OTHERS:
        other = of_size(case, *size)
        stages = heard(lambda other=other: other.step(planned))
        assert "measuring times" not in stages, size
        plan = planned.plan
        assert "times scaled from those of graph" in plan.profile_source
        for module in (planned, eager):
            module.zero_grad()
        train_side_by_side(other, planned, eager, steps=2)
        peak_bytes, _ = rockplan.peak_live_bytes(lambda other=other: other.step(planned), 1)
        assert peak_bytes <= plan.peak_bytes <= plan.budget_bytes, size
        assert peak_bytes >= 0.95 * plan.peak_bytes, size
        for module in (planned, eager):
            module.zero_grad()
    assert len(planned.plans) <= 1 + len(OTHERS)  # one for many sizes may serve several


def roofline_problem(case: Case) -> tuple[Problem, Lowered]:
    """On prices that are the same everywhere."""
    source = captured_call(ModuleCall(case.model, case.args, case.kwargs), OPTIONS)
    graph = source.lowered.graph
    return problem_of(graph, roofline(graph, CPU_RATES), OPTIONS), source.lowered


LARGER = {
    "llama": lambda: models.llama(batch=6, length=96),
    "gpt2": lambda: models.gpt2(batch=6, length=96),
}


@pytest.mark.parametrize("name", LARGER)
def test_the_overhead_is_a_new_plans(name: str) -> None:
    torch.manual_seed(0)
    case = LARGER[name]()
    problem, _ = roofline_problem(of_size(case, 4, 64))
    share = Budget(share=0.7)
    known = planning.plan_within(problem, share, OPTIONS)
    assert known.overhead > 0.02
    same_bytes = Budget(size_bytes=known.budget_bytes)
    for size in ((4, 50), (4, 96), (6, 64)):
        problem, lowered = roofline_problem(of_size(case, *size))
        for budget in (share, same_bytes):
            like = problem_like([known], lowered, (), OPTIONS)
            assert like is not None and like.known is not None
            found = planning.plan_within(like, budget, OPTIONS)
            anew = planning.plan_within(problem, budget, OPTIONS)
            assert found.peak_bytes <= found.budget_bytes == anew.budget_bytes
            time_ns = simulate(problem.graph, found.schedule).time_ns
            assert time_ns <= anew.time_ns + 0.01 * anew.eager_time_ns, (size, budget)


class Meaning(nn.Module):
    """What is made of what is given, as a mean that a parameter scales."""

    def __init__(self, made: Callable[..., Tensor]) -> None:
        super().__init__()
        self.made = made
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, *given: Tensor) -> Tensor:
        return (self.made(*given).mean(1).abs() * self.scale).square().mean()


class Frames(nn.Module):
    """Frames of a signal that overlap, as of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.unfold(0, 40, 16))).square().mean()


def complex_rows(count: int) -> Tensor:
    return torch.randn(count, 16, dtype=torch.complex64)


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "integers": (
        lambda: Meaning(lambda ids: ids / 7),
        lambda n: (torch.arange(n * 16).view(n, 16),),
    ),
    "positions": (
        lambda: Meaning(lambda ids: torch.sin(ids[:, None].expand(-1, 16).contiguous() * 0.5)),
        lambda n: (torch.arange(n),),
    ),
    "conjugated": (
        lambda: Meaning(lambda x, y: x * y.conj()),
        lambda n: (complex_rows(n), complex_rows(n)),
    ),
    "infinite": (
        lambda: Meaning(lambda h: torch.isinf(h).float()),
        lambda n: (torch.randn(n, 16),),
    ),
    "absolute": (lambda: Meaning(torch.abs), lambda n: (complex_rows(n),)),
    "frames": (Frames, lambda n: (torch.randn(16 * n),)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_peak_of_unusual_operands_is_promised(name: str) -> None:
    kind, make = UNUSUAL[name]
    planned: Any = rockplan.solve(kind(), make(256), "100%", options=OPTIONS)
    args = make(200)
    peak_bytes, _ = rockplan.peak_live_bytes(lambda: planned(*args).backward(), 1)
    assert "times scaled" in planned.plan.profile_source
    assert peak_bytes <= planned.plan.peak_bytes


class Chunked(nn.Module):
    """Runs a chunk of rows at a time: how often depends on how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        done = [self.second(torch.tanh(self.first(part)).exp()) for part in x.split(4)]
        return torch.cat(done).pow(2).mean()


class Squeezing(nn.Module):
    """A batch of one goes a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if len(x) == 1:
                x = x + torch.sin(layer(x).cos().squeeze(0)).sigmoid().exp().unsqueeze(0)
            else:
                x = torch.tanh(layer(x))
        return x.pow(2).mean()


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(("kind", "count", "other"), [(Chunked, 16, 32), (Squeezing, 8, 1)])
def test_another_graph_is_planned_anew(kind: type[nn.Module], count: int, other: int) -> None:
    torch.manual_seed(0)
    eager = kind()
    planned: Any = rockplan.solve(copy.deepcopy(eager), rows(count), "70%", options=OPTIONS)
    stages = heard(lambda: planned(rows(other)).backward())
    assert "measuring times" in stages and planned.plan.trace
    eager(rows(other)).backward()
    assert_same_state(planned, eager, "step")
    assert not heard(lambda: planned(rows(other)).backward())


def test_packed_sequences_of_one_length_have_one_plan() -> None:
    case = CASES["llama"]()
    eager = copy.deepcopy(case.model)
    ids = case.kwargs["input_ids"][:1]

    def call(*lengths: int) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        length = positions.numel()
        return {
            "input_ids": ids[:, :length],
            "labels": ids[:, :length],
            "position_ids": positions,
            "attention_mask": None,
        }

    planned: Any = rockplan.solve(case.model, call(20, 28), "70%", options=OPTIONS)
    for lengths in ((20, 28), (30, 10, 8), (7, 41)):
        for module in (planned, eager):
            module(**call(*lengths)).loss.backward()
    assert_same_state(planned, eager, "packed")
    assert len(planned.plans) == 1


def test_a_chain_of_lengths_gets_no_worse() -> None:
    case = CASES["llama"]()
    share = Budget(share=0.7)
    problem, _ = roofline_problem(of_size(case, 4, 24))
    plans = [planning.plan_within(problem, share, OPTIONS)]
    for length in (30, 43, 64, 56):
        problem, lowered = roofline_problem(of_size(case, 4, length))
        like = problem_like(plans[-1:], lowered, (), OPTIONS)
        assert like is not None
        plans.append(planning.plan_within(like, share, OPTIONS))
    anew = planning.plan_within(problem, share, OPTIONS)
    time_ns = simulate(problem.graph, plans[-1].schedule).time_ns
    assert time_ns <= anew.time_ns + 0.01 * anew.eager_time_ns


def test_a_loaded_plan_is_replayed_on_other_sizes(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Squeezing()
    planned: Any = rockplan.solve(copy.deepcopy(model), rows(8), "80%", options=OPTIONS)
    planned(rows(6)).backward()
    rockplan.save_plan(planned, tmp_path / "two.plan.json")
    loaded: Any = rockplan.load(copy.deepcopy(model), rows(8), tmp_path / "two.plan.json")
    assert heard(lambda: loaded(rows(6)).backward()) <= {"capturing the model", "writing the code"}
    assert loaded.plan.graph_digest == planned.plan.graph_digest
    assert "measuring times" not in heard(lambda: loaded(rows(5)).backward())
    model(rows(5)).backward()
    expected, found = model(rows(5)), loaded(rows(5))
    assert_same_tensor(found, expected, "loss")
