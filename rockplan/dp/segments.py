"""Segments: the sub-chains over which the recurrence runs, each distinct one once.

takes: links. returns: the distinct segments, shorter ones first, and the choices of each. source:
Rockmate (ICML 2023), appendix C, equations 1 and 2. A segment is known by the string of its links
and by whether it ends the chain: a chain of L blocks of which most repeat has about 4 L distinct
segments instead of L (L + 1) / 2.

Memory of a segment s..t includes the input of s and the gradient of the output of t. An input that
only the segment needs is dropped after its last use (`drops`), any other is held to the end.
(Rockmate holds every input, and leaves the first one out of the memory.) In a segment that ends the
chain, forward runs come before any gradient exists; every other segment runs when all its blocks
have run before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rockplan.dp.links import ForwardCost, Link, OptionCost, OptionCosts

Integers = npt.NDArray[np.int64]

EMPTY = 0
"""The segment without blocks: no time, no bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class OptionArrays:
    """The options of one link in one role, as arrays of equal length."""

    option: Integers
    saved_bytes: Integers
    forward_peak_bytes: Integers
    backward_peak_bytes: Integers
    time_ns: Integers
    reads_output: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """Costs of blocks in segments that end the chain, or in all others.

    inner, last: options of each block, if other blocks of the segment follow it or not; indexed by
    [drops]. forward_time_ns: of the blocks before each, summed up (one entry more than blocks).
    forward_peak_bytes, dropped_peak_bytes: of running each block forward, beside its input.
    """

    inner: tuple[tuple[OptionArrays, ...], tuple[OptionArrays, ...]]
    last: tuple[tuple[OptionArrays, ...], tuple[OptionArrays, ...]]
    forward_time_ns: Integers
    forward_peak_bytes: Integers
    dropped_peak_bytes: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The distinct segments of a chain. ids[drops, s, t]: the segment of blocks s..t; spans[id]:
    one (s, t, drops) of it.

    A segment's id is above those of its parts; EMPTY has s > t. The arrays have one entry for each
    block; the input of the first one costs nothing.
    """

    ids: Integers
    spans: tuple[tuple[int, int, int], ...]
    ending: Roles
    repeated: Roles
    input_bytes: Integers
    incoming_gradient_bytes: Integers
    background_bytes: Integers

    @property
    def blocks(self) -> int:
        return len(self.input_bytes)

    @property
    def whole(self) -> int:
        """Id of the whole chain."""
        return int(self.ids[0, 0, self.blocks - 1])


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """All choices to begin a segment, one per index; all arrays have the same length.

    Choice k takes time_ns[k] and peak_bytes[k]. It runs segment inner[k] in the memory less
    held_bytes[k], and afterwards segment left[k] in the whole memory. option[k]: the index in the
    family of the option with which the first block runs once, around inner; left is EMPTY. Or -1:
    ahead[k] blocks run forward, inner starts after them, left runs them again.
    """

    time_ns: Integers
    peak_bytes: Integers
    held_bytes: Integers
    inner: Integers
    left: Integers
    option: Integers
    ahead: Integers

    def need_bytes(self, segment_needs: Integers) -> Integers:
        """Return the bytes that each choice needs, if segments need segment_needs (by id)."""
        inner = self.held_bytes + segment_needs[self.inner]
        needs: Integers = np.maximum(np.maximum(self.peak_bytes, inner), segment_needs[self.left])
        return needs


def intern_segments(links: Sequence[Link]) -> Segments:
    """Return the distinct sub-chains of the chain `links`, shortest first, and the costs of all
    blocks as arrays."""
    ids, spans = _distinct(links)
    return Segments(
        ids=ids,
        spans=spans,
        ending=_roles(
            [link.first for link in links],
            [link.first for link in links],
            [link.first_forward for link in links],
        ),
        repeated=_roles(
            [link.again for link in links],
            [link.closing for link in links],
            [link.again_forward for link in links],
        ),
        input_bytes=_integers([0, *(link.output_bytes for link in links[:-1])]),
        incoming_gradient_bytes=_integers(link.incoming_gradient_bytes for link in links),
        background_bytes=_integers(link.background_bytes for link in links),
    )


def choices(segments: Segments, segment: int) -> Choices:
    """Return all ways to begin a segment (an id): run its first block once, with each of its
    options, around the rest; or run some blocks forward first, keep only the input of the next one,
    and run the skipped ones again afterwards. (Equations 1 and 2 of Rockmate.)"""
    s, t, drops = segments.spans[segment]
    ends_chain = t == segments.blocks - 1
    roles = segments.ending if ends_chain else segments.repeated
    gradient_bytes = 0 if ends_chain else segments.incoming_gradient_bytes[t]
    input_bytes, background_bytes = segments.input_bytes, segments.background_bytes
    options = roles.inner[drops][s] if s < t else roles.last[drops][s]
    option_peaks = np.maximum(
        options.forward_peak_bytes + gradient_bytes, options.backward_peak_bytes
    )
    # The first input is needed again when the blocks ahead run again; other inputs are dropped.
    forward_peaks = roles.dropped_peak_bytes[s:t] + input_bytes[s:t]
    forward_peaks[:1] = roles.forward_peak_bytes[s:t][:1]
    forward_peaks += background_bytes[s:t] + gradient_bytes
    splits = np.arange(s + 1, t + 1)
    none = np.zeros_like(options.option)
    inner, held_bytes = none + EMPTY, none
    if s < t:
        inner = segments.ids[1 - options.reads_output, s + 1, t]
        held_bytes = options.saved_bytes + input_bytes[s]
    return Choices(
        time_ns=_join(options.time_ns, roles.forward_time_ns[splits] - roles.forward_time_ns[s]),
        peak_bytes=input_bytes[s]
        + _join(option_peaks + background_bytes[s], np.maximum.accumulate(forward_peaks)),
        held_bytes=_join(held_bytes, np.full(t - s, input_bytes[s])),
        inner=_join(inner, segments.ids[1, splits, t]),
        left=_join(none + EMPTY, segments.ids[drops, s, s:t]),
        option=_join(options.option, np.full(t - s, -1)),
        ahead=_join(none, splits - s),
    )


def _distinct(links: Sequence[Link]) -> tuple[Integers, tuple[tuple[int, int, int], ...]]:
    """Give equal sub-chains of the chain `links` one id, and return (ids, spans): ids[drops, s, t]
    of blocks s..t, where drops says if the input of s is freed after its last use; spans[id] is one
    (s, t, drops) of it. Ids of shorter ones come first; 0 is the empty one."""
    length = len(links)
    numbers = {link: i for i, link in enumerate(dict.fromkeys(links))}
    classes = [numbers[link] for link in links]
    matters = [k > 0 and link.may_drop_input for k, link in enumerate(links)]
    inputs = [0, *(link.output_bytes for link in links)]
    ids = np.zeros((2, length + 1, length), dtype=np.int64)
    known: dict[tuple[int, ...], int] = {}
    spans = [(1, 0, 0)]
    for size in range(1, length + 1):
        for s in range(length - size + 1):
            t = s + size - 1
            # A negative number after the last block: does the segment end the chain?
            rest = ids[:, s + 1, t].tolist() if size > 1 else [-1 - (t == length - 1)]
            for drops in (0, 1):
                key = (classes[s], inputs[s], drops and matters[s], *rest)
                if key not in known:
                    known[key] = len(spans)
                    spans.append((s, t, drops))
                ids[drops, s, t] = known[key]
    return ids, tuple(spans)


def _roles(
    inner: Sequence[OptionCosts], last: Sequence[OptionCosts], forward: Sequence[ForwardCost]
) -> Roles:
    arrays = {costs: (_options(costs.held), _options(costs.dropped)) for costs in (*inner, *last)}
    return Roles(
        inner=(
            tuple(arrays[costs][0] for costs in inner),
            tuple(arrays[costs][1] for costs in inner),
        ),
        last=(tuple(arrays[costs][0] for costs in last), tuple(arrays[costs][1] for costs in last)),
        forward_time_ns=np.cumsum([0, *(f.time_ns for f in forward)], dtype=np.int64),
        forward_peak_bytes=_integers(f.peak_bytes for f in forward),
        dropped_peak_bytes=_integers(f.dropped_peak_bytes for f in forward),
    )


def _options(costs: Sequence[OptionCost]) -> OptionArrays:
    names = [f.name for f in fields(OptionArrays)]
    return OptionArrays(*(_integers(getattr(c, name) for c in costs) for name in names))


def _integers(numbers: Iterable[int]) -> Integers:
    return np.array(list(numbers), dtype=np.int64)


def _join(options: Integers, splits: Integers) -> Integers:
    return np.concatenate([options, splits])
