"""Out-of-memory errors that say who owned the memory, and what fits."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rockplan
from rockplan.options import Options
from rockplan.will_it_fit import out_of_memory

Step = Callable[[nn.Module], torch.Tensor]


class Net(nn.Module):
    """Raises as a full device does, once where it is asked to."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU()) for _ in range(2))
        self.back = nn.Linear(32, 8)
        self.fails = [True] if fails else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.back(block(x))
        if self.fails:
            self.fails.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x.square().mean()


def _full(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _forward(model: nn.Module) -> torch.Tensor:
    return model(torch.zeros(64, 8))


def _backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.zeros(64, 8))
    loss.register_hook(_full)
    loss.backward()
    return loss


def _under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _forward(model)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "OPTIONS", Options(cache=False, time_limit_s=1.0))


def _note_of(step: Step, model: nn.Module, passed: nn.Module | None = None) -> str:
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory") as found,
        rockplan.explained(passed),
    ):
        step(model)
        optimizer.step()
    (note,) = found.value.__notes__
    return note


def test_in_forward_it_names_module_and_line() -> None:
    note = _note_of(_forward, Net(fails=True))
    assert "Net needs" in note and "blocks." in note and ".py:" in note
    ways = {line.split("  ")[4].strip() for line in note.splitlines() if "at least 64" in line}
    assert ways == {"kept whole", "checkpoint per block", "rockplan"}
    assert "optimizer AdamW" in note


def test_in_backward_it_knows_the_models_call() -> None:
    model = Net(fails=False)
    assert "rockplan.explained(model) knows" in _note_of(_backward, model)
    assert "Net needs" in _note_of(_backward, model, passed=model)
    assert not model._forward_pre_hooks


def test_of_a_planned_module() -> None:
    model = Net(fails=False)
    fast = rockplan.solve(model, torch.zeros(64, 8), "min", options=Options(cache=False))
    assert "Net needs" in _note_of(_backward, fast, passed=fast)


def test_autocast_is_seen_by_its_tensors() -> None:
    halves = _note_of(_under_autocast, Net(fails=True)), _note_of(_forward, Net(fails=True))
    under, outside = (note.partition("peak ")[2].split(" in ")[0] for note in halves)
    assert under != outside


def test_without_such_an_error_nothing_is_said() -> None:
    model = Net(fails=False)
    with rockplan.explained(model):
        _forward(model)
    with pytest.raises(ValueError) as found, rockplan.explained():
        raise ValueError("other")
    assert not hasattr(found.value, "__notes__")


def test_what_the_error_held_goes_with_it() -> None:
    model, held = Net(fails=True), []

    def step() -> None:
        x = torch.zeros(64, 8)
        held.append(weakref.ref(x))
        model(x)

    gc.collect()
    gc.disable()
    try:
        batch = torch.zeros(64, 8)
        held.append(weakref.ref(batch))
        with contextlib.suppress(torch.OutOfMemoryError), rockplan.explained():
            step()
        del batch
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_what_cannot_be_explained_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_told", lambda *_: 1 / 0)
    assert "cannot say what took the memory" in _note_of(_forward, Net(fails=True))
