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

import datasets
import peft
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import rockplan
from rockplan.search import planning
from rockplan.values.plan import format_bytes, recomputations
from testing.training import QUICK, assert_same_state

LENGTH = 24
ROWS = 4
WORDS = ("<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(124)))


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_llama() -> Any:
    """As `from_config` and `from_pretrained` give it."""
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 88, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def make_gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=len(WORDS), n_positions=32
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


def make_mixtral() -> Any:
    """With a loss of its routers beside the whole loss."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=len(WORDS), intermediate_size=64, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True, **SIZES,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


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


def tokens(rows: int = ROWS, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, len(WORDS), (rows, LENGTH), generator=generator)


def batch_for(kind: str) -> dict[str, torch.Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids[:, 0] % 2 if kind == "classifier" else ids}


# A model as a configuration gives it


@pytest.mark.parametrize("kind", MODELS)
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


def test_a_cache_that_is_asked_for_is_refused_and_left_on() -> None:
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


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
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


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that are their own targets."""

    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(3 * ROWS)[index]
        return {"input_ids": ids, "labels": ids}


def settings(folder: Path) -> dict[str, Any]:
    """Three steps, every one logged."""
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "max_steps": 3, "per_device_train_batch_size": ROWS, "logging_steps": 1, "seed": 3,
        "save_strategy": "no", "bf16": False, "learning_rate": 1e-2,
    }  # fmt: skip


def history(trainer: transformers.Trainer) -> list[tuple[float, float]]:
    """Losses and norms of gradients, from a seed."""
    torch.manual_seed(7)
    trainer.train()
    rows = trainer.state.log_history
    found = [(row["loss"], row["grad_norm"]) for row in rows if "grad_norm" in row]
    assert len(found) == 3
    return found


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


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], lora_dropout=0.1
    )


WRAPS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "as it is": (make_llama, lambda model: model),
    "routers": (make_mixtral, lambda model: model),
    "LoRA": (make_llama, with_lora),
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


def test_the_trainer_holds_no_logits(tmp_path: Path) -> None:
    """As the documents say."""
    batch = batch_for("llama") | {"num_items_in_batch": torch.tensor(1.0)}
    released = replace(QUICK, released=(1,))
    fast, twin = rockplan.solve(make_llama(), batch, "min", options=released), make_llama()
    arguments = transformers.TrainingArguments(**settings(tmp_path))
    runs = [
        transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
        for model in (fast, twin)
    ]
    assert history(runs[0]) == history(runs[1])
    assert_same_state(fast, twin, "trained")
    items = torch.tensor(ROWS * (LENGTH - 1.0))
    assert peak_of_step(runs[0], fast, num_items_in_batch=items) <= fast.plan.budget_bytes
    assert (
        fast.plan.budget_bytes < rockplan.plan(make_llama(), batch, "min", options=QUICK).peak_bytes
    )


@pytest.mark.parametrize("other", ["the batch", "a whole number", "two tensors", "a mask"])
def test_a_call_of_a_trainer_takes_over_the_plan_of_the_sample(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs is a division by a number, or which arguments are one tensor: nothing is
    searched, and there is one plan."""
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    calls = {
        "the batch": batch,
        "a whole number": batch | {"num_items_in_batch": torch.tensor(70)},
        "two tensors": batch | {"labels": ids.clone(), "num_items_in_batch": torch.tensor(70.0)},
        "a mask": batch | {"attention_mask": torch.ones_like(ids)},
    }
    model = make_llama()
    eager = copy.deepcopy(model)
    fast = rockplan.solve(model, batch, "70%", options=QUICK)
    searched: list[int] = []
    plan_within = planning.plan_within
    monkeypatch.setattr(
        planning, "plan_within", lambda *args: (searched.append(1), plan_within(*args))[1]
    )

    def step() -> None:
        fast(**calls[other]).loss.backward()

    for _ in range(2):
        step()
        eager(**calls[other], use_cache=False).loss.backward()
    assert_same_state(fast, eager, other)
    assert not searched and len(fast.plans) == 1
    assert recomputations(fast.plan)
    assert rockplan.peak_live_bytes(step)[0] <= fast.plan.peak_bytes <= fast.plan.budget_bytes

    # The sample comes all the same, and then the call again.
    for call in (batch, calls[other]):
        for module, more in ((fast, {}), (eager, {"use_cache": False})):
            module.zero_grad()
            module(**call, **more).loss.backward()
        assert_same_state(fast, eager, "the sample")
    assert not searched


def test_attributes_that_the_forward_does_not_read_need_no_other_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = batch_for("llama")
    fast = rockplan.solve(make_llama(), batch, "70%", options=replace(QUICK, cache=False))
    monkeypatch.setattr(planning, "plan_within", None)
    fast.tag = "of a trainer"
    fast.config.pad_token_id = 3
    fast(**batch).loss.backward()
    assert len(fast.plans) == 1


def test_logits_that_the_caller_may_let_go_are_advised_of(
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


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    numbers = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def texts(seed: int, length: int) -> list[str]:
    return [" ".join(WORDS[i] for i in row[:length]) for row in tokens(3 * ROWS, seed)]


def supervised(model: nn.Module, folder: Path, config: peft.LoraConfig | None) -> Any:
    data = datasets.Dataset.from_dict({"text": texts(4, LENGTH - 1)})
    arguments = trl.SFTConfig(**settings(folder), max_length=LENGTH, gradient_checkpointing=False)
    return trl.SFTTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer(),
        peft_config=config,
    )  # fmt: skip


def preferred(model: nn.Module, folder: Path, config: peft.LoraConfig | None) -> Any:
    """Rows of chosen and rejected answers, of LENGTH tokens each."""
    chosen, rejected = texts(5, LENGTH - 9), texts(6, LENGTH - 9)
    data = datasets.Dataset.from_dict(
        {
            "prompt": texts(4, 8),
            "chosen": [f" {t}" for t in chosen],
            "rejected": [f" {t}" for t in rejected],
        }
    )
    arguments = trl.DPOConfig(**settings(folder), max_length=LENGTH, gradient_checkpointing=False)
    return trl.DPOTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer(),
        peft_config=config, ref_model=None if config else make_llama(),
    )  # fmt: skip


TRAINERS = {"SFT": (supervised, 1), "DPO": (preferred, 2)}


def planned_decoder(model: Any, rows: int) -> Any:
    """The decoder of a causal model, planned in its place."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    ids = tokens(rows)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    base.model = rockplan.solve(base.model, batch, "60%", options=QUICK)
    assert recomputations(base.model.plan)
    return base.model


@pytest.mark.parametrize("when", ["before", "after", "LoRA"])
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
