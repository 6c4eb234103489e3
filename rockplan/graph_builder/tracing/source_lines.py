"""Source lines: the line of the user's model that is running.

takes: the frames of Python that run. returns: parts of messages.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import types
from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from rockplan.python_state.leftovers import variables_of

_TORCH_FOLDER = os.path.join(torch.__path__[0], "")
_OWN_FOLDER = __file__.rsplit("graph_builder", 1)[0]
_TENSOR_FILES = f"{_TORCH_FOLDER}_tensor"
_NO_USERS = (_TORCH_FOLDER, _OWN_FOLDER, contextlib.__file__)
_LIBRARY_FOLDER = os.path.join(os.path.dirname(os.__file__), "")
# Outside of virtual environments these lie inside of the folder of Python's own library.
_INSTALLED = ("site-packages", "dist-packages")
# Models in this file count as a user's; callers of the command line do not.
_EXAMPLES = f"{_OWN_FOLDER}examples.py"
_COMMANDS = os.path.join(_OWN_FOLDER, "cli", "")


Where = tuple[str, str]
"""Path of a submodule, and the user's 'file:line'; '' for what is unknown."""


def frames() -> Iterator[types.FrameType]:
    """Yield the frames of the current stack, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def first_argument(frame: types.FrameType) -> object:
    """Return the first argument of the function that runs in `frame`."""
    code = frame.f_code
    return variables_of(frame).get(code.co_varnames[0]) if code.co_argcount else None


def torch_function() -> str:
    """Return the innermost public function of PyTorch that calls the operator now, as
    'torch.nn.functional.ctc_loss'; '' if the user's code calls it, directly or by a tensor
    method."""
    for frame in frames():
        name = frame.f_code.co_filename
        is_own = name.startswith(_OWN_FOLDER) and name != _EXAMPLES
        if not (is_own or is_of_torch(name)):
            break
        called = frame.f_code.co_name
        is_method = name.startswith(_TENSOR_FILES)
        if not (is_own or is_method or called[0] in "_<" or "<" in frame.f_code.co_qualname):
            return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
    return ""


def is_of_torch(name: str) -> bool:
    """Return whether a file is one of PyTorch's own (not of torchvision)."""
    return name.startswith(_TORCH_FOLDER)


def user_source() -> str:
    """Return 'file.py:12' of the innermost frame outside of torch, rockplan and Python, or ''."""
    for frame in frames():
        name = frame.f_code.co_filename
        if name.startswith(_COMMANDS):
            break
        if is_of_users(name) and not is_of_python(name):
            return f"{name}:{frame.f_lineno}"
    return ""


def is_of_python(name: str) -> bool:
    """Return whether a file belongs to Python's own library (`copy.py`), and was not installed."""
    return name.startswith(_LIBRARY_FOLDER) and not any(part in name for part in _INSTALLED)


def is_of_users(name: str) -> bool:
    """Return whether a file is outside of torch, rockplan and contextlib."""
    ours = name.startswith(_NO_USERS) and name != _EXAMPLES
    return not (ours or name[0] == "<")


_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def of_function() -> str:
    """The remedy, to be appended, for the innermost autograd.Function that runs, or ''."""
    for frame in frames():
        context = first_argument(frame)
        if isinstance(context, FunctionCtx):
            kind = getattr(type(context), "_forward_cls", type(context))
            name = kind.__qualname__.replace("<locals>.", "")
            path = name if kind.__module__ == "__main__" else f"{kind.__module__}.{name}"
            how = f"rockplan.opaque({path}), before the module is planned"
            if name != kind.__qualname__:
                how = (
                    "put @rockplan.opaque on the class where it is made. If the forward makes it "
                    "anew at each call, make it once, before that, and pass what it takes from "
                    "around it as arguments of `apply`"
                )
            return (
                f"; or give the autograd.Function {name} to rockplan.opaque, which runs it whole: "
                f"{how}"
            )
    return ""


def of_experts() -> str:
    """Return the remedy, to be appended, if a running module is a mixture of experts, which chooses
    in Python what runs; else ''."""
    for frame in frames():
        owner = variables_of(frame).get("self")
        if isinstance(owner, nn.Module) and _EXPERTS.search(type(owner).__name__):
            return (
                f". {type(owner).__qualname__} chooses experts by values: compute all of them at "
                "once (torch.nn.functional.grouped_mm), as models of transformers do after "
                'model.set_experts_implementation("grouped_mm")'
            )
    return ""
