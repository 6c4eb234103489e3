"""What the scripts for a borrowed GPU do where something fails or takes too long."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks import gpu_compiled, gpu_stack
from benchmarks.compiled import line
from benchmarks.gpu import TimeLimit, TimeUp, tried
from rockplan.checkpointing.wrap import per_block, sharing_copy


def test_what_fails_is_a_line_and_what_follows_runs() -> None:
    limit = TimeLimit(60)

    def fails() -> None:
        raise ValueError("first | line\nsecond")

    assert tried(fails, limit) == "ValueError: first / line second"
    assert tried(lambda: 3, limit) == 3


def test_what_takes_too_long_is_interrupted() -> None:
    def sleeps() -> None:
        try:
            time.sleep(30)
        except Exception:  # as compilers do
            time.sleep(30)

    begin = time.monotonic()
    found = tried(sleeps, TimeLimit(1.5))
    assert isinstance(found, str) and found.startswith("TimeUp: not done after")
    assert time.monotonic() - begin < 15
    assert tried(lambda: 3, TimeLimit(0.5)) == "TimeUp: no time left"
    with pytest.raises(TimeUp), TimeLimit(0).holds():
        pass


def test_rows_of_a_model_with_a_way_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    case = gpu_compiled.cases(on_cpu=True)["llama"]()
    known = gpu_compiled.ways(case, {})
    after = known[f"rockplan, peak of {gpu_compiled.BOTH}"]

    def ways(case: Any, peaks: dict[str, int]) -> dict[str, gpu_compiled.Make]:
        return {"eager": sharing_copy, "checkpoint": per_block, "planned": after}

    monkeypatch.setattr(gpu_compiled, "ways", ways)
    said: list[gpu_compiled.Row] = []
    rows = gpu_compiled.rows_of("llama", case, torch.device("cpu"), TimeLimit(120), said.append)
    eager, checkpoint, planned = rows
    assert [row["way"] for row in said] == ["eager", "checkpoint", "planned"]
    assert int(checkpoint["peak_bytes"] or 0) < int(eager["peak_bytes"] or 0)
    assert eager["difference"] == checkpoint["difference"] == 0
    assert float(eager["milliseconds"] or 0) > 0
    assert planned["error"] == f"LookupError: no peak of {gpu_compiled.BOTH} to plan for"
    assert line(planned).count("|") == line(eager).count("|")


def test_blocks_under_fully_shard_on_one_device() -> None:
    torch.manual_seed(0)
    plain, planned = gpu_stack.sharded(True, torch.device("cpu"))
    assert plain.equal == planned.equal == "equal"
    assert planned.peak_bytes < plain.peak_bytes
    assert str(planned).startswith("| fully_shard, blocks | planned | ")
