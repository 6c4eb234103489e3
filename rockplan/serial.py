"""JSON of the values that are kept on disk. Reading checks every field and runs nothing.

Documents carry a kind and a version; what does not fit raises PlanFormatError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from rockplan.block import BlockOption, OptionFamily
from rockplan.errors import PlanFormatError
from rockplan.profile import OpCost, Profile

VERSION = 1
T = TypeVar("T")


def dump(kind: str, content: dict[str, Any]) -> str:
    """One JSON document, the same text for the same content."""
    document = {"kind": kind, "version": VERSION, **content}
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def parse(text: str, kind: str, read: Callable[[dict[str, Any]], T]) -> T:
    """Read what `dump` wrote. Raises PlanFormatError for anything else."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("kind") != kind:
            raise PlanFormatError(f"not a document of kind {kind!r}")
        if document.get("version") != VERSION:
            raise PlanFormatError(f"version {document.get('version')!r}, expected {VERSION}")
        return read(document)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PlanFormatError(f"damaged {kind} document: {error}") from error


def dump_profile(profile: Profile) -> str:
    costs = {
        digest: [c.time_ns, c.spread_ns, c.workspace_bytes, list(c.result_bytes), c.repeats]
        for digest, c in profile.costs
    }
    facts = {f.name: getattr(profile, f.name) for f in fields(profile) if f.name != "costs"}
    return dump("profile", {**facts, "costs": costs})


def parse_profile(text: str) -> Profile:
    return parse(text, "profile", _read_profile)


def _read_profile(document: dict[str, Any]) -> Profile:
    costs = [
        (
            _text(digest),
            OpCost(
                _natural(row[0]),
                _natural(row[1]),
                _natural(row[2]),
                _naturals(row[3]),
                _natural(row[4]),
            ),
        )
        for digest, row in document["costs"].items()
    ]
    return Profile(
        source=_text(document["source"]),
        device=_text(document["device"]),
        torch_version=_text(document["torch_version"]),
        threads=_natural(document["threads"]),
        costs=tuple(costs),
    )


_OPTION_BYTES = (
    "output_bytes",
    "saved_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "time_ns",
)


def dump_family(family: OptionFamily) -> str:
    options = [
        {
            "forward": list(o.forward),
            "backward": list(o.backward),
            **{name: getattr(o, name) for name in _OPTION_BYTES},
        }
        for o in family.options
    ]
    return dump("options", {"options": options, "gap_ns": family.gap_ns, "solves": family.solves})


def parse_family(text: str) -> OptionFamily:
    return parse(text, "options", _read_family)


def _read_family(document: dict[str, Any]) -> OptionFamily:
    options = tuple(
        BlockOption(
            forward=_naturals(row["forward"]),
            backward=_naturals(row["backward"]),
            **{name: _natural(row[name]) for name in _OPTION_BYTES},
        )
        for row in document["options"]
    )
    gap_ns = document["gap_ns"]
    return OptionFamily(
        options, None if gap_ns is None else _natural(gap_ns), _natural(document["solves"])
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected a number >= 0, found {value!r}")
    return value


def _naturals(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"expected a list, found {type(values).__name__}")
    return tuple(_natural(v) for v in values)
