"""Answer key: the key under which an answer of `fit` is stored in the cache.

takes: a model, a sample, a small capture, the question. returns: the key. guarantees: it includes
the source of this package, versions, the graph of a small call to the byte, and of each module its
class, the file that the class is written in, and its attributes, also inside containers,
configurations and functions (code, constants, defaults, closures): these decide the graphs of other
sizes. Not seen: what is deeper than a few containers or functions, attributes of objects without
`__dict__`, global variables, and the files of functions that a forward calls.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from rockplan.python_state import trees
from rockplan.store import documents
from rockplan.store.fingerprint import planner

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type)
_VALUES = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_DEPTH = 6
_OF_TORCH = "torch.nn."
_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module; parameters, buffers and submodules have their own lines."""


def answer_key(model: nn.Module, sample: object, graph: object, **asked: object) -> dict[str, str]:
    """Return the key under which an answer of `fit` is cached, by name: digests of model, sample
    and graph, versions, and what else was asked. graph: of a small call; asked: values whose `repr`
    says all of them."""
    return {
        "planner": planner(),
        "torch": str(torch.__version__),
        "model": _digest(_lines(model)),
        "sample": _digest(map(repr, map(_of_argument, trees.tree_leaves(sample)))),
        "graph": _digest([repr(graph)]),
        **{name: repr(value) for name, value in asked.items()},
    }


def _digest(lines: Any) -> str:
    return documents.digest([*lines])


def _lines(model: nn.Module) -> Iterator[str]:
    seen = set[int]()
    for name, module in model.named_modules():
        kind = type(module)
        yield f"{name}: {kind.__module__}.{kind.__qualname__} {module.training}"
        for of in kind.__mro__:
            if not of.__module__.startswith(_OF_TORCH):
                yield _source(of)
        own = (item for item in vars(module).items() if item[0] not in _OWN)
        yield from (f"{name}.{key} = {_described(value, seen)}" for key, value in own)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        yield f"{name}: {_shape(tensor)}"


@functools.cache
def _source(kind: type) -> str:
    """Of the file that a class is written in; its name if there is no file."""
    try:
        return hashlib.sha256(Path(inspect.getsourcefile(kind) or "").read_bytes()).hexdigest()
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"


def _shape(tensor: torch.Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return f"{tuple(tensor.shape)} {strides} {tensor.dtype} {tensor.requires_grad}"


def _of_argument(leaf: Any) -> object:
    """Content of integers, which decides what is computed; of floating-point ones shape and
    dtype."""
    if not isinstance(leaf, torch.Tensor):
        return _described(leaf)
    if leaf.is_meta or leaf.dtype.is_floating_point or leaf.layout is not torch.strided:
        return _shape(leaf)
    content = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return _shape(leaf), hashlib.sha256(content.tobytes()).hexdigest()


def _described(value: Any, seen: set[int] | None = None, depth: int = _DEPTH) -> str:
    """What is inside counts, `depth` levels deep, each object once. seen: ids of those described
    before."""
    if isinstance(value, _PLAIN + _VALUES):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _shape(value)
    seen = set() if seen is None else seen
    if isinstance(value, nn.Module) or not depth or id(value) in seen:
        return type(value).__qualname__
    seen.add(id(value))
    if isinstance(value, CodeType):
        constants = _described(value.co_consts, seen, depth - 1)
        return f"{value.co_name} {value.co_code.hex()} {value.co_names} {constants}"
    if isinstance(value, FunctionType):
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        return _described(
            [value.__code__, value.__defaults__, value.__kwdefaults__, cells], seen, depth
        )
    if isinstance(value, MethodType):
        return _described([value.__func__, value.__self__], seen, depth)
    if isinstance(value, functools.partial):
        return _described([value.func, value.args, value.keywords], seen, depth)
    if isinstance(value, list | tuple | set | frozenset):
        inside = [_described(v, seen, depth - 1) for v in value]
        return f"[{', '.join(sorted(inside) if isinstance(value, set | frozenset) else inside)}]"
    held = value if isinstance(value, Mapping) else _attributes(value)
    pairs = (f"{k!r}: {_described(v, seen, depth - 1)}" for k, v in held.items())
    return f"{type(value).__qualname__} {{{', '.join(pairs)}}}"


def _cell(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attributes(value: object) -> dict[str, Any]:
    """Hashes, of which configurations of transformers keep some, differ in each process."""
    return {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.endswith("hash")}
