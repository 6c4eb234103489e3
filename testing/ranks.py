"""Memory of a process of several that train a model: what is said of it, and what it needs."""

from __future__ import annotations

import bisect
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rockplan import Options
from rockplan.fitting.changes import Holding, left_alive, peak_of
from rockplan.fitting.exchange import Transport
from rockplan.fitting.optimizer import OptimizerSteps, optimizer_steps
from rockplan.fitting.reserved import storage_sizes
from rockplan.fitting.shards import DDP, Shards
from rockplan.fitting.timeline import Passes, passes_of, timeline_of
from rockplan.fitting.ways import kept_whole, pages_of, per_block
from rockplan.graph_builder.costs.ruler import memory_events, profiled, profiler_events
from rockplan.runtime.checkpointing import repeated_blocks
from rockplan.runtime.program import ModuleCall
from rockplan.solving.captured_calls import arguments, captured_call, problems_of
from rockplan.values.copies import Host
from testing.models import Case

Make = Callable[[Any], torch.optim.Optimizer]

STEP = "step of a rank"

TRANSPORTS = {
    "gloo": Transport(copies=True, pads=True),
    "fake": Transport(copies=False, pads=True),
}


@contextmanager
def fake_group(count: int) -> Iterator[None]:
    """This process as the first of `count`, of which there are no others: a collective does
    nothing, and asks for no memory."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Rank:
    """How a process trains. make: a case whose model computes its loss; how: 'ddp' or 'fsdp2';
    host: that blocks page to, in what is said."""

    make: Callable[[], Case]
    how: str
    optimizer: Make
    checkpointed: bool = False
    host: Host | None = None

    def said_bytes(self) -> int:
        """At the peak of a step that finds the optimizer's state, beside inputs and the caller's
        scalars."""
        model, shards, steps, passes = self._said()
        resident = {
            Holding.PARAMETERS: shards.parameter_sizes(model),
            Holding.BUFFERS: storage_sizes(model.buffers()),
            Holding.BUCKETS: shards.bucket_sizes(model),
        }
        first, later = timeline_of(resident, passes, steps).steps
        held = Counter({owner: sum(sizes) for owner, sizes in resident.items()})
        for change in left_alive(first).values():
            held[change.owner] += change.size_bytes
        return peak_of((c for c in later if c.owner is not Holding.CALLER), held).size_bytes

    def said_alive_bytes(self) -> int:
        """At the peak of forward and backward, beside parameters and `.grad`."""
        changes = (c for c in self._said()[-1].first if "parts of gradients" not in str(c.key))
        return peak_of((c for c in changes if c.owner is not Holding.CALLER), {}).size_bytes

    def _said(self) -> tuple[nn.Module, Shards, OptimizerSteps, Passes]:
        case = self.make()
        model = case.model
        shards, blocks = Shards(dist.get_world_size(), self.how), repeated_blocks(model)
        call = ModuleCall(model, *arguments(model, case.args, case.kwargs))
        source = captured_call(call, Options())
        graph = problems_of(source, Options())[0].graph
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        steps = optimizer_steps(self.optimizer, named, metered=True, shards=shards)
        way = per_block(graph, blocks) if self.checkpointed else kept_whole(graph)
        if self.host:
            way = per_block(graph, (), pages_of(graph, blocks, self.host))
        groups = shards.groups(model, blocks)
        transport = TRANSPORTS[dist.get_backend()]
        interface, is_eager = source.lowered.interface, self.host is None
        passes = passes_of(*way, interface, steps, groups, transport, is_eager=is_eager)
        return model, shards, steps, passes

    def measured_bytes(self, steps: int) -> int:
        """The same, measured: the least of so many steps.

        A session of the profiler sees what becomes of memory that was asked for inside of it: it
        begins with the model. What a thread of gloo gives back when it is done with a collective
        comes late, or is not seen, so that this may be too much: the least rise of the steps
        counts, beside what is known to be there.
        """
        self.make().step()  # what operators keep from their first run is no part of a step
        gc.collect()
        with profiled() as session:
            case = self.make()
            module = self.wrapped(case.model)
            optimizer = self.optimizer(module.parameters())
            gc.collect()
            for _ in range(1 + steps):
                with record_function(STEP):
                    optimizer.zero_grad()
                    case.step(module)
                    optimizer.step()
        events = [*memory_events(session)]
        times = [time_ns for time_ns, _ in events]
        live = [*itertools.accumulate((change for _, change in events), initial=0)]
        begins = sorted(e.start_ns() for e in profiler_events(session) if e.name() == STEP)
        first, *at = (bisect.bisect(times, begin) for begin in begins)
        ranges = zip(at, [*at[1:], len(events)], strict=True)
        rise = min(max(live[begin : end + 1]) - live[begin] for begin, end in ranges)
        made = tree_leaves(([p.grad for p in module.parameters()], [*optimizer.state.values()]))
        inputs = tree_leaves((case.args, case.kwargs))
        return live[first] + rise + sum(storage_sizes(map(_own, made))) - sum(storage_sizes(inputs))

    def wrapped(self, model: Any) -> Any:
        blocks = [model.get_submodule(path) for path in repeated_blocks(model)]
        for block in blocks if self.checkpointed else ():
            # The state of the CPU's generator is no memory of a GPU.
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        if self.how == DDP:
            return DistributedDataParallel(model, init_sync=False)  # the same on each
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)


def _own(leaf: Any) -> Any:
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf
