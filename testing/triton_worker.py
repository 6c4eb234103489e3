"""Triton kernels on CPU, by Triton's interpreter, which has to be chosen before Triton is imported:
python -m testing.triton_worker NAME ... prints what came of each case as JSON."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import nn
from torch.autograd import Function

import rockplan
import testing  # noqa: F401
from rockplan.graph_builder.costs import call_costs
from rockplan.graph_builder.foreign.triton_writes import UnknownWrites, parameters_written
from testing.training import assert_same_state

call_costs._TIME_BOX_NS = 0
QUICK = rockplan.Options(cache=False, time_limit_s=2, without=("exchange", "proof"))
ROWS, WIDTH, BLOCK = 6, 8, 16


def _as_compiled() -> None:
    """The interpreter has numbers where compiled kernels have scalars, and makes cycles of Python
    objects that hold tensors."""
    convert, launch = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def with_floats(value: Any) -> Any:
        if type(value) is not float:
            return convert(value)
        handle = interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), tl.float32)
        return tl.core.tensor(handle, tl.float32)

    def launch_and_forget(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(self, *args, **kwargs)
        gc.collect(1)

    interpreter._implicit_cvt = with_floats
    interpreter.GridExecutor.__call__ = launch_and_forget


@triton.jit
def store_scaled(pointer, value, mask, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(pointer, value * SCALE, mask=mask)


@triton.jit
def silu_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    store_scaled(y_ptr + offsets, x * tl.sigmoid(x), mask, 1.0)


@triton.jit
def silu_backward(g_ptr, x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Over what was saved."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0)
    s = tl.sigmoid(x)
    tl.store(x_ptr + offsets, g * (s * (1 + x * (1 - s))), mask=mask)


tuned = triton.autotune(configs=[triton.Config({"BLOCK": BLOCK}, num_warps=2)], key=["n"])(
    silu_forward
)
by_rule = triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})(silu_forward)


@triton.jit
def scale_in_place(x_ptr, scale, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pointers = x_ptr + offsets
    x = tl.load(pointers, mask=offsets < n, other=0.0)
    tl.store(pointers, x * scale, mask=offsets < n)


@triton.jit
def column_sums(x_ptr, sums_ptr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, COLUMNS)
    x_ptr += tl.program_id(0) * COLUMNS
    tl.atomic_add(sums_ptr + columns, tl.load(x_ptr + columns))


@triton.jit
def takes_addresses(table_ptr, y_ptr, n):  # type: ignore[no-untyped-def]
    address = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(address, tl.load(y_ptr))


@triton.jit
def writes_several(a_ptr, b_ptr, index_ptr, n, WHICH: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.load(index_ptr)
    target, other = a_ptr, b_ptr
    if WHICH:
        target = b_ptr
    tl.store(target + index, tl.load(other))


def _grid(n: int) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


class Silu(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: str) -> torch.Tensor:
        y, n = torch.empty_like(x), x.numel()
        settings = {"BLOCK": BLOCK} if kernel == "silu_forward" else {}
        globals()[kernel][_grid(n)](x, y, n, **settings)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient, n = gradient.contiguous(), x.numel()
        silu_backward[(triton.cdiv(n, BLOCK),)](gradient, x, n=n, BLOCK=BLOCK)
        return x, None


class Scaled(Function):
    """Its gradient is in the memory of the one that comes in; divides by a count of labels."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, labels: torch.Tensor, is_tuned: bool = False
    ) -> torch.Tensor:
        ctx.count, ctx.is_tuned = int((labels != -100).sum().item()), is_tuned
        return Scaled.scale(x.clone(), ctx)

    @staticmethod
    def scale(x: torch.Tensor, ctx: Any) -> torch.Tensor:
        if ctx.is_tuned:
            restored[(1,)](x, 1.0 / ctx.count, x.numel())
        else:
            scale_in_place[(1,)](x, 1.0 / ctx.count, x.numel(), BLOCK=64)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Scaled.scale(gradient.contiguous(), ctx), None, None


class Bias(Function):
    """Sums by atomic additions."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, kernel: Any = column_sums
    ) -> torch.Tensor:
        ctx.kernel = kernel
        return x + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sums = torch.zeros(WIDTH)
        ctx.kernel[(ROWS,)](gradient.contiguous(), sums, COLUMNS=WIDTH)
        return gradient, sums, None


class Shared(Function):
    """Reads in an operator what its kernel has written over, by another tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        flat = x.view(-1)
        scale_in_place[(1,)](flat, 2.0, x.numel(), BLOCK=128)
        return gradient * x


class ByTurns:
    """Measures in a way that each tuning of two configurations takes the one that the last did
    not, and with memory to evict caches, as Triton does."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, call: Callable[[], None], quantiles: Any = None) -> list[float]:
        scratch = torch.zeros(4096)
        call()
        del scratch
        self.count += 1
        return [float(self.count % 4 in (1, 0))] * 3


@triton.jit
def chunk_sums(x_ptr, w_ptr, y_ptr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of rows, whose bits depend on CHUNK."""
    row = tl.program_id(0) * COLUMNS
    total = tl.zeros((1,), tl.float32)
    for start in tl.static_range(0, COLUMNS, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        weight = tl.load(w_ptr + columns).to(tl.float32)
        total += tl.sum(tl.load(x_ptr + row + columns) * weight, axis=0)
    tl.store(y_ptr + tl.program_id(0) + tl.arange(0, 1), total)


def _as_many_as_dimensions(configs: list[Any], named: dict[str, Any], **others: Any) -> list[Any]:
    return configs[: named["x_ptr"].dim()]


def _tuned(kernel: Any, *settings: dict[str, int], **how: Any) -> Any:
    configs = [triton.Config(one, num_warps=2) for one in settings]
    return triton.autotune(configs=configs, do_bench=ByTurns(), **how)(kernel)


by_turns = _tuned(chunk_sums, {"CHUNK": 2}, {"CHUNK": 8}, key=["COLUMNS"])
pruned = _tuned(
    *(chunk_sums, {"CHUNK": 2}, {"CHUNK": 8}, {"CHUNK": 3}),
    key=["COLUMNS"],
    prune_configs_by={"early_config_prune": _as_many_as_dimensions},
)
restored = _tuned(scale_in_place, {"BLOCK": 64}, {"BLOCK": 128}, key=["n"], restore_value=["x_ptr"])
zeroed = _tuned(column_sums, {}, {"num_stages": 2}, key=["COLUMNS"], reset_to_zero=["sums_ptr"])


class FromFile(triton.runtime.autotuner.Autotuner):  # type: ignore[misc,name-defined]
    """As that of fla, which looks for a configuration in a file: it may be none of its own."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, BLOCK=2 * BLOCK)


from_file = FromFile(
    silu_forward, silu_forward.arg_names, [triton.Config({"BLOCK": BLOCK})], ["n"], None, None
)


class ChunkSums(Function):
    """Of x times weights of another dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kernel: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        y = x.new_empty(len(x), 1)
        kernel[(len(x),)](x, y_ptr=y, w_ptr=weight, COLUMNS=x.shape[1])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0].float(), None, None


Layer = Callable[["Block", torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self.layer = layer

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self, x, labels)


class Net(nn.Module):
    def __init__(self, layer: Layer, loss: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer) for _ in range(3))
        self.loss = loss
        if loss is not None:
            self.head = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, labels)
        return x.square().mean() if self.loss is None else self.loss(self, x, labels)


def _silu(kernel: str) -> Layer:
    return lambda block, x, labels: block.down(Silu.apply(block.up(x), kernel))


def _sums(kernel: Any) -> Layer:
    weight = torch.linspace(0.1, 1, 2 * WIDTH, dtype=torch.bfloat16)
    return lambda block, x, labels: x * ChunkSums.apply(block.up(x), weight, kernel)


def _raw(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Outside of a function, of which autograd is told nothing."""
    h = block.up(x)
    mask = torch.empty_like(h)
    silu_forward[(triton.cdiv(h.numel(), BLOCK),)](h.detach(), mask, h.numel(), BLOCK=BLOCK)
    return block.down(h * mask)


class Hooked:
    """What a kernel is given that is neither a tensor nor a number."""


def _two_dtypes(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    h = block.up(x).detach()
    silu_forward[(1,)](h[:1].view(torch.int32), h[1:], WIDTH, BLOCK=BLOCK)
    return block.down(h)


class Halves(Function):
    """Its kernels take parts of one tensor: of the result, and of what is saved, which the backward
    writes over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        silu_forward[(2,)](y[: ROWS // 2], y[ROWS // 2 :], y.numel() // 2, BLOCK=BLOCK)
        ctx.save_for_backward(x * 2)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        first, second = saved[: ROWS // 2], saved[ROWS // 2 :]
        silu_forward[(2,)](first, second, first.numel(), BLOCK=BLOCK)
        return gradient * torch.cat([first, second])


def _addresses(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    takes_addresses[(1,)](labels, x, 1)
    return block.down(block.up(x))


def _object(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    silu_forward[(1,)](x, torch.empty_like(x), Hooked(), BLOCK=BLOCK)
    return block.down(block.up(x))


def _with_hook(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    configuration = triton.Config({"BLOCK": BLOCK}, pre_hook=lambda args: None)
    kernel = triton.autotune(configs=[configuration], key=["n"])(silu_forward)
    kernel[(1,)](x, torch.empty_like(x), x.numel())
    return block.down(block.up(x))


def _reads_values(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    class Read(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            scale_in_place[(1,)](y, 2.0, y.numel(), BLOCK=64)
            return y * float(y.max())

    return block.down(block.up(Read.apply(x)))


def _grid_of_a_module(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    h = block.up(x)
    mask, n = torch.empty_like(h), h.numel()
    width = block.down
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]) + 0 * width.in_features,)  # noqa: E731
    from_file[grid](h.detach(), mask, n)
    return block.down(h * mask)


LAYERS: dict[str, Layer] = {
    "writes what is saved": _silu("silu_forward"),
    "autotuned": _silu("tuned"),
    "heuristics": _silu("by_rule"),
    "in place, a count": lambda block, x, labels: block.down(
        block.up(Scaled.apply(x.tanh() + block.bias, labels))
    ),
    "parts": lambda block, x, labels: block.down(Halves.apply(block.up(x))),
    "tuned": _sums(by_turns),
    "tuned, of a few": _sums(pruned),
    "tuned, restored": lambda block, x, labels: block.down(
        block.up(Scaled.apply(x.tanh() + block.bias, labels, True))
    ),
    "tuned, zeroed": lambda block, x, labels: Bias.apply(x.tanh(), block.bias, zeroed),
    "tuned elsewhere": _silu("from_file"),
    "atomic": lambda block, x, labels: Bias.apply(x.tanh(), block.bias),
    "outside of a function": _raw,
}
REFUSED: dict[str, Layer] = {
    "addresses": _addresses,
    "an object": _object,
    "a hook": _with_hook,
    "two dtypes": _two_dtypes,
    "overwritten": lambda block, x, labels: block.down(Shared.apply(block.up(x))),
    "values": _reads_values,
}
WRITES = {
    "silu_forward": (silu_forward, {}),
    "silu_backward": (silu_backward, {}),
    "column_sums": (column_sums, {}),
    "writes_several": (writes_several, {"WHICH": True}),
}


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return 1 / tl.sqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


def _without_libdevice(package: str) -> None:
    """The interpreter has none."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            for function, own in (("rsqrt", _rsqrt), ("tanh", _tanh)):
                if hasattr(module, function):
                    setattr(module, function, own)


def liger() -> tuple[dict[str, Layer], dict[str, Callable[..., torch.Tensor]]]:
    import liger_kernel.ops as ops
    from liger_kernel.chunked_loss.dpo_loss import (
        LigerFusedLinearDPOFunction,
        LigerFusedLinearDPOLoss,
    )

    _without_libdevice("liger_kernel")
    for kind in (
        *(ops.LigerCrossEntropyFunction, ops.LigerFusedLinearCrossEntropyFunction),
        *(ops.LigerKLDivLossFunction, ops.LigerTVDLossFunction, LigerFusedLinearDPOFunction),
    ):
        rockplan.opaque(kind)

    def norm(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        apply = ops.LigerRMSNormFunction.apply
        return block.down(block.up(apply(x.tanh(), block.bias, 1e-6, 0.0, "llama", True)))

    def layer_norm(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        apply = ops.LigerLayerNormFunction.apply
        return block.down(block.up(apply(x.tanh(), block.bias, 2 * block.bias, 1e-6)))

    def rope(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k = (linear(x).view(1, 2, ROWS, WIDTH) for linear in (block.up, block.gate))
        angles = torch.arange(ROWS)[None, :, None] * torch.linspace(0.1, 1, WIDTH)
        q, k = ops.LigerRopeFunction.apply(q, k, angles.cos(), angles.sin())
        return block.down((q + k).reshape(ROWS, 2 * WIDTH))

    def gated(function: Any) -> Layer:
        return lambda block, x, labels: block.down(function.apply(block.gate(x), block.up(x)))

    def cross_entropy(net: Net, x: torch.Tensor, labels: torch.Tensor) -> Any:
        rest = (None, -100, 0.0, 0.0, "mean", None, False)
        return ops.LigerCrossEntropyFunction.apply(x * 1, labels, *rest)[0]

    def fused(net: Net, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return ops.LigerFusedLinearCrossEntropyFunction.apply(x, net.head, labels)[0]

    def divergence(net: Net, x: torch.Tensor, labels: torch.Tensor) -> Any:
        p, q = x.log_softmax(-1), net.head[:ROWS].softmax(-1).detach()
        return ops.LigerKLDivLossFunction.apply(p, q, "batchmean", False, 1e-10)

    def variation(net: Net, x: torch.Tensor, labels: torch.Tensor) -> Any:
        p, q = x.softmax(-1), net.head[:ROWS].softmax(-1).detach()
        return ops.LigerTVDLossFunction.apply(p, q, None, "batchmean", -100)

    def preference(net: Net, x: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = LigerFusedLinearDPOLoss(compiled=False, use_ref_model=False)
        return loss(net.head, x.view(2, ROWS // 2, WIDTH), labels.view(2, ROWS // 2))[0]

    layers = {"liger rms norm": norm, "liger layer norm": layer_norm, "liger rope": rope}
    layers |= {"liger swiglu": gated(ops.LigerSiLUMulFunction)}
    layers |= {"liger geglu": gated(ops.LigerGELUMulFunction)}
    losses = {"liger cross entropy": cross_entropy, "liger fused cross entropy": fused}
    losses |= {"liger kl": divergence, "liger tvd": variation, "liger dpo": preference}
    return layers, losses


def liger_llama() -> str:
    """'ok' where a model of transformers, as Liger makes it, trains as in eager execution with one
    plan, whatever the number of labels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaConfig, LlamaForCausalLM

    apply_liger_kernel_to_llama()
    _without_libdevice("liger_kernel")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    eager = LlamaForCausalLM(config)
    batches = []
    for step in range(3):
        ids = torch.randint(32, (2, 8))
        batches.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) <= step, -100)})
    planned: Any = rockplan.solve(
        copy.deepcopy(eager), (), "min", sample_kwargs=batches[0], options=QUICK
    )
    for step, batch in enumerate(batches):
        for model in (eager, planned):
            model.zero_grad()
            model(**batch).loss.backward()
        assert_same_state(planned, eager, f"step {step}")
    assert len(planned.plans) == 1
    peak = rockplan.peak_live_bytes(lambda: planned(**batches[0]).loss.backward()).peak_bytes
    return "ok" if peak <= planned.plan.peak_bytes <= planned.plan.budget_bytes else f"{peak} bytes"


def fla() -> dict[str, Layer]:
    """Functions of flash-linear-attention, whose kernels are tuned."""
    from fla.modules.convolution import causal_conv1d
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.modules.rotary import rotary_embedding
    from fla.ops.gla import fused_recurrent_gla

    property_of = triton.runtime.autotuner.Autotuner
    property_of.do_bench = property(lambda tuner: _BENCHES.setdefault(id(tuner), ByTurns()))

    def heads(h: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return h.view(1, ROWS, count, -1).chunk(2, -1)

    def norm(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h, gate = block.up(x).view(1, ROWS, 2, WIDTH).unbind(2)
        return block.down(block.gate(rms_norm_gated(h, gate, block.bias, None)[0]))

    def convolution(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = block.bias[:, None].expand(WIDTH, 4).contiguous()
        return block.down(block.up(causal_conv1d(x[None], weight, activation="silu")[0][0]))

    def rotary(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(ROWS)[:, None] * torch.linspace(0.1, 1, WIDTH // 2)
        h = block.up(x).view(1, ROWS, 2, WIDTH)
        return block.down(rotary_embedding(h, angles.cos(), angles.sin()).reshape(ROWS, 2 * WIDTH))

    def recurrent(block: Block, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k = heads(block.up(x), 1)
        v, gate = heads(block.gate(x), 1)
        found = fused_recurrent_gla(q, k, v, gate.sigmoid().log())[0][0, :, 0]
        return x + found

    return {
        "fla gated norm": norm,
        "fla convolution": convolution,
        "fla rotary": rotary,
        "fla recurrent": recurrent,
    }


_BENCHES: dict[int, ByTurns] = {}


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(WIDTH, (ROWS,))
    labels[:1] = -100
    return torch.randn(ROWS, WIDTH), labels


def trained(layer: Layer, loss: Callable[..., torch.Tensor] | None, budget: str) -> str:
    """'ok' where two steps have the bits of eager, and the peak is at most the one predicted."""
    torch.manual_seed(0)
    eager = Net(layer, loss)
    planned: Any = rockplan.solve(copy.deepcopy(eager), _batch(0), budget, options=QUICK)
    for step in range(2):
        batch = _batch(step)
        for net in (eager, planned):
            net.zero_grad()
            (net(*(t.clone() for t in batch)) * (step + 1)).backward()
        assert_same_state(planned, eager, f"step {step}")
    given = _batch(0)
    peak = rockplan.peak_live_bytes(lambda: planned(*given).backward()).peak_bytes
    return "ok" if peak <= planned.plan.peak_bytes <= planned.plan.budget_bytes else f"{peak} bytes"


def first_step(layer: Layer) -> str:
    """'ok' where the first step of this process, in which kernels may be tuned, is within the peak,
    with whatever profile and plan are in the cache."""
    torch.manual_seed(0)
    options = dataclasses.replace(QUICK, cache=True)
    planned: Any = rockplan.solve(Net(layer, None), _batch(0), "min", options=options)
    given = _batch(0)
    for parameter in planned.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peak = rockplan.peak_live_bytes(lambda: planned(*given).backward(), warmup=0).peak_bytes
    return "ok" if peak <= planned.plan.peak_bytes else f"{peak} of {planned.plan.peak_bytes} bytes"


def outcome(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            return run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def written(name: str) -> list[str]:
    kernel, constants = WRITES[name]
    return sorted(parameters_written(kernel.fn, constants))


def main(wanted: list[str]) -> None:
    _as_compiled()
    layers, losses = ({}, {}) if "liger" not in wanted else liger()
    if "fla" in wanted:
        layers |= fla()
    found: dict[str, Any] = {}
    if "own" in wanted:
        layers |= LAYERS
        plain = functools.partial(trained, loss=None, budget="min")
        found |= {n: outcome(functools.partial(plain, layer)) for n, layer in REFUSED.items()}
        found |= {f"writes {n}": outcome(functools.partial(written, n)) for n in WRITES}
        found["undetermined"] = _undetermined()
        found["unknown grid"] = outcome(functools.partial(plain, _grid_of_a_module))
    if "first step" in wanted:
        for name in ("tuned, restored", "tuned, zeroed"):
            found[name] = outcome(functools.partial(first_step, LAYERS[name]))
    for name, layer in layers.items():
        found[name] = outcome(functools.partial(trained, layer, None, "min"))
    if "llama" in wanted:
        liger()
        found["llama"] = outcome(liger_llama)
    for name, loss in losses.items():
        plain_layer = lambda block, x, labels: block.down(block.up(x).tanh())  # noqa: E731
        found[name] = outcome(functools.partial(trained, plain_layer, loss, "min"))
    print(json.dumps(found))


def _undetermined() -> str:
    try:
        parameters_written(takes_addresses.fn, {})
    except UnknownWrites as unknown:
        return str(unknown)
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
