"""Operators whose kernels call others that autocast casts for, where nobody sees it.

takes: the name of such an operator. returns: an operator that calls it under autocast as it is now:
a plan runs without autocast, since all other casts are in its graph. guarantees: its name says all,
so that a plan of another process finds it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from rockplan.errors import UnsupportedModel
from rockplan.python_state.autocast import DEVICE_TYPES, Autocast, autocast_state, under_autocast

_LIBRARY = "rockplan_autocast_"
_UNTRIED = "untried"


def as_called(operator: OpOverload, kinds: Collection[str], is_tried: bool) -> OpOverload:
    """Return what calls `operator` under autocast as it is now ('rockplan_autocast_bfloat16_none.
    l12_bitsandbytes_gemm_4bit.default', with the dtype of each of DEVICE_TYPES); `operator` itself
    where that is off on all devices of `kinds`. is_tried: planning runs it to see what it makes;
    else each run raises UnsupportedModel for other dtypes than its rule for fake tensors says."""
    dtypes = autocast_state().dtypes
    if not any(d for d, kind in zip(dtypes, DEVICE_TYPES, strict=True) if kind in kinds):
        return operator
    texts = [str(dtype).rpartition(".")[2].lower() for dtype in dtypes]
    state = "_".join([*texts, *([] if is_tried else [_UNTRIED])])
    library, packet, overload = str(operator).split(".")
    return called(f"{_LIBRARY}{state}.l{len(library)}_{library}_{packet}.{overload}")


def inner_name(name: str) -> str:
    """Return the name of the operator that the one called `name` calls; `name` of any other."""
    library, packet, overload = name.split(".")
    if not library.startswith(_LIBRARY):
        return name
    size, _, rest = packet.removeprefix("l").partition("_")
    return f"{rest[: int(size)]}.{rest[int(size) + 1 :]}.{overload}"


@functools.cache
def called(name: str) -> OpOverload:
    """Return the operator of this name; one of ours is defined."""
    library, packet, overload = name.split(".")
    if library.startswith(_LIBRARY):
        _define(name, called(inner_name(name)))
    operator = getattr(getattr(getattr(torch.ops, library), packet), overload)
    assert isinstance(operator, OpOverload)
    return operator


def _define(name: str, inner: OpOverload) -> None:
    library, packet, overload = name.split(".")
    kinds = library.removeprefix(_LIBRARY).split("_")
    dtypes = (None if k == "none" else getattr(torch, k) for k in kinds if k != _UNTRIED)
    state = Autocast(tuple(dtypes), cached=True)

    def fake(*args: Any, **kwargs: Any) -> Any:
        with under_autocast(state):
            return inner(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = fake(*args, **kwargs)
        on_meta = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        told, made = map(_dtypes, (fake(*on_meta[0], **on_meta[1]), result))
        if told != made:
            raise UnsupportedModel(
                f"{inner} returns {', '.join(made)} under autocast, and was planned as its rule "
                f"for fake tensors says ({', '.join(told)}): say that it has no side effects, and "
                f"it is tried (rockplan.pure('{inner._schema.name}')), or call it under "
                "torch.autocast(..., enabled=False)"
            )
        return result

    short = packet if overload == "default" else f"{packet}.{overload}"
    opened = _opened(library)
    opened.define(short + str(inner._schema).removeprefix(inner.name()), tags=inner.tags)
    is_compared = _UNTRIED in kinds and inner._schema.returns
    opened.impl(short, run if is_compared else fake, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library}::{short}", fake, lib=opened)


def _dtypes(result: Any) -> list[str]:
    return [str(t.dtype) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


@functools.cache
def _opened(library: str) -> torch.library.Library:
    return torch.library.Library(library, "FRAGMENT")
