"""Code names: names of attributes, global variables and imported modules that a code object has."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable
from typing import Any


def root_package(value: Any) -> str:
    """Return the name of the package that a class or function is from."""
    return str(getattr(value, "__module__", None)).partition(".")[0]


# Packages whose classes, functions and global variables are not the user's, wherever they lie. (An
# `assert` in a test file calls pytest, which reaches all that is tested: 40,000 objects.)
CLOSED = {"torch", "torchvision", "torchaudio", "numpy", "triton", "rockplan", "builtins"}
CLOSED |= {"_pytest", *sys.stdlib_module_names} - {"__main__"}


@functools.cache
def is_library(name: str | None) -> bool:
    """True for a module that is installed or of the standard library; False for None."""
    if name is None:
        return False
    path = str(getattr(sys.modules.get(name), "__file__", None) or "")
    return name.partition(".")[0] in CLOSED or "site-packages" in path or "dist-packages" in path


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return all names in `code` and its inner functions. String constants that are identifiers
    count as well: `getattr(self, "kept")`, `globals()["KEPT"]`."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    texts = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(code.co_names).union(texts, *map(names_in, inner))


@functools.cache
def global_names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of global variables that `code` and its inner functions read, set or delete;
    all of `names_in` where the code may look up any variable by its text (`globals()`, `eval`)."""
    names = names_in(code)
    if names & _BY_TEXT:
        return names
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    own = (i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS)
    return frozenset(own).union(*map(global_names_in, inner))


_OF_GLOBALS = frozenset(
    f"{verb}_{what}" for verb in ("LOAD", "STORE", "DELETE") for what in ("GLOBAL", "NAME")
) | {"LOAD_FROM_DICT_OR_GLOBALS"}

_BY_TEXT = frozenset(
    (
        *("globals", "locals", "vars", "eval", "exec", "modules", "import_module", "__import__"),
        *("__dict__", "__globals__", "__builtins__", "f_globals", "f_locals"),
        *("getmodule", "attrgetter"),
    )
)
"""Names of functions and attributes by which code looks up global variables by text."""


@functools.cache
def imported_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of the modules that `code` imports while it runs."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    own: Iterable[str] = ()
    if _IMPORT in code.co_code[::2]:
        own = (i.argval for i in dis.get_instructions(code) if i.opcode == _IMPORT)
    return frozenset(own).union(*map(imported_in, inner))


_IMPORT = dis.opmap["IMPORT_NAME"]


def files_of(name: str, package: str) -> Iterable[dict[str, Any]]:
    """Yield the global variables (`vars`) of each loaded module that `import name` in `package` may
    mean: the absolute name, and the name relative to the package and to each package around it."""
    parts = package.split(".")
    around = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    for path in (name, *(f"{p}.{name}".strip(".") for p in around)):
        module = sys.modules.get(path)
        if isinstance(module, types.ModuleType):
            yield vars(module)


@functools.cache
def compares_objects(code: types.CodeType) -> bool:
    """True if the code or an inner function says `a is b` or `id(a)`, other than `a is None` and
    comparisons with constants."""
    before = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before != "LOAD_CONST":
            return True
        before = instruction.opname
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return "id" in code.co_names or any(map(compares_objects, inner))
