"""Trainers that change models: causal models as a configuration gives them, in the Trainer of
transformers also with LoRA (peft), in TRL's SFTTrainer and DPOTrainer. Each ends with the bits of
the original, within budget, on one plan; nothing is downloaded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import rockplan
from rockplan.search import planning
from rockplan.values.plan import format_bytes, recomputations
from testing.trainers import (
    LENGTH,
    ROWS,
    SIZES,
    WORDS,
    Rows,
    history,
    lora,
    make_gpt2,
    make_llama,
    make_mixtral,
    preferred,
    settings,
    supervised,
    tokens,
)
from testing.training import QUICK, assert_same_state
from tests.planning import heard


def make_t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(WORDS),
        d_model=32,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        d_kv=8,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.AutoModelForSeq2SeqLM.from_config(config).train()


def make_classifier() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 88}
    config = transformers.LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, **sizes)
    return transformers.AutoModelForSequenceClassification.from_config(config).train()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": make_llama,
    "gpt2": make_gpt2,
    "mixtral": make_mixtral,
    "t5": make_t5,
    "classifier": make_classifier,
}


def batch_for(kind: str) -> dict[str, torch.Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids[:, 0] % 2 if kind == "classifier" else ids}


# A model as a configuration gives it


@pytest.mark.parametrize("kind", ["t5", "classifier", "mixtral"])
def test_a_default_model_is_planned_without_its_cache(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch, model = batch_for(kind), MODELS[kind]()
    eager = copy.deepcopy(model)
    assert model.config.use_cache
    with caplog.at_level(logging.WARNING, "rockplan"):
        fast = rockplan.solve(model, batch, "min", options=QUICK)
    assert recomputations(fast.plan)
    assert [r.name for r in caplog.records if "key-value cache" in r.getMessage()] == ["rockplan"]
    assert fast.config.use_cache and model.config.use_cache

    for step in range(3):
        fast.config.use_cache = step != 1  # trainers switch it, sooner or later
        results = []
        for module, call in ((fast, batch), (eager, batch | {"use_cache": False})):
            torch.manual_seed(step)
            result = module(**call)
            result.loss.backward()
            results.append(result)
        assert list(results[0]) == list(results[1])
        assert torch.equal(results[0].logits, results[1].logits)
        assert_same_state(fast, eager, f"step {step}")
        assert fast.config.use_cache == (step != 1)
    assert len(fast.plans) == 1

    with torch.no_grad():
        kept = fast.eval()(**batch)
    assert any("Cache" in type(value).__name__ for value in kept.values())


def test_a_requested_cache_is_refused_and_left_on() -> None:
    model, batch = make_llama(), batch_for("llama")
    with pytest.raises(rockplan.UnsupportedModel, match="use_cache=False"):
        rockplan.solve(model, {**batch, "use_cache": True}, "min", options=QUICK)
    assert model.config.use_cache
    with pytest.raises(rockplan.InfeasibleBudget):
        rockplan.solve(model, batch, 1000, options=QUICK)
    assert model.config.use_cache


def test_check_and_other_settings_of_a_default_model() -> None:
    """A run that is checked; a setting that the forward does read is another kind of call."""
    batch = batch_for("llama")
    fast = rockplan.solve(
        make_llama(), batch, "60%", options=rockplan.Options(time_limit_s=2, check=True)
    )
    assert fast.plan.checked
    fast(**batch).loss.backward()
    fast.config.output_hidden_states = True
    assert len(fast(**batch).hidden_states) == 3


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_a_model_in_eval_mode_is_said(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Without dropout its plan is that of training, too."""
    batch = batch_for("llama")
    fast = rockplan.solve(make().eval(), batch, "70%", options=QUICK)
    assert any("model.train()" in r.getMessage() for r in caplog.records)
    fast.train()
    fast(**batch).loss.backward()
    assert len(fast.plans) == (1 if make is make_llama else 2)


# transformers.Trainer


def peak_of_step(trainer: transformers.Trainer, model: nn.Module, **more: Any) -> int:
    """Peak of the step that the trainer does, without the gradients of parameters."""
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    peak, _ = rockplan.peak_live_bytes(
        lambda: trainer.compute_loss(model, dict(batch), **more).backward()
    )
    return peak


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora())


WRAPS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "LoRA": (make_llama, with_lora),
    "routers": (make_mixtral, lambda model: model),
    "as it is": (make_llama, lambda model: model),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_trainer(kind: str, tmp_path: Path) -> None:
    make, wrap = WRAPS[kind]
    batch = batch_for("llama") | {"num_items_in_batch": torch.tensor(1.0)}
    fast = rockplan.solve(wrap(make()), batch, "70%", options=QUICK)
    twin = wrap(make())
    assert recomputations(fast.plan)
    runs = [
        transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**settings(tmp_path)),
            train_dataset=Rows(),
        )
        for model in (fast, twin)
    ]
    assert history(runs[0]) == history(runs[1])
    assert_same_state(fast, twin, "trained")
    assert len(fast.plans) == 1, "planned once, by solve"
    items = torch.tensor(ROWS * (LENGTH - 1.0))
    assert peak_of_step(runs[0], fast, num_items_in_batch=items) <= fast.plan.budget_bytes
    assert len(fast.plans) == 1


@pytest.mark.parametrize("other", ["a mask", "two tensors", "a whole number"])
def test_trainers_calls_take_over_the_samples_plan(other: str) -> None:
    """What differs is a division by a number, or which arguments are one tensor: nothing is
    measured, and there is one plan."""
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    calls = {
        "a whole number": batch | {"num_items_in_batch": torch.tensor(70)},
        "two tensors": batch | {"labels": ids.clone(), "num_items_in_batch": torch.tensor(70.0)},
        "a mask": batch | {"attention_mask": torch.ones_like(ids)},
    }
    model = make_llama()
    eager = copy.deepcopy(model)
    fast = rockplan.solve(model, batch, "70%", options=QUICK)

    def step() -> None:
        fast(**calls[other]).loss.backward()

    for _ in range(2):
        assert "measuring times" not in heard(step)
        eager(**calls[other], use_cache=False).loss.backward()
    assert_same_state(fast, eager, other)
    assert len(fast.plans) == 1
    assert recomputations(fast.plan)
    assert rockplan.peak_live_bytes(step)[0] <= fast.plan.peak_bytes <= fast.plan.budget_bytes

    # The sample comes all the same, and then the call again.
    for call in (batch, calls[other]):
        for module, more in ((fast, {}), (eager, {"use_cache": False})):
            module.zero_grad()
            module(**call, **more).loss.backward()
        assert_same_state(fast, eager, "the sample")


def test_attributes_never_read_need_no_other_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = batch_for("llama")
    fast = rockplan.solve(make_llama(), batch, "70%", options=replace(QUICK, cache=False))
    monkeypatch.setattr(planning, "plan_within", None)
    fast.tag = "of a trainer"
    fast.config.pad_token_id = 3
    fast(**batch).loss.backward()
    assert len(fast.plans) == 1


def test_logits_that_may_go_are_advised_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 88, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=2000, **sizes)
    ).train()
    batch = batch_for("llama")
    size_bytes = ROWS * LENGTH * 2000 * 4
    with pytest.raises(rockplan.InfeasibleBudget, match=r"released=\(1,\)") as raised:
        rockplan.solve(model, batch, size_bytes, options=QUICK)
    let_go = replace(QUICK, released=(1,))
    least = rockplan.plan(model, batch, "min", options=let_go)
    assert raised.value.minimum_bytes - least.peak_bytes > 0.9 * size_bytes

    fast = rockplan.solve(model, batch, "min", options=QUICK)
    assert fast.plan.overhead > 0
    (said,) = [r.getMessage() for r in caplog.records if "released=(1,)" in r.getMessage()]
    assert format_bytes(size_bytes) in said
    assert format_bytes(size_bytes) in str(fast.plan) and "released" in str(fast.plan)
    caplog.clear()
    fast = rockplan.solve(model, batch, "min", options=let_go)
    assert not [r for r in caplog.records if "released" in r.getMessage()]
    assert "released" not in str(fast.plan)
    peak, _ = rockplan.peak_live_bytes(lambda: fast(**batch).loss.backward())
    assert peak <= fast.plan.budget_bytes


# TRL


TRAINERS = {"SFT": (supervised, 1), "DPO": (preferred, 2)}


def planned_decoder(model: Any, rows: int) -> Any:
    """The decoder of a causal model, planned in its place."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    ids = tokens(rows)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    base.model = rockplan.solve(base.model, batch, "60%", options=QUICK)
    assert recomputations(base.model.plan)
    return base.model


@pytest.mark.parametrize("when", ["LoRA", "before", "after"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_trl(kind: str, when: str, tmp_path: Path) -> None:
    """The decoder planned before the trainer is made, or after, when it has changed the model."""
    make, share = TRAINERS[kind]
    config = lora() if when == "LoRA" else None
    model, twin = make_llama(), make_llama()
    if when == "before":
        fast = planned_decoder(model, share * ROWS)
    trainer, expected = make(model, tmp_path, config), make(twin, tmp_path, config)
    if when != "before":
        fast = planned_decoder(trainer.model, share * ROWS)
    plan = fast.plan
    assert history(trainer) == history(expected)
    assert_same_state(trainer.model, expected.model, "trained")
    assert len(fast.plans) == 1 and fast.plan.graph_digest == plan.graph_digest

    # The rest of the model is not planned.
    assert peak_of_step(trainer, trainer.model) < peak_of_step(expected, expected.model)
    ids = tokens(share * ROWS)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    gradient = torch.ones(share * ROWS, LENGTH, 32)
    peak, _ = rockplan.peak_live_bytes(lambda: fast(**batch).last_hidden_state.backward(gradient))
    assert peak <= fast.plan.budget_bytes
    assert len(fast.plans) == 1


def test_a_planned_whole_in_the_forward_of_trl() -> None:
    """It replaces the forward of the instance, and calls the one before where it has no head of
    its own to run: that is the plan."""
    from trl.trainer.utils import add_fused_lm_head

    batch = batch_for("llama")
    fast, twin = rockplan.solve(make_llama(), batch, "min", options=QUICK), make_llama()
    for model in (fast, twin):
        model.config.use_cache = False
        add_fused_lm_head(model)
        model(**batch).loss.backward()
    assert_same_state(fast, twin, "step")
    peak, _ = rockplan.peak_live_bytes(lambda: fast(**batch).loss.backward())
    assert peak <= fast.plan.budget_bytes
