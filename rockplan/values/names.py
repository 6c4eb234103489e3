"""Names of operations and storages that a person can read, write down and find again.

takes: a CDGraph. returns: one name for each operation, or for each storage. guarantees: names are
unique in their graph, and depend on nothing but the module that an operation belongs to, its
operator, its phase, and how many of the same came before it there. So a name outlives changes of
shapes, budgets and profiles, changes elsewhere in the model, and the way through a plan file.

    layers.0.attn/softmax        the operation, and the storage that it makes
    layers.0.attn/softmax#1      the second one in that module
    layers.0.norm/layer_norm:2   the third of several storages of one operation
    layers.0.attn/backward/mm    an operation of the backward phase
    (root)/add                   an operation outside submodules
    layers.0.attn.weight         what no operation makes: parameters, buffers, inputs, tangents
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable

from rockplan.values.graph import CDGraph, ComputeNode, Phase, producers

ROOT = "(root)"


def operation_names(graph: CDGraph) -> tuple[str, ...]:
    """Return the name of each of `graph.nodes`: module and operator, with '#1', '#2' where a name
    occurs again."""
    seen: Counter[str] = Counter()
    names = []
    for node in graph.nodes:
        phase = "backward/" if node.phase is Phase.BACKWARD else ""
        stem = f"{node.module or ROOT}/{phase}{operator_of(node)}"
        names.append(f"{stem}#{seen[stem]}" if seen[stem] else stem)
        seen[stem] += 1
    return tuple(names)


def activation_names(graph: CDGraph) -> tuple[str, ...]:
    """Return the name of each of `graph.data`: that of the operation that makes it first, with
    ':0', ':1' if it makes several; its own name if none does."""
    names = [d.name for d in graph.data]
    made_by = producers(graph)
    for node, name in zip(graph.nodes, operation_names(graph), strict=True):
        for position, made in enumerate(node.writes):
            if made_by[made] == node.index:
                names[made] = name if len(node.writes) == 1 else f"{name}:{position}"
    return tuple(names)


def operator_of(node: ComputeNode) -> str:
    """Return 'addmm' for the node 'addmm_12'."""
    return re.sub(r"_\d+$", "", node.name)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the three of `known` most like `name`, quoted; names that differ only in numbers count
    once."""
    stems = dict.fromkeys(re.sub(r"\d+", "*", one) for one in known)
    found = difflib.get_close_matches(re.sub(r"\d+", "*", name), stems, n=3, cutoff=0.0)
    return ", ".join(map(repr, found))


def pattern_of(name: str) -> str:
    """Return a name for all layers: 'layers.*.attn/softmax' for 'layers.3.attn/softmax#1',
    'layers.*.norm/layer_norm' for 'layers.3.norm/layer_norm:2'."""
    module, slash, operator = name.partition("/")
    if not slash:
        return name
    return re.sub(r"\d+", "*", module) + slash + re.sub(r"(#\d+)?(:\d+)?$", "", operator)
