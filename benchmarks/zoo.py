"""Sweep over architectures: is the planned module the same as eager execution, within its budget?

Every case is planned at two budgets ('min' and '60%' of the unplanned peak) and trained three
steps beside eager execution; then its peak is measured. It ends as

    equal        same bits (results, gradients, parameters, buffers, generator), within budget,
                 measured peak within 2 % of the prediction, at both budgets (at 'min' alone
                 where 60 % is less)
    refused      a rockplan.RockplanError
    unfinished   the time limit of a case struck (the body of a large model, on one core), or that
                 of its memory; `--retry unfinished --limit 3600 --gib 20` gives such cases an
                 hour each, and twice the memory
    unrepeated   two eager runs from the same seed differ from one another
    not built    no small configuration or no input was found that eager execution accepts
    wrong        anything else

With `--compile` the plans are those of compiled kernels, at '100%', where nothing runs again, and
at 'min'. Then equal is: the same bits at both budgets, and peaks as above; draws, and where the
generator ends, as eager's; results, gradients and buffers of a step no further from eager's than
`Options(check=True)` allows.

Dropout is on. Off are SpecAugment and LayerDrop of transformers (`zoo_cases.OFF`).

Command: OMP_NUM_THREADS=1 python -m benchmarks.zoo [--jobs 2] [--retry wrong] [--recheck 50]
         [--device cuda] [--seconds 600] [--compile]
Results: benchmarks/results/zoo.jsonl (of a device zoo_cuda.jsonl, of kernels zoo_compile.jsonl),
one line a case with the commit that it was examined at, kept and continued; zoo.md, the table.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import datetime
import functools
import gc
import json
import logging
import os
import platform
import random
import re
import resource
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from testing.sweep import FOR_CUDA, seed_of, tolerance_bytes

RESULTS = Path(__file__).parent / "results"
TIME_LIMIT_S = 600
# A worker's cases share a cache; its profile grows, and so does what libraries keep.
CASES_OF_A_WORKER = 60
STEPS = 3
LARGE_GRAPH = 150

# Of a worker: a configuration that does not build small must not take the machine with it.
ADDRESS_SPACE_GIB = 10
BUDGETS = ("min", "60%")
COMPILED_BUDGETS = ("100%", "min")

OUTCOMES = ("equal", "refused", "wrong", "unfinished", "unrepeated", "not built")
SOURCES = ("modules", "transformers", "timm")


# --- worker: one case after another, results on the original stdout ------------------------------


def work(budgets: list[str], gib: int, device: str, is_compiled: bool) -> None:
    """Read names from stdin, write a line of JSON for every stage and result."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    else:
        # Eager execution repeats itself, or the case cannot be judged.
        torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    plan_roughly()
    capture_once()
    package = package_commit()
    channel.write(json.dumps({"ready": True}) + "\n")

    def tell(stage: str) -> None:
        channel.write(json.dumps({"stage": stage}) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROCKPLAN_CACHE_DIR"] = folder
        for line in sys.stdin:
            started = time.process_time()
            result = Examination(line.strip(), budgets, tell, device, is_compiled).run()
            result["seconds"] = round(time.process_time() - started, 1)
            result["package"] = package
            channel.write(json.dumps({"result": result}) + "\n")
            if not gc.get_freeze_count():
                # The libraries' objects, which are not to be looked through again and again.
                gc.collect()
                gc.freeze()


def plan_roughly() -> None:
    """Spend little on what the answer does not depend on, in this process: times need not be
    precise."""
    from rockplan.graph_builder.costs import call_costs

    call_costs._LEAST_REPEATS, call_costs._TIME_BOX_NS = 2, 0
    call_costs.SCRATCH_BYTES = {"cpu": 1, "cuda": 1}


def capture_once() -> None:
    """The second budget of a case plans from the capture of the first, in this process."""
    from rockplan.solving import programs

    capture = programs.captured_call
    latest: list[Any] = [None, None]

    def captured_once(call: Any, *options: Any, **tried: Any) -> Any:
        if tried:  # with other options, for what an error says of them
            return capture(call, *options, **tried)
        known = latest[0]
        if known is None or known.module is not call.module or known.incoming != call.incoming:
            latest[:] = call, capture(call, *options)
        return latest[1]

    programs.captured_call = captured_once


class Examination:
    """One case: its stages, told as they begin, and its outcome."""

    def __init__(
        self,
        name: str,
        budgets: list[str],
        tell: Any,
        device: str = "cpu",
        is_compiled: bool = False,
    ) -> None:
        self.name = name
        self.budgets = budgets
        self.tell = tell
        self.device = device
        self.is_compiled = is_compiled
        self.stage = ""
        self.facts: dict[str, Any] = {"name": name}

    def run(self) -> dict[str, Any]:
        import rockplan
        from testing.zoo_cases import NotBuilt

        try:
            self._examine()
        except NotBuilt as error:
            return self._end("not built", error)
        except rockplan.RockplanError as error:
            return self._end("refused", error)
        except Exception as error:
            if self.stage == "build" or self.stage == "eager":
                differs = isinstance(error, AssertionError)
                return self._end("unrepeated" if differs else "not built", error)
            if is_out_of_memory(error):
                return self._end("unfinished", error)
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
        case = make_case(self.name).to(self.device)
        take_input_gradients(case)
        self._begin("eager")
        train_side_by_side(case, copy.deepcopy(case.model), copy.deepcopy(case.model))
        if self.is_compiled:
            self._examine_kernels(case)
            return
        for budget in self.budgets:
            self._examine_budget(case, budget)

    def _examine_budget(self, case: Any, budget: str) -> None:
        import rockplan

        eager = copy.deepcopy(case.model)
        try:
            planned = self._planned(case, budget)
        except rockplan.InfeasibleBudget as error:
            if budget == "min":
                raise
            self.facts[budget] = f"less than the minimum, {error.minimum_bytes} bytes"
            return
        self._begin(f"train {budget}")
        train_side_by_side(case, planned, eager)
        self._begin(f"measure {budget}")
        self.facts[budget] = measure(case, planned, self.device)

    def _examine_kernels(self, case: Any) -> None:
        """Plans of compiled kernels: the first keeps everything, the others are as it is."""
        eager = copy.deepcopy(case.model)
        first, *others = self.budgets
        started = time.perf_counter()
        with lines_of_the_logger() as said:
            kept = self._planned(case, first)
        self.facts["planning_s"] = round(time.perf_counter() - started, 1)
        self.facts["kernels"] = len(kept.plan.graph.kernels)
        self.facts["said"] = [without_folders(line)[:300] for line in said]
        planned = {first: kept, **{budget: self._planned(case, budget) for budget in others}}
        self._begin("compare with eager")
        self.facts |= compare_with_eager(case, copy.deepcopy(kept), eager)
        for budget in others:
            self._begin(f"train {budget}")
            train_side_by_side(case, copy.deepcopy(planned[budget]), copy.deepcopy(kept))
        for budget, module in planned.items():
            self._begin(f"measure {budget}")
            self.facts[budget] = measure(case, module, self.device)

    def _planned(self, case: Any, budget: str) -> Any:
        """Raises rockplan.RockplanError."""
        import torch

        import rockplan
        from testing.training import assert_equal_trees, generator_states

        # In less time the smallest budget that is found is up to four times as large as it is, and
        # plans where memory is shortest run most again.
        limit_s = 2.0 if budget == "min" else 0.2
        options = rockplan.Options(
            time_limit_s=limit_s, bound_time_limit_s=0.05, compile=self.is_compiled
        )
        self._begin(f"plan {budget}")
        torch.manual_seed(0)
        before = generator_states()
        planned = rockplan.solve(
            case.model, case.args, budget, sample_kwargs=case.kwargs, options=options
        )
        assert_equal_trees(generator_states(), before, "planning moved the generator")
        return planned


@contextlib.contextmanager
def lines_of_the_logger() -> Iterator[list[str]]:
    """What the package warns of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rockplan")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def compare_with_eager(case: Any, planned: Any, eager: Any) -> dict[str, Any]:
    """A step of each: how far results, gradients and buffers of `planned` are from eager's, and
    milliseconds. Raises AssertionError beyond what rockplan.Options(check=True) allows."""
    import torch

    from rockplan.graph_builder.fusion import kernels
    from rockplan.solving import check

    rounded = copy.deepcopy(eager)
    steps, milliseconds = [], []
    for module in (eager, planned):
        started = time.perf_counter()
        steps.append(_named_step(case, module))
        milliseconds.append(round(1e3 * (time.perf_counter() - started), 1))

    names = {v.spec.dtype.removeprefix("torch.") for v in planned.plan.graph.values}
    dtypes = {getattr(torch, name) for name in names}

    def of_rounded() -> dict[str, float]:
        check.round_otherwise(rounded.parameters(), dtypes)
        return check.shares_of(_named_step(case, rounded), steps[0])

    shares = check.shares_of(steps[1], steps[0])
    said = ", ".join(f"{what} {share:.1e}" for what, share in shares.items())
    bound = kernels.bound_of(dtypes)
    assert not check.too_far(shares, bound, of_rounded), f"far from eager: {said}"
    return {"from_eager": {w: float(f"{s:.1e}") for w, s in shares.items()}, "ms": milliseconds}


def _named_step(case: Any, module: Any) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    seed_everything(1000)
    module.zero_grad()
    result = module(*case.args, **case.kwargs)
    case.loss(result).backward()
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return {
        **{f"output {i}": t.detach() for i, t in enumerate(leaves)},
        **{f"gradient of {n}": p.grad for n, p in module.named_parameters()},
        **{f"gradient of input {i}": g for i, g in enumerate(take_input_gradients(case))},
        **{f"buffer {n}": b for n, b in module.named_buffers()},
        "generator state": torch.get_rng_state(),
    }


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch's allocator on CPU raises a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def without_folders(text: str) -> str:
    """`text` with the paths of installed packages and of this repository made relative."""
    here = str(Path(__file__).parents[1])
    return re.sub(r"/[^\s\"']*/site-packages/", "", text).replace(here + "/", "")


def make_case(name: str) -> Any:
    from testing import library_cases, zoo_cases

    source = name.split("/")[0]
    seed_everything(seed_of(name))
    factories = {
        "transformers": zoo_cases.transformers_case,
        "module": zoo_cases.module_case,
        "timm": zoo_cases.timm_case,
        "library": library_cases.library_case,
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

    from testing.training import assert_equal_trees, assert_same_state, generator_states

    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (eager, planned)]
    for step in range(STEPS):
        found = []
        for module, optimizer in zip((eager, planned), optimizers, strict=True):
            seed_everything(1000 + step)
            optimizer.zero_grad()
            result = module(*case.args, **case.kwargs)
            case.loss(result).backward()
            found.append((result, take_input_gradients(case), generator_states()))
        whats = ("result", "gradient of an input", "generators")
        for what, expected, other in zip(whats, *found, strict=True):
            assert_equal_trees(other, expected, f"step {step}: {what}")
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


def measure(case: Any, planned: Any, device: str) -> dict[str, int]:
    """Budget, prediction and measured peak in bytes; raises AssertionError where they disagree."""
    from torch.utils import _pytree as pytree

    import rockplan

    def step() -> None:
        # With containers of its own: what the forward puts into them is there after the step.
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (case.args, case.kwargs))
        result = planned(*args, **kwargs)
        case.loss(result).backward()
        del result, args, kwargs
        # A plan counts them as new; into those of a step before they would be added.
        take_input_gradients(case)

    peak_bytes, left_bytes = rockplan.peak_live_bytes(step, device=device)
    plan = planned.plan
    facts = f"measured {peak_bytes}, predicted {plan.peak_bytes}, budget {plan.budget_bytes}"
    assert peak_bytes <= plan.budget_bytes, f"over budget: {facts}"
    off_bytes = abs(peak_bytes - plan.peak_bytes)
    assert off_bytes <= tolerance_bytes(plan, device), f"off: {facts}"
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
    """A process that examines cases, one at a time."""

    def __init__(
        self,
        budgets: list[str],
        limit_s: int = TIME_LIMIT_S,
        gib: int = ADDRESS_SPACE_GIB,
        device: str = "cpu",
        is_compiled: bool = False,
    ) -> None:
        self.limit_s = limit_s
        worker = [sys.executable, "-m", "benchmarks.zoo", "--worker"]
        worker += ["--compile"] * is_compiled
        self.process = subprocess.Popen(
            [*worker, "--gib", str(gib), "--device", device, "--budgets", *budgets],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=Path(__file__).parents[1],
            env={**FOR_CUDA, **os.environ},
        )
        assert self.process.stdout is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""
        self._message(time.monotonic() + limit_s)

    def examine(self, name: str) -> tuple[dict[str, Any], bool]:
        """(result, True if the worker lives on)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        deadline = time.monotonic() + self.limit_s
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
        late = "unfinished" if code is None else "wrong"
        outcome = {"build": "not built", "eager": "not built"}.get(stage, late)
        row = {"name": name, "outcome": outcome, "stage": stage, "error": what, "message": what}
        return {**row, "package": package_commit()}

    def end(self) -> None:
        """No more cases: the process removes its cache and ends, or is killed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

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


def case_names(sources: list[str]) -> list[str]:
    from testing import zoo_cases

    warnings.simplefilter("ignore")
    listed = {
        "modules": zoo_cases.module_names,
        "transformers": zoo_cases.transformers_names,
        "timm": zoo_cases.timm_names,
    }
    return [name for source in sources for name in listed[source]()]


def sweep(
    names: list[str],
    path: Path,
    jobs: int,
    start: Callable[[], Worker],
    deadline: float = float("inf"),
    cases_of_a_worker: int = CASES_OF_A_WORKER,
) -> None:
    """Examine `names` in `jobs` processes, appending each result to `path`; begin none after
    `deadline` (of time.monotonic)."""
    waiting = collections.deque(names)
    started = time.monotonic()
    lock = threading.Lock()

    def keep(result: dict[str, Any]) -> None:
        done = len(names) - len(waiting)
        left = (time.monotonic() - started) / done * len(waiting)
        with lock, path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
            print(
                f"{done}/{len(names)} {result['name']}: {result['outcome']} "
                f"{result.get('error', '')} ({left / 60:.0f} min left)",
                file=sys.stderr,
                flush=True,
            )

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        each = (waiting, start, keep, deadline, cases_of_a_worker)
        for one in [pool.submit(_examine_all, *each) for _ in range(jobs)]:
            one.result()


def _examine_all(
    waiting: collections.deque[str],
    start: Callable[[], Worker],
    keep: Callable[[dict[str, Any]], None],
    deadline: float,
    cases_of_a_worker: int,
) -> None:
    """Take names from `waiting` until none is left; a worker that is lost is replaced."""
    while waiting and time.monotonic() < deadline:
        worker = start()
        for _ in range(cases_of_a_worker):
            if time.monotonic() >= deadline:
                break
            try:
                name = waiting.popleft()
            except IndexError:
                break
            result, alive = worker.examine(name)
            keep(result)
            if not alive:
                break
        worker.end()


def package_commit() -> str:
    """Commit of this repository, with a '+' where files of the package differ from it."""
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        return found.stdout.strip()

    changed = git(
        "status",
        "--porcelain",
        "--",
        "rockplan",
        "testing",
    )
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def table(rows: dict[str, dict[str, Any]], command: str, where: str, left: int) -> str:
    """The counts, everything that is not equal, and every architecture, as Markdown."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, row in rows.items():
        counts[name.split("/")[0]][row["outcome"]] += 1
        counts["all"][row["outcome"]] += 1
    lines = [
        "# Sweep over architectures",
        "",
        f"`{command}` on {where}, {os.cpu_count()} cores, one thread each, "
        f"Python {platform.python_version()}, {_versions()}, {datetime.date.today()}; commits "
        f"{_commits(rows)}. Outcomes are explained in `benchmarks/zoo.py`. {len(rows)} cases "
        f"examined, {left} not yet.",
        "",
        "| source | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---|" * len(OUTCOMES),
    ]
    for source in (*sorted(counts.keys() - {"all"}), "all"):
        cells = " | ".join(str(counts[source][o]) for o in OUTCOMES)
        lines.append(f"| {source} | {cells} |")
    ordered = [row for _, row in sorted(rows.items())]
    for outcome in OUTCOMES[1:]:
        chosen = [r for r in ordered if r["outcome"] == outcome]
        if chosen:
            lines += ["", f"## {outcome}", "", "| case | error |", "|---|---|"]
            lines += [f"| {r['name']} | {_cell(r)} |" for r in chosen]
    equal = [r for r in ordered if r["outcome"] == "equal"]
    lines += ["", "## equal", "", "Bytes, measured.", ""]
    if any("kernels" in r for r in rows.values()):
        lines += [
            "| case | operations | kernels | stay eager | everything kept | min | gradients from "
            "eager's | seconds to plan first |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_compiled_line(r) for r in equal]
    else:
        lines += ["| case | operations | everything kept | 60% | min |", "|---|---|---|---|---|"]
        lines += [_equal_line(r) for r in equal]
    return "\n".join(lines) + "\n"


def machine_of(device: str) -> str:
    if device == "cpu":
        return platform.machine()
    import torch

    return torch.cuda.get_device_name(device)


def _versions() -> str:
    return ", ".join(f"{n} {metadata.version(n)}" for n in ("torch", "transformers", "timm"))


def _commits(rows: dict[str, dict[str, Any]]) -> str:
    """'3fdb83f (900 cases), ...'."""
    found = collections.Counter(row["package"] for row in rows.values())
    return ", ".join(f"{commit} ({count} cases)" for commit, count in found.most_common())


def _cell(row: dict[str, Any]) -> str:
    text = f"{row['error']}: {row['message']}".replace("\n", " ").replace("|", "/")
    return text if len(text) <= 240 else text[:237] + "..."


def _equal_line(row: dict[str, Any]) -> str:
    least, more = row["min"], row["60%"]
    middle = "below min" if isinstance(more, str) else f"{more['measured_bytes']:,}"
    return (
        f"| {row['name']} | {least['operations']} | {least['unplanned_bytes']:,} | {middle} "
        f"| {least['measured_bytes']:,} |"
    )


def _compiled_line(row: dict[str, Any]) -> str:
    kept, least = row["100%"], row["min"]
    left = sum("cannot be compiled" in line for line in row["said"])
    return (
        f"| {row['name']} | {kept['operations']} | {row['kernels']} | {left} "
        f"| {kept['measured_bytes']:,} | {least['measured_bytes']:,} "
        f"| {row['from_eager']['gradients']:.1e} | {row['planning_s']} |"
    )


def choose(
    listed: list[str], rows: dict[str, dict[str, Any]], retry: list[str], recheck: int
) -> list[str]:
    """What to examine: what was not, what ended as one of `retry`, and `recheck` random equal
    ones, those of other commits first. Mixed, so that a sweep that is cut short is a
    fair sample; what is examined again first, bodies without a head last."""
    equal = [n for n in listed if n in rows and rows[n]["outcome"] == "equal"]
    here = package_commit()
    shuffled = random.Random(len(equal)).sample(equal, len(equal))
    again = set(sorted(shuffled, key=lambda n: rows[n]["package"] == here)[:recheck])
    again |= {n for n in listed if n in rows and rows[n]["outcome"] in retry}
    names = [n for n in listed if n not in rows or n in again]
    return sorted(names, key=lambda n: (n not in again, "/base/" in n, seed_of(n)))


def spread(names: list[str], plain: dict[str, dict[str, Any]]) -> list[str]:
    """In an order in which a run that is cut short has seen something of everything: one of each
    kind of architecture, then another of each. plain: rows without kernels. Large graphs, for which
    it takes minutes to compile, are the rarer the larger they are; what was not equal without
    kernels comes last."""

    def size(name: str) -> int:
        row = plain.get(name, {})
        operations = row["min"]["operations"] if "min" in row else 0
        return 1 + operations // LARGE_GRAPH

    def is_last(name: str) -> bool:
        return plain.get(name, {}).get("outcome", "equal") != "equal"

    seen: collections.Counter[tuple[str, int]] = collections.Counter()
    places = {}
    for name in sorted(names, key=seed_of):
        source, _, rest = name.partition("/")
        kind = rest.partition("/")[0] if source == "transformers" else source
        seen[kind, size(name)] += 1
        places[name] = size(name) * seen[kind, size(name)]
    return sorted(names, key=lambda n: (is_last(n), places[n], seed_of(n)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--retry", nargs="+", choices=OUTCOMES[1:], default=[], help="outcomes to examine again"
    )
    parser.add_argument("--recheck", type=int, default=0, help="equal ones to examine again")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--budgets", nargs="+")
    parser.add_argument("--limit", type=int, default=TIME_LIMIT_S, help="seconds for a case")
    parser.add_argument(
        "--gib", type=int, default=ADDRESS_SPACE_GIB, help="address space for a case"
    )
    parser.add_argument("--device", default="cpu", help="cuda: everything is moved there")
    parser.add_argument("--compile", action="store_true", help="plans of compiled kernels")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--only", default="", help="part of the names to examine")
    parser.add_argument("--results", type=Path, help="else zoo.jsonl, of a device zoo_cuda.jsonl")
    arguments = parser.parse_args()
    is_compiled = arguments.compile
    budgets = arguments.budgets or list(COMPILED_BUDGETS if is_compiled else BUDGETS)
    if arguments.worker:
        work(budgets, arguments.gib, arguments.device, is_compiled)
        return
    if arguments.results is None:
        kinds = ["zoo"] + ["compile"] * is_compiled
        kinds += [arguments.device] * (arguments.device != "cpu")
        arguments.results = RESULTS / f"{'_'.join(kinds)}.jsonl"
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    rows = read_results(arguments.results)
    listed = case_names(arguments.sources)
    wanted = [n for n in listed if arguments.only in n]
    names = choose(wanted, rows, arguments.retry, arguments.recheck)
    if is_compiled:
        names = spread(names, read_results(RESULTS / "zoo.jsonl"))
    how = (budgets, arguments.limit, arguments.gib, arguments.device, is_compiled)
    deadline = time.monotonic() + arguments.seconds
    sweep(names, arguments.results, arguments.jobs, functools.partial(Worker, *how), deadline)
    rows = read_results(arguments.results)
    lines = "".join(json.dumps(rows[name]) + "\n" for name in sorted(rows))
    arguments.results.write_text(lines, encoding="utf-8")
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.zoo --jobs {arguments.jobs}"
    if is_compiled:
        command += " --compile"
    if arguments.device != "cpu":
        command += f" --device {arguments.device}"
    arguments.results.with_suffix(".md").write_text(
        table(rows, command, machine_of(arguments.device), len(set(listed) - set(rows))),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
