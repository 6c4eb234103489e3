"""Will it fit: bytes of whole steps of training, against the allocator's events."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gc
import itertools
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typer.testing import CliRunner

import rockplan
from rockplan import plan_of
from rockplan.cli.ending import ExitCode
from rockplan.cli.main import app
from rockplan.errors import ForwardRaises, InvalidInput, NothingToDifferentiate
from rockplan.examples import mlp
from rockplan.fitting.changes import Changes, Holding, MemoryChange, peak_of
from rockplan.fitting.gpus import gpu
from rockplan.fitting.optimizer import NAMES, OptimizerSteps, optimizer_steps
from rockplan.fitting.scheduled import first_gradients
from rockplan.fitting.timeline import Passes, passes_of, timeline_of
from rockplan.fitting.training_step import USUAL
from rockplan.fitting.ways import kept_whole, per_block
from rockplan.graph_builder.costs.estimate import Rates
from rockplan.graph_builder.costs.ruler import memory_events, profiled
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.runtime import checkpointing
from rockplan.runtime.checkpointing import repeated_blocks
from rockplan.runtime.planned_state import programs_of
from rockplan.runtime.program import ModuleCall
from rockplan.solving.captured_calls import arguments, captured_call, problems_of
from rockplan.values.interface import Interface
from rockplan.values.plan import Plan
from rockplan.will_it_fit import question
from rockplan.will_it_fit.captured_sizes import (
    OpenCall,
    PricedCall,
    Size,
    SizedCalls,
    open_call,
    priced_call,
    resized,
)
from rockplan.will_it_fit.inference import inference_rows
from rockplan.will_it_fit.what_fits import _with_remedies
from testing import models
from testing.trainers import make_llama, tokens
from testing.training import QUICK, solve_case

SHAPES = ((64, 64), (64,), (128, 64), (10, 128))


class Replacing(torch.optim.Optimizer):
    """Momentum that is a new tensor in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            before = state.get("m")
            state["m"] = parameter.grad.clone() if before is None else 0.9 * before + parameter.grad
            parameter.sub_(state["m"], alpha=0.1)


class Masters(torch.optim.Optimizer):
    """Masters beside `state`, made in `__init__`; the optimizer of them is inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.masters = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.inner = torch.optim.SGD(self.masters, lr=0.1, momentum=0.9)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for master, parameter in zip(self.masters, self.param_groups[0]["params"], strict=True):
            master.grad = parameter.grad
        self.inner.step()
        for master, parameter in zip(self.masters, self.param_groups[0]["params"], strict=True):
            parameter.copy_(master)
            master.grad = None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "state that is replaced": Replacing,
    "masters": Masters,
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "nesterov": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, foreach=True),
    "centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True, foreach=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": lambda p: torch.optim.RAdam(p, foreach=True),
    "rprop": torch.optim.Rprop,
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:]}]
    ),
}


def real_peaks(step: Callable[[], object], steps: int) -> list[tuple[int, int]]:
    """(peak, bytes left) of each step, relative to its start."""
    found = []
    for _ in range(steps):
        gc.collect()
        with profiled() as session:
            step()
        live = [*itertools.accumulate((c for _, c in memory_events(session)), initial=0)]
        found.append((max(live), live[-1]))
    return found


def peaks(changes: tuple[MemoryChange, ...]) -> tuple[int, int]:
    return peak_of(changes).size_bytes, sum(
        -c.size_bytes if c.is_free else c.size_bytes for c in changes
    )


@pytest.mark.parametrize("clip_norm", [False, True])
@pytest.mark.parametrize("name", [*NAMES, *OPTIMIZERS])
def test_an_optimizer_allocates_what_is_said(name: str, clip_norm: bool) -> None:
    parameters = {str(s): torch.nn.Parameter(torch.randn(s)) for s in SHAPES}
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    kind = rockplan.TrainingStep(clip_norm=clip_norm)
    found = optimizer_steps(OPTIMIZERS.get(name, name), parameters, step=kind, metered=True)
    real = factory(name)([*parameters.values()])

    def step() -> None:
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([*parameters.values()], 1.0)
        real.step()

    first, later = real_peaks(step, 2)
    assert (peaks(found.first), peaks(found.later)) == (first, later)
    assert found.state_bytes == first[1] + sum(change.size_bytes for change in found.before)


def test_the_callers_optimizer_is_left_alone() -> None:
    parameters = {
        "w": torch.nn.Parameter(torch.randn(8, 8)),
        "frozen": torch.nn.Parameter(torch.randn(8)),
    }
    optimizer = torch.optim.Adam([*parameters.values()])
    found = optimizer_steps(optimizer, {"w": parameters["w"]})
    assert found.state_bytes == 4 + 2 * 8 * 8 * 4
    assert not optimizer.state and len(optimizer.param_groups[0]["params"]) == 2
    for made in (Masters([*parameters.values()]), torch.optim.Adagrad([*parameters.values()])):
        own = optimizer_steps(made, parameters)
        assert own.state_bytes == optimizer_steps(type(made), parameters).state_bytes
        assert len(own.held) == len(own.before) > 0
    torch.optim.lr_scheduler.LinearLR(optimizer)  # exchanges `step` of the object
    optimizer_steps(optimizer, parameters)
    assert not optimizer.state


def test_what_has_no_sum_is_refused() -> None:
    parameters = {"w": torch.nn.Parameter(torch.empty(8, 8, device="meta"))}
    for optimizer, said in [
        ("adan", "there are adafactor"),
        (lambda p: 1 / 0, "ZeroDivisionError"),
        (lambda p: 3, "makes a int"),
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "does not run over fake tensors"),
    ]:
        with pytest.raises(InvalidInput, match=said):
            optimizer_steps(optimizer, parameters)
    assert optimizer_steps(torch.optim.AdamW, parameters).state_bytes == 4 + 2 * 8 * 8 * 4


def test_foreach_is_what_cuda_gets() -> None:
    """It holds temporaries of all parameters at once, on CUDA by default."""
    on_cpu = {str(i): torch.nn.Parameter(torch.empty(64, 64)) for i in range(8)}
    each = peak_of(optimizer_steps("adamw", on_cpu).later)
    together = peak_of(optimizer_steps(lambda p: torch.optim.AdamW(p, foreach=True), on_cpu).later)
    assert together.size_bytes == 8 * 64 * 64 * 4 > each.size_bytes
    assert together.owners.keys() == {Holding.OPTIMIZER_TEMPORARIES}


CASES = {
    "gpt2": lambda: models.gpt2(layers=2, width=32, batch=2, length=16, attention_dropout=0.0),
    "llama": lambda: models.llama(layers=2, width=32, batch=2, length=16),
    "vit": lambda: models.vit(layers=2, width=32, batch=2),
}


@pytest.mark.parametrize("name", [*CASES])
def test_steps_of_a_plan_need_what_is_said(name: str) -> None:
    """Gradients that are made anew or added to, for one step and two, clipped, unscaled; averages
    of parameters. The scalars of the caller's loss, which these models compute themselves, are
    counted and not there."""
    torch.manual_seed(0)
    case = CASES[name]()
    fast = solve_case(case, "70%", options=QUICK)
    case.step(fast)  # what operators keep from their first run is no part of a step
    program = plan_of(fast), programs_of(fast)[0].interface
    for step in STEPS:
        said = step_peaks(case, *program, "adamw", step)
        fast.zero_grad()
        own = training(case, fast, "adamw", step)
        real = [peak for peak, _ in real_peaks(own, 2)]
        scaled_loss_bytes = 2 * 4 if step.grad_scaler else 0  # and its gradient
        more = [b - a for a, b in zip(said, real, strict=True)]
        assert all(0 <= m <= scaled_loss_bytes for m in more), (step, said, real)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
@pytest.mark.parametrize("name", [*CASES])
def test_optimizers_stepping_in_backward_need_what_is_said(name: str, optimizer: str) -> None:
    """Of each parameter as its gradient comes, which is given back then; which of several gradients
    that come at once is the first, autograd decides: those that wait count."""
    torch.manual_seed(0)
    case = CASES[name]()
    case.step()
    case.model.zero_grad()
    step = rockplan.TrainingStep(in_backward=True)
    hooks = in_backward(case, optimizer)
    fast = solve_case(case, "70%", options=QUICK)
    program = plan_of(fast), programs_of(fast)[0].interface
    case.step(fast)
    said = step_peaks(case, *program, optimizer, step)
    hooks()
    real = [peak for peak, _ in real_peaks(functools.partial(case.step, fast), 2)]
    assert all(b <= a <= 1.1 * b for a, b in zip(said, real, strict=True)), (said, real)


class _Written(torch.nn.Module):
    """A block whose variables hold what its gradients do not need."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        shifted = hidden + 1
        doubled = shifted * 2
        return x + self.down((doubled - 3).sigmoid())


def _written() -> models.Case:
    blocks = torch.nn.Sequential(*(_Written(64) for _ in range(3)))
    return models.Case(
        "written out", blocks, (torch.randn(2048, 64),), {}, lambda y: y.square().mean()
    )


WAYS = {
    "written out": _written,
    "gpt2": lambda: models.gpt2(3, width=64, batch=4, attention_dropout=0.0),
    "llama": lambda: models.llama(3, width=64, batch=4),
    "bert": lambda: models.bert(3, width=64, batch=4),
    "vit": lambda: models.vit(3, width=64, batch=16),
    "resnet18": lambda: models.resnet18(16, 8, 32),
}


@pytest.mark.parametrize("name", [*WAYS])
def test_schedules_need_what_they_stand_for(name: str) -> None:
    """Eager's own steps, kept whole and with PyTorch's checkpointing: never more than is said."""
    torch.manual_seed(0)
    case = WAYS[name]()
    call = ModuleCall(case.model, *arguments(case.model, case.args, case.kwargs))
    options = rockplan.Options()
    graph = problems_of(captured_call(call, options), options)[0].graph
    blocks = repeated_blocks(case.model)
    # PyTorch saves the state of the CPU's generator for each block, here in the same memory.
    states_bytes = len(blocks) * torch.get_rng_state().nbytes
    for module, said in (
        (case.model, simulate(*kept_whole(graph)).peak_bytes),
        (
            checkpointing.per_block(case.model),
            simulate(*per_block(graph, blocks)).peak_bytes + states_bytes,
        ),
    ):
        found = rockplan.peak_live_bytes(functools.partial(case.step, module)).peak_bytes
        assert 0.999 <= said / found <= 1.02, (said, found)


STEPS = (
    *(
        rockplan.TrainingStep(set_to_none=set_to_none, accumulate=accumulate)
        for set_to_none, accumulate in itertools.product((True, False), (1, 2))
    ),
    rockplan.TrainingStep(clip_norm=True),
    rockplan.TrainingStep(grad_scaler=True),
    rockplan.TrainingStep(grad_scaler=True, clip_norm=True, accumulate=2, set_to_none=False),
    rockplan.TrainingStep(average=True),
)


def test_eager_steps_in_backward_as_its_schedule_says() -> None:
    torch.manual_seed(0)
    case = CASES["llama"]()
    case.step()
    case.model.zero_grad()
    call = ModuleCall(case.model, *arguments(case.model, case.args, case.kwargs))
    source = captured_call(call, rockplan.Options())
    graph = problems_of(source, rockplan.Options())[0].graph
    interface, named = source.lowered.interface, dict(case.model.named_parameters())
    step = rockplan.TrainingStep(in_backward=True)
    own = optimizer_steps("adamw", named, step=step, metered=True)
    passes = passes_of(*kept_whole(graph), interface, own)
    said = [peak_of(changes).size_bytes for changes in timeline_of({}, passes, own).steps]
    in_backward(case, "adamw")
    real = [peak for peak, _ in real_peaks(case.step, 2)]
    assert all(0.999 <= a / b <= 1.1 for a, b in zip(said, real, strict=True)), (said, real)


def test_what_a_step_does_is_in_the_sum() -> None:
    """On a device of which the optimizer and gradients take most."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(8)])
        x = torch.empty(2, 512)
    size_bytes = sum(p.nbytes for p in model.parameters())

    def held(**how: Any) -> dict[str, int]:
        step = rockplan.TrainingStep(**how)
        found = rockplan.fit(model, x, "1GiB", step=step, options=QUICK)
        return found.breakdown("kept whole")

    plain = held()
    assert plain["gradients"] == plain["optimizer temporaries"] == size_bytes
    assert held(average=True)["averages"] == size_bytes
    scaled = held(grad_scaler=True)
    # Its scale and how often that held; whether gradients of a step are finite.
    assert scaled["optimizer"] == plain["optimizer"] + 2 * 4
    assert scaled["optimizer temporaries"] == plain["optimizer temporaries"] + 4
    inside = held(in_backward=True)
    assert inside["optimizer"] <= plain["optimizer"]
    assert inside["gradients"] == inside["optimizer temporaries"] == 512 * 512 * 4
    for how, said in [
        ({"accumulate": 0}, "at least 1"),
        ({"clip_norm": 1.0}, "choose False or True"),
        ({"in_backward": True, "accumulate": 2, "clip_norm": True}, "accumulate, clip_norm"),
    ]:
        with pytest.raises(InvalidInput, match=said):
            rockplan.TrainingStep(**how)


def factory(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    kind, arguments = NAMES[name]
    return functools.partial(getattr(torch.optim, kind), **arguments)


def training(
    case: models.Case, module: torch.nn.Module, name: str, step: rockplan.TrainingStep
) -> Callable[[], None]:
    """A step as a loop writes it."""
    optimizer = factory(name)(module.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=step.grad_scaler)
    average = AveragedModel(case.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    scaled = dataclasses.replace(case, loss=lambda result: scaler.scale(case.loss(result)))

    def run() -> None:
        optimizer.zero_grad(step.set_to_none)
        for _ in range(step.accumulate):
            scaled.step(module)
        if step.clip_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step.average:
            average.update_parameters(case.model)

    return run


def in_backward(case: models.Case, name: str) -> Callable[[], None]:
    """An optimizer for each parameter; those returned by the call have no state."""
    optimizers: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def begin() -> None:
        optimizers.update({p: factory(name)([p]) for p in case.model.parameters()})

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    begin()
    for parameter in case.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return begin


def step_peaks(
    case: models.Case, plan: Plan, interface: Interface, optimizer: str, step: rockplan.TrainingStep
) -> list[int]:
    """Of two steps, each relative to its start, without the caller's scalars."""
    named = dict(case.model.named_parameters())
    used = {n: named[n] for n in first_gradients(plan.graph, interface)}
    own = optimizer_steps(optimizer, used, step=step, metered=True)
    passes = passes_of(plan.graph, plan.schedule, interface, own)
    how = {"accumulate": step.accumulate, "set_to_none": step.set_to_none}
    return [
        peak_of(c for c in changes if c.owner is not Holding.CALLER).size_bytes
        for changes in timeline_of({}, passes, own, **how).steps
    ]


def test_a_peak_says_who_has_it() -> None:
    """What comes when other things are gone is not counted beside them."""
    activation = MemoryChange("a", 100, Holding.ACTIVATIONS)
    gradient = MemoryChange(("gradient", "w"), 10, Holding.GRADIENTS)
    state, inside = (
        MemoryChange("s", 20, Holding.OPTIMIZER),
        MemoryChange("t", 60, Holding.OPTIMIZER_TEMPORARIES),
    )
    passes = Passes((activation, activation.freed, gradient), (activation, activation.freed))
    optimizer = OptimizerSteps("own", 20, (state, inside, inside.freed), (inside, inside.freed))
    steps = timeline_of({Holding.PARAMETERS: (10,)}, passes, optimizer)
    assert steps.peak.size_bytes == 10 + 20 + 100
    held = {owner: size for owner, size in steps.peak.owners.items() if size}
    assert held == {Holding.PARAMETERS: 10, Holding.OPTIMIZER: 20, Holding.ACTIVATIONS: 100}
    assert peak_of(steps.steps[0], steps.resident_bytes).size_bytes == 10 + 100
    kept = timeline_of({Holding.PARAMETERS: (10,)}, passes, optimizer, set_to_none=False)
    assert kept.peak.size_bytes == 10 + 20 + 10 + 100


class Rows(torch.nn.Module):
    """Products beside each other, whose weights take 7 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(1024, 1792, bias=False) for _ in range(40)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


def test_parameters_are_asked_for_one_by_one() -> None:
    """Two of them have a segment of 20 MiB: what fits as one block does not fit so."""
    with torch.device("meta"):
        model, x = Rows(), torch.empty(2, 1024)
    held_bytes = sum(p.nbytes for p in model.parameters())
    found = rockplan.fit(model, x, "4GiB", optimizer=None, options=QUICK).rows[0]
    segments_bytes = 20 * (20 << 20)
    allocated = Changes(()).usage([7 << 20] * 40)
    assert allocated.reserved_peak_bytes == segments_bytes > 1.42 * held_bytes
    # With as many gradients, in segments of the same size.
    assert found.reserved_bytes >= 2 * segments_bytes


def test_batches_fit_as_the_allocator_finds_memory() -> None:
    """On a device for which one more sample is too much; the model has no memory."""
    with torch.device("meta"):
        model, (x,), _ = mlp()
    found = rockplan.fit(model, x, "600MiB", sizes={0: (64, 100_000)}, options=QUICK)
    kept, checkpointed, planned = found.rows
    assert [row.way for row in found.rows] == ["kept whole", "checkpoint per block", "rockplan"]
    assert 64 < kept.batch < checkpointed.batch and kept.batch < planned.batch
    assert kept.overhead == 0 < checkpointed.overhead
    assert found.largest().batch == max(checkpointed.batch, planned.batch)
    usable = found.usable_bytes
    for row in found.rows:
        assert row.allocated_bytes <= row.reserved_bytes <= usable
        assert sum(size_bytes for _, size_bytes in row.owners) == row.reserved_bytes
        context_bytes = found.device_bytes - usable
        assert found.breakdown(row.way) == {**dict(row.owners), "context": context_bytes}
    assert "by a model: reserved" in found.notes[0]
    more = {0: (kept.batch + 1, kept.batch + 1)}
    too_many = rockplan.fit(model, x, "600MiB", sizes=more, options=QUICK)
    assert not too_many.rows[0].batch and f"asked for, {kept.batch + 1}:" in too_many.notes[-1]
    assert json.loads(found.to_json())["rows"][0]["batch"] == kept.batch
    assert dict(kept.owners)["parameters"] == sum(p.nbytes for p in model.parameters())
    assert x.is_meta and all(p.is_meta for p in model.parameters())


class Lonely(torch.nn.Module):
    """A single sample goes another way, with more operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)).tanh().sigmoid() if len(x) == 1 else torch.relu(layer(x))
        return x.square().mean()


def test_a_single_odd_sample_has_its_own_plan() -> None:
    """The only batch that fits; a result of one sample takes 24 MiB."""
    with torch.device("meta"):
        model, x = Lonely(), torch.empty(1, 24_576, 256)
    found = rockplan.fit(model, x, "700MiB", optimizer="sgd", sizes={0: (1, 2)}, options=QUICK)
    planned = found.rows[-1]
    assert planned.way == "rockplan" and planned.batch == 1
    assert (
        planned.allocated_bytes
        < rockplan.fit(model, x, "8GiB", optimizer="sgd", options=QUICK).rows[0].allocated_bytes
    )


class Scaled(torch.nn.Module):
    """Without a product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).exp().sum()


def test_lengths_beside_it_decide_no_row() -> None:
    case = models.llama(layers=2, width=64, heads=4, vocabulary=512, batch=2, length=32)
    options = Options(cache=False, only_loss=True, time_limit_s=100)
    asked: Any = {"sample_kwargs": case.kwargs, "options": options}
    both, alone = (
        rockplan.fit(case.model, case.args, "600MiB", sizes={0: (1, 16), 1: (n, 128)}, **asked)
        for n in (64, 128)
    )
    assert alone.rows == both.rows[3:]


class Seeing(torch.nn.Module):
    """Reads words beside pictures, whose dimension 1 is of colours."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.seen = torch.nn.Embedding(64, 32), torch.nn.Linear(8, 32)

    def forward(self, pictures: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        read = self.words(ids).exp().square()
        return (read + self.seen(pictures).mean((1, 2))[:, None]).square().mean()


SEEING = """
import torch
from tests.test_fit import Seeing

def make():
    return Seeing(), (torch.zeros(2, 3, 8, 8), torch.zeros(2, 16, dtype=torch.long))
"""


def test_lengths_of_some_tensors_are_named(tmp_path: Path) -> None:
    """As the refusal says, in both languages."""
    (tmp_path / "model.py").write_text(SEEING)
    flags = ["fit", f"{tmp_path / 'model.py'}:make", "--gpu", "8GiB", "--json", "--length"]
    refused = CliRunner().invoke(app, [*flags, "16:64"])
    said = " ".join(refused.stderr.split())
    assert "dimension 1 is 3 in 'pictures', 16 in 'ids': name the tensors" in said
    assert "sizes={'ids': {1: (16, 64)}} (--length ids=16:64)" in said
    named = CliRunner().invoke(app, [*flags, "ids=16:64"])
    rows = rockplan.Fit.from_json(named.stdout).rows
    assert {row.length for row in rows} == {16, 32, 64}
    sample = torch.zeros(2, 3, 8, 8), torch.zeros(2, 16, dtype=torch.long)
    sizes = {"ids": {1: (16, 64)}}
    assert rockplan.fit(Seeing(), sample, "8GiB", sizes=sizes, options=QUICK).rows == rows
    wrong = CliRunner().invoke(app, [*flags, "idx=16:64"])
    assert "pictures, ids" in wrong.stderr


def test_heads_in_parts_fit_more() -> None:
    """Logits of a large vocabulary are most of the memory; a model without a head has no such
    row."""
    case = models.llama(layers=1, width=16, batch=2, length=32, vocabulary=5000)
    options = replace(QUICK, only_loss=True, tile=True)
    sizes = {0: (2, 512)}
    found = rockplan.fit(case.model, dict(case.kwargs), "700MiB", sizes=sizes, options=options)
    assert [row.way for row in found.rows][-2:] == ["rockplan", "rockplan, head in 32 parts"]
    whole, in_parts = found.rows[-2:]
    assert 2 < whole.batch < in_parts.batch
    assert whole.allocated_bytes < found.usable_bytes >= in_parts.reserved_bytes
    x = torch.zeros(2, 8, 64)
    rows = rockplan.fit(Scaled(), x, "700MiB", options=options).rows
    assert [row.way for row in rows] == ["kept whole", "rockplan"]


def test_remedies_are_options_that_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the row that its options give; none that gains nothing, or that cannot be had; none
    is tried where the largest batch fits."""
    model, args, _ = mlp()
    plain = rockplan.fit(model, args, "640MiB", sizes={0: (256, 65536)}, options=QUICK)
    row = plain.rows[-1]
    batches = {"only_loss": row.batch, "tile": row.batch + 1, "host": 65536}
    tried = []

    def answer(options: rockplan.Options = QUICK) -> rockplan.Fit:
        changed = [name for name in batches if getattr(options, name)]
        tried.append(changed)
        if options.compile:
            raise rockplan.InvalidInput("which kernels the compiler makes is not known")
        batch = max([row.batch, *map(batches.__getitem__, changed)])
        made = replace(row, batch=batch, is_most=batch == 65536)
        return replace(plain, rows=(*plain.rows[:-1], made))

    found = _with_remedies(answer, QUICK)
    assert found.rows[: len(plain.rows)] == plain.rows
    assert {row.way: row.batch for row in found.rows[len(plain.rows) :]} == {
        "rockplan, tile=True": row.batch + 1,
        "rockplan, only_loss=True, tile=True": row.batch + 1,
        "rockplan, host='64GiB'": 65536,
    }
    tried.clear()
    assert len(_with_remedies(answer, replace(QUICK, only_loss=True)).rows) == len(plain.rows) + 2
    compiled = ["only_loss"]
    assert tried == [[], ["only_loss", "tile"], compiled, ["only_loss", "host"]]
    largest = {0: (256, 512)}
    found = rockplan.fit(model, args, "640MiB", sizes=largest, remedies=True, options=QUICK)
    assert len(found.rows) == 3


def test_inference_needs_what_a_forward_holds() -> None:
    """Beside the model and its inputs, measured on CPU; the cache has keys and values of each."""
    model, ids = make_llama(), tokens()
    asked = question.FitQuestion(
        model, model, ((), {"input_ids": ids, "labels": ids}), gpu("cpu"), None, USUAL, QUICK
    )
    calls = SizedCalls(asked.whole, 2, 8, [16])
    rows = {row.way: row for row in inference_rows(asked, calls, lambda timeline: 8)}
    assert model.training and rows["evaluation"].is_most
    model.eval()
    ids = torch.zeros(8, 16, dtype=torch.long)
    own: dict[str, dict[str, Any]] = {
        "evaluation": {"labels": ids},
        "generation": {"use_cache": True, "logits_to_keep": 1},
    }
    there = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + ids.nbytes
    for way, more in own.items():
        step = torch.no_grad()(lambda given=more: model(ids, **given))
        measured = rockplan.peak_live_bytes(step).peak_bytes
        assert rows[way].allocated_bytes - there == measured, way
    layers, heads, width = 2, 2, 8
    assert rows["generation"].cache_bytes == 2 * layers * heads * width * 4
    found = rockplan.Fit("", 0, 0, "none", (), inference=(*rows.values(),))
    assert rockplan.Fit.from_json(found.to_json()) == found
    assert "at least 8" in str(found)
    with pytest.raises(InvalidInput, match="one process"):
        rockplan.fit(model, {"input_ids": ids}, "t4", gpus=2, inference=True)


def test_the_optimizer_steps_as_on_a_gpu() -> None:
    """With temporaries of all parameters at once, whatever device the model is on; an optimizer of
    the caller's may be of parameters without memory."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])
        x = torch.empty(2, 512)
    size_bytes = sum(p.nbytes for p in model.parameters())
    of_model = torch.optim.AdamW(model.parameters())
    for optimizer in ("adamw", of_model):
        found = rockplan.fit(model, x, "1GiB", optimizer=optimizer, options=QUICK)
        held = found.breakdown("kept whole")
        assert held["optimizer temporaries"] == held["gradients"] == size_bytes
        assert held["optimizer"] == 2 * size_bytes + 4 * 4


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW, None])
def test_frozen_models_have_gradients_of_inputs_only(optimizer: Any) -> None:
    """There is nothing to step. Without them nothing is asked; the remedy is followed."""
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)], torch.nn.GELU())
    model.requires_grad_(requires_grad=False)
    x = torch.randn(64, 256)
    asked: Any = {"optimizer": optimizer, "options": QUICK}
    with pytest.raises(NothingToDifferentiate, match="set requires_grad on the sample input"):
        rockplan.fit(model, x, "1GiB", **asked)
    found = rockplan.fit(model, x.requires_grad_(), "1GiB", **asked)
    assert found.optimizer == "none" and all(row.batch == 64 for row in found.rows)
    for row in found.rows:
        held = found.breakdown(row.way)
        assert held["activations"] > 0
        assert not held.keys() & {"optimizer", "optimizer temporaries"}
        # That of the input is the caller's, and no parameter has one.
        assert held.get("gradients", 0) in (0, x.nbytes)
    with pytest.raises(InvalidInput, match="there are adafactor"):
        rockplan.fit(model, x, "1GiB", optimizer="adan", options=QUICK)


def sized_calls(
    model: torch.nn.Module, arguments: Any, *sizes: Any
) -> tuple[SizedCalls, Callable[[Size], PricedCall]]:
    def resized_to(size: Size) -> Any:
        return resized(model, arguments, {d: n for d, n in enumerate(size) if n is not None})

    def capture(size: Size) -> PricedCall:
        return priced_call(model, resized_to(size), rockplan.Options(), RATES)

    def record(size: Size, free: Sequence[int]) -> OpenCall:
        return open_call(size, model, resized_to(size), free, rockplan.Options(), RATES)

    return SizedCalls(capture, *sizes, record), capture


RATES = Rates(1e12, 1e13)
LENGTHS = (8, 12, 16, 32, 64, 128)


def padded(case: models.Case) -> models.Case:
    """Its mask is made from values, of the square of the length."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[:, :2] = 0
    return replace(case, kwargs={**case.kwargs, "attention_mask": mask})


def of_lengths(case: models.Case) -> tuple[models.Case, Any]:
    return case, LENGTHS


RECORDED: dict[str, Callable[[], tuple[models.Case, Any]]] = {
    "padded": lambda: of_lengths(padded(models.llama(layers=1, width=32, batch=2, length=16))),
    **{name: lambda made=made: (made(), (None,)) for name, made in CASES.items()},
    "flash": lambda: of_lengths(models.llama(layers=1, width=32, batch=2, length=16)),
    "written out": lambda: of_lengths(
        models.gpt2(layers=1, width=32, batch=2, length=128, attention_dropout=0.1)
    ),
}


@pytest.mark.parametrize("name", [*RECORDED])
def test_sizes_of_one_recording_are_those_of_captures(name: str) -> None:
    """Two captures of it: a small one, and the largest."""
    case, lengths = RECORDED[name]()
    calls, capture = sized_calls(case.model, (case.args, case.kwargs), 2, 64, lengths)
    for size in ((2, lengths[0]), (7, lengths[-2:][0]), (33, lengths[len(lengths) // 2])):
        call, captured = calls.at(*size), capture(size)
        assert call.numbers == captured.numbers
        assert call.graph.nodes == tuple(
            replace(n, calls=o.calls, recalls=o.recalls)
            for n, o in zip(captured.graph.nodes, call.graph.nodes, strict=True)
        )
    assert len(calls.captured) == 2 and (64, lengths[-1]) in calls.captured
    opened = calls.opened((7, lengths[-1]))
    assert opened is not None
    step = question.FitQuestion(
        case.model, case.model, (case.args, case.kwargs), gpu("h100-80"), "sgd", USUAL, QUICK
    )
    for size in ((2, lengths[0]), (33, lengths[-1])):
        said = step.timeline(opened.call, *kept_whole(opened.call.graph), is_eager=True)
        captured = capture(size)
        found = step.timeline(captured, *kept_whole(captured.graph), is_eager=True)
        both = (said.at_sizes(opened.numbers(size)).changes, found.changes)
        sizes = ([c[1:] for c in changes if c.size_bytes] for changes in both)
        assert next(sizes) == next(sizes)


class Bounded(torch.nn.Module):
    """Stores no more than so many of a sequence, of a batch, or of all together; goes through a
    sequence in pieces."""

    def __init__(
        self, length: int = 10**6, batch: int = 10**6, together: int = 10**9, piece: int = 0
    ) -> None:
        super().__init__()
        self.bounds = batch, length
        self.together, self.piece = together, piece
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = self.bounds
        if x.shape[1] > length:
            x = x[:, -length:]
        if x.shape[0] > batch:
            x = x[:batch]
        if self.piece:
            x = torch.cat([self.inner(part).exp() for part in x.split(self.piece, 1)], 1)
        stored = self.inner(x).exp().square()
        return stored.flatten(0, 1)[: self.together].exp().square().sum()


@pytest.mark.parametrize(
    ("bounds", "recorded"),
    [({"length": 60}, 2), ({"batch": 9}, 2), ({"together": 1000}, 2), ({"piece": 16}, 3)],
)
def test_sizes_that_follow_no_expression_are_right(bounds: dict[str, int], recorded: int) -> None:
    """Some are of other recordings, such as one for each length; others are captured."""
    arguments = ((torch.zeros(2, 8, 8),), {})
    calls, capture = sized_calls(Bounded(**bounds), arguments, 2, 16, (8, 16, 32, 64, 128))
    for size in itertools.product((4, 12), (8, 32, 128)):
        assert calls.at(*size).numbers == capture(size).numbers, size
    assert len(calls.recorded) == recorded


def test_what_does_not_fit_says_what_is_known() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU())
        x = torch.empty(8, 4096)
    with pytest.raises(InvalidInput, match="fit in no less than 11 shards"):
        rockplan.fit(model, x, "600MiB")
    for given, said in [
        (("h1000",), "h100-80"),
        (("t4", {"sizes": {0: (8, 4)}}), "smallest size comes first"),
        (("t4", {"sizes": {2: (1, 4)}}), "pass {0: "),
        (("t4", {"optimizer": "adan"}), "adamw"),
    ]:
        device, *more = given
        with pytest.raises(InvalidInput, match=said):
            rockplan.fit(model, x, device, **(more[0] if more else {}))


class Tabled(torch.nn.Module):
    """Keeps a table of the longest sequence so far."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(8.0, device=x.device)[:, None].cos()
        return (self.layer(x) * self.table).relu().sum()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_first_calls_that_keep_tables_are_the_users(device: str) -> None:
    """Nothing runs at the sizes that are asked for; once it was called the model has an answer."""
    model, x = Tabled().to(device), torch.empty(2, 8, 64, device=device)
    with pytest.raises(rockplan.UnsupportedModel, match="run the module once on the sample"):
        rockplan.fit(model, x, "8GiB", options=QUICK)
    assert model.table is None
    model(x)
    assert rockplan.fit(model, x, "8GiB", options=QUICK).rows[0].batch == 2


class Placed(torch.nn.Module):
    """Has 16 places in a sequence. How they are looked up is the kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.places = torch.nn.Embedding(16, 8)
        self.register_buffer("numbers", torch.arange(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table, length = self.places.weight, x.shape[1]
        at = torch.arange(length, device=x.device)
        if self.kind == "cut off":
            places = table[:length]
        elif self.kind == "embedding":
            places = self.places(at.unsqueeze(0))
        elif self.kind == "buffer":
            places = self.places(self.get_buffer("numbers")[:length])
        elif self.kind == "index":
            places = table[at + 1 - 1]
        elif self.kind == "index_select":
            places = table.index_select(0, at)
        else:
            places = table.gather(0, at[:, None].expand(length, 8))
        return (x + places).exp().sum()


PLACED = ("cut off", "embedding", "buffer", "index", "index_select", "gather")


@pytest.mark.parametrize("kind", PLACED)
def test_a_length_beyond_the_model_is_refused(kind: str) -> None:
    model, x = Placed(kind), torch.zeros(2, 16, 8)
    found = rockplan.fit(model, x, "t4", sizes={1: (8, 16)}, options=QUICK)
    assert all(row.batch for row in found.rows)
    with pytest.raises(ForwardRaises, match=r"batch 2 of length 32: .*optimizer take"):
        rockplan.fit(model, x, "t4", sizes={1: (16, 32)}, options=QUICK)


def test_positions_of_a_decoder_end_where_they_end() -> None:
    case = models.gpt2(layers=1, width=32, batch=2, length=32, attention_dropout=0.0)
    with pytest.raises(ForwardRaises, match=r"of length 64: .*wpe.*index 63 .*among 32"):
        rockplan.fit(
            case.model, dict(case.kwargs), "t4", sizes={0: (2, 8), 1: (8, 64)}, options=QUICK
        )


class _Warns(torch.nn.Module):
    """Warns in each forward, once by a function cache and once by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _warn_once("by a cache")
        logging.getLogger("a library").warning("by itself")
        return self.linear(x)


@functools.cache
def _warn_once(text: str) -> None:
    logging.getLogger("a library").warning(text)


def test_what_a_forward_logs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    handle = logging.Logger.handle
    rockplan.fit(_Warns(), torch.randn(2, 4), "t4", sizes={0: (1, 64)}, options=QUICK)
    said = [r.getMessage() for r in caplog.records if r.name == "a library"]
    assert sorted(said) == ["by a cache", "by itself"]
    assert logging.Logger.handle is handle


def test_the_page_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs" / "fit.md"
    ((code, shown),) = re.findall(
        r"^```python fit\n(.*?)^```\n\n```text\n(.*?)^```",
        page.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    exec(compile(code, "fit.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_a_batch_that_does_not_fit_is_accumulated() -> None:
    """In passes that fit where gradients are there already."""
    model, args, _ = mlp()
    asked = {0: (256, 65536)}
    row = rockplan.fit(model, args, "640MiB", sizes=asked, options=QUICK).rows[0]
    assert row.passes is not None and f"(accumulate {row.passes[0]} x {row.passes[1]})" in str(
        row.samples
    )
    passes, samples = row.passes
    assert passes * samples >= 65536 > (passes - 1) * samples
    step = rockplan.TrainingStep(accumulate=passes)
    each = rockplan.fit(model, args, "640MiB", sizes=asked, step=step, options=QUICK).rows[0]
    assert samples <= each.batch <= row.batch


def test_the_first_device_with_the_largest_batch_wins() -> None:
    model, args, _ = mlp()
    devices, asked = ["500MiB", "2GiB", "80GiB"], {0: (256, 65536)}
    found = rockplan.fit(model, args, devices, sizes=asked, options=QUICK)
    assert found.device == "2GiB"


def test_the_page_draws_bytes_over_batch_by_length(tmp_path: Path) -> None:
    """A line for each way with its mark, and nothing that runs or is loaded."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "fit.html"
    words = ["fit", "rockplan.examples:transformer", "--gpu", "600MiB", "--batch", "1:64"]
    result = CliRunner().invoke(
        app, [*words, "--length", "16:32", "--html", str(file), "--time-limit", "0.2", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    page = file.read_text()
    assert len(rows) == 6 and all(row["way"] in page for row in rows)
    drawn = [base64.b64decode(data) for data in re.findall('base64,([^"]*)"', page)]
    for length, figure in zip((16, 32), map(ElementTree.fromstring, drawn), strict=True):
        texts = {text.text for text in figure.iter("{http://www.w3.org/2000/svg}text")}
        assert {row["way"] for row in rows} | {f"batch, at length {length}"} <= texts
    assert "<script" not in page and "http" not in page


LAYERS = """
import torch


def make():
    with torch.device("meta"):
        layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
        return torch.nn.Sequential(*layers), torch.empty(2, 512)
"""


def test_the_command_says_what_the_function_does(tmp_path: Path) -> None:
    """Each of its options where it matters: what comes with the step where gradients and state take
    most, what holds gradients while a pass runs where that takes most."""
    file = tmp_path / "layers.py"
    file.write_text(LAYERS)
    scope: dict[str, Any] = {}
    exec(LAYERS, scope)
    words = ["fit", f"{file}:make", "--gpu", "1GiB", "--json", "--time-limit", "1"]

    def row(batch: int, flags: list[str], **how: Any) -> object:
        result = CliRunner().invoke(app, [*words, "--batch", str(batch), *flags])
        assert result.exit_code == 0, result.output
        step = rockplan.TrainingStep(**how)
        own = replace(QUICK, time_limit_s=1.0)
        sizes = {0: (batch, batch)}
        asked = rockplan.fit(*scope["make"](), "1GiB", sizes=sizes, step=step, options=own)
        assert rockplan.Fit.from_json(result.stdout).rows == asked.rows
        return asked.rows[0].owners

    plain = {batch: row(batch, []) for batch in (2, 4096)}
    for batch, flag, how in (
        (4096, ["--accumulate", "2"], {"accumulate": 2}),
        (4096, ["--keep-gradients"], {"set_to_none": False}),
        (2, ["--clip-norm"], {"clip_norm": True}),
        (2, ["--grad-scaler"], {"grad_scaler": True}),
        (2, ["--average"], {"average": True}),
        (2, ["--in-backward"], {"in_backward": True}),
    ):
        assert row(batch, flag, **how) != plain[batch], flag
    listed = CliRunner().invoke(app, ["fit", "--gpu", "list"])
    assert "h100-80" in listed.stdout
    assert CliRunner().invoke(app, ["fit"]).stdout == listed.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "h1000"], "h100-80"),
        ([], "say --gpu NAME; --gpu list shows them"),
        (["--batch", "1:8"], "say --gpu NAME"),
        (["--gpu", "t4", "--batch", "8:1"], "--batch 8:1: write LEAST:MOST, such as --batch 1:64"),
        (["--gpu", "t4", "--batch", "0"], "--batch 0: write LEAST:MOST"),
        (["--gpu", "t4", "--length", "1:x"], "--length 1:x: write LEAST:MOST"),
        (["--gpu", "t4", "--shard", "ddp"], "--shard ddp says how several"),
        (["--gpu", "t4", "--shard", "fsdp2", "--gpus", "1"], "write --gpus N, too"),
        (["--gpu", "t4", "--gpus", "0"], "number of at least 1"),
    ],
)
def test_the_command_refuses_in_its_own_words(flags: list[str], said: str) -> None:
    refused = CliRunner().invoke(app, ["fit", "rockplan.examples:mlp", *flags])
    assert refused.exit_code == ExitCode.USAGE
    assert said in " ".join(refused.stderr.split())


class _Loss(torch.nn.Module):
    """Ends in a formula of autograd that has several operators."""

    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hidden, self.loss = torch.nn.Linear(64, 64), loss
        # Two parameters with one gradient, and one that no optimizer below has.
        self.one, self.two = (torch.nn.Parameter(torch.zeros(4096, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.hidden(x) + (self.one + self.two))


def _eager_bytes(model: torch.nn.Module, x: torch.Tensor, make: Any) -> int:
    """The peak of three eager steps, with what is there before."""
    fixed_bytes = sum(t.nbytes for t in (*model.parameters(), x))
    gc.collect()
    with profiled() as session:
        optimizer = make([*model.parameters()])
        for _ in range(3):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    changes = (size_bytes for _, size_bytes in memory_events(session))
    return fixed_bytes + max(itertools.accumulate(changes, initial=0))


class _Cubed(torch.autograd.Function):
    """Holds variables of its own while it runs, and while its backward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        square = x * x
        return square.sin() * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        square = x * x
        cosine = square.cos()
        return gradient * (2 * square * cosine + square.sin())


def _with_a_look(h: torch.Tensor) -> torch.Tensor:
    spread = torch.cat([h, h]).sin()
    spread = spread.abs().mean(0)
    return h.sin() if spread.dim() else h


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean of squares": lambda h: h.pow(2).mean(),
    "erf": lambda h: (h * torch.erf(h / 1.4)).sum(),
    "RMSNorm": lambda h: (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).sum(),
    "cumsum": lambda h: h.cumsum(0).pow(3).sum(),
    "where": lambda h: torch.where(h > 0, h, h.exp()).sum(),
    "cat": lambda h: torch.cat([h, h.exp()]).sin().sum(),
    # Statements of C++, each of which lets go of its temporaries.
    "std": lambda h: h.std(-1).sum(),
    "norm": lambda h: h.norm(dim=-1).sum(),
    "cosine": lambda h: functional.cosine_similarity(h, h.sin(), dim=-1).sum(),
    "atan2": lambda h: torch.atan2(h, h.exp()).sum(),
    "maximum": lambda h: torch.maximum(h, -h).sum(),
    "logits": lambda h: functional.binary_cross_entropy_with_logits(h, torch.ones_like(h)),
    # `h` is a variable of the caller: it outlives what its gradient needs.
    "divergence": lambda h: functional.kl_div(
        h.log_softmax(-1), h.detach().softmax(-1), reduction="sum"
    ),
    # What the forward computes and nobody reads, in a variable and in none.
    "unused": lambda h: (torch.cat([h, h, h]).exp(), h.sin().sum())[1],
    "unused in the middle": lambda h: _with_a_look(h.exp()).cos().sum(),
    "a function": lambda h: _Cubed.apply(h.exp()).sum(),
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_kept_whole_has_what_formulas_keep(formula: str) -> None:
    model, x = _Loss(FORMULAS[formula]), torch.randn(4096, 64)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(parameters)[:2])

    torch.nn.init.normal_(model.one)
    found = rockplan.fit(model, x, torch.device("cpu"), optimizer=make, options=QUICK)
    real_bytes = _eager_bytes(model, x, make)
    assert found.rows[0].allocated_bytes == pytest.approx(real_bytes, abs=64)
