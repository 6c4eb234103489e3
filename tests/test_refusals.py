"""Refusals are rows: each is printed in docs/limits.md, and each names the test that shows it."""

from __future__ import annotations

import copy
import functools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from rockplan.errors import CaptureError, InvalidInput, RockplanError
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.operators.rows import ROWS as OPERATORS
from rockplan.graph_builder.recorded.results import Results
from rockplan.graph_builder.tracing.addresses import of_address
from rockplan.graph_builder.tracing.outputs import foreign_gradient
from rockplan.graph_builder.tracing.refusals import (
    NAMED,
    REFUSALS,
    Refusal,
    When,
    refuse,
)

TESTS = Path(__file__).parent
LIMITS = TESTS.parent / "docs" / "limits.md"
SHOWN_BY = {
    "test_modes.test_function_modes_are_refused_by_name": "function mode",
    "test_bad_input.test_torchscript_modules_are_refused": "TorchScript",
    "test_bad_input.test_refused_with_cause_and_remedy": (
        "lazy; hook on a submodule; nested tensor that is given; class of tensors; generator; "
        "values of a function of PyTorch; cross entropy; autocast inside; other memory; seeds; "
        "value; shape; kept tensor; opaque result; key-value cache; result with "
        "a gradient of its own; nothing to differentiate; detached; foreign parameter; "
        "requires_grad; backward in the forward"
    ),
    "test_bad_input.test_models_without_memory_are_refused_everywhere": "meta",
    "test_distributed.test_distributed_data_parallel": "shard",
    "test_usage.test_hooks_on_all_modules_are_refused": "hook on all modules",
    "test_usage.test_cached_parametrizations": "cached parametrization",
    "test_distributed.test_tensor_parallel": "distributed tensor; draw of a distributed tensor",
    "test_distributed.test_forwards_that_exchange_data": (
        "context parallel; objects between processes"
    ),
    "test_python_state.test_a_fake_tensor_that_is_left_is_found": "leftover",
    "test_refusals.test_an_operator_of_whose_result_nothing_is_known": "unknown result",
    "test_foreign_kernels.test_an_operator_whose_result_is_not_described": "no rule",
    "test_bad_input.test_changing_an_inputs_shape_in_place_is_refused": "shape in place",
    "test_cuda.test_recurrent_layers_of_cudnn_are_refused": "recurrent layer of cuDNN",
    "test_bad_input.test_writing_to_an_input_with_history_is_refused": "argument in place",
    "test_bad_input.test_what_is_changed_inside_a_checkpoint_is_refused": "write in a checkpoint",
    "test_bad_input.test_arrays_of_tensors_written_to_are_refused": "memory of an array",
    "test_refusals_followed.test_what_a_row_says_to_do_is_planned": "moved module",
    "test_bad_input.test_draws_from_what_the_module_holds_are_refused": (
        "iterator of the module; generator of Python"
    ),
    "test_foreign_kernels.test_kernels_are_refused_by_name": "unwritten memory; address",
    "test_refusals.test_addresses_that_no_user_code_asks_for": "address by a library",
    "test_triton.test_refused_by_name": (
        "writes of a Triton kernel; views for a Triton kernel; read of what was overwritten; "
        "argument of a Triton kernel"
    ),
    "test_opaque.test_refused_by_name": (
        "subclass of an opaque function; argument of an opaque function; other call of an "
        "opaque function; run of an opaque function; write of an opaque function; draws of an "
        "opaque function; view by an opaque function"
    ),
    "test_python_state.test_is_planned_as_eager_or_refused": "kept change",
    "test_refusals.test_parameters_that_are_parts_of_one": "flat parameters",
    "test_bad_input.test_gradients_that_depend_on_values": "gradient by values",
    "test_refusals_followed.test_what_keeps_a_tensor_is_planned_afterwards": "another next call",
    "test_bad_input.test_dictionaries_that_checkpoints_share_are_refused": "state of a checkpoint",
    "test_bad_input.test_what_is_made_of_data_and_written": "fresh constant",
}
"""Test -> names of the refusals that it shows, beside those of `CASES`."""
BEGIN, END = "<!-- printed by tests/test_refusals.py -->\n", "<!-- end -->\n"


def as_markdown() -> str:
    """Return all refusals as a Markdown text, as docs/limits.md has it: by stage, then those of
    operators."""
    lines: list[str] = []
    for when in When:
        lines += [f"### {when}", ""]
        lines += [_item(row.says, row.remedy) for row in REFUSALS if row.when is when]
        lines.append("")
    lines += ["### Operators that are refused by name", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in OPERATORS:
        if row.refused_because:
            called = row.called or row.name.removeprefix("*.")
            names = reasons.setdefault((row.refused_because, row.instead), [])
            names += [] if f"`{called}`" in names else [f"`{called}`"]
    for (because, instead), names in reasons.items():
        of_each = "each of " if len(names) > 1 else ""
        lines.append(_item(f"{of_each}{', '.join(names)} {because}", instead))
    return "\n".join(lines).rstrip() + "\n"


def _item(says: str, remedy: str) -> str:
    """Return a message and its remedy as an item of a Markdown list, with '...' for places to fill
    in; without remedy the message alone."""
    said, todo = (re.sub(r"('?\{\w+\}'?)+", "...", text) for text in (says, remedy))
    return textwrap.fill(
        f"- {said}{f' - *{todo}*' if todo else ''}",
        width=100,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def test_limits_has_the_list_as_it_is_printed() -> None:
    text = LIMITS.read_text()
    _, listed = text.split(BEGIN)
    printed, rest = listed.split(END)
    assert not rest.strip()
    assert printed.strip() == as_markdown().strip()


def test_names_are_unique() -> None:
    assert len(NAMED) == len(REFUSALS)


def test_each_is_shown_by_a_test() -> None:
    for test in SHOWN_BY:
        file, function = test.split(".")
        assert f"def {function}(" in (TESTS / f"{file}.py").read_text()
    shown = [name for names in SHOWN_BY.values() for name in names.split("; ")]
    assert {*shown, *CASES} == NAMED.keys()


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.name)
def test_each_makes_an_error_of_ours(row: Refusal) -> None:
    places = set(re.findall(r"\{(\w+)\}", row.says + row.remedy))
    found = {place: f"<{place}>" for place in places}
    error = row.error(None, **found)
    assert isinstance(error, RockplanError)
    assert all(text in str(error) for text in found.values())
    if isinstance(error, CaptureError):
        at = row.at("layer", "file.py:3", **found)
        assert str(at) == f"in module 'layer' at file.py:3: {error}"


def test_each_is_raised_somewhere() -> None:
    """By its name, unless a rule finds it."""
    folder = TESTS.parent / "rockplan"
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    for row in REFUSALS:
        names = text.count(f'"{row.name}"') + text.count(f"'{row.name}'")
        assert row.rule is not None or names > 1, row.name


def test_what_is_found_may_have_own_remedies() -> None:
    row = NAMED["value"]
    assert row.text(who="a", what="b").endswith(f". {row.remedy}")
    assert row.text(who="a", what="b", remedy="Call it later").endswith("planned. Call it later")


def test_the_first_rule_that_finds_something_says_so() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    refuse(When.RESULT, module)
    with pytest.raises(InvalidInput, match=r"^1.weight is lazy: run the module once"):
        refuse(When.MODULE, module)
    with pytest.raises(InvalidInput, match=r"^0.weight is on the meta device"):
        refuse(When.MODULE, nn.Sequential(nn.Linear(2, 2, device="meta"), nn.LazyLinear(2))[:1])
    refuse(When.MODULE, nn.Sequential(nn.Linear(2, 2)))
    assert torch.is_grad_enabled()


class Does(nn.Module):
    """What `step` makes of a hidden tensor and the argument."""

    def __init__(self, step: Callable[[Any, torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step
        self.register_buffer("kept", torch.zeros(3, 4))
        self.flag, self.table = 0, None

    def forward(self, x: Any) -> Any:
        first = x if isinstance(x, torch.Tensor) else next(t for t in x if t is not None)
        return self.step(self, self.linear(first), x)


def hooked(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    h.register_hook(lambda gradient: gradient)
    return h


def nested(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([h, h], layout=torch.jagged).values()


def sparse(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return torch.sparse.mm(h.to_sparse(), module.linear.weight)


def noted(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    h.note = 1  # type: ignore[attr-defined]
    return h


def into_buffer(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    module.kept.copy_(h)
    return h * 2


TABLE = torch.zeros(3, 4)


def into_table(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    TABLE.copy_(h)
    return h * 2


def asked(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return h if x._version == 0 else h * 2


def compared(module: Any, h: torch.Tensor, x: Any) -> torch.Tensor:
    return h if x is module.linear.last else h * 2


class Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def changed_since(module: Any, h: torch.Tensor, x: Any) -> Any:
    alias = Alias.apply(h)
    h.add_(1)
    return alias


@functools.cache
def remembered(h: torch.Tensor) -> torch.Tensor:
    return h * 2


SAMPLE = torch.randn(3, 4)
MARKED = torch.randn(3, 4)
MARKED.fake_device = "cpu"  # type: ignore[attr-defined]
CASES: dict[str, tuple[Callable[[Any, torch.Tensor, Any], Any], Any]] = {
    "hook on a tensor": (hooked, SAMPLE),
    "nested tensor": (nested, SAMPLE),
    "layout": (sparse, SAMPLE),
    "attribute of a result": (noted, SAMPLE),
    "attribute of a fake tensor": (lambda module, h, x: h, MARKED),
    "write of what has a gradient": (into_buffer, SAMPLE),
    "write into another tensor": (into_table, SAMPLE),
    "question": (asked, SAMPLE),
    "kept argument": (compared, SAMPLE),
    "kept in a cache": (lambda module, h, x: remembered(h), SAMPLE),
    "result that is an argument": (
        lambda module, h, x: (h, x[0]), torch.randn(3, 4, requires_grad=True)
    ),
    "result without a gradient": (changed_since, SAMPLE),
    "iterator as an argument": (lambda module, h, x: h, iter([SAMPLE])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refusals_say_the_words_of_their_rows(name: str) -> None:
    step, x = CASES[name]
    module = Does(step)
    if name == "kept argument":
        module.linear.last = x  # type: ignore[assignment]
    with pytest.raises(CaptureError) as info:
        capture(module, (x,), {})
    words = re.split(r"\{\w+\}", NAMED[name].says)
    if name == "nested tensor":
        # Where the process has made others before, an operator says it instead of the forward.
        words = ["a nested tensor, whose sizes a plan cannot follow"]
    assert all(part in str(info.value) for part in words)
    assert re.split(r"\{\w+\}", NAMED[name].remedy)[0] in str(info.value)


@pytest.mark.parametrize("of", ["weight", "activation"])
@pytest.mark.parametrize(
    "ask",
    [
        copy.copy,
        copy.deepcopy,
        lambda t: t.as_subclass(torch.Tensor),
        lambda t: t * len(dir(t)),
        lambda t: t * len(vars(t)),
        lambda t: t * t.is_pinned(),
        lambda t: t * t.is_shared(),
        lambda t: t * t._is_view(),
    ],
)
def test_questions_that_no_plan_answers(ask: Callable[[torch.Tensor], Any], of: str) -> None:
    module = Does(lambda module, h, x: h + ask(h if of == "activation" else module.linear.weight))
    with pytest.raises(CaptureError, match="the forward asks .* for `") as info:
        capture(module, (torch.ones(4, 4),), {})
    # The user's line, not one of Python's copy.py.
    assert f" at {__file__}:" in str(info.value)
    assert type(module.linear.weight) is nn.Parameter


def test_an_operator_of_whose_result_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(results: Results, operator: Any, *_: Any) -> NoReturn:
        raise UnsupportedOperatorException(operator)

    monkeypatch.setattr(Results, "of", fails)
    with pytest.raises(CaptureError, match=r"what aten\.t\.default returns is not known before"):
        capture(nn.Linear(2, 2), (torch.randn(1, 2),), {})


def test_addresses_that_no_user_code_asks_for() -> None:
    assert of_address(iter(())) == NAMED["address by a library"].text(kernel="foreign code")


def test_parameters_that_are_parts_of_one() -> None:
    flat = nn.Parameter(torch.zeros(2))
    assert "neither a parameter" in str(foreign_gradient(flat))
    flat._is_flat_param = True  # type: ignore[attr-defined]
    assert str(foreign_gradient(flat)) == NAMED["flat parameters"].text()
