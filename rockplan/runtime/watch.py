"""Watch: is a planned module called before an optimizer has stepped twice?

takes: a planned module. guarantees: one warning for each module whose parameters an optimizer
changes twice by gradients before its first call with gradients. Afterwards nothing is watched.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


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
        _hooked()

    def end(self) -> None:
        """Watch this module no more: it was called, or is not meant to be."""
        if self in _WAITING:
            _WAITING.discard(self)
            _ENDED.add(self)

    def _parameters(self) -> dict[int, nn.Parameter]:
        module = None if self._module is None else self._module()
        return {} if module is None else {id(p): p for p in module.parameters()}

    def stepped(self, changed: frozenset[int]) -> None:
        """Count a step on parameters of these identities if it was one of the module's; warn of the
        second."""
        own = self._parameters()
        self._steps += any(own[i].grad is not None for i in own.keys() & changed)
        if self._steps == 2:
            _WAITING.discard(self)
            if all(own.keys().isdisjoint(watch._parameters()) for watch in _ENDED):
                assert self._module is not None
                name = type(self._module()).__qualname__
                # The caller of `optimizer.step`: between are the hook of PyTorch and two of ours.
                warnings.warn(_WITHOUT_ITS_PLAN.format(name), stacklevel=4)


_WAITING: weakref.WeakSet[Watch] = weakref.WeakSet()
_ENDED: weakref.WeakSet[Watch] = weakref.WeakSet()
"""Those of modules that were called: what trains their parameters may leave out other plans of
these, one for evaluation or under another budget."""


@functools.cache
def _hooked() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    waiting = [*_WAITING]
    if waiting:
        changed = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
        for watch in waiting:
            watch.stepped(changed)


_WITHOUT_ITS_PLAN = (
    "a planned {} is trained without its plan: an optimizer has stepped twice before its first "
    "call. Such steps run as in eager, with eager's memory. A plan is what a call of the planned "
    "module runs, not its methods, its parts or the original: train with what rockplan.solve "
    "returned, or plan what is called, that submodule or a module of your own whose forward makes "
    "these calls. If its forward was replaced after planning, replace that of the original first "
    "and plan then (for a trainer that replaces it: plan the module inside, whose forward stays), "
    "or have the new forward call the one that it replaces. This is said once"
)
