"""On four processes: those that plan together have one plan, or one error. Exits with an error
where they differ."""

from __future__ import annotations

import copy
import datetime
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

import rockplan
from rockplan.solving import programs
from testing.blocks import QUICK, Stack, batch
from testing.sharding import everywhere, gloo, sharded
from testing.trainer import digest, digest_of_blocks, trainer_step
from testing.training import assert_same_state
from tests.planning import heard

TOGETHER = rockplan.Options(**{**QUICK, "time_limit_s": 0.5}, cache=False)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(32, 4)).train()


def digest_of(planned: nn.Module) -> str:
    plan = rockplan.plan_of(planned)
    return digest((plan.graph_digest, plan.schedule, plan.peak_bytes, plan.time_ns))


def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    result: Any = module(x)
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result.pow(2).mean()
    loss.backward()
    return loss.detach()


def check_same(planned: nn.Module, eager: nn.Module, x: torch.Tensor) -> None:
    assert torch.equal(step(planned, x), step(eager, x))
    assert_same_state(planned, eager, "planned together")


def check_whole(group: Any, budget: str) -> None:
    """One of the group measures and solves."""
    made: list[object] = []
    solver = programs.plan_as_asked
    programs.plan_as_asked = lambda *args: made.append(args) or solver(*args)  # type: ignore[func-returns-value]
    x = torch.randn(256, 32) + dist.get_rank()
    options = replace(TOGETHER, group=group)
    own = dist.get_process_group_ranks(group)
    try:
        eager = network()
        planned = rockplan.solve(copy.deepcopy(eager), x, budget, options=options)
        assert len({everywhere(digest_of(planned))[rank] for rank in own}) == 1
        check_same(planned, eager, x)
    finally:
        programs.plan_as_asked = solver
    assert len(made) == (dist.get_rank() == own[0])
    # What one process alone meets, it plans alone; copies are of it, too.
    if dist.get_rank() == own[0]:
        check_same(planned, eager, x[:100])
        step(copy.deepcopy(planned), x[:90])


def check_sizes() -> None:
    """Sizes that are planned ahead have a plan of the largest that all share, and a program for all
    others, whatever sizes the samples have."""
    options = replace(TOGETHER, group=dist.group.WORLD, sizes={0: (100, 256)})
    sample = torch.randn((256, 100, 200, 200)[dist.get_rank()], 32)
    eager = network()
    planned: Any = rockplan.solve(copy.deepcopy(eager), sample, "50%", options=options)
    largest = planned.plans[0]
    assert len({*everywhere(digest((largest.graph_digest, largest.schedule)))}) == 1
    for rows in (150, 256, 100, 201):
        x = torch.randn(rows, 32)
        assert "capturing the model" not in heard(lambda x=x: step(planned, x)), rows
        for module in (planned, eager):
            module.zero_grad()
        check_same(planned, eager, x)


def check_blocks(options: rockplan.Options, budget: str, is_sharded: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = batch(256) + dist.get_rank()
    ours, eager = Stack().train(), Stack().train()
    for model in (ours, eager) if is_sharded else ():
        sharded(model, mesh)
    rockplan.solve_blocks(ours, x, budget, options=options)
    assert len({*everywhere(digest_of_blocks(ours))}) == 1
    assert torch.equal(step(ours, x), step(eager, x))
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        local = [getattr(g, "_local_tensor", g) for g in (a.grad, b.grad)]
        assert torch.equal(*local)


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


def check_trainer(sizes: tuple[int, int, int]) -> None:
    ours, eager = trainer_step(TOGETHER, sizes), trainer_step(None, sizes)
    assert all(t.isfinite().all() for t in eager)
    assert len(ours) == len(eager) and all(map(torch.equal, ours, eager)), sizes


def check_silence() -> None:
    """A process that does not come is named, as are those that did."""
    options = replace(TOGETHER, group=dist.group.WORLD)
    store: Any = dist.distributed_c10d._get_default_store()
    dist.barrier()
    store.set_timeout(datetime.timedelta(seconds=5))
    if dist.get_rank() == 3:
        return
    try:
        rockplan.solve(network(), torch.randn(64, 32), "min", options=options)
    except rockplan.OtherRankFailed as error:
        assert re.search(r"ranks? 3 did not answer within 5 s.*ranks 0, 1, 2 did", str(error)), (
            error
        )
    else:
        raise AssertionError("rank 3 has not planned")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    check_whole(halves[dist.get_rank() // 2], "25%")
    check_errors()
    check_trainer((2, 1, 2))
    check_silence()


def rest() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rockplan").addHandler(handler)
    with gloo():
        check_whole(dist.group.WORLD, "60%")
        check_sizes()
        check_blocks(replace(TOGETHER, group=dist.group.WORLD), "40%", is_sharded=False)
        check_blocks(TOGETHER, "min", is_sharded=True)
        check_others(said)
        check_trainer((2, 2, 1))
