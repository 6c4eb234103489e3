"""Fuse: a recorded run -> the same run, in which compiled kernels compute what can be fused.

takes: a Capture. returns: a Capture whose calls are unfused operators and calls of kernels, which
`kernels` lists. guarantees: outputs, gradients, writes and random draws stay as they are.
docs/compiled.md says what becomes a kernel.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from rockplan.graph_builder.fusion import inductor, kernels
from rockplan.graph_builder.fusion.dataflow import Dataflow, dataflow_of
from rockplan.graph_builder.fusion.groups import groups_of
from rockplan.graph_builder.fusion.kinds import Fused, fused_group
from rockplan.graph_builder.fusion.parts import PartKind, Parts, Table, parts_of
from rockplan.graph_builder.fusion.stored import stored
from rockplan.graph_builder.lowering.cancelled_casts import read_in_place_of
from rockplan.graph_builder.recorded.run import Capture, RecordedCall
from rockplan.values.graph import Call, Phase, ValueRef, is_kernel, refs, renamed
from rockplan.values.progress import report

_LOGGER = logging.getLogger("rockplan")


def fused(capture: Capture, keeps_roundings: bool) -> Capture:
    """Compile what can be fused; return `capture` with calls of kernels, or `capture` itself if
    there is nothing to fuse. Operators of a kernel that does not compile stay, and a warning is
    logged. keeps_roundings: kernels round intermediate values to 16 bits where eager does. Raises
    MissingLibrary without a working compiler; InvalidInput for a device without one, or whose
    compiler cannot keep roundings."""
    report("choosing kernels")
    device_type = device_type_of(capture)
    inductor.check_compiler(device_type)
    if keeps_roundings:
        inductor.check_roundings(device_type, {value.spec.dtype for value in capture.values})
    table = inductor.decompositions()
    opaque: set[int] = set()
    warned: set[str] = set()
    while True:
        proposal = proposed(capture, keeps_roundings, table, frozenset(opaque))
        wanted = {f.kernel.op: f.kernel for f in proposal.fused}.values()
        failed = kernels.opened(wanted) if capture.sizes.symbols else kernels.made(wanted)
        if not failed:
            return _once(proposal.rewritten()) if proposal.fused else capture
        if len(failed) == len({one.kernel.op for one in proposal.fused}):
            kernels.check_compiler(proposal.fused[0].kernel.device, next(iter(failed.values())))
        for one in proposal.fused:
            if one.kernel.op not in failed:
                continue
            if one.kernel.op not in warned and not one.kernel.sizes:
                last = capture.calls[one.owners[-1]]
                _LOGGER.warning(
                    "in module '%s' at %s: the kernel %s cannot be compiled (%s); its operators "
                    "run one by one",
                    *(last.module or "(root)", last.source or "an unknown line"),
                    *(one.kernel.name, failed[one.kernel.op]),
                )
                warned.add(one.kernel.op)
            opaque.update(one.owners)


def _once(capture: Capture) -> Capture:
    """Leave out kernels that compute what one before them, of the same phase, has computed, such as
    the mask that each layer makes anew. What one call reads both of stays apart: an operator whose
    operands share memory may need more (an LSTM of oneDNN, whose two states begin as zeros)."""
    run, same = capture.view, dict[int, int]()
    first: dict[tuple[Call, Phase], tuple[tuple[int, ...], set[int]]] = {}

    def known(value: int) -> int:
        return same.get(value, value)

    for position, recorded in enumerate(capture.calls):
        call = recorded.call
        if is_kernel(call.op) and run.is_plain(position):
            key = renamed(call, known, lambda _: None), recorded.phase
            storages = run.storages(call.made)
            made, readers = first.setdefault(key, (call.made, set()))
            own_readers = {reader for s in storages for reader in run.readers.get(s, ())}
            is_shared = run.wanted.isdisjoint(storages) and readers.isdisjoint(own_readers)
            if made == call.made or is_shared:
                readers |= own_readers
                same |= {new: one for new, one in zip(call.made, made, strict=True) if new != one}
    return read_in_place_of(capture, same)


def device_type_of(capture: Capture) -> str:
    """The accelerator ('cuda') that the run computes on, of several the first, else 'cpu'."""
    types = {value.spec.device.split(":")[0] for value in capture.values} - {"meta"}
    return min(types - {"cpu"}, default="cpu")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A run with the kernels to compile. fused: the kernels in the order in which they run; alone:
    groups that equal one recorded operator, which is called unfused."""

    capture: Capture
    flow: Dataflow
    fused: tuple[Fused, ...]
    alone: tuple[Fused, ...]

    def rewritten(self) -> Capture:
        """Return the run in which kernels are called."""
        return _KernelRun(self).capture()


def proposed(
    capture: Capture, keeps_roundings: bool, table: Table, opaque: frozenset[int]
) -> Proposal:
    """Kernels that could be compiled. table: Inductor's decompositions, operator -> function;
    opaque: positions of recorded calls that must stay unfused."""
    opaque |= capture.view.sums
    # Calls that join the parts of a tiled head: fused, they would need all parts at once.
    opaque |= {
        position
        for position, recorded in enumerate(capture.calls)
        if capture.tiles.joined.intersection(recorded.call.results)
    }
    parts = parts_of(capture, opaque, table)
    roots = capture.view.wanted | capture.view.storages(capture.tiles.whole)
    flow = dataflow_of(parts, roots, _kept(capture, parts))
    in_memory = stored(flow, device_type_of(capture))
    count, sizes = len(capture.values), capture.numbers_of_symbols
    groups = [
        fused_group(flow, in_memory, group, count, keeps_roundings, sizes)
        for group in groups_of(flow, in_memory)
    ]
    alone: list[Fused] = []
    compiled: list[Fused] = []
    for one in groups:
        made = [set(capture.calls[owner].call.made) for owner in one.owners]
        (alone if made == [set(one.results)] else compiled).append(one)
    return Proposal(capture, flow, tuple(compiled), tuple(alone))


def _kept(capture: Capture, parts: Parts) -> frozenset[int]:
    """Return the positions of opaque parts that run even if nothing reads their results: they
    change a tensor in place, or repeating them gives other results."""
    calls = capture.calls
    return frozenset(
        position
        for position, part in enumerate(parts.parts)
        if part.kind is PartKind.OPAQUE and (part.writes or not calls[part.owner].is_repeatable)
    )


class _KernelRun:
    """Builds the run with kernels. Calls are in execution order, views before what reads them."""

    def __init__(self, proposal: Proposal) -> None:
        self._capture = proposal.capture
        self._flow = proposal.flow
        self._proposal = proposal
        self._calls: list[RecordedCall] = []
        self._derived: set[int] = set()

    def capture(self) -> Capture:
        """Return the run: opaque calls, unfused groups and calls of kernels in execution order,
        each after the views that it reads, the forward phase before the backward phase."""
        flow, recorded = self._flow, self._capture
        steps: list[tuple[float, int, RecordedCall]] = [
            (position, -1, recorded.calls[flow.parts.parts[position].owner])
            for position in flow.opaque
        ]
        calls = [
            (one, replace(self._capture.calls[one.owners[0]], phase=one.group.phase))
            for one in self._proposal.alone
        ]
        calls += [(one, self._of_kernel(one)) for one in self._proposal.fused]
        steps += [(one.group.at, number, call) for number, (one, call) in enumerate(calls)]
        for _, _, call in sorted(steps, key=lambda step: step[:2]):
            for value in call.reads:
                self._derive(value)
            self._calls.append(call)
        gradients = (gradient for _, gradient in recorded.gradients if gradient is not None)
        for value in (*recorded.view.outputs, *gradients):
            self._derive(value)
        named = {one.kernel.op: one.kernel for one in self._proposal.fused}
        # Views of outputs were appended last; those of the forward phase come before the backward.
        in_phases = sorted(self._calls, key=lambda call: call.phase is Phase.BACKWARD)
        guards = dict.fromkeys((*recorded.sizes.guards, *flow.parts.guards))
        guards |= {guard: None for op in named for guard in kernels.guards_of(op)}
        return replace(
            recorded,
            values=flow.parts.values,
            calls=tuple(in_phases),
            kernels=tuple(named.values()),
            sizes=replace(recorded.sizes, guards=tuple(guards)),
        )

    def _of_kernel(self, one: Fused) -> RecordedCall:
        """Return the call of a kernel. Its module and source line are those of the recorded call
        that makes the kernel's largest result (of equal ones the last)."""
        flow = self._flow
        main = max(one.group.targets, key=lambda t: (flow.size_bytes[t], flow.made[t].maker))
        owner = self._capture.calls[flow.parts.parts[flow.made[main].maker].owner]
        return RecordedCall(
            call=Call(
                one.kernel.op, (*one.kernel.sizes, *map(ValueRef, one.inputs)), (), one.results
            ),
            phase=one.group.phase,
            reads=one.inputs,
            writes=(),
            random=False,
            module=owner.module,
            source=owner.source,
        )

    def _derive(self, value: int) -> None:
        position = self._flow.views.get(value)
        if position is None or value in self._derived:
            return
        part = self._flow.parts.parts[position]
        owner = self._capture.calls[part.owner]
        call, made = part.call, part.makes
        if value in owner.call.results and self._capture.view.is_view(part.owner):
            call, made = owner.call, owner.call.made
        self._derived.update(made)
        reads = tuple(r.index for r in refs(call))
        for read in reads:
            self._derive(read)
        self._calls.append(replace(owner, call=call, reads=reads))
