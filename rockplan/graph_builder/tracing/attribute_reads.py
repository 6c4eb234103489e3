"""Attribute reads: the attributes of modules, and of configurations of transformers, that Python
asks for while a forward and its backward are recorded. What nobody reads makes no other kind of
call: a trainer's own marks, what a checkpoint notes in the configuration."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from rockplan.graph_builder.tracing.patches import exchanged
from rockplan.libraries import key_value_cache
from rockplan.values.interface import EVERYTHING, AttributesRead


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
