"""Rows of a program in which storages may go to the host and come back: what the link carries.

takes: Facts with a host, of a graph with fetches (`values.copies.with_fetches`), a program while it
is written. guarantees: a schedule whose copies out are in the forward phase and whose copies in are
in the backward phase is a solution that costs at most what it takes beyond first executions by the
clock (`oracles.clock`): re-executions, and waits.

A fetch is a re-execution that reads nothing and takes no time. What is fetched was stored before
the turn, all of it fits into the host, and the link carries

    out, what is made by a node or after it, in the time from there to the turn;
    in, what a span of intervals fetches and then reads for the first time, in the time from where
    the span begins to the last read. What was alive where it begins, or runs again in it, is not
    fetched in it so.

Without the unions of intervals of `program`, half of a storage fetched before a moment and half
after it would do for both.

Columns, for storage d, interval s:
    stored[d]     binary: d is on the host at the turn
    elapsed       what re-executions and waits take: of the forward phase, of each interval after it
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from rockplan.ilp.highs import TIME_UNIT, ProgramBuilder
from rockplan.ilp.whole_graph.intervals import Facts, Interval
from rockplan.values.copies import Host


class HostRows:
    """turn: the number of the first interval of the backward phase; reruns: of each interval, node
    -> column."""

    def __init__(
        self,
        facts: Facts,
        host: Host,
        builder: ProgramBuilder,
        intervals: Sequence[Interval],
        turn: int,
        reruns: Sequence[Mapping[int, int]],
    ) -> None:
        nodes = facts.graph.nodes
        self._facts, self._host, self._builder = facts, host, builder
        self._intervals, self._turn = intervals, turn
        self._unit_ns = max(facts.graph.time_ns, 1) * TIME_UNIT
        times_ns = (0 if n.optional else n.time_ns for n in nodes)
        self._starts_ns = list(itertools.accumulate(times_ns, initial=0))
        fetches = {n.writes[0]: n.index for n in nodes if n.optional}
        self._fetches = {d: fetches[d] for d in intervals[turn].wanted if d in fetches}
        self._stored = {d: builder.binary() for d in self._fetches}
        forward = self._elapsed(reruns[:turn])
        self._later = [self._elapsed([runs]) for runs in reruns[turn:]]
        self._add_copies_out(forward)

    def _elapsed(self, parts: Iterable[Mapping[int, int]]) -> int:
        nodes, builder = self._facts.graph.nodes, self._builder
        elapsed, waits = builder.amount(), builder.amount(1.0)
        again = [(c, nodes[i].time_ns / self._unit_ns) for runs in parts for i, c in runs.items()]
        builder.at_least([*again, (waits, 1), (elapsed, -1)], 0)
        return elapsed

    def _between(self, first: int, last: int) -> float:
        return (self._starts_ns[last] - self._starts_ns[first]) / self._unit_ns

    def _carried(self, d: int, bytes_per_s: int) -> float:
        return self._facts.sizes[d] * 1e9 / bytes_per_s / self._unit_ns

    def _add_copies_out(self, forward: int) -> None:
        """For each forward node, copies out of what it or later ones make fit into the time from
        its end to the start of the backward phase. forward: the column of what the forward takes
        more."""
        sizes, most_bytes = self._facts.sizes, max(self._host.size_bytes, 1)
        self._builder.at_most([(c, sizes[d] / most_bytes) for d, c in self._stored.items()], 1)
        maker = self._facts.producer
        out_time: list[tuple[int, float]] = [(forward, -1.0)]
        latest_first = sorted(self._stored, key=lambda d: -maker[d])
        for node, made in itertools.groupby(latest_first, key=maker.__getitem__):
            rate = self._host.link.out_bytes_per_s
            out_time += [(self._stored[d], self._carried(d, rate)) for d in made]
            self._builder.at_most(out_time, self._between(node + 1, len(self._facts.graph.forward)))

    def span(self, s: int, end: int, runs: Mapping[int, int]) -> None:
        """Add the rows of the intervals s to `end` taken together: what is fetched in them lies on
        the host, and copies in fit into the time from where s begins to the first read of each.
        runs: node -> column that is 1 if the node runs again in these intervals."""
        fetched = {
            d: runs[self._fetches[d]]
            for d in self._intervals[s].wanted
            if self._fetches.get(d) in runs
        }
        for d, column in fetched.items():
            self._builder.at_least([(self._stored[d], 1), (column, -1)], 0)
        if s < self._turn:
            return
        in_time: list[tuple[int, float]] = []
        for t in range(s, end + 1):
            part = self._intervals[t]
            rate = self._host.link.in_bytes_per_s
            read = [d for d in sorted(part.reads) if d in fetched]
            in_time += [(fetched.pop(d), self._carried(d, rate)) for d in read]
            in_time.append((self._later[t - self._turn], -1.0))
            if read:
                most_time = self._between(self._intervals[s].first, part.end)
                self._builder.at_most(in_time, most_time)
