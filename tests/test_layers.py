"""The layers of docs/model.md: imports point down only, heavy libraries stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rockplan"

VALUES = {"errors", "graph", "interface", "schedule", "block", "profile", "plan", "budget"}
VALUES |= {"progress", "curve", "version", "names", "options", "collection", "literals", "contents"}
VALUES |= {"trees", "python_state", "key_value_cache"}
ORACLES = {"verify", "simulate", "render", "serial", "plan_file", "lifetimes", "explain"}
ORACLES |= {"memory", "report", "palette"}
PASSES = {"graph_builder", "ilp", "dp", "codegen"}
LIBRARIES = {
    "torch": {"graph_builder", "codegen", "contents", "trees", "python_state"},
    "pulp": {"ilp"},
    "highspy": {"ilp"},
    "graphviz": {"render"},
    "matplotlib": {"render"},
    "numpy": {"ilp", "dp", "graph_builder", "contents", "python_state"},
    "networkx": {"graph_builder"},
}


def layer_of(part: str) -> int:
    """0 values, 1 oracles, 2 passes, 3 top."""
    for level, names in enumerate((VALUES, ORACLES, PASSES)):
        if part in names:
            return level
    return 3


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module.startswith("rockplan"):
                found |= {f"{module}.{alias.name}" for alias in node.names}
            else:
                found.add(module)
    return found


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = part_of(path)
    for name in imports(path):
        if not name.startswith("rockplan."):
            continue
        other = name.split(".")[1]
        if other == own:
            continue
        assert layer_of(other) < layer_of(own) or layer_of(own) == layer_of(other) != 2, (
            f"{own} (layer {layer_of(own)}) imports {name} (layer {layer_of(other)})"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_stay_in_their_packages(path: Path) -> None:
    own = part_of(path)
    if layer_of(own) == 3:
        return
    for name in imports(path):
        library = name.split(".")[0]
        if library in LIBRARIES:
            assert own in LIBRARIES[library], f"{own} imports {library}"
