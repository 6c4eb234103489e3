"""What fits on one of several devices: bytes of a process, and what is gathered at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rockplan
from rockplan.cli.main import app
from rockplan.errors import InvalidInput
from rockplan.examples import mlp
from rockplan.fitting.changes import Holding
from rockplan.fitting.shards import Shards
from rockplan.fitting.timeline import Timeline
from rockplan.will_it_fit.page import fit_page
from rockplan.will_it_fit.question import FitQuestion
from testing.training import QUICK


class Stack(nn.Module):
    """Blocks without activations to speak of, beside a table that is in none."""

    def __init__(self, blocks: int = 8, width: int = 512) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(100, width))
        layers = [nn.Sequential(nn.Linear(width, width, False), nn.ReLU()) for _ in range(blocks)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table[0]
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def on_meta(**how: Any) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Stack(**how), torch.empty(2, how.get("width", 512))


def held(way: str = "kept whole", **how: Any) -> dict[str, int]:
    model, x = on_meta()
    found = rockplan.fit(model, x, "1GiB", options=QUICK, optimizer="sgd-momentum", **how)
    return found.breakdown(way)


BLOCK, TABLE = 512 * 512 * 4, 100 * 512 * 4


@pytest.mark.parametrize("gpus", [1, 3, 8])
def test_a_rank_holds_its_part_and_gathers(gpus: int) -> None:
    own, ddp = held(gpus=gpus), held(gpus=gpus, shard="ddp")
    whole = 8 * BLOCK + TABLE
    assert ddp["parameters"] == ddp["optimizer"] == whole
    assert ddp.get("buckets of gradients", 0) == (whole if gpus > 1 else 0)
    part = 8 * -(-512 // gpus) * 512 * 4 + -(-100 // gpus) * 512 * 4
    assert own["parameters"] == own["optimizer"] == part
    # The table, a block, and the one before it in its buffer; filled up to parts of one size.
    parts = {b: -(-b // 2048 // gpus) * gpus * 2048 for b in (BLOCK, TABLE)}
    gathered = parts[TABLE] + 2 * parts[BLOCK]
    assert own.get("gathered parameters", 0) in ((0,) if gpus == 1 else (gathered,))


def test_gradients_that_add_up_are_parts() -> None:
    """Each backward pass makes whole ones of a block anew, and none of all blocks."""
    once, often = (held(gpus=8, step=rockplan.TrainingStep(accumulate=n)) for n in (1, 4))
    assert once["gradients"] < 3 * BLOCK
    assert often["gradients"] <= once["gradients"] + 8 * BLOCK // 8 + TABLE


def test_blocks_run_again_as_far_as_they_must() -> None:
    """The row of planned blocks is no slower than checkpointing, and holds as large a batch."""
    model = nn.ModuleDict({"layers": nn.ModuleList(wide() for _ in range(6))})
    model.forward = lambda x: forward(model, x)  # type: ignore[method-assign]
    x, sizes = torch.empty(2, 64), {0: (1, 4096)}
    whole, again, planned = rockplan.fit(
        model, x, "700MiB", sizes=sizes, gpus=2, options=QUICK
    ).rows
    assert planned.way == "rockplan, blocks"
    assert whole.batch < again.batch == planned.batch
    assert 0 < planned.overhead <= again.overhead
    roomy = rockplan.fit(model, x, "8GiB", sizes=sizes, gpus=2, options=QUICK).rows
    assert roomy[-1].batch == 4096 and roomy[-1].overhead == 0


def test_blocks_beyond_checkpointing_hold_fewer_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row fits, whatever its schedules need beside those of checkpointing."""
    real, more = FitQuestion.timeline, 1 << 25

    def timeline(question: FitQuestion, *how: Any, is_eager: bool = False) -> Timeline:
        found = real(question, *how, is_eager=is_eager)
        resident = {**found.resident, Holding.CALLER: (0 if is_eager else more,)}
        return replace(found, resident=resident)

    monkeypatch.setattr(FitQuestion, "timeline", timeline)
    model = nn.ModuleDict({"layers": nn.ModuleList(wide() for _ in range(6))})
    model.forward = lambda x: forward(model, x)  # type: ignore[method-assign]
    sizes = {0: (1, 1 << 20)}
    found = rockplan.fit(model, torch.empty(2, 64), "700MiB", sizes=sizes, gpus=2, options=QUICK)
    again, planned = found.rows[1:]
    assert 0 < planned.batch < again.batch
    assert more < planned.reserved_bytes <= found.usable_bytes


@pytest.mark.parametrize(
    ("device", "link", "pages"),
    [("700MiB", "1000GB/s", True), ("700MiB", "1MB/s", False), ("8GiB", "1000GB/s", False)],
)
def test_blocks_page_where_that_takes_less_time(device: str, link: str, pages: bool) -> None:
    """A row beside that of blocks that page nothing, which it is where paging gains nothing."""
    model = nn.ModuleDict({"layers": nn.ModuleList(wide() for _ in range(6))})
    model.forward = lambda x: forward(model, x)  # type: ignore[method-assign]
    sizes, host_bytes = {0: (1, 4096)}, 6 * (17 << 20)
    options = replace(QUICK, host=host_bytes, link=link)
    found = rockplan.fit(model, torch.empty(2, 64), device, sizes=sizes, gpus=2, options=options)
    plain, paging = found.rows[2:]
    assert paging.way == "rockplan, blocks, paging" and paging.batch == plain.batch
    assert paging.reserved_bytes <= found.usable_bytes
    assert (0 < paging.host_bytes <= host_bytes) is pages
    assert (paging.overhead < plain.overhead) is pages
    assert paging == replace(plain, way=paging.way) or pages


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))


def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model["layers"]:
        x = layer(x)
    return x.sum()


def test_buckets_are_closed_by_what_fills_them() -> None:
    """The first of a mebibyte, others of 25."""
    mib = 1 << 18
    layers = [nn.Linear(1, rows * mib, False, device="meta") for rows in (20, 6, 7, 2, 1)]
    assert Shards(2, "ddp").bucket_sizes(nn.Sequential(*layers)) == tuple(
        n << 20 for n in (1, 2 + 7 + 6 + 20)
    )
    assert Shards(1, "ddp").bucket_sizes(layers[0]) == Shards(2).bucket_sizes(layers[0]) == ()


def test_too_small_a_device_names_what_helps() -> None:
    model, x = on_meta(blocks=64)
    with pytest.raises(InvalidInput, match=r"gpus=\d+, shard='fsdp2'; --gpus") as error:
        rockplan.fit(model, x, "610MiB")
    gpus = int(str(error.value).split("gpus=")[1].split(",")[0])
    fewer, more = (
        rockplan.fit(model, x, "610MiB", gpus=n, options=QUICK).rows
        for n in (gpus - 1, 1 << gpus.bit_length())  # whose parts are of one size
    )
    assert [row.batch for row in (*fewer, *more)] == [0] * 3 + [2] * 3
    with pytest.raises(InvalidInput, match="gathered at a time"):
        rockplan.fit(*on_meta(blocks=2, width=4096), "610MiB", gpus=64)


def rows_of(count: int) -> nn.Module:
    """A table of few rows, which many processes cannot share."""
    table = nn.Module()
    table.rows = nn.Parameter(torch.empty(count, 1 << 26, device="meta"))
    table.forward = lambda x: (x * table.rows[:, :1]).sum()  # type: ignore[method-assign]
    return table


def scaled() -> tuple[nn.Module, torch.Tensor]:
    model, x = on_meta(blocks=64)
    model.scale = nn.Parameter(torch.empty((), device="meta"))
    return model, x


STEPPED = {"step": rockplan.TrainingStep(in_backward=True)}
AVERAGED = {"step": rockplan.TrainingStep(average=True)}
TILED = {"options": rockplan.Options(tile=True, host="1GiB", link="9GB/s", cache=False)}


@pytest.mark.parametrize(
    ("made", "device", "how", "said"),
    [
        (scaled(), "610MiB", {}, r"than \d+ shards; .*'scale' is a scalar: give it one dim\w+$"),
        (scaled(), "610MiB", {"gpus": 4, "shard": "ddp"}, "'scale' is a scalar: give"),
        (on_meta(blocks=64), "610MiB", {"gpus": 9, "shard": "ddp"}, r"gpus=\d+, shard='fsdp2';"),
        (on_meta(blocks=64), "610MiB", STEPPED, "--shard fsdp2, without in_backward"),
        (on_meta(blocks=64), "610MiB", AVERAGED, "--shard fsdp2, without average"),
        (on_meta(blocks=64), "610MiB", TILED, "--shard fsdp2, without tile"),
        (on_meta(blocks=64), "500MiB", {}, "fit in no number of shards"),
        (
            on_meta(blocks=2, width=4096),
            "610MiB",
            {},
            "more parts of fully_shard do not .* 65.6 MiB at",
        ),
        ((rows_of(1), torch.empty(1, 1)), "700MiB", {}, "more parts of fully_shard do not"),
        (
            (rows_of(1), torch.empty(1, 1)),
            "1300MiB",
            {"gpus": 8},
            "more parts of fully_shard do not",
        ),
        (
            (rows_of(2), torch.empty(2, 1)),
            "1300MiB",
            {"gpus": 2},
            "more parts of fully_shard do not",
        ),
    ],
)
def test_a_remedy_is_one_that_helps(
    made: tuple[nn.Module, torch.Tensor], device: str, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        rockplan.fit(*made, device, optimizer=None, **how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"gpus": 0}, "number of at least 1"),
        ({"gpus": True}, "number of at least 1"),
        ({"gpus": 2, "shard": "zero3"}, "choose 'ddp' or 'fsdp2'"),
        ({"gpus": 2, "step": rockplan.TrainingStep(in_backward=True)}, "in_backward"),
        ({"gpus": 2, "step": rockplan.TrainingStep(average=True)}, "average is AveragedModel"),
        ({"gpus": 2, "options": rockplan.Options(tile=True)}, "tile says something"),
    ],
)
def test_what_several_processes_cannot_have_is_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        rockplan.fit(*on_meta(blocks=2), "1GiB", **how)


def test_the_command_says_the_same() -> None:
    words = ["fit", "rockplan.examples:mlp", "--gpu", "1GiB", "--gpus", "4"]
    with torch.device("meta"):
        model, args, _ = mlp()
    for shard in ("fsdp2", "ddp"):
        done = CliRunner().invoke(app, [*words, "--shard", shard, "--json", "--time-limit", "1"])
        found = rockplan.Fit.from_json(done.stdout)
        asked = rockplan.fit(model, args, "1GiB", gpus=4, shard=shard, options=QUICK)
        assert found.shards == asked.shards == f" of a rank of 4 ({shard})"
        assert found.breakdown("kept whole") == asked.breakdown("kept whole")
        assert f"of a rank of 4 ({shard})" in fit_page(found)


class Bias(nn.Module):
    """Of a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(512, dtype=torch.float64, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias.float()


def test_what_fully_shard_does_not_take_is_refused() -> None:
    scaled, x = on_meta(blocks=2)
    scaled.scale = nn.Parameter(torch.empty((), device="meta"))
    tied, turned, mixed, frozen = (on_meta(blocks=2)[0] for _ in range(4))
    tied.layers[0][0].weight = tied.layers[1][0].weight  # type: ignore[index,union-attr]
    turned.table = nn.Parameter(torch.empty(512, 100, device="meta").t())
    for model in (mixed, frozen):
        model.layers[0].append(Bias())  # type: ignore[index,operator,union-attr]
    frozen.layers[0][-1].requires_grad_(requires_grad=False)  # type: ignore[index,union-attr]
    for model, said in (
        (scaled, "'scale' is a scalar"),
        (tied, "is shared by block 'layers.0'"),
        (turned, "'table' is not contiguous"),
        (mixed, r"of torch.float64, others of block 'layers.0' of torch.float32"),
    ):
        with pytest.raises(InvalidInput, match=said):
            rockplan.fit(model, x, "1GiB", gpus=2)
        assert rockplan.fit(model, x, "1GiB", gpus=2, shard="ddp", options=QUICK).rows
    assert rockplan.fit(frozen, x, "1GiB", gpus=2, options=QUICK).rows
