"""Watch: is a planned module called before an optimizer has stepped twice?

takes: a planned module. guarantees: one warning for each module whose parameters an optimizer
changes twice by gradients before its first call with gradients: its forward was replaced, or its
methods, its submodules or the original are called in its place. Afterwards nothing is watched.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class Watch:
    """Steps of optimizers on parameters of a planned module that was not called yet."""

    __slots__ = ("__weakref__", "_module", "_steps")

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        self._steps = 0

    def __deepcopy__(self, memo: object) -> Watch:
        return Watch()

    def begin(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        _WAITING.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_stepped))

    def end(self) -> None:
        """Watch this module no more: it was called, or is not meant to be."""
        if self not in _WAITING:
            return
        _WAITING.discard(self)
        _ENDED.add(self)
        # Not while the hook runs: PyTorch goes through its hooks.
        if not _WAITING:
            _hooks.pop().remove()

    def _parameters(self) -> frozenset[int]:
        module = None if self._module is None else self._module()
        return frozenset() if module is None else frozenset(map(id, module.parameters()))

    def stepped(self, changed: frozenset[int]) -> None:
        """Count a step on parameters of these identities if it was one of the module's; warn of the
        second."""
        module = None if self._module is None else self._module()
        if module is not None and any(
            id(p) in changed and p.grad is not None for p in module.parameters()
        ):
            self._steps += 1
            if self._steps == 2:
                _WAITING.discard(self)
                own = self._parameters()
                if all(own.isdisjoint(watch._parameters()) for watch in _ENDED):
                    _warn(module)


_WAITING: weakref.WeakSet[Watch] = weakref.WeakSet()
_ENDED: weakref.WeakSet[Watch] = weakref.WeakSet()
"""Those of modules that were called: what trains their parameters may leave out other plans of
these, one for evaluation or under another budget."""

_hooks: list[RemovableHandle] = []
"""The one on steps of all optimizers, while a module waits for its first call."""


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    waiting = [*_WAITING]
    if waiting:
        changed = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
        for watch in waiting:
            watch.stepped(changed)


def _warn(module: nn.Module) -> None:
    if "forward" in module.__dict__:
        cause = (
            f"its forward was replaced after planning{_by(module.__dict__['forward'])}, and the "
            "new one does not call the planned one"
        )
        remedy = (
            "Replace the forward of the original first and plan the module then (for a trainer "
            "that replaces it: plan the module inside, whose forward stays), or have the new "
            "forward call the one that it replaces"
        )
    else:
        cause = "methods or parts of it, or the original, are called in its place"
        remedy = (
            "A plan is what a call of the planned module runs. Train with what rockplan.solve "
            "returned, or plan what is called: that submodule, or a module of your own whose "
            "forward makes these calls"
        )
    warnings.warn(
        f"a planned {type(module).__qualname__} is trained without its plan: an optimizer has "
        f"stepped twice before its first call, since {cause}. Such steps run as in eager, with "
        f"eager's memory. {remedy}. This is said once",
        stacklevel=_level_of_user(),
    )


def _by(function: Any) -> str:
    """Partials and methods are looked through (the own name may be that of a function that it
    wraps); '' if unknown."""
    while (inner := getattr(function, "func", getattr(function, "__func__", None))) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f" (by {code.co_qualname} at {code.co_filename}:{code.co_firstlineno})"


def _level_of_user() -> int:
    """Of the innermost frame that is neither ours nor PyTorch's; 2 if there is none."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "rockplan"):
            return level
        level, frame = level + 1, frame.f_back
    return 2
