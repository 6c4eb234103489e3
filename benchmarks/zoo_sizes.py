"""Which architectures run batches of other sizes by one program, recorded with symbols?

    OMP_NUM_THREADS=1 python -m benchmarks.zoo_sizes [--every 11] [--first 0] [--jobs 2]
        [--seconds 600] [NAME...]

Every so many of the architectures of `benchmarks.zoo` that train equal to eager (vision models of
timm, models of transformers) is planned for 3 samples, and called with 4, 5 and 6; of models of
text also with lengths that are 1, 2 and 3 longer. Each call is a step beside eager, bit by bit. A
dimension is

    open     the second size was recorded with symbols, and the next two were captured no more
    static   each is captured, for the reason that the logger gives
    wrong    anything that is not eager's
    -        eager itself does not take these sizes, tensors have several, or it is the number of
             channels

Results: benchmarks/results/zoo_sizes.jsonl and, of all rows in it, zoo_sizes.md.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import json
import logging
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

from benchmarks import zoo
from benchmarks.timing import where

CASE_S = 300
ROWS = zoo.RESULTS / "zoo_sizes.jsonl"
DIMENSIONS = {0: "batch", 1: "length"}


def calls_of(case: Any, dimension: int) -> list[Any]:
    """The case at four sizes that follow one another; [] if eager does not take them."""
    from rockplan.errors import InvalidInput
    from rockplan.runtime.planned_state import original_forward
    from rockplan.solving.sizes import tensors_of
    from rockplan.will_it_fit.captured_sizes import resized, size_of
    from testing.zoo_cases import try_eager

    arguments = case.args, case.kwargs
    named: dict[int, list[str]] = {}
    if dimension:
        arguments = resized(case.model, arguments, {0: 3})
        try:
            resized(case.model, arguments, {1: 3})
        except InvalidInput:  # that of features is another one: tokens vary
            tensors = tensors_of(original_forward(case.model), *arguments)
            named = {
                1: [n for n, t in tensors.items() if t.dim() > 1 and not t.is_floating_point()]
            }
    made = []
    try:
        least = 3 if dimension == 0 else size_of(case.model, arguments, 1, named)
        for size in range(least, least + 4):
            args, kwargs = resized(case.model, arguments, {dimension: size}, named)
            made.append(replace(case, args=args, kwargs=kwargs))
    except InvalidInput:  # several lengths that differ
        return []
    return [] if any(try_eager(one) for one in made) else made


def examined(case: Any, dimension: int) -> str:
    import rockplan
    from rockplan.values import progress

    calls = calls_of(case, dimension)
    if not calls:
        return "-"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rockplan")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model, eager = case.model, copy.deepcopy(case.model)
    options = rockplan.Options(cache=False, time_limit_s=5, bound_time_limit_s=0)
    first = calls[0]
    planned: Any = rockplan.solve(
        model, first.args, "100%", sample_kwargs=first.kwargs, options=options
    )
    captured = []
    for one in calls:
        stages: list[str] = []
        with progress.listening(lambda told, to=stages: to.append(told.stage)):
            zoo.train_side_by_side(replace(one, model=planned), planned, eager)
        captured.append("capturing the model" in stages)
    logger.removeHandler(handler)
    if not any(captured[2:]):
        return "open"
    why = [text.partition("by itself: ")[2] for text in said if "planned by itself" in text]
    return f"static: {why[-1] if why else 'other programs, which are not for all of these sizes'}"


def here(name: str) -> dict[str, Any]:
    zoo.plan_roughly()
    row: dict[str, Any] = {"name": name}
    for dimension, what in DIMENSIONS.items():
        if dimension and not name.startswith("transformers"):
            continue
        try:
            row[what] = examined(zoo.make_case(name), dimension)
        except AssertionError as error:
            row[what] = f"wrong: {error}"
        except Exception as error:
            line = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
            row[what] = f"static: {line}"
    return row


def report(rows: list[dict[str, Any]]) -> str:
    ended = [row for row in rows if "batch" in row]
    left_out = [row["name"] for row in rows if "batch" not in row]
    counts = {
        what: collections.Counter(row[what].partition(":")[0] for row in ended if what in row)
        for what in DIMENSIONS.values()
    }
    listed = [
        f"{what}: " + ", ".join(f"{count} {name}" for name, count in found.most_common())
        for what, found in counts.items()
    ]
    return "\n".join(
        [
            "# Sizes in the zoo",
            "",
            f"{len(ended)} architectures, {len(left_out)} more not ended in time "
            f"({', '.join(left_out) or 'none'}); {'; '.join(listed)}. What the words mean is in "
            "`benchmarks/zoo_sizes.py`.",
            "",
            *(f"- {made}" for made in dict.fromkeys(row["where"] for row in rows)),
            "",
            "| architecture | batch | length |",
            "|---|---|---|",
            *(
                f"| {r['name']} | {r['batch'][:150]} | {r.get('length', '-')[:150]} |"
                for r in ended
            ),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, in place of every so many")
    parser.add_argument("--every", type=int, default=11)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(here(arguments.here)))
        return
    known = zoo.read_results(zoo.RESULTS / "zoo.jsonl")
    names = [n for n in zoo.case_names(["transformers", "timm"]) if _is_equal(known.get(n))]
    until = time.monotonic() + arguments.seconds
    made = f"`python -m benchmarks.zoo_sizes {' '.join(sys.argv[1:])}`, {where()}"
    chosen = arguments.names or names[arguments.first :: arguments.every]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda name: _in_a_process(name, until), chosen):
            if row is not None:
                with ROWS.open("a") as rows:
                    rows.write(json.dumps(row | {"where": made}) + "\n")
    (zoo.RESULTS / "zoo_sizes.md").write_text(report([*zoo.read_results(ROWS).values()]))


def _in_a_process(name: str, until: float) -> dict[str, Any] | None:
    """Only its name if it does not end; None if it was not begun."""
    if time.monotonic() > until:
        return None
    command = [sys.executable, "-m", "benchmarks.zoo_sizes", "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_S, check=False)
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return {"name": name}
    return row


def _is_equal(row: dict[str, Any] | None) -> bool:
    return row is not None and row.get("outcome") == "equal"


if __name__ == "__main__":
    main()
