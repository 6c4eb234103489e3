"""Plans for steps that use the loss alone (`only_loss`): the bits of eager, logits that are not
made and say so, evaluation as before, in the loops of trainers."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput
from typer.testing import CliRunner

import rockplan
from rockplan.api import plan_each
from rockplan.cli.main import app
from rockplan.errors import BackwardError, InvalidInput, PlanMismatch, ResultNotMade
from rockplan.options import Options
from testing.training import QUICK, Tokens, assert_same_state, make_gpt2
from tests.kernels import interpret

OPTIONS = replace(QUICK, only_loss=True, cache=False)
V, D = 128, 16

Pair = namedtuple("Pair", ["scores", "loss"])


@dataclass
class Made:
    loss: torch.Tensor
    scores: torch.Tensor


pytree.register_pytree_node(
    Made, lambda m: ([m.loss, m.scores], None), lambda leaves, _: Made(*leaves)
)

Shape = Callable[[torch.Tensor, torch.Tensor], Any]
RESULTS: dict[str, Shape] = {
    "loss before logits": lambda loss, scores: (loss, scores),
    "by names": lambda loss, scores: {"scores": scores, "loss": loss, "count": 3},
    "of transformers": lambda loss, scores: CausalLMOutput(loss=loss, logits=scores),
    "named tuple": lambda loss, scores: Pair(scores, loss),
    "dataclass": lambda loss, scores: Made(loss, scores),
    "nested, a part of the loss": lambda loss, scores: (
        {"loss": loss + 1, "part": loss},
        [scores, scores.detach(), scores.argmax(-1), (scores, scores[..., 0])],
    ),
    "a loss of another name": lambda loss, scores: {"scores": scores, "objective": loss},
}


class Net(nn.Module):
    """A loss of logits, and both in the container that `shape` makes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(V, D), nn.Linear(D, D)
        self.drop, self.head, self.shape = nn.Dropout(0.2), nn.Linear(D, V), shape

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.head(self.drop(self.inner(self.embedding(tokens)).sin()))
        return self.shape(functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores)


def net(shape: Shape = RESULTS["by names"]) -> nn.Module:
    torch.manual_seed(0)
    return Net(shape)


def batch(rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = torch.randint(V, (2, 4, rows), generator=torch.Generator().manual_seed(1))
    return tokens, labels


def solved(model: nn.Module, budget: str | int = "min", **changes: Any) -> nn.Module:
    return rockplan.solve(model, batch(), budget, options=replace(OPTIONS, **changes))


def loss_of(result: Any) -> torch.Tensor:
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    scalars = [t for t in leaves if t.ndim == 0]
    return scalars[0]


def step(module: nn.Module) -> Any:
    torch.manual_seed(2)
    module.zero_grad()
    result = module(*batch())
    loss_of(result).backward()
    return result


@pytest.mark.parametrize("name", RESULTS)
def test_the_loss_is_eagers_without_other_leaves(name: str) -> None:
    eager = net(RESULTS[name])
    fast = solved(copy.deepcopy(eager))
    expected, found = step(eager), step(fast)
    assert_same_state(fast, eager, name)
    ours, theirs = (pytree.tree_flatten(r) for r in (found, expected))
    assert ours[1] == theirs[1] and type(found) is type(expected)
    for one, other in zip(ours[0], theirs[0], strict=True):
        if not isinstance(other, torch.Tensor) or other.ndim == 0:
            assert one == other
        else:
            assert isinstance(one, torch.Tensor) and one.device == other.device
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            with pytest.raises(ResultNotMade, match="only_loss"):
                one.sum()
    whole, given = replace(OPTIONS, only_loss=False), batch()
    held_bytes = rockplan.plan(net(RESULTS[name]), given, "min", options=whole).peak_bytes
    measured = rockplan.peak_live_bytes(lambda: loss_of(fast(*given)).backward()).peak_bytes
    predicted = rockplan.plan_of(fast).peak_bytes
    assert predicted - 16 <= measured <= predicted < held_bytes


PASSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to("cpu", torch.bfloat16, non_blocking=True),
    "type": lambda x: x.type(torch.float64),
    "detach": lambda x: x.detach(),
    "cpu": lambda x: x.cpu(),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "data": lambda x: x.data,
    "deepcopy": copy.deepcopy,
    "convert": accelerate.utils.convert_to_fp32,
    "send": lambda x: accelerate.utils.send_to_device(x, "cpu"),
    "map": lambda x: pytree.tree_map(lambda t: t.detach().float(), {"x": x})["x"],
}

READS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: 1 - x,
    "in place": lambda x: x.mul_(2),
    "index": lambda x: x[0],
    "last of each": lambda x: x[..., :-1, :],
    "comparison": lambda x: x == x,
    "function": lambda x: functional.cross_entropy(x.view(-1, V), torch.zeros(128).long()),
    "argmax": lambda x: x.argmax(-1),
    "item": lambda x: x.item(),
    "truth": bool,
    "number": float,
    "list": lambda x: x.tolist(),
    "iterate": list,
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "written elsewhere": lambda x: torch.zeros(4, 32, V).copy_(x),
    "joined": lambda x: torch.cat([torch.zeros(4, 32, V), x]),
    "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()),
    "address": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "dlpack": torch.from_dlpack,
    "applied": lambda x: x.apply_(lambda v: v),
    "backward": lambda x: x.backward(),
    "hook": lambda x: x.register_hook(print),
    "cast and read": lambda x: x.float().cpu().numpy(),
}


def test_trainers_may_handle_results_but_not_read() -> None:
    unread = step(solved(net()))["scores"]
    for name, passes in PASSES.items():
        passed = passes(unread)
        assert passed.shape == unread.shape, name
        with pytest.raises(ResultNotMade):
            passed.sum()
    assert unread.float().dtype is torch.float32 and unread.bfloat16().dtype is torch.bfloat16
    assert not unread.requires_grad and len(unread) == 4
    says = r"the leaf \['scores'\] of this result .*not made.*only_loss.*torch.no_grad.*released"
    for read in READS.values():
        with pytest.raises(ResultNotMade, match=says):
            read(unread)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(unread)
    assert "not made" in str(unread) and "not made" in f"{unread}"


def test_evaluation_returns_all() -> None:
    eager = net()
    fast = solved(copy.deepcopy(eager))
    with torch.no_grad():
        torch.manual_seed(3)
        expected = eager(*batch())
        torch.manual_seed(3)
        assert torch.equal(fast(*batch())["scores"], expected["scores"])
    fast.eval()
    assert torch.equal(fast(*batch())["scores"], eager.eval()(*batch())["scores"])
    fast.train()
    with pytest.raises(ResultNotMade):
        fast(*batch())["scores"].sum()


class Several(nn.Module):
    """Two losses, none of which is called so."""

    def __init__(self, keys: tuple[str, str]) -> None:
        super().__init__()
        self.one, self.other, self.keys = nn.Linear(4, 4), nn.Linear(4, 4), keys

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.one(x), self.other(x)
        losses = zip(self.keys, (first.sum(), second.sum()), strict=True)
        return {**dict(losses), "x": first}


def test_which_leaf_is_the_loss() -> None:
    x = torch.randn(8, 4)
    with pytest.raises(InvalidInput, match=r"\(0, 1\) .* none is called `loss`") as refused:
        rockplan.solve(Several(("a", "b")), x, "min", options=OPTIONS)
    assert "differentiated=(0,)" in str(refused.value)
    by_option = replace(OPTIONS, differentiated=(0,))
    for keys, options in ((("a", "b"), by_option), (("loss", "b"), OPTIONS)):
        fast = rockplan.solve(Several(keys), x, "min", options=options)
        result = fast(x)
        result[keys[0]].backward()
        assert fast.one.weight.grad is not None and fast.other.weight.grad is None
        loss, other, *_ = fast(x).values()
        with pytest.raises(BackwardError, match="differentiated"):
            (loss + other).backward()
    both = replace(OPTIONS, differentiated=(0, 1))
    fast = rockplan.solve(Several(("a", "b")), x, "min", options=both)
    loss, other, unread = fast(x).values()
    (loss + other).backward()
    assert fast.one.weight.grad is not None and fast.other.weight.grad is not None
    with pytest.raises(ResultNotMade):
        unread.sum()
    with pytest.raises(InvalidInput, match="none in this one.*labels"):
        rockplan.solve(nn.Linear(4, 4), x, "min", options=OPTIONS)
    with pytest.raises(InvalidInput, match="only_loss is 1"):
        Options(only_loss=1)  # type: ignore[arg-type]


def test_files_copies_pickles_and_checks(tmp_path: Path) -> None:
    eager = net()
    fast = solved(copy.deepcopy(eager), check=True)
    assert "equal to eager" in rockplan.plan_of(fast).checked
    step(eager)
    rockplan.save_plan(fast, tmp_path / "plan.json")
    loaded = rockplan.load(net(), batch(), tmp_path / "plan.json", options=OPTIONS)
    with pytest.raises(PlanMismatch):
        rockplan.load(net(), batch(), tmp_path / "plan.json")
    for other in (loaded, copy.copy(fast), copy.deepcopy(fast), fast):
        with pytest.raises(ResultNotMade):
            step(other)["scores"].sum()
        assert_same_state(other, eager, "copy")


def test_the_cache_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(tmp_path))
    made = [
        rockplan.plan(net(), batch(), "min", options=replace(OPTIONS, cache=True, only_loss=one))
        for one in (True, False, True)
    ]
    assert made[0].graph_digest == made[2].graph_digest != made[1].graph_digest
    assert not made[2].trace  # of the cache


def test_with_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    expected = step(net())["loss"]
    sizes = solved(net(), sizes={1: (16, 64)})
    assert len(rockplan.plan_of(sizes).graph.nodes) and len(sizes.plans) == 3
    assert torch.equal(step(sizes)["loss"], expected)
    for rows in (16, 48):
        sizes(*batch(rows))["loss"].backward()
    kernels = step(solved(net(), compile=True, tile=True))
    assert torch.allclose(kernels["loss"], expected)
    with pytest.raises(ResultNotMade):
        kernels["scores"].sum()
    with pytest.raises(InvalidInput, match="only_loss"):
        rockplan.solve_blocks(net(), batch(), "min", options=OPTIONS)


def test_compare_and_the_command_line(tmp_path: Path) -> None:
    rows = rockplan.compare(net(), batch(), "min", rounds=1, options=OPTIONS).rows
    (ours,) = (r for r in rows if r.budget_bytes is not None)
    assert ours.gradients == "equal bit for bit" and ours.peak_bytes
    assert ours.predicted_peak_bytes - 16 <= ours.peak_bytes <= ours.predicted_peak_bytes
    model = tmp_path / "model.py"
    model.write_text(
        "from tests.test_only_loss import batch, net\ndef make(): return net(), batch()"
    )
    asked = ["solve", f"{model}:make", "-b", "100%", "--no-cache", "--time-limit", "1"]
    for flags, holds in (([], True), (["--only-loss", "--check"], False)):
        ended = CliRunner().invoke(app, [*asked, *flags])
        assert ended.exit_code == 0, ended.output
        assert ("held by the caller" in ended.output) is holds
    ended = CliRunner().invoke(app, ["profile", f"{model}:make", "--no-cache", "--json"])
    lower = json.loads(ended.output)["kept_peak_bytes_with"]
    assert [*lower] == ["Options(released=(0,))", "Options(only_loss=True)"]
    kept = rockplan.plan(net(), batch(), "100%", options=OPTIONS).eager_peak_bytes
    assert lower["Options(only_loss=True)"] == kept
    ended = CliRunner().invoke(app, ["profile", f"{model}:make", "--no-cache"])
    assert "with other options less is needed" in ended.output
    ended = CliRunner().invoke(app, ["show", f"{model}:make", "-b", "90%", "--explain"])
    assert "Options(only_loss=True)" in ended.output


@pytest.mark.parametrize("unplanned", [False, True])
def test_an_explanation_names_options_that_need_less(unplanned: bool) -> None:
    """Each figure is a plan's, with the options as they are written."""
    options, given = replace(QUICK, cache=False), batch(96)
    fast = rockplan.solve(net(), given, "80%", options=options)
    assert not rockplan.explain(fast).needed_bytes_with
    explained = rockplan.explain(fast, unplanned=unplanned, sample_input=given, options=options)
    found = explained.needed_bytes_with
    assert {"Options(released=(0,))", "Options(only_loss=True)"} < {*found}
    assert "Options(only_loss=True, tile=True)" in found
    for text, needed in found.items():
        assert f"  {text}" in str(explained) and explained.as_json()["needed_bytes_with"] == found
        changed = replace(options, **eval(f"dict{text.removeprefix('Options')}"))
        plan = rockplan.plan(net(), given, "100%" if unplanned else needed, options=changed)
        if not unplanned:
            assert plan.peak_bytes <= needed
        elif not changed.tile:  # where it is, either way may be taken
            assert plan.eager_peak_bytes == needed
    with pytest.raises(InvalidInput, match="planned module"):
        rockplan.explain(rockplan.plan_of(fast), sample_input=given)


@pytest.mark.parametrize("part", [0.9, 0.5, 0.1])
def test_an_error_names_options_that_are_enough(part: float) -> None:
    """With figures that hold, as far as the first that fits."""
    options = replace(QUICK, cache=False)
    least_bytes = rockplan.plan(net(), batch(256), "min", options=options).peak_bytes
    budget = int(part * least_bytes)
    with pytest.raises(rockplan.InfeasibleBudget) as refused:
        rockplan.solve(net(), batch(256), budget, options=options)
    said = re.findall(r"Options\(((?:[^()]|\([^()]*\))*)\) needs (\d+) bytes", str(refused.value))
    assert said and "compile=True" in str(refused.value)
    for number, (text, needed) in enumerate(said, 1):
        changes = eval(f"dict({text})")
        plan = rockplan.plan(net(), batch(256), int(needed), options=replace(options, **changes))
        assert plan.peak_bytes <= int(needed) <= least_bytes
        assert int(needed) > budget or number == len(said)
    has_all = "only_loss=True, tile=True"
    assert has_all in said[-1][0] if part == 0.1 else int(said[-1][1]) <= budget
    if part == 0.9:  # what the command line prints
        (row,) = plan_each(net(), batch(256), [budget], options=options)
        assert str(row) == str(refused.value)
    quiet = replace(options, on_infeasible="smallest")
    assert rockplan.plan(net(), batch(256), budget, options=quiet).peak_bytes > budget


# Trainers


@functools.cache
def planned_once() -> nn.Module:
    ids = torch.stack([row["input_ids"] for row in Tokens(4)])
    return rockplan.solve(make_gpt2(), {"input_ids": ids, "labels": ids}, "min", options=OPTIONS)


def planned_gpt2() -> nn.Module:
    return copy.deepcopy(planned_once())


def run_trainer(model: nn.Module, folder: Path) -> Any:
    """Two epochs; the metric reads the logits of evaluation."""

    def metric(predicted: Any) -> dict[str, float]:
        return {"mean": float(np.abs(predicted.predictions).mean())}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
        per_device_eval_batch_size=2, eval_strategy="epoch", report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1, seed=3,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Tokens(10), eval_dataset=Tokens(4),
        compute_metrics=metric,
    )  # fmt: skip
    trainer.train()
    kept = ("loss", "eval_loss", "eval_mean")
    return [{k: v for k, v in row.items() if k in kept} for row in trainer.state.log_history]


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    eager, fast = make_gpt2(), planned_gpt2()
    expected = run_trainer(eager, tmp_path / "eager")
    assert run_trainer(fast, tmp_path / "fast") == expected
    assert any("eval_mean" in row for row in expected)
    assert_same_state(fast, eager, "after training")


def test_a_trainer_that_reads_logits_is_told(tmp_path: Path) -> None:
    class Reads(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs).logits.mean()

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = Reads(model=planned_gpt2(), args=arguments, train_dataset=Tokens(4))
    with pytest.raises(ResultNotMade, match="logits"):
        trainer.train()
    smooth = replace(arguments, label_smoothing_factor=0.1)
    trainer = transformers.Trainer(model=planned_gpt2(), args=smooth, train_dataset=Tokens(4))
    with pytest.raises(InvalidInput, match="labels"):
        trainer.train()
