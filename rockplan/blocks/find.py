"""Find: the blocks that a user names -> paths of submodules.

takes: a model; a pattern, paths, modules, or None. returns: the submodules by path, in the order of
the model; for one with several paths, the first. guarantees: none lies in another, none is the
model itself.

A module without a forward (a ModuleList, a ModuleDict) stands for its content. In a pattern '*',
'?' and '[...]' are those of `fnmatch` within one part of a path: 'model.layers.*' is the layers,
and nothing inside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from rockplan.errors import InvalidInput
from rockplan.runtime.checkpointing import has_parameters, opened, repeated_blocks
from rockplan.runtime.planned_module import Planned
from rockplan.runtime.planned_state import is_own
from rockplan.values.names import nearest

Blocks = str | nn.Module | Sequence[str | nn.Module] | None
"""Names of blocks; None: the repeated ones (`repeated_blocks`)."""

_REMEDY = (
    "name the modules that repeat, such as blocks='model.layers.*', or leave `blocks` out: then "
    "they are found"
)


def named_blocks(model: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    """Return path -> submodule for what `blocks` names (None: the repeated blocks), in the order of
    the model. Raises InvalidInput for none, the whole model, overlaps, and blocks that `solve`
    planned."""
    if blocks is None:
        paths: Iterable[str] = repeated_blocks(model)
        if not paths:
            raise InvalidInput(
                "no blocks are found: no list of modules (ModuleList, Sequential, ModuleDict) of "
                "this model holds two of one class that have parameters and submodules. Name them "
                "(blocks='encoder.stage*'), or plan the whole (rockplan.solve)"
            )
    else:
        several = [blocks] if isinstance(blocks, str | nn.Module) else blocks
        if not isinstance(several, Iterable):
            raise InvalidInput(f"blocks is a {type(blocks).__name__}; {_REMEDY}")
        named = itertools.chain.from_iterable(_paths(model, one) for one in several)
        paths = itertools.chain.from_iterable(opened(model, path) for path in named)
    identities = {id(model.get_submodule(path)) for path in paths}
    chosen = {path: m for path, m in model.named_modules() if id(m) in identities}
    if not chosen:
        raise InvalidInput(f"blocks is empty; {_REMEDY}")
    if "" in chosen:
        raise InvalidInput("the block is the whole model; plan it with rockplan.solve")
    _refuse_overlap(chosen)
    for path, module in chosen.items():
        if any(isinstance(m, Planned) and not is_own(m) for m in module.modules()):
            raise InvalidInput(
                f"block '{path}' is planned already, by solve; put the original in its place"
            )
    return chosen


def called_blocks(
    model: nn.Module, found: Mapping[str, nn.Module], called: Collection[int]
) -> dict[str, nn.Module]:
    """Return path -> submodule like `found`, in which a module that was never called, only parts of
    it (a Sequential used as a list), is replaced by the outermost parts that were called and have
    parameters. A module of which nothing was called is left out if no other of its list was called;
    if that leaves nothing, `found` is returned. called: identities of modules."""
    lists = {path.rpartition(".")[0] for path, module in found.items() if id(module) in called}
    result: dict[str, nn.Module] = {}
    for path, module in found.items():
        inner = [] if id(module) in called else [*_outermost(path, module, called)]
        if inner:
            result.update(inner)
        elif path.rpartition(".")[0] in lists:
            result[path] = module
    return result or dict(found)


def _outermost(
    path: str, module: nn.Module, called: Collection[int]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if id(child) in called and has_parameters(child):
            yield f"{path}.{name}", child
        elif id(child) not in called:
            yield from _outermost(f"{path}.{name}", child, called)


def _paths(model: nn.Module, one: object) -> list[str]:
    if isinstance(one, nn.Module):
        paths = [path for path, m in model.named_modules() if m is one]
        if not paths:
            raise InvalidInput(
                f"a block, a {type(one).__name__}, is no submodule of this model; {_REMEDY}"
            )
        return paths
    if not isinstance(one, str):
        raise InvalidInput(f"a block is a {type(one).__name__}; {_REMEDY}")
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    pattern = one.split(".")
    split = ((path, path.split(".")) for path in known)
    paths = [
        path
        for path, parts in split
        if len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
    ]
    if not paths:
        hint = f"; nearest: {nearest(one, known)}" if known else ""
        raise InvalidInput(f"blocks={one!r} names no module of this model{hint}")
    return paths


def _refuse_overlap(chosen: dict[str, nn.Module]) -> None:
    paths = {id(module): path for path, module in chosen.items()}
    for path, outer in chosen.items():
        inner = (paths[id(m)] for m in outer.modules() if m is not outer and id(m) in paths)
        for other in inner:
            raise InvalidInput(
                f"block '{other}' lies in block '{path}'; name the outer ones or the inner ones, "
                "not both"
            )
