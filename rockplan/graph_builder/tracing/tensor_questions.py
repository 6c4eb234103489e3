"""Questions: attributes that a forward reads from a tensor, answered as in eager execution.

A recorded run has stand-ins for the tensors of the caller, which are of another class and new.
takes: the stand-ins. guarantees: class, attributes and autograd state of a parameter, a buffer or
an argument are those of the real tensor; an answer that may differ at the next call is a
`Question`, asked again before it; a question that no plan could answer is refused.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import ShapeRule
from rockplan.graph_builder.recorded.run import RecordedCall, RecordedValue
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.graph_builder.tracing.patches import exchanged
from rockplan.graph_builder.tracing.recorder import Recorder, overrides
from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.graph_builder.tracing.source_lines import is_of_users
from rockplan.python_state.contents import described
from rockplan.python_state.memory import PLACE, answer_of
from rockplan.values.interface import ABSENT, Question

_NEVER_TOLD: dict[type, dict[str, str]] = {
    torch.Tensor: {"_version": "how often it was written to"},
    FakeTensor: {
        "__deepcopy__": "a copy with its attributes: take a clone",
        "__reduce_ex__": "a copy with its attributes: take a clone",
        "__dir__": "the names of its attributes",
        "as_subclass": "itself as one of another class",
        "is_shared": "is it in shared memory?",
        "is_pinned": "is it in pinned memory?",
        "_is_view": "is it a view?",
    },
}
"""Class -> attributes that no planned call could give, whatever their value -> meaning. (A real
tensor is none of the call's, but counts its writes.)"""

# Attributes that are allowed if they are None, which is asked again before each call.
_TOLD_IF_NONE = {"grad": "its gradient so far", "grad_fn": "what computed it"}
# Further methods that lead to the storage of a tensor.
_OF_STORAGE = ("storage", "_typed_storage")
_ATTRIBUTE = object.__getattribute__
# Attributes of fake tensors, whose names a real tensor may use for its own.
_OF_STAND_INS = frozenset(
    name for name in {*vars(FakeTensor), *FakeTensor.__annotations__} if not name.startswith("__")
)


@dataclass(slots=True)
class Questions:
    """What was asked. mode: of the stand-ins; real: id of a stand-in -> the real tensor; names: id
    of a stand-in -> (its name in messages, role, name or position), by which a planned call finds
    the real tensor; asked: the questions so far."""

    mode: FakeTensorMode
    real: Mapping[int, torch.Tensor]
    refuse: Callable[[str], NoReturn]
    names: dict[int, tuple[str, str, str | int]] = field(default_factory=dict)
    asked: dict[tuple[str, str | int, str], Question] = field(default_factory=dict)
    stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)

    def name(self, stand_in: torch.Tensor, called: str, role: str, key: str | int) -> None:
        """Register the stand-in of a tensor of the caller. called: its name in messages; role
        ('parameter', 'buffer', 'input') and key (name, position) lead a planned call to the real
        tensor. Raises CaptureError for an attribute that a fake tensor has of its own."""
        self.names.setdefault(id(stand_in), (called, role, key))
        self.stand_ins[id(stand_in)] = stand_in
        shadowed = self.real[id(stand_in)].__dict__.keys() & _OF_STAND_INS
        for attribute in sorted(shadowed):
            raise NAMED["attribute of a fake tensor"].error(tensor=called, attribute=attribute)

    @contextlib.contextmanager
    def answered(self, namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
        """While active, stand-ins answer the forward's questions as real tensors do, and questions
        that later calls must answer alike are noted. namespaces: of code that may ask `type` and
        `id`."""
        with contextlib.ExitStack() as stack:
            for owner, name, member in self._members():
                stack.enter_context(exchanged(owner, name, member))
            replacements = {"type": _Type, "id": self._id}
            for namespace in namespaces:
                stack.enter_context(_variables(namespace, replacements))
            _class_of.append(self._class)
            try:
                yield
            finally:
                _class_of.pop()
                # A mode that saw the patched functions may live on: no references to tensors.
                self.stand_ins, self.names = {}, {}
                del self.refuse

    def refuse_set(self, results: Sequence[Any]) -> None:
        """Raise CaptureError if the forward has set an attribute of a result."""
        for position, result in enumerate(results):
            if isinstance(result, FakeTensor) and id(result) not in self.names:
                for attribute in _users_attributes(result.__dict__):
                    what: Any = {"attribute": attribute, "position": position}
                    raise NAMED["attribute of a result"].error(**what)

    def _members(self) -> Iterator[tuple[type, str, Any]]:
        """Yield (class, name, member) for each member of a class that is another meanwhile."""

        def attribute(tensor: torch.Tensor, name: str) -> Any:
            return self._attribute(tensor, name, _asks_users_file())

        def class_too(tensor: torch.Tensor, name: str) -> Any:
            if name == "__class__":
                return self._class(tensor)
            if name == "__torch_function__":
                return self._function(tensor)
            if name == "__dict__" and _asks_users_file():
                self._refuse(tensor, name, "all of its attributes")
            return _ATTRIBUTE(tensor, name)

        yield FakeTensor, "__getattribute__", class_too
        yield FakeTensor, "__getattr__", attribute
        yield FakeTensor, "is_leaf", property(self._is_leaf)
        for name, what in _TOLD_IF_NONE.items():
            yield FakeTensor, name, self._if_none(name, what)
        for name in (*PLACE, *_OF_STORAGE):
            yield FakeTensor, name, self._place(name)
        for owner, names in _NEVER_TOLD.items():
            for name, what in names.items():
                yield owner, name, self._refused(name, what)
        yield type(nn.Parameter), "__instancecheck__", self._is_a()

    @property
    def inputs_asked(self) -> frozenset[int]:
        """Positions of the leaves of the arguments that were asked for anything."""
        return frozenset(int(key) for role, key, _ in self.asked if role == "input")

    def asked_for_places(self) -> list[torch.Tensor]:
        """Return stand-ins whose place in memory was asked for."""
        asked = {(role, key) for role, key, attribute in self.asked if attribute in PLACE}
        return [self.stand_ins[i] for i, (_, *name) in self.names.items() if tuple(name) in asked]

    def _real_if_users_ask(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """None if other code asks, or for a tensor that is no stand-in."""
        real = self.real.get(id(tensor))
        return real if real is not None and _asks_users_file() else None

    def _class(self, tensor: torch.Tensor) -> type:
        """FakeTensor for a fake tensor of another mode."""
        own = _ATTRIBUTE(tensor, "__dict__")
        if own.get("fake_mode") is not self.mode:
            return FakeTensor
        real = self.real.get(id(tensor))
        if real is not None:
            return type(real)
        return nn.Parameter if "_is_param" in own else torch.Tensor

    def _function(self, tensor: torch.Tensor) -> Any:
        """Return the `__torch_function__` of a fake tensor; of a stand-in that of the class of the
        real tensor, if it has one, which is told of that class."""
        kind = type(self.real.get(id(tensor), tensor))
        if not overrides(kind, "__torch_function__"):
            return _ATTRIBUTE(tensor, "__torch_function__")

        def call(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kinds = dict.fromkeys(kind if k is FakeTensor else k for k in types)
            return kind.__torch_function__(func, tuple(kinds), args, kwargs or {})

        return call

    def _is_a(self) -> Callable[[Any, Any], bool]:
        original: Any = vars(type(nn.Parameter))["__instancecheck__"]

        def is_a(kind: type, instance: object) -> bool:
            if type(instance) is FakeTensor and id(instance) in self.real:
                return isinstance(self.real[id(instance)], kind)
            return bool(original(kind, instance))

        return is_a

    def _id(self, value: object, /) -> int:
        return id(self.real.get(id(value), value))

    def ask(self, tensor: torch.Tensor, attribute: str, answer: Any) -> None:
        """Note that the forward read `attribute` of a tensor of the caller: later calls must find
        the first `answer`; ABSENT if the tensor has no such attribute."""
        name = self.names.get(id(tensor))
        if name is not None:
            _, role, key = name
            value = answer if answer is ABSENT else described(answer)
            # The first answer: what the forward itself has changed since is no condition.
            self.asked.setdefault((role, key, attribute), Question(role, key, attribute, value))

    def _attribute(self, tensor: torch.Tensor, attribute: str, is_users: bool) -> Any:
        """Return an attribute that fake tensors do not have, from the real tensor, and note the
        question; members of its class are not noted, since guards compare classes. is_users: the
        user's code asks; other code's questions on private names do not count. Raises
        AttributeError as the real tensor would."""
        real = self.real.get(id(tensor))
        answer: Any = ABSENT
        if real is not None and not attribute.startswith("__"):
            for base in type(real).__mro__:
                if attribute in vars(base):
                    member = vars(base)[attribute]
                    is_bound = hasattr(member, "__get__")
                    return member.__get__(tensor, type(real)) if is_bound else member
            answer = real.__dict__.get(attribute, ABSENT)
            if is_users or not attribute.startswith("_"):
                self.ask(tensor, attribute, answer)
        if answer is ABSENT:
            kind = self._class(tensor).__name__
            raise AttributeError(f"'{kind}' object has no attribute '{attribute}'")
        stand_ins = (self.stand_ins[identity] for identity, t in self.real.items() if t is answer)
        return next(stand_ins, answer)

    def _is_leaf(self, tensor: torch.Tensor) -> bool:
        real = self._real_if_users_ask(tensor)
        if real is None:
            return bool(torch._C.TensorBase.is_leaf.__get__(tensor))  # type: ignore[attr-defined]
        self.ask(tensor, "is_leaf", real.is_leaf)
        return real.is_leaf

    def _place(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def place(tensor: torch.Tensor) -> Any:
            if _asks_users_file():
                self.ask_place(tensor)
            return original(tensor)

        return place

    def ask_place(self, tensor: torch.Tensor, attributes: Iterable[str] = PLACE) -> None:
        """Note questions about the place in memory of all the caller's tensors on the storage of
        `tensor`. attributes: names in `PLACE`."""
        storage = torch._C.TensorBase.untyped_storage(tensor)._cdata
        for identity, stand_in in self.stand_ins.items():
            if torch._C.TensorBase.untyped_storage(stand_in)._cdata == storage:
                for attribute in attributes:
                    self.ask(stand_in, attribute, answer_of(self.real[identity], attribute))

    def _refused(self, name: str, what: str) -> Any:
        original: Any = getattr(torch.Tensor, name)
        thread = threading.get_ident()

        def ask(tensor: torch.Tensor) -> Any:
            if threading.get_ident() == thread and _asks_users_file():
                self._refuse(tensor, name, what)
            return original.__get__(tensor)

        if not callable(original):
            return property(ask)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if name == "as_subclass" and overrides(args[0], "__torch_function__"):
                kind = args[0].__qualname__
                self.refuse(NAMED["class of tensors"].text(tensor="what it computes", kind=kind))
            return ask(tensor)(*args, **kwargs)

        return call

    def _if_none(self, name: str, what: str) -> property:
        # None of the real tensor is noted as the answer, another value is refused.
        original: Any = getattr(torch.Tensor, name)

        def get(tensor: torch.Tensor) -> Any:
            real = self._real_if_users_ask(tensor)
            if real is None:
                return original.__get__(tensor)
            if getattr(real, name) is not None:
                self._refuse(tensor, name, what)
            self.ask(tensor, name, None)
            return original.__get__(tensor)

        return property(get, original.__set__)

    def _refuse(self, tensor: torch.Tensor, name: str, what: str) -> NoReturn:
        called = self.names.get(id(tensor), ("a tensor", "", ""))[0]
        self.refuse(NAMED["question"].text(tensor=called, name=name, what=what))


_class_of: list[Callable[[torch.Tensor], type]] = []
"""Stack of functions: a fake tensor -> the class that it has in eager execution."""


class _Meta(type):
    """Metaclass of the replacement for `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0])
        if kind is FakeTensor and _class_of:
            return _class_of[-1](args[0])
        return _Type if kind is type else kind

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class _Type(type, metaclass=_Meta):
    """Replaces `type` in the user's code: called with one argument, it returns the eager class."""


def _asks_users_file() -> bool:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_code.co_filename
    return is_of_users(name) or name.startswith("<")


def _users_attributes(attributes: Mapping[str, Any]) -> list[str]:
    own = {*_OF_STAND_INS, "_fake_device", "_is_param", "_is_buffer", "persistent"}
    return sorted(n for n in attributes.keys() - own if not ("_memo" in n or "_capsule" in n))


@contextlib.contextmanager
def _variables(namespace: dict[str, Any], variables: Mapping[str, Any]) -> Iterator[None]:
    """While active, a module has further global variables, where it has none of that name."""
    new = {name: value for name, value in variables.items() if name not in namespace}
    namespace.update(new)
    try:
        yield
    finally:
        for name in new:
            namespace.pop(name, None)


# Places in memory where tensors of the caller begin, which most forwards do not ask


def ask_places(recorder: Recorder, questions: Questions) -> None:
    """Make questions of the plan of the places in memory (offset, size of the storage) of the
    caller's tensors that recorded operators depend on."""
    asked: dict[int, set[str]] = defaultdict(set)
    for recorded in recorder.calls:
        for attribute in _asked_by(recorded):
            asked[recorder.values[recorded.reads[0]].storage].add(attribute)
    for stand_in in questions.stand_ins.values() if asked else ():
        if attributes := asked.get(_storage(recorder, stand_in)):
            questions.ask_place(stand_in, sorted(attributes))


def _storage(recorder: Recorder, tensor: torch.Tensor) -> int:
    return recorder.values[recorder.value(tensor)].storage


def _asked_by(recorded: RecordedCall) -> Iterator[str]:
    """Yield what a recorded call depends on of its first argument's place: 'storage_offset' and
    'untyped_storage' for an explicit storage offset, the latter for a storage that is copied."""
    operator = facts.resolve(recorded.call.op)
    arguments = dict(zip(facts.argument_names(operator), recorded.call.args, strict=False))
    if {**arguments, **dict(recorded.call.kwargs)}.get("storage_offset") is not None:
        yield from PLACE
    elif facts.facts_of(operator).shape_rule is ShapeRule.STORAGE_AS_LARGE:
        yield "untyped_storage"


def without_places(recorder: Recorder, questions: Questions) -> tuple[RecordedValue, ...]:
    """Return the recorded values with offsets relative to the first tensor in each storage of the
    caller, except in storages whose place the forward has asked for."""
    values, begins = recorder.values, dict[int, int]()
    for value in (*values[: recorder.given_values], *(values[v] for v, _ in recorder.constants)):
        begin_bytes = value.spec.offset * dtype_of(value.spec).itemsize
        begins[value.storage] = min(begins.get(value.storage, begin_bytes), begin_bytes)
    for stand_in in questions.asked_for_places():
        begins.pop(_storage(recorder, stand_in), None)
    moved = [*values]
    for i, value in enumerate(values):
        if begin_bytes := begins.get(value.storage, 0):
            offset = value.spec.offset - begin_bytes // dtype_of(value.spec).itemsize
            moved[i] = replace(value, spec=replace(value.spec, offset=offset))
    return tuple(moved)
