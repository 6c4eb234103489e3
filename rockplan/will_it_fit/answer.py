"""Answer: what fits on a device, as a frozen value and as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rockplan.errors import InvalidInput
from rockplan.reports.explain import wrapped
from rockplan.values.columns import aligned
from rockplan.values.plan import format_bytes


@dataclass(frozen=True, slots=True)
class FitRow:
    """The largest batch that fits one way of running, at one length; the memory and time of its
    steps.

    length: None if lengths do not vary; batch: 0 if none fits, then all figures are of the smallest
    batch. allocated_bytes, reserved_bytes: of the caching allocator at their peaks, over the first
    three steps; owners: (owner, bytes) at the peak of requested bytes, with what the allocator
    reserves beyond that: in sum reserved_bytes; none of inference. overhead: of time, over
    everything kept; tokens_per_s: an estimate (samples, if lengths do not vary), None if the
    device's rates are unknown, and of inference; both with a quick host, and slow_... with a slow
    one. host_bytes: of activations on the host. is_most: no larger batch was asked for. passes:
    (how many, samples of each) that accumulate the largest batch asked for. peaks: (batch, bytes at
    the peak) of those that were looked at. cache_bytes: of the key-value cache, for each token of
    each sample.
    """

    length: int | None
    way: str
    batch: int
    allocated_bytes: int
    reserved_bytes: int
    owners: tuple[tuple[str, int], ...]
    overhead: float = 0.0
    tokens_per_s: float | None = None
    slow_overhead: float = 0.0
    slow_tokens_per_s: float | None = None
    host_bytes: int = 0
    is_most: bool = False
    passes: tuple[int, int] | None = None
    peaks: tuple[tuple[int, int], ...] = ()
    cache_bytes: int = 0

    @property
    def samples(self) -> str:
        """The largest batch in words."""
        if self.is_most:
            return f"at least {self.batch}"
        by = f" (accumulate {' x '.join(map(str, self.passes))})" if self.passes else ""
        return f"{self.batch or '-'}{by}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its line in a table."""
        length = "" if self.length is None else str(self.length)
        needs = (format_bytes(self.allocated_bytes), format_bytes(self.reserved_bytes))
        speed = _range(_rate_text, self.slow_tokens_per_s, self.tokens_per_s)
        overheads = sorted((self.overhead, self.slow_overhead)) if self.owners else ()
        price = _range("{:+.1%}".format, *overheads)
        cached = f", {format_bytes(self.cache_bytes)} a token" if self.cache_bytes else ""
        return length, self.way + cached, self.samples, *needs, price, speed


def _range(text: Callable[[float], str], *ends: float | None) -> str:
    return " to ".join(dict.fromkeys(text(n) for n in ends if n is not None))


def _rate_text(rate: float) -> str:
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else f"{rate:.3g}"


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer of `fit`. device_bytes: all of the device; usable_bytes: left for the caching
    allocator beside the context; optimizer: its name; notes: what the figures rely on; shards: the
    process whose device it is, if several train together, each on batches of its own; inference:
    what fits without training, under `no_grad`, if that was asked for: in evaluation
    ("evaluation"), and where prompts of a length are read and their key-value cache stays
    ("generation")."""

    device: str
    device_bytes: int
    usable_bytes: int
    optimizer: str
    rows: tuple[FitRow, ...]
    notes: tuple[str, ...] = ()
    shards: str = ""
    inference: tuple[FitRow, ...] = ()

    def largest(self, length: int | None = None) -> FitRow:
        """Return the row of the way with the largest batch at this length (None: that of the
        sample); of equal ones, that of least overhead. Raises InvalidInput if there is none."""
        rows = [row for row in self.rows if row.length == length]
        if not rows:
            lengths = ", ".join(str(n) for n in dict.fromkeys(row.length for row in self.rows))
            raise InvalidInput(f"no row is of length {length}; there are {lengths}")
        return max(rows, key=lambda row: (row.batch, -row.overhead))

    def fastest(self) -> FitRow | None:
        """Return the row of most tokens a second, of those that fit; None if none fits, or times
        are unknown."""
        rows = [row for row in self.rows if row.batch and row.tokens_per_s]
        return max(rows, key=lambda row: row.tokens_per_s or 0, default=None)

    def breakdown(self, way: str, length: int | None = None) -> dict[str, int]:
        """Return owner ("parameters", "activations", ...) -> bytes of the device at the peak of the
        row of this way and length, the CUDA context among them. Raises InvalidInput if there is no
        such row."""
        context_bytes = self.device_bytes - self.usable_bytes
        for row in self.rows:
            if (row.way, row.length) == (way, length):
                return {**dict(row.owners), "context": context_bytes}
        ways = ", ".join(dict.fromkeys(row.way for row in self.rows))
        raise InvalidInput(f"no row is of {way!r} at length {length}; ways are {ways}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Fit:
        """Read what `to_json` wrote. Raises AttributeError, KeyError, TypeError or ValueError for
        anything else."""
        facts = _hashable(json.loads(text))
        rows = {name: tuple(FitRow(**r) for r in facts[name]) for name in ("rows", "inference")}
        return cls(**facts | rows)

    @property
    def headline(self) -> str:
        """What the figures are of: device, optimizer, and process, if there are several."""
        context = format_bytes(self.device_bytes - self.usable_bytes)
        return (
            f"{self.device}: {format_bytes(self.device_bytes)}, {context} of it for the context; "
            f"optimizer {self.optimizer}{self.shards and f';{self.shards}'}"
        )

    def __str__(self) -> str:
        head = ("length", "way", "largest batch", "allocated", "reserved", "overhead", "a second")
        rows = *self.rows, *self.inference
        table = [head, *(row.cells for row in rows)]
        if any(row.host_bytes for row in rows):
            on_host = (format_bytes(row.host_bytes) if row.host_bytes else "" for row in rows)
            table = [(*row, cell) for row, cell in zip(table, ("on host", *on_host), strict=True)]
        lines = [
            self.headline,
            *aligned(table, numbers=(0, *range(2, len(table[0])))),
            *(line for note in self.notes for line in wrapped(note)),
        ]
        return "\n".join(line.rstrip() for line in lines)


def _hashable(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {name: _hashable(fact) for name, fact in facts.items()}
    return tuple(map(_hashable, facts)) if isinstance(facts, list) else facts
