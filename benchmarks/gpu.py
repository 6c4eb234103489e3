"""On a CUDA machine: the figures that are worth most, in six minutes.

    python -m benchmarks.gpu [--minutes 6] [--only compiled ...] [--out build/gpu] [--cpu]

TASKS says what is measured, in the order of its worth; what does not fit into the time is left out.
Each task is a process of its own that writes rows as they come. One that hangs, or takes the device
with it, is ended, has a row that says so, and goes on after it in a new process. Rows are printed
and kept in OUT/rows.jsonl when they come; OUT/table.md is up to date whenever this process ends, by
itself, by a signal, or by SIGKILL; OUT/logs has what each task printed. This process needs no
package beside Python's own.

With --cpu: small models without a GPU, to test the scripts. A name of --only is that of a task, or
the first word of several. `make wheels` loads what a machine with PyTorch and no network lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from benchmarks.gpu_table import DETAIL, line, table
from benchmarks.gpu_worker import Row, TimeLimit, lines_of
from testing.sweep import WHERE_TIME_IS_MEASURED

GRACE_S = 10.0
"""After a limit, for what does not let itself be interrupted; then its process is ended."""

START_S = 90.0
"""Until a process begins with its first way: imports, the device, caches that are cold."""

LEAST_S = 5.0
"""With less left than this nothing is begun."""

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Task:
    """A process. command: what follows `python -m`, before the arguments of all workers; limit_s:
    how long it may take at most."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def _task(kind: str, name: str, limit_s: float) -> Task:
    return Task(f"{kind} {name}", (f"benchmarks.gpu_{kind}", name), limit_s)


MODELS = ("llama", "gpt2", "gpt2-written-out", "t5", "bert", "vit", "resnet-50", "unet")
STACK = ("lengths", "sharded", "liger", "flex", "liger-rope")
FIT = ("llama", "gpt2-large", "resnet-50", "llama-largest", "llama-expandable")

TASKS: tuple[tuple[Task, ...], ...] = (
    # What kernels compute, and whether they may write in place; what is compiled is on disk then.
    # Nothing is timed here: these processes run side by side.
    (
        *(_task("kernels", name, 90) for name in MODELS),
        *(_task("warm", name, 90) for name in ("llama", "resnet-50", "gpt2-large")),
        *(_task("fault", name, 60) for name in ("eager", "compiled")),
    ),
    # Paging to the host: the link, then times and peaks beside other ways to offload.
    (_task("host", "llama", 120),),
    # Peaks and times beside torch.compile.
    (_task("compiled", "llama", 140),),
    (_task("compiled", "resnet-50", 60),),
    (_task("compiled", "gpt2-large", 90),),
    # Plans as CUDA graphs: bits of their code, time of device and host.
    (_task("graph", "gpt2-large", 120),),
    (_task("graph", "llama", 60),),
    tuple(
        _task("tests", name, 240)
        for name in (
            "test_cuda",
            "test_cuda_compiled",
            "test_cuda_kernels",
            "test_cuda_graph",
            "test_cuda_paging",
        )
    ),
    *((_task("stack", name, 60),) for name in STACK),
    (_task("host", "wide", 120),),
    # Bytes of whole steps, side by side: nothing is timed here, either.
    tuple(_task("fit", name, 90) for name in FIT),
)
"""Those of one line run side by side, as far as there are cores."""


class Stopped(BaseException):
    """By a signal."""


@dataclass(slots=True)
class Running:
    """A task whose process runs, from `begin` on. way: what it measures now, '' before that and
    between; strikes_at: when it is ended unless it comes to an end by itself; failed_ways: after
    which it does not begin anew once more."""

    task: Task
    rows: Path
    log: Path
    limit: TimeLimit
    on_cpu: bool
    environment: dict[str, str]
    read: int = 0
    way: str = ""
    waited_s: float = 0.0
    strikes_at: float = 0.0
    failed_ways: set[str] = field(default_factory=lambda: {""})
    process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        command = [sys.executable, "-m", *self.task.command, "--rows", str(self.rows)]
        command += ["--until", f"{self.limit.end:.1f}", *(["--cpu"] if self.on_cpu else [])]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self.way = ""
        self._waits(min(START_S, self.limit.left_s))

    def _waits(self, seconds: float) -> None:
        self.waited_s, self.strikes_at = seconds, time.monotonic() + seconds + GRACE_S

    def new_rows(self) -> Iterator[Row]:
        """What came since it was asked last."""
        lines = lines_of(self.rows)
        for row in lines[self.read :]:
            if "begin" in row:
                self.way = row["begin"]
                self._waits(row["limit_s"])
            else:
                if row["way"] == self.way:
                    self.way = ""
                    self._waits(min(START_S, self.limit.left_s))
                yield {"task": self.task.name, **row}
        self.read = len(lines)

    @property
    def code(self) -> int | None:
        """Of its end; None while it runs."""
        return None if self.process is None else self.process.poll()

    def failed(self, code: int | None) -> Row | None:
        """A row that says how it ended, where it did not end well, of what it measured then. One
        that takes too long is ended here."""
        if code is None and time.monotonic() < self.strikes_at:
            return None
        if code is None:
            self.stop()
            if self.read and not self.way:
                return None  # it was done, and slow to end
            how = f"ended from outside: {self.waited_s:.0f} s were over"
        elif code == 0 and not self.way:
            return None
        else:
            how = f"died ({code}): {_last_line(self.log)}"
        return {"task": self.task.name, "way": self.way, "error": how.replace("|", "/")[:200]}

    def stop(self) -> None:
        """Its process, and those that this one started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _last_line(log: Path) -> str:
    lines = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    return lines[-1].strip() if lines else "it said nothing"


@dataclass(slots=True)
class Report:
    """All rows so far, in a folder and on the screen."""

    folder: Path
    head: str
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """A row, or more of one that is there. It is said at once, but for details, and for what
        is measured once more."""
        known = self.rows.setdefault((row["task"], row["way"]), {})
        is_new = bool(row.keys() - known.keys()) and DETAIL not in row
        known.update(row)
        with (self.folder / "rows.jsonl").open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        (self.folder / "table.md").write_text(self.text())
        if is_new:
            print(line(row), flush=True)

    def text(self) -> str:
        return f"{self.head}\n\n{table(list(self.rows.values()))}"


def measured(
    tasks: Sequence[Sequence[Task]], limit: TimeLimit, report: Report, on_cpu: bool = False
) -> None:
    """Run the tasks one line after the other, as far as the time goes."""
    logs = report.folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for together in tasks:
            _together(together, limit, report, logs, Path(caches), on_cpu)


def _together(
    tasks: Sequence[Task],
    limit: TimeLimit,
    report: Report,
    logs: Path,
    caches: Path,
    on_cpu: bool,
) -> None:
    cores = os.cpu_count() or 1
    at_once = min(len(tasks), max(1, cores - 1))
    environment = _environment(caches, cores // at_once)
    waiting, running = deque(tasks), list[Running]()
    # Where they cannot all run at once, the last ones are left out, and not what comes after.
    limit = limit.at_most(max(task.limit_s for task in tasks))
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                task = waiting.popleft()
                if limit.left_s < LEAST_S:
                    report.add({"task": task.name, "way": "", "error": "no time left"})
                    continue
                file = logs / task.name.replace(" ", "-")
                own = limit.at_most(task.limit_s)
                paths = (file.with_suffix(".jsonl"), file.with_suffix(".log"))
                running.append(Running(task, *paths, own, on_cpu, environment))
                running[-1].begin()
            time.sleep(POLL_S)
            running = [one for one in running if _followed(one, report)]
    finally:
        for one in running:
            one.stop()
            for row in one.new_rows():
                report.add(row)


def _followed(one: Running, report: Report) -> bool:
    """Whether it still runs, with what came of it. One that failed within a way runs again, from
    the next way on."""
    code = one.code
    for row in one.new_rows():
        report.add(row)
    failed = one.failed(code)
    if failed is None:
        return one.code is None
    report.add(failed)
    goes_on = one.way not in one.failed_ways and one.limit.left_s > LEAST_S
    one.failed_ways.add(one.way)
    if goes_on:
        one.begin()
    return goes_on


def _environment(folder: Path, threads: int) -> dict[str, str]:
    """Of workers: the allocator as tests have it, prices that are measured now, and
    kernels where the processes of this run find those of each other."""
    own = {
        **WHERE_TIME_IS_MEASURED,
        "ROCKPLAN_CACHE_DIR": str(folder / "rockplan"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, threads)),
        "OMP_NUM_THREADS": str(max(1, threads)),
        "PYTHONUNBUFFERED": "1",
    }
    return {**own, **os.environ}


def where() -> str:
    """Machine, versions, date."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        name = ""
    packages = ("torch", "triton", "transformers", "liger-kernel")
    versions = ", ".join(f"{p} {v}" for p in packages if (v := _version(p)))
    name = name or platform.machine()
    return f"{name}, {versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def chosen(names: Sequence[str]) -> list[list[Task]]:
    """The tasks of these names, or whose names begin with them; all without any."""
    groups = [
        [task for task in together if not names or {task.name, task.name.split()[0]} & set(names)]
        for together in TASKS
    ]
    return [group for group in groups if group]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--only", nargs="+", default=[], help="names of tasks")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--cpu", action="store_true", help="small models without a GPU")
    given = parser.parse_args(arguments)
    limit = TimeLimit(60 * given.minutes)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "rows.jsonl").unlink(missing_ok=True)
    tasks = chosen(given.only)
    if not tasks:
        raise SystemExit(f"no task is called {' or '.join(given.only)}")

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    report = Report(given.out, where())
    print(report.head, flush=True)
    try:
        measured(tasks, limit, report, given.cpu)
    except Stopped as stopped:
        print(f"stopped by {stopped}", flush=True)
    print(f"\n{report.text()}", flush=True)


if __name__ == "__main__":
    main()
