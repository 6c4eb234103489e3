"""The pictures of docs/usage.md and docs/explain.md: a small decoder planned under 40 %.

Compares the plan with PyTorch's checkpointing, draws docs/memory.svg, docs/schedule.svg and
docs/frontier.svg, writes report.html to a folder if one is named, and prints the explanation of the
plan.
Command: python -m benchmarks.pictures [FOLDER]        (needs matplotlib)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import rockplan
from rockplan.comparison import measured_series
from rockplan.examples import transformer
from rockplan.reports.pictures import curve_series, plan_series

DOCS = Path(__file__).parent.parent / "docs"
BUDGET = "40%"


def main() -> None:
    torch.set_num_threads(1)
    model, tokens = transformer()
    planned = rockplan.solve(model, tokens, BUDGET)
    compared = rockplan.compare(model, tokens, [BUDGET], rounds=25)
    series = [curve_series(rockplan.pareto(model, tokens)), *measured_series(compared)]
    (DOCS / "memory.svg").write_bytes(rockplan.draw_memory(planned.plan))
    (DOCS / "schedule.svg").write_bytes(rockplan.draw_schedule(planned.plan))
    frontier = rockplan.draw_curve([*series, plan_series(planned.plan)])
    (DOCS / "frontier.svg").write_bytes(frontier)
    for name in sys.argv[1:2]:
        page = rockplan.html_report(planned.plan, title="transformer", series=series)
        (Path(name) / "report.html").write_text(page, encoding="utf-8")
    print(rockplan.explain(planned.plan))


if __name__ == "__main__":
    main()
