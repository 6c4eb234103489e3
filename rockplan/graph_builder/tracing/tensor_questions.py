"""Questions: what a forward asks a tensor about itself, answered as in eager execution.

A recorded run has stand-ins for the tensors of the caller, which are of another class and were made
a moment ago. takes: the stand-ins. guarantees: class, attributes and what autograd says of a
parameter, a buffer or an argument are those of the real tensor; what may be another at the next
call is a `Question` that is asked again before it; what no plan could answer is refused.
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

# Attributes that say of a tensor what it is for the caller alone, whatever they say.
_TOLD_ALONE = {
    "_version": "how often it was written to",
}
# Of these, None is an answer that can be asked for again before each call.
_TOLD_IF_NONE = {"grad": "its gradient so far", "grad_fn": "what computed it"}
# What else leads to the storage of a tensor.
_OF_STORAGE = ("storage", "_typed_storage")
_PLAIN_CLASSES = (torch.Tensor, nn.Parameter)
_ATTRIBUTE = object.__getattribute__
# Its own, of which a tensor may have an attribute of the same name.
_OF_STAND_INS = frozenset(
    name for name in {*vars(FakeTensor), *FakeTensor.__annotations__} if not name.startswith("__")
)


@dataclass(slots=True)
class Questions:
    """What was asked. names: identity of a stand-in -> what a message calls it, and how a planned
    call finds the real tensor: by a role and a name or position."""

    mode: FakeTensorMode
    real: Mapping[int, torch.Tensor]
    refuse: Callable[[str], NoReturn]
    names: dict[int, tuple[str, str, str | int]] = field(default_factory=dict)
    asked: dict[tuple[str, str | int, str], Question] = field(default_factory=dict)
    attributes: dict[int, frozenset[str]] = field(default_factory=dict)
    stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)

    def name(self, stand_in: torch.Tensor, called: str, role: str, key: str | int) -> None:
        """A message calls it `called`."""
        self.names.setdefault(id(stand_in), (called, role, key))
        self.stand_ins[id(stand_in)] = stand_in
        self.attributes.setdefault(id(stand_in), frozenset(stand_in.__dict__))
        shadowed = self.real[id(stand_in)].__dict__.keys() & _OF_STAND_INS
        for attribute in sorted(shadowed):
            raise NAMED["attribute of a fake tensor"].error(tensor=called, attribute=attribute)

    @contextlib.contextmanager
    def answered(self, namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Questions are answered. namespaces: global variables of the code that may ask."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_members(FakeTensor, self._members()))
            alone = {name: self._alone(name, what) for name, what in _TOLD_ALONE.items()}
            stack.enter_context(_members(torch.Tensor, alone))
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
        """A mode that has seen the functions in here holds no tensor by them."""
        self.stand_ins, self.names, self.refuse = {}, {}, _refuse_nothing

    def refuse_set(self, results: Sequence[Any]) -> None:
        """Raise where the forward has given a tensor of the caller's, or a result, an attribute."""
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
        """Stand-ins that were asked where they are in memory."""
        asked = {(role, key) for role, key, attribute in self.asked if attribute in PLACE}
        return [self.stand_ins[i] for i, (_, *name) in self.names.items() if tuple(name) in asked]

    def _asked_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor, where the user's code asks a stand-in of this recording."""
        real = self.real.get(id(tensor))
        return real if real is not None and _asks_users_file() else None

    def _class(self, tensor: torch.Tensor) -> type:
        """Of a stand-in that of the real tensor; of others what eager execution makes."""
        own = _ATTRIBUTE(tensor, "__dict__")
        if own.get("fake_mode") is not self.mode:
            return FakeTensor
        real = self.real.get(id(tensor))
        if real is not None:
            return type(real)
        return nn.Parameter if "_is_param" in own else torch.Tensor

    def _is_a(self) -> Callable[[Any, Any], bool]:
        """`isinstance` of parameters, and of classes derived from theirs."""
        original: Any = vars(type(nn.Parameter))["__instancecheck__"]

        def is_a(kind: type, instance: object) -> bool:
            if type(instance) is FakeTensor and id(instance) in self.real:
                return isinstance(self.real[id(instance)], kind)
            return bool(original(kind, instance))

        return is_a

    def _id(self, value: object, /) -> int:
        return id(self.real.get(id(value), value))

    def ask(self, tensor: torch.Tensor, attribute: str, answer: Any) -> None:
        """Each later call must find `answer` again, where `tensor` is a stand-in."""
        name = self.names.get(id(tensor))
        if name is not None:
            _, role, key = name
            told = answer if answer is ABSENT else described(answer)
            # The first answer: what the forward itself has changed since is no condition.
            self.asked.setdefault((role, key, attribute), Question(role, key, attribute, told))

    def _attribute(self, tensor: torch.Tensor, attribute: str, is_users: bool) -> Any:
        """Of a stand-in, an attribute that fake tensors do not have."""
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
        real = self.real.get(id(tensor))
        if real is None:
            own: dict[str, Any] = _ATTRIBUTE(tensor, "__dict__")
            return {name: own[name] for name in _given(own)}
        self.ask(tensor, "__dict__", real.__dict__)
        return real.__dict__

    def _directory(self) -> Callable[..., Any]:
        original = torch.Tensor.__dir__

        def directory(tensor: torch.Tensor) -> Any:
            real = self._asked_of(tensor)
            if real is None:
                return original(tensor)
            self.ask(tensor, "__dict__", real.__dict__)
            return original(real)

        return directory

    def _by_identity(self, answer: Any) -> Any:
        """Another of the caller's tensors as its stand-in."""
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
        original = getattr(torch.Tensor, name)

        def place(tensor: torch.Tensor) -> Any:
            if _asks_users_file():
                self.ask_place(tensor)
            return original(tensor)

        return place

    def ask_place(self, tensor: torch.Tensor, attributes: Iterable[str] = PLACE) -> None:
        """Of all tensors of the caller's on the storage of a fake tensor."""
        storage = torch._C.TensorBase.untyped_storage(tensor)._cdata
        for identity, stand_in in self.stand_ins.items():
            if torch._C.TensorBase.untyped_storage(stand_in)._cdata == storage:
                for attribute in attributes:
                    self.ask(stand_in, attribute, answer_of(self.real[identity], attribute))

    def _deep_copy(self) -> Callable[..., Any]:
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
            if id(tensor) not in memo:  # with the mode that it is of, which is not copied
                made = tensor.detach().clone()
                kind = {"_is_param": True} if "_is_param" in own else {}
                given = {name: own[name] for name in _given(own)}
                _ATTRIBUTE(made, "__dict__").update(kind | copy.deepcopy(given, memo))
                memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]

        return deep_copy

    def _as_subclass(self) -> Callable[..., Any]:
        def as_subclass(tensor: torch.Tensor, kind: type) -> torch.Tensor:
            if kind is not torch.Tensor:
                self.refuse(
                    f"the forward makes a {kind.__qualname__} of a tensor (as_subclass), a class "
                    "that a plan would not give back; keep to plain tensors"
                )
            plain: torch.Tensor = torch.ops.aten.alias.default(tensor)
            return plain

        return as_subclass

    def _alone(self, name: str, what: str) -> property:
        original: Any = getattr(torch._C.TensorBase, name)
        thread = threading.get_ident()

        def get(tensor: torch.Tensor) -> Any:
            """Also of tensors that are views of the caller's, or that somebody else keeps."""
            if threading.get_ident() == thread and _asks_users_file():
                self._refuse(tensor, name, what)
            return original.__get__(tensor)

        return property(get)

    def _if_none(self, name: str, what: str) -> property:
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
"""The last says what class a fake tensor stands for."""


class _Meta(type):
    """Of what stands for `type`, by which code asks for a class."""

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
    """Called with one argument, the class that it has in eager execution."""


def _refuse_nothing(message: str) -> NoReturn:
    raise AssertionError(message)


def _asks_users_file() -> bool:
    """Is what asks for an attribute code of neither PyTorch nor rockplan?"""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_code.co_filename
    return is_of_users(name) or name.startswith("<")


def _given(attributes: Mapping[str, Any]) -> list[str]:
    """Names that are none of a fake tensor's own."""
    return sorted(name for name in attributes if not (name in _OF_STAND_INS or _is_own(name)))


def _is_own(name: str) -> bool:
    """Is it an attribute that fake tensors get?"""
    return name in ("_fake_device", "_is_param", "_is_buffer", "persistent") or "_memo" in name


@contextlib.contextmanager
def _members(owner: type, members: Mapping[str, Any]) -> Iterator[None]:
    """A class has other members meanwhile."""
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
    """A file has other global variables meanwhile, where it has none of that name itself."""
    new = {name: value for name, value in variables.items() if name not in namespace}
    namespace.update(new)
    try:
        yield
    finally:
        for name in new:
            namespace.pop(name, None)
