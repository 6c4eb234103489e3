"""Parts: parts of a model that can be planned by themselves if the whole is refused.

takes: a module, and the error that refuses it. returns: the call of `solve_blocks` that plans the
parts. guarantees: no part has a module of the class of the refused one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from rockplan.errors import CaptureError, ForwardRaises, NothingToDifferentiate
from rockplan.graph_builder.tracing.refusals import RUN_ONCE, When, around, refuse
from rockplan.runtime.checkpointing import has_parts, repeated_blocks

_HELPS_TO_RUN_ONCE = re.compile(rf"[.;:] {RUN_ONCE}", re.IGNORECASE)
"""Matches errors that the first call alone causes (and not 'if only the first call is another')."""

_PATTERNS = 4
"""Patterns that the advice writes out at most."""


@contextlib.contextmanager
def named_in_refusals(model: nn.Module) -> Iterator[None]:
    """Add to a CaptureError raised in the `with` block which parts of `model` can be planned by
    themselves, unless the remedy is another one."""
    try:
        yield
    except (ForwardRaises, NothingToDifferentiate):
        raise
    except CaptureError as error:
        if _HELPS_TO_RUN_ONCE.search(str(error)):
            raise  # one call before planning is the remedy, for the whole model
        with contextlib.suppress(CaptureError):
            refuse(When.MODULE, model)  # raises what would refuse each part, too
            error.args = (f"{error}{_advice(model, error)}",)
        raise


ADVICE = ". To plan parts of it: "


def _advice(model: nn.Module, error: CaptureError) -> str:
    """Return the sentence that says how to plan parts of the model; '' if none can be planned."""
    parts = parts_beside(model, error)
    if not parts:
        return ""
    patterns = _patterns(model, parts)
    which = f"blocks={patterns[0]!r}, " if len(patterns) == 1 else f"blocks={patterns}, "
    if len(patterns) > _PATTERNS:
        which = ""
    return (
        f"{ADVICE}rockplan.solve_blocks(model, sample, budget, {which}"
        "options=rockplan.Options(on_refused='leave')), which leaves the rest to Python"
    )


def parts_beside(model: nn.Module, error: CaptureError) -> list[str]:
    """Return the paths of the repeated blocks in which no module is of the class that `error`
    names; if there are none, of the largest other submodules like that. (What is refused in a
    module of PyTorch's is for the one that it is in.)"""
    kinds = (type(m) for m in reversed([*around(model, error.module_path or "")][1:]))
    kind = next((k for k in kinds if not k.__module__.startswith("torch.")), None)

    def is_unaffected(path: str) -> bool:
        block = model.get_submodule(path)
        return has_parts(block) and all(type(m) is not kind for m in block.modules())

    blocks = [path for path in repeated_blocks(model) if is_unaffected(path)]
    return blocks or [*_largest(model, is_unaffected)]


def _largest(model: nn.Module, is_wanted: Callable[[str], bool], path: str = "") -> Iterator[str]:
    for name, child in model.get_submodule(path).named_children():
        inner = f"{path}.{name}" if path else name
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and is_wanted(inner):
            yield inner
        else:
            yield from _largest(model, is_wanted, inner)


def _patterns(model: nn.Module, parts: Iterable[str]) -> list[str]:
    named: dict[str, list[str]] = {}
    for path, _ in model.named_modules():
        named.setdefault(re.sub(r"\b\d+\b", "*", path), []).append(path)
    wanted = set(parts)
    patterns: list[str] = []
    for pattern, paths in named.items():
        chosen = [path for path in paths if path in wanted]
        patterns += [pattern] if len(chosen) == len(paths) else chosen
    return patterns
