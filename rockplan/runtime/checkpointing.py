"""Peers: PyTorch's own checkpointing, applied to a model without changes by the user.

takes: a module. returns: functions that apply one kind of checkpointing to a copy of it.
guarantees: copies share parameters with the original and have their own buffers; `NotApplicable`
says why a kind does not apply.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from rockplan.graph_builder.operators.facts import resolve
from rockplan.graph_builder.operators.rows import ROWS
from rockplan.runtime.planned_state import class_of

Forward = Callable[..., Any]


class NotApplicable(Exception):
    """A kind of checkpointing has nothing to work on in this model."""


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy with the parameters of `model` and its own buffers."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the repeated modules, commonly called layers: the outermost modules with
    parameters and submodules of which a container holds at least two of one class. Containers
    themselves count only if there are no others: a Sequential by itself, another container by its
    content."""
    return _repeated(model, may_be_containers=False) or _repeated(model, may_be_containers=True)


def _repeated(model: nn.Module, may_be_containers: bool) -> tuple[str, ...]:
    paths: list[str] = []
    for path, container in model.named_modules():
        if not _is_container(container):
            continue
        if any(path == block or path.startswith(f"{block}.") for block in paths):
            continue
        layers = {
            name: child
            for name, child in container.named_children()
            if has_parts(child) and (may_be_containers or not _is_container(child))
        }
        count = Counter(map(class_of, layers.values()))
        repeated = (name for name, child in layers.items() if count[class_of(child)] > 1)
        inner = (opened(model, f"{path}.{name}" if path else name) for name in repeated)
        paths += [p for each in inner for p in each if has_parameters(model.get_submodule(p))]
    return tuple(paths)


def opened(model: nn.Module, path: str) -> list[str]:
    """Return the path of a module; if it is never called, those of its content."""
    module = model.get_submodule(path)
    if is_callable(module):
        return [path]
    inner = (f"{path}.{name}" if path else name for name, _ in module.named_children())
    return [found for one in inner for found in opened(model, one)]


def is_callable(module: nn.Module) -> bool:
    """True if the module has a forward. (Lists and dictionaries of modules, and modules that only
    hold others, have none.)"""
    return class_of(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or not is_callable(module)


def has_parts(module: nn.Module) -> bool:
    """True if the module has submodules and parameters."""
    return next(module.children(), None) is not None and has_parameters(module)


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def per_block(model: nn.Module) -> nn.Module:
    """Apply torch.utils.checkpoint to every repeated block."""
    return _wrapped(model, functools.partial(checkpoint, use_reentrant=False))


def selective(model: nn.Module) -> nn.Module:
    """Apply it to every repeated block, but save results of matrix products and convolutions."""
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        [resolve(row.name) for row in ROWS if row.matrix_product],
    )
    return _wrapped(model, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


def _wrapped(model: nn.Module, checkpointing: Forward) -> nn.Module:
    other = sharing_copy(model)
    paths = repeated_blocks(other)
    if not paths:
        raise NotApplicable("no list of modules holds two blocks of one class")
    for path in paths:
        block = other.get_submodule(path)
        block.forward = functools.partial(checkpointing, block.forward)
    return other


def sequential(model: nn.Module) -> nn.Module:
    """Return a copy of `model`, with the same parameters, whose longest nn.Sequential (of n
    modules) runs by torch.utils.checkpoint.checkpoint_sequential in sqrt(n) segments. Raises
    NotApplicable if none has four modules."""
    other = sharing_copy(model)
    sequentials = [m for m in other.modules() if isinstance(m, nn.Sequential) and len(m) >= 4]
    if not sequentials:
        raise NotApplicable("no nn.Sequential of at least four modules")
    chosen = max(sequentials, key=len)
    segments = round(math.sqrt(len(chosen)))
    functions = list(chosen)
    chosen.forward = functools.partial(  # type: ignore[method-assign]
        checkpoint_sequential, functions, segments, use_reentrant=False
    )
    return other
