"""Forms: check an intermediate form (run or graph) against a table of rules.

takes: rules, functions that yield what breaks them; their docstrings say what holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rockplan.errors import IllegalForm

_Form = TypeVar("_Form")


def check(rules: Iterable[Callable[[_Form], Iterator[str]]], form: _Form, when: str) -> None:
    """Raise IllegalForm with the first rule that `form` breaks. when: what made the form."""
    for rule in rules:
        for broken in rule(form):
            raise IllegalForm(f"{when}: {(rule.__doc__ or '').rstrip('.')}, but {broken}")
