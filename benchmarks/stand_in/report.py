"""What can be verified of CUDA without a device: tests, kernels, steps, races, in one report.

    make cuda     or, where the stand-in is built,
    python -m benchmarks.stand_in.report LIBRARY [--only tests kernels ...] [--names ...]

LIBRARY is the folder of libcuda.so.1. Each part runs in processes of its own: the tests of CUDA;
kernels of two layers of eight models at full width, with those that write in place, and why others
do not; steps of a Llama of 8 layers; the caching allocator beside its model; kernels in place of
the models, small, in Triton's interpreter. What came of each part is kept there, with a
report of those that ran, which becomes benchmarks/results/cuda.md when all did.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu import MODELS
from benchmarks.gpu_table import DETAIL, table
from benchmarks.gpu_worker import lines_of
from benchmarks.stand_in.run import environment

REPORT = Path(__file__).parent.parent / "results" / "cuda.md"
TESTS = (
    "test_stand_in",
    "test_cuda",
    "test_cuda_kernels",
    "test_cuda_compiled",
    "test_cuda_graph",
    "test_carving",
    "test_cuda_paging",
)
TEST_S, MODEL_S = 3600.0, 900.0
FAR_16_BITS, FAR = 2e-2, 1e-5
"""From eager's operators, at most: those round to 16 bits where a kernel does not."""

OF_A_DEVICE = ("far", "other_bits", "spilled")
"""Of kernels, what a device alone can tell."""

Row = dict[str, Any]


class Parts:
    """What can be run, each with the names that it is run for. folder: of the library, and of what
    came of the parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def environment(self) -> dict[str, str]:
        own = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        return {**environment(self.folder), **own}

    def tests(self, name: str) -> list[Row]:
        return self._worker("tests", name, TEST_S)

    def kernels(self, name: str) -> list[Row]:
        rows = self._worker("kernels", name, MODEL_S)
        return [{key: row[key] for key in row if key not in OF_A_DEVICE} for row in rows]

    def steps(self, name: str) -> list[Row]:
        rows = self._printed(["benchmarks.stand_in.steps"], self.environment())
        return [{"task": name, **row} for row in rows]

    def allocator(self, name: str) -> list[Row]:
        rows = self._printed(["benchmarks.stand_in.allocator"], self.environment())
        return [{"task": name, **row} for row in rows]

    def races(self, name: str) -> list[Row]:
        file = str(self.folder / f"{name}.pkl")
        self._printed(["benchmarks.stand_in.kernels", name, file], self.environment())
        # The interpreter computes on CPU, and needs no device.
        interpreted = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        rows = self._printed(["benchmarks.stand_in.races", file], interpreted)
        ran = [row for row in rows if "error" not in row]
        is_far = [row["far"] > (FAR_16_BITS if row["is_16_bits"] else FAR) for row in ran]
        row = {
            "task": "races",
            "way": name,
            "in_place": len(rows),
            "ran": len(ran),
            "races": sum(sum(row["races"].values()) for row in ran),
            "read_again": sum(row["read_again"] for row in ran),
            "other_lane": sum(row["other_lane"] for row in ran),
            "too_far": sum(is_far),
            "farthest": max((row["far"] for row in ran), default=0.0),
            "other_bits": sum(not row["same_bits"] for row in ran),
            "failed": "; ".join(sorted({row["error"] for row in rows if "error" in row})),
        }
        return [row]

    def _worker(self, kind: str, name: str, seconds: float) -> list[Row]:
        """Rows of a worker of `benchmarks.gpu`, those of one way together."""
        file = self.folder / f"{kind}-{name}.jsonl"
        file.unlink(missing_ok=True)
        until = f"{time.monotonic() + seconds:.1f}"
        command = [f"benchmarks.gpu_{kind}", name, "--rows", str(file), "--until", until]
        self._printed(command, self.environment())
        rows: dict[str, Row] = {}
        for row in lines_of(file):
            if "way" in row:
                rows.setdefault(row["way"], {"task": kind}).update(row)
        return [row for row in rows.values() if not row.get(DETAIL)]

    def _printed(self, command: Sequence[str], environment: Mapping[str, str]) -> list[Row]:
        """Rows that a module prints, the rest is shown."""
        done = subprocess.run(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, env=environment
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
        lines = done.stdout.splitlines()
        print("\n".join(line for line in lines if not line.startswith("{")), flush=True)
        return [json.loads(line) for line in lines if line.startswith("{")]


NAMES = {
    "tests": TESTS,
    "kernels": MODELS,
    "steps": ("steps",),
    "allocator": ("allocator",),
    "races": MODELS,
}
TITLES = {
    "tests": "Tests (bits are those of zeros: they are compared where a device is real)",
    "kernels": "Kernels of two layers at full width: bytes and compilation",
    "steps": "A step of Llama, 8 layers of width 2048, 4 x 2048 tokens, bfloat16",
    "allocator": "The model of the caching allocator (columns: benchmarks/stand_in/allocator.py)",
    "races": "Kernels in place in Triton's interpreter, small models",
}


@cache
def where() -> str:
    """Found once: the report itself changes a file."""
    names = ("torch", "triton", "transformers")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{commit}, {versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def written(folder: Path) -> str:
    """The report of all parts that ran, each with what it last ran on."""
    text = ["# CUDA without a device\n", f"`make cuda`. {_HEAD}"]
    for part, title in TITLES.items():
        files = [folder / f"{part}-{name}.json" for name in NAMES[part]]
        kept = [json.loads(file.read_text()) for file in files if file.exists()]
        places = dict.fromkeys(one["where"] for one in kept)
        rows = [row for one in kept for row in one["rows"]]
        text += [f"## {title}\n", *(f"{place}\n" for place in places), table(rows)]
    return "\n".join(text)


_HEAD = """On the stand-in of `benchmarks/stand_in`: PyTorch's own allocator, streams, generators,
Inductor and Triton, down to ptxas for sm_90a; kernels and products are counted and not run. Bytes
are those that the caching allocator gave out. Workspaces of cuDNN and cuBLAS, times of a device,
spills and asserts of kernels are not to be had here. In the interpreter, `races` are elements that
one program touches and another one writes; `read again` and `other lane` those that a program reads
after writing them, or writes in another place of a tile than it read them in; `other bits` kernels
that round otherwise than those that write nothing in place, which are refused on a device;
`reserved` is what the allocator takes from the device beyond what it held before the step.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--names", nargs="+", help="of models, or files of tests")
    given = parser.parse_args()
    parts = Parts(given.library)
    for part in given.only:
        for name in NAMES[part]:
            if given.names and name not in given.names:
                continue
            kept = {"where": where(), "rows": getattr(parts, part)(name)}
            (parts.folder / f"{part}-{name}.json").write_text(json.dumps(kept))
            print(table(kept["rows"]), flush=True)
            (parts.folder / REPORT.name).write_text(written(parts.folder))
    if all((parts.folder / f"{p}-{n}.json").exists() for p in TITLES for n in NAMES[p]):
        REPORT.write_text(written(parts.folder))


if __name__ == "__main__":
    main()
