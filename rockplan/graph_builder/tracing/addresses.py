"""Foreign kernels: addresses of tensors that a forward gives to code outside of PyTorch.

A kernel that is launched on an address (ctypes, Triton, CUDA) is seen by no dispatch mode, and fake
tensors have no memory for it. guarantees: code that asks for an address is refused by name; so is a
read of memory that nothing has written, which
libraries cause that skip their kernels under a fake mode.
"""

from __future__ import annotations

import linecache
import traceback
import types
from collections.abc import Iterable, Iterator

from torch import nn
from torch._ops import OpOverload
from torch.autograd.function import FunctionCtx

from rockplan.errors import UnsupportedModel
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.graph_builder.tracing.source_lines import Where, first_argument, frames, is_of_users

NO_ADDRESS = "Cannot access data pointer of Tensor"
"""Part of PyTorch's error when C++ asks a fake tensor for its memory."""

# Packages whose functions launch kernels for their callers.
_LAUNCHERS = ("triton", "cupy", "numba", "cutlass", "tvm_ffi", "tilelang", "cffi", "ctypes")
_LONGEST_LINE = 90
# File names of code without a file.
_TYPED_IN = ("<stdin>", "<string>", "<ipython")


Frame = tuple[types.FrameType, int]
"""A frame and the line that runs in it."""


def of_address(frames: Iterable[Frame]) -> str:
    """Return the message for Python or C++ code that asks a tensor for its address: the user's
    code, as far as it is known. frames: the stack at that moment, innermost first."""
    users = [*_users(frames)]
    if not users:
        return NAMED["address"].text(function="the forward", code="", caller="")
    (frame, line), *outer = users
    facts = {"code": _code(frame, line), "caller": _called_by(outer)}
    return NAMED["address"].text(function=_function(frame), **facts)


def running() -> Iterator[Frame]:
    """Yield the frames of the current stack, the innermost first."""
    return ((frame, frame.f_lineno) for frame in frames())


def _users(frames: Iterable[Frame]) -> Iterator[Frame]:
    for frame, line in frames:
        name, file = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        is_users = is_of_users(name) or name.startswith(_TYPED_IN)
        if is_users and file.partition(".")[0] not in _LAUNCHERS:
            yield frame, line


def _function(frame: types.FrameType) -> str:
    name = frame.f_code.co_qualname.replace("<locals>.", "")
    context = first_argument(frame)
    if isinstance(context, FunctionCtx):
        return f"the autograd.Function {name}"
    return f"the function {name}"


def _called_by(outer: Iterable[Frame]) -> str:
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
    users = [*_users(running())]
    if not users:
        return "PyTorch"
    caller = _called_by(users[1:])
    return f"{_function(users[0][0])}{caller}{',' if caller else ''}"


def refusal(error: BaseException, module: nn.Module) -> UnsupportedModel | None:
    """Return the error to raise if C++ asked for the memory of a fake tensor, else None."""
    if NO_ADDRESS not in str(error):
        return None
    raised = [*traceback.walk_tb(error.__traceback__)][::-1]
    paths = {id(m): path for path, m in module.named_modules()}
    held = (paths.get(id(first_argument(frame))) for frame, _ in _users(raised))
    path = next((path for path in held if path is not None), "")
    sources = (_source(*entry) for entry in _users(raised))
    return UnsupportedModel.at(path, next(sources, ""), of_address(raised))


def named_error(error: Exception) -> str:
    """Return type and message of an error, without the full stop."""
    return f"{type(error).__name__}: {error}".rstrip(".: ")


class Unwritten:
    """Uninitialized storages (by number): made by `torch.empty`, and not written by a call. A
    kernel outside of PyTorch wrote them, or was skipped under a fake mode, and a plan would train
    on random content: reads are refused."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[str, Where]] = {}

    def __bool__(self) -> bool:
        return bool(self._made)

    def makes(self, operator: OpOverload, storages: Iterable[int], where: Where) -> None:
        """Note new storages, if `operator` leaves them uninitialized."""
        if facts.facts_of(operator).makes_unwritten:
            self._made |= dict.fromkeys(storages, (maker(), where))

    def written(self, storages: Iterable[int]) -> None:
        """Note that a call has written to storages, at least to a part of each."""
        for storage in storages:
            self._made.pop(storage, None)

    def refuse(self, storages: Iterable[int], reader: str) -> None:
        """Raise CaptureError if one of the storages that `reader` reads is uninitialized. reader:
        in words, for the message."""
        for by, where in (self._made[s] for s in storages if s in self._made):
            raise NAMED["unwritten memory"].at(*where, reader=reader, maker=by)
