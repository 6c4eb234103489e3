"""What scripts for a borrowed GPU share: a limit of time that holds, rows of which one may fail."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import TypeVar

import torch

from benchmarks import models
from benchmarks.zoo import FOR_CUDA

LLAMA = partial(
    models.llama,
    layers=8,
    width=2048,
    heads=32,
    key_value_heads=4,
    vocabulary=32000,
    batch=4,
    length=2048,
)
"""The one that the tables of a GPU are of."""

Found = TypeVar("Found")
GRACE_S = 20
"""After the limit, for what does not let itself be interrupted; then the process ends."""


class TimeUp(BaseException):
    """What was measured took longer than it may. No Exception: compilers wrap these, and go on
    without a kernel."""


class TimeLimit:
    """Of a whole script."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    def part(self, share: float) -> TimeLimit:
        """A limit of its own for a share of what is left."""
        return TimeLimit(share * self.left_s)

    @contextlib.contextmanager
    def holds(self) -> Iterator[None]:
        """Raises TimeUp inside where the limit is reached."""
        if self.left_s < 1:
            raise TimeUp("no time left")
        seconds = self.left_s

        def strike(number: int, frame: FrameType | None) -> None:
            raise TimeUp(f"not done after {seconds:.0f} s")

        before = signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def tried(work: Callable[[], Found], limit: TimeLimit) -> Found | str:
    """What `work` returns; what it raises as a line of text, and its memory is free again."""
    try:
        with limit.holds():
            return work()
    except (Exception, TimeUp) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].replace("|", "/")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return said


def arguments(description: str, minutes: float) -> argparse.Namespace:
    """Of the command line, once the process is set up: `cpu`, `minutes`. It ends when these are
    over, whatever happens."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="small models without a GPU")
    parser.add_argument("--minutes", type=float, default=minutes)
    found = parser.parse_args()
    for name, value in FOR_CUDA.items():
        os.environ.setdefault(name, value)
    if not found.cpu and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --cpu runs the same steps on small models")
    last = threading.Timer(60 * found.minutes + GRACE_S, os._exit, (1,))
    last.daemon = True
    last.start()
    return found


def where() -> str:
    """Machine, versions, date."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    packages = ("torch", "triton", "transformers", "liger-kernel")
    versions = ", ".join(f"{p} {v}" for p in packages if (v := _version(p)))
    return f"{name}, {versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
