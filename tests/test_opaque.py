"""Opaque functions: what runs for real inside of a plan has the bits of eager execution, within the
budget, and is refused by name where a plan could not do what it does."""

from __future__ import annotations

import copy
import ctypes
import enum
import functools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.autograd import Function

import rockplan
from rockplan.graph_builder.foreign.opaque import REGISTERED
from testing.training import assert_same_state, assert_same_steps, ensure, generator_states

RUNS: Counter[str] = Counter()
ROWS, WIDTH = 8, 4
QUICK = rockplan.Options(time_limit_s=2, without=("blocks", "exchange", "proof"))


class Net(nn.Module):
    """Linear layers, and `use(hidden)` after each."""

    def __init__(self, use: Callable[..., Any], layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.use(layer(x))
        return x


def train(
    use: Callable[..., Any],
    budget: Any = "min",
    steps: int = 2,
    layers: int = 2,
) -> Any:
    """Steps with the bits of eager, and the peak that was predicted. Returns the planned module."""
    torch.manual_seed(0)
    eager = Net(use, layers)
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    planned: Any = rockplan.solve(copy.deepcopy(eager), x, budget, options=QUICK)
    assert_same_steps(planned, eager, [(torch.randn(ROWS, WIDTH),) for _ in range(steps)])
    return planned


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """As a kernel: nothing of it is an operator."""
    found = torch.empty_like(x)
    numpy.divide(1, 1 + numpy.exp(-x.detach().numpy()), out=found.numpy())
    return found


@rockplan.opaque
class Silu(Function):
    """Saves an argument, and what is neither that nor a result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        RUNS["forward"] += 1
        s = sigmoid(x)
        ctx.save_for_backward(x, s)
        ctx.scale = scale
        return x * s * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        RUNS["backward"] += 1
        x, s = ctx.saved_tensors
        return gradient * ctx.scale * (s * (1 + x * (1 - s))), None


silu = Silu.apply


def test_a_function_runs_again() -> None:
    planned = train(lambda h: h + silu(h, 2.0), layers=4)
    x = torch.randn(ROWS, WIDTH)
    RUNS.clear()
    planned(x).square().sum().backward()
    assert RUNS["forward"] > 4 and RUNS["backward"] == 4
    RUNS.clear()
    with torch.no_grad():
        planned(x)
    assert RUNS == {"forward": 4}


def test_outside_of_plans_it_is_what_it_was() -> None:
    before = dict(vars(Silu))
    x = torch.randn(3, requires_grad=True)
    silu(x, 1.0).sum().backward()
    train(lambda h: silu(h), steps=1)
    assert vars(Silu) == before and rockplan.opaque(Silu) is Silu


class Loss(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_the_peak_is_as_predicted(budget: str) -> None:
    x = torch.randn(64, 4)
    planned: Any = rockplan.solve(Loss(lambda h: h + Scaled.apply(h)), x, budget, options=QUICK)

    def step() -> None:
        result = planned(x)
        loss = result * 2
        loss.backward()

    peak, left = rockplan.peak_live_bytes(step)
    assert (peak, left) == (planned.plan.peak_bytes, 0)
    assert planned.plan.peak_bytes <= planned.plan.budget_bytes


@rockplan.opaque
class Scaled(Function):
    """All of its memory is PyTorch's, which can be measured."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.sin())
        return x.cos().cos() * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].exp()


class Kind(enum.Enum):
    TWICE = 2


@rockplan.opaque
class Several(Function):
    """Results that are no tensors or need no gradient; attributes, tensors among them."""

    @staticmethod
    def forward(ctx: Any, x: Any, pair: Any, kind: Any, name: str, call: Any, none: None) -> Any:
        ctx.shape, ctx.kind, ctx.tensors = x.shape, kind, {"twice": [x * kind.value]}
        order = x.argsort(1)
        ctx.mark_non_differentiable(order)
        result = call(x) + pair[0]
        ctx.save_for_backward(result, None, x[1:])
        return result, order, name, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, order: Any, name: Any, third: Any) -> Any:
        ensure(name is None and third is not None)
        result, none, part = ctx.saved_tensors
        ensure(none is None and ctx.needs_input_grad == (True, *[False] * 5))
        gradient = first * ctx.kind.value + third * 3 + ctx.tensors["twice"][0] * result
        gradient[1:] += part
        return gradient.view(ctx.shape), None, None, None, None, None


@rockplan.opaque
class Sparing(Function):
    """With setup_context, default values, and gradients that are left out."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor, factor: float = 2.0) -> Any:
        return x * factor, y.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])
        ctx.factor = inputs[2]

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        (y,) = ctx.saved_tensors
        given = None if first is None else first * ctx.factor
        return given, None if second is None else second * y, None


@rockplan.opaque
class Views(Function):
    """Results and gradients that are arguments, and parts of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.save_for_backward(y.detach())
        made = torch.cat([x, y])
        return x, y.detach().t(), made[: len(x)], made[len(x) :]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradients[2], gradients[1].t() * y + gradients[3]


@rockplan.opaque
class InPlace(Function):
    """Autograd is told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + ctx.saved_tensors[0]


@rockplan.opaque
class Inner(Function):
    """Differentiates inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch.enable_grad():
            return x.sin() * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0]
        with torch.enable_grad():
            y = x.sin() * 2
        return torch.autograd.grad(y, x, gradient)[0]


def mode(scale: float) -> Any:
    """A member of an enumeration that looks like those of others."""

    class Mode(enum.Enum):
        A = 1

        def __repr__(self) -> str:
            return "A"

    Mode.scale = scale
    return Mode.A


MODES = mode(1.0), mode(5.0)


@rockplan.opaque
class OfMode(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mode: Any) -> torch.Tensor:
        ctx.scale = float(type(mode).scale)
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.scale, None


def moved(destination: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)


def _reversed(x: torch.Tensor) -> torch.Tensor:
    made, flipped = torch.empty_like(x), x.flip(0)
    moved(made, flipped)
    return made


@rockplan.opaque
class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _reversed(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _reversed(gradient.contiguous())


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@rockplan.opaque
class Applies(Function):
    """Is given a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[..., Any]) -> Any:
        ctx.save_for_backward(x)
        return function(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class Squarer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def square(self, x: torch.Tensor) -> torch.Tensor:
        return x.square() * self.scale


SQUARERS = Squarer(1.0), Squarer(2.0)
PARTIAL = functools.partial(torch.mul, other=2)


@rockplan.opaque
class WritesOthers(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        written(others[0], x.detach() * 2)
        return others[0] + x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.clone(), None


def several(h: torch.Tensor) -> torch.Tensor:
    x, order, name, third = Several.apply(h, [h.detach() * 2], Kind.TWICE, "name", double, None)
    assert name == "name"
    return x + order + third.tanh()


def views(h: torch.Tensor) -> torch.Tensor:
    a, b, c, d = Views.apply(h, h.tanh())
    return a.tanh() + b.t() + c * d


WORKING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "several": several,
    "sparing": lambda h: Sparing.apply(h, h.tanh())[0],
    "sparing, the other": lambda h: Sparing.apply(h, h.tanh(), 3.0)[1].tanh(),
    "sparing, both": lambda h: sum(Sparing.apply(h, h.tanh())),
    "views": views,
    "a lambda": lambda h: Applies.apply(h, lambda t: t * 2),
    "methods": lambda h: (
        Applies.apply(h, SQUARERS[0].square) + Applies.apply(h, SQUARERS[1].square)
    ),
    "a partial": lambda h: Applies.apply(h, PARTIAL),
    "in place": lambda h: InPlace.apply(h * 1).sin(),
    "a partial made anew": lambda h: Applies.apply(h, functools.partial(torch.mul, other=2)),
    "modes": lambda h: OfMode.apply(OfMode.apply(h, MODES[0]).tanh(), MODES[1]),
    "inner": lambda h: Inner.apply(h),
    "addresses": lambda h: Reversed.apply(h) + h,
    "others": lambda h: WritesOthers.apply(h, torch.zeros_like(h)),
    "twice the same": lambda h: Sparing.apply(h, h)[0],
    "parts of a tensor": lambda h: torch.cat([silu(p) for p in h.chunk(2, dim=1)], dim=1),
    "no gradient": lambda h: h + silu(torch.ones(WIDTH)),
}


@pytest.mark.parametrize("name", WORKING)
def test_bits_are_those_of_eager(name: str) -> None:
    train(WORKING[name])


# Of the shape of Liger's functions: kernels write where nothing tells autograd.


def written(target: torch.Tensor, source: torch.Tensor) -> None:
    """A kernel: no version is counted."""
    target.detach().numpy()[...] = source.numpy()


@rockplan.opaque
class SiluMul(Function):
    """Its gradients are in the memory of what was saved."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def backward(ctx: Any, dc: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        s = a.sigmoid()
        db = dc * s * a
        written(a, dc * b * (s * (1 + a * (1 - s))))
        written(b, db)
        return a, b


@rockplan.opaque
class RMSNorm(Function):
    """Its gradient is in the memory of the one that comes in."""

    @staticmethod
    def forward(ctx: Any, X: torch.Tensor, W: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.rsqrt(X.square().mean(-1, keepdim=True) + eps)
        ctx.eps = eps
        ctx.save_for_backward(X, W, rstd)
        return X * rstd * W

    @staticmethod
    def backward(ctx: Any, dY: torch.Tensor) -> Any:
        X, W, rstd = ctx.saved_tensors
        dW = (dY * X * rstd).sum(0)
        m = dY * W
        written(dY, rstd * (m - X * rstd.square() * (m * X).mean(-1, keepdim=True)))
        return dY, dW, None


@rockplan.opaque
class CrossEntropy(Function):
    """The gradient of the logits is in their memory from the forward on; reads a count of
    labels."""

    @staticmethod
    def forward(ctx: Any, _input: torch.Tensor, target: torch.Tensor, ignored: int) -> Any:
        mask = target != ignored
        count = max(int(mask.sum().item()), 1)
        logs = _input.detach().log_softmax(-1)
        safe = target.where(mask, 0)
        loss = -(logs.gather(1, safe[:, None])[:, 0] * mask).sum() / count
        gradient = logs.exp()
        gradient.scatter_add_(1, safe[:, None], -torch.ones_like(logs[:, :1]))
        written(_input, gradient * mask[:, None] / count)
        ctx.save_for_backward(_input.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        if not torch.equal(grad_output, torch.tensor(1.0)):
            written(gradient, gradient * grad_output)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = RMSNorm.apply(x, self.weight, 1e-6)
        return x + self.down(SiluMul.apply(self.gate(h), self.up(h)))


class LikeLiger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return CrossEntropy.apply(self.head(x), labels, -100)


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_a_model_of_functions_such_as_liger_has(budget: str) -> None:
    torch.manual_seed(0)
    eager = LikeLiger()
    sample = torch.randn(ROWS, WIDTH), torch.randint(11, (ROWS,))
    planned: Any = rockplan.solve(copy.deepcopy(eager), sample, budget, options=QUICK)
    for step in range(3):
        x, labels = torch.randn(ROWS, WIDTH), torch.randint(11, (ROWS,))
        labels[:step] = -100
        for net in (eager, planned):
            net.zero_grad()
            (net(x, labels) * (step + 1)).backward()
        assert_same_state(planned, eager, f"step {step}")


def test_autocast_inside() -> None:
    @rockplan.opaque
    class Product(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x @ x.t() @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return (gradient @ gradient.t()).to(gradient.dtype) @ ctx.saved_tensors[0]

    def step(net: nn.Module, x: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            result = net(x)
        result.float().square().sum().backward()

    torch.manual_seed(0)
    eager, x = Net(Product.apply), torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        planned: Any = rockplan.solve(copy.deepcopy(eager), x, "min", options=QUICK)
    for net in (eager, planned):
        step(net, x)
    assert_same_state(planned, eager, "under autocast")


class Applied:
    """A function that can be pickled."""

    function: Any

    def __call__(self, x: torch.Tensor) -> Any:
        return self.function.apply(x)


def test_copies_and_pickles_of_a_planned_module() -> None:
    planned = train(silu)
    x = torch.randn(ROWS, WIDTH)
    copied = copy.deepcopy(planned)
    for net in (planned, copied):
        net.zero_grad()
        net(x).sum().backward()
    assert_same_state(copied, planned, "a copy")
    planned.use = opened = Applied()
    opened.function = Silu
    loaded = pickle.loads(pickle.dumps(planned))
    loaded.zero_grad()
    loaded(x).sum().backward()
    assert_same_state(loaded, planned, "a pickle")
    assert loaded.plan.peak_bytes <= planned.plan.budget_bytes


class Preference(Function):
    """As losses of Liger: results inside of a result, and a backward that returns what was saved
    where the gradient that comes in is one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        x = x.detach()
        ctx.save_for_backward(2 * x)
        return x.square().sum(), (x.mean(0), [x.amax(0), "name"])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *others: Any) -> torch.Tensor:
        ensure(others == (None,))
        (saved,) = ctx.saved_tensors
        is_scaled = bool(torch.ne(gradient, torch.tensor(1.0)))
        return saved * gradient if is_scaled else saved


rockplan.opaque(Preference)


class Preferring(Net):
    def forward(self, x: torch.Tensor) -> Any:
        loss, (mean, (largest, name)) = Preference.apply(super().forward(x))
        ensure(name == "name" and not mean.requires_grad)
        return loss, mean, largest


def test_results_in_results_and_saved_gradients() -> None:
    torch.manual_seed(0)
    eager = Preferring(torch.tanh)
    planned: Any = rockplan.solve(
        copy.deepcopy(eager), torch.randn(ROWS, WIDTH), "min", options=QUICK
    )
    for scale in (1, 2, 1):
        x, results = torch.randn(ROWS, WIDTH), []
        for net in (eager, planned):
            net.zero_grad()
            results.append(net(x))
            (results[-1][0] * scale).backward()
        assert_same_state(planned, eager, f"scale {scale}")
        assert all(map(torch.equal, *results))


@rockplan.opaque
class Accumulating(Function):
    """Writes where nothing tells autograd, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        written(sums, sums + x.detach().sum(0))
        ctx.save_for_backward(x, x.detach() * 2)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, twice = ctx.saved_tensors
        written(twice, twice * gradient)
        return twice, None


def test_writes_in_both_directions() -> None:
    train(lambda h: h + Accumulating.apply(h, torch.zeros(WIDTH)))
    kind: Any = type(
        "Writing",
        (Function,),
        {"forward": staticmethod(_saves), "backward": staticmethod(_writes_saved)},
    )
    rockplan.opaque(kind)
    train(lambda h: kind.apply(h * 1))


def _kernel_relu(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x > 0)
    written(x, x.detach().relu())
    return x * 2


def _operator_clamp(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x > 0)
    return x.clamp_(0, 1) * 2


def _where_positive(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.contiguous()
    written(gradient, gradient * ctx.saved_tensors[0])
    return gradient * 2


@pytest.mark.parametrize("forward", [_kernel_relu, _operator_clamp])
def test_writes_that_leave_many_numbers_are_known(forward: Any) -> None:
    """Of numbers between 0 and 1 they leave all."""
    use = function_of(forward, _where_positive)

    def twice(h: torch.Tensor) -> torch.Tensor:
        made = h * 1
        return use(made) + made.detach()

    train(twice)


def test_trials_below_zero_end_before_lookups() -> None:
    """On CUDA a number that is no index ends the process."""
    said: list[str] = []

    def looks_up(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        index = (x.detach() * 4).long().clamp(-8, 7)
        try:
            return x * torch.arange(8.0)[index]
        except ValueError as error:
            said.append(str(error))
            raise

    train(function_of(looks_up))
    assert {*said} == {"aten.index.Tensor looks at made-up numbers"}


def test_a_derived_function_is_declared_itself() -> None:
    train(lambda h: h + DeclaredKernel.apply(h, 2.0))


def function_of(forward: Callable[..., Any], backward: Callable[..., Any] | None = None) -> Any:
    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward or (lambda ctx, g, *others: g.clone())),
    }
    kind: Any = type("Kernel", (Function,), members)
    return rockplan.opaque(kind).apply


def _sets(ctx: Any, x: torch.Tensor, value: Any) -> torch.Tensor:
    ctx.value = value
    return x.clone()


def _raising(*args: Any) -> Any:
    raise ValueError("not these numbers")


def _saves(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.save_for_backward(x)
    return x.clone()


def _writes_saved(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    written(ctx.saved_tensors[0], gradient)
    return gradient


takes_two = function_of(lambda ctx, x, other: x.clone())


class DerivedKernel(Silu):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2, None


class DerivedKernelWithSetup(Sparing):
    """Nothing of its own."""


class DeclaredKernel(DerivedKernel):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return DerivedKernel.forward(ctx, x * 2, scale)


rockplan.opaque(DeclaredKernel)

REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], list[str]]] = {
    "an object": (
        lambda h: takes_two(h, nn.Linear(2, 2)),
        ["is given a Linear", "numbers, text"],
    ),
    "a method of a module": (
        lambda h: takes_two(h, nn.Linear(2, 2).forward),
        ["is given a method", "numbers, text"],
    ),
    "derived": (
        lambda h: DerivedKernel.apply(h, 2.0),
        ["derived from tests.test_opaque.Silu", "rockplan.opaque(DerivedKernel)"],
    ),
    "derived, with setup_context": (
        lambda h: DerivedKernelWithSetup.apply(h, h),
        ["derived from tests.test_opaque.Sparing", "rockplan.opaque(DerivedKernelWithSetup)"],
    ),
    "does not run": (function_of(_raising), ["ValueError: not these numbers", "custom_op"]),
    "backward does not run": (
        function_of(lambda ctx, x: x.clone(), _raising),
        ["Kernel.backward", "custom_op"],
    ),
    "draws in Python": (
        function_of(lambda ctx, x: x * random.random()),
        ["draws random numbers"],
    ),
    "draws in numpy": (
        function_of(lambda ctx, x: x * float(numpy.random.rand())),
        ["draws random numbers"],
    ),
    "draws": (function_of(lambda ctx, x: x * torch.rand(4)), ["draws random numbers"]),
    "draws in the backward": (
        function_of(lambda ctx, x: x.clone(), lambda ctx, g: g * torch.rand(4)),
        ["draws random numbers"],
    ),
    "other numbers": (
        function_of(lambda ctx, x: (x.clone(), x.detach().view(torch.int32))),
        ["another kind of numbers"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    use, words = REFUSED[name]
    x = torch.randn(ROWS, WIDTH)
    python, arrays = random.getstate(), numpy.random.get_state()[2]

    def first(h: torch.Tensor) -> torch.Tensor:
        found = use(h)
        result: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return result

    net = Net(first)
    states = generator_states()
    with pytest.raises(rockplan.UnsupportedModel) as refused:
        rockplan.solve(net, x, "min", options=QUICK)
    assert all(word in str(refused.value) for word in [*words, "Kernel", "test_opaque.py:"])
    assert (random.getstate(), numpy.random.get_state()[2]) == (python, arrays)
    assert all(map(torch.equal, generator_states(), states))


def _by_sign(ctx: Any, x: torch.Tensor) -> Any:
    ctx.is_positive = bool(x.sum() > 0)
    return x.clone()


def _doubles_if_low(x: torch.Tensor) -> None:
    if x.sum() < -x.numel():
        x.detach().mul_(2)


CHANGING: dict[str, tuple[Any, str]] = {
    "an attribute": (function_of(_by_sign), "something else"),
    "a shape": (
        function_of(
            lambda ctx, x: x.new_zeros(1 + int(x.min() < 0), 3),
            lambda ctx, gradient: gradient.new_zeros(ROWS, WIDTH),
        ),
        "something else",
    ),
    "memory": (function_of(lambda ctx, x: x if x.sum() < 0 else x.clone()), "something else"),
    "a write": (
        function_of(lambda ctx, x: (_doubles_if_low(x), x.clone())[1]),
        "has written into",
    ),
    "a write of the backward": (
        function_of(
            lambda ctx, x: (ctx.save_for_backward(x), x.clone())[1],
            lambda ctx, g: (_doubles_if_low(ctx.saved_tensors[0]), g.clone())[1],
        ),
        "has written into",
    ),
    "a draw": (function_of(lambda ctx, x: x + (torch.rand(4) if x.sum() < 0 else 0)), "drawn"),
    "what is saved": (
        function_of(lambda ctx, x: (ctx.save_for_backward(x[: 1 + int(x.min() < 0)]), x * 1)[1]),
        "something else",
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_run_that_is_another_is_refused(name: str) -> None:
    use, words = CHANGING[name]
    net = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    nn.init.constant_(net[1].weight, 1.0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> Any:
            return use(self.net(x))

    x = torch.rand(ROWS, WIDTH)
    planned = rockplan.solve(Last(), x, "100%", options=QUICK)
    planned(x).sum().backward()
    with torch.no_grad():
        nn.init.constant_(net[1].weight, -1.0)
    with pytest.raises(rockplan.UnsupportedModel, match=words):
        planned(x).sum().backward()


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: rockplan.opaque(3), "takes a subclass of torch.autograd.Function"),
        (lambda: rockplan.opaque(nn.Linear), "takes a subclass of torch.autograd.Function"),
        (lambda: rockplan.opaque(double), "torch.library.custom_op"),
    ],
)
def test_declarations_that_cannot_be(declare: Callable[[], Any], words: str) -> None:
    before = REGISTERED[Silu]
    with pytest.raises(rockplan.RockplanError, match=words):
        declare()
    assert REGISTERED[Silu] is before
