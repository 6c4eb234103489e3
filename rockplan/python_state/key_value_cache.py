"""Key-value caches of transformers: planned calls run without them.

A causal model that is made from a configuration, or loaded, has `config.use_cache = True`: it keeps
keys and values for generation and returns them in a container that cannot be planned. Training
steps do not need it; trainers and gradient checkpointing switch it off, some time after planning.
So a plan is made with it off, whatever the configuration says, and holds after it is switched.
Unplanned calls (evaluation, generation) follow the configuration.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rockplan.values.classes import once_for_each_class

SWITCH = "use_cache"

_LOGGER = logging.getLogger("rockplan")

# Class names in transformers 4 and 5.
_CONFIGURATIONS = ("PretrainedConfig", "PreTrainedConfig")


@once_for_each_class
def configuration_class(kind: type) -> type | None:
    """The class of transformers that a class of configurations derives from, or None."""
    bases = (b for b in kind.__mro__ if b.__module__.startswith("transformers."))
    return next((base for base in bases if base.__name__ in _CONFIGURATIONS), None)


@contextlib.contextmanager
def switched_off(module: Any) -> Iterator[None]:
    """While active, `use_cache` is False in the configurations of all modules in `module`;
    afterwards True again where it was."""
    configurations = [c for c in _configurations(module) if getattr(c, SWITCH, None) is True]
    for configuration in configurations:
        setattr(configuration, SWITCH, False)
    try:
        yield
    finally:
        for configuration in configurations:
            setattr(configuration, SWITCH, True)


def switch_off(module: Any) -> tuple[Any, ...]:
    """Set `use_cache` to False in the configurations of all modules in `module`, and log that;
    return those that had it on."""
    configurations = tuple(c for c in _configurations(module) if getattr(c, SWITCH, None) is True)
    for configuration in configurations:
        setattr(configuration, SWITCH, False)
    if configurations:
        _LOGGER.warning(
            "config.use_cache is False from now on: a block that is planned takes no key-value "
            "cache. Pass use_cache=True where one is wanted, as generate() does"
        )
    return configurations


def switch_on(configurations: Iterable[Any]) -> None:
    """Undo `switch_off`, which returned these configurations."""
    for configuration in configurations:
        setattr(configuration, SWITCH, True)


def say(module: Any, kwargs: Mapping[str, Any]) -> None:
    """Warn that planned calls like this one return no cache, if eager calls would."""
    owners = (m for m in module.modules() if getattr(vars(m).get("config"), SWITCH, None) is True)
    users = [m for m in owners if SWITCH in inspect.signature(m.forward).parameters]
    if users and kwargs.get(SWITCH) is None and not any(_has_none(m, kwargs) for m in users):
        _LOGGER.warning(
            "config.use_cache is True, and planned calls run without the key-value cache: their "
            "results hold none (past_key_values), as with gradient checkpointing in transformers"
        )


def _has_none(module: Any, kwargs: Mapping[str, Any]) -> bool:
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return any(re.search(says, source) and is_so(module, kwargs) for says, is_so in _WITHOUT)


# Pattern in the source of a forward -> when such a forward has no cache despite its configuration.
_WITHOUT: tuple[tuple[str, Callable[[Any, Mapping[str, Any]], bool]], ...] = (
    (r"self\.config\.is_decoder", lambda module, kwargs: not module.config.is_decoder),
    (
        r"labels is not None:\n(?:.*\n){0,5}? +use_cache = False",
        lambda module, kwargs: kwargs.get("labels") is not None,
    ),
    (
        r"use_cache if not self\.training|not self\.training and use_cache|"
        r"use_cache and cache is None and not self\.training",
        lambda module, kwargs: module.training,
    ),
)


def without(result: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a call without its key-value cache, unless `use_cache` in `kwargs` asked
    for one (the model of peft's prefix tuning returns one, which it was passed). Results other than
    a ModelOutput are returned as they are. Warns once for each class."""
    if kwargs.get(SWITCH) or not any(b.__name__ == "ModelOutput" for b in type(result).__mro__):
        return result
    kept = {name: part for name, part in result.items() if not _is_cache(part)}
    if len(kept) == len(result):
        return result
    _say_dropped(type(result).__qualname__)
    return type(result)(**kept)


def _is_cache(value: Any) -> bool:
    kind = type(value)
    return "Cache" in kind.__name__ and kind.__module__.startswith("transformers.")


@functools.cache
def _say_dropped(kind: str) -> None:
    _LOGGER.warning(
        "the model returns a key-value cache in its %s, though nothing asks for one (use_cache): "
        "the results of planned calls hold none",
        kind,
    )


def _configurations(module: Any) -> Iterable[Any]:
    waiting = [vars(m).get("config") for m in module.modules()]
    configurations: dict[int, Any] = {}
    while waiting:
        configuration = waiting.pop()
        kind = type(configuration)
        if configuration_class(kind) and id(configuration) not in configurations:
            configurations[id(configuration)] = configuration
            waiting += vars(configuration).values()
    return configurations.values()
