"""Questions: attributes that a forward reads from a tensor, answered as in eager execution.

A recorded run has stand-ins for the tensors of the caller, which are of another class and new.
takes: the stand-ins. guarantees: class, attributes and autograd state of a parameter, a buffer or
an argument are those of the real tensor; an answer that may differ at the next call is a
`Question`, asked again before it; a question that no plan could answer is refused.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rockplan.graph_builder.tracing.refusals import NAMED
from rockplan.graph_builder.tracing.source_lines import is_of_users
from rockplan.python_state.answers import ASKED, PLACE, answer_of
from rockplan.python_state.contents import described
from rockplan.values.interface import ABSENT, Question

# Attributes that no planned call could give, whatever their value.
_NEVER_TOLD = {
    "_version": "how often it was written to",
}
# Attributes that are allowed if they are None, which is asked again before each call.
_TOLD_IF_NONE = {"grad": "its gradient so far", "grad_fn": "what computed it"}
# Further methods that lead to the storage of a tensor.
_OF_STORAGE = ("storage", "_typed_storage")
_PLAIN_CLASSES = (torch.Tensor, nn.Parameter)
_ATTRIBUTE = object.__getattribute__
# Attributes of fake tensors, whose names a real tensor may use for its own.
_OF_STAND_INS = frozenset(
    name for name in {*vars(FakeTensor), *FakeTensor.__annotations__} if not name.startswith("__")
)


@dataclass(slots=True)
class Questions:
    """What was asked. mode: of the stand-ins; real: id of a stand-in -> the real tensor; names: id
    of a stand-in -> (its name in messages, role, name or position), by which a planned call finds
    the real tensor; asked: the questions so far; attributes: names in `__dict__` before the run."""

    mode: FakeTensorMode
    real: Mapping[int, torch.Tensor]
    refuse: Callable[[str], NoReturn]
    names: dict[int, tuple[str, str, str | int]] = field(default_factory=dict)
    asked: dict[tuple[str, str | int, str], Question] = field(default_factory=dict)
    attributes: dict[int, frozenset[str]] = field(default_factory=dict)
    stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)

    def name(self, stand_in: torch.Tensor, called: str, role: str, key: str | int) -> None:
        """Register a stand-in. called: name in messages; role, key: how a planned call finds it."""
        self.names.setdefault(id(stand_in), (called, role, key))
        self.stand_ins[id(stand_in)] = stand_in
        self.attributes.setdefault(id(stand_in), frozenset(stand_in.__dict__))
        shadowed = self.real[id(stand_in)].__dict__.keys() & _OF_STAND_INS
        for attribute in sorted(shadowed):
            raise NAMED["attribute of a fake tensor"].error(tensor=called, attribute=attribute)

    @contextlib.contextmanager
    def answered(self, namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Answer questions while inside. namespaces: global variables of the code that may ask."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_members(FakeTensor, self._members()))
            refused = {name: self._refused(name, what) for name, what in _NEVER_TOLD.items()}
            stack.enter_context(_members(torch.Tensor, refused))
            stack.enter_context(_members(type(nn.Parameter), {"__instancecheck__": self._is_a()}))
            told = {"type": _Type, "id": self._id}
            for namespace in namespaces:
                stack.enter_context(_variables(namespace, told))
            _class_of.append(self._class)
            try:
                yield
            finally:
                _class_of.pop()
                self._forget()

    def _forget(self) -> None:
        """Drop all references to tensors: a mode that saw the patched functions may live on."""
        self.stand_ins, self.names, self.refuse = {}, {}, _refuse_nothing

    def refuse_set(self, results: Sequence[Any]) -> None:
        """Raise if the forward has set an attribute of a tensor of the caller, or of a result."""
        for position, result in enumerate(results):
            if isinstance(result, FakeTensor) and id(result) not in self.names:
                for attribute in _given(result.__dict__):
                    raise NAMED["attribute of a result"].error(
                        attribute=attribute, position=position
                    )
        for identity, (called, _, _) in self.names.items():
            stand_in = self.stand_ins[identity]
            for attribute in stand_in.__dict__.keys() - self.attributes[identity]:
                if not _is_own(attribute):
                    raise NAMED["attribute of a tensor"].error(tensor=called, attribute=attribute)

    def _members(self) -> dict[str, Any]:
        """Return the members that replace those of FakeTensor: the answers of real tensors."""

        def attribute(tensor: torch.Tensor, name: str) -> Any:
            return self._attribute(tensor, name, _asks_users_file())

        def class_too(tensor: torch.Tensor, name: str) -> Any:
            if name == "__class__":
                return self._class(tensor)
            if name == "__dict__" and _asks_users_file():
                return self._dictionary(tensor)
            return _ATTRIBUTE(tensor, name)

        members: dict[str, Any] = {
            "__getattribute__": class_too,
            "__deepcopy__": self._deep_copy(),
            "__dir__": self._directory(),
            "as_subclass": self._as_subclass(),
            "__getattr__": attribute,
            "is_leaf": property(self._is_leaf),
        }
        for name, what in _TOLD_IF_NONE.items():
            members[name] = self._if_none(name, what)
        for name in ASKED:
            members[name] = self._method(name)
        for name in (*PLACE, *_OF_STORAGE):
            members[name] = self._place(name)
        return members

    def asked_for_places(self) -> list[torch.Tensor]:
        """Return stand-ins whose place in memory was asked for."""
        asked = {(role, key) for role, key, attribute in self.asked if attribute in PLACE}
        return [self.stand_ins[i] for i, (_, *name) in self.names.items() if tuple(name) in asked]

    def _asked_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor if the user's code asks a stand-in of this recording."""
        real = self.real.get(id(tensor))
        return real if real is not None and _asks_users_file() else None

    def _class(self, tensor: torch.Tensor) -> type:
        """Return the class that the tensor has in eager execution."""
        own = _ATTRIBUTE(tensor, "__dict__")
        if own.get("fake_mode") is not self.mode:
            return FakeTensor
        real = self.real.get(id(tensor))
        if real is not None:
            return type(real)
        return nn.Parameter if "_is_param" in own else torch.Tensor

    def _is_a(self) -> Callable[[Any, Any], bool]:
        """Return `isinstance` for parameters and derived classes, as in eager execution."""
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
        `answer`."""
        name = self.names.get(id(tensor))
        if name is not None:
            _, role, key = name
            told = answer if answer is ABSENT else described(answer)
            # The first answer: what the forward itself has changed since is no condition.
            self.asked.setdefault((role, key, attribute), Question(role, key, attribute, told))

    def _attribute(self, tensor: torch.Tensor, attribute: str, is_users: bool) -> Any:
        """Return an attribute that fake tensors do not have, from the real tensor. is_users: the
        user's code asks."""
        real = self.real.get(id(tensor))
        if real is None or attribute.startswith("__"):
            kind = self._class(tensor).__name__
            raise AttributeError(f"'{kind}' object has no attribute '{attribute}'")
        for base in type(real).__mro__:
            if attribute in vars(base):
                member = vars(base)[attribute]
                is_bound = hasattr(member, "__get__")
                return member.__get__(tensor, type(real)) if is_bound else member
        answer = real.__dict__.get(attribute, ABSENT)
        if is_users or not attribute.startswith("_"):
            self.ask(tensor, attribute, answer)
        if answer is ABSENT:
            kind = type(real).__name__
            raise AttributeError(f"'{kind}' object has no attribute '{attribute}'")
        return self._by_identity(answer)

    def _dictionary(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return `__dict__` as in eager execution."""
        real = self.real.get(id(tensor))
        if real is None:
            own: dict[str, Any] = _ATTRIBUTE(tensor, "__dict__")
            return {name: own[name] for name in _given(own)}
        self.ask(tensor, "__dict__", real.__dict__)
        return real.__dict__

    def _directory(self) -> Callable[..., Any]:
        """Return a `__dir__` that answers as the real tensor does."""
        original = torch.Tensor.__dir__

        def directory(tensor: torch.Tensor) -> Any:
            real = self._asked_of(tensor)
            if real is None:
                return original(tensor)
            self.ask(tensor, "__dict__", real.__dict__)
            return original(real)

        return directory

    def _by_identity(self, answer: Any) -> Any:
        """Return the stand-in if the answer is a tensor of the caller, else the answer."""
        for identity, real in self.real.items():
            if real is answer:
                return self.stand_ins[identity]
        return answer

    def _is_leaf(self, tensor: torch.Tensor) -> bool:
        real = self._asked_of(tensor)
        if real is None:
            return bool(torch._C.TensorBase.is_leaf.__get__(tensor))  # type: ignore[attr-defined]
        self.ask(tensor, "is_leaf", real.is_leaf)
        return real.is_leaf

    def _method(self, name: str) -> Callable[..., Any]:
        """Return a method that answers as the real tensor does, and notes the question."""
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            real = self._asked_of(tensor)
            if real is None:
                return original(tensor, *args, **kwargs)
            answer = answer_of(real, name)
            self.ask(tensor, name, answer)
            return answer

        return method

    def _place(self, name: str) -> Callable[..., Any]:
        """Return a method that notes a question about the tensor's place in memory."""
        original = getattr(torch.Tensor, name)

        def place(tensor: torch.Tensor) -> Any:
            if _asks_users_file():
                self.ask_place(tensor)
            return original(tensor)

        return place

    def ask_place(self, tensor: torch.Tensor, attributes: Iterable[str] = PLACE) -> None:
        """Note questions about the place of all caller's tensors on a fake's storage."""
        storage = torch._C.TensorBase.untyped_storage(tensor)._cdata
        for identity, stand_in in self.stand_ins.items():
            if torch._C.TensorBase.untyped_storage(stand_in)._cdata == storage:
                for attribute in attributes:
                    self.ask(stand_in, attribute, answer_of(self.real[identity], attribute))

    def _deep_copy(self) -> Callable[..., Any]:
        """Return a `__deepcopy__` for fake tensors that copies as in eager execution."""
        original = torch.Tensor.__deepcopy__

        def deep_copy(tensor: torch.Tensor, memo: Any) -> Any:
            real = self._asked_of(tensor)
            if real is not None and (real.__dict__ or type(real) not in _PLAIN_CLASSES):
                self.refuse(
                    f"the forward copies {self.names[id(tensor)][0]} with its attributes "
                    "(copy.deepcopy), of which a plan has none; copy it outside, or clone it"
                )
            own: dict[str, Any] = _ATTRIBUTE(tensor, "__dict__")
            if own.get("fake_mode") is not self.mode or not tensor.is_leaf:
                return original(tensor, memo)
            if (
                id(tensor) not in memo
            ):  # made by an operator: the fake mode itself must not be copied
                made = tensor.detach().clone()
                kind = {"_is_param": True} if "_is_param" in own else {}
                given = {name: own[name] for name in _given(own)}
                _ATTRIBUTE(made, "__dict__").update(kind | copy.deepcopy(given, memo))
                memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]

        return deep_copy

    def _as_subclass(self) -> Callable[..., Any]:
        """Return an `as_subclass` that refuses subclasses."""

        def as_subclass(tensor: torch.Tensor, kind: type) -> torch.Tensor:
            if kind is not torch.Tensor:
                self.refuse(
                    f"the forward makes a {kind.__qualname__} of a tensor (as_subclass), a class "
                    "that a plan would not give back; keep to plain tensors"
                )
            plain: torch.Tensor = torch.ops.aten.alias.default(tensor)
            return plain

        return as_subclass

    def _refused(self, name: str, what: str) -> property:
        """Return a property that raises a refusal if the user's code reads it. what: its
        meaning."""
        original: Any = getattr(torch._C.TensorBase, name)
        thread = threading.get_ident()

        def get(tensor: torch.Tensor) -> Any:
            """Refuse, also for views of the caller's tensors and for tensors kept elsewhere."""
            if threading.get_ident() == thread and _asks_users_file():
                self._refuse(tensor, name, what)
            return original.__get__(tensor)

        return property(get)

    def _if_none(self, name: str, what: str) -> property:
        """Return a property that raises a refusal if it is not None on the real tensor."""
        original: Any = getattr(torch.Tensor, name)

        def get(tensor: torch.Tensor) -> Any:
            real = self._asked_of(tensor)
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


def _refuse_nothing(message: str) -> NoReturn:
    raise AssertionError(message)


def _asks_users_file() -> bool:
    """Return whether the code that reads an attribute is neither PyTorch's nor rockplan's."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_code.co_filename
    return is_of_users(name) or name.startswith("<")


def _given(attributes: Mapping[str, Any]) -> list[str]:
    """Return names of attributes that are not a fake tensor's own."""
    return sorted(name for name in attributes if not (name in _OF_STAND_INS or _is_own(name)))


def _is_own(name: str) -> bool:
    """Return whether fake tensors get an attribute of this name."""
    return name in ("_fake_device", "_is_param", "_is_buffer", "persistent") or "_memo" in name


@contextlib.contextmanager
def _members(owner: type, members: Mapping[str, Any]) -> Iterator[None]:
    """Replace members of a class while inside."""
    before = {name: vars(owner)[name] for name in members if name in vars(owner)}
    for name, member in members.items():
        setattr(owner, name, member)
    try:
        yield
    finally:
        for name in members:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def _variables(namespace: dict[str, Any], variables: Mapping[str, Any]) -> Iterator[None]:
    """Add global variables to a module while inside, where it has none of that name."""
    new = {name: value for name, value in variables.items() if name not in namespace}
    namespace.update(new)
    try:
        yield
    finally:
        for name in new:
            namespace.pop(name, None)
