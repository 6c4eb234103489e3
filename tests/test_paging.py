"""Plans that page to the host: eager's bits at the predicted peak, however late copies are, and
wrong bits as soon as one wait is left out."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rockplan
from rockplan.errors import CaptureError, HostMemoryError
from rockplan.paging.pages import Pages
from rockplan.runtime.planned_state import latest_of
from rockplan.values.graph import producers
from testing.models import CASES, Case, gpt2, llama
from testing.random_networks import network
from testing.training import (
    QUICK,
    assert_equal_trees,
    assert_same_state,
    generator_states,
    solve_case,
    train_side_by_side,
    twin,
)
from testing.zoo_cases import loss_of
from tests.paging import LINKS, page, poisoned

MODELS: dict[str, Callable[[], Case]] = {
    "llama": lambda: llama(length=32),
    "gpt2": lambda: gpt2(length=32),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return MODELS[request.param]()


made: dict[tuple[str, str], nn.Module] = {}


def planned_and_eager(case: Case, budget: str = "80%") -> tuple[Any, nn.Module]:
    """Copies of one that pages, and the original."""
    if (case.name, budget) not in made:
        planned = solve_case(copy.deepcopy(case), budget, options=QUICK)
        made[case.name, budget] = page(planned)
    return copy.deepcopy(made[case.name, budget]), twin(case)


def peak_of(case: Case, module: nn.Module) -> int:
    peak_bytes, left_bytes = rockplan.peak_live_bytes(lambda: case.step(module))
    assert left_bytes == 0
    return peak_bytes


def arenas_in_use(module: nn.Module) -> int:
    gc.collect()
    layout = latest_of(module).executable.layout
    assert layout is not None
    return len(layout.pool._used)


@pytest.mark.parametrize(("budget", "seed"), [("100%", 0), ("60%", 1)])
def test_bits_are_eagers_on_every_link(case: Case, budget: str, seed: int) -> None:
    eager = twin(case)
    planned: Any = solve_case(case, budget, options=QUICK)
    # Of the caller's loss, where that is there at the peak.
    beside_bytes = planned.plan.peak_bytes - peak_of(case, planned)
    page(planned, seed)
    assert len(latest_of(planned).executable.code.pages) > 10
    for link in LINKS:
        with poisoned(planned, link):
            train_side_by_side(case, planned, eager, 2)
            assert planned.plan.peak_bytes - peak_of(case, planned) in (0, beside_bytes), link


@pytest.mark.parametrize("name", ["resnet", "bert", "mlp", "encoder"])
def test_other_models_page_too(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    planned, eager = planned_and_eager(case, "100%")
    with poisoned(planned):
        train_side_by_side(case, planned, eager, 2)


def test_random_networks_page_too() -> None:
    """Changes in place, views, half precision, complex numbers, several results."""
    equal = pages = 0
    for seed in range(8):
        rng = random.Random(seed)
        model, inputs = network(rng)
        case = Case(f"network {seed}", model, inputs, {}, loss_of)
        eager = twin(case)
        try:
            planned: Any = solve_case(case, "100%", options=QUICK)
        except CaptureError:  # of a backward pass that eager does not run either
            continue
        page(planned, seed, least_bytes=1)
        with poisoned(planned):
            train_side_by_side(case, planned, eager, 1)
        equal += 1
        pages += planned.code.count("frame.page_in(")
    assert equal >= 4 and pages >= 40, (equal, pages)


def test_copies_out_begin_in_the_clocks_order() -> None:
    """Also those of one operation, such as the means and deviations of a normalization."""
    torch.manual_seed(0)
    layers = [[nn.Linear(16, 16), nn.LayerNorm(16)] for _ in range(3)]
    model = nn.Sequential(*(module for layer in layers for module in layer))
    turned = 0
    for seed in range(6):
        planned: Any = rockplan.solve(model, torch.randn(512, 16), "100%", options=QUICK)
        page(planned, seed)
        plan: Any = planned.plan
        begun = re.findall(r'frame\.page_out\("(\w+)"', planned.code)
        names = {v.data: v.name for v in reversed(plan.graph.values) if v.view is None}
        leaves = [names[trip.data] for trip in plan.trips]
        assert [name.split("_v")[0] for name in begun] == leaves
        maker = producers(plan.graph)
        pairs = pairwise(trip.data for trip in plan.trips)
        turned += sum(maker[a] == maker[b] and a > b for a, b in pairs)
    assert turned


def test_compiled_kernels_page_too() -> None:
    """Bits are those of the same kernels where nothing is paged."""
    torch.manual_seed(0)
    case = CASES["mlp"]()
    options = replace(QUICK, compile=True)
    kept, planned = (solve_case(case, "100%", options=options) for _ in range(2))
    page(planned)
    assert any("frame.page_out" in line for line in planned.code.splitlines())
    found = []
    for module in (kept, planned):
        with poisoned(planned):
            torch.manual_seed(1)
            module.zero_grad()
            case.step(module)
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert_equal_trees(*reversed(found), "gradients")


# -- mutations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["paged_out", "paged_in"])
def test_each_wait_is_needed(case: Case, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies as late as allowed, a step without one of the waits has other bits."""
    planned, eager = planned_and_eager(case)
    names = [name for name, *_ in latest_of(planned).executable.code.pages]
    for left_out in names:
        with poisoned(planned), pytest.MonkeyPatch.context() as patch:
            waits = getattr(Pages, wait)

            def does(self: Pages, name: str, waits: Any = waits, out: str = left_out) -> None:
                if name != out:
                    waits(self, name)

            patch.setattr(Pages, wait, does)
            with pytest.raises(AssertionError, match="differs in"):
                train_side_by_side(case, planned, copy.deepcopy(eager), 1)
        planned.load_state_dict(eager.state_dict())


# -- ways to train -------------------------------------------------------------------------------


def losses(case: Case, module: nn.Module, seeds: tuple[int, ...]) -> list[torch.Tensor]:
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        found.append(case.loss(module(*case.args, **case.kwargs)))
    return found


def same(
    case: Case, planned: nn.Module, eager: nn.Module, step: Callable[[nn.Module], Any]
) -> None:
    """After `step` of both from no gradients."""
    ends = []
    for module in (eager, planned):
        module.zero_grad()
        ends.append((step(module), generator_states()))
    assert_equal_trees(*reversed(ends), "results and generators")
    assert_same_state(planned, eager, "after it")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_several_calls_in_flight(case: Case, order: tuple[int, ...]) -> None:
    planned, eager = planned_and_eager(case)

    def step(module: nn.Module) -> None:
        found = losses(case, module, (1, 2, 3))
        for number in order:
            found[number].backward()

    for link in ("late", "threads"):
        with poisoned(planned, link):
            same(case, planned, eager, step)
    assert arenas_in_use(planned) == 0


def test_a_graph_that_is_retained(case: Case) -> None:
    """The second backward runs the forward again, which pages as well."""
    planned, eager = planned_and_eager(case)

    def step(module: nn.Module) -> None:
        (loss,) = losses(case, module, (1,))
        loss.backward(retain_graph=True)
        loss.backward()

    with poisoned(planned):
        same(case, planned, eager, step)


def test_accumulation_and_calls_whose_backward_never_comes(case: Case) -> None:
    planned, eager = planned_and_eager(case)

    def step(module: nn.Module) -> None:
        for seed in range(3):
            losses(case, module, (seed,))[0].backward()
            losses(case, module, (10 + seed,))  # an evaluation with gradients, say

    with poisoned(planned):
        same(case, planned, eager, step)
        forward_bytes, left_bytes = rockplan.peak_live_bytes(lambda: losses(case, planned, (1,)))
    assert left_bytes == 0 < forward_bytes
    assert arenas_in_use(planned) == 0


def test_activation_checkpoints_around_it(case: Case) -> None:
    planned, eager = planned_and_eager(case)

    def step(module: nn.Module) -> None:
        torch.manual_seed(1)
        result = checkpoint(module, *case.args, **case.kwargs, use_reentrant=False)
        case.loss(result).backward()

    with poisoned(planned):
        same(case, planned, eager, step)


def test_copies_and_pickles_page_as_well(case: Case) -> None:
    planned, eager = planned_and_eager(case)
    copies = [copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))]
    for copied in copies:
        assert latest_of(copied).executable.code.pages
        with poisoned(copied):
            train_side_by_side(case, copied, copy.deepcopy(eager), 1)


# -- errors --------------------------------------------------------------------------------------


def failing(method: str, at: int, error: Exception) -> Any:
    """The method of Pages, which raises when it is called for the time `at`."""
    original = getattr(Pages, method)
    calls = iter(range(at + 1))

    def raises(self: Pages, *arguments: Any) -> Any:
        if next(calls, None) == at:
            raise error
        return original(self, *arguments)

    return raises


class Interrupted(Exception):
    """By what has nothing to do with pages."""


@pytest.mark.parametrize(
    ("method", "link"),
    [("page_out", "late"), ("paged_out", "threads"), ("page_in", "threads"), ("paged_in", "late")],
)
def test_an_error_amid_copies_leaves_nothing_behind(case: Case, method: str, link: str) -> None:
    planned, eager = planned_and_eager(case)
    with poisoned(planned, link):
        for at in (0, 3, 7):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Pages, method, failing(method, at, Interrupted()))

                def step() -> None:
                    with pytest.raises(Interrupted):
                        case.step(planned)
                    planned.zero_grad()

                step()
            assert arenas_in_use(planned) == 0
        train_side_by_side(case, planned, eager, 1)
        assert peak_of(case, planned) <= planned.plan.peak_bytes


def test_a_hook_that_raises_between_slices(case: Case) -> None:
    """Fetches are on their way then; the call goes with its graph."""
    planned, eager = planned_and_eager(case)
    parameters = list(planned.parameters())
    for parameter in parameters[:: len(parameters) // 6]:

        def raises(gradient: torch.Tensor) -> None:
            raise Interrupted

        for link in ("threads", "late"):
            with poisoned(planned, link):
                handle = parameter.register_hook(raises)
                with pytest.raises(Interrupted):
                    case.step(planned)
                handle.remove()
    planned.zero_grad()
    with poisoned(planned):
        train_side_by_side(case, planned, eager, 1)


def test_a_failing_file_system_is_our_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:

    planned, eager = planned_and_eager(case)

    def fails(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    for name in ("pwritev", "preadv"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(HostMemoryError, match="No space left"):
                case.step(planned)
        planned.zero_grad()
    train_side_by_side(case, planned, eager, 1)
