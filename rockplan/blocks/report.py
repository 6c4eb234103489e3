"""Report: the plan of a step, and the owners of its bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rockplan.dp.block_sequence import NO_OTHERS, Others
from rockplan.values.block_sequence import BoundedOption, StepMoment, step_peak_bytes
from rockplan.values.copies import paged
from rockplan.values.graph import CDGraph
from rockplan.values.names import activation_names, operation_names
from rockplan.values.plan import format_bytes
from rockplan.values.schedule import Schedule, kept_data


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block of a step. kind: number of its kind (blocks planned as one); option: how it runs;
    eager: how it would run unplanned; names: in words, what it keeps, pages and computes again;
    paged_bytes: on the host between its phases."""

    path: str
    kind: int
    option: BoundedOption
    eager: BoundedOption
    names: tuple[str, str, str]
    paged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The owners of the peak of a step, or of a part of it. outside_bytes: measured beside the
    blocks; saved_bytes: what blocks save meanwhile; running_bytes: what the running block `path`
    needs; path is '' if none runs."""

    outside_bytes: int
    saved_bytes: int
    running_bytes: int = 0
    path: str = ""
    is_backward: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.outside_bytes + self.saved_bytes + self.running_bytes


@dataclass(frozen=True, slots=True)
class BlocksPlan:
    """The plan of `solve_blocks`.

    blocks: in the order of their forwards; moments: of the step that was measured; left: (path,
    why) of blocks that are not planned; others: calls that are in flight meanwhile; least: moments
    with the least of several measured steps, in which collectives let go of their memory soonest.
    """

    budget_bytes: int
    blocks: tuple[PlacedBlock, ...]
    moments: tuple[StepMoment, ...]
    left: tuple[tuple[str, str], ...] = ()
    others: Others = NO_OTHERS
    least: tuple[StepMoment, ...] = ()

    @property
    def options(self) -> tuple[BoundedOption, ...]:
        return tuple(block.option for block in self.blocks)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a whole step, other calls in flight included."""
        return step_peak_bytes(self.moments, self.options) + self.others.needed_bytes(self.options)

    @property
    def least_peak_bytes(self) -> int:
        """The same without what collectives let go of late (those of gloo do)."""
        return step_peak_bytes(self.least, self.options) + self.others.needed_bytes(self.options)

    @property
    def eager_peak_bytes(self) -> int:
        """The same if every block runs unplanned."""
        eager = [block.eager for block in self.blocks]
        return step_peak_bytes(self.moments, eager) + self.others.needed_bytes(eager)

    @property
    def saved_bytes(self) -> int:
        """What all blocks save between their phases, beside what they return."""
        return sum(option.saved_bytes for option in self.options)

    @property
    def paged_bytes(self) -> int:
        """What all blocks have on the host between their phases."""
        return sum(block.paged_bytes for block in self.blocks)

    @property
    def overhead(self) -> float:
        """Predicted extra time of the blocks alone: 0.05 is 5 % of the time of all blocks."""
        eager_ns = sum(block.eager.time_ns for block in self.blocks)
        return sum(option.time_ns for option in self.options) / max(eager_ns, 1) - 1.0

    @property
    def peak(self) -> StepBytes:
        """The owners of the predicted peak."""
        return owners(self.moments, self.options, self._paths)

    @property
    def beside(self) -> StepBytes:
        """The owners of the peak while no block runs: mostly the loss."""
        between = [m for m in self.moments if m.running is None]
        return owners(between, self.options, self._paths)

    @property
    def _paths(self) -> tuple[str, ...]:
        return tuple(block.path for block in self.blocks)

    @property
    def first_bytes(self) -> int:
        """Bytes alive beside the blocks when the first one begins."""
        return next((m.outside_bytes for m in self.moments if m.running is not None), 0)

    def __str__(self) -> str:
        beside, others = self.beside, []
        if self.least_peak_bytes < self.peak_bytes:
            late = format_bytes(self.peak_bytes - self.least_peak_bytes)
            others += [f"let go late     {late} of the peak, by collectives, in some steps"]
        if self.paged_bytes:
            others += [f"paged           {format_bytes(self.paged_bytes)} to the host and back"]
        if self.others.count:
            held = format_bytes(self.others.needed_bytes(self.options))
            others += [f"others          {held} held by {self.others.count} more calls in flight"]
        lines = [
            f"budget          {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes)",
            f"predicted peak  {format_bytes(self.peak_bytes)} "
            f"({self.peak_bytes / max(self.eager_peak_bytes, 1):.0%} of "
            f"{format_bytes(self.eager_peak_bytes)} with everything kept)",
            f"  made of       {described(self.peak)}",
            f"beside blocks   {format_bytes(self.first_bytes)} alive before the first block, "
            f"{format_bytes(beside.outside_bytes)} at most between blocks (measured)",
            f"blocks          {format_bytes(self.saved_bytes)} kept between forward and backward",
            *others,
            f"overhead        {self.overhead:+.1%} predicted time of the blocks",
            "bytes count what is alive beyond parameters, buffers, inputs and .grad",
        ]
        return "\n".join([*lines, *self._rows(), *(f"{p}  left: {why}" for p, why in self.left)])

    def _rows(self) -> Iterator[str]:
        rows = Counter(
            replace(block, path=re.sub(r"\d+", "*", block.path), eager=self.blocks[0].eager)
            for block in self.blocks
        )
        eager_ns = {block.kind: max(block.eager.time_ns, 1) for block in self.blocks}
        for block, count in rows.items():
            option, (keeps, pages, again) = block.option, block.names
            yield (
                f"{block.path}  x{count}  kind {block.kind}: keeps "
                f"{format_bytes(option.saved_bytes)}, needs "
                f"{format_bytes(option.forward_peak_bytes)} forward and "
                f"{format_bytes(option.backward_peak_bytes)} backward, "
                f"{option.time_ns / eager_ns[block.kind] - 1:+.1%} time"
            )
            yield f"    keeps       {keeps}"
            if block.paged_bytes:
                yield f"    pages       {pages}"
            yield f"    recomputes  {again}"


MOST_NAMES = 4
"""Names of storages and operations in a row of the report."""


def in_words(graph: CDGraph, schedule: Schedule) -> tuple[tuple[str, str, str], int]:
    """Return (what `schedule` keeps between the phases beside results and what it pages to the host
    meanwhile, the largest first, and which operations of the forward it runs again, the longest
    first; bytes of what it pages)."""
    names, sizes = activation_names(graph), [d.size_bytes for d in graph.data]

    def largest(storages: Iterable[int]) -> str:
        ranked = sorted(storages, key=lambda d: (-sizes[d], d))
        return _few([f"{names[d]} {format_bytes(sizes[d])}" for d in ranked])

    runs = Counter(schedule.computes)
    again = (n for n in graph.forward if runs[n.index] > 1)
    longest = sorted(again, key=lambda n: (-n.time_ns, n.index))
    operations = operation_names(graph)
    pages = [page.data for page in paged(graph) if page.store in runs]
    words = (
        largest(kept_data(graph, schedule).difference(graph.outputs)),
        largest(pages),
        _few([operations[n.index] for n in longest]),
    )
    return words, sum(sizes[d] for d in pages)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more if names else "nothing"


def owners(
    moments: Sequence[StepMoment], options: Sequence[BoundedOption], paths: Sequence[str]
) -> StepBytes:
    """Return the owners of the most bytes alive at any of these moments, with blocks that run as
    `options` say; of no moments, zero bytes."""
    if not moments:
        return StepBytes(0, 0)
    most = max(moments, key=lambda m: m.peak_bytes(options))
    own_bytes = most.own_bytes(options)
    saved_bytes = most.peak_bytes(options) - most.outside_bytes - own_bytes
    path = "" if most.running is None else paths[most.running]
    return StepBytes(most.outside_bytes, saved_bytes, own_bytes, path, most.is_backward)


def described(step_bytes: StepBytes) -> str:
    """Return the owners of a peak and their bytes in words: '1.0 GiB beside the blocks + ...'."""
    outside, saved = format_bytes(step_bytes.outside_bytes), format_bytes(step_bytes.saved_bytes)
    parts = [f"{outside} beside the blocks", f"{saved} kept by blocks"]
    if step_bytes.path:
        phase = "backward" if step_bytes.is_backward else "forward"
        parts.append(
            f"{format_bytes(step_bytes.running_bytes)} in the {phase} of '{step_bytes.path}'"
        )
    return " + ".join(parts)
