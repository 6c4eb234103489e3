"""Forms: check an intermediate form (run or graph) against its table of rules.

takes: rules, functions that yield what breaks them; their docstrings say what holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rockplan.graph_builder.recorded.run import Capture
from rockplan.values.graph import CDGraph
from testing import graph_rules, run_rules

_Form = TypeVar("_Form")


class IllegalForm(Exception):
    """A recorded run or a graph breaks a rule of its table. Always a bug in rockplan, never in the
    model."""


def check_after_pass(made: Capture | CDGraph, name: str) -> None:
    """Check what the pass `name` has made. Raises IllegalForm."""
    if isinstance(made, Capture):
        check(run_rules.RULES, made, f"after {name}")
    else:
        check(graph_rules.RULES, made, f"after {name}")


def check(rules: Iterable[Callable[[_Form], Iterator[str]]], form: _Form, when: str) -> None:
    """Raise IllegalForm with the first rule that `form` breaks, in the words of its docstring up to
    "Yields", and with how it is broken. when: what made the form."""
    for rule in rules:
        for broken in rule(form):
            words = " ".join((rule.__doc__ or "").split()).partition(" Yields")[0]
            raise IllegalForm(f"{when}: {words.rstrip('.')}, but {broken}")
