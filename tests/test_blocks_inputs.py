"""Blocks whose inputs go to the host: how much that saves, and who else may hold or change them."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rockplan
from rockplan.graph_builder.costs.ruler import peak_live_bytes
from testing.blocks import QUICK, Mixer
from tests.paging import LINKS, poisoned

OPTIONS = rockplan.Options(**{**QUICK, "without": ()}, host="1GiB", link="4GB/s")
WIDTH, ROWS = 32, 48
HIDDEN_BYTES = WIDTH * ROWS * 4
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

Call = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]
"""Calls a block with a hidden state; the block's number."""


def plainly(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return block(h)  # type: ignore[no-any-return]


class Chain(nn.Module):
    """Blocks between two layers, each called by `call`."""

    def __init__(self, depth: int = 3, call: Call = plainly, block: Any = Mixer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(block(WIDTH) for _ in range(depth))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            h = self.call(block, h, number)
        return self.head(h).pow(2).mean()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def all_sizes_are_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rockplan.search.paging.LEAST_BYTES", 1)


def planned(model: nn.Module, budget: Any = "min", **named: Any) -> Any:
    options = {"options": OPTIONS, "blocks": "blocks.*", **named}
    return rockplan.solve_blocks(model.train(), X, budget, **options)


def step_of(model: Any, x: torch.Tensor = X) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        torch.manual_seed(0)
        loss = model(x)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def pages_inputs(model: Any) -> list[bool]:
    """For each block, whether its input is on the host between its phases."""
    named = (block.names[1] for block in rockplan.blocks_of(model).blocks)
    return ["(root)/input" in pages for pages in named]


def assert_trains_as_eager(model: Any, eager: Any, x: torch.Tensor = X, steps: int = 3) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager)]
    for _ in range(steps):
        losses = []
        for one, optimizer in zip((model, eager), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(step_of(one, x)())
            optimizer.step()
        assert torch.equal(*losses)
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(p, q), name


def measured(model: Any, x: torch.Tensor = X) -> int:
    return peak_live_bytes(step_of(model, x)).peak_bytes


@functools.cache
def planned_once(budget: str) -> Any:
    return planned(Chain(), budget)


def copied(budget: str = "min") -> Any:
    return copy.deepcopy(planned_once(budget))


def test_memory_does_not_grow_with_more_blocks() -> None:
    needed = []
    for depth in (3, 6):
        eager = Chain(depth)
        model = planned(copy.deepcopy(eager))
        plan = rockplan.blocks_of(model)
        assert measured(model) == plan.peak_bytes <= plan.budget_bytes
        assert_trains_as_eager(model, eager)
        state_bytes = plan.saved_bytes  # of generators
        needed.append(plan.peak_bytes - state_bytes)
        kept = rockplan.blocks_of(planned(Chain(depth), options=rockplan.Options(**QUICK)))
        assert kept.peak_bytes - plan.peak_bytes >= (depth - 1) * HIDDEN_BYTES
    assert needed[0] == needed[1]


@pytest.mark.parametrize("link", LINKS)
def test_however_late_copies_are(link: str) -> None:
    model = copied()
    with poisoned(model.blocks[0], link):
        found = peak_live_bytes(step_of(model))
        assert_trains_as_eager(model, Chain().train())
    assert (found.peak_bytes, found.final_bytes) == (rockplan.blocks_of(model).peak_bytes, 0)
    assert all(pages_inputs(model))


# Who else holds the input


def sliced(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    """A part that does not lie apart."""
    return torch.cat([h[:, :4], block(h[:, 4:])], 1)


def halved(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    """A part that lies apart, in the memory of the whole."""
    return torch.cat([block(h[: ROWS // 2]), h[ROWS // 2 :]])


def viewed(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return block(h.view(2, -1, WIDTH)).view(-1, WIDTH)  # type: ignore[no-any-return]


def added(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return (h * block(h)).tanh()  # type: ignore[no-any-return]


def detached(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return h + block(h.detach())  # type: ignore[no-any-return]


def checkpointed(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return checkpoint(block, h, use_reentrant=False)  # type: ignore[no-any-return]


def hooked(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(h)  # type: ignore[no-any-return]


class Sliced(Mixer):
    def __init__(self, width: int) -> None:
        super().__init__(width - 4)


CALLS: dict[str, tuple[Call, Any]] = {
    "sliced": (sliced, Sliced),
    **{call.__name__: (call, Mixer) for call in (halved, viewed, added, detached)},
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_that_are_parts_or_held_by_others(name: str) -> None:
    call, block = CALLS[name]
    assert_planned_as_eager(lambda: Chain(3, call, block), "min", is_alone=name != "added")


def assert_planned_as_eager(make: Callable[[], Chain], budget: str, *, is_alone: bool) -> None:
    """is_alone: no input of a block is used elsewhere, where sums of gradients may differ in their
    last bits; else what is planned without a host does the same."""
    model, eager = planned(make(), budget), make().train()
    plan = rockplan.blocks_of(model)
    assert measured(model) <= plan.peak_bytes <= plan.budget_bytes
    if not is_alone:
        eager = planned(eager, "min", options=rockplan.Options(**QUICK))
    assert_trains_as_eager(model, eager)


@pytest.mark.filterwarnings("ignore:.*checkpoint", "ignore:.*saved")
@pytest.mark.parametrize("call", [halved, checkpointed, hooked, detached])
def test_calls_that_come_otherwise_later(call: Call) -> None:
    model, eager = copied(), Chain().train()
    model.call = eager.call = call
    assert_trains_as_eager(model, eager)


class Crossed(Mixer):
    """A block of a decoder, which reads what an encoder returned."""

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.norm(encoded)


class Decoder(Chain):
    def __init__(self) -> None:
        super().__init__(block=Crossed)
        self.call = lambda block, h, number: block(h, self.encoded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.encoded = self.first(x).tanh()
        try:
            return super().forward(x)
        finally:
            del self.encoded


class Ended(Mixer):
    """Its last operation reads its result in the backward phase."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class Passing(Mixer):
    """It returns its input, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


def first_of(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    y, given = block(h)
    return (y * given).tanh()  # type: ignore[no-any-return]


SHARED: dict[str, tuple[Callable[[], Chain], bool]] = {
    "read by all": (Decoder, False),
    "read by its maker": (lambda: Chain(block=Ended), True),
    "returned": (lambda: Chain(3, first_of, Passing), False),
}


@pytest.mark.parametrize("budget", ["min", "45%"])
@pytest.mark.parametrize("name", SHARED)
def test_what_several_blocks_hold(name: str, budget: str) -> None:
    make, is_alone = SHARED[name]
    assert_planned_as_eager(make, budget, is_alone=is_alone)


# Changes in place


def changed(block: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    y = block(h)
    with torch.no_grad():
        h.mul_(2)
    return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", ["min", "90%"])
def test_a_change_after_the_forward_is_refused(budget: str) -> None:
    model, eager = copied(budget), Chain().train()
    model.call = eager.call = changed
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_of(eager)()
    with pytest.raises(rockplan.BackwardError, match="modified in place"):
        step_of(model)()
    model.call = eager.call = plainly
    model.zero_grad()
    assert_trains_as_eager(model, eager)


# Backward passes


def gradients(model: Any, run: Callable[[Any], None]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    run(model)
    return [p.grad.clone() for p in model.parameters()]


def twice(model: Any) -> None:
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()


def in_flight(model: Any) -> None:
    losses = [model(X), model(-X), model(X + 1)]
    for loss in losses:
        loss.backward()


def abandoned(model: Any) -> None:
    model(X)
    with pytest.raises(ZeroDivisionError):
        model(X) / (1 // 0)
    model(-X).backward()


def accumulated(model: Any) -> None:
    for x in (X, -X):
        model(x).backward()


def of_other_strides(model: Any) -> None:
    h = model.first(X)
    for block in model.blocks:
        h = block(h)
    h.sum().backward()  # an expanded gradient
    model.head(X).sum().backward()


def of_inputs(model: Any) -> None:
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x), [x], retain_graph=True)
    (grad.sum() * model.head.weight.sum()).backward()
    model(x).backward()


@pytest.mark.parametrize("budget", ["min", "90%"])
@pytest.mark.parametrize(
    "run", [twice, in_flight, abandoned, accumulated, of_other_strides, of_inputs]
)
def test_backward_passes_of_all_kinds(run: Callable[[Any], None], budget: str) -> None:
    model = copied(budget)
    for _ in range(2):
        pairs = zip(gradients(model, run), gradients(Chain().train(), run), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert peak_live_bytes(lambda: run(model)).final_bytes == 0


def test_a_graph_that_was_not_retained() -> None:
    loss = copied()(X)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_retained_graph_after_a_change() -> None:
    model = copied()
    h = model.first(X)
    y = model.blocks[0](h)
    first = torch.autograd.grad(y.sum(), [h], retain_graph=True)
    with torch.no_grad():
        h.zero_()
    assert torch.equal(*first, *torch.autograd.grad(y.sum(), [h]))


def test_evaluation_and_copies() -> None:
    model, eager = copied(), Chain().train()
    model = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(model.eval()(X), eager.eval()(X))
    assert measured(model.train()) == rockplan.blocks_of(model).peak_bytes
    assert_trains_as_eager(model, eager.train())


def test_other_sizes() -> None:
    model, eager = copied(), Chain().train()
    for rows in (ROWS, 40, 36, 24):
        x = X[:rows]
        assert measured(model, x) <= rockplan.blocks_of(model).peak_bytes
        assert_trains_as_eager(model, eager, x, steps=2)
        assert model.blocks[0].plan.trips
