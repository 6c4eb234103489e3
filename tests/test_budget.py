"""Budgets as users write them."""

from __future__ import annotations

import pytest

from rockplan.budget import Budget, parse_budget


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


def test_share_of_a_later_call_is_not_below_the_first_budget() -> None:
    later = Budget(share=0.4, least_bytes=500)
    assert [later.within(peak) for peak in (1000, 2000)] == [500, 800]


def test_minimum() -> None:
    assert parse_budget("min").within(100) is None
