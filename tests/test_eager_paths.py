"""Patches of PyTorch and libraries: each holds in one thread, and is gone afterwards."""

from __future__ import annotations

import copy
import sys
import threading
import types
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rockplan
from rockplan.graph_builder.tracing.eager_paths import (
    PATCHES,
    WARNING_OF_COMPILED_MODULES,
)
from rockplan.graph_builder.tracing.patches import Patch, patched
from testing.training import assert_same_tensor
from tests.following import OPTIONS

ROWS = [*PATCHES, WARNING_OF_COMPILED_MODULES]
PRESENT = [row for row in ROWS if not isinstance(row.owner, str)]


def named(row: Patch) -> str:
    return f"{getattr(row.owner, '__name__', row.owner)}.{row.name}"


class Refused(Exception):  # noqa: N818
    """What a replacement refuses."""


def refuse(message: str) -> NoReturn:
    raise Refused(message)


def test_each_row_is_there_once_and_says_why() -> None:
    names = [named(row) for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(row.why for row in ROWS)


def test_a_patch_is_gone_afterwards() -> None:
    for row in PRESENT:
        own, before = dict(vars(row.owner)), getattr(row.owner, row.name)
        with pytest.raises(KeyError), patched([row]):
            assert getattr(row.owner, row.name) is not before
            raise KeyError
        assert getattr(row.owner, row.name) is before
        assert dict(vars(row.owner)) == own


@pytest.mark.parametrize("row", [r for r in PRESENT if r.name.endswith("seed")], ids=named)
def test_other_threads_call_what_it_was(row: Patch) -> None:
    done: list[Any] = []
    state = torch.get_rng_state()
    with patched([row], types.SimpleNamespace(refuse_here=refuse)):
        function = getattr(row.owner, row.name)
        args = (3,) if "manual" in row.name else ()
        thread = threading.Thread(target=lambda: done.append(function(*args)))
        thread.start()
        thread.join()
        with pytest.raises(Refused, match="seeds torch's generator"):
            function(*args)
    torch.set_rng_state(state)
    assert len(done) == 1


def test_files_of_a_package_that_have_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers.one", "transformers.two", "others.three"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    one, three = sys.modules["transformers.one"], sys.modules["others.three"]
    one.is_fake_tensor = three.is_fake_tensor = lambda x: True  # type: ignore[attr-defined]
    (row,) = (row for row in PATCHES if row.owner == "transformers")
    with patched([row]):
        assert not one.is_fake_tensor(1)
        assert three.is_fake_tensor(1)
        assert not hasattr(sys.modules["transformers.two"], "is_fake_tensor")
    assert one.is_fake_tensor(1)


def test_pooling_is_that_of_eager_execution() -> None:
    (row,) = (row for row in PATCHES if row.name == "max_pool1d")
    x = torch.randn(2, 16, 4)
    expected = torch.max_pool1d(x.transpose(1, 2), 2).stride()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert torch.max_pool1d(x.transpose(1, 2), 2).stride() != expected
        with patched([row]):
            assert torch.max_pool1d(x.transpose(1, 2), 2).stride() == expected


class Copying(nn.Module):
    """Copies what it keeps, in which tensors may be one or share memory."""

    def __init__(self, *kept: Tensor) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(4, 4), {"scales": [*kept]}

    def forward(self, x: Tensor) -> Tensor:
        copied = copy.deepcopy(self.state)["scales"]
        copied[0].mul_(2)
        return sum(copied, self.layer(x))


def test_copies_of_kept_tensors_are_recorded() -> None:
    scale = torch.arange(4.0)
    for kept in ([scale], [scale, scale], [scale, torch.ones(3, 4), torch.tensor(2.0)]):
        model = Copying(*kept)
        planned = rockplan.solve(model, torch.ones(3, 4), "100%", options=OPTIONS)
        for x in torch.randn(2, 3, 4):
            assert_same_tensor(planned(x), model(x), "result")
        assert_same_tensor(scale, torch.arange(4.0), "kept")


@pytest.mark.parametrize(
    "other", [lambda t: t[:1], lambda t: t.view(1, 4), lambda t: t.expand(3, 4)]
)
def test_copies_that_share_memory_are_refused(other: Any) -> None:
    scale = torch.arange(4.0)
    for kept in ([scale, other(scale)], [other(scale), scale]):
        with pytest.raises(rockplan.CaptureError, match="exchanges the storage"):
            rockplan.solve(Copying(*kept), torch.ones(3, 4), "100%", options=OPTIONS)


def test_files_that_are_loaded_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class File(types.ModuleType):
        @property
        def __dict__(self) -> Any:  # what another thread does while names are looked up
            monkeypatch.setitem(sys.modules, "a_package.later", types.ModuleType("later"))
            return {"ask": None}

    found = File("a_package")
    monkeypatch.setitem(sys.modules, "a_package", found)
    assert Patch("a_package", "ask", lambda before, _: before, "").owners() == [found]
