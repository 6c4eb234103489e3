"""Factory: the name of a function that makes a model and a sample -> its result.

takes: 'package.module:factory' or 'path/file.py:factory'. returns: Subject. guarantees: an error in
the name, the file, the function or its result is an InvalidInput that says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rockplan.errors import InvalidInput

_FORM = "write 'module:factory' or 'file.py:factory'"
_RESULT = "return (model, sample_input) or (model, args, kwargs)"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with one call of it, as `rockplan.solve` takes them."""

    name: str
    model: Any
    sample_input: Any
    sample_kwargs: Mapping[str, Any]

    @property
    def call(self) -> dict[str, Any]:
        """The model and the sample by the names that functions of rockplan have for them."""
        return {
            "model": self.model,
            "sample_input": self.sample_input,
            "sample_kwargs": self.sample_kwargs,
        }


def make_subject(name: str) -> Subject:
    """Import and call the factory that `name` ('module:factory' or 'file.py:factory') names; return
    the model and sample that it makes. Raises InvalidInput, with an exception of the factory as its
    cause."""
    made = _made_by(name)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise InvalidInput(f"{name} returned {what}; {_RESULT}")
    if len(made) == 2:
        return Subject(name, made[0], made[1], {})
    model, args, kwargs = made
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise InvalidInput(
            f"{name} returned a {type(args).__name__} and a {type(kwargs).__name__} after the "
            f"model; args is a tuple, kwargs a dictionary: {_RESULT}"
        )
    return Subject(name, model, tuple(args), kwargs)


def _made_by(name: str) -> object:
    module_name, colon, path = name.rpartition(":")
    if not (module_name and colon and path):
        raise InvalidInput(f"{name!r} does not name a model; {_FORM}")
    module = _file(module_name) if module_name.endswith(".py") else _module(module_name)
    factory = _attribute(module, module_name, path)
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise InvalidInput(
            f"{name} {_failed(error)}. A factory takes no arguments; call it by itself to see "
            "where it fails"
        ) from error


def _file(name: str) -> ModuleType:
    path = Path(name)
    if not path.is_file():
        raise InvalidInput(f"there is no file {name}; {_FORM}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Files beside it can be imported, as when Python runs it.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    load = spec.loader.exec_module
    return _imported(name, lambda: load(module) or module)


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return _imported(name, lambda: importlib.import_module(name))


def _imported(name: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except SystemExit as error:
        raise InvalidInput(
            f"{name} {_failed(error)} while it was imported; put what runs it under "
            "if __name__ == '__main__'"
        ) from error
    except Exception as error:
        raise InvalidInput(
            f"{name} cannot be imported: it {_failed(error)}. Run the command where the module "
            "can be imported, or name its file"
        ) from error


def _failed(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        # Not passed on: the command would end with the file's exit code, perhaps 0.
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    words = str(error).rstrip(".")
    return f"raised {type(error).__name__}" + (f": {words}" if words else "")


def _attribute(module: ModuleType, module_name: str, path: str) -> Callable[[], object]:
    attribute: Any = module
    for part in path.split("."):
        if not hasattr(attribute, part):
            called = ((n, v) for n, v in vars(module).items() if callable(v))
            own = (n for n, v in called if getattr(v, "__module__", None) == module.__name__)
            near = ", ".join(sorted(own))
            raise InvalidInput(
                f"{module_name} has no {path!r}" + (f"; it has {near}" if near else "")
            )
        attribute = getattr(attribute, part)
    if not callable(attribute):
        raise InvalidInput(
            f"{path!r} in {module_name} is a {type(attribute).__name__}; name a function that "
            f"takes nothing; it shall {_RESULT}"
        )
    factory: Callable[[], object] = attribute
    return factory
