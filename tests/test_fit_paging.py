"""Will it fit with activations on the host: rows of plans that page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rockplan
from rockplan.cli.ending import ExitCode
from rockplan.cli.main import app
from rockplan.errors import InvalidInput
from rockplan.fitting.gpus import gpu
from rockplan.fitting.training_step import USUAL
from rockplan.fitting.ways import kept_whole
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.copies import Host, HostLink
from rockplan.will_it_fit.captured_sizes import SizedCalls
from rockplan.will_it_fit.question import FitQuestion
from testing import models

GIB = 1 << 30
DEVICE, LINK = "t4", "16GB/s"


def options(**changed: Any) -> rockplan.Options:
    given = {"time_limit_s": 60.0, "bound_time_limit_s": 0.0, "cache": False}
    return rockplan.Options(**{**given, "without": ("exchange",), **changed})


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Products of matrices take longer than what they make takes to leave."""
    with torch.device("meta"):
        layers = [[nn.Linear(4096, 4096), nn.GELU()] for _ in range(3)]
        return nn.Sequential(*(m for layer in layers for m in layer)), torch.empty(2, 4096)


def narrow() -> tuple[nn.Module, torch.Tensor]:
    """The other way about."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Sigmoid() for _ in range(8)], nn.Linear(64, 1)), torch.empty(
            2, 64
        )


def test_what_goes_to_the_host_runs_once() -> None:
    """A row beside the others: faster for as many samples."""
    model, x = wide()
    sizes, host_bytes = {0: (128_000, 128_000)}, 64 * GIB
    found = rockplan.fit(model, x, DEVICE, sizes=sizes, options=options(host=host_bytes))
    plain, paging = found.rows[-2:]
    assert (plain.way, paging.way) == ("rockplan", "rockplan, paging")
    assert plain.host_bytes == 0 < paging.host_bytes <= host_bytes
    assert plain.batch == paging.batch == 128_000 and paging.overhead < plain.overhead
    assert plain.tokens_per_s < paging.tokens_per_s
    assert paging.reserved_bytes <= found.usable_bytes
    assert "on host" in str(found).splitlines()[1] and "paging: over a link of" in str(found)
    assert "on host" not in str(replace(found, rows=(plain,)))


def test_a_slow_link_carries_nothing() -> None:
    model, x = narrow()
    asked = options(host=64 * GIB, link="1GB/s")
    plain, paging = rockplan.fit(model, x, DEVICE, sizes={0: (2, 10**8)}, options=asked).rows[-2:]
    assert paging.host_bytes == 0 and paging.batch == plain.batch


def layers(width: int) -> nn.Module:
    made = [[nn.Linear(width, width), nn.GELU()] for _ in range(4)]
    return nn.Sequential(*(m for layer in made for m in layer))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], Any]]] = {
    "layers": lambda: (layers(64), (torch.randn(2, 64),), {}),
    "gpt2": lambda: _of(models.gpt2(layers=1, width=32, batch=2, length=16)),
    "llama": lambda: _of(models.llama(layers=1, width=32, batch=2, length=16)),
}


def _of(case: models.Case) -> tuple[nn.Module, tuple[Any, ...], Any]:
    return case.model, case.args, case.kwargs


@pytest.mark.parametrize("name", [*MODELS])
def test_rows_are_of_schedules_that_can_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that pages at sizes beside that which it was found at, for calls in eager's order."""
    monkeypatch.setattr("rockplan.search.paging.LEAST_BYTES", 1)
    model, *call = MODELS[name]()
    sample = call[0], call[1]
    usual = FitQuestion(model, model, sample, gpu(DEVICE), "sgd", USUAL, options())
    paging = usual.paging_to(Host(64 * GIB, HostLink(10**12, 10**12)))
    calls = SizedCalls(usual.whole, 2, 4096)
    kept_bytes = simulate(*kept_whole(calls.at(64).graph)).peak_bytes
    paging.take(calls.at(64), paging.plan(paging.problem(calls.at(64)), kept_bytes * 7 // 10))
    for batch in (8, 64, 1024):
        graph, schedule = paging.replayed(calls.at(batch))
        verify(graph, schedule)
        found = simulate(graph, schedule)
        assert found.host_peak_bytes > 0
        assert paging.timeline(calls.at(batch), graph, schedule).host_bytes == found.host_peak_bytes
        everything = simulate(*kept_whole(calls.at(batch).graph))
        assert found.peak_bytes < everything.peak_bytes


@pytest.mark.parametrize(
    ("device", "given", "said"),
    [
        ("14GiB", {"host": "8GiB"}, "write it, such as link='25GB/s'"),
        (DEVICE, {"host": True}, "such as host='64GiB'"),
        (DEVICE, {"host": "8GiB", "host_path": "/tmp"}, "without host_path"),
    ],
)
def test_what_is_not_known_of_another_machine(
    device: str, given: dict[str, Any], said: str
) -> None:
    model, x = wide()
    with pytest.raises(InvalidInput, match=said):
        rockplan.fit(model, x, device, options=options(**given))


WIDE = """
import torch
from torch import nn


def make():
    with torch.device("meta"):
        layers = [[nn.Linear(4096, 4096), nn.GELU()] for _ in range(3)]
        return nn.Sequential(*(m for layer in layers for m in layer)), torch.empty(2, 4096)
"""


def test_the_command_pages(tmp_path: Path) -> None:
    """On a device in bytes, over a link that is given."""
    file = tmp_path / "wide.py"
    file.write_text(WIDE)
    words = ["fit", f"{file}:make", "--gpu", "14GiB", "--batch", "128000"]
    paged = CliRunner().invoke(app, [*words, "--host", "64GiB", "--link", "100GB/s", "--json"])
    assert paged.exit_code == 0, paged.output
    row = rockplan.Fit.from_json(paged.stdout).rows[-1]
    assert row.way == "rockplan, paging" and row.batch == 128_000 and row.host_bytes
    refused = CliRunner().invoke(app, [*words, "--host", "64GiB"])
    assert refused.exit_code == ExitCode.USAGE and "link='25GB/s'" in refused.stderr
