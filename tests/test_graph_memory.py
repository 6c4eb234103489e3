"""What plans as CUDA graphs do with memory, on the CPU: gradients of several slices, and who holds.

The graphs themselves are in test_cuda_graph.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rockplan
from rockplan.codegen.executable import Frame, run_forward
from rockplan.runtime import captured
from rockplan.runtime.planned_state import latest_of
from rockplan.values.interface import Interface


class AddedAt(nn.Module):
    """A parameter that several layers add, beside others that read the same gradient later."""

    def __init__(self, places: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(places))
        self.beside = nn.ModuleList(nn.Linear(8, 8) for _ in range(places))
        self.added = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer, beside in zip(self.layers, self.beside, strict=True):
            h = beside(x) + torch.tanh(layer(h) + self.added.squeeze(0)) + self.added.squeeze(0)
        return h.square().sum()


class AddedWhole(AddedAt):
    """A parameter whose gradients are fresh tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer, beside in zip(self.layers, self.beside, strict=True):
            h = beside(x) + torch.tanh(layer(h) * self.added[0])
        return h.square().sum()


class Expanded(AddedAt):
    """A parameter whose gradient is one number for all elements, at some places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.added.sum() + 3 * self.added.sum()


@pytest.mark.parametrize("budget", ["min", "100%"])
@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("made", [AddedAt, AddedWhole, Expanded])
def test_gradients_of_several_slices_add_up(
    made: Callable[[int], nn.Module], places: int, budget: str
) -> None:
    x, model = torch.randn(4, 8), made(places)
    eager = torch.autograd.grad(model(x), [*model.parameters()])
    planned = rockplan.solve(model, x, budget)
    program = latest_of(planned)
    code, interface = program.executable, program.interface
    named = dict(planned.named_parameters())
    frame = Frame((*(named[n] for n, _ in interface.parameters), x, *program.constants))
    run_forward(code, frame)
    frame.put_tangents((torch.ones(()),))
    slices = captured._gradients(code, frame)
    pairs = [
        (target, gradient)
        for targets, gradients in zip(code.targets, slices, strict=True)
        for target, gradient in zip(targets, gradients, strict=True)
        if gradient is not None
    ]
    found = dict(pairs)
    assert len(found) == len(pairs)  # each gradient is handed out once
    names = [n for n, _ in interface.parameters]
    for (name, _), gradient in zip(model.named_parameters(), eager, strict=True):
        assert torch.equal(found[names.index(name)], gradient), name


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "an alias": captured._alias,
    "a part": lambda tensor: tensor[1:],
    "its storage": lambda tensor: tensor.untyped_storage(),
    "numpy": lambda tensor: tensor.numpy(),
    "in autograd": lambda tensor: nn.Parameter(torch.ones(4)) * captured._alias(tensor),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_memory_is_seen(holder: str) -> None:
    tensor = torch.zeros(4)
    own = [tensor.untyped_storage()]
    before = captured._uses(own)
    held = HOLDERS[holder](tensor)
    assert captured._uses(own) != before
    del held
    assert captured._uses(own) == before


LAYOUTS: dict[str, torch.Tensor] = {
    "transposed": torch.randn(3, 5).t(),
    "with gaps": torch.randn(4, 6)[:, 1:4],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "empty": torch.randn(0, 3),
    "one number": torch.randn(()),
    "parameter": nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arguments_are_copied_in_their_layout(layout: str) -> None:
    tensor = LAYOUTS[layout]
    static = captured._static(tensor, tensor.stride())
    captured._memory(static).copy_(captured._memory(tensor))
    assert torch.equal(static, tensor) and static.stride() == tensor.stride()
    assert static.data_ptr() != tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize("make", [lambda t: t.conj(), lambda t: t.conj().imag])
def test_arguments_with_a_rule_are_refused(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = make(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match="no plain tensors"):
        captured._static(given, given.stride())


def test_inputs_lie_between_tensors_and_constants() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    planned = rockplan.solve(model, torch.randn(3, 4), "100%")
    interface: Interface = latest_of(planned).interface
    (place,) = captured._inputs(interface)
    assert interface.residents[place] == interface.inputs[0][1]
