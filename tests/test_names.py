"""Names: unique, readable, and the same whatever else changes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rockplan
from rockplan.store.plan_file import outline
from rockplan.values.graph import DataKind
from rockplan.values.names import activation_names, operation_names
from testing.graphs import random_graph


class Model(nn.Module):
    """Two applications of one operator in a submodule, and one outside submodules."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * 2
        return (x * x).sum()


def graph_of(layers: int, batch: int) -> rockplan.values.graph.CDGraph:
    return rockplan.plan(Model(layers), torch.randn(batch, 8), "100%").graph


@pytest.mark.parametrize("seed", range(12))
def test_names_are_unique(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    for names in (activation_names(graph), operation_names(graph)):
        assert len(set(names)) == len(names)


def test_names_say_module_operator_and_occurrence() -> None:
    graph = graph_of(layers=2, batch=4)
    names = operation_names(graph)
    assert names[: len(graph.forward)] == (
        "layers.0.0/addmm",
        "layers.0.1/gelu",
        "layers.0.2/bernoulli",
        "layers.0.2/mul",
        "(root)/mul",
        "layers.1.0/addmm",
        "layers.1.1/gelu",
        "layers.1.2/bernoulli",
        "layers.1.2/mul",
        "(root)/mul#1",
        "(root)/mul#2",
        "(root)/sum",
    )
    assert all("/backward/" in name for name in names[len(graph.forward) :])
    storages = activation_names(graph)
    assert len(set(storages)) == len(storages)
    for data, name in zip(graph.data, storages, strict=True):
        made = data.kind in (DataKind.ACTIVATION, DataKind.GRADIENT)
        assert ("/" in name) == made
        assert made or name == data.name


def test_names_do_not_depend_on_what_follows() -> None:
    small, large = graph_of(2, 4), graph_of(2, 32)
    assert activation_names(small) == activation_names(large)
    assert operation_names(small) == operation_names(large)
    first = [n for n in activation_names(small) if n.startswith("layers.")]
    assert set(first) <= set(activation_names(graph_of(3, 4)))


def test_names_outlive_a_plan_file(tmp_path: Path) -> None:
    plan = rockplan.plan(Model(2), torch.randn(4, 8), "100%")
    rockplan.save_plan(plan, tmp_path / "plan.json")
    (read,) = rockplan.read_plans(tmp_path / "plan.json")
    assert read.graph == outline(plan.graph)
    assert activation_names(read.graph) == activation_names(plan.graph)
    assert operation_names(read.graph) == operation_names(plan.graph)


def test_names_of_tests_have_at_most_eight_words() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        for name in re.findall(r"^ *def test_(\w+)", path.read_text(), re.MULTILINE):
            assert name.count("_") < 8, f"{path.name}: {name}"
