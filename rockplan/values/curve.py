"""Curve: predicted time at every useful peak, for one module under one profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rockplan.values.block import undominated
from rockplan.values.plan import Certificate, Status, format_bytes


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The plan for a budget of `peak_bytes`. eager_time_ns: time of executing every node once."""

    peak_bytes: int
    saved_bytes: int
    certificate: Certificate
    eager_time_ns: int

    @property
    def time_ns(self) -> int:
        """Predicted time of one iteration."""
        return self.certificate.objective_ns

    @property
    def overhead(self) -> float:
        """Predicted extra time over one execution of every node: 0.05 is 5 %."""
        return self.time_ns / max(self.eager_time_ns, 1) - 1.0


def useful(points: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Return the Pareto-optimal points by ascending peak: each is faster than all before it."""
    ranked = sorted(points, key=lambda p: (p.peak_bytes, p.time_ns))
    return undominated(ranked, lambda p: (p.peak_bytes, p.time_ns))


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of peak and time, and what they were computed for.

    points: from the smallest budget that works to the one at which nothing is recomputed;
    each needs more bytes and less time than all before it.
    Bytes follow the convention of the ruler: alive during forward and backward beyond
    parameters, buffers, the caller's inputs and the parameters' `.grad`.
    unplanned_bytes: peak of executing every node once, each result in a storage of its own, as
    eager does; shares ('40%') are shares of it. The last point may need less.
    """

    points: tuple[CurvePoint, ...]
    unplanned_bytes: int
    graph_digest: str
    profile_digest: str
    profile_source: str

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget that works."""
        return self.points[0].peak_bytes

    def at(self, budget_bytes: int) -> CurvePoint | None:
        """Return the fastest point within budget_bytes; None below the minimum."""
        fitting = [p for p in self.points if p.peak_bytes <= budget_bytes]
        return fitting[-1] if fitting else None

    def __str__(self) -> str:
        names = f"{'peak':>12} {'share':>6} {'saved':>12} {'time':>11} {'overhead':>9}"
        rows = [f"{names} {'gap at most':>12}"]
        for point in self.points:
            is_short = point.certificate.status is Status.TIME_LIMIT
            share = point.peak_bytes / max(self.unplanned_bytes, 1)
            rows.append(
                f"{format_bytes(point.peak_bytes):>12} {share:6.1%} "
                f"{format_bytes(point.saved_bytes):>12} {point.time_ns / 1e6:8.1f} ms "
                f"{point.overhead:+9.1%} {point.certificate.gap:12.1%}"
                f"{' (time limit)' if is_short else ''}"
            )
        return "\n".join([*rows, f"profile {self.profile_source}"])
