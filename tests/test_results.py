"""Fake results that are remembered are those that FakeTensorMode gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from rockplan.graph_builder.operators import facts, layouts
from rockplan.graph_builder.recorded.results import Results

aten = torch.ops.aten
Arguments = tuple[Any, ...]

CALLS: dict[str, tuple[OpOverload, Callable[[], Arguments]]] = {
    "new": (aten.mm.default, lambda: (torch.randn(3, 4), torch.randn(4, 5))),
    "promoted": (aten.mul.Tensor, lambda: (torch.ones(3, dtype=torch.int32), 1.0)),
    "several": (aten.native_layer_norm.default, lambda: (torch.randn(2, 8), [8], None, None, 1e-5)),
    "view": (aten.transpose.int, lambda: (torch.randn(3, 4, 5)[1:], 0, 2)),
    "views": (aten.split.Tensor, lambda: (torch.randn(6, 4), 2)),
    "unsafe view": (aten._unsafe_view.default, lambda: (torch.randn(6, 4), [4, 6])),
    "in place": (aten.add_.Tensor, lambda: (torch.randn(3), torch.randn(3))),
    "no elements": (aten.mm.default, lambda: (torch.randn(0, 4), torch.randn(4, 5))),
    "some": (
        aten.native_layer_norm_backward.default,
        lambda: (
            *(torch.randn(2, 8), torch.randn(2, 8), [8], torch.randn(2, 1), torch.randn(2, 1)),
            *(torch.randn(8), None, [True, True, False]),
        ),
    ),
}

WORKED_OUT = ("promoted", "view", "views", "unsafe view", "new", "no elements")


def described(result: Any, given: list[torch.Tensor]) -> list[object]:
    """Of each tensor: what it looks like, which argument it is, whose storage it has."""
    leaves = result if isinstance(result, tuple | list) else [result]
    return [
        leaf
        if leaf is None
        else (
            *(tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device),
            leaf.untyped_storage().nbytes(),
            [leaf is t for t in given],
            [leaf.untyped_storage()._cdata == t.untyped_storage()._cdata for t in given],
        )
        for leaf in leaves
    ]


@pytest.mark.parametrize("name", CALLS)
def test_remembered_results_are_the_fake_modes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, arguments = CALLS[name]
    asked: list[OpOverload] = []
    fake_result = layouts.fake_result

    def counted(operator: OpOverload, args: Arguments, kwargs: dict[str, Any]) -> Any:
        asked.append(operator)
        return fake_result(operator, args, kwargs)

    monkeypatch.setattr(layouts, "fake_result", counted)
    with FakeTensorMode() as mode:
        results = Results(mode)
        found = []
        for _ in range(3):
            args = arguments()
            given = list(facts.tensors(args))
            result = results.of(operator, args, {})
            found.append(described(result, given))
            expected = operator(*args)
            assert type(result) is type(expected)
            assert found[-1] == described(expected, given)
    assert found[0] == found[1] == found[2]
    # Views, products, and what works element by element are worked out without the fake mode.
    assert len(asked) == (0 if name in WORKED_OUT else 1)


def _matrix(layout: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    made = {
        "plain": lambda: torch.ones(rows, columns),
        "transposed": lambda: torch.ones(columns, rows).t(),
        "sliced": lambda: torch.ones(2 * rows, columns + 1)[::2, 1:],
        "expanded": lambda: torch.ones(1, columns).expand(rows, columns),
    }
    return made[layout]().to(dtype)


LAYOUTS = ("plain", "transposed", "sliced", "expanded")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


@pytest.mark.parametrize("sizes", [(3, 4, 5), (1, 4, 1), (2, 1, 5), (0, 4, 5), (3, 0, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_as_their_kernels_make_them(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    rows, inner, columns = sizes
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        a, b = _matrix(left, rows, inner, dtype), _matrix(right, inner, columns, dtype)
        bias, batches = torch.ones(columns, dtype=dtype), (a[None], b[None].expand(1, -1, -1))
        calls: list[tuple[OpOverload, Arguments]] = [
            (aten.mm.default, (a, b)),
            (aten.addmm.default, (bias, a, b)),
            (aten.addmm.default, (torch.ones(columns, rows, dtype=dtype).t(), a, b)),
            (aten.bmm.default, batches),
            (aten.baddbmm.default, (bias, *batches)),
        ]
        for operator, args in calls:
            real = operator(*args)
            with FakeTensorMode() as mode:
                fakes = tuple(mode.from_tensor(t) for t in args)
                made = Results(mode).of(operator, fakes, {})
            assert described(made, list(fakes)) == described(real, list(args))


def test_products_that_kernels_refuse_are_refused() -> None:
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="reduction dim"):
        Results(mode).of(aten.mm.default, (torch.ones(3, 4), torch.ones(3, 4)), {})


def test_what_differs_materially_is_another_call() -> None:
    with FakeTensorMode() as mode:
        results = Results(mode)
        ones = torch.ones(3, dtype=torch.int32)
        dtypes = [results.of(aten.mul.Tensor, (ones, x), {}).dtype for x in (1, 1.0, 1, 1.0)]
        assert dtypes == [torch.int32, torch.float32] * 2
        flat = torch.randn(24)
        kinds = [flat.view(4, 6), flat.view(4, 6).t().contiguous().t(), flat.view(4, 6)]
        strides = [results.of(aten.relu.default, (x,), {}).stride() for x in kinds]
        assert strides == [torch.relu(x).stride() for x in kinds]
        assert len(set(strides)) == 2


def test_sharing_of_arguments_is_part_of_a_call() -> None:
    with FakeTensorMode() as mode:
        results = Results(mode)
        for _ in range(2):
            base = torch.randn(4)
            for other in (base, base[:], torch.randn(4)):
                assert results.of(aten.add_.Tensor, (base, other), {}) is base
                assert results.of(aten.copy_.default, (other, base), {}) is other


def test_values_and_their_shapes_are_not_remembered() -> None:
    assert not facts.follows_shapes(aten.nonzero.default)
    assert not facts.follows_shapes(aten._local_scalar_dense.default)
    assert not facts.follows_shapes(aten.squeeze_.dim)
    assert not facts.follows_shapes(aten.lift_fresh.default)
    assert facts.follows_shapes(aten.bernoulli_.float)
