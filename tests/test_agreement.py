"""Agreement of processes, here of threads that share a store."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import rockplan
from rockplan.solving.agreement import Agreement

TIMEOUT = datetime.timedelta(seconds=200)


class Late:
    """A store that says late what is there."""

    def __init__(self, store: Any):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, places: list[str]) -> bool:
        time.sleep(0.1)
        return bool(self._store.check(places))


def outcomes(*works: Callable[[Agreement], object]) -> list[Any]:
    """What each rank returns or raises; the first gets messages late."""
    store: Any = dist.HashStore()
    store.set_timeout(TIMEOUT)
    ranks = tuple(range(len(works)))

    def outcome(rank: int) -> object:
        agreed = Agreement(rank, ranks, store if rank else Late(store))
        try:
            found = works[rank](agreed)
            agreed.end()
        except BaseException as error:
            agreed.fail(error)
            return error
        return found

    with ThreadPoolExecutor(len(works)) as pool:
        return [*pool.map(outcome, ranks)]


def test_processes_of_other_models_differ_in_steps() -> None:
    def steps(count: int) -> Callable[[Agreement], object]:
        return lambda agreed: [[*agreed.gathered(count, i)] for i in range(count)]

    assert outcomes(steps(1), steps(5)) == [[[0]], [[1]] * 5]


def test_all_read_a_decision_before_it_is_deleted() -> None:
    def work(agreed: Agreement) -> object:
        return [agreed.decided(lambda: "key", lambda i=i: i) for i in range(3)]  # type: ignore[misc]

    assert outcomes(work, work, work) == [[0, 1, 2]] * 3


def interrupt() -> object:
    raise KeyboardInterrupt


def leave() -> object:
    raise SystemExit(3)


def refuse() -> object:
    error = rockplan.InfeasibleBudget(1, 2, "an operation", unplanned_bytes=3)
    error.cause = lambda: None  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize(
    ("make", "own", "text"),
    [
        (interrupt, KeyboardInterrupt, "KeyboardInterrupt"),
        (leave, SystemExit, "SystemExit: 3"),
        (lambda: lambda: None, rockplan.OtherRankFailed, "pickle"),
        (refuse, rockplan.InfeasibleBudget, "budget"),
    ],
    ids=["interrupted", "left", "no message", "error that is no message"],
)
def test_nobody_waits_for_one_that_decides_nothing(
    make: Callable[[], object], own: type[BaseException], text: str
) -> None:
    def work(agreed: Agreement) -> object:
        return agreed.decided(lambda: "key", make)

    began = time.monotonic()
    first, *others = outcomes(work, work, work)
    assert time.monotonic() - began < TIMEOUT.total_seconds()
    assert isinstance(first, own), first
    for other in others:
        assert isinstance(other, rockplan.RockplanError), other
        assert str(other).startswith("rank 0 could not plan: ") and text in str(other)
    if own is rockplan.InfeasibleBudget:
        assert [other.minimum_bytes for other in others] == [2, 2]


def test_a_key_without_a_message_is_not_awaited() -> None:
    began = time.monotonic()
    first, other = outcomes(
        lambda agreed: agreed.gathered(lambda: None, 1), lambda agreed: agreed.gathered("key", 1)
    )
    assert time.monotonic() - began < TIMEOUT.total_seconds()
    assert not isinstance(first, rockplan.RockplanError)
    assert isinstance(other, rockplan.OtherRankFailed) and "rank 0 could not plan" in str(other)
