"""Eager paths: replaced names of PyTorch and of libraries while a forward is recorded, so that it
takes the paths of eager execution; what a plan could not follow is refused.

Each function, class or variable is a row (`patches.Patch`). A new PyTorch is a diff of the rows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.operators.symbols import are_known
from rockplan.graph_builder.tracing import addresses
from rockplan.graph_builder.tracing.patches import Patch
from rockplan.graph_builder.tracing.recorder import Recorder, is_same_memory
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.python_state.hooks import is_foreign
from rockplan.python_state.memory import is_copyable
from rockplan.python_state.walk import Root, Walk

# Replacements


def _always(result: Any) -> Callable[[Any, Recorder], Any]:
    def replacement(original: Any, recorder: Recorder) -> Any:
        return lambda *args, **kwargs: result

    return replacement


def refusing(refusal: str, **facts: Any) -> Callable[[Any, Recorder], Any]:
    """Return `replacement` of a patch: a call raises this refusal (of NAMED) with these facts."""

    def replacement(original: Any, recorder: Recorder) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            recorder.refuse_here(NAMED[refusal].text(**facts))

        return refuse

    return replacement


def _max_pool1d(original: Any, recorder: Recorder) -> Any:
    def max_pool1d(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with_indices = input.requires_grad and torch.is_grad_enabled()
        if input.device.type == "cpu" and not with_indices:
            input = input.contiguous()
        pooled: torch.Tensor = original(input, *args, **kwargs)
        return pooled

    return max_pool1d


def _ctc_loss(original: Any, recorder: Recorder) -> Any:
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
    ) -> Any:
        lengths = as_tensor(input_lengths), as_tensor(target_lengths)
        return original(log_probs, targets, *lengths, *args, **kwargs)

    return ctc_loss


@contextlib.contextmanager
def _refusing_writes(
    recorder: Recorder | None, called: Sequence[Any], run_again: Callable[[], bool]
) -> Iterator[None]:
    """While active, nothing is refused; at the end writes into tensors of the caller are, if
    `run_again()` is true: eager would then run the same code again in the backward pass. called:
    function and arguments of that."""
    if recorder is None:
        yield
        return
    before = len(recorder.callers_writes())
    with _disable_current_modes():
        reached = Walk([Root("an argument", one) for one in called], stops=nn.Module)
    yield
    if not run_again():
        return
    recorder.checkpoints.append(reached)
    for call in recorder.callers_writes()[before:]:
        place = f" in module '{call.module}'" if call.module else ""
        facts = {"operator": call.call.op, "place": place}
        recorder.refuse_here(NAMED["write in a checkpoint"].text(**facts))


def _no_hooks(original: Any, recorder: Recorder) -> Any:
    """Return a replacement for `_checkpoint_without_reentrant_generator`, the generator around the
    function of a checkpoint, without its hooks on saved tensors. Eager runs the function again if
    tensors are saved; a hook to detect that would keep them alive, so it counts as run again, and
    writes to tensors of the caller's raise, if a tensor made inside requires a gradient."""

    def no_hooks(*args: Any, **kwargs: Any) -> Iterator[None]:
        before = len(recorder.made())
        with _refusing_writes(
            recorder,
            [*args, *kwargs.values()],
            lambda: any(t is not None and t.requires_grad for t in recorder.made()[before:]),
        ):
            yield

    return no_hooks


@dataclass(frozen=True, slots=True)
class _Direct:
    """Replaces the autograd.Function of reentrant checkpoints. Like any such function, its result
    requires a gradient only if one of its own tensor arguments does, whatever else it reads."""

    recorder: Recorder | None

    def apply(self, function: Callable[..., Any], preserve: Any, *args: Any) -> Any:
        """Replace `CheckpointFunction.apply`: return what the checkpoint's function returns,
        detached unless an argument requires a gradient. Eager would run it again then: writes to
        tensors of the caller's raise."""
        has_gradient = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        has_gradient = has_gradient and torch.is_grad_enabled()
        runs_again = _refusing_writes(self.recorder, [function, *args], lambda: has_gradient)
        with torch.set_grad_enabled(has_gradient), runs_again:
            result = function(*args)
        if has_gradient:
            return result
        return tuple(map(_detached, result)) if type(result) is tuple else _detached(result)


def _detached(result: Any) -> Any:
    """Return the result detached: the function may have switched gradients on."""
    return result.detach() if isinstance(result, torch.Tensor) and result.requires_grad else result


def _telling(original: Any, recorder: Recorder) -> Any:
    def tell(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        real = recorder.read_all(tensor)
        if real is None:
            return original(tensor, *args, **kwargs)
        with _disable_current_modes():
            return original(real.requires_grad_(tensor.requires_grad), *args, **kwargs)

    return tell


def _compile(original: Any, recorder: Recorder) -> Any:
    refuse = refusing("compiler")(original, recorder)

    def compile(function: Any = None, **how: Any) -> Any:
        # torch.cond and its like are refused by their names, as the operators that they come to.
        # The frame between is that of `in_this_thread`.
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        return function if caller.startswith("torch._higher_order_ops.") else refuse()

    return compile


def _data_ptr(original: Any, recorder: Recorder) -> Any:
    def data_ptr(owner: Any) -> Any:
        if recorder.is_active():
            recorder.refuse_here(addresses.of_address(addresses.running()))
        return original(owner)

    return data_ptr


def _deepcopy(original: Any, recorder: Recorder) -> Any:
    def deepcopy(tensor: torch.Tensor, memo: dict[Any, Any]) -> Any:
        is_dense = type(tensor) is torch.Tensor and is_copyable(tensor) and tensor.is_contiguous()
        if recorder.is_active() and is_dense and not (tensor.requires_grad or vars(tensor)):
            storage = tensor.untyped_storage()
            # What shares memory shares that of the copy, too.
            if storage._cdata not in memo and storage.nbytes() == tensor.nbytes:
                return memo.setdefault(storage._cdata, tensor.clone())
        return original(tensor, memo)

    return deepcopy


def _moved(original: Any, recorder: Recorder) -> Any:
    def apply(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        if all(function(tensor) is tensor for tensor in tensors):  # `expert.to(x.device)`
            return module
        try:  # PyTorch fails to move stand-ins of parameters, which have other references
            moved: nn.Module = original(module, function, recurse)
        except RuntimeError:
            recorder.refuse_here(NAMED["moved module"].text(kind=type(module).__qualname__))
        return moved

    return apply


def _data(original: Any, recorder: Recorder) -> Any:
    def assign(tensor: torch.Tensor, other: torch.Tensor) -> None:
        # Nothing is done for the memory that it has (`p.data = p.data.contiguous()`).
        if recorder.is_active() and not is_same_memory(tensor, recorder.known_tensor(other)):
            recorder.refuse_here(NAMED["other memory"].text())

    return property(original.__get__, assign)


# Rows

_SEED = refusing("seeds")
_HOOK = refusing("hook on a tensor")
_OF_SEED = "what is drawn next is another number in eager execution alone"
# Up to torch 2.13 the generator has no inner implementation.
_CHECKPOINT_HOOKS = "_checkpoint_without_reentrant_generator"
if hasattr(checkpoint, f"{_CHECKPOINT_HOOKS}_impl"):
    _CHECKPOINT_HOOKS += "_impl"
_CHECKPOINTED = (
    "what is computed again is the plan's decision, and a checkpoint's replay of draws cannot be "
    "recorded: it calls its function directly"
)
_TOLD = "tells Python the values of a whole tensor, and calls no operator for it"
_OBJECTS = (
    "collectives of objects pickle them into memory that they make, before they exchange that"
)
_ADDRESS = "fake tensors have no memory, and what is done with that of others is not seen"


def _without_our_hooks(original: Any, recorder: Recorder) -> Any:
    @contextlib.contextmanager
    def disabled(message: str) -> Iterator[None]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or is_foreign(hooks[0]):
            with original(message):
                yield
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with original(message):
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    return disabled


REENTRANT_CHECKPOINT = Patch(
    checkpoint, "CheckpointFunction", lambda original, recorder: _Direct(recorder), _CHECKPOINTED
)
TRANSFORMS_UNDER_HOOKS = Patch(
    torch.autograd.graph,
    "disable_saved_tensors_hooks",
    _without_our_hooks,
    "transforms of torch.func do not run below hooks on saved tensors; ours are no reason for that",
)
WARNING_OF_COMPILED_MODULES = Patch(
    nn.modules.module,
    "_has_any_global_hook",
    _always(False),
    "a recording has hooks on every module, against which a compiled module warns when called",
)


def _upsample(original: Any, recorder: Recorder) -> Any:
    def upsample(input: torch.Tensor, output_size: Any, *rest: Any) -> Any:
        sizes = torch._C.TensorBase.shape.__get__(input)  # type: ignore[attr-defined]
        if are_known((*sizes, *(output_size or ()))):
            return original(input, output_size, *rest)
        scales = rest[-1] or [None] * (len(sizes) - 2)
        if output_size is None:
            pairs = zip(sizes[2:], scales, strict=True)
            output_size = [torch.sym_int(size * float(scale)) for size, scale in pairs]
        operator = getattr(torch.ops.aten, original.__name__).default
        return operator(input, [*output_size], *rest[:-1], *scales)

    return upsample


_UPSAMPLES = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)

PATCHES: tuple[Patch, ...] = (
    *(
        Patch(torch._C._nn, name, _upsample, "in C++ it takes no symbols as sizes")
        for name in _UPSAMPLES
    ),
    Patch(
        "transformers",
        "is_fake_tensor",
        _always(False),
        "transformers builds explicit masks where it meets fake tensors, which changes kernels",
    ),
    Patch(
        torch,
        "max_pool1d",
        _max_pool1d,
        "on CPU, where no gradient is needed, it has a kernel of its own, whose result is "
        "contiguous; a dispatch mode leads it to the one with indices, whose result has the "
        "layout of its operand, and later operators round otherwise (Pooling.cpp in PyTorch)",
    ),
    Patch(
        torch,
        "ctc_loss",
        _ctc_loss,
        "of lengths that are numbers it makes a tensor by writing into its memory, of which fake "
        "tensors have none; of lengths that are tensors it computes the same bits",
    ),
    Patch(
        torch,
        "compile",
        _compile,
        "a call of it leaves what it knows of PyTorch in caches, where functions that are others "
        "while a forward is recorded would stay",
    ),
    Patch(checkpoint, _CHECKPOINT_HOOKS, _no_hooks, _CHECKPOINTED),
    REENTRANT_CHECKPOINT,
    Patch(FakeTensor, "tolist", lambda original, r: _telling(torch._C.TensorBase.tolist, r), _TOLD),
    Patch(torch.Tensor, "tolist", _telling, _TOLD),
    Patch(torch.Tensor, "numpy", _telling, _TOLD),
    Patch(torch.Tensor, "__repr__", _telling, _TOLD),
    Patch(torch.Tensor, "__dlpack__", _telling, _TOLD),
    Patch(torch.Tensor, "register_hook", _HOOK, "it would run while a forward is recorded alone"),
    Patch(torch.Tensor, "data_ptr", _data_ptr, _ADDRESS),
    Patch(torch.UntypedStorage, "data_ptr", _data_ptr, _ADDRESS),
    Patch(torch.Tensor, "__deepcopy__", _deepcopy, "no operator copies its memory to another"),
    Patch(nn.Module, "_apply", _moved, "fake parameters are not moved as real ones are"),
    Patch(torch.Tensor, "data", _data, "no operator is called, so nothing would be recorded"),
    Patch(
        NestedTensor,
        "__new__",
        refusing("nested tensor", tensor="what the forward makes"),
        "PyTorch fails to make them (of jagged layout) of fake tensors before it calls an operator",
    ),
    Patch("torch", "_object_to_tensor", refusing("objects between processes"), _OBJECTS),
    *(
        Patch(owner, name, _SEED, _OF_SEED)
        for owner in (torch, torch.random, torch.cuda)
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")
        if hasattr(owner, name)
    ),
)
"""Patches that hold while a forward is recorded."""
