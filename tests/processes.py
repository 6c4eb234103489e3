"""Scripts that run on several processes: by torchrun, or forked by one that has imported them.

`python -m tests.processes COUNT MODULE[:FUNCTION] ...` is the one that forks.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import rockplan
from tests.planning import plan_quickly

ROOT = Path(__file__).parent.parent


LEAVE = """
import os

os._exit(0)
"""
"""At the end of a script: with gloo, processes that used DistributedDataParallel (torch 2.13) abort
now and then while Python shuts down, 2 to 6 of 12 without rockplan in them, 'terminate called
without an active exception'. An error before is seen as it was."""


def torchrun(script: Path, cache: Path) -> None:
    """Run `script` on two processes; a failure shows what they wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)]
    _run(command, cache)


def on_processes(count: int, cache: Path, *modules: str) -> None:
    """Run `main` of modules of tests, or the function named after a colon, one after another on
    `count` new processes, none of which imports it again."""
    _run([sys.executable, "-m", "tests.processes", str(count), *modules], cache)


def _run(command: list[str], cache: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ROCKPLAN_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _forked(main: Callable[[], None], count: int) -> bool:
    """Run `main` in `count` processes that torch.distributed can connect; True if all succeed.

    None imports what plans, a second of each, and none goes through all that is imported when it
    measures memory.
    """
    for name in rockplan.__all__:
        getattr(rockplan, name)
    gc.collect()
    gc.freeze()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    running = {_started(main, rank, count, port) for rank in range(count)}
    while running:
        process, failure = os.wait()
        running.discard(process)
        if failure:  # the others would wait for it
            for other in running:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            return False
    return True


def _started(main: Callable[[], None], rank: int, count: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # see LEAVE


if __name__ == "__main__":
    plan_quickly()
    names = [name.partition(":") for name in sys.argv[2:]]
    parts = [getattr(importlib.import_module(name), part or "main") for name, _, part in names]
    sys.exit(not all(_forked(part, int(sys.argv[1])) for part in parts))
