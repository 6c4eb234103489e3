"""A plan that is not what trains is said once, with the way out; right uses say nothing."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rockplan
from rockplan.runtime.planned_state import HasPlans
from testing.training import QUICK, assert_same_state

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
OPTIONS = replace(QUICK, cache=False)
Step = Callable[[Any], Tensor]


def halves() -> tuple[nn.Module, nn.Module]:
    def half() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    return half(), half()


class Coder(nn.Module):
    """What is trained by methods as often as by calls."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = halves()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.ones(8))

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.e(x)
        return y

    def decode(self, z: Tensor) -> Tensor:
        y: Tensor = self.d(z)
        return y

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.scaled(self.decode(self.encode(x)))


def pair(options: rockplan.Options = OPTIONS, budget: str = "min") -> tuple[Any, Any]:
    """The planned module and a copy of the original."""
    torch.manual_seed(0)
    eager = Coder()
    return rockplan.solve(copy.deepcopy(eager), X, budget, options=options), eager


def warned(act: Callable[[], object]) -> list[str]:
    """The warnings of `act` that a plan does not run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if "without its plan" in str(w.message)]


def trained(module: Any, step: Step, steps: int = 3, parameters: Any = None) -> None:
    optimizer = torch.optim.SGD(list(parameters or module.parameters()), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        step(module).backward()
        optimizer.step()


def twice(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.decode(m.encode(x)) * 2
    return y


BYPASSES: dict[str, Step] = {
    "methods": lambda m: m.decode(m.encode(X)).pow(2).sum(),
    "a submodule": lambda m: m.d(X).pow(2).sum(),
    "own parameter": lambda m: m.scaled(X).pow(2).sum(),
    "under checkpoint": lambda m: checkpoint(m.encode, X, use_reentrant=False).pow(2).sum(),
}


@pytest.mark.parametrize("name", BYPASSES)
def test_training_by_parts_is_said_once(name: str) -> None:
    planned, eager = pair()
    step = BYPASSES[name]
    assert warned(lambda: trained(planned, step, 1)) == []
    with pytest.warns(UserWarning, match="planned Coder .*rockplan.solve") as caught:
        trained(planned, step)
    assert [w.filename for w in caught if "without its plan" in str(w.message)] == [__file__]
    trained(eager, step, 1)
    trained(eager, step)
    assert_same_state(planned, eager, name)


def replaced_by_function(m: Any) -> None:
    m.forward = lambda x: twice(m, x)


def replaced_by_parts(m: Any) -> None:
    e, d = m.e, m.d
    m.forward = lambda x: d(e(x))


def replaced_by_fused(m: Any) -> None:
    """As TRL does: a method that has the name of what it replaces."""
    replaced = m.forward

    @functools.wraps(replaced)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return twice(self, *args, **kwargs)

    m.forward = types.MethodType(forward, m)


REPLACED = [replaced_by_function, replaced_by_parts, replaced_by_fused]


@pytest.mark.parametrize("replace", REPLACED)
def test_a_replaced_forward_is_said_once(replace: Callable[[Any], None]) -> None:
    planned, eager = pair()
    replace(planned)
    replace(eager)
    (message,) = warned(lambda: trained(planned, lambda m: m(X).pow(2).sum()))
    assert "forward was replaced" in message
    trained(eager, lambda m: m(X).pow(2).sum())
    assert_same_state(planned, eager, "replaced")


def around_closure(m: Any) -> None:
    forward = m.forward
    m.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def around_wrapped(m: Any) -> None:
    forward = m.forward
    m._original_forward = forward
    m.forward = functools.wraps(forward)(lambda x: forward(x).float())


AROUND = [around_closure, around_wrapped]


@pytest.mark.parametrize("replace", AROUND)
def test_forwards_around_the_planned_one_run_it(
    replace: Callable[[Any], None],
) -> None:
    planned, eager = pair()
    replace(planned)
    replace(eager)
    unplanned_bytes = rockplan.peak_live_bytes(lambda: eager(X).pow(2).sum().backward())[0]
    assert (
        rockplan.peak_live_bytes(lambda: planned(X).pow(2).sum().backward())[0] <= unplanned_bytes
    )
    planned.zero_grad()
    eager.zero_grad()
    assert warned(lambda: trained(planned, lambda m: m(X).pow(2).sum())) == []
    trained(eager, lambda m: m(X).pow(2).sum())
    assert_same_state(planned, eager, "around")


def pieces() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())


def in_turn(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.pow(2).sum()


@pytest.mark.parametrize(
    "step",
    [
        lambda m: m[:-1](X).pow(2).sum(),
        lambda m: in_turn(m.children(), X),
    ],
)
def test_training_the_pieces_of_a_sequence_is_said(step: Step) -> None:
    planned = rockplan.solve(pieces(), X, "min", options=OPTIONS)
    assert len(warned(lambda: trained(planned, step))) == 1


def test_training_the_original_in_its_place_is_said() -> None:
    model = Coder()
    planned: Any = rockplan.solve(model, X, "min", options=OPTIONS)
    assert warned(lambda: model(X).pow(2).sum().backward()) == []  # to compare the two
    assert len(warned(lambda: trained(model, lambda m: m(X).pow(2).sum()))) == 1
    assert warned(lambda: trained(planned, lambda m: m(X).pow(2).sum())) == []


def evaluation_between(m: Any) -> None:
    for _ in range(2):
        trained(m, lambda m: m(X).pow(2).sum(), 1)
        m.eval()
        with torch.no_grad():
            m.decode(m.encode(X))
            m(X)
        m.train()


def gradients_in_evaluation(m: Any) -> None:
    m.eval()
    trained(m, lambda m: m(X).pow(2).sum())
    m.train()
    trained(m, lambda m: m(X).pow(2).sum())


def penalty_in_its_own_pass(m: Any) -> None:
    def step(m: Any) -> Tensor:
        m(X).pow(2).sum().backward()
        found: Tensor = sum(p.pow(2).sum() for p in m.parameters())  # type: ignore[assignment]
        return found

    trained(m, step)


def frozen_parts(m: Any) -> None:
    m.e.requires_grad_(False)
    trained(m, lambda m: m(X).pow(2).sum(), parameters=[*m.d.parameters(), *m.layers.parameters()])
    m.requires_grad_(False)
    x = X.clone().requires_grad_()
    m(x).pow(2).sum().backward()


def a_shared_parameter(m: Any) -> None:
    other = nn.Linear(8, 8)
    other.weight = m.d[2].weight
    trained(m, lambda m: m(X).pow(2).sum(), 1)
    trained(other, lambda o: o(X).pow(2).sum(), 3)


def after_others(m: Any) -> None:
    """Another module is trained before."""
    other = nn.Linear(8, 1)
    trained(other, lambda o: o(m.encode(X).detach()).mean())
    trained(m, lambda m: other(m(X)).mean())


def another_plan_of_the_same(m: Any) -> None:
    if isinstance(m, HasPlans):
        other = rockplan.solve(m, X, "auto", options=OPTIONS)
        trained(other, lambda other: other(X).pow(2).sum(), 3)


RIGHT = [evaluation_between, gradients_in_evaluation, penalty_in_its_own_pass, frozen_parts]
RIGHT += [a_shared_parameter, after_others, another_plan_of_the_same]


@pytest.mark.parametrize("use", RIGHT)
def test_right_uses_say_nothing(use: Callable[[Any], None]) -> None:
    planned, eager = pair()
    assert warned(lambda: use(planned)) == []
    use(eager)


@pytest.mark.parametrize("replaced", [False, True])
def test_originals_run_as_options_say_are_right(replaced: bool) -> None:
    planned, eager = pair(replace(OPTIONS, on_mismatch="original"))
    if replaced:
        around_closure(planned)
        around_closure(eager)
    step: Step = lambda m: m(X[:3]).pow(2).sum()  # noqa: E731
    assert warned(lambda: trained(planned, step)) == []
    trained(eager, step)
    assert_same_state(planned, eager, "original")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_watched_for_themselves(how: Callable[[Any], Any]) -> None:
    planned, _ = pair()
    assert warned(lambda: trained(planned, lambda m: m(X).pow(2).sum())) == []
    assert len(warned(lambda: trained(how(planned), BYPASSES["methods"]))) == 1
    assert warned(lambda: trained(how(planned), lambda m: m(X).pow(2).sum())) == []


def test_what_watches_is_no_hook_of_parameters() -> None:
    planned, _ = pair()
    assert not any(p._post_accumulate_grad_hooks for p in planned.parameters())


def test_nothing_is_left_of_modules_that_are_gone() -> None:
    model = Coder()
    rockplan.solve(model, X, "min", options=OPTIONS)
    gc.collect()
    assert warned(lambda: trained(model, lambda m: m(X).pow(2).sum())) == []
