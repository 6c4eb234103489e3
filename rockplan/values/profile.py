"""Measurements: what each unique operator call costs on one device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one unique call.

    time_ns: the least of `repeats`; spread_ns: interquartile range; workspace_bytes: peak of
    temporaries beyond inputs and results; result_bytes: storage size of each fresh result, in
    the order of `Call.results` (0 for a view or a non-tensor), rounded up as the allocator does.
    """

    time_ns: int
    spread_ns: int
    workspace_bytes: int
    result_bytes: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by call digest.

    source: 'measured', 'roofline', or 'sizes measured, times scaled' from those of another graph;
    device, torch_version, threads: where the costs hold.
    """

    source: str
    device: str
    torch_version: str
    threads: int
    costs: tuple[tuple[str, OpCost], ...]

    @property
    def spread(self) -> float:
        """Return the interquartile range of the measured times as a share of their sum."""
        measured = [cost for _, cost in self.costs if cost.repeats]
        return sum(c.spread_ns for c in measured) / max(sum(c.time_ns for c in measured), 1)
