"""The Python examples of README and docs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_distributed import torchrun

ROOT = Path(__file__).parent.parent


def examples() -> list[tuple[str, str]]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        found += [(f"{path.name}-{i}", block) for i, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("name", "code"), examples(), ids=[n for n, _ in examples()])
def test_example_runs(name: str, code: str, tmp_path: Path) -> None:
    if "torchrun" in code:
        script = tmp_path / "train.py"
        script.write_text(code)
        torchrun([str(script)], tmp_path)
        return
    exec(compile(code, name, "exec"), {"__name__": name})
