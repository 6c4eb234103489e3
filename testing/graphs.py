"""Small random CDGraphs for the tests, and two realistic transformer blocks.

Every generator draws from a `random.Random`: pass `random.Random(seed)` for a fixed graph, or use
the hypothesis strategies at the end, which drive the same code. Every graph is legal: its
`keep_all` schedule passes `verify`.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from rockplan.errors import IllegalSchedule
from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate, timeline
from rockplan.oracles.verify import verify
from rockplan.values.block import Block
from rockplan.values.graph import (
    Call,
    CDGraph,
    ComputeNode,
    DataKind,
    DataNode,
    Phase,
    Takeover,
    TensorSpec,
    Value,
    ValueRef,
    readers,
)
from rockplan.values.order import keep_all_order
from rockplan.values.schedule import Schedule, keep_all, merge_handovers, with_frees


@dataclass(frozen=True, slots=True)
class Ranges:
    """What the random generators draw from; percentages are chances per node."""

    max_size_bytes: int = 12
    max_time_ns: int = 20
    max_workspace_bytes: int = 5
    max_rng_state_bytes: int = 2
    random_percent: int = 15
    pinned_percent: int = 5
    multi_output_percent: int = 30
    handed_percent: int = 40
    two_step_backward_percent: int = 25


DEFAULT = Ranges()


@dataclass
class Draft:
    """A CDGraph under construction: nodes name data by index, forward and backward apart."""

    data: list[DataNode] = field(default_factory=list)
    forward: list[ComputeNode] = field(default_factory=list)
    backward: list[ComputeNode] = field(default_factory=list)
    handed: list[int] = field(default_factory=list)

    def add_data(self, kind: DataKind, size_bytes: int, name: str = "") -> int:
        index = len(self.data)
        self.data.append(DataNode(index, name or f"{kind.value[0]}{index}", kind, size_bytes))
        return index

    def add_node(
        self,
        phase: Phase,
        reads: list[int],
        writes: list[int],
        *,
        time_ns: int,
        workspace_bytes: int = 0,
        random: bool = False,
        recomputable: bool = True,
        name: str = "",
    ) -> ComputeNode:
        nodes = self.forward if phase is Phase.FORWARD else self.backward
        node = ComputeNode(
            index=-1,
            name=name or f"{phase.value}{len(nodes)}",
            phase=phase,
            reads=tuple(sorted(set(reads))),
            writes=tuple(sorted(writes)),
            time_ns=time_ns,
            workspace_bytes=workspace_bytes,
            random=random,
            recomputable=recomputable,
        )
        nodes.append(node)
        return node

    def finish(
        self, outputs: tuple[int, ...], held: tuple[int, ...] = (), rng_state_bytes: int = 0
    ) -> CDGraph:
        nodes = tuple(replace(n, index=i) for i, n in enumerate((*self.forward, *self.backward)))
        return CDGraph(
            data=tuple(self.data),
            nodes=nodes,
            outputs=outputs,
            held=held,
            handed=tuple(self.handed),
            rng_state_bytes=rng_state_bytes,
        )


def gelu_of_product() -> CDGraph:
    """Four nodes: `gelu(x * w)` and its gradient of the parameter `w`, with their operators."""
    product = Call("aten.mul.Tensor", (ValueRef(0), ValueRef(1)), (), (2,))
    gelu = Call("aten.gelu.default", (ValueRef(2),), (), (3,))
    gelu_backward = Call("aten.gelu_backward.default", (ValueRef(4), ValueRef(2)), (), (5,))
    product_backward = Call("aten.mul.Tensor", (ValueRef(5), ValueRef(1)), (), (6,))
    data = (
        DataNode(0, "w", DataKind.PARAMETER, 64),
        DataNode(1, "x", DataKind.INPUT, 64),
        DataNode(2, "h", DataKind.ACTIVATION, 64),
        DataNode(3, "y", DataKind.ACTIVATION, 64),
        DataNode(4, "g_y", DataKind.TANGENT, 64),
        DataNode(5, "g_h", DataKind.GRADIENT, 64),
        DataNode(6, "g_w", DataKind.GRADIENT, 64),
    )
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    nodes = (
        ComputeNode(0, "mul_0", forward, (0, 1), (2,), 100, source="model.py:3"),
        ComputeNode(1, "gelu_0", forward, (2,), (3,), 250, module="act", source="model.py:4"),
        ComputeNode(
            2, "gelu_backward_0", backward, (2, 4), (5,), 400, 16, module="act", source="model.py:4"
        ),
        ComputeNode(3, "mul_1", backward, (1, 5), (6,), 100, source="model.py:3"),
    )
    calls = (product, gelu, gelu_backward, product_backward)
    spec = TensorSpec((4, 4), (4, 1), 0, "torch.float32", "cpu")
    return CDGraph(
        data=data,
        nodes=tuple(
            replace(n, calls=(c,), recalls=(c,)) for n, c in zip(nodes, calls, strict=True)
        ),
        outputs=(3,),
        held=(3,),
        handed=(6,),
        values=tuple(Value(d.index, d.index, d.name, spec) for d in data),
    )


def random_graph(rng: random.Random, forward_nodes: int = 4, ranges: Ranges = DEFAULT) -> CDGraph:
    """A forward DAG, and a backward that reads forward storages and gradients.

    At times the output is held, and an inner storage is a second, held, output.
    """
    draft = Draft()
    source = draft.add_data(DataKind.INPUT, rng.randint(1, ranges.max_size_bytes))
    output = _draw_forward(draft, rng, ranges, source, forward_nodes)
    tangent = draft.add_data(DataKind.TANGENT, rng.randint(1, ranges.max_size_bytes))
    _draw_backward(draft, rng, ranges, draft.forward, {output: [tangent]}, None)
    inner = [d for n in draft.forward for d in n.writes if d != output]
    outputs = [output]
    held = [output] if _chance(rng, 30) else []
    if inner and _chance(rng, 20):
        second = rng.choice(inner)
        outputs.append(second)
        held.append(second)
    return draft.finish(
        tuple(sorted(outputs)), tuple(sorted(held)), rng.randint(0, ranges.max_rng_state_bytes)
    )


def with_random_takes(rng: random.Random, graph: CDGraph) -> CDGraph:
    """`graph` where results may take over operands, which are as large: one of two, or several at
    once."""
    return _with_several_taken(rng, graph) if _chance(rng, 50) else _with_one_taken(rng, graph)


def _with_one_taken(rng: random.Random, graph: CDGraph) -> CDGraph:
    outside = {*graph.outputs, *graph.held, *graph.handed}
    ours = {DataKind.ACTIVATION, DataKind.GRADIENT}
    data, nodes = list(graph.data), list(graph.nodes)
    for node in graph.nodes:
        found = [d for d in node.reads if data[d].kind in ours and d not in outside]
        if len(node.writes) != 1 or node.random or outside & set(node.writes) or not found:
            continue
        (written,) = node.writes
        best = rng.choice(found)
        data[written] = replace(data[written], size_bytes=data[best].size_bytes)
        takes = [best, *(d for d in found if d != best and _chance(rng, 50))]
        nodes[node.index] = replace(node, takes=tuple(Takeover((d,), node.writes) for d in takes))
    return replace(graph, data=tuple(data), nodes=tuple(nodes))


def _with_several_taken(rng: random.Random, graph: CDGraph) -> CDGraph:
    """`graph` where some nodes make several results, which may all take over operands, or some."""
    outside = {*graph.outputs, *graph.held, *graph.handed}
    ours = {DataKind.ACTIVATION, DataKind.GRADIENT}
    data, nodes = list(graph.data), list(graph.nodes)
    for node in graph.nodes:
        found = [d for d in node.reads if data[d].kind in ours and d not in outside]
        if node.random or not found or outside.intersection(node.writes):
            continue
        rng.shuffle(found)
        writes = list(node.writes)
        while len(writes) < len(found) and _chance(rng, 70):
            kind = data[node.writes[0]].kind
            data.append(DataNode(len(data), f"more_{len(data)}", kind, 0))
            writes.append(len(data) - 1)
        pairs = list(zip(found, writes, strict=False))
        for operand, result in pairs:
            data[result] = replace(data[result], size_bytes=data[operand].size_bytes)
        takes = [Takeover(*zip(*pairs, strict=True))]
        if len(pairs) > 1 and _chance(rng, 50):
            takes.append(Takeover(*zip(*pairs[:-1], strict=True)))
        nodes[node.index] = replace(node, writes=tuple(sorted(writes)), takes=tuple(takes))
    return replace(graph, data=tuple(data), nodes=tuple(nodes))


def with_more_held(rng: random.Random, graph: CDGraph) -> CDGraph:
    """`graph` where the caller holds a gradient, as those of inputs, and some tangents, as those of
    losses."""
    gradients = [d.index for d in graph.data if d.kind is DataKind.GRADIENT]
    tangents = [d.index for d in graph.data if d.kind is DataKind.TANGENT]
    held = {*graph.held, rng.choice(gradients), *(d for d in tangents if _chance(rng, 50))}
    handed = tuple(d for d in graph.handed if d not in held)
    nodes = tuple(
        replace(n, takes=tuple(t for t in n.takes if held.isdisjoint((*t.operands, *n.writes))))
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes, held=tuple(sorted(held)), handed=handed)


def constrained_graph(rng: random.Random, ranges: Ranges = DEFAULT) -> CDGraph:
    """A random graph some of whose activations must not be kept between the phases."""
    while True:
        graph = (
            random_chain(rng, (2, 3, 2), ranges)[0]
            if rng.random() < 0.5
            else random_graph(rng, 6, ranges)
        )
        read = {d for node in graph.backward for d in node.reads}
        outside = {*graph.outputs, *graph.held}
        made = {d for node in graph.forward if node.recomputable for d in node.writes}
        inner = sorted(made.intersection(read) - outside)
        if inner:
            dropped = tuple(sorted(rng.sample(inner, rng.randint(1, len(inner)))))
            return replace(graph, dropped=dropped)


def varied_graph(seed: int) -> CDGraph:
    """A small graph of one of four kinds: with states of generators, with storages that are taken
    over, a block, with activations that must not be kept."""
    rng, with_states = random.Random(seed), Ranges(random_percent=40, max_rng_state_bytes=5)
    match seed % 4:
        case 0:
            return with_more_held(rng, random_graph(rng, rng.randint(2, 4), with_states))
        case 1:
            return with_random_takes(rng, random_graph(rng, rng.randint(2, 4)))
        case 2:
            return random_block(rng, rng.randint(2, 3), with_states).problem
        case _:
            return constrained_graph(rng)


def with_room(graph: CDGraph, room_bytes: int) -> CDGraph:
    """With as much for the caller's loss, of which exhaustive search knows nothing."""
    last = len(graph.forward) - 1
    nodes = [replace(n, workspace_bytes=room_bytes) if n.index == last else n for n in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def random_chain(
    rng: random.Random, lengths: tuple[int, ...] = (2, 3, 2), ranges: Ranges = DEFAULT
) -> tuple[CDGraph, tuple[Block, ...]]:
    """A whole graph that is a chain of blocks of `lengths` forward nodes, and its blocks."""
    draft = Draft()
    source: int = draft.add_data(DataKind.INPUT, rng.randint(1, ranges.max_size_bytes))
    separators: list[int] = [source]
    pieces: list[list[ComputeNode]] = []
    for length in lengths:
        start = len(draft.forward)
        separators.append(_draw_forward(draft, rng, ranges, separators[-1], length))
        pieces.append(draft.forward[start:])
    tangent = draft.add_data(DataKind.TANGENT, rng.randint(1, ranges.max_size_bytes))
    gradients = [tangent]
    backward_counts: list[int] = []
    for k in reversed(range(len(lengths))):
        start = len(draft.backward)
        needs_gradient = separators[k] if k > 0 else None
        partials = {separators[k + 1]: gradients}
        gradients = _draw_backward(draft, rng, ranges, pieces[k], partials, needs_gradient)
        backward_counts.append(len(draft.backward) - start)
    held = (separators[-1],) if _chance(rng, 50) else ()
    graph = draft.finish((separators[-1],), held, rng.randint(0, ranges.max_rng_state_bytes))
    return graph, cut_chain(graph, lengths, tuple(backward_counts[::-1]), tuple(separators))


def repeated_chain(
    rng: random.Random, copies: int, length: int = 3, ranges: Ranges = DEFAULT
) -> tuple[CDGraph, tuple[Block, ...]]:
    """A chain of `copies` blocks, the inner ones alike (same digest), as in a transformer."""
    seed = rng.randint(0, 2**32)
    size_bytes = rng.randint(1, ranges.max_size_bytes)
    draft = Draft()
    separators = [draft.add_data(DataKind.INPUT, size_bytes)]
    pieces: list[list[ComputeNode]] = []
    for _ in range(copies):
        start = len(draft.forward)
        output = _draw_forward(
            draft, random.Random(seed), ranges, separators[-1], length, size_bytes
        )
        separators.append(output)
        pieces.append(draft.forward[start:])
    gradients = [draft.add_data(DataKind.TANGENT, size_bytes)]
    backward_counts: list[int] = []
    for k in reversed(range(copies)):
        start = len(draft.backward)
        needs_gradient = separators[k] if k > 0 else None
        gradients = _draw_backward(
            draft,
            random.Random(seed + 1),
            ranges,
            pieces[k],
            {separators[k + 1]: gradients},
            needs_gradient,
        )
        backward_counts.append(len(draft.backward) - start)
    graph = draft.finish((separators[-1],), (), rng.randint(0, ranges.max_rng_state_bytes))
    return graph, cut_chain(
        graph, (length,) * copies, tuple(backward_counts[::-1]), tuple(separators)
    )


def random_block(rng: random.Random, forward_nodes: int = 4, ranges: Ranges = DEFAULT) -> Block:
    """The middle block of a chain: resident input, tangents in, held gradients out."""
    _, blocks = random_chain(rng, (1, forward_nodes, 1), ranges)
    return blocks[1]


def cut_chain(
    graph: CDGraph,
    forward_counts: tuple[int, ...],
    backward_counts: tuple[int, ...],
    separators: tuple[int, ...],
) -> tuple[Block, ...]:
    """Blocks of a chain-shaped graph; block k reads separators[k] and makes separators[k + 1].

    backward_counts[k]: backward nodes of block k; the last block's come first in the graph.
    """
    blocks = []
    forward_start = 0
    backward_stop = len(graph.nodes)
    for k, (n_forward, n_backward) in enumerate(zip(forward_counts, backward_counts, strict=True)):
        forward = tuple(range(forward_start, forward_start + n_forward))
        backward = tuple(range(backward_stop - n_backward, backward_stop))
        first = separators[k] if k > 0 else None
        blocks.append(_cut_block(graph, k, forward, backward, first, separators[k + 1]))
        forward_start += n_forward
        backward_stop -= n_backward
    return tuple(blocks)


def _cut_block(
    graph: CDGraph,
    index: int,
    forward: tuple[int, ...],
    backward: tuple[int, ...],
    first: int | None,
    output: int,
) -> Block:
    inside = [graph.nodes[i] for i in (*forward, *backward)]
    written = {d for n in inside for d in n.writes}
    touched = sorted({d for n in inside for d in (*n.reads, *n.writes)})
    local = {d: i for i, d in enumerate(touched)}
    node_set = {n.index for n in inside}
    read_by = readers(graph)

    def kind(d: int) -> DataKind:
        if d in written or graph.data[d].kind.resident:
            return graph.data[d].kind
        return DataKind.INPUT if d == first else DataKind.TANGENT

    passed_on = [
        d
        for d in touched
        if d in written
        and graph.data[d].kind is DataKind.GRADIENT
        and any(i not in node_set for i in read_by[d])
    ]
    problem = CDGraph(
        data=tuple(
            DataNode(local[d], f"d{local[d]}", kind(d), graph.data[d].size_bytes) for d in touched
        ),
        nodes=tuple(
            replace(
                n,
                index=i,
                name=f"n{i}",
                reads=tuple(sorted(local[d] for d in n.reads)),
                writes=tuple(sorted(local[d] for d in n.writes)),
            )
            for i, n in enumerate(inside)
        ),
        outputs=(local[output],),
        held=tuple(sorted(local[d] for d in {*passed_on, *(written & set(graph.held))})),
        handed=tuple(local[d] for d in graph.handed if d in written),
        rng_state_bytes=graph.rng_state_bytes,
    )
    return Block(
        index=index,
        forward=forward,
        backward=backward,
        input=first,
        output=output,
        problem=problem,
        digest=hashlib.sha256(repr(problem).encode()).hexdigest(),
        incoming_gradient_bytes=GraphView(problem).bytes_of(GraphView(problem).tangents),
        background_bytes=0,
        name=f"block{index}",
    )


def _chance(rng: random.Random, percent: int) -> bool:
    return rng.randint(0, 99) < percent


def _draw_forward(
    draft: Draft,
    rng: random.Random,
    ranges: Ranges,
    source: int,
    count: int,
    output_bytes: int | None = None,
) -> int:
    """Add `count` forward nodes that start from `source`; returns the last one's output."""
    available = [source]
    for position in range(count):
        last = position == count - 1
        extra = rng.sample(available, rng.randint(0, min(2, len(available) - 1)))
        writes = 1 if last or not _chance(rng, ranges.multi_output_percent) else 2
        sizes = [rng.randint(1, ranges.max_size_bytes) for _ in range(writes)]
        if last and output_bytes is not None:
            sizes = [output_bytes]
        made = [draft.add_data(DataKind.ACTIVATION, size) for size in sizes]
        draft.add_node(
            Phase.FORWARD,
            [available[-1], *extra],
            made,
            time_ns=rng.randint(1, ranges.max_time_ns),
            workspace_bytes=rng.randint(0, ranges.max_workspace_bytes),
            random=_chance(rng, ranges.random_percent),
            recomputable=not _chance(rng, ranges.pinned_percent),
        )
        available += made
    return available[-1]


def _draw_backward(
    draft: Draft,
    rng: random.Random,
    ranges: Ranges,
    forward: list[ComputeNode],
    partials: dict[int, list[int]],
    source: int | None,
) -> list[int]:
    """Add the backward of `forward`, last node first; returns the gradients of `source`.

    partials: data -> its gradients so far, one for each reader; the producer's backward reads
    them all. source: the storage outside `forward` whose gradient is wanted, if any.
    """
    wanted = {d for n in forward for d in n.writes} | ({source} if source is not None else set())
    partials = {d: list(found) for d, found in partials.items()}
    for node in reversed(forward):
        incoming = [g for d in node.writes for g in partials.get(d, [])]
        if not incoming:
            continue
        if _chance(rng, ranges.two_step_backward_percent):
            middle = draft.add_data(DataKind.GRADIENT, rng.randint(1, ranges.max_size_bytes))
            _draw_backward_node(draft, rng, ranges, node, incoming, [middle])
            incoming = [middle]
        made = []
        for d in node.reads:
            if d in wanted:
                gradient = draft.add_data(DataKind.GRADIENT, draft.data[d].size_bytes)
                partials.setdefault(d, []).append(gradient)
                made.append(gradient)
        if not made or _chance(rng, ranges.handed_percent):
            made.append(draft.add_data(DataKind.GRADIENT, rng.randint(1, ranges.max_size_bytes)))
            draft.handed.append(made[-1])
        _draw_backward_node(draft, rng, ranges, node, incoming, made)
    return partials.get(source, []) if source is not None else []


def _draw_backward_node(
    draft: Draft,
    rng: random.Random,
    ranges: Ranges,
    node: ComputeNode,
    incoming: list[int],
    made: list[int],
) -> None:
    """A backward node of `node`: reads `incoming` and some of what `node` reads and writes."""
    around = [*node.reads, *node.writes]
    saved = rng.sample(around, rng.randint(0, min(2, len(around))))
    draft.add_node(
        Phase.BACKWARD,
        [*incoming, *saved],
        made,
        time_ns=rng.randint(1, ranges.max_time_ns),
        workspace_bytes=rng.randint(0, ranges.max_workspace_bytes),
    )


@dataclass
class Roofline:
    """Writes operators into a Draft at the price of a machine of 100 GB/s and 2 Tflop/s.

    Elements take four bytes; `masks` of dropout take one.
    """

    draft: Draft = field(default_factory=Draft)

    def source(self, kind: DataKind, elements: int, name: str) -> int:
        return self.draft.add_data(kind, 4 * elements, name)

    def run(
        self,
        phase: Phase,
        name: str,
        reads: list[int],
        results: dict[str, int],
        *,
        flops: int = 0,
        random: bool = False,
        handed: bool = False,
    ) -> list[int]:
        """One operator; results: name -> elements; a name that ends in 'mask' is of bytes."""
        kind = DataKind.ACTIVATION if phase is Phase.FORWARD else DataKind.GRADIENT
        made = [
            self.draft.add_data(kind, n if key.endswith("mask") else 4 * n, key)
            for key, n in results.items()
        ]
        moved = sum(self.draft.data[d].size_bytes for d in (*reads, *made))
        self.draft.add_node(
            phase,
            reads,
            made,
            time_ns=max(moved // 100, flops // 2_000, 1_000),
            random=random,
            name=name,
        )
        if handed:
            self.draft.handed += made
        return made

    def forward(
        self,
        name: str,
        reads: list[int],
        results: dict[str, int],
        *,
        flops: int = 0,
        random: bool = False,
    ) -> list[int]:
        return self.run(Phase.FORWARD, name, reads, results, flops=flops, random=random)

    def backward(
        self, name: str, reads: list[int], results: dict[str, int], *, flops: int = 0
    ) -> int:
        return self.run(Phase.BACKWARD, name, reads, results, flops=flops)[0]

    def parameter_gradient(
        self, name: str, reads: list[int], elements: int, *, flops: int = 0
    ) -> None:
        self.run(Phase.BACKWARD, name, reads, {name: elements}, flops=flops, handed=True)

    def linear_backward(
        self, name: str, gradient: int, saved: int, rows: int, inputs: int, outputs: int
    ) -> int:
        """Gradient of the input; those of weight and bias are handed over."""
        flops = 2 * rows * inputs * outputs
        result = self.backward(
            f"{name}.input", [gradient], {f"g_{name}": rows * inputs}, flops=flops
        )
        self.parameter_gradient(f"{name}.weight", [gradient, saved], inputs * outputs, flops=flops)
        self.parameter_gradient(f"{name}.bias", [gradient], outputs)
        return result

    def norm_backward(self, gradient: int, saved: list[int], elements: int, width: int) -> int:
        made = self.run(
            Phase.BACKWARD,
            "norm.backward",
            [gradient, *saved],
            {"g_norm": elements, "g_gamma": width, "g_beta": width},
        )
        self.draft.handed += made[1:]
        return made[0]


def mlp_block(batch: int = 4, length: int = 256, width: int = 768) -> CDGraph:
    """The MLP half of a GPT-2 block: 6 forward and 10 backward operators."""
    rows, inner = batch * length, 4 * width
    flops = 2 * rows * width * inner
    r = Roofline()
    x = r.source(DataKind.INPUT, rows * width, "x")
    h, mean, rstd = r.forward("norm", [x], {"h": rows * width, "mean": rows, "rstd": rows})
    (u,) = r.forward("fc", [h], {"u": rows * inner}, flops=flops)
    (v,) = r.forward("gelu", [u], {"v": rows * inner}, flops=20 * rows * inner)
    (w,) = r.forward("proj", [v], {"w": rows * width}, flops=flops)
    dropped, mask = r.forward(
        "dropout", [w], {"dropped": rows * width, "mask": rows * width}, random=True
    )
    (out,) = r.forward("add", [x, dropped], {"out": rows * width})
    g_out = r.source(DataKind.TANGENT, rows * width, "g_out")
    g_w = r.backward("dropout.backward", [g_out, mask], {"g_w": rows * width})
    g_v = r.linear_backward("proj", g_w, v, rows, inner, width)
    g_u = r.backward("gelu.backward", [g_v, u], {"g_u": rows * inner}, flops=30 * rows * inner)
    g_h = r.linear_backward("fc", g_u, h, rows, width, inner)
    g_n = r.norm_backward(g_h, [x, mean, rstd], rows * width, width)
    g_x = r.backward("add.backward", [g_out, g_n], {"g_x": rows * width})
    return r.draft.finish((out,), (g_x,), rng_state_bytes=16)


def attention_block(
    batch: int = 4, length: int = 256, width: int = 768, heads: int = 12
) -> CDGraph:
    """The attention half of a GPT-2 block, written out: 15 forward and 19 backward operators."""
    rows = batch * length
    full, scores = rows * width, batch * heads * length * length
    flops = 2 * scores * (width // heads)
    r = Roofline()
    x = r.source(DataKind.INPUT, full, "x")
    h, mean, rstd = r.forward("norm", [x], {"h": full, "mean": rows, "rstd": rows})
    (qkv,) = r.forward("qkv", [h], {"qkv": 3 * full}, flops=6 * rows * width * width)
    (q,) = r.forward("q.clone", [qkv], {"q": full})
    (k,) = r.forward("k.clone", [qkv], {"k": full})
    (s,) = r.forward("scores", [q, k], {"s": scores}, flops=flops)
    (scaled,) = r.forward("div", [s], {"scaled": scores})
    (masked,) = r.forward("where", [scaled], {"masked": scores})
    (p,) = r.forward("softmax", [masked], {"p": scores}, flops=10 * scores)
    kept, kept_mask = r.forward(
        "attention.dropout", [p], {"kept": scores, "kept_mask": scores}, random=True
    )
    (v,) = r.forward("v.clone", [qkv], {"v": full})
    (o,) = r.forward("context", [kept, v], {"o": full}, flops=flops)
    (merged,) = r.forward("merge", [o], {"merged": full})
    (w,) = r.forward("proj", [merged], {"w": full}, flops=2 * rows * width * width)
    dropped, mask = r.forward("dropout", [w], {"dropped": full, "mask": full}, random=True)
    (out,) = r.forward("add", [x, dropped], {"out": full})
    g_out = r.source(DataKind.TANGENT, full, "g_out")
    g_w = r.backward("dropout.backward", [g_out, mask], {"g_w": full})
    g_merged = r.linear_backward("proj", g_w, merged, rows, width, width)
    g_o = r.backward("merge.backward", [g_merged], {"g_o": full})
    g_kept = r.backward("context.left", [g_o, v], {"g_kept": scores}, flops=flops)
    g_v = r.backward("context.right", [g_o, kept], {"g_v": full}, flops=flops)
    g_p = r.backward("attention.dropout.backward", [g_kept, kept_mask], {"g_p": scores})
    g_masked = r.backward("softmax.backward", [g_p, p], {"g_masked": scores}, flops=8 * scores)
    g_scaled = r.backward("where.backward", [g_masked], {"g_scaled": scores})
    g_s = r.backward("div.backward", [g_scaled], {"g_s": scores})
    g_q = r.backward("scores.left", [g_s, k], {"g_q": full}, flops=flops)
    g_k = r.backward("scores.right", [g_s, q], {"g_k": full}, flops=flops)
    g_qkv = r.backward("cat", [g_q, g_k, g_v], {"g_qkv": 3 * full})
    g_h = r.linear_backward("qkv", g_qkv, h, rows, width, 3 * width)
    g_n = r.norm_backward(g_h, [x, mean, rstd], full, width)
    g_x = r.backward("add.backward", [g_out, g_n], {"g_x": full})
    return r.draft.finish((out,), (g_x,), rng_state_bytes=16)


_RANDOMS = st.randoms(use_true_random=False)


def cd_graphs(max_forward_nodes: int = 5, ranges: Ranges = DEFAULT) -> st.SearchStrategy[CDGraph]:
    """Whole graphs: `random_graph`."""
    return st.builds(random_graph, _RANDOMS, st.integers(1, max_forward_nodes), st.just(ranges))


def block_graphs(
    max_forward_nodes: int = 5, ranges: Ranges = DEFAULT
) -> st.SearchStrategy[CDGraph]:
    """Problems of blocks: `random_block`."""
    blocks = st.builds(random_block, _RANDOMS, st.integers(1, max_forward_nodes), st.just(ranges))
    return blocks.map(lambda block: block.problem)


def chains(
    max_blocks: int = 4, max_forward_nodes: int = 3, ranges: Ranges = DEFAULT
) -> st.SearchStrategy[tuple[CDGraph, tuple[Block, ...]]]:
    """Chains with their blocks: `random_chain`."""
    lengths = st.lists(st.integers(1, max_forward_nodes), min_size=1, max_size=max_blocks)
    return st.builds(random_chain, _RANDOMS, lengths.map(tuple), st.just(ranges))


def assert_improved(graph: CDGraph, before: Schedule, after: Schedule, budget_bytes: int) -> None:
    """Legal, within the budget, no slower."""
    verify(graph, after)
    found = simulate(graph, after)
    assert found.peak_bytes <= budget_bytes
    assert found.time_ns <= simulate(graph, before).time_ns


def random_schedule(rng: random.Random, graph: CDGraph) -> Schedule:
    """Every operation once, and re-executions anywhere after the first of them."""
    handed = set(graph.handed)
    share = rng.choice((0.05, 0.3, 1.0))
    executed: list[int] = []
    phases = []
    for phase in keep_all_order(graph):
        order: list[int] = []
        for index in phase:
            while executed and rng.random() < share / 2:
                order.append(rng.choice(executed))
            order.append(index)
            node = graph.nodes[index]
            if node.recomputable and handed.isdisjoint(node.writes):
                executed.append(index)
        phases.append(order)
    schedule = with_frees(graph, *phases)
    if rng.random() < 0.5:
        during = [step.during_bytes for step in timeline(graph, schedule)]
        ends = frozenset(rng.choices([n.index for n in graph.backward], k=2))
        schedule = merge_handovers(graph, schedule, GraphView(graph).sizes, during, ends)
    verify(graph, schedule)
    return schedule


def graph_or_block(seed: int, ranges: Ranges, forward_nodes: int = 4) -> CDGraph:
    rng = random.Random(seed)
    size = rng.randint(2, forward_nodes)
    if seed % 2:
        return random_graph(rng, size, ranges)
    return random_block(rng, size, ranges).problem


BRANCHED = Ranges(handed_percent=60, two_step_backward_percent=50)


def branched(rng: random.Random, size: int) -> CDGraph:
    """A random graph with gradients of weights: nodes that read what some backward node reads,
    anywhere after it has been made. Some of them are random or run only once."""
    graph = random_graph(rng, size, BRANCHED)
    data, handed, order = list(graph.data), list(graph.handed), list(graph.nodes)
    for node in graph.backward:
        if not node.reads or rng.random() < 0.4:
            continue
        data.append(DataNode(len(data), f"w{len(data)}", DataKind.GRADIENT, rng.randint(1, 12)))
        handed.append(data[-1].index)
        weight = replace(
            node,
            name=f"weight{len(data)}",
            reads=tuple(sorted(rng.sample(node.reads, rng.randint(1, len(node.reads))))),
            writes=(data[-1].index,),
            workspace_bytes=rng.randint(0, 5),
            random=rng.random() < 0.1,
            recomputable=rng.random() < 0.9,
        )
        order.insert(rng.randint(order.index(node), len(order)), weight)
    nodes = tuple(replace(n, index=i) for i, n in enumerate(order))
    return replace(graph, data=tuple(data), nodes=nodes, handed=tuple(handed))


def random_recomputations(graph: CDGraph, rng: random.Random) -> Schedule:
    """A legal schedule with recomputations, where the graph allows some."""
    forward = [n.index for n in graph.forward]
    backward = [n.index for n in graph.backward]
    best = keep_all(graph)
    for _ in range(12):
        node = rng.choice(graph.forward).index
        tried = list(backward)
        tried.insert(rng.randrange(len(tried) + 1), node)
        schedule = with_frees(graph, forward, tried)
        try:
            verify(graph, schedule)
        except IllegalSchedule:
            continue
        backward, best = tried, schedule
    return best
