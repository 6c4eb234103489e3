"""Opaque functions: an autograd.Function that runs for real, as two calls of a plan.

takes: an autograd.Function. returns: the same. guarantees: outside of recordings it does what it
did before. While a forward is recorded, its forward and its backward are each a call of an operator
of ours, which takes and returns tensors and names everything else by a key; what the context saves
is a result of the first and an argument of the second, so a plan may drop it and run the forward
again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import _is_setup_context_defined
from torch.utils import _pytree as pytree

from rockplan.errors import InvalidInput, StalePlan, UnsupportedModel
from rockplan.graph_builder.foreign import opaque_functions
from rockplan.graph_builder.foreign.outcomes import OpaqueRun, Ref, new_tensor, taken
from rockplan.graph_builder.operators.rows import OPAQUE
from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.python_state.walk import NOT_FOLLOWED

LIBRARY = torch.library.Library(OPAQUE, "DEF")
_FORWARD = "(Tensor[] given, Tensor(a!)[] changed, str call) -> Tensor[]"
_BACKWARD = "(Tensor[] given, str call) -> Tensor[]"
_PACKETS: Counter[str] = Counter()


def new_packet(name: str) -> str:
    """Return an unused operator name for a function called `name`."""
    stem = re.sub(r"\W+", "_", name.replace("<locals>.", ""))
    _PACKETS[stem] += 1
    return stem if _PACKETS[stem] == 1 else f"{stem}__{_PACKETS[stem]}"


def operators_of(name_of_function: str) -> str:
    """Define the forward and backward operators of a function; return the name that they share
    ('NAME' of 'NAME.forward')."""
    packet = new_packet(name_of_function)

    def made_as_known(*args: Any) -> list[torch.Tensor]:
        made = opaque_functions.KNOWN[args[-1]].outcome.made
        return [new_tensor(one) for one in made if one.base is None]

    for name, schema, run in (
        (f"{packet}.forward", _FORWARD, _run_forward),
        (f"{packet}.backward", _BACKWARD, lambda given, call: _checked(_known(call), given)),
    ):
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{OPAQUE}::{name}", made_as_known, lib=LIBRARY)
    return packet


def result_of(known: opaque_functions.Known, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the result of a known call, rebuilt from tensors by place."""
    leaves = [taken(ref, tensors) for ref in known.results]
    return pytree.tree_unflatten(leaves, known.structure)


def _known(key: str) -> opaque_functions.Known:
    if key not in opaque_functions.KNOWN:
        raise StalePlan(
            "the plan calls a function that was given to rockplan.opaque in another process; plan "
            "the module in this one"
        )
    return opaque_functions.KNOWN[key]


def _run_forward(
    given: list[torch.Tensor], changed: list[torch.Tensor], call: str
) -> list[torch.Tensor]:
    # given: tensors that the function only reads; changed: those that it writes into.
    known = _known(call)
    read, written = iter(given), iter(changed)
    places = range(len(given) + len(changed))
    tensors = [next(written if i in known.changed else read) for i in places]
    return _checked(known, tensors)


def _checked(known: opaque_functions.Known, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a known call on `tensors` for real; return its results in new memory. Raises
    UnsupportedModel if its outcome differs from the recorded one, or if it draws random numbers or,
    by an operator of PyTorch, writes into other tensors."""
    before = generator_states(tensors)
    run = known.run(tensors)
    storages = known.call.tensors.storages
    written = {storages[i] for i in run.written} - {storages[i] for i in known.changed}
    if isinstance(known.call, opaque_functions.OpaqueBackward) and run.outcome != known.outcome:
        run = _with_copies(known, run)
    called = known.call.called
    if run.outcome != known.outcome:
        raise UnsupportedModel(
            f"{called}, an opaque function, returns, saves or sets something else than when it was "
            "planned: tensors of other shapes, strides, dtypes or memory, other data, or None. A "
            "plan needs the same of each run: what follows from shapes and from arguments that are "
            "no tensors alone"
        )
    if generator_states(tensors) != before:
        raise UnsupportedModel(
            f"{called}, an opaque function, has drawn random numbers, which it did not when it was "
            "planned: a run of it in a plan could not repeat them"
        )
    if written:
        raise UnsupportedModel(
            f"{called}, an opaque function, has written into an argument (tensor {min(written)}), "
            "which it did not when it was planned. Let it always write, or never"
        )
    return run.fresh()


def _with_copies(known: opaque_functions.Known, run: OpaqueRun) -> OpaqueRun:
    """Return the run with copies of results that are arguments, where a new tensor was recorded;
    `run` itself if copies do not make it as recorded. A backward may return an argument (a saved
    tensor, if the incoming gradient is one) where it made a new tensor when recorded."""
    outcome, first = known.outcome, len(run.tensors) - len(run.outcome.made)
    if len(run.results) != len(outcome.results):
        return run
    copies: dict[int, torch.Tensor] = {}
    for expected, found in zip(outcome.results, run.results, strict=True):
        place = expected.place if isinstance(expected, Ref) else -1
        made = outcome.made[place - first] if place >= first else None
        if made is None or made.base is not None or not isinstance(found, Ref):
            continue
        tensor = run.tensors[found.place]
        like = replace(tensor_spec(tensor), offset=made.spec.offset)
        if place not in copies and like == made.spec:
            copies[place] = new_tensor(made).copy_(tensor)
    if sorted(copies) != [first + i for i, made in enumerate(outcome.made)]:
        return run
    tensors = (*run.tensors[:first], *(copies[place] for place in sorted(copies)))
    return OpaqueRun(outcome, tensors, known.results, known.structure)


def generator_states(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Name ('cpu', 'cuda:0') -> state as bytes, of what a call on `tensors` may draw from."""
    devices = {t.device.index for t in tensors if t.device.type == "cuda"}
    states = {f"cuda:{i}": torch.cuda.default_generators[i].get_state() for i in devices}
    states["cpu"] = torch.get_rng_state()
    return {device: state.numpy().tobytes() for device, state in states.items()}


REGISTERED: dict[type[Function], opaque_functions.Opaque] = {}


def opaque(function: Any) -> Any:
    """Plan `function` as a whole: it runs for real, and plans know what it takes, makes and writes.

    function: a subclass of torch.autograd.Function, which is returned as it is. Usable as a
    decorator. Raises InvalidInput.
    """
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise InvalidInput(
            f"rockplan.opaque takes a subclass of torch.autograd.Function, got {function!r}; a "
            "function and its backward are an operator: torch.library.custom_op"
        )
    called = f"{function.__module__}.{function.__qualname__}".replace("<locals>.", "")
    if getattr(function, "boxed_grads_call", False):
        raise InvalidInput(f"{called} takes its gradients in one list, which is not supported")
    has_setup = _is_setup_context_defined(function.setup_context)
    NOT_FOLLOWED[id(function)] = function
    before = REGISTERED.get(function)
    backward_name = "vjp" if function.vjp is not Function.vjp else "backward"
    REGISTERED[function] = opaque_functions.Opaque(
        kind=function,
        called=called,
        packet=before.packet if before else operators_of(function.__qualname__),
        forward=function.forward,
        setup_context=function.setup_context if has_setup else None,
        backward=getattr(function, backward_name),
        backward_name=backward_name,
    )
    return function
