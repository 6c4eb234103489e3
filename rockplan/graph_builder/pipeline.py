"""The pipeline of the front half: a recorded run -> a graph, as two tuples of passes.

takes: a Capture, Options. returns: Lowered, with what each pass left and its duration. guarantees:
a schedule of the graph computes what the run computes, bit for bit except for what `Options.tile`
and `Options.compile` say.
Removing a line of a tuple removes a mechanism from the product; `Options(without=("name",))` does
so for one call. Each pass takes a value and returns a new one; after each pass the tables
`recorded.rules` and `graph_rules` check the value if `CHECKED` is on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar

from rockplan.graph_builder.costs.layouts import check_layouts
from rockplan.graph_builder.fusion.fuse import fused
from rockplan.graph_builder.fusion.in_place import with_kernels_in_place
from rockplan.graph_builder.lowering.backward_order import reordered
from rockplan.graph_builder.lowering.buffer_copies import with_copies
from rockplan.graph_builder.lowering.cancelled_casts import without_cancelled_casts
from rockplan.graph_builder.lowering.functionalize import with_versions
from rockplan.graph_builder.lowering.lower import Lowered, assembled
from rockplan.graph_builder.lowering.reinplace import with_takeovers
from rockplan.graph_builder.recorded import rules as run_rules
from rockplan.graph_builder.recorded.run import Capture
from rockplan.graph_builder.tiling.embedding import with_rows_added
from rockplan.graph_builder.tiling.tile import tiled
from rockplan.options import DEFAULT_OPTIONS, Options
from rockplan.oracles import graph_rules
from rockplan.oracles.graph_rules import check
from rockplan.values.graph import CDGraph, Phase
from rockplan.values.plan import PassTrace

_Form = TypeVar("_Form", Capture, CDGraph)

CHECKED: ContextVar[bool] = ContextVar("rockplan checked passes", default=False)
"""True if the result of every pass is checked against the tables of rules, as in tests."""


class HeadStaysWhole(Exception):
    """Raised with the reason why no head of the run can be tiled."""


# -- passes from a run to a run ----------------------------------------------------------------


def functionalize(run: Capture, options: Options) -> Capture:
    """Replace changes in place by operators that make a new storage. Only changes that could not be
    in one node with what they change; with a tiled head or kernels, all possible changes."""
    return with_versions(run, everywhere=bool(options.tile or options.compile))


def cancel_casts(run: Capture, options: Options) -> Capture:
    """Read a tensor itself where it was cast up and straight down again."""
    return without_cancelled_casts(run)


def tile(run: Capture, options: Options) -> Capture:
    """Write the calls of the model's head and its loss once for each part of its rows, if
    options.tile says so; the number of parts is that of the options, or chosen here for True.
    Raises HeadStaysWhole, which says why, if that cannot be done."""
    if not options.tile:
        return run
    made = tiled(run, None if options.tile is True else options.tile)
    if isinstance(made, str):
        raise HeadStaysWhole(made)
    return made


def add_rows(run: Capture, options: Options) -> Capture:
    """Add gradients of embeddings row by row to the gradient of a tiled head of the same weight."""
    return with_rows_added(run) if run.tiles.parts else run


def fuse(run: Capture, options: Options) -> Capture:
    """Replace operators by calls of compiled kernels."""
    if not options.compile:
        return run
    return fused(run, keeps_roundings=options.compile == "near")


def copy_buffers(run: Capture, options: Options) -> Capture:
    """Copy the buffers that the forward reads and changes, so that it can run again."""
    return with_copies(run)


# -- passes from a graph to a graph ------------------------------------------------------------


def reinplace(graph: CDGraph, options: Options) -> CDGraph:
    """Allow results to take over the storages of operands that die."""
    return with_takeovers(graph)


def kernels_in_place(graph: CDGraph, options: Options) -> CDGraph:
    """Compile kernels that write their results over operands that die."""
    return with_kernels_in_place(graph) if graph.kernels else graph


def reorder(graph: CDGraph, options: Options) -> CDGraph:
    """Put backward nodes in an order that needs less memory than eager's."""
    return reordered(graph)


RunPass = Callable[[Capture, Options], Capture]
GraphPass = Callable[[CDGraph, Options], CDGraph]

RUN_PASSES: tuple[RunPass, ...] = (
    functionalize,
    cancel_casts,
    tile,
    add_rows,
    fuse,
    copy_buffers,
)

GRAPH_PASSES: tuple[GraphPass, ...] = (
    reinplace,
    kernels_in_place,
    reorder,
)


def _named(*passes: Callable[..., object]) -> tuple[str, ...]:
    return tuple(one.__name__.replace("_", "-") for one in passes)


NAMES = _named(*RUN_PASSES, *GRAPH_PASSES)


def lower(
    run: Capture, rng_state_bytes: int, options: Options = DEFAULT_OPTIONS, with_dead: bool = False
) -> Lowered:
    """Return the graph of a recorded run, after all passes.

    rng_state_bytes: size of one saved generator state on the device; with_dead: as for `assembled`.
    Raises HeadStaysWhole if
    `options.tile` finds no head, InvalidInput for options that do not fit the run, UnsupportedModel
    for a run that no graph can represent.
    """
    run, before = _passed(RUN_PASSES, run, options)
    since = time.perf_counter()
    lowered = assembled(
        run, rng_state_bytes, options.released, options.rerun_collectives, with_dead
    )
    built = _checked(lowered.graph, "lower", time.perf_counter() - since)
    graph, after = _passed(GRAPH_PASSES, lowered.graph, options)
    if not (run.kernels and run.sizes.symbols):  # with symbols: checked before it was fused
        check_layouts(graph, lowered.samples)
    return replace(lowered, graph=graph, trace=(*before, built, *after))


def _passed(
    passes: Sequence[Callable[[_Form, Options], _Form]], form: _Form, options: Options
) -> tuple[_Form, list[PassTrace]]:
    traces: list[PassTrace] = []
    for one, name in zip(passes, _named(*passes), strict=True):
        if name in options.without:
            continue
        since = time.perf_counter()
        made = one(form, options)
        seconds = time.perf_counter() - since
        is_changed = made is not form
        traces.append(_checked(made, name, seconds, is_changed))
        form = made
    return form, traces


def _checked(
    made: Capture | CDGraph, name: str, seconds: float, is_changed: bool = True
) -> PassTrace:
    """Return the trace of a pass: its name, how many calls or nodes `made` has in each phase, and
    its seconds. In tests, raises IllegalForm if a changed result breaks a rule of its form."""
    if CHECKED.get() and is_changed:
        if isinstance(made, Capture):
            check(run_rules.RULES, made, f"after {name}")
        else:
            check(graph_rules.RULES, made, f"after {name}")
    steps = made.calls if isinstance(made, Capture) else made.nodes
    forward = sum(step.phase is Phase.FORWARD for step in steps)
    return PassTrace(name, forward, len(steps) - forward, seconds, is_changed)
