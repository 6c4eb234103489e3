"""What goes to the host: chosen, placed, printed, kept in files; eager's bits at the peak that is
predicted."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rockplan
from rockplan.budget import parse_budget
from rockplan.cli.main import app
from rockplan.errors import IllegalSchedule, InvalidInput
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.costs.price import price
from rockplan.graph_builder.pipeline import lower
from rockplan.oracles.clock import clock, trips
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.reports.timeline import block_rows, planned_timeline
from rockplan.runtime.planned_state import programs_of
from rockplan.search import paging
from rockplan.search.local.exchange import exchanged
from rockplan.search.local.placing import placed
from rockplan.search.planning import plan_anew
from rockplan.search.problem import host_of, problem_of
from rockplan.values.copies import Host, HostLink, paged, with_copies, with_fetches, without_copies
from rockplan.values.graph import CDGraph, Queue, readers, required
from rockplan.values.order import keep_all_order
from rockplan.values.schedule import keep_all, with_frees
from testing.graphs import gelu_of_product, random_graph
from testing.models import Case, gpt2, llama
from testing.training import QUICK, solve_case, train_side_by_side, twin
from tests.paging import pageable_of, placings

LINK = HostLink(1_000_000_000, 500_000_000)


def fetched_once(graph: CDGraph, storages: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Orders of `with_fetches`: every node once, each storage fetched before it is read first."""
    asked = with_fetches(graph, storages)
    turn = len(graph.forward)
    backward = list(required(asked.backward))
    for k, d in enumerate(sorted(storages)):
        read = min(p for p, i in enumerate(backward) if d in asked.nodes[i].reads)
        backward.insert(read, turn + k)
    return required(asked.forward), tuple(backward)


def small_graphs(count: int) -> Iterator[tuple[CDGraph, list[int]]]:
    """With one or two storages that may be paged."""
    for seed in itertools.count():
        rng = random.Random(seed)
        graph = random_graph(rng, rng.randint(3, 5))
        storages = pageable_of(graph)[:2]
        if storages and len(graph.nodes) <= 9 and not any(n.random for n in graph.nodes):
            yield graph, storages
            count -= 1
        if not count:
            return


def fastest_ns(graph: CDGraph, storages: list[int], budget_bytes: int) -> int:
    """Of all places of the copies, each once, and back before the storage is read."""
    made = with_copies(graph, storages, LINK)
    forward, backward = required(made.forward), required(made.backward)
    stores = [p.store for p in paged(made)]
    fetches = [p.fetch for p in paged(made)]
    reads = readers(made)
    orders = itertools.product(placings(forward, stores), placings(backward, fetches))
    best = 1 << 62
    for first, second in orders:
        if any(
            second.index(p.fetch) > min(second.index(i) for i in reads[p.data] if i in second)
            for p in paged(made)
        ):
            continue
        schedule = with_frees(made, first, second)
        with contextlib.suppress(IllegalSchedule):
            verify(made, schedule)
            found = simulate(made, schedule)
            if found.peak_bytes <= budget_bytes:
                best = min(best, found.time_ns)
    return best


def test_copies_are_placed_mostly_as_well_as_possible() -> None:
    as_good = tried = 0
    for graph, storages in small_graphs(25):
        orders = fetched_once(graph, storages)
        asked = with_fetches(graph, storages)
        least_bytes = simulate(asked, with_frees(asked, *orders)).peak_bytes
        most_bytes = simulate(graph, keep_all(graph)).peak_bytes
        for budget_bytes in {least_bytes, (least_bytes + most_bytes) // 2, most_bytes}:
            if budget_bytes < least_bytes:
                continue
            made = placed(graph, storages, orders, LINK, budget_bytes)
            verify(made.graph, made.schedule)
            found = simulate(made.graph, made.schedule)
            assert found.peak_bytes <= budget_bytes
            assert found.time_ns == made.time_ns
            assert without_copies(made.graph) == graph
            best_ns = fastest_ns(graph, storages, budget_bytes)
            assert made.time_ns >= best_ns, "placed where no copy may stand"
            tried += 1
            as_good += made.time_ns == best_ns
    assert as_good > 0.9 * tried


def test_nothing_that_comes_back_is_made_again() -> None:
    """What need not run is left out by the searches, and never counted as a first execution."""
    for graph, storages in small_graphs(15):
        asked = with_fetches(graph, storages)
        everything = with_frees(asked, *keep_all_order(asked))
        verify(asked, everything)
        assert everything.computes == required(asked.nodes)
        orders = fetched_once(graph, storages)
        least = with_frees(asked, *orders)
        peak_bytes = simulate(asked, everything).peak_bytes
        assert exchanged(asked, least, peak_bytes).computes == required(asked.nodes)


def test_choices_fit_the_link_and_the_host() -> None:
    for graph, _ in small_graphs(20):
        ranked = pageable_of(graph)
        all_of_it = paging.chosen(graph, ranked, HostLink(10**15, 10**15), 1.0, 1 << 60)
        half = sum(graph.data[d].size_bytes for d in all_of_it) // 2
        less = paging.chosen(graph, ranked, HostLink(10**15, 10**15), 1.0, half)
        assert sum(graph.data[d].size_bytes for d in less) <= half
        slow = paging.chosen(graph, ranked, HostLink(1, 1), 1.0, 1 << 60)
        assert slow == tuple(d for d in slow if graph.data[d].size_bytes == 0)
        assert set(less) <= set(ranked)


# -- plans of modules ------------------------------------------------------------------------------


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "LEAST_BYTES", 1 << 10)


def options(**changed: Any) -> rockplan.Options:
    given: dict[str, Any] = {"cache": False, "host": "1GiB", "link": "20GB/s", **changed}
    return rockplan.Options(bound_time_limit_s=0.0, **given)


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [[nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)] for _ in range(5)]
    return nn.Sequential(*(module for layer in layers for module in layer)), torch.randn(256, 64)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(("make", "budget"), [(llama, "35%"), (gpt2, "25%")])
def test_bits_are_eagers_at_the_predicted_peak(make: Any, budget: str) -> None:
    torch.manual_seed(0)
    case: Case = make()
    eager, plain = twin(case), solve_case(case, budget, options=QUICK)
    planned: Any = solve_case(case, budget, options=options())
    plan = planned.plan
    assert plan.trips and plan.peak_bytes <= plan.budget_bytes
    # Of the caller's loss, where that is there at the peak.
    beside_bytes = plain.plan.peak_bytes - peak_of(case, plain)
    train_side_by_side(case, planned, eager, 2)
    assert plan.peak_bytes - peak_of(case, planned) in (0, beside_bytes)


def peak_of(case: Case, module: nn.Module) -> int:
    peak_bytes, left_bytes = rockplan.peak_live_bytes(lambda: case.step(module))
    assert left_bytes == 0
    return peak_bytes


@pytest.mark.usefixtures("small_pages")
def test_nothing_goes_to_the_host_unasked() -> None:
    model, x = network()
    plain = rockplan.plan(model, x, "50%", options=rockplan.Options(cache=False))
    assert not plain.trips and "paged" not in str(plain)
    without = rockplan.plan(model, x, "50%", options=options(without=("paging",)))
    assert not without.trips


@pytest.mark.usefixtures("small_pages")
def test_the_host_holds_no_more_than_it_may() -> None:
    model, x = network()
    for host in (100_000, 300_000):
        plan = rockplan.plan(model, x, "50%", options=options(host=host))
        found = simulate(plan.graph, plan.schedule)
        assert 0 < found.host_peak_bytes <= host
        assert found.host_peak_bytes == sum(trip.size_bytes for trip in plan.trips)


@pytest.mark.usefixtures("small_pages")
def test_less_than_the_least_without_paging() -> None:
    model, x = network()
    least = rockplan.plan(model, x, "min", options=rockplan.Options(cache=False))
    plan = rockplan.plan(model, x, int(0.97 * least.peak_bytes), options=options())
    assert plan.trips and plan.peak_bytes <= plan.budget_bytes < least.peak_bytes


@pytest.mark.usefixtures("small_pages")
def test_plans_print_what_goes_to_the_host() -> None:
    model, x = network()
    plan = rockplan.plan(model, x, "40%", options=options())
    text = str(plan)
    count = len(plan.trips)
    assert f"in {count} storages to the host and back, at 16.0 GB/s" in text
    assert "above the proven bound at most" in text
    assert "leaves ms" in text and "comes back ms" in text
    for trip in plan.trips:
        assert trip.leaves_ns < trip.gone_ns <= trip.comes_ns < trip.back_ns
    assert plan.trips == trips(plan.graph, plan.schedule)


@pytest.mark.usefixtures("small_pages")
def test_plans_with_a_host_state_what_is_proven() -> None:
    """More than that everything runs once, and less than without a host."""
    model, x = network()
    lowered = lower(capture(model, (x,), {}), 0)
    profile = roofline(lowered.graph, Rates(1e11, 2e12))
    saved_bytes = sum(lowered.graph.data[d].size_bytes for d in pageable_of(lowered.graph))
    forward_ns = sum(n.time_ns for n in price(lowered.graph, profile).forward)
    link = f"{0.3 * saved_bytes / forward_ns}GB/s"
    plain = rockplan.Options(cache=False, bound_time_limit_s=0.0)
    given = options(link=link)
    ways = {"with": given, "off": replace(given, without=("paging",)), "plain": plain}
    plans = {
        way: plan_anew(problem_of(lowered.graph, profile, asked), parse_budget("40%"), asked)
        for way, asked in ways.items()
    }
    bounds_ns = {way: plan.certificate.bound_ns for way, plan in plans.items()}
    assert plans["with"].trips
    assert plans["with"].eager_time_ns < bounds_ns["with"] <= plans["with"].time_ns
    # Without the stage plans are those without a host; what is proven holds for others, too.
    assert plans["off"].schedule == plans["plain"].schedule
    assert bounds_ns["with"] == bounds_ns["off"] < bounds_ns["plain"]


@pytest.mark.usefixtures("small_pages")
def test_files_and_cache_keep_what_pages(tmp_path: Path) -> None:
    model, x = network()
    kept = options(cache=True)
    planned: Any = rockplan.solve(model, x, "40%", options=kept)
    file = tmp_path / "plan.json"
    rockplan.save_plan(planned, file)
    (read,) = rockplan.read_plans(file)
    assert read.trips == planned.plan.trips and read.schedule == planned.plan.schedule
    loaded: Any = rockplan.load(model, x, file, options=options())
    again: Any = rockplan.solve(model, x, "40%", options=kept)
    for plan in (loaded.plan, again.plan):
        assert plan.schedule == planned.plan.schedule and plan.trips == planned.plan.trips
        assert plan.graph.values == planned.plan.graph.values
        copies = [[n.calls for n in p.graph.nodes if n.optional] for p in (plan, planned.plan)]
        assert copies[0] == copies[1]
    torch.manual_seed(1)
    expected = model(x)
    for module in (loaded, again):
        torch.manual_seed(1)
        assert torch.equal(module(x), expected)


@pytest.mark.usefixtures("small_pages")
def test_plans_from_files_page_what_options_allow(tmp_path: Path) -> None:
    model, x = network()
    file = tmp_path / "plan.json"
    made = rockplan.plan(model, x, "40%", options=options())
    rockplan.save_plan(made, file)
    needed_bytes = simulate(made.graph, made.schedule).host_peak_bytes
    said = rf"pages {needed_bytes} bytes .*Options\(host={needed_bytes}\)"
    for refused in (
        rockplan.Options(cache=False),
        rockplan.Options(cache=False, host=needed_bytes - 1, link="20GB/s"),
    ):
        with pytest.raises(InvalidInput, match=said):
            rockplan.load(model, x, file, options=refused)
    for link in ("20GB/s", "10GB/s", None):
        loaded: Any = rockplan.load(model, x, file, options=options(host=needed_bytes, link=link))
        assert loaded.plan.schedule == made.schedule
    rockplan.load(model, x, file, options=options(host=True))


@pytest.mark.usefixtures("small_pages")
def test_pictures_and_words_know_what_pages() -> None:
    model, x = network()
    plan = rockplan.plan(model, x, "40%", options=options())
    drawn = planned_timeline(plan)
    assert drawn.time_ns == plan.time_ns and drawn.peak_bytes == plan.peak_bytes
    out, back = block_rows(plan)[len(plan.blocks) :]
    assert len(out.runs) + len(back.runs) == sum(1 + trip.times_back for trip in plan.trips)
    explained = rockplan.explain(plan)
    assert explained.peak_bytes == plan.peak_bytes == sum(t.size_bytes for t in explained.tenants)
    assert not any("store" in again.name for again in explained.recomputations)


@pytest.mark.usefixtures("small_pages")
def test_schedules_have_rows_of_copies_each_way() -> None:
    model, x = network()
    plan = rockplan.plan(model, x, "40%", options=options())
    copies = clock(plan.graph, plan.schedule).copies
    ways = {
        "to the host": [(c.begins_ns, c.ends_ns) for c in copies if c.queue is Queue.OUT],
        "from the host": [(c.begins_ns, c.ends_ns) for c in copies if c.queue is Queue.IN],
    }
    assert all(ways.values())
    rows = [(row.name, row.runs) for row in block_rows(plan)[len(plan.blocks) :]]
    assert rows == [(name, tuple((*t, "copy") for t in times)) for name, times in ways.items()]
    plain = rockplan.plan(model, x, "40%", options=rockplan.Options(cache=False))
    assert len(block_rows(plain)) == len(plain.blocks)
    if importlib.util.find_spec("matplotlib"):
        pictures = [rockplan.draw_schedule(p).decode() for p in (plan, plain)]
        found = [[name in picture for name in ways] for picture in pictures]
        assert found == [[True] * 2, [False] * 2]


@pytest.mark.usefixtures("small_pages")
def test_storages_that_page_say_why() -> None:
    """The peak of this one is while something is on its way."""
    model, x = network()
    reasons: set[str] = set()
    for budget in ("60%", "45%", "35%", "28%"):
        plan = rockplan.plan(model, x, budget, options=options(link="2GB/s"))
        reasons |= {t.reason for t in rockplan.explain(plan).tenants}
    assert any("host" in reason for reason in reasons)


@pytest.mark.usefixtures("small_pages")
def test_a_host_may_beat_the_bound_without_one() -> None:
    """A relaxation that is proven near ends the search without a host alone."""
    model, x = network()
    quick = rockplan.Options(cache=False, bound_time_limit_s=0.0)
    plain = rockplan.plan(model, x, "30%", options=quick)
    assert plain.overhead > 0.02
    assert rockplan.plan(model, x, "30%", options=options()).trips


@pytest.mark.usefixtures("small_pages")
def test_calls_of_other_sizes_are_planned_anew() -> None:
    model, x = network()
    planned: Any = rockplan.solve(model, x, "40%", options=options())
    model_again, _ = network()
    for rows in (256, 200):
        for module in (planned, model_again):
            torch.manual_seed(1)
            module(x[:rows]).square().sum().backward()
    first, second = (program.plan for program in programs_of(planned))
    assert first.graph_digest != second.graph_digest and first.trips and second.trips
    for ours, theirs in zip(planned.parameters(), model_again.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.usefixtures("small_pages")
def test_a_curve_has_plans_that_page() -> None:
    model, x = network()
    quick = {"without": ("exchange", "proof")}
    plain = rockplan.pareto(model, x, options=rockplan.Options(cache=False, **quick))
    paging = rockplan.pareto(model, x, options=options(**quick))
    curves = (plain, paging)
    both_bytes = max(min(p.peak_bytes for p in curve.points) for curve in curves)
    times_ns = [
        min(p.time_ns / p.eager_time_ns for p in curve.points if p.peak_bytes <= both_bytes)
        for curve in curves
    ]
    assert times_ns[1] < times_ns[0]


@pytest.mark.usefixtures("small_pages")
def test_the_command_line_pages() -> None:
    words = ("solve", "rockplan.examples:mlp", "-b", "40%", "--no-cache", "--time-limit", "3")
    paged = CliRunner().invoke(app, [*words, "--host", "1GiB", "--link", "20GB/s"])
    assert paged.exit_code == 0, paged.output
    assert "storages to the host and back, at 16.0 GB/s" in paged.stdout
    refused = CliRunner().invoke(app, [*words, "--link", "20GB/s"])
    assert refused.exit_code != 0 and "pass host, too" in refused.stderr


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "much"}, "host is 'much'; pass bytes"),
        ({"host": "40%"}, "host is '40%'; pass bytes"),
        ({"host": 0}, "host is 0; pass bytes"),
        ({"host": "8GiB", "link": "fast"}, "link is 'fast'; pass bytes a second"),
        ({"host": "8GiB", "link": "25GB"}, "link is '25GB'; pass bytes a second"),
        ({"link": "25GB/s"}, "link is for activations that go to the host"),
        ({"host_path": "/tmp"}, "host_path is for activations that go to the host"),
        ({"host": True, "host_path": 3}, "host_path is 3; pass a folder"),
        ({"host": True, "in_flight": 2}, r"\(in_flight=2\) page nothing .*leave out host"),
    ],
)
def test_options_that_say_nothing_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        rockplan.Options(**given)


def test_a_module_on_several_devices_does_not_page() -> None:
    graph = gelu_of_product()
    there = [
        replace(v, spec=replace(v.spec, device="cuda:0")) if v.name == "h" else v
        for v in graph.values
    ]
    split = replace(graph, values=tuple(there))
    with pytest.raises(InvalidInput, match=r"several devices \(cpu, cuda:0\)"):
        host_of(split, options())
    assert host_of(graph, options()) == Host(1 << 30, HostLink(20 * 10**9, 20 * 10**9))
    assert host_of(graph, rockplan.Options()) is None
