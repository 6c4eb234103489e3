"""Heads in parts of their rows: what is cut, that it is exact, and what plans of it need."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import rockplan
from rockplan.budget import Budget
from rockplan.cli.main import app
from rockplan.errors import InvalidInput, PlanMismatch
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.pipeline import lower
from rockplan.graph_builder.recorded import evaluate
from rockplan.graph_builder.recorded.run import Capture
from rockplan.graph_builder.tiling.tile import tiled
from rockplan.options import Options
from rockplan.search import planning, problem
from rockplan.values.graph import Phase
from testing.models import Case, gpt2, llama
from tests.kernels import LossOf, distance, gradients, interpret
from tests.planning import heard

V, D = 96, 8
OPTIONS = Options(tile=4, cache=False, time_limit_s=1)

Loss = Callable[[torch.Tensor, torch.Tensor], Any]


class Head(nn.Module):
    """Embedding, a layer, a head, and the loss of it. tied: the head's weight is the embedding."""

    def __init__(self, loss: Loss, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(V, D), nn.Linear(D, D)
        self.head, self.loss = nn.Linear(D, V, bias=bias), loss
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.head(self.inner(self.embedding(tokens)).sin()), labels)


def head(loss: Loss, dtype: torch.dtype = torch.float64, rows: int = 26, **kind: bool) -> Case:
    """Of 4 sequences, with labels that do not count."""
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, V, (2, 4, rows))
    labels[:, : rows // 3] = -100
    labels[3] = -100
    return Case("head", Head(loss, **kind).to(dtype), (tokens, labels), {}, total)


def total(result: Any) -> torch.Tensor:
    results = result if isinstance(result, tuple) else (result,)
    return sum((r.float().mean() for r in results if r.is_floating_point()), torch.zeros(()))


def cross_entropy(**settings: Any) -> Loss:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.view(-1, V), labels.view(-1), **settings)

    return loss


def counted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over labels, by gathering."""
    counts = labels != -100
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(found * counts).sum() / counts.sum()


def with_squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy written out, with a loss of its normalizer."""
    norm = logits.logsumexp(-1)
    found = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return (norm - found).mean() + 1e-2 * norm.square().mean()


def written_out(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    chosen = functional.one_hot(labels.clamp(min=0), V)
    return -(chosen * (shifted - shifted.exp().sum(-1, True).log())).sum(-1).mean()


def without_the_last(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), reduction="sum"
    )


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy()(3 * (logits / 3).tanh(), labels)


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy()(logits, labels)


def without_sevens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(ignore_index=7)(logits, labels.masked_fill(labels == -100, 7))


def squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.sigmoid() - 0.5).square().mean()


def by_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(reduction="none")(logits, labels).square().mean()


def with_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy()(logits, labels), logits


def with_guesses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy()(logits, labels), logits.argmax(-1)


WEIGHT = torch.linspace(1, 2, V, dtype=torch.float64)

LOSSES: dict[str, tuple[Loss, dict[str, bool]]] = {
    "mean": (cross_entropy(), {}),
    "sum": (cross_entropy(reduction="sum"), {"bias": True}),
    "by token": (by_token, {}),
    "weights": (cross_entropy(weight=WEIGHT), {}),
    "smoothing": (cross_entropy(label_smoothing=0.1), {"bias": True}),
    "other labels": (without_sevens, {}),
    "tied": (cross_entropy(), {"tied": True}),
    "tied, bias": (cross_entropy(), {"tied": True, "bias": True}),
    "gathered": (counted, {}),
    "squares of the norm": (with_squares, {}),
    "written out": (written_out, {}),
    "shift": (without_the_last, {}),
    "cap": (capped, {}),
    "squares": (squares, {"bias": True}),
    "logits": (with_logits, {}),
    "guesses": (with_guesses, {}),
}


def recorded(case: Case) -> Capture:
    return capture(case.model, case.args, case.kwargs)


def parts_of(case: Case, parts: int = 4) -> Capture:
    made = tiled(recorded(case), parts)
    assert not isinstance(made, str), made
    return made


def in_parts(case: Case, budget: str = "min", options: Options = OPTIONS) -> nn.Module:
    sample, kwargs = case.args, case.kwargs
    planned = rockplan.solve(case.model, sample, budget, sample_kwargs=kwargs, options=options)
    assert rockplan.plan_of(planned).graph.tiles == options.tile
    return planned


# What is computed


@pytest.mark.parametrize("name", LOSSES)
def test_results_and_gradients_are_those_of_eager(name: str) -> None:
    loss, kind = LOSSES[name]
    case = head(loss, **kind)
    expected = [*results(case, case.model), *gradients(case, case.model)]
    planned = in_parts(case)
    found = [*results(case, planned), *gradients(case, planned)]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride()
        assert one.equal(other) or float((one - other).norm() / other.norm()) < 1e-12


def results(case: Case, module: nn.Module) -> list[torch.Tensor]:
    result = module(*case.args)
    return [r.detach() for r in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [(torch.float32, True, 1e-2), (torch.bfloat16, False, 1e-2), (torch.float16, False, 1e-3)],
)
def test_of_16_bits_only_last_bits_differ(dtype: torch.dtype, autocast: bool, bound: float) -> None:
    """The sum of the losses of 16 bits is made of 32: else it would be infinite in float16."""
    case = head(cross_entropy(), dtype, rows=96)
    mode = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with mode:
        planned = in_parts(case)
        (found,), (eager,) = results(case, planned), results(case, case.model)
        assert torch.allclose(found, eager, rtol=4 * torch.finfo(eager.dtype).eps)
        expected = gradients(case, case.model)
        assert 0 < distance(gradients(case, planned), expected) < bound


def test_no_label_counts() -> None:
    case = head(cross_entropy())
    case.args[1].fill_(-100)
    assert results(case, in_parts(case))[0].isnan() and results(case, case.model)[0].isnan()


def run(made: Capture, case: Case) -> list[torch.Tensor]:
    """Gradients of parameters, by the calls of a recording in their order."""
    named = dict(case.model.named_parameters())
    known = {v: named[name].detach() for name, v in made.parameters}
    known |= {v: case.args[i] for i, v in made.inputs} | dict(made.constants)
    (start,) = (o.tangent for o in made.outputs if o.tangent is not None)
    known[start] = torch.ones((), dtype=next(case.model.parameters()).dtype)
    found = evaluate.run([c.call for c in made.calls], known)
    return [found[g] for v, g in made.gradients if g is not None]


@pytest.mark.parametrize("loss", [with_squares, cross_entropy()], ids=["squares", "mean"])
def test_what_runs_again_changes_no_bit(loss: Loss) -> None:
    case = head(loss, torch.float32, rows=200)
    planned = in_parts(case, options=replace(OPTIONS, check=True))
    plan = rockplan.plan_of(planned)
    assert plan.overhead > 0 and "of their norm" in plan.checked
    kept = run(parts_of(case), case)
    assert all(map(torch.equal, gradients(case, planned), kept))
    measured = rockplan.peak_live_bytes(lambda: case.step(planned)).peak_bytes
    assert plan.peak_bytes - 16 <= measured <= plan.peak_bytes <= plan.budget_bytes


def test_draws_are_those_of_eager() -> None:
    case = head(cross_entropy())
    case.model.inner = nn.Sequential(case.model.inner, nn.Dropout(0.5))
    expected = gradients(case, case.model)
    state = torch.get_rng_state()
    found = gradients(case, in_parts(case))
    assert torch.equal(torch.get_rng_state(), state)
    assert distance(found, expected) < 1e-12


# What is cut


def made_shapes(made: Capture) -> list[tuple[int, ...]]:
    """Of the results in storages of their own."""
    found = [
        (made.values[r].storage, made.values[r].spec.shape, made.values[v].storage)
        for c in made.calls
        for r in c.call.results
        if r is not None
        for v in (c.reads or (r,))[:1]
    ]
    return [shape for storage, shape, read in found if storage != read]


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"logits"}))
def test_no_result_has_the_logits_of_all_rows(name: str) -> None:
    loss, kind = LOSSES[name]
    case = head(loss, **kind)
    logits = case.args[0].numel() * V
    assert max(map(prod, made_shapes(recorded(case)))) == logits
    assert max(map(prod, made_shapes(parts_of(case)))) <= logits // 2 ** (name != "shift") // 2


def test_logits_that_the_caller_gets_are_made_once() -> None:
    case = head(with_logits)
    logits = case.args[0].numel() * V
    assert [prod(s) for s in made_shapes(parts_of(case))].count(logits) == 1


def test_the_last_part_has_what_is_left() -> None:
    case = head(cross_entropy(), rows=25)
    sizes = [s[0] for s in made_shapes(parts_of(case, 3)) if s[1:] == (V,)]
    assert set(sizes) == {34, 32} and sizes.count(34) == 2 * sizes.count(32)


@pytest.mark.parametrize(
    ("rows", "width", "parts"), [(1024, 64, 8), (1024, 4096, 2), (8192, 64, 32), (300, 64, 3)]
)
def test_the_size_of_parts(rows: int, width: int, parts: int) -> None:
    """At least 128 rows, an eighth of the width, at most 32 parts."""
    model = nn.Sequential(nn.Linear(width, 1024), Mean())
    made = tiled(capture(model, (torch.randn(rows, width),), {}))
    assert not isinstance(made, str) and made.tiles.parts == parts


def test_parts_are_smaller_with_larger_loss_dtypes() -> None:
    model = nn.Sequential(nn.Linear(64, 1024), Mean(torch.float32)).to(torch.bfloat16)
    made = tiled(capture(model, (torch.randn(512, 64, dtype=torch.bfloat16),), {}))
    assert not isinstance(made, str) and made.tiles.parts == 8


class Mean(nn.Module):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1, dtype=self.dtype).mean()


def test_one_part_follows_the_other() -> None:
    """In the backward phase, too: what one has made dies before the next one begins."""
    made = parts_of(head(cross_entropy()))
    wide = [
        c.call.op
        for c in made.calls
        if c.phase is Phase.BACKWARD
        and "view" not in c.call.op
        and "detach" not in c.call.op
        and any(made.values[r].spec.shape == (26, V) for r in c.call.made)
    ]
    assert wide == ["aten.nll_loss_backward.default", "aten._log_softmax_backward_data.default"] * 4


class Sized(nn.Module):
    """Two layers and what is made of them."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, width)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.second(self.first(x)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.cumsum(0).mean(), "aten.cumsum.default .* reads all rows at once"),
        (lambda x: x.softmax(0).mean(), "aten._softmax.default .* reads all rows at once"),
        (lambda x: (x @ x.t()).mean(), "aten.mm.default .* reads all rows at once"),
        (lambda x: x.softmax(-1), "aten._softmax.default .* what the caller gets of all rows"),
        (lambda x: functional.dropout(x).mean(), "reads all rows at once"),
        (lambda x: x, "its loss is computed by the caller"),
    ],
)
def test_what_mixes_rows_is_left_whole_and_said(
    function: Callable[[torch.Tensor], torch.Tensor], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Sized(function), torch.randn(40, 8)
    planned = rockplan.solve(model, x, "100%", options=OPTIONS)
    assert rockplan.plan_of(planned).graph.tiles == 0
    assert re.search(f"nothing is tiled: .*{reason}", caplog.text)


def test_models_without_a_head_are_untouched() -> None:
    x = torch.randn(40, 8)
    equal = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    assert "equally large" in str(tiled(capture(equal, (x,), {})))
    assert "no matrix product" in str(tiled(capture(nn.Tanh(), (x.requires_grad_(),), {})))
    single = Sized(lambda x: x.sin().mean())
    assert "one row" in str(tiled(capture(single, (torch.randn(1, 8),), {})))
    assert "one part" in str(tiled(capture(single, (x,), {})))


# Tied embeddings


class Tied(nn.Module):
    """Embeddings, and a head with the same weight, of two dtypes of tokens."""

    def __init__(self, uses: int = 1, padding: int | None = None, frequency: bool = False) -> None:
        super().__init__()
        kind = {"padding_idx": padding, "scale_grad_by_freq": frequency}
        self.embedding, self.uses = nn.Embedding(V, D, **kind), uses  # type: ignore[arg-type]
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        shifted = (self.embedding(tokens.roll(i, 1)[:, 1:]) * (i + 1) for i in range(self.uses))
        hidden = sum(shifted, torch.zeros((), dtype=self.head.weight.dtype)).sin()
        logits = self.head(hidden).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten().long())


@pytest.mark.parametrize(
    ("kind", "dtype", "integers"),
    [
        ({}, torch.bfloat16, torch.int64),
        ({"uses": 3}, torch.float32, torch.int32),
        ({"padding": 5}, torch.float32, torch.int64),
        ({"frequency": True, "uses": 2}, torch.bfloat16, torch.int64),
    ],
    ids=["once", "often", "padding", "by frequency"],
)
@pytest.mark.usefixtures("thorough")  # peaks of two searches are compared
def test_embedding_rows_are_added_to_the_heads_gradient(
    kind: dict[str, Any], dtype: torch.dtype, integers: torch.dtype
) -> None:
    """Each bit as where a whole gradient of the embedding is added, of which there is none."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (4, 33), dtype=integers)  # which come again
    tokens[:, ::4] = torch.randint(0, V, (4, 9))
    case = Case("tied", Tied(**kind).to(dtype), (tokens,), {}, lambda loss: loss)
    whole, by_rows = (
        in_parts(case, options=replace(OPTIONS, without=without)) for without in (("add-rows",), ())
    )
    assert all(map(torch.equal, gradients(case, by_rows), gradients(case, whole)))
    weight_bytes = case.model.head.weight.nbytes  # type: ignore[union-attr]
    graphs = [rockplan.plan_of(one).graph for one in (whole, by_rows)]
    sums = [c.op for n in graphs[1].nodes for c in n.calls if "index_add" in c.op]
    assert len(sums) == kind.get("uses", 1)
    made = [
        sum(d.size_bytes == weight_bytes for d in g.data if "embedding_d" in d.name) for g in graphs
    ]
    assert made == [kind.get("uses", 1), 0]
    plan = rockplan.plan_of(by_rows)
    assert plan.peak_bytes <= rockplan.plan_of(whole).peak_bytes
    measured = rockplan.peak_live_bytes(lambda: case.step(by_rows)).peak_bytes
    assert plan.peak_bytes - 16 <= measured <= plan.peak_bytes


def tied_llama() -> nn.Module:
    sizes = {"intermediate_size": 32, **TIED_SIZES}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **SIZES))


def tied_gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **SIZES))


def tied_opt() -> nn.Module:
    sizes = {"ffn_dim": 32, "word_embed_proj_dim": 16, **TIED_SIZES}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **SIZES))


SIZES: dict[str, Any] = {"vocab_size": 500, "use_cache": False, "tie_word_embeddings": True}
TIED_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("make", "dtype", "bound"),
    [
        (tied_llama, torch.float32, 1e-6),
        (tied_gpt2, torch.bfloat16, 1e-2),
        (tied_opt, torch.float32, 1e-6),
    ],
    ids=["llama", "gpt2", "opt"],
)
def test_only_tied_weights_gradients_differ(
    make: Callable[[], nn.Module], dtype: torch.dtype, bound: float
) -> None:
    """By the order of its sums; all others have eager's bits, at each step of eager's."""
    torch.manual_seed(0)
    eager: Any = make().to(dtype).train()
    fast: Any = copy.deepcopy(eager)
    options = replace(OPTIONS, only_loss=True)
    tokens = torch.randint(500, (4, 4, 64))
    given = {"input_ids": tokens[0], "labels": tokens[0]}
    fast = rockplan.solve(fast, given, "min", options=options)
    assert rockplan.plan_of(fast).graph.tiles == options.tile
    optimizer = torch.optim.SGD(eager.parameters(), 0.1)
    tied = eager.get_input_embeddings().weight
    assert tied is eager.get_output_embeddings().weight
    for step, batch in enumerate(tokens):
        fast.load_state_dict(eager.state_dict())
        for module in (eager, fast):
            torch.manual_seed(step)
            module.zero_grad()
            module(input_ids=batch, labels=batch).loss.backward()
        for (name, p), q in zip(eager.named_parameters(), fast.parameters(), strict=True):
            if p is tied:
                assert (p.grad - q.grad).double().norm() <= bound * p.grad.double().norm()
            else:
                assert torch.equal(p.grad, q.grad), f"{name} at step {step}"
        optimizer.step()


# Plans


def large(rows: int = 512) -> Case:
    return head(cross_entropy(), torch.float32, rows=rows)


def plan_of(case: Case, budget: str | int, **changes: Any) -> rockplan.Plan:
    options = replace(OPTIONS, **changes)
    return rockplan.plan(case.model, case.args, budget, sample_kwargs=case.kwargs, options=options)


def test_parts_are_taken_where_they_are_better() -> None:
    case = large()
    whole, parts = plan_of(case, "min", tile=False), plan_of(case, "min", tile=True)
    assert parts.graph.tiles == 16 and 3 * parts.peak_bytes < whole.peak_bytes
    assert "tiled           the head, in 16 parts" in str(parts) and "tiled" not in str(whole)
    assert plan_of(case, parts.peak_bytes, tile=True).graph.tiles == 16
    # Parts are 16 times as many calls, and more of what is made again.
    assert plan_of(case, whole.peak_bytes // 2, tile=True).graph.tiles == 16


def test_the_faster_of_both_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By prices that do not depend on the machine, with which parts gain nothing."""
    case = large()
    monkeypatch.setattr(
        problem, "measure", lambda graph, *_, **__: roofline(graph, Rates(1e11, 2e10))
    )
    kept = plan_of(case, "100%", tile=False)
    assert plan_of(case, "100%", tile=True).graph.tiles == 0
    # A share is one of what the head needs whole.
    half = plan_of(case, "50%", tile=True)
    assert half.graph.tiles == 16 and half.budget_bytes == kept.eager_peak_bytes // 2
    with pytest.raises(rockplan.InfeasibleBudget) as found:
        plan_of(case, 1000, tile=True)
    assert 3 * found.value.minimum_bytes < plan_of(case, "min", tile=False).peak_bytes


def test_a_large_vocabulary_needs_a_third() -> None:
    """Of Llama with 4 layers, in prices of a roofline: only planned."""
    torch.manual_seed(0)
    case = llama(layers=4, width=64, heads=2, vocabulary=128256, batch=2, length=512)
    case.kwargs["labels"] = case.kwargs["labels"].clone()
    case.kwargs["labels"][:, :100] = -100
    made = capture(LossOf(case.model), (), case.kwargs)
    parts = tiled(made)
    assert not isinstance(parts, str) and parts.tiles.parts == 8
    least = []
    for one in (made, parts):
        graph = lower(one, 0).graph
        goal = problem.problem_of(graph, roofline(graph, Rates(1e11, 2e10)), OPTIONS)
        least.append(planning.plan_within(goal, Budget(is_minimum=True), OPTIONS).peak_bytes)
    assert least[0] > 3 * least[1]


@pytest.mark.parametrize("make", [llama, gpt2])
def test_models_of_transformers(make: Callable[..., Case]) -> None:
    """Llama has a head of its own, GPT-2 the embedding, whose gradient autograd adds up."""
    torch.manual_seed(0)
    case = make(layers=1, width=16, heads=2, vocabulary=512, batch=2, length=32)
    case.kwargs["labels"] = case.kwargs["labels"].clone()
    case.kwargs["labels"][:, :5] = -100
    case = replace(case, model=LossOf(case.model), loss=lambda loss: loss)
    expected = gradients(case, case.model)
    planned = in_parts(case)
    assert distance(gradients(case, planned), expected) < 1e-6
    plan = rockplan.plan_of(planned)
    measured = rockplan.peak_live_bytes(lambda: case.step(planned)).peak_bytes
    assert plan.peak_bytes - 16 <= measured <= plan.peak_bytes <= plan.budget_bytes


def test_lengths_follow(caplog: pytest.LogCaptureFixture) -> None:
    """A longer call gets the plan of the first, or a new one, in parts of its own, which is said
    once."""
    case = head(cross_entropy(), torch.float32, rows=64)
    planned = in_parts(case)
    for rows in (66, 10):
        other = head(cross_entropy(), torch.float32, rows=rows)
        other = replace(other, model=case.model)
        assert distance(gradients(other, planned), gradients(other, case.model)) < 1e-6
        assert {p.graph.tiles for p in planned._rockplan.plans} == {4}
    said = [r for r in caplog.records if "planned by itself" in r.getMessage()]
    assert len(said) == 1 and said[0].levelname == "WARNING"
    assert "parts of the head" in said[0].getMessage()


def test_what_stays_whole_has_open_sizes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    planned = rockplan.solve(model, torch.randn(40, 8), "100%", options=OPTIONS)
    captured = []
    for rows in (40, 30, 20, 50):
        x = torch.randn(rows, 8)
        stages = heard(lambda x=x: planned(x).square().sum().backward())
        captured.append("capturing the model" in stages)
    assert captured == [False, True, False, False]


def test_the_curve_has_both() -> None:
    case = large(64)
    both = rockplan.pareto(case.model, case.args, options=OPTIONS)
    whole = rockplan.pareto(case.model, case.args, options=replace(OPTIONS, tile=False))
    assert both.minimum_bytes < whole.minimum_bytes
    assert both.unplanned_bytes == whole.unplanned_bytes


def test_files_say_in_how_many_parts(tmp_path: Path) -> None:
    case = head(cross_entropy(), torch.float32)
    planned = in_parts(case, options=replace(OPTIONS, tile=3))
    rockplan.save_plan(planned, tmp_path / "plan.json")
    (read,) = rockplan.read_plans(tmp_path / "plan.json")
    assert read.graph.tiles == 3
    expected = gradients(case, planned)
    loaded = rockplan.load(case.model, case.args, tmp_path / "plan.json")
    assert rockplan.plan_of(loaded).graph.tiles == 3
    assert all(map(torch.equal, gradients(case, loaded), expected))
    other = head(squares, torch.float32)
    with pytest.raises(PlanMismatch):
        rockplan.load(other.model, other.args, tmp_path / "plan.json")


def test_the_cache_knows_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    case = head(cross_entropy(), torch.float32)
    made = [plan_of(case, "min", cache=True, tile=tile) for tile in (2, 4, False, 2)]
    assert [p.graph.tiles for p in made] == [2, 4, 0, 2]
    assert len({p.graph_digest for p in made}) == 3
    assert not made[3].trace  # of the cache


@pytest.mark.parametrize("tile", [1, 0, -2, 2.5, "yes", None])
def test_what_is_no_number_of_parts(tile: Any) -> None:
    with pytest.raises(InvalidInput, match="tile is"):
        Options(tile=tile)


def test_blocks_have_no_head() -> None:
    case = large(8)
    with pytest.raises(InvalidInput, match="tile"):
        rockplan.solve_blocks(case.model, case.args, "min", options=OPTIONS)


def test_the_command_line(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "from tests.test_tiled import large\n"
        "def make():\n    case = large(128)\n    return case.model, case.args\n"
    )
    asked = ["solve", f"{model}:make", "-b", "min", "--tile", "--check", "--no-cache"]
    ended = CliRunner().invoke(app, [*asked, "--time-limit", "1"])
    assert ended.exit_code == 0, ended.output
    assert "tiled" in ended.output and "in 4 parts" in ended.output


# With kernels


def test_kernels_of_parts_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel reads two parts, and those of all parts are the same two."""
    interpret(monkeypatch)
    case = head(cross_entropy(), torch.float32, rows=32)
    planned = in_parts(case, options=replace(OPTIONS, compile=True))
    plan = rockplan.plan_of(planned)
    wide = [k for k in plan.graph.kernels if any(s.shape == (32, V) for s in k.inputs)]
    assert len(wide) == 2 and all(s.shape != (128, V) for k in wide for s in k.inputs)
    for kernel in wide:
        assert sum(s.shape == (32, V) for s in kernel.inputs) == 1
    assert distance(gradients(case, planned), gradients(case, case.model)) < 1e-6
    measured = rockplan.peak_live_bytes(lambda: case.step(planned)).peak_bytes
    assert measured <= plan.peak_bytes
