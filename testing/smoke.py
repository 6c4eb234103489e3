"""What an installed package has to do at least: plan, train, save, load, print; in an environment
with nothing but what it depends on. `make dist` runs it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import rockplan


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)), torch.nn.Tanh())
    x = torch.randn(64, 32)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.plan.json"
        planned = rockplan.solve(model, x, "min", options=rockplan.Options(cache=False))
        rockplan.save_plan(planned, path)
        deferred = rockplan.solve(model, options=rockplan.Options(cache=False))
        for fast in (planned, deferred, rockplan.load(model, x, path)):
            model.zero_grad()
            fast(x).square().mean().backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
        report = rockplan.html_report(planned.plan)
        assert "<style>" in report
        commands = (["--help"], ["solve", "rockplan.examples:mlp", "-b", "60%", "--no-cache"])
        for words in commands:
            subprocess.run([sys.executable, "-m", "rockplan", *words], check=True, cwd=folder)
    print(f"rockplan {rockplan.__version__} of {Path(rockplan.__file__).parent}: ok")


if __name__ == "__main__":
    main()
