"""Left behind: what a recorded forward has changed in Python, which a planned step would not do.

takes: what the forward can reach, before and after its run. guarantees: unless refused by place,
all of it is what it was; arguments are not what the forward can compare with them by `is`;
iterators do not advance.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import RockplanError, StoredByTheFirstCall
from rockplan.graph_builder.recorded.run import RecordedCall
from rockplan.graph_builder.tracing.recorder import Recorder
from rockplan.graph_builder.tracing.refusals import NAMED, PUT_INTO_A_DICTIONARY, RUN_ONCE
from rockplan.graph_builder.tracing.value_reads import ValueReader
from rockplan.python_state import trees
from rockplan.python_state.code_names import CLOSED, compares_objects, root_package
from rockplan.python_state.elements import cached_in, is_function_cache
from rockplan.python_state.walk import (
    StateChange,
    Walk,
    is_generator,
    is_iterator,
    shown,
)


@dataclass(frozen=True, slots=True)
class RunTensors:
    """Recognizes tensors of the run. stand_ins: id of a fake tensor -> the real tensor."""

    recorder: Recorder
    reader: ValueReader
    stand_ins: Mapping[int, torch.Tensor]

    def is_ours(self, value: Any) -> bool:
        return isinstance(value, FakeTensor) and value.fake_mode is self.recorder.fake_mode

    def is_of_constants(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor depends on constants, parameters and buffers only."""
        if id(tensor) in self.stand_ins:
            return self.recorder.value(tensor) not in self.reader.inputs
        return not tensor.requires_grad and self.reader.is_of_constants(self.recorder, tensor)


def refusal(found: StateChange, before: Walk, after: Walk, made: RunTensors) -> RockplanError:
    """Return the error for what the run has changed. It is StoredByTheFirstCall if the tensors that
    it has stored depend on constants only."""
    module = found.place.module
    if is_generator(type(found.owner)):
        kind = type(found.owner).__name__
        return NAMED["generator of Python"].error(module, place=found.place, kind=kind)
    if isinstance(found.owner, torch.Tensor) and isinstance(found.former, bool):
        return NAMED["requires_grad"].error(tensor=found.place)
    stored = [t for t in after.objects if made.is_ours(t) and id(t) not in before.number]
    is_tensor = isinstance(found.now, torch.Tensor)
    row = NAMED["kept tensor" if is_tensor else "kept change"]
    holder = next((r.value for r in before.roots if r.module == module is not None), None)
    error = row.error(module, **_facts(found, is_tensor, holder))
    is_callers = any(after.root_of(after.number[id(t)]).is_callers for t in stored)
    if stored and not is_callers and all(map(made.is_of_constants, stored)):
        return StoredByTheFirstCall(str(error), module_path=module)
    return error


def _facts(found: StateChange, is_tensor: bool, holder: nn.Module | None) -> dict[str, Any]:
    place = found.place
    name = place.text.removeprefix("self.")
    who = "" if place.module is None else f"in module '{place.module or '(root)'}': "
    facts = {"who": f"{who}the forward", "place": place.text}
    facts |= {"former": shown(found.former), "now": shown(found.now)}
    if place.is_callers:
        facts["remedy"] = PUT_INTO_A_DICTIONARY[0].upper() + PUT_INTO_A_DICTIONARY[1:]
    elif is_tensor and holder is not None and name.isidentifier():
        run = f"{type(holder).__name__}.forward"
        copied = (
            "Where a library does, and nothing reads it after the call, let a copy keep it ("
            f"{run} = lambda self, *args, run={run}, **named: run(copy.copy(self), *args, **named)"
            "). "
        )  # of which buffers are those of the original
        facts["remedy"] = (
            f"Return it, or update a registered buffer in place ({place.text}.copy_(...)). "
            f"{'' if name in holder._buffers else copied}If only the first call does: {RUN_ONCE}; "
            "make tables of all sizes before"
        )
    return facts


def refuse_in_checkpoints(checkpoints: Iterable[Walk]) -> None:
    """Raise CaptureError if what the function of a checkpoint could reach has changed since."""
    for before in checkpoints:
        with _disable_current_modes():
            found = before.difference(before.again())
        if found is not None:
            facts = {"former": shown(found.former), "now": shown(found.now)}
            raise NAMED["state of a checkpoint"].error(place=found.place.text, **facts)


def refuse_cached(walk: Walk, made: RunTensors) -> None:
    """Raise CaptureError if a function cache holds a tensor of the run that depends on more than
    constants: eager finds it at the next call, a plan computes it anew."""
    for cache in filter(is_function_cache, walk.objects):
        for tensor in cached_in(cache):
            if made.is_ours(tensor) and not made.is_of_constants(tensor):
                raise NAMED["kept in a cache"].error(place=cache.__qualname__)


def refuse_fresh_constants(walk: Walk, recorder: Recorder) -> None:
    """Raise CaptureError if the run writes to a tensor that was not there before: the forward makes
    it of other data at each call, and a plan would write to the same tensor each time."""
    written: dict[int, RecordedCall] = {}
    for call in recorder.calls:
        for value in call.writes:
            written.setdefault(recorder.values[value].storage, call)
    for value, tensor in recorder.constants:
        writer = written.get(recorder.values[value].storage)
        if writer is not None and id(tensor) not in walk.number:
            raise NAMED["fresh constant"].at(writer.module, writer.source)


def refuse_kept_arguments(
    walk: Walk, arguments: tuple[Any, ...], registered: Mapping[int, torch.Tensor]
) -> None:
    """Raise CaptureError if code that compares objects by identity can reach one of the tensors of
    `arguments`, or a container of theirs, elsewhere too: these would be one object in this call,
    and two in the next. registered: id -> parameter or buffer: they may be arguments as well."""
    functions = (f for f in walk.objects if type(f) is types.FunctionType)
    forwards = (type(root.value).forward for root in walk.roots if root.module is not None)
    codes = [f.__code__ for f in (*functions, *forwards) if hasattr(f, "__code__")]
    if not any(map(compares_objects, codes)):
        return
    tensors = (t for t in trees.tree_leaves(arguments) if isinstance(t, torch.Tensor))
    given = {*map(id, tensors)} - registered.keys() | {*map(id, trees.objects(arguments))}
    for n in sorted(walk.number[i] for i in given & walk.number.keys()):
        if not walk.root_of(n).is_callers:
            raise NAMED["kept argument"].error(place=walk.place(n))


def refuse_iterators(walk: Walk) -> None:
    """Raise if an argument of the caller is an iterator."""
    for n, value in enumerate(walk.objects):
        if is_iterator(type(value)) and walk.root_of(n).is_callers:
            place, kind = walk.place(n).text, type(value).__name__
            raise NAMED["iterator as an argument"].error(place=place, kind=kind)


class NotAdvanced:
    """Replaces an iterator while a forward is recorded, and refuses to advance."""

    def __init__(self, refuse: Callable[[str], NoReturn], kind: str) -> None:
        self._refuse, self._kind = refuse, kind

    def __iter__(self) -> NotAdvanced:
        return self

    def __next__(self) -> NoReturn:
        self._refuse(NAMED["iterator of the module"].text(kind=self._kind))

    def send(self, value: object) -> NoReturn:
        """Refuse, as `__next__` does."""
        self.__next__()


def namespaces(walk: Walk, module: nn.Module) -> list[dict[str, Any]]:
    """Return the global variables of the code that may ask tensors about themselves: of the user's
    functions, and of all files of the packages of modules' classes."""
    packages = {root_package(base) for m in module.modules() for base in type(m).__mro__} - CLOSED
    names = [name for name in [*sys.modules] if name.partition(".")[0] in packages]
    loaded = (sys.modules[name] for name in names)
    spaces = [vars(file) for file in loaded if type(file) is types.ModuleType]
    functions = (f for f in walk.objects if type(f) is types.FunctionType)
    spaces += [f.__globals__ for f in functions if root_package(f) not in CLOSED]
    return [*{id(space): space for space in spaces}.values()]
