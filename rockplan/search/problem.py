"""Problem: a captured graph to be planned, without a budget; Goal: one budget of it.

takes: a captured graph, options. returns: Problem, with the prices of this machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rockplan.budget import MOST_BYTES
from rockplan.errors import HostMemoryError, InvalidInput
from rockplan.graph_builder.costs.price import measure, price, profile_key
from rockplan.graph_builder.digests import graph_digest, profile_digest
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.partition import partition
from rockplan.machine import available_bytes, is_in_memory
from rockplan.options import Options
from rockplan.oracles.constraints import constrain, refuse_unmatched, with_room_for_loss
from rockplan.oracles.simulate import Simulation, simulate
from rockplan.paging.arenas import pool_of
from rockplan.paging.pages import measured_link
from rockplan.store.cache import Cache, default_folder
from rockplan.values.block import Block
from rockplan.values.copies import Host, HostLink
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import CDGraph, DataKind, as_eager
from rockplan.values.plan import PassTrace
from rockplan.values.profile import Profile
from rockplan.values.progress import report
from rockplan.values.schedule import Schedule, Waits, keep_all

_measured_link = functools.cache(measured_link)

MARGIN = 0.2
"""Share of the host's memory, or of a disk, that stays free if paging may use all that is left."""


@dataclass(frozen=True, slots=True)
class KnownSchedule:
    """What a plan of nearly the same graph says. schedule: its order of computations, legal here;
    budget_bytes: of that plan."""

    schedule: Schedule
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph to be planned, before a budget is known.

    graph: with the prices of `profile`; constrained: the same under the constraints of the options
    and with room for the caller's loss; blocks: of `constrained`. unplanned: every node once, as in
    eager execution. waits: gradients of parameters that have hooks. passes: traces of the passes
    that made the graph. host: where storages may be paged, None if nowhere. known: what a search
    begins with.
    """

    graph: CDGraph
    constrained: CDGraph
    blocks: tuple[Block, ...]
    profile: Profile
    graph_digest: str
    profile_digest: str
    unplanned: Simulation
    waits: Waits = ()
    passes: tuple[PassTrace, ...] = ()
    host: Host | None = None
    known: KnownSchedule | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What the stages of a search work on: a graph, its blocks, and the most bytes that a schedule
    may need; None: as few as possible. cache: of options of blocks. host: where storages may be
    paged."""

    graph: CDGraph
    blocks: tuple[Block, ...]
    budget_bytes: int | None
    cache: Cache | None = None
    host: Host | None = None


def measured(
    lowered: Lowered, options: Options, waits: Waits = (), known: Profile | None = None
) -> Problem:
    """Return the problem of a captured graph, with costs measured here, now or earlier. known: the
    profile of another graph that has some of the same calls."""
    problem = problem_of(lowered.graph, _profile(lowered, cache_of(options), known), options)
    return replace(problem, waits=waits, passes=lowered.trace)


def problem_of(graph: CDGraph, profile: Profile, options: Options) -> Problem:
    """Return the problem of a graph under a profile of its calls."""
    return problem_of_priced(price(graph, profile), profile, options)


@paused_collection()
def problem_of_priced(priced: CDGraph, profile: Profile, options: Options) -> Problem:
    """Return the problem of a graph whose nodes have times and workspaces; profile: where these
    come from. Adds the constraints of the options, room for the caller's loss, blocks and the peak
    of eager execution. Raises InvalidInput for options that do not fit the graph."""
    report("finding blocks")
    eager = as_eager(priced)
    unplanned = simulate(eager, keep_all(eager))
    refuse_unmatched({"": priced}, options.keep, options.recompute)
    constrained = constrain(priced, options.keep, options.recompute)
    constrained = with_room_for_loss(constrained, unplanned.peak_bytes)
    return Problem(
        graph=priced,
        constrained=constrained,
        blocks=partition(constrained),
        profile=profile,
        graph_digest=graph_digest(priced),
        profile_digest=profile_digest(profile),
        unplanned=unplanned,
        host=host_of(priced, options),
    )


def host_of(graph: CDGraph, options: Options) -> Host | None:
    """Return how many bytes may be paged to the host and how fast the link is (measured unless the
    options say so); None if storages stay on the device. Raises InvalidInput if the activations are
    on several devices or cannot be paged."""
    if options.host is None:
        return None
    activations = {d.index for d in graph.data if d.kind is DataKind.ACTIVATION}
    # Scalars do not count: many graphs of CUDA have some on the CPU.
    devices = {v.spec.device for v in graph.values if v.data in activations and v.spec.shape}
    if len(devices) > 1:
        raise InvalidInput(
            f"activations of a module on several devices ({', '.join(sorted(devices))}) cannot be "
            "paged; plan without host, or each part of the module by itself"
        )
    device, path = devices.pop() if devices else "cpu", options.host_path
    folder = None if path is None else os.fspath(path)
    pool_of(device, folder)  # raises if nothing can be paged
    rate = options.link_bytes_per_s or in_two_digits(int(_measured_link(device, folder)))
    place = folder if device.startswith("cuda") else folder or tempfile.gettempdir()
    return Host(options.host_bytes or _left_bytes(place), HostLink(rate, rate))


def in_two_digits(measured: int) -> int:
    """Round down to two significant digits, so that the cache finds plans again: the number is part
    of their key."""
    unit: int = 10 ** max(len(str(measured)) - 2, 0)
    return measured // unit * unit


def _left_bytes(folder: str | None) -> int:
    """Less MARGIN, in two digits. folder: of the file to page to, whose disk counts; None:
    pinned."""
    left = available_bytes()
    if folder is not None:
        free = _free_bytes(folder)
        left = free if left is None or not is_in_memory(Path(folder)) else min(free, left)
    return MOST_BYTES if left is None else in_two_digits(int(left * (1 - MARGIN)))


def _free_bytes(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise HostMemoryError(
            f"activations are to be paged to the folder {folder}: {error}. Name a folder that is "
            "writable and has room, Options(host_path=...)"
        ) from error


def cache_of(options: Options) -> Cache | None:
    """Return the cache, None if the options do without."""
    return Cache(default_folder()) if options.cache else None


def _profile(lowered: Lowered, cache: Cache | None, known: Profile | None) -> Profile:
    """Only calls that are neither in `known` nor in the cache are measured, and put into the
    cache."""
    key = {"profile": profile_key(lowered.graph)}
    known = (cache.profile(key) if cache else None) or known
    profile = measure(lowered.graph, lowered.samples, known=known)
    before = frozenset(known.costs) if known else frozenset()
    new = tuple(cost for cost in profile.costs if cost not in before)
    if cache and new:
        cache.put_profile(key, replace(profile, costs=new))
    return profile
