"""`rockplan.token_log_probs`: what a loss needs of the logits, which are never there as a whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockplan
from testing.training import QUICK


def by_logits(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(hidden, weight, bias).float() / temperature
    found, is_read = logits.log_softmax(-1), ids != -100
    chosen = found.gather(-1, ids.masked_fill(~is_read, 0)[..., None].long())[..., 0]
    return chosen * is_read, -(found.exp() * found).sum(-1) * is_read


@pytest.mark.parametrize("vocabulary", [7, 512, 513, 70_000])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_logits(
    vocabulary: int, entropy: bool, has_bias: bool
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (3, 8), dtype=torch.int32)
    ids[0, 2] = ids[2, 3] = -100
    leaves = [torch.randn(3, 8, 16), torch.randn(vocabulary, 16) / 4, torch.randn(vocabulary)]
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    given = bias if has_bias else None
    expected = by_logits(hidden, weight, ids, given, 0.7)[: 2 if entropy else 1]
    found = rockplan.token_log_probs(
        hidden, weight, ids, bias=given, temperature=0.7, entropy=entropy
    )
    found = found if entropy else (found,)
    trained = [hidden, weight, bias] if has_bias else [hidden, weight]
    of_results = [torch.randn(3, 8) / 24 for _ in found]
    gradients = [torch.autograd.grad(results, trained, of_results) for results in (expected, found)]
    for own, other in zip((*found, *gradients[1]), (*expected, *gradients[0]), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


class Policy(nn.Module):
    """Returns the loss of tokens with advantages, as GRPO has it."""

    def __init__(self, vocabulary: int = 3000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        layers = [(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))] * 3
        self.layers = nn.Sequential(*(copy.deepcopy(m) for layer in layers for m in layer))
        self.head = nn.Linear(32, vocabulary, bias=False)

    def forward(self, ids: Tensor, advantages: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(ids[:, :-1]))
        found, spread = rockplan.token_log_probs(
            hidden, self.head.weight, ids[:, 1:], temperature=0.9, entropy=True
        )
        return -(found * advantages).mean() - 0.01 * spread.mean()


@pytest.mark.parametrize("is_cast", [False, True])
def test_plans_have_eagers_bits_within_budget(is_cast: bool) -> None:
    torch.manual_seed(0)
    eager = Policy()
    batch = torch.randint(3000, (4, 65)), torch.randn(4, 64)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_cast)
    with autocast:
        fast: Any = rockplan.solve(copy.deepcopy(eager), batch, "min", options=QUICK)
    assert fast.plan.overhead > 0

    def step(module: nn.Module) -> None:
        torch.manual_seed(0)
        with autocast:
            loss = module(*batch)
        loss.backward()

    for _ in range(2):
        step(eager)
        step(fast)
    for one, other in zip(eager.parameters(), fast.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    peak_bytes = rockplan.peak_live_bytes(lambda: step(fast)).peak_bytes
    assert peak_bytes <= fast.plan.peak_bytes <= fast.plan.budget_bytes


def test_frozen_heads_take_a_twentieth_of_logits() -> None:
    rows, width, vocabulary = 512, 4, 80_000
    hidden = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16)
    ids = torch.randint(vocabulary, (rows,))
    hidden.grad = torch.zeros_like(hidden)

    def step() -> None:
        rockplan.token_log_probs(hidden, weight, ids).mean().backward()

    assert rockplan.peak_live_bytes(step).peak_bytes <= rows * vocabulary * 2 / 20


@pytest.mark.parametrize(
    "change, error",
    [
        ({"ids": torch.zeros(5, dtype=torch.long)}, "pass .*width"),
        ({"weight": torch.ones(6)}, "pass .*width"),
        ({"ids": torch.zeros(4)}, "pass integers"),
        ({"temperature": 0.0}, "a number above 0"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], error: str) -> None:
    given = {"hidden": torch.ones(4, 6), "weight": torch.ones(9, 6), "ids": torch.arange(4)}
    with pytest.raises(rockplan.InvalidInput, match=error):
        rockplan.token_log_probs(**(given | change))


@pytest.mark.parametrize("wrong", [-1, 1000, 5000])
def test_ids_beyond_the_vocabulary_raise(wrong: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        rockplan.token_log_probs(torch.ones(2, 4), torch.ones(1000, 4), torch.tensor([3, wrong]))
