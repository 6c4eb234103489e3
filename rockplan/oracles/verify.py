"""The one verifier: is a schedule legal for a graph?

takes: CDGraph, Schedule. returns: nothing; raises IllegalSchedule with the first broken rule.

Rules:
1. forward nodes run at least once, all of them before the backward phase; backward nodes run at
   least once, in the backward phase only; optional nodes need not run, must not run while all that
   they make is alive, and run once at most if they are of the forward phase
2. whatever a node reads is alive
3. only what is alive, not resident and not held is freed
4. a node that is not recomputable runs once, and so does one that makes a gradient of `handed`,
   which autograd would otherwise get twice
5. first executions of random and of not recomputable nodes come in the order of the graph
   (so that random draws and side effects equal those of eager)
6. `outputs` are alive when the forward phase ends, and nothing of `dropped` is; at the end of the
   schedule nothing but `held` is alive
"""

from __future__ import annotations

from rockplan.errors import IllegalSchedule
from rockplan.values.graph import CDGraph, DataKind, Phase
from rockplan.values.schedule import Compute, Schedule


def verify(graph: CDGraph, schedule: Schedule) -> None:
    """Raise IllegalSchedule with the first rule of this module that `schedule` breaks (what is read
    is alive, each phase runs its nodes, nothing runs again that must not, and so on), and where."""
    resident = {d.index for d in graph.data if d.kind.resident}
    not_ours = resident.union(graph.held)
    handed = frozenset(graph.handed)
    alive: set[int] = set()
    executed: set[int] = set()
    last_effect = -1
    for position, event in enumerate((*schedule.events, None)):
        if position == schedule.forward_length:
            _check_forward_end(graph, executed, alive)
            alive |= {d.index for d in graph.data if d.kind is DataKind.TANGENT}
        if event is None:
            break
        if not isinstance(event, Compute):
            if event.data in not_ours or event.data not in alive:
                what = "not ours to free" if event.data in not_ours else "freed but not alive"
                name = graph.data[event.data].name
                raise IllegalSchedule(f"event {position}: {name} is {what}")
            alive.discard(event.data)
            continue
        node = graph.nodes[event.node]
        if node.phase is Phase.BACKWARD and position < schedule.forward_length:
            raise IllegalSchedule(f"event {position}: {node.name} is backward, phase is forward")
        for d in node.reads:
            if d not in alive and d not in resident:
                raise IllegalSchedule(
                    f"event {position}: {node.name} reads {graph.data[d].name}, which is not alive"
                )
        if node.optional and alive.issuperset(node.writes):
            raise IllegalSchedule(f"event {position}: {node.name} makes what is alive")
        if node.index in executed:
            is_once = node.optional and node.phase is Phase.FORWARD
            if is_once or not node.recomputable or not handed.isdisjoint(node.writes):
                raise IllegalSchedule(f"event {position}: {node.name} may run only once")
        elif node.random or not node.recomputable:
            if node.index < last_effect:
                raise IllegalSchedule(f"event {position}: {node.name} first runs out of order")
            last_effect = node.index
        executed.add(node.index)
        alive.update(node.writes)
    missing = [n.name for n in graph.nodes if n.index not in executed and not n.optional]
    if missing:
        raise IllegalSchedule(f"never executed: {', '.join(missing[:5])}")
    left = alive - set(graph.held)
    if left:
        names = ", ".join(graph.data[d].name for d in sorted(left)[:5])
        raise IllegalSchedule(f"alive at the end: {names}")


def _check_forward_end(graph: CDGraph, executed: set[int], alive: set[int]) -> None:
    """Raise IllegalSchedule unless, where the forward phase ends, every required forward node has
    run, outputs are alive and storages to be dropped are not. executed: nodes; alive: storages."""
    missing = [n.name for n in graph.forward if n.index not in executed and not n.optional]
    if missing:
        raise IllegalSchedule(f"not executed in the forward phase: {', '.join(missing[:5])}")
    dead = [
        graph.data[d].name
        for d in graph.outputs
        if d not in alive and not graph.data[d].kind.resident
    ]
    if dead:
        raise IllegalSchedule(f"outputs not alive at the end of forward: {', '.join(dead[:5])}")
    left = [graph.data[d].name for d in graph.dropped if d in alive]
    if left:
        raise IllegalSchedule(f"to be dropped, but alive at the end of forward: {left[:5]}")
