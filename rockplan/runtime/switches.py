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


def _casts(state: Autocast) -> str:
    kinds = zip(DEVICE_TYPES, state.dtypes, strict=True)
    casts = [f"{_short(d)} on {kind}" for kind, d in kinds if d is not None]
    return ", ".join(casts or ["off"]) + ("" if state.cached else ", without its cache")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _modes(modes: tuple[torch.device | int, ...]) -> str:
    texts = (str(m) if isinstance(m, torch.device) else "a TorchFunctionMode" for m in modes)
    return ", ".join(texts) or "none"


def _attention() -> int:
    """Return the identity of the code of attention, which context_parallel and other libraries
    replace, at each step by a new function of the same code."""
    function: Any = torch.nn.functional.scaled_dot_product_attention
    return id(getattr(function, "__code__", function))


def _called(_: int) -> str:
    function: Any = torch.nn.functional.scaled_dot_product_attention
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} of {getattr(function, '__module__', None) or 'torch'}"


def _handled(ways: tuple[frozenset[tuple[Any, int]], bool]) -> str:
    handled = sorted(str(operator) for operator, _ in ways[0])
    return ", ".join([*handled, *(["implicit_replication()"] if ways[1] else [])]) or "none"


_KERNELS = ("flash", "memory-efficient", "math", "cudnn")
_FLAG = ("off", "on").__getitem__

SWITCHES: tuple[tuple[str, Callable[[], Any], Callable[[Any], str]], ...] = (
    ("autocast", autocast_state, _casts),
    ("the default device", function_modes, _modes),
    ("the default dtype", torch.get_default_dtype, _short),
    (
        "kernels of attention",
        _attention_kernels,
        lambda enabled: ", ".join(itertools.compress(_KERNELS, enabled)),
    ),
    ("torch.backends.mkldnn", lambda: torch.backends.mkldnn.enabled, _FLAG),
    ("torch.backends.cudnn", lambda: torch.backends.cudnn.enabled, _FLAG),
    ("torch.nn.utils.parametrize.cached()", lambda: bool(parametrize._cache_enabled), _FLAG),
    ("scaled_dot_product_attention", _attention, _called),
    ("operators with other rules for DTensor (loss_parallel)", own_ways, _handled),
    ("hooks on all modules", _hooks_on_all_modules, lambda hooks: str(len(hooks))),
)
"""(name, how a switch is read, how a message says its value)"""


def switches_now() -> tuple[Any, ...]:
    return tuple(read() for _, read, _ in SWITCHES)


def switches_in_words() -> tuple[tuple[str, str], ...]:
    """Return (name, value in words) of each switch."""
    return tuple((name, said(read())) for name, read, said in SWITCHES)
