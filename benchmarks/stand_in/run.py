"""Runs Python on the stand-in, such as all of the six minutes of a GPU:

    python -m benchmarks.stand_in.run build/stand_in -m benchmarks.gpu --minutes 6

The folder is that of libcuda.so.1. There are two devices.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from testing.sweep import WHERE_TIME_IS_MEASURED


def environment(folder: Path) -> dict[str, str]:
    """In which PyTorch and Triton find the stand-in."""
    return {
        **os.environ,
        **WHERE_TIME_IS_MEASURED,
        "LD_PRELOAD": str(folder.resolve() / "libcuda.so.1"),
        "TRITON_LIBCUDA_PATH": str(folder.resolve()),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "STAND_IN_DEVICES": "2",
        "OMP_NUM_THREADS": "1",
    }


def main() -> None:
    folder, *arguments = sys.argv[1:]
    os.execve(sys.executable, [sys.executable, *arguments], environment(Path(folder)))


if __name__ == "__main__":
    main()
