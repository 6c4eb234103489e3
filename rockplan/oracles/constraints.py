"""Constraints: activations that a user wants kept or recomputed, and memory that the caller needs.

takes: a CDGraph and patterns. returns: the graph that solvers get. guarantees: every legal schedule
of the result is a legal schedule of `graph` that obeys the patterns, and needs no more bytes there.
Patterns are of paths in the whole model, also for the graph of one of its modules.
To keep an activation, its node is marked as one that may run only once. To recompute it, it is put
into `CDGraph.dropped`: dead between the phases. `verify` judges both; solvers need no rule for
them. Memory for the caller's loss is workspace of the last forward node.

A pattern without '/' names a module, and stands for all activations that are made in it and in its
submodules; one with '/' names activations (`rockplan.values.names`), with or without their
occurrence. '*', '?' and '[...]' are those of `fnmatch`; '*' also crosses dots.

    layers.*.attn            everything made inside the attention of every layer
    *.act                    everything made by modules called act
    layers.*.attn/softmax    every softmax there; attn/softmax#1 is the second one only
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from rockplan.errors import InvalidConstraint
from rockplan.oracles.simulate import timeline
from rockplan.values.graph import CDGraph, DataKind, caller_bytes, producers
from rockplan.values.names import activation_names, nearest
from rockplan.values.schedule import Compute, keep_all


def constrain(
    graph: CDGraph, keep: Sequence[str], recompute: Sequence[str], path: str = ""
) -> CDGraph:
    """Return `graph` changed so that its legal schedules keep and recompute what the patterns match
    (module paths, or names of activations with a "/").

    keep: what the backward phase reads of the matching activations stays from the forward phase on
    (its makers may run once only). recompute: nothing that matches is alive between the phases.
    path: of the module that this is the graph of. A pattern may match nothing
    (`refuse_unmatched`). Raises InvalidConstraint for one that cannot be obeyed.
    """
    if not keep and not recompute:
        return graph
    placed = _placed(graph, path)
    once = {n: pattern for pattern in keep for n in _kept_nodes(placed, pattern)}
    dropped = {d for pattern in recompute for d in _dropped_data(placed, pattern, once)}
    return replace(
        graph,
        nodes=tuple(replace(n, recomputable=False) if n.index in once else n for n in graph.nodes),
        dropped=tuple(sorted(dropped)),
    )


def refuse_unmatched(
    parts: Mapping[str, CDGraph], keep: Sequence[str], recompute: Sequence[str]
) -> None:
    """Raise InvalidConstraint, with near names, for a pattern that matches nothing in any of
    `parts` (path of a module -> its graph), or for a `keep` pattern of whose activations the
    backward phases read none."""
    placed = [_placed(graph, path) for path, graph in parts.items()] if keep or recompute else []
    for option, pattern in [*(("keep", p) for p in keep), *(("recompute", p) for p in recompute)]:
        if not any(_matching(graph, pattern) for graph in placed):
            spelled = (s for graph in placed for s in _spelled(graph, "/" in pattern).values())
            known = (_shortened(n)[1] for s in spelled for n in (s[:1] if "/" in pattern else s))
            place = "this model" if "" in parts else "a block, and nothing else is planned"
            raise InvalidConstraint(
                f"{option} pattern {pattern!r} matches no activation of {place}; nearest: "
                f"{nearest(pattern, known)}",
                pattern,
            )
        if option == "keep" and not any(_kept_nodes(graph, pattern) for graph in placed):
            raise InvalidConstraint(
                f"keep pattern {pattern!r} matches activations of which the backward pass reads "
                "none: there is nothing to keep; name what it reads, or leave the pattern out",
                pattern,
            )


def _placed(graph: CDGraph, path: str) -> CDGraph:
    return replace(
        graph,
        nodes=tuple(replace(n, module=f"{path}.{n.module}".strip(".")) for n in graph.nodes),
    )


def with_room_for_loss(graph: CDGraph, eager_peak_bytes: int) -> CDGraph:
    """Return `graph` with the workspace of the last forward node raised to the bytes that the
    caller's loss will need.

    That is memory of the caller, so the promised peak counts the gradients only. But a plan that
    fills its budget at that node to the last byte would make a step need more. The workspace is
    capped so that keeping everything needs no more than eager_peak_bytes, where a loss has no more
    room either.
    """
    everything = keep_all(graph)
    last = graph.nodes[len(graph.forward) - 1]
    steps = zip(everything.events, timeline(graph, everything), strict=True)
    during_bytes = next(s.during_bytes for e, s in steps if e == Compute(last.index))
    most_bytes = eager_peak_bytes - (during_bytes - last.workspace_bytes)
    room_bytes = max(last.workspace_bytes, min(caller_bytes(graph), most_bytes))
    raised = replace(last, workspace_bytes=room_bytes)
    nodes = (*graph.nodes[: last.index], raised, *graph.nodes[last.index + 1 :])
    return replace(graph, nodes=nodes)


def _kept_nodes(graph: CDGraph, pattern: str) -> set[int]:
    producer = producers(graph)
    read = {d for n in graph.backward for d in n.reads}
    return {producer[d] for d in _matching(graph, pattern) if d in read}


def _dropped_data(graph: CDGraph, pattern: str, once: dict[int, str]) -> list[int]:
    """Return the storages that match a `recompute` pattern. once: node that must run once -> the
    `keep` pattern that says so. Raises InvalidConstraint if one cannot be recomputed."""
    producer = producers(graph)
    dropped = _matching(graph, pattern)
    names = activation_names(graph)
    for d in dropped:
        node = graph.nodes[producer[d]]
        reason = None
        if node.index in once:
            reason = f"keep pattern {once[node.index]!r} wants it, or what is made with it, kept"
        elif not node.recomputable:
            reason = (
                "its operation may run only once (it changes or reads what the forward "
                "changes, or acts outside of the step)"
            )
        elif d in graph.outputs:
            reason = "the module that is planned returns it, and the caller holds it"
        if reason is not None:
            raise InvalidConstraint(
                f"recompute pattern {pattern!r} matches {names[d]!r} ({node.source}), which cannot "
                f"be recomputed: {reason}; make the pattern narrower",
                pattern,
            )
    return dropped


def _matching(graph: CDGraph, pattern: str) -> list[int]:
    spelled = _spelled(graph, "/" in pattern)
    return [d for d, names in spelled.items() if any(fnmatchcase(n, pattern) for n in names)]


def _spelled(graph: CDGraph, by_name: bool) -> dict[int, Sequence[str]]:
    """Return activation -> its names, the whole one first, or the modules that it is made in."""
    producer, names = producers(graph), activation_names(graph)
    activations = [d.index for d in graph.data if d.kind is DataKind.ACTIVATION]
    if by_name:
        return {d: (names[d], *_shortened(names[d])) for d in activations}
    return {d: _ancestors(graph.nodes[producer[d]].module) for d in activations}


def _shortened(name: str) -> tuple[str, str]:
    without_position = re.sub(r":\d+$", "", name)
    return without_position, re.sub(r"#\d+$", "", without_position)


def _ancestors(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
