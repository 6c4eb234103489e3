"""Argument and attribute reads: whether a step looks at leaves of its arguments that are believed
to be unread, and at which attributes of modules and of configurations of transformers. What nobody
reads makes no other kind of call: a trainer's own marks, what a checkpoint notes.

takes: positions of leaves; a module. guarantees: while a forward and its backward are recorded,
each use of these is noted: of numbers and text by proxies, of tensors by a mode; what is used,
returned, or kept is read.

A proxy has the class of its value for `isinstance`; what is not seen is code that asks for
`type(value)` and then leaves it alone, so nothing is unread where the user's code asks for types.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rockplan.graph_builder.tracing.patches import exchanged
from rockplan.python_state import key_value_cache, trees
from rockplan.python_state.code_names import is_library, names_in
from rockplan.values.interface import EVERYTHING, AttributesRead

_DUNDERS = re.findall(
    r"\w+",
    "add sub mul truediv floordiv mod pow lshift rshift and or xor matmul divmod radd rsub rmul "
    "rtruediv rfloordiv rmod rpow rlshift rrshift rand ror rxor rmatmul rdivmod eq ne lt le gt ge "
    "bool int float index complex len iter getitem contains hash str repr format neg pos abs "
    "invert round trunc floor ceil reduce_ex",
)


class _Watched:
    """A proxy for a number or text: what it is asked is noted, and answered by the value."""

    __slots__ = ("__weakref__", "_note", "_value")

    def __init__(self, value: Any, note: Callable[[], None]) -> None:
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_note", note)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, "_value")
        if name == "__class__":
            return type(value)
        object.__getattribute__(self, "_note")()
        return getattr(value, name)

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_without(args), **_without(kwargs or {}))


def _leaf(watched: _Watched) -> Any:
    object.__getattribute__(watched, "_note")()
    return object.__getattribute__(watched, "_value")


def _without(tree: Any) -> Any:
    leaves, spec = trees.tree_flatten(tree)
    own = (_leaf(leaf) if type(leaf) is _Watched else leaf for leaf in leaves)
    return trees.tree_unflatten(own, spec)


def _delegating(name: str) -> Callable[..., Any]:
    def call(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        return getattr(_leaf(self), name)(*_without(args), **_without(kwargs))

    return call


for _name in _DUNDERS:
    setattr(_Watched, f"__{_name}__", _delegating(f"__{_name}__"))


class _Touches(TorchFunctionMode):
    """Notes which tensors functions and properties of PyTorch are called with, but for our own
    calls. of: identity of a tensor -> its position."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self.of: dict[int, int] = {}
        self._note = note

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith("rockplan."):
            for leaf in trees.tree_leaves((args, kwargs)):
                if id(leaf) in self.of:
                    self._note(self.of[id(leaf)])
        return func(*args, **kwargs)


class ArgumentsWatched:
    """The leaves of one recording that are believed to be unread. positions: of these; reached:
    what the forward can reach."""

    def __init__(self, positions: frozenset[int], reached: Sequence[Any]) -> None:
        functions = (f for f in reached if type(f) is types.FunctionType)
        own = (f for f in functions if positions and not is_library(f.__module__))
        asks_types = any(names_in(f.__code__) & {"type", "__class__"} for f in own)
        self._positions = frozenset() if asks_types else positions
        self._read: set[int] = {*positions} - self._positions
        self._alive: list[tuple[int, weakref.ref[_Watched]]] = []
        self._touches = _Touches(self._read.add)
        self._tensors: dict[int, torch.Tensor] = {}
        self._before: dict[int, int] = {}

    def active(self) -> contextlib.AbstractContextManager[object]:
        """While active, uses of tensors are noted."""
        return self._touches if self._positions else contextlib.nullcontext()

    def replaced(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call with proxies for plain values; tensors stay."""
        if not self._positions:
            return args, kwargs
        leaves, spec = trees.tree_flatten((args, kwargs))
        for position in self._positions:
            if isinstance(leaves[position], torch.Tensor):
                self._touches.of[id(leaves[position])] = position
                self._tensors[position] = leaves[position]
                continue
            proxy = _Watched(leaves[position], functools.partial(self._read.add, position))
            self._alive.append((position, weakref.ref(proxy)))
            leaves[position] = proxy
        replaced: tuple[Any, Any] = trees.tree_unflatten(leaves, spec)
        del leaves
        self._before = self._counts()
        return replaced

    def _counts(self) -> dict[int, int]:
        return {position: sys.getrefcount(t) for position, t in self._tensors.items()}

    def returned(self, result: Any) -> Any:
        """Return the result of the forward without proxies; what is in it is read."""
        if not self._positions:
            return result
        now = self._counts()
        self._read.update(i for i, count in self._before.items() if now[i] > count)
        own = (self._touches.of.get(id(leaf)) for leaf in trees.tree_leaves(result))
        self._read.update(position for position in own if position is not None)
        return _without(result)

    def unread(self) -> frozenset[int]:
        """Return the positions that nothing has read, and nobody keeps."""
        kept = {position for position, proxy in self._alive if proxy() is not None}
        return self._positions - self._read - kept


class ReadsNoted:
    """Notes what is read of the modules in `module`, and of configurations, while `noted`."""

    def __init__(self, module: nn.Module) -> None:
        modules = [*module.modules()]
        self._names: tuple[set[str], set[str]] = set(), set()
        self._is_all = False
        self._owners: dict[type, set[str]] = {nn.Module: self._names[0]}
        for value in (v for m in modules for v in m.__dict__.values()):
            base = key_value_cache.configuration_class(type(value))
            if base is not None:
                self._owners[base] = self._names[1]
        own = {type(m).__getattribute__ for m in modules}
        self._is_all = own != {nn.Module.__getattribute__}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what this thread reads in the `with` block."""
        with contextlib.ExitStack() as stack:
            for owner, names in self._owners.items():
                original: Any = owner.__getattribute__
                noting = self._noting(original, names, threading.get_ident())
                stack.enter_context(exchanged(owner, "__getattribute__", noting))
            yield

    def _noting(
        self, original: Callable[[Any, str], Any], names: set[str], thread: int
    ) -> Callable[[Any, str], Any]:
        def read(owner: Any, name: str) -> Any:
            if name not in names and threading.get_ident() == thread:
                by = str(sys._getframe(1).f_globals.get("__name__"))
                if name == "__dict__":
                    self._is_all |= by != nn.Module.__module__ and not by.startswith("rockplan.")
                elif not by.startswith("rockplan."):
                    names.add(name)
            return original(owner, name)

        return read

    @property
    def found(self) -> AttributesRead:
        """What was read so far."""
        of_modules, of_configurations = map(frozenset, self._names)
        return EVERYTHING if self._is_all else AttributesRead(of_modules, of_configurations)
