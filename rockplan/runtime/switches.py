"""Switches: PyTorch's global state that decides which operators a call of a module executes.

Autocast, modes that replace functions, the default device and dtype, kernels, rules of DTensor,
hooks on all modules: read before each call, and set as they were if a call is planned again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from rockplan.python_state.autocast import DEVICE_TYPES, Autocast, autocast_state
from rockplan.python_state.distributed import own_ways
from rockplan.python_state.hooks import foreign_hooks, is_foreign


def function_modes() -> tuple[torch.device | int, ...]:
    """Return the modes of this thread that replace functions of PyTorch (TorchFunctionMode),
    outermost first: the torch.device of the default device, the identity of a mode that is not
    PyTorch's."""
    if not torch._C._is_torch_function_mode_enabled():
        return ()
    modes: list[Any] = _get_current_function_mode_stack()
    return tuple(
        id(mode) if is_foreign(mode) else mode.device
        for mode in modes
        if isinstance(mode, DeviceContext) or is_foreign(mode)
    )


@contextlib.contextmanager
def _under_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """While active, this thread has just the modes `modes`, outermost first; afterwards its own."""
    before = _get_current_function_mode_stack()
    _exchange_modes(before, modes)
    try:
        yield
    finally:
        _exchange_modes(modes, before)


def _exchange_modes(now: Sequence[Any], wanted: Sequence[Any]) -> None:
    for _ in now:
        _pop_mode()
    for mode in wanted:
        _push_mode(mode)


@contextlib.contextmanager
def under_default_device(modes: Sequence[torch.device | int]) -> Iterator[None]:
    """While active, the only mode is the default device among `modes` (what `function_modes`
    returned at another time), none if there is no such device."""
    with _under_function_modes(()), contextlib.ExitStack() as stack:
        for device in modes:
            if isinstance(device, torch.device):
                stack.enter_context(device)
        yield


@contextlib.contextmanager
def without_default_device() -> Iterator[None]:
    """While active, the default device is off if it is the only mode: for code that says itself
    where it makes tensors. (Under a mode every function and every property of a tensor goes through
    Python.) Hooks and dispatch modes called meanwhile do not see it in eager execution either."""
    is_default_device = any(isinstance(mode, torch.device) for mode in function_modes())
    is_alone = is_default_device and torch._C._len_torch_function_stack() == 1
    aside = _pop_mode() if is_alone else None
    try:
        yield
    finally:
        if aside is not None:
            _push_mode(aside)


_OF_INITIALIZATION = ("lightning.fabric.utilities.init", "lightning_fabric.utilities.init")
"""Modules of Lightning with the mode that may leave out initializers."""


def outside_of_initialization() -> contextlib.AbstractContextManager[None]:
    """While active, the modes are off under which Lightning calls `configure_model`: they decide
    how modules are made, on which device among others, and are gone when steps run."""
    modes = _get_current_function_mode_stack()
    of_lightning = [m for m in modes if type(m).__module__ in _OF_INITIALIZATION]
    if not of_lightning:
        return contextlib.nullcontext()
    others = [m for m in modes if not (isinstance(m, DeviceContext) or m in of_lightning)]
    return _under_function_modes(others)


def _attention_kernels() -> tuple[bool, ...]:
    kernels = torch.backends.cuda
    return (
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
        kernels.cudnn_sdp_enabled(),
    )


def _hooks_on_all_modules() -> tuple[int, ...]:
    directions = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    registries = (getattr(module_hooks, f"_global_{name}") for name in directions)
    return tuple(map(id, foreign_hooks(*registries)))


Words = tuple[tuple[str, str], ...]
"""(name, value in words) of switches."""


def _autocast_words(state: Autocast) -> Words:
    kinds = zip(DEVICE_TYPES, state.dtypes, strict=True)
    casts = [f"{str(d).removeprefix('torch.')} on {k}" for k, d in kinds if d is not None]
    return ("autocast", ", ".join(casts) or "off"), *_on("the cache of autocast")(state.cached)


def _mode_words(modes: tuple[torch.device | int, ...]) -> Words:
    devices = [str(mode) for mode in modes if isinstance(mode, torch.device)]
    others = str(len(modes) - len(devices))
    return (
        ("the default device", ", ".join(devices) or "none"),
        ("modes that replace functions (TorchFunctionMode)", others),
    )


def _kernel_words(enabled: tuple[bool, ...]) -> Words:
    names = itertools.compress(("flash", "memory-efficient", "math", "cudnn"), enabled)
    return (("kernels of attention", ", ".join(names)),)


def _attention() -> int:
    """Return the identity of the code of attention, which context_parallel and other libraries
    replace, at each step by a new function of the same code."""
    function: Any = torch.nn.functional.scaled_dot_product_attention
    return id(getattr(function, "__code__", function))


def _attention_words(_: int) -> Words:
    function: Any = torch.nn.functional.scaled_dot_product_attention
    name = getattr(function, "__qualname__", type(function).__qualname__)
    place = getattr(function, "__module__", None) or "torch"
    return (("scaled_dot_product_attention", f"{name} of {place}"),)


def _ways_words(ways: tuple[frozenset[tuple[Any, int]], bool]) -> Words:
    handled = ", ".join(sorted(str(operator) for operator, _ in ways[0]))
    return (
        ("operators with other rules for DTensor (loss_parallel)", handled or "none"),
        *_on("implicit_replication() of DTensor")(ways[1]),
    )


def _on(name: str) -> Callable[[bool], Words]:
    return lambda is_on: ((name, "on" if is_on else "off"),)


SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Words]], ...] = (
    (autocast_state, _autocast_words),
    (function_modes, _mode_words),
    (torch.get_default_dtype, lambda d: (("the default dtype", str(d).removeprefix("torch.")),)),
    (_attention_kernels, _kernel_words),
    (lambda: torch.backends.mkldnn.enabled, _on("torch.backends.mkldnn")),
    (lambda: torch.backends.cudnn.enabled, _on("torch.backends.cudnn")),
    (lambda: bool(parametrize._cache_enabled), _on("torch.nn.utils.parametrize.cached()")),
    (_attention, _attention_words),
    (own_ways, _ways_words),
    (_hooks_on_all_modules, lambda hooks: (("hooks on all modules", str(len(hooks))),)),
)
"""(how a switch is read, how a message describes its value)"""


def switches_now() -> tuple[Any, ...]:
    return tuple(read() for read, _ in SWITCHES)


def switches_in_words() -> Words:
    return tuple(itertools.chain(*(words(read()) for read, words in SWITCHES)))
