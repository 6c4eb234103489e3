"""Models on the CPU that `fit` asks about for a GPU: the operators that they call on CUDA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import rockplan
from rockplan.cli.main import app
from rockplan.fitting import as_on_cuda as ways
from rockplan.fitting.as_on_cuda import as_on_cuda
from rockplan.fitting.gpus import gpu
from rockplan.graph_builder.capture import capture
from rockplan.options import Options

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Function = Any

# (operator, dtype of the input, dtype of the result) under autocast in bfloat16.
CASTS: list[tuple[Function, torch.dtype, torch.dtype]] = [
    (lambda x: x.softmax(-1), BF16, F32),
    (lambda x: x.log_softmax(-1), BF16, F32),
    (lambda x: torch.softmax(x, -1, dtype=BF16), F32, BF16),
    (lambda x: torch.ops.aten.log_softmax.int(x, -1, BF16), BF16, BF16),  # cross_entropy's
    (lambda x: torch.ops.aten.log_softmax.int(x, -1, None), BF16, F32),
    (lambda x: functional.layer_norm(x, (4,)), BF16, F32),
    (lambda x: functional.group_norm(x, 2), BF16, F32),
    (lambda x: x.sum(-1), BF16, F32),
    (lambda x: x.cumsum(-1), BF16, F32),
    (lambda x: x.pow(2), BF16, F32),
    (lambda x: x.exp(), BF16, F32),
    (lambda x: x.rsqrt(), BF16, F32),
    (lambda x: x.logsumexp(-1), BF16, F32),
    (lambda x: torch.norm(x, 2.0, -1), BF16, F32),
    (lambda x: functional.softplus(x), BF16, F32),
    (lambda x: functional.gelu(x), BF16, BF16),
    (lambda x: x.mean(-1), BF16, BF16),
    (lambda x: x @ x, F32, BF16),
    (lambda x: torch.einsum("ab,bc->ac", x, x), F32, BF16),
    (lambda x: torch.addcmul(x, x.float(), x), BF16, F32),
    (lambda x: functional.mse_loss(x, x), BF16, F32),
    (lambda x: torch.cat([x, x.float()]), BF16, F32),
]


def test_autocast_casts_as_on_cuda() -> None:
    """By "CUDA Ops that can autocast to ..." of PyTorch's documentation of torch.amp."""
    for number, (function, dtype, expected) in enumerate(CASTS):
        x = torch.rand(4, 4, dtype=dtype) + 1
        with torch.autocast("cpu", dtype=BF16):
            before = function(x).dtype
            with as_on_cuda():
                assert function(x).dtype is expected, number
            assert function(x).dtype is before


def test_every_listed_operator_is_on_cudas_lists() -> None:
    names = torch._C._dispatch_get_all_op_names()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    on_cuda = {n.removeprefix("aten::") for n in names if has(n, "AutocastCUDA")}
    assert on_cuda >= ways._TO_ITS_DTYPE | ways._TO_THE_WIDEST | ways._BY_ARGUMENT


class Attention(nn.Module):
    def __init__(self, p: float, is_masked: bool, heads: int = 2) -> None:
        super().__init__()
        self.p, self.is_masked, self.heads = p, is_masked, heads
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        given = {"attn_mask": mask} if self.is_masked else {"is_causal": True}
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p, **given)
        return found.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("dtype", "heads", "is_masked", "expected"),
    [
        (BF16, 2, False, "aten._scaled_dot_product_flash_attention.default"),
        (BF16, 4, False, "aten._scaled_dot_product_flash_attention.default"),
        (BF16, 2, True, "aten._scaled_dot_product_efficient_attention.default"),
        (F32, 2, False, "aten._scaled_dot_product_efficient_attention.default"),
    ],
    ids=["16 bits", "small heads", "mask", "32 bits"],
)
def test_attention_with_dropout_has_cudas_kernel(
    dtype: torch.dtype, heads: int, is_masked: bool, expected: str
) -> None:
    model = Attention(0.1, is_masked, heads).to(dtype)
    with as_on_cuda():
        run = capture(model, (torch.rand(2, 16, 16, dtype=dtype),), {})
    called = [call.call.op for call in run.calls]
    assert expected in called and f"{expected.split('.default')[0]}_backward.default" in called


@pytest.mark.parametrize("at_hand", ["", "cuda"])
def test_masks_of_dropout_take_one_byte(at_hand: str) -> None:
    layers = 4
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)),) * layers)
    rows = 4096
    taken = {}
    for device in ("cpu", replace(gpu("h100-80"), at_hand=at_hand)):
        found = rockplan.fit(
            model, torch.rand(rows, 64), device, optimizer=None, options=Options(cache=False)
        )
        taken[device == "cpu"] = found.breakdown("kept whole", None)["activations"]
    # On CPU a mask has the dtype of its input.
    assert taken[True] - taken[False] == layers * rows * 64 * (4 - 1)


def test_autocast_of_a_model_on_the_meta_device(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    with torch.device('meta'):\n"
        "        return torch.nn.Linear(64, 64), torch.empty(8, 64)\n"
    )
    words = ["fit", f"{file}:make", "--gpu", "h100-80", "--autocast", "bfloat16"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "kept whole" in done.output
