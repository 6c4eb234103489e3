"""Each row of the refusals: a model that is refused by it, and the same with its remedy followed,
which is planned and equal to eager."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import rockplan
from rockplan.graph_builder.tracing.refusals import NAMED
from testing.training import assert_same_steps
from tests.following import OPTIONS, Net, assert_planned, assert_unchanged, made_once, state_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Forward = Callable[..., Any]


def net(forward: Forward, *args: Any) -> tuple[Any, ...]:
    return Net(forward), args or (X,)


def with_state(forward: Forward, **state: Any) -> tuple[Any, ...]:
    model = Net(forward)
    for name, value in state.items():
        setattr(model, name, value)
    return model, (X,)


def with_table(model: nn.Module) -> nn.Module:
    model.table = None  # type: ignore[assignment]
    return model


def with_buffer(forward: Forward) -> tuple[Any, ...]:
    model = Net(forward)
    model.register_buffer("kept", torch.zeros(4, 8))
    return model, (X,)


def with_ring(forward: Forward) -> tuple[Any, ...]:
    model, args = with_buffer(forward)
    model.register_buffer("at", torch.zeros((), dtype=torch.long))
    return model, args


def after_one_call(made: tuple[Any, ...]) -> tuple[Any, ...]:
    return made_once(made[0], X), made[1]


def plain(self: Any, x: Tensor, *more: Any) -> Tensor:
    return self.b(self.a(x).relu())


def plus(self: Any, x: Tensor, drawn: Tensor) -> Tensor:
    return self.b(self.a(x) + drawn)


def by_generator(self: Any, x: Tensor, generator: Any) -> Tensor:
    return self.b(self.a(x) + torch.rand(8, generator=generator))


def packed(self: Any, x: Any) -> Tensor:
    unpacked, _ = nn.utils.rnn.pad_packed_sequence(x)
    return self.b(self.a(unpacked))


def seeded(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return self.b(self.a(x) + torch.rand(8))


def hooked(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.register_hook(lambda gradient: gradient * 2)
    return self.b(h)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def entropy(**settings: Any) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        return functional.cross_entropy(plain(self, x), torch.arange(4), **settings)

    return forward


def array_written(is_copied: bool) -> Forward:
    def forward(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        array = ids.numpy().copy() if is_copied else ids.numpy()
        array[0] = 1
        return self.b(self.a(x) * float(array.sum()))

    return forward


def data_assigned(self: Any, x: Tensor) -> Tensor:
    self.kept.data = torch.ones(4, 8)
    return self.b(self.a(x) + self.kept)


def data_copied(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.kept.copy_(torch.ones(4, 8))
    return self.b(self.a(x) + self.kept)


@functools.cache
def cached_product(h: Tensor) -> Tensor:
    return h * 2


def counted(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return plain(self, x)


def counted_in_buffer(self: Any, x: Tensor) -> Tensor:
    self.kept += 1
    return plain(self, x)


def ring_by_number(self: Any, x: Tensor) -> Tensor:
    self.kept[int(self.at) % 4] = x.detach().mean(0)
    self.at += 1
    return plain(self, x) + self.kept.sum(0)


def ring_by_tensor(self: Any, x: Tensor) -> Tensor:
    self.kept.index_copy_(0, (self.at % 4).reshape(1), x.detach().mean(0)[None])
    self.at += 1
    return plain(self, x) + self.kept.sum(0)


TABLES: dict[str, Tensor] = {}
ELEMENTS: list[Tensor] = []


def _table() -> Tensor:
    return torch.linspace(0, 1, 8).cos()


def in_attribute(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = _table()
    return plain(self, x) * self.table


def in_dictionary(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) * self.tables.setdefault(len(x), _table())


def in_file(self: Any, x: Tensor) -> Tensor:
    if "table" not in TABLES:
        TABLES["table"] = _table()
    return plain(self, x) * TABLES["table"]


def in_list(self: Any, x: Tensor) -> Tensor:
    if not ELEMENTS:
        ELEMENTS.append(_table())
    return plain(self, x) * ELEMENTS[0]


def first_is_otherwise(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = _table()
        return plain(self, x) + self.table
    return plain(self, x) * self.table


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def asked_for(self: Any, x: Tensor) -> Any:
    h = self.a(x)
    (gradient,) = torch.autograd.grad(h.square().sum(), h, create_graph=False)
    return self.b(h), gradient


def backward_inside(self: Any, x: Tensor) -> Tensor:
    self.a(x).square().sum().backward()
    return plain(self, x)


def fresh(is_cloned: bool) -> Forward:
    ones = numpy.ones(8, dtype=numpy.float32)

    def forward(self: Any, x: Tensor) -> Tensor:
        table = torch.from_numpy(ones)
        table = table.clone() if is_cloned else table
        table += 1
        return plain(self, x) * table

    return forward


def with_hook(on_root: bool) -> tuple[Any, ...]:
    model = Net(plain)
    part = model if on_root else model.a
    part.register_forward_hook(lambda module, args, result: result * 2)
    return model, (X,)


def lazy() -> tuple[Any, ...]:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)), (X,)


def meta(is_materialized: bool) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.ReLU())
    if is_materialized:
        model.to_empty(device="cpu")
        nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
        nn.init.ones_(model[0].bias)  # type: ignore[arg-type]
    return model, (X,)


def scripted(is_scripted: bool) -> tuple[Any, ...]:
    part: nn.Module = nn.Linear(8, 8)
    return nn.Sequential(torch.jit.trace(part, X) if is_scripted else part), (X,)


class Kind(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


OWN = nn.Parameter(torch.ones(8))


def with_foreign(is_registered: bool) -> tuple[Any, ...]:
    model = Net(lambda self, x: plain(self, x) * (self.own if is_registered else OWN))
    if is_registered:
        model.own = nn.Parameter(torch.ones(8))
    return model, (X,)


class Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def changed_since(y: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    made: Tensor = Returned.apply(y, make)
    y.detach().add_(1)
    return made


def needs_gradient(x: Tensor = X) -> Tensor:
    return x.clone().requires_grad_()


def marked(name: str) -> Tensor:
    x = X.clone()
    setattr(x, name, 1)
    return x


def iterated(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) * next(self.numbers)


TABLE = torch.zeros(4, 8)


def is_last(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) * (2 if x is self.last else 1)


def keeping(self: Any, x: Tensor) -> Tensor:
    self.last = self.a(x)
    return self.b(self.last)


def noted(h: Tensor) -> Tensor:
    h.note = 1  # type: ignore[attr-defined]
    return h


def retained(h: Tensor) -> Tensor:
    h.retain_grad()
    return h


ELSEWHERE = {
    "function mode": "test_refusals_followed.test_outside_of_a_function_mode",
    "hook on all modules": "test_usage.test_hooks_on_all_modules_are_refused",
    "leftover": "test_python_state.test_a_fake_tensor_that_is_left_is_found",
    "cached parametrization": "test_usage.test_cached_parametrizations",
    "unknown result": "test_refusals.test_an_operator_of_whose_result_nothing_is_known",
    "no rule": "test_foreign_kernels.test_an_operator_whose_result_is_not_described",
    "shard": "test_distributed.test_two_processes",
    "distributed tensor": "test_distributed.test_two_processes",
    "draw of a distributed tensor": "test_distributed.test_two_processes",
    "context parallel": "test_distributed.test_two_processes",
    "objects between processes": "test_distributed.test_two_processes",
    "recurrent layer of cuDNN": "test_cuda.test_recurrent_layers_of_cudnn_are_refused",
    "write in a checkpoint": "test_bad_input.test_what_is_changed_inside_a_checkpoint_is_refused",
    "compiler": "test_bad_input.test_functions_compiled_in_the_forward_are_refused",
    "generator of Python": "test_bad_input.test_draws_from_what_the_module_holds_are_refused",
    "unwritten memory": "test_foreign_kernels.test_kernels_are_refused_by_name",
    "address": "test_foreign_kernels.test_kernels_are_refused_by_name",
    "writes of a Triton kernel": "test_triton.test_refused_by_name",
    "read of what was overwritten": "test_triton.test_refused_by_name",
    "argument of a Triton kernel": "test_triton.test_refused_by_name",
    "subclass of an opaque function": "test_opaque.test_refused_by_name",
    "argument of an opaque function": "test_opaque.test_refused_by_name",
    "run of an opaque function": "test_opaque.test_refused_by_name",
    "draws of an opaque function": "test_opaque.test_refused_by_name",
    "view by an opaque function": "test_opaque.test_refused_by_name",
    "state of a checkpoint": "test_bad_input.test_dictionaries_that_checkpoints_share_are_refused",
    "detached": "test_bad_input.test_refused_with_cause_and_remedy",
    "flat parameters": "test_refusals.test_parameters_that_are_parts_of_one",
    "gradient by values": "test_bad_input.test_gradients_that_depend_on_values",
}
"""Rows without a case here -> the test that shows them."""

FOLLOWED: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[], tuple[Any, ...]]]] = {
    "TorchScript": (lambda: scripted(True), lambda: scripted(False)),
    "lazy": (lazy, lambda: (made_once(lazy()[0], X), (X,))),
    "meta": (lambda: meta(False), lambda: meta(True)),
    "hook on a submodule": (lambda: with_hook(False), lambda: with_hook(True)),
    "layout": (
        lambda: net(lambda self, x: torch.sparse.mm(self.a(x).to_sparse(), self.b.weight)),
        lambda: net(lambda self, x: torch.mm(self.a(x), self.b.weight)),
    ),
    "generator": (
        lambda: net(by_generator, X, torch.Generator()),
        lambda: net(plus, X, torch.rand(8)),
    ),
    "shape in place": (
        lambda: net(lambda self, x: self.a(x.unsqueeze_(0)), X.clone()),
        lambda: net(lambda self, x: self.a(x.unsqueeze(0)), X.clone()),
    ),
    "values of a function of PyTorch": (
        lambda: net(packed, nn.utils.rnn.pack_sequence([X[:3], X[:2]])),
        lambda: net(plain, nn.utils.rnn.pad_sequence([X[:3], X[:2]])),
    ),
    "memory of an array": (
        lambda: net(array_written(False), X, torch.arange(3)),
        lambda: net(array_written(True), X, torch.arange(3)),
    ),
    "cross entropy": (
        lambda: net(entropy(weight=torch.ones(8), label_smoothing=0.1)),
        lambda: net(entropy(label_smoothing=0.1)),
    ),
    "other memory": (lambda: with_buffer(data_assigned), lambda: with_buffer(data_copied)),
    "moved module": (
        lambda: net(lambda self, x: self.a.to(torch.float64)(x.double()).float()),
        lambda: net(lambda self, x: self.a.to(x.device, torch.float32)(x)),
    ),
    "seeds": (lambda: net(seeded), lambda: net(plus, X, torch.rand(8))),
    "hook on a tensor": (
        lambda: net(hooked),
        lambda: net(lambda self, x: self.b(Doubled.apply(self.a(x)))),
    ),
    "iterator of the module": (
        lambda: with_state(iterated, numbers=iter([1.0, 2.0])),
        lambda: net(lambda self, x, number: plain(self, x) * number, X, torch.tensor(2.0)),
    ),
    "iterator as an argument": (
        lambda: net(lambda self, x, more: plain(self, x) + next(more), X, iter([X])),
        lambda: net(lambda self, x, more: plain(self, x) + more[0], X, [X]),
    ),
    "value": (
        lambda: net(lambda self, x: self.a(x) if self.b(x).sum() > 0 else self.b(x)),
        lambda: net(lambda self, x: torch.where(self.b(x).sum() > 0, self.a(x), self.b(x))),
    ),
    "shape": (
        lambda: net(lambda self, x: self.a(x)[self.b(x) > 0].sum()),
        lambda: net(lambda self, x: (self.a(x) * (self.b(x) > 0)).sum()),
    ),
    "kept in a cache": (
        lambda: net(lambda self, x: cached_product(self.a(x))),
        lambda: net(lambda self, x: cached_product.__wrapped__(self.a(x))),
    ),
    "attribute of a fake tensor": (
        lambda: net(plain, marked("fake_device")),
        lambda: net(plain, marked("device_of_mine")),
    ),
    "question": (
        lambda: net(lambda self, x: plain(self, x) * (1 if x._version == 0 else 2)),
        lambda: net(lambda self, x, is_first: plain(self, x) * (1 if is_first else 2), X, True),
    ),
    "opaque result": (
        lambda: net(lambda self, x: (self.a(x), Box(self.a(x)))),
        lambda: net(lambda self, x: self.a(x) + self.b(x)),
    ),
    "result that is an argument": (
        lambda: net(lambda self, x: x.view(-1), needs_gradient()),
        lambda: net(lambda self, x: x.view(-1).clone(), needs_gradient()),
    ),
    "result without a gradient": (
        lambda: net(lambda self, x: changed_since(self.a(x).sin(), lambda y: y.view_as(y))),
        lambda: net(lambda self, x: changed_since(self.a(x).sin(), torch.clone)),
    ),
    "nothing to differentiate": (
        lambda: (nn.ReLU(), (X,)),
        lambda: (nn.ReLU(), (needs_gradient(),)),
    ),
    "foreign parameter": (lambda: with_foreign(False), lambda: with_foreign(True)),
    "write of what has a gradient": (
        lambda: with_buffer(lambda self, x: self.kept.copy_(self.a(x)) * 2),
        lambda: with_buffer(lambda self, x: self.kept.copy_(self.a(x).detach()) + self.b(x)),
    ),
    "requires_grad": (
        lambda: net(lambda self, x: plain(self, x.requires_grad_()), X.clone()),
        lambda: net(plain, needs_gradient()),
    ),
    "backward in the forward": (lambda: net(backward_inside), lambda: net(plain)),
    "kept change": (lambda: with_state(counted, count=0), lambda: with_buffer(counted_in_buffer)),
    "another next call": (
        lambda: after_one_call(with_ring(ring_by_number)),
        lambda: with_ring(ring_by_tensor),
    ),
    "fresh constant": (lambda: net(fresh(False)), lambda: net(fresh(True))),
    "nested tensor": (
        lambda: net(plain, torch.nested.nested_tensor([X[:3], X[:2]], layout=torch.jagged)),
        lambda: net(plain, nn.utils.rnn.pad_sequence([X[:3], X[:2]])),
    ),
    "class of tensors": (
        lambda: net(plain, X.as_subclass(Kind)),
        lambda: net(plain, X.as_subclass(Kind).as_subclass(Tensor)),
    ),
    "argument in place": (
        lambda: net(lambda self, x: plain(self, x.mul_(2)), needs_gradient() * 1),
        lambda: net(lambda self, x: plain(self, x.clone().mul_(2)), needs_gradient()),
    ),
    "kept argument": (
        lambda: with_state(lambda self, x: plain(self, x) * (2 if x is self.last else 1), last=X),
        lambda: (with_state(is_last, last=X)[0], (X.clone(),)),
    ),
    "kept tensor": (
        lambda: with_state(keeping, last=None),
        lambda: net(lambda self, x: plain(self, x)),
    ),
    "attribute of a result": (
        lambda: net(lambda self, x: noted(self.a(x))),
        lambda: net(lambda self, x: self.a(x)),
    ),
    "result with a gradient of its own": (
        lambda: net(lambda self, x: retained(self.a(x))),
        lambda: net(lambda self, x: self.a(x)),
    ),
    "write of what has a gradient; another tensor": (
        lambda: net(lambda self, x: TABLE.copy_(self.a(x)) * 2),
        lambda: net(lambda self, x: TABLE.copy_(self.a(x).detach()) + self.b(x)),
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_row_says_to_do_is_planned(name: str) -> None:
    refused, followed = FOLLOWED[name]
    model, args = refused()
    before, generator = state_of(model), torch.get_rng_state()
    with pytest.raises(rockplan.RockplanError) as caught:
        rockplan.solve(model, args, "100%", options=OPTIONS)
    words = re.split(r"\{\w+\}", NAMED[name.partition(";")[0]].says)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_planned(followed()[0], followed()[1])


def of_a_buffer(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.outer(self.kept[0], self.kept[0])
    return plain(self, x) @ self.table


def of_the_input(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = x.detach().mean()
    return plain(self, x) * self.table


def drawn(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.rand(8)
    return plain(self, x) * self.table


def lengthened(self: Any, x: Tensor) -> Tensor:
    """As libraries keep rotary tables: until longer ones are asked for."""
    if len(x) > self.length:
        self.length, self.table = len(x), torch.arange(len(x) * 8.0).view(-1, 8).cos()
    return plain(self, x) * self.table[: len(x)]


def counted_too(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return in_attribute(self, x)


WITH_TABLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "attribute": lambda: with_state(in_attribute, table=None),
    "dictionary": lambda: with_state(in_dictionary, tables={}),
    "file": lambda: net(in_file),
    "list": lambda: net(in_list),
    "lengthened": lambda: with_state(lengthened, table=None, length=0),
}


@pytest.mark.parametrize("where", WITH_TABLES)
def test_what_keeps_a_table_of_constants_is_planned(where: str) -> None:
    """And has it, as eager after its first call; so is a call of another size."""
    TABLES.clear()
    ELEMENTS.clear()
    model, args = WITH_TABLES[where]()
    planned = assert_planned(model, args)
    assert tables_of(model) or hasattr(model, "tables")
    others = [(torch.randn(rows, 8),) for rows in (7, 2, 7)]
    model.zero_grad()
    assert_same_steps(planned, copy.deepcopy(model), others)


def tables_of(model: nn.Module) -> list[str]:
    values = (*vars(model).items(), *TABLES.items(), *enumerate(ELEMENTS))
    return [str(k) for k, v in values if isinstance(v, Tensor)]


ONCE_BEFORE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "another first call": lambda: with_state(first_is_otherwise, table=None),
    "of a buffer": lambda: (with_table(with_buffer(of_a_buffer)[0]), (X,)),
    "of the input": lambda: with_state(of_the_input, table=None),
    "drawn": lambda: with_state(drawn, table=None),
}


@pytest.mark.parametrize("where", ONCE_BEFORE)
def test_what_keeps_a_tensor_is_planned_afterwards(where: str) -> None:
    """Until then it is refused, and has none afterwards: training would begin with what planning
    has stored."""
    TABLES.clear()
    ELEMENTS.clear()
    model, args = ONCE_BEFORE[where]()
    with pytest.raises(rockplan.CaptureError, match="If only the first call does: run"):
        rockplan.solve(model, args, "100%", options=OPTIONS)
    assert not tables_of(model)
    assert_planned(*after_one_call((model, args)))


class Keeping(nn.Linear):
    """As a library's class may, which nobody can change: each call keeps a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.detach().abs().amax(-1, keepdim=True)
        return super().forward(x) / self.scale


@pytest.mark.parametrize("was_called", [False, True])
def test_a_copy_keeps_what_a_library_keeps(was_called: bool) -> None:
    model = nn.Sequential(Keeping(8, 8), nn.Tanh(), Keeping(8, 8))
    if was_called:
        model(X)
    with pytest.raises(rockplan.CaptureError, match="let a copy keep it") as refused:
        rockplan.solve(model, X, "100%", options=OPTIONS)
    before = Keeping.forward
    advice = re.search(r"let a copy keep it \((.*named\))\)", str(refused.value))
    assert advice is not None
    try:
        exec(advice[1], {"copy": copy, "Keeping": Keeping})
        assert_planned(model, (X,), (X.flip(0),))
    finally:
        Keeping.forward = before  # type: ignore[method-assign]


class Averaging(nn.Linear):
    """Keeps a mean in a buffer: another tensor each time, or the same."""

    def __init__(self, is_in_place: bool) -> None:
        super().__init__(8, 8)
        self.is_in_place = is_in_place
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        if self.is_in_place:
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return y - self.mean


def test_a_buffer_is_updated_in_place() -> None:
    with pytest.raises(rockplan.CaptureError, match=r"self\.mean\.copy_\(") as refused:
        rockplan.solve(Averaging(is_in_place=False), X, "100%", options=OPTIONS)
    assert "let a copy keep it" not in str(refused.value)
    assert_planned(Averaging(is_in_place=True), (X,), (X.flip(0),))


def test_a_refusal_after_a_first_call_leaves_nothing() -> None:
    model, args = with_state(counted_too, table=None, calls=0)
    with pytest.raises(rockplan.CaptureError, match="calls"):
        rockplan.solve(model, args, "100%", options=OPTIONS)
    assert not tables_of(model) and model.calls == 0


def test_each_row_is_shown_by_a_test() -> None:
    for test in ELSEWHERE.values():
        file, function = test.split(".")
        assert f"def {function}(" in (Path(__file__).parent / f"{file}.py").read_text()
    assert not FOLLOWED.keys() & ELSEWHERE.keys()
    assert {name.partition(";")[0] for name in (*FOLLOWED, *ELSEWHERE)} == NAMED.keys()


def test_outside_of_a_function_mode() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(rockplan.CaptureError, match="Plan and call the module outside"):
        rockplan.solve(Net(plain), X, "100%", options=OPTIONS)
    assert_planned(Net(plain), (X,))
