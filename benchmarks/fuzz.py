"""Networks and uses drawn at random: is a planned module always as eager execution?

Each seed is a network (`testing/random_networks.py`), a budget, options, and some uses one after
another, as training code has them: losses of everything or of one output, several forwards before
a backward, retained graphs, gradients of some parameters, frozen parameters, autocast, evaluation,
other batch sizes, copies. Results, gradients, parameters, buffers and the generator must be those
of eager execution bit for bit after each, and the measured peak of a step within the budget and as
predicted. A seed ends as

    equal        all of it
    refused      a rockplan.RockplanError; the uses until then were equal
    unrepeated   two eager runs differ from one another, or eager refuses the network
    wrong        anything else

Operators without a result, which check what they are given, are called as often as in eager,
but where `Options(check=True)` has steps of the original run beside a new plan.

With `--compile` plans are of compiled kernels. Then the bits are those of a plan for 1000 %, where
nothing runs again; and each use of that is compared with the same of eager execution, from the same
parameters: the generator ends where eager's does, and results, gradients and buffers are no further
from eager's than `Options(check=True)` allows: 1e-3 of their norm, 0.1 where anything is of 16
bits, and ten times what a rounding of parameters and inputs does to eager's where that is more (of
gradients that are zero but for roundings). `--compile operators` compiles nothing: kernels run by
the operators that they fuse, which is quick, and finds what the pass itself does wrong.

With `--autocast` every call is under autocast, a norm comes before the network (so that what it
gets was computed), and the network is planned with it or alone, as a block.

Command: OMP_NUM_THREADS=1 python -m benchmarks.fuzz --seconds 600 [--first 0] [--seed 17]
         [--compile | --autocast]
Results: benchmarks/results/fuzz.jsonl, one line a run with `--keep`.

With `--python-state` the seeds are models that keep something in Python, see
`benchmarks/python_state.py`, with the same flags.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import itertools
import json
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import rockplan
from benchmarks import python_state
from benchmarks.timing import where
from benchmarks.zoo import plan_roughly
from rockplan.errors import IllegalSchedule
from rockplan.graph_builder.fusion import inductor, kernels
from rockplan.solving import check
from testing.models import moved
from testing.random_networks import CALLS, Network, network
from testing.sweep import FOR_CUDA, tolerance_bytes
from testing.training import assert_equal_trees, assert_same_state, generator_states
from testing.zoo_cases import loss_of

RESULTS = Path(__file__).parent / "results" / "fuzz.jsonl"
OUTCOMES = ("equal", "refused", "unrepeated", "wrong")
BUDGETS = ("min", "50%", "70%", "100%", "200%")


@dataclass
class Side:
    """One of the two modules that are used in the same way, with inputs of its own. is_checked:
    each plan is compared with steps of the original when it is made; autocast: of its calls."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_checked: bool = False
    autocast: bool = False

    def call(self) -> Any:
        with casting(self.inputs, self.autocast):
            return self.module(*self.inputs, **self.kwargs)


def casting(inputs: tuple[torch.Tensor, ...], enabled: bool) -> torch.autocast:
    """Autocast to bfloat16 if `enabled`; else what there is."""
    kind = inputs[0].device.type
    return torch.autocast(kind, torch.bfloat16, enabled or torch.is_autocast_enabled(kind))


class AfterNorm(nn.Module):
    """A network that gets inputs, some of them normalized."""

    def __init__(self, network: Network, width: int, normalized: tuple[bool, ...]) -> None:
        super().__init__()
        self.norm, self.block, self.normalized = nn.LayerNorm(width), network, normalized

    def forward(self, *inputs: torch.Tensor, **kwargs: Any) -> Any:
        pairs = zip(self.normalized, inputs, strict=True)
        return self.block(*(self.norm(t) if n else t for n, t in pairs), **kwargs)

    def __str__(self) -> str:
        return f"normalized {self.normalized}; {self.block}"


def own_inputs(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)


# --- Uses: each does the same to both sides, as `number`, drawn once for both, says ------------


def differentiable(result: Any) -> list[torch.Tensor]:
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return [t for t in leaves if t.requires_grad]


def mean_square(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.float().pow(2).mean() for t in tensors]).sum()


def descend(side: Side) -> None:
    with torch.no_grad():
        for parameter in side.module.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad


def train(side: Side, number: int) -> Any:
    side.module.zero_grad(set_to_none=number % 2 == 0)
    result = side.call()
    mean_square(differentiable(result)).backward()
    descend(side)
    return result


def accumulate(side: Side, number: int) -> Any:
    results = []
    for _ in range(2):
        results.append(side.call())
        loss_of(results[-1]).backward()
    return results


def train_from_one(side: Side, number: int) -> Any:
    result = side.call()
    leaves = differentiable(result)
    mean_square([leaves[number % len(leaves)]]).backward()
    return result


def train_from_sum(side: Side, number: int) -> Any:
    result = side.call()
    torch.stack([t.sum().float() for t in differentiable(result)]).sum().backward()
    return result


def two_forwards(side: Side, number: int) -> Any:
    results = [side.call(), side.call()]
    for result in results if number % 2 else results[::-1]:
        mean_square(differentiable(result)).backward()
    return results


def twice(side: Side, number: int) -> Any:
    result = side.call()
    loss = mean_square(differentiable(result))
    loss.backward(retain_graph=True)
    loss.backward()
    return result


def some_gradients(side: Side, number: int) -> Any:
    wanted = [p for p in side.module.parameters() if p.requires_grad]
    wanted += [t for t in side.inputs if t.requires_grad]
    chosen = random.Random(number).sample(wanted, (len(wanted) + 1) // 2)
    result = side.call()
    loss = mean_square(differentiable(result))
    return result, torch.autograd.grad(loss, chosen, allow_unused=True)


def no_backward(side: Side, number: int) -> Any:
    return side.call()


def without_gradients(side: Side, number: int) -> Any:
    with torch.no_grad() if number % 2 else torch.inference_mode():
        return pytree.tree_map_only(torch.Tensor, torch.clone, side.call())


def evaluate(side: Side, number: int) -> Any:
    side.module.eval()
    try:
        result = side.call()
        if number % 2:
            mean_square(differentiable(result)).backward()
    finally:
        side.module.train()
    return result


def under_autocast(side: Side, number: int) -> Any:
    with torch.autocast(side.inputs[0].device.type, torch.bfloat16):
        result = side.call()
    mean_square(differentiable(result)).backward()
    return result


def other_batch(side: Side, number: int) -> Any:
    whole = side.inputs
    side.inputs = own_inputs(tuple(t[:-1] for t in whole))
    try:
        result = train(side, number)
        return result, [t.grad for t in side.inputs]
    finally:
        side.inputs = whole


def other_scale(side: Side, number: int) -> Any:
    side.kwargs = {"scale": 1.0 + number % 3}
    return train(side, number)


def freeze(side: Side, number: int) -> Any:
    parameters = list(side.module.parameters())
    if parameters:
        parameter = parameters[number % len(parameters)]
        parameter.requires_grad_(not parameter.requires_grad)
    return train(side, number)


def other_inputs(side: Side, number: int) -> Any:
    """New values, and perhaps another one that requires a gradient."""
    generator = torch.Generator().manual_seed(number)
    side.inputs = tuple(
        torch.randn(t.shape, generator=generator, dtype=t.dtype)
        .to(t.device)
        .requires_grad_(t.requires_grad != (i == number % 4))
        for i, t in enumerate(side.inputs)
    )
    return train(side, number)


def double(side: Side, number: int) -> Any:
    side.module.double()
    side.inputs = own_inputs(tuple(t.double().requires_grad_(t.requires_grad) for t in side.inputs))
    return train(side, number)


def in_a_larger_model(side: Side, number: int) -> Any:
    """Inputs that something else made, and more after the result."""
    leaf = torch.full((1,), 1.5, dtype=side.inputs[0].dtype, requires_grad=True)
    leaves = side.inputs
    side.inputs = tuple(t * leaf if i != number % 3 else t for i, t in enumerate(leaves))
    try:
        result = side.call()
    finally:
        side.inputs = leaves
    loss = torch.stack([(t * leaf).float().tanh().mean() for t in differentiable(result)]).sum()
    loss.backward()
    return result, leaf.grad


def under_checkpoint(side: Side, number: int) -> Any:
    """Eager execution would change buffers twice."""
    if next(side.module.buffers(), None) is not None:
        return train(side, number)

    def call(*inputs: torch.Tensor) -> Any:
        return dataclasses.replace(side, inputs=inputs).call()

    result = checkpoint(call, *side.inputs, use_reentrant=False)
    mean_square(differentiable(result)).backward()
    return result


def other_strides(side: Side, number: int) -> Any:
    whole = side.inputs
    side.inputs = tuple(
        t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(t.requires_grad)
        for t in whole
    )
    try:
        return train(side, number), [t.grad for t in side.inputs]
    finally:
        side.inputs = whole


def slices(side: Side, number: int) -> Any:
    """Inputs that are parts of a larger tensor, and do not begin where others do."""
    whole, begin = side.inputs, number % 5
    tables = [
        torch.cat([t.detach()[:1].expand(begin, *t.shape[1:]), t.detach(), t.detach()[:2]])
        for t in whole
    ]
    for table, t in zip(tables, whole, strict=True):
        table.requires_grad_(t.requires_grad)
    side.inputs = tuple(
        table[begin : begin + len(t)] for table, t in zip(tables, whole, strict=True)
    )
    try:
        return train(side, number), [table.grad for table in tables]
    finally:
        side.inputs = whole


def into_a_container(side: Side, number: int) -> Any:
    """Results that are put into a dictionary and a list of the caller's."""
    into: dict[str, Any] = {"parts": [], "number": number % 2}
    side.kwargs["into"] = into
    try:
        result = side.call()
    finally:
        del side.kwargs["into"]
    assert result is into
    made = [into["last"], *into["parts"]] if number % 3 else [into["loss"]]
    mean_square(differentiable(made)).backward()
    descend(side)
    return into


def part_in_evaluation(side: Side, number: int) -> Any:
    modules = list(side.module.modules())[1:]
    modules[number % len(modules)].eval()
    result = train(side, number)
    side.module.train()
    return result


def copied(side: Side, number: int) -> Any:
    side.module = copy.deepcopy(side.module)
    return train(side, number)


def pickled(side: Side, number: int) -> Any:
    side.module = pickle.loads(pickle.dumps(side.module))
    return train(side, number)


def loaded(side: Side, number: int) -> Any:
    state = {name: value + 0 for name, value in side.module.state_dict().items()}
    side.module.load_state_dict(state)
    return train(side, number)


def hooked(side: Side, number: int) -> Any:
    """A hook on the module's result and one on each gradient."""
    seen: list[torch.Tensor] = []
    handles = [side.module.register_forward_hook(lambda _, __, result: None)]
    handles += [
        p.register_hook(lambda g: seen.append(g.clone()))
        for p in side.module.parameters()
        if p.requires_grad
    ]
    try:
        result = train(side, number)
    finally:
        for handle in handles:
            handle.remove()
    return result, sorted(float(g.double().nan_to_num().sum()) for g in seen)


USES: tuple[Callable[[Side, int], Any], ...] = (
    train,
    accumulate,
    train_from_one,
    train_from_sum,
    two_forwards,
    twice,
    some_gradients,
    no_backward,
    without_gradients,
    evaluate,
    under_autocast,
    other_batch,
    other_scale,
    freeze,
    other_inputs,
    double,
    in_a_larger_model,
    under_checkpoint,
    other_strides,
    slices,
    into_a_container,
    part_in_evaluation,
    copied,
    pickled,
    loaded,
    hooked,
)


# --- One seed ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """A network, how it is planned, and how it is used."""

    model: Network | AfterNorm
    inputs: tuple[torch.Tensor, ...]
    budget: str
    options: rockplan.Options
    uses: tuple[tuple[Callable[[Side, int], Any], int], ...]
    autocast: bool = False
    as_block: bool = False

    def __str__(self) -> str:
        uses = ", ".join(f"{use.__name__} {number}" for use, number in self.uses)
        how = f"budget {self.budget}, {self.options}{', as a block' if self.as_block else ''}"
        return f"{self.model}\n{how}\n{uses}"

    def side(self, module: nn.Module, is_checked: bool = False) -> Side:
        return Side(module, own_inputs(self.inputs), {}, is_checked, self.autocast)


def draw(
    seed: int, device: str = "cpu", is_compiled: bool = False, autocast: bool = False
) -> Drawn:
    rng = random.Random(seed)
    model, inputs = network(rng)
    model, inputs = model.to(device), moved(inputs, device)
    options = rockplan.Options(
        time_limit_s=rng.choice((0.0, 0.2, 2.0)),
        bound_time_limit_s=0.05,
        cache=rng.random() < 0.5,
        check=rng.random() < 0.2,
        compile=is_compiled,
    )
    uses = tuple((rng.choice(USES), rng.randrange(1 << 20)) for _ in range(rng.randint(2, 6)))
    budget = rng.choice(BUDGETS)
    released = tuple(i for i in tensors_of_result(model, inputs) if rng.random() < 0.3)
    uses = ((train, 0), *uses)
    if not autocast:
        return Drawn(model, inputs, budget, dataclasses.replace(options, released=released), uses)
    after = AfterNorm(model, inputs[0].shape[-1], tuple(rng.random() < 0.7 for _ in inputs))
    return Drawn(after, inputs, budget, options, uses, True, rng.random() < 0.7)


def tensors_of_result(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[int]:
    """Leaves, by position, that are tensors; none where eager execution refuses the network."""
    try:
        result = copy.deepcopy(model)(*own_inputs(inputs))
    except Exception:
        return []
    leaves = pytree.tree_leaves(result)
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


WHOLE_USES = (train, accumulate, two_forwards)
"""Those whose backward passes reach all that a plan's do."""


def use_both(
    first: Side, second: Side, use: Callable[[Side, int], Any], number: int, when: str
) -> Any:
    """What the same use of both returns; AssertionError where anything differs, EagerFailed where
    `first` raises."""
    torch.manual_seed(number)
    CALLS.clear()
    try:
        expected = use(first, number)
    except rockplan.RockplanError:
        raise
    except Exception as error:
        raise EagerFailed(f"{when}: {type(error).__name__}: {error}") from error
    states, calls = generator_states(), CALLS[:]
    torch.manual_seed(number)
    CALLS.clear()
    found = use(second, number)
    # Steps of the original call what checks as well.
    is_counted = use is not under_checkpoint and not second.is_checked
    directions = ("forward", "backward") if is_counted else ()
    for direction in directions if use in WHOLE_USES else directions[:1]:
        of_both = [own.count(direction) for own in (CALLS, calls)]
        assert of_both[0] == of_both[1], f"{when}: checks of the {direction}: {of_both}"
    assert_equal_trees(generator_states(), states, f"{when}: generator")
    assert_equal_trees(found, expected, f"{when}: result")
    gradients = [[t.grad for t in side.inputs] for side in (second, first)]
    assert_equal_trees(*gradients, f"{when}: gradients of inputs")
    assert_same_state(second.module, first.module, when)
    return expected


def use_nearly(
    eager: Side,
    found: Any,
    kept: Side,
    use: Callable[[Side, int], Any],
    number: int,
    when: str,
) -> None:
    """The use of `eager`, whose tensors are afterwards those of `kept`, which has had it and
    returned `found`: AssertionError where that is far from eager's."""
    state = torch.get_rng_state()
    rounded = Side(copy.deepcopy(eager.module), own_inputs(eager.inputs), eager.kwargs)
    torch.manual_seed(number)
    expected = use(eager, number)
    assert torch.equal(torch.get_rng_state(), state), f"{when}: the generator is not as eager's"
    dtypes = {
        getattr(torch, value.spec.dtype.removeprefix("torch."))
        for plan in kept.module.plans  # type: ignore[union-attr]
        for value in plan.graph.values
    }
    tensors = named(eager, expected)

    def of_rounded() -> Mapping[str, float]:
        check.round_otherwise([*rounded.module.parameters(), *rounded.inputs], dtypes)
        torch.manual_seed(number)
        return check.shares_of(named(rounded, use(rounded, number)), tensors)

    shares = check.shares_of(named(kept, found), tensors)
    far = check.too_far(shares, kernels.bound_of(dtypes), of_rounded)
    assert not far, f"{when}: far from eager: {far}"
    with torch.no_grad():
        take_over(eager, kept)


def named(side: Side, result: Any) -> dict[str, torch.Tensor | None]:
    """All that a use leaves, by names that `check.shares_of` knows."""
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return {
        **{f"output {i}": t.detach() for i, t in enumerate(leaves)},
        **{f"gradient of {n}": p.grad for n, p in side.module.named_parameters()},
        **{f"gradient of input {i}": t.grad for i, t in enumerate(side.inputs)},
        **{f"buffer {n}": b for n, b in side.module.named_buffers()},
    }


def take_over(eager: Side, kept: Side) -> None:
    """Parameters, gradients and buffers of `eager` are those of `kept`."""
    for one, other in zip(eager.module.parameters(), kept.module.parameters(), strict=True):
        one.copy_(other)
        one.grad = None if other.grad is None else other.grad.clone()
    for buffer, other in zip(eager.module.buffers(), kept.module.buffers(), strict=True):
        buffer.copy_(other)
    for tensor, other in zip(eager.inputs, kept.inputs, strict=True):
        tensor.grad = None if other.grad is None else other.grad.clone()


class EagerFailed(Exception):
    """Eager execution refuses the use."""


def eager_runs(drawn: Drawn) -> int:
    """How many of the uses eager execution accepts, with equal results in two runs."""
    sides = [drawn.side(copy.deepcopy(drawn.model)) for _ in range(2)]
    for position, (use, number) in enumerate(drawn.uses):
        try:
            use_both(sides[0], sides[1], use, number, use.__name__)
        except (EagerFailed, AssertionError):
            return position
    return len(drawn.uses)


def examine(drawn: Drawn) -> tuple[str, str]:
    """(outcome, what was said)."""
    accepted = eager_runs(drawn)
    if accepted == 0:
        return "unrepeated", ""
    try:
        torch.manual_seed(0)
        eager = drawn.side(copy.deepcopy(drawn.model))
        before = generator_states()
        kept = solve_kept(drawn) if drawn.options.compile else None
        planned = solve(drawn)
        assert_equal_trees(generator_states(), before, "planning moved the generator")
        side = drawn.side(planned, drawn.options.check)
        if not drawn.as_block:
            measure(side, drawn.options.released)
        eager.module.load_state_dict(side.module.state_dict())
        side.module.zero_grad()
        side.inputs = own_inputs(drawn.inputs)
        if kept is not None:
            kept.module.load_state_dict(side.module.state_dict())
        for position, (use, number) in enumerate(drawn.uses[:accepted]):
            when = f"{position} {use.__name__}"
            if kept is None:
                use_both(eager, side, use, number, when)
                continue
            use_nearly(eager, use_both(kept, side, use, number, when), kept, use, number, when)
    except (rockplan.CheckFailed, IllegalSchedule):
        return "wrong", traceback.format_exc()
    except rockplan.RockplanError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:
        return "wrong", traceback.format_exc()
    return "equal", ""


def solve(drawn: Drawn) -> nn.Module:
    """Within the smallest budget where that which was drawn is less."""
    plan = functools.partial(rockplan.solve_blocks, blocks=["block"])
    plan = functools.partial(
        plan if drawn.as_block else rockplan.solve,
        *(drawn.model, drawn.inputs),
        options=drawn.options,
    )
    with casting(drawn.inputs, drawn.autocast):
        try:
            return plan(drawn.budget)
        except rockplan.InfeasibleBudget as error:
            return plan(error.minimum_bytes)


def solve_kept(drawn: Drawn) -> Side:
    """The same kernels where nothing runs again, with a module of its own."""
    options = dataclasses.replace(drawn.options, check=False)
    model = copy.deepcopy(drawn.model)
    return drawn.side(rockplan.solve(model, drawn.inputs, "1000%", options=options))


def measure(side: Side, released: tuple[int, ...]) -> None:
    """AssertionError where a step needs more than the budget, or other than predicted.

    It holds the result in backward, but for the `released` leaves that have no gradient."""

    def step() -> None:
        result = side.call()
        own = result.get("loss") if isinstance(result, dict) else None
        from_here = differentiable(result) if own is None else [own]
        held = [
            leaf
            for i, leaf in enumerate(pytree.tree_leaves(result))
            if i not in released or any(leaf is t for t in from_here)
        ]
        loss = loss_of(result) if own is None else own
        del result, from_here, own
        loss.backward()
        del held
        for tensor in side.inputs:
            tensor.grad = None

    device = str(side.inputs[0].device)
    peak_bytes, left_bytes = rockplan.peak_live_bytes(step, device=device)
    plan = rockplan.plan_of(side.module)
    facts = f"measured {peak_bytes}, predicted {plan.peak_bytes}, budget {plan.budget_bytes}"
    assert peak_bytes <= plan.budget_bytes, f"over budget: {facts}"
    off_bytes = abs(peak_bytes - plan.peak_bytes)
    assert off_bytes <= tolerance_bytes(plan, device), f"off: {facts}"
    assert left_bytes == 0, f"{left_bytes} bytes left after a step"


def sweep(first: int, stride: int, seconds: float, draws: Callable[[int], Drawn]) -> dict[str, Any]:
    """Examine one seed after another; prints what is refused or wrong."""
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROCKPLAN_CACHE_DIR"] = folder
        for seed in itertools.count(first, stride):
            if time.monotonic() >= deadline:
                break
            outcome, said = examine(draws(seed))
            counts[outcome] += 1
            if outcome == "refused":
                refusals[said.split(":")[0]] += 1
            if outcome in ("refused", "wrong"):
                print(f"seed {seed}: {outcome}: {said}", flush=True)
    return {
        "seeds": f"{first} to {seed}, every {stride}.",
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        "refusals": dict(refusals.most_common()),
        "where": where(),
    }


def run_by_operators() -> None:
    """In this process no kernel is compiled."""
    inductor.compiled = lambda wanted: {
        kernel.op: functools.partial(kernels.computed, kernel) for kernel in wanted
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--stride", type=int, default=1, help="between seeds")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no seed after that")
    parser.add_argument("--seed", type=int, help="this one only, and print it")
    parser.add_argument("--device", default="cpu", help="that everything is moved to")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        choices=("inductor", "operators"),
        help="plans of compiled kernels; operators: that run by the operators that they fuse",
    )
    parser.add_argument("--autocast", action="store_true", help="call everything under autocast")
    parser.add_argument("--keep", action="store_true", help="append to the results")
    parser.add_argument("--minutes", type=float, help="in place of the seconds")
    parser.add_argument("--python-state", action="store_true", help="models with state in Python")
    parser.add_argument("--brief", action="store_true", help="of those, print what fails alone")
    arguments = parser.parse_args()
    if arguments.compile and arguments.autocast:
        parser.error("a block that is compiled alone is another program than in a compiled whole")
    if arguments.minutes is not None:
        arguments.seconds = 60 * arguments.minutes
    if arguments.python_state:
        sys.exit(not python_state.run(arguments))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plan_roughly()
    if arguments.compile == "operators":
        run_by_operators()
    is_compiled = arguments.compile is not None
    if arguments.device != "cpu":
        for name, value in FOR_CUDA.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True, warn_only=True)
    draws = functools.partial(
        draw, device=arguments.device, is_compiled=is_compiled, autocast=arguments.autocast
    )
    if arguments.seed is not None:
        drawn = draws(arguments.seed)
        print(drawn)
        print(*examine(drawn))
        return
    found = sweep(arguments.first, arguments.stride, arguments.seconds, draws)
    if is_compiled:
        found["compile"] = arguments.compile
    if arguments.autocast:
        found["autocast"] = True
    line = json.dumps(found)
    print(line)
    if arguments.keep:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    sys.exit(bool(found["counts"]["wrong"]))


if __name__ == "__main__":
    main()
