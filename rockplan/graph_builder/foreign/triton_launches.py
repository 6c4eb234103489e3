"""Launches of Triton kernels, `kernel[grid](...)`, as calls of a plan.

While a forward is recorded, a launch is a call of an operator of ours, which reads tensors, writes
into those that the kernel's source may write into (`triton_writes`), and names everything else by a
key: the kernel, its grid, and arguments that are no tensors. In a plan the operator launches the
kernel. guarantees: all launches of one key get the same arguments except for values of tensors; a
kernel whose writes are unknown is refused by name.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import StalePlan
from rockplan.graph_builder.foreign.opaque import LIBRARY, new_packet
from rockplan.graph_builder.foreign.opaque_functions import is_plain, numbered, text_of
from rockplan.graph_builder.foreign.outcomes import Tensors, taken, with_refs
from rockplan.graph_builder.foreign.triton_writes import (
    UnknownWrites,
    parameters_written,
    plain_function,
)
from rockplan.graph_builder.operators.rows import OPAQUE
from rockplan.graph_builder.recorded.run import tensor_spec
from rockplan.graph_builder.tracing.patches import Patch
from rockplan.graph_builder.tracing.recorder import Recorder, whole_storage
from rockplan.graph_builder.tracing.refusals import NAMED

_SCHEMA = "(Tensor[] given, Tensor(a!)[] changed, str call) -> ()"
_WHY = "a plan launches the kernel itself, on tensors that have memory"

_DTYPES = "it is given the same memory as tensors of several dtypes"
_NUMBERS = (int, float, str, type(None), torch.dtype, torch.device)

Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel.

    kernel: with its autotuner, if any; leaves, structure: of its arguments by name, in the order in
    which they were given, tensors as Refs; positional: how many were given by position; options: of
    the launch. grids: (arguments set by a configuration of the autotuner, grid for these); grid:
    function for other configurations, None if it cannot be called later. changed: storages that it
    may write into, each as the place of its first tensor; the operator gets one tensor for each.
    """

    kernel: Any
    leaves: tuple[Any, ...]
    structure: Any
    positional: int
    options: tuple[tuple[str, Any], ...]
    grids: tuple[tuple[tuple[tuple[str, Any], ...], Grid], ...]
    grid: types.FunctionType | None
    tensors: Tensors
    changed: tuple[int, ...]

    def run(self, read: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
        """Launch the kernel. read: tensors in storages that it does not write into, in order;
        changed: one tensor for each changed storage."""
        waiting, written = iter(read), dict(zip(self.changed, changed, strict=True))
        tensors = [
            self._on(written[s], place) if s in written else next(waiting)
            for place, s in enumerate(self.tensors.storages)
        ]
        leaves = [taken(leaf, tensors) for leaf in self.leaves]
        named = pytree.tree_unflatten(leaves, self.structure)
        # By position as recorded: otherwise an autotuner would see another launch, and tune again.
        args = [named.pop(name) for name in list(named)[: self.positional]]
        self.kernel[self._grid](*args, **named, **dict(self.options))

    def _on(self, storage: torch.Tensor, place: int) -> torch.Tensor:
        if self.tensors.storages.count(self.tensors.storages[place]) == 1:
            return storage
        spec = self.tensors.specs[place]
        return storage.as_strided(spec.shape, spec.stride, storage.storage_offset() + spec.offset)

    def _grid(self, chosen: Mapping[str, Any]) -> Grid:
        """Return the grid for what the autotuner has chosen. Raises StalePlan if it is unknown."""
        for settings, grid in self.grids:
            if all(
                chosen.get(name) is value or chosen.get(name) == value for name, value in settings
            ):
                return grid
        if self.grid is None:
            name = plain_function(self.kernel).__qualname__
            raise StalePlan(
                f"the autotuner of the Triton kernel {name} has taken a configuration that it did "
                "not have when the forward was recorded (from a file or another process), and its "
                "grid depends on more than numbers and shapes. Run a step of the original module, "
                "and plan again"
            )
        return _sizes(self.grid(chosen))

    def key(self) -> str:
        """Return a key of 16 digits that is equal for launches that do the same."""
        function = plain_function(self.kernel)
        name = f"{function.__module__}.{function.__qualname__}"
        parts = [numbered(name, self.kernel), str(self.structure)]
        parts += [text_of(_constant(leaf)) for leaf in self.leaves]
        parts += [f"{name}={text_of(_constant(value))}" for name, value in self.options]
        parts += [str([grid for _, grid in self.grids]), repr(self.tensors), repr(self.changed)]
        parts += [str(self.positional), "" if self.grid is None else _text_of_grid(self.grid)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


LAUNCHES: dict[str, Launch] = {}
"""Launches by key."""


def patches() -> Iterator[Patch]:
    """Yield the patch of launches, if Triton was imported."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is not None:
        yield Patch(jit.KernelInterface, "__getitem__", _launcher, _WHY)


def _launcher(original: Any, recorder: Recorder) -> Any:
    def __getitem__(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if recorder.is_active():
                return _launch(kernel, grid, args, kwargs, recorder)
            return original(kernel, grid)(*args, **kwargs)

        return launch

    return __getitem__


def _launch(kernel: Any, grid: Any, args: Any, kwargs: dict[str, Any], recorder: Recorder) -> None:
    function = plain_function(kernel)
    name = getattr(function, "__qualname__", str(kernel)).replace("<locals>.", "")
    parameters = list(inspect.signature(function).parameters)
    named = dict(zip(parameters, args, strict=False))
    named |= {n: value for n, value in kwargs.items() if n in parameters}
    options = tuple(sorted((n, value) for n, value in kwargs.items() if n not in parameters))
    leaves, structure = pytree.tree_flatten(named)
    for leaf in (*leaves, *(value for _, value in options)):
        is_known = is_plain(_constant(leaf)) or type(leaf).__module__ == "triton.language.core"
        if not isinstance(leaf, torch.Tensor) and not is_known:
            what = {"kernel": name, "kind": type(leaf).__name__}
            recorder.refuse_here(NAMED["argument of a Triton kernel"].text(**what))
    try:
        written = _written(kernel, named)
    except UnknownWrites as unknown:
        recorder.refuse_here(NAMED["writes of a Triton kernel"].text(kernel=name, why=unknown))
    refs, tensors = with_refs(leaves)
    described = Tensors.of(tensors)
    is_written = [
        any(leaf is tensor for n in written for leaf in pytree.tree_leaves(named.get(n)))
        for tensor in tensors
    ]
    storages = {s for s, is_one in zip(described.storages, is_written, strict=True) if is_one}
    changed = tuple(sorted(storages))
    views = [
        [t for t, s in zip(tensors, described.storages, strict=True) if s == storage]
        for storage in changed
    ]
    if any(len({view.dtype for view in several}) > 1 for several in views):
        recorder.refuse_here(NAMED["writes of a Triton kernel"].text(kernel=name, why=_DTYPES))
    recorder.copy_before_backward_writes(views)
    grids = tuple(_grids(kernel, grid, named)) if callable(grid) else (((), _sizes(grid)),)
    launch = Launch(
        kernel=kernel,
        leaves=refs,
        structure=structure,
        positional=len(args),
        options=options,
        grids=grids,
        grid=_kept_grid(kernel, grid),
        tensors=described,
        changed=changed,
    )
    key = launch.key()
    LAUNCHES.setdefault(key, launch)
    read = [t for t, s in zip(tensors, described.storages, strict=True) if s not in storages]
    # In eager, writes of a kernel do not change version counters.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        written_into = [v[0] if len(v) == 1 else whole_storage(v[0]) for v in views]
        _operator(kernel)(read, written_into, key)


def _constant(leaf: Any) -> Any:
    is_constant = type(leaf).__name__ == "constexpr" and type(leaf).__module__.startswith("triton")
    return leaf.value if is_constant else leaf


def _layers(kernel: Any) -> Iterator[Any]:
    while kernel is not None and kernel is not plain_function(kernel):
        yield kernel
        kernel = getattr(kernel, "fn", None)


def _configurations(kernel: Any) -> list[Any]:
    return [c for layer in _layers(kernel) for c in getattr(layer, "configs", ())]


def _written(kernel: Any, named: Mapping[str, Any]) -> set[str]:
    """Return the names of arguments that a launch may write into, in the kernel or before it.
    named: the arguments by name. Raises UnknownWrites."""
    written: set[str] = set()
    for layer in _layers(kernel):
        written |= {*getattr(layer, "reset_to_zero", ()), *getattr(layer, "restore_value", ())}
        hooks = [
            *getattr(layer, "pre_run_hooks", ()),
            getattr(layer, "user_defined_pre_hook", False),
            getattr(layer, "user_defined_post_hook", False),
        ]
        if any(hooks):
            raise UnknownWrites("a function of the caller's runs before or after it (a hook)")
    configurations = _configurations(kernel)
    if any(getattr(one, "pre_hook", None) is not None for one in configurations):
        raise UnknownWrites("a function of the caller's runs before it (pre_hook)")
    leaves = {name: pytree.tree_leaves(value) for name, value in named.items()}
    values = {n: v for n, v in named.items() if not any(map(torch.is_tensor, leaves[n]))}
    chosen = [dict(one.kwargs) for one in configurations] or [{}]
    function = plain_function(kernel)
    for settings in chosen:
        written |= parameters_written(function, {**values, **settings})
    return written


def _grids(
    kernel: Any, grid: Any, named: Mapping[str, Any]
) -> Iterator[tuple[tuple[tuple[str, Any], ...], Grid]]:
    """Yield (arguments that a configuration of the autotuner sets, grid for these) for each
    configuration; one pair without an autotuner. named: the arguments by name."""
    parameters = inspect.signature(plain_function(kernel)).parameters
    known = {n: p.default for n, p in parameters.items() if p.default is not p.empty} | dict(named)
    for settings in [dict(one.all_kwargs()) for one in _configurations(kernel)] or [{}]:
        chosen = {**known, **settings}
        for layer in _layers(kernel):
            # Heuristics compute further arguments.
            for name, compute in (getattr(layer, "values", None) or {}).items():
                chosen[name] = compute(dict(chosen))
        own = tuple(sorted((n, value) for n, value in settings.items() if n in parameters))
        yield own, _sizes(grid(chosen))


def _sizes(blocks: Any) -> Grid:
    return tuple(int(size) for size in ((blocks,) if isinstance(blocks, int) else blocks))


def _kept_grid(kernel: Any, grid: Any) -> types.FunctionType | None:
    """Return the grid function with its closure frozen and fake tensors for tensors, for autotuner
    configurations that appear later. Return None if there is no such function, or if it refers to
    more than numbers and shapes."""
    if not isinstance(grid, types.FunctionType) or not _configurations(kernel):
        return None
    leaves, structure = pytree.tree_flatten(_referred(grid))
    if not all(isinstance(leaf, (torch.Tensor, *_NUMBERS)) for leaf in leaves):
        return None
    with _disable_current_modes(), FakeTensorMode():
        shapes = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor)
            else v
            for v in leaves
        ]
    cells, defaults, named = pytree.tree_unflatten(shapes, structure)
    closure = tuple(map(types.CellType, cells))
    kept = types.FunctionType(
        grid.__code__, grid.__globals__, grid.__name__, defaults, closure if cells else None
    )
    kept.__kwdefaults__ = named
    return kept


def _referred(function: types.FunctionType) -> tuple[Any, ...]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return cells, tuple(function.__defaults__ or ()), dict(function.__kwdefaults__ or {})


def _text_of_grid(grid: types.FunctionType) -> str:
    leaves, structure = pytree.tree_flatten(_referred(grid))
    texts = [repr(tensor_spec(v)) if isinstance(v, torch.Tensor) else repr(v) for v in leaves]
    return repr([numbered(grid.__qualname__, grid.__code__), str(structure), *texts])


_OPERATORS: dict[int, tuple[Any, Any]] = {}
"""id of a kernel -> the kernel (kept alive), its operator."""


def _operator(kernel: Any) -> Any:
    if id(kernel) not in _OPERATORS:
        packet = new_packet(plain_function(kernel).__qualname__)
        LIBRARY.define(f"{packet}.launch{_SCHEMA}")
        LIBRARY.impl(f"{packet}.launch", _run, "CompositeExplicitAutograd")
        fake = f"{OPAQUE}::{packet}.launch"
        torch.library.register_fake(fake, lambda *args: None, lib=LIBRARY)
        _OPERATORS[id(kernel)] = kernel, getattr(getattr(torch.ops, OPAQUE), packet).launch
    return _OPERATORS[id(kernel)][1]


def _run(given: list[torch.Tensor], changed: list[torch.Tensor], call: str) -> None:
    launch = LAUNCHES.get(call)
    if launch is None:
        raise StalePlan(
            "the plan launches a Triton kernel that was met in another process; plan the module in "
            "this one"
        )
    launch.run(given, changed)
