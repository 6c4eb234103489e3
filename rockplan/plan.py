"""Plan: the schedule of a whole module with what it promises and why to believe it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rockplan.graph import CDGraph
from rockplan.schedule import Schedule


class Status(Enum):
    """OPTIMAL: proven within the solver's tolerance; FEASIBLE: legal, gap as stated;
    TIME_LIMIT: the search was cut short, best plan so far."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True, slots=True)
class Certificate:
    """objective_ns: predicted time of the plan; bound_ns: no schedule of this graph under this
    profile and budget is faster; gap: (objective - bound) / objective."""

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
class Plan:
    """A schedule for `graph` under `budget_bytes`.

    Bytes follow the convention of the ruler: alive during forward and backward beyond
    parameters, buffers, the caller's inputs and the parameters' `.grad`.
    eager_peak_bytes, eager_time_ns: predicted for executing every node once.
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

    @property
    def overhead(self) -> float:
        """Predicted extra time over one execution of every node: 0.05 is 5 %."""
        return self.time_ns / max(self.eager_time_ns, 1) - 1.0
