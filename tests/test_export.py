"""A plan as torch.utils.checkpoint code: it runs without rockplan, computes what the model does,
and needs the bytes that its header predicts."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.checkpointing.export import _needed, _simulated, _wrapped
from rockplan.checkpointing.wrap import repeated_blocks
from rockplan.examples import mlp, transformer
from testing.models import Case, gpt2, llama, mean_square, resnet
from testing.training import QUICK, solve_case
from tests.usage import both, net_case

NET = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.up, self.act = nn.Linear(32, 128), nn.GELU()
        self.dropout, self.down = nn.Dropout(0.1), nn.Linear(128, 32)

    def forward(self, x, scale):
        return x + scale * self.down(self.dropout(self.act(self.up(self.norm(x)))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.pow(2).mean()

def make():
    torch.manual_seed(0)
    return Net().train(), torch.randn(64, 32)
"""

TRAIN = """
import copy, sys
import torch
from net import make
import checkpointed

model, x = make()
other = checkpointed.apply(copy.deepcopy(model))
assert list(other.state_dict()) == list(model.state_dict())
for module in (model, other):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()
    module.eval()
    print(module(x).item(), torch.rand(1).item())
same = [torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values())]
same += [torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters())]
assert all(same), same
assert "rockplan" not in sys.modules
"""


def namespace(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(code, "exported", "exec"), found)
    return found


def test_it_trains_without_rockplan(tmp_path: Path) -> None:
    """Parameters, gradients, running statistics and random draws of three steps are eager's."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "train.py").write_text(TRAIN)
    model, x = namespace(NET)["make"]()
    code = rockplan.as_checkpoint_code(rockplan.solve(model, x, "40%", options=QUICK))
    (tmp_path / "checkpointed.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    eager, other = done.stdout.splitlines()
    assert eager == other
    assert "rockplan" not in code.partition('"""\n')[2].partition('"""\n')[2]


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: gpt2(attention_dropout=0.0),
    "llama": llama,
    "resnet": resnet,
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_peak(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    planned = solve_case(case, "50%", options=QUICK)
    eager = copy.deepcopy(case.model)
    code = rockplan.as_checkpoint_code(planned)
    other = namespace(code)["apply"](copy.deepcopy(case.model))
    for _ in range(2):
        both(other, eager, case.step, name)
    peaks = [rockplan.peak_live_bytes(lambda m=m: case.step(m))[0] for m in (eager, other, planned)]
    print(f"{name}: eager {peaks[0]}, exported {peaks[1]}, plan {peaks[2]}")
    assert peaks[1] < peaks[0]


def test_the_predicted_peak_is_the_measured_one() -> None:
    """Where Python holds no tensors longer than autograd does."""
    model, x = transformer()
    plan = rockplan.plan(model, x, "50%", options=QUICK)
    code = rockplan.as_checkpoint_code(model, plan)
    assert_head_says_what_is_lost(code)
    other = namespace(code)["apply"](copy.deepcopy(model))
    measured, _ = rockplan.peak_live_bytes(lambda: other(x).backward())
    assert measured < rockplan.peak_live_bytes(lambda: model(x).backward())[0]
    wrapped = [_wrapped(plan, path) for path in repeated_blocks(model)]
    predicted = _simulated(plan.graph, _needed(plan, [w for w in wrapped if w])).peak_bytes
    assert abs(measured - predicted) <= 0.01 * measured


def assert_head_says_what_is_lost(code: str) -> None:
    words = " ".join(code.split('"""')[1].split())
    assert f"torch {torch.__version__}" in words
    for lost in (
        "Nothing here keeps to a budget",
        "repeated modules are wrapped",
        "that the plan drops are kept",
        "that the plan keeps are computed again",
    ):
        assert lost in words


class Layers(nn.Module):
    """Layers without random draws, which a policy can keep as a plan does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_what_the_plan_keeps_is_kept() -> None:
    """The plan drops what the second layer's GELU made, and no more; so does the code."""
    torch.manual_seed(0)
    case = Case("layers", Layers(), (torch.randn(256, 16),), {}, mean_square)
    options = rockplan.Options(recompute=["layers.1.1"], keep=["layers.*.0", "layers.*.3"])
    loose = rockplan.plan(case.model, case.args, "100%", options=options)
    plan = rockplan.plan(case.model, case.args, loose.peak_bytes, options=options)
    found = namespace(rockplan.as_checkpoint_code(case.model, plan))
    ((paths, kept, buffers),) = found["WRAPPED"]
    assert paths == ("layers.1",) and not buffers
    assert kept == {"aten.addmm.default": (0,), "aten.tanh.default": (0,)}
    other = found["apply"](copy.deepcopy(case.model))
    both(other, copy.deepcopy(case.model), case.step, "layers")
    measured, _ = rockplan.peak_live_bytes(lambda: case.step(other))
    predicted = _simulated(plan.graph, _needed(plan, [_wrapped(plan, "layers.1")])).peak_bytes
    assert plan.peak_bytes <= predicted <= measured <= 1.02 * predicted  # in eager's order


def test_running_statistics_change_once() -> None:
    model, x = namespace(NET)["make"]()
    code = rockplan.as_checkpoint_code(rockplan.solve(model, x, "min", options=QUICK))
    assert "norm.num_batches_tracked" in code
    case = Case("net", model, (x,), {}, lambda loss: loss)
    eager = copy.deepcopy(model)
    other = namespace(code)["apply"](copy.deepcopy(model))
    both(other, eager, case.step, "net")
    assert other.layers[0].norm.num_batches_tracked.item() == 1


def test_layers_that_are_containers() -> None:
    model, args, _ = mlp()
    assert repeated_blocks(model) == tuple(str(i) for i in range(6))
    code = rockplan.as_checkpoint_code(rockplan.solve(model, args, "min", options=QUICK))
    case = Case("mlp", model, args, {}, mean_square)
    other = namespace(code)["apply"](copy.deepcopy(model))
    both(other, copy.deepcopy(model), case.step, "mlp")


def test_where_nothing_maps_it_is_said() -> None:
    case = net_case()
    planned = solve_case(case, "min", options=QUICK)
    with pytest.raises(rockplan.InvalidInput, match="no repeated modules to wrap"):
        rockplan.as_checkpoint_code(planned)
    model, args, _ = mlp()
    planned = rockplan.solve(model, args, "100%", options=QUICK)
    with pytest.raises(rockplan.InvalidInput, match="none of the 6 repeated modules"):
        rockplan.as_checkpoint_code(planned)
    with pytest.raises(rockplan.InvalidInput, match="Linear has no plan"):
        rockplan.as_checkpoint_code(nn.Linear(2, 2))
