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
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from rockplan.values.columns import aligned
from rockplan.values.literals import picklable


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
        """Always alive and never counted: owned by the model or by the caller."""
        return self in _RESIDENT

    @property
    def weighs(self) -> bool:
        """Do its bytes count on the device?"""
        return self not in _WEIGHTLESS


# Tuples: to find a member is faster than to hash one.
_RESIDENT = (DataKind.PARAMETER, DataKind.BUFFER, DataKind.INPUT, DataKind.CONSTANT)
_WEIGHTLESS = (*_RESIDENT, DataKind.HOST)


class Queue(Enum):
    """Where a node runs: beside the computations, copies out of the device and copies into it, each
    one after the other."""

    COMPUTE = "compute"
    OUT = "out"
    IN = "in"


CALLER_LOSS = "caller_loss"
"""Name of the tangent that stands for scalars of the caller: a loss that is made of the result."""


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
    """Static description of a tensor: shape and strides in elements, dtype and device by name.

    is_conj, is_neg: what is stored is the conjugate, or the negative, of what it stands for, and
    kernels copy it.
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
class Call:
    """One operator call: `op` as 'aten.addmm.default'.

    args and kwargs hold literals, ValueRefs and (nested) tuples and lists of them; results are
    indices of values, None for a result that nobody names.
    """

    op: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    results: tuple[int | None, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """Its results that have a name."""
        return tuple([r for r in self.results if r is not None])

    def __reduce__(self) -> tuple[object, ...]:
        return Call, (self.op, picklable(self.args), picklable(self.kwargs), self.results)


NAMESPACE = "rockplan"
"""Of the operators that call kernels."""


def is_kernel(op: str) -> bool:
    """Does the operator of this name call a kernel?"""
    return op.startswith(f"{NAMESPACE}.")


def stem(op: str) -> str:
    """The name of an operator; without the digest, which differs with shapes, if it calls a
    kernel: 'rockplan.mean_rsqrt_mul.default'."""
    if not is_kernel(op):
        return op
    namespace, name, overload = op.split(".")
    return f"{namespace}.{name.rpartition('_')[0]}.{overload}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Operators that are compiled as one function, in a numbering of their own. Equal kernels are
    one, and the name has a digest of all that is computed. No code: a compiler makes it from these
    values, here or elsewhere.

    op: the operator that calls it, 'rockplan.mean_rsqrt_mul_0123456789abcdef.default'.

    inputs: its arguments, values 0, 1, ...; calls: what it computes, whose results are numbered
    from there on; results, result_specs: the values that it returns, each in a storage of its own,
    and how they look. keeps_roundings: it rounds where operators of eager would, to `rounded`.

    plain, over: of a kernel that computes what `plain` does, over its inputs: places of results
    that are written there, with those of the inputs. Other results have storages of their own.
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

    @property
    def name(self) -> str:
        return self.op.split(".")[1]

    def __str__(self) -> str:
        """The name, then a line a call."""
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
    """Results that are written where operands die, all of them or none.

    operands: storages that the node reads; results: for each of them, the one that the node makes
    there; call: of the node's calls the first, which does so. None in an outline. more_bytes: what
    it needs beyond the node's workspace, which counts for every execution of the node (`price`).
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    call: Call | None = None
    more_bytes: int = 0

    @property
    def outline(self) -> Takeover:
        """What a document keeps of it."""
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
    takes: ways to write results where operands die at this node, of which it goes one: the first
    whose operands all die. Those that take more come first.
    time_ns, workspace_bytes: from the Profile; workspace is the peak of temporaries inside the
    node, beyond its inputs and `writes`.
    queue: on which it takes that time (`oracles.clock`). optional: it need not run; what it makes
    that others make as well is made again by it.
    module, source: where it came from in the user's model ('transformer.h.0.attn', 'file.py:12').
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

    def called(self, again: bool, takeover: Takeover | None) -> tuple[Call, ...]:
        """What an execution calls that goes this way to write results where operands die."""
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
    eager_order: all nodes that are not optional in the order in which eager executes them; empty if
    it is theirs.
    kernels: compiled ones that calls name. tiles: how many parts the head is written in, 0 where it
    is whole.
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
    def time_ns(self) -> int:
        """Time of one execution of every node that must run: the iteration without
        recomputation."""
        return sum(n.time_ns for n in self.nodes if not n.optional)

    def __str__(self) -> str:
        """A line a node: index, phase, name, what it reads -> what it writes, its bytes, its time;
        and what else holds of it. Names of nodes and data are those of the generated code."""
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
    """'a' or 'b', or both 'a + b'."""
    names = ([graph.data[d].name for d in t.operands] for t in node.takes)
    return ", ".join(map(" + ".join, names))


def _listed(graph: CDGraph, data: Iterable[int]) -> str:
    return ", ".join(graph.data[d].name for d in data)


def as_eager(graph: CDGraph) -> CDGraph:
    """`graph` as eager executes it: in its order, every result in a storage of its own."""
    return without_takes(in_eager_order(graph))


def in_eager_order(graph: CDGraph) -> CDGraph:
    """`graph` as it was before `lowering.backward_order`, without what need not run; forward nodes
    keep their indices."""
    order = graph.eager_order or required(graph.nodes)
    nodes = [graph.nodes[i] for i in order]
    placed = tuple(replace(n, index=i) for i, n in enumerate(nodes))
    return replace(graph, nodes=placed, eager_order=())


def without_takes(graph: CDGraph) -> CDGraph:
    """`graph` where every result has a storage of its own."""
    return replace(graph, nodes=tuple(replace(n, takes=()) if n.takes else n for n in graph.nodes))


_CALLER_GRADIENTS = 4


def caller_bytes(graph: CDGraph) -> int:
    """What the caller's loss needs where the backward phase starts, beyond the outputs: the
    gradients that come in, and three times as much from which they are computed.

    As measured, a mean of squares needs 4 times their bytes, cross entropy, `mse_loss` and
    `binary_cross_entropy_with_logits` 3, a sum of products 2, a sum 1.
    """
    tangents = (d.size_bytes for d in graph.data if d.kind is DataKind.TANGENT)
    return _CALLER_GRADIENTS * sum(tangents)


def required(nodes: Iterable[ComputeNode]) -> tuple[int, ...]:
    """Those of `nodes` that every schedule executes."""
    return tuple([n.index for n in nodes if not n.optional])


def may_run_again(graph: CDGraph) -> frozenset[int]:
    """Nodes that a schedule may execute more than once: autograd would get a gradient twice."""
    handed = frozenset(graph.handed)
    return frozenset(n.index for n in graph.nodes if n.recomputable and handed.isdisjoint(n.writes))


def added_to(graph: CDGraph) -> frozenset[int]:
    """Gradients to which autograd may add others, in the order of the nodes that read them: those
    that it is handed, and those of inputs, which are alive to the end."""
    held = (d for d in graph.held if graph.data[d].kind is DataKind.GRADIENT)
    return frozenset((*graph.handed, *held))


def movable(graph: CDGraph) -> frozenset[int]:
    """Backward nodes that may run for the first time sooner or later than by their index, wherever
    what they read is made before, and what reads them comes after.

    Others draw numbers, act on something outside, make what the caller holds, or what autograd adds
    to a gradient: all of that in order.
    """
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
    """data index -> index of the first node that writes it; resident data and tangents have
    none."""
    first: dict[int, int] = {}
    for node in graph.nodes:
        for d in node.writes:
            first.setdefault(d, node.index)
    return first


def readers(graph: CDGraph) -> dict[int, tuple[int, ...]]:
    """data index -> indices of the nodes that read it, ascending; every data has an entry."""
    readers_of: dict[int, list[int]] = {d.index: [] for d in graph.data}
    for node in graph.nodes:
        for d in node.reads:
            readers_of[d].append(node.index)
    return {d: tuple(nodes) for d, nodes in readers_of.items()}


def value_refs(arguments: object) -> list[ValueRef]:
    """Every ValueRef in nested arguments of a call, in order."""
    if isinstance(arguments, ValueRef):
        return [arguments]
    references: list[ValueRef] = []
    if isinstance(arguments, _CONTAINERS):
        for item in arguments.values() if isinstance(arguments, dict) else arguments:
            if isinstance(item, ValueRef):
                references.append(item)
            # Most are literals: no call for each of them.
            elif isinstance(item, _CONTAINERS):
                references += value_refs(item)
    return references


_CONTAINERS = (tuple, list, dict)


def refs(call: Call) -> list[ValueRef]:
    """Of all arguments."""
    references = value_refs(call.args)
    for _, argument in call.kwargs:
        references += value_refs(argument)
    return references


def with_each_ref(argument: Any, of: Callable[[int], object]) -> Any:
    """`argument` with what `of` says of its index in place of each ValueRef."""
    if isinstance(argument, ValueRef):
        return of(argument.index)
    return (
        tuple([with_each_ref(a, of) for a in argument]) if isinstance(argument, tuple) else argument
    )


def renamed(
    call: Call, argument: Callable[[int], int], result: Callable[[int], int | None]
) -> Call:
    """`call` with other numbers for its arguments and results."""

    def ref(index: int) -> ValueRef:
        return ValueRef(argument(index))

    kwargs = tuple([(name, with_each_ref(a, ref)) for name, a in call.kwargs])
    results = tuple([None if r is None else result(r) for r in call.results])
    return Call(call.op, with_each_ref(call.args, ref), kwargs, results)
