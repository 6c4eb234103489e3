"""What a plan was made under is compared before each call: other arguments, another state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from tests.usage import both, count_programs, mean_square

SAMPLE = torch.randn(16, 16)


class Prompted(nn.Module):
    """Is passed what may be a parameter or a buffer of its own, or share memory with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.prompt = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("table", torch.randn(16, 16))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.linear(x) @ given)
        return y @ self.prompt.exp() @ self.table


class Decays(Prompted):
    """Changes the buffer in place, between two reads of what it is given."""

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) + given)
        self.table.mul_(0.5)
        return torch.tanh(self.linear(y) + given) @ self.prompt


def other(module: nn.Module, kind: int = 0) -> torch.Tensor:
    torch.manual_seed(kind)
    return torch.randn(16, 16)


GIVEN: dict[str, Callable[[Any], torch.Tensor]] = {
    "another parameter": lambda m: nn.Parameter(other(m)),
    "its parameter": lambda m: m.prompt,
    "its other parameter": lambda m: m.linear.weight,
    "another tensor": other,
    "its buffer": lambda m: m.table,
    "view of its buffer": lambda m: m.table.view(16, 16),
}


@pytest.mark.parametrize("kind", [Prompted, Decays])
@pytest.mark.parametrize("sample", GIVEN)
def test_which_argument_is_a_tensor_of_the_module(
    kind: type[Prompted], sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned for one, called with all."""
    torch.manual_seed(0)
    model = kind()
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, (SAMPLE, GIVEN[sample](model)), "min")

    def use(module: nn.Module, given: str) -> Any:
        argument = GIVEN[given](module)
        result = module(SAMPLE, argument)
        mean_square(result).backward()
        return result, argument.grad

    for given in (*GIVEN, sample):
        both(planned, eager, lambda m, given=given: use(m, given), given)
    made = count_programs(monkeypatch)
    for given in GIVEN:
        both(planned, eager, lambda m, given=given: use(m, given), f"{given}, again")
    assert not made


def test_which_argument_is_a_tensor_of_the_module_for_copies_of_a_plan() -> None:
    torch.manual_seed(0)
    model = Decays()
    planned = rockplan.solve(model, (SAMPLE, model.table), "min")
    strict = rockplan.Options(on_mismatch="error")
    copied = copy.deepcopy(rockplan.solve(model, (SAMPLE, model.table), "min", options=strict))
    both(copied, copy.deepcopy(planned), lambda m: m(SAMPLE, m.table), "a copy")
    for given in (model.table, copied.table[:]):
        with pytest.raises(rockplan.StalePlan, match="which arguments are"):
            copied(SAMPLE, given)
