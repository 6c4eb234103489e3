"""Tracker: the memory changes of Python code that runs over fake tensors.

takes: code that runs inside of it, under a FakeTensorMode. returns: an allocation for each new
storage and a free when it dies, in the order of eager execution: Python and autograd hold fake
tensors exactly as long as they would hold real ones. guarantees: nothing of their sizes is
allocated, except by calls that are measured (`metered`).

Temporary memory inside an operator is counted only if calls are measured.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rockplan.fitting.changes import Holding, MemoryChange
from rockplan.graph_builder.costs.ruler import rise_of
from rockplan.python_state import trees

_numbers = itertools.count()

_NO_KERNELS = ("prim", "profiler")
"""Namespaces of what is asked or noted while nothing runs."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records memory changes. owner: of memory that is allocated from now on; moved_bytes: that
    operators have read and written so far; calls: how many ran."""

    def __init__(self, owner: Holding, *, metered: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.changes: list[MemoryChange] = []
        self.moved_bytes = self.calls = 0
        self._metered = metered
        self._known: dict[int, weakref.ref[Any]] = {}

    def know(self, tensor: torch.Tensor, key: Hashable, owner: Holding) -> MemoryChange:
        """Note that `tensor` exists already, and return its allocation; its memory is given back
        when it dies."""
        change = MemoryChange(key, _bytes_of(tensor), owner)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._watch(storage, change)
        return change

    def _watch(self, storage: Any, change: MemoryChange) -> None:
        address = storage._cdata

        def freed(reference: object) -> None:
            if self._known.get(address) is reference:
                del self._known[address]
                self.changes.append(change.freed)

        self._known[address] = weakref.ref(storage, freed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and record the storages that it makes."""
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            # A number that nobody knows: sizes of an optimizer's tensors do not depend on it, as
            # they may on booleans.
            is_number = func is torch.ops.aten._local_scalar_dense.default
            if not is_number or args[0].dtype is torch.bool:
                raise
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func.namespace not in _NO_KERNELS and not func.is_view:
            self.calls += 1
            places = zip(func._schema.arguments, args, strict=False)
            written = [argument for place, argument in places if place.is_write]
            self.moved_bytes += sum(t.nbytes for t in _tensors((args, kwargs, written)))
        for leaf in _tensors(result):
            storage = leaf.untyped_storage()
            if storage._cdata not in self._known:
                self.moved_bytes += leaf.nbytes
                change = MemoryChange(next(_numbers), _bytes_of(leaf), self.owner)
                self.changes.append(change)
                self._watch(storage, change)
        if self._metered and (size_bytes := workspace_bytes(func, args, kwargs)):
            is_optimizer = self.owner is Holding.OPTIMIZER_TEMPORARIES
            owner = self.owner if is_optimizer else Holding.WORKSPACES
            inside = MemoryChange(next(_numbers), size_bytes, owner)
            self.changes += (inside, inside.freed)
        return result


def _bytes_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


_measured: dict[Hashable, int] = {}


def workspace_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that a call of the operator `func` allocates on the CPU beyond its results,
    measured on made-up tensors, once for each kind of call in this process. 0 if it does not run on
    them."""
    leaves, spec = trees.tree_flatten((args, kwargs))
    key = (str(func), str(spec), *map(_described, leaves))
    if key not in _measured:
        with _disable_current_modes():
            _measured[key] = _run(func, *trees.tree_unflatten([*map(_made_up, leaves)], spec))
    return _measured[key]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the second of two calls, at its peak, beyond new results; 0 if it fails."""
    made: list[Any] = []

    def call() -> None:
        made.append(func(*args, **kwargs))

    with contextlib.suppress(Exception), torch.no_grad():
        call()
        made.clear()
        rise = rise_of(call, torch.device("cpu"))
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        new = {t.untyped_storage()._cdata: _bytes_of(t) for t in _tensors(made)}
        return max(rise - sum(size for key, size in new.items() if key not in known), 0)
    return 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _described(leaf: Any) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type)


def _made_up(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu").zero_()
