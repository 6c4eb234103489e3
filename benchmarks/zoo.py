"""Sweep over architectures: is the planned module the same as eager execution, within its budget?

Every case is planned at two budgets ('min' and '60%' of the unplanned peak) and trained three
steps beside eager execution; then its peak is measured. It ends as

    equal        same bits (results, gradients, parameters, buffers, generator), within budget,
                 measured peak within 2 % of the prediction, at both budgets
    refused      a rockplan.RockplanError
    eager fails  eager execution is not deterministic against itself from the same seed
    not built    no small configuration or no input was found that eager execution accepts
    wrong        anything else

Command: OMP_NUM_THREADS=1 python -m benchmarks.zoo [--retry] [--sources transformers modules timm]
Results: benchmarks/results/zoo.jsonl, one line a case, kept and continued; zoo.md, the table.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import platform
import random
import re
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TIME_LIMIT_S = 120.0
STEPS = 3
TOLERANCE = 0.02
BUDGETS = ("min", "60%")
OUTCOMES = ("equal", "refused", "wrong", "eager fails", "not built")
SOURCES = ("modules", "transformers", "timm")


# --- worker: one case after another, results on the original stdout ------------------------------


def work(budgets: list[str]) -> None:
    """Read names from stdin, write a line of JSON for every stage and result."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    channel.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        name = line.strip()
        started = time.monotonic()
        found = Examination(
            name, budgets, lambda stage: channel.write(json.dumps({"stage": stage}) + "\n")
        )
        result = found.run()
        result["seconds"] = round(time.monotonic() - started, 1)
        channel.write(json.dumps({"result": result}) + "\n")


class Examination:
    """One case: its stages, told as they begin, and its outcome."""

    def __init__(self, name: str, budgets: list[str], tell: Any) -> None:
        self.name = name
        self.budgets = budgets
        self.tell = tell
        self.stage = ""
        self.facts: dict[str, Any] = {"name": name}

    def run(self) -> dict[str, Any]:
        import rockplan
        from benchmarks.zoo_cases import NotBuilt

        try:
            self._examine()
        except NotBuilt as error:
            return self._end("not built", error)
        except rockplan.RockplanError as error:
            return self._end("refused", error)
        except Exception as error:
            if self.stage == "eager":
                return self._end("eager fails", error)
            last = traceback.format_exc().splitlines(True)[-14:]
            self.facts["traceback"] = without_folders("".join(last))
            return self._end("wrong", error)
        self.facts["outcome"] = "equal"
        return self.facts

    def _end(self, outcome: str, error: Exception) -> dict[str, Any]:
        self.facts |= {
            "outcome": outcome,
            "stage": self.stage,
            "error": type(error).__name__,
            "message": without_folders(str(error))[:1500],
        }
        return self.facts

    def _begin(self, stage: str) -> None:
        self.stage = stage
        self.tell(stage)

    def _examine(self) -> None:
        self._begin("build")
        case = make_case(self.name)
        take_input_gradients(case)
        self._begin("eager")
        train_side_by_side(case, copy.deepcopy(case.model), copy.deepcopy(case.model))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ROCKPLAN_CACHE_DIR"] = folder
            for budget in self.budgets:
                self._examine_budget(case, budget)

    def _examine_budget(self, case: Any, budget: str) -> None:
        import torch

        import rockplan

        options = rockplan.Options(time_limit_s=3, bound_time_limit_s=0.2)
        model, eager = copy.deepcopy(case.model), copy.deepcopy(case.model)
        self._begin(f"plan {budget}")
        torch.manual_seed(0)
        before = torch.get_rng_state()
        try:
            planned = rockplan.solve(
                model, case.args, budget, sample_kwargs=case.kwargs, options=options
            )
        except rockplan.InfeasibleBudget as error:
            if budget == "min":
                raise
            self.facts[budget] = f"less than the minimum, {error.minimum_bytes} bytes"
            return
        assert torch.equal(torch.get_rng_state(), before), "planning moved the generator"
        self._begin(f"train {budget}")
        train_side_by_side(case, planned, eager)
        self._begin(f"measure {budget}")
        self.facts[budget] = measure(case, planned)


def without_folders(text: str) -> str:
    """`text` with the paths of installed packages and of this repository made relative."""
    here = str(Path(__file__).parents[1])
    return re.sub(r"/[^\s\"']*/site-packages/", "", text).replace(here + "/", "")


def make_case(name: str) -> Any:
    from benchmarks import zoo_cases

    source = name.split("/")[0]
    seed_everything(seed_of(name))
    factories = {
        "transformers": zoo_cases.transformers_case,
        "module": zoo_cases.module_case,
        "timm": zoo_cases.timm_case,
    }
    return factories[source](name)


def seed_everything(seed: int) -> None:
    import numpy
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def train_side_by_side(case: Any, planned: Any, eager: Any) -> None:
    """Three steps of stochastic gradient descent of both; everything the same bit for bit."""
    import torch

    from tests.training import assert_equal_trees, assert_same_state

    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (eager, planned)]
    for step in range(STEPS):
        found = []
        for module, optimizer in zip((eager, planned), optimizers, strict=True):
            seed_everything(1000 + step)
            optimizer.zero_grad()
            result = module(*case.args, **case.kwargs)
            case.loss(result).backward()
            found.append((result, take_input_gradients(case), torch.get_rng_state()))
        (expected, *others), (result, *found_others) = found
        assert_equal_trees(result, expected, f"step {step}: result")
        assert_equal_trees(found_others[0], others[0], f"step {step}: gradient of an input")
        assert torch.equal(found_others[1], others[1]), f"step {step}: generator state"
        assert_same_state(planned, eager, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(planned, eager, f"after step {step}")


def take_input_gradients(case: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves((case.args, case.kwargs))
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_leaf]
    found = [t.grad for t in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


def measure(case: Any, planned: Any) -> dict[str, int]:
    """Budget, prediction and measured peak in bytes; raises AssertionError where they disagree."""
    import rockplan

    def step() -> None:
        result = planned(*case.args, **case.kwargs)
        case.loss(result).backward()

    peak_bytes, left_bytes = rockplan.peak_live_bytes(step)
    take_input_gradients(case)
    plan = planned.plan
    facts = f"measured {peak_bytes}, predicted {plan.peak_bytes}, budget {plan.budget_bytes}"
    assert peak_bytes <= plan.budget_bytes, f"over budget: {facts}"
    assert abs(peak_bytes - plan.peak_bytes) <= TOLERANCE * plan.peak_bytes, f"off: {facts}"
    assert left_bytes == 0, f"{left_bytes} bytes left after a step"
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": peak_bytes,
        "unplanned_bytes": plan.eager_peak_bytes,
        "operations": len(plan.graph.nodes),
    }


# --- parent: names, the worker's life, results ---------------------------------------------------


class Worker:
    """A process that examines cases until one takes too long or kills it."""

    def __init__(self, budgets: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zoo", "--worker", "--budgets", *budgets],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=Path(__file__).parents[1],
        )
        assert self.process.stdout is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""
        self._message(time.monotonic() + TIME_LIMIT_S)

    def examine(self, name: str) -> tuple[dict[str, Any], bool]:
        """(result, True if the worker lives on)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        deadline = time.monotonic() + TIME_LIMIT_S
        stage = ""
        while True:
            message = self._message(deadline)
            if message is None:
                return self._lost(name, stage), False
            if "result" in message:
                return message["result"], True
            stage = message.get("stage", stage)

    def _lost(self, name: str, stage: str) -> dict[str, Any]:
        code = self.process.poll()
        what = "time limit" if code is None else f"the process ended with {code}"
        self.process.kill()
        self.process.wait()
        outcome = {"build": "not built", "eager": "eager fails"}.get(stage, "wrong")
        return {"name": name, "outcome": outcome, "stage": stage, "error": what, "message": what}

    def _message(self, deadline: float) -> dict[str, Any] | None:
        """The next line of the worker; None if it ended or the time is over."""
        assert self.process.stdout is not None
        while b"\n" not in self.buffer:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                self.process.wait()
                return None
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in rows}


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def case_names(sources: list[str]) -> list[str]:
    from benchmarks import zoo_cases

    warnings.simplefilter("ignore")
    listed = {
        "modules": zoo_cases.module_names,
        "transformers": zoo_cases.transformers_names,
        "timm": zoo_cases.timm_names,
    }
    return [name for source in sources for name in listed[source]()]


def sweep(names: list[str], path: Path, budgets: list[str]) -> None:
    """Examine `names`, appending each result to `path`."""
    worker: Worker | None = None
    started = time.monotonic()
    for number, name in enumerate(names):
        worker = worker or Worker(budgets)
        result, alive = worker.examine(name)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        spent = time.monotonic() - started
        left = spent / (number + 1) * (len(names) - number - 1)
        print(
            f"{number + 1}/{len(names)} {name}: {result['outcome']} "
            f"{result.get('error', '')} ({left / 60:.0f} min left)",
            file=sys.stderr,
            flush=True,
        )
        if not alive:
            worker = None
    if worker is not None:
        worker.process.kill()
        worker.process.wait()


def table(rows: dict[str, dict[str, Any]], command: str, left: int) -> str:
    """The counts and everything that is not equal, as Markdown."""
    import torch

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, row in rows.items():
        counts[name.split("/")[0]][row["outcome"]] += 1
    lines = [
        "# Sweep over architectures",
        "",
        f"`{command}` on {platform.machine()}, {os.cpu_count()} cores, one thread, "
        f"Python {platform.python_version()}, torch {torch.__version__}. Outcomes are explained "
        f"in `benchmarks/zoo.py`. {len(rows)} cases examined, {left} not yet.",
        "",
        "| source | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---|" * len(OUTCOMES),
    ]
    for source in sorted(counts):
        cells = " | ".join(str(counts[source][o]) for o in OUTCOMES)
        lines.append(f"| {source} | {cells} |")
    for outcome in ("wrong", "refused", "eager fails", "not built"):
        chosen = [r for _, r in sorted(rows.items()) if r["outcome"] == outcome]
        if chosen:
            lines += ["", f"## {outcome}", "", "| case | error |", "|---|---|"]
            lines += [f"| {r['name']} | {_cell(r)} |" for r in chosen]
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    text = f"{row['error']}: {row['message']}".replace("\n", " ").replace("|", "/")
    return text if len(text) <= 200 else text[:197] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--retry", action="store_true", help="examine wrong and refused again")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES[:2]))
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--only", default="", help="part of the names to examine")
    parser.add_argument("--results", type=Path, default=RESULTS / "zoo.jsonl")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.budgets)
        return
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    rows = read_results(arguments.results)
    again = ("wrong", "refused") if arguments.retry else ()
    done = {name for name, row in rows.items() if row["outcome"] not in again}
    listed = case_names(arguments.sources)
    names = [n for n in listed if n not in done and arguments.only in n]
    # Mixed, so that a sweep that is cut short is a fair sample; bodies without a head last.
    names.sort(key=lambda n: (n not in rows, "/base/" in n, seed_of(n)))
    sweep(names, arguments.results, arguments.budgets)
    rows = read_results(arguments.results)
    lines = "".join(json.dumps(rows[name]) + "\n" for name in sorted(rows))
    arguments.results.write_text(lines, encoding="utf-8")
    command = "OMP_NUM_THREADS=1 python -m benchmarks.zoo"
    arguments.results.with_suffix(".md").write_text(
        table(rows, command, len(set(listed) - set(rows))), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
