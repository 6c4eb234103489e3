"""flex_attention: planned as the operators of its dense form, with the bits that this has in eager
execution, also where functions of scores and masks capture tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from transformers import LlamaConfig, LlamaForCausalLM

import rockplan
from testing.training import assert_same_state, assert_same_tensor

QUICK = rockplan.Options(time_limit_s=3, without=("exchange", "descent"))
LENGTH, HEADS, WIDTH = 16, 2, 8


@pytest.fixture
def trained_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch refuses gradients of queries on CPU, where its dense form has them."""
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[["Layer", Heads, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, attention: Attention, trains: bool = True) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH).requires_grad_(trains)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH))
        self.scale = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", torch.rand(HEADS))
        self.back = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.plain = torch.rand(HEADS)
        self.attention = attention

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(len(x), LENGTH, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        found = self.attention(self, tuple(heads.unbind()), documents)
        return x + self.back(found.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, attention: Attention, trains: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attention, trains and i > 0) for i in range(2))
        if not trains:
            self.layers = self.layers[:1]

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, documents)
        return x


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * LENGTH])
    return torch.randn(2, LENGTH, HEADS * WIDTH), documents


def train(attention: Attention, trains: bool = True, autocast: bool = False) -> None:
    """Steps with the bits of eager, within budget."""
    torch.manual_seed(0)
    eager = Net(attention, trains)
    surroundings = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with surroundings:
        planned: Any = rockplan.solve(copy.deepcopy(eager), sample(), "min", options=QUICK)
    for step in range(2):
        x, documents = sample()
        results = []
        for net in (eager, planned):
            net.zero_grad()
            with surroundings:
                results.append(net(x, documents))
            results[-1].float().square().sum().backward()
        assert_same_tensor(results[1], results[0], f"step {step}")
        assert_same_state(planned, eager, f"step {step}")
    assert planned.plan.peak_bytes <= planned.plan.budget_bytes

    given, gradient = sample(), torch.ones_like(results[0])

    def a_step() -> None:
        with surroundings:
            result = planned(*given)
        result.backward(gradient)

    assert rockplan.peak_live_bytes(a_step).peak_bytes <= planned.plan.peak_bytes


def captured(layer: Layer, heads: Heads, documents: torch.Tensor) -> torch.Tensor:
    """A parameter, what is computed of one, a buffer, a plain tensor, a number."""
    twice = layer.scale * 2
    number = 3.0

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        capped = number * torch.tanh(s / number)
        return capped + layer.bias[h, i] * twice[h] - layer.slopes[h] * (i - j) + layer.plain[h]

    return flex.flex_attention(*heads, score_mod=score)


def of_documents(layer: Layer, heads: Heads, documents: torch.Tensor) -> torch.Tensor:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (documents[b, i] == documents[b, j]) & (i >= j)

    blocks = flex.create_block_mask(mask, len(documents), None, LENGTH, LENGTH, device="cpu")
    return flex.flex_attention(*heads, block_mask=blocks)


def of_few_keys(layer: Layer, heads: Heads, documents: torch.Tensor) -> torch.Tensor:
    query, key, value = heads
    found, others = flex.flex_attention(
        query,
        key[:, :1],
        value[:, :1],
        score_mod=lambda s, b, h, i, j: s + layer.bias[h, j],
        enable_gqa=True,
        scale=0.3,
        return_aux=flex.AuxRequest(lse=True),
    )
    return found * others.lse.tanh()[..., None]


def compiled_here(layer: Layer, heads: Heads, documents: torch.Tensor) -> torch.Tensor:
    attention = torch.compile(flex.flex_attention, backend="eager")
    return attention(*heads, score_mod=lambda s, b, h, i, j: s * layer.scale[h])


KINDS = {
    "captured": captured,
    "documents": of_documents,
    "few keys": of_few_keys,
    "plain": lambda layer, heads, documents: flex.flex_attention(*heads),
    "compiled": compiled_here,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("trained_on_cpu")
def test_bits_are_those_of_eager(name: str) -> None:
    train(KINDS[name])


@pytest.mark.usefixtures("trained_on_cpu")
def test_under_autocast() -> None:
    train(of_few_keys, autocast=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_queries_without_a_gradient() -> None:
    """As PyTorch lets them be trained on CPU: what is captured may have one."""
    train(captured, trains=False)


def test_what_pytorch_refuses_is_said_in_its_words() -> None:
    with pytest.raises(rockplan.CaptureError, match="does not support backward on CPU"):
        train(KINDS["plain"])


@pytest.mark.usefixtures("trained_on_cpu")
def test_functions_compiled_in_a_recording_compile_later() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            @torch.compile(backend=backend)
            def twice(h: torch.Tensor) -> torch.Tensor:
                return h.sin() * 2

            found: torch.Tensor = twice(self.linear(x))
            return found

    net = Kept()
    planned: Any = rockplan.solve(net, torch.randn(2, 4), "100%", options=QUICK)
    planned(torch.randn(2, 4)).sum().backward()
    assert not compiled
    net(torch.randn(2, 4))
    assert compiled


@pytest.mark.usefixtures("trained_on_cpu")
def test_llama() -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        use_cache=False,
        attn_implementation="flex_attention",
    )
    torch.manual_seed(0)
    eager = LlamaForCausalLM(config)
    ids = torch.randint(50, (2, 24))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    options = rockplan.Options(time_limit_s=3, released=(1,), without=("exchange", "descent"))
    planned: Any = rockplan.solve(copy.deepcopy(eager), batch, "min", options=options)
    # Without the compiler's own kernels, which have no backward on CPU.
    with torch.compiler.set_stance("force_eager"):
        for net in (eager, planned, eager, planned):
            net.zero_grad()
            net(**batch).loss.backward()
    assert_same_state(planned, eager, "a step")

    def a_step() -> None:
        planned(**batch).loss.backward()

    assert rockplan.peak_live_bytes(a_step).peak_bytes <= planned.plan.peak_bytes
