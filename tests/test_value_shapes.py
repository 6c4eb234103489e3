"""Shapes that values of integer and boolean arguments decide: planned for what was read, and
compared at each call; those that activations decide are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rockplan
from testing.training import assert_same_state, assert_same_tensor
from tests.usage import count_programs

QUICK = rockplan.Options(cache=False, time_limit_s=5, without=("exchange",))


class Net(nn.Module):
    """`use(net, h, k)`: what it does with activations of 8 rows of 16 and an argument."""

    def __init__(self, use: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embedding, self.a, self.b = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.use = use

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.use(self, torch.tanh(self.a(x)), k)


def mask(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.bool)


# Two with as many elements, and another.
MASKS = [mask(1, 0, 1, 0, 1, 0, 0, 0), mask(0, 1, 0, 1, 0, 0, 1, 0), mask(1, 1, 1, 1, 0, 0, 0, 0)]
IDS = [
    torch.tensor([1, 0, 2, 0, 3, 0, 0, 0]),
    torch.tensor([0, 3, 0, 1, 0, 0, 2, 0]),
    torch.tensor([1, 1, 2, 1, 0, 3, 3, 0]),
]


def put(h: torch.Tensor, k: torch.Tensor, value: Any) -> torch.Tensor:
    h = h.clone()
    h[k] = value
    return h


def scaled(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    h = h * 2
    h[k] *= 3
    return h


def of_unique(net: Any, h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    values, inverse, counts = torch.unique(k, return_inverse=True, return_counts=True)
    return (net.b(net.embedding(values))[inverse] + h) * counts[inverse][:, None]


OF_MASKS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda net, h, k: net.b(h)[k],
    "index, then a layer": lambda net, h, k: net.b(h[k]),
    "index of columns": lambda net, h, k: net.b(h.t()[:, k].t()),
    "two dimensions": lambda net, h, k: net.b(h)[k[:, None] & k.repeat(2)],
    "a mask and indices": lambda net, h, k: net.b(h)[k, torch.arange(int(k.sum()))],
    "not": lambda net, h, k: net.b(h)[~k],
    "bytes": lambda net, h, k: net.b(h)[k.to(torch.uint8)],
    "put rows": lambda net, h, k: put(net.b(h), k, h[k]),
    "in place": lambda net, h, k: scaled(net.b(h), k),
    "nonzero": lambda net, h, k: net.b(h).index_select(0, k.nonzero().squeeze(1)),
    "nonzero as a tuple": lambda net, h, k: net.b(h)[k.nonzero(as_tuple=True)],
    "where": lambda net, h, k: net.b(h)[torch.where(k)[0]],
    "argwhere": lambda net, h, k: net.b(h)[torch.argwhere(k)[:, 0]],
    "masked_select": lambda net, h, k: net.b(h).masked_select(k[:, None]),
    "size in Python": lambda net, h, k: net.b(h) * k.nonzero().shape[0],
}
ANY_MASK: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "put a number": lambda net, h, k: put(net.b(h), k, 0.5),
    "masked_fill": lambda net, h, k: net.b(h).masked_fill(k[:, None], 0.0),
    "masked_scatter": lambda net, h, k: h.masked_scatter(k[:, None], net.b(h)),
}
OF_IDS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "not padding": lambda net, h, k: net.b(h)[k != 0],
    "bool()": lambda net, h, k: net.b(h)[k.bool()],
    "labels": lambda net, h, k: F.cross_entropy(net.b(h)[k > 0], k[k > 0]),
    "repeat_interleave": lambda net, h, k: net.b(h.repeat_interleave(k, 0)),
    "repeats alone": lambda net, h, k: net.b(h)[torch.repeat_interleave(k)],
    "unique": lambda net, h, k: net.b(net.embedding(torch.unique(k))).sum() + h,
    "unique, with all": of_unique,
    "unique rows": lambda net, h, k: h + net.embedding(torch.unique(k.view(4, 2), dim=0)).mean(),
    "unique_consecutive": lambda net, h, k: h + net.embedding(k.unique_consecutive()).sum(),
    "consecutive rows": lambda net, h, k: (
        h + net.embedding(torch.unique_consecutive(k.view(4, 2), dim=0)).mean()
    ),
    "bincount": lambda net, h, k: net.b(h).sum() * torch.bincount(k),
    "bincount with weights": lambda net, h, k: net.b(h).sum() * k.bincount(h.detach()[:, 0]),
}
ANY_IDS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bincount with minlength": lambda net, h, k: net.b(h).sum() * torch.bincount(k, minlength=9),
}


def both(use: Callable[..., torch.Tensor], k: torch.Tensor, **options: Any) -> list[nn.Module]:
    """An original and a planned twin."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(Net(use))
    sample = (torch.randn(8, 16), k)
    options = {"cache": False, "time_limit_s": 5, **options}
    found[1] = rockplan.solve(found[1], sample, "min", options=rockplan.Options(**options))
    return found


def step(eager: nn.Module, planned: nn.Module, k: torch.Tensor, seed: int) -> None:
    """One step of training of both, with the same bits."""
    torch.manual_seed(seed)
    x = torch.randn(8, 16)
    results = []
    for module in (eager, planned):
        module.zero_grad()
        result = module(x, k)
        result.float().square().mean().backward()
        results.append(result)
    assert results[0].stride() == results[1].stride()
    assert_same_tensor(results[1], results[0], f"seed {seed}")
    assert_same_state(planned, eager, f"seed {seed}")
    for module in (eager, planned):
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)


def train(
    use: Callable[..., torch.Tensor], given: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """The number of further plans after a step with each of `given`, and the first again."""
    programs = count_programs(monkeypatch)
    eager, planned = both(use, given[0])
    found = []
    for seed, k in enumerate([*given, given[0]]):
        step(eager, planned, k, seed)
        found.append(len(programs) - 1)
    return found


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("kind", OF_MASKS)
def test_masks_of_as_many_elements_keep_plans(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(OF_MASKS[kind], MASKS, monkeypatch) == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ANY_MASK)
def test_shapes_that_no_mask_decides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(ANY_MASK[kind], MASKS, monkeypatch) == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", OF_IDS)
def test_what_integers_decide(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = train(OF_IDS[kind], IDS, monkeypatch)
    assert found[0] == 0 and found[-1] == found[-2], found


@pytest.mark.parametrize("kind", ANY_IDS)
def test_integers_that_decide_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(ANY_IDS[kind], IDS, monkeypatch) == [0, 0, 0, 0]


def test_a_longest_count_beyond_minlength_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = train(ANY_IDS["bincount with minlength"], [*IDS, IDS[0] + 12], monkeypatch)
    assert found == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("last", [mask(*[0] * 8), mask(*[1] * 8)])
def test_masks_of_nothing_and_of_everything(
    last: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = OF_MASKS["index, then a layer"]
    assert train(lambda *a: use(*a).sum(), [MASKS[0], last], monkeypatch) == [0, 1, 1]


def test_another_size_is_no_call_of_the_plan() -> None:
    _, planned = both(OF_MASKS["index"], MASKS[0], on_mismatch="error")
    planned(torch.randn(8, 16), MASKS[1]).square().sum().backward()
    with pytest.raises(rockplan.StalePlan):
        planned(torch.randn(8, 16), MASKS[2])


def test_other_sizes_run_the_original_if_wanted() -> None:
    eager, planned = both(OF_MASKS["index"], MASKS[0], on_mismatch="original")
    for seed, k in enumerate(MASKS):
        step(eager, planned, k, seed)


def selected(net: Any, h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return net.b(h)[k]


def of_kinds(net: Any, h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return net.b(net.embedding(torch.unique(k))).sum() + h


@pytest.mark.parametrize(("use", "given"), [(selected, MASKS), (of_kinds, IDS)])
def test_pickles_compare_the_size_as_well(use: Any, given: list[torch.Tensor]) -> None:
    eager, planned = both(use, given[0], on_mismatch="error")
    planned = pickle.loads(pickle.dumps(planned))
    for seed, k in enumerate(given[:2]):
        step(eager, planned, k, seed)
    with pytest.raises(rockplan.StalePlan):
        planned(torch.randn(8, 16), torch.zeros_like(given[0]))


REFUSED: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "an activation": lambda net, h, k: net.b(h)[h[:, 0] > 0],
    "a parameter": lambda net, h, k: net.b(h)[net.b.bias[:8] > 0],
    "a mask and an activation": lambda net, h, k: net.b(h)[k & (h[:, 0] > 0)],
    "nonzero": lambda net, h, k: h * (h > 0).nonzero().shape[0],
    "masked_select": lambda net, h, k: h.masked_select(h > 0),
    "unique": lambda net, h, k: h * torch.unique(h.argmax(1)).shape[0],
    "bincount": lambda net, h, k: h.sum() * torch.bincount(h.argmax(1)),
    "repeat_interleave": lambda net, h, k: h.repeat_interleave(h.argmax(1), 0),
    "a draw": lambda net, h, k: h[torch.rand(8) < 0.5],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_shapes_that_activations_decide_are_refused(kind: str) -> None:
    with pytest.raises(rockplan.DataDependentShape) as refused:
        both(REFUSED[kind], MASKS[0])
    assert "test_value_shapes.py:" in str(refused.value)
    assert "torch.where" in str(refused.value) and "argument" in str(refused.value)
    named = {"a draw": "a random draw", "a parameter": "the parameter 'b.bias'"}
    assert named.get(kind, "the parameter 'a.weight'") in str(refused.value)


def test_a_refusal_that_is_caught_remains_one() -> None:
    def use(net: Any, h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        try:
            return net.b(h)[h[:, 0] > 0]
        except RuntimeError:
            return h

    with pytest.raises(rockplan.DataDependentShape):
        both(use, MASKS[0])


class Experts(nn.Module):
    """A mixture whose experts run in a Python loop."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.gate, self.reads = nn.Linear(4, 3), reads
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, result = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            hit = chosen == number
            if not self.reads or hit.any():
                result[hit] = expert(x[hit])
        return result


@pytest.mark.parametrize("reads", [False, True])
def test_loops_over_experts_name_a_way_out(reads: bool) -> None:
    with pytest.raises(rockplan.CaptureError, match='implementation\\("grouped_mm"\\)') as refused:
        rockplan.solve(nn.Sequential(Experts(reads)), torch.randn(3, 4), "min", options=QUICK)
    assert "Experts chooses" in str(refused.value) and "module '0'" in str(refused.value)


def test_the_way_out_of_experts_in_a_loop() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=3,
        use_cache=False,
    )
    ids = torch.randint(0, 50, (2, 8))
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    with pytest.raises(rockplan.DataDependentShape, match='implementation\\("grouped_mm"\\)'):
        rockplan.solve(model, {"input_ids": ids, "labels": ids}, "min", options=QUICK)
    model.set_experts_implementation("grouped_mm")
    loss = model(input_ids=ids, labels=ids).loss
    planned = rockplan.solve(model, {"input_ids": ids, "labels": ids}, "min", options=QUICK)
    assert torch.equal(planned(input_ids=ids, labels=ids).loss, loss)
