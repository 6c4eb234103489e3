"""CDGraph: computations and the storages they make (Rockmate, section 3.2).

The unit of memory is the storage: views and in-place results live in the storage that they
share, so they are members of one DataNode. The unit of execution is the ComputeNode: all calls
that must run together because they write one storage. A graph lists forward nodes, then backward
nodes, the former in the order in which eager PyTorch executes them.

These are values: nothing here imports torch, and no pass changes a graph in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

from rockplan.values.columns import aligned
from rockplan.values.literals import picklable
from rockplan.values.sizes import Size


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class DataKind(Enum):
    """Who owns a storage, hence who pays for it (docs/usage.md, The budget)."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    TANGENT = "tangent"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    HOST = "host"

    @property
    def resident(self) -> bool:
        """True if the storage is always alive and never counted: owned by model or caller."""
        return self in _RESIDENT

    @property
    def weighs(self) -> bool:
        """True if the storage's bytes count on the device."""
        return self not in _WEIGHTLESS


# Tuples: a search through four members is faster than hashing one.
_RESIDENT = (DataKind.PARAMETER, DataKind.BUFFER, DataKind.INPUT, DataKind.CONSTANT)
_WEIGHTLESS = (*_RESIDENT, DataKind.HOST)


class Queue(Enum):
    """Where a node runs: among the computations, among copies out of the device, or among copies
    into it. Nodes of one queue run one after the other."""

    COMPUTE = "compute"
    OUT = "out"
    IN = "in"


CALLER_LOSS = "caller_loss"
"""Name of the tangent that stands for scalars of the caller: a loss computed from the result."""


@dataclass(frozen=True, slots=True)
class DataNode:
    """One storage.

    kind: ACTIVATION is made by a forward node, GRADIENT by a backward node; a TANGENT comes alive
    when the backward phase starts; HOST is in the memory of the host, and weighs nothing on the
    device; the other kinds are resident.
    """

    index: int
    name: str
    kind: DataKind
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Static description of a tensor: shape, strides and offset in elements, dtype and device by
    name.

    is_conj, is_neg: the memory holds the conjugate, or the negative, of the values that the tensor
    stands for; kernels resolve that by a copy.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    device: str
    is_conj: bool = False
    is_neg: bool = False


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Reference to `CDGraph.values[index]` inside the arguments of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """Among the arguments of a call, the processes that it exchanges data with: one dimension of a
    device mesh.

    dimension: as the mesh calls it, or its number; size: how many they are; number: of several such
    groups, in the order in which the program comes to them. name: what PyTorch calls this one in
    this process, which is no part of a digest: processes beside it have another.
    """

    dimension: str
    size: int
    number: int
    name: str

    def __str__(self) -> str:
        return repr(self.dimension)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call: `op` as 'aten.addmm.default'.

    args and kwargs hold literals, ValueRefs and (nested) tuples and lists of them; results are
    indices of values, None for a result that is not used.
    """

    op: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    results: tuple[int | None, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """Indices of the results, without unused ones."""
        return tuple([r for r in self.results if r is not None])

    def __reduce__(self) -> tuple[object, ...]:
        return Call, (self.op, picklable(self.args), picklable(self.kwargs), self.results)


NAMESPACE = "rockplan"
"""Namespace of the operators that call compiled kernels."""


def is_kernel(op: str) -> bool:
    """Return whether the operator of this name calls a compiled kernel."""
    return op.startswith(f"{NAMESPACE}.")


def stem(op: str) -> str:
    """Return the name of an operator; for one that calls a kernel without the digest, which differs
    with shapes: 'rockplan.mean_rsqrt_mul.default'."""
    if not is_kernel(op):
        return op
    namespace, name, overload = op.split(".")
    return f"{namespace}.{name.rpartition('_')[0]}.{overload}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Operators that are compiled as one function, with values numbered from 0.

    Equal kernels are one kernel: the name has a digest of all that is computed. It holds no code: a
    compiler makes that from these values, in any process.
    op: the operator that calls it, 'rockplan.mean_rsqrt_mul_0123456789abcdef.default'.
    inputs: specs of its arguments, values 0, 1, ...; calls: what it computes, results numbered from
    len(inputs) on; results, result_specs: the values that it returns, each in a storage of its own,
    and their specs. keeps_roundings: it rounds where eager's operators would, to `rounded`.
    plain: for the in-place variant of a kernel, the operator of the plain kernel, which computes
    the same; over: pairs (position of a result, position of the input that it is written over).
    Other results have storages of their own. sizes: its symbols, with the numbers of the call that
    it was compiled for; values of these come first among the arguments of its operator.
    """

    op: str
    inputs: tuple[TensorSpec, ...]
    calls: tuple[Call, ...]
    results: tuple[int, ...]
    result_specs: tuple[TensorSpec, ...]
    device: str
    keeps_roundings: bool = False
    rounded: tuple[int, ...] = ()
    plain: str = ""
    over: tuple[tuple[int, int], ...] = ()
    sizes: tuple[Size, ...] = ()

    keeps_sizes: ClassVar = True

    @property
    def name(self) -> str:
        return self.op.split(".")[1]

    def __str__(self) -> str:
        """Return the name, then a line for each call."""
        over = dict(self.over)
        written = [f" over %{over[p]}" if p in over else "" for p in range(len(self.results))]
        results = ", ".join(f"%{v}{w}" for v, w in zip(self.results, written, strict=True))
        lines = [f"{self.name}({', '.join(map(_looks, self.inputs))}) -> {results}"]
        for call in self.calls:
            made = ", ".join("_" if r is None else f"%{r}" for r in call.results)
            arguments = f"{_text(call.args)} {_text(call.kwargs)}".removesuffix(" ()")
            lines.append(f"  {made} = {call.op}{arguments}")
        return "\n".join(lines)


def _looks(spec: TensorSpec) -> str:
    return f"{spec.dtype.removeprefix('torch.')}{list(spec.shape)}"


def _text(arguments: object) -> str:
    if isinstance(arguments, tuple):
        return f"({', '.join(map(_text, arguments))})"
    return f"%{arguments.index}" if isinstance(arguments, ValueRef) else str(arguments)


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the captured program: a member of the storage `data`.

    view: the call that derives it from another member of the same storage; None for a value
    that a ComputeNode (or the caller) provides. Views are derived again wherever they are read;
    they cost no memory.
    """

    index: int
    data: int
    name: str
    spec: TensorSpec
    view: Call | None = None


@dataclass(frozen=True, slots=True)
class Takeover:
    """Results that are written into the storages of operands that die: all of them or none.

    operands: storages that the node reads; results: for each operand, the storage that the node
    writes in its place; call: what replaces the first of the node's calls to do so, None in an
    outline. more_bytes: workspace beyond the node's, which `price` adds to it for every execution.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    call: Call | None = None
    more_bytes: int = 0

    @property
    def outline(self) -> Takeover:
        """The part of a takeover that a document (plan file, digest) keeps."""
        return Takeover(self.operands, self.results)


@dataclass(frozen=True, slots=True)
class ComputeNode:
    """Calls that execute as one unit.

    reads, writes: indices of DataNodes, ascending; `writes` are the storages that it allocates.
    calls: the first execution. recalls: a re-execution (without side effects such as running
    statistics); equal to `calls` for most nodes.
    recomputable: False if it may execute only once (its effect or its inputs cannot be had
    again); then whatever it writes is kept until its last use.
    random: draws from a generator; a re-execution replays the generator's state.
    takes: ways to write results into storages of operands that die at this node. An execution uses
    the first whose operands all die; ways that take more come first.
    time_ns, workspace_bytes: from the Profile; workspace is the peak of temporaries inside the
    node, beyond its inputs and `writes`.
    queue: where it takes that time (`oracles.clock`). optional: a schedule may leave it out; it
    then makes again what required nodes make too (copies in).
    module, source: where it came from in the user's model ('transformer.h.0.attn', 'file.py:12').
    function: of autograd, which eager runs at once (`RecordedCall`); ends: data that eager lets go
    after it, which nothing but Python or a kernel in C++ may hold; was_in_place: eager changes an
    operand in place; is_dead: eager runs it, and nobody needs it; all unknown to plan files.
    """

    index: int
    name: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_ns: int = 0
    workspace_bytes: int = 0
    random: bool = False
    recomputable: bool = True
    calls: tuple[Call, ...] = ()
    recalls: tuple[Call, ...] = ()
    takes: tuple[Takeover, ...] = ()
    module: str = ""
    source: str = ""
    queue: Queue = Queue.COMPUTE
    optional: bool = False
    function: int = field(default=0, compare=False, repr=False)
    ends: tuple[int, ...] = field(default=(), compare=False, repr=False)
    was_in_place: bool = field(default=False, compare=False, repr=False)
    is_dead: bool = field(default=False, compare=False, repr=False)

    def called(self, again: bool, takeover: Takeover | None) -> tuple[Call, ...]:
        """Return the calls of one execution. again: a re-execution; takeover: if it uses one."""
        calls = self.recalls if again else self.calls
        return calls if takeover is None or takeover.call is None else (takeover.call, *calls[1:])


@dataclass(frozen=True, slots=True)
class CDGraph:
    """Forward and backward of one module, or of one block of it.

    data[i].index == i, nodes[i].index == i; forward nodes precede backward nodes.
    outputs: non-resident data that must be alive when the forward phase ends.
    held: data that, once made, stay alive to the end (what the caller holds: the module's
    outputs; for a block also the gradients that it passes on).
    handed: GRADIENT data that are handed to autograd when they are freed (parameters' gradients).
    rng_state_bytes: bytes of one saved generator state, alive from the first to the last
    execution of a random node that executes more than once.
    dropped: ACTIVATION data, none of `outputs`, that must not be alive between the forward and the
    backward phase: whatever needs them later makes them again.
    eager_order: indices of all nodes that are not optional, in the order in which eager executes
    them; empty if they are in that order.
    kernels: compiled kernels that calls name. tiles: parts of the head, 0 if not tiled.
    """

    data: tuple[DataNode, ...]
    nodes: tuple[ComputeNode, ...]
    outputs: tuple[int, ...]
    held: tuple[int, ...] = ()
    handed: tuple[int, ...] = ()
    rng_state_bytes: int = 0
    values: tuple[Value, ...] = ()
    dropped: tuple[int, ...] = ()
    eager_order: tuple[int, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    tiles: int = 0

    @property
    def forward(self) -> tuple[ComputeNode, ...]:
        return self.nodes[: self._forward_length]

    @property
    def backward(self) -> tuple[ComputeNode, ...]:
        return self.nodes[self._forward_length :]

    @property
    def _forward_length(self) -> int:
        return bisect_left(self.nodes, True, key=lambda n: n.phase is Phase.BACKWARD)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names, in this process, of the groups that it exchanges data with."""
        arguments = (
            a for n in self.nodes for c in n.calls for a in c.args if isinstance(a, MeshGroup)
        )
        return tuple(dict.fromkeys(group.name for group in arguments))

    @property
    def time_ns(self) -> int:
        """Time of executing every required node once: the iteration without recomputation."""
        return sum(n.time_ns for n in self.nodes if not n.optional)

    def __str__(self) -> str:
        """Return a line for each node: index, phase, name, what it reads -> what it writes, its
        bytes, its time; first a line of what else holds of the graph. Names are those of the
        code."""
        lines = [_facts_line(self), *aligned(map(self._row, self.nodes), numbers=(0, 4, 5))]
        return "\n".join(lines)

    def _row(self, node: ComputeNode) -> tuple[str, ...]:
        size_bytes = sum(self.data[d].size_bytes for d in node.writes)
        remarks = (
            f"workspace {node.workspace_bytes} B" if node.workspace_bytes else "",
            f"takes {_taken(self, node)}" if node.takes else "",
            "random" if node.random else "",
            "" if node.recomputable else "runs once",
            "" if node.queue is Queue.COMPUTE else f"copies {node.queue.value}",
            "optional" if node.optional else "",
            f"in {node.module}" if node.module else "",
        )
        return (
            str(node.index),
            node.phase.value,
            node.name,
            f"{_listed(self, node.reads)} -> {_listed(self, node.writes)}".strip(),
            f"{size_bytes} B",
            f"{node.time_ns} ns",
            ", ".join(filter(None, remarks)),
        )


def _facts_line(graph: CDGraph) -> str:
    tangents = [d.index for d in graph.data if d.kind is DataKind.TANGENT]
    roles = {
        "outputs": graph.outputs,
        "tangents": tangents,
        "held": graph.held,
        "handed": graph.handed,
        "dropped": graph.dropped,
    }
    named = (f"; {role} {_listed(graph, data)}" for role, data in roles.items() if data)
    return f"{len(graph.nodes)} nodes, {graph.time_ns} ns{''.join(named)}"


def _taken(graph: CDGraph, node: ComputeNode) -> str:
    names = ([graph.data[d].name for d in t.operands] for t in node.takes)
    return ", ".join(map(" + ".join, names))


def _listed(graph: CDGraph, data: Iterable[int]) -> str:
    return ", ".join(graph.data[d].name for d in data)


def as_eager(graph: CDGraph) -> CDGraph:
    """Return `graph` as eager executes it: in its order, every result in a storage of its own, and
    nothing dropped."""
    return replace(without_takes(in_eager_order(graph)), dropped=())


def in_eager_order(graph: CDGraph) -> CDGraph:
    """Return `graph` as it was before `lowering.backward_order`, without optional nodes; forward
    nodes keep their indices."""
    order = graph.eager_order or required(graph.nodes)
    nodes = [graph.nodes[i] for i in order]
    placed = tuple(replace(n, index=i) for i, n in enumerate(nodes))
    return replace(graph, nodes=placed, eager_order=())


def without_dead(graph: CDGraph) -> CDGraph:
    """Return `graph`, in eager's order, without nodes that nobody needs; itself if it has none."""
    nodes = [n for n in graph.nodes if not n.is_dead]
    if len(nodes) == len(graph.nodes):
        return graph
    return replace(graph, nodes=tuple(replace(n, index=i) for i, n in enumerate(nodes)))


def without_takes(graph: CDGraph) -> CDGraph:
    """Return `graph` without takeovers: every result has a storage of its own."""
    return replace(graph, nodes=tuple(replace(n, takes=()) if n.takes else n for n in graph.nodes))


_CALLER_GRADIENTS = 4


def caller_bytes(graph: CDGraph) -> int:
    """Return the bytes that the caller's loss is taken to need where the backward phase starts,
    beyond the outputs: the incoming gradients, and three times as much from which they are
    computed. As measured, a mean of squares needs 4 times their bytes, cross entropy, `mse_loss`
    and `binary_cross_entropy_with_logits` 3, a sum of products 2, a sum 1."""
    tangents = (d.size_bytes for d in graph.data if d.kind is DataKind.TANGENT)
    return _CALLER_GRADIENTS * sum(tangents)


def required(nodes: Iterable[ComputeNode]) -> tuple[int, ...]:
    """Return the indices of those `nodes` that every schedule executes."""
    return tuple([n.index for n in nodes if not n.optional])


def added_to(graph: CDGraph) -> frozenset[int]:
    """Return the gradients to which autograd may add others, in the order of the nodes that read
    them: the handed ones, and those of inputs, which are alive to the end."""
    held = (d for d in graph.held if graph.data[d].kind is DataKind.GRADIENT)
    return frozenset((*graph.handed, *held))


def movable(graph: CDGraph) -> frozenset[int]:
    """Return the indices of the backward nodes whose first execution may come earlier or later than
    by their index, as long as it comes after the makers of their operands and before their readers.
    The other nodes keep their order: they draw random numbers, have side effects, make what the
    caller holds, or make what autograd adds to a gradient."""
    in_order = added_to(graph)
    held = frozenset(graph.held)
    return frozenset(
        n.index
        for n in graph.backward
        if n.recomputable
        and not n.optional
        and not n.random
        and n.calls == n.recalls
        and in_order.isdisjoint(n.reads)
        and held.isdisjoint(n.writes)
    )


def producers(graph: CDGraph) -> dict[int, int]:
    """Return data index -> first node that writes it; no entry for resident data and tangents."""
    first: dict[int, int] = {}
    for node in graph.nodes:
        for d in node.writes:
            first.setdefault(d, node.index)
    return first


def readers(graph: CDGraph) -> dict[int, tuple[int, ...]]:
    """Return data index -> indices of nodes that read it, ascending; every data has an entry."""
    readers_of: dict[int, list[int]] = {d.index: [] for d in graph.data}
    for node in graph.nodes:
        for d in node.reads:
            readers_of[d].append(node.index)
    return {d: tuple(nodes) for d, nodes in readers_of.items()}


def value_refs(arguments: object) -> list[ValueRef]:
    """Return every ValueRef (reference to a tensor of the graph) in nested tuples, lists and dicts
    of a call's arguments, in order."""
    if isinstance(arguments, ValueRef):
        return [arguments]
    references: list[ValueRef] = []
    if isinstance(arguments, _CONTAINERS):
        for item in arguments.values() if isinstance(arguments, dict) else arguments:
            if isinstance(item, ValueRef):
                references.append(item)
            # Most items are literals, which need no recursive call.
            elif isinstance(item, _CONTAINERS):
                references += value_refs(item)
    return references


_CONTAINERS = (tuple, list, dict)


def refs(call: Call) -> list[ValueRef]:
    """Return every ValueRef in the arguments of `call`, in order."""
    references = value_refs(call.args)
    for _, argument in call.kwargs:
        references += value_refs(argument)
    return references


def with_each_ref(argument: Any, of: Callable[[int], object]) -> Any:
    """Replace each ValueRef in nested tuples by `of(its index)`."""
    if isinstance(argument, ValueRef):
        return of(argument.index)
    return (
        tuple([with_each_ref(a, of) for a in argument]) if isinstance(argument, tuple) else argument
    )


def renamed(
    call: Call, argument: Callable[[int], int], result: Callable[[int], int | None]
) -> Call:
    """Return `call` with other indices of values: those of arguments by the function `argument`,
    those of results by `result`, which may return None for a result that nothing needs."""

    def ref(index: int) -> ValueRef:
        return ValueRef(argument(index))

    kwargs = tuple([(name, with_each_ref(a, ref)) for name, a in call.kwargs])
    results = tuple([None if r is None else result(r) for r in call.results])
    return Call(call.op, with_each_ref(call.args, ref), kwargs, results)
