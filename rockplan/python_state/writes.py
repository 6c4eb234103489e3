"""Writes: what held is compared again only after something that it was read from was written to.

takes: items, each of which says what it is read from. guarantees: `hold` answers as all items
together would; only those are asked whose sources were written to since they held.

That a dictionary was written to is told by its version, which guards of Dynamo read. From Python
3.13 on attributes are written beside the dictionary that has them, and its version stays: there,
and with a PyTorch that has no such function, the objects in it tell.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch


def are_one(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """True if both have the same objects in the same order."""
    return len(now) == len(then) and all(map(operator.is_, now, then))


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How it is told that sources of a kind were written to. read: return a token of each source;
    is_alike, are_alike: compare two tokens, two lists of them."""

    read: Callable[[Sequence[Any]], list[Any]]
    is_alike: Callable[[Any, Any], bool] = operator.eq
    are_alike: Callable[[Any, Any], bool] = operator.eq


def of_parts(parts: Callable[[Any], Sequence[Any]]) -> Way:
    """Return the way of sources that hold nothing but `parts`."""
    return Way(lambda of: [*map(parts, of)], are_one, lambda *of: all(map(are_one, *of)))


_space = operator.attrgetter("__dict__")
_version: Any = getattr(torch._C._dynamo.guards, "dict_version", None)
_BY_VERSION = Way(lambda tables: [*map(_version, tables)])
_BY_CONTENT = of_parts(lambda table: (*table, *table.values()))
FILLED = _BY_VERSION if _version and sys.version_info < (3, 13) else _BY_CONTENT
EMPTY = Way(lambda tables: [*map(bool, tables)] if any(tables) else [])
"""Versions do not count that an empty dictionary becomes a copy of another one."""


def _of_attributes(way: Way) -> Way:
    return replace(way, read=lambda owners: way.read([*map(_space, owners)]))


_KIND = Way(lambda owners: [*map(type, owners)], operator.is_, are_one)
_ATTRIBUTES, _NO_ATTRIBUTES = _of_attributes(FILLED), _of_attributes(EMPTY)
ELEMENTS = of_parts(tuple)

Sources = tuple[Any, ...]
"""The way and the owner of each in turn. A way is None where it cannot be told."""

UNTOLD: Sources = (None, None)


def attributes(owner: Any) -> Sources:
    """Return the sources of what the class and the attributes of an object say."""
    read: Any = type(owner).__getattribute__
    if read is not object.__getattribute__:
        return UNTOLD
    return _KIND, owner, _ATTRIBUTES if _space(owner) else _NO_ATTRIBUTES, owner


def items(table: Any) -> Sources:
    """Return the source of the items of a dictionary. (One of a derived class may order them.)"""
    return (FILLED if table else EMPTY, table) if type(table) is dict else UNTOLD


class Item(Protocol):
    """Something that is compared with what it was."""

    def hold(self) -> bool:
        """True if it is as it was recorded."""

    def sources(self) -> Sources:
        """Return what `hold` reads; UNTOLD also if it holds because other objects are equal to the
        recorded ones, into which it does not look again."""


@dataclass(slots=True)
class _Noted:
    """Sources of one way, the number of the item that each is of, and tokens from before that was
    found to hold."""

    way: Way
    owners: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)

    def changes(self) -> list[tuple[_Noted, int, Any]]:
        """List (this, place of a source, its token now) of those that were written to."""
        now, is_alike = self.way.read(self.owners), self.way.is_alike
        if self.way.are_alike(now, self.tokens):
            return []
        pairs = enumerate(itertools.zip_longest(now, self.tokens, fillvalue=False))
        return [(self, place, pair[0]) for place, pair in pairs if not is_alike(*pair)]


class UntilWritten:
    """Items of which it is asked before each call whether they hold."""

    __slots__ = ("_always", "_items", "_noted", "_sources")

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = tuple(items)
        self._noted: list[_Noted] = []

    def hold(self) -> bool:
        """True if all items hold."""
        if not self._noted:
            return self._note()
        changes = [change for noted in self._noted for change in noted.changes()]
        touched = {noted.numbers[place] for noted, place, _ in changes}
        if not all(self._items[number].hold() for number in touched | self._always):
            return False
        same = {n for n in touched if are_one(self._items[n].sources(), self._sources[n])}
        for noted, place, token in changes:
            if noted.numbers[place] in same:
                noted.tokens[place] = token
        return True

    def _note(self) -> bool:
        """Ask all items, and note their sources if all hold."""
        sources = [item.sources() for item in self._items]
        self._always = {n for n, of in enumerate(sources) if any(way is None for way in of[::2])}
        by_way: dict[Way, _Noted] = {}
        for number, of in enumerate(sources):
            for way, owner in zip(of[::2], of[1::2], strict=True):
                if number not in self._always:
                    noted = by_way.setdefault(way, _Noted(way))
                    noted.owners.append(owner)
                    noted.numbers.append(number)
        for noted in by_way.values():
            noted.tokens = noted.way.read(noted.owners)
        is_alike = all(item.hold() for item in self._items)
        if is_alike:
            self._sources, self._noted = sources, [*by_way.values()]
        return is_alike
