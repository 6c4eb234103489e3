"""Swap: functions and modes of PyTorch and of libraries, others while a forward is recorded."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import InvalidInput
from rockplan.graph_builder.tracing import foreign_kernels
from rockplan.graph_builder.tracing.recorder import PADDED, is_same_memory

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Of 446 operators of PyTorch's own database and those of its modules, these.
_CAST_INSIDE = (
    (torch, "affine_grid_generator"),
    (torch, "bilinear"),
    (nn.functional, "bilinear"),
)
_COMPILED = (
    "planning runs inside a function that is being compiled by torch.compile; plan the module "
    "before, and call the planned module there"
)
_TELLING = ("tolist", "numpy", "__repr__", "__dlpack__")
_SEEDING = (
    (torch, ("manual_seed", "seed", "set_rng_state")),
    (torch.random, ("manual_seed", "seed", "set_rng_state")),
    (torch.cuda, ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")),
)


@contextlib.contextmanager
def _exchanged(owner: Any, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """`owner` has other functions (or classes) meanwhile; other threads call what it had."""
    before = {name: getattr(owner, name) for name in replacements}
    inherited = before.keys() - vars(owner).keys()
    for name, replacement in replacements.items():
        is_class = isinstance(replacement, type)
        setattr(owner, name, replacement if is_class else _here(replacement, before[name]))
    try:
        yield
    finally:
        for name, original in before.items():
            if name in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _here(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in this thread, `elsewhere` in others."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = function if threading.get_ident() == thread else elsewhere
        return chosen(*args, **kwargs)

    return call


@contextlib.contextmanager
def transformers_sees_real_tensors() -> Iterator[None]:
    """transformers builds explicit masks where it meets fake tensors, which changes kernels;
    let it take the same path as in eager execution."""
    replaced: list[tuple[Any, Any]] = []
    for name, library in list(sys.modules.items()):
        if name.split(".")[0] == "transformers" and "is_fake_tensor" in vars(library):
            replaced.append((library, vars(library)["is_fake_tensor"]))
            library.__dict__["is_fake_tensor"] = lambda x: False
    try:
        yield
    finally:
        for library, function in replaced:
            library.__dict__["is_fake_tensor"] = function


def max_pool1d_as_unwatched() -> contextlib.AbstractContextManager[None]:
    """On CPU, where no gradient is needed, `max_pool1d` has a kernel of its own, whose result is
    contiguous; a dispatch mode leads it to the one with indices, whose result has the layout of
    its operand, and later operators round otherwise (Pooling.cpp in PyTorch)."""
    original = torch.max_pool1d

    def max_pool1d(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with_indices = input.requires_grad and torch.is_grad_enabled()
        if input.device.type == "cpu" and not with_indices:
            input = input.contiguous()
        return original(input, *args, **kwargs)

    return _exchanged(torch, {"max_pool1d": max_pool1d})


def ctc_loss_of_tensors() -> contextlib.AbstractContextManager[None]:
    """Of lengths that are numbers `ctc_loss` makes a tensor by writing into its memory, of which
    fake tensors have none; of lengths that are tensors it computes the same bits."""
    original = torch.ctc_loss

    def as_tensor(lengths: Any) -> torch.Tensor:
        is_tensor = isinstance(lengths, torch.Tensor)
        return lengths if is_tensor else torch.tensor(lengths, device="cpu")

    def ctc_loss(
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        lengths = as_tensor(input_lengths), as_tensor(target_lengths)
        return original(log_probs, targets, *lengths, *args, **kwargs)

    return _exchanged(torch, {"ctc_loss": ctc_loss})


@contextlib.contextmanager
def without_autocast_inside(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Refuse operators whose kernels call operators that autocast casts for: eager execution casts
    inside of them, where nobody sees it."""

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled(first.device.type):
                refuse(
                    f"under autocast the kernel of {name} casts inside, which a plan cannot "
                    "repeat; call it under torch.autocast(..., enabled=False)"
                )
            return original(first, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in _CAST_INSIDE:
            replacement = refusing(name, getattr(owner, name))
            stack.enter_context(_exchanged(owner, {name: replacement}))
        yield


@contextlib.contextmanager
def without_seeding(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Refuse a forward that seeds torch's generators, or gives them another state."""

    def seed(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(
            "the forward seeds torch's generator, or saves and restores its state "
            "(torch.manual_seed, torch.random.fork_rng), which a planned step would not repeat; "
            "seed before the call, or pass the numbers in as a tensor"
        )

    with contextlib.ExitStack() as stack:
        for owner, names in _SEEDING:
            stack.enter_context(_exchanged(owner, dict.fromkeys(names, seed)))
        yield


def without_checkpointing() -> contextlib.AbstractContextManager[None]:
    """Let `torch.utils.checkpoint` inside the model call its function directly: what is
    recomputed is the plan's decision, and its replay of random draws cannot be recorded."""

    def no_hooks(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class _Direct:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: Any, *args: Any) -> Any:
            return function(*args)

    names: dict[str, Callable[..., Any]] = {
        "_checkpoint_without_reentrant_generator": no_hooks,
        "CheckpointFunction": _Direct,
    }
    return _exchanged(checkpoint, names)


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """What `torch.compile` was applied to, in whatever way, runs as it is written: the compiler
    cannot run below dispatch modes, where it ends the process."""
    # Capture has hooks on every module, against which a compiled module warns when it is called.
    no_warning = {"_has_any_global_hook": lambda: False}
    try:
        eager = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise InvalidInput(_COMPILED) from error
    with eager, _exchanged(nn.modules.module, no_warning):
        yield


def refuse_compiling() -> None:
    """Raise where the compiler follows this very code."""
    follows = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)()
    if follows is not None and follows is not False:
        raise InvalidInput(_COMPILED)


@contextlib.contextmanager
def empty_cache_of_parametrizations() -> Iterator[None]:
    """A block of `torch.nn.utils.parametrize.cached()` around starts anew, and neither gets what
    is computed meanwhile nor loses what it has."""
    before = parametrize._cache
    parametrize._cache = {}
    try:
        yield
    finally:
        parametrize._cache = before


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Keep the caller's hooks on saved tensors (an activation checkpoint around the planned
    module, save_on_cpu) away from the recorded run."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


@contextlib.contextmanager
def without_logs_of_fake_tensors() -> Iterator[None]:
    """Keep from stderr the traceback that fake tensors log of an operator that fails; what it
    raised is raised all the same, and becomes an error of ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave modes of the caller in which autograd records nothing (inference mode), looks at the
    values of gradients (anomaly mode), or calls of operators go through Python (dispatch modes):
    these see the calls of planned steps, and of planning nothing."""
    anomaly = torch.autograd.set_detect_anomaly(False)
    with torch.inference_mode(False), anomaly, _disable_current_modes():
        yield


@contextlib.contextmanager
def without_hooks_on_all_modules() -> Iterator[None]:
    """Keep from this thread's calls those hooks that may be there while a module is planned: they
    follow which module runs (FlopCounterMode does so), and would follow what is not run."""
    registries: list[dict[int, Any]] = [
        getattr(nn.modules.module, f"_global{name}") for name in HOOKS
    ]
    before = [dict(registry) for registry in registries]
    for registry in registries:
        registry |= {key: _here(_nothing, hook) for key, hook in registry.items()}
    try:
        yield
    finally:
        for registry, hooks in zip(registries, before, strict=True):
            registry |= {key: hook for key, hook in hooks.items() if key in registry}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a hook."""


@contextlib.contextmanager
def values_told(read: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Methods that tell Python the values of a whole tensor, and call no operator for it, do so of
    the real tensor that `read` gives, where it gives one."""

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        def tell(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            real = read(tensor)
            if real is None:
                return original(tensor, *args, **kwargs)
            with _disable_current_modes():
                return original(real.requires_grad_(tensor.requires_grad), *args, **kwargs)

        return tell

    with contextlib.ExitStack() as stack:
        stack.enter_context(_exchanged(FakeTensor, {"tolist": telling(torch.Tensor.tolist)}))
        replacements = {name: telling(getattr(torch.Tensor, name)) for name in _TELLING}
        stack.enter_context(_exchanged(torch.Tensor, replacements))
        yield


def without_tensor_hooks(
    refuse: Callable[[str], NoReturn],
) -> contextlib.AbstractContextManager[None]:
    """Refuse hooks that the forward puts on its tensors: they would run during capture only."""

    def register_hook(self: torch.Tensor, hook: Any) -> NoReturn:
        refuse(
            "the forward registers a hook on a tensor, which would not run in a planned step; use "
            "a custom autograd.Function, or hook the parameters"
        )

    return _exchanged(torch.Tensor, {"register_hook": register_hook})


def without_nested_tensors(
    refuse: Callable[[str], NoReturn],
) -> contextlib.AbstractContextManager[None]:
    """Refuse nested tensors (of jagged layout) that the forward makes: PyTorch fails to make them
    of fake tensors before it calls an operator."""

    def new(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the forward makes a nested tensor, {PADDED}")

    return _exchanged(NestedTensor, {"__new__": new})


@contextlib.contextmanager
def without_addresses(
    is_recorded: Callable[[], bool], refuse: Callable[[str], NoReturn]
) -> Iterator[None]:
    """Refuse `data_ptr` of tensors and storages while the forward is recorded: fake tensors have no
    memory, and what is done with that of others is not seen."""

    def address(original: Callable[..., int]) -> Callable[..., int]:
        def data_ptr(owner: Any) -> int:
            # Copies of tensors ask whether there is memory.
            is_copied = sys._getframe(2).f_code is torch.Tensor.__deepcopy__.__code__
            if is_copied and isinstance(owner, FakeTensor):
                return 0
            if not is_copied and is_recorded():
                refuse(foreign_kernels.of_address(foreign_kernels.running()))
            return original(owner)

        return data_ptr

    with contextlib.ExitStack() as stack:
        for owner in (torch.Tensor, torch.UntypedStorage):
            replacement = {"data_ptr": address(owner.data_ptr)}
            stack.enter_context(_exchanged(owner, replacement))
        yield


@contextlib.contextmanager
def without_other_memory(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Refuse `tensor.data = other`: no operator is called, so nothing of it would be recorded.
    What leaves the tensor in its memory (`p.data = p.data.contiguous()`) changes nothing."""
    data: Any = torch.Tensor.data
    before = vars(torch.Tensor).get("data")

    def assign(tensor: torch.Tensor, other: torch.Tensor) -> None:
        if not is_same_memory(tensor, other):
            refuse(
                "the forward assigns to the `.data` of a tensor, which gives it other memory, and "
                "a planned run would not see it; write into it instead: "
                "`with torch.no_grad(): tensor.copy_(...)`"
            )

    assigned = _here(assign, data.__set__)
    torch.Tensor.data = property(data.__get__, assigned)  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del torch.Tensor.data
        else:
            torch.Tensor.data = before
