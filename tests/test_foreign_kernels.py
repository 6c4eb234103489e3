"""Kernels that are no operators of PyTorch, and addresses of tensors: never a crash, nor a plan
without what the kernel does; refused by name. So are operators that take functions."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._guards import active_fake_mode

import rockplan
from testing.training import assert_same_steps

QUICK = rockplan.Options(cache=False, time_limit_s=5)


def move(destination: int, source: int, n_bytes: int) -> None:
    """A kernel."""
    ctypes.memmove(ctypes.c_void_p(destination), ctypes.c_void_p(source), n_bytes)


def copied(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    move(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
    return y


def copied_if_real(x: torch.Tensor) -> torch.Tensor:
    """As flash-attention 4: the kernel is skipped under a fake mode."""
    return torch.empty_like(x) if active_fake_mode() is not None else copied(x)


class Jit:
    """Launches a kernel as Triton does: `kernel[grid](x, y)`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.run(*args)

    def run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if all(tensor.data_ptr() % 4 == 0 for tensor in (x, y)):
            self.fn(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())


copy_kernel = Jit(move)


def launched(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    copy_kernel[(1,)](x, y)
    return y


def function_of(
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> type[torch.autograd.Function]:
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return backward(gradient.contiguous())

    return Kernel


class Net(nn.Module):
    def __init__(self, use: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.a, self.b = self.inner
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.ones(4))
        self.plain = torch.ones(4)
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self, x)


X = torch.randn(3, 4)


def refusal(use: Callable[[Any, torch.Tensor], Any]) -> str:
    with pytest.raises(rockplan.CaptureError) as refused:
        rockplan.solve(Net(use), X, "min", options=QUICK)
    assert "test_foreign_kernels.py:" in str(refused.value)
    return str(refused.value)


KERNELS = {"ctypes": copied, "launcher": launched, "skipped": copied_if_real}
WORDS = {
    "ctypes": ["the function copied asks", "move(y.data_ptr(), x.data_ptr()"],
    "launcher": ["Jit.run"],
    "skipped": ["the function copied_if_real", "written", "flash-attention 4", "torch.zeros"],
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("where", ["plain", "forward", "backward", "both"])
def test_kernels_are_refused_by_name(name: str, where: str) -> None:
    kernel = KERNELS[name]
    forward = torch.clone if where == "backward" else kernel
    backward = torch.clone if where == "forward" else kernel
    applied: Any = kernel if where == "plain" else function_of(forward, backward).apply
    message = refusal(lambda net, x: net.b(applied(net.a(x))))
    assert all(word in message for word in [*WORDS[name], "torch.library.custom_op", "triton_op"])
    if where != "plain":
        step = "backward" if where == "backward" else "forward"
        assert f"the autograd.Function function_of.Kernel.{step}" in message


def test_the_place_is_in_the_model() -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return copied(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Part()))
    with pytest.raises(rockplan.UnsupportedModel, match=r"in module '1\.0' at .*kernels.py:"):
        rockplan.solve(model, X, "min", options=QUICK)


def test_a_kernel_with_a_bypass_is_refused() -> None:
    def either(net: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return copied(net.a(x))
        except Exception:
            return net.a(x).clone()

    assert "the function copied asks" in refusal(either)


def test_an_address_that_is_asked_for_in_c() -> None:
    message = refusal(lambda net, x: torch.utils.dlpack.to_dlpack(net.a(x).detach()))
    assert "address" in message and "torch.library.custom_op" in message


def tied(ask: Callable[[torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def use(net: Any, x: torch.Tensor) -> torch.Tensor:
        is_one = ask(net.a.weight) == ask(net.b.weight)
        return net.b(x).relu() if is_one else net.b(x) * 2

    return use


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "ask",
    [
        lambda w: w.data_ptr(),
        lambda w: w[1:].data_ptr(),
        lambda w: w.detach().data_ptr(),
        lambda w: w.untyped_storage().data_ptr(),
        lambda w: w.storage().data_ptr(),
        lambda w: w.storage()._data_ptr(),
        lambda w: w.storage().untyped().data_ptr(),
    ],
)
def test_addresses_are_no_test_for_one_tensor(ask: Callable[[torch.Tensor], Any]) -> None:
    assert "a is b" in refusal(tied(ask))


@pytest.mark.parametrize("of", ["table", "plain", "argument", "activation"])
def test_addresses_of_all_kinds_of_tensors_are_refused(of: str) -> None:
    def use(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.a(x)
        kinds = {"argument": x, "activation": h, "table": net.table, "plain": net.plain}
        return h * 2 if kinds[of].data_ptr() % 64 else h

    assert "data_ptr" in refusal(use)


def train(use: Callable[[Any, torch.Tensor], Any]) -> None:
    """Two steps with the bits of eager."""
    torch.manual_seed(0)
    eager = Net(use)
    torch.manual_seed(0)
    planned = rockplan.solve(Net(use), X, "min", options=QUICK)
    assert_same_steps(planned, eager, [(torch.randn(3, 4),) for _ in range(2)])


@pytest.mark.parametrize(
    "ask",
    [
        lambda net, other: net.a.weight.untyped_storage()._cdata == other.untyped_storage()._cdata,
        lambda net, other: net.a.weight.is_set_to(other),
        lambda net, other: net.a.weight is other,
    ],
)
@pytest.mark.parametrize("which", [lambda net: net.b.weight, lambda net: net.inner[0].bias])
def test_one_tensor_is_told_from_two(ask: Any, which: Any) -> None:
    train(lambda net, x: net.b(x).relu() if ask(net, which(net)) else net.b(x) * 2)


def filled(h: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(h)
    y[:, 0] = h[:, 1]
    y[:, 1:] = h[:, :-1]
    return y


WRITTEN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "piece by piece": lambda net, x: filled(net.a(x)),
    "copy_": lambda net, x: torch.empty(3, 4).copy_(net.a(x)),
    "fill_": lambda net, x: net.a(x) * torch.empty(4).fill_(2.0),
    "zero_ and add_": lambda net, x: torch.empty(3, 4).zero_().add_(net.a(x)),
    "draws": lambda net, x: net.a(x) + torch.empty(4).normal_() + torch.empty(4).uniform_(),
    "initialized": lambda net, x: net.a(x) + nn.init.xavier_uniform_(torch.empty(3, 4)),
    "out=": lambda net, x: net.a(x) + torch.mul(x, 2, out=torch.empty(3, 4)),
    "index_put_": lambda net, x: torch.empty(4, 3).t().index_copy_(0, torch.arange(3), net.a(x)),
    "its shape": lambda net, x: net.a(x) + torch.ones_like(torch.empty(4, 3).t()),
    "its shape, drawn": lambda net, x: net.a(x) + torch.rand_like(torch.empty(4, 3).t()),
    "no elements": lambda net, x: net.a(torch.cat([torch.empty(0, 4), x])),
    "dropout": lambda net, x: nn.functional.dropout(net.a(x), 0.5),
    "never read": lambda net, x: (torch.empty(5), net.a(x))[1],
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_memory_that_is_written_before_it_is_read(kind: str) -> None:
    train(WRITTEN[kind])


UNWRITTEN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "an operand": lambda net, x: net.a(x) * torch.empty(4),
    "changed": lambda net, x: torch.empty(3, 4).add_(net.a(x)),
    "a view of it": lambda net, x: net.a(x) * torch.empty(2, 4)[1].flip(0),
    "another allocator": lambda net, x: net.a(x) * x.new_empty(4),
    "of strides": lambda net, x: net.a(x) * torch.empty_strided((4,), (1,)),
    "a result": lambda net, x: (net.a(x), torch.empty(4)),
    "a result, behind a function": lambda net, x: function_of(copied_if_real, torch.clone).apply(
        net.a(x)
    ),
    "a number": lambda net, x: net.a(x) * float(torch.empty(1)),
    "an array": lambda net, x: net.a(x) * torch.from_numpy(torch.empty(4).numpy()),
}


@pytest.mark.parametrize("kind", UNWRITTEN)
def test_memory_that_nothing_has_written_is_not_read(kind: str) -> None:
    message = refusal(UNWRITTEN[kind])
    assert "written" in message and "torch.empty" in message and "custom_op" in message


@pytest.mark.parametrize(
    "compute",
    [
        lambda h: torch.from_numpy(numpy.sin(h.numpy())),
        lambda h: torch.from_numpy(numpy.asarray(h) * 2),
        lambda h: torch.as_tensor(h.cpu().numpy().copy()),
        lambda h: torch.from_dlpack(h) * 1.0,
        lambda h: torch.tensor(h.tolist()),
    ],
)
def test_functions_on_arrays_are_told_what_would_work(compute: Any) -> None:
    message = refusal(lambda net, x: net.a(x) + compute(net.a(x).detach()))
    assert "torch.library.custom_op" in message


SCRIPT = """
import ctypes, torch, rockplan
libc = ctypes.CDLL(None)

def copied(x):
    y = torch.empty_like(x)
    pointers = ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(x.data_ptr())
    libc.memcpy(*pointers, ctypes.c_size_t(x.numel() * 4))
    return y

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return copied(x) if FORWARD else x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return copied(gradient.contiguous())

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
    def forward(self, x):
        return Function.apply(self.a(x))

net = Net()
for FORWARD in (True, False):
    net(torch.randn(4, 8)).sum().backward()
    try:
        rockplan.solve(net, torch.randn(4, 8), "100%")
    except rockplan.UnsupportedModel as error:
        print("refused" if "Function" in str(error) else error)
print(net(torch.randn(4, 8)).sum().item() is not None)
"""


def test_the_process_lives() -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=1500
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "refused", "True"]), done


def condition(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda t: net.a(t), lambda t: net.b(t), (x,))


def loop(net: Any, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    start = (torch.tensor(0), x)
    return net.a(while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 2), start)[1])


def scan(net: Any, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.scan import scan

    return net.a(scan(lambda carry, y: (carry + y, carry + y), x[0] * 0, x)[1])


def mapped(net: Any, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.map import map

    return map(lambda t: net.a(t), x)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (condition, "torch.cond"),
        (loop, "while_loop"),
        (scan, "scan"),
        (mapped, "map"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_operators_that_take_functions_are_refused_by_name(use: Any, name: str) -> None:
    message = refusal(use)
    assert f"{name} is a higher-order operator" in message and "Recorder" not in message


@pytest.mark.parametrize("chosen", [True, False])
def test_a_condition_that_is_a_bool_is_planned(chosen: bool) -> None:
    def condition(net: Any, x: torch.Tensor) -> Any:
        is_true = bool((net.plain > 0).all()) == chosen
        return torch.cond(is_true, lambda h: net.a(h), lambda h: h.sin(), (net.b(x),))

    train(condition)


@rockplan.pure
@torch.library.custom_op("rockplan_tests::copied", mutates_args=())
def copied_by_operator(x: torch.Tensor) -> torch.Tensor:
    return copied(x)


@copied_by_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


copied_by_operator.register_autograd(
    lambda ctx, gradient: copied_by_operator(gradient.contiguous()),
)


@rockplan.pure
@torch.library.custom_op("rockplan_tests::copied_into", mutates_args=("y",))
def copied_into(x: torch.Tensor, y: torch.Tensor) -> None:
    move(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())


@rockplan.pure
@torch.library.custom_op("rockplan_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return copied(x)


def into(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    copied_into(x.detach(), y)
    return y


@pytest.mark.parametrize("use", [copied_by_operator, into])
def test_kernels_that_are_operators_are_planned(use: Any) -> None:
    train(lambda net, x: net.b(use(net.a(x)) + net.a(x)))


def test_an_operator_whose_result_is_not_described() -> None:
    assert "register_fake" in refusal(lambda net, x: net.b(unknown(net.a(x).detach())))
