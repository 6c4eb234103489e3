"""Planned blocks of models of transformers: in a loop, in the Trainer, in TRL's trainers, with
LoRA. Each ends with the bits of the original; in a loop, what is predicted is measured. Nothing is
downloaded."""

from __future__ import annotations

import copy
import functools
import importlib
import operator
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import trl
from torch import nn

import rockplan
from rockplan.graph_builder.costs.ruler import peak_live_bytes
from rockplan.runtime import planned_module
from testing import models
from testing.blocks import QUICK, Stack
from testing.blocks import batch as rows
from testing.trainers import (
    Rows,
    history,
    lora,
    make_gpt2,
    make_llama,
    make_mixtral,
    make_tokenizer,
    preferred,
    settings,
    supervised,
    texts,
    tokens,
    unpaired,
)
from testing.training import assert_same_state

OPTIONS = rockplan.Options(**QUICK)
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "mixtral": (make_mixtral, "model.layers.*.self_attn"),
    "llama": (make_llama, "model.layers.*"),
    "gpt2": (make_gpt2, "transformer.h.*"),
}


def batch() -> dict[str, torch.Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", MODELS)
def test_a_loop(kind: str) -> None:
    make, blocks = MODELS[kind]
    model, eager, sample = make(), make(), batch()
    eager.config.use_cache = False
    loss = operator.attrgetter("loss")  # beside which Mixtral returns that of its routers
    rockplan.solve_blocks(model, sample, "min", blocks=blocks, loss=loss, options=OPTIONS)
    plan = rockplan.blocks_of(model)
    assert len(plan.blocks) == 2 and plan.overhead > 0

    def step() -> None:
        result = model(**sample)  # held, logits and all
        result.loss.backward()

    assert peak_live_bytes(step).peak_bytes == plan.peak_bytes <= plan.budget_bytes
    for module in (model, eager):
        module.zero_grad()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for step in range(3):
            torch.manual_seed(step)
            module(**sample).loss.backward()
            optimizer.step()
    assert_same_state(model, eager, "trained")
    layers = [model.get_submodule(block.path) for block in plan.blocks]
    assert [len(layer.plans) for layer in layers] == [1] * 2


def test_the_cache_is_off_while_blocks_are_planned(caplog: pytest.LogCaptureFixture) -> None:
    model = make_llama()
    with pytest.raises(rockplan.InfeasibleBudget):
        rockplan.solve_blocks(model, batch(), 1_000, options=OPTIONS)
    assert model.config.use_cache and not caplog.records
    for _ in range(2):
        rockplan.solve_blocks(model, batch(), "min", options=OPTIONS)
        assert not model.config.use_cache
    assert ["use_cache" in r.getMessage() for r in caplog.records] == [True] * 2
    copied = copy.deepcopy(model)
    assert rockplan.restore_blocks(copied).config.use_cache and not model.config.use_cache
    assert rockplan.restore_blocks(model).config.use_cache
    model.config.use_cache = False
    rockplan.solve_blocks(model, batch(), "min", options=OPTIONS)
    assert not rockplan.restore_blocks(model).config.use_cache


def planned(model: nn.Module, blocks: Any = None) -> Any:
    rockplan.solve_blocks(model, batch(), "min", blocks=blocks, options=OPTIONS)
    plan = rockplan.blocks_of(model)
    assert plan.overhead > 0
    return [model.get_submodule(block.path) for block in plan.blocks]


def test_trainer(tmp_path: Path) -> None:
    """It passes a number on to the layers, which none of them reads."""
    model, twin = make_llama(), make_llama()
    blocks = planned(model)
    arguments = transformers.TrainingArguments(**settings(tmp_path))
    trainer, expected = (
        transformers.Trainer(model=m, args=arguments, train_dataset=Rows()) for m in (model, twin)
    )
    found = history(trainer)
    assert len(found) == 3 and found == history(expected)
    assert_same_state(model, twin, "trained")
    assert [len(block.plans) for block in blocks] == [2, 2]


def test_lora_on_some_blocks() -> None:
    """What is before the first trained parameter is left; blocks with and without are two kinds."""
    model, eager = make_llama(4), make_llama(4)
    both = []
    for base in (model, eager):
        torch.manual_seed(1)
        both.append(peft.get_peft_model(base, lora([1, 3])))
    ours, twin = both
    blocks = planned(ours, "base_model.model.model.layers.*")
    plan = rockplan.blocks_of(ours)
    assert [path.rsplit(".", 1)[1] for path, _ in plan.left] == ["0"]
    assert [block.kind for block in plan.blocks] == [0, 1, 2]
    twin.config.use_cache = False
    for module in (ours, twin):
        for step in range(2):
            torch.manual_seed(step)
            module(**batch()).loss.backward()
    assert_same_state(ours, twin, "step")
    assert {len(block.plans) for block in blocks} == {1}


# TRL


def rewarded(model: Any, folder: Path, config: Any = None, kind: Any = trl.GRPOTrainer) -> Any:
    def reward(completions: list[str], **more: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    arguments = trl.GRPOConfig(
        **settings(folder), num_generations=2, max_completion_length=6,
        gradient_checkpointing=False,
    )  # fmt: skip
    return kind(
        model=model, args=arguments, processing_class=make_tokenizer(), reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(4, 6)}), peft_config=config,
    )  # fmt: skip


TRAINERS = {"SFT with LoRA": supervised, "SFT": supervised, "DPO": preferred, "GRPO": rewarded}


@pytest.mark.parametrize("kind", TRAINERS)
def test_trl(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks planned after the trainer is made, which replaces the forward of the model."""
    run, ran = planned_module.run, Counter[str]()

    def counted(bound: Any, *more: Any) -> Any:
        ran[bound.program.plan.graph_digest] += 1
        return run(bound, *more)

    config = lora() if "LoRA" in kind else None
    trainer, expected = (TRAINERS[kind](make_llama(), tmp_path, config) for _ in range(2))
    blocks = planned(trainer.model)
    monkeypatch.setattr(planned_module, "run", counted)
    found = history(trainer)
    # Steps of other sizes than the sample are planned once for all blocks.
    assert all(1 <= len(block.plans) <= 3 for block in blocks)
    assert ran.total() == 3 * len(blocks)
    assert len(found) == 3 and found == history(expected)
    assert_same_state(trainer.model, expected.model, "trained")


RECIPES = {"Trainer": rewarded, "PreferenceTrainer": preferred, "UnpairedTrainer": unpaired}


@functools.cache
def written() -> dict[str, Any]:
    """What docs/usage.md defines where it makes no logits."""
    text = (Path(__file__).parent.parent / "docs" / "usage.md").read_text()
    names: dict[str, Any] = {"trl": trl, "rockplan": rockplan, "torch": torch}
    for recipe in re.findall(r"```python no-run\n(.*?)```", text, re.DOTALL):
        if "rockplan.token_log_probs(" in recipe:
            exec(recipe, names)
    return names


@pytest.mark.parametrize("name", RECIPES)
def test_losses_without_logits_train_as_the_original(name: str, tmp_path: Path) -> None:
    """The recipes of docs/usage.md."""
    ours = RECIPES[name](make_llama(), tmp_path, kind=written()[name])
    expected = RECIPES[name](make_llama(), tmp_path)
    blocks = planned(ours.model)
    torch.testing.assert_close(history(ours), history(expected), rtol=1e-4, atol=1e-5)
    assert all(block.plans for block in blocks)
    trained = zip(ours.model.parameters(), expected.model.parameters(), strict=True)
    for p, q in trained:
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


VOCABULARY = 32_000


def make_talker() -> Any:
    """With a large vocabulary, in training, and a batch of which a part has no label."""
    case = models.llama(layers=2, width=32, vocabulary=VOCABULARY, batch=1, length=512)
    labels = case.kwargs["input_ids"].clone()
    labels[:, 100:200] = -100
    return replace(case, kwargs={**case.kwargs, "labels": labels})


def assert_makes_no_logits(case: Any, step: Callable[[], Any], planned: Any) -> None:
    """step: of the model of `case`, of which `planned` is a part or the whole."""
    peak_bytes = peak_live_bytes(lambda: step().backward()).peak_bytes
    assert peak_bytes == rockplan.blocks_of(planned).peak_bytes
    assert peak_bytes < case.kwargs["input_ids"].numel() * VOCABULARY * 4 / 6
    case.model.zero_grad()
    eager = make_talker().model
    eager.load_state_dict(case.model.state_dict())
    loss, expected = step(), eager(**case.kwargs).loss
    for one in (loss, expected):
        one.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for parameter, theirs in zip(case.model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_large_vocabulary_beside_blocks() -> None:
    """What the refusals of `tile` and `only_loss` advise: a loss on the hidden states, measured
    beside the blocks of the model without its head."""
    case = make_talker()
    causal, ids, labels = case.model, case.kwargs["input_ids"], case.kwargs["labels"][:, 1:]
    for option in ("tile", "only_loss"):
        wished = replace(OPTIONS, **{option: True})
        with pytest.raises(rockplan.InvalidInput, match=f"{option}=.*rockplan.token_log_probs"):
            rockplan.solve_blocks(causal, (), "min", sample_kwargs=case.kwargs, options=wished)

    def loss(result: Any) -> torch.Tensor:
        hidden, weight = result.last_hidden_state, causal.lm_head.weight
        found = rockplan.token_log_probs(hidden[:, :-1], weight, labels)
        return -found.sum() / (labels != -100).sum()

    body = rockplan.solve_blocks(causal.model, ids, "min", loss=loss, options=OPTIONS)
    assert_makes_no_logits(case, lambda: loss(body(ids)), body)


def test_models_that_compute_their_loss_make_no_logits() -> None:
    case = make_talker()
    causal = case.model
    logits = causal.eval()(**case.kwargs)
    written()["without_logits"](causal)
    rockplan.solve_blocks(causal.train(), (), "min", sample_kwargs=case.kwargs, options=OPTIONS)
    assert_makes_no_logits(case, lambda: causal(**case.kwargs).loss, causal)
    again = causal.eval()(**case.kwargs)
    assert torch.equal(again.logits, logits.logits) and torch.equal(again.loss, logits.loss)


def test_what_is_collected_inside_of_blocks() -> None:
    """Losses of routers, which transformers collects by hooks while a step runs."""
    model, eager = make_mixtral(), make_mixtral()
    leave = rockplan.Options(**QUICK, on_refused="leave")
    mixed = ["model.layers.0", "model.layers.1.self_attn"]
    rockplan.solve_blocks(model, batch(), "min", blocks=mixed, options=leave)
    assert [path for path, _ in rockplan.blocks_of(model).left] == ["model.layers.0"]
    eager.config.use_cache = False
    for module in (model, eager):
        module(**batch()).loss.backward()
    assert_same_state(model, eager, "step")


def test_generation_and_checkpoints_of_planned_blocks(tmp_path: Path) -> None:
    model, eager = make_llama(), make_llama()
    planned(model)
    ids = tokens(2)[:, :5]
    ours, theirs = (
        m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (model, eager)
    )
    assert torch.equal(ours, theirs)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(again, eager, "loaded")
    assert type(copy.deepcopy(model).model.layers[0]).__name__ == "LlamaDecoderLayer"


class ActivationCheckpointing:
    """What a policy of torchtitan 0.3.0 derives from: `Config.build` makes it, `apply` gets a part
    of a model that has no memory yet."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config


def test_the_policy_of_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied before there is memory; an evaluation comes first."""
    path = "torchtitan.distributed.activation_checkpoint"
    library = types.ModuleType(path)
    library.ActivationCheckpointing = ActivationCheckpointing  # type: ignore[attr-defined]
    for name in ("torchtitan", "torchtitan.distributed", path):
        monkeypatch.setitem(sys.modules, name, library)
    own = importlib.import_module("rockplan.integrations.torchtitan")
    monkeypatch.delitem(sys.modules, own.__name__)
    losses = []
    for policy in (own.RockplanAC(own.RockplanAC.Config(budget="60%", optimizer="sgd")), None):
        with torch.device("meta"):
            model: Any = Stack()
        if policy:
            policy.apply(model)
        model.to_empty(device="cpu").load_state_dict(Stack().state_dict())
        with torch.no_grad():
            model.eval()(rows())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            torch.manual_seed(step)
            losses.append(model(rows())["loss"])
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not policy or rockplan.blocks_of(model).overhead > 0
    assert losses[:3] == losses[3:]
