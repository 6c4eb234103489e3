"""Plans that are replayed as CUDA graphs: what a replay asks of the device, and when there is none.

On the stand-in, which computes nothing, bits are no evidence. Seen there are which kernels a replay
launches, where generators are, the bytes of the pool, and whether a call is replayed: memory that
somebody can still read must not be written over.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import rockplan
from benchmarks import stand_in
from rockplan.runtime import captured
from testing.models import CASES
from testing.training import QUICK, solve_case, train_side_by_side, twin
from tests.cuda import ON_CUDA, deterministic, large  # noqa: F401

pytestmark = ON_CUDA
ON_THE_STAND_IN = pytest.mark.skipif(not stand_in.is_there(), reason="no stand-in: make cuda")
GRAPH = rockplan.Options(graph=True)


class Loss(nn.Module):
    """The mean square of a stack of layers, and with_rows what it is of."""

    def __init__(self, dropout: float = 0.0, with_rows: bool = False, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 64))
            for _ in range(depth)
        ]
        self.layers, self.with_rows = nn.Sequential(*layers), with_rows

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.layers(x)
        loss = rows.square().mean()
        return (loss, rows) if self.with_rows else loss


def rows(count: int = 512) -> torch.Tensor:
    return torch.randn(count, 64, device="cuda")


def planned_loss(budget: str = "100%", options: rockplan.Options = GRAPH, **given: Any) -> Any:
    model = Loss(**given).cuda()
    chosen = (0,) if model.with_rows else None
    options = replace(options, differentiated=chosen, time_limit_s=20)
    return rockplan.solve(model, rows(), budget, options=options)


@contextlib.contextmanager
def replays() -> Iterator[list[int]]:
    """The number of graphs that were replayed, in a list of one."""
    count, replay = [0], torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        replay(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
        yield count


def step(module: Any, x: torch.Tensor | None = None) -> int:
    """A step whose gradients are let go of; returns how many graphs were replayed."""
    with replays() as count:
        result = module(rows() if x is None else x)
        (result[0] if isinstance(result, tuple) else result).backward()
    module.zero_grad()
    return count[0]


def recorded(module: Any) -> Any:
    """`module` after a step that warms up, and one that is recorded and replayed."""
    assert [step(module), step(module)] == [0, 2]
    return module


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "rockplan")

    def why() -> list[str]:
        beginning = "a call runs the code of its plan, not as a CUDA graph: "
        texts = [r.getMessage() for r in caplog.records]
        return [t.removeprefix(beginning) for t in texts if t.startswith(beginning)]

    return why


# -- what a replay is -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["min", "100%"])
@pytest.mark.parametrize("name", CASES)
def test_models_train_as_in_eager(name: str, budget: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]().to("cuda")
    eager = twin(case)
    planned = solve_case(case, budget, options=replace(QUICK, graph=True))
    with replays() as count:
        train_side_by_side(case, planned, eager, 5)
    assert count[0] == 8, planned._rockplan.pool._said


ASKED = ("launches", "triton", "products")


@ON_THE_STAND_IN
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("budget", ["min", "100%"])
def test_replays_launch_what_the_step_does(
    budget: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    options = rockplan.Options(graph=True, compile=compiles)
    planned, x = planned_loss(budget, options), rows()

    def asked() -> dict[str, int]:
        before = stand_in.counts()
        step(planned, x)
        return stand_in.since(before)

    asked()
    by_code = asked_of_a_plan(planned, x)
    asked()
    replayed = asked()
    assert replayed["graphs"] == 2 and by_code["graphs"] == 0
    assert by_code["products"] > 0
    assert {k: replayed[k] for k in ASKED} == {k: by_code[k] for k in ASKED}
    assert replayed["syncs"] == replayed["mallocs"] == 0


def asked_of_a_plan(planned: Any, x: torch.Tensor) -> dict[str, int]:
    planned(x).backward()
    planned.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # so by the code
        before = stand_in.counts()
        planned(x).backward()
        asked = stand_in.since(before)
    planned.zero_grad()
    return asked


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_generators_are_where_eager_leaves_them(budget: str) -> None:
    planned, eager = planned_loss(budget, dropout=0.1), Loss(0.1).cuda()
    generator, x = torch.cuda.default_generators[0], rows()
    for _ in range(2):
        step(planned, x)
    (of,) = planned._rockplan.pool.recorded
    assert bool(of._backward.again) == (budget == "min")
    for seed in range(3):
        ends = []
        for module in (eager, planned):
            torch.manual_seed(seed)
            generator.set_offset(400 * seed)
            result = module(x)
            ends.append(generator.get_offset())
            torch.manual_seed(99)  # backward draws as the forward did, all the same
            result.backward()
            ends.append(generator.get_offset())
            module.zero_grad()
        assert ends[:2] == ends[2:] and ends[0] > 400 * seed
        for clone, name in of._backward.again:
            begins = 400 * seed + of._offsets[name]
            assert clone.initial_seed() == seed
            assert begins < clone.get_offset() <= begins + 400


def test_each_draw_again_begins_where_it_first_did() -> None:
    planned = recorded(planned_loss("min", dropout=0.1))
    (of,) = planned._rockplan.pool.recorded
    drawn = sorted({of._offsets[name] for _, name in of._backward.again})
    generator, x = torch.cuda.default_generators[0], torch.ones(512, 256, device="cuda")
    start = generator.get_offset()
    torch.dropout(x, 0.1, True)
    size = generator.get_offset() - start
    assert drawn and all(offset % size == 0 and offset < 3 * size for offset in drawn)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("budget", ["min", "50%", "100%"])
def test_the_pool_takes_what_is_predicted(budget: str, compiles: bool) -> None:
    planned = planned_loss(budget, rockplan.Options(graph=True, compile=compiles), depth=6)
    step(planned)
    assert planned.plan.pool_bytes == most_in_the_pool(planned)


@ON_THE_STAND_IN
@pytest.mark.parametrize("name", CASES)
def test_pools_of_models_take_what_is_predicted(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]().to("cuda")
    planned = solve_case(case, "min", options=replace(QUICK, graph=True))
    case.step(planned)
    planned.zero_grad()
    found = most_in_the_pool(planned, lambda: case.step(planned))
    assert found <= planned.plan.pool_bytes
    assert found >= 0.9 * planned.plan.pool_bytes


def most_in_the_pool(planned: Any, run: Callable[[], object] | None = None) -> int:
    """The most bytes that are alive while the graphs of a call are recorded, beyond before, beside
    what cuBLAS keeps and a seed and an offset for each generator."""
    gc.collect()
    real, found = captured._CallGraphs, []

    def measured(*given: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces"):  # kept, to be counted
            result = real(*given)
        most_bytes = torch.cuda.max_memory_allocated() - before
        alive_bytes = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        workspace_bytes = alive_bytes - torch.cuda.memory_allocated()
        graphs = (result._forward, result._backward)
        generators = sum(1 + len(of.again) for of in graphs)
        found.append(most_bytes - workspace_bytes - generators * 2 * 512)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "_CallGraphs", measured)
        step(planned) if run is None else run()
    most_bytes, *_ = found  # then with all that is free held
    return most_bytes


def test_versions_of_buffers_go_on() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).square().mean()

    with torch.backends.cudnn.flags(enabled=False):
        planned = rockplan.solve(Normed().cuda(), rows(), "100%", options=GRAPH)
        recorded(planned)
        before = [b._version for b in planned.buffers()]
        result = planned(rows())
        assert all(b._version > v for b, v in zip(planned.buffers(), before, strict=True))
        result.backward()


# -- when a call is not replayed ------------------------------------------------------------------


def test_a_call_in_flight_keeps_its_memory(said: Any) -> None:
    planned = recorded(planned_loss())
    with replays() as count:
        first = planned(rows())
        second = planned(rows())
        assert count[0] == 1
        second.backward()
        first.backward()
        assert count[0] == 2
    planned.zero_grad()
    del first, second
    assert step(planned) == 2
    assert said() == [captured._WAITING]


def test_a_dropped_forward_waits_for_nothing(said: Any) -> None:
    planned = recorded(planned_loss())
    planned(rows())
    assert step(planned) == 2 and not said()


def test_gradients_that_are_alive_keep_their_memory(said: Any) -> None:
    planned = recorded(planned_loss())
    planned(rows()).backward()
    weight = planned.layers[0][0].weight
    place = weight.grad.data_ptr()
    with replays() as count:
        planned(rows()).backward()  # adds up
        planned(rows()).backward()
        assert count[0] == 0 and weight.grad.data_ptr() == place
        planned.zero_grad(set_to_none=False)
        planned(rows()).backward()
        assert count[0] == 0
    kept = weight.grad[0]  # a part is enough
    planned.zero_grad()
    assert step(planned) == 0
    storage = kept.untyped_storage()
    del kept
    assert step(planned) == 0
    del storage
    assert step(planned) == 2
    assert said() == [captured._GRADIENTS]


def test_gradients_that_add_up_are_copied_after() -> None:
    planned = recorded(planned_loss())
    (of,) = planned._rockplan.pool.recorded
    weight, own = planned.layers[0][0].weight, {g.data_ptr() for s in of._gradients for g in s}
    counts = []
    for _ in range(3):
        with replays() as count:
            for _ in range(3):
                planned(rows()).backward()
        counts.append(count[0])
        assert (weight.grad.data_ptr() in own) == (len(counts) == 1)
        planned.zero_grad()
    assert counts == [2, 6, 6]


@pytest.mark.parametrize("is_read", [False, True])
def test_contributions_add_up_where_nobody_reads(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [(torch.ones(4),), (torch.ones(4),)]
    place, kept = made[0][0].data_ptr(), made[0][0].view(2, 2) if is_read else None
    monkeypatch.setattr(captured, "run_slices", lambda code, frame, run: [*made.pop(0)])
    code: Any = SimpleNamespace(targets=((0,), (0,)))
    (first,), (second,) = captured._gradients(code, code)
    assert second is None and first is not None and first.tolist() == [2.0] * 4
    assert (first.data_ptr() == place) != is_read
    assert kept is None or kept.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_gradients_of_autograd_grad_keep_their_memory() -> None:
    planned = recorded(planned_loss())
    gradients = torch.autograd.grad(planned(rows()), [*planned.parameters()])
    assert step(planned) == 0
    del gradients
    assert step(planned) == 2


def test_gradients_elsewhere_are_added_to() -> None:
    planned = recorded(planned_loss())
    for p in planned.parameters():
        p.grad = torch.zeros_like(p)
    places = [p.grad.data_ptr() for p in planned.parameters()]
    with replays() as count:
        for _ in range(3):
            planned(rows()).backward()
        assert count[0] == 6
    assert places == [p.grad.data_ptr() for p in planned.parameters()]


def test_large_results_that_are_alive_keep_their_memory(said: Any) -> None:
    planned = planned_loss(with_rows=True)
    assert [step(planned), step(planned)] == [0, 2]
    loss, result = planned(rows())
    loss.backward()
    planned.zero_grad()
    assert step(planned) == 0
    part = result[3]
    del result
    assert step(planned) == 0
    del part
    assert step(planned) == 2
    assert said() == [captured._RESULTS]
    losses = [planned(rows())[0].detach() for _ in range(3)]
    assert len({t.data_ptr() for t in losses}) == 3


def test_small_results_are_copies() -> None:
    planned = recorded(planned_loss())
    kept = []
    for _ in range(3):
        loss = planned(rows())
        loss.backward()
        planned.zero_grad()
        kept.append(loss.detach())
        del loss
    (of,) = planned._rockplan.pool.recorded
    places = {t.data_ptr() for t in (*kept, *of._results)}
    assert len(places) == 4


def test_results_changed_before_backward_are_noticed() -> None:
    planned = planned_loss(with_rows=True)
    assert [step(planned), step(planned)] == [0, 2]
    loss, result = planned(rows())
    result.detach().zero_()
    with pytest.raises(rockplan.BackwardError, match="modified in place"):
        loss.backward()
    with replays() as count:
        loss, _ = planned(rows())
    assert count[0] == 0  # the one before still waits
    del loss


def test_another_thread_does_not_replay_beside(said: Any) -> None:
    planned = recorded(planned_loss())
    loss, counts = planned(rows()), []
    thread = threading.Thread(target=lambda: counts.append(step(planned)))
    thread.start()
    thread.join()
    loss.backward()
    assert counts == [0] and said() == [captured._WAITING]


def test_a_second_backward_runs_the_code() -> None:
    planned = recorded(planned_loss("min", dropout=0.1))
    loss = planned(rows())
    loss.backward(retain_graph=True)
    planned.zero_grad()
    assert step(planned) == 2  # nothing of the first call is read any more
    with replays() as count:
        loss.backward()
    assert count[0] == 0
    planned.zero_grad()


def test_moved_parameters_run_the_code(said: Any) -> None:
    planned = recorded(planned_loss())
    weight = planned.layers[0][0].weight
    place = weight.data
    weight.data = weight.data.clone()
    assert step(planned) == 0
    weight.data = place
    assert step(planned) == 2
    assert len(said()) == 1 and "lies elsewhere" in said()[0]


def test_moved_constants_run_the_code(said: Any) -> None:
    model = Ends(lambda y, x: y * model.table)  # type: ignore[operator]
    model.table = rows(1)
    planned = recorded(rockplan.solve(model.cuda(), rows(), "100%", options=GRAPH))
    model.table.data = model.table.clone()
    assert step(planned) == 0
    assert len(said()) == 1 and "lies elsewhere" in said()[0]


def test_numbers_on_the_host_are_compared(said: Any) -> None:
    """They are part of a graph, by value."""
    model = Ends(lambda y, x: y * model.scale)  # type: ignore[operator]
    model.scale = torch.tensor(2.0)
    model.layer.cuda()
    planned = recorded(rockplan.solve(model, rows(), "100%", options=GRAPH))
    model.scale.fill_(3.0)
    assert step(planned) == 0
    assert len(said()) == 1 and "another number" in said()[0]
    model.scale.fill_(2.0)
    assert step(planned) == 2


def test_other_parameters_are_recorded_anew() -> None:
    planned = recorded(planned_loss())
    state = {k: v.clone() for k, v in planned.state_dict().items()}
    planned.load_state_dict(state, assign=True)
    assert [step(planned), step(planned), step(planned)] == [0, 2, 2], planned._rockplan.pool._said
    assert len(planned._rockplan.pool.recorded) == 1


def _hooks(planned: Any) -> Any:
    return planned.layers[0][0].weight.register_hook(lambda g: None)


LOOKERS: dict[str, Callable[[], Any]] = {
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "anomaly": torch.autograd.detect_anomaly,
    "saved": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "precision": lambda: _precision("high"),
    "dispatch": lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
    "graph": lambda: torch.cuda.graph(torch.cuda.CUDAGraph()),
}


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("looker", LOOKERS)
@pytest.mark.filterwarnings("ignore")
def test_whoever_looks_sees_the_code_run(looker: str, said: Any) -> None:
    planned = recorded(planned_loss())
    x = rows()
    with replays() as count:
        for _ in range(2):
            with LOOKERS[looker]():
                planned(x).backward()
                planned.zero_grad()
    assert count[0] == 0
    assert len(said()) == 1, said()
    assert step(planned) == 2


def test_another_stream_waits_for_the_last_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = recorded(planned_loss())
    waited: list[tuple[Any, Any]] = []
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda *both: waited.append(both))
    x, own, other = rows(), torch.cuda.current_stream(), torch.cuda.Stream()
    assert step(planned, x) == 2 and not waited
    with torch.cuda.stream(other):
        assert step(planned, x) == 2
        assert waited == [(other, own)]
        step(planned, x)
    assert len(waited) == 1


def test_hooks_on_parameters_run_the_code(said: Any) -> None:
    planned = recorded(planned_loss())
    handle = _hooks(planned)
    assert step(planned) == 0
    handle.remove()
    assert step(planned) == 2
    assert "hooks on parameters" in said()[0]


def test_unaligned_arguments_run_the_code() -> None:
    planned, memory = recorded(planned_loss()), torch.zeros(512 * 64 + 1, device="cuda")
    assert step(planned, memory[1:].view(512, 64)) == 0
    assert step(planned, memory[:-1].view(512, 64)) == 2


def test_kinds_of_call_share_the_pool(said: Any) -> None:
    planned = planned_loss()
    sizes = (512, 256)
    counts = [step(planned, rows(n)) for n in (*sizes, *sizes, *sizes)]
    assert counts == [0, 0, 2, 2, 2, 2]
    planned(rows(512)).backward()
    assert step(planned, rows(256)) == 0  # gradients of the other kind are alive
    assert said() == [captured._GRADIENTS]


def test_kinds_take_the_memory_of_others() -> None:
    planned, grown = planned_loss(depth=6), []
    for n in (512, 480):
        step(planned, rows(n))
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        assert step(planned, rows(n)) == 2
        gc.collect()
        torch.cuda.empty_cache()
        grown.append(torch.cuda.memory_reserved() - before)
    assert grown[1] < grown[0] / 2


def test_kinds_take_the_memory_of_gradients() -> None:
    case, reserved = large(width=1024, batch=1024), []
    planned: Any = rockplan.solve(case.model, case.args, "min", options=GRAPH)
    for n in (1024, 768, 1024, 512):
        for _ in range(2):
            planned(case.args[0][:n]).square().mean().backward()
            planned.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    gradients = sum(p.nbytes for p in planned.parameters())
    assert len(planned._rockplan.pool.recorded) == 3
    assert reserved[-1] - reserved[0] < gradients


def test_memory_stays_as_long_as_a_gradient() -> None:
    planned = recorded(planned_loss())
    pool = planned._rockplan.pool._memory
    gradients = torch.autograd.grad(planned(rows()), [*planned.parameters()])
    del planned

    def pages() -> list[range]:
        gc.collect()
        torch.cuda.empty_cache()
        found = torch.cuda.memory_snapshot(pool)
        return [range(one["address"], one["address"] + one["total_size"]) for one in found]

    for _ in range(2):
        assert all(any(g.data_ptr() in one for one in pages()) for g in gradients)
        gradients = gradients[:1]
    del gradients
    assert not pages()


class Conjugate(nn.Module):
    """The gradient of its parameter is a tensor that is not resolved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.conj() * x).real.sum()


def test_unresolved_gradients_run_the_code(said: Any) -> None:
    planned: Any = rockplan.solve(Conjugate().cuda(), rows(), "100%", options=GRAPH)
    assert [step(planned), step(planned)] == [0, 0]
    assert "no plain tensors" in said()[0]


def test_memory_of_kinds_that_are_gone_is_kept(said: Any) -> None:
    planned = recorded(planned_loss())
    gradients = torch.autograd.grad(planned(rows()), [*planned.parameters()])
    state = {k: v.clone() for k, v in planned.state_dict().items()}
    planned.load_state_dict(state, assign=True)
    gc.collect()
    assert [step(planned), step(planned)] == [0, 0]
    assert said() == [captured._GRADIENTS]
    del gradients
    assert [step(planned), step(planned)] == [2, 2]
    assert len(planned._rockplan.pool.recorded) == 1


def test_no_more_than_some_kinds_are_recorded(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_KINDS", 1)
    planned = recorded(planned_loss())
    assert [step(planned, rows(256)) for _ in range(3)] == [0, 0, 0]
    assert step(planned) == 2 and "kinds of call already" in said()[0]


def test_copies_have_graphs_of_their_own() -> None:
    planned = recorded(planned_loss())
    other = copy.deepcopy(planned)
    assert [step(other), step(other), step(planned)] == [0, 2, 2]


def test_pickles_have_graphs_of_their_own() -> None:
    planned = recorded(planned_loss())
    other = pickle.loads(pickle.dumps(planned))
    assert [step(other), step(other), step(planned)] == [0, 2, 2]


def test_modules_on_the_cpu_run_their_code(said: Any) -> None:
    planned = recorded(planned_loss()).cpu()
    assert [step(planned, rows().cpu()) for _ in range(3)] == [0, 0, 0]
    assert len(said()) == 1 and "computes on cpu" in said()[0]


def test_nothing_stays_of_a_module_that_is_gone() -> None:
    planned = recorded(planned_loss())
    step(planned)
    planned(rows()).backward()
    weight = planned.layers[0][0].weight
    gradient = weight.grad
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    del planned, weight
    gc.collect()
    torch.cuda.empty_cache()
    gradient.zero_()  # its memory stays
    assert torch.cuda.memory_reserved() <= before


def test_a_capture_that_fails_leaves_the_code(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = planned_loss(dropout=0.1)
    step(planned)
    real = captured.run_slices

    def waits(*given: Any) -> Any:
        torch.cuda.synchronize()
        return real(*given)

    monkeypatch.setattr(captured, "run_slices", waits)
    assert [step(planned), step(planned)] == [0, 0]
    assert len(said()) == 1 and "cannot be recorded" in said()[0]
    torch.rand(4, device="cuda")  # the generator draws as before


# -- what is refused by name ----------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"in_flight": 2}, {"host": "1GiB"}, {"released": (0,)}])
def test_options_that_no_graph_goes_with(given: dict[str, Any]) -> None:
    with pytest.raises(rockplan.InvalidInput, match="graph=True goes without"):
        rockplan.Options(graph=True, **given)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x * 1).square().mean()
        x.add_(1)
        return y


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x).square().mean(), x


@rockplan.opaque
class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


class Ends(nn.Module):
    """A layer, and what `end` makes of its result and of the argument."""

    def __init__(self, end: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(64, 64), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.layer(x), x).mean()


@functools.cache
def unknown_operator() -> Any:
    @torch.library.custom_op("graphed::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    count.register_fake(torch.empty_like)
    count.register_autograd(lambda ctx, gradient: gradient)
    return lambda y, x: count(y)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "in place": (InPlace, "changes an argument in place"),
    "its argument": (Returns, "share memory"),
    "opaque": (lambda: Ends(lambda y, x: Squares.apply(y)), "is Python"),
    "unknown": (lambda: Ends(unknown_operator()), "may act outside of the step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_no_graph_can_be_of(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(rockplan.InvalidInput, match=why):
        rockplan.solve(make().cuda(), rows(), "100%", options=GRAPH)


@pytest.mark.parametrize(
    ("operator", "takes_mask", "waits"),
    [
        ("aten.nonzero.default", False, True),
        ("aten.masked_select.default", True, True),
        ("aten._local_scalar_dense.default", False, True),
        ("aten.index.Tensor", True, True),
        ("aten.index.Tensor", False, False),
        ("aten.index_put_.default", True, True),
        ("aten.where.self", True, False),
    ],
)
def test_operators_that_the_host_waits_for(operator: str, takes_mask: bool, waits: bool) -> None:
    why = captured._why_not(operator, takes_mask)
    assert why == ("has a result for which the host waits" if waits else "")


def test_graphs_are_refused_on_the_cpu() -> None:
    with pytest.raises(rockplan.InvalidInput, match="computes on cpu"):
        rockplan.solve(Loss(), rows().cpu(), "100%", options=GRAPH)
    with pytest.raises(rockplan.InvalidInput, match="computes on cpu"):
        rockplan.plan(Loss(), rows().cpu(), "100%", options=GRAPH)


def test_blocks_are_refused() -> None:
    with pytest.raises(rockplan.InvalidInput, match="Python runs at each step"):
        rockplan.solve_blocks(Loss().cuda(), rows(), "100%", options=GRAPH)
