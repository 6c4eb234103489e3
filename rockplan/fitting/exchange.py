"""Exchange: what gathering parameters and reducing gradients allocate during a step.

takes: a CDGraph whose nodes know their modules, a schedule whose backward pass goes from block to
block, groups of parameters. returns: changes, by the event that they come before. guarantees: the
order of torch/distributed/fsdp/_fully_shard, by its defaults:

- A group is gathered into one buffer and copied from it (`foreach_all_gather`,
  `foreach_all_gather_copy_out`): before the forward of its block, after which the copies are freed
  (`reshard`), and again before its backward. In forward the buffer lives until that of the next
  group is filled and copied (`wait_for_unshard`, which holds `all_gather_state` that long); in
  backward the buffer of the block before is filled meanwhile (`_backward_prefetch`). What is
  filled or copied for a block whose backward does not run is freed at the end
  (`finalize_backward`).
- Parameters of no block stay gathered from the beginning of forward to the end of backward
  (`_lazy_init`: a root does not reshard after forward).
- After the backward of a block its gradients are copied into one buffer (`foreach_reduce`), which
  lives until the next group's (`reduce_scatter_states`), and reduced to the parts of this process,
  one storage. Blocks into whose inputs no gradient flows come after all others
  (`_root_post_backward_final_callback`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rockplan.fitting.changes import Holding, MemoryChange
from rockplan.fitting.scheduled import all_gradients
from rockplan.fitting.shards import GatheredGroup
from rockplan.fitting.ways import block_of
from rockplan.values.graph import CDGraph, Phase
from rockplan.values.interface import Interface
from rockplan.values.schedule import Compute, Free, Schedule

Handed = Mapping[str, Sequence[int]]
"""Name of a parameter -> storages of all contributions to its gradient (`all_gradients`)."""

Before = Mapping[int, Sequence[MemoryChange]]
"""Position of an event -> changes."""


@dataclass(frozen=True, slots=True)
class Transport:
    """How collectives allocate. copies: True if a collective works on a copy of its arguments
    (ProcessGroupGloo.cpp: outputs of `allgather` flat, inputs of `reduce_scatter` cloned); pads:
    True if gradients that do not divide evenly are padded in copies (`_chunk_cat` on CPU; on CUDA
    one kernel writes into the buffer)."""

    copies: bool
    pads: bool


NCCL = Transport(copies=False, pads=False)
"""Works in place; its own memory does not come from the caching allocator."""


class _Span(NamedTuple):
    """Positions of a block's events in one phase: of the first one, and of the event after the last
    one."""

    begin: int
    end: int


def gathers(
    graph: CDGraph,
    schedule: Schedule,
    interface: Interface,
    groups: Sequence[GatheredGroup],
    transport: Transport,
    *,
    adds: bool,
) -> Before:
    """Return position in the schedule -> memory changes before it, of gathering the parameters of
    each group and reducing its gradients in a step under fully_shard. groups: parameters that are
    gathered together, of a block each, and of the rest (path ''). adds: gradients are added to
    those of an earlier backward pass. The sums that autograd makes of several contributions
    (`sums_of_gradients`) are among them."""
    blocks = {group.path: group for group in groups}
    rest = blocks.pop("", None)
    handed = all_gradients(graph, interface)
    paths = _paths(graph, handed, blocks)
    sizes = {name: graph.data[data[0]].size_bytes for name, data in handed.items()}
    course = _Course(transport, sizes, adds)
    middle, last = schedule.forward_length, len(schedule.events)

    forward = _spans(schedule, paths, range(middle))
    if rest is not None:
        course.gather_in_forward(0, rest)
    for position, path, is_end in _begins_and_ends(forward):
        if is_end:
            course.let_go_of_whole(position, blocks[path])
        else:
            course.gather_in_forward(position, blocks[path])
    course.let_go(middle, course.filled)

    called = [path for _, path, is_end in _begins_and_ends(forward) if is_end]
    before = dict(zip(called[1:], called, strict=False))
    if rest is not None and called:
        course.fill(middle, blocks[called[-1]])
    backward = _spans(schedule, paths, range(middle, last))
    reduced_last = _open_ended(graph, paths, handed, blocks)
    for position, path, is_end in _begins_and_ends(backward):
        if not is_end:
            key = course.fill(position, blocks[path])
            course.copy_out(position, blocks[path])
            course.let_go(position, key)
            if path in before:
                course.fill(position, blocks[before[path]])
        elif path not in reduced_last:
            course.reduce(position, blocks[path])
    for group in groups:
        if not group.path or group.path in reduced_last:
            course.reduce(last, group)
    course.let_go(last, course.reduced)
    for key in [k for k, change in course.alive.items() if change.owner is Holding.GATHERED]:
        course.let_go(last, key)
    for position, changes in sums_of_gradients(graph, schedule, interface).items():
        course.changes[position] += changes
    return course.changes


def sums_of_gradients(graph: CDGraph, schedule: Schedule, interface: Interface) -> Before:
    """Return position in the schedule -> memory changes before it, where autograd adds a further
    gradient of a parameter to the one it has: the sum is a new storage, and the old ones go."""
    further = {d for data in all_gradients(graph, interface).values() for d in data[1:]}
    before = {}
    for position in range(schedule.forward_length, len(schedule.events)):
        event = schedule.events[position]
        if isinstance(event, Free) and event.data in further:
            size_bytes = graph.data[event.data].size_bytes
            made = MemoryChange(("sum", event.data), size_bytes, Holding.GRADIENTS)
            before[position] = (made, made.freed)
    return before


@dataclass(slots=True)
class _Course:
    """The changes so far. handed: name -> bytes of a gradient; adds: True if gradients are added to
    earlier ones; filled, reduced: keys of the buffers of the last gather in forward, and of the
    gradients reduced last; alive: what is allocated."""

    transport: Transport
    handed: Mapping[str, int]
    adds: bool
    changes: dict[int, list[MemoryChange]] = field(default_factory=lambda: defaultdict(list))
    filled: Hashable = None
    reduced: Hashable = None
    alive: dict[Hashable, MemoryChange] = field(default_factory=dict)

    def ask(self, position: int, key: Hashable, size_bytes: int, owner: Holding) -> None:
        if key not in self.alive:
            self.alive[key] = MemoryChange(key, size_bytes, owner)
            self.changes[position].append(self.alive[key])

    def let_go(self, position: int, key: Hashable) -> None:
        if key in self.alive:
            self.changes[position].append(self.alive.pop(key).freed)

    def use(self, position: int, key: Hashable, size_bytes: int, owner: Holding) -> None:
        self.ask(position, key, size_bytes, owner)
        self.let_go(position, key)

    def fill(self, position: int, group: GatheredGroup) -> Hashable:
        """Returns the key of the buffer, which is allocated unless the parameters are there
        already."""
        key = ("gathered", group.path)
        if ("whole", group.names[0]) not in self.alive and key not in self.alive:
            size_bytes = group.bytes_of(group.names)
            self.ask(position, key, size_bytes, Holding.GATHERED)
            if self.transport.copies:
                self.use(position, ("copy", group.path), size_bytes, Holding.GATHERED)
        return key

    def copy_out(self, position: int, group: GatheredGroup) -> None:
        for name in group.names:
            self.ask(position, ("whole", name), group.whole_bytes(name), Holding.GATHERED)

    def gather_in_forward(self, position: int, group: GatheredGroup) -> None:
        before = self.filled
        self.filled = self.fill(position, group)
        self.copy_out(position, group)
        self.let_go(position, before)

    def let_go_of_whole(self, position: int, group: GatheredGroup) -> None:
        for name in group.names:
            self.let_go(position, ("whole", name))

    def reduce(self, position: int, group: GatheredGroup) -> None:
        """Gradients are replaced by this process's parts of their sums; nothing if there are
        none."""
        self.let_go_of_whole(position, group)
        self.let_go(position, self.reduced)
        trained = [name for name in group.parts if name in self.handed]
        if not trained:
            return
        self.reduced = ("reduced", group.path)
        size_bytes = group.bytes_of(trained)
        self.ask(position, self.reduced, size_bytes, Holding.BUCKETS)
        if self.transport.pads:
            filled_up = group.bytes_of(name for name in trained if name in group.uneven)
            self.use(position, ("filled up", group.path), filled_up, Holding.BUCKETS)
        for name in trained:
            gone = MemoryChange(("gradient", name), self.handed[name], Holding.GRADIENTS)
            self.changes[position].append(gone.freed)
        part = ("parts of gradients", group.path, self.adds)
        self.ask(position, part, size_bytes // group.count, Holding.GRADIENTS)
        if self.transport.copies:
            self.use(position, ("copy", group.path), size_bytes, Holding.BUCKETS)
        if self.adds:
            self.let_go(position, part)


def _begins_and_ends(spans: Mapping[str, _Span]) -> list[tuple[int, str, bool]]:
    """Return where blocks end and begin, in order: (position, path, True for an end)."""
    ends = [(span.end, path, True) for path, span in spans.items()]
    begins = [(span.begin, path, False) for path, span in spans.items()]
    return sorted((*ends, *begins), key=lambda turn: (turn[0], not turn[2]))


def _spans(schedule: Schedule, paths: Sequence[str], phase: range) -> dict[str, _Span]:
    runs = [i for i in phase if isinstance(schedule.events[i], Compute)]
    own = defaultdict[str, list[int]](list)
    for number, position in enumerate(runs):
        own[paths[schedule.events[position].node]].append(number)  # type: ignore[union-attr]
    own.pop("", None)
    after = [*runs[1:], phase.stop]
    return {path: _Span(runs[numbers[0]], after[numbers[-1]]) for path, numbers in own.items()}


def _paths(graph: CDGraph, handed: Handed, groups: Mapping[str, GatheredGroup]) -> list[str]:
    path_of = {name: path for path, group in groups.items() for name in group.parts}
    of_data = {d: path_of[name] for name, data in handed.items() if name in path_of for d in data}
    return [
        next((of_data[data] for data in node.writes if data in of_data), block_of(node, groups))
        for node in graph.nodes
    ]


def _open_ended(
    graph: CDGraph, paths: Sequence[str], handed: Handed, groups: Mapping[str, GatheredGroup]
) -> set[str]:
    """Blocks whose backward hands no gradient on, neither to another block nor to the caller."""
    backward = [node for node in graph.nodes if node.phase is Phase.BACKWARD]
    maker = {data: paths[node.index] for node in backward for data in node.writes}
    read = {(data, paths[node.index]) for node in backward for data in node.reads}
    going_on = {maker[data] for data, path in read if maker.get(data, path) != path}
    own = {d for path in groups for name in groups[path].parts for d in handed.get(name, ())}
    going_on |= {maker[d] for d in (*graph.handed, *graph.held) if d in maker and d not in own}
    return {*maker.values()} - going_on
