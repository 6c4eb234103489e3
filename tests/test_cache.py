"""The cache: nothing is made twice, several processes may share it, nothing in it is trusted."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.store import documents
from rockplan.store.cache import KINDS, Cache
from rockplan.store.documents import dump_family, dump_profile, parse_family, parse_profile
from rockplan.store.plan_file import dump_plans, parse_plans
from tests.cache_worker import KEY, hammer
from tests.planning import WITHOUT_SEARCH, hearing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(folder))
    return folder


def make_plan(budget: str = "80%", **options: Any) -> rockplan.Plan:
    """By options of blocks, so that there are all kinds of entries."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
    x = torch.randn(64, 16)
    made = rockplan.Options(without=("relaxation", "eviction"), **options)
    return rockplan.plan(model, x, budget, options=made)


def entries(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(folder.glob(f"{kind}/*.json"))


def rewrite(path: Path, change: dict[str, Any]) -> None:
    """Change a document as someone would who knows how its digest is made."""
    document = {**json.loads(path.read_text()), **change}
    del document["digest"]
    path.write_text(documents.canonical({**document, "digest": documents.digest(document)}))


# What is kept


def test_the_second_plan_measures_and_solves_nothing(folder: Path) -> None:
    first = make_plan()
    assert {p.parent.name for p in entries(folder)} == {*KINDS}
    with hearing() as stages:
        assert make_plan() == first
    assert stages <= WITHOUT_SEARCH


def test_another_budget_measures_nothing_and_solves_no_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_plan()
    monkeypatch.setattr("rockplan.ilp.blocks.pareto_search.option_family", None)
    with hearing() as stages:
        other = make_plan("min")
    assert "measuring times" not in stages
    assert other.profile_digest == first.profile_digest
    assert other.peak_bytes < first.peak_bytes


@pytest.mark.usefixtures("folder")
def test_the_least_peak_is_looked_for_once() -> None:
    with pytest.raises(rockplan.InfeasibleBudget) as first:
        make_plan("1KB")
    with hearing() as stages:
        with pytest.raises(rockplan.InfeasibleBudget) as second:
            make_plan("2KB")
        assert second.value.minimum_bytes == first.value.minimum_bytes
        assert make_plan("min").budget_bytes == first.value.minimum_bytes
    assert "looking for the smallest peak" not in stages


@pytest.mark.parametrize("change", ["budget", "option", "planner", "threads", "torch"])
def test_a_plan_is_not_used_where_inputs_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    make_plan()
    (kept,) = entries(folder, "plan")
    match change:
        case "budget":
            make_plan("81%")
        case "option":
            make_plan(bound_time_limit_s=0.1)
        case "planner":
            monkeypatch.setattr("rockplan.search.planning.planner", lambda: "rockplan 99")
            make_plan()
        case "threads":
            monkeypatch.setattr("torch.get_num_threads", lambda: 7)
            make_plan()
        case "torch":
            monkeypatch.setattr("torch.__version__", "99.0")
            make_plan()
    assert len(entries(folder, "plan")) == 2 and kept.exists()


def test_options_beside_the_plan_do_not_matter(folder: Path) -> None:
    first = make_plan()
    with hearing() as stages:
        assert make_plan(on_mismatch="error") == first
    assert stages <= WITHOUT_SEARCH


def test_an_infeasible_budget_is_not_kept(folder: Path) -> None:
    with pytest.raises(rockplan.InfeasibleBudget):
        make_plan("1B")
    assert not entries(folder, "plan")


def test_round_trips(folder: Path) -> None:
    plan = make_plan()
    for path in entries(folder):
        text = path.read_text()
        key = json.loads(text)["key"]
        match path.parent.name:
            case "profile":
                assert dump_profile(parse_profile(text, key), key) == text
            case "options":
                assert dump_family(parse_family(text, key), key) == text
            case "plan":
                assert dump_plans(parse_plans(text, key), key) == text
                assert json.loads(text)["plans"][0]["graph_digest"] == plan.graph_digest


def test_without_cache_nothing_is_written(folder: Path) -> None:
    make_plan(cache=False)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["cache", "a" * 300])
def test_a_folder_without_write_access_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "file"
    if name == "cache":
        file.write_text("")
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(file / name))
    with pytest.warns(UserWarning, match="ROCKPLAN_CACHE_DIR"):
        assert make_plan().peak_bytes > 0


# What is not trusted


def number_document(number: str) -> bytes:
    """A profile whose number of threads is `number`, with a digest that cannot matter."""
    head = f'{{"kind": "profile", "version": {documents.VERSION}, "key": {{}}, "digest": "0"'
    return f'{head}, "threads": {number}}}'.encode()


HOSTILE = {
    "nothing": b"",
    "half": b'{"kind": "plan", "version": ',
    "not text": b"\xff\xfe",
    "no object": b"[]",
    "another version": b'{"kind": "profile", "version": 1, "costs": {}}',
    "no digest": b'{"kind": "options", "version": 2, "options": [], "solves": 0}',
    "a pickle": b"cos\nsystem\n(S'echo hostile'\ntR.",
    "a program": b"__import__('os').system('echo hostile')",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "infinity": number_document("Infinity"),
    "not a number": number_document("NaN"),
    "a fraction": number_document("1.5"),
    "an exponent": number_document("1e999"),
    "5000 digits": number_document("9" * 5000),
    "100 digits": number_document("9" * 100),
    "a name twice": number_document('1, "threads": 2'),
    "lone surrogate": number_document(r'"\ud800"'),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_damaged_and_hostile_entries_are_set_aside(tmp_path: Path, content: bytes) -> None:
    cache = Cache(tmp_path)
    kinds: dict[str, Callable[[], object]] = {
        "profile": lambda: cache.profile(KEY),
        "options": lambda: cache.family(KEY, lambda option: True),
        "plan": lambda: cache.plan(KEY, lambda plan: True),
    }
    for kind, read in kinds.items():
        key = documents.digest(KEY)[:40]
        path = tmp_path / kind / (f"{key}-0.json" if kind == "profile" else f"{key}.json")
        path.parent.mkdir()
        path.write_bytes(content)
        with pytest.warns(UserWarning, match=f"{path}.*set aside"):
            assert read() is None
        assert not path.exists()
        assert path.with_suffix(".damaged").read_bytes() == content


def test_damaged_entries_are_made_again(folder: Path) -> None:
    first = make_plan()
    for kinds in (["plan", "options"], ["profile"]):
        damaged = [path for kind in kinds for path in entries(folder, kind)]
        for path in damaged:
            path.write_bytes(path.read_bytes().replace(b"1", b"2"))
        with pytest.warns(UserWarning, match="set aside") as caught:
            again = make_plan()
        named = "\n".join(str(w.message) for w in caught)
        assert damaged and all(str(path) in named for path in damaged)
        assert again.graph_digest == first.graph_digest
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert make_plan() == again


LIES: dict[str, dict[str, Any]] = {
    "wrong type": {"options": "all", "plans": "all", "costs": 1},
    "wrong rows": {"options": [1], "plans": [[]], "costs": {"a": [1, 2]}},
    "negative": {"solves": -1, "plans": [{"graph": -1}], "threads": -1},
    "too large": {"solves": 2**64, "plans": [{"graph": 2**64}], "threads": 2**64},
    "none": {"options": [], "plans": [], "costs": None},
    "another kind": {"kind": "../../other"},
    "another key": {"key": {"graph": "../../../etc/passwd"}},
    "key of numbers": {"key": {"graph": 1}},
    "key is a list": {"key": []},
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES.keys())
def test_documents_with_valid_digests_are_still_checked(
    folder: Path, change: dict[str, Any]
) -> None:
    make_plan()
    before = sorted(folder.parent.rglob("*"))
    for path in entries(folder):
        rewrite(path, change)
    with pytest.warns(UserWarning, match="set aside"):
        make_plan()
    outside = [p for p in folder.parent.rglob("*") if folder not in p.parents]
    assert set(outside) == {p for p in before if folder not in p.parents}


def test_an_option_that_lies_is_not_used(folder: Path) -> None:
    first = make_plan()
    for path in entries(folder, "plan"):
        path.unlink()
    for path in entries(folder, "options"):
        options = json.loads(path.read_text())["options"]
        lies = [{**option, "time_ns": 1, "backward_peak_bytes": 0} for option in options]
        rewrite(path, {"options": lies})
    with pytest.warns(UserWarning, match="not legal"):
        again = make_plan()
    assert again.peak_bytes == first.peak_bytes


@pytest.mark.parametrize(
    "cost",
    [
        lambda c: [c[0], c[1], 0, [min(size, 1) for size in c[3]], c[4]],
        lambda c: [c[0], c[1], c[2], [], c[4]],
        lambda c: [c[0], c[1], 2**62, c[3], c[4]],
        lambda c: [2**62, c[1], c[2], c[3], c[4]],
    ],
    ids=["sizes", "number of results", "workspace", "time"],
)
def test_costs_that_cannot_be_are_measured_again(folder: Path, cost: Any) -> None:
    first = make_plan()
    (path,) = entries(folder, "profile")
    costs = json.loads(path.read_text())["costs"]
    rewrite(path, {"costs": {call: cost(c) for call, c in costs.items()}})
    with pytest.warns(UserWarning, match="cannot be right"):
        again = make_plan()
    assert [d.size_bytes for d in again.graph.data] == [d.size_bytes for d in first.graph.data]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_plan() == again


@pytest.mark.parametrize(
    "change",
    [{"peak_bytes": 1}, {"time_ns": 1}, {"events": []}, {"graph_digest": "0" * 64}],
    ids=["peak", "time", "schedule", "graph"],
)
def test_a_plan_that_lies_is_not_used(folder: Path, change: dict[str, Any]) -> None:
    first = make_plan()
    (path,) = entries(folder, "plan")
    (plan,) = json.loads(path.read_text())["plans"]
    rewrite(path, {"plans": [{**plan, **change}]})
    with pytest.warns(UserWarning, match="set aside"):
        assert make_plan() == first


def test_another_graphs_plan_under_this_key_is_unused(folder: Path) -> None:
    make_plan()
    (path,) = entries(folder, "plan")
    other = rockplan.plan(nn.Linear(4, 4), torch.randn(2, 4), "min")
    rewrite(path, {"plans": json.loads(dump_plans([other]))["plans"]})
    with pytest.warns(UserWarning, match="another graph"):
        make_plan()


@rockplan.pure
@torch.library.custom_op("rockplan_test::own_tanh", mutates_args=())
def own_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


@rockplan.pure
@torch.library.custom_op("rockplan_test::own_tanh_backward", mutates_args=())
def own_tanh_backward(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.tanh_backward(gradient, result)


own_tanh.register_fake(torch.empty_like)
own_tanh_backward.register_fake(lambda gradient, result: torch.empty_like(gradient))
own_tanh.register_autograd(
    lambda ctx, gradient: own_tanh_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Activated(nn.Module):
    """Layers with an activation that may or may not take over its argument's storage."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x.mean()


@pytest.mark.usefixtures("folder")
def test_entries_with_other_takeovers_are_not_damaged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for activation in (torch.tanh, own_tanh, torch.tanh):
            options = rockplan.Options(time_limit_s=5)
            rockplan.plan(Activated(activation), torch.randn(64, 16), "min", options=options)


@rockplan.pure
@torch.library.custom_op("rockplan_test::doubled_outside", mutates_args=())
def doubled_outside(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2.0)


@rockplan.pure
@torch.library.custom_op("rockplan_test::split_outside", mutates_args=())
def split_outside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(x.numpy() * 1.0), x.sin().cos()


doubled_outside.register_fake(torch.empty_like)
doubled_outside.register_autograd(lambda ctx, gradient: doubled_outside(gradient))
split_outside.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
split_outside.register_autograd(lambda ctx, first, second: doubled_outside(first + second))


@pytest.mark.parametrize("operator", [doubled_outside, lambda x: sum(split_outside(x))])
def test_operators_allocating_outside_pytorch_have_costs(
    folder: Path, operator: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (
            rockplan.plan(Activated(operator), torch.randn(64, 16), budget)
            for budget in ("100%", "95%")
        )
    assert first.profile_digest == second.profile_digest
    assert not list(folder.rglob("*.damaged"))
    costs = [
        c for p in entries(folder, "profile") for c in json.loads(p.read_text())["costs"].values()
    ]
    assert all(number >= 0 for *numbers, sizes, _ in costs for number in (*numbers, *sizes))


def test_a_huge_entry_is_not_read(folder: Path) -> None:
    make_plan()
    (path,) = entries(folder, "plan")
    os.truncate(path, documents.MAX_BYTES + 1)
    with pytest.warns(UserWarning, match=f"more than {documents.MAX_BYTES} bytes"):
        make_plan()


def test_an_entry_that_is_no_file_is_passed(folder: Path) -> None:
    make_plan()
    (path,) = entries(folder, "plan")
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match="not a regular file"):
        make_plan()


# Writing


def test_no_partial_files_are_left(folder: Path) -> None:
    make_plan()
    assert not list(folder.rglob("*.part"))


def test_an_interrupted_write_keeps_the_old_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    (path,) = entries(folder, "plan")
    before = path.read_text()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rockplan.store.plan_file.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Cache(folder).put_plan(json.loads(before)["key"], plan)
    assert path.read_text() == before
    assert not list(folder.rglob("*.part"))


def test_several_processes_write_the_same_entries_at_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as processes:
        found = list(processes.map(hammer, [tmp_path] * 4, range(4)))
    assert found == [[]] * 4
    known = Cache(tmp_path).profile(KEY)
    assert known is not None and [call for call, _ in known.costs] == ["0", "1", "2", "3"]
    assert not any(entry.problem for entry in Cache(tmp_path).entries())


# Looking after it


def test_entries_say_their_inputs_and_their_faults(folder: Path) -> None:
    make_plan()
    cache = Cache(folder)
    assert {e.kind for e in cache.entries()} == set(KINDS)
    assert not any(e.problem for e in cache.entries())
    (plan,) = (e for e in cache.entries() if e.kind == "plan")
    assert plan.key["torch"] == torch.__version__
    plan.path.rename(plan.path.with_name(f"{'0' * 40}.json"))
    (folder / "plan" / f"{'1' * 40}.json").write_text("{}")
    (folder / "plan" / f"{'2' * 40}7_ab.part").write_text("{")
    problems = {e.name[0]: e.problem for e in cache.entries() if e.problem}
    assert "not that of its key" in problems["0"]
    assert "not a document" in problems["1"]
    assert "interrupted" in problems["2"]


def test_clear_deletes_nothing_but_entries(folder: Path) -> None:
    make_plan()
    own = folder / "plan" / "notes.json"
    own.write_text("mine")
    (folder / "plan" / f"{'3' * 40}.damaged").write_text("")
    target = folder.parent / "target.json"
    target.write_text("not ours")
    (folder / "plan" / f"{'4' * 40}.json").symlink_to(target)
    cache = Cache(folder)
    assert cache.clear(["plan"])[0] == 3
    assert entries(folder, "plan") == [own] and target.exists()
    assert entries(folder, "profile") and entries(folder, "options")
    count, size_bytes = cache.clear()
    assert count > 0 and size_bytes > 0
    assert entries(folder) == [own]


def test_plans_are_found_from_another_line(folder: Path) -> None:
    x = torch.randn(64, 8)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]

    class Other(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Another(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    first = rockplan.plan(Other(*layers), x, "min")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = rockplan.plan(Another(*layers), torch.randn(128, 8)[:64], "min")
    sources = [{node.source for node in plan.graph.nodes} for plan in (first, second)]
    assert sources[0] != sources[1]
    assert second.schedule == first.schedule
