"""Plan: the schedule of a whole module, its predicted peak and time, and the proof of its
quality."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from rockplan.errors import InvalidInput
from rockplan.values.columns import aligned
from rockplan.values.copies import Trip
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, is_kernel, required
from rockplan.values.names import activation_names, operator_of, pattern_of
from rockplan.values.schedule import Schedule, kept_data


class Status(Enum):
    """OPTIMAL: the time equals the bound; FEASIBLE: legal, gap as stated; TIME_LIMIT: a time limit
    cut the search for this plan, or for the plan of the smallest budget: then it may equal the
    bound."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof of how far from the fastest schedule a plan can be. objective_ns: predicted time of the
    plan; bound_ns: lower bound on the time of every schedule of this graph under this profile and
    budget that executes each node for the first time in the order in which the plan does
    (`rockplan.ilp.whole_graph.refine`) and leaves the caller's loss its room (`caller_bytes`),
    whatever it pages of what may be paged, if there is a host; gap: (objective - bound) /
    objective."""

    status: Status
    objective_ns: int
    bound_ns: int

    @property
    def gap(self) -> float:
        return (self.objective_ns - self.bound_ns) / max(self.objective_ns, 1)


@dataclass(frozen=True, slots=True)
class BlockSummary:
    """One block of the chain for display: its name, class digest and number of operations."""

    name: str
    digest: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What a stage of the search left: time and peak of the incumbent, None if there is none; the
    lower bound on the time of every schedule within the budget; the stage's duration in seconds."""

    stage: str
    time_ns: int | None
    peak_bytes: int | None
    bound_ns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PassTrace:
    """What a pass from a module to its graph left. forward, backward: number of calls of the run,
    or nodes of the graph, in each phase; is_changed: it returned another value than it got."""

    name: str
    forward: int
    backward: int
    seconds: float
    is_changed: bool


COMPILED = ("yes", "near")
"""Values of `Plan.compiled` for a plan of compiled kernels."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for `graph` under `budget_bytes`.

    Bytes follow the convention of the ruler: alive during forward and backward beyond
    parameters, buffers, the caller's inputs and the parameters' `.grad`.
    eager_peak_bytes, eager_time_ns: predicted for executing every node once and freeing each
    storage after its last use, every result in a storage of its own; local variables of the
    original's forward may hold more.
    torch_version: under which the graph was captured and planned.
    checked: result of comparing two steps with eager execution, '' if none was made; for compiled
    kernels of comparing with two steps that recompute nothing, and the distance to eager.
    compiled: '' for a plan of the operators of eager execution; 'yes' for one of compiled kernels,
    'near' where these round as eager does.
    in_flight: how many calls are between forward and backward at once: budget_bytes holds for all
    of them together, peak_bytes for one, while each of the other calls keeps saved_bytes.
    origin: where a plan that was read from a file was made, '' for one of this process.
    reserved_bytes: what PyTorch's caching allocator takes from a CUDA device at the peak, by a
    model of it (`rockplan.fitting.reserved`); None where that is not known, and on CPU.
    pool_bytes: with options.graph, the most bytes alive in the memory of the CUDA graphs of the
    call, with its gradients and copies of its arguments; None without.
    trips: one for each storage that is paged to the host and back.
    trace: one entry for each stage of the search, none if the plan comes from the cache or a file,
    or was replayed. passes: one for each pass that made the graph, none for a plan from a file.
    """

    graph: CDGraph
    schedule: Schedule
    blocks: tuple[BlockSummary, ...]
    budget_bytes: int
    peak_bytes: int
    saved_bytes: int
    time_ns: int
    eager_peak_bytes: int
    eager_time_ns: int
    certificate: Certificate
    graph_digest: str
    profile_digest: str
    profile_source: str
    torch_version: str
    checked: str = ""
    compiled: str = ""
    in_flight: int = 1
    origin: str = ""
    reserved_bytes: int | None = field(default=None, compare=False)
    pool_bytes: int | None = field(default=None, compare=False)
    trips: tuple[Trip, ...] = ()
    trace: tuple[StageTrace, ...] = field(default=(), compare=False, repr=False)
    passes: tuple[PassTrace, ...] = field(default=(), compare=False, repr=False)

    @property
    def overhead(self) -> float:
        """Predicted extra time over one execution of every node: 0.05 is 5 %."""
        return self.time_ns / max(self.eager_time_ns, 1) - 1.0

    def __str__(self) -> str:
        return "\n".join(_summary_lines(self) + _page_lines(self) + _block_lines(self))


def format_bytes(size_bytes: int) -> str:
    """Return bytes as text in B, KiB, MiB or GiB: '1.5 MiB' for 1572864."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def plan_in(planned: object) -> Plan:
    """Return `planned` if it is a Plan, else the plan of a planned module. Raises InvalidInput for
    anything else."""
    if isinstance(planned, Plan):
        return planned
    # Read through the planned module's state: the model may have an attribute `plan` of its own.
    plan = getattr(getattr(planned, "_rockplan", None), "plan", None)
    if isinstance(plan, Plan):
        return plan
    raise InvalidInput(
        f"a {type(planned).__name__} has no plan; pass what rockplan.solve, rockplan.load or "
        "rockplan.plan returned"
    )


def recomputations(plan: Plan) -> dict[int, int]:
    """Return node index -> number of re-executions, for nodes with any; copies do not count."""
    executions = Counter(i for i in plan.schedule.computes if not plan.graph.nodes[i].optional)
    return {node: count - 1 for node, count in sorted(executions.items()) if count > 1}


def _summary_lines(plan: Plan) -> list[str]:
    certificate = plan.certificate
    share = plan.peak_bytes / max(plan.eager_peak_bytes, 1)
    again = recomputations(plan)
    forward, operations = len(required(plan.graph.forward)), len(required(plan.graph.nodes))
    reserved = ""
    if plan.reserved_bytes is not None:
        more = plan.reserved_bytes / max(plan.peak_bytes, 1) - 1
        reserved = f"{format_bytes(plan.reserved_bytes)} ({more:+.0%}) by PyTorch's allocator"
        reserved += ", as a model of it says"
    rows = {
        "budget": f"{format_bytes(plan.budget_bytes)} ({plan.budget_bytes} bytes)",
        "predicted peak": f"{format_bytes(plan.peak_bytes)} ({share:.0%} of "
        f"{format_bytes(plan.eager_peak_bytes)} with everything kept)",
        "reserved": reserved,
        "graphs": "" if plan.pool_bytes is None else f"hold {format_bytes(plan.pool_bytes)}",
        "saved": f"{format_bytes(plan.saved_bytes)} between forward and backward",
        "overhead": f"{plan.overhead:+.1%} predicted time "
        f"({len(again)} of {forward} forward operations run again)",
        "paged": _paged(plan),
        "gap": f"{certificate.gap:.1%} above the proven bound at most ({certificate.status.value})",
        "profile": f"{plan.profile_source} [{plan.profile_digest[:12]}]",
        "graph": f"{operations} operations in {len(plan.blocks)} blocks "
        f"of {len({b.digest for b in plan.blocks})} kinds [{plan.graph_digest[:12]}]",
        "compiled": _kernels(plan),
        "tiled": f"the head, in {plan.graph.tiles} parts" if plan.graph.tiles else "",
        "origin": plan.origin,
        "results": _held(plan),
        "checked": plan.checked or "no (Options(check=True) compares two steps)",
    }
    lines = [f"{label:<16}{text}" for label, text in rows.items() if text]
    return [*lines, "bytes count what is alive beyond parameters, buffers, inputs and .grad"]


def _paged(plan: Plan) -> str:
    if not plan.trips:
        return ""
    size_bytes = sum(t.size_bytes for t in plan.trips)
    rate = max(t.size_bytes / max(t.gone_ns - t.leaves_ns, 1) for t in plan.trips)
    waits_ns = sum(t.waits_ns for t in plan.trips)
    waits = f"{waits_ns / 1e6:.2f} ms waited for" if waits_ns else "none waited for"
    storages = f"{format_bytes(size_bytes)} in {len(plan.trips)} storages"
    return f"{storages} to the host and back, at {rate:.1f} GB/s, {waits}"


def _page_lines(plan: Plan) -> list[str]:
    """Those whose names differ only in numbers in one row. Times are from the start of the step."""
    if not plan.trips:
        return []
    names = activation_names(plan.graph)
    groups: dict[str, list[Trip]] = {}
    for trip in plan.trips:
        groups.setdefault(pattern_of(names[trip.data]), []).append(trip)
    rows = [("paged", "", "leaves ms", "comes back ms", "waited for")]
    for name, trips in groups.items():
        waits_ns = sum(t.waits_ns for t in trips)
        rows.append(
            (
                f"{name}" + (f"  x{len(trips)}" if len(trips) > 1 else ""),
                format_bytes(sum(t.size_bytes for t in trips)),
                _span(min(t.leaves_ns for t in trips), max(t.gone_ns for t in trips)),
                _span(min(t.comes_ns for t in trips), max(t.back_ns for t in trips)),
                f"{waits_ns / 1e6:.2f} ms" if waits_ns else "",
            )
        )
    return ["", *aligned(rows)]


def _span(begin_ns: int, end_ns: int) -> str:
    return f"{begin_ns / 1e6:.1f} to {end_ns / 1e6:.1f}"


def _kernels(plan: Plan) -> str:
    if not plan.compiled:
        return ""
    near = ", which round as eager does" if plan.compiled == "near" else ""
    kernels = [kernel for kernel in plan.graph.kernels if not kernel.over]
    calls = sum(is_kernel(c.op) for n in plan.graph.nodes for c in n.calls)
    counted = f"{calls} calls of {len(kernels)} kernels" if kernels else "compiled kernels"
    return f"{counted}{near}"


_WORTH = 0.05
"""Results that the caller holds are mentioned from this share of the peak on."""


def _held(plan: Plan) -> str:
    """How much the caller is taken to hold, and which option avoids it; '' unless backward starts
    from scalars only and that is worth a line."""
    graph = plan.graph
    kinds = [(graph.data[v.data].kind, v) for v in graph.values]
    starts = [v for kind, v in kinds if kind is DataKind.TANGENT]
    if not starts or any(v.spec.shape for v in starts):
        return ""
    held = (graph.data[d] for d in graph.held)
    size_bytes = sum(d.size_bytes for d in held if d.kind is DataKind.ACTIVATION)
    if size_bytes < _WORTH * plan.peak_bytes:
        return ""
    return (
        f"{format_bytes(size_bytes)} held by the caller until backward is over "
        "(Options(only_loss=True), or released=..., where the loss is all that a step reads)"
    )


def _block_lines(plan: Plan) -> list[str]:
    kept = kept_data(plan.graph, plan.schedule)
    again = recomputations(plan)
    rows: dict[tuple[str, str, str], int] = {}
    for block in plan.blocks:
        own = [plan.graph.nodes[n] for n in block.forward]
        row = (re.sub(r"\d+", "*", block.name) or "(root)", *_listed(plan, own, kept, again))
        rows[row] = rows.get(row, 0) + 1
    lines = []
    for (name, keeps, repeats), count in rows.items():
        lines += ["", f"{name}" + (f"  x{count}" if count > 1 else "")]
        lines += [f"    keeps       {keeps}", f"    recomputes  {repeats}"]
    return lines


def _listed(
    plan: Plan, nodes: Sequence[ComputeNode], kept: frozenset[int], again: dict[int, int]
) -> tuple[str, str]:
    """Bytes and operators of what is `kept`; operators that run again. again: node ->
    re-executions."""
    kept_here = [(n, d) for n in nodes for d in n.writes if d in kept]
    size_bytes = sum(plan.graph.data[d].size_bytes for _, d in kept_here)
    names = Counter(operator_of(n) for n, _ in kept_here)
    repeated = Counter(operator_of(n) for n in nodes for _ in range(again.get(n.index, 0)))
    keeps = f"{format_bytes(size_bytes)}: {_listing(names)}" if kept_here else "nothing"
    return keeps, _listing(repeated) or "nothing"


def _listing(names: Counter[str]) -> str:
    return ", ".join(f"{n} x{c}" if c > 1 else n for n, c in names.items())
