"""Facts about operators: what a plan has to know of a call.

`facts_of` joins what a schema says with the rows that say more (`rows`): which arguments a call
writes, whether it draws random numbers, how it runs again without side effects, which operators
read values or make shapes that depend on values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for

from rockplan.errors import InvalidInput
from rockplan.graph_builder.operators import casting, rows
from rockplan.graph_builder.operators.rows import ANNOTATIONS, PURE_LIBRARIES, Effect
from rockplan.python_state.autocast import DEVICE_TYPES

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

CALL_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)
"""Errors of operators that reject their arguments; TypeError from torch 2.15 on (`maximum` of
complex numbers)."""


@functools.cache
def operator_name(operator: OpOverload) -> str:
    """Return 'aten.addmm.default' for torch.ops.aten.addmm.default."""
    return str(operator)


def resolve(name: str) -> OpOverload:
    """Return the operator of this name; inverse of `operator_name`."""
    return casting.called(name)


def tensors(arguments: object) -> list[torch.Tensor]:
    """Return every tensor in nested tuples, lists and dicts of arguments, in order."""
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    operands: list[torch.Tensor] = []
    if isinstance(arguments, _CONTAINERS):
        for argument in arguments.values() if isinstance(arguments, dict) else arguments:
            if isinstance(argument, torch.Tensor):
                operands.append(argument)
            # Most items are literals, which need no recursive call.
            elif isinstance(argument, _CONTAINERS):
                operands += tensors(argument)
    return operands


_CONTAINERS = (tuple, list, dict)


@functools.cache
def facts_of(operator: Any) -> rows.OperatorFacts:
    """Return what the schema and our rows say of an operator: what it writes, whether it draws
    random numbers, has side effects, is refused. operator: an overload, or a name. A higher-order
    operator, which is no overload, is refused."""
    if isinstance(operator, str) and "." in operator:
        return facts_of(resolve(operator))
    if not isinstance(operator, OpOverload):
        refused = rows.OperatorFacts(str(operator), "", rows.HIGHER_ORDER, rows.PARTS)
        return _merged(refused, str(operator))
    if (inner := casting.inner_name(str(operator))) != str(operator):
        return replace(facts_of(inner), name=str(operator))
    namespace, packet, _ = str(operator).split(".")
    names = (f"{namespace}.*", f"*.{packet}", f"{namespace}.{packet}", str(operator))
    facts = _merged(_facts_of_schema(operator), *names)
    return replace(facts, changes_shape_as="") if facts.refused_because else facts


_ROWS = {row.name: row for row in rows.ROWS}
# Arguments by which operators draw random numbers: only if the argument is not zero or False.
_DRAWS_IF = ("dropout_p", "dropout", "draws")


def _merged(facts: rows.OperatorFacts, *names: str) -> rows.OperatorFacts:
    for row in (_ROWS[name] for name in names if name in _ROWS):
        said = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "name"}
        facts = replace(facts, **{name: fact for name, fact in said.items() if fact})
    return facts


def _facts_of_schema(operator: OpOverload) -> rows.OperatorFacts:
    name, arguments = str(operator), operator._schema.arguments
    namespace = operator.namespace
    packet = operator._schema.name.split("::")[-1]
    names = [argument.name for argument in arguments]
    draws = torch.Tag.nondeterministic_seeded in operator.tags
    new = namespace == "aten" and (packet.endswith("_like") or packet.startswith("new_"))
    view = _out_of_place_view(operator)
    aliased = any(r.alias_info is not None for r in operator._schema.returns)
    because = instead = ""
    if torch.Tag.inplace_view in operator.tags and view is None:
        because, instead = "changes the shape of a tensor in place", "use an operator that does not"
    if "nested" in name:
        because, instead = f"makes or reads a nested tensor, {rows.OF_UNKNOWN_SIZES}", rows.PAD
    return rows.OperatorFacts(
        name,
        refused_because=because,
        instead=instead,
        writes=tuple(names[position] for position in _declared_writes(operator)),
        draws=draws,
        draws_if=next((n for n in _DRAWS_IF if draws and n in names), ""),
        reads_no_element_of=tuple(names[:1]) if new else (),
        view=rows.ViewKind.PLAIN
        if aliased and not operator._schema.is_mutable
        else rows.ViewKind.NONE,
        changes_shape_as="" if view is None else operator_name(view),
        shape_by_values=torch.Tag.dynamic_output_shape in operator.tags,
        shape_rule=rows.ShapeRule.OF_A_RUN
        if namespace == rows.OPAQUE
        else rows.ShapeRule.OF_PYTORCH,
        casts_inside=() if aliased or namespace in rows.OF_PYTORCH else DEVICE_TYPES,
        effect=_effect(operator),
    )


_PURE: set[str] = set()


def pure(operator: Any) -> Any:
    """Declare that an operator has no side effects: plans may run it again, leave it out if its
    results are not needed, and run it to measure its cost.

    operator: what torch.library.custom_op returns, 'library::name', or torch.ops.library.name; it
    is returned, so this is usable as a decorator. Needed for operators of libraries that rockplan
    does not know, which otherwise run as often as in eager execution and never again. Raises
    InvalidInput for anything else.
    """
    name = operator if isinstance(operator, str) else getattr(operator, "_qualname", None)
    if name is None and isinstance(operator, OpOverload):
        name = operator._schema.name
    name = str(name or operator).replace(".", "::", 1)
    if name.count("::") != 1 or not all(part.isidentifier() for part in name.split("::")):
        raise InvalidInput(
            f"rockplan.pure takes an operator (what torch.library.custom_op returns, or "
            f"'library::name'), not {operator!r}"
        )
    _PURE.add(name)
    facts_of.cache_clear()
    return operator


def _effect(operator: OpOverload) -> Effect:
    schema, library = operator._schema, operator.namespace
    is_view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    if library in ANNOTATIONS or schema.name in _PURE or is_view:
        return Effect.NONE
    of_triton = getattr(sys.modules.get("torch._library.triton"), "triton_ops_to_kernels", {})
    is_pure = library in PURE_LIBRARIES or schema.name in of_triton
    if not is_pure and torch.Tag.pointwise not in operator.tags:
        return Effect.UNKNOWN
    # What returns nothing and writes nothing is called to check.
    return Effect.NONE if schema.returns or schema.is_mutable else Effect.CHECKS


@functools.cache
def _declared_writes(operator: OpOverload) -> tuple[int, ...]:
    return tuple(
        position
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def argument_names(operator: OpOverload) -> tuple[str, ...]:
    """Return the names of all arguments, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


def given(operator: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument `name` of a call; its default value if the call leaves it out."""
    position = argument_names(operator).index(name)
    if position < len(args):
        return args[position]
    return kwargs.get(name, operator._schema.arguments[position].default_value)


def written(operator: OpOverload, args: Args, kwargs: Kwargs) -> tuple[torch.Tensor, ...]:
    """Return the tensors that this call changes in place, by the schema and our rows."""
    facts, names = facts_of(operator), argument_names(operator)
    places = [names[position] for position in _declared_writes(operator)]
    undeclared = [name for name in facts.writes if name not in places]
    if undeclared and (not facts.if_argument or given(operator, facts.if_argument, args, kwargs)):
        places += undeclared
    return tuple(t for name in places for t in tensors(given(operator, name, args, kwargs)))


def out_of_place_view(operator: OpOverload) -> OpOverload | None:
    """Return the view operator that does what `operator` does to the shape of its argument in
    place; None for other operators."""
    view = facts_of(operator).changes_shape_as
    return resolve(view) if view else None


def _out_of_place_view(operator: OpOverload) -> OpOverload | None:
    """`squeeze` for `squeeze_`; None if it changes no shape in place, or has no such variant."""
    if torch.Tag.inplace_view not in operator.tags:
        return None
    namespace, name = operator._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    return next((o for o in overloads if takes(o) == takes(operator)), None)


def takes(operator: OpOverload) -> list[tuple[str, str]]:
    """Return (name, type) of each argument but `out`."""
    return [(a.name, str(a.type)) for a in operator._schema.arguments if not a.is_out]


def is_random(operator: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Return whether the call may draw from a generator; attention and RNNs do with dropout > 0."""
    facts = facts_of(operator)
    if not facts.draws or not facts.draws_if:
        return facts.draws
    value = given(operator, facts.draws_if, args, kwargs)
    return value is None or bool(value)


def without_statistics(
    name: str, args: tuple[object, ...]
) -> tuple[str, tuple[object, ...]] | None:
    """Return (name of an operator, its args) that compute the same as this call of batch
    normalization in training mode, but leave running statistics alone. None if `name` is no such
    operator, or the call is not in training mode."""
    again = facts_of(name).runs_again_as
    if not again or not _holds(resolve(name), args):
        return None
    operator = resolve(name)
    taken, unread = argument_names(resolve(again)), unread_arguments(name, args)
    named = enumerate(zip(argument_names(operator), args, strict=False))
    kept = (None if i in unread else a for i, (argument, a) in named if argument in taken)
    return again, tuple(kept)


def unread_arguments(name: str, args: tuple[object, ...]) -> tuple[int, ...]:
    """Return positions of arguments whose content the call does not read: running statistics where
    batch normalization in training mode writes them, and where its backward ignores them."""
    unread = facts_of(name).reads_no_element_of
    if not unread or not _holds(resolve(name), args):
        return ()
    return tuple(map(argument_names(resolve(name)).index, unread))


def _holds(operator: OpOverload, args: tuple[object, ...]) -> bool:
    flag = facts_of(operator).if_argument
    return not flag or bool(given(operator, flag, args, {}))


def reads_content(operator: OpOverload) -> bool:
    """True if a call of the operator may read elements of an argument that it does not write,
    rather than its shape and dtype only."""
    facts = facts_of(operator)
    if facts.if_argument:
        return True
    ignored = {*facts.writes, *facts.reads_no_element_of}
    tensors_of = (a.name for a in operator._schema.arguments if "Tensor" in str(a.type))
    return not facts.reads_no_element_of or not ignored.issuperset(tensors_of)


def reads_first(operator: OpOverload) -> bool:
    """Return whether an operator that writes into its first argument reads that one too."""
    packet = operator._schema.name.split("::")[-1]
    return operator.namespace == "aten" and packet[-1] == "_" and not facts_of(operator).fills


def without_argument(
    operator: OpOverload, args: Args, result: Any
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """Return (operator, args, kwargs) that make the same as this call, which reads no element of
    its argument (`zeros_like`), without that argument: then a dropout mask can be drawn while what
    it masks is not alive. result: the call's result, on fake tensors. None for other calls, and if
    the new tensor has strides that only `empty` can be given."""
    facts = facts_of(operator)
    if not facts.recorded_as:
        return None
    same = resolve(facts.recorded_as)
    shape, strides = tuple(result.shape), result.stride()
    kind = {"dtype": result.dtype, "device": result.device}
    if facts.makes_unwritten:
        return same, (shape, strides), kind
    if strides != make_contiguous_strides_for(shape):
        return None
    if "fill_value" not in argument_names(operator):
        return same, (shape,), kind
    fill = argument_names(operator).index("fill_value")
    return (same, (shape, args[fill]), kind) if len(args) > fill else None


@functools.cache
def follows_shapes(operator: OpOverload) -> bool:
    """Return whether the shape rule of the operator depends on nothing but shapes, strides, dtypes,
    devices and literals, and changes none of them in its arguments."""
    facts = facts_of(operator)
    by_values = facts.shape_by_values or torch.Tag.data_dependent_output in operator.tags
    others = facts.changes_shape_as or facts.may_be_constant or facts.refused_because
    return operator.namespace == "aten" and not (by_values or others)


@functools.cache
def is_plain_view(operator: OpOverload) -> bool:
    """Return whether the operator returns a view with the elements of its only tensor argument."""
    facts = facts_of(operator)
    tensors_taken = sum("Tensor" in str(a.type) for a in operator._schema.arguments)
    is_view = facts.view not in (rows.ViewKind.NONE, rows.ViewKind.OTHER_NUMBERS)
    is_view = is_view and not operator._schema.is_mutable
    return is_view and tensors_taken == 1


@functools.cache
def is_pointwise(operator: OpOverload) -> bool:
    """Return whether the result is a new tensor, computed element by element."""
    facts = facts_of(operator)
    returned = [r.alias_info for r in operator._schema.returns]
    is_new = returned == [None] and not (operator._schema.is_mutable or facts.draws)
    return is_new and torch.Tag.pointwise in operator.tags and not facts.shape_rule


PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
"""Matrix products, by libraries: with a workspace on CUDA, straight into the result on CPU."""


@functools.cache
def is_product(operator: OpOverload) -> bool:
    """Return whether the operator is a matrix product: on all devices its result is allocated by
    the code that also makes the result for meta tensors (PyTorch calls such kernels structured)."""
    return operator_name(operator) in PRODUCTS
