"""The stand-in for a CUDA device, and the detector of races: what they are believed for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rockplan
from benchmarks import stand_in

ROOT = Path(__file__).parent.parent
HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_THE_STAND_IN = pytest.mark.skipif(not stand_in.is_there(), reason="no stand-in: make cuda")

WATCHED = """
import json, os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
from benchmarks.stand_in.interpreter import Watch, watching

@triton.jit
def reverse(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + n - 1 - i))

@triton.jit
def double(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, 2 * tl.load(x + i))

found = {}
for name, kernel, block in (("reverse", reverse, 16), ("one", reverse, 64), ("double", double, 16)):
    x = torch.arange(64.0)
    watch = Watch([x])
    with watching(watch):
        kernel[(64 // block,)](x, 64, B=block)
    found[name] = (dict(watch.races), watch.read_again, watch.other_lane)
print(json.dumps(found))
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_races_are_seen_and_nothing_else() -> None:
    """Reversed in place: by several programs, by one, and a kernel that is right."""
    environment = {name: v for name, v in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", _in_a_file(WATCHED)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    races, _, other_lane = found["reverse"]
    assert sum(races.values()) == 64 and other_lane == 0
    assert found["one"] == [{}, 0, 64]
    assert found["double"] == [{}, 0, 0]


def _in_a_file(code: str) -> str:
    """Triton reads the source of a kernel from where it is."""
    return (
        "import linecache\n"
        f"code = {code!r}\n"
        "linecache.cache['<watched>'] = (len(code), None, code.splitlines(True), '<watched>')\n"
        "exec(compile(code, '<watched>', 'exec'), {'__name__': 'watched'})\n"
    )


@ON_THE_STAND_IN
def test_what_is_asked_for_is_counted() -> None:
    x = torch.ones(4, 4, device="cuda")
    before = stand_in.counts()
    x @ x
    x.add_(1)
    assert not x.cpu().any()  # nothing was computed
    asked = stand_in.since(before)
    assert asked["products"] == asked["launches"] == asked["to_host"] == 1


@ON_THE_STAND_IN
def test_a_devices_memory_is_bounded_and_its_own() -> None:
    torch.cuda.empty_cache()
    free_bytes, all_bytes = torch.cuda.mem_get_info(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(all_bytes, dtype=torch.uint8, device="cuda:0")
    held = torch.empty(free_bytes // 2, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.mem_get_info(0)[0] < 0.6 * free_bytes
    del held
    if torch.cuda.device_count() > 1:
        assert torch.cuda.mem_get_info(1) == (all_bytes, all_bytes)


@ON_THE_STAND_IN
def test_a_full_device_explains_out_of_memory() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to("cuda:0")
    x = torch.randn(1 << 16, 256, device="cuda:0")
    with pytest.raises(torch.OutOfMemoryError) as found, rockplan.explained(model):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        torch.cuda.empty_cache()
        left_bytes = torch.cuda.mem_get_info(0)[0] - (4 << 20)
        held = torch.empty(left_bytes, dtype=torch.uint8, device="cuda:0")
        loss.backward()
    del held
    note = " ".join(found.value.__notes__[0].split())
    assert "Sequential needs" in note and "under autocast of bfloat16" in note, note
    assert "kept whole" in note and "(computes nothing)" in note


@ON_THE_STAND_IN
def test_what_waits_is_refused_in_a_capture() -> None:
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
        x.sum().item()
