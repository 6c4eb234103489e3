"""Files with a model that keeps something in Python, drawn at random, for `benchmarks/fuzz.py`.

A case is the text of a file, as a user would write it: a class `Net`, a caller that passes
arguments and may change things between steps, and what the caller reads afterwards. Families:

    state       where something is kept x what it is x when it changes
    asked       a tensor is asked about itself: class, attributes, history, memory, identity
    history     the forward writes into a tensor that is not its own
    given       containers, iterators, callbacks of the caller
    alias       two arguments that are one, arguments that the module holds as well
    registered  a parameter or buffer that is held elsewhere, too
    result      attributes on the result, results that are state, functions or iterators
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

STEPS = (
    ("train", "train", "train"),
    ("train", "evaluate", "train"),
    ("train", "another size", "train"),
    ("evaluate", "train", "train"),
    ("train", "train", "train", "without gradients", "train"),
)
"""What a training loop does, one step after another."""


@dataclass(frozen=True, slots=True)
class Case:
    """source: the file with `Net`, `arguments`, `change` and `seen`; other: a file that it
    imports as `other`; needs_gradient: the argument x requires one."""

    name: str
    source: str
    other: str = ""
    steps: tuple[str, ...] = STEPS[0]
    needs_gradient: bool = False

    @property
    def family(self) -> str:
        return self.name.split(":")[0]

    def __str__(self) -> str:
        other = f"\n# --- other ---\n{self.other}" if self.other.strip() else ""
        needs = "; x requires a gradient" if self.needs_gradient else ""
        return f"{self.name}; {', '.join(self.steps)}{needs}\n{self.source}{other}"


# --- Text ----------------------------------------------------------------------------------------


def fill(template: str, **parts: str) -> str:
    """`template` with `<name>` replaced; a line that is a name alone may become several, or none,
    all as far from the margin."""
    lines = []
    for line in template.splitlines():
        alone = re.fullmatch(r"( *)<(\w+)>", line)
        if alone and alone[2] in parts:
            inner = parts[alone[2]].strip("\n")
            lines += [alone[1] + one if one else "" for one in inner.splitlines()]
        else:
            lines.append(_inline(line, parts))
    return "\n".join(lines) + "\n"


def _inline(line: str, parts: dict[str, str]) -> str:
    return re.sub(r"<(\w+)>", lambda found: parts.get(found[1], found[0]), line)


HEADER = """
import argparse
import array
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import queue
import random
import sys
import threading
import types
import typing
import weakref

import numpy as np
import torch
from torch import nn

import <other> as other


class Mode(enum.Enum):
    A = 2
    B = 3


@dataclasses.dataclass
class Box:
    kept: object = None


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept):
        self.kept = kept


class Thing:
    def __init__(self, kept):
        self.kept = kept


class Pair(typing.NamedTuple):
    kept: object
    number: int = 1


class Special(nn.Parameter):
    pass
"""

# The keeper of the state is the model itself, or each of its parts.
_KEEPER = """
class <keeper>(<base>):
    <body>

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        <init>

    def forward(self, x<parameters>):
        <before>
        h = torch.tanh(self.a(x))
        <block>
        return <result>
"""

_NET_OF_PARTS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(<count>))
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.b(x)
"""

_CALLER = """
def arguments(caller, model, x, number):
    <arguments>


def change(caller, model, x, number):
    for self in <owners>:
        <change>


def seen(caller, model, x):
    return [read(caller, self, x) for self in <owners>]


def read(caller, self, x):
    try:
        return <read>
    except (AttributeError, LookupError, TypeError):
        return None


def cleanup():
    <cleanup>
"""


def file_of(
    *,
    top: str = "",
    base: str = "nn.Module",
    body: str = "pass",
    init: str = "pass",
    parameters: str = "",
    before: str = "pass",
    block: str = "pass",
    result: str = "self.b(h)",
    parts: int = 0,
    arguments: str = "return (x,), {}",
    change: str = "pass",
    read: str = "None",
    cleanup: str = "pass",
) -> str:
    """parts: how many submodules keep the state in place of the model."""
    keeper = fill(
        _KEEPER,
        keeper="Part" if parts else "Net",
        base=base,
        body=body,
        init=init,
        parameters=parameters,
        before=before,
        block=block,
        result="h" if parts else result,
    )
    text = HEADER + "\n\n" + top.strip("\n") + "\n\n" + keeper
    if parts:
        text += "\n" + fill(_NET_OF_PARTS, count=str(parts))
    return text + fill(
        _CALLER,
        arguments=arguments,
        change=change,
        read=read,
        owners="model.parts" if parts else "[model]",
        cleanup=cleanup,
    )


# --- What is kept --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """Expressions. make: in a forward, of h, x and self; use: h from a value <v>; start: before the
    first call; after: the value after <v>; given: by the caller, of number; alter: a statement that
    changes a value <v> where it is. has_history: it cannot be used in a later call's backward."""

    name: str
    make: str
    use: str
    start: str
    given: str
    after: str = ""
    alter: str = ""
    has_history: bool = False
    is_hashable: bool = True
    is_tensor: bool = False


def _tensor(
    name: str,
    make: str,
    has_history: bool = False,
    use: str = "h + 0.5 * <v>",
    start: str = "<t>",
) -> Content:
    """start: an expression of a tensor <t>."""
    return Content(
        name,
        make,
        use,
        start=start.replace("<t>", "torch.full((8,), 0.25)"),
        given=start.replace("<t>", "torch.full((8,), 0.25 + number)"),
        alter="with torch.no_grad(): <v>.add_(0.5)" if start == "<t>" else "",
        has_history=has_history,
        is_tensor=True,
    )


def _plain(
    name: str, make: str, use: str, start: str, given: str, after: str, alter: str = ""
) -> Content:
    is_hashable = name not in ("list of numbers", "dictionary of numbers", "array")
    return Content(name, make, use, start, given, after, alter, is_hashable=is_hashable)


CONTENTS = (
    _tensor("activation", "h", has_history=True),
    _tensor("mean of an activation", "h.pow(2).mean()", has_history=True),
    _tensor("detached activation", "h.detach()"),
    _tensor("detached clone", "h.detach().clone()"),
    _tensor("detached mean", "h.mean(0).detach()"),
    _tensor("the argument", "x"),
    _tensor("the parameter", "self.a.weight[0]", has_history=True),
    _tensor("the buffer", "self.scale"),
    _tensor("table", "torch.arange(8.0).cos()"),
    _tensor("table by length", "torch.arange(float(x.shape[0])).view(-1, 1).cos()"),
    _tensor("mask by length", "torch.ones(x.shape[0], 8).tril()"),
    _tensor("random table", "torch.randn(8)"),
    _tensor("table like the argument", "torch.zeros_like(x) + 0.5"),
    _tensor("new leaf", "torch.full((8,), 0.5, requires_grad=True)", has_history=True),
    _tensor("tensors in a tuple", "(h.detach(), 1)", use="h + <v>[0]", start="(<t>, 1)"),
    _tensor("tensors in a dictionary", "{'h': h.detach()}", use="h + <v>['h']", start="{'h': <t>}"),
    _tensor(
        "function over an activation", "lambda: h.detach()", use="h + <v>()", start="lambda: <t>"
    ),
    _tensor("node of autograd", "h.grad_fn", has_history=True, use="h"),
    _tensor(
        "storage",
        "h.detach().untyped_storage()",
        use="h * (1 + <v>.nbytes() % 3)",
        start="<t>.untyped_storage()",
    ),
    _plain("count", "x.shape[0]", "h * (1 + <v>)", "0", "number", "<v> + 1"),
    _plain("float", "x.shape[0] / 3", "h * (1 + <v>)", "0.5", "0.5 + number", "<v> * 0.5"),
    _plain("string", "'n' * x.shape[0]", "h * (1 + len(<v>))", "'a'", "'a' * number", "<v> + 'a'"),
    _plain(
        "list of numbers",
        "[1.0] * x.shape[0]",
        "h * (1 + sum(<v>))",
        "[1.0]",
        "[1.0] * number",
        "<v> + [1.0]",
        "<v>.append(1.0)",
    ),
    _plain(
        "dictionary of numbers",
        "{'n': x.shape[0]}",
        "h * (1 + sum(<v>.values()))",
        "{'n': 1}",
        "{'n': number}",
        "{'n': <v>['n'] + 1}",
        "<v>['n'] += 1",
    ),
    _plain(
        "array",
        "np.ones(8) * x.shape[0]",
        "h * (1.0 + float(<v>.sum()))",
        "np.ones(8)",
        "np.ones(8) * number",
        "<v> + 1",
        "np.add(<v>, 1, out=<v>)",
    ),
    _plain(
        "scalar of numpy",
        "np.float64(x.shape[0])",
        "h * float(1 + <v>)",
        "np.float64(0.5)",
        "np.float64(number)",
        "<v> + np.float64(1)",
    ),
    _plain("flag", "x.shape[0] > 1", "(h * 2 if <v> else h)", "False", "number > 0", "not <v>"),
    _plain(
        "enum",
        "Mode.B",
        "h * <v>.value",
        "Mode.A",
        "Mode.B if number else Mode.A",
        "Mode.B if <v> is Mode.A else Mode.A",
    ),
    _plain("shape", "tuple(x.shape)", "h * <v>[0]", "(1, 8)", "(1 + number, 8)", "(<v>[0] + 1, 8)"),
    _plain("size", "x.shape", "h * <v>[0]", "torch.Size((1, 8))", "torch.Size((1, 8))", "x.shape"),
    _plain(
        "dtype",
        "h.dtype",
        "(h * 2 if <v> is torch.float32 else h)",
        "torch.float64",
        "torch.float32 if number else torch.float64",
        "h.dtype",
    ),
)


# --- Where it is kept ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Base:
    """A name. at: in the forward; outside: for the caller, as something that can be assigned to.
    Texts have <holder> for the value at first, <block> for what the forward does with it.
    can_rebind: another object may be put there. persists: the caller passes one object in all
    steps. parts: in how many submodules it may be, 0 for the model itself."""

    name: str
    at: str
    outside: str = ""
    top: str = ""
    other: str = ""
    base: str = "nn.Module"
    body: str = "pass"
    init: str = "pass"
    parameters: str = ""
    before: str = "pass"
    block: str = "<block>"
    arguments: str = "return (x,), {}"
    cleanup: str = "pass"
    put: str = ""
    can_rebind: bool = True
    parts: tuple[int, ...] = (0, 0, 1, 2)


_IN_A_FUNCTION = "h = keep(self, x, h)"

BASES = (
    Base("attribute", "self.kept", init="self.kept = <holder>"),
    Base(
        "attribute by its dictionary",
        "self.__dict__['kept']",
        init="self.__dict__['kept'] = <holder>",
    ),
    Base(
        "attribute by setattr",
        "getattr(self, 'kept')",
        outside="self.kept",
        init="self.kept = <holder>",
        put="setattr(self, 'kept', <v>)",
    ),
    Base(
        "attribute behind a property",
        "self.kept",
        body="""
@property
def kept(self):
    return self._hidden[0]

@kept.setter
def kept(self, value):
    self._hidden[0] = value
""",
        init="self._hidden = [<holder>]",
    ),
    Base("class attribute", "type(self).kept", body="kept = <holder>"),
    Base(
        "attribute of a base class",
        "Root.kept",
        top="class Root(nn.Module):\n    kept = <holder>",
        base="Root",
    ),
    Base(
        "attribute of a class of PyTorch",
        "nn.Linear.kept",
        top="nn.Linear.kept = <holder>",
        cleanup="if hasattr(nn.Linear, 'kept'): del nn.Linear.kept",
    ),
    Base(
        "attribute of another class",
        "Store.kept",
        top="class Store:\n    kept = <holder>",
    ),
    Base("global", "KEPT", top="KEPT = <holder>", before="global KEPT"),
    Base("global by globals()", "globals()['KEPT']", top="KEPT = <holder>"),
    Base("global of a file, by its module", "sys.modules[__name__].KEPT", top="KEPT = <holder>"),
    Base("global of another file", "other.KEPT", other="KEPT = <holder>"),
    Base(
        "global of another file, by a function",
        "KEPT",
        outside="other.KEPT",
        other="""
KEPT = <holder>

def keep(self, x, h):
    global KEPT
    <block>
    return h
""",
        block="h = other.keep(self, x, h)",
    ),
    Base("helper object", "STORE.kept", top="STORE = types.SimpleNamespace(kept=<holder>)"),
    Base(
        "helper object of another file",
        "other.STORE.kept",
        other="STORE = types.SimpleNamespace(kept=<holder>)",
    ),
    Base(
        "singleton",
        "Store.instance().kept",
        top="""
class Store:
    the_one = None

    def __init__(self):
        self.kept = <holder>

    @classmethod
    def instance(cls):
        if cls.the_one is None:
            cls.the_one = cls()
        return cls.the_one
""",
    ),
    Base(
        "cell of a closure",
        "kept",
        outside="CELL.cell_contents",
        top="""
def make():
    kept = <holder>

    def keep(self, x, h):
        nonlocal kept
        <block>
        return h

    return keep

keep = make()
CELL = dict(zip(keep.__code__.co_freevars, keep.__closure__))["kept"]
""",
        block=_IN_A_FUNCTION,
    ),
    Base(
        "cell of a closure on the module",
        "kept",
        outside="self.cell.cell_contents",
        top="""
def make():
    kept = <holder>

    def keep(self, x, h):
        nonlocal kept
        <block>
        return h

    return keep
""",
        init="""
self.keep = make()
self.cell = dict(zip(self.keep.__code__.co_freevars, self.keep.__closure__))["kept"]
""",
        block="h = self.keep(self, x, h)",
    ),
    Base(
        "function attribute",
        "keep.kept",
        top="""
def keep(self, x, h):
    <block>
    return h

keep.kept = <holder>
""",
        block=_IN_A_FUNCTION,
    ),
    Base(
        "default argument of forward",
        "kept",
        outside="next(f for k in type(self).__mro__ "
        "if (f := getattr(vars(k).get('forward'), '__defaults__', None)))[0]",
        parameters=", kept=<holder>",
        can_rebind=False,
    ),
    Base(
        "default argument of forward by keyword",
        "kept",
        outside="type(self).forward.__kwdefaults__['kept']",
        parameters=", *, kept=<holder>",
        can_rebind=False,
    ),
    Base(
        "default argument of a function",
        "kept",
        outside="keep.__defaults__[0]",
        top="""
def keep(self, x, h, kept=<holder>):
    <block>
    return h
""",
        block=_IN_A_FUNCTION,
        can_rebind=False,
    ),
    Base(
        "argument of a partial",
        "kept",
        outside="PARTIAL.keywords['kept']",
        top="""
def keep(self, x, h, kept):
    <block>
    return h

PARTIAL = functools.partial(keep, kept=<holder>)
""",
        block="h = PARTIAL(self, x, h)",
        can_rebind=False,
    ),
    Base(
        "local of a thread",
        "LOCAL.kept",
        top="LOCAL = threading.local()\nLOCAL.kept = <holder>",
    ),
    Base(
        "local of a thread on the module",
        "self.local.kept",
        init="self.local = threading.local()\nself.local.kept = <holder>",
    ),
    Base(
        "context variable",
        "KEPT.get()",
        top="KEPT = contextvars.ContextVar('kept')\nKEPT.set(<holder>)",
        put="KEPT.set(<v>)",
    ),
    Base(
        "weak dictionary by module",
        "STORE[self]",
        parts=(1, 2),  # A planned module is another object than the original.
        top="STORE = weakref.WeakKeyDictionary()",
        init="STORE[self] = <holder>",
    ),
    Base(
        "weak dictionary by submodule",
        "STORE[self.a]",
        top="STORE = weakref.WeakKeyDictionary()",
        init="STORE[self.a] = <holder>",
    ),
    Base(
        "dictionary by id of the module",
        "STORE[id(self)]",
        parts=(1, 2),  # A planned module is another object than the original.
        top="STORE = {}",
        init="STORE[id(self)] = <holder>",
    ),
    Base(
        "dictionary of a class by size",
        "type(self).tables[x.shape[1]]",
        body="tables = {8: <holder>}",
    ),
    Base("attribute of a parameter", "self.a.weight.kept", init="self.a.weight.kept = <holder>"),
    Base("attribute of a buffer", "self.scale.kept", init="self.scale.kept = <holder>"),
    Base(
        "attribute of an argument",
        "x.kept",
        arguments="x.kept = <holder>\nreturn (x,), {}",
        parts=(0,),
    ),
    Base(
        "attribute of a kept tensor",
        "self.table.kept",
        init="self.table = torch.ones(8)\nself.table.kept = <holder>",
    ),
    Base("attribute of a submodule", "self.a.kept", init="self.a.kept = <holder>"),
    Base(
        "attribute of a module that is not registered",
        "self.hidden[0].kept",
        init="self.hidden = [nn.Identity()]\nself.hidden[0].kept = <holder>",
    ),
    Base(
        "argument",
        "given",
        outside="caller.given",
        parameters=", given",
        arguments="caller.given = <holder>\nreturn (x, caller.given), {}",
        can_rebind=False,
        parts=(0,),
    ),
    Base(
        "argument by keyword",
        "given",
        outside="caller.given",
        parameters=", *, given=None",
        arguments="caller.given = <holder>\nreturn (x,), {'given': caller.given}",
        can_rebind=False,
        parts=(0,),
    ),
    Base(
        "argument that the caller keeps",
        "given",
        outside="caller.given",
        parameters=", given",
        arguments="""
if not hasattr(caller, "given"):
    caller.given = <holder>
return (x, caller.given), {}
""",
        can_rebind=False,
        parts=(0,),
    ),
)


@dataclass(frozen=True, slots=True)
class Container:
    """How the value is held at a base <c>. Where it is a collection: add, values, pop, clear."""

    name: str
    suffix: str
    holder: str
    empty: str = ""
    present: str = ""
    put: str = ""
    add: str = ""
    values: str = "<c>"
    pop: str = "<c>.pop()"
    only: Callable[[Content], bool] = field(default=lambda content: True)

    @property
    def replaces(self) -> bool:
        """The whole container is put at its base again, or there is none."""
        return not self.suffix or "<c> =" in self.put


CONTAINERS = (
    Container("itself", "", "<start>"),
    Container("list", "[0]", "[<start>]", "[]", "len(<c>) > 0", "", "<c>.append(<v>)"),
    Container("list by insert", "[0]", "[<start>]", "[]", "<c>", "", "<c>.insert(0, <v>)"),
    Container("list by extend", "[0]", "[<start>]", "[]", "<c>", "", "<c>.extend([<v>])"),
    Container(
        "list by slice", "[0]", "[<start>]", "[]", "<c>", "<c>[:] = [<v>]", "<c>[:0] = [<v>]"
    ),
    Container(
        "dict",
        "['h']",
        "{'h': <start>}",
        "{}",
        "'h' in <c>",
        "",
        "<c>[len(<c>)] = <v>",
        "<c>.values()",
        "<c>.popitem()[1]",
    ),
    Container(
        "dict by update",
        "['h']",
        "{'h': <start>}",
        "{}",
        "'h' in <c>",
        "<c>.update(h=<v>)",
        "<c>.setdefault(len(<c>), <v>)",
        "<c>.values()",
        "<c>.pop(next(iter(<c>)))",
    ),
    Container(
        "dict by size",
        "[h.shape[1]]",
        "{8: <start>}",
        "{}",
        "h.shape[1] in <c>",
    ),
    Container(
        "deque",
        "[0]",
        "collections.deque([<start>], maxlen=20)",
        "collections.deque(maxlen=20)",
        "<c>",
        "",
        "<c>.append(<v>)",
        pop="<c>.popleft()",
    ),
    Container(
        "full deque",
        "[0]",
        "collections.deque([<start>], maxlen=1)",
        "collections.deque(maxlen=1)",
        "<c>",
        "<c>.append(<v>)",
        "<c>.append(<v>)",
    ),
    Container("tuple", "[0]", "(<start>,)", "()", "<c>", "<c> = (<v>,)"),
    Container("named tuple", ".kept", "Pair(<start>)", "", "", "<c> = <c>._replace(kept=<v>)"),
    Container(
        "OrderedDict",
        "['h']",
        "collections.OrderedDict(h=<start>)",
        "collections.OrderedDict()",
        "'h' in <c>",
        "",
        "<c>[len(<c>)] = <v>",
        "<c>.values()",
        "<c>.popitem()[1]",
    ),
    Container(
        "defaultdict",
        "['h']",
        "collections.defaultdict(lambda: None, h=<start>)",
        "collections.defaultdict(list)",
        "'h' in <c>",
        "",
        "<c>['all'].append(<v>)",
        "<c>['all']",
        "<c>['all'].pop()",
    ),
    Container(
        "Counter",
        "['h']",
        "collections.Counter(h=<start>)",
        "collections.Counter()",
        "'h' in <c>",
        only=lambda content: content.name in ("count", "float"),
    ),
    Container(
        "set",
        "",
        "<start>",
        "set()",
        "len(<c>) > 0",
        "",
        "<c>.add(<v>)",
        "sorted(<c>, key=str)",
        only=lambda content: content.is_hashable,
    ),
    Container(
        "UserDict", "['h']", "collections.UserDict(h=<start>)", "collections.UserDict()", "<c>"
    ),
    Container("UserList", "[0]", "collections.UserList([<start>])"),
    Container("ChainMap", "['h']", "collections.ChainMap({}, {'h': <start>})"),
    Container("mapping proxy", "['h']", "types.MappingProxyType({'h': <start>})", put="pass"),
    Container("array of objects", "[0]", "np.array([<start>, None], dtype=object)"),
    Container("dict of lists", "['a'][0]", "{'a': [<start>]}", "{'a': []}", "<c>['a']"),
    Container("list of dicts", "[0]['h']", "[{'h': <start>}]", "[{}]", "<c>[0]"),
    Container("tuple of lists", "[0][0]", "([<start>],)", "([],)", "<c>[0]"),
    Container("list of objects", "[0].kept", "[Thing(<start>)]"),
    Container("dict of slots", "['h'].kept", "{'h': Slotted(<start>)}"),
    Container(
        "namespace",
        ".kept",
        "types.SimpleNamespace(kept=<start>)",
        "types.SimpleNamespace()",
        "hasattr(<c>, 'kept')",
    ),
    Container("dataclass", ".kept", "Box(<start>)"),
    Container("slots", ".kept", "Slotted(<start>)"),
    Container(
        "Namespace of argparse",
        ".kept",
        "argparse.Namespace(kept=<start>)",
        "argparse.Namespace()",
        "'kept' in <c>",
    ),
    Container("object", ".kept", "Thing(<start>)", "", "", "setattr(<c>, 'kept', <v>)"),
    Container("object in an object", ".kept.kept", "Thing(Box(<start>))"),
    Container("object with a list", ".kept[0]", "Thing([<start>])"),
    Container("cell", ".cell_contents", "types.CellType(<start>)", "types.CellType()", "", ""),
)


# --- When it changes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """block: what the forward does, with <at> for the value, <put X> written as PUT(X), ADD(X) for
    an element more. start: 'none', 'empty' (of the container), 'start' (of the content), 'many'."""

    name: str
    block: str
    start: str = "none"
    change: str = "pass"
    needs: Callable[[Content, Container], bool] = field(default=lambda content, container: True)


def _is_repeatable(content: Content, container: Container) -> bool:
    return not content.has_history


def _adds(content: Content, container: Container) -> bool:
    return bool(container.add)


def _adds_repeatable(content: Content, container: Container) -> bool:
    return bool(container.add) and not content.has_history


MOMENTS = (
    Moment(
        "set once",
        "if <at> is None:\n    PUT(<make>)\nh = USE(<at>)",
        needs=_is_repeatable,
    ),
    Moment(
        "set once if absent",
        "if not (<present>):\n    PUT_NEW(<make>)\nh = USE(<at>)",
        "empty",
        needs=lambda content, container: bool(
            container.present and container.suffix and not content.has_history
        ),
    ),
    Moment(
        "replaced, read in the next call",
        "new = <make>\nif <at> is not None:\n    h = USE(<at>)\nPUT(new)",
        needs=_is_repeatable,
    ),
    Moment("replaced, then read", "PUT(<make>)\nh = USE(<at>)"),
    Moment("replaced, for the caller", "PUT(<make>)"),
    Moment("put there and cleared again", "PUT(<make>)\nh = USE(<at>)\nPUT(None)"),
    Moment(
        "put there and put back",
        "before = <at>\nPUT(<make>)\nh = USE(<at>)\nPUT(before)",
        "start",
    ),
    Moment(
        "each other call",
        "if <at> is None:\n    PUT(<make>)\nelse:\n    h = h * 2\n    PUT(None)",
    ),
    Moment(
        "counted",
        "PUT(<after>)\nh = USE(<at>)",
        "start",
        needs=lambda content, container: bool(content.after),
    ),
    Moment(
        "counted, not read",
        "PUT(<after>)",
        "start",
        needs=lambda content, container: bool(content.after),
    ),
    Moment("in the first call alone", "if <at> is None:\n    PUT(<make>)\n    h = h * 2"),
    Moment(
        "in training alone",
        "if self.training:\n    PUT(<make>)\nif <at> is not None:\n    h = USE(<at>)",
        needs=_is_repeatable,
    ),
    Moment(
        "in evaluation alone",
        "if not self.training:\n    PUT(<make>)\nif <at> is not None:\n    h = USE(<at>)",
        needs=_is_repeatable,
    ),
    Moment(
        "without gradients alone",
        "if not torch.is_grad_enabled():\n    PUT(<make>)\nif <at> is not None:\n    h = USE(<at>)",
        needs=_is_repeatable,
    ),
    Moment("changed by the caller", "h = USE(<at>)", "given", "if number:\n    OUTSIDE(<given>)"),
    Moment(
        "changed by the caller and counted",
        "PUT(<after>)\nh = USE(<at>)",
        "start",
        "if number == 2:\n    OUTSIDE(<given>)",
        needs=lambda content, container: bool(content.after),
    ),
    Moment("constant", "h = USE(<at>)", "given"),
    Moment(
        "changed where it is",
        "h = USE(<at>)\n<alter>",
        "start",
        needs=lambda content, container: bool(content.alter),
    ),
    Moment(
        "changed where it is, then read",
        "<alter>\nh = USE(<at>)",
        "start",
        needs=lambda content, container: bool(content.alter),
    ),
    Moment("appended", "ADD(<make>)", "empty", needs=_adds),
    Moment(
        "appended and read",
        "ADD(<make>)\nfor value in list(<values>)[-2:]:\n    h = USE(value)",
        "empty",
        needs=_adds_repeatable,
    ),
    Moment(
        "cleared and refilled",
        "<c>.clear()\nADD(<make>)\nfor value in list(<values>):\n    h = USE(value)",
        "empty",
        needs=_adds,
    ),
    Moment(
        "refilled, then cleared",
        "ADD(<make>)\nfor value in list(<values>):\n    h = USE(value)\n<c>.clear()",
        "empty",
        needs=_adds,
    ),
    Moment("popped", "h = USE(<pop>)", "many", needs=_adds),
    Moment(
        "popped again",
        "ADD(<make>)\nh = USE(<pop>)",
        "empty",
        needs=_adds,
    ),
)

_MAKE_MANY = """
def many(container):
    for number in range(1, 13):
        <add>
    return container
"""


def can_be(base: Base, container: Container, content: Content, moment: Moment) -> bool:
    """Does the combination make sense?"""
    is_set = container.name == "set"
    puts = "PUT" in moment.block or "OUTSIDE" in moment.change
    needs_item = "<at>" in moment.block or puts
    return (
        container.only(content)
        and moment.needs(content, container)
        and not (is_set and needs_item)
        and not (container.put == "pass" and puts)
        and not (needs_item and not container.suffix and not base.can_rebind)
        and not (puts and container.replaces and not base.can_rebind)
        and not (moment.start == "empty" and not container.empty)
        and not (is_set and "<pop>" in moment.block)  # Python does not say which goes next
    )


def state_case(
    base: Base,
    container: Container,
    content: Content,
    moment: Moment,
    parts: int = 0,
    steps: tuple[str, ...] = STEPS[0],
) -> Case:
    """The file for one combination."""
    holder = _holder(container, content, moment)
    inside, outside = base.at, base.outside or base.at
    block = _code(moment.block, base, container, content, inside)
    change = _code(moment.change, base, container, content, outside)
    texts = {"holder": holder, "block": block}
    init = fill(base.init, **texts)
    top = fill(base.top, **texts)
    other = fill(base.other, **texts)
    many = ""
    if moment.start == "many":
        add = container.add.replace("<c>", "container").replace("<v>", content.given)
        many = fill(_MAKE_MANY, add=add)
    source = file_of(
        top=many + top,
        base=base.base,
        body=fill(base.body, **texts),
        init=init,
        parameters=_inline(base.parameters, texts),
        before=base.before,
        block=fill(base.block, **texts),
        parts=parts,
        arguments=fill(base.arguments, **texts),
        change=f"{base.before}\n{change}" if base.before.startswith("global") else change,
        read=outside,
        cleanup=base.cleanup,
    )
    where = base.name if container.name == "itself" else f"{base.name}, {container.name}"
    place = f" of {parts} submodules" if parts else ""
    name = f"state: {where}{place} / {content.name} / {moment.name}"
    if other.strip():
        other = HEADER.replace("import <other> as other\n", "") + many + "\n" + other
    return Case(name, source, other, steps)


def _holder(container: Container, content: Content, moment: Moment) -> str:
    if moment.start == "empty":
        return container.empty
    if moment.start == "many":
        return f"many({container.empty})"
    start = {
        "none": "None",
        "start": content.start,
        "given": content.given.replace("number", "1"),
    }[moment.start]
    return container.holder.replace("<start>", start)


def _code(code: str, base: Base, container: Container, content: Content, at_base: str) -> str:
    """`code` with what stands for the place and the content replaced."""
    at = at_base + container.suffix

    def put(value: str) -> str:
        if container.put and not (container.put.startswith("<c> =") and base.put):
            return container.put.replace("<c>", at_base).replace("<v>", value)
        if base.put and container.put:
            whole = container.put.removeprefix("<c> = ").replace("<c>", at_base)
            return base.put.replace("<v>", whole.replace("<v>", value))
        if base.put and not container.suffix:
            return base.put.replace("<v>", value)
        return f"{at} = {value}"

    def put_new(value: str) -> str:
        """Where nothing is there yet."""
        if not container.put and container.suffix == "[0]":
            return f"{at_base}.append({value})"
        if container.name in ("tuple of lists", "dict of lists"):
            return f"{at.removesuffix('[0]')}.append({value})"
        return put(value)

    used = content.use
    code = code.replace("<make>", content.make).replace("<given>", content.given)
    code = code.replace("<after>", content.after.replace("<v>", at))
    code = code.replace("<alter>", content.alter.replace("<v>", at))
    code = code.replace("<present>", container.present.replace("<c>", at_base))
    code = code.replace("<values>", container.values.replace("<c>", at_base))
    code = code.replace("<pop>", container.pop.replace("<c>", at_base))
    code = code.replace("<c>", at_base).replace("<at>", at)
    code = _replaced(code, "PUT_NEW", put_new)
    code = _replaced(code, "PUT", put)
    code = _replaced(code, "OUTSIDE", put)
    code = _replaced(code, "ADD", lambda v: container.add.replace("<c>", at_base).replace("<v>", v))
    return _replaced(code, "USE", lambda v: used.replace("<v>", v))


def _replaced(code: str, word: str, by: Callable[[str], str]) -> str:
    """`word(argument)` replaced, with the parentheses in the argument."""
    lines = []
    for line in code.splitlines():
        found = re.search(rf"\b{word}\(", line)
        if found:
            end = _closing(line, found.end())
            line = line[: found.start()] + by(line[found.end() : end]) + line[end + 1 :]
        lines.append(line)
    return "\n".join(lines)


def _closing(line: str, start: int) -> int:
    depth = 1
    for position in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if not depth:
            return position
    raise ValueError(line)


def draw_state(rng: random.Random) -> Case:
    while True:
        base, container = rng.choice(BASES), rng.choice(CONTAINERS)
        if rng.random() < 0.25:
            container = CONTAINERS[0]
        content, moment = rng.choice(CONTENTS), rng.choice(MOMENTS)
        if can_be(base, container, content, moment):
            break
    parts, steps = rng.choice(base.parts), rng.choice(STEPS)
    return state_case(base, container, content, moment, parts, steps)


def state(
    base: str, container: str, content: str, moment: str, parts: int = 0, steps: int = 0
) -> Case:
    """The case of these names."""
    parts_of_case = (
        _named(BASES, base),
        _named(CONTAINERS, container),
        _named(CONTENTS, content),
        _named(MOMENTS, moment),
    )
    assert can_be(*parts_of_case), (base, container, content, moment)
    return state_case(*parts_of_case, parts, STEPS[steps])


def _named(members: Iterable[Any], name: str) -> Any:
    return next(m for m in members if m.name == name)


# --- A tensor is asked about itself --------------------------------------------------------------

TARGETS = {
    "the argument": "x",
    "another argument": "given",
    "a weight": "self.a.weight",
    "a bias": "self.b.bias",
    "a frozen weight": "self.frozen",
    "a special parameter": "self.special",
    "a buffer": "self.scale",
    "a kept tensor": "self.table",
    "an activation": "h",
    "a view of a weight": "self.a.weight[0]",
}

QUESTIONS = {
    "class is Tensor": "type(t) is torch.Tensor",
    "class is Parameter": "type(t) is nn.Parameter",
    "__class__": "t.__class__ is nn.Parameter",
    "name of the class": "type(t).__name__ == 'Parameter'",
    "file of the class": "type(t).__module__ == 'torch'",
    "class among others": "type(t) in (torch.Tensor, nn.Parameter, nn.Buffer)",
    "classes above": "len(type(t).__mro__)",
    "isinstance Parameter": "isinstance(t, nn.Parameter)",
    "isinstance of a class": "isinstance(t, Special)",
    "isinstance Tensor": "isinstance(t, torch.Tensor)",
    "type()": "t.type() == 'torch.FloatTensor'",
    "repr": "repr(t).startswith('tensor(')",
    "is_leaf": "t.is_leaf",
    "_version": "t._version",
    "grad is None": "t.grad is None",
    "shape of grad": "0 if t.grad is None else t.grad.shape[-1]",
    "requires_grad": "t.requires_grad",
    "grad_fn is None": "t.grad_fn is None",
    "name of grad_fn": "type(t.grad_fn).__name__ == 'TanhBackward0'",
    "retains_grad": "t.retains_grad",
    "output_nr": "t.output_nr",
    "_is_view": "t._is_view()",
    "_base": "t._base is None",
    "hooks": "bool(t._backward_hooks)",
    "data_ptr": "t.data_ptr() == u.data_ptr()",
    "data_ptr is there": "t.data_ptr() != 0",
    "storage": "t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr()",
    "storage by _cdata": "t.untyped_storage()._cdata == u.untyped_storage()._cdata",
    "storage by is_set_to": "t.is_set_to(u)",
    "bytes of the storage": "t.untyped_storage().nbytes()",
    "storage_offset": "t.storage_offset()",
    "strides": "t.stride()[0]",
    "contiguous": "t.is_contiguous()",
    "is": "t is u",
    "id": "id(t) == id(u)",
    "id in a dictionary": "id(t) in {id(u): 1}",
    "key of a dictionary": "t in {u: 1}",
    "among the parameters": "any(t is p for p in self.parameters())",
    "name among the parameters": "any(p is t and n[0] == 'a' for n, p in self.named_parameters())",
    "hash": "hash(t) == hash(u)",
    "weak reference": "weakref.ref(t)() is t",
    "main_grad": "getattr(t, 'main_grad', None) is not None",
    "sum of main_grad": "float(len(getattr(t, 'main_grad', ())))",
    "hasattr": "hasattr(t, 'flag')",
    "flag": "getattr(t, 'flag', False)",
    "scale": "getattr(t, 'scale', 1.0)",
    "tag": "len(getattr(t, 'tag', ''))",
    "infshape": "getattr(t, 'infshape', types.SimpleNamespace(width=1)).width",
    "vars": "len(vars(t))",
    "dir": "'flag' in dir(t)",
    "name": "t.name is None",
    "names": "t.names[0] is None",
    "is_inference": "t.is_inference()",
    "is_shared": "t.is_shared()",
    "dtype": "t.dtype is torch.float32",
    "device": "str(t.device) == 'cpu'",
    "copy": "type(copy.copy(t)) is type(u)",
    "deep copy": "type(copy.deepcopy(t.detach())) is torch.Tensor",
    "class of data": "type(t.data) is torch.Tensor",
    "class of detach": "type(t.detach()) is torch.Tensor",
    "class of a result": "type(t * 1) is torch.Tensor",
    "numpy": "type(t.detach().numpy()).__name__ == 'ndarray'",
    "functions of a subclass": "torch.overrides.has_torch_function((t,))",
    "grad mode": "torch.is_grad_enabled()",
}
"""Of tensors t and u."""

SECONDS = {
    "itself": "t",
    "the argument": "x",
    "another argument": "given",
    "a tied weight": "self.b.weight",
    "a kept tensor": "self.table",
    "held elsewhere": "HELD[0]",
}

# What the caller does between steps; t is the target.
CHANGES = {
    "nothing": "pass",
    "a flag": "t.flag = number % 2 == 0\nt.scale = 1.0 + number\nt.tag = 'a' * number",
    "an attribute that goes": "if number == 2 and hasattr(t, 'flag'):\n    del t.flag",
    "main_grad": "t.main_grad = torch.ones(number)",
    "width": "t.infshape = types.SimpleNamespace(width=2 + number)",
    "a gradient": "t.grad = torch.ones_like(t) if number == 2 else None",
    "a version": "with torch.no_grad():\n    t.mul_(0.5)",
    "a hook": "if number == 1 and t.requires_grad:\n    t.register_hook(lambda g: g)",
    "not a leaf": "caller.is_result = number > 0",
    "held": "if number == 2:\n    HELD[0] = t",
}

# What there is before planning.
BEFORE = {
    "nothing": "pass",
    "a flag": "t.flag = True\nt.scale = 2.0\nt.tag = 'ab'",
    "main_grad": "t.main_grad = torch.ones(3)",
    "width": "t.infshape = types.SimpleNamespace(width=2)",
    "held": "HELD[0] = t",
    "tied": "self.b.weight = self.a.weight",
}


def asked_case(
    target: str,
    question: str,
    second: str = "itself",
    before: str = "nothing",
    change: str = "nothing",
    steps: tuple[str, ...] = STEPS[0],
) -> Case:
    """The forward asks `question` of a target and of a second tensor."""
    of_caller = {"x": "x", "given": "caller.given"}.get(TARGETS[target], TARGETS[target])
    is_outside = target != "an activation"
    setup = f"for self in [model]:\n    t = {of_caller}\n" + fill("    <b>", b=BEFORE[before])
    with_given = "given" in (TARGETS[target], SECONDS[second])
    of_init = """
self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
self.special = Special(torch.ones(8))
self.table = torch.full((8,), 0.5)
"""
    arguments = f"""
caller.given = torch.ones(4, 8)
is_sample = not hasattr(caller, "is_result")
if is_sample:
    caller.is_result = False
if is_sample or {"given" in of_caller or of_caller == "x"}:
    <setup>
change_first(caller, model, x, number)
if caller.is_result:
    x = x * torch.ones(8, requires_grad=True)
return (x{", caller.given" if with_given else ""}), {{}}
"""
    if not with_given:
        arguments = arguments.replace("return (x)", "return (x,)")
    changed = (
        f"for self in [model]:\n    t = {of_caller}\n" + fill("    <c>", c=CHANGES[change])
        if is_outside and change != "nothing"
        else "pass"
    )
    top = """
HELD = [torch.ones(8)]

def change_first(caller, model, x, number):
    if number:
        <changed>
"""
    block = f"""
t = {TARGETS[target]}
u = {SECONDS[second]}
answer = {QUESTIONS[question]}
h = h * (2.0 + float(answer)) + 0.1 * self.frozen * self.special * self.table * self.scale
"""
    source = file_of(
        top=fill(top, changed=changed),
        init=of_init,
        parameters=", given" if with_given else "",
        block=block,
        arguments=fill(arguments, setup=setup if is_outside else "pass"),
    )
    said = f"asked: {target}, {second} / {question} / {before}, then {change}"
    return Case(said, source, "", steps)


def draw_asked(rng: random.Random) -> Case:
    target, question = rng.choice([*TARGETS]), rng.choice([*QUESTIONS])
    return asked_case(
        target,
        question,
        rng.choice([*SECONDS]),
        rng.choice([*BEFORE]),
        rng.choice([*CHANGES]),
        rng.choice(STEPS),
    )


# --- History -------------------------------------------------------------------------------------

# Written to -> (lines of __init__, top, expression in the forward, expression for the caller, what
# the caller does to it before each step).
WRITTEN = {
    "an argument": ("pass", "pass", "given", "caller.given", "pass"),
    "a part of an argument": ("pass", "pass", "given[1:3]", "caller.given", "pass"),
    "an argument in a list": ("pass", "pass", "given[0]", "caller.given[0]", "pass"),
    "an argument in a dictionary": ("pass", "pass", "given['m']", "caller.given['m']", "pass"),
    "the argument x": ("pass", "pass", "x", "x", "pass"),
    "a buffer": (
        "self.register_buffer('memory', torch.ones(4, 8))",
        "pass",
        "self.memory",
        "model.memory",
        "pass",
    ),
    "a buffer that the caller detaches": (
        "self.register_buffer('memory', torch.ones(4, 8))",
        "pass",
        "self.memory",
        "model.memory",
        "model.memory.detach_()",
    ),
    "a buffer that is no state": (
        "self.register_buffer('memory', torch.ones(4, 8), persistent=False)",
        "pass",
        "self.memory",
        "model.memory",
        "model.memory = torch.ones(4, 8)",
    ),
    "a tensor attribute": (
        "self.memory = torch.ones(4, 8)",
        "pass",
        "self.memory",
        "model.memory",
        "model.memory = torch.ones(4, 8)",
    ),
    "a tensor in a list": (
        "self.memory = [torch.ones(4, 8)]",
        "pass",
        "self.memory[0]",
        "model.memory[0]",
        "model.memory[0].detach_()",
    ),
    "a global tensor": (
        "pass",
        "MEMORY = torch.ones(4, 8)",
        "MEMORY",
        "MEMORY",
        "MEMORY.detach_()",
    ),
    "a tensor of another file": (
        "pass",
        "other.MEMORY = torch.ones(4, 8)",
        "other.MEMORY",
        "other.MEMORY",
        "other.MEMORY.detach_()",
    ),
    "the gradient of a parameter": (
        "self.a.weight.grad = torch.zeros(8, 8)",
        "pass",
        "self.a.weight.grad[:4]",
        "model.a.weight.grad",
        "pass",
    ),
    "an attribute of a parameter": (
        "self.a.weight.main_grad = torch.zeros(4, 8)",
        "pass",
        "self.a.weight.main_grad",
        "model.a.weight.main_grad",
        "model.a.weight.main_grad.detach_()",
    ),
    "a frozen parameter": (
        "self.memory = nn.Parameter(torch.ones(4, 8), requires_grad=False)",
        "pass",
        "self.memory",
        "model.memory",
        "pass",
    ),
}

WRITES = {
    "add_": "m.add_(v)",
    "copy_": "m.copy_(v)",
    "mul_": "m.mul_(v)",
    "setitem": "m[:] = v",
    "setitem of a row": "m[0] = v[0]",
    "setitem by mask": "m[torch.tensor([True, False] * (len(m) // 2))] = 0.5",
    "+=": "m += v",
    "index_put_": "m.index_put_((torch.tensor([0]),), v[:1])",
    "index_add_": "m.index_add_(0, torch.tensor([0]), v[:1])",
    "index_copy_": "m.index_copy_(0, torch.tensor([1]), v[:1])",
    "scatter_": "m.scatter_(0, torch.zeros(1, 8, dtype=torch.int64), v[:1])",
    "lerp_": "m.lerp_(v, 0.5)",
    "addcmul_": "m.addcmul_(v, v)",
    "zero_": "m.zero_()",
    "fill_": "m.fill_(v.mean())",
    "masked_fill_": "m.masked_fill_(torch.ones(8, dtype=torch.bool), v.mean())",
    "data.copy_": "m.data.copy_(v)",
    "detach().copy_": "m.detach().copy_(v.detach())",
    "view of rows": "m.view(-1)[:4].add_(v[0, :4])",
    "without gradients": "with torch.no_grad():\n    m.copy_(v)",
    "out=": "torch.add(m, v.detach(), out=m)",
    "requires_grad_": "m.requires_grad_()",
    "detach_": "m.detach_()",
    "set_": "m.set_(v.detach())",
    "resize_": "m.resize_(4, 8)",
    "numpy": "m.numpy()[:] = 0.5",
    "foreach": "torch._foreach_add_([m], [v])",
    "relu_": "nn.functional.relu_(m)",
    "normal_": "m.normal_()",
    "swap": "torch.utils.swap_tensors(m, v.detach().clone())",
}

VALUES = {
    "an activation": "h",
    "a detached activation": "h.detach()",
    "a weight": "self.a.weight[:4]",
    "no history": "torch.ones(4, 8)",
}


def history_case(
    written: str, write: str, value: str, is_read: bool, steps: tuple[str, ...] = STEPS[0]
) -> Case:
    """The forward writes `value` into what is not its own; is_read: reads it afterwards."""
    init, top, inside, outside, between = WRITTEN[written]
    with_given = "given" in inside
    given = {"given[0]": "[torch.ones(4, 8)]", "given['m']": "{'m': torch.ones(4, 8)}"}.get(
        inside, "torch.ones(4, 8)"
    )
    arguments = f"caller.given = {given}\nreturn (x, caller.given), {{}}"
    block = f"m, v = {inside}, {VALUES[value]}[:len({inside})]\n{WRITES[write]}"
    if is_read:
        block += "\nh = h + m.mean()"
    source = file_of(
        top=top,
        init=init,
        parameters=", given" if with_given else "",
        block=block,
        arguments=arguments if with_given else "return (x,), {}",
        change=between,
        read=outside.replace("model", "self"),
    )
    read = "read" if is_read else "not read"
    return Case(f"history: {written} / {write}, {value} / {read}", source, "", steps)


def draw_history(rng: random.Random) -> Case:
    return history_case(
        rng.choice([*WRITTEN]),
        rng.choice([*WRITES]),
        rng.choice([*VALUES]),
        rng.random() < 0.5,
        rng.choice(STEPS),
    )


# --- What the caller gives -----------------------------------------------------------------------

# (what is given, what the forward does, what the caller reads)
GIVEN = {
    "iterator of numbers": (
        "iter([1.0, 2.0, 3.0])",
        "h = h * next(given)",
        "list(itertools.islice(copy.copy(caller.given), 9))",
    ),
    "iterator of tensors": (
        "iter([torch.ones(8), torch.zeros(8)])",
        "h = h + next(given)",
        "list(itertools.islice(copy.copy(caller.given), 9))",
    ),
    "generator": (
        "(float(n) for n in range(3))",
        "h = h * next(given)",
        "caller.given.gi_frame.f_locals.get('n')",
    ),
    "generator of tensors": (
        "(torch.full((8,), float(n)) for n in range(3))",
        "for t in given:\n    h = h + t",
        "caller.given.gi_frame.f_locals.get('n')",
    ),
    "zip": (
        "zip([1, 2], [3, 4])",
        "h = h * sum(next(given))",
        "None",
    ),
    "enumerate": (
        "enumerate([2.0, 3.0])",
        "h = h * next(given)[1]",
        "None",
    ),
    "count": (
        "itertools.count(1)",
        "h = h * next(given)",
        "list(itertools.islice(copy.copy(caller.given), 9))",
    ),
    "reversed": (
        "reversed([2.0, 3.0])",
        "h = h * next(given)",
        "list(itertools.islice(copy.copy(caller.given), 9))",
    ),
    "queue": (
        "queue.Queue()",
        "given.put(h.mean())",
        "list(caller.given.queue)",
    ),
    "simple queue": (
        "queue.SimpleQueue()",
        "given.put(h.detach())",
        "caller.given.qsize()",
    ),
    "append of a list": ("caller.all.append", "given(h.pow(2).mean())", "caller.all"),
    "callback": ("lambda h: caller.all.append(h)", "given(h)", "caller.all"),
    "callback of a number": ("lambda n: caller.all.append(n)", "given(h.shape[0])", "caller.all"),
    "callback that returns": ("lambda h: h * (1 + len(caller.all))", "h = given(h)", "caller.all"),
    "callable object": ("Recorder()", "h = given(h)", "caller.given.calls"),
    "list in a tuple": ("([], 1)", "given[0].append(h.mean())", "caller.given"),
    "list in a list": ("[[], []]", "given[1].append(h.mean())", "caller.given"),
    "list in a dictionary": ("{'aux': []}", "given['aux'].append(h.mean())", "caller.given"),
    "dictionary filled": ("{}", "given['h'] = h\ngiven['n'] = 1", "caller.given"),
    "dictionary of counts": ("{'n': 0}", "given['n'] += 1", "caller.given"),
    "dictionary emptied": ("{'w': torch.ones(8)}", "h = h + given.pop('w')", "caller.given"),
    "list emptied": ("[1.0, 2.0]", "h = h * given.pop()", "caller.given"),
    "list of tensors emptied": (
        "[torch.ones(8), torch.zeros(8)]",
        "while given:\n    h = h + given.pop()",
        "caller.given",
    ),
    "list of tensors replaced": (
        "[torch.ones(8), torch.zeros(8)]",
        "given[0] = h.mean(0)\nh = h + given[1]",
        "caller.given",
    ),
    "list of tensors sorted": (
        "[torch.ones(8), torch.zeros(8)]",
        "given.reverse()\nh = h + given[0]",
        "caller.given",
    ),
    "list of numbers sorted": ("[3, 1, 2]", "given.sort()\nh = h * given[0]", "caller.given"),
    "list cleared": ("[1.0, 2.0]", "h = h * sum(given)\ngiven.clear()", "caller.given"),
    "deque rotated": ("collections.deque([1.0, 2.0])", "given.rotate(1)", "caller.given"),
    "set of names": ("{'b'}", "given.add('a')", "sorted(caller.given)"),
    "set emptied": ("{'a', 'b'}", "given.discard('a')", "sorted(caller.given)"),
    "set of tensors": ("set()", "given.add(h)", "caller.given"),
    "byte array": ("bytearray(b'ab')", "given[0] = 99", "caller.given"),
    "array of array": ("array.array('d', [1.0])", "given.append(2.0)", "list(caller.given)"),
    "array of numpy": ("np.ones(8)", "given[0] = 5.0", "caller.given"),
    "array of numpy read": (
        "np.full(8, float(number))",
        "h = h + torch.from_numpy(given).float()",
        "caller.given",
    ),
    "array from an activation": (
        "np.ones(8)",
        "given[:] = h.detach().mean(0).numpy()",
        "caller.given",
    ),
    "object": ("Thing(1)", "given.kept = h", "vars(caller.given)"),
    "object counted": ("Thing(1)", "given.kept += 1", "vars(caller.given)"),
    "object with a tensor": (
        "Thing(torch.full((8,), float(number)))",
        "h = h + given.kept",
        "vars(caller.given)",
    ),
    "object with a list": ("Thing([])", "given.kept.append(h)", "vars(caller.given)"),
    "object gets an attribute": ("Thing(1)", "given.aux = h.mean()", "vars(caller.given)"),
    "dataclass": ("Box()", "given.kept = h.mean()", "vars(caller.given)"),
    "dataclass with a tensor": (
        "Box(torch.full((8,), float(number)))",
        "h = h + given.kept",
        "vars(caller.given)",
    ),
    "slots": ("Slotted(None)", "given.kept = h.mean()", "caller.given.kept"),
    "slots with a tensor": (
        "Slotted(torch.full((8,), float(number)))",
        "h = h + given.kept",
        "caller.given.kept",
    ),
    "namespace": ("types.SimpleNamespace()", "given.h = h.detach()", "vars(caller.given)"),
    "class": ("type('Config', (), {'kept': 1})", "given.kept = h.shape", "caller.given.kept"),
    "function": ("lambda: None", "given.kept = h.mean()", "vars(caller.given)"),
    "module": ("model.a", "given.kept = h.detach()", "caller.given.kept"),
    "another module": ("nn.Linear(8, 8)", "h = given(h)", "caller.given.weight.grad"),
    "iterable of the caller": (
        "types.MappingProxyType({'n': number})",
        "h = h * (1 + given['n'])",
        "caller.given['n']",
    ),
    "string": ("'a' * (1 + number)", "h = h * len(given)", "caller.given"),
    "random generator": ("random.Random(0)", "h = h * given.random()", "caller.given.getstate()"),
    "generator of numpy": (
        "np.random.default_rng(0)",
        "h = h * float(given.random())",
        "str(caller.given.bit_generator.state)",
    ),
    "generator of torch": (
        "torch.Generator().manual_seed(0)",
        "h = h + torch.randn(8, generator=given)",
        "caller.given.get_state()",
    ),
    "exception": ("ValueError('a')", "given.args = (h.shape[0],)", "caller.given.args"),
    "partial": (
        "functools.partial(caller.all.append)",
        "given(h.detach().mean())",
        "caller.all",
    ),
    "weak reference": ("weakref.ref(model.a)", "h = h * (1 if given() is self.a else 2)", "None"),
    "number that changes": ("number", "h = h * (1 + given)", "None"),
    "tensor with an attribute": (
        "tagged(torch.ones(4, 8), number)",
        "h = h * given.tag + given",
        "caller.given.tag",
    ),
    "tensor that gets an attribute": (
        "torch.ones(4, 8)",
        "given.tag = h.mean()\nh = h + given",
        "getattr(caller.given, 'tag', None)",
    ),
}

_GIVEN_TOP = """
class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, h):
        self.calls.append(h.detach())
        return h * len(self.calls)


def tagged(tensor, tag):
    tensor.tag = tag
    return tensor
"""


def given_case(
    given: str, how: str = "by position", keeps: bool = False, steps: tuple[str, ...] = STEPS[0]
) -> Case:
    """keeps: the caller passes the same object in all steps."""
    made, block, read = GIVEN[given]
    set_up = "if not hasattr(caller, 'all'):\n    caller.all = []\n"
    make = f"caller.given = {made}"
    if keeps:
        make = f"if not hasattr(caller, 'given'):\n    {make}"
    passed = {
        "by position": ", given",
        "by keyword": ", *, given",
        "in further ones": ", *rest",
        "in further ones by keyword": ", **rest",
    }
    unpack = {
        "in further ones": "given = rest[0]\n",
        "in further ones by keyword": "given = rest['given']\n",
    }
    call = (
        "return (x,), {'given': caller.given}"
        if "keyword" in how
        else "return (x, caller.given), {}"
    )
    source = file_of(
        top=_GIVEN_TOP,
        parameters=passed[how],
        block=unpack.get(how, "") + block,
        arguments=f"{set_up}{make}\n{call}",
        read=read,
    )
    kept = ", kept by the caller" if keeps else ""
    return Case(f"given: {given} / {how}{kept}", source, "", steps)


def draw_given(rng: random.Random) -> Case:
    hows = ("by position", "by keyword", "in further ones", "in further ones by keyword")
    return given_case(rng.choice([*GIVEN]), rng.choice(hows), rng.random() < 0.4, rng.choice(STEPS))


# --- Two that are one ----------------------------------------------------------------------------

# What two arguments are: (first, second), of number.
ALIASES = {
    "one list": ("caller.one", "caller.one", "[1.0]"),
    "two equal lists": ("caller.one", "[*caller.one]", "[1.0]"),
    "one list of tensors": ("caller.one", "caller.one", "[torch.ones(8)]"),
    "one dictionary": ("caller.one", "caller.one", "{0: 1.0}"),
    "one object": ("caller.one", "caller.one", "Thing(1.0)"),
    "one tensor": ("caller.one", "caller.one", "torch.ones(8)"),
    "a tensor and a view": ("caller.one", "caller.one[:]", "torch.ones(8)"),
    "a tensor and its detached": ("caller.one", "caller.one.detach()", "torch.ones(8)"),
    "x and itself": ("x", "caller.one", "torch.ones(8)"),
    "one until the last": ("caller.one", "caller.one if number < 2 else [1.0]", "[1.0]"),
    "one from the second": ("caller.one", "[1.0] if number < 1 else caller.one", "[1.0]"),
    "one tensor until the last": (
        "caller.one",
        "caller.one if number < 2 else torch.ones(8)",
        "torch.ones(8)",
    ),
    "lists of one tensor": ("[caller.one]", "[caller.one]", "torch.ones(8)"),
    "list and an element": ("[caller.one]", "caller.one", "torch.ones(8)"),
    "a weight": ("model.a.weight", "caller.one", "torch.ones(8)"),
    "a weight and its data": ("model.a.weight", "model.a.weight.data", "torch.ones(8)"),
    "a weight from the second": (
        "model.a.weight if number else torch.ones(8, 8)",
        "caller.one",
        "torch.ones(8)",
    ),
    "another weight": (
        "(model.a if number < 1 else model.b).weight",
        "caller.one",
        "torch.ones(8)",
    ),
    "a weight in a list": ("[model.a.weight]", "caller.one", "torch.ones(8)"),
    "a buffer": ("model.scale", "model.scale", "torch.ones(8)"),
    "what the module keeps": ("model.held[0]", "caller.one", "torch.ones(8)"),
    "the module's list": ("model.held", "caller.one", "torch.ones(8)"),
    "a global tensor": ("HELD[0]", "caller.one", "torch.ones(8)"),
    "the global list": ("HELD", "caller.one", "torch.ones(8)"),
    "a submodule": ("model.a", "model.b", "torch.ones(8)"),
}

# What the forward does with them.
COMPARED = {
    "is": "h = h * (2 if first is second else 3)",
    "id": "h = h * (2 if id(first) == id(second) else 3)",
    "==": "h = h * (2 if first == second else 3)",
    "is x": "h = h * (2 if first is x else 3)",
    "is the weight": "h = h * (2 if first is self.a.weight else 3)",
    "among the parameters": "h = h * (2 if any(first is p for p in self.parameters()) else 3)",
    "is kept": "h = h * (2 if first is self.held[0] else 3)",
    "is the module's list": "h = h * (2 if first is self.held else 3)",
    "is global": "h = h * (2 if first is HELD[0] else 3)",
    "is the global list": "h = h * (2 if first is HELD else 3)",
    "is the submodule": "h = h * (2 if first is self.a else 3)",
    "elements": "h = h * (2 if first[0] is second[0] else 3)",
    "element": "h = h * (2 if first[0] is second else 3)",
    "appended": "first.append(2.0)\nh = h * len(second)",
    "set item": "first[0] = 5.0\nh = h * second[0]",
    "set item to an activation": "first[0] = h.mean()\nh = h * second[0]",
    "set attribute": "first.kept = 5.0\nh = h * second.kept",
    "written": "first.add_(1)\nh = h * second",
    "written without gradients": "with torch.no_grad():\n    first.add_(1)\nh = h * second",
    "multiplied": "h = h * first + h * second",
    "multiplied by the first": "h = h @ first if first.dim() == 2 else h * first",
    "multiplied by its element": "h = h @ first[0] if first[0].dim() == 2 else h * first[0]",
    "kept": "self.last = first\nh = h * (2 if self.last is second else 3)",
    "remembered": "h = h * (2 if self.last is first else 3)\nself.last = first",
    "attribute": "first.tag = 2\nh = h * getattr(second, 'tag', 1)",
    "data_ptr": "h = h * (2 if first.data_ptr() == second.data_ptr() else 3)",
}


def alias_case(alias: str, compared: str, steps: tuple[str, ...] = STEPS[0]) -> Case:
    first, second, one = ALIASES[alias]
    source = file_of(
        top="HELD = [torch.ones(8)]",
        init="self.held = [torch.ones(8)]\nself.last = None",
        parameters=", first, second",
        block=COMPARED[compared],
        arguments=f"caller.one = {one}\nreturn (x, {first}, {second}), {{}}",
        read="caller.one",
    )
    return Case(f"alias: {alias} / {compared}", source, "", steps)


def draw_alias(rng: random.Random) -> Case:
    return alias_case(rng.choice([*ALIASES]), rng.choice([*COMPARED]), rng.choice(STEPS))


# --- Registered, and held elsewhere --------------------------------------------------------------

# Who holds <t>: (top, lines of __init__, expression)
HOLDERS = {
    "list": ("pass", "self.held = [<t>]", "self.held[0]"),
    "tuple": ("pass", "self.held = (<t>, 1)", "self.held[0]"),
    "dictionary": ("pass", "self.held = {'w': <t>}", "self.held['w']"),
    "dictionary by tensor": ("pass", "self.held = {<t>: 1}", "next(iter(self.held))"),
    "object": ("pass", "self.held = Thing(<t>)", "self.held.kept"),
    "slots": ("pass", "self.held = Slotted(<t>)", "self.held.kept"),
    "dataclass": ("pass", "self.held = Box(<t>)", "self.held.kept"),
    "attribute by its dictionary": ("pass", "self.__dict__['held'] = <t>", "self.held"),
    "closure": ("pass", "t = <t>\nself.held = lambda: t", "self.held()"),
    "default": ("pass", "self.held = lambda t=<t>: t", "self.held()"),
    "partial": ("pass", "self.held = functools.partial(max, [<t>], key=id)", "self.held()"),
    "bound method": ("pass", "self.held = <t>.detach", "self.held()"),
    "global": ("HELD = [None]", "HELD[0] = <t>", "HELD[0]"),
    "global of another file": ("other.HELD = None", "other.HELD = <t>", "other.HELD"),
    "class": ("class Store:\n    held = None", "Store.held = <t>", "Store.held"),
    "class of the module": ("pass", "type(self).held = <t>", "type(self).held"),
    "closure of the file": (
        "def hold(t):\n    global get\n    get = lambda: t",
        "hold(<t>)",
        "get()",
    ),
    "attribute of a tensor": (
        "pass",
        "self.table = torch.ones(8)\nself.table.held = <t>",
        "self.table.held",
    ),
    "attribute of a parameter": ("pass", "self.b.weight.held = <t>", "self.b.weight.held"),
    "attribute of a submodule": ("pass", "self.b.__dict__['held'] = <t>", "self.b.held"),
    "module that is not registered": ("pass", "self.held = [self.a]", "self.held[0].weight"),
    "weak reference": ("pass", "self.held = weakref.ref(<t>)", "self.held()"),
    "thread": ("LOCAL = threading.local()", "LOCAL.held = <t>", "LOCAL.held"),
    "argument": ("pass", "pass", "given[0]"),
}

HELD = {
    "weight": "self.a.weight",
    "bias": "self.a.bias",
    "buffer": "self.scale",
    "frozen weight": "self.frozen",
    "view of a weight": "self.a.weight.data[0]",
    "weight that is not registered": "nn.Parameter(torch.ones(8))",
    "module": "self.a",
}

HELD_USES = {
    "multiplied": "h = h @ t if t.dim() == 2 else h * t",
    "is": "h = h * (2 if t is <t> else 3)",
    "written": "with torch.no_grad():\n    t.mul_(0.9)",
    "added": "h = h + t.sum() * 0.1",
    "asked": "h = h * (2 if t.requires_grad else 3) * (2 if isinstance(t, nn.Parameter) else 3)",
    "called": "h = t(h) if isinstance(t, nn.Module) else h * t.mean()",
    "returned as attribute": "self.last = t",
    "its attribute set": "t.tag = h.detach()",
}

HELD_CHANGES = {
    "nothing": "pass",
    "the parameter replaced": (
        "if number == 1:\n    self.a.weight = nn.Parameter(self.a.weight.detach() * 2)"
    ),
    "the buffer replaced": "if number == 1:\n    self.scale = self.scale * 2",
    "the data replaced": "if number == 1:\n    self.a.weight.data = self.a.weight.data * 2",
    "frozen": "self.a.weight.requires_grad_(number % 2 == 0)",
    "the state loaded": (
        "self.load_state_dict({k: v * 0.5 for k, v in self.state_dict().items()}, assign=True)"
    ),
}


def registered_case(
    holder: str, held: str, use: str, change: str = "nothing", steps: tuple[str, ...] = STEPS[0]
) -> Case:
    top, init, at = HOLDERS[holder]
    is_argument = holder == "argument"
    given = HELD[held].replace("self", "model")
    source = file_of(
        top=top,
        init="self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)\nself.last = None\n"
        + init.replace("<t>", HELD[held]),
        parameters=", given" if is_argument else "",
        block=f"t = {at}\n{HELD_USES[use].replace('<t>', HELD[held])}",
        arguments=f"return (x, [{given}]), {{}}" if is_argument else "return (x,), {}",
        change=HELD_CHANGES[change],
        read="self.last" if is_argument else f"[{at}, self.last]",
        cleanup="pass",
    )
    return Case(f"registered: {holder}, {held} / {use} / {change}", source, "", steps)


def draw_registered(rng: random.Random) -> Case:
    return registered_case(
        rng.choice([*HOLDERS]),
        rng.choice([*HELD]),
        rng.choice([*HELD_USES]),
        rng.choice([*HELD_CHANGES]),
        rng.choice(STEPS),
    )


# --- Results and functions -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """What a forward does otherwise, and what the caller reads."""

    block: str = "pass"
    result: str = "self.b(h)"
    read: str = "None"
    init: str = "pass"
    body: str = "pass"
    top: str = "pass"


RESULTS = {
    "attribute of the result": Kept(
        block=("y = self.b(h)\ny.aux = h.mean()"),
        result="y",
    ),
    "number on the result": Kept(
        block=("y = self.b(h)\ny.tag = 'a'"),
        result="y",
    ),
    "class of the result": Kept(
        block="y = self.b(h)",
        result="y.as_subclass(torch.Tensor)",
    ),
    "parameter as result": Kept(
        result="(self.b(h), self.a.weight)",
    ),
    "buffer as result": Kept(
        result="(self.b(h), self.scale)",
    ),
    "kept tensor as result": Kept(
        result="(self.b(h), self.table)",
        read="self.table",
        init="self.table = torch.ones(8)",
    ),
    "kept list as result": Kept(
        block="self.kept.append(h.detach())",
        result="(self.b(h), self.kept)",
        read="self.kept",
        init="self.kept = []",
    ),
    "kept list of one as result": Kept(
        block="self.kept[0] = h.mean()",
        result="(self.b(h), self.kept)",
        read="self.kept",
        init="self.kept = [None]",
    ),
    "namespace as result": Kept(
        result="types.SimpleNamespace(y=self.b(h))",
    ),
    "dataclass as result": Kept(
        result="Box(self.b(h))",
    ),
    "named tuple as result": Kept(
        result="Pair(self.b(h), 3)",
    ),
    "slots as result": Kept(
        result="Slotted(self.b(h))",
    ),
    "set as result": Kept(
        result="{self.b(h)}",
    ),
    "deque as result": Kept(
        result="collections.deque([self.b(h)])",
    ),
    "generator as result": Kept(
        block="y = self.b(h)",
        result="(y * n for n in (1, 2))",
    ),
    "iterator as result": Kept(
        block="y = self.b(h)",
        result="iter([y, h])",
    ),
    "function as result": Kept(
        block="y = self.b(h)",
        result="(y, lambda: h.sum())",
    ),
    "partial as result": Kept(
        block="y = self.b(h)",
        result="(y, functools.partial(torch.add, y, h))",
    ),
    "number as result": Kept(
        block="self.count += 1",
        result="(self.b(h), self.count)",
        read="self.count",
        init="self.count = 0",
    ),
    "shape as result": Kept(
        result="(self.b(h), h.shape, h.dtype)",
    ),
    "array as result": Kept(
        result="(self.b(h), np.ones(3))",
    ),
    "array of numbers that change": Kept(
        block="self.table += 1",
        result="(self.b(h), self.table)",
        read="self.table",
        init="self.table = np.zeros(3)",
    ),
    "lru_cache": Kept(
        block="h = h + table(h.shape[1])",
        read="table(8)",
        top=(
            "@functools.lru_cache(maxsize=None)\n"
            "def table(n):\n"
            "    return torch.arange(float(n)).cos()"
        ),
    ),
    "lru_cache of an activation": Kept(
        block="h = h + table(h)",
        read="table.cache_info().currsize",
        top=("@functools.lru_cache(maxsize=None)\ndef table(h):\n    return h.detach() * 2"),
    ),
    "lru_cache of a weight": Kept(
        block="h = h @ table(self.a.weight)",
        read="table(self.a.weight)",
        top=("@functools.cache\ndef table(w):\n    return w.detach() * 2"),
    ),
    "lru_cache of the module": Kept(
        block="h = h @ self.table(8)",
        read="self.table(8)",
        body=(
            "@functools.lru_cache\ndef table(self, n):\n    return self.a.weight.detach()[:n] * 2"
        ),
    ),
    "cache of random numbers": Kept(
        block="h = h + table(h.shape[1])",
        read="table.cache_info().currsize",
        top=("@functools.cache\ndef table(n):\n    return torch.randn(n)"),
    ),
    "cache that counts": Kept(
        block="h = h * table(h.shape[1])",
        read="CALLS",
        top=("CALLS = []\n\n@functools.cache\ndef table(n):\n    CALLS.append(n)\n    return 2.0"),
    ),
    "cached_property": Kept(
        block="h = h + self.table",
        read="self.table",
        body=("@functools.cached_property\ndef table(self):\n    return torch.arange(8.0).cos()"),
    ),
    "cached_property of a weight": Kept(
        block="h = h + self.table",
        read="vars(self).get('table')",
        body=(
            "@functools.cached_property\n"
            "def table(self):\n"
            "    return self.a.weight.detach().mean(0)"
        ),
    ),
    "generator that counts": Kept(
        block="h = h * next(self.numbers)",
        init="self.numbers = numbers()",
        top=("def numbers():\n    n = 0.0\n    while True:\n        n += 1\n        yield n"),
    ),
    "generator of the file": Kept(
        block="h = h * next(NUMBERS)",
        top=(
            "def numbers():\n"
            "    n = 0.0\n"
            "    while True:\n"
            "        n += 1\n"
            "        yield n\n"
            "\n"
            "NUMBERS = numbers()"
        ),
    ),
    "generator that keeps": Kept(
        block="h = h + self.keeper.send(h.detach())",
        init=("self.keeper = keeper()\nnext(self.keeper)"),
        top=("def keeper():\n    kept = 0.0\n    while True:\n        kept = yield kept"),
    ),
    "count of itertools": Kept(
        block="h = h * next(self.numbers)",
        init="self.numbers = itertools.count(1)",
    ),
    "count of itertools in the file": Kept(
        block="h = h * next(NUMBERS)",
        top="NUMBERS = itertools.count(1)",
    ),
    "cycle of itertools": Kept(
        block="h = h * next(NUMBERS)",
        top="NUMBERS = itertools.cycle([1.0, 2.0, 3.0])",
    ),
    "queue on the module": Kept(
        block="self.queue.put(h.detach())",
        read="list(self.queue.queue)",
        init="self.queue = queue.Queue()",
    ),
    "queue of the file": Kept(
        block="QUEUE.put(h.shape[0])",
        read="QUEUE.qsize()",
        top="QUEUE = queue.SimpleQueue()",
    ),
    "append kept on the module": Kept(
        block="self.log(h.detach())",
        read="ALL",
        init="self.log = ALL.append",
        top="ALL = []",
    ),
    "weak values": Kept(
        block="STORE['h'] = self.last = h.detach()",
        read="STORE.get('h')",
        init="self.last = None",
        top="STORE = weakref.WeakValueDictionary()",
    ),
    "weak values of the result": Kept(
        block=("y = self.b(h)\nSTORE['y'] = y"),
        result="y",
        read="STORE.get('y')",
        top="STORE = weakref.WeakValueDictionary()",
    ),
    "weak reference": Kept(
        block=("y = self.b(h)\nself.last = weakref.ref(y)"),
        result="y",
        read="self.last and self.last()",
        init="self.last = None",
    ),
    "weak set": Kept(
        block=("STORE.add(self)\nh = h * len(STORE)"),
        read="len(STORE)",
        top="STORE = weakref.WeakSet()",
    ),
    "class made in the forward": Kept(
        block=("class Local:\n    kept = h.detach()\nMADE.append(Local)"),
        read="[k.kept for k in MADE]",
        top="MADE = []",
    ),
    "thread that writes": Kept(
        block=(
            "value = h.detach()\n"
            "thread = threading.Thread(target=ALL.append, args=(value,))\n"
            "thread.start()\n"
            "thread.join()"
        ),
        read="ALL",
        top="ALL = []",
    ),
    "module added": Kept(
        block=("if self.late is None:\n    self.late = nn.Linear(8, 8)\nh = self.late(h)"),
        read="self.late",
        init="self.late = None",
    ),
    "buffer added": Kept(
        block=(
            "if not hasattr(self, 'late'):\n"
            "    self.register_buffer('late', torch.ones(8))\n"
            "h = h + self.late"
        ),
        read="getattr(self, 'late', None)",
    ),
    "buffer replaced": Kept(
        block="self.scale = h.detach().mean(0)",
        read="self.scale",
    ),
    "buffer replaced by the same": Kept(
        block=("self.scale = self.scale * 0.5\nh = h * self.scale"),
        read="self.scale",
    ),
    "training flag": Kept(
        block=("if self.training:\n    self.a.training = not self.a.training"),
        read="self.a.training",
    ),
    "function replaced": Kept(
        block=("h = self.act(h)\nself.act = torch.sigmoid"),
        read="self.act.__name__",
        init="self.act = torch.tanh",
    ),
    "method replaced": Kept(
        block="h = self.act(h)",
        read="self.act.__name__",
        body=("def act(self, h):\n    self.act = torch.sigmoid\n    return torch.tanh(h)"),
    ),
    "class of the module replaced": Kept(
        block="self.__class__ = Later",
        read="type(self).__name__",
        top=(
            "class Later(nn.Module):\n"
            "    def forward(self, x):\n"
            "        return self.b(self.a(x)) * 2"
        ),
    ),
    "warning once": Kept(
        block=("if 'a' not in SAID:\n    SAID.add('a')"),
        read="sorted(SAID)",
        top="SAID = set()",
    ),
    "text": Kept(
        block="print(h.shape, file=TEXT)",
        read="TEXT.getvalue()",
        top=("import io\n\nTEXT = io.StringIO()"),
    ),
    "environment": Kept(
        block="os.environ['PYTHON_STATE_OF_A_CASE'] = str(h.shape[0])",
        read="os.environ.get('PYTHON_STATE_OF_A_CASE')",
        top="import os",
    ),
}


def result_case(kind: str, parts: int = 0, steps: tuple[str, ...] = STEPS[0]) -> Case:
    kept = RESULTS[kind]
    source = file_of(
        top=kept.top,
        body=kept.body,
        init=kept.init,
        block=kept.block,
        result=kept.result,
        parts=parts,
        read=kept.read,
        cleanup="import os\nos.environ.pop('PYTHON_STATE_OF_A_CASE', None)"
        if kind == "environment"
        else "pass",
    )
    place = f", in {parts} submodules" if parts else ""
    return Case(f"result: {kind}{place}", source, "", steps)


def draw_result(rng: random.Random) -> Case:
    kind = rng.choice([*RESULTS])
    has_own_result = RESULTS[kind].result != "self.b(h)"
    return result_case(kind, 0 if has_own_result else rng.choice((0, 1, 2)), rng.choice(STEPS))


# --- All of them ---------------------------------------------------------------------------------

FAMILIES: dict[Callable[[random.Random], Case], float] = {
    draw_state: 0.58,
    draw_asked: 0.14,
    draw_history: 0.09,
    draw_given: 0.07,
    draw_alias: 0.05,
    draw_registered: 0.04,
    draw_result: 0.03,
}
"""How often each is drawn."""


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    families, weights = zip(*FAMILIES.items(), strict=True)
    (family,) = rng.choices(families, weights)
    return replace(family(rng), needs_gradient=rng.random() < 0.2)


def plain() -> Case:
    """A model that keeps nothing: planned, and equal."""
    return Case("plain: nothing", file_of())
