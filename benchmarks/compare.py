"""Peak and time of a training step, measured: eager, PyTorch's checkpointing and rockplan.

A GPT-2, a Llama, a ViT, two ResNets and a UNet with random weights, at sizes at which activations
take 100 to 200 MiB and a step about half a second on one core. For each model first the peaks of
PyTorch's ways, then all in one run of `rockplan.compare`: rockplan's budgets are shares of the
peak of keeping everything, and the measured peak of each of the others, so that times are compared
at equal memory. Models that are in the results are left out: run the command again to go on.

    OMP_NUM_THREADS=1 python -m benchmarks.compare [--models llama unet] [--redo] [--rounds 7]

Writes benchmarks/results/compare.{jsonl,md} and compare-MODEL.svg (pictures need matplotlib).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import rockplan
from rockplan.comparison import Comparison, Row, measured_series
from rockplan.reports.pictures import Series
from testing import models
from testing.models import Case

RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "compare.jsonl"
SHARES = ("min", "25%", "50%", "75%", "100%")
ROUNDS = 7

CASES: dict[str, Callable[[], Case]] = {
    "gpt2": partial(
        models.gpt2,
        layers=6,
        width=192,
        heads=6,
        vocabulary=1024,
        batch=4,
        length=192,
        attention="eager",
    ),
    "llama": partial(
        models.llama, layers=6, width=192, heads=6, vocabulary=1024, batch=4, length=256
    ),
    "vit": partial(models.vit, layers=6, width=192, heads=3, batch=10, size=96),
    "resnet-18": partial(models.resnet18, width=32, batch=56, size=96),
    "resnet-50": partial(models.resnet, width=32, batch=14, size=96),
    "unet": partial(models.unet, width=16, batch=10, size=96),
}
COMPILE_BUDGETS: dict[str, tuple[float, ...]] = {"gpt2": (0.5,)}
"""Ratios for torch.compile, which takes minutes for each."""


def compared(case: Case, name: str, rounds: int) -> Comparison:
    """Of one model, with a budget at the peak of each other variant that saves memory."""
    measure = partial(
        rockplan.compare,
        case.model,
        case.args,
        sample_kwargs=case.kwargs,
        compile_budgets=COMPILE_BUDGETS.get(name, ()),
    )
    eager, *others = measure([], rounds=1).rows
    peaks = {row.peak_bytes for row in others if row.peak_bytes is not None}
    assert eager.peak_bytes is not None
    smaller = sorted(peak for peak in peaks if peak < eager.peak_bytes)
    return measure([*SHARES, *smaller], rounds=rounds)


def examined(name: str, rounds: int, command: str) -> dict[str, Any]:
    torch.manual_seed(0)
    case = CASES[name]()
    found = compared(case, name, rounds)
    versions = {n: metadata.version(n) for n in ("torch", "transformers", "highspy")}
    return {
        "model": name,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": versions,
        **asdict(found),
    }


def _commit() -> str:
    """The last one that changed the package, with a '+' where files of it differ from that."""
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", "rockplan"]
        return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()

    return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")


def read() -> dict[str, dict[str, Any]]:
    """The newest result of each model, in the order of CASES."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    found = {row["model"]: row for row in map(json.loads, lines)}
    return {name: found[name] for name in CASES if name in found}


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Results, table and pictures."""
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in found.values()))
    (RESULTS / "compare.md").write_text("\n".join(report(found)) + "\n")
    for name, result in found.items():
        draw(name, comparison_of(result))


# Report


def comparison_of(result: Mapping[str, Any]) -> Comparison:
    rows = tuple(
        Row(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
        for row in result["rows"]
    )
    return Comparison(rows, result["machine"], result["rounds"])


def report(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "# Eager, PyTorch's checkpointing and rockplan, measured"
    yield ""
    yield (
        "`OMP_NUM_THREADS=1 python -m benchmarks.compare`. MiB alive beyond parameters, buffers, "
        "inputs and `.grad`, by the ruler. Time: CPU time of a step over eager's of the same "
        "round, less 1, the median of interleaved rounds and the middle half; fastest: the "
        "fastest round over eager's fastest, which the other work on this machine disturbed "
        "least, and which the pictures show. A step drops outputs that nobody differentiates "
        "(logits beside a loss); a plan reserves them for the caller, so it may need less than "
        "predicted. Inductor draws other random numbers, so with dropout its gradients differ."
    )
    yield from ("", "## At equal memory", "")
    yield (
        "Each of PyTorch's ways that needs less than eager, beside rockplan with its measured peak "
        "as the budget."
    )
    yield ""
    heads = ("model", "variant", "its peak", "its time", "fastest")
    yield "| " + " | ".join((*heads, "rockplan's peak", "rockplan's time", "fastest")) + " |"
    yield "|" + "---|" * (len(heads) + 3)
    for name, result in found.items():
        compared = comparison_of(result)
        eager = compared.rows[0]
        for pair in at_equal_memory(compared):
            sides = (c for row in pair for c in (_mib(row.peak_bytes), *_times(row, eager)))
            yield "| " + " | ".join((name, pair[0].name, *sides)) + " |"
    for name, result in found.items():
        yield from _model_report(name, result)


def at_equal_memory(found: Comparison) -> Iterator[tuple[Row, Row]]:
    """(a variant of PyTorch's that needs less than eager, rockplan's largest budget within it)."""
    eager, *others = found.rows
    planned = [row for row in others if row.budget_bytes is not None]
    for row in others:
        peak_bytes = row.peak_bytes or 0
        if row.budget_bytes is not None or not 0 < peak_bytes < (eager.peak_bytes or 0):
            continue
        within = [p for p in planned if (p.budget_bytes or 0) <= peak_bytes]
        if within:
            yield row, max(within, key=lambda p: p.budget_bytes or 0)


def _model_report(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    found = comparison_of(result)
    versions = ", ".join(f"{n} {v}" for n, v in result["versions"].items())
    yield from ("", f"## {name}", "", f"![{name}](compare-{name}.svg)", "")
    yield (
        f"{result['parameters'] / 1e6:.1f} million parameters; {result['machine']}, {versions}; "
        f"{found.rounds} rounds; {result['date']}, commit {result['commit']}."
    )
    yield ""
    heads = ("variant", "budget", "predicted peak", "peak", "predicted time", "time", "fastest")
    yield "| " + " | ".join((*heads, "gap at most", "beside eager")) + " |"
    yield "|" + "---|" * (len(heads) + 2)
    for row in found.rows:
        is_planned = row.budget_bytes is not None
        title = "rockplan" + (f" {row.name.split()[1]}" if row.name.endswith(("%", "min")) else "")
        cells = (
            title if is_planned else row.name,
            _mib(row.budget_bytes),
            _mib(row.predicted_peak_bytes),
            _mib(row.peak_bytes),
            _percent(row.predicted_overhead),
            *_times(row, found.rows[0]),
            _percent(row.gap).lstrip("+"),
            _remark(row),
        )
        yield "| " + " | ".join(cells) + " |"


def _mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**20:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def _times(row: Row, eager: Row) -> tuple[str, str]:
    """The median with the middle half, and the fastest round."""
    if row.quartiles is None:
        return "", ""
    low, high = row.quartiles
    return (
        f"{_percent(row.overhead)} ({low:+.1%} to {high:+.1%})",
        _percent(fastest(row, eager)),
    )


def fastest(row: Row, eager: Row) -> float:
    """Time over eager's, less 1, of the fastest round of each."""
    return min(row.times_ns) / min(eager.times_ns) - 1


def _remark(row: Row) -> str:
    if row.note:
        return row.note.partition(";")[0]
    unequal = [t for t in (row.gradients, row.buffers) if t and t != "equal bit for bit"]
    return "; ".join(unequal) or "equal bit for bit"


def draw(name: str, found: Comparison) -> None:
    """Peak against time: rockplan's budgets as predicted and as measured, and the others."""
    planned = [row for row in found.rows if row.predicted_peak_bytes is not None]
    points = sorted((r.predicted_peak_bytes or 0, r.predicted_overhead or 0.0) for r in planned)
    predicted = Series("rockplan (predicted)", tuple(points), connected=True)
    rows = (replace(r, overhead=fastest(r, found.rows[0])) for r in found.rows if r.times_ns)
    series: Sequence[Series] = (predicted, *measured_series(replace(found, rows=tuple(rows))))
    title = f"{name}: {found.machine}"
    (RESULTS / f"compare-{name}.svg").write_bytes(rockplan.draw_curve(series, title=title))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--redo", action="store_true", help="measure again what is there")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    write(read())
    for name in wanted.models:
        if name in read() and not wanted.redo:
            continue
        command = f"python -m benchmarks.compare --models {name} --rounds {wanted.rounds}"
        found = {**read(), name: examined(name, wanted.rounds, command)}
        write({n: found[n] for n in CASES if n in found})
        print(f"{name}\n{comparison_of(found[name])}\n", flush=True)


if __name__ == "__main__":
    main()
