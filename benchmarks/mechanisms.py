"""What each mechanism around a recording is worth: who needs it, and what happens without it.

A recording has mechanisms beside operators: how objects of Python hold others, what a tensor says
of itself, tables and data that a forward leaves. Each is a row of `MECHANISMS`: a function, when it
has done anything, and what stands in its place where it is left out. The recordings of

    zoo       architectures whose rows in `benchmarks.zoo` say less than 3 s of CPU time: every
              model, every fourth module of PyTorch
    libraries all models of `benchmarks.libraries`, in the environment that it has
    trainers  tests/test_trainers.py, test_blocks_trainers.py, test_integrations.py
    triton    groups of `testing.triton_worker`, in an environment with Triton, Liger and fla
    drawn     files of `benchmarks.python_state`, of fixed seeds

say which mechanisms do anything (`--uses`). Where one does, the case is examined once more without
it (`--without`): of the zoo as `benchmarks.zoo` does at 'min', at most six a mechanism. A mechanism
stays if a model or a trainer is refused or wrong without it, or if a drawn file is wrong.

Command: OMP_NUM_THREADS=1 python -m benchmarks.mechanisms --uses zoo | trainers | triton | drawn
         OMP_NUM_THREADS=1 python -m benchmarks.mechanisms --without zoo | trainers | triton | drawn
         python -m benchmarks.mechanisms --table
Results: benchmarks/results/mechanisms.jsonl, kept and continued; mechanisms.md, the table.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

import rockplan
from benchmarks import python_state, zoo
from benchmarks.timing import where
from rockplan.graph_builder.tracing import (
    eager_paths,
    left_behind,
    recording,
    tensor_questions,
    value_reads,
)
from rockplan.python_state import given, leftovers, surroundings, walk

RESULTS = Path(__file__).parent / "results" / "mechanisms.jsonl"
SMALL_S = 3.0
CASES_OF_A_MECHANISM = 6
FIRST_SEED, SEEDS = 700_000, 150
TRAINERS = ("test_trainers", "test_blocks_trainers", "test_integrations")
KERNELS = ("own", "liger", "llama", "fla")

Told = Callable[[tuple[Any, ...], Any], bool]
"""Has a call with these arguments and this result done anything?"""

Note = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """place: where it is; watched: tells whenever it has done anything; left_out: it is not there
    meanwhile."""

    name: str
    place: str
    watched: Callable[[Note], contextlib.AbstractContextManager[None]]
    left_out: Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Wherever the package has the function `owner.attribute`, `by` of it stands meanwhile."""
    function = vars(owner)[attribute]
    files = [f for n, f in list(sys.modules.items()) if n.startswith("rockplan")]
    owners = {id(o): o for o in (owner, *files) if vars(o).get(attribute) is function}
    called = getattr(function, "__func__", function)
    other = classmethod(by(called)) if isinstance(function, classmethod) else by(called)
    for one in owners.values():
        setattr(one, attribute, other)
    try:
        yield
    finally:
        for one in owners.values():
            setattr(one, attribute, function)


def _of_package(function: Any) -> Any:
    """Its frame is none of a user's file: what the package answers depends on who asks."""
    function.__code__ = function.__code__.replace(co_filename=tensor_questions.__file__)
    return function


def _watching(called: Any, has_done: Told, note: Note) -> Any:
    @_of_package
    @functools.wraps(called)
    def watch(*args: Any, **kwargs: Any) -> Any:
        result = called(*args, **kwargs)
        if has_done(args, result):
            note()
        return result

    return watch


def _place_of(owner: Any) -> str:
    name = owner.__module__ if isinstance(owner, type) else owner.__name__
    return str(name).removeprefix("rockplan.")


def by_function(
    name: str, owner: Any, attribute: str, has_done: Told, off: Callable[..., Any]
) -> Mechanism:
    """A mechanism that is one function, of a file or a class. off: what stands in its place."""
    return Mechanism(
        name,
        f"{_place_of(owner)} `{attribute}`",
        lambda note: replaced(owner, attribute, lambda f: _watching(f, has_done, note)),
        lambda: replaced(owner, attribute, lambda f: off),
    )


# --- Rows ----------------------------------------------------------------------------------------


def _always(args: tuple[Any, ...], result: Any) -> bool:
    return True


def _is_there(args: tuple[Any, ...], result: Any) -> bool:
    return bool(result)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


class LeftOut(rockplan.RockplanError):
    """What is left out would be needed."""


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise LeftOut("left out")


def _refused_if(function: Callable[..., Any], is_needed: Callable[[Any], bool]) -> Any:
    def off(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if is_needed(result):
            raise LeftOut("left out")
        return result

    return off


def of_member(name: str) -> Mechanism:
    """What fake tensors answer for real ones when the user's code asks."""

    def members(exchanged: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        def by(called: Any) -> Any:
            def found(self: Any) -> Iterator[tuple[type, str, Any]]:
                for owner, own, member in called(self):
                    if own != name:
                        yield owner, own, member
                    elif exchanged is not None:
                        yield owner, own, exchanged(member)

            return found

        return by

    def watched(note: Note) -> contextlib.AbstractContextManager[None]:
        def exchanged(member: Any) -> Any:
            get = member.fget if isinstance(member, property) else member

            @_of_package
            @functools.wraps(get)
            def watch(*args: Any) -> Any:
                if tensor_questions._asks_users_file():
                    note()
                return get(*args)

            return property(watch, member.fset) if isinstance(member, property) else watch

        return replaced(tensor_questions.Questions, "_members", members(exchanged))

    def left_out() -> contextlib.AbstractContextManager[None]:
        return replaced(tensor_questions.Questions, "_members", members(None))

    return Mechanism(
        f"questions: {name}", "graph_builder.tracing.tensor_questions", watched, left_out
    )


def of_patch(number: int, row: Any) -> Mechanism:
    """A name that is another while a forward is recorded."""

    @contextlib.contextmanager
    def rows(exchanged: tuple[Any, ...]) -> Iterator[None]:
        before = eager_paths.PATCHES
        eager_paths.PATCHES = (*before[:number], *exchanged, *before[number + 1 :])
        try:
            yield
        finally:
            eager_paths.PATCHES = before

    def watched(note: Note) -> contextlib.AbstractContextManager[None]:
        def replacement(original: Any, access: Any) -> Any:
            made = row.replacement(original, access)
            if isinstance(made, property):
                return property(made.fget, _watching(made.fset, _always, note))
            is_function = callable(made) and not isinstance(made, type)
            return _watching(made, _always, note) if is_function else made

        return rows((dataclasses.replace(row, replacement=replacement),))

    owner = row.owner if isinstance(row.owner, str) else row.owner.__name__
    return Mechanism(
        f"patch: {owner}.{row.name}",
        "graph_builder.tracing.eager_paths",
        watched,
        lambda: rows(()),
    )


_Q = tensor_questions.Questions
_READER = value_reads.ValueReader
_LEFT = leftovers.Leftovers


def _is_stand_in(args: tuple[Any, ...], result: Any) -> bool:
    return type(args[1]) is FakeTensor and id(args[1]) in args[0].real


def _is_contents(args: tuple[Any, ...], result: Any) -> bool:
    return isinstance(result, given.WithContents)


MECHANISMS: tuple[Mechanism, ...] = (
    by_function("what a forward leaves behind", left_behind, "refusal", _is_there, lambda *_: None),
    by_function("what the first call settles", walk, "_stays", _is_there, _no),
    by_function("hooks of transformers", walk, "_is_hook_of_transformers", _is_there, _no),
    by_function(
        "arguments of checkpoints",
        *(left_behind, "refuse_in_checkpoints", lambda a, r: bool(a[0]), _nothing),
    ),
    by_function(
        "constants that are written to", left_behind, "refuse_fresh_constants", _always, _nothing
    ),
    by_function(
        "containers of the caller's",
        *(given.GivenCall, "with_contents", _is_contents),
        _refused_if(given.GivenCall.with_contents, lambda r: _is_contents((), r)),
    ),
    by_function(
        "leftovers: in caches of functions", _LEFT, "_empty_function_caches", _always, _nothing
    ),
    by_function("leftovers: in closures of frames", _LEFT, "_empty_closures", _always, _nothing),
    by_function("iterators", recording, "is_iterator", _is_there, _no),
    by_function("questions: id", _Q, "_id", _is_stand_in, lambda self, value: id(value)),
    by_function("questions: of attributes", _Q, "_attribute", _always, _refused),
    by_function("questions: places in memory", _Q, "ask_place", lambda a, r: len(a) < 3, _nothing),
    *map(of_member, ("is_leaf", "grad", "grad_fn")),
    by_function("reads: values", _READER, "read", _always, _refused),
    by_function("reads: whatever is drawn", value_reads, "_outcomes", _is_there, lambda c, r: ()),
    by_function("reads: of whole tensors", _READER, "read_all", _always, _refused),
    by_function("reads: shapes", _READER, "shaped", _always, _refused),
    *(
        of_patch(number, row)
        for number, row in enumerate(eager_paths.PATCHES)
        if row.name != "data_ptr"  # which counts frames
    ),
)


@dataclass(frozen=True, slots=True)
class Gone:
    """What no model needed: it was deleted."""

    name: str
    place: str


GONE = (
    Gone("tables of constants", "deleted: refused, with what to do"),
    Gone("objects of the caller's", "deleted: refused, with what to do"),
    *(
        Gone(f"questions: {name}", "deleted: refused")
        for name in (
            "__deepcopy__",
            "__dict__",
            "__dir__",
            "as_subclass",
            "is_shared",
            "is_pinned",
            "_is_view",
        )
    ),
    Gone("patch: torch.nn.utils.parametrize._cache", "deleted: refused around a call"),
    Gone("data that each call overwrites", "deleted: such calls make one more kind"),
    Gone("data that a call leaves", "deleted: refused, until it has been called once"),
    Gone("a second run is compared", "deleted: refused, until it has been called once"),
    Gone("changes that a cache hides", "deleted: refused, until it has been called once"),
)


VERDICT = """
What followed. *Deleted*: tables of constants, which were made for real, put in place, and recorded
again up to twice (no architecture, library or trainer has one; the refusal says to run the module
once, and then it is planned), the run with other data that told which data each call overwrites
(kinds of calls are more without it), tensors that a call puts into objects of the caller's
other than dictionaries and lists (refused; a dictionary in their place is planned), answers to
questions that nothing asks (refused), and calls in a block of parametrize.cached() (refused; in the
forward it is planned). Then one walk over what the forward reaches, before and after it, came in
place of holders, of second runs, and of the data that each call leaves. *Kept for a model*: what a
first call settles (sequence classifiers of transformers set `config.problem_type`), containers of
the caller's (sentence-transformers). *Kept for its
time*: leftovers in closures of frames, without which each refusal looks through all objects there
are. Not examined here: Triton's libraries, which need a GPU or `make cuda`.
"""


# --- Who needs them ------------------------------------------------------------------------------


@contextlib.contextmanager
def noted(used: collections.Counter[str]) -> Iterator[None]:
    """Which mechanisms do anything meanwhile."""

    def note(name: str) -> None:
        used[name] += 1

    with contextlib.ExitStack() as stack:
        for one in MECHANISMS:
            stack.enter_context(one.watched(functools.partial(note, one.name)))
        yield


def small_architectures() -> list[str]:
    known = zoo.read_results(zoo.RESULTS / "zoo.jsonl")
    built = {n: r for n, r in known.items() if r["outcome"] in ("equal", "refused")}
    small = sorted(n for n, r in built.items() if r.get("seconds", SMALL_S) < SMALL_S)
    models = [name for name in small if not name.startswith("module/")]
    return [*models, *[name for name in small if name.startswith("module/")][::4]]


def of_zoo() -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, recording it)"""
    return _recorded(small_architectures())


def of_libraries() -> Iterator[tuple[str, Callable[[], str]]]:
    from testing import library_cases

    return _recorded(library_cases.names())


def _recorded(names: Iterable[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    from rockplan.graph_builder.capture import capture
    from testing.zoo_cases import NotBuilt

    def record(name: str) -> str:
        try:
            case = zoo.make_case(name)
            capture(case.model, case.args, dict(case.kwargs))
            surroundings.Surroundings.of(case.model, case.model.forward)
        except NotBuilt:
            return "not built"
        except rockplan.RockplanError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "recorded"

    for name in names:
        yield name, functools.partial(record, name)


def of_drawn() -> Iterator[tuple[str, Callable[[], str]]]:
    def examine(number: int) -> str:
        outcome = python_state.examine_seed(number)
        return f"{outcome.kind}: {outcome.said}"

    for number in range(FIRST_SEED, FIRST_SEED + SEEDS):
        yield str(number), functools.partial(examine, number)


def of_trainers() -> Iterator[tuple[str, Callable[[], str]]]:
    def run(file: str) -> str:
        import pytest

        return str(pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"tests/{file}.py"]))

    for file in TRAINERS:
        yield file, functools.partial(run, file)


def of_triton() -> Iterator[tuple[str, Callable[[], str]]]:
    def run(group: str) -> str:
        from testing import triton_worker

        with contextlib.redirect_stdout(io.StringIO()) as said:
            triton_worker.main([group])
        found = json.loads(said.getvalue().splitlines()[-1])
        return f"{[*found.values()].count('ok')} of {len(found)} equal"

    for group in KERNELS:
        yield group, functools.partial(run, group)


SOURCES = {
    "zoo": of_zoo,
    "libraries": of_libraries,
    "drawn": of_drawn,
    "trainers": of_trainers,
    "triton": of_triton,
}


def keep(row: dict[str, Any]) -> None:
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def find_uses(source: str) -> None:
    known = {(r["source"], r["case"]) for r in rows() if "uses" in r}
    for name, run in SOURCES[source]():
        if (source, name) in known:
            continue
        used: collections.Counter[str] = collections.Counter()
        with noted(used):
            outcome = run()
        keep({"source": source, "case": name, "outcome": outcome[:200], "uses": sorted(used)})
        gc.collect()


def rows() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def leave_out(source: str, names: list[str]) -> None:
    """Examine cases in which a mechanism does anything without it."""
    users: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    known = {(r["source"], r["case"], r["without"]) for r in rows() if "without" in r}
    for row in rows():
        if row["source"] == source and "uses" in row:
            for name in row["uses"]:
                users[name].append(row)
    for one in MECHANISMS:
        if names and not any(one.name.startswith(name) for name in names):
            continue
        planned = [r for r in users[one.name] if not r["outcome"].startswith(("not", "unrep"))]
        for row in planned[: None if source == "drawn" else CASES_OF_A_MECHANISM]:
            case = row["case"]
            if (source, case, one.name) in known:
                continue
            with one.left_out():
                outcome = _examine(source, case)
            keep({"source": source, "case": case, "without": one.name, "outcome": outcome[:300]})
            gc.collect()


def _examine(source: str, case: str) -> str:
    if source in ("zoo", "libraries"):
        facts = zoo.Examination(case, ["min"], lambda stage: None).run()
        return f"{facts['outcome']}: {facts.get('message', '')}"
    if source == "drawn":
        outcome = python_state.examine_seed(int(case))
        return f"{outcome.kind}: {outcome.said}"
    return dict(SOURCES[source]())[case]()


def table() -> str:
    """Who uses each mechanism, and what became of cases without it, as Markdown."""
    users: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    became: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    before: dict[tuple[str, str], str] = {}
    cases: collections.Counter[str] = collections.Counter()
    for row in rows():
        kind = row["outcome"].partition(":")[0]
        if "uses" in row:
            cases[row["source"]] += 1
            before[row["source"], row["case"]] = kind
            users.update({n: users[n] + collections.Counter([row["source"]]) for n in row["uses"]})
        else:
            was = before[row["source"], row["case"]].replace("recorded", "equal")
            became[row["without"]][f"{was} -> {kind}"] += 1
    counted = ", ".join(f"{cases[source]} {source}" for source in SOURCES)
    lines = [
        "# Mechanisms around a recording",
        "",
        f"`python -m benchmarks.mechanisms` on {where()}. Cases: {counted}. How often each does "
        "anything there, and what became of cases where it is left out; explained in "
        "`benchmarks/mechanisms.py`.",
        "",
        f"| mechanism | where | {' | '.join(SOURCES)} | without it |",
        f"|---|---|{'---|' * len(SOURCES)}---|",
    ]
    for one in (*MECHANISMS, *GONE):
        counts = " | ".join(str(users[one.name][source]) for source in SOURCES)
        outcomes = ", ".join(f"{count} {what}" for what, count in became[one.name].most_common())
        lines.append(f"| {one.name} | {one.place} | {counts} | {outcomes or '-'} |")
    lines += ["", VERDICT.strip()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uses", choices=SOURCES)
    parser.add_argument("--without", choices=SOURCES)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.table:
        RESULTS.with_suffix(".md").write_text(table(), encoding="utf-8")
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not {"trainers", "triton"} & {arguments.uses, arguments.without}:
        python_state.prepare()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROCKPLAN_CACHE_DIR"] = folder
        if arguments.uses:
            find_uses(arguments.uses)
        if arguments.without:
            leave_out(arguments.without, arguments.names)


if __name__ == "__main__":
    main()
