"""The pictures of README and docs/explain.md: a small decoder planned under 40 % of its peak.

Measures memory over time of both modules, draws docs/memory.svg, docs/schedule.svg and
docs/blocks.svg, writes report.html and trace.json beside them if a folder is named, and prints
the explanation of the plan.
Command: python -m benchmarks.pictures [FOLDER]        (needs matplotlib, and Graphviz's dot)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import rockplan
from rockplan.examples import transformer
from rockplan.render import curve_series

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    torch.set_num_threads(1)
    model, tokens = transformer()
    planned = rockplan.solve(model, tokens, "40%")
    measured = rockplan.measured_timeline(lambda: planned(tokens).backward())
    eager_measured = rockplan.measured_timeline(lambda: model(tokens).backward())
    found = {"measured": measured, "eager_measured": eager_measured}
    (DOCS / "memory.svg").write_bytes(rockplan.draw_memory(planned.plan, **found))
    (DOCS / "schedule.svg").write_bytes(rockplan.draw_schedule(planned.plan))
    blocks = rockplan.draw_graph(planned.plan)
    (DOCS / f"blocks{blocks.suffix}").write_bytes(blocks.data)
    for name in sys.argv[1:2]:
        series = [curve_series(rockplan.pareto(model, tokens))]
        page = rockplan.html_report(planned.plan, title="transformer", series=series, **found)
        (Path(name) / "report.html").write_text(page, encoding="utf-8")
        (Path(name) / "trace.json").write_text(rockplan.plan_trace(planned.plan, **found))
    print(rockplan.explain(planned.plan))


if __name__ == "__main__":
    main()
