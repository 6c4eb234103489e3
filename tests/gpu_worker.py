"""A worker of `benchmarks.gpu` whose ways fail in all ways that are known: python -m
tests.gpu_worker NAME --rows FILE --until S."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from benchmarks.gpu_worker import Row, worker


def fine() -> Row:
    return {"peak_bytes": 2**20, "ms": 1.5}


def swallows() -> Row:
    """As callbacks do: what is raised in them is printed, and lost."""
    for _ in range(3):
        try:
            time.sleep(30)
        except BaseException:
            time.sleep(0.01)
    return fine()


def hangs() -> Row:
    """In C, with the interpreter's lock: no handler of a signal runs, nor any other thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.PyDLL(None).sleep(600)
    return fine()


def misses() -> Row:
    import a_library_that_is_not_there

    return {"found": a_library_that_is_not_there.__name__}


def crashes() -> Row:
    os.abort()


WAYS: dict[str, dict[str, Callable[[], Row]]] = {
    "hangs": {"first": fine, "swallows": swallows, "hangs": hangs, "last": fine},
    "crashes": {"misses": misses, "crashes": crashes, "last": fine},
    "fine": {"first": fine},
}


def main() -> None:
    own, given = worker(__doc__, "name")
    if given.name == "broken":
        print("it says why", file=sys.stderr)
        raise SystemExit(3)
    for way, work in WAYS[given.name].items():
        own.tries(way, work, 2)
    own.leave()


if __name__ == "__main__":
    main()
