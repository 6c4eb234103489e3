"""OpenProgram: what one program for calls of many sizes needs to know of a call.

takes: leaves of a call's arguments. returns: its sizes, the peak of the program's schedule there,
and whatever of the plan follows from sizes. guarantees: the peak is that of `simulate` at these
sizes, or an upper bound of it; nothing of the call is allocated to find it, beside operators that
run once to see what they take inside.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rockplan.codegen.load import Expressions
from rockplan.graph_builder.costs.estimate import with_scaled_times
from rockplan.graph_builder.costs.open_workspaces import OpenWorkspaces, given_integers
from rockplan.graph_builder.digests import graph_digest
from rockplan.graph_builder.operators.symbols import function_of, loaded
from rockplan.oracles.clock import trips
from rockplan.oracles.peak_rows import PeakRows, peak_rows
from rockplan.oracles.simulate import simulate
from rockplan.values.copies import with_copies_of, without_copies
from rockplan.values.graph import CDGraph, as_eager
from rockplan.values.interface import Interface
from rockplan.values.plan import Certificate, Plan, Status
from rockplan.values.schedule import Schedule, keep_all
from rockplan.values.sizes import LEAST, MOST, resized, text_of, texts_in

Limits = tuple[int, ...]
"""Most bytes of (peak, what is saved between the phases, what is on the host), the last if
that is limited."""

Numbers = Mapping[str, int | float]
"""Expression -> its value at some sizes."""


@dataclass(frozen=True, slots=True)
class OpenProgram:
    """given: leaves of (args, kwargs), as `opened_key` describes them -> values of the symbols that
    are no counts; None for a call that the program is not for; agree: values of all symbols ->
    whether it is for counts like these. rows, kept: of its schedule, and of eager's; few,
    all: expressions that each call needs, and all of the graph."""

    graph: CDGraph
    interface: Interface
    given: Callable[[Sequence[Any]], tuple[int, ...] | None]
    agree: Callable[[Sequence[int]], bool]
    rows: PeakRows
    kept: PeakRows
    workspaces: OpenWorkspaces
    few: Expressions
    all: Expressions

    @classmethod
    def of(
        cls,
        graph: CDGraph,
        interface: Interface,
        schedule: Schedule,
        in_flight: int,
        workspaces: OpenWorkspaces | None,
    ) -> OpenProgram:
        """Return what a schedule of `graph` needs to know. workspaces: of another schedule of the
        same graph, whose measurements count here too."""
        rows, names = peak_rows(graph, schedule, in_flight), interface.sizes.names
        eager = as_eager(without_copies(graph))
        kept = peak_rows(eager, keep_all(eager), in_flight)
        values = (v for o in interface.outputs for v in (o.tangent, o.value) if v is not None)
        run = texts_in((interface.outputs, tuple(graph.values[v].spec for v in values)))
        return cls(
            graph,
            interface,
            *_size_readers(graph, interface),
            rows,
            kept,
            workspaces or OpenWorkspaces.in_graph(graph, interface.sizes_in(graph), names),
            Expressions.of(names, (*run, *rows.texts, *kept.texts)),
            Expressions.of(names, texts_in((graph, interface))),
        )

    def fits(self, sizes: tuple[int, ...], leaves: Sequence[Any], limits: Limits) -> bool:
        """Return whether a call of these sizes stays within `limits`. Operators run only if what is
        known of them does not decide."""
        least, most = self.workspaces.bounds(sizes)
        numbers = self.few.at(sizes)

        def is_within(inside: Numbers) -> bool:
            return all(map(operator.le, self.rows.bytes_at({**numbers, **inside}), limits))

        if not is_within(least):
            return False
        unbounded = self.measured(sizes, leaves, least.keys() - most.keys())
        return is_within({**most, **unbounded}) or is_within(self.measured(sizes, leaves))

    def least_bytes(self, rows: PeakRows, sizes: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (peak, saved, host) bytes of `rows` at these sizes, or a little less."""
        return rows.bytes_at({**self.few.at(sizes), **self.workspaces.bounds(sizes)[0]})

    def measured(
        self, sizes: tuple[int, ...], leaves: Sequence[Any], names: Iterable[str] | None = None
    ) -> Numbers:
        """Return symbol -> bytes of the workspaces `names` that have no expression; None for all
        such."""
        names = self.workspaces.of if names is None else names
        if not names:
            return {}
        given = given_integers(self.graph, self.interface.inputs, leaves) if leaves else {}
        return self.workspaces.measured(sizes, self.all.at(sizes), given, names)

    def plan_at(self, plan: Plan, sizes: tuple[int, ...]) -> Plan:
        """Return the plan of this program as one for a call of these sizes, with times scaled."""
        _, most = self.workspaces.bounds(sizes)
        # Made-up masks have other counts.
        is_bounded = most.keys() == self.workspaces.of.keys() and self.interface.sizes.counts
        inside = most if is_bounded else self.measured(sizes, ())
        known = without_copies(self.graph)
        graph = resized(known, {**self.all.at(sizes), **inside})
        graph = with_scaled_times(graph, known, {n.index: n.index for n in graph.nodes})
        eager, graph = as_eager(graph), with_copies_of(graph, self.graph)
        unplanned, simulation = simulate(eager, keep_all(eager)), simulate(graph, plan.schedule)
        return replace(
            plan,
            graph=graph,
            graph_digest=graph_digest(graph),
            peak_bytes=simulation.peak_bytes,
            saved_bytes=simulation.saved_bytes,
            time_ns=simulation.time_ns,
            eager_peak_bytes=unplanned.peak_bytes,
            eager_time_ns=unplanned.time_ns,
            certificate=Certificate(Status.FEASIBLE, simulation.time_ns, unplanned.time_ns),
            trips=trips(graph, plan.schedule),
        )

    def numbers(self, sizes: tuple[int, ...], leaves: Sequence[Any]) -> Numbers:
        """Return the value of every expression in the graph and the interface."""
        return {**self.all.at(sizes), **self.measured(sizes, leaves)}


def _size_readers(
    graph: CDGraph, interface: Interface
) -> tuple[Callable[[Sequence[Any]], tuple[int, ...] | None], Callable[[Sequence[int]], bool]]:
    sizes, counts, call = interface.sizes, {*interface.sizes.counts}, interface.call_in(graph)
    given = [symbol for symbol in sizes.symbols if symbol.name not in counts]
    of_counts = [g for g in sizes.guards if counts.intersection(re.findall(r"\w+", g))]
    lines = ["def sizes(leaves):", "    try:"]
    lines += [f"        {symbol.name} = {symbol.place}" for symbol in given]
    whole = [symbol.name for symbol in given if isinstance(symbol.of(call), int)]
    checks = [f"{LEAST} <= {name} <= {MOST}" for name in whole]
    open_numbers = {symbol.position for symbol in given if symbol.axis == "number"}
    static = ((i, repr(n)) for i, n in interface.numbers if i not in open_numbers)
    checks += [f"repr(leaves[{position}]) == {number!r}" for position, number in static]
    checks += [f"({guard})" for guard in sizes.guards if guard not in of_counts]
    for position, value in interface.inputs:
        spec = graph.values[value].spec
        for where, numbers in (("shape", spec.shape), ("stride()", spec.stride)):
            listed = "".join(f"{text_of(n)}, " for n in numbers)
            checks.append(f"leaves[{position}].{where} == ({listed})")
    lines.append(f"        is_for = {' and '.join(checks)}")
    lines += ["    except (IndexError, ZeroDivisionError):", "        return None"]
    lines.append(f"    return ({''.join(f'{s.name}, ' for s in given)}) if is_for else None")
    checks = [f"{LEAST} <= {name} <= {MOST}" for name in sizes.counts] + [
        f"({guard})" for guard in of_counts
    ]
    agree = function_of(sizes.names, checks)
    return loaded(lines, "sizes"), lambda found: all(agree(found))
