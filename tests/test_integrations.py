"""Where people train: a planned module in a plain loop, transformers.Trainer, Lightning and
accelerate ends with the same bits as the original, checkpoints and smaller batches included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import pytorch_lightning as lightning
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import rockplan
from rockplan.values.plan import recomputations
from testing.training import QUICK, Tokens, make_gpt2

BATCH = 64


def make_net() -> nn.Module:
    """Layers with dropout, statistics and an operation in place."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(16, 24), nn.GELU(), nn.BatchNorm1d(24), nn.ReLU(inplace=True)]
        layers += [nn.Dropout(0.1), nn.Linear(24, 16)]
    return nn.Sequential(*layers).train()


def make_data() -> TensorDataset:
    """Two batches of BATCH rows and one of 22."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(2 * BATCH + 22, 16, generator=generator),
        torch.randn(2 * BATCH + 22, 16, generator=generator),
    )


def planned(net: nn.Module, precision: str = "no") -> nn.Module:
    """`net` under a budget that makes it recompute, planned for the precision of a trainer."""
    own = {"enabled": "bf16" in precision, "cache_enabled": precision != "bf16-mixed"}
    with torch.autocast("cpu", torch.bfloat16, **own):
        fast = rockplan.solve(net, make_data()[:BATCH][0], budget="60%", options=QUICK)
    assert recomputations(fast.plan)
    return fast


def assert_same_bits(found: nn.Module, expected: nn.Module) -> None:
    """Same names, same parameters and buffers."""
    states = found.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def plans_held(fast: nn.Module) -> int:
    """How many kinds of call the module has plans for."""
    return sum(map(len, fast._rockplan.programs.values()))


# A plain loop


def train_plainly(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: range,
) -> list[float]:
    """Two batches to an optimizer step, the last batch smaller; evaluation between epochs."""
    losses = []
    for epoch in epochs:
        torch.manual_seed(epoch)
        loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True)
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(net(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
            if number % 2 or number == len(loader) - 1:
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            losses += [nn.functional.mse_loss(net(x), y).item() for x, y in loader]
        net.train()
    return losses


def train_and_resume(wrap: Callable[[nn.Module], nn.Module], folder: Path) -> Any:
    """Two epochs, a checkpoint into another module, two epochs more."""
    first = wrap(make_net())
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    losses = train_plainly(first, optimizer, range(2))
    torch.save([first.state_dict(), optimizer.state_dict()], folder / "checkpoint.pt")

    second = wrap(make_net())
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
    weights, moments = torch.load(folder / "checkpoint.pt")
    second.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    losses += train_plainly(second, optimizer, range(2, 4))
    return losses, second


def test_plain_loop(tmp_path: Path) -> None:
    losses, fast = train_and_resume(planned, tmp_path)
    expected, net = train_and_resume(lambda net: net, tmp_path)
    assert losses == expected
    assert_same_bits(fast, net)
    assert plans_held(fast) == 2  # full and last batch


# transformers.Trainer


def planned_gpt2() -> nn.Module:
    ids = Tokens(8).ids
    batch = {"input_ids": ids, "labels": ids}
    fast = rockplan.solve(make_gpt2(), batch, budget="70%", options=QUICK)
    assert recomputations(fast.plan)
    return fast


def run_trainer(model: nn.Module, folder: Path, resume: str | None = None) -> Any:
    """Two epochs of 8, 8 and 3 sequences, two batches to a step, evaluated and saved after each."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=2,
        num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch", logging_steps=1,
        use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Tokens(19), eval_dataset=Tokens(5)
    )
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return [{k: v for k, v in row.items() if "loss" in k or k == "grad_norm"} for row in history]


def test_trainer(tmp_path: Path) -> None:
    fast, twin = planned_gpt2(), make_gpt2()
    history = run_trainer(fast, tmp_path / "fast")
    assert history == run_trainer(twin, tmp_path / "twin")
    assert sum("eval_loss" in row for row in history) == 2
    assert_same_bits(fast, twin)

    fast.save_pretrained(tmp_path / "saved")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert_same_bits(loaded, twin)

    resumed = planned_gpt2()
    run_trainer(resumed, tmp_path / "fast", resume=str(tmp_path / "fast" / "checkpoint-2"))
    assert_same_bits(resumed, twin)


# Lightning


class Regression(lightning.LightningModule):
    """A network as part of a LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    net: nn.Module, precision: str, checkpoint: Path, *, epochs: int, resume: bool = False
) -> Regression:
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs, accumulate_grad_batches=2, accelerator="cpu", precision=precision,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(make_data(), batch_size=BATCH)
    module = Regression(net)
    trainer.fit(module, loader, loader, ckpt_path=checkpoint if resume else None)
    trainer.save_checkpoint(checkpoint)
    return module


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_lightning(tmp_path: Path, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    runs = {}
    of_precision = functools.partial(planned, precision=precision)
    for name, wrap in (("planned", of_precision), ("original", lambda net: net)):
        checkpoint = tmp_path / f"{name}.ckpt"
        first = fit(wrap(make_net()), precision, checkpoint, epochs=2)
        second = fit(wrap(make_net()), precision, checkpoint, epochs=3, resume=True)
        runs[name] = (first, second)
    for found, expected in zip(runs["planned"], runs["original"], strict=True):
        assert found.losses == expected.losses
        assert_same_bits(found, expected)
    assert not any("autocast" in message for message in caplog.messages)


class Configured(Regression):
    """The network is made, or planned, where Lightning has large models made."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(nn.Identity())
        self.wrap = wrap

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = self.wrap(make_net())


def test_lightning_configure_model() -> None:
    runs = []
    for wrap in (planned, lambda net: net):
        lightning.seed_everything(1, verbose=False)
        trainer = lightning.Trainer(
            max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        runs.append(Configured(wrap))
        trainer.fit(runs[-1], DataLoader(make_data(), batch_size=BATCH))
    assert runs[0].losses == runs[1].losses
    assert_same_bits(runs[0], runs[1])
    assert plans_held(runs[0].net) == 1


class Doubles(TorchFunctionMode):
    """Changes what functions do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.gelu else result


def test_modes_around_lightnings_own() -> None:
    """What Lightning enters is left aside and entered again; what others enter is refused."""
    from lightning_fabric.utilities.init import _EmptyInit

    with _EmptyInit(), torch.device("cpu"):
        modes = _get_current_function_mode_stack()
        fast = planned(make_net())
        assert _get_current_function_mode_stack() == modes
        with Doubles(), pytest.raises(rockplan.UnsupportedModel, match="Doubles"):
            planned(make_net())
    fast(make_data()[:BATCH][0]).pow(2).mean().backward()
    assert plans_held(fast) == 1


# accelerate


def run_accelerate(net: nn.Module, precision: str, folder: Path) -> tuple[nn.Module, list[float]]:
    """Two epochs with clipped gradients, accumulated over two batches; the state saved after the
    first epoch and loaded after the second, which therefore is repeated."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(make_data(), batch_size=BATCH)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses = []
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(x), y)
                losses.append(loss.item())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(folder))
        if epoch == 1:
            accelerator.load_state(str(folder))
    return accelerator.unwrap_model(net, keep_fp32_wrapper=False), losses


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_accelerate(tmp_path: Path, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    fast, losses = run_accelerate(planned(make_net(), precision), precision, tmp_path / "planned")
    net, expected = run_accelerate(make_net(), precision, tmp_path / "original")
    assert losses == expected
    assert losses[3:6] == losses[6:9]
    assert_same_bits(fast, net)
    assert not any("autocast" in message for message in caplog.messages)
    fast(make_data()[:BATCH][0]).sum().backward()
    assert recomputations(fast.plan)
