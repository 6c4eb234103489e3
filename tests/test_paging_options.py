"""Plans that `Options(host=...)` makes, run with late copies and poison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.errors import HostMemoryError
from rockplan.search import paging, problem
from testing.graphs import gelu_of_product
from testing.models import gpt2, llama
from testing.training import (
    assert_same_state,
    solve_case,
    train_side_by_side,
    twin,
)
from tests.paging import poisoned


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "LEAST_BYTES", 1 << 10)


def options(**changed: Any) -> rockplan.Options:
    given = {"cache": False, "bound_time_limit_s": 0.0, "host": "1GiB", "link": "20GB/s"}
    return rockplan.Options(**{**given, **changed})


def pages_of(planned: Any) -> int:
    return str(planned.code).count("frame.page_in(")


def test_a_check_compares_steps_that_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    planned: Any = solve_case(
        gpt2(length=32), "35%", options=options(check=True, host_path=tmp_path)
    )
    assert pages_of(planned) and planned.plan.checked


@pytest.mark.parametrize("link", ["20GB/s", None])
@pytest.mark.parametrize("host", ["1GiB", True])
def test_folders_are_tried_when_a_plan_is_made(
    tmp_path: Path, host: str | bool, link: str | None
) -> None:
    torch.manual_seed(0)
    case, folder = llama(length=32), tmp_path / "missing"
    with pytest.raises(HostMemoryError, match=rf"(?s){folder}: .*No such file or directory"):
        solve_case(case, "35%", options=options(host=host, link=link, host_path=folder))


@pytest.mark.parametrize(
    ("left", "is_in_memory", "expected"),
    [(0, True, 0), (500, True, 400), (None, True, 800), (0, False, 800)],
)
def test_true_is_what_the_machine_leaves(
    left: int | None, is_in_memory: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a folder with 1000 bytes, with a margin; None: of the memory nothing is known."""
    monkeypatch.setattr(problem, "available_bytes", lambda: left)
    monkeypatch.setattr(problem, "is_in_memory", lambda folder: is_in_memory)
    monkeypatch.setattr(problem, "_free_bytes", lambda folder: 1000)
    found = problem.host_of(gelu_of_product(), options(host=True))
    assert found is not None and found.size_bytes == expected


def test_measurements_are_rounded_down_for_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a machine leaves is another from run to run."""
    hosts = []
    for left in (123_456_789_012, 123_456_000_000):
        monkeypatch.setattr(problem, "_free_bytes", lambda folder, left=left: left)
        monkeypatch.setattr(problem, "is_in_memory", lambda folder: False)
        hosts.append(problem.host_of(gelu_of_product(), options(host=True)))
    assert hosts[0] == hosts[1]
    assert hosts[0] is not None and hosts[0].size_bytes == 98_000_000_000
    assert [problem.in_two_digits(n) for n in (0, 7, 99, 100, 1999)] == [0, 7, 99, 100, 1900]


def test_a_head_in_parts_pages_too() -> None:
    """Compared with the same parts where nothing runs again, and nothing is paged."""
    torch.manual_seed(0)
    case = llama(length=32, vocabulary=1000)
    in_parts = options(tile=4, only_loss=True, check=True)
    planned: Any = solve_case(case, "30%", options=in_parts)
    assert pages_of(planned) and planned.plan.graph.tiles == 4 and planned.plan.checked


def test_optimizers_inside_the_backward_pass() -> None:
    torch.manual_seed(0)
    case = gpt2(length=32)
    eager, planned = twin(case), solve_case(case, "40%", options=options())

    def steps_in_backward(module: nn.Module) -> None:
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def stepped(of: torch.Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(stepped)

    for module in (eager, planned):
        steps_in_backward(module)
        for seed in range(2):
            torch.manual_seed(seed)
            case.step(module)
    assert pages_of(planned)
    assert_same_state(planned, eager, "after it")


@pytest.mark.parametrize("link", ["late", "random", "threads"])
def test_bits_are_eagers_whatever_the_link_does(link: str) -> None:
    torch.manual_seed(0)
    case = llama(length=32)
    eager, planned = twin(case), solve_case(case, "30%", options=options())
    assert pages_of(planned)
    with poisoned(planned, link):
        train_side_by_side(case, planned, eager, 2)
