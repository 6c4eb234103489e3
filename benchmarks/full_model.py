"""The full model: any node may run again before any other, backward nodes included.

takes: Units and budgets. returns: Solution. It is the reference for the stage formulation of
`rockplan.ilp.blocks`: Checkmate's T x T program (Jain et al., MLSys 2020, section 4) on
storages, as Rockmate states it (Zhao et al., ICML 2023, section 3.2), with liveness as in
`rockplan.ilp.blocks.formulate` in place of variables for frees.

Stage t is what happens from the first execution of node t - 1 to that of node t; in it every
earlier node may run again once, in order. Columns:
    keep[t, d]    d is alive when stage t starts
    rerun[t, i]   i runs again at stage t
    use[t, d, u]  d is used at t by node u or later, or kept for stage t + 1
    state[t, i]   random node i runs again at stage t or later
A node that hands a gradient over never runs again: the gradient would be handed over twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import pulp

from rockplan.ilp.blocks.decode import Solution, solution
from rockplan.ilp.highs import TIME_UNIT, in_own_thread, report
from rockplan.ilp.scaling import UNLIMITED, Units
from rockplan.values.graph import ComputeNode, DataKind
from rockplan.values.order import Orders, without_idle

Expression: TypeAlias = Any
"""A pulp.LpAffineExpression; PuLP has no types."""


def solve_full(
    units: Units, peak_bytes: int, saved_bytes: int, *, time_limit_s: float, gap: float
) -> Solution:
    """The fastest schedule within the budgets (tiny storages aside); gap: share of the iteration
    time that may stay unproven. Status and bound are what HiGHS itself reports, not PuLP's."""
    model = _Model(units, peak_bytes, saved_bytes)
    solver = pulp.HiGHS(
        msg=False,
        threads=1,
        gapRel=0.0,
        gapAbs=gap / TIME_UNIT,
        timeLimit=max(time_limit_s, 0.0),
        random_seed=0,
    )
    in_own_thread(lambda: model.program.solve(solver))
    integral = np.array([v.cat == pulp.LpInteger for v in model.program.variables()], dtype=bool)
    found = report(model.program.solverModel, integral)
    return solution(units.graph, found, None if found.values is None else model.orders())


class _Model:
    """The PuLP problem while it is written, and how to read its solution."""

    def __init__(self, units: Units, peak_bytes: int, saved_bytes: int) -> None:
        self.units = units
        self.graph = graph = units.graph
        self.peak_bytes = peak_bytes
        self.sizes, self.producer = units.view.sizes, units.view.producer
        self.state_size = units.up(graph.rng_state_bytes)
        self.program = pulp.LpProblem("rematerialization", pulp.LpMinimize)
        self.n_forward = len(graph.forward)
        # Always there once made: held or free of charge.
        self.settled = units.tiny | set(graph.held)
        self.keep = {
            (t, d): self._binary(f"keep_{t}_{d}")
            for t in range(len(graph.nodes))
            for d in self._countable(t)
            if t != self.n_forward or d not in graph.dropped
        }
        self.rerun = {
            (t, i): self._binary(f"rerun_{t}_{i}")
            for t in range(len(graph.nodes))
            for i in range(t)
            if self._may_rerun(graph.nodes[i])
        }
        self.state = {
            (t, i): self._fraction(f"state_{t}_{i}")
            for t, i in self.rerun
            if graph.nodes[i].random and graph.rng_state_bytes
        }
        self.program += pulp.lpSum(
            column * (graph.nodes[i].time_ns / (TIME_UNIT * max(graph.time_ns, 1)))
            for (_, i), column in self.rerun.items()
        )
        for t in range(len(graph.nodes)):
            self._require_inputs(t)
            self._require_continuity(t)
            self._limit_stage(t)
        self._limit_start()
        self._limit_saved(saved_bytes)

    def orders(self) -> Orders:
        """Each stage's re-executions in order, then its node."""
        forward: list[int] = []
        backward: list[int] = []
        for t in range(len(self.graph.nodes)):
            order = forward if t < self.n_forward else backward
            order += [i for i in range(t) if self._is_chosen(self.rerun.get((t, i)))]
            order.append(t)
        return Orders(*without_idle(self.graph, forward, backward))

    def _is_chosen(self, column: pulp.LpVariable | None) -> bool:
        """What no row is about and costs nothing was not solved: it has no value."""
        value = None if column is None else pulp.value(column)
        return value is not None and value > 0.5

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.program.add_variable(name, cat=pulp.LpBinary)

    def _fraction(self, name: str) -> pulp.LpVariable:
        return self.program.add_variable(name, lowBound=0, upBound=1)

    def _may_rerun(self, node: ComputeNode) -> bool:
        return node.recomputable and set(node.writes).isdisjoint(self.graph.handed)

    def _countable(self, t: int) -> list[int]:
        """Storages that may be alive when stage t starts and are not settled."""
        return [
            d.index
            for d in self.graph.data
            if d.index not in self.settled and self._is_made(d.index, t)
        ]

    def _is_made(self, d: int, t: int) -> bool:
        """Before stage t? Tangents are there when the backward phase starts."""
        if self.graph.data[d].kind is DataKind.TANGENT:
            return t >= self.n_forward
        return self.producer.get(d, t) < t

    def _bytes(self, data: Iterable[int]) -> int:
        return sum(self.sizes[d] for d in data)

    def _size(self, d: int) -> int:
        """Units of storage d."""
        return self.units.up(self.sizes[d])

    def _limit(self, units: Expression, constant_bytes: int, budget_bytes: int) -> None:
        """units + constant_bytes <= budget_bytes"""
        if budget_bytes < UNLIMITED:
            self.program += units <= self.units.down(budget_bytes - constant_bytes)

    def _kept(self, t: int, d: int) -> Expression:
        return self.keep.get((t, d), 0) + pulp.LpAffineExpression()

    def _rerun(self, t: int, i: int | None) -> Expression:
        return self.rerun.get((t, -1 if i is None else i), 0) + pulp.LpAffineExpression()

    def _available(self, t: int, d: int) -> Expression:
        """1 if d can be read at stage t by what comes after its producer."""
        return self._kept(t, d) + self._rerun(t, self.producer.get(d))

    def _read_at(self, t: int) -> list[int]:
        """Storages that must be alive while node t runs: what it reads, and at the end of the
        forward phase the outputs."""
        needed = set(self.graph.nodes[t].reads)
        if t == self.n_forward - 1:
            needed |= set(self.graph.outputs)
        return [d for d in self._countable(t) if d in needed]

    def _require_inputs(self, t: int) -> None:
        for d in self._read_at(t):
            self.program += self._available(t, d) >= 1
        countable = set(self._countable(t))
        for i in range(t):
            if (t, i) in self.rerun:
                for d in countable & set(self.graph.nodes[i].reads):
                    self.program += self.rerun[t, i] <= self._available(t, d)

    def _require_continuity(self, t: int) -> None:
        """What is kept was there before; a copy is either kept or made again."""
        for d in self._countable(t):
            self.program += self._available(t, d) <= 1
            if (t + 1, d) in self.keep:
                self.program += self.keep[t + 1, d] <= self._available(t, d)
        for (stage, i), state in self.state.items():
            if stage == t:
                self.program += state >= self.rerun[t, i]
                if (t + 1, i) in self.state:
                    self.program += state >= self.state[t + 1, i]

    def _limit_stage(self, t: int) -> None:
        """Memory while nodes run again at stage t, then while node t runs."""
        lives = {d: self._life(t, d) for d in self._countable(t)}
        held_bytes = self._bytes(d for d in self.graph.held if self._is_made(d, t))
        for i in range(t):
            if (t, i) in self.rerun:
                node = self.graph.nodes[i]
                copies_bytes = self._bytes(d for d in node.writes if d in self.settled)
                extra = self.units.up(node.workspace_bytes + copies_bytes)
                extra += self.state_size if node.random else 0
                alive = pulp.lpSum(self._alive(t, d, i, life) for d, life in lives.items())
                units = alive + self._states(t, i) + self.rerun[t, i] * extra
                self._limit(units, held_bytes, self.peak_bytes)
        node = self.graph.nodes[t]
        read = self._read_at(t)
        fixed_bytes = held_bytes + self._bytes(node.writes) + self._bytes(read)
        kept = pulp.lpSum(self._kept(t + 1, d) * self._size(d) for d in lives if d not in read)
        units = kept + self._states(t + 1, 0)
        self._limit(units, fixed_bytes + node.workspace_bytes, self.peak_bytes)

    def _life(self, t: int, d: int) -> dict[int, pulp.LpVariable]:
        """use[t, d, u] of every node u that may read d again at stage t."""
        made_by = self.producer.get(d, -1)
        users = [
            i
            for i in range(made_by + 1, t)
            if (t, i) in self.rerun and d in self.graph.nodes[i].reads
        ]
        life = {u: self._fraction(f"use_{t}_{d}_{u}") for u in users}
        later = self._tail(t, d)
        for u in reversed(users):
            self.program += life[u] >= self.rerun[t, u]
            self.program += life[u] >= later
            later = life[u]
        return life

    def _tail(self, t: int, d: int) -> Expression:
        """1 if d is alive when node t runs."""
        return (
            pulp.LpAffineExpression(constant=1) if d in self._read_at(t) else self._kept(t + 1, d)
        )

    def _alive(self, t: int, d: int, i: int, life: dict[int, pulp.LpVariable]) -> Expression:
        """Units of d while node i runs again at stage t."""
        made_by = self.producer.get(d, -1)
        if i < made_by:
            return self._kept(t, d) * self._size(d)
        if i == made_by:
            return self._available(t, d) * self._size(d)
        later = [column for u, column in life.items() if u >= i]
        return (later[0] if later else self._tail(t, d)) * self._size(d)

    def _states(self, t: int, i: int) -> Expression:
        """Units of generator states while node i runs again at stage t."""
        return pulp.lpSum(
            column * self.state_size
            for (stage, node), column in self.state.items()
            if stage == (t if node >= i else t + 1)
        )

    def _limit_start(self) -> None:
        """When the backward phase starts all outputs and tangents are alive."""
        first = self.n_forward
        tangents = {d.index for d in self.graph.data if d.kind is DataKind.TANGENT}
        alive = {*self.graph.outputs, *tangents}
        alive |= {d for d in self.graph.held if self.producer.get(d, first) < first}
        self._limit(self._kept_units(first, alive), self._bytes(alive), self.peak_bytes)

    def _limit_saved(self, saved_bytes: int) -> None:
        first = self.n_forward
        outside = set(self.graph.outputs)
        outside |= {d.index for d in self.graph.data if d.kind is DataKind.TANGENT}
        held = {d for d in self.graph.held if self.producer.get(d, first) < first}
        units = self._kept_units(first, outside)
        self._limit(units, self._bytes(held - outside), saved_bytes)

    def _kept_units(self, t: int, without: set[int]) -> Expression:
        """Units of what is kept when stage t starts, `without` some storages."""
        kept = pulp.lpSum(
            self._kept(t, d) * self._size(d) for d in self._countable(t) if d not in without
        )
        return kept + self._states(t, 0)
