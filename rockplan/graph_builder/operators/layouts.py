"""Fake results: results of calls on fake tensors, where PyTorch's own rules differ from kernels.

takes: an operator and its arguments, fake tensors. returns: the result (`fake_result`), and the
strides and dtypes of the real call (`Layouts`). guarantees: operators with side effects are never
called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.rows import Effect, ShapeRule
from rockplan.graph_builder.operators.symbols import are_known, hints, is_unknown, known_number
from rockplan.values.sizes import text_of

# Functions of the base class, as in `recorded.run.tensor_spec`.
_OF = torch._C.TensorBase


def fake_result(operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> Any:
    """Return the result of a call on fake tensors, with several of PyTorch's shape rules
    corrected, and one that is missing.

    Gradients that are not wanted (`output_mask`) are None, as kernels return them; some rules make
    them anyway. The rule of grouped matrix products requires what CUDA kernels need (bfloat16),
    also on other devices. The rules of operators that copy a whole storage make only the elements
    that the argument shows, those of some losses, bags and columns only what is left of the
    storage. The rule of views takes seconds for symbols that divide one another.
    """
    rule, effect = facts.facts_of(operator).shape_rule, facts.facts_of(operator).effect
    if effect is Effect.WAITS:
        return args[0]
    if effect and not operator._schema.returns and not operator._schema.is_mutable:
        return None  # as the real call does; it may have no rule for fake tensors
    if rule is ShapeRule.LIKE_SECOND:
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)
    if rule is ShapeRule.OF_DENSE and (dense := _dense_view(*args)) is not None:
        return dense
    if rule is ShapeRule.GROUPED_PRODUCT:
        return _grouped_product(operator, args, kwargs)
    if rule is ShapeRule.STEPS and isinstance(args[2], torch.SymInt):
        return operator(0.0, 1.0, 1, **kwargs).new_empty(args[2:])
    if rule is ShapeRule.INPUT_SIZE:
        sizes: Any = facts.given(operator, "input_size", args, kwargs)
        enlarged: Any = facts.given(operator, "output_size", args, kwargs)
        if not are_known((*sizes, *enlarged)):  # the rule takes no symbols
            return torch.empty(tuple(sizes), dtype=args[0].dtype, device=args[0].device)
    result = operator(*args, **kwargs)
    if rule is ShapeRule.STORAGE_AS_LARGE:
        # If the argument repeats elements, so that the result has other strides, only elements are
        # copied.
        if result.stride() != args[0].stride():
            return result
        return _in_storage_of(args[0].untyped_storage().nbytes() // result.itemsize, result)
    if rule is ShapeRule.STORAGE_OF_FIRST and result.numel() < args[0].numel():
        return _in_storage_of(args[0].numel(), result)
    if rule is ShapeRule.STORAGE_OF_ALL and not result.dim():
        whole = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return _in_storage_of(math.prod(whole), result)
    if rule is ShapeRule.STORAGES_OF_BAGS and result[0].device.type == "cpu":
        sums, bags, counts, largest = result
        bags = _in_storage_of(bags.numel() + 1, bags) if bags.numel() else bags
        return sums, bags, _in_storage_of(args[2].numel(), counts), largest
    if "output_mask" not in facts.argument_names(operator):
        return result
    pairs = zip(result, facts.given(operator, "output_mask", args, kwargs), strict=True)
    return tuple(None if isinstance(r, torch.Tensor) and not m else r for r, m in pairs)


def _in_storage_of(elements: Any, result: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(elements, dtype=result.dtype, device=result.device)
    return storage.as_strided(result.shape, result.stride(), result.storage_offset())


def _dense_view(tensor: torch.Tensor, sizes: Sequence[Any]) -> torch.Tensor | None:
    """Return a view of memory without gaps, whose sizes are symbols; None of any other. PyTorch's
    rule asks how each dimension meets another, seconds for sizes such as those of windows."""
    if are_known((*tensor.shape, *sizes)):
        return None
    as_new = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    strides = zip(as_new.stride(), tensor.stride(), strict=True)
    if any(text_of(known_number(a)) != text_of(known_number(b)) for a, b in strides):
        return None
    shape, count = [*sizes], tensor.numel()
    for place in (p for p, n in enumerate(sizes) if type(n) is int and n == -1):
        shape[place] = count // math.prod((*sizes[:place], *sizes[place + 1 :]))
    torch._check(math.prod(shape) == count)
    made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.as_strided(shape, made.stride(), tensor.storage_offset())


def _grouped_product(operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs) -> torch.Tensor:
    # Of `self` and `mat2` (2 or 3 dimensions each; `offs`: ends of the groups), in any dtype.
    named = {**dict(zip(facts.argument_names(operator), args, strict=False)), **kwargs}
    offsets: Any = named.get("offs")
    left, right = named["self"], named["mat2"]
    rows, columns = left.shape[-2], right.shape[-1]
    shape: tuple[int, ...] = (rows, columns)
    if left.ndim == right.ndim == 2:
        shape = (offsets.shape[0], rows, columns)
    elif left.ndim == right.ndim == 3:
        shape = (left.shape[0], rows, columns)
    dtype = named.get("out_dtype") or left.dtype
    return torch.empty(shape, dtype=dtype, device=left.device)


_Layout = tuple[tuple[int, ...], torch.dtype]
"""Strides and dtype of a tensor."""

_MOST_DIMENSIONS = 64
"""Of a tensor. A larger number in a call is a size, not a dimension, and so are those in one list
with it."""


@dataclass(slots=True)
class SeenLayouts:
    """Layouts of results of real calls by the form of the call, used for the same call at other
    sizes: the order in which kernels lay out the dimensions of a result follows from the order in
    the arguments. results: form -> (dimensions from the outermost to the innermost, dtype) of each
    result, None if a result has gaps, so that each size must run; checked: forms of calls whose
    strides were compared with the capture (`costs.layouts`)."""

    results: dict[object, tuple[tuple[tuple[int, ...], torch.dtype], ...] | None] = field(
        default_factory=dict
    )
    checked: set[object] = field(default_factory=set)

    def layouts(self, call: object, shapes: Sequence[Sequence[int]]) -> tuple[_Layout, ...] | None:
        """(Strides, dtype) of each result in the order of a call of the same form. None if none was
        seen, or its results were not dense. shapes: of the fake results."""
        orders = self.results.get(call)
        if orders is None or len(orders) not in (0, len(shapes)):
            return None
        pairs = zip(shapes, orders, strict=False)
        return tuple((dense_strides(shape, order), dtype) for shape, (order, dtype) in pairs)

    def remember(
        self, call: object, shapes: Sequence[Sequence[int]], real: tuple[_Layout, ...]
    ) -> None:
        """Store the order of dimensions and dtype of each result of a real call, for calls of its
        form; None (nothing follows) if one has gaps. shapes: of the fake results; real: their real
        strides and dtypes."""
        self.results[call] = tuple((tuple(outermost_first(s)), dtype) for s, dtype in real)
        if self.layouts(call, shapes) != real:
            self.results[call] = None


SEEN: ContextVar[SeenLayouts | None] = ContextVar("rockplan layouts of other sizes", default=None)
"""Set while one call is captured at many sizes (`captured_sizes`): small ones run for real."""


def form(name: str, arguments: object) -> object:
    """Return a key of a call that is equal for calls which differ in sizes only: the operator's
    name, of tensors dtype and order of dimensions, other literals. arguments: tensors or specs as
    leaves."""

    def described(leaf: Any) -> object:
        if hasattr(leaf, "shape") and hasattr(leaf, "stride"):
            strides = leaf.stride() if callable(leaf.stride) else leaf.stride
            return _arrangement(tuple(leaf.shape), tuple(strides)), str(leaf.dtype)
        numbers = leaf if _is_numbers(leaf) else (leaf,) if type(leaf) is int else ()
        if any(abs(number) > _MOST_DIMENSIONS for number in numbers):
            return type(leaf).__name__, tuple(min(number, 2) for number in numbers)
        return type(leaf).__name__, repr(leaf)

    leaves, structure = pytree.tree_flatten(arguments, is_leaf=_is_numbers)
    return name, tuple(map(described, leaves)), str(structure)


def _is_numbers(argument: object) -> bool:
    return isinstance(argument, list | tuple) and all(type(n) is int for n in argument)


def _arrangement(shape: Sequence[int], strides: Sequence[int]) -> object:
    """Return (dimensions from the outermost to the innermost; for each 0, 1 or 2 for no, one or
    several elements; for each 1 if it lies without a gap around the next, -1 if it repeats
    elements, else 0)."""
    order = outermost_first(strides)
    beside = [0] * len(order)
    expected = 1
    for dimension in reversed(order):
        beside[dimension] = (strides[dimension] == expected) - (strides[dimension] == 0)
        expected = strides[dimension] * shape[dimension] or expected
    return tuple(order), tuple(min(n, 2) for n in shape), tuple(beside)


def outermost_first(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda d: (-strides[d], d))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor of this shape without gaps. order: dimensions
    from the outermost to the innermost."""
    strides = [1] * len(shape)
    expected = 1
    for dimension in reversed(order):
        strides[dimension] = expected
        expected = expected * (shape[dimension] or 1)
    return tuple(strides)


class Layouts:
    """Strides and dtypes of real results, where PyTorch's shape rules may be wrong.

    The rules of many backward operators ignore that kernels follow the strides of transposed
    arguments. Those of views and of elementwise operators give other strides to dimensions of size
    1, from which kernels guess the memory format. The capture would then record other copies or
    views than eager executes, and workspaces would differ. The rules of normalizations give wrong
    dtypes to statistics if parameters are more precise than the input, as under autocast.
    So a view is made once more by the real code on meta tensors. Another call whose arguments have
    different precision, or other strides than a new tensor, runs once for real, on zeros, one call
    at a time, unless it was seen at another size (`SEEN`).
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[_Layout, ...]] = {}
        self._seen = SEEN.get()  # here: the thread of autograd's backward on CUDA has another

    def corrected(
        self, operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs, result: Any
    ) -> Any:
        """Return `result` of a call on fake tensors with the strides and dtypes that the real call
        gives; itself where the rules are trusted (new tensors from contiguous arguments of one
        dtype) or the real call fails."""
        passed = facts.tensors((args, kwargs))
        made = facts.tensors(result)
        if any(t.layout is not torch.strided for t in made):
            return result
        row, sizes = facts.facts_of(operator), (n for t in made for n in _OF.shape.__get__(t))  # type: ignore[attr-defined]
        if row.shape_rule is ShapeRule.OF_A_RUN or row.effect or any(map(is_unknown, sizes)):
            return result  # a recording compares layouts of what follows from values
        storages = {t.untyped_storage()._cdata for t in passed}
        shared = {t.untyped_storage()._cdata in storages for t in made}
        if len(shared) != 1:
            return result
        (is_view,) = shared
        if is_view and facts.written(operator, args, kwargs):
            return result
        # Which casts are inside, shape rules do not say.
        if not (is_view or row.casts_inside or _may_differ(args, kwargs)):
            return result
        shapes = [hints(_OF.shape.__get__(t)) for t in made]  # type: ignore[attr-defined]
        args, kwargs = pytree.tree_map(_at_hint, (args, kwargs), is_leaf=torch.is_tensor)
        known = self._layouts(operator, args, kwargs, shapes, is_view)
        if len(known) != len(made):
            return result
        layouts = iter(known)

        def correct(leaf: torch.Tensor) -> torch.Tensor:
            stride, dtype = next(layouts)
            own = hints(_OF.stride(leaf))
            if len(stride) != leaf.ndim or (stride, dtype) == (own, leaf.dtype):
                return leaf
            shape = _OF.shape.__get__(leaf)  # type: ignore[attr-defined]
            strides = _as_real(leaf, shape, stride)
            if is_view:
                return leaf.as_strided(shape, strides, leaf.storage_offset())
            return torch.empty_strided(shape, strides, dtype=dtype, device=leaf.device)

        return pytree.tree_map_only(torch.Tensor, correct, result)

    def _layouts(
        self,
        operator: OpOverload,
        args: facts.Args,
        kwargs: facts.Kwargs,
        shapes: Sequence[Sequence[int]],
        is_view: bool,
    ) -> tuple[_Layout, ...]:
        """Return (strides, dtype) of each tensor that the real call returns: known from the same
        call, or from one of other sizes, or found by running it. () if the real call fails. shapes:
        of the fake results."""

        def described(leaf: Any) -> object:
            if isinstance(leaf, torch.Tensor):
                return (tuple(leaf.shape), leaf.stride(), leaf.dtype, str(leaf.device))
            return (type(leaf).__name__, repr(leaf))

        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (facts.operator_name(operator), tuple(map(described, leaves)), str(structure))
        if key not in self._known:
            seen = None if is_view else self._seen
            call = form(key[0], (args, kwargs)) if seen else None
            known = seen.layouts(call, shapes) if seen else None
            if known is None:
                known = _real_layouts(operator, args, kwargs, is_view)
                if seen:
                    seen.remember(call, shapes, known)
            self._known[key] = known
        return self._known[key]


def _may_differ(args: facts.Args, kwargs: facts.Kwargs) -> bool:
    # All arguments are floating-point tensors and masks, and one has not the strides of a new
    # tensor, or they differ in precision.
    passed = facts.tensors((args, kwargs))
    dtypes = {t.dtype for t in passed if t.dtype is not torch.bool}
    plain = all(dtype.is_floating_point for dtype in dtypes)
    layouts = ((hints(_OF.shape.__get__(t)), hints(_OF.stride(t))) for t in passed)  # type: ignore[attr-defined]
    as_new = all(strides == make_contiguous_strides_for(shape) for shape, strides in layouts)
    return plain and (len(dtypes) > 1 or not as_new)


def _is_static(tensor: torch.Tensor) -> bool:
    shape = _OF.shape.__get__(tensor)  # type: ignore[attr-defined]
    return are_known((*shape, *_OF.stride(tensor), _OF.storage_offset(tensor)))


def _at_hint(leaf: Any) -> Any:
    if isinstance(leaf, torch.SymInt):
        return int(known_number(leaf))
    if isinstance(leaf, torch.SymFloat):
        return float(known_number(leaf))
    if not isinstance(leaf, torch.Tensor) or _is_static(leaf):
        return leaf
    shape = hints(_OF.shape.__get__(leaf))  # type: ignore[attr-defined]
    strides = hints(_OF.stride(leaf))
    with _disable_current_modes():
        return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)


def _as_real(leaf: torch.Tensor, shape: Sequence[Any], stride: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the strides of a real result as expressions: of a dense one those that follow from its
    shape, else those that the fake result has too; of a dimension of size 1, whose stride reaches
    nothing, also one that another dimension has there, or that times its size."""
    if _is_static(leaf):
        return stride
    order = outermost_first(stride)
    if dense_strides(hints(shape), order) == stride:
        return dense_strides(shape, order)
    own = _OF.stride(leaf)
    others = (*own, *(length * size for length, size in zip(own, shape, strict=True)))
    found = []
    for size, length, real in zip(shape, own, stride, strict=True):
        tried = (length, *others) if type(size) is int and size == 1 else (length,)
        found.append(next((n for n in tried if known_number(n) == real), real))
    return tuple(found)


def _real_layouts(
    operator: OpOverload, args: facts.Args, kwargs: facts.Kwargs, is_view: bool
) -> tuple[_Layout, ...]:
    """Run the call on zeros like its fake arguments (on the meta device if is_view) and return
    (strides, dtype) of each tensor of its result; () if it fails. Generators are put back."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        device = "meta" if is_view else tensor.device
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.zero_()

    generators = _generators(args, kwargs) if facts.is_random(operator, args, kwargs) else []
    with _disable_current_modes(), torch.no_grad():
        states = [generator.get_state() for generator in generators]
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
        try:
            result = operator(*real_args, **real_kwargs)
        except facts.CALL_ERRORS:
            return ()
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return tuple((t.stride(), t.dtype) for t in facts.tensors(result))


def _generators(args: facts.Args, kwargs: facts.Kwargs) -> list[torch.Generator]:
    devices = {t.device for t in facts.tensors((args, kwargs)) if t.device.type == "cuda"}
    of_devices = [torch.cuda.default_generators[device.index] for device in devices]
    passed = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Generator)]
    return [torch.default_generator, *of_devices, *passed]
