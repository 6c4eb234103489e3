"""Is a model that keeps something in Python, beside its tensors, planned as eager or refused?

Each seed is a file (`testing/python_state_cases.py`) and some steps of a training loop. The file
is imported anew for each run, so that nothing is shared. What the steps yield (results, what the
caller can read afterwards, gradients of a loss of all that, parameters, buffers, generators) is
compared bit for bit; then one step of another model of the class. A seed ends as

    equal          all of it, for the planned module and for the original one after planning
    refused        a rockplan.RockplanError from `solve`; the original then does as if never planned
    refused later  one from a later call or backward pass; all before it was equal
    unrepeated     eager execution refuses the first step, or two eager runs differ
    left           fake tensors are alive after planning
    wrong          anything else
    crashed        the process ended, or nothing came within two minutes

Command: OMP_NUM_THREADS=1 python -m benchmarks.fuzz --python-state --minutes 60 [--seed 17]
Results: benchmarks/results/fuzz_python_state.jsonl, one line a run with `--keep`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import gc
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import rockplan
from benchmarks.timing import where
from benchmarks.zoo import plan_roughly
from testing.python_state_cases import Case, draw, plain
from testing.training import generator_states

RESULTS = Path(__file__).parent / "results" / "fuzz_python_state.jsonl"
OUTCOMES = ("equal", "refused", "refused later", "unrepeated", "left", "wrong", "crashed")
FAILURES = ("left", "wrong", "crashed")

OPTIONS = rockplan.Options(time_limit_s=2, bound_time_limit_s=0.05, cache=False)

_LONGEST_S = 120.0
_SEEDS_OF_A_PROCESS = 500
UNCLEAR = ("FakeTensor", "bug of rockplan")
"""What no refusal should say."""

_LONGEST_LINE = 700
_DEEPEST = 8
_RECORDS_OF_A_CALL = 3

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    said: str = ""


# --- A case, imported anew -----------------------------------------------------------------------


class World:
    """A file with a model and a caller of its own, and the module that the caller calls."""

    def __init__(self, case: Case, folder: str) -> None:
        self._names = (f"state_{next(_NUMBERS)}", f"other_{next(_NUMBERS)}")
        own, other = self._names
        _imported(other, case.other, folder)
        self.file = _imported(own, case.source.replace("<other>", other), folder)
        torch.manual_seed(0)
        self.model: nn.Module = self.file.Net()
        self.caller = types.SimpleNamespace()
        seed(100)
        x = torch.randn(4, 8).requires_grad_(case.needs_gradient)
        self.sample = self.file.arguments(self.caller, self.model, x, 0)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.cleanup()
        for name in self._names:
            del sys.modules[name]


def _imported(name: str, source: str, folder: str) -> Any:
    path = Path(folder) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


# --- What can be read of a value -----------------------------------------------------------------


def parts(value: Any) -> list[tuple[str, Any]]:
    """(name, part) of what can be looked into."""
    if isinstance(value, dict | collections.UserDict | collections.ChainMap):
        return [(repr(key), inner) for key, inner in list(value.items())]
    if isinstance(value, types.MappingProxyType):
        return parts(dict(value))
    if isinstance(value, set | frozenset):
        return [("in it", inner) for inner in sorted(value, key=_order)]
    if isinstance(value, list | tuple | collections.deque | collections.UserList):
        return [(str(i), inner) for i, inner in enumerate(list(value))]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return parts(list(value.flat))
    if isinstance(value, torch.Tensor):
        return list(vars(value).items()) if type(value) in (torch.Tensor, nn.Parameter) else []
    if isinstance(value, weakref.ref):
        return [("()", value())]
    if isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType | enum.Enum):
        return []
    slots = getattr(type(value), "__slots__", ())
    found = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return [*found, *getattr(value, "__dict__", {}).items()]


def _order(value: Any) -> str:
    return str(description(value))


def description(value: Any, depth: int = _DEEPEST) -> tuple[Any, ...]:
    """Equal for equal values, of tensors with all bits."""
    kind = "module" if isinstance(value, nn.Module) else type(value).__name__
    inner = [(name, description(part, depth - 1)) for name, part in parts(value)] if depth else []
    return kind, _itself(value), inner


def _itself(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return "fake"
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous()
        shown, bits = data.flatten()[:3].tolist(), data.numpy().tobytes()
        has_history = value.grad_fn is not None
        return str(data.dtype), tuple(data.shape), value.requires_grad, has_history, shown, bits
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype, value.shape, value.tobytes()
    plain_kinds = (bool, int, float, complex, str, bytes, bytearray, enum.Enum, torch.dtype)
    if value is None or isinstance(value, (*plain_kinds, np.generic, torch.Size)):
        return repr(value)
    return _position(value) if isinstance(value, Iterator) else None


def _position(iterator: Iterator[Any]) -> Any:
    """How far it is, without moving it on."""
    if isinstance(iterator, types.GeneratorType):
        return inspect.getgeneratorstate(iterator)
    return repr(iterator) if isinstance(iterator, itertools.count) else length_hint(iterator, -1)


def first_difference(found: Any, expected: Any, path: str = "") -> str | None:
    """Where two descriptions differ, and how."""
    if found == expected:
        return None
    (kind, itself, inner), (other_kind, other_itself, other_inner) = found, expected
    if kind != other_kind:
        return f"{path} is a {kind}, eager: a {other_kind}"
    if itself != other_itself:
        return f"{path} is {_short(itself)}, eager: {_short(other_itself)}"
    names, other_names = [n for n, _ in inner], [n for n, _ in other_inner]
    if names != other_names:
        return f"{path} holds {names}, eager: {other_names}"
    for (name, one), (_, other) in zip(inner, other_inner, strict=True):
        difference = first_difference(one, other, f"{path}[{name}]")
        if difference is not None:
            return difference
    return None


def _short(itself: Any) -> str:
    if isinstance(itself, tuple) and len(itself) == 6:  # of a tensor
        _, shape, requires_grad, has_history, shown, _ = itself
        values = ", ".join(f"{value:.4g}" for value in shown)
        return f"{shape} [{values} ..] requires_grad={requires_grad} history={has_history}"
    return " ".join(str(itself).split())[:150]


def tensors_in(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    if depth:
        for _, part in parts(value):
            yield from tensors_in(part, depth - 1)


def opened(result: Any) -> Any:
    """A result whose iterators are exhausted and whose functions are called."""
    if type(result) in (tuple, list):
        return [opened(inner) for inner in result]
    if isinstance(result, Iterator):
        return list(result)
    return result() if callable(result) and not isinstance(result, nn.Module) else result


# --- Steps of a training loop --------------------------------------------------------------------


@dataclass(slots=True)
class Course:
    """What some steps yielded, one (label, description) after another, until an error."""

    records: list[tuple[str, Any]] = field(default_factory=list)
    error: str = ""
    is_ours: bool = False


def course(case: Case, world: World, model: nn.Module) -> Course:
    """The steps of the case with `model`, then one of another model of its class."""
    found = Course()
    try:
        for record in steps(case, world, model, world.caller, case.steps):
            found.records.append(record)
        torch.manual_seed(0)
        another = world.file.Net()
        for label, content in steps(case, world, another, types.SimpleNamespace(), case.steps[:1]):
            found.records.append((f"another model: {label}", content))
    except Exception as error:
        found.error = _told(error)
        found.is_ours = isinstance(error, rockplan.RockplanError)
    return found


def _told(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({place})"


def steps(
    case: Case,
    world: World,
    model: nn.Module,
    caller: types.SimpleNamespace,
    names: tuple[str, ...],
) -> Iterator[tuple[str, Any]]:
    """The steps of `names`; yields (label, description) of whatever there is to see."""
    parameters = dict(model.named_parameters())
    for number, step in enumerate(names):
        seed(number)
        x = torch.randn(6 if step == "another size" else 4, 8).requires_grad_(case.needs_gradient)
        if number % 2 == 0:
            model.zero_grad(set_to_none=number > 0)
        args, kwargs = world.file.arguments(caller, model, x, number)
        x = args[0]
        world.file.change(caller, model, x, number)
        model.train(step != "evaluate")
        earlier = [*tensors_in((world.file.seen(caller, model, x), args, kwargs))]
        with torch.set_grad_enabled(step not in ("evaluate", "without gradients")):
            result = opened(model(*args, **kwargs))
        label = f"step {number}, {step}"
        yield f"{label}: result", description(result)
        yield f"{label}: arguments", description((args, kwargs))
        seen = world.file.seen(caller, model, x)
        yield f"{label}: seen", description(seen)
        losses = [*_distinct(tensors_in((result, seen, args, kwargs)), earlier)]
        if losses:
            torch.stack([t.float().pow(2).mean() for t in losses]).sum().backward()
        given = [t for t in tensors_in((args, kwargs)) if t.is_leaf]
        parameters = dict(model.named_parameters())
        yield f"{label}: gradients", description({n: p.grad for n, p in parameters.items()})
        yield f"{label}: gradients of arguments", description([t.grad for t in given])
        yield f"{label}: seen after backward", description(world.file.seen(caller, model, x))
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
        yield f"{label}: state", description(dict(model.state_dict()))
        yield f"{label}: generators", description([generator_states(), random.getstate()])


def _distinct(
    tensors: Iterator[torch.Tensor], earlier: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Those that require a gradient and were not there before the call, each once; of those that
    were there the ones that the call gave a history."""
    histories = {id(t): t.grad_fn for t in earlier}
    done: set[int] = set()
    for tensor in tensors:
        is_new = id(tensor) not in histories or tensor.grad_fn is not histories[id(tensor)]
        if tensor.requires_grad and is_new and id(tensor) not in done:
            done.add(id(tensor))
            yield tensor


# --- One case ------------------------------------------------------------------------------------


def examine(case: Case, budget: str = "min", options: rockplan.Options = OPTIONS) -> Outcome:
    """What became of a case."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _eager(case, folder)
        if expected is None:
            return Outcome("unrepeated")
        for user in ("planned", "original"):
            with World(case, folder) as world:
                outcome = _planned(case, world, expected, user == "planned", budget, options)
            gc.collect()
            if outcome.kind != "equal":
                return outcome
    return Outcome("equal")


def _eager(case: Case, folder: str) -> Course | None:
    """What eager execution does, None if it does not repeat itself or does nothing."""
    found = []
    for _ in range(2):
        try:
            with World(case, folder) as world:
                found.append(course(case, world, world.model))
        except AttributeError:  # a module has not what is asked of tensors
            return None
    one, other = found
    if one.error.split(" (")[0] != other.error.split(" (")[0] or one.records != other.records:
        return None
    return one if len(one.records) >= _RECORDS_OF_A_CALL else None


def _planned(
    case: Case,
    world: World,
    expected: Course,
    uses_planned: bool,
    budget: str,
    options: rockplan.Options,
) -> Outcome:
    """uses_planned: the planned module takes the steps, not the original after planning."""
    refused = ""
    before = _fakes()
    args, kwargs = world.sample
    given, generators = description(world.sample), generator_states()
    model = world.model
    try:
        planned = rockplan.solve(model, args, budget, sample_kwargs=kwargs, options=options)
        if uses_planned:
            model = planned
    except rockplan.RockplanError as error:
        refused = f"{type(error).__name__}: {' '.join(str(error).split())}"
    except Exception as error:
        return Outcome("wrong", f"solve raises {_told(error)}")
    left = _left(before)
    if left:
        return Outcome("left", f"after {'a refused ' if refused else ''}solve: {left}; {refused}")
    difference = first_difference(description(world.sample), given, "the sample")
    if difference is not None:
        return Outcome("wrong", f"after solve {difference}")
    if any(not torch.equal(a, b) for a, b in zip(generators, generator_states(), strict=True)):
        return Outcome("wrong", "solve moved the generator")
    found = course(case, world, model)
    said = "planned" if uses_planned and not refused else f"the original after solve; {refused}"
    outcome = _compared(found, expected, said, is_planned=uses_planned and not refused)
    left = _left(before)
    if left:
        return Outcome("left", f"after the steps ({outcome.kind}): {left}")
    return Outcome("refused", refused) if outcome.kind == "equal" and refused else outcome


def _compared(found: Course, expected: Course, said: str, is_planned: bool) -> Outcome:
    for (label, one), (other_label, other) in zip(found.records, expected.records, strict=False):
        assert label == other_label
        difference = first_difference(one, other, label)
        if difference is not None:
            return Outcome("wrong", f"{said}: {difference}")
    if len(found.records) >= len(expected.records):
        return Outcome("equal")
    last = found.records[-1][0] if found.records else "the start"
    if found.is_ours and is_planned:
        return Outcome("refused later", f"after {last}: {found.error}")
    return Outcome("wrong", f"{said}: after {last}: {found.error}")


def _fakes() -> list[FakeTensor]:
    """The fake tensors that are alive, or wait to be collected."""
    return [found for found in gc.get_objects() if type(found) is FakeTensor]


def _left(before: list[FakeTensor]) -> str:
    """What holds the fake tensors that there were not `before`; '' if there are none."""
    known = {id(fake) for fake in before}
    left = [fake for fake in _fakes() if id(fake) not in known]
    if left:  # of which most may be in cycles: to collect these takes longest
        left.clear()
        gc.collect()
        left = [fake for fake in _fakes() if id(fake) not in known]
    held = {name for i in range(min(5, len(left))) for name in _holders(left, i)}
    return f"{len(left)} fake tensors, held by {', '.join(sorted(held))}" if left else ""


def _holders(left: list[FakeTensor], position: int) -> Iterator[str]:
    for referrer in gc.get_referrers(left[position]):
        if isinstance(referrer, dict):
            items = list(referrer.items())
            yield from (f"[{str(k)[:40]!r}]" for k, v in items if v is left[position])
        elif referrer is not left:
            yield type(referrer).__name__


# --- Many seeds ----------------------------------------------------------------------------------


def how_planned(number: int) -> tuple[str, rockplan.Options]:
    """The budget and options of a seed."""
    rng = random.Random(-number - 1)
    options = rockplan.Options(
        time_limit_s=2, bound_time_limit_s=0.05, cache=False, check=rng.random() < 0.15
    )
    return rng.choice(("min", "100%")), options


def examine_seed(number: int) -> Outcome:
    budget, options = how_planned(number)
    return examine(draw(number), budget, options)


def prepare() -> None:
    """Of a process that examines many."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plan_roughly()
    examine(plain())
    gc.collect()
    gc.freeze()  # What is there is not looked through again.


def _serve(connection: Any) -> None:
    prepare()
    while True:
        number = connection.recv()
        if number is None:
            return
        connection.send(examine_seed(number))


class _Process:
    """Examines seeds in a process of its own, which may crash, or hang."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.seeds = 0

    def examine(self, number: int) -> Outcome:
        self.seeds += 1
        try:
            self._connection.send(number)
            if self._connection.poll(_LONGEST_S):
                found: Outcome = self._connection.recv()
                return found
        except (EOFError, ConnectionError):
            self._process.join()
            return Outcome("crashed", f"exit code {self._process.exitcode}")
        return Outcome("crashed", f"nothing in {_LONGEST_S:.0f} s")

    def close(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._connection.send(None)
        self._process.join(5)
        self._process.kill()
        self._process.join()


def sweep(
    first: int, stride: int, seconds: float, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Examine one seed after another."""
    counts: collections.Counter[str] = collections.Counter()
    of_families: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    unclear: list[str] = []
    failing: list[str] = []
    deadline = time.monotonic() + seconds
    process = _Process()
    for number in itertools.count(first, stride):
        if time.monotonic() >= deadline:
            break
        if process.seeds >= _SEEDS_OF_A_PROCESS:
            process.close()
            process = _Process()
        case = draw(number)
        outcome = process.examine(number)
        counts[outcome.kind] += 1
        of_families[case.family][outcome.kind] += 1
        if outcome.kind.startswith("refused") and any(word in outcome.said for word in UNCLEAR):
            unclear.append(f"{number}: {case.name}")
        say(f"seed {number}: {outcome.kind}: {case.name}: {outcome.said}")
        if outcome.kind in FAILURES:
            failing.append(f"{number} {outcome.kind}: {case.name}")
        if outcome.kind == "crashed":
            process.close()
            process = _Process()
    process.close()
    return {
        "seeds": f"{first} to {number}, every {stride}.",
        "minutes": round(seconds / 60, 1),
        "counts": {kind: counts[kind] for kind in OUTCOMES},
        "families": {
            family: {kind: found[kind] for kind in OUTCOMES if found[kind]}
            for family, found in sorted(of_families.items())
        },
        "refused unclearly": unclear,
        "failing": failing,
        "where": where(),
    }


def show(number: int) -> Outcome:
    """Print a seed's case and what becomes of it."""
    prepare()
    budget, options = how_planned(number)
    print(draw(number))
    print(f"budget {budget}, check {options.check}")
    outcome = examine_seed(number)
    print(f"{outcome.kind}: {outcome.said}")
    return outcome


def run(arguments: argparse.Namespace) -> bool:
    """The command, with the arguments of `benchmarks.fuzz`. True if nothing failed."""
    if arguments.seed is not None:
        return show(arguments.seed).kind not in FAILURES

    def say(line: str) -> None:
        if not arguments.brief or line.split(": ")[1] in FAILURES:
            print(line[:_LONGEST_LINE], flush=True)

    found = sweep(arguments.first, arguments.stride, arguments.seconds, say)
    lists = {name: len(found[name]) for name in ("failing", "refused unclearly")}
    print(json.dumps(found | lists))
    if arguments.keep:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    return not any(found["counts"][kind] for kind in FAILURES)
