"""What the scripts for a borrowed GPU bring where something fails, hangs or takes too long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_fit, gpu_host, gpu_stack
from benchmarks.gpu import Report, Task
from benchmarks.gpu_table import line, table
from benchmarks.gpu_worker import Row, TimeLimit, TimeUp, tried
from testing.gpu_cases import case_of
from tests.paging import page

ROOT = Path(__file__).parent.parent


def task(name: str, limit_s: float = 300) -> Task:
    return Task(f"own {name}", ("tests.gpu_worker", name), limit_s)


def rows_of(
    folder: Path, names: tuple[str, ...], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[str, str], Row]:
    """What came of workers of `tests.gpu_worker`, run side by side on CPU."""
    monkeypatch.setattr(gpu, "GRACE_S", 2.0)
    report = Report(folder, "here")
    gpu.measured([[task(name) for name in names]], TimeLimit(seconds), report, on_cpu=True)
    kept = [json.loads(text) for text in (folder / "rows.jsonl").read_text().splitlines()]
    assert {(row["task"], row["way"]) for row in kept} == report.rows.keys()
    assert (folder / "table.md").read_text() == report.text()
    return report.rows


def test_what_hangs_has_a_row_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = rows_of(tmp_path, ("hangs",), 300, monkeypatch)
    of = {way: row for (_, way), row in found.items()}
    assert of["first"]["ms"] == of["last"]["ms"] == 1.5
    # Struck every second, until it was through with what it does thrice.
    assert of["swallows"].get("error", "").startswith("TimeUp") or of["swallows"]["ms"] == 1.5
    assert of["hangs"]["error"] == "ended from outside: 2 s were over"
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "own hangs | first | peak MiB 1.00, ms 1.5"


def test_missing_libraries_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows_of(tmp_path, ("broken", "crashes", "fine"), 300, monkeypatch)
    errors = {key: row["error"] for key, row in found.items() if "error" in row}
    assert errors.keys() == {
        ("own broken", ""),
        ("own crashes", "misses"),
        ("own crashes", "crashes"),
    }
    assert errors["own broken", ""] == "died (3): it says why"
    assert errors["own crashes", "misses"].startswith("ModuleNotFoundError: No module named 'a_lib")
    assert errors["own crashes", "crashes"].startswith(f"died ({-signal.SIGABRT}): ")
    assert found["own crashes", "last"]["ms"] == found["own fine", "first"]["ms"] == 1.5


def test_what_comes_after_the_limit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows_of(tmp_path, ("fine",), 1, monkeypatch)
    assert found == {
        ("own fine", ""): {"task": "own fine", "way": "", "error": "no time left"},
    }


def test_a_signal_ends_workers_and_prints_the_table(tmp_path: Path) -> None:
    code = (
        "from benchmarks import gpu\n"
        "gpu.TASKS = ((gpu.Task('own hangs', ('tests.gpu_worker', 'hangs'), 60),),)\n"
        f"gpu.main(['--cpu', '--out', {str(tmp_path)!r}])"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    said = ""
    while "| first |" not in said:
        said = started.stdout.readline()
    started.send_signal(signal.SIGTERM)
    rest, _ = started.communicate(timeout=500)
    assert "stopped by SIGTERM" in rest
    assert "| own hangs | first | 1.00 | 1.5 |" in rest
    assert (tmp_path / "table.md").read_text() in rest
    assert started.returncode == 0


def test_figures_come_before_the_time_is_over(tmp_path: Path) -> None:
    """Of a model that compiles: what is quick has its rows and its times, and the rest says why it
    has none."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--only", "compiled llama"]
    command += ["--minutes", "0.5", "--out", str(tmp_path)]
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert time.monotonic() - begin < 0.5 * 60 + 2 * gpu.GRACE_S
    assert done.returncode == 0, done.stderr
    kept = [json.loads(text) for text in (tmp_path / "rows.jsonl").read_text().splitlines()]
    peaks = {row["way"]: row["peak_bytes"] for row in kept if "peak_bytes" in row}
    assert peaks["checkpoint"] < peaks["eager"]
    assert done.stdout.endswith((tmp_path / "table.md").read_text() + "\n")


def test_blocks_under_fully_shard_on_one_device() -> None:
    said: dict[str, Row] = {"plain": {}, "planned": {}}
    gpu_stack.sharded(True, torch.device("cpu"), lambda way, row: said[way].update(row))
    assert said["plain"]["equal"] == said["planned"]["equal"] == "equal"
    assert said["planned"]["peak_bytes"] < said["plain"]["peak_bytes"]
    assert said["planned"]["ms"] > 0


def test_the_link_and_paging_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_host, "PLANNING_S", 1.0)
    device = torch.device("cpu")
    row = gpu_host.link(device)
    assert min(row[f"{way}_gb_a_second"] for way in ("out", "in", "both")) > 0
    case = gpu_host.language(gpu_host.models.llama)
    ways = gpu_host.HostWays(case, ())
    (stage,) = ways.stages()
    said: Row = {}
    within = "rockplan, peak of checkpoint"
    rows = {
        way: ways.measured(way, stage[way], device, lambda way, row: said.update(row))
        for way in (gpu_host.EAGER, gpu_host.CHECKPOINT, "save_on_cpu", within)
    }
    assert {row["difference"] for row in rows.values()} == {0.0}
    planned = page(ways.made[within])
    with gpu_host.late_copies():
        late = gpu_host.gradients(case, planned)
    assert gpu_host.distance(late, ways.exact) == 0


# -- one process -----------------------------------------------------------------------------------


def test_a_failure_is_a_line_and_others_run() -> None:
    limit = TimeLimit(60)

    def fails() -> None:
        raise ValueError("first | line\nsecond")

    assert tried(fails, limit) == "ValueError: first / line second"
    assert tried(lambda: 3, limit) == 3


def test_what_takes_too_long_is_interrupted() -> None:
    caught: list[Exception] = []

    def sleeps() -> None:
        try:
            time.sleep(30)
        except Exception as error:  # as compilers do
            caught.append(error)

    found = tried(sleeps, TimeLimit(2))
    assert isinstance(found, str) and found.startswith("TimeUp: not done after")
    assert not caught
    assert tried(lambda: 3, TimeLimit(0.5)) == "TimeUp: no time left"
    with pytest.raises(TimeUp), TimeLimit(0).holds():
        pass


def test_a_limit_that_is_swallowed_strikes_again() -> None:
    struck: list[TimeUp] = []

    def swallows() -> str:
        while len(struck) < 2:
            try:
                time.sleep(30)
            except TimeUp as error:
                struck.append(error)
        time.sleep(30)
        return "through"

    found = tried(swallows, TimeLimit(2))
    assert isinstance(found, str) and found.startswith("TimeUp") and len(struck) == 2


def test_a_table_has_the_columns_of_its_rows() -> None:
    rows: list[Row] = [
        {"task": "a x", "way": "1", "peak_bytes": 2**20, "ms": 1.25},
        {"task": "a x", "way": "2", "error": "none"},
        {"task": "a x", "way": "3", "detail": True},
        {"task": "b", "way": "1", "far": 1e-7},
    ]
    assert table(rows).splitlines() == [
        "| task | way | peak MiB | ms | error |",
        "|---|---|---|---|---|",
        "| a x | 1 | 1.00 | 1.2 |  |",
        "| a x | 2 |  |  | none |",
        "",
        "| task | way | far |",
        "|---|---|---|",
        "| b | 1 | 1e-07 |",
    ]
    assert line(rows[0]) == "a x | 1 | peak MiB 1.00, ms 1.2"


def test_whole_steps_need_what_their_rows_predict() -> None:
    device = torch.device("cpu")
    case = case_of("llama", True, device)
    steps = gpu_fit.Steps(case, device, False, gpu_fit.smallest(case))
    for way, optimizer in (("kept whole", "sgd"), ("rockplan", "adamw")):
        row = steps.row(way, optimizer)
        assert row["allocated_off"] in ("+0.00%", "-0.00%"), (way, row)
