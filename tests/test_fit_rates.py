"""What a device and a host reach: times of calls and steps of `fit`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import rockplan
from rockplan.fitting.gpus import gpu
from rockplan.fitting.optimizer import optimizer_steps
from rockplan.fitting.rates import rates_of, step_ns
from rockplan.graph_builder.costs.estimate import CUDA_RATES
from rockplan.options import Options
from rockplan.values.graph import Call

QUICK = Options(time_limit_s=2.0, cache=False)
H200 = gpu("h200")


def _call(op: str, *args: object) -> Call:
    return Call(f"aten.{op}", args, (), (None,))


@pytest.mark.parametrize(
    ("call", "dtype", "tflops"),
    [
        (_call("mm.default"), "bfloat16", 790.29),
        (_call("mm.default"), "float32", 51.34),
        (_call("convolution.default"), "float32", 759.4 / 2),
        (_call("convolution.default"), "float16", 759.4),
    ],
)
def test_operations_take_a_share_of_measured_products(
    call: Call, dtype: str, tflops: float
) -> None:
    operations = 10**15
    reached = operations / rates_of(H200).ns(call, f"torch.{dtype}", operations, 0) / 1e3
    assert 0.2 * tflops < reached < 0.9 * tflops


def test_causal_attention_does_half() -> None:
    op = "_scaled_dot_product_flash_attention.default"
    whole, causal = (
        rates_of(H200).ns(_call(op, 0, 0, 0, 0.0, is_causal), "torch.float16", 10**15, 0)
        for is_causal in (False, True)
    )
    assert causal / whole == pytest.approx(0.5, rel=1e-3)


def test_evaluation_mode_is_said() -> None:
    model, x = nn.Linear(64, 64), torch.zeros(2, 64)
    for is_training in (True, False):
        said = rockplan.fit(model.train(is_training), x, "a10", options=QUICK).notes
        assert any("in evaluation mode" in note for note in said) == (not is_training)


def test_what_nobody_measured_has_no_rate() -> None:
    model, x = nn.Linear(64, 64), torch.zeros(2, 64)
    assert rates_of(gpu("a10")) is CUDA_RATES
    found = rockplan.fit(model, x, "a10", options=QUICK)
    assert {row.tokens_per_s for row in found.rows} == {None} and found.fastest() is None
    assert "nobody has published" in str(found)


def test_a_host_slower_than_the_device_makes_ranges() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    x = torch.zeros(4, 8)
    row = rockplan.fit(model, x, "h200", options=QUICK).rows[0]
    assert row.tokens_per_s is not None and row.slow_tokens_per_s is not None
    least_us, most_us = H200.host_us
    assert row.tokens_per_s / row.slow_tokens_per_s == pytest.approx(most_us / least_us)
    assert " to " in row.cells[-1]
    known = replace(H200, host_us=(30.0, 30.0))
    assert " to " not in rockplan.fit(model, x, known, options=QUICK).rows[0].cells[-1]
    assert step_ns(H200, 1e9, 10) == (1e9, 1e9)


def test_steps_move_what_their_optimizer_reads_and_writes() -> None:
    parameters = {f"{n}": nn.Parameter(torch.zeros(1000)) for n in range(3)}
    sgd = optimizer_steps("sgd", parameters, as_on_cuda=True)
    assert (sgd.moved_bytes, sgd.calls) == (3 * 3 * 4000, 1)  # parameter twice, gradient
    adam = optimizer_steps("adamw", parameters, as_on_cuda=True)
    assert adam.moved_bytes > 7 * 3 * 4000 and adam.calls > 5
