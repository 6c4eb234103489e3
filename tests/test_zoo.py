"""A fixed sample of the sweep over architectures (`benchmarks/zoo.py`), with the same checks:
results, gradients, state and generator equal to eager execution bit for bit, peak within budget
and as predicted, at two budgets. Of compiled kernels a smaller one: equal to the same kernels where
nothing runs again, and near eager execution."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import zoo
from rockplan.solving import programs

EQUAL = (
    "transformers/causal-lm/doge",
    "transformers/causal-lm/granitemoehybrid",
    "transformers/masked-lm/deberta-v2",
    "transformers/seq-to-seq-causal-lm/t5",
    "transformers/audio-classification/wav2vec2",
    "transformers/image-classification/convnext",
    "timm/test_efficientnet",
    "module/LSTM/6",
)

COMPILED = (
    "module/BatchNorm2d/4",
    "module/LSTM/16",
    "module/TransformerEncoderLayer/18",
    "transformers/zero-shot-image-classification/tipsv2",
)
"""Of few kernels: those of all of them take a minute to compile."""

NEEDED = {"transformers": "transformers", "timm": "timm", "module": "expecttest"}


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    """In this process, which has imported the libraries: that takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "captured_call", programs.captured_call)  # put back afterwards
        zoo.capture_once()
        yield


def skip_without(name: str) -> None:
    needed = NEEDED[name.split("/")[0]]
    try:
        importlib.import_module(needed)
    except ImportError as error:
        pytest.skip(f"{needed} cannot be imported: {error}")


@pytest.mark.parametrize("name", EQUAL)
def test_planned_is_eager_within_the_budget(name: str, captured_once: None) -> None:
    skip_without(name)
    row = zoo.Examination(name, list(zoo.BUDGETS), lambda stage: None).run()
    assert row["outcome"] == "equal", row


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compute_alike_where_nothing_runs_again(
    name: str, captured_once: None, compilers: Path
) -> None:
    skip_without(name)
    budgets = list(zoo.COMPILED_BUDGETS)
    row = zoo.Examination(name, budgets, lambda stage: None, is_compiled=True).run()
    assert row["outcome"] == "equal" and row["kernels"] and not row["said"], row


def test_a_case_without_memory_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine_in_no_memory(_: zoo.Examination) -> None:
        torch.empty(1 << 62, dtype=torch.uint8)

    monkeypatch.setattr(zoo.Examination, "_examine", examine_in_no_memory)
    row = zoo.Examination("module/GRU/0", list(zoo.BUDGETS), print).run()
    assert (row["outcome"], row["error"]) == ("unfinished", "RuntimeError")
