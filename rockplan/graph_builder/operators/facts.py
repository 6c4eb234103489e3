"""Facts about ATen operators that their schemas do not all state.

Which arguments a call writes, whether it draws random numbers, how it runs again without side
effects, and which operators read values or make shapes that depend on values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

# Running statistics are written by these although their schema does not say so: the argument
# positions of (running_mean, running_var, training).
_BATCH_NORM_STATISTICS = {
    "aten.native_batch_norm.default": (3, 4, 5),
    "aten.cudnn_batch_norm.default": (3, 4, 5),
    "aten.miopen_batch_norm.default": (3, 4, 5),
}
# Same, for operators whose schema does mark them; None: always training.
_BATCH_NORM_DECLARED = {
    "aten._native_batch_norm_legit.default": (3, 4, 5),
    "aten._batch_norm_with_update.default": (3, 4, None),
}
# Their backward; `cudnn_batch_norm_backward` exists for training mode alone.
_BATCH_NORM_BACKWARD: dict[str, tuple[int, int, int | None]] = {
    "aten.native_batch_norm_backward.default": (3, 4, 7),
    "aten.cudnn_batch_norm_backward.default": (3, 4, None),
    "aten.miopen_batch_norm_backward.default": (3, 4, None),
}
# Re-execution without statistics goes through another overload where None is not accepted.
_WITHOUT_STATISTICS = {
    "aten._native_batch_norm_legit.default": "aten._native_batch_norm_legit.no_stats",
    "aten._batch_norm_with_update.default": "aten._batch_norm_no_update.default",
}

VALUE_READS = frozenset(
    {
        "aten._local_scalar_dense.default",
        "aten.allclose.default",
        "aten.equal.default",
        "aten.is_nonzero.default",
    }
)

_STORAGE_SURGERY = frozenset(
    {"set_", "resize_", "resize_as_", "_resize_output_", "storage_resize_", "swap_data"}
)

# Drawn from a generator although untagged.
_UNTAGGED_RANDOM = {"aten.mkldnn_rnn_layer.default", "aten._cudnn_rnn.default"}


@functools.cache
def operator_name(operator: OpOverload) -> str:
    """'aten.addmm.default' for torch.ops.aten.addmm.default."""
    return str(operator)


def resolve(name: str) -> OpOverload:
    """Inverse of `operator_name`."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    assert isinstance(found, OpOverload)
    return found


def tensors(arguments: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested arguments, in order."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, dict):
        yield from tensors(tuple(arguments.values()))
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from tensors(argument)


def written(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The tensors that this call mutates."""
    found: list[torch.Tensor] = []
    for position, name in _declared_writes(operator):
        if position < len(args):
            found += tensors(args[position])
        elif name in kwargs:
            found += tensors(kwargs[name])
    statistics = _BATCH_NORM_STATISTICS.get(operator_name(operator))
    if statistics is not None and args[statistics[2]]:
        found += tensors(args[statistics[0]])
        found += tensors(args[statistics[1]])
    return tuple(found)


@functools.cache
def _declared_writes(operator: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that the schema marks as written."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def changes_storage(operator: OpOverload) -> bool:
    """True if the call exchanges or resizes the storage of an argument."""
    return operator._schema.name.split("::")[-1] in _STORAGE_SURGERY


@functools.cache
def out_of_place_view(operator: OpOverload) -> OpOverload | None:
    """`squeeze` for `squeeze_`: what makes a view where `operator` changes the shape or strides of
    its argument in place, without touching its elements; None for other operators."""
    if torch.Tag.inplace_view not in operator.tags:
        return None
    namespace, name = operator._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"))
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    (found,) = (o for o in overloads if _takes(o) == _takes(operator))
    assert isinstance(found, OpOverload)
    return found


def _takes(operator: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]


def is_random(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the call may draw from a generator; attention and RNNs only with dropout > 0."""
    if not _may_be_random(operator):
        return False
    for position, argument in enumerate(operator._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.name in ("dropout_p", "dropout"):
            value = argument.default_value if value is None else value
            return bool(value)
        if argument.name == "train" and operator_name(operator) == "aten.native_dropout.default":
            return value is not False
    return True


@functools.cache
def _may_be_random(operator: OpOverload) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in operator.tags
    return tagged or operator_name(operator) in _UNTAGGED_RANDOM


def without_statistics(
    name: str, args: tuple[object, ...]
) -> tuple[str, tuple[object, ...]] | None:
    """(operator, args) that computes the same as batch normalization in training mode but
    leaves running statistics alone; None if `name` is no such operator."""
    positions = _BATCH_NORM_STATISTICS.get(name) or _BATCH_NORM_DECLARED.get(name)
    if positions is None:
        return None
    mean, variance, training = positions
    if training is not None and not args[training]:
        return None
    if name == "aten._native_batch_norm_legit.default":
        kept = tuple(a for i, a in enumerate(args) if i not in (mean, variance))
    else:
        kept = tuple(None if i in (mean, variance) else a for i, a in enumerate(args))
    return _WITHOUT_STATISTICS.get(name, name), kept


def unread_statistics(name: str, args: tuple[object, ...]) -> tuple[int, ...]:
    """Positions of running mean and variance where the call does not look at their content:
    batch normalization in training mode writes them, its backward ignores them."""
    if name in _BATCH_NORM_BACKWARD:
        mean, variance, training = _BATCH_NORM_BACKWARD[name]
        return (mean, variance) if training is None or args[training] else ()
    if without_statistics(name, args) is None:
        return ()
    return (_BATCH_NORM_STATISTICS.get(name) or _BATCH_NORM_DECLARED[name])[:2]


# Operators that look at the shape and dtype of their first argument alone: what makes the same
# without it, and the position of what they fill it with.
_SAME_WITHOUT_ARGUMENT: dict[str, tuple[str, int | None]] = {
    "aten.zeros_like.default": ("aten.zeros.default", None),
    "aten.ones_like.default": ("aten.ones.default", None),
    "aten.full_like.default": ("aten.full.default", 1),
    "aten.rand_like.default": ("aten.rand.default", None),
    "aten.randn_like.default": ("aten.randn.default", None),
    "aten.new_zeros.default": ("aten.zeros.default", None),
    "aten.new_ones.default": ("aten.ones.default", None),
    "aten.new_full.default": ("aten.full.default", 2),
}
_EMPTY = frozenset(
    {"aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default"}
)


def without_argument(
    operator: OpOverload, args: tuple[Any, ...], result: Any
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """(operator, args, kwargs) that make the same as a call that reads no element of its argument,
    without it: a dropout mask need not wait for what it masks, nor have it made again.

    None for other calls, and where the new tensor has strides that only `empty` can be given.
    """
    name = operator_name(operator)
    if name not in _EMPTY and name not in _SAME_WITHOUT_ARGUMENT:
        return None
    shape, strides = tuple(result.shape), result.stride()
    kind = {"dtype": result.dtype, "device": result.device}
    if name in _EMPTY:
        return torch.ops.aten.empty_strided.default, (shape, strides), kind
    if strides != make_contiguous_strides_for(shape):
        return None
    same, fill = _SAME_WITHOUT_ARGUMENT[name]
    if fill is None:
        return resolve(same), (shape,), kind
    return (resolve(same), (shape, args[fill]), kind) if len(args) > fill else None


@functools.cache
def follows_shapes(operator: OpOverload) -> bool:
    """True if the shape rule of the operator looks at nothing but shapes, strides, dtypes, devices
    and literals, and changes none of them in its arguments."""
    tags = {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
    is_lift = operator._schema.name.startswith("aten::lift")
    return operator.namespace == "aten" and not is_lift and tags.isdisjoint(operator.tags)


@functools.cache
def shapes_depend_on_values(name: str) -> bool:
    """True if shapes of results depend on the values of arguments."""
    return torch.Tag.dynamic_output_shape in resolve(name).tags


# They copy all of the storage of their first argument, and write into the copy (of 702 entries of
# PyTorch's op_db, forward and backward, these alone make storages whose size depends on that of an
# argument's storage).
_COPIES_OF_STORAGES = frozenset(
    f"aten.{view}_scatter.default" for view in ("slice", "select", "diagonal", "as_strided")
)


def fake_result(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call on fake tensors.

    Gradients that nobody wants (`output_mask`) are None, as kernels return them; some shape rules
    make them all the same. The shape rule of grouped matrix products insists on what CUDA kernels
    need (bfloat16), which kernels of other devices do not: their result is described here. So are
    storages that are copied as a whole, of which shape rules make the elements that are seen.
    """
    if operator_name(operator) in _COPIES_OF_STORAGES:
        return _on_storage_as_large(operator(*args, **kwargs), args[0])
    if operator_name(operator) != "aten._grouped_mm.default":
        result = operator(*args, **kwargs)
        position = _position_of_mask(operator)
        if position is None:
            return result
        mask = args[position] if position < len(args) else kwargs["output_mask"]
        pairs = zip(result, mask, strict=True)
        return tuple(None if isinstance(r, torch.Tensor) and not m else r for r, m in pairs)
    names = [a.name for a in operator._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    offsets: Any = given.get("offs")
    left, right = given["self"], given["mat2"]
    rows, columns = left.shape[-2], right.shape[-1]
    shape: tuple[int, ...] = (rows, columns)
    if left.ndim == right.ndim == 2:
        shape = (offsets.shape[0], rows, columns)
    elif left.ndim == right.ndim == 3:
        shape = (left.shape[0], rows, columns)
    dtype = given.get("out_dtype") or left.dtype
    return torch.empty(shape, dtype=dtype, device=left.device)


def _on_storage_as_large(made: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """`made`, in a storage as large as that of `argument`; of one that repeats elements, which
    gets other strides, the elements are copied."""
    elements = argument.untyped_storage().nbytes() // made.itemsize
    if made.stride() != argument.stride():
        return made
    storage = torch.empty(elements, dtype=made.dtype, device=made.device)
    return storage.as_strided(made.shape, made.stride(), made.storage_offset())


@functools.cache
def _position_of_mask(operator: OpOverload) -> int | None:
    """Of the argument that says which gradients are wanted, one for each result."""
    names = [a.name for a in operator._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


_Layout = tuple[tuple[int, ...], torch.dtype]
"""Strides and dtype of a tensor."""


class Layouts:
    """Strides and dtypes of real results, where those of PyTorch's shape rules may be wrong.

    The rules of many backward operators ignore that kernels follow the strides of transposed
    arguments, and those of views and of elementwise operators give other strides to dimensions of
    size 1, from which kernels guess the memory format; what the capture records after them (a
    copy or a view) would then differ from eager, and so would workspaces. Those of normalizations
    give wrong dtypes to statistics where parameters are more precise than what is normalized, as
    under autocast. So a view is made once more by the real code, on tensors without memory, and
    another call with an argument that does not have the strides of a new tensor, or with arguments
    of different precision, runs once for real, on zeros, one call at a time.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[_Layout, ...]] = {}

    def corrected(
        self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """`result` of a fake call with the strides and dtypes that the real call gives."""
        given = list(tensors((args, kwargs)))
        made = list(tensors(result))
        if any(t.layout is not torch.strided for t in made):
            return result
        storages = {t.untyped_storage()._cdata for t in given}
        shared = {t.untyped_storage()._cdata in storages for t in made}
        if len(shared) != 1:
            return result
        (is_view,) = shared
        if is_view and written(operator, args, kwargs):
            return result
        if not is_view and not _may_differ(args, kwargs):
            return result
        known = self._layouts(operator, args, kwargs, is_view)
        if len(known) != len(made):
            return result
        layouts = iter(known)

        def correct(leaf: torch.Tensor) -> torch.Tensor:
            stride, dtype = next(layouts)
            if len(stride) != leaf.ndim or (stride, dtype) == (leaf.stride(), leaf.dtype):
                return leaf
            if is_view:
                return leaf.as_strided(leaf.shape, stride, leaf.storage_offset())
            return torch.empty_strided(leaf.shape, stride, dtype=dtype, device=leaf.device)

        return pytree.tree_map_only(torch.Tensor, correct, result)

    def _layouts(
        self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], is_view: bool
    ) -> tuple[_Layout, ...]:
        def described(leaf: Any) -> object:
            if isinstance(leaf, torch.Tensor):
                return (tuple(leaf.shape), leaf.stride(), leaf.dtype, str(leaf.device))
            return (type(leaf).__name__, repr(leaf))

        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (operator_name(operator), tuple(map(described, leaves)), str(structure))
        if key not in self._known:
            self._known[key] = _real_layouts(operator, args, kwargs, is_view)
        return self._known[key]


def _may_differ(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a call on floating-point tensors and masks of which one does not have the strides of
    a new tensor, or which are of different precision."""
    given = list(tensors((args, kwargs)))
    dtypes = {t.dtype for t in given if t.dtype is not torch.bool}
    plain = all(dtype.is_floating_point for dtype in dtypes)
    as_new = all(t.stride() == make_contiguous_strides_for(t.shape) for t in given)
    return plain and (len(dtypes) > 1 or not as_new)


def _real_layouts(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], is_view: bool
) -> tuple[_Layout, ...]:
    """Of the tensors that the real call returns; none if it refuses zeros. What it draws is given
    back to the generators."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        device = "meta" if is_view else tensor.device
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.zero_()

    generators = _generators(args, kwargs) if is_random(operator, args, kwargs) else []
    with _disable_current_modes(), torch.no_grad():
        states = [generator.get_state() for generator in generators]
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
        try:
            result = operator(*real_args, **real_kwargs)
        except (RuntimeError, ValueError, IndexError):
            return ()
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return tuple((t.stride(), t.dtype) for t in tensors(result))


def _generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """Those that a call may draw from."""
    devices = {t.device for t in tensors((args, kwargs)) if t.device.type == "cuda"}
    of_devices = [torch.cuda.default_generators[device.index] for device in devices]
    given = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Generator)]
    return [torch.default_generator, *of_devices, *given]
