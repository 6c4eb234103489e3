"""Captured calls: a module and a sample -> its graphs, without prices, and problems for the search.

guarantees: a call that no plan can be made of is refused before anything is recorded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rockplan.codegen import rng_replay
from rockplan.errors import CaptureError, InvalidInput, StoredByTheFirstCall
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.lowering.lower import Lowered
from rockplan.graph_builder.pipeline import HeadStaysWhole, lower
from rockplan.graph_builder.recorded.run import Capture
from rockplan.graph_builder.tracing.refusals import WITHOUT_FLAT_PARAMETERS
from rockplan.options import Options, checked
from rockplan.python_state import key_value_cache
from rockplan.python_state.hooks import has_hooks
from rockplan.runtime.planned_state import PLANNING, original_forward
from rockplan.runtime.program import ModuleCall
from rockplan.runtime.switches import outside_of_initialization
from rockplan.search.problem import Problem, measured
from rockplan.solving.parts import named_in_refusals
from rockplan.solving.sizes import SizedCall, sized_calls
from rockplan.solving.untouched import after_a_first_call
from rockplan.values.garbage_collection import paused_collection
from rockplan.values.graph import CDGraph
from rockplan.values.interface import Interface
from rockplan.values.progress import report
from rockplan.values.released import Releasable, releasable
from rockplan.values.schedule import Waits
from rockplan.values.sizes import CallSizes

_LOGGER = logging.getLogger("rockplan")


def arguments(
    model: object,
    sample_input: object,
    sample_kwargs: Mapping[str, Any] | None,
    *,
    says_cache: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) with which `model` is called on the sample: a tensor, a tuple of
    arguments, or a mapping of keyword arguments, and further keyword arguments. says_cache: log
    that planned calls run without the key-value cache. Raises InvalidInput if the model cannot be
    planned or called so."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    _refuse_wrappers(model)
    if not isinstance(sample_kwargs, Mapping | None):
        raise InvalidInput(
            f"sample_kwargs is a {type(sample_kwargs).__name__}; pass a mapping of keyword "
            "arguments"
        )
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dict(sample_kwargs or {})
    if isinstance(sample_input, Mapping):
        kwargs = {**{str(k): v for k, v in sample_input.items()}, **kwargs}
    elif isinstance(sample_input, tuple | list):
        args = tuple(sample_input)
    elif isinstance(sample_input, torch.Tensor):
        args = (sample_input,)
    else:
        raise InvalidInput(
            f"sample_input is a {type(sample_input).__name__}; pass a tensor, a tuple of "
            "positional arguments or a mapping of keyword arguments"
        )
    _check_devices(model, (*args, *kwargs.values()))
    if says_cache:
        key_value_cache.say(model, kwargs)
    if "labels" in kwargs and not model.training:
        _LOGGER.warning(
            "the model is in eval mode, as from_pretrained returns it, and planned for that: steps "
            "in training mode may need another plan. Call model.train() before it is planned"
        )
    return args, kwargs


def _refuse_wrappers(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod"):
        raise InvalidInput(
            "model is compiled by torch.compile, and a plan runs without a compiler; plan the "
            "module inside it (model._orig_mod)"
        )
    if isinstance(model, nn.DataParallel):
        raise InvalidInput(
            f"model is a {type(model).__name__}; plan the module inside it, then wrap the "
            "planned module"
        )
    for path, module in model.named_modules():
        # By name: importing a library that is not in use would take a second.
        kind = next((k.__name__ for k in type(module).__mro__ if k.__name__ in _DISTRIBUTED), None)
        if kind is not None:
            part = f"submodule '{path}'" if path else "model"
            raise InvalidInput(f"{part} is a {kind}, {_DISTRIBUTED[kind]}")


# Wrappers that work around a planned module, and not inside one -> why, and what to do.
_DISTRIBUTED = {
    "DistributedDataParallel": (
        "which sums gradients over processes when autograd has them; plan the module without it, "
        "then wrap the whole planned module"
    ),
    "FullyShardedDataParallel": (
        "which exchanges the memory of parameters while they are used; plan the module without it, "
        f"and {WITHOUT_FLAT_PARAMETERS}"
    ),
}


def _check_devices(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Raise InvalidInput if parameters are on several devices, or if one of the sample's
    `arguments` is on another kind of device than the model. The meta device does not count."""
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise InvalidInput(
            f"the parameters of the model are on {', '.join(sorted(map(str, devices)))}; a plan is "
            "for the memory of one device. Move the model to one, or plan its parts"
        )
    own = {t.device.type for t in (*model.parameters(), *model.buffers())} - {"meta"}
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and own and argument.device.type not in own:
            raise InvalidInput(
                f"the sample has a tensor on {argument.device}, the model is on "
                f"{', '.join(sorted(own))}; move the sample there"
            )


def calls_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[SizedCall, ...]:
    """Return the calls that are planned before training, the largest first; without
    `Options.sizes`, the sample."""
    checked(options)
    return sized_calls(original_forward(model), args, kwargs, options)


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One kind of call of a module as a graph, without prices. hooked: names of parameters that
    have hooks; in_parts: the same call with a tiled head, if the options ask for it and it can be
    tiled; earlier_workspaces: if its sizes are symbols, the workspace of each node, in eager's
    order, in the call that it was compared with."""

    lowered: Lowered
    hooked: frozenset[str]
    in_parts: CapturedCall | None = None
    earlier_workspaces: tuple[int, ...] = ()

    @property
    def run(self) -> Capture:
        """The recorded run that the graph was made from."""
        return self.lowered.run

    def releasable(self, options: Options) -> Releasable | None:
        """Return what the caller could release of the result, beside what the options release."""
        return releasable(self.lowered.graph, self.lowered.interface, options.released)

    @property
    def variants(self) -> tuple[CapturedCall, ...]:
        """The variants that can be planned: with the whole head, and with the tiled one."""
        return (self,) if self.in_parts is None else (self, self.in_parts)

    @property
    def waits(self) -> Waits:
        return waits_of(self.lowered.graph, self.lowered.interface, self.hooked)


def waits_of(graph: CDGraph, interface: Interface, hooked: frozenset[str]) -> Waits:
    """Return (contributions to the gradient of a parameter, parameter), all as storages, for each
    parameter that has a hook. hooked: names of these."""
    values = graph.values
    targets = {value for name, value in interface.parameters if name in hooked}
    return tuple(
        (tuple(values[g].data for g in gradients), values[target].data)
        for target, gradients in interface.gradients
        if gradients and target in targets
    )


def captured_call(
    call: ModuleCall,
    options: Options,
    is_asked: bool = True,
    may_run: bool = True,
    earlier: CallSizes | None = None,
    kept: frozenset[int] = frozenset(),
    with_dead: bool = False,
) -> CapturedCall:
    """Record one call of a module on fake tensors and lower it to graphs: one as it is, and, with
    Options(tile=True), one with its head in parts. is_asked: log why the head cannot be tiled.
    may_run: the module may be called for real if its first call stores tables (`untouched`).
    earlier: as for `capture`; sizes become symbols (`open_sizes`); kept: positions of leaves that
    are taken as if something read them; with_dead: what nobody needs is in the graph, too.
    Raises CaptureError, InvalidInput."""
    report("capturing the model")
    checked(options)
    module, incoming = call.module, call.incoming
    if incoming is None and options.differentiated is not None:
        incoming = dict.fromkeys(options.differentiated)
    # Not as a decorator, whose frame would be taken for the user's line.
    with PLANNING, paused_collection(), key_value_cache.switched_off(module):
        run = _recorded(replace(call, incoming=incoming), options.only_loss, may_run, earlier, kept)
        parameters = module.named_parameters(remove_duplicate=False)
        hooked = frozenset(n for n, p in parameters if has_hooks(p))
        state_bytes = rng_replay.state_bytes(_device(module, run))
        in_parts = None
        if options.tile:
            in_parts = _in_parts(run, state_bytes, hooked, options, is_asked)
        whole = lower(run, state_bytes, replace(options, tile=False), with_dead)
        return CapturedCall(whole, hooked, in_parts)


def _recorded(
    call: ModuleCall,
    only_loss: bool,
    may_run: bool,
    earlier: CallSizes | None,
    kept: frozenset[int],
) -> Capture:
    """Record one call. If the module's first call stores tables and the original may be called for
    real (`may_run`), record it as a second call."""
    module, forward = call.module, original_forward(call.module)
    capture_call = functools.partial(
        capture, module, call.args, call.kwargs, forward, call.incoming, only_loss
    )

    def record() -> Capture:
        """Before, with an eye on what may be unread, until no more of that is read; both have to do
        the same."""
        watched, unread = None, call.unread
        while unread and (watched is None or watched.unread != unread):
            try:
                unread = unread if watched is None else watched.unread
                watched = capture_call(None, unread)
            except CaptureError:
                unread = frozenset()
        run = capture_call(earlier)
        if watched is None or not _do_the_same(watched, run):
            return run
        return replace(run.without(unread - kept), unread=unread)

    try:
        return record()
    except StoredByTheFirstCall as refusal:
        if not may_run:
            raise
        first = refusal.with_traceback(None)
    with after_a_first_call(call, first):
        return record()


def _do_the_same(one: Capture, other: Capture) -> bool:
    """True if two runs of a call have the same operators on the same values; sizes of one of them
    may be symbols."""

    def done(run: Capture) -> list[Any]:
        return [(c.call.op, c.reads, c.writes, c.call.results) for c in run.calls]

    is_exact = not other.sizes.symbols
    return (
        (one.values, one.calls) == (other.values, other.calls)
        if is_exact
        else (done(one) == done(other))
    )


def _in_parts(
    run: Capture, state_bytes: int, hooked: frozenset[str], options: Options, is_asked: bool
) -> CapturedCall | None:
    """Return the recorded run lowered with a tiled head; None if the head cannot be tiled, and if
    is_asked the log says why. state_bytes: of a generator state; hooked: parameters with hooks."""
    try:
        return CapturedCall(lower(run, state_bytes, options), hooked)
    except HeadStaysWhole as reason:
        if is_asked:
            _LOGGER.warning("nothing is tiled: %s", reason)
        return None


def prepared(
    module: nn.Module, call: SizedCall, options: Options
) -> tuple[CapturedCall, tuple[Problem, ...]]:
    """Capture a call of `module` and measure its operations. Returns it with a search problem for
    each variant (as it is, with the head in parts). Errors name the sizes of the call and parts
    that can be planned."""
    with named_in_refusals(module), outside_of_initialization(), call.named_in_errors():
        source = captured_call(call.of(module), options)
        return source, problems_of(source, options)


def problems_of(source: CapturedCall, options: Options) -> tuple[Problem, ...]:
    """Return the search problem of each variant of a captured call, its operations priced on this
    machine; operations that several variants have in common are measured once."""
    problems: tuple[Problem, ...] = ()
    with PLANNING:
        for variant in source.variants:
            known = problems[0].profile if problems else None
            problems += (measured(variant.lowered, options, variant.waits, known),)
    return problems


def _device(module: nn.Module, captured: Capture) -> torch.device:
    kinds = {v.spec.device for v in captured.values if v.spec.device.startswith("cuda")}
    return torch.device(min(kinds)) if kinds else torch.device("cpu")
