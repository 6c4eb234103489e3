"""Plans on disk: one JSON document that holds the plans of one model, one for each kind of call.

takes: plans, or the text of a document. returns: the text, or plans that are consistent: their
schedule is legal for their graph (`verify`) and needs the bytes and the time that they state
(`simulate`). guarantees: nothing that is read is executed. A document holds only the outline of a
graph: storages and operations with names, sizes, times, reads and writes, but no calls of
operators. To run a plan, `fit` puts it onto a graph that was captured here. docs/plan.md describes
the format.
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path, PurePath
from typing import Any

from rockplan.errors import IllegalSchedule, InvalidInput, PlanFormatError, PlanMismatch
from rockplan.oracles.clock import trips
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.store import documents
from rockplan.store.documents import flag, list_of, natural, naturals, read_fields, text_of
from rockplan.store.fingerprint import VERSION
from rockplan.values import graph as graphs
from rockplan.values.copies import with_copies_of, without_copies
from rockplan.values.plan import COMPILED, BlockSummary, Certificate, Plan, Status
from rockplan.values.schedule import Compute, Event, Free, Schedule, keep_all

# What documents state in members of the same names.
_OF_PLAN = (
    *("budget_bytes", "peak_bytes", "saved_bytes", "time_ns", "eager_peak_bytes", "eager_time_ns"),
    *("graph_digest", "profile_digest", "profile_source", "torch_version", "checked"),
)
_OF_GRAPH = ("outputs", "held", "handed", "rng_state_bytes")
_OF_NODE = (
    *("name", "module", "source", "reads", "writes"),
    *("time_ns", "workspace_bytes", "random", "recomputable"),
)


def save_plan(planned: object, path: str | os.PathLike[str]) -> None:
    """Write a plan, or all plans of a planned module (one for each kind of call it has seen).

    planned: what `solve` or `load` returned, a Plan, or several Plans of one model. The complete
    file replaces what was at `path`. Raises InvalidInput.
    """
    # From a planned module's state: the model may have its own attribute `plans`.
    plans = getattr(getattr(planned, "_rockplan", planned), "plans", planned)
    plans = (plans,) if isinstance(plans, Plan) else plans
    if not (isinstance(plans, tuple | list) and plans and all(isinstance(p, Plan) for p in plans)):
        raise InvalidInput(
            f"a {type(planned).__name__} has no plans to save; pass what rockplan.solve or "
            "rockplan.plan returned"
        )
    if len({p.graph_digest for p in plans}) < len(plans):
        raise InvalidInput("two of the plans are for the same kind of call; save one of them")
    write_whole(_path_of(path), dump_plans(plans))


def _path_of(path: object) -> Path:
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInput(
            f"the path of a plan is a str or a pathlib.Path, not a {type(path).__name__}"
        ) from error
    if "\0" in text:
        raise InvalidInput(f"the path {text!r} has a null character, which no file name has")
    return Path(text)


def read_plans(path: str | os.PathLike[str]) -> tuple[Plan, ...]:
    """Return the plans in a file that `save_plan` wrote, for printing and pictures.

    Their graphs are outlines: `rockplan.load` makes a module that runs them. Raises InvalidInput
    for what is no path, PlanFormatError if the file was not written by `save_plan`, OSError if it
    cannot be opened.
    """
    file = _path_of(path)
    try:
        return parse_plans(documents.read_text(file))
    except PlanFormatError as error:
        raise PlanFormatError(
            f"{file} is no plan of rockplan {VERSION} ({error}); write it again with "
            "rockplan.save_plan"
        ) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that at any time `path` holds all of the old or all of the new content, with
    the permissions that it had. A link stays a link; a pipe or a device is written to directly.

    Raises InvalidInput for a path without a name, OSError (of `path`) if it cannot be written.
    """
    if not path.name:
        raise InvalidInput(f"the path '{path}' names no file; name the file to write")
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not (target.is_file() or target.is_dir()):
            target.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as error:
        # Name the path that was asked for, not the temporary file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, data: bytes) -> None:
    """By a temporary file beside `path`, with its permissions."""
    temporary = path.with_name(f"{path.stem[:40]}{os.getpid()}_{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            if path.is_file():
                shutil.copymode(path, temporary)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def fit(
    plans: Iterable[Plan], graph: graphs.CDGraph, graph_digest: str, torch_version: str
) -> Plan:
    """Return the one of `plans` that is for `graph`, on `graph` itself but with the sizes and times
    of the plan.

    graph: captured here under torch_version. A plan that was made under another version of PyTorch
    fits if the graph is the same: the schedule is legal for it, and only the sizes and times may
    differ; that is warned of and recorded as the plan's origin. Raises PlanMismatch if none of
    `plans` is for this graph, PlanFormatError if the sizes of that plan are impossible.
    """
    plans = tuple(plans)
    plan = next((p for p in plans if p.graph_digest == graph_digest), None)
    graph = graph if plan is None else with_copies_of(graph, plan.graph)
    fitted = None if plan is None else onto(graph, plan.graph)
    if (
        plan is None
        or fitted is None
        or not is_outline_of(graphs.without_takes(plan.graph), graphs.without_takes(fitted))
    ):
        raise _mismatch(plans, graph, graph_digest, torch_version)
    _check_sizes(graph, fitted)
    _check_takeovers(plan, fitted)
    origin = f"read from a file, planned with torch {plan.torch_version}"
    if plan.torch_version != torch_version:
        origin += f", captured with torch {torch_version}"
        warnings.warn(
            f"the plan was made with torch {plan.torch_version}, this is torch {torch_version}: "
            "the graph is the same, so results are right; predicted bytes and times are those "
            "of the other version",
            stacklevel=2,
        )
    return replace(plan, graph=fitted, origin=origin)


def outline(graph: graphs.CDGraph) -> graphs.CDGraph:
    """Return the part of `graph` that documents store: no calls, values or kernels, of takeovers
    only storages, source lines without folders."""
    nodes = tuple(
        replace(
            n,
            calls=(),
            recalls=(),
            takes=tuple(t.outline for t in n.takes),
            source=PurePath(n.source).name,
        )
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes, values=(), kernels=())


def is_outline_of(outlined: graphs.CDGraph, graph: graphs.CDGraph) -> bool:
    """True if `outlined` is the outline of `graph`, up to what no plan depends on: the line that
    calls the model, and the bytes of inputs (a batch may be a part of a larger tensor)."""
    return _deciding(outlined) == _deciding(outline(graph))


def _deciding(graph: graphs.CDGraph) -> graphs.CDGraph:
    return replace(
        graph,
        data=tuple(replace(d, size_bytes=0) if d.kind.resident else d for d in graph.data),
        nodes=tuple(replace(n, source="") for n in graph.nodes),
    )


def onto(graph: graphs.CDGraph, prices: graphs.CDGraph) -> graphs.CDGraph | None:
    """Return `graph` with the sizes, times, workspaces and takeovers of `prices`, an outline of the
    same graph; None if it has another number of storages or nodes."""
    if len(graph.data) != len(prices.data) or len(graph.nodes) != len(prices.nodes):
        return None
    return replace(
        graph,
        data=tuple(
            d if d.size_bytes == p.size_bytes else replace(d, size_bytes=p.size_bytes)
            for d, p in zip(graph.data, prices.data, strict=True)
        ),
        nodes=tuple(
            replace(
                n,
                takes=tuple(t for t in n.takes if t.outline in p.takes),
                time_ns=p.time_ns,
                workspace_bytes=p.workspace_bytes,
            )
            for n, p in zip(graph.nodes, prices.nodes, strict=True)
        ),
        rng_state_bytes=prices.rng_state_bytes,
    )


def _check_sizes(graph: graphs.CDGraph, fitted: graphs.CDGraph) -> None:
    """A measured size may be larger than the captured one, by padding."""
    for captured, stated in zip(graph.data, fitted.data, strict=True):
        if not captured.kind.resident and stated.size_bytes < captured.size_bytes:
            raise PlanFormatError(
                f"the plan states {stated.size_bytes} bytes for {captured.name}, which has "
                f"{captured.size_bytes} in this model, so its peak would not be kept; make a plan "
                "with rockplan.solve"
            )


def _check_takeovers(plan: Plan, fitted: graphs.CDGraph) -> None:
    """Results that the plan writes over dying operands cannot be written so by kernels of another
    compiler."""
    peak_bytes = simulate(fitted, plan.schedule).peak_bytes
    if peak_bytes > plan.peak_bytes:
        raise PlanMismatch(
            f"the plan states {plan.peak_bytes} bytes, and would need {peak_bytes} here, where "
            "some results cannot be written over operands; make a plan for this call with "
            "rockplan.solve",
            plan_digests=(plan.graph_digest,),
            graph_digest=plan.graph_digest,
        )


def _mismatch(
    plans: tuple[Plan, ...], graph: graphs.CDGraph, graph_digest: str, torch_version: str
) -> PlanMismatch:
    position, difference = max([_first_difference(p.graph, graph) for p in plans])
    versions = " and ".join(sorted({p.torch_version for p in plans}))
    return PlanMismatch(
        f"there is no plan for this model and this call: {difference}. The plan holds for "
        f"the same model, shapes, dtypes, autocast state, training flag and frozen parameters; "
        f"it was made with torch {versions}, this is torch {torch_version}. Make a plan for this "
        "call with rockplan.solve",
        plan_digests=tuple(p.graph_digest for p in plans),
        graph_digest=graph_digest,
    )


def _first_difference(planned: graphs.CDGraph, graph: graphs.CDGraph) -> tuple[int, str]:
    """(Position, a sentence); the number of operations if none differs by name, module and
    phase."""
    for position, (there, here) in enumerate(zip(planned.nodes, graph.nodes, strict=False)):
        place = (there.name, there.module, there.phase), (here.name, here.module, here.phase)
        if place[0] != place[1]:
            return position, (
                f"operation {position} is {there.name} in '{there.module}' in the plan, "
                f"{here.name} in '{here.module}' in the model"
            )
    if len(planned.nodes) != len(graph.nodes):
        return len(graph.nodes), (
            f"the plan has {len(planned.nodes)} operations, the model {len(graph.nodes)}"
        )
    pairs = zip(planned.nodes, graph.nodes, strict=True)
    again = next((a for a, b in pairs if a.recomputable != b.recomputable), None)
    if again is not None:
        where = "plan and not in the model" if again.recomputable else "model and not in the plan"
        return len(graph.nodes), (
            f"{again.name} in '{again.module}' may run again in the {where}, as operations may by "
            "Options(rerun_collectives=True) and rockplan.pure"
        )
    return len(graph.nodes), "the operations have other shapes, dtypes or arguments"


# The document


def dump_plans(plans: Iterable[Plan], key: documents.Key | None = None) -> str:
    """Return the document of `plans`."""
    content = {"rockplan_version": VERSION, "plans": [_plan_row(p) for p in plans]}
    return documents.dump("plan", content, key)


def parse_plans(text: str, key: documents.Key | None = None) -> tuple[Plan, ...]:
    """Return the plans of a document. Raises PlanFormatError."""
    return documents.parse(text, "plan", _read_plans, key)


def _plan_row(plan: Plan) -> dict[str, object]:
    return {
        **{name: getattr(plan, name) for name in _OF_PLAN},
        **({"compiled": plan.compiled} if plan.compiled else {}),
        **({"in_flight": plan.in_flight} if plan.in_flight > 1 else {}),
        "certificate": {**asdict(plan.certificate), "status": plan.certificate.status.value},
        "graph": _graph_row(outline(plan.graph)),
        "blocks": [astuple(block) for block in plan.blocks],
        "forward_length": plan.schedule.forward_length,
        "events": [
            ["compute", e.node] if isinstance(e, Compute) else ["free", e.data]
            for e in plan.schedule.events
        ],
    }


def _graph_row(graph: graphs.CDGraph) -> dict[str, object]:
    return {
        **{name: getattr(graph, name) for name in (*_OF_GRAPH, "eager_order")},
        "data": [[d.name, d.kind.value, d.size_bytes] for d in graph.data],
        "nodes": [
            {
                **{name: getattr(n, name) for name in _OF_NODE},
                "phase": n.phase.value,
                "takes": [_takeover_row(t, n) for t in n.takes],
                **({} if n.queue is graphs.Queue.COMPUTE else {"queue": n.queue.value}),
                **({"optional": True} if n.optional else {}),
            }
            for n in graph.nodes
        ],
        **({"tiles": graph.tiles} if graph.tiles else {}),
    }


def _read_plans(document: dict[str, Any]) -> tuple[Plan, ...]:
    rows = list_of(document["plans"])
    if not rows:
        raise ValueError("no plans")
    return tuple(map(_read_plan, rows))


def _read_plan(row: Mapping[str, Any]) -> Plan:
    """Raises KeyError, TypeError or ValueError for another form, and if its schedule is illegal or
    does not keep the stated bytes and times."""
    graph = _read_graph(row["graph"])
    certificate = row["certificate"]
    compiled = text_of(row.get("compiled", ""))
    if compiled not in ("", *COMPILED):
        raise ValueError(f"kernels that are compiled in an unknown way: {compiled!r:.40}")
    plan = Plan(
        graph=graph,
        schedule=_read_schedule(row, graph),
        blocks=tuple(_read_block(block, graph) for block in list_of(row["blocks"])),
        certificate=Certificate(
            Status(certificate["status"]), **read_fields(Certificate, certificate)
        ),
        compiled=compiled,
        in_flight=natural(row.get("in_flight", 1)),
        **read_fields(Plan, row, *_OF_PLAN),
    )
    _check_promises(plan)
    return replace(plan, trips=trips(graph, plan.schedule))


def _read_graph(row: Mapping[str, Any]) -> graphs.CDGraph:
    """Raises KeyError, TypeError or ValueError for another form, or where it contradicts itself."""
    data = tuple(
        graphs.DataNode(i, text_of(name), graphs.DataKind(kind), natural(size_bytes))
        for i, (name, kind, size_bytes) in enumerate(list_of(row["data"]))
    )
    nodes = tuple(_read_node(i, node, len(data)) for i, node in enumerate(list_of(row["nodes"])))
    phases = [n.phase for n in nodes]
    if phases != sorted(phases, key=lambda phase: phase is graphs.Phase.BACKWARD):
        raise ValueError("a forward operation after a backward operation")
    graph = graphs.CDGraph(
        data=data,
        nodes=nodes,
        **read_fields(graphs.CDGraph, row, *_OF_GRAPH),
        eager_order=_read_order(row, nodes),
        tiles=natural(row.get("tiles", 0)),
    )
    _check_below((*graph.outputs, *graph.held, *graph.handed), len(data))
    if with_copies_of(without_copies(graph), graph) != graph:
        raise ValueError("operations that copy storages to the host are not those of a plan")
    return graph


def _read_order(row: Mapping[str, Any], nodes: Sequence[graphs.ComputeNode]) -> tuple[int, ...]:
    """() in plans older than reordering. Raises ValueError."""
    order, must = naturals(row.get("eager_order", [])), graphs.required(nodes)
    if order and sorted(order) != list(must):
        raise ValueError("the order of eager does not name each operation once")
    if order and [nodes[i].phase for i in order] != [nodes[i].phase for i in must]:
        raise ValueError("the order of eager has a forward operation after a backward operation")
    return order


def _read_node(index: int, row: Mapping[str, Any], data: int) -> graphs.ComputeNode:
    """data: number of storages of the graph. Raises KeyError, TypeError or ValueError for another
    form."""
    node = graphs.ComputeNode(
        index=index,
        phase=graphs.Phase(row["phase"]),
        queue=graphs.Queue(row.get("queue", "compute")),
        optional=flag(row.get("optional", False)),
        **read_fields(graphs.ComputeNode, row, *_OF_NODE),
    )
    _check_below((*node.reads, *node.writes), data)
    # Plans older than takeovers do not state any, and are right without.
    return replace(
        node, takes=tuple(_read_takeover(t, node) for t in list_of(row.get("takes", [])))
    )


def _takeover_row(takeover: graphs.Takeover, node: graphs.ComputeNode) -> object:
    if takeover.results == node.writes and len(node.writes) == 1:
        return takeover.operands[0]
    return list(map(list, zip(takeover.operands, takeover.results, strict=True)))


def _read_takeover(row: object, node: graphs.ComputeNode) -> graphs.Takeover:
    """row: [[operand, result], ...], or one operand for the only result of the node. Raises
    ValueError."""
    pairs = [naturals(p) for p in list_of(row)] if isinstance(row, list) else [(row, *node.writes)]
    if any(len(pair) != 2 for pair in pairs) or not pairs:
        raise ValueError("an operation takes over no pairs of an operand and a result")
    operands, results = zip(*pairs, strict=True)
    if not set(node.reads).issuperset(operands):
        raise ValueError("an operation takes over what it does not read")
    if not set(node.writes).issuperset(results):
        raise ValueError("an operation takes over storages for what it does not make")
    if len(set(operands)) < len(pairs) or len(set(results)) < len(pairs):
        raise ValueError("an operation takes over a storage twice")
    return graphs.Takeover(operands, results)


def _read_block(row: object, graph: graphs.CDGraph) -> BlockSummary:
    names = ("name", "digest", "forward", "backward")
    block = BlockSummary(**read_fields(BlockSummary, dict(zip(names, list_of(row), strict=True))))
    _check_below((*block.forward, *block.backward), len(graph.nodes))
    return block


def _read_schedule(row: Mapping[str, Any], graph: graphs.CDGraph) -> Schedule:
    events = tuple(_read_event(event, graph) for event in list_of(row["events"]))
    forward_length = natural(row["forward_length"])
    if forward_length > len(events):
        raise ValueError("the forward phase is longer than the schedule")
    return Schedule(events, forward_length)


def _read_event(event: object, graph: graphs.CDGraph) -> Event:
    what, index = list_of(event)
    if what not in ("compute", "free"):
        raise ValueError(f"an event that is neither 'compute' nor 'free': {repr(what)[:40]}")
    _check_below((natural(index),), len(graph.nodes if what == "compute" else graph.data))
    return Compute(index) if what == "compute" else Free(index)


def _check_below(indices: Sequence[int], limit: int) -> None:
    if any(i >= limit for i in indices):
        raise ValueError(f"an index beyond the last of {limit}")


def _check_promises(plan: Plan) -> None:
    executed = graphs.as_eager(plan.graph)
    try:
        verify(plan.graph, plan.schedule)
        verify(executed, keep_all(executed))
    except IllegalSchedule as error:
        raise ValueError(f"the schedule is not legal: {error}") from error
    simulation = simulate(plan.graph, plan.schedule)
    everything = simulate(executed, keep_all(executed))
    needed = (simulation.peak_bytes, simulation.saved_bytes, simulation.time_ns)
    eager = (everything.peak_bytes, everything.time_ns)
    if needed != (plan.peak_bytes, plan.saved_bytes, plan.time_ns) or eager != (
        plan.eager_peak_bytes,
        plan.eager_time_ns,
    ):
        raise ValueError("the schedule needs other bytes or time than the plan states")
    if plan.in_flight < 1:
        raise ValueError("no call is in flight")
    if plan.peak_bytes + (plan.in_flight - 1) * plan.saved_bytes > plan.budget_bytes:
        raise ValueError("the peak is beyond the budget")
    certificate = plan.certificate
    if not certificate.bound_ns <= certificate.objective_ns == plan.time_ns:
        raise ValueError("the certificate does not belong to the schedule")
    is_met = certificate.bound_ns == plan.time_ns
    # If time ended the search for the smallest budget, a plan within it may still be optimal.
    belongs = {Status.OPTIMAL: is_met, Status.FEASIBLE: not is_met, Status.TIME_LIMIT: True}
    if not belongs[certificate.status]:
        raise ValueError("the certificate's status does not belong to its bound")
