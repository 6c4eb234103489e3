"""Networks drawn at random, of operations that real models use, for `benchmarks/fuzz.py`.

All values between operations have one shape, (batch, time, width), so that any operation can follow
any other; what an operation needs in other shapes it makes itself.
"""

from __future__ import annotations

import cmath
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Operation:
    """`apply(module, *values)` of `arity` values; `make(width)` is its module, if it has one.

    in_place: it changes an operand, or is often read by what does."""

    arity: int
    apply: Callable[..., Tensor]
    make: Callable[[int], nn.Module] | None = None
    in_place: bool = False


OPERATIONS: dict[str, Operation] = {}

CHANGED = 0.2
"""Of the networks, how many are of operations in place."""


def _values(name: str, arity: int, apply: Callable[..., Tensor]) -> None:
    OPERATIONS[name] = Operation(arity, lambda _, *values: apply(*values))


def _module(
    name: str,
    make: Callable[[int], nn.Module],
    apply: Callable[..., Tensor] = lambda module, x: module(x),
    arity: int = 1,
) -> None:
    OPERATIONS[name] = Operation(arity, apply, make)


def _changes(
    name: str,
    arity: int,
    apply: Callable[..., Tensor],
    make: Callable[[int], nn.Module] = nn.Identity,
) -> None:
    """`apply(module, *values)`, also where networks are mostly of such operations."""
    OPERATIONS[name] = Operation(arity, apply, make, in_place=True)


class _Scale(nn.Module):
    """A parameter, and a buffer that each training step moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
                self.count += 1
        return (x - self.mean) * self.weight


class _Adapter(nn.Module):
    """A frozen projection and a trained one of low rank beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.up(functional.dropout(self.down(x), 0.1, self.training))
        return y


class _Attention(nn.Module):
    """Attention written out, with a causal mask and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        scores = q @ k.transpose(-2, -1) * (width // 2) ** -0.5
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        scores = functional.dropout(scores, 0.1, self.training)
        y: Tensor = self.out((scores @ v).transpose(1, 2).reshape(batch, time, width))
        return y


class _Experts(nn.Module):
    """Two experts, weighted by a router, all of them executed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
        y = torch.zeros_like(x)
        for position, expert in enumerate(self.experts):
            y = y + expert(x) * weights * (chosen == position)
        return y


CALLS: list[str] = []
"""What was checked since it was last emptied, in order."""


def _numbers(values: Any) -> Iterator[complex]:
    for value in values if isinstance(values, list) else [values]:
        yield from _numbers(value) if isinstance(value, list) else [value]


@torch.library.custom_op("rockplan_benchmarks::check", mutates_args=())
def check(x: Tensor, where: str) -> None:
    """Has no result, and is called to raise. It makes no tensors: what operators that nobody knows
    need comes on top of a predicted peak."""
    CALLS.append(where)
    if all(map(cmath.isinf, _numbers(x.tolist()))):
        raise ValueError(f"nothing finite in the {where}")


class _Checked(torch.autograd.Function):
    """Looks at what comes in, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        check(x, "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        check(gradient, "backward")
        return gradient


def _asserted(x: Tensor) -> Tensor:
    check(x.detach() * 2, "forward")
    torch._assert_async(x.isfinite().any() | x.isnan().any())
    return x


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class _Checkpointed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return y


def _as_channels(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x.transpose(1, 2)).transpose(1, 2)
    return y


def _as_image(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x.unsqueeze(1)).mean(1)
    return y


def _first(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)[0]
    return y


def _halves(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)[0]
    return y[..., : x.shape[-1]] + y[..., x.shape[-1] :]


def _filled(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, ::2] = x[:, ::2] * 2
    y[:, 1::2] = x[:, 1::2].sigmoid()
    return y


def _rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * 0.1
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def _half_precision(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x @ x.transpose(1, 2) @ x).to(x.dtype)


def _in_place(x: Tensor) -> Tensor:
    y = x * 0.5
    y.add_(1.0).mul_(2.0)
    y[:, 0] -= 1.0
    return y


def _index_put(x: Tensor) -> Tensor:
    y = x.clone()
    y.index_put_((torch.tensor([0, 1]), torch.tensor([1, 0])), x[0, :2].tanh())
    return y


def _scattered(x: Tensor) -> Tensor:
    values, places = x.topk(3, dim=-1)
    return torch.zeros_like(x).scatter_add(-1, places, values)


def _spectrum(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1)


def _complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * pairs.conj() + pairs).flatten(-2)


def _solved(x: Tensor) -> Tensor:
    gram = x @ x.transpose(1, 2) + 4 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(gram, x)


def _attended(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z: Tensor = module(x, y, y)[0]
    return z


def _from_memory(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z: Tensor = module(x, y)
    return z


def _part_into_part(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    x[..., :half].add_(y[..., half:])
    return x


def _later_steps(_: nn.Module, x: Tensor) -> Tensor:
    part = x[:, 1:]
    part += 1.0
    return x.clone()


def _through_a_view(_: nn.Module, x: Tensor) -> Tensor:
    x.unsqueeze(0).transpose(1, 2).sub_(0.5)
    return x


def _two_sums(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z += module(y)
    z -= y.sigmoid()
    return z


def _accumulated(modules: nn.ModuleList, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for module in modules:
        y += module(x)
    return y


_module("linear", lambda w: nn.Linear(w, w))
_module("mlp", lambda w: nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w)))
_module("swish", lambda w: nn.Sequential(nn.Linear(w, w, bias=False), nn.SiLU(inplace=True)))
_module("relu in place", lambda w: nn.Sequential(nn.Linear(w, w), nn.ReLU(inplace=True)))
_module("weight norm", lambda w: parametrizations.weight_norm(nn.Linear(w, w)))
_module("spectral norm", lambda w: parametrizations.spectral_norm(nn.Linear(w, w)))
_module("adapter", _Adapter)
_module("experts", _Experts)
_module("attention", _Attention)
_module("scale", _Scale)
_module("prelu", nn.PReLU)
_module("checkpointed", _Checkpointed)
_module("dropout", lambda _: nn.Dropout(0.3))
_module("dropout in place", lambda w: nn.Sequential(nn.Linear(w, w), nn.Dropout(0.3, inplace=True)))
_module("alpha dropout", lambda _: nn.AlphaDropout(0.2))
_module("dropout of features", lambda _: nn.Dropout1d(0.3))
_module("rrelu", lambda _: nn.RReLU())
_module("layer norm", nn.LayerNorm)
_module("rms norm", nn.RMSNorm)
_module("group norm", lambda w: nn.GroupNorm(2, w), _as_channels)
_module("batch norm", nn.BatchNorm1d, _as_channels)
_module("instance norm", lambda w: nn.InstanceNorm1d(w, affine=True), _as_channels)
_module("statistics", lambda w: nn.InstanceNorm1d(w, track_running_stats=True), _as_channels)
_module("convolution", lambda w: nn.Conv1d(w, w, 3, padding=1), _as_channels)
_module("depthwise", lambda w: nn.Conv1d(w, w, 3, padding=1, groups=w), _as_channels)
_module("transposed", lambda w: nn.ConvTranspose1d(w, w, 3, padding=1), _as_channels)
_module(
    "image", lambda w: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)), _as_image
)
_module("pooled", lambda w: nn.MaxPool1d(3, 1, 1), _as_channels)
_module("gru", lambda w: nn.GRU(w, w, batch_first=True), _first)
_module("lstm", lambda w: nn.LSTM(w, w, 2, batch_first=True, dropout=0.2), _first)
_module("both ways", lambda w: nn.GRU(w, w, batch_first=True, bidirectional=True), _halves)
_module("recurrent", lambda w: nn.RNN(w, w, batch_first=True), _first)
_module("encoder", lambda w: nn.TransformerEncoderLayer(w, 2, 2 * w, batch_first=True))
_module("decoder", lambda w: nn.TransformerDecoderLayer(w, 2, w, batch_first=True), _from_memory, 2)
_module("heads", lambda w: nn.MultiheadAttention(w, 2, 0.1, batch_first=True), _attended, 2)
_module("bilinear", lambda w: nn.Bilinear(w, w, w), _from_memory, 2)
_module(
    "embedding",
    lambda w: nn.Embedding(w, w, padding_idx=0),
    lambda module, x: module(x.argmax(-1)) + x,
)

_values("add", 2, torch.add)
_values("multiply", 2, torch.mul)
_values("residual", 2, lambda x, y: x + y.tanh())
_values("attend", 2, lambda x, y: functional.scaled_dot_product_attention(x, y, y))
_values("causal", 1, lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True))
_values("einsum", 2, lambda x, y: torch.einsum("btw,bsw,bsv->btv", x, y, y))
_values("choose", 2, lambda x, y: torch.where(x > y, x, y.detach()))
_values("concatenate", 2, lambda x, y: torch.cat([x, y], -1).unflatten(-1, (2, -1)).mean(-2))
_values("gated", 2, lambda x, y: functional.glu(torch.cat([x, y], -1)))
_values("lerp", 2, lambda x, y: torch.lerp(x, y, 0.3))
_values("addcmul", 3, lambda x, y, z: torch.addcmul(x, y, z, value=0.5))
_values("stack", 3, lambda *values: torch.stack(values).amax(0))
_values("added in place", 2, lambda x, y: (x * 2).add_(y))
_values("into the operand", 2, lambda x, y: x.add_(y))
_values("gelu", 1, lambda x: functional.gelu(x, approximate="tanh"))
_values("softmax", 1, lambda x: x.softmax(-1))
_values("log softmax", 1, lambda x: x.log_softmax(1))
_values("sum of exponentials", 1, lambda x: x - x.logsumexp(-1, keepdim=True))
_values("cumulated", 1, lambda x: x.cumsum(1) * 0.1)
_values("product", 1, lambda x: (x * 0.1 + 1).cumprod(1))
_values("sorted", 1, lambda x: x.sort(dim=-1).values)
_values("scattered", 1, _scattered)
_values("gathered", 1, lambda x: x.gather(1, x.argsort(1)))
_values(
    "selected",
    1,
    lambda x: x.index_select(1, torch.arange(x.shape[1], device=x.device).flip(0)),
)
_values("rolled", 1, lambda x: x.roll(1, 1).flip(-1))
_values("padded", 1, lambda x: functional.pad(x, (1, 1))[..., 2:])
_values("split", 1, lambda x: torch.cat([part * i for i, part in enumerate(x.split(3, 1))], 1))
_values("clamped", 1, lambda x: x.clamp(-0.5, 0.5))
_values("largest", 1, lambda x: x * x.max(1, keepdim=True).values)
_values("normalized", 1, lambda x: functional.normalize(x, dim=-1))
_values("deviation", 1, lambda x: x / (x.std(-1, keepdim=True) + 1))
_values("filled", 1, _filled)
_values("rotated", 1, _rotated)
_values("half precision", 1, _half_precision)
_values("double", 1, lambda x: (x.double() ** 2).mean(-1, keepdim=True).to(x.dtype) * x)
_values("in place", 1, _in_place)
_values("index put", 1, _index_put)
_values("spectrum", 1, _spectrum)
_values("complex", 1, _complex)
_values("solved", 1, _solved)
_values("cube", 1, lambda x: _Cube.apply(x.clamp(-2, 2)))
_values("checked", 1, lambda x: _Checked.apply(x))
_values("asserted", 1, _asserted)
_values("noise", 1, lambda x: x + torch.randn_like(x) * 0.1)
_values("noise, twice", 1, lambda x: x * torch.rand(x.shape) + torch.rand(x.shape[-1]))
_values("bernoulli", 1, lambda x: x * torch.bernoulli(x.detach().sigmoid()))
_values("gumbel", 1, lambda x: functional.gumbel_softmax(x, hard=True))
_values("expanded", 1, lambda x: x.mean(1, keepdim=True).expand_as(x))
_values("strided", 1, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
_values("unfolded", 1, lambda x: functional.pad(x, (1, 1)).unfold(-1, 3, 1).mean(-1))
_values("resized", 1, lambda x: functional.interpolate(x, scale_factor=2.0)[..., ::2])
_values("straight through", 1, lambda x: x + (x.round() - x).detach())
_values("view", 1, lambda x: x.flatten(1).view_as(x))
_values("nan to num", 1, lambda x: (x / x.detach().relu()).nan_to_num(0.0, 1.0, -1.0))

_changes("linear, then changed", 1, lambda module, x: module(x), lambda w: nn.Linear(w, w))
_changes("linear into", 2, lambda module, x, y: x.add_(module(y)), lambda w: nn.Linear(w, w))
_changes("tanh into", 2, lambda _, x, y: x.add_(y.tanh()))
_changes("doubled", 1, lambda _, x: x.mul_(2.0))
_changes("relu into", 1, lambda _, x: functional.relu_(x))
_changes("part into part", 2, _part_into_part)
_changes("later steps", 1, _later_steps)
_changes("through a view", 1, _through_a_view)
_changes("strided, then changed", 1, lambda _, x: x.transpose(1, 2).contiguous().transpose(1, 2))
_changes("dropped, then changed", 1, lambda _, x: functional.dropout(x, 0.3))
_changes("detached, then changed", 1, lambda _, x: x.detach())
_changes("two sums", 2, _two_sums, lambda w: nn.Linear(w, w))
_changes("accumulated", 1, _accumulated, lambda w: nn.ModuleList(nn.Linear(w, w) for _ in "abc"))


class Step(nn.Module):
    """One operation, by name, so that networks can be pickled."""

    def __init__(self, name: str, module: nn.Module | None) -> None:
        super().__init__()
        self.name, self.module = name, module

    def forward(self, *values: Tensor) -> Tensor:
        return OPERATIONS[self.name].apply(self.module, *values)


class Network(nn.Module):
    """Steps that read earlier values: program[i] is (step, positions of the values it reads).

    returned: positions of the values in the result; style: how they are returned ('tensor',
    'tuple', 'mapping', 'loss', or 'both': a mapping with a loss)."""

    def __init__(
        self,
        steps: list[Step],
        program: list[tuple[int, tuple[int, ...]]],
        returned: tuple[int, ...],
        style: str,
    ) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.program, self.returned, self.style = program, returned, style

    def forward(
        self, *inputs: Tensor, scale: float = 1.0, into: dict[str, Any] | None = None
    ) -> Any:
        """into: gets the results, and is returned."""
        values = [inputs[0] * scale, *inputs[1:]]
        for step, reads in self.program:
            values.append(self.steps[step](*(values[position] for position in reads)))
        results = [values[position] for position in self.returned]
        # What a caller adds to the gradient of an input comes in another order (docs/limits.md).
        results = [r * 1 if r.requires_grad and r.is_leaf else r for r in results]
        loss = torch.stack([result.float().pow(2).mean() for result in results]).sum()
        if into is not None:
            into["parts"][:] = results
            into |= {"loss": loss, "inputs": inputs, "last": results[-1]}
            return into
        if self.style == "tensor":
            return results[-1]
        if self.style == "tuple":
            return tuple(results)
        if self.style == "loss":
            return loss
        mapping = {f"result {i}": result for i, result in enumerate(results)}
        return mapping if self.style == "mapping" else {"loss": loss, **mapping, "scale": scale}

    def __str__(self) -> str:
        inputs = 1 + min(i for i, _ in enumerate(self.program))
        lines = [f"{self.steps[s].name}{reads}" for s, reads in self.program]
        return f"{'; '.join(lines)} -> {self.style}{self.returned} ({inputs})"


def network(rng: random.Random) -> tuple[Network, tuple[Tensor, ...]]:
    """A network and its inputs; parameters and inputs are drawn from `rng`, too."""
    torch.manual_seed(rng.getrandbits(32))
    width, time, batch = rng.choice((8, 16, 32)), rng.choice((6, 8, 12)), rng.choice((2, 4, 8))
    inputs = [torch.randn(batch, time, width) for _ in range(rng.choice((1, 1, 2)))]
    for value in inputs:
        value.requires_grad_(rng.random() < 0.3)
    changed = rng.random() < CHANGED
    names = [name for name, o in OPERATIONS.items() if o.in_place or not changed]
    steps: list[Step] = []
    program: list[tuple[int, tuple[int, ...]]] = []
    values = len(inputs)
    for _ in range(rng.randint(2, 14)):
        if steps and rng.random() < 0.15:
            step = rng.randrange(len(steps))
        else:
            name = rng.choice(names)
            make = OPERATIONS[name].make
            step = len(steps)
            steps.append(Step(name, make(width) if make else None))
        # Mostly what was made last, so that networks are deep.
        reads = [
            values - 1 if rng.random() < 0.7 else rng.randrange(values)
            for _ in range(OPERATIONS[steps[step].name].arity)
        ]
        program.append((step, tuple(reads)))
        values += 1
    returned = {values - 1, *(rng.randrange(values) for _ in range(rng.choice((0, 0, 1, 2))))}
    style = rng.choice(("tensor", "tuple", "mapping", "loss", "loss", "both"))
    return Network(steps, program, tuple(sorted(returned)), style).train(), tuple(inputs)
