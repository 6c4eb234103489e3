"""Where a tensor begins in memory is no part of a kind of call, unless the forward asks for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.runtime.planned_state import programs_of
from testing.models import mean_square
from tests.usage import both, count_programs

_WIDTH = 16


class Asking(nn.Module):
    """Two layers around what `ask` makes of the argument."""

    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.ask = ask
        self.first, self.second = nn.Linear(_WIDTH, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(self.ask(x))))
        return y


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


def rows(count: int = 8, of: int = 48) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    table = torch.randn(of, _WIDTH)
    return tuple(table[i : i + count] for i in range(0, of, count))


def columns() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    table = torch.randn(8, 4 * _WIDTH)
    return tuple(table[:, i : i + _WIDTH] for i in (0, _WIDTH, 33, 47))


def transposed() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return tuple(part.t() for part in torch.randn(4 * _WIDTH, 8).split(_WIDTH))


def overlapping() -> tuple[torch.Tensor, ...]:
    """Windows of a series, most of them not aligned."""
    torch.manual_seed(1)
    return tuple(torch.randn(400).as_strided((8, _WIDTH), (_WIDTH, 1), i) for i in (0, 1, 3, 17))


def with_gradients() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(32, _WIDTH, requires_grad=True).chunk(4)


BATCHES: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
    "rows": rows,
    "columns": columns,
    "transposed": transposed,
    "overlapping": overlapping,
    "with gradients": with_gradients,
    "a sample of its own": lambda: (torch.randn(8, _WIDTH), *rows()),
}
NO_QUESTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": itself,
    "views": lambda x: (
        x[1:, :4].repeat(1, 4) + x.unflatten(0, (2, 4))[:, :, None].flatten(0, 2)[1:]
    ),
    "in strides": lambda x: x.as_strided((4, _WIDTH), (_WIDTH, 1)) * 2,
}


def trained(module: nn.Module, batch: torch.Tensor) -> Any:
    result = module(batch)
    mean_square(result).backward()
    return result


@pytest.mark.parametrize("ask", NO_QUESTIONS)
@pytest.mark.parametrize("batches", BATCHES)
def test_slices_of_one_tensor_run_one_plan(
    batches: str, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Asking(NO_QUESTIONS[ask])
    eager = copy.deepcopy(model)
    planned_for = BATCHES[batches]()
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, planned_for[0], "min")
    for place, _ in enumerate(planned_for):
        both(planned, eager, lambda m, i=place: trained(m, BATCHES[batches]()[i]), f"batch {place}")
    assert len(made) == 1


def test_gradients_arrive_at_the_tensor_that_was_sliced() -> None:
    torch.manual_seed(0)
    model, whole = Asking(itself), torch.randn(32, _WIDTH, requires_grad=True)
    planned = rockplan.solve(model, whole[:8], "min")
    grads = []
    for module in (model, planned):
        whole.grad = None
        torch.cat([module(part) for part in whole.split(8)]).square().sum().backward()
        grads.append(whole.grad)
    assert grads[0] is not None and torch.equal(grads[0], grads[1])


QUESTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda x: x * (1 + x.storage_offset()),
    "offset of a view": lambda x: x * (1 + x[1:].t().storage_offset()),
    "from the start": lambda x: x + x.as_strided((_WIDTH,), (1,), 0),
    "scattered": lambda x: x.as_strided_scatter(x[0] * 2, (_WIDTH,), (1,), x.shape[1]) + x,
}


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_forward_is_told_where_arguments_begin(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Asking(QUESTIONS[ask])
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    sample = rows()[1] if ask == "scattered" else rows()[0]
    planned = rockplan.solve(model, sample, "min")
    for _ in range(2):
        for place, _ in enumerate(rows()[:3]):
            if ask == "scattered" and place != 1:  # eager's error
                continue
            both(planned, eager, lambda m, i=place: trained(m, rows()[i]), f"batch {place}")
    assert len(made) == (1 if ask == "scattered" else 3)


SIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bytes": lambda x: x * x.untyped_storage().nbytes(),
    "bytes of a view": lambda x: x * x[2:].untyped_storage().nbytes(),
    "elements": lambda x: x * len(x.storage()),
    "memory for a copy": lambda x: x.slice_scatter(x[1:3] * 2, 0, 1, 3),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("ask", SIZES)
def test_a_forward_is_told_of_its_arguments_base(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Asking(SIZES[ask])
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, rows()[0], "min")
    for of in (48, 8, 48):
        for part in range(of // 8):
            whole = rows(of=of)[part] if of > 8 else rows()[0].clone()
            both(planned, eager, lambda m, x=whole: trained(m, x), f"part {part} of {of}")
    assert len(made) == (1 + len(rows()) if ask in ("bytes", "bytes of a view", "elements") else 2)


class Writing(nn.Module):
    """Changes one argument in place between two reads of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(other.clone()))
        x.mul_(0.5)
        result: torch.Tensor = self.second(torch.tanh(y + other)) + x.mean()
        return result


@pytest.mark.parametrize("sample", [(0, 8), (0, 4), (4, 0), None])
def test_arguments_that_overlap_and_are_written_to(sample: tuple[int, int] | None) -> None:
    """Planned for one overlap, called with all."""

    def given(begins: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(2)
        table = torch.randn(24, _WIDTH)
        if begins is None:
            return table[:8].clone(), table[8:16].clone()
        a, b = begins
        return table[a : a + 8], table[b : b + 8]

    def use(module: nn.Module, begins: tuple[int, int] | None) -> Any:
        x, other = given(begins)
        result = module(x, other)
        mean_square(result).backward()
        return result, x, other

    torch.manual_seed(0)
    model = Writing()
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, given(sample), "min")
    for begins in ((0, 8), (0, 4), (4, 0), (9, 3), (0, 0), None):
        both(planned, eager, lambda m, b=begins: use(m, b), str(begins))


def test_parameters_that_are_parts_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ensemble: the parameters of each member are a row of stacked ones."""
    torch.manual_seed(0)
    model, x = Asking(itself), torch.randn(8, _WIDTH)
    stacked = {n: torch.randn(3, *p.shape, requires_grad=True) for n, p in model.named_parameters()}
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, x, "min")

    def members(module: nn.Module) -> Iterator[torch.Tensor]:
        for i in range(3):
            parameters = {n: p[i] for n, p in stacked.items()}
            yield torch.func.functional_call(module, parameters, (x,))

    both_of = []
    for module in (model, planned):
        results = torch.stack([*members(module)])
        both_of.append((results, *torch.autograd.grad(mean_square(results), [*stacked.values()])))
    for eager, own in zip(*both_of, strict=True):
        assert torch.equal(eager, own)
    assert len(made) <= 2


class Steps(nn.Module):
    """Truncated backpropagation through time: a recurrent layer on windows of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(11, 8), nn.GRU(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> Any:
        y, state = self.cell(self.embedding(tokens), state)
        return self.head(y), state


def test_windows_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    source = torch.randint(0, 11, (36, 3))
    model = Steps()
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    planned = rockplan.solve(model, (source[:6], torch.zeros(1, 3, 8)), "min")

    def train(module: nn.Module) -> Any:
        state = torch.zeros(1, 3, 8)
        for i in range(0, 30, 6):
            logits, state = module(source[i : i + 6], state.detach())
            target = source[i + 1 : i + 7].reshape(-1)
            nn.functional.cross_entropy(logits.reshape(-1, 11), target).backward()
        return state

    both(planned, eager, train, "windows")
    assert len(made) <= 2  # the second: the backward pass of the caller starts from the logits


def test_every_slice_is_within_the_budget() -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh())
    options = rockplan.Options(on_mismatch="original")
    planned = rockplan.solve(model, x[:128], "min", options=options)
    for i in (0, 128, 301, 1024 - 128):
        batch = x[i : i + 128]
        measured = rockplan.peak_live_bytes(lambda b=batch: planned(b).sum().backward())
        assert measured.peak_bytes <= planned.plan.peak_bytes


class Table(nn.Module):
    """Blocks that are each given a row of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, _WIDTH))
        self.register_buffer("shifts", torch.randn(4, _WIDTH))
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(_Shifted() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block, row, shift in zip(self.blocks, self.table, self.shifts, strict=True):
            x = block(x, row, shift)
        return x


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, 64), nn.Linear(64, _WIDTH)

    def forward(self, x: torch.Tensor, row: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x * row + shift)))
        return x + y


def test_blocks_given_one_tables_rows_are_one_kind() -> None:
    torch.manual_seed(0)
    model, x = Table(), torch.randn(64, _WIDTH)
    eager = copy.deepcopy(model)
    rockplan.solve_blocks(model, x, "min")
    assert {block.kind for block in rockplan.blocks_of(model).blocks} == {0}
    assert len({id(p.executable) for b in model.blocks for p in programs_of(b)}) == 1
    both(model, eager, lambda m: trained(m, x), "blocks")


@rockplan.opaque
class Halves(torch.autograd.Function):
    """Saves what it is given, returns a view of it, and saves another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x, x[2:])
        return torch.tanh(x), x.sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_sum: torch.Tensor) -> torch.Tensor:
        x, later = ctx.saved_tensors
        return gradient / torch.cosh(x).square() + of_sum[:, None] * later.mean()


@pytest.mark.parametrize("batches", ["rows", "with gradients"])
def test_opaque_functions_are_given_slices(batches: str) -> None:
    """They keep views of what they are given."""
    torch.manual_seed(0)
    model = Asking(lambda x: Halves.apply(x)[0] + Halves.apply(x * 2)[1][:, None])
    eager = copy.deepcopy(model)
    planned = rockplan.solve(model, BATCHES[batches]()[0], "min")
    for place, _ in enumerate(BATCHES[batches]()):
        both(planned, eager, lambda m, i=place: trained(m, BATCHES[batches]()[i]), f"batch {place}")
