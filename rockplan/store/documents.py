"""JSON of the values that are stored on disk. Reading checks every field and executes nothing.

A document states its kind, the version of its format, what it depends on (`key`), and the digest of
everything else in it. PlanFormatError is raised for damage, another version, another kind, wrong
types, fractions and numbers beyond 63 bits, names given twice, deeper nesting or more bytes than
any document has.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rockplan.errors import PlanFormatError
from rockplan.values.block import BlockOption, OptionFamily
from rockplan.values.profile import OpCost, Profile

VERSION = 2
"""Version of the format; 2 added the digest and the key."""

MAX_BYTES = 2**26
"""Largest document that is read; a plan of 10,000 operations takes about 5 MB."""

MAX_NUMBER = 2**63 - 1

T = TypeVar("T")
Key = Mapping[str, str]
"""What a document depends on, by name."""


def canonical(content: object) -> str:
    """Return the same text for the same content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(content: object) -> str:
    """Return the sha256 of the canonical text, in hexadecimal."""
    return hashlib.sha256(canonical(content).encode("ascii")).hexdigest()


def dump(kind: str, content: Mapping[str, object], key: Key | None = None) -> str:
    """Return a JSON document, the same text for the same content."""
    document = {"kind": kind, "version": VERSION, "key": dict(key or {}), **content}
    return canonical({**document, "digest": digest(document)})


def parse(text: str, kind: str, read: Callable[[dict[str, Any]], T], key: Key | None = None) -> T:
    """Return what `read` makes of the fields of a document that `dump` wrote. kind: what it must be
    of; key: if given, the one that it must have been written with. Raises PlanFormatError for any
    other text, and if `read` fails."""
    document = load(text)
    if document["kind"] != kind:
        raise PlanFormatError(f"a document of kind {document['kind']!r}, expected {kind!r}")
    if key is not None and document["key"] != key:
        raise PlanFormatError("it belongs to another key")
    try:
        return read(document)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PlanFormatError(f"damaged {kind} document: {error!r}") from error


def load(text: str) -> dict[str, Any]:
    """Return the fields of a JSON document that `dump` wrote, less its digest, which must be that
    of the rest: 'kind' is text, 'key' maps text to text. Raises PlanFormatError for any other
    text."""
    try:
        document = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_refuse
        )
        if not isinstance(document, dict):
            raise TypeError(f"a {type(document).__name__}, expected an object")
        if document.get("version") != VERSION:
            raise ValueError(f"version {document.get('version')!r:.40}, expected {VERSION}")
        stated = document.pop("digest")
        if stated != digest(document):
            raise ValueError("its content is not what its digest says")
        text_of(document["kind"])
        for pair in document["key"].items():
            list(map(text_of, pair))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PlanFormatError(f"not a document of rockplan: {error!r:.200}") from error
    return document


def read_text(path: Path) -> str:
    """Return the text of a document on disk.

    Raises PlanFormatError if it is no regular file, larger than MAX_BYTES or not UTF-8, and OSError
    if it cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise PlanFormatError("not a regular file")
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise PlanFormatError(f"more than {MAX_BYTES} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanFormatError(f"not UTF-8: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object; raises ValueError if a name occurs twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name is given twice")
    return members


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number:.40} is not an integer")


# Fields: each function returns a value of its type, or raises TypeError


def text_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise TypeError(f"expected a number of at most 63 bits, found {repr(value)[:40]}")
    return value


def naturals(values: object) -> tuple[int, ...]:
    return tuple(natural(v) for v in list_of(values))


def list_of(values: object) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError(f"expected a list, found {type(values).__name__}")
    return values


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {type(value).__name__}")
    return value


_READERS: dict[Any, Callable[[object], Any]] = {
    "str": text_of,
    "int": natural,
    "bool": flag,
    "tuple[int, ...]": naturals,
}


def read_fields(kind: Any, row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Read fields of the dataclass `kind` from the members of those names: `names`, or all that are
    texts, numbers, flags or lists of numbers."""
    readers = {f.name: _READERS[f.type] for f in fields(kind) if f.type in _READERS}
    return {name: readers[name](row[name]) for name in names or readers}


# Profiles


def dump_profile(profile: Profile, key: Key | None = None) -> str:
    costs = {digest: astuple(cost) for digest, cost in profile.costs}
    facts = {f.name: getattr(profile, f.name) for f in fields(profile) if f.name != "costs"}
    return dump("profile", {**facts, "costs": costs}, key)


def parse_profile(text: str, key: Key | None = None) -> Profile:
    return parse(text, "profile", _read_profile, key)


def _read_profile(document: dict[str, Any]) -> Profile:
    names = [f.name for f in fields(OpCost)]
    rows = {c: dict(zip(names, list_of(r), strict=True)) for c, r in document["costs"].items()}
    costs = tuple((call, OpCost(**read_fields(OpCost, row))) for call, row in rows.items())
    return Profile(**read_fields(Profile, document), costs=costs)


# Options of blocks


def dump_family(family: OptionFamily, key: Key | None = None) -> str:
    """Return the options of one block as the text of a document, stored under `key`."""
    return dump("options", asdict(family), key)


def parse_family(text: str, key: Key | None = None) -> OptionFamily:
    return parse(text, "options", _read_family, key)


def _read_family(document: dict[str, Any]) -> OptionFamily:
    options = tuple(BlockOption(**read_fields(BlockOption, row)) for row in document["options"])
    return OptionFamily(options, **read_fields(OptionFamily, document))
