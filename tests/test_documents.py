"""README and docs are true: their Python and their commands run, their schema holds."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from rockplan import read_plans
from rockplan.cli import app
from rockplan.plan_file import dump_plans, parse_plans
from tests.test_distributed import torchrun

ROOT = Path(__file__).parent.parent


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def blocks(path: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def examples(kind: str) -> list[tuple[str, str]]:
    return [
        (f"{path.name}-{i}", block)
        for path in DOCUMENTS
        for i, block in enumerate(blocks(path, kind))
    ]


def named(kind: str) -> dict[str, Any]:
    found = examples(kind)
    return {"argvalues": found, "ids": [name for name, _ in found]}


@pytest.mark.parametrize(("name", "code"), **named("python"))
def test_example_runs(name: str, code: str, tmp_path: Path) -> None:
    if "torchrun" in code:
        script = tmp_path / "train.py"
        script.write_text(code)
        torchrun([str(script)], tmp_path)
        return
    exec(compile(code, name, "exec"), {"__name__": name})


@pytest.mark.parametrize(("name", "session"), **named("console"))
def test_commands_run(name: str, session: str) -> None:
    """Every `$ rockplan ...` of a session works, and prints lines that begin as those shown."""
    steps = re.split(r"^\$ rockplan ", session, flags=re.MULTILINE)[1:]
    assert steps
    for step in steps:
        command, _, shown = step.partition("\n")
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
        printed = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
        expected = {line.split()[0] for line in shown.splitlines() if line.strip()} - {"..."}
        assert expected <= printed, command


PLAN = ROOT / "docs" / "plan.md"
SAVE = ["-b", "min", "--save", "plan.json"]


def test_the_schema_describes_the_example_and_real_plans() -> None:
    (schema,) = map(json.loads, blocks(PLAN, "json schema"))
    (example,) = blocks(PLAN, "json example")
    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    check.validate(json.loads(example))
    assert len(parse_plans(example)) == 1
    assert CliRunner().invoke(app, ["solve", "rockplan.examples:mlp", *SAVE]).exit_code == 0
    text = dump_plans(read_plans("plan.json"))
    check.validate(json.loads(text))
    for wrong in ('"time_ns":-1', '"time_ns":1.5', '"time_ns":"1"', '"time":1'):
        with pytest.raises(jsonschema.ValidationError):
            check.validate(json.loads(re.sub(r'"time_ns":\d+', wrong, text, count=1)))
