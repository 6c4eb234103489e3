"""Writes of Triton kernels: which of its arguments a kernel may write into, found in its source.

takes: a kernel's function, and its constant arguments. returns: names of parameters. guarantees: a
parameter that is not among them is not written into. For each variable the analysis knows from
which parameters it may be computed, wherever it is assigned. Addresses of stores, and arguments of
unknown functions, count as written; a kernel whose source cannot be followed raises.
PyTorch has an analysis of compiled kernels (`triton_kernel_wrap`), which needs a device, cannot
analyse interpreted kernels, and assumes that everything is written if it fails.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Names = frozenset[str]
_NOTHING: Names = frozenset()
_UNKNOWN = object()
_TRITON = "triton"
# Parts of names of Triton functions that write to memory, and of those that return values read
# from memory, which are no addresses.
_WRITE = ("store", "atomic", "scatter", "copy", "asm", "reduce_descriptor", "descriptor_reduce")
_READ = ("load", "gather", "atomic")
_UNREAD = (
    *(ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match),
)


class UnknownWrites(Exception):
    """Raised with the reason why the writes of a kernel are unknown."""


def parameters_written(function: Any, constants: Mapping[str, Any]) -> Names:
    """Return the parameters that a jit function may write into. Raises UnknownWrites."""
    return frozenset(_Analysis().of(function, dict(constants)).written)


def plain_function(kernel: Any) -> Any:
    """Return the Python function inside of `triton.jit`, autotuners and heuristics."""
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


@dataclass(slots=True)
class _Effects:
    """Effects of one function. written: parameters that it may write into; returned: parameters
    that its result may be computed from."""

    written: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)


class _Analysis:
    """Analyses functions and those that they call, each once."""

    def __init__(self) -> None:
        self._running: dict[Any, _Effects] = {}

    def of(self, function: Any, constants: dict[str, Any]) -> _Effects:
        """Return the effects of a function, by iterating until they no longer grow. constants:
        parameters that are known -> value. A recursive call gets the effects found so far."""
        key = function, tuple(sorted((n, id(c)) for n, c in constants.items() if _is_jit(c)))
        if key in self._running:
            return self._running[key]
        effects = self._running[key] = _Effects()
        while True:
            before = set(effects.written), set(effects.returned)
            _Function(self, function, constants, effects).visit_all()
            if before == (effects.written, effects.returned):
                return effects


class _Function(ast.NodeVisitor):
    """Analysis of one function: from which parameters each of its variables may be computed."""

    def __init__(
        self, analysis: _Analysis, function: Any, constants: dict[str, Any], effects: _Effects
    ) -> None:
        self._analysis, self._function, self._effects = analysis, function, effects
        self._constants = constants
        self._definition = _definition(function)
        arguments = self._definition.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if arguments.vararg or arguments.kwarg:
            raise UnknownWrites(f"{function.__qualname__} takes any number of arguments")
        self._made_of: dict[str, Names] = {n: frozenset({n}) for n in names if n not in constants}
        assigned = (n for n in ast.walk(self._definition) if isinstance(n, ast.Name))
        self._local = {*self._made_of, *(n.id for n in assigned if isinstance(n.ctx, ast.Store))}

    def visit_all(self) -> None:
        while True:
            before = dict(self._made_of), set(self._effects.written), set(self._effects.returned)
            for statement in self._definition.body:
                self.visit(statement)
            if before == (self._made_of, self._effects.written, self._effects.returned):
                return

    # Statements

    def visit_Assign(self, node: ast.Assign) -> None:
        made_of = self._of(node.value)
        for target in node.targets:
            self._assign(target, made_of)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assign(node.target, self._of(node.target) | self._of(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, self._of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self._assign(node.target, self._of(node.iter))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._effects.returned |= self._of(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.NamedExpr | ast.Call):
            self._of(node)
        else:
            self._refuse_unread(node)
            super().generic_visit(node)

    def _refuse_unread(self, node: ast.AST) -> None:
        if isinstance(node, _UNREAD) or getattr(node, "optional_vars", None) is not None:
            raise UnknownWrites(f"it has `{ast.unparse(node).splitlines()[0]}`")

    def _assign(self, target: ast.expr, made_of: Names) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._assign(element, made_of)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, made_of)
        elif isinstance(target, ast.Name):
            self._made_of[target.id] = self._made_of.get(target.id, _NOTHING) | made_of
        elif made_of:
            raise UnknownWrites(f"it assigns to `{ast.unparse(target)}`")

    # Expressions

    def _of(self, node: ast.expr) -> Names:
        """Return the parameters of the kernel that an expression may be computed from; add those
        that it writes into to the effects. Raises UnknownWrites for what cannot be analysed."""
        if isinstance(node, ast.Name):
            return self._made_of.get(node.id, _NOTHING)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        self._refuse_unread(node)
        if isinstance(node, ast.NamedExpr):
            made_of = self._of(node.value)
            self._assign(node.target, made_of)
            return made_of
        children = ast.iter_child_nodes(node)
        parts = [self._of(child) for child in children if isinstance(child, ast.expr)]
        if isinstance(node, ast.Compare | ast.Constant | ast.JoinedStr):
            return _NOTHING
        return frozenset().union(*parts)

    def _of_call(self, node: ast.Call) -> Names:
        arguments = [a.value if isinstance(a, ast.Starred) else a for a in node.args]
        positional = [self._of(a) for a in arguments]
        named = {k.arg: self._of(k.value) for k in node.keywords}
        everything = frozenset().union(*positional, *named.values())
        callee = self._value(node.func)
        if _is_jit(callee) and not _is_of_triton(plain_function(callee)):
            if len(arguments) != len([a for a in node.args if not isinstance(a, ast.Starred)]):
                raise UnknownWrites(f"it calls `{ast.unparse(node.func)}` with any arguments")
            return self._of_function(plain_function(callee), node, positional, named)
        if isinstance(node.func, ast.Attribute) and callee is _UNKNOWN:
            everything |= self._of(node.func.value)  # a method of a computed value
        elif not _is_of_triton(callee) and getattr(callee, "__module__", "") != "builtins":
            if everything:
                raise UnknownWrites(f"it calls `{ast.unparse(node.func)}`")
            return _NOTHING
        name = node.func.attr if isinstance(node.func, ast.Attribute) else _name(callee)
        if "pointer_type" in ast.unparse(node):
            raise UnknownWrites("it takes numbers for addresses (pointer_type)")
        if any(part in name for part in _WRITE):
            self._effects.written |= everything
        return _NOTHING if any(part in name for part in _READ) else everything

    def _of_function(
        self, function: Any, node: ast.Call, positional: list[Names], named: dict[Any, Names]
    ) -> Names:
        names = list(inspect.signature(function).parameters)
        made_of = dict(zip(names, positional, strict=False)) | named
        arguments = dict(zip(names, node.args, strict=False))
        arguments |= {k.arg: k.value for k in node.keywords if k.arg is not None}
        values = {n: self._value(a) for n, a in arguments.items()}
        constants = {n: value for n, value in values.items() if _is_jit(value)}
        effects = self._analysis.of(function, constants)
        self._effects.written |= {p for n in effects.written for p in made_of.get(n, _NOTHING)}
        return frozenset(p for n in effects.returned for p in made_of.get(n, _NOTHING))

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            if node.id in self._constants:
                return getattr(self._constants[node.id], "value", self._constants[node.id])
            if node.id in self._local:
                return _UNKNOWN
            return _global(self._function, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            is_known = isinstance(owner, types.ModuleType | type)
            return getattr(owner, node.attr, _UNKNOWN) if is_known else _UNKNOWN
        return _UNKNOWN


def _definition(function: Any) -> ast.FunctionDef:
    try:
        text = textwrap.dedent("".join(inspect.getsourcelines(function)[0]))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError) as error:
        raise UnknownWrites("its source cannot be read") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            return node
    raise UnknownWrites("its source has no function")


def _global(function: Any, name: str) -> Any:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        return cells[name].cell_contents
    return function.__globals__.get(name, getattr(builtins, name, _UNKNOWN))


def _is_jit(value: Any) -> bool:
    return _is_of_triton(type(value)) and isinstance(plain_function(value), types.FunctionType)


def _is_of_triton(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == _TRITON


def _name(function: Any) -> str:
    return str(getattr(plain_function(function), "__name__", ""))
