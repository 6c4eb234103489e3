"""Modes, filters and registries of the caller that a recording suspends.

Things with a name are rows of `eager_paths`; the others have a context manager here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import InvalidInput
from rockplan.graph_builder.tracing.eager_paths import WARNING_OF_COMPILED_MODULES
from rockplan.graph_builder.tracing.patches import exchanged, in_this_thread, patched
from rockplan.graph_builder.tracing.refusals import HOOKS

_COMPILED = (
    "planning runs inside a function that is being compiled by torch.compile; plan the module "
    "before, and call the planned module there"
)


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """While active, functions compiled by `torch.compile` run uncompiled: under a dispatch mode the
    compiler would end the process. Raises InvalidInput inside of a compiled function."""
    try:
        eager = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise InvalidInput(_COMPILED) from error
    with eager, patched([WARNING_OF_COMPILED_MODULES]):
        yield


def refuse_compiling() -> None:
    """Raise InvalidInput if the compiler is tracing this very code."""
    follows = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)()
    if follows is not None and follows is not False:
        raise InvalidInput(_COMPILED)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """While active, the caller's hooks on saved tensors (an activation checkpoint around the
    planned module, save_on_cpu) do not see the recorded run."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        yield
        return
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def without_logs_of_fake_tensors() -> contextlib.AbstractContextManager[None]:
    """While active, fake tensors log nothing: of a failing operator a traceback, whose error is
    raised, and becomes one of ours."""
    return exchanged(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave modes of the caller while inside: inference mode (autograd records nothing), anomaly
    mode (it reads values of gradients), and dispatch modes (they are for planned steps, not for
    planning)."""
    anomaly = torch.autograd.set_detect_anomaly(False)
    with torch.inference_mode(False), anomaly, _disable_current_modes():
        yield


@contextlib.contextmanager
def without_hooks_on_all_modules() -> Iterator[None]:
    """While active, hooks on all modules do nothing in this thread. Those that are allowed while a
    module is planned follow which module runs (FlopCounterMode), and would follow the recording."""
    registries: list[dict[int, Any]] = [
        getattr(nn.modules.module, f"_global{name}") for name in HOOKS
    ]
    before = [dict(registry) for registry in registries]
    for registry in registries:
        registry |= {key: in_this_thread(nothing, hook) for key, hook in registry.items()}
    try:
        yield
    finally:
        for registry, hooks in zip(registries, before, strict=True):
            registry |= {key: hook for key, hook in hooks.items() if key in registry}


def nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a hook."""
