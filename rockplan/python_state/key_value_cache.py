"""The key-value caches of transformers, without which planned calls run.

A causal model that is made of a configuration, or loaded, has `config.use_cache = True`: it keeps
keys and values for generation and returns them in a container that nothing can be planned through.
Steps of training have no use for it; trainers and gradient checkpointing switch it off, at their
own time. So a plan is made with it off, whatever the configuration says, and holds where it is
switched later. What runs unplanned (evaluation, generation) does as the configuration says.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rockplan.python_state.classes import once_for_each_class

SWITCH = "use_cache"

_LOGGER = logging.getLogger("rockplan")

# In transformers 4 and 5.
_CONFIGURATIONS = ("PretrainedConfig", "PreTrainedConfig")


@once_for_each_class
def is_configuration(kind: type) -> bool:
    """Is it a class of configurations of transformers?"""
    return any(
        base.__name__ in _CONFIGURATIONS and base.__module__.startswith("transformers.")
        for base in kind.__mro__
    )


@contextlib.contextmanager
def switched_off(module: Any) -> Iterator[None]:
    """The configurations of all modules in `module` ask for no cache meanwhile."""
    configurations = [c for c in _configurations(module) if getattr(c, SWITCH, None) is True]
    for configuration in configurations:
        setattr(configuration, SWITCH, False)
    try:
        yield
    finally:
        for configuration in configurations:
            setattr(configuration, SWITCH, True)


def switch_off(module: Any) -> tuple[Any, ...]:
    """The configurations of all modules in `module` ask for no cache from now on; returns those
    that did."""
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
    """Undo `switch_off`, which returned these."""
    for configuration in configurations:
        setattr(configuration, SWITCH, True)


def say(module: Any, kwargs: Mapping[str, Any]) -> None:
    """Log that the results of planned calls like this one have no cache, where eager's have."""
    asked = kwargs.get(SWITCH) is not None
    users = (
        m
        for m in module.modules()
        if getattr(vars(m).get("config"), SWITCH, None) is True
        and SWITCH in inspect.signature(m.forward).parameters
    )
    if not asked and any(True for _ in users):
        _LOGGER.warning(
            "config.use_cache is True, and planned calls run without the key-value cache: their "
            "results hold none (past_key_values), as with gradient checkpointing in transformers"
        )


def _configurations(module: Any) -> Iterable[Any]:
    """Of the modules, and the parts that these consist of (of texts, of images)."""
    waiting = [vars(m).get("config") for m in module.modules()]
    configurations: dict[int, Any] = {}
    while waiting:
        configuration = waiting.pop()
        kind = type(configuration)
        if is_configuration(kind) and id(configuration) not in configurations:
            configurations[id(configuration)] = configuration
            waiting += vars(configuration).values()
    return configurations.values()
