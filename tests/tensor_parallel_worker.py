"""On two and four processes: blocks of parallelize_module, alone and inside fully_shard, planned
and beside the original under the same. Exits with an error where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import rockplan
from testing.blocks import QUICK
from testing.sharding import HALF, everywhere, sharded
from testing.tensor_parallel import Exchanges, Llama, sequence_parallel, tensor_parallel, words

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


def compare(what: str, wrap: Wrap, budget: str, ids: torch.Tensor, plans: int = 1) -> Any:
    """The planned model, which trains as the original does."""
    eager, ours = wrap(Llama().train()), wrap(Llama().train())
    rockplan.solve_blocks(ours, ids, budget, blocks="layers.*", options=OPTIONS)
    assert rockplan.blocks_of(ours).overhead > 0, what
    for step, (found, expected) in enumerate(zip(steps(ours, ids), steps(eager, ids), strict=True)):
        place = f"{what}, step {step}"
        assert found[1] == expected[1], f"{place}: {found[1]}, in eager {expected[1]}"
        assert found[2] == expected[2], f"{place}: {found[2]}, in eager {expected[2]}"
        for i, (a, b) in enumerate(zip(found[0], expected[0], strict=True)):
            assert torch.equal(a, b), f"{place}: tensor {i}"
    assert [len(layer.plans) for layer in ours.layers] == [plans] * len(ours.layers), what
    return ours


def check_peak(model: Any, ids: torch.Tensor) -> None:
    """The least of some steps is within the budget: a collective of gloo lets go of its memory late
    in some."""
    plan = rockplan.blocks_of(model)

    def step() -> None:
        model(ids).backward()

    least_bytes = min(rockplan.peak_live_bytes(step, 1).peak_bytes for _ in range(8))
    assert least_bytes <= plan.peak_bytes <= 1.3 * least_bytes, (least_bytes, plan)
    assert plan.eager_peak_bytes > 1.4 * plan.peak_bytes, plan


def on_one_mesh(mesh: DeviceMesh) -> None:
    compare("tensor parallel", lambda model: tensor_parallel(model, mesh), "min", words())
    # Processes with other budgets have other plans, which exchange the same data in the same order.
    budget = ("min", "60%")[dist.get_rank()]
    model = compare("sequence parallel", lambda m: sequence_parallel(m, mesh), budget, words())
    check_peak(model, words())


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


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() == 2:
        on_one_mesh(init_device_mesh("cpu", (2,)))
    else:
        on_two_dimensions(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
    dist.barrier()
    dist.destroy_process_group()
