"""Out of memory: what an error of the device says, where it is raised in a `with` block.

takes: any code that calls modules. returns: nothing; the error gets a note: who owns the memory of
the call that did not fit, by module and line, and which ways of running it fit. guarantees: without
an error nothing happens, beside a hook of a model that is passed; the error stays what it was,
whatever is found. Operators of a GPU do not run for the note.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from rockplan.fitting.as_on_cuda import autocast_dtype
from rockplan.fitting.gpus import gpu, others_bytes
from rockplan.fitting.optimizer import Factory
from rockplan.fitting.training_step import USUAL
from rockplan.fitting.ways import kept_whole
from rockplan.options import Options
from rockplan.python_state import trees
from rockplan.python_state.leftovers import variables_of
from rockplan.reports.explain import explain_schedule
from rockplan.runtime.planned_state import unplanned
from rockplan.values.plan import format_bytes
from rockplan.will_it_fit.captured_sizes import Arguments, size_of
from rockplan.will_it_fit.question import BATCH, FitQuestion
from rockplan.will_it_fit.twin import twin_of, with_values
from rockplan.will_it_fit.what_fits import fit

OPTIONS = Options(cache=False, tile=True, time_limit_s=5.0)
"""Of the plans that are tried; each takes as long at most."""


@dataclass(frozen=True, slots=True)
class _FailedCall:
    """A call of a module. autocast: its dtype, None outside of autocast."""

    module: nn.Module
    arguments: Arguments
    autocast: torch.dtype | None


@contextlib.contextmanager
def explained(model: nn.Module | None = None) -> Iterator[None]:
    """In the `with` block, add a note to an out-of-memory error of the device (CUDA): who owns the
    memory of the call that did not fit, by module and line, with everything kept; and which ways of
    running it (checkpointing, plans, logits in parts) fit the device, in bytes.

    The call is the outermost one of a module on the way to the error. model: whose last call it is
    where there is none, as in a backward pass; a hook remembers the shapes of each call of it.
    Finding out takes as long as `rockplan.fit` does, some seconds to a minute.
    """
    last: list[_FailedCall] = []
    hook = model and model.register_forward_pre_hook(
        lambda module, *arguments: last.__setitem__(
            slice(None), [_FailedCall(module, _shapes(arguments), autocast_dtype())]
        ),
        with_kwargs=True,
    )
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(_note(error, last))
        raise
    finally:
        if hook:
            hook.remove()


def _shapes(arguments: Any) -> Any:
    def shape(leaf: Any) -> Any:
        return leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf

    leaves, spec = trees.tree_flatten(arguments)
    return trees.tree_unflatten([*map(shape, leaves)], spec)


def _calls(frames: list[FrameType]) -> Iterator[_FailedCall]:
    """Autocast has ended by now: tensors of 16 bits of a module that has none tell of it."""
    for number, frame in enumerate(frames):
        if frame.f_code is nn.Module._call_impl.__code__:
            given = variables_of(frame)
            module = given["self"]
            inside = (v for f in frames[number:] for v in variables_of(f).values())
            dtypes = {t.dtype for t in inside if isinstance(t, torch.Tensor)}
            short = dtypes & {torch.float16, torch.bfloat16} - {
                p.dtype for p in module.parameters()
            }
            arguments = _shapes((given["args"], given["kwargs"]))
            yield _FailedCall(module, arguments, next(iter(short), None))


def _note(error: BaseException, last: list[_FailedCall]) -> str:
    """last: what the hook of a model has seen. (Nothing but this function may hold frames, which
    hold the memory of the device.)"""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [*_calls(frames)]
    modules = [call.module for call in calls]
    # What a hook has seen says more, where the call is on the way to the error.
    calls = [call for call in last if not calls or call.module in modules] + calls
    if not calls:
        return (
            "rockplan: no call of a module is on the way to this error. "
            "rockplan.explained(model) knows the last call of the model"
        )
    call = calls[0]
    on = next((p.device for p in call.module.parameters()), torch.device("cpu"))
    autocast = torch.autocast(on.type, call.autocast, enabled=call.autocast is not None)
    try:
        with autocast, torch.enable_grad(), torch.device("cpu"):
            return _told(call, on, frames)
    except Exception as why:  # the caller has an error already, which must not be lost
        return f"rockplan cannot say what took the memory: {type(why).__name__}: {why}"


def _optimizers(frames: list[FrameType], model: nn.Module) -> Iterator[Factory]:
    owned = {id(p) for p in model.parameters()}
    for space in (space for frame in frames for space in (variables_of(frame), frame.f_globals)):
        for value in [*space.values()]:
            if isinstance(value, torch.optim.Optimizer):
                groups = (group["params"] for group in value.param_groups)
                if any(id(p) in owned for group in groups for p in group):
                    known = inspect.signature(type(value)).parameters
                    own = {name: v for name, v in value.defaults.items() if name in known}
                    yield functools.partial(type(value), **own)


def _told(call: _FailedCall, on: torch.device, frames: list[FrameType]) -> str:
    steps = next(_optimizers(frames, call.module), None)
    # On the CPU: the device is full.
    model = twin_of(unplanned(call.module), on.type)
    args, kwargs = with_values(call.arguments)
    question = FitQuestion(model, model, (args, kwargs), gpu(on), None, USUAL, Options(cache=False))
    whole = question.whole((size_of(model, (args, kwargs), BATCH), None))
    ways = fit(model, args, on, sample_kwargs=kwargs, optimizer=steps, options=OPTIONS)
    of_others = ""
    if on.type == "cuda":
        of_others = f" (others hold {format_bytes(others_bytes(on))} of it now)"
    return (
        f"rockplan: who owns what {type(call.module).__name__} needs beyond its parameters and "
        f"gradients, with everything kept:\n{explain_schedule(*kept_whole(whole.graph))}\n"
        f"which ways of running it fit{of_others}:\n{ways}"
    )
