"""Unmade results: stand-ins in the result of a planned call for leaves that the plan does not make.

takes: an `Unmade`. returns: a tensor of its shape, dtype and device, without memory. guarantees:
what trainers do to a result that nobody reads (casts, moves, `detach`, copies) works; whatever
needs a value raises ResultNotMade, with a remedy; what takes its address in C++, PyTorch's error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from rockplan.errors import ResultNotMade
from rockplan.graph_builder.recorded.specs import dtype_of
from rockplan.values.interface import Unmade

_aten = torch.ops.aten

# Operators whose result has the same values as the argument.
_PASSES = frozenset(
    [
        _aten._to_copy.default,
        _aten.alias.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.lift_fresh.default,
    ]
)


class UnmadeResult(torch.Tensor):
    """A tensor without memory in place of a leaf of a result. It requires no gradient."""

    _of: Unmade
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, of: Unmade, dtype: torch.dtype, device: torch.device) -> UnmadeResult:
        made: UnmadeResult = torch.Tensor._make_wrapper_subclass(
            cls, of.spec.shape, strides=of.spec.stride, dtype=dtype, device=device
        )
        made._of = of
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return a new stand-in for operators that keep all values, in the dtype and on the device
        asked for. Raises ResultNotMade for all other operators."""
        first, options = args[0] if args else None, kwargs or {}
        if func in _PASSES and isinstance(first, UnmadeResult):
            dtype = options.get("dtype") or first.dtype
            return cls(first._of, dtype, options.get("device") or first.device)
        leaves = pytree.tree_leaves((args, options))
        return next(leaf for leaf in leaves if isinstance(leaf, UnmadeResult))._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ResultNotMade(f"{self._text()} {_REMEDY}")

    def _text(self) -> str:
        return (
            f"the leaf {self._of.name} of this result (shape {tuple(self.shape)}, {self.dtype}) "
            "was not made: its module is planned with only_loss, for steps that use nothing but "
            "the loss."
        )

    # Methods that read values without going through the dispatcher.
    numpy = tolist = item = data_ptr = storage = untyped_storage = apply_ = _refuse
    backward = retain_grad = register_hook = _refuse
    __array__ = __dlpack__ = __reduce_ex__ = _refuse
    __bool__ = __int__ = __float__ = __complex__ = __index__ = _refuse

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self._text()}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach()


_REMEDY = (
    "It is there in evaluation (model.eval() or torch.no_grad()); to read it in training as well, "
    "plan without only_loss: where it is let go before backward, Options(released=...) leaves its "
    "memory to the plan"
)


def stand_in(of: Unmade) -> UnmadeResult:
    return UnmadeResult(of, dtype_of(of.spec), torch.device(of.spec.device))
