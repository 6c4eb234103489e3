"""On two processes: DistributedDataParallel and fully_shard of a planned and of
the original module, compared. Exits with an error where they differ."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rockplan
from rockplan.runtime.planned_state import programs_of
from rockplan.search import paging
from testing.sharding import gloo
from testing.training import QUICK
from tests.planning import heard


class Unused(nn.Module):
    """A branch whose parameters get no gradient."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(32, 4)).train()


def step(module: nn.Module, batch: torch.Tensor, synchronized: bool = True) -> None:
    """One forward and backward from a seed of this rank."""
    torch.manual_seed(100 + dist.get_rank())
    context: Any = contextlib.nullcontext() if synchronized else module.no_sync()  # type: ignore[operator]
    with context:
        module(batch).pow(2).mean().backward()


def assert_same_gradients(a: nn.Module, b: nn.Module, what: str) -> None:
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{what}: {name}"
        assert p.grad is None or torch.equal(p.grad, q.grad), f"{what}: {name}"


def compare(unused: bool, pages: bool = False) -> None:
    model = Unused(network()) if unused else network()
    batch = torch.randn(64, 32) + dist.get_rank()
    eager = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=unused)
    options = rockplan.Options(host="1GiB", link="20GB/s") if pages else QUICK
    planned_module = rockplan.solve(model, batch, "50%" if pages else "min", options=options)
    assert pages or planned_module.plan.overhead > 0
    assert pages == ("frame.page_in(" in planned_module.code)
    planned = DistributedDataParallel(planned_module, find_unused_parameters=unused)
    for round_ in range(2):
        for synchronized in (True, False, True):
            for module in (eager, planned):
                step(module, batch, synchronized)
            assert_same_gradients(planned, eager, f"round {round_}, {synchronized}")
        for module in (eager, planned):
            torch.optim.SGD(module.parameters(), 0.1).step()
            module.zero_grad()


def check_overlap() -> None:
    """Buckets are reduced while the backward pass still computes."""
    model = network()
    batch = torch.randn(64, 32)
    planned = DistributedDataParallel(
        rockplan.solve(model, batch, "min", options=QUICK),
        bucket_cap_mb=0.004,
        gradient_as_bucket_view=True,
    )
    for _ in range(2):  # DDP rebuilds its buckets after the first iteration
        step(planned, batch)
    events: list[str] = []

    # Without annotations: DDP compares them by identity, and here they would be text.
    def reduce(state, bucket):  # type: ignore[no-untyped-def]
        events.append("reduce")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    planned.register_comm_hook(None, reduce)
    for name, parameter in planned.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: events.append(n))
    step(planned, batch)
    first = events.index("reduce")
    gradients_after = [e for e in events[first:] if e != "reduce"]
    assert len(gradients_after) >= 8, events
    weights = [e for e in events if e.endswith("weight")]
    assert weights == sorted(weights, reverse=True), "gradients arrive in backward order"


def compare_sharded() -> None:
    """A planned module may be sharded as a whole. Where its parameters are shards, or parts of
    one, they are refused by what they are."""
    model, mesh = network(), init_device_mesh("cpu", (dist.get_world_size(),))
    batch = torch.randn(64, 32) + dist.get_rank()
    planned, eager = (
        rockplan.solve(copy.deepcopy(model), batch, "min", options=QUICK),
        copy.deepcopy(model),
    )
    fully_shard([planned], mesh=mesh)
    fully_shard([eager], mesh=mesh)
    refused(eager, batch, "'0.0.weight' is a DTensor")
    optimizers = [torch.optim.Adam(module.parameters()) for module in (planned, eager)]
    for _ in range(2):
        for module, optimizer in zip((planned, eager), optimizers, strict=True):
            step(module, batch)
            optimizer.step()
        assert_same_gradients(planned, eager, "sharded")
    assert len(planned.plans) == 1
    part = nn.Sequential(DistributedDataParallel(copy.deepcopy(model)))
    refused(part, batch, "submodule '0' is a DistributedDataParallel")
    cpu = torch.device("cpu")
    refused(FullyShardedDataParallel(copy.deepcopy(model), device_id=cpu), batch, "fully_shard")
    wrapped = FullyShardedDataParallel(
        rockplan.solve(model, batch, "min", options=QUICK), device_id=cpu
    )
    with contextlib.suppress(rockplan.UnsupportedModel):
        wrapped(batch)
        raise AssertionError("a planned module inside")


class Classifier(nn.Module):
    """Returns a loss beside what it is computed from, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": logits.pow(2).mean(), "logits": logits}


def compare_sharded_losses() -> None:
    """A planned module that returns a loss and logits, sharded as a whole; and one whose blocks are
    planned, each sharded by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    batch = torch.randn(64, 32) + dist.get_rank()
    eager, whole, parts = Classifier().train(), Classifier().train(), Classifier().train()
    whole = rockplan.solve(whole, batch, "min", options=QUICK)
    for i, block in enumerate(parts.blocks):
        sample = batch.clone().requires_grad_(i > 0)
        parts.blocks[i] = rockplan.solve(block, sample, "min", options=QUICK)
    modules = {"eager": eager, "whole": whole, "parts": parts}
    for name, module in modules.items():
        for block in module.blocks if name != "whole" else ():
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.Adam(module.parameters()) for module in modules.values()]
    for _ in range(2):
        for module, optimizer in zip(modules.values(), optimizers, strict=True):
            torch.manual_seed(100 + dist.get_rank())
            module(batch)["loss"].backward()
            optimizer.step()
        assert_same_gradients(whole, eager, "sharded as a whole")
        assert_same_gradients(parts, eager, "sharded parts")
    assert len(whole.plans) == 1
    assert [len(block.plans) for block in parts.blocks] == [1] * 4


def compare_lengths(is_of_blocks: bool) -> None:
    """Each rank has lengths of its own, one program runs them: of a module in
    DistributedDataParallel, or of blocks, each in fully_shard."""
    model, rank = Classifier().train(), dist.get_rank()
    eager = copy.deepcopy(model)
    batches = [torch.randn(n, 32) for n in ((64, 40, 88, 17, 56), (64, 31, 90, 65, 33))[rank]]
    parts = (model.blocks, eager.blocks)
    if is_of_blocks:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module, blocks in zip((model, eager), parts, strict=True):
            for block in (*blocks, module):
                fully_shard(block, mesh=mesh)
        rockplan.solve_blocks(model, batches[0], "70%", options=QUICK)
        modules: Any = model, eager
    else:
        planned = rockplan.solve(model, batches[0], "min", options=QUICK)
        modules = DistributedDataParallel(planned), DistributedDataParallel(eager)
    optimizers = [torch.optim.Adam(module.parameters()) for module in modules]
    captured = []
    for batch in batches:
        for module, optimizer in zip(modules, optimizers, strict=True):

            def forward(module: Any = module, batch: Tensor = batch) -> None:
                torch.manual_seed(100 + rank)
                module(batch)["loss"].backward()

            stages = heard(forward)
            captured += ["capturing the model" in stages] if module is modules[0] else []
            optimizer.step()
        assert_same_gradients(*modules, f"{len(batch)} rows")
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert captured == [False, True, False, False, False], captured
    for module in parts[0] if is_of_blocks else [planned]:
        assert [p.open is not None for p in programs_of(module)].count(False) == 1


def refused(module: nn.Module, batch: torch.Tensor, words: str) -> None:
    try:
        rockplan.solve(module, batch, "min", options=QUICK)
    except rockplan.RockplanError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)


def compare_compiled() -> None:
    """Plans of compiled kernels: the bits of those that run nothing again, near eager."""
    model, batch = network(), torch.randn(64, 32) + dist.get_rank()
    options = replace(QUICK, compile=True)
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():  # those after the first find its kernels in Inductor's cache
            kept, planned = (
                rockplan.solve(copy.deepcopy(model), batch, budget, options=options)
                for budget in ("100%", "min")
            )
        dist.barrier()
    assert planned.plan.graph.kernels and planned.plan.overhead > 0
    modules = [DistributedDataParallel(m) for m in (model, kept, planned)]
    for round_ in range(2):
        for module in modules:
            step(module, batch, synchronized=round_ == 1)
        assert_same_gradients(modules[2], modules[1], f"compiled, round {round_}")
    for p, q in zip(modules[2].parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert (p.grad - q.grad).norm() <= 1e-3 * q.grad.norm()


def main() -> None:
    with gloo():
        compare(unused=True)
        check_overlap()
        compare_sharded()
        compare_lengths(is_of_blocks=True)


def rest() -> None:
    with gloo():
        paging.LEAST_BYTES = 1 << 10
        compare(unused=False, pages=True)
        compare_compiled()
        compare_sharded_losses()
        compare_lengths(is_of_blocks=False)
