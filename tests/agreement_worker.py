"""On four processes: those that plan together have one plan, or one error. Exits with an error
where they differ."""

from __future__ import annotations

import copy
import datetime
import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rockplan
from rockplan import programs
from testing.blocks import QUICK, Mixer, Stack, batch
from testing.sharding import everywhere, sharded
from testing.training import assert_same_state

TOGETHER = rockplan.Options(**{**QUICK, "time_limit_s": 0.5}, cache=False)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(32, 4)).train()


def digest(thing: object) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()


def digest_of(planned: nn.Module) -> str:
    plan = rockplan.plan_of(planned)
    return digest((plan.graph_digest, plan.schedule, plan.peak_bytes, plan.time_ns))


def digest_of_blocks(model: nn.Module) -> str:
    plan = rockplan.blocks_of(model)
    return digest((plan.budget_bytes, plan.moments, plan.options, plan.peak_bytes))


def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    result: Any = module(x)
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result.pow(2).mean()
    loss.backward()
    return loss.detach()


def check_same(planned: nn.Module, eager: nn.Module, x: torch.Tensor) -> None:
    assert torch.equal(step(planned, x), step(eager, x))
    assert_same_state(planned, eager, "planned together")


def check_whole(group: Any, budgets: tuple[str, ...]) -> None:
    """One of the group measures and solves."""
    made: list[object] = []
    solver = programs.plan_as_asked
    programs.plan_as_asked = lambda *args: made.append(args) or solver(*args)  # type: ignore[func-returns-value]
    x = torch.randn(256, 32) + dist.get_rank()
    options = replace(TOGETHER, group=group)
    own = dist.get_process_group_ranks(group)
    try:
        for budget in budgets:
            eager = network()
            planned = rockplan.solve(copy.deepcopy(eager), x, budget, options=options)
            assert len({everywhere(digest_of(planned))[rank] for rank in own}) == 1, budget
            check_same(planned, eager, x)
    finally:
        programs.plan_as_asked = solver
    assert len(made) == len(budgets) * (dist.get_rank() == own[0])
    # What one process alone meets, it plans alone; copies are of it, too.
    if dist.get_rank() == own[0]:
        check_same(planned, eager, x[:100])
        step(copy.deepcopy(planned), x[:90])


def check_sizes() -> None:
    """Of sizes that are planned ahead, one adapts the plan of the largest for all."""
    adapted = programs.adapted
    made: list[rockplan.Plan] = []  # where there is one that could be adapted
    programs.adapted = lambda known, *args: made.extend(known[:1]) or adapted(known, *args)  # type: ignore[func-returns-value]
    options = replace(TOGETHER, group=dist.group.WORLD, sizes={0: (100, 256)})
    try:
        planned: Any = rockplan.solve(network(), torch.randn(200, 32), "50%", options=options)
    finally:
        programs.adapted = adapted
    plans = [(p.graph_digest, p.schedule, p.peak_bytes, p.time_ns) for p in planned.plans]
    assert len(plans) == 3 and len({*everywhere(digest(plans))}) == 1
    assert len(made) == 2 * (dist.get_rank() == 0)


def check_blocks(options: rockplan.Options, budgets: tuple[str, ...], is_sharded: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = batch(256) + dist.get_rank()
    for budget in budgets:
        ours, eager = Stack().train(), Stack().train()
        for model in (ours, eager) if is_sharded else ():
            sharded(model, mesh)
        rockplan.solve_blocks(ours, x, budget, options=options)
        assert len({*everywhere(digest_of_blocks(ours))}) == 1, budget
        assert torch.equal(step(ours, x), step(eager, x))
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            local = [getattr(g, "_local_tensor", g) for g in (a.grad, b.grad)]
            assert torch.equal(*local), budget


def raised(plan: Callable[[], object]) -> list[tuple[type, str]]:
    """By all processes."""
    try:
        plan()
    except rockplan.RockplanError as error:
        return everywhere((type(error), str(error)))
    raise AssertionError("no error")


def check_errors() -> None:
    """That of one process is raised on all, with its rank."""
    rank, options = dist.get_rank(), replace(TOGETHER, group=dist.group.WORLD)
    x = torch.randn(64, 32)
    for budget, odd in (("3KB", "3KB"), ("70%", "3KB")):
        found = raised(
            lambda b=budget, o=odd: rockplan.solve(
                network(), x, o if rank == 2 else b, options=options
            )
        )
        first = 0 if budget == odd else 2
        assert all(kind is rockplan.InfeasibleBudget for kind, _ in found), found
        assert all(text.startswith(f"rank {first} could not plan: budget") for _, text in found)
    for solve in (rockplan.solve, rockplan.solve_blocks):
        model = Stack().train()
        if rank == 1:
            model.layers[2].forward = lambda h: h * h.sum().item()  # type: ignore[method-assign]
        found = raised(lambda s=solve, m=model: s(m, batch(), "min", options=options))
        assert {kind for kind, _ in found} == {rockplan.ValueDependentControlFlow}, found
        assert all(text.startswith("rank 1 could not plan: ") for _, text in found), found
    found = raised(lambda: rockplan.solve(network(), [1] if rank == 3 else x, "x", options=options))
    assert {kind for kind, _ in found} <= {rockplan.InvalidBudget, rockplan.InvalidInput}


def check_others(caplog: list[str]) -> None:
    """A process with another batch has a plan of its own, and that is said; sharded models that
    are not the same are refused."""
    rank, options = dist.get_rank(), replace(TOGETHER, group=dist.group.WORLD)
    x = torch.randn(64 if rank else 32, 32)
    eager = network()
    planned = rockplan.solve(copy.deepcopy(eager), x, "50%", options=options)
    check_same(planned, eager, x)
    digests = everywhere(digest_of(planned))
    assert digests[0] != digests[1] and len({*digests[1:]}) == 1
    assert any(re.search(r"rank \d plans another model, batch size or budget", t) for t in caplog)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = fully_shard(Stack(depth=2 + (rank == 1)).train(), mesh=mesh)
    found = raised(lambda: rockplan.solve_blocks(model, batch(), "min", options=TOGETHER))
    assert all("other parameters" in text for _, text in found), found


class Stage(nn.Module):
    """One half of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def init_weights(self) -> None:
        """Without random numbers, of which parts of tensors would get others."""
        for parameter in self.parameters():
            local: Any = parameter.detach()
            values = getattr(local, "_local_tensor", local)
            values.copy_(torch.linspace(-0.2, 0.3, values.numel()).view_as(values))


def trainer_step(is_planned: bool, sizes: tuple[int, int, int]) -> list[torch.Tensor]:
    """As torchtitan has it: pipeline, tensor and data parallel on the meta device, memory, weights,
    plans, optimizer. Losses and gradients of two steps."""
    rows, count = 32, 4
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    index = mesh["pp"].get_local_rank()
    with torch.device("meta"):
        part = Stage().train()
    if sizes[2] > 1:
        for layer in part.layers:
            ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], ways)
    sharded(part, mesh["dp"])
    part.to_empty(device="cpu")
    part.init_weights()
    if is_planned:
        microbatch = torch.randn(rows, 16).requires_grad_(index > 0)
        part.set_requires_gradient_sync(False)  # of microbatches the last one exchanges
        options = replace(TOGETHER, in_flight=2 - index)
        loss = lambda y: y.pow(2).mean()  # noqa: E731
        rockplan.solve_blocks(
            part, microbatch, "min", blocks="layers.*", loss=loss, options=options
        )
        plan = rockplan.blocks_of(part)
        digests = everywhere((index, digest_of_blocks(part)))
        assert len({*digests}) == 2 and plan.overhead > 0
    optimizer = torch.optim.SGD(part.parameters(), 0.01)
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, count, loss_fn=lambda y, t: (y - t).pow(2).mean())
    found: list[torch.Tensor] = []
    for number in range(2):
        torch.manual_seed(number + mesh["dp"].get_local_rank())
        x, target = (torch.randn(rows * count, 16) for _ in range(2))
        losses: list[torch.Tensor] = []
        last: dict[str, Any] = {"target": target, "losses": losses} if index else {}
        schedule.step(*(() if index else (x,)), **last)
        found += [*losses, *(p.grad.to_local().clone() for p in part.parameters())]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


def check_trainer() -> None:
    for sizes in ((2, 2, 1), (2, 1, 2)):
        ours, eager = trainer_step(True, sizes), trainer_step(False, sizes)
        assert all(t.isfinite().all() for t in eager)
        assert len(ours) == len(eager) and all(map(torch.equal, ours, eager)), sizes


def check_silence() -> None:
    """A process that does not come is named, as are those that did."""
    options = replace(TOGETHER, group=dist.group.WORLD)
    store: Any = dist.distributed_c10d._get_default_store()
    dist.barrier()
    store.set_timeout(datetime.timedelta(seconds=1))
    if dist.get_rank() == 3:
        return
    try:
        rockplan.solve(network(), torch.randn(64, 32), "min", options=options)
    except rockplan.OtherRankFailed as error:
        assert re.search(r"ranks? 3 did not answer within 1 s.*ranks 0, 1, 2 did", str(error)), (
            error
        )
    else:
        raise AssertionError("rank 3 has not planned")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rockplan").addHandler(handler)
    check_whole(dist.group.WORLD, ("60%", "min"))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    check_whole(halves[dist.get_rank() // 2], ("40%", "25%"))
    check_sizes()
    check_blocks(replace(TOGETHER, group=dist.group.WORLD), ("40%",), is_sharded=False)
    check_blocks(TOGETHER, ("60%", "min"), is_sharded=True)
    check_errors()
    check_others(said)
    check_trainer()
    check_silence()
