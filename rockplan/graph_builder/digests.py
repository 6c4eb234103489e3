"""Digests: equal text for equal problems, in every process.

takes: a graph, a problem or a profile. returns: sha256 in hexadecimal. guarantees: independent of
PYTHONHASHSEED, of the process and of where files lie; each docstring says what
its digest leaves out.
"""

from __future__ import annotations

import hashlib
import json
import re

from rockplan.values import graph as graphs
from rockplan.values.profile import Profile

# Types of torch whose repr is their whole value; matched by name, so that torch is not imported.
_NAMED_LITERALS = frozenset({"dtype", "device", "layout", "memory_format"})
_AS_THEY_ARE = frozenset({type(None), bool, int, str})


def digest(content: object, on_any_device: bool = False) -> str:
    """Return sha256 of `content` (nested lists of strings, numbers and None) as canonical JSON.
    on_any_device: leave out the indices of devices."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    if on_any_device:
        text = re.sub(r"\b(cuda|xpu|hpu|npu):\d+", r"\1", text)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def problem_digest(problem: graphs.CDGraph) -> str:
    """Return a digest of everything that a solver sees of a block or of a whole graph: sizes,
    kinds, reads, writes, takeovers, phases, times, workspaces, flags, outputs, held, handed and
    dropped data.

    Left out: names, calls, values, and storages that are always alive and never paid for. The input
    of the block counts: the chain may drop it. Storages count in order of appearance.
    """
    local: dict[int, int] = {}
    for node in problem.nodes:
        for data in (*node.reads, *node.writes):
            kind = problem.data[data].kind
            if kind is graphs.DataKind.INPUT or not kind.resident:
                local.setdefault(data, len(local))

    def indices(data: tuple[int, ...]) -> list[int]:
        return sorted(local[d] for d in data if d in local)

    def takeover(one: graphs.Takeover) -> list[list[int]]:
        return [[local[d] for d in data] for data in (one.operands, one.results)]

    return digest(
        [
            [[problem.data[d].kind.value, problem.data[d].size_bytes] for d in local],
            [
                [
                    *(n.phase.value, n.time_ns, n.workspace_bytes, n.random, n.recomputable),
                    *_unusual(n),
                    indices(n.reads),
                    indices(n.writes),
                    *([[takeover(t) for t in n.takes]] if n.takes else []),
                ]
                for n in problem.nodes
            ],
            indices(problem.outputs),
            indices(problem.held),
            indices(problem.handed),
            indices(problem.dropped),
            problem.rng_state_bytes,
        ]
    )


def graph_digest(graph: graphs.CDGraph, *, on_any_device: bool = False) -> str:
    """Return a digest of the captured program: storages, nodes, calls, literals, specs of values,
    names.

    on_any_device: equal for processes that run it on different devices (cuda:0, cuda:1).
    Left out: prices (sizes, times, workspaces), which the digest of the profile covers, source
    lines, which name files, and takeovers (`takes_digest`).
    """
    return digest(
        [
            [[d.name, d.kind.value] for d in graph.data],
            [_program(n) for n in graph.nodes],
            [_value(v) for v in graph.values],
            [list(graph.outputs), list(graph.held), list(graph.handed), list(graph.dropped)],
            list(graph.eager_order),
        ],
        on_any_device,
    )


def takes_digest(graph: graphs.CDGraph) -> str:
    """Return a digest of all takeovers: those of kernels depend on the compiler."""
    return digest([[[t.operands, t.results] for t in n.takes] for n in graph.nodes])


def profile_digest(profile: Profile) -> str:
    """Return a digest of a profile: device, torch, threads, and every cost."""
    return digest(
        [
            [profile.source, profile.device, profile.torch_version, profile.threads],
            [
                [key, c.time_ns, c.spread_ns, c.workspace_bytes, list(c.result_bytes), c.repeats]
                for key, c in sorted(profile.costs)
            ],
        ]
    )


def canonical_literal(literal: object) -> object:
    """Return the JSON form of an argument of a call: its type and its exact value.

    Raises TypeError for an object whose value is not known to be in its repr.
    """
    if type(literal) in _AS_THEY_ARE:  # most are
        return literal
    match literal:
        case None | bool() | int() | str():
            return literal
        case float() | complex():
            return [type(literal).__name__, repr(literal)]
        case graphs.ValueRef(index):
            return ["value", index]
        case graphs.MeshGroup():
            return ["group", literal.dimension, literal.size, literal.number]
        case graphs.TensorSpec():
            return ["tensor", *spec_fields(literal)]
        case tuple() | list():
            return ["sequence", [canonical_literal(item) for item in literal]]
        case slice(start=start, stop=stop, step=step):
            return ["slice", [canonical_literal(part) for part in (start, stop, step)]]
        case _ if type(literal).__name__ in _NAMED_LITERALS:
            return [type(literal).__name__, repr(literal)]
    raise TypeError(f"argument of type {type(literal).__name__} has no canonical form: {literal!r}")


def spec_fields(spec: graphs.TensorSpec, offset: int | None = None) -> list[object]:
    """Return shape, strides, offset, dtype and device of `spec` for JSON, and 'conj' and 'neg' if
    they apply. offset: replaces that of the spec."""
    if offset is None:
        offset = spec.offset
    marks = [name for name, is_so in (("conj", spec.is_conj), ("neg", spec.is_neg)) if is_so]
    return [list(spec.shape), list(spec.stride), offset, spec.dtype, spec.device, *marks]


def _unusual(node: graphs.ComputeNode) -> list[object]:
    queue = [] if node.queue is graphs.Queue.COMPUTE else [node.queue.value]
    return [*queue, "optional"] if node.optional else queue


def _program(node: graphs.ComputeNode) -> list[object]:
    return [
        node.name,
        node.module,
        node.phase.value,
        node.random,
        node.recomputable,
        list(node.reads),
        list(node.writes),
        [call_fields(c) for c in node.calls],
        [call_fields(c) for c in node.recalls],
        *_unusual(node),
    ]


def _value(value: graphs.Value) -> list[object]:
    view = None if value.view is None else call_fields(value.view)
    return [value.data, value.name, spec_fields(value.spec), view]


def call_fields(call: graphs.Call) -> list[object]:
    """Return a call as JSON values."""
    kwargs = [[name, canonical_literal(argument)] for name, argument in call.kwargs]
    return [call.op, canonical_literal(call.args), kwargs, list(call.results)]
