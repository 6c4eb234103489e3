"""Forms: check an intermediate form (run or graph) against a table of rules.

takes: rules, functions that yield what breaks them; their docstrings say what holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rockplan.errors import IllegalForm

_Form = TypeVar("_Form")


def check(rules: Iterable[Callable[[_Form], Iterator[str]]], form: _Form, when: str) -> None:
    """Raise IllegalForm with the first rule that `form` breaks, in the words of its docstring up to
    "Yields", and with how it is broken. when: what made the form."""
    for rule in rules:
        for broken in rule(form):
            words = " ".join((rule.__doc__ or "").split()).partition(" Yields")[0]
            raise IllegalForm(f"{when}: {words.rstrip('.')}, but {broken}")
