"""Plans as files: shipped with the training code, checked where they are loaded, data only."""

from __future__ import annotations

import copy
import json
import os
import random
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockplan
from rockplan.oracles.simulate import simulate
from rockplan.store import documents, plan_file
from rockplan.store.plan_file import dump_plans, outline, parse_plans, write_whole
from rockplan.values.graph import as_eager
from rockplan.values.plan import Status
from rockplan.values.schedule import keep_all
from tests.planning import WITHOUT_SEARCH, hearing


class Net(nn.Module):
    """Layers with dropout, and a random generator that a plan must replay."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def net(width: int = 16) -> Net:
    torch.manual_seed(0)
    return Net(width)


def sample(batch: int = 64, width: int = 16) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, width)


@pytest.fixture(scope="module")
def planned() -> nn.Module:
    """Planned for two kinds of call."""
    module = rockplan.solve(net(), sample(), "min")
    module(sample(32)).pow(2).sum().backward()
    return module


@pytest.fixture
def path(tmp_path: Path, planned: nn.Module) -> Path:
    path = tmp_path / "net.plan.json"
    rockplan.save_plan(planned, path)
    return path


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    torch.manual_seed(2)
    module(x).pow(2).sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def test_a_loaded_plan_runs_without_measuring_or_solving(planned: nn.Module, path: Path) -> None:
    with hearing() as stages:
        loaded = rockplan.load(net(), sample(), path)
    assert loaded.plan.schedule == planned.plans[0].schedule
    assert loaded.plan.graph == planned.plans[0].graph
    assert "planned with torch" in str(loaded.plan)
    for x in (sample(), sample(32)):
        for a, b in zip(gradients(loaded, x), gradients(net(), x), strict=True):
            assert torch.equal(a, b)
    assert stages <= WITHOUT_SEARCH
    peaks = [
        rockplan.peak_live_bytes(lambda module=module: module(sample()).pow(2).sum().backward())
        for module in (loaded, planned)
    ]
    assert peaks[0] == peaks[1]


def test_the_lines_of_the_source_do_not_matter(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)
    plans = [
        rockplan.plan(model, x, "min"),
        rockplan.plan(model, x, "min"),
    ]
    assert plans[0].graph.nodes[0].source != plans[1].graph.nodes[0].source
    assert plans[0].graph_digest == plans[1].graph_digest
    rockplan.save_plan(plans[0], tmp_path / "plan.json")
    loaded = rockplan.load(model, x, tmp_path / "plan.json")
    assert loaded.plan.graph.nodes[0].source != plans[0].graph.nodes[0].source


def test_loaded_modules_are_checked_copied_and_saved(path: Path, tmp_path: Path) -> None:
    options = rockplan.Options(check=True)
    loaded = rockplan.load(net(), sample(), path, options=options)
    assert "bit for bit" in loaded.plan.checked
    assert len(copy.deepcopy(loaded).plans) == 1
    rockplan.save_plan(loaded, tmp_path / "again.json")
    (again,) = rockplan.read_plans(tmp_path / "again.json")
    assert again.schedule == loaded.plan.schedule and again.checked == loaded.plan.checked


def test_files_hold_every_kind_and_no_machine(planned: nn.Module, path: Path) -> None:
    plans = rockplan.read_plans(path)
    assert [p.graph for p in plans] == [outline(p.graph) for p in planned.plans]
    assert [str(p) for p in plans] == [str(p) for p in planned.plans]
    assert len(plans) == 2
    assert str(Path(__file__).parent) not in path.read_text()
    assert dump_plans(plans) == path.read_text()


def test_reading_needs_no_torch(path: Path) -> None:
    program = (
        "import sys, rockplan\n"
        "print(rockplan.read_plans(sys.argv[1])[0])\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == f"{rockplan.read_plans(path)[0]}\n"


def test_one_plan_or_several_can_be_saved(planned: nn.Module, tmp_path: Path) -> None:
    rockplan.save_plan(planned.plan, tmp_path / "one.json")
    rockplan.save_plan(list(planned.plans), str(tmp_path / "two.json"))
    assert len(rockplan.read_plans(tmp_path / "one.json")) == 1
    assert len(rockplan.read_plans(tmp_path / "two.json")) == 2
    for nothing in (net(), [], None, [planned]):
        with pytest.raises(rockplan.InvalidInput):
            rockplan.save_plan(nothing, tmp_path / "none.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "two.json"]


# Another model, another call, another version


def test_another_model_is_refused_with_the_difference(path: Path) -> None:
    model = net()
    model.layers[1][1] = nn.Tanh()
    with pytest.raises(rockplan.PlanMismatch, match=r"gelu.*tanh.*layers\.1\.1") as caught:
        rockplan.load(model, sample(), path)
    assert caught.value.graph_digest not in caught.value.plan_digests
    assert len(caught.value.plan_digests) == 2


@pytest.mark.parametrize("change", ["width", "dtype", "eval", "frozen", "longer"])
def test_whatever_changes_the_graph_is_refused(path: Path, change: str) -> None:
    model, x = net(), sample()
    match change:
        case "width":
            model, x = net(8), sample(64, 8)
        case "dtype":
            model, x = model.double(), x.double()
        case "eval":
            model.eval()
        case "frozen":
            model.layers[0][0].weight.requires_grad_(False)
        case "longer":
            model.layers.append(nn.Linear(16, 16))
    with pytest.raises(rockplan.PlanMismatch, match=r"rockplan\.solve"):
        rockplan.load(model, x, path)


def test_a_kind_that_the_file_lacks(path: Path) -> None:
    replanning = rockplan.load(net(), sample(), path)
    x = sample(48)
    for a, b in zip(gradients(replanning, x), gradients(net(), x), strict=True):
        assert torch.equal(a, b)
    assert replanning.plan.budget_bytes == replanning.plans[0].budget_bytes
    assert not replanning.plan.origin and replanning.plans[0].origin
    refusing = rockplan.load(net(), sample(), path, options=rockplan.Options(on_mismatch="error"))
    refusing(sample(32))
    with pytest.raises(rockplan.PlanMismatch):
        refusing(x)
    original = rockplan.load(
        net(), sample(), path, options=rockplan.Options(on_mismatch="original")
    )
    original(x)
    assert len(original.plans) == 1


def test_another_torch_with_the_same_graph_is_warned(planned: nn.Module, path: Path) -> None:
    change(path, lambda plan: plan.update(torch_version="2.99.0"))
    with pytest.warns(UserWarning, match=r"2\.99\.0"):
        loaded = rockplan.load(net(), sample(), path)
    assert "planned with torch 2.99.0, captured with torch " in loaded.plan.origin
    assert loaded.plan.schedule == planned.plans[0].schedule


# Files that are damaged, or lie


def change(path: Path, edit: Any) -> None:
    """Edit each plan of a file, as someone would who knows how the digest is made."""
    document = json.loads(path.read_text())
    del document["digest"]
    for plan in document["plans"]:
        edit(plan)
    path.write_text(documents.canonical({**document, "digest": documents.digest(document)}))


def test_a_changed_byte_is_noticed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"gelu", b"relu", 1))
    with pytest.raises(rockplan.PlanFormatError, match="digest"):
        rockplan.read_plans(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04.", b"PK\x03\x04", b"null", b"[" * 9999])
def test_foreign_files_are_refused_by_name(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(rockplan.PlanFormatError, match=r"net\.plan\.json"):
        rockplan.load(net(), sample(), path)


def test_a_missing_file_is_an_error_of_python(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        rockplan.load(net(), sample(), tmp_path / "none.json")


def first_event(plan: dict[str, Any]) -> None:
    del plan["events"][0]
    plan["forward_length"] -= 1


def test_a_smallest_budget_cut_short_is_readable(tmp_path: Path) -> None:
    """No plan within as many bytes is faster, but with more time they might be fewer."""
    late = rockplan.Options(cache=False, time_limit_s=0.0, without=("eviction", "blocks"))
    planned = rockplan.solve(net(), sample(), "min", options=late)
    certificate = planned.plan.certificate
    assert certificate.status is Status.TIME_LIMIT
    assert certificate.bound_ns == certificate.objective_ns
    rockplan.save_plan(planned, tmp_path / "plan.json")
    assert rockplan.read_plans(tmp_path / "plan.json")[0].certificate == certificate


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (first_event, "not legal"),
        (lambda p: p.update(peak_bytes=p["peak_bytes"] - 1), "other bytes"),
        (lambda p: p.update(time_ns=p["time_ns"] - 1), "other bytes or time"),
        (lambda p: p.update(budget_bytes=1), "beyond the budget"),
        (lambda p: p["certificate"].update(bound_ns=2**60), "certificate"),
        (lambda p: p["certificate"].update(status="perfect"), "perfect"),
        (lambda p: p["certificate"].update(status="optimal", bound_ns=0), "status"),
        (lambda p: p["certificate"].update(status="feasible", bound_ns=p["time_ns"]), "status"),
        (lambda p: p["events"].append(["exec", 0]), "neither"),
        (lambda p: p["events"].append(["compute", 10**6]), "beyond the last"),
        (lambda p: p["graph"]["nodes"][0].update(reads=[-1]), "63 bits"),
        (lambda p: p["graph"]["nodes"].reverse(), "after a backward"),
        (lambda p: p["graph"]["nodes"][0].update(random=1), "true or false"),
    ],
)
def test_a_plan_that_does_not_hold_is_refused(path: Path, edit: Any, words: str) -> None:
    change(path, edit)
    with pytest.raises(rockplan.PlanFormatError, match=words):
        rockplan.read_plans(path)


def test_plans_with_stolen_digests_are_refused(
    planned: nn.Module, path: Path, tmp_path: Path
) -> None:
    other = rockplan.plan(nn.Linear(16, 16), sample(), "min")
    rockplan.save_plan(other, path)
    change(path, lambda plan: plan.update(graph_digest=planned.plans[0].graph_digest))
    with pytest.raises(rockplan.PlanMismatch):
        rockplan.load(net(), sample(), path)


def shrunk(plan: dict[str, Any]) -> None:
    """No storage takes a byte, and all that is promised follows from that."""
    for data in plan["graph"]["data"]:
        data[2] = 0
    graph = plan_file._read_graph(plan["graph"])
    found = simulate(graph, plan_file._read_schedule(plan, graph))
    executed = as_eager(graph)
    kept = simulate(executed, keep_all(executed))
    plan.update(peak_bytes=found.peak_bytes, saved_bytes=found.saved_bytes)
    plan.update(eager_peak_bytes=kept.peak_bytes)


def test_storages_smaller_than_the_models_are_refused(path: Path) -> None:
    change(path, shrunk)
    assert rockplan.read_plans(path)
    with pytest.raises(rockplan.PlanFormatError, match=r"states 0 bytes for .*rockplan\.solve"):
        rockplan.load(net(), sample(), path)


def test_random_edits_are_refused_or_harmless(planned: nn.Module) -> None:
    """Whatever is changed, what is read is a legal plan with the bytes and time that it states."""
    text = dump_plans([planned.plans[0]])
    values = [None, True, -1, 0, 1, 10**30, "x", "../../x", [], [0], {}, {"a": 1}]
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        document = json.loads(text)
        del document["digest"]
        spot: Any = document["plans"]
        while True:
            keys = list(spot) if isinstance(spot, dict) else range(len(spot))
            key = draw.choice(list(keys))
            if not (isinstance(spot[key], dict | list) and spot[key]) or draw.random() < 0.1:
                break
            spot = spot[key]
        spot[key] = draw.choice(values)
        changed = documents.canonical({**document, "digest": documents.digest(document)})
        try:
            parse_plans(changed)
        except rockplan.PlanFormatError:
            refused += 1
    assert refused > 150


# Writing


def test_an_interrupted_save_keeps_the_old_file(
    planned: nn.Module, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_text()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rockplan.store.plan_file.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rockplan.save_plan(planned.plan, path)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_saved_files_have_ordinary_permissions(path: Path) -> None:
    beside = path.with_name("beside")
    beside.touch()
    assert os.stat(path).st_mode == os.stat(beside).st_mode


def test_nothing_is_written_into_an_absent_folder(planned: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        rockplan.save_plan(planned.plan, tmp_path / "absent" / "plan.json")


def test_loading_is_quiet_where_all_agrees(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rockplan.load(net(), sample(), path)


def test_a_path_without_access_is_named_as_given(planned: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(rockplan.InvalidInput, match="names no file"):
        rockplan.save_plan(planned, "")
    with pytest.raises(IsADirectoryError) as caught:
        rockplan.save_plan(planned, tmp_path)
    assert caught.value.filename == str(tmp_path) and ".part" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, b"", "a\0b", b"a\0b"])
def test_what_is_no_path_is_invalid_input(planned: nn.Module, path: Any) -> None:
    words = "names no file" if path == b"" else "path"
    with pytest.raises(rockplan.InvalidInput, match=words):
        rockplan.save_plan(planned, path)
    if path != b"":
        with pytest.raises(rockplan.InvalidInput, match=words):
            rockplan.load(net(), sample(), path)


def test_writing_keeps_links_and_permissions_and_fills_pipes(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo() and {p.name for p in tmp_path.iterdir()} == {"target", "link", "pipe"}
