"""Plans of kernels that Inductor has compiled: bits, peaks, and how far they are from eager.

Few and tiny kernels, each of which a C++ compiler takes a second for.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import rockplan
from rockplan.cli.main import app
from rockplan.graph_builder.fusion import inductor, kernels
from rockplan.graph_builder.fusion.fuse import proposed
from rockplan.options import Options
from rockplan.oracles.lifetimes import taken_over
from rockplan.values.graph import Call, Kernel, TensorSpec, ValueRef, is_kernel
from testing.models import Case, mean_square
from tests.kernels import distance, gradients, run
from tests.planning import heard, set_times

OPTIONS = Options(compile=True, cache=False, time_limit_s=5)


pytestmark = pytest.mark.usefixtures("compilers")


def solved(case: Case, budget: str, options: Options = OPTIONS) -> nn.Module:
    return rockplan.solve(case.model, case.args, budget, sample_kwargs=case.kwargs, options=options)


def small() -> Case:
    """The one model of several tests: its kernels are compiled once."""
    torch.manual_seed(0)
    ends = nn.Linear(32, 96), nn.Linear(96, 32), nn.SiLU(), nn.Linear(32, 4)
    model = nn.Sequential(nn.LayerNorm(32), ends[0], nn.GELU(), nn.Dropout(0.1), *ends[1:])
    return Case("small", model.train(), (torch.randn(512, 32),), {}, mean_square)


class Head(nn.Module):
    """A layer, a head, and the loss of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 32), nn.Linear(32, 256)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.inner(x).tanh()), labels)


def test_kernels_of_a_head_in_parts() -> None:
    """64 rows in 4 parts."""
    torch.manual_seed(0)
    case = Case("head", Head(), (torch.randn(64, 16), torch.randint(256, (64,))), {}, torch.sum)
    expected = gradients(case, case.model)
    planned = solved(case, "min", replace(OPTIONS, tile=4, check=True))
    plan = rockplan.plan_of(planned)
    assert plan.graph.tiles == 4 and "of their norm" in plan.checked
    assert 0 < distance(gradients(case, planned), expected) < 2e-6
    measured = rockplan.peak_live_bytes(lambda: case.step(planned)).peak_bytes
    assert plan.peak_bytes - 8 <= measured <= plan.peak_bytes


def test_recomputed_kernels_change_no_bit() -> None:
    case = small()
    expected = gradients(case, case.model)
    state = torch.get_rng_state()
    kept = solved(case, "100%")
    found = gradients(case, kept)
    assert torch.equal(torch.get_rng_state(), state)  # what is drawn is what eager draws
    assert distance(found, expected) < 2e-6
    smallest = solved(case, "min")
    again = gradients(case, smallest)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
    plan = rockplan.plan_of(smallest)
    assert plan.overhead > 0
    calls = [t.call for t in taken_over(plan.graph, plan.schedule).values()]
    assert any(call is not None and is_kernel(call.op) for call in calls)
    for planned in (kept, smallest):
        plan = rockplan.plan_of(planned)
        measured = rockplan.peak_live_bytes(lambda m=planned: case.step(m)).peak_bytes
        # The scalars of a loss that the caller makes of the result (docs/usage.md).
        assert plan.peak_bytes - 8 <= measured <= plan.peak_bytes <= plan.budget_bytes


def test_kernels_compiled_once_run_all_sizes() -> None:
    torch.manual_seed(0)
    model = Head()
    eager = copy.deepcopy(model)

    def case(rows: int, of: nn.Module) -> Case:
        torch.manual_seed(rows)
        return Case("", of, (torch.randn(rows, 16), torch.randint(256, (rows,))), {}, torch.sum)

    planned: Any = solved(case(64, model), "min", replace(OPTIONS, check=True))
    made = []
    for rows in (48, 160, 33):
        sized = case(rows, model)
        made.append("compiling kernels" in heard(lambda sized=sized: sized.step(planned)))
        assert distance(gradients(sized, planned), gradients(case(rows, eager), eager)) < 2e-6
        measured = rockplan.peak_live_bytes(lambda sized=sized: sized.step(planned)).peak_bytes
        assert planned.plan.peak_bytes - 8 <= measured <= planned.plan.peak_bytes, rows
    assert made == [True, False, False]
    assert "of their norm" in planned.plan.checked
    with pytest.raises(IndexError, match="out of bounds"):
        planned(torch.randn(70, 16), torch.full((70,), 256))


def test_the_gradient_of_a_maximum_reaches_its_equals() -> None:
    """In 16 bits a kernel would round neither; none would be equal."""

    class Maximum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (self.inner(x) * 1.7 + 0.3).amax(-1)
            return result

    torch.manual_seed(0)
    case = Case("maximum", Maximum(), (torch.randn(64, 16).bfloat16(),), {}, mean_square)
    expected = gradients(case, case.model)
    assert distance(gradients(case, solved(case, "100%")), expected) < 0.02


def test_no_further_from_eager_than_torch_compile() -> None:
    """In bfloat16, in which it shows, and in the mean."""
    ours, theirs = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        x = torch.randn(256, 16).bfloat16()
        case = Case("mlp", model.bfloat16(), (x,), {}, mean_square)
        exact = gradients(case, model)
        theirs.append(distance(gradients(case, torch.compile(model)), exact))
        ours.append(distance(gradients(case, solved(case, "100%")), exact))
    assert 0 < sum(ours) <= sum(theirs)


def test_roundings_that_no_compiler_keeps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        "bf16", nn.Linear(4, 4).bfloat16(), (torch.randn(8, 4).bfloat16(),), {}, mean_square
    )
    monkeypatch.setattr("torch.__version__", "2.11.0")
    with pytest.raises(rockplan.InvalidInput, match="use torch 2.13 or later, or compile=True"):
        solved(case, "100%", replace(OPTIONS, compile="near"))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="C++ of Inductor keeps no roundings")
def test_kernels_near_eager_round_as_eager_does() -> None:
    spec = TensorSpec((64,), (1,), 0, "torch.bfloat16", "cpu")
    product = Call("aten.mul.Tensor", (ValueRef(0), ValueRef(1)), (), (2,))
    total = Call("aten.add.Tensor", (ValueRef(2), ValueRef(1)), (), (3,))
    x, y = torch.randn(2, 64, dtype=torch.bfloat16)
    found = []
    for keeps, rounded in ((True, (2, 3)), (False, ())):
        name = f"rockplan.test_near_{keeps}.default"
        kernel = Kernel(name, (spec, spec), (product, total), (3,), (spec,), "cpu", keeps, rounded)
        found += kernels.functions_of([kernel])[name]([x, y])
    assert torch.equal(found[0], x * y + y)
    assert not torch.equal(found[1], x * y + y)


def _kernel(result: TensorSpec) -> Kernel:
    """The square of a row, as something that looks like `result`."""
    row = TensorSpec((8,), (1,), 0, "torch.float32", "cpu")
    call = Call("aten.mul.Tensor", (ValueRef(0), ValueRef(0)), (), (1,))
    name = f"rockplan.test_{abs(hash(result))}.default"
    return Kernel(name, (row,), (call,), (1,), (result,), "cpu")


def test_a_result_of_another_shape_is_restored() -> None:
    """Some versions of Inductor leave out dimensions of size 1, on some devices."""
    kernel = _kernel(TensorSpec((1, 8), (8, 1), 0, "torch.float32", "cpu"))
    function = inductor._finished(kernel, lambda arguments: [arguments[0].square()], [])
    x = torch.arange(8.0)
    (found,) = function([x])
    assert found.shape == (1, 8) and torch.equal(found[0], x * x)


def test_a_result_that_looks_otherwise_is_refused() -> None:
    kernel = _kernel(TensorSpec((8,), (2,), 0, "torch.float64", "cpu"))
    with pytest.raises(rockplan.CaptureError, match=r"cannot be compiled here .* was recorded"):
        kernels.functions_of([kernel])


OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "several views of one list": lambda x: (p := (x * 2).chunk(2, -1))[0].sigmoid() * p[1],
    "unbound": lambda x: sum(p.exp() for p in (x * 2).view(8, 2, 4).unbind(1)),
}


def test_what_is_fused_compiles() -> None:
    """One kernel of each, all of them together; as eager computes it."""
    wanted, expected = [], []
    for name, function in OPERATORS.items():
        x = torch.randn(8, 8)
        made = run(function, (8, 8))
        found = proposed(made, False, inductor.decompositions(), frozenset()).fused[0].kernel
        assert len(found.inputs) == 1, name
        wanted.append(found)
        expected.append((x, function(x)))
    assert kernels.made(wanted) == {}
    for kernel, (x, result) in zip(wanted, expected, strict=True):
        (computed,) = kernels.functions_of([kernel])[kernel.op]([x])
        torch.testing.assert_close(computed, result)


_SECOND = """
import sys, time, torch
from tests.test_compiled import small
from rockplan.graph_builder.fusion.fuse import fused
from rockplan.graph_builder.capture import capture
torch.set_num_threads(1)
case = small()
recorded = capture(case.model, case.args, case.kwargs)
made = fused(recorded, keeps_roundings=False)
from torch._dynamo.utils import counters
print(len(made.kernels), counters["inductor"]["fxgraph_cache_hit"])
"""


def test_another_process_compiles_nothing(compilers: Path) -> None:
    solved(small(), "100%")  # is compiled by a test before, or here
    ended = subprocess.run(
        [sys.executable, "-c", _SECOND], capture_output=True, text=True, check=True
    )
    made, hits = ended.stdout.split()
    assert made == hits != "0"


_DIGESTS = """
import hashlib, sys, pytest, torch
from torch._inductor import config
from tests.planning import plan_quickly, set_times
from tests.test_compiled import digests
plan_quickly()
with pytest.MonkeyPatch.context() as patch:
    set_times(patch)
    patch.setattr(config, "max_autotune", True)
    print(digests())
"""


def digests() -> str:
    """Of a plan of a small module, and of its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    case = Case("mlp", model, (torch.randn(256, 16),), {}, mean_square)
    planned = solved(case, "min")
    found = b"".join(g.numpy().tobytes() for g in gradients(case, planned))
    text = rockplan.code_of(planned) + rockplan.plan_of(planned).graph_digest
    return hashlib.sha256(text.encode() + found).hexdigest()


def test_another_process_with_an_empty_cache_plans_alike(
    compilers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the settings of that process; bits of gradients included, where times are given."""
    set_times(monkeypatch)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _DIGESTS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.split()[-1] == digests()


def test_the_command_line(compilers: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    model = tmp_path / "model.py"
    model.write_text(
        "from tests.test_compiled import small\n"
        "def make():\n    case = small()\n    return case.model, case.args\n"
    )
    ended = CliRunner().invoke(
        app, ["solve", f"{model}:make", "-b", "100%", "--compile", "--check", "--no-cache"]
    )
    assert ended.exit_code == 0, ended.output
    assert "calls of" in ended.output and "of their norm" in ended.output.replace("\n", " ")
    ended = CliRunner().invoke(app, ["show", f"{model}:make", "-b", "min", "--kernels", "--json"])
    (plan,) = json.loads(ended.stdout)["plans"]
    assert [k for k in plan["kernels"] if "_over_" in k["name"] and " over %" in k["operators"]]
    assert all(k["calls"] >= 1 and " = aten." in k["operators"] for k in plan["kernels"])
    ended = CliRunner().invoke(app, ["solve", f"{model}:make", "-b", "100%", "--near"])
    assert ended.exit_code != 0 and "--compile" in ended.output
