"""On two processes: forwards that exchange data, planned for other budgets on each,
beside the original. Exits with an error where they differ."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel

import rockplan
from testing.sharding import everywhere
from testing.tensor_parallel import Exchanges
from testing.training import QUICK, assert_equal_trees, assert_same_state, generator_states


def statistics(x: torch.Tensor) -> torch.Tensor:
    """Of all processes, as batch normalization over processes has them."""
    mean = functional.all_reduce(x.detach().mean(0), "avg", dist.group.WORLD)
    return torch.sin(x - mean)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The result of one collective is that of the next, with gradients."""
    whole = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    return functional.reduce_scatter_tensor_autograd(torch.tanh(whole), "sum", 0, dist.group.WORLD)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """As experts of fixed capacity are called."""
    half = x.shape[0] // 2
    sizes = [half, x.shape[0] - half] if dist.get_world_size() == 2 else None
    return functional.all_to_all_single_autograd(torch.sigmoid(x), sizes, sizes, dist.group.WORLD)


def several(x: torch.Tensor) -> torch.Tensor:
    """Waited for together, one of them in vain."""
    parts = [x.detach().mean(0), x.detach().amax(0)]
    first, second = functional.all_reduce_coalesced(parts, "sum", dist.group.WORLD)
    functional.broadcast(second * 2, 0, dist.group.WORLD)
    return x * first.sigmoid() + second


def checked(x: torch.Tensor) -> torch.Tensor:
    """Something else is called for what it does, too."""
    torch._assert_async(x.isfinite().all())
    return statistics(x)


class Counted(nn.Module):
    """Divides by a number of tokens that is exchanged, an integer made of integers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = functional.all_reduce((labels != 0).sum(), "sum", dist.group.WORLD)
        return x.sum(0) / count


class Net(nn.Module):
    def __init__(self, exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.exchange, self.counted = exchange, Counted()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.exchange(nn.functional.dropout(layer(x), 0.1)) + x
        return self.counted(x.pow(2), labels).mean()


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    labels = torch.randint(0, 3, (32,), generator=generator)
    return torch.randn(32, 16, generator=generator), labels


def step(module: nn.Module, times: int = 1) -> tuple[torch.Tensor, list[str]]:
    """times: of backward passes."""
    torch.manual_seed(7)
    module.zero_grad()
    with Exchanges() as exchanges:
        loss = module(*sample())
        for left in reversed(range(times)):
            loss.backward(retain_graph=left > 0)
    return loss.detach(), exchanges.calls


def compare(exchange: Callable[[torch.Tensor], torch.Tensor], budgets: tuple[str, str]) -> None:
    eager = Net(exchange).train()
    with Exchanges() as exchanges:
        budget = budgets[dist.get_rank() % 2]
        planned = rockplan.solve(copy.deepcopy(eager), sample(), budget, options=QUICK)
    what = f"{exchange.__name__} {budget}"
    assert exchanges.calls == [], f"{what}: planning exchanges data"
    assert budget == "100%" or exchange is not statistics or planned.plan.overhead > 0, what
    for _ in range(2):
        (expected, calls), states = step(eager), generator_states()
        found, ours = step(planned)
        assert ours == calls, f"{what}: {ours}, in eager {calls}"
        assert_equal_trees((found, generator_states()), (expected, states), what)
        assert_same_state(planned, eager, what)


def refused_apart(work: Callable[[], object]) -> None:
    try:
        work()
    except rockplan.InvalidInput as error:
        assert f"and ranks {1 - dist.get_rank()} do not make" in str(error), error
    else:
        raise AssertionError("one plan is needed, and each process has its own")


def check_reruns() -> None:
    """Collectives may run again by one plan on all processes, and by no other."""
    options = replace(QUICK, rerun_collectives=True)
    together = replace(options, group=dist.group.WORLD)
    own_budget = ("70%", "min")[dist.get_rank()]
    for exchange in (checked, gathered, exchanged):
        eager = Net(exchange).train()
        planned = rockplan.solve(copy.deepcopy(eager), sample(), "min", options=together)
        nodes = planned.plan.graph.nodes
        once_only = {c.op for n in nodes if not n.recomputable for c in n.calls}
        assert once_only == {"aten._assert_async.default"} & {c.op for n in nodes for c in n.calls}
        orders = []
        for times in (1, 2):
            (expected, calls), states = step(eager, times), generator_states()
            found, ours = step(planned, times)
            what = f"{exchange.__name__} again, {times} backward passes"
            assert not Counter(calls) - Counter(ours) and len(ours) > len(calls), what
            assert_equal_trees((found, generator_states()), (expected, states), what)
            assert_same_state(planned, eager, what)
            orders.append(ours)
        assert all(theirs == orders for theirs in everywhere(orders)), exchange.__name__
    x, labels = sample()
    refused_apart(lambda: planned(x[:16], labels[:16]))
    refused_apart(lambda: rockplan.solve(eager, (x, labels), "min", options=options))
    refused_apart(lambda: rockplan.solve(eager, (x, labels), own_budget, options=together))
    once = rockplan.plan(eager, (x, labels), "min", options=QUICK)
    assert planned.plan.peak_bytes < once.peak_bytes
    with tempfile.TemporaryDirectory() as folder:
        rockplan.save_plan(planned, f"{folder}/plan.json")
        try:
            rockplan.load(copy.deepcopy(eager), sample(), f"{folder}/plan.json", options=QUICK)
        except rockplan.PlanMismatch as error:
            assert "in the plan and not in the model, as" in str(error), error
        else:
            raise AssertionError("collectives of a plan that is read would run again")


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return x + y


def into_list(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return x + sum(parts)


def sent(x: torch.Tensor) -> torch.Tensor:
    y, other = torch.empty_like(x), 1 - dist.get_rank()
    waiting = [dist.isend(x.detach().clone(), other), dist.irecv(y, other)]
    for one in waiting:
        assert one is not None
        one.wait()
    return x + y


def objects(x: torch.Tensor) -> torch.Tensor:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, 3)
    return x * found[0]


class InBackward(torch.autograd.Function):
    """As Megatron has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def in_backward(x: torch.Tensor) -> torch.Tensor:
    return InBackward.apply(x)


MESHES: list[DeviceMesh] = []


def distributed(x: torch.Tensor) -> torch.Tensor:
    """A tensor of all processes within the forward."""
    whole: Any = DTensor.from_local(x, MESHES[0], [Shard(0)])
    together: Any = torch.tanh(whole * 2).redistribute(placements=[Replicate()])
    return together.to_local()[: len(x)]


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, 32, 2, 8).transpose(1, 2)
    found = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return found.transpose(1, 2).reshape(32, 16)


def check_context_parallel() -> None:
    with context_parallel(MESHES[0], buffers=[torch.zeros(4)], buffer_seq_dims=[0]):
        refused(attention)


def refused(exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    try:
        rockplan.solve(Net(exchange), sample(), "min", options=QUICK)
    except rockplan.UnsupportedModel as error:
        said = str(error)
        assert "between processes" in said and "functional form" in said, said
    else:
        raise AssertionError(f"{exchange.__name__} is planned")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    MESHES.append(init_device_mesh("cpu", (dist.get_world_size(),)))
    for exchange in (statistics, gathered, exchanged, several, distributed):
        compare(exchange, ("100%", "min"))
    compare(statistics, ("90%", "min"))
    check_reruns()
    for exchange in (in_place, into_list, sent, objects, in_backward):
        refused(exchange)
    check_context_parallel()
    dist.barrier()
    dist.destroy_process_group()
