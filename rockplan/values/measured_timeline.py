"""Measured timeline: the live bytes of one step, as an allocator saw them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeasuredTimeline:
    """Live bytes of one step as the allocator saw them: live_bytes[i] from times_ns[i] on.

    times_ns count from the start of the step, under the profiler, which slows operators down
    a little; the first is 0, the last is when the step is done.
    """

    times_ns: tuple[int, ...]
    live_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)
