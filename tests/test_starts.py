"""From where a step is taken to start its backward pass: a budget that `solve` accepts holds in the
first step, whatever of the result the loss is made of."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rockplan
from testing.training import QUICK

OPTIONS = QUICK
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


class Potential(nn.Module):
    """Energy of positions, and forces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU())
        self.out = nn.Linear(24, 1)

    def energies(self, positions: torch.Tensor) -> torch.Tensor:
        squares = (positions[:, None] - positions[None]).pow(2).sum(-1, keepdim=True)
        return self.out(self.net(squares)).sum((1, 2))

    def forward(self, positions: torch.Tensor) -> Any:
        positions = positions.detach().requires_grad_()
        energy = self.energies(positions).sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


class Named(Potential):
    """With parts of the energy, and several scalars."""

    def forward(self, positions: torch.Tensor) -> Any:
        positions = positions.detach().requires_grad_()
        energies = self.energies(positions)
        energy = energies.sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return {
            "energy": energy,
            "energy per node": energies,
            "forces": -gradient,
            "virial": (gradient * positions).sum(),
        }


class Coded(nn.Module):
    """A quantized tensor, and what the codebook costs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 16))
        self.codes = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.encoder(x)
        codes = self.codes[torch.cdist(h, self.codes).argmin(-1)]
        return h + (codes - h).detach(), (codes - h).square().mean()


def of_tuple(result: Any) -> torch.Tensor:
    return sum(leaf.square().mean() for leaf in result)


def of_names(*names: str) -> Callable[[Any], torch.Tensor]:
    return lambda result: sum(result[name].square().mean() for name in names)


SITUATIONS = {
    "energy and forces": (Potential, of_tuple),
    "energy": (Potential, lambda result: result[0].square()),
    "forces": (Potential, lambda result: result[1].square().mean()),
    "named": (Named, of_names("energy", "forces")),
    "named, virial": (Named, of_names("energy", "forces", "virial")),
    "codes": (Coded, of_tuple),
    "codes alone": (Coded, lambda result: result[1]),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_budget_that_is_accepted_holds(situation: str) -> None:
    kind, loss = SITUATIONS[situation]
    smallest = rockplan.solve(kind(), X, "min", options=OPTIONS).plan.peak_bytes
    model = kind()
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, X, smallest, options=OPTIONS)
    for one in (planned, eager):
        loss(one(X)).backward()
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    # What the loss makes of what it is given is the caller's.
    caller_bytes = 2 * sum(leaf.nbytes for leaf in pytree.tree_leaves(model(X)))
    measured = rockplan.peak_live_bytes(lambda: loss(planned(X)).backward())
    assert measured.peak_bytes <= smallest + caller_bytes


class Classifier(nn.Module):
    """A loss and its logits, as most of them return them."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.body, self.head = make, nn.Linear(3, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.head(self.body(x).tanh())
        return self.make(logits.log_softmax(-1).mean(), logits)


def starts(planned: Any) -> list[int]:
    (bound,) = (b for bounds in planned._rockplan.programs.values() for b in bounds)
    outputs = bound.program.interface.outputs
    return [i for i, leaf in enumerate(outputs) if leaf.tangent is not None]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Classifier(lambda loss, logits: {"loss": loss, "logits": logits}), [0]),
        (Classifier(lambda loss, logits: {"logits": logits, "loss": loss}), [1]),
        (Classifier(lambda loss, logits: (loss, logits)), [0]),
        (Classifier(lambda loss, logits: (logits, loss, logits)), [1]),
        (Classifier(lambda loss, logits: {"loss": loss, "last": logits[-1]}), [0]),
        (Classifier(lambda loss, logits: (2 * loss, {"part": loss, "logits": logits})), [0]),
        (Classifier(lambda loss, logits: (loss, logits[-1])), [0, 1]),
        (Classifier(lambda loss, logits: (logits, logits.tanh())), [0, 1]),
        (Potential(), [0, 1]),
        (Named(), [0, 2, 3]),
        (Coded(), [0, 1]),
    ],
)
def test_what_backward_is_taken_to_start_from(
    model: nn.Module, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rockplan"):
        planned = rockplan.solve(copy.deepcopy(model), X, "100%", options=OPTIONS)
    assert starts(planned) == expected
    assert (f"from leaves {tuple(expected)} of the result" in caplog.text) is has_scalar(model)


def has_scalar(model: nn.Module) -> bool:
    return any(leaf.ndim == 0 for leaf in pytree.tree_leaves(model(X)))


def test_what_was_chosen_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    options = rockplan.Options(cache=False, differentiated=(0,))
    with caplog.at_level(logging.INFO, "rockplan"):
        planned = rockplan.solve(Potential(), X, "100%", options=options)
    assert starts(planned) == [0] and "differentiated" not in caplog.text


def test_compare_starts_where_the_plan_does() -> None:
    """Its rows are of one step: what is measured of a plan is what it promises."""
    found = rockplan.compare(Potential(), X, ("60%",), rounds=1, options=OPTIONS)
    row = found.rows[-1]
    assert row.gradients == "equal bit for bit"
    assert 0 <= row.predicted_peak_bytes - row.peak_bytes <= 64, "a loss of the caller's"
