"""Foreign kernels: addresses of tensors that a forward gives to code outside of PyTorch.

A kernel that is launched on an address (ctypes, Triton, CUDA) is seen by no dispatch mode, and fake
tensors have no memory for it. guarantees: code that asks for an address is refused by name, with
the kernel as far as it can be identified; so is a read of memory that nothing has written, which
libraries cause that skip their kernels under a fake mode.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from rockplan.errors import UnsupportedModel
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.graph_builder.tracing.source_lines import first_argument, frames, is_of_users

NO_ADDRESS = "Cannot access data pointer of Tensor"
"""Part of PyTorch's error when C++ asks a fake tensor for its memory."""

# Packages whose functions launch kernels for their callers.
_LAUNCHERS = ("triton", "cupy", "numba", "cutlass", "tvm_ffi", "tilelang", "cffi", "ctypes")
_LONGEST_LINE = 90
_FOREIGN = "foreign code"
# File names of code without a file.
_TYPED_IN = ("<stdin>", "<string>", "<ipython")


Frame = tuple[types.FrameType, int]
"""A frame and the line that runs in it."""

Frames = Iterator[Frame]
"""A stack, the innermost frame first."""


def of_address(frames: Frames) -> str:
    """Return the message for Python or C++ code that asks a tensor for its address: the kernel and
    the user's code, as far as they are known. frames: the stack at that moment, innermost first."""
    users = _users(frames)
    kernel = next(filter(None, (_kernel(frame) for frame, _ in _up_to_caller(users))), _FOREIGN)
    asking = [(frame, line) for frame, line in users if not _is_launcher(frame)]
    if not asking:
        return NAMED["address by a library"].text(kernel=kernel)
    (frame, line), *outer = asking
    return NAMED["address"].text(
        function=_function(frame),
        kernel=kernel,
        code=_code(frame, line),
        caller=_called_by(outer),
    )


def running() -> Frames:
    """Return the frames of the current stack."""
    return ((frame, frame.f_lineno) for frame in frames())


def _raised(error: BaseException) -> Frames:
    frames: list[Frame] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    yield from reversed(frames)


def _place(users: Sequence[Frame], module: nn.Module) -> tuple[str, str]:
    """Return (path of the submodule of `module`, the user's 'file:line') in which the frames ran;
    '' for what is unknown. users: frames outside of PyTorch and rockplan, innermost first."""
    paths = {id(m): path for path, m in module.named_modules()}
    held = (paths.get(id(first_argument(frame))) for frame, _ in users)
    path = next((path for path in held if path is not None), "")
    outside = [entry for entry in users if not _is_launcher(entry[0])]
    return path, _source(*outside[0]) if outside else ""


def _users(frames: Frames) -> list[Frame]:
    named = ((f, line, f.f_code.co_filename) for f, line in frames)
    return [(f, line) for f, line, n in named if is_of_users(n) or n.startswith(_TYPED_IN)]


def _up_to_caller(users: Sequence[Frame]) -> Frames:
    for entry in users:
        if isinstance(first_argument(entry[0]), FunctionCtx | nn.Module):
            return
        yield entry


def _is_launcher(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).split(".")[0] in _LAUNCHERS


def _kernel(frame: types.FrameType) -> str | None:
    """Return 'the kernel add' if `self` of the frame is a launcher with a name or a function, else
    None."""
    launcher = first_argument(frame)
    if launcher is None or isinstance(launcher, nn.Module | FunctionCtx | torch.Tensor | type):
        return None
    if frame.f_code.co_varnames[0] != "self":
        return None
    own = getattr(launcher, "fn", None) or getattr(launcher, "kernel", None) or launcher
    name = getattr(own, "__name__", None) or getattr(own, "name", None)
    return f"the kernel {name}" if isinstance(name, str) else None


def _function(frame: types.FrameType) -> str:
    name = frame.f_code.co_qualname.replace("<locals>.", "")
    context = first_argument(frame)
    if isinstance(context, FunctionCtx):
        return f"the autograd.Function {name}"
    return f"the function {name}"


def _called_by(outer: Sequence[Frame]) -> str:
    for frame, line in outer:
        if isinstance(first_argument(frame), FunctionCtx | nn.Module):
            return f", called by {_function(frame)} at {_source(frame, line)}"
    return ""


def _code(frame: types.FrameType, line: int) -> str:
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    shown = text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."
    return f" in `{shown}`" if shown else ""


def _source(frame: types.FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line}"


def maker() -> str:
    """Name the user's function that makes new memory now: 'the function empty_for, called by the
    autograd.Function F.forward at file.py:3'."""
    users = [entry for entry in _users(running()) if not _is_launcher(entry[0])]
    if not users:
        return "PyTorch"
    caller = _called_by(users[1:])
    return f"{_function(users[0][0])}{caller}{',' if caller else ''}"


def refusal(error: BaseException, module: nn.Module) -> UnsupportedModel | None:
    """Return the error to raise if C++ asked for the memory of a fake tensor, else None."""
    if NO_ADDRESS not in str(error):
        return None
    place = _place(_users(_raised(error)), module)
    return UnsupportedModel.at(*place, of_address(_raised(error)))
