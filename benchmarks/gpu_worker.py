"""A process that measures on a borrowed GPU: limits of time that strike, rows written as they come.

`benchmarks.gpu` starts it, reads what it writes, and ends it where it does not end itself: a call
in C cannot be interrupted from here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

Found = TypeVar("Found")
Row = dict[str, Any]
WAY_S = 60.0
"""For one way of a model, at most."""

AGAIN_S = 1.0
"""After the limit it strikes this often, until what it interrupts lets it through."""


class TimeUp(BaseException):
    """What was measured took longer than it may. No Exception: compilers wrap these, and go on
    without a kernel."""


class TimeLimit:
    """`seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    def at_most(self, seconds: float) -> TimeLimit:
        """Of so many seconds, or of what is left here."""
        return TimeLimit(min(seconds, self.left_s))

    @contextlib.contextmanager
    def holds(self) -> Iterator[None]:
        """Raises TimeUp inside where the limit is reached, again and again until it comes through:
        what is raised in a callback of the garbage collector, say, is lost. Not to be nested."""
        if self.left_s < 1:
            raise TimeUp("no time left")
        seconds, is_over = self.left_s, False

        def strike(number: int, frame: FrameType | None) -> None:
            if not is_over:
                raise TimeUp(f"not done after {seconds:.0f} s")

        before = signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
        try:
            yield
        finally:
            is_over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def tried(work: Callable[[], Found], limit: TimeLimit) -> Found | str:
    """What `work` returns; what it raises as a line of text (the log has all of it), and its memory
    is free again."""
    try:
        with limit.holds():
            return work()
    except (Exception, SystemExit, TimeUp) as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].replace("|", "/")
    gc.collect()
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_initialized():
            with contextlib.suppress(Exception):  # the device itself may have failed
                torch.cuda.empty_cache()
    return said


class Worker:
    """Writes rows where `benchmarks.gpu` reads them. What a process before this one has begun, and
    did not survive, is left out."""

    def __init__(self, rows: Path, until: float, on_cpu: bool) -> None:
        self.path, self.on_cpu = rows, on_cpu
        self.limit = TimeLimit(until - time.monotonic())
        self.begun = {line["begin"] for line in lines_of(rows) if "begin" in line}

    def begin(self, way: str, limit: TimeLimit) -> None:
        """From here on this way is measured; a row says what came of it."""
        self._write({"begin": way, "limit_s": limit.left_s})

    def add(self, way: str, row: Mapping[str, Any]) -> None:
        """A row, or more of one that is there."""
        self._write({"way": way, **row})

    def tries(
        self, way: str, work: Callable[[], Row], limit_s: float = WAY_S, again: bool = False
    ) -> None:
        """The row of one way, under a limit of its own. again: also where a process before this one
        has begun with it, since others need it."""
        if way in self.begun and not again:
            return
        limit = self.limit.at_most(limit_s)
        if limit.left_s < 1:
            self.add(way, {"error": "no time left"})
            return
        self.begin(way, limit)
        found = tried(work, limit)
        self.add(way, {"error": found} if isinstance(found, str) else found)

    def leave(self) -> None:
        """End the process here and now: what libraries do at the end may take as long as a way."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _write(self, line: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def lines_of(path: Path) -> list[Row]:
    """Those that are complete: one may have been cut off as its process was ended."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def worker(description: str | None, *names: str) -> tuple[Worker, argparse.Namespace]:
    """As the command line says. names: of further arguments, one word each."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name in names:
        parser.add_argument(name)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="by the clock of the system")
    parser.add_argument("--cpu", action="store_true", help="small models without a GPU")
    given = parser.parse_args()
    if not given.cpu:
        _check_device()
    return Worker(given.rows, given.until, given.cpu), given


def _check_device() -> None:
    """Also sets the stand-in up, where that is the device."""
    import torch

    from benchmarks import stand_in

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --cpu runs the same steps on small models")
    if stand_in.is_there():
        stand_in.install()
