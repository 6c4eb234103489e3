"""Scripts that run on several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


LEAVE = """
import os

os._exit(0)
"""
"""At the end of a script: with gloo, processes that used DistributedDataParallel (torch 2.13) abort
now and then while Python shuts down, 2 to 6 of 12 without rockplan in them, 'terminate called
without an active exception'. An error before is seen as it was."""


def torchrun(script: list[str], cache: Path, processes: int = 2) -> None:
    """Run `script` on `processes`; a failure shows what they wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ROCKPLAN_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*command, *script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
