"""ForwardCall: a run of the forward over fake tensors, in the state of eager execution."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from rockplan.errors import ForwardRaises, RockplanError
from rockplan.graph_builder.tracing import addresses, eager_paths, left_behind, modes, patches
from rockplan.graph_builder.tracing.argument_reads import ArgumentsWatched, ReadsNoted
from rockplan.graph_builder.tracing.outputs import known_output, refuse_unwritten
from rockplan.graph_builder.tracing.patches import PatchSource, in_this_thread
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.graph_builder.tracing.stand_ins import Arguments
from rockplan.graph_builder.tracing.value_reads import ValueReader
from rockplan.libraries import key_value_cache
from rockplan.python_state import trees
from rockplan.python_state.given import GivenCall

# Part of PyTorch's error when a kernel reads values of a fake tensor.
_NO_VALUES = "data is not allocated yet"
# Part of PyTorch's error for a change in place of a leaf, or of a view of one.
_WRITES_TO_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"


@dataclass(frozen=True, slots=True)
class ForwardRun:
    """One run of the forward. outputs, spec: leaves and structure of its result."""

    outputs: list[Any]
    spec: trees.TreeSpec


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A forward with fake arguments. results_of_others: positions of argument leaves that are not
    autograd leaves of the caller; foreign_rows: patches besides those of `eager_paths`; reading,
    watched: note which attributes, and which of some arguments, are read."""

    module: nn.Module
    forward: Callable[..., Any]
    arguments: Arguments
    results_of_others: Sequence[int]
    reader: ValueReader
    foreign_rows: PatchSource
    reading: ReadsNoted
    watched: ArgumentsWatched

    @contextlib.contextmanager
    def as_in_eager(self, recorder: Recorder) -> Iterator[None]:
        """While active, PyTorch and libraries take the paths of eager execution in this thread:
        gradient mode on, the caller's autocast with a weight cache of its own, patches in place."""

        torch.clear_autocast_cache()
        with (
            torch.enable_grad(),
            modes.without_compiling(),
            modes.without_hooks_on_all_modules(),
            modes.without_saved_tensor_hooks(),
            modes.without_logs_of_fake_tensors(),
            patches.patched((*eager_paths.PATCHES, *self.foreign_rows()), recorder),
            self.reading.noted(),
            self.watched.active(),
        ):
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def run(self, recorder: Recorder) -> ForwardRun:
        """Raises CaptureError for what a plan could not repeat."""
        args, kwargs = self.arguments.args, self.arguments.kwargs
        call = GivenCall.of(args, kwargs)
        with recorder, _module_paths(self.module, recorder):
            result = key_value_cache.without(_call_module(self, args, kwargs), kwargs)
        recorder.refuse_if_refused()
        left_behind.refuse_in_checkpoints(recorder.checkpoints)
        self.reader.refuse_writes()
        leaves, spec = trees.tree_flatten(call.with_contents(result))
        # Not a comprehension: in an error, its frame would keep the recorder, and so every tensor.
        known = functools.partial(known_output, recorder)
        outputs = [*map(known, range(len(leaves)), leaves)]
        refuse_unwritten(recorder, outputs)
        return ForwardRun(outputs, spec)


def _call_module(call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    results_of_others = call.results_of_others
    try:
        args, kwargs = call.watched.replaced(args, kwargs)
        return call.watched.returned(call.forward(*args, **kwargs))
    except RockplanError:
        raise
    except Exception as error:
        by_address = addresses.refusal(error, call.module)
        if by_address is not None:
            raise by_address from error
        if results_of_others and _WRITES_TO_A_LEAF in str(error):
            leaves = ", ".join(map(str, results_of_others))
            raise NAMED["argument in place"].error(leaves=leaves) from error
        if _NO_VALUES in str(error):
            raise NAMED["values of a function of PyTorch"].error() from error
        by_name = isinstance(error, TypeError) and kwargs and not args
        remedy = "; for a forward that takes one dictionary pass `(batch,)`" if by_name else ""
        raise ForwardRaises(
            f"the model's forward does not run on these arguments: {named_error(error)}. Check "
            f"their shapes, dtypes and devices by calling the original module on them{remedy}"
        ) from error


def named_error(error: Exception) -> str:
    """Return type and message of an error, without the full stop."""
    return f"{type(error).__name__}: {error}".rstrip(".: ")


@contextlib.contextmanager
def _module_paths(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    paths = {id(m): path for path, m in module.named_modules()}
    stack = recorder.module_stack

    def enter(m: nn.Module, args: Any) -> None:
        stack.append(paths.get(id(m), stack[-1]))

    def leave(m: nn.Module, args: Any, result: Any) -> None:
        stack.pop()

    elsewhere = modes.nothing
    handles = [
        module_hooks.register_module_forward_pre_hook(in_this_thread(enter, elsewhere)),
        module_hooks.register_module_forward_hook(
            in_this_thread(leave, elsewhere), always_call=True
        ),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
