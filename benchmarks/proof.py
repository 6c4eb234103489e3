"""Proofs of the least time within a budget, for graphs too large for the planner's own search.

    python -m benchmarks.proof gpt2-sdpa [bert ...] [--budgets 0 1 ...] [--most 200000]
                               [--limit 150]

takes: rows of benchmarks/results/gap.jsonl. returns: the same with larger bounds where more is
proven. guarantees: no schedule that executes every node for the first time in the order of the
plan, within the budget, takes less time than the bound.

The search is that of `benchmarks.exact_search`, backwards over what is needed, compiled:
`proof.cpp`, which needs a C++ compiler (`c++`, or $CXX). Two things make it reach graphs of 150
operations. It searches a relaxation: storages below SMALL of the budget take no room, and what
writes over its only operand, which nothing else reads, runs again only together with what made
that operand (`_parts_of` says why no schedule is lost). Second, bounds grow from below: what must
be spent before each first execution is proven one level after the other, alone and with one more
storage needed there, by a search that is cut off by what is already proven of the levels below.
Where that does not reach the end, the relaxation at moments of
`benchmarks.bounds.prove` bounds the rest, for --limit seconds.

A search of a level that reaches more than --most states is given up; what the last one within that
many has proven stays. Each line printed is a level: what must have been spent before it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.bounds.prove import lower_bound_ns
from benchmarks.exact_search import Mask, Step, View, bits, certain
from benchmarks.gap import Row, add, read, write
from benchmarks.timing import where
from rockplan.graph_builder.digests import graph_digest
from rockplan.graph_builder.lowering.backward_order import renumbered
from rockplan.options import Options
from rockplan.values.graph import CDGraph
from testing.priced import prepared

SMALL = 0.005
"""Of the budget. Of 119 storages of the `gpt2-sdpa` case 117 are left, of 183 of BERT 144."""

MOST = 200_000
"""States of a level for one storage; ALONE times as many for none, which all others build on."""

ALONE = 30

NARROW = 300
"""States kept of each level where one way within the proven bound would do: then it is exact."""

FIRST_STEP = 0.003
"""Of the iteration time: by how much the limit is raised at first; then twice as much each time."""

PAYS = 0.003
"""Of the iteration time: how much more must be spent before a level than before the last one at
which all storages were tried, for all to be tried again."""

NONE = -1

Words = npt.NDArray[np.uint64]


class _Layout(ctypes.Structure):
    """As `Layout` in proof.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("steps", "storages", "turn", "budget", "room")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("sizes", "maker", "times", "extra", "state", "part", "first_take"),
                *("held", "reads", "writes", "saved", "gone", "takes"),
            )
        ),
    ]


class Relaxation:
    """Of one graph within one budget. Storages are bits, as in `View` but for the small ones."""

    def __init__(self, graph: CDGraph, budget_bytes: int, small: float = SMALL) -> None:
        view = self.view = View(graph)
        self.time_ns, self.levels = graph.time_ns, len(view.times_ns)
        self._large = [k for k, size in enumerate(view.sizes) if size >= small * budget_bytes]
        self._bit = {k: bit for bit, k in enumerate(self._large)}
        self.words = max(-(-len(self._large) // 64), 1)
        self.held = self._of(view.held)
        self.made = [self._of(made) for made in view.made]
        self.reads, self.writes, self.saved, self.gone = (
            [self._of(mask) for mask in masks]
            for masks in (view.reads, view.writes, view.saved, view.gone)
        )
        self.takes = [[m for taken in takes if (m := self._of(taken))] for takes in view.takes]
        self.parts = self._parts_of()
        self._library = _library(self.words)
        self._problem = self._library.proof_make(ctypes.byref(self._layout(budget_bytes)))

    def __del__(self) -> None:
        if hasattr(self, "_problem"):
            self._library.proof_free(self._problem)

    def bound_ns(self, level: int, needed: Mask) -> int:
        """What is learned so far of the re-executions before a level where `needed` is needed."""
        laid = self._laid([needed])
        return int(self._library.proof_bound(self._problem, level, _pointer(laid)))

    def learn(self, level: int, bound_ns: int, storage: int = -1) -> None:
        """Of any set that is needed at a level, or any with a storage."""
        self._library.proof_learn(self._problem, level, storage, bound_ns)

    def least_ns(
        self, level: int, needed: Mask, limit_ns: int, most: int, width: int = 0
    ) -> int | None:
        """Least time of re-executions before a level where `needed` is needed, NONE if it is more
        than the limit, None if a level has more than `most` states. With a width only so many
        states of a level are followed to the next: then NONE says nothing."""
        laid = self._laid([needed])
        found = self._library.proof_search(
            self._problem, level, _pointer(laid), limit_ns, most, width
        )
        return None if found == -2 else int(found)

    def certain(self, level: int) -> Mask:
        """What every schedule needs at a level."""
        return self._of(certain(self.view, level))

    def _of(self, mask: Mask) -> Mask:
        return sum(1 << self._bit[k] for k in bits(mask) if k in self._bit)

    def _parts_of(self) -> list[Step]:
        """By step what runs again right before it, -1 nothing. It writes over its only operand,
        which is no smaller than its result and which nothing else reads: right after the operand is
        made it can do so in no more room, and to keep the result takes no more than the operand."""
        view = self.view
        readers: dict[int, list[Step]] = {}
        for step, reads in enumerate(self.reads):
            for k in bits(reads):
                readers.setdefault(k, []).append(step)
        again = set(view.again)
        parts = []
        for step, (reads, takes) in enumerate(zip(self.reads, self.takes, strict=True)):
            part = -1
            if step in again and reads in takes and self.writes[step].bit_count() == 1:
                k = reads.bit_length() - 1
                maker = view.maker[self._large[k]]
                stays = reads & (self.held | self.gone[view.turn])
                same_phase = (maker < view.turn) == (step < view.turn)
                if maker in again and readers[k] == [step] and not stays and same_phase:
                    part = maker
            parts.append(part)
        return parts

    def _layout(self, budget_bytes: int) -> _Layout:
        view = self.view
        # What is small takes no room where it is made either.
        small_bytes = [
            view.bytes_of(sum(1 << k for k in bits(writes) if k not in self._bit))
            for writes in view.writes
        ]
        extra = [a - b for a, b in zip(view.extra_bytes, small_bytes, strict=True)]
        first_take = [0, *np.cumsum([len(takes) for takes in self.takes])]
        self._arrays = [
            *map(
                _numbers,
                (
                    [view.sizes[k] for k in self._large],
                    [view.maker[k] for k in self._large],
                    view.times_ns,
                    extra,
                    [view.rng_state_bytes if saved else 0 for saved in self.saved],
                    self.parts,
                    first_take,
                ),
            ),
            *map(
                self._laid,
                (
                    [self.held],
                    self.reads,
                    self.writes,
                    self.saved,
                    self.gone,
                    [taken for takes in self.takes for taken in takes],
                ),
            ),
        ]
        sizes = (self.levels, len(self._large), view.turn, budget_bytes, view.room_bytes)
        return _Layout(*sizes, *map(_pointer, self._arrays))

    def _laid(self, masks: Iterable[Mask]) -> Words:
        word = (1 << 64) - 1
        laid = [mask >> 64 * w & word for mask in masks for w in range(self.words)]
        return np.array(laid, dtype=np.uint64)


def _numbers(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def _pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Until the process ends: the loader takes a file for another one whose place on the disk it
    has been given."""
    return tempfile.TemporaryDirectory()


@cache
def _library(words: int) -> ctypes.CDLL:
    """Compiled for sets of so many words."""
    source = Path(__file__).with_suffix(".cpp")
    library = Path(_folder().name) / f"proof{words}.so"
    compiler = os.environ.get("CXX", "c++")
    options = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", f"-DWORDS={words}")
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    number, pointer, index = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    loaded.proof_make.restype = pointer
    loaded.proof_make.argtypes = [pointer]
    loaded.proof_free.argtypes = [pointer]
    loaded.proof_learn.argtypes = [pointer, index, index, number]
    loaded.proof_bound.restype = loaded.proof_search.restype = number
    loaded.proof_bound.argtypes = [pointer, index, pointer]
    loaded.proof_search.argtypes = [pointer, index, pointer, number, number, number]
    return loaded


def least_ns(
    relaxation: Relaxation, level: int, needed: Mask, enough_ns: int, most: int
) -> tuple[int, bool]:
    """Proven of the re-executions before a level where `needed` is needed: the least time, or less
    if more states would have to be looked at, or more than enough; and whether none were too many.
    """
    proven = relaxation.bound_ns(level, needed)
    step = int(FIRST_STEP * relaxation.time_ns)
    best = _found(relaxation.least_ns(level, needed, proven, most, NARROW))
    while proven <= enough_ns and best != proven:
        limit = min(proven + step, enough_ns)
        if best is None:
            best = _found(relaxation.least_ns(level, needed, limit, most, 10 * NARROW))
        if best is not None:
            limit = min(limit, best - 1)
        found = relaxation.least_ns(level, needed, limit, most)
        if found is None:
            return proven, False
        if found != NONE:
            return found, True
        proven, step = limit + 1, 2 * step
    return proven, True


def _found(least_ns: int | None) -> int | None:
    return None if least_ns == NONE else least_ns


def proven_ns(relaxation: Relaxation, enough_ns: int, most: int) -> Iterator[tuple[int, int]]:
    """Level by level what must be spent on re-executions before it; the last one is the end.
    enough_ns: more than this is not proven."""
    turn = relaxation.view.turn
    alone_ns = tried_ns = given_up = resting = 0
    with_one: dict[int, int] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for level in range(turn + 1, relaxation.levels + 1):
            certain = relaxation.certain(level)
            # Without the step between the two levels, what is done before this one can be done
            # before the one below, if no more is needed there, and the turn is not between them.
            if level - 1 == turn or relaxation.certain(level - 1) & ~certain:
                with_one = {}
            relaxation.learn(level, alone_ns)
            for k, bound_ns in with_one.items():
                relaxation.learn(level, bound_ns, k)
            is_last = level == relaxation.levels
            if is_last or resting == 0:
                alone_ns, is_exact = least_ns(relaxation, level, certain, enough_ns, ALONE * most)
                relaxation.learn(level, alone_ns)
                # A search that is given up takes longest: the more in a row, the fewer follow.
                given_up = 0 if is_exact else given_up + 1
                resting = max(given_up - 1, 0)
            else:
                resting -= 1
            yield level, alone_ns
            if is_last or alone_ns > enough_ns:
                return
            is_dearer = alone_ns - tried_ns > PAYS * relaxation.time_ns
            if is_dearer:
                tried_ns = alone_ns
            open_there = bits(relaxation.made[level] & ~certain)
            tried = [k for k in open_there if is_dearer or k not in with_one]

            def with_storage(k: int, level: int = level, certain: Mask = certain) -> int:
                return least_ns(relaxation, level, certain | 1 << k, enough_ns, most)[0]

            for k, bound_ns in zip(tried, pool.map(with_storage, tried), strict=True):
                with_one[k] = bound_ns
                relaxation.learn(level, bound_ns, k)


def prove(row: Row, graph: CDGraph, most: int, limit_s: float) -> Row:
    """The row of a plan for a graph, with a larger bound if more is proven."""
    start = time.process_time()
    relaxation = Relaxation(graph, row.budget_bytes)
    turn, spent_ns, bound_ns = relaxation.view.turn, dict[int, int](), 0
    for level, bound_ns in proven_ns(relaxation, row.time_ns - row.once_ns, most):
        print(
            f"{row.model} {level}/{relaxation.levels}: {bound_ns / row.once_ns:+.2%}, "
            f"{time.process_time() - start:.0f} s",
            flush=True,
        )
        # The level before node i is i + 1.
        is_dearer = bound_ns - max(spent_ns.values(), default=0) > PAYS * row.once_ns
        if turn + 1 < level < relaxation.levels and is_dearer:
            spent_ns[level - 1] = bound_ns
    bound_ns = min(row.once_ns + bound_ns, row.time_ns)
    if bound_ns < row.time_ns:
        rest = lower_bound_ns(graph, row.budget_bytes, time_limit_s=limit_s, spent_ns=spent_ns)
        bound_ns = max(bound_ns, rest)
    if bound_ns <= row.bound_ns:
        return row
    seconds = round(time.process_time() - start, 1)
    return replace(row, bound_ns=bound_ns, bound_cpu_seconds=seconds, bound_where=where())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--budgets", type=int, nargs="*", default=[0], metavar="0..9")
    parser.add_argument("--most", type=int, default=MOST)
    parser.add_argument("--limit", type=float, default=150.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = read()
    for name in arguments.models:
        made = prepared(name, Options())
        digest = graph_digest(made.graph)[:16]
        for index in arguments.budgets:
            row = found[name, digest, index]
            assert isinstance(row, Row) and row.once_ns == made.constrained.time_ns
            graph = made.constrained
            if row.order:
                graph = renumbered(graph, row.order)
            add(found, prove(row, graph, arguments.most, arguments.limit))
            write(found)


if __name__ == "__main__":
    main()
