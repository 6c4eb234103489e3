"""What callers do to results that depend on one another, or share memory, before backward."""

from __future__ import annotations

import itertools
import operator
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rockplan
from rockplan.codegen.result_aliasing import _are_apart
from rockplan.values.graph import TensorSpec
from testing.models import Case, mean_square
from testing.training import QUICK, assert_equal_trees, train_side_by_side
from tests.usage import SAMPLE, both, classifier, count_programs, pair


class Twice(nn.Module):
    """Some leaves of its result are one tensor, others are tensors of their own in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.linear(x)
        mask = h > 0
        inside = h.detach()
        return {
            "last": h,
            "all": [h.tanh(), h],
            "masks": (mask, mask),
            "inside": (inside, h.detach(), inside),
            "none": (None, None),
        }


def twice_case() -> Case:
    torch.manual_seed(0)
    return Case("twice", Twice(), (SAMPLE,), {}, lambda r: mean_square(r["last"]))


def test_leaves_that_are_one_tensor_are_one_object() -> None:
    planned, eager = pair(twice_case())

    def use(module: nn.Module) -> list[int]:
        leaves = pytree.tree_leaves(module(SAMPLE))
        return [next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves]

    both(planned, eager, use, "objects")


@pytest.mark.parametrize("differentiated", [None, (0,), (2,), (0, 1, 2)])
def test_one_of_several_leaves_changes_in_place(
    differentiated: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_programs(monkeypatch)
    planned, eager = pair(twice_case(), options=rockplan.Options(differentiated=differentiated))

    def use(module: nn.Module) -> None:
        result = module(SAMPLE)
        result["last"].mul_(2)
        mean_square(result["all"][1]).backward()

    for step in range(2):
        both(planned, eager, use, f"step {step}")
    assert len(made) == (1 if differentiated in [(0,), (2,)] else 2)


class Shares(nn.Module):
    """Its results are parts of one tensor, and a tensor of its own that nothing reads."""

    def __init__(self, parts: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.linear, self.other, self.parts = nn.Linear(16, 8), nn.Linear(16, 3), parts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*self.parts(self.linear(x).view(32, 2, 4)), self.other(x))


class Through(torch.autograd.Function):
    """Its result is another tensor, all of whose memory is that of its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def shares_case(parts: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Case:
    torch.manual_seed(0)
    return Case("shares", Shares(parts), (SAMPLE,), {}, lambda r: sum(map(mean_square, r)))


OVERLAPPING: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a part": lambda h: (h, h[:, :, 2:]),
    "two parts": lambda h: (h[:, :, :3], h[:, :, 2:]),
    "a row": lambda h: (h[:, 1], h[3]),
    "transposed": lambda h: (h, h.transpose(0, 1)),
    "real and complex": lambda h: (torch.view_as_complex(h.view(32, 4, 2)).real, h),
    "by a function": lambda h: (h, Through.apply(h)),
}


@pytest.mark.parametrize(("kind", "changed"), [*zip(OVERLAPPING, itertools.cycle([0, 1]))])
def test_results_that_share_memory_may_not_change(kind: str, changed: int) -> None:
    planned, eager = pair(shares_case(OVERLAPPING[kind]))

    def changed_in_place(module: nn.Module, copied: bool) -> torch.Tensor:
        """What is left has no hold on the results."""
        results = [r.clone() if copied else r for r in module(SAMPLE)]
        results[changed].mul_(2)
        return results[1 - changed].real.sum() + results[2].sum()

    loss = changed_in_place(planned, copied=False)
    with pytest.raises(rockplan.BackwardError, match="leaf 0 and leaf 1.*clone"):
        loss.backward()
    both(planned, eager, lambda m: changed_in_place(m, copied=True).backward(), "clones")
    both(planned, eager, lambda m: m(SAMPLE)[2].mul_(2).sum().backward(), "the other")


def test_every_backward_notices_a_changed_result() -> None:
    planned, _ = pair(shares_case(OVERLAPPING["a part"]))
    results = planned(SAMPLE)
    results[0].sum().backward(retain_graph=True)
    results[1].mul_(2)
    results[2].sum().backward(retain_graph=True)
    for result in results[:2]:
        with pytest.raises(rockplan.BackwardError, match="clone"):
            result.sum().backward()


APART: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "halves": lambda h: (h[:16], h[16:]),
    "columns": lambda h: (h[..., :2], h[..., 2:]),
    "middle": lambda h: (h[:, 0], h[:, 1]),
    "elements": lambda h: (h[..., 0], h[..., 1]),
    "odd and even": lambda h: (h.view(-1)[::2], h.view(-1)[1::2]),
    "without a gradient": lambda h: (h, h.detach()[:, 1:]),
    "empty": lambda h: (h, h[:0]),
}


@pytest.mark.parametrize(("kind", "changed"), [*zip(APART, itertools.cycle([0, 1]))])
def test_results_without_common_elements_may_change(kind: str, changed: int) -> None:
    planned, eager = pair(shares_case(APART[kind]))

    def use(module: nn.Module) -> None:
        results = module(SAMPLE)
        results[changed].mul_(2)
        sum(map(mean_square, results)).backward()

    both(planned, eager, use, kind)


def test_what_is_apart_has_no_common_element() -> None:
    draw = random.Random(0)

    def spec() -> TensorSpec:
        shape = tuple(draw.randint(0, 3) for _ in range(draw.randint(0, 3)))
        stride = tuple(draw.choice([0, 1, 2, 3, 4, 6, 12]) for _ in shape)
        return TensorSpec(shape, stride, draw.randint(0, 12), "torch.float32", "cpu")

    def elements(spec: TensorSpec) -> set[int]:
        places = itertools.product(*map(range, spec.shape))
        return {spec.offset + sum(map(operator.mul, p, spec.stride)) for p in places}

    pairs = [(spec(), spec()) for _ in range(5000)]
    known = [pair for pair in pairs if _are_apart(*pair)]
    assert all(elements(a).isdisjoint(elements(b)) for a, b in known)
    assert len(known) > len(pairs) / 3


class Kept(nn.Module):
    """Backward reads its first result; the second is an input, and the third a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x * self.scale).tanh(), x.detach(), self.scale[None]


@pytest.mark.parametrize("changed", [0, 1, 2])
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_a_changed_result_that_backward_reads_is_noticed(changed: int, budget: str) -> None:
    """A plan that computes again also reads what eager does not."""
    torch.manual_seed(0)
    x = torch.randn(32, 16, requires_grad=True)
    planned, eager = pair(Case("kept", Kept(), (x,), {}, lambda r: mean_square(r[0])), budget)

    def loss_of(result: torch.Tensor) -> torch.Tensor:
        """It needs nothing of the result itself."""
        return (result * torch.ones(32, 8)).sum()

    expected = torch.autograd.grad(loss_of(eager(x)[0]), [x, *eager.parameters()])
    results = planned(x)
    loss = loss_of(results[0])
    with torch.no_grad():
        results[changed].mul_(2)
    try:
        found = torch.autograd.grad(loss, [x, *planned.parameters()])
    except rockplan.BackwardError as error:
        assert "modified in place" in str(error)
    else:
        assert (budget, changed) in [("100%", 1)], "eager reads it, or the plan computes it again"
        assert_equal_trees(found, expected, "not read")


class Steps(nn.Module):
    """Returns what it computes its result from, step by step, and what that does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.other = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.a(x).tanh()
        variance, mean = torch.var_mean(self.b(h), 1)
        return self.c(h), h, self.other(x), variance, mean, self.c(h.detach())


def steps_case() -> Case:
    torch.manual_seed(0)
    return Case("steps", Steps(), (SAMPLE,), {}, lambda r: mean_square(r[0]) + mean_square(r[1]))


WATCHED: dict[str, Callable[[torch.Tensor], Any]] = {
    "hook": lambda h: h.register_hook(lambda g: g * 0.1),
    "two hooks, one removed": lambda h: [h.register_hook(torch.neg) for _ in range(2)][0].remove(),
    "hook of several": lambda h: torch.autograd.graph.register_multi_grad_hook((h,), print),
    "retain_grad": lambda h: h.retain_grad(),
}


@pytest.mark.parametrize(("kind", "also_used"), [*zip(WATCHED, itertools.cycle([True, False]))])
def test_hooks_on_results_behind_others_are_refused(kind: str, also_used: bool) -> None:
    planned, _ = pair(steps_case())
    result = planned(SAMPLE)
    WATCHED[kind](result[1])
    loss = mean_square(result[0]) + (mean_square(result[1]) if also_used else 0)
    with pytest.raises(rockplan.BackwardError, match="leaf 1.*leaf 0.*autograd.Function"):
        loss.backward()


def test_a_hook_on_a_gone_result_is_noticed() -> None:
    planned, _ = pair(steps_case())

    def loss() -> torch.Tensor:
        result = planned(SAMPLE)
        result[1].register_hook(lambda g: g * 0.1)
        return mean_square(result[0])

    made = loss()
    with pytest.raises(rockplan.BackwardError, match="leaf 1.*leaf 0"):
        made.backward()


USES: dict[str, tuple[int, ...]] = {
    "the hooked one alone": (1,),
    "neither": (2,),
    "one that is computed from it without a gradient": (1, 5),
    "both of two that are computed from it": (3, 4),
    "nothing that the hooked one depends on": (2, 5),
}


@pytest.mark.parametrize("uses", USES)
def test_hooks_on_results_see_as_in_eager(uses: str) -> None:
    """And are not called where no gradient arrives."""
    planned, eager = pair(steps_case(), options=rockplan.Options(differentiated=tuple(range(6))))
    hooked = (3, 4) if USES[uses] == (3, 4) else (1, 2)

    def use(module: nn.Module) -> list[Any]:
        result = module(SAMPLE)
        seen: dict[int, list[torch.Tensor]] = {i: [] for i in hooked}
        for i in hooked:
            result[i].register_hook(seen[i].append)
            result[i].register_hook(lambda g: g * 0.1)
            result[i].retain_grad()
        sum(mean_square(result[i]) for i in USES[uses]).backward()
        return [seen, *(result[i].grad for i in hooked)]

    both(planned, eager, use, uses)


def test_hooks_on_results_changed_in_place() -> None:
    planned, eager = pair(steps_case())

    def use(module: nn.Module) -> list[Any]:
        result = module(SAMPLE)
        seen: list[torch.Tensor] = []
        result[3].register_hook(seen.append)
        result[3].mul_(2).register_hook(seen.append)
        (mean_square(result[3]) + mean_square(result[2])).backward()
        return seen

    both(planned, eager, use, "in place")


def test_hooks_on_a_result_that_was_returned_twice() -> None:
    planned, eager = pair(twice_case())

    def use(module: nn.Module) -> list[Any]:
        result = module(SAMPLE)
        seen: list[torch.Tensor] = []
        result["all"][1].register_hook(seen.append)
        (mean_square(result["last"]) + result["all"][1].sum()).backward()
        return seen

    both(planned, eager, use, "twice")


ASKED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "grad": lambda loss, h: torch.autograd.grad(loss, h),
    "grad, if there is one": lambda loss, h: torch.autograd.grad(loss, h, allow_unused=True),
    "grad, to go on": lambda loss, h: torch.autograd.grad(loss, h, create_graph=True),
    "backward": lambda loss, h: loss.backward(inputs=[h]),
}


@pytest.mark.parametrize(("kind", "also_used"), [*zip(ASKED, itertools.cycle([True, False]))])
def test_gradients_between_results_are_refused(kind: str, also_used: bool) -> None:
    planned, _ = pair(steps_case())
    result = planned(SAMPLE)
    loss = mean_square(result[0]) + (mean_square(result[1]) if also_used else 0)
    with pytest.raises(rockplan.BackwardError, match=r"leaf \d.*leaf \d.*original module"):
        ASKED[kind](loss, result[1])


def test_gradients_of_results_that_come_from_outside_alone() -> None:
    planned, eager = pair(steps_case())

    def use(module: nn.Module) -> list[Any]:
        result = module(SAMPLE)
        loss = mean_square(result[0]) + mean_square(result[2].tanh() * 2)
        found = [
            torch.autograd.grad(loss, result[2], retain_graph=True),
            torch.autograd.grad(loss, [result[0], module.c.weight], retain_graph=True),
            torch.autograd.grad(mean_square(result[1]), result[1], retain_graph=True),
        ]
        loss.backward(inputs=[result[0]], retain_graph=True)
        loss.backward()
        return [*found, result[0].grad]

    both(planned, eager, use, "from outside")


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_leaves_that_are_let_go_are_not_counted(budget: str) -> None:
    case = classifier()
    scores_bytes = 64 * 400 * 4
    options = replace(QUICK, released=(1,))
    planned, eager = pair(case, budget, options=options)
    plan = planned.plan
    assert pair(classifier(), budget)[0].plan.peak_bytes == plan.peak_bytes + scores_bytes
    measured, left = rockplan.peak_live_bytes(lambda: planned(*case.args)[0].backward())
    assert left == 0 and measured <= plan.budget_bytes
    assert measured == pytest.approx(plan.peak_bytes, rel=0.02)
    # Held all the same, they are as in eager execution and come on top.
    planned.zero_grad()
    train_side_by_side(case, planned, eager)
    held, _ = rockplan.peak_live_bytes(lambda: case.step(planned))
    assert held <= measured + scores_bytes


def test_a_leaf_that_backward_starts_from_is_held() -> None:
    case = classifier()
    options = replace(QUICK, released=(1,), differentiated=(0, 1))
    both_start = pair(case, "100%", options=replace(QUICK, differentiated=(0, 1)))[0]
    planned, eager = pair(classifier(), "100%", options=options)
    assert planned.plan.peak_bytes == both_start.plan.peak_bytes
    both(planned, eager, lambda module: sum(map(mean_square, module(*case.args))).backward(), "")


@pytest.mark.parametrize("released", [(2,), (-1,), (0, 5)])
def test_only_tensors_of_the_result_can_be_released(released: tuple[int, ...]) -> None:
    with pytest.raises(rockplan.InvalidInput, match=r"released is .* are \(0, 1\)"):
        pair(classifier(), options=replace(QUICK, released=released))


def test_released_is_a_tuple_of_positions() -> None:
    with pytest.raises(rockplan.InvalidInput, match="released"):
        rockplan.Options(released="1")  # type: ignore[arg-type]


class Sized(nn.Module):
    """What it returns besides, and is given, are sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, size: torch.Size) -> dict[str, Any]:
        h = self.linear(x).reshape(size) / size.numel()
        return {
            "h": h,
            "size": h.shape,
            "more": (h.mT.shape, tuple(h.shape), h.detach().max(dim=0)),
        }


def test_sizes_are_sizes() -> None:
    case = Case("sized", Sized(), (SAMPLE, SAMPLE.shape), {}, lambda r: mean_square(r["h"]))
    planned, eager = pair(case)

    def use(module: nn.Module, size: torch.Size) -> list[Any]:
        found = module(SAMPLE, size)
        mean_square(found["h"]).backward()
        more: tuple[Any, ...] = found["more"]
        return [found["size"], type(found["size"]), *map(type, more), *more[:2]]

    for size in (SAMPLE.shape, SAMPLE.mT.shape):
        both(planned, eager, lambda module, size=size: use(module, size), f"{size}")
    assert len(planned.plans) == 2
    eager.zero_grad()
    both(pickle.loads(pickle.dumps(planned)), eager, lambda m: use(m, SAMPLE.shape), "a copy")
