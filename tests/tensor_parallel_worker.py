"""On two and four processes: blocks of parallelize_module, alone and inside fully_shard, planned
and beside the original under the same. Exits with an error where they differ."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import rockplan
from rockplan.graph_builder.tracing import recorder
from rockplan.solving import agreement
from testing.blocks import QUICK, Stack, batch
from testing.sharding import HALF, everywhere, gloo, sharded
from testing.tensor_parallel import (
    WORDS,
    Exchanges,
    Llama,
    sequence_parallel,
    tensor_parallel,
    words,
)

OPTIONS = rockplan.Options(**QUICK)
Wrap = Callable[[Any], Any]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def steps(model: Any, ids: torch.Tensor) -> list[Any]:
    """Loss, gradients with where they are placed, and the collectives of two steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found: list[Any] = []
    for step in range(2):
        torch.manual_seed(step)
        with Exchanges() as exchanges:
            loss = model(ids)
            loss.backward()
        gradients = [p.grad for p in model.parameters()]
        placed = [getattr(g, "placements", None) for g in gradients]
        tensors = [t.detach().clone() for t in map(local, (loss, *gradients))]
        found.append((tensors, placed, exchanges.calls))
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare(what: str, wrap: Wrap, budget: str, ids: torch.Tensor, kind: Any = Llama) -> Any:
    """The planned model, which trains as the original does."""
    eager, ours = wrap(kind().train()), wrap(kind().train())
    rockplan.solve_blocks(ours, ids, budget, blocks="layers.*", options=OPTIONS)
    assert rockplan.blocks_of(ours).overhead > 0, what
    assert_same_steps(what, ours, eager, ids)
    assert [len(layer.plans) for layer in ours.layers] == [1] * len(ours.layers), what
    return ours


def assert_same_steps(what: str, ours: Any, eager: Any, ids: torch.Tensor) -> None:
    for step, (found, expected) in enumerate(zip(steps(ours, ids), steps(eager, ids), strict=True)):
        place = f"{what}, step {step}"
        assert found[1] == expected[1], f"{place}: {found[1]}, in eager {expected[1]}"
        assert found[2] == expected[2], f"{place}: {found[2]}, in eager {expected[2]}"
        for i, (a, b) in enumerate(zip(found[0], expected[0], strict=True)):
            assert torch.equal(a, b), f"{place}: tensor {i}"


def check_peak(ours: Any, eager: Any, ids: torch.Tensor) -> None:
    """The least of some steps is within what is promised, and less than eager's: a collective of
    gloo lets go of its memory late in some."""

    def least_bytes(model: Any) -> int:
        return min(
            rockplan.peak_live_bytes(lambda: model(ids).backward(), 1).peak_bytes for _ in range(5)
        )

    plan, needed_bytes = rockplan.blocks_of(ours), least_bytes(ours)
    assert needed_bytes <= plan.peak_bytes, (needed_bytes, plan.peak_bytes)
    assert needed_bytes < least_bytes(eager)


def check_reruns(mesh: DeviceMesh) -> None:
    """Where gathers may run again: of a whole module in `collectives_worker`."""
    options = replace(OPTIONS, rerun_collectives=True)
    eager, ours = (sequence_parallel(Llama().train(), mesh) for _ in range(2))
    rockplan.solve_blocks(ours, words(), "min", blocks="layers.*", options=options)
    chosen = [placed.option for placed in rockplan.blocks_of(ours).blocks]
    assert all(theirs == chosen for theirs in everywhere(chosen))
    rows = zip(steps(ours, words()), steps(eager, words()), strict=True)
    for (found, placed, calls), (expected, as_placed, once) in rows:
        assert all(map(torch.equal, found, expected)) and placed == as_placed
        assert not Counter(once) - Counter(calls) and len(calls) > len(once)
        assert all(theirs == calls for theirs in everywhere(calls))
    try:
        ours(words(length=8))
    except rockplan.InvalidInput as error:
        assert f"ranks {1 - dist.get_rank()} do not make this one" in str(error), error
    else:
        raise AssertionError("a call in training is planned by one process")


class Placed(Stack):
    """Blocks take and return DTensors, and draw for them; returns its loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)["loss"]


def placed(model: Any, mesh: DeviceMesh) -> Any:
    """Rows are divided between blocks, and within these columns."""
    rows: dict[str, Any] = {"output_layouts": Shard(0), "use_local_output": False}
    first, last = ColwiseParallel(**rows), ColwiseParallel(input_layouts=Shard(0))
    parallelize_module(model, mesh, {"first": first, "head": last})
    for layer in model.layers:
        ways: dict[str, Any] = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
            "down": RowwiseParallel(**rows),
        }
        parallelize_module(layer, mesh, ways)
    return model


def check_refused(mesh: DeviceMesh) -> None:
    """Unequal parts, and draws where DTensor moves the generator itself."""

    def refused(rows: int, words: str) -> None:
        model = placed(Placed().train(), mesh)
        try:
            rockplan.solve_blocks(model, batch(rows), "min", blocks="layers.*", options=OPTIONS)
        except rockplan.UnsupportedModel as error:
            assert "'layers.0'" in str(error) and words in str(error), error
        else:
            raise AssertionError(words)

    refused(47, "2 processes have unequal parts")
    recorder.DRAWS_PLAINLY = ()
    refused(48, "draws random numbers for a DTensor")


class Classes(nn.Module):
    """Returns its loss, of logits that are divided by classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok, self.norm = nn.Embedding(WORDS, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: Any = self.head(self.norm(self.tok(ids))).flatten(0, 1)
        wanted = DTensor.from_local(
            ids.flatten(), logits.device_mesh, [Replicate()], run_check=False
        )
        return local(nn.functional.cross_entropy(logits, wanted))


def check_loss_parallel(mesh: DeviceMesh) -> None:
    """Of one module, steps outside and inside of `loss_parallel` have plans of their own."""
    ways = {"head": ColwiseParallel(use_local_output=False)}
    eager, ours = (parallelize_module(Classes(), mesh, ways) for _ in range(2))
    ours = rockplan.solve(ours, words(), "min", options=OPTIONS)
    for times, place in enumerate((contextlib.nullcontext, loss_parallel) * 2):
        with place():
            assert_same_steps(f"time {times} of losses", ours, eager, words())
        assert len(ours.plans) == min(1 + times, 2)


def check_ends(mesh: DeviceMesh) -> None:
    """Results that are DTensors are compared, and are refused if they, or their gradients, are of
    unequal parts."""
    x = torch.randn(41, 8, generator=torch.Generator().manual_seed(0))

    def made(placement: Any) -> nn.Module:
        last = RowwiseParallel(output_layouts=placement, use_local_output=False)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": last})

    def refused(words: str, work: Callable[[], object]) -> None:
        try:
            work()
        except rockplan.UnsupportedModel as error:
            assert f"{words} is a DTensor that has 41 elements" in str(error), error
        else:
            raise AssertionError(words)

    checked = replace(OPTIONS, check=True)
    ours = rockplan.solve(made(Shard(0)), x[:40], "min", options=checked)
    assert ours.plan.checked.startswith("equal to eager"), ours.plan.checked
    refused("leaf 0 of the module's result", lambda: rockplan.solve(made(Shard(0)), x, "min"))
    result = rockplan.solve(made(Replicate()), x, "min")(x)
    given = distribute_tensor(torch.ones(41, 8), mesh, [Shard(0)])
    refused("a gradient of the result", lambda: result.backward(given))


def check_left(mesh: DeviceMesh) -> None:
    """A block that one process leaves is left by all."""
    eager, ours = (tensor_parallel(Llama(3).train(), mesh) for _ in range(2))
    own = ours.layers[dist.get_rank()].attention
    forward = own.forward
    own.forward = lambda x: forward(x) + 0 * next(iter(x.detach().flatten().tolist()))
    options = replace(OPTIONS, on_refused="leave")
    rockplan.solve_blocks(ours, words(), "min", blocks="layers.*", options=options)
    assert [placed.path for placed in rockplan.blocks_of(ours).blocks] == ["layers.2"]
    assert_same_steps("left", ours, eager, words())


def on_one_mesh(mesh: DeviceMesh) -> None:
    # Processes with other budgets have other plans, which exchange the same data in the same order.
    budget = ("min", "60%")[dist.get_rank()]
    model = compare("sequence parallel", lambda m: sequence_parallel(m, mesh), budget, words())
    check_peak(model, sequence_parallel(Llama().train(), mesh), words())
    check_reruns(mesh)
    check_loss_parallel(mesh)
    check_others(mesh)
    check_ends(mesh)


def on_two_dimensions(mesh: DeviceMesh) -> None:
    """Within fully_shard; processes beside each other have one plan."""
    ids = words(mesh["data"].get_local_rank())
    for what, how in (("float32", {}), ("bfloat16", {"mp_policy": HALF})):

        def wrap(model: Any, how: Any = how) -> Any:
            return sharded(sequence_parallel(model, mesh["tensor"]), mesh["data"], **how)

        ours = compare(f"2 x 2, {what}", wrap, "min", ids)
        chosen = (
            [layer.plan.graph_digest for layer in ours.layers],
            rockplan.blocks_of(ours).options,
        )
        assert all(other == chosen for other in everywhere(chosen)), what


def check_plan_file(mesh: DeviceMesh) -> None:
    """A whole model, by the plan of a process of another group."""
    ids = words(mesh["data"].get_local_rank())
    eager, ours = (tensor_parallel(Llama(1).train(), mesh["tensor"]) for _ in range(2))
    path = Path(os.environ["ROCKPLAN_CACHE_DIR"], "plan.json")
    if dist.get_rank() < 2:
        ours = rockplan.solve(ours, ids, "min", options=OPTIONS)
        if dist.get_rank() == 0:
            path.parent.mkdir(exist_ok=True)
            rockplan.save_plan(ours, path)
    dist.barrier()
    if dist.get_rank() >= 2:
        ours = rockplan.load(ours, ids, path)
    assert ours.plan.overhead > 0
    assert_same_steps("a whole model", ours, eager, ids)


def check_others(mesh: DeviceMesh) -> None:
    """Blocks that are not the same are refused before anything is exchanged."""
    model, blocks = placed(Placed().train(), mesh), ("layers.*", "layers.0")[dist.get_rank()]
    try:
        rockplan.solve_blocks(model, batch(), "min", blocks=blocks, options=OPTIONS)
    except rockplan.InvalidInput as error:
        assert "name other blocks" in str(error), error
    else:
        raise AssertionError("other blocks")


def check_one_fails(mesh: DeviceMesh) -> None:
    """Of an error in a measured step the others hear where their next collective ends."""
    times = itertools.count()

    def loss(result: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1 and next(times) == 2:
            raise ValueError("an odd batch")
        return result

    agreement._LEAVING_S = 0.1
    model = sequence_parallel(Llama().train(), mesh)
    try:
        rockplan.solve_blocks(model, words(), "min", blocks="layers.*", loss=loss, options=OPTIONS)
    except ValueError:
        os._exit(0)
    except rockplan.OtherRankFailed as error:
        assert "rank 1 could not plan: ValueError: an odd batch" in str(error), error
    else:
        raise AssertionError("rank 1 has not planned")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() == 2:
        mesh = init_device_mesh("cpu", (2,))
        on_one_mesh(mesh)
        dist.barrier()
        check_one_fails(mesh)
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    on_two_dimensions(mesh)
    check_plan_file(mesh)
    dist.barrier()
    dist.destroy_process_group()


def rest() -> None:
    with gloo():
        mesh = init_device_mesh("cpu", (2,))
        compare("tensor parallel", lambda model: tensor_parallel(model, mesh), "min", words())
        compare("results", lambda model: placed(model, mesh), "min", batch(), kind=Placed)
        check_left(mesh)
        check_refused(mesh)
