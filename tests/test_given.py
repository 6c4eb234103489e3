"""Results that a forward puts into dictionaries and lists of the caller's are there after a planned
call, and gradients flow through them."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rockplan
from testing.training import QUICK, assert_equal_trees, assert_same_state
from tests.usage import count_programs

IDS = torch.arange(12).reshape(3, 4)


class Encoder(nn.Module):
    """Works as modules in a row do that hand a dictionary on."""

    def __init__(self, put: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = (
            nn.Embedding(12, 8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
        )
        self.put = put

    def forward(self, given: Any, **more: Any) -> Any:
        ids = given["ids"] if isinstance(given, dict) else given[0]
        h = self.head(torch.tanh(self.hidden(self.embedding(ids))))
        return self.put(given, h, **more)


def pooled(given: Any, h: torch.Tensor) -> Any:
    """sentence-transformers."""
    mask = given["mask"].unsqueeze(-1).float()
    given["token_embeddings"] = h
    given.update(sentence=(h * mask).sum(1) / mask.sum(1), size=h.shape[-1], all=[h, (h.detach(),)])
    return given


def nested(given: Any, h: torch.Tensor) -> Any:
    given["inner"]["h"] = h
    given["inner"]["ids"] = given["ids"]
    given["list"].append(h * 2)
    return {"out": given["inner"], "again": given["list"]}


def replaced(given: Any, h: torch.Tensor) -> Any:
    """Of schnetpack: what it reads is written over, and something goes."""
    del given["mask"]
    given["ids"] = h
    given["same"] = given
    return given


def popped(given: Any, h: torch.Tensor) -> Any:
    given["list"].insert(0, h)
    first = given.pop("inner")
    return given["list"], first["x"] * 2


def written_over(given: Any, h: torch.Tensor) -> Any:
    given["inner"]["x"] = given["inner"]["x"] + h
    return given["inner"]["x"].sum()


def listed(given: Any, h: torch.Tensor) -> Any:
    given += [h, given[0]]
    return given


def filled(given: Any, h: torch.Tensor, cache: Any) -> Any:
    cache[7] = h
    return h * 2


PUT = (pooled, nested, replaced, popped, written_over, listed, filled)


def call_of(
    put: Callable[..., Any], ids: torch.Tensor = IDS
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if put is listed:
        return ([ids],), {}
    torch.manual_seed(3)
    given = collections.OrderedDict(ids=ids, mask=(ids > 2).long())
    if put in (nested, popped, written_over):
        given |= {"inner": {"x": torch.randn(*ids.shape, 8)}, "list": [torch.randn(2)]}
    return (given if put is pooled else {**given},), {"cache": {}} if put is filled else {}


def tensors(tree: Any, seen: set[int]) -> list[torch.Tensor]:
    if id(tree) in seen or isinstance(tree, str | int):
        return []
    if isinstance(tree, torch.Tensor):
        return [tree]
    seen.add(id(tree))
    children = tree.values() if isinstance(tree, dict) else tree
    return [t for child in children for t in tensors(child, seen)]


def step(module: nn.Module, put: Callable[..., Any], ids: torch.Tensor) -> tuple[Any, ...]:
    """A step of training from all that comes back, by the result and by what was given."""
    args, kwargs = call_of(put, ids)
    result = module(*args, **kwargs)
    seen: set[int] = set()
    found = [t for t in tensors((result, args, kwargs), seen) if t.requires_grad]
    names = [[*o] for o in (*args, *kwargs.values()) if isinstance(o, dict)]
    sum(t.square().mean() for t in found).backward()
    is_same = [result is args[0], isinstance(result, dict) and result.get("out") is args[0]]
    args[0].pop("same", None) if isinstance(args[0], dict) else None
    if result is args[0]:
        result = None
    return result, args, kwargs, names, is_same, len(found)


@pytest.mark.parametrize("put", PUT)
def test_results_in_containers_of_the_caller(
    put: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Encoder(put)
    eager = copy.deepcopy(model)
    made = count_programs(monkeypatch)
    args, kwargs = call_of(put)
    before = copy.deepcopy((args, kwargs))
    planned: Any = rockplan.solve(model, args, "min", sample_kwargs=kwargs, options=QUICK)
    assert_equal_trees((args, kwargs), before, "the sample")
    for number, ids in enumerate((IDS, IDS.flip(0), IDS[:2], IDS)):
        expected, found = (step(m, put, ids) for m in (eager, planned))
        assert_equal_trees(found, expected, f"step {number}")
        assert_same_state(planned, eager, f"step {number}")
    assert len(made) <= 4
    copied = copy.deepcopy(planned)
    expected, found = (step(m, put, IDS) for m in (eager, copied))
    assert_equal_trees(found, expected, "a copy")


@dataclass
class Results:
    hidden: Any = None


class Slotted:
    __slots__ = ("hidden",)


PUT_INTO: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "UserDict": (collections.UserDict, lambda given, h: given.update(hidden=h)),
    "BatchEncoding": (transformers.BatchEncoding, lambda given, h: given.update(hidden=h)),
    "namespace": (types.SimpleNamespace, lambda given, h: setattr(given, "hidden", h)),
    "dataclass": (Results, lambda given, h: setattr(given, "hidden", h)),
    "slots": (Slotted, lambda given, h: setattr(given, "hidden", h)),
}


class Filling(nn.Module):
    def __init__(self, put: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.put = nn.Linear(4, 4), nn.Linear(4, 4), put

    def forward(self, given: Any, x: torch.Tensor) -> Any:
        h = self.a(x).sin()
        self.put(given, h)
        return self.b(h).sin()


@pytest.mark.parametrize("name", PUT_INTO)
def test_results_in_objects_of_the_caller_are_refused(name: str) -> None:
    make, put = PUT_INTO[name]
    given = make()
    with pytest.raises(rockplan.UnsupportedModel, match=r"Return what it adds there"):
        rockplan.solve(Filling(put), (given, torch.randn(3, 4)), "min")
    assert getattr(given, "hidden", None) is None
    assert not getattr(given, "data", {})


def test_what_is_refused_of_objects_says_what_works() -> None:
    """And does."""

    def counted(given: Any, h: torch.Tensor) -> Any:
        given["calls"] = given["calls"] + 1
        return h.sum()

    def deep(given: Any, h: torch.Tensor) -> Any:
        given["kept"]["h"] = h
        return h.sum()

    for put in (counted, deep):
        batch = transformers.BatchEncoding({"ids": IDS, "calls": 1, "kept": {}})
        model: Any = Encoder(put)
        model.forward = types.MethodType(forward_of_mappings, model)
        with pytest.raises(rockplan.UnsupportedModel, match=r"pass `dict\(batch\)`"):
            rockplan.solve(model, (batch,), "min")
        planned, given = rockplan.solve(model, (dict(batch),), "min", options=QUICK), dict(batch)
        planned(given).backward()
        assert given["calls"] == 2 if put is counted else "h" in given["kept"]


def forward_of_mappings(self: Any, given: Any) -> Any:
    h = self.head(torch.tanh(self.hidden(self.embedding(given["ids"]))))
    return self.put(given, h)
