"""`rockplan cache`: list and clear the entries on disk."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rockplan.cli import display
from rockplan.cli.arguments import Json
from rockplan.cli.ending import ending
from rockplan.errors import InvalidInput
from rockplan.store.cache import KINDS, Cache, Entry, default_folder
from rockplan.values.plan import format_bytes

app = typer.Typer(
    help="Look after profiles, options and plans that are kept on disk "
    "(ROCKPLAN_CACHE_DIR, else the platform's cache folder).",
    no_args_is_help=True,
    rich_markup_mode=None,
)


Kinds = Annotated[
    list[str] | None, typer.Argument(metavar="[KIND]...", help=f"Any of {', '.join(KINDS)}.")
]


@app.command("list", epilog="Example: rockplan cache list plan")
def list_entries(kinds: Kinds = None, as_json: Json = False) -> None:
    """What is kept: kind, name, size, age, and what it was made for, or why it is of no use."""
    with ending(as_json):
        wanted = _checked_kinds(kinds)
        entries = [e for e in Cache(default_folder()).entries() if e.kind in wanted]
    if as_json:
        display.print_json(
            {"folder": str(default_folder()), "entries": list(map(_entry_row, entries))}
        )
        return
    print(
        f"{default_folder()}: {len(entries)} entries, "
        f"{format_bytes(sum(e.size_bytes for e in entries))}"
    )
    if entries:
        columns = ["name", "kind", "size", "age", "made for"]
        display.show_table(columns, map(_facts, entries), words=(0, 1, 4))


@app.command("clear", epilog="Example: rockplan cache clear plan options")
def clear_entries(kinds: Kinds = None, as_json: Json = False) -> None:
    """Delete entries, of all kinds or of some. Files that are not the cache's own stay."""
    with ending(as_json):
        count, size_bytes = Cache(default_folder()).clear(_checked_kinds(kinds))
    if as_json:
        display.print_json({"deleted": count, "bytes": size_bytes})
    else:
        print(f"deleted {count} files, {format_bytes(size_bytes)}, from {default_folder()}")


def _checked_kinds(kinds: list[str] | None) -> tuple[str, ...]:
    unknown = set(kinds or ()) - set(KINDS)
    if unknown:
        raise InvalidInput(
            f"no kind of entry: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}"
        )
    return tuple(kinds or KINDS)


def _entry_row(entry: Entry) -> display.Row:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "modified_ns": entry.modified_ns,
        "key": dict(entry.key),
        "problem": entry.problem,
    }


def _facts(entry: Entry) -> list[str]:
    hours = (time.time_ns() - entry.modified_ns) / 3.6e12
    age = f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"
    names = {
        "profile": ("profile",),
        "options": ("block",),
        "plan": ("graph", "budget"),
    }
    found = {name: entry.key.get(name, "?") for name in names[entry.kind]}
    of = ", ".join(f"{n} {fact[:12] if len(fact) == 64 else fact}" for n, fact in found.items())
    return [entry.name[:16], entry.kind, format_bytes(entry.size_bytes), age, entry.problem or of]
