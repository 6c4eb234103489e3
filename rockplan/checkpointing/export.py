"""Export: a plan -> ordinary `torch.utils.checkpoint` code that needs no rockplan to run.

takes: a plan and the module it is for. returns: the source of one Python file whose `apply(model)`
wraps repeated modules. guarantees: the code imports PyTorch alone; gradients are those of the model
without it; its header says how it differs from the plan. A repeated module is wrapped if the plan
recomputes something of it, and keeps those of its results that the plan keeps, call by call; then
modules are unwrapped, the last one first, as long as the predicted peak stays within the budget.

A result can be kept only if every call of its operator in the module returns a new tensor that
nothing changes in place, draws no random numbers (later draws would differ when the module runs
again) and is no cast (autocast caches casts of weights, so a second run has fewer). Calls are
counted in the order of the graph: a module that runs twice in one forward keeps in both runs what
the plan keeps in the first.
"""

from __future__ import annotations

import pprint
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from rockplan.checkpointing.wrap import repeated_blocks
from rockplan.errors import InvalidInput
from rockplan.graph_builder.operators.rows import ROWS
from rockplan.oracles.simulate import Simulation, simulate
from rockplan.oracles.verify import verify
from rockplan.runtime.planned_state import plan_of
from rockplan.store.fingerprint import VERSION
from rockplan.values.graph import CDGraph, ComputeNode, DataKind, as_eager, producers
from rockplan.values.plan import Plan, format_bytes, plan_in, recomputations
from rockplan.values.schedule import Schedule, kept_data, with_frees

_CASTS = frozenset(row.name for row in ROWS if row.casts)

KeptCalls = tuple[tuple[str, tuple[int, ...]], ...]
"""(operator, numbers of its kept calls, from 0, in one forward of a module)"""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """One module under torch.utils.checkpoint.

    nodes: its forward operations. saved: those whose results are kept; kept: the same, as numbers
    of calls. buffers: those that its forward changes, by their path inside the module.
    """

    path: str
    nodes: tuple[int, ...]
    saved: frozenset[int]
    kept: KeptCalls
    buffers: tuple[str, ...]


def as_checkpoint_code(model: nn.Module, plan: object = None) -> str:
    """Export a plan as ordinary PyTorch code: the source of a file with a function `apply(model)`.

    model: what `solve` or `load` returned, whose `.plan` is exported; or, with `plan`, the module
    that the plan was made for. `apply` wraps modules of the (unplanned) model in place with
    `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, and with a selective policy if the
    plan keeps results inside such a module. The header lists what of the plan the code cannot
    express. Raises InvalidInput if the plan cannot be expressed as checkpointing: its kernels are
    compiled, it pages to the host, its head is tiled, the model has no sibling modules of one class
    to wrap, or none needs to be wrapped.
    """
    exported = plan_of(model) if plan is None else plan_in(plan)
    if exported.compiled:
        raise InvalidInput(
            "this plan cannot be exported as checkpointing code: it is of compiled kernels "
            "(Options(compile=...)), and that code runs operators. Export a plan without them, or "
            "run the plan itself"
        )
    if exported.trips:
        raise InvalidInput(
            "this plan cannot be exported as checkpointing code: activations go to the host and "
            "come back (Options(host=...)), and that code only runs operators again. Export a plan "
            "without that, or run the plan itself"
        )
    if exported.graph.tiles:
        raise InvalidInput(
            "this plan cannot be exported as checkpointing code: the head works on a part of its "
            "rows at a time (Options(tile=...)), and that code calls whole modules. Export a plan "
            "without that, or run the plan itself"
        )
    paths = repeated_blocks(model)
    if not paths:
        raise InvalidInput(
            "this plan cannot be exported as checkpointing code: the model has no repeated "
            "modules to wrap (no ModuleList or Sequential holds two modules of one class that "
            "have parameters and submodules). Run the plan itself: rockplan.solve, or "
            "rockplan.save_plan and rockplan.load"
        )
    wrapped_paths = [_wrapped(exported, path) for path in paths]
    wrapped = _needed(exported, [module for module in wrapped_paths if module is not None])
    if not wrapped:
        raise InvalidInput(
            f"this plan cannot be exported as checkpointing code: none of the {len(paths)} "
            f"repeated modules ({paths[0]}, ...) needs to be wrapped for it. It computes "
            f"{len(recomputations(exported))} operations again; export a plan for a smaller "
            "budget, or run the plan itself"
        )
    return _header(exported, wrapped, len(paths)) + _IMPORTS + _table(wrapped) + _FUNCTIONS


# Choosing modules


def _wrapped(plan: Plan, path: str) -> Wrapped | None:
    """None if the plan recomputes nothing of it."""
    again = recomputations(plan)
    nodes = [n for n in plan.graph.forward if _is_inside(n.module, path)]
    if not any(n.index in again for n in nodes):
        return None
    alone = {n.index for n in nodes if len(n.calls) == 1 and n.writes and not n.random}
    called = [(call.op, n.index in alone) for n in nodes for call in n.calls]
    can_be_kept = {op for op, is_alone in called if is_alone} - _CASTS
    can_be_kept -= {op for op, is_alone in called if not is_alone}
    kept_storages = kept_data(plan.graph, plan.schedule)
    seen: Counter[str] = Counter()
    kept: dict[str, list[int]] = defaultdict(list)
    saved = set()
    for node in nodes:
        for call in node.calls:
            if call.op in can_be_kept and _is_mostly_kept(plan.graph, node, kept_storages):
                kept[call.op].append(seen[call.op])
                saved.add(node.index)
            seen[call.op] += 1
    calls = tuple((op, tuple(numbers)) for op, numbers in sorted(kept.items()))
    own = tuple(n.index for n in nodes)
    effects = (n for n in nodes if n.calls != n.recalls or not n.recomputable)
    touched = {plan.graph.data[d] for n in effects for d in n.reads}
    names = (d.name for d in touched if d.kind is DataKind.BUFFER and _is_inside(d.name, path))
    buffers = tuple(sorted(name.removeprefix(f"{path}.") for name in names))
    return Wrapped(path, own, frozenset(saved), calls, buffers)


def _is_inside(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _is_mostly_kept(graph: CDGraph, node: ComputeNode, kept: frozenset[int]) -> bool:
    kept_bytes = _bytes(graph, kept & set(node.writes))
    return kept_bytes > 0 and 2 * kept_bytes >= _bytes(graph, node.writes)


# Predicting memory


def _needed(plan: Plan, wrapped: Sequence[Wrapped]) -> list[Wrapped]:
    """Those without which the predicted peak would exceed the budget of the plan, or the peak with
    all of them; tried from the last one back."""
    needed = list(wrapped)
    limit_bytes = max(plan.budget_bytes, _simulated(plan.graph, needed).peak_bytes)
    for module in reversed(wrapped):
        rest = [other for other in needed if other is not module]
        if _simulated(plan.graph, rest).peak_bytes <= limit_bytes:
            needed = rest
    return needed


def _kept_here(graph: CDGraph, wrapped: Sequence[Wrapped]) -> frozenset[int]:
    """What policies save, inputs of modules, and results outside that the backward phase reads."""
    producer = producers(graph)
    inside = {n: module.path for module in wrapped for n in module.nodes}
    kept = {d for module in wrapped for n in module.saved for d in graph.nodes[n].writes}
    for module in wrapped:
        reads = {d for n in module.nodes for d in graph.nodes[n].reads}
        kept |= {d for d in reads if d in producer and inside.get(producer[d]) != module.path}
    read_later = {d for n in graph.backward for d in n.reads}
    activations = (d.index for d in graph.data if d.kind is DataKind.ACTIVATION)
    kept |= {d for d in activations if d in read_later and producer[d] not in inside}
    return frozenset(kept)


def _schedule(graph: CDGraph, wrapped: Sequence[Wrapped]) -> Schedule:
    """Each module runs again, but for what it keeps, directly before the first backward operation
    that reads a missing result."""
    kept = _kept_here(graph, wrapped)
    there = {n.index for n in graph.nodes if not n.recomputable or kept.issuperset(n.writes)}
    missing = [[n for n in module.nodes if n not in there] for module in wrapped]
    makes = [{d for n in nodes for d in graph.nodes[n].writes} - kept for nodes in missing]
    backward: list[int] = []
    done: set[int] = set()
    for node in graph.backward:
        for number, nodes in enumerate(missing):
            if number not in done and makes[number] & set(node.reads):
                done.add(number)
                backward += nodes
        backward.append(node.index)
    return with_frees(graph, [n.index for n in graph.forward], backward)


def _simulated(graph: CDGraph, wrapped: Sequence[Wrapped]) -> Simulation:
    executed = as_eager(graph)
    schedule = _schedule(executed, wrapped)
    verify(executed, schedule)
    return simulate(executed, schedule)


def _bytes(graph: CDGraph, data: frozenset[int] | tuple[int, ...]) -> int:
    return sum(graph.data[d].size_bytes for d in data)


# Text


def _header(plan: Plan, wrapped: Sequence[Wrapped], repeated: int) -> str:
    graph = plan.graph
    kept, planned = _kept_here(graph, wrapped), kept_data(plan.graph, plan.schedule)
    inside = {d for m in wrapped for n in m.nodes for d in graph.nodes[n].writes}
    simulation = _simulated(graph, wrapped)
    text = _HEADER.format(
        version=VERSION,
        torch=plan.torch_version,
        budget=format_bytes(plan.budget_bytes),
        plan_peak=format_bytes(plan.peak_bytes),
        plan_overhead=plan.overhead,
        eager_peak=format_bytes(plan.eager_peak_bytes),
        peak=format_bytes(simulation.peak_bytes),
        overhead=simulation.time_ns / max(plan.eager_time_ns, 1) - 1,
        count=len(wrapped),
        repeated=repeated,
        too_much=format_bytes(_bytes(graph, kept - planned)),
        too_little=format_bytes(_bytes(graph, (planned & inside) - kept)),
    )
    lines = [
        textwrap.fill(line, 96, subsequent_indent="  " if line.startswith("- ") else "")
        for line in text.splitlines()
    ]
    return "\n".join(lines) + "\n"


def _table(wrapped: Sequence[Wrapped]) -> str:
    groups: dict[tuple[KeptCalls, tuple[str, ...]], list[str]] = defaultdict(list)
    for module in wrapped:
        groups[module.kept, module.buffers].append(module.path)
    rows = [(tuple(paths), dict(kept), buffers) for (kept, buffers), paths in groups.items()]
    return f"WRAPPED = {pprint.pformat(rows, width=96, sort_dicts=False)}\n"


_HEADER = '''\
"""Activation checkpointing after a plan of rockplan {version}, as ordinary PyTorch code.

Call `apply(model)` once, before training. It needs PyTorch (2.11 or later) and nothing else.

The plan: budget {budget}, peak {plan_peak} of {eager_peak} with everything kept, \
{plan_overhead:+.1%} time.
This code: peak {peak}, {overhead:+.1%} time.
Both predicted, for the sample of the plan, under torch {torch}; bytes beyond parameters, buffers, \
inputs and .grad.

What is lost in the translation:
- Nothing here keeps to a budget. The peak is a prediction, not a promise: Python may hold tensors \
longer than a plan does. Measure it.
- {count} of {repeated} repeated modules are wrapped. All that is not kept of one is computed \
again at once, when its backward pass begins; a plan makes each tensor where it is needed.
- {too_much} that the plan drops are kept: inputs of wrapped modules, and what is outside of them.
- {too_little} that the plan keeps are computed again: results of operations in place, of random \
draws and of casts cannot be kept, nor some results of a call without the others.
- A call is recognised by its number among the calls of its operator: where the model changes, \
export again.
- Where results are kept inside of modules, only one backward pass per forward works, and every \
operation of these modules passes through Python.
"""

'''

_IMPORTS = """\
import contextlib
import functools
from collections import Counter

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# (modules, operator -> which of its calls in one forward of such a module are kept, from 0,
#  buffers that the forward changes)
"""

_FUNCTIONS = '''

def apply(model):
    """Wrap modules of `model` in place; returns it."""
    for paths, kept, buffers in WRAPPED:
        for path in paths:
            module = model.get_submodule(path)
            settings = {}
            if kept or buffers:
                settings["context_fn"] = functools.partial(_contexts, module, kept, buffers)
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, **settings
            )
    return model


def _contexts(module, kept, buffers):
    """Contexts of the forward, which keeps results, and of the run that takes them from there."""
    first, again = contextlib.nullcontext(), contextlib.nullcontext()
    if kept:
        calls = {False: Counter(), True: Counter()}

        def policy(context, operator, *args, **kwargs):
            name, seen = str(operator), calls[context.is_recompute]
            number = seen[name]
            seen[name] += 1
            is_kept = number in kept.get(name, ())
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        first, again = create_selective_checkpoint_contexts(policy)
    return first, _OnCopies(module, buffers, again) if buffers else again


class _OnCopies:
    """A context in which `buffers` are copies: what the forward does to them, it does once."""

    def __init__(self, module, buffers, context):
        names = [buffer.rpartition(".") for buffer in buffers]
        self.owners = [(module.get_submodule(path), name) for path, _, name in names]
        self.context = context

    def __enter__(self):
        self.originals = [owner._buffers[name] for owner, name in self.owners]
        for (owner, name), original in zip(self.owners, self.originals):
            owner._buffers[name] = original.clone()
        return self.context.__enter__()

    def __exit__(self, *error):
        for (owner, name), original in zip(self.owners, self.originals):
            owner._buffers[name] = original
        return self.context.__exit__(*error)
'''
