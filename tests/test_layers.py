"""The layers of docs/model.md: imports point down only, heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rockplan"

LIBRARIES = {
    "torch": {
        "graph_builder",
        "codegen",
        "runtime",
        "python_state",
        "paging",
        "search",
        "blocks",
        "fitting",
        "solving",
        "will_it_fit",
        "cli",
        "integrations",
    },
    "highspy": {"ilp"},
    "graphviz": {"reports"},
    "matplotlib": {"reports"},
    "numpy": {"fitting", "oracles", "ilp", "dp", "graph_builder", "python_state", "search"},
    "networkx": {"graph_builder"},
    "pulp": {"ilp"},
}
"""Which folders import them; files beside the folders may import any."""


@functools.cache
def table(heading: str) -> dict[str, int]:
    """Folder, or file beside the folders -> its level, from the table in docs/model.md whose first
    column has this heading."""
    text = (ROOT / "docs" / "model.md").read_text()
    (rows,) = re.findall(rf"^\| {heading} \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    levels = re.findall(r"^\| (\d+) \| ([^|]+) \|", rows, re.MULTILINE)
    return {part: int(level) for level, parts in levels for part in re.findall(r"`(\w+)`", parts)}


def layers() -> dict[str, int]:
    return table("layer")


@functools.cache
def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if not part_of(p).startswith("__"))


def test_every_part_of_the_package_has_a_layer() -> None:
    assert {part_of(path) for path in FILES} == set(layers())


def imported(paths: list[Path]) -> Iterator[tuple[Path, str]]:
    return ((path, name) for path in paths for name in imports(path))


def test_imports_point_down() -> None:
    level = layers()
    for path, name in imported(FILES):
        own = part_of(path)
        if not name.startswith("rockplan."):
            continue
        other = name.split(".")[1]
        is_file = not (PACKAGE / own).is_dir()
        may = level[other] < level[own] or (is_file and level[other] == level[own])
        assert other == own or may, f"{own} (layer {level[own]}) imports {name}"


ROOMS = sorted((PACKAGE / "graph_builder").rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE / "graph_builder").parts[0].removesuffix(".py")


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in ROOMS} - {"__init__"} == set(table("floor"))


def test_rooms_import_from_floors_below() -> None:
    floors = table("floor")
    for path, name in imported(ROOMS):
        own, parts = room_of(path), name.split(".")
        if parts[:2] != ["rockplan", "graph_builder"] or len(parts) < 3 or parts[2] not in floors:
            continue
        other = parts[2]
        below = floors[other] < floors[own]
        assert other == own or below, f"{own} (floor {floors[own]}) imports {name}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types count."""
    module = {str(p.relative_to(ROOT).with_suffix("")).replace("/", "."): p for p in FILES}
    imported_by = {
        name: {
            other
            for used in imports(path)
            for other in (used, used.rpartition(".")[0])
            if other in module and other != name
        }
        for name, path in module.items()
    }
    while lowest := [name for name, others in imported_by.items() if not others]:
        for name in lowest:
            del imported_by[name]
        for others in imported_by.values():
            others.difference_update(lowest)
    assert not imported_by


def test_libraries_stay_in_their_folders() -> None:
    for path, name in imported(FILES):
        own, library = part_of(path), name.split(".")[0]
        if (PACKAGE / own).is_dir() and library in LIBRARIES:
            assert own in LIBRARIES[library], f"{own} imports {library}"


def test_no_class_name_is_used_twice() -> None:
    """A leading underscore makes no other name."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("rockplan", ("testing", "tests", "benchmarks")),
        ("testing", ("tests", "benchmarks")),
        ("benchmarks", ("tests",)),
        ("tests", ("tests.test_",)),
    ],
)
def test_what_tests_and_benchmarks_share_is_below_both(
    folder: str, others: tuple[str, ...]
) -> None:
    """What several files of tests share is in files of other names (usage, kernels and others)."""
    for path in (ROOT / folder).rglob("*.py"):
        borrowed = [name for name in imports(path) if name.startswith(others)]
        assert not borrowed, f"{path.relative_to(ROOT)} imports {borrowed}"
