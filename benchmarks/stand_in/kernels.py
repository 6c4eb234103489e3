"""Inductor's Triton code of the kernels of a model, on the stand-in, for the interpreter.

python -m benchmarks.stand_in.kernels NAME FILE
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import stand_in
from benchmarks.kernel_record import graph_of, recorded
from testing.gpu_cases import KERNELS, made_on


@contextmanager
def configurations() -> Iterator[dict[str, dict[str, int]]]:
    """Source of each Triton kernel that is made inside -> its first configuration."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found: dict[str, dict[str, int]] = {}
    begin = CachingAutotuner.__init__

    def recording(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        found[self.fn.src.strip()] = dict(self.configs[0].kwargs)

    CachingAutotuner.__init__ = recording
    try:
        yield found
    finally:
        CachingAutotuner.__init__ = begin


def main() -> None:
    name, file = sys.argv[1:]
    stand_in.install()
    _, small = KERNELS[name]
    case = made_on(small, torch.device("cuda"))
    with configurations() as found, recorded(with_code=True) as record:
        graph_of(case)
    Path(file).write_bytes(pickle.dumps((record, found)))


if __name__ == "__main__":
    main()
