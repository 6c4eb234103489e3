"""Budgets as users write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.budget import Budget, parse_budget
from rockplan.errors import InvalidBudget
from rockplan.solving import captured_calls
from testing.training import QUICK


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (1000, 1000),
        (1000.9, 1000),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("1.5 gib", 3 * 2**29),
        ("1_000_000", 10**6),
        ("1e6", 10**6),
        (".5MB", 500_000),
        ("512", 512),
    ],
)
def test_bytes(text: str | int | float, size_bytes: int) -> None:
    assert parse_budget(text) == Budget(size_bytes=size_bytes)


def test_share_rounds_down() -> None:
    assert parse_budget("40%").within(1001) == 400


def test_later_shares_are_not_below_the_first_budget() -> None:
    later = Budget(share=0.4, least_bytes=500)
    assert [later.within(peak) for peak in (1000, 2000)] == [500, 800]


def test_minimum() -> None:
    assert parse_budget("min").within(100) is None


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [(0.5, "'50%'"), ("0.5", "'50%'"), (".25", "'25%'"), ("0.9B", "'90%'"), (1e-300, "'1e-298%'")],
)
def test_less_than_a_byte_means_a_share(budget: Any, remedy: str) -> None:
    with pytest.raises(InvalidBudget, match=f"less than one byte.*{re.escape(remedy)}"):
        parse_budget(budget)


TOO_LARGE: dict[str, Any] = {
    "exponent": "1e400",
    "share": "1e400%",
    "digits": "9" * 400,
    "digits of a share": "9" * 400 + "%",
    "a million digits": "9" * 10**6,
    "a million digits and more": "9" * 10**6 + "!",
    "integer": 10**400,
    "integer without text": 10**5000,
    "float": 1e300,
    "text": "1e300",
    "unit": "1e20 TB",
    "share of everything": "1e9%",
    "room": "auto-1e400",
    "64 bits": 2**63,
    "64 bits as text": "9223372036854775808",
}


@pytest.mark.parametrize("budget", TOO_LARGE.values(), ids=TOO_LARGE)
def test_budgets_that_are_too_large(budget: Any) -> None:
    with pytest.raises(InvalidBudget, match="too large|too long") as caught:
        parse_budget(budget)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("budget", [2**63 - 1, "9223372036854775807", "1e6%", "8e6 TiB"])
def test_the_largest_budgets(budget: Any) -> None:
    found = parse_budget(budget).within(2**40)
    assert found is not None and 2**40 < found < 2**63


def test_a_loss_outside_has_room_in_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    layers = [k for _ in range(4) for k in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, x = nn.Sequential(*layers), torch.randn(128, 64)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    def measured(budget: Any) -> tuple[int, int]:
        """Return the bytes asked for, and those of a step."""
        asked = rockplan.plan(model, x, budget, options=QUICK).budget_bytes
        planned = rockplan.solve(model, x, budget, loss=loss, options=QUICK)
        step = rockplan.peak_live_bytes(lambda: loss(planned(x)).backward())
        return asked, step.peak_bytes

    for budget in ("60%", "80%"):
        asked, needed = measured(budget)
        assert 0.9 * asked < needed <= asked
    assert not caplog.messages
    asked, needed = measured("min")
    assert needed > asked
    (said,) = re.findall(r"a step needs (\d+) bytes.* a budget of (\d+) bytes", caplog.text)
    assert int(said[0]) == pytest.approx(needed, abs=16)
    caplog.clear()
    asked, needed = measured(int(said[1]))
    assert needed <= asked and not caplog.messages
    for wrong in (lambda y: y.no_such(), lambda y: y):
        with pytest.raises(rockplan.InvalidInput, match="loss= does not run"):
            rockplan.solve(model, x, "60%", loss=wrong, options=QUICK)


@pytest.mark.parametrize(
    "loss, recordings", [(lambda y: y.square().mean(), 1), (lambda y: y.sum(), 2)]
)
def test_a_loss_as_expected_needs_one_recording(
    loss: Callable[[torch.Tensor], torch.Tensor],
    recordings: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a second plan leaves it room; gradients in other strides need another."""
    found: list[int] = []
    real = captured_calls.capture
    monkeypatch.setattr(captured_calls, "capture", lambda *call: (found.append(1), real(*call))[1])
    layers = [k for _ in range(4) for k in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, x = nn.Sequential(*layers), torch.randn(128, 64)
    for made in (rockplan.solve, rockplan.plan):
        found.clear()
        made(model, x, "80%", loss=loss, options=QUICK)  # type: ignore[operator]
        assert len(found) == recordings
