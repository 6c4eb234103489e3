"""Trials: runs of opaque functions on made-up numbers, to find out what a call makes.

They run outside of a recording and of the module, so an opaque function may have any effect on
Python's state, which plans do not track. guarantees: generators are put back afterwards; undeclared
writes into arguments, and draws that a plan could not repeat, are refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from rockplan.errors import RockplanError
from rockplan.graph_builder.foreign.opaque import (
    device_of_draws,
    generator_states,
    moved,
    result_of,
)
from rockplan.graph_builder.foreign.opaque_functions import (
    KNOWN,
    Known,
    OpaqueBackward,
    OpaqueForward,
    argument_names,
    backward_call,
    backward_names,
    key_of,
)
from rockplan.graph_builder.foreign.outcomes import OpaqueRun, Ref, Tensors
from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.recorded.tensors import tensor_in, tensor_of
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.elements import EVERYBODYS, GENERATOR


def find_out(call: OpaqueForward | OpaqueBackward, place: tuple[str, str]) -> OpaqueRun:
    """Run `call` on made-up tensors (fake ones if the function has a `fake`); remember its outcome
    in `KNOWN` and return the run. place: (module path, source line), for errors. Raises
    CaptureError for what a plan cannot do: undeclared writes, unknown draws, views of another
    kind."""
    is_fake = call.function.fake is not None
    undeclared: list[str] = []
    if is_fake:
        with FakeTensorMode():
            run = _run(call, _tensors_for(call, place), True, place)
            draws = bool(run.fresh())  # unknown for a function with `fake`, so assumed
    else:
        with _generators_restored(call):
            run, draws, undeclared = _real_run(call, _tensors_for(call, place), place)
    for made in run.outcome.made:
        base = None if made.base is None else tensor_spec(run.tensors[made.base])
        is_plain = not (made.spec.is_conj or made.spec.is_neg)
        if not is_plain or (base is not None and base.dtype != made.spec.dtype):
            raise NAMED["view by an opaque function"].at(*place, function=call.called)
    known = Known(call, run.outcome, run.results, run.structure, run.attributes, draws)
    if undeclared:
        _refuse_writes(known, run, undeclared, place)
    KNOWN[key_of(call)] = known
    return run


def _all_generator_states(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the states of the generators of devices, Python and numpy. (Plans do not check the
    latter two, from which other threads draw as well.)"""
    others = {name: GENERATOR.read(one) for name, one in EVERYBODYS.items()}
    return {**generator_states(tensors), **others}


@contextlib.contextmanager
def _generators_restored(call: OpaqueForward | OpaqueBackward) -> Iterator[None]:
    devices = {s.device for s in call.tensors.specs if s.device.startswith("cuda")}
    states = [(one, GENERATOR.read(one)) for one in EVERYBODYS.values()]
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            for one, state in states:
                GENERATOR.write(one, state)


def _real_run(
    call: OpaqueForward | OpaqueBackward, tensors: list[torch.Tensor], place: tuple[str, str]
) -> tuple[OpaqueRun, bool, list[str]]:
    """Return (the run, whether it drew random numbers, names of tensors that it wrote into without
    a declaration). Raises CaptureError for draws that a plan could not repeat."""
    declared = call.changed if isinstance(call, OpaqueForward) else ()
    before = [_bytes(t).clone() for t in tensors]
    states = _all_generator_states(tensors)
    run = _run(call, tensors, False, place)
    storages = {call.tensors.storages[i] for i in declared}
    written = {
        i
        for i, (tensor, content) in enumerate(zip(tensors, before, strict=True))
        if call.tensors.storages[i] not in storages and not torch.equal(_bytes(tensor), content)
    }
    drawn = moved(states, _all_generator_states(tensors))
    if not drawn <= {device_of_draws(run.fresh())}:
        raise NAMED["draws of an opaque function"].at(*place, function=call.called)
    return run, bool(drawn), _names_of_places(call, written)


def _run(
    call: OpaqueForward | OpaqueBackward,
    tensors: list[torch.Tensor],
    is_fake: bool,
    place: tuple[str, str],
) -> OpaqueRun:
    try:
        return call.run(tensors, is_fake)
    except RockplanError:
        raise
    except Exception as error:
        raise NAMED["run of an opaque function"].at(
            *place, function=call.called, error=f"{type(error).__name__}: {error}".rstrip(".")
        ) from error


def _names_of_places(call: OpaqueForward | OpaqueBackward, places: Iterable[int]) -> list[str]:
    """Return the names by which a user declares writes into tensors at `places`, one a storage."""
    if isinstance(call, OpaqueForward):
        names = argument_names(call.function, len(call.args))
        named = {
            name: tuple(r.place for r in pytree.tree_leaves(argument) if isinstance(r, Ref))
            for name, argument in zip(names, call.args, strict=True)
        }
    else:
        named = backward_names(call.function, call.saved, call.attributes, call.gradients)
    storages: dict[int, str] = {}
    for place in sorted(places):
        name = next(n for n, own in named.items() if place in own)
        storages.setdefault(call.tensors.storages[place], name)
    return list(dict.fromkeys(storages.values()))


def _refuse_writes(
    known: Known, run: OpaqueRun, undeclared: Sequence[str], place: tuple[str, str]
) -> NoReturn:
    """Raise CaptureError with the line that declares the writes, the backward's included if it can
    be tried. undeclared: names of tensors that the call writes into."""
    call = known.call
    if isinstance(call, OpaqueForward):
        of_backward: list[str] = []
        with contextlib.suppress(RockplanError), _generators_restored(call):
            likely = likely_backward(known, run)
            of_backward = _real_run(likely, _tensors_for(likely, place), place)[2]
        line = call.function.line(undeclared, of_backward)
    else:
        line = call.function.line((), undeclared)
    raise NAMED["write of an opaque function"].at(
        *place, function=call.called, argument=undeclared[0], line=line
    )


def _tensors_for(
    call: OpaqueForward | OpaqueBackward, place: tuple[str, str]
) -> list[torch.Tensor]:
    """Return made-up tensors for a call, by place. For a backward they are those that a run of the
    forward saves, and made-up gradients."""
    if isinstance(call, OpaqueForward):
        return _made_up(call.tensors)
    is_fake = call.function.fake is not None
    forward = call.forward
    run = _run(forward, _made_up(forward.tensors), is_fake, place)
    tensors: list[Any] = [None] * len(call.tensors.specs)
    refs = [*call.saved, *(leaf for _, leaves, _ in call.attributes for leaf in leaves)]
    made = [*run.outcome.saved, *(leaf for _, leaves, _ in run.attributes for leaf in leaves)]
    for to, ref in zip(refs, made, strict=True):
        if isinstance(to, Ref) and isinstance(ref, Ref):
            tensors[to.place] = run.tensors[ref.place].detach()
    waiting = [i for i, tensor in enumerate(tensors) if tensor is None]
    specs = tuple(call.tensors.specs[i] for i in waiting)
    sizes = tuple(call.tensors.sizes[i] for i in waiting)
    alone = Tensors(specs, tuple(range(len(specs))), sizes)
    for i, tensor in zip(waiting, _made_up(alone), strict=True):
        tensors[i] = tensor
    return tensors


def likely_backward(known: Known, run: OpaqueRun) -> OpaqueBackward:
    """Return the backward call in which all results that are tensors get a contiguous gradient in
    new memory. run: of the forward."""
    made = result_of(known, run.tensors)
    results = made if isinstance(made, tuple) else (made,)
    gradients = [
        torch.zeros(r.shape, dtype=r.dtype, device=r.device)
        if isinstance(r, torch.Tensor)
        else None
        for r in results
    ]
    return backward_call(known, dict(enumerate(run.tensors)), gradients)[0]


def _made_up(tensors: Tensors) -> list[torch.Tensor]:
    """Return tensors of these specs, by place, which share storages as they say: numbers in [0, 1),
    zeros for integers."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: list[torch.Tensor] = []
    of = zip(tensors.specs, tensors.storages, tensors.sizes, strict=True)
    for spec, storage, size_bytes in of:
        if storage not in storages:
            storages[storage] = tensor_of(spec, _numbers, size_bytes).untyped_storage()
        made.append(tensor_in(storages[storage], spec))
    return made


def _numbers(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(elements, device=device).to(dtype)
    return torch.zeros(elements, dtype=dtype, device=device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))
