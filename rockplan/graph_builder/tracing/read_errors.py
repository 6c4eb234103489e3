"""Errors of reads: messages for Python code that reads values, and for shapes that depend on
values.

A message names what the value depends on, which code reads it, and a remedy there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._ops import OpOverload

from rockplan.errors import CaptureError
from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing.recorder import OUTSIDE
from rockplan.graph_builder.tracing.refusals import DECIDED, DRAWN, NAMED
from rockplan.graph_builder.tracing.source_lines import (
    Where,
    frames,
    of_experts,
    of_function,
    torch_function,
)

# Parts of a message on what a value depends on: words without a name, prefixes, how many names.
_CHANGED = "a value that the forward has changed in place"
BUFFER = "the buffer"
ARGUMENT = "leaf "
_NAMED = 3
# Prefix of the name of a function on the stack -> its own remedy.
_REMEDIES = {
    "torch.nn.modules.batchnorm._BatchNorm.forward": (
        "With momentum=None it divides by the number of batches so far: give it a momentum"
    ),
    "torch.distributions.": (
        "torch.distributions checks its arguments like this: pass it validate_args=False"
    ),
    "torchdiffeq._impl.solvers.AdaptiveStepsizeODESolver.": (
        "A method with adaptive steps asks how large its error is: take one with fixed steps "
        "(method='rk4')"
    ),
}
# Further remedy for code that gets an array.
OF_ARRAYS = (
    "; a function that computes with the array (numpy, scipy, numba) can be planned as an operator "
    "(torch.library.custom_op with register_fake and register_autograd)"
)


def value_read_error(
    calls: Sequence[RecordedCall],
    names: Sequence[str],
    is_backward: bool,
    where: Where,
    further: str,
) -> CaptureError:
    """Return the error for a read of a value in Python. calls: those that the value depends on;
    names: parameters, buffers and inputs that it depends on; is_backward: read in the backward
    pass; further: a remedy."""
    what = f"a value that depends on {_listed(names)}"
    if not names:
        what = "a value of the backward pass (a gradient)" if is_backward else _CHANGED
    function = torch_function()
    who = f"the function of PyTorch {function}" if function else "Python (or a function of PyTorch)"
    remedy = NAMED["value"].remedy
    if function:
        remedy = OUTSIDE
    remedy += _of_the_callers(names)
    is_drawn = not names and any(c.random for c in calls)
    what = (_of_outside(calls) if is_drawn or not any(c.random for c in calls) else "") or what
    if is_drawn:
        remedy += (
            f"; or {DRAWN}; where layers are dropped at random, set their share to 0 (layerdrop)"
        )
    remedy = f"{_known_remedy() or remedy}{further}{of_function()}{of_experts()}"
    return NAMED["value"].at(*where, who=who, what=what, remedy=remedy)


def _of_outside(calls: Sequence[RecordedCall]) -> str:
    """Name a value among `calls` that is unknown before the call: a draw, or the result of an
    operator with side effects; '' if there is none."""
    if any(c.random for c in calls):
        return "a random draw"
    acting = next((c.call.op for c in calls if c.effect), "")
    return f"what {acting} returns, which is not called before the step" if acting else ""


def shape_error(
    operator: OpOverload, calls: Sequence[RecordedCall], names: Sequence[str], where: Where
) -> CaptureError:
    """Return the error for a result of `operator` whose shape depends on values. calls, names: what
    these depend on."""
    function = torch_function()
    if function:
        remedy = f"It is called by {function}. {OUTSIDE}"
    else:
        remedy = "Replace it by a masked operation (torch.where, multiplication by the mask)"
    what = f"the values of {_listed(names)}" if names else "the values of its input"
    what = _of_outside(calls) or what
    remedy = f"{remedy}{_of_the_callers(names)}{of_function()}{of_experts()}"
    return NAMED["shape"].at(*where, operator=operator, what=what, remedy=remedy)


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if names[_NAMED:] else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _of_the_callers(names: Sequence[str]) -> str:
    """Return remedies for a read, to be appended, if all names are arguments, or arguments and
    buffers; else ''."""
    remedy = ""
    if names and all(name.startswith(ARGUMENT) for name in names):
        remedy = f"; or decide before the call, and pass in what was decided {DECIDED}"
    if names and all(name.startswith((ARGUMENT, BUFFER)) for name in names):
        remedy += (
            "; a table that stays as it is can be a plain attribute of the module in place of "
            "that: its values are compared at every call"
        )
    return remedy


def _known_remedy() -> str:
    for frame in frames():
        called = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
        for prefix, remedy in _REMEDIES.items():
            if called.startswith(prefix):
                return remedy
    return ""
