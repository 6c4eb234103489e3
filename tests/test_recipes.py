"""Recipes: trainers as people write them, with one line of rockplan. Each ends with the bits of the
original, and once the first steps are planned nothing is said."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import pytest
import pytorch_lightning as lightning
import torch
import transformers
import trl
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rockplan
from rockplan.integrations.lightning import RockplanCallback as ForLightning
from rockplan.integrations.transformers import RockplanCallback
from testing.trainers import (
    LENGTH,
    Rows,
    lora,
    make_gpt2,
    make_llama,
    make_tokenizer,
    preferred,
    settings,
    supervised,
    texts,
)
from testing.training import QUICK, assert_same_state

BUDGET = "60%"
Run = tuple[list[Any], nn.Module]
"""Losses and the trained module."""


def make_net() -> nn.Module:
    torch.manual_seed(0)
    parts = [(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(3)]
    return nn.Sequential(*(module for part in parts for module in part)).train()


def make_loader() -> Any:
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.flip(0)), batch_size=32)


def loop(is_planned: bool, folder: Path) -> Run:
    """A loop with accumulation, `sum` as the loss, evaluation."""
    net = make_net()
    if is_planned:
        net = rockplan.solve(net, budget=BUDGET, options=QUICK)
    optimizer, losses = torch.optim.AdamW(net.parameters()), []
    for epoch in range(2):
        torch.manual_seed(epoch)
        for number, (x, y) in enumerate(make_loader()):
            loss = (net(x) - y).square().sum()
            loss.backward()
            losses.append(loss.item())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            losses.append(net.eval()(x).sum().item())
        net.train()
    return losses, net


def accelerated(is_planned: bool, folder: Path) -> Run:
    """accelerate in bf16."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    net = make_net()
    if is_planned:
        net = rockplan.solve(net, budget=BUDGET, options=QUICK)
    prepared = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), make_loader())
    losses = []
    torch.manual_seed(1)
    for x, y in prepared[2]:
        loss = nn.functional.mse_loss(prepared[0](x), y)
        accelerator.backward(loss)
        prepared[1].step()
        prepared[1].zero_grad()
        losses.append(loss.item())
    return losses, accelerator.unwrap_model(prepared[0], keep_fp32_wrapper=False)


class Fits(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.losses = net, list[float]()

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fitted(is_planned: bool, folder: Path) -> Run:
    """Lightning by its callback."""
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder),
        callbacks=[ForLightning(BUDGET, QUICK)] if is_planned else [],
    )  # fmt: skip
    module = Fits(make_net())
    trainer.fit(module, make_loader())
    return module.losses, module


def trained(trainer: Any, is_planned: bool, options: rockplan.Options = QUICK) -> Run:
    """A trainer of transformers or TRL by its callback."""
    if is_planned:
        trainer.add_callback(RockplanCallback(BUDGET, options))
    torch.manual_seed(7)
    trainer.train()
    rows = [r for r in trainer.state.log_history if "loss" in r or "eval_loss" in r]
    kept = ("loss", "grad_norm", "eval_loss")
    assert not any("_rockplan" in m.__dict__ for m in trainer.model.modules())
    return [[r.get(k) for k in kept] for r in rows], trainer.model


def with_trainer(model: Any, folder: Path, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(**{**settings(folder), **more})
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows()
    )


OFTEN = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
OFTEN |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "bf16": True}
OFTEN |= {"per_device_train_batch_size": 2}


def packed(model: Any, folder: Path) -> Any:
    data = datasets.Dataset.from_dict({"text": texts(4, LENGTH - 1)})
    sizes = {**settings(folder), "per_device_train_batch_size": 2, "max_length": 2 * LENGTH}
    arguments = trl.SFTConfig(**sizes, gradient_checkpointing=False, packing=True)
    return trl.SFTTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer()
    )


RECIPES: dict[str, Callable[[bool, Path], Run]] = {
    "loop": loop,
    "accelerate": accelerated,
    "Lightning": fitted,
    "Trainer": lambda is_planned, f: trained(with_trainer(make_gpt2(), f), is_planned),
    "Trainer, LoRA, bf16, evaluation, checkpoints": lambda is_planned, f: trained(
        with_trainer(peft.get_peft_model(make_llama(), lora()), f, **OFTEN), is_planned
    ),
    "SFT": lambda is_planned, f: trained(supervised(make_llama(), f), is_planned),
    "SFT, packed": lambda is_planned, f: trained(packed(make_llama(), f), is_planned),
    "DPO, LoRA": lambda is_planned, f: trained(preferred(make_llama(), f, lora()), is_planned),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_the_originals_bits(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as of_eager:
        warnings.simplefilter("always")
        expected, eager = RECIPES[name](False, tmp_path / "eager")
    caplog.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, planned = RECIPES[name](True, tmp_path / "planned")
    assert found == expected
    assert_same_state(planned, eager, name)
    said = [r for r in caplog.records if r.name == "rockplan" and r.levelno >= logging.WARNING]
    first = ("planned ", "config.use_cache", "leaf 1 of the result", "no plan fits")
    beyond = [r.getMessage() for r in said if not r.getMessage().startswith(first)]
    kinds = [r.getMessage() for r in said if "another kind" in r.getMessage()]
    assert beyond == [] and kinds == []
    assert not {str(w.message) for w in warned} - {str(w.message) for w in of_eager}
