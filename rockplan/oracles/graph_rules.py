"""Legality of a graph: a table of rules, each a function that yields what breaks it.

takes: a CDGraph. `check` applies them after passes if `CHECKED` is on; `verify`
judges schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rockplan.errors import IllegalForm
from rockplan.values.graph import CDGraph, DataKind, Phase, Queue, is_kernel, refs, required

Rule = Callable[[CDGraph], Iterator[str]]
"""Yields what breaks the rule; its docstring says what must hold."""


def numbered_by_place(graph: CDGraph) -> Iterator[str]:
    """Nodes, storages and values are numbered by their positions. Yields a text for each of the
    three that is not."""
    of_kinds = {
        "node": [node.index for node in graph.nodes],
        "storage": [data.index for data in graph.data],
        "value": [value.index for value in graph.values],
    }
    for kind, indices in of_kinds.items():
        if indices != [*range(len(indices))]:
            yield f"{kind} numbers are {indices}"


def forward_comes_first(graph: CDGraph) -> Iterator[str]:
    """Nodes of the forward phase come before those of the backward phase."""
    is_backward = [node.phase is Phase.BACKWARD for node in graph.nodes]
    if is_backward != sorted(is_backward):
        yield f"node {is_backward.index(True)} is one of the backward phase"


def one_maker(graph: CDGraph) -> Iterator[str]:
    """A storage is made by one node, in the phase of its kind, and after that only by optional
    nodes; storages of the caller are made by none. Yields a text for each that is not."""
    maker: dict[int, int] = {}
    own = {Phase.FORWARD: DataKind.ACTIVATION, Phase.BACKWARD: DataKind.GRADIENT}
    for node in graph.nodes:
        kind = DataKind.HOST if node.queue is Queue.OUT else own[node.phase]
        for data in node.writes:
            if data not in maker and graph.data[data].kind is not kind:
                yield f"node {node.index} makes the {graph.data[data].kind.value} {data}"
            elif data in maker and not node.optional:
                yield f"nodes {maker[data]} and {node.index} make {graph.data[data].name}"
            maker.setdefault(data, node.index)


def what_is_on_the_host_is_copied(graph: CDGraph) -> Iterator[str]:
    """Storages on the host are made by copies out and read by copies in, and copies need no bytes
    beyond their operands and results. Yields a text for each node that breaks that."""
    for node in graph.nodes:
        read = any(graph.data[d].kind is DataKind.HOST for d in node.reads)
        made = any(graph.data[d].kind is DataKind.HOST for d in node.writes)
        if (read, made) != (node.queue is Queue.IN, node.queue is Queue.OUT):
            yield f"node {node.index}, {node.name}, is on the queue {node.queue.value}"
        elif node.queue is not Queue.COMPUTE and (node.workspace_bytes or node.takes):
            yield f"node {node.index}, {node.name}, needs more"


def made_before_read(graph: CDGraph) -> Iterator[str]:
    """Nothing is read before it is made. Yields a text for each read that is."""
    made = {d.index for d in graph.data if d.kind.resident or d.kind is DataKind.TANGENT}
    for node in graph.nodes:
        for data in node.reads:
            if data not in made:
                yield f"node {node.index}, {node.name}, reads {graph.data[data].name}"
        made.update(node.writes)


def values_are_in_storages(graph: CDGraph) -> Iterator[str]:
    """A value is in a storage of the graph, and a view in the storage of a value that it views.
    Yields a text for each value that is not."""
    for value in graph.values:
        if value.data not in range(len(graph.data)):
            yield f"value {value.index} is in storage {value.data}"
        elif value.view is not None and value.data not in {
            graph.values[ref.index].data for ref in refs(value.view)
        }:
            yield f"{value.name} is a view of none in {graph.data[value.data].name}"


def roles_are_of_storages(graph: CDGraph) -> Iterator[str]:
    """Outputs, held, handed and dropped data are storages that are not resident."""
    roles = {"output": graph.outputs, "held": graph.held, "handed": graph.handed}
    for role, storages in (roles | {"dropped": graph.dropped}).items():
        for data in storages:
            if data not in range(len(graph.data)) or graph.data[data].kind.resident:
                yield f"{role} storage {data}"


def takeovers_are_of_the_node(graph: CDGraph) -> Iterator[str]:
    """A node reads the operands that it may take over, and makes the results that it writes there.
    Yields a text for each takeover of which that is not so."""
    for node in graph.nodes:
        for takeover in node.takes:
            if not ({*takeover.operands} <= {*node.reads}):
                yield f"node {node.index}, {node.name}, takes {takeover.operands}"
            if not ({*takeover.results} <= {*node.writes}):
                yield f"node {node.index}, {node.name}, writes {takeover.results}"


def kernels_are_known(graph: CDGraph) -> Iterator[str]:
    """A called kernel is one of the graph's kernels. Yields a text for each call of another."""
    known = {kernel.op for kernel in graph.kernels}
    for node in graph.nodes:
        calls = (*node.calls, *(t.call for t in node.takes if t.call is not None))
        for call in calls:
            if is_kernel(call.op) and call.op not in known:
                yield f"node {node.index} calls {call.op}"


def sizes_are_sums_of_bytes(graph: CDGraph) -> Iterator[str]:
    """Sizes, workspaces and times are not negative. Yields a text for each storage or node with one
    that is."""
    for data in graph.data:
        if data.size_bytes < 0:
            yield f"{data.name} has {data.size_bytes} bytes"
    for node in graph.nodes:
        if node.workspace_bytes < 0 or node.time_ns < 0:
            yield f"{node.name} has {node.workspace_bytes} bytes of workspace, {node.time_ns} ns"


def eager_order_is_an_order(graph: CDGraph) -> Iterator[str]:
    """Eager's order names each required node once."""
    if graph.eager_order and sorted(graph.eager_order) != [*required(graph.nodes)]:
        yield f"it is {graph.eager_order}"


RULES: tuple[Rule, ...] = (
    numbered_by_place,
    forward_comes_first,
    one_maker,
    what_is_on_the_host_is_copied,
    made_before_read,
    values_are_in_storages,
    roles_are_of_storages,
    takeovers_are_of_the_node,
    kernels_are_known,
    sizes_are_sums_of_bytes,
    eager_order_is_an_order,
)


_Form = TypeVar("_Form")


def check(rules: Iterable[Callable[[_Form], Iterator[str]]], form: _Form, when: str) -> None:
    """Raise IllegalForm with the first rule that `form` breaks, in the words of its docstring up to
    "Yields", and with how it is broken. when: what made the form."""
    for rule in rules:
        for broken in rule(form):
            words = " ".join((rule.__doc__ or "").split()).partition(" Yields")[0]
            raise IllegalForm(f"{when}: {words.rstrip('.')}, but {broken}")
