"""Families of options found by enumeration, and chains of blocks of GPT made by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from rockplan.oracles.graph_view import GraphView
from rockplan.oracles.simulate import simulate
from rockplan.values.block import Block, BlockOption, OptionFamily
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, Phase, producers
from rockplan.values.schedule import with_frees
from testing.graphs import Draft, Roofline, attention_block, mlp_block


def enumerated_family(problem: CDGraph, small_bytes: int = 0) -> OptionFamily:
    """Options of all saved sets, without dominated ones; keep-all comes first.

    Storages of at most small_bytes are always saved.
    """
    wanted = {d for n in problem.backward for d in n.reads}
    made = sorted(d for n in problem.forward for d in n.writes if d in wanted)
    fixed = {d for n in problem.forward if not n.recomputable for d in n.writes}
    sizes = GraphView(problem).sizes
    fixed |= {d for d in made if sizes[d] <= small_bytes}
    free = [d for d in made if d not in fixed]
    options = [rule_option(problem, fixed | set(saved)) for saved in _subsets(free)]
    return OptionFamily(tuple(_undominated(options)), solves=0)


def rule_option(problem: CDGraph, saved: set[int]) -> BlockOption:
    """The option that saves `saved` and recomputes the rest at its first use."""
    producer = producers(problem)
    forward = tuple(n.index for n in problem.forward)
    available = set(saved)
    backward: list[int] = []

    def provide(data: int) -> None:
        if data in available or data not in producer:
            return
        node = problem.nodes[producer[data]]
        for read in node.reads:
            provide(read)
        backward.append(node.index)
        available.update(node.writes)

    for node in problem.backward:
        for data in node.reads:
            provide(data)
        backward.append(node.index)
        available.update(node.writes)
    schedule = with_frees(problem, forward, backward)
    simulation = simulate(problem, schedule)
    output_bytes = GraphView(problem).bytes_of(problem.outputs)
    return BlockOption(
        forward=forward,
        backward=tuple(backward),
        output_bytes=output_bytes,
        saved_bytes=simulation.saved_bytes - output_bytes,
        forward_peak_bytes=simulation.forward_peak_bytes,
        backward_peak_bytes=simulation.backward_peak_bytes,
        time_ns=simulation.time_ns,
    )


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(items), -1, -1):
        yield from combinations(items, size)


def _undominated(options: Iterable[BlockOption]) -> Iterator[BlockOption]:
    found: list[tuple[int, int, int]] = []
    for option in sorted(options, key=lambda o: (o.time_ns, o.saved_bytes)):
        sizes = (option.saved_bytes, option.forward_peak_bytes, option.backward_peak_bytes)
        if not any(all(a <= b for a, b in zip(f, sizes, strict=True)) for f in found):
            found.append(sizes)
            yield option


def embedding_block(rows: int, width: int, vocabulary: int) -> CDGraph:
    """Token embedding and dropout: 2 forward and 2 backward operators."""
    full = rows * width
    r = Roofline()
    tokens = r.source(DataKind.INPUT, 2 * rows, "tokens")
    (e,) = r.forward("embedding", [tokens], {"e": full})
    out, mask = r.forward("dropout", [e], {"out": full, "mask": full}, random=True)
    g_out = r.source(DataKind.TANGENT, full, "g_out")
    g_e = r.backward("dropout.backward", [g_out, mask], {"g_e": full})
    r.parameter_gradient("embedding.backward", [g_e, tokens], vocabulary * width)
    return r.draft.finish((out,), (), rng_state_bytes=16)


def head_block(rows: int, width: int, vocabulary: int) -> CDGraph:
    """Final norm, logits, loss: 4 forward and 7 backward operators."""
    flops = 2 * rows * width * vocabulary
    r = Roofline()
    x = r.source(DataKind.INPUT, rows * width, "x")
    h, mean, rstd = r.forward("norm", [x], {"h": rows * width, "mean": rows, "rstd": rows})
    (logits,) = r.forward("logits", [h], {"logits": rows * vocabulary}, flops=flops)
    (logs,) = r.forward("log_softmax", [logits], {"logs": rows * vocabulary})
    (loss,) = r.forward("nll", [logs], {"loss": 1})
    g_loss = r.source(DataKind.TANGENT, 1, "g_loss")
    g_logs = r.backward("nll.backward", [g_loss], {"g_logs": rows * vocabulary})
    g_logits = r.backward("log_softmax.backward", [g_logs, logs], {"g_logits": rows * vocabulary})
    g_h = r.linear_backward("logits", g_logits, h, rows, width, vocabulary)
    g_x = r.norm_backward(g_h, [x, mean, rstd], rows * width, width)
    return r.draft.finish((loss,), (g_x,), rng_state_bytes=16)


def gpt_problems(
    layers: int, batch: int = 4, length: int = 256, width: int = 768, vocabulary: int = 8192
) -> list[CDGraph]:
    """2 * layers + 2 problems: embedding, halves of layers with attention written out, head."""
    rows = batch * length
    halves = [attention_block(batch, length, width), mlp_block(batch, length, width)]
    return [
        embedding_block(rows, width, vocabulary),
        *(halves * layers),
        head_block(rows, width, vocabulary),
    ]


def join(problems: Sequence[CDGraph]) -> tuple[CDGraph, tuple[Block, ...]]:
    """The whole graph whose blocks have these problems.

    Each but the first has its input as data 0 and hands back one gradient, `held[0]`, which is
    the one tangent of the problem before.
    """
    draft = Draft()
    maps: list[dict[int, int]] = []
    for k, problem in enumerate(problems):
        known = {0: maps[-1][problems[k - 1].outputs[0]]} if k else {}
        maps.append(_add_phase(draft, problem, Phase.FORWARD, known))
    gradient: int | None = None
    counts: list[int] = []
    for problem, known in zip(reversed(problems), reversed(maps), strict=True):
        start = len(draft.backward)
        if gradient is not None:
            known |= {d.index: gradient for d in problem.data if d.kind is DataKind.TANGENT}
        _add_phase(draft, problem, Phase.BACKWARD, known)
        gradient = known[problem.held[0]] if problem.held else None
        counts.append(len(draft.backward) - start)
        draft.handed += [known[d] for d in problem.handed]
    outputs = (maps[-1][problems[-1].outputs[0]],)
    graph = draft.finish(outputs, (), problems[0].rng_state_bytes)
    return graph, _blocks(problems, maps, counts[::-1], len(graph.nodes))


def _add_phase(
    draft: Draft, problem: CDGraph, phase: Phase, known: dict[int, int]
) -> dict[int, int]:
    """Add the nodes of `phase`; known: local data -> data of the draft, completed and returned."""
    for node in problem.nodes:
        if node.phase is phase:
            for d in (*node.reads, *node.writes):
                if d not in known:
                    data = problem.data[d]
                    known[d] = draft.add_data(data.kind, data.size_bytes, data.name)
            nodes: list[ComputeNode] = draft.forward if phase is Phase.FORWARD else draft.backward
            reads = tuple(sorted(known[d] for d in node.reads))
            writes = tuple(sorted(known[d] for d in node.writes))
            nodes.append(replace(node, reads=reads, writes=writes))
    return known


def _blocks(
    problems: Sequence[CDGraph],
    maps: Sequence[dict[int, int]],
    backward_counts: Sequence[int],
    nodes: int,
) -> tuple[Block, ...]:
    digests = {id(p): hashlib.sha256(repr(p).encode()).hexdigest() for p in problems}
    blocks: list[Block] = []
    start, stop = 0, nodes
    for k, problem in enumerate(problems):
        forward = len(problem.forward)
        blocks.append(
            Block(
                index=k,
                forward=tuple(range(start, start + forward)),
                backward=tuple(range(stop - backward_counts[k], stop)),
                input=maps[k - 1][problems[k - 1].outputs[0]] if k else None,
                output=maps[k][problem.outputs[0]],
                problem=problem,
                digest=digests[id(problem)],
                incoming_gradient_bytes=GraphView(problem).bytes_of(GraphView(problem).tangents),
                background_bytes=0,
            )
        )
        start, stop = start + forward, stop - backward_counts[k]
    return tuple(blocks)


def families(blocks: Sequence[Block], small_bytes: int = 0) -> tuple[OptionFamily, ...]:
    """enumerated_family of each block, found once for each digest."""
    found: dict[str, OptionFamily] = {}
    for block in blocks:
        if block.digest not in found:
            found[block.digest] = enumerated_family(block.problem, small_bytes)
    return tuple(found[block.digest] for block in blocks)
