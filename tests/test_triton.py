"""Launches of Triton kernels: planned with the bits of eager, within budget, on CPU by Triton's
interpreter; what cannot be known of a kernel is refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NEEDS = "Triton (pip install triton: 280 MB, 0.9 GB unpacked; Linux) is not installed"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NEEDS)
ROOT = Path(__file__).parent.parent


def outcomes(*wanted: str, **environment: str) -> Any:
    """What came of the cases, in a process of its own."""
    command = [sys.executable, "-m", "testing.triton_worker", *wanted]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=550, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def own() -> Any:
    return outcomes("own")


PLANNED = (
    *("writes what is saved", "autotuned", "heuristics"),
    *("in place, a count", "atomic", "outside of a function", "parts"),
    *("tuned", "tuned, of a few", "tuned, restored", "tuned, zeroed", "tuned elsewhere"),
)


@pytest.mark.parametrize("name", PLANNED)
def test_bits_are_eagers_and_peaks_as_predicted(own: Any, name: str) -> None:
    assert own[name] == "ok"


def test_kernels_are_tuned_before_the_first_step(tmp_path: Path) -> None:
    """Also in a process that finds profile and plan in the cache, and measures nothing."""
    for _ in range(2):
        found = outcomes("first step", ROCKPLAN_CACHE_DIR=str(tmp_path))
        assert found == {"tuned, restored": "ok", "tuned, zeroed": "ok"}


REFUSED = {
    "addresses": ["takes_addresses writes into: it takes numbers for addresses", "rockplan.opaque"],
    "an object": ["silu_forward is given a Hooked", "rockplan.opaque"],
    "a hook": ["silu_forward writes into: a function of the caller's", "pre_hook"],
    "two dtypes": ["silu_forward writes into: it is given the same memory as tensors of several"],
    "overwritten": ["has written over in the backward pass", "rockplan.opaque"],
    "values": ["reads", "give the autograd.Function", "Read", "rockplan.opaque"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(own: Any, name: str) -> None:
    assert all(words in own[name] for words in [*REFUSED[name], "triton_worker.py:"])


def test_a_configuration_without_a_grid_is_refused(own: Any) -> None:
    words = "StalePlan: the autotuner of the Triton kernel silu_forward has taken a configuration"
    assert own["unknown grid"].startswith(words)


WRITES = {
    "silu_forward": ["y_ptr"],
    "silu_backward": ["x_ptr"],
    "column_sums": ["sums_ptr"],
    "writes_several": ["a_ptr", "b_ptr"],
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_kernel_writes_into(own: Any, name: str) -> None:
    pointers = [n for n in own[f"writes {name}"] if n.endswith("_ptr")]
    assert pointers == WRITES[name]


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None,
    reason="Liger (pip install --no-deps liger-kernel) is not installed",
)
def test_functions_of_liger() -> None:
    found = outcomes("liger")
    assert len(found) == 10 and set(found.values()) == {"ok"}, found


def is_installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


@pytest.mark.skipif(
    not is_installed("liger_kernel", "transformers"),
    reason="Liger (pip install --no-deps liger-kernel) or transformers is not installed",
)
def test_a_model_as_liger_makes_it() -> None:
    assert outcomes("llama") == {"llama": "ok"}


@pytest.mark.skipif(
    not is_installed("fla"),
    reason="fla (pip install --no-deps flash-linear-attention fla-core einops) is not installed",
)
def test_functions_of_fla() -> None:
    found = outcomes("fla")
    assert len(found) == 4 and set(found.values()) == {"ok"}, found
