"""Cache: profiles, options of blocks and plans on disk, so that nothing is computed twice.

One JSON document for each entry (`documents`), named by the digest of everything it depends on (its
key); an entry of a profile is named by its content too, so that measurements of several processes
add up. A document is written beside its place and then moved there, so readers never see half of
one. An entry that cannot be used (damaged, written by another version, false) is named in a
warning, set aside with the ending '.damaged', and made again. Nothing that is read is executed, and
no name that is read becomes a path.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import platformdirs

from rockplan.errors import PlanFormatError
from rockplan.store import documents, plan_file
from rockplan.store.documents import Key
from rockplan.values.block import BlockOption, OptionFamily
from rockplan.values.plan import Plan
from rockplan.values.profile import Profile

T = TypeVar("T")

KINDS = ("profile", "options", "plan")

_PARSERS: dict[str, Callable[[str], object]] = {
    "profile": documents.parse_profile,
    "options": documents.parse_family,
    "plan": plan_file.parse_plans,
}

_NAME = r"[0-9a-f]{40}"
# Names of the cache's own files, which `clear` may delete; the folder may hold other files.
_OWN = re.compile(rf"{_NAME}(-{_NAME})?(\.json|\.damaged|\w*\.part)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache.

    key: everything it depends on, empty if the file cannot be read; problem: why it cannot be used,
    '' if it can; modified_ns: since the epoch.
    """

    kind: str
    path: Path
    size_bytes: int
    modified_ns: int
    key: Key
    problem: str

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache in one folder."""

    folder: Path

    def profile(self, key: Key) -> Profile | None:
        """Return all costs of calls stored under `key`, in one profile; None if there are none.
        They lie in several files: of two costs of one call the newer counts, since a call is
        measured again only if the first cost cannot be right."""
        profiles = [self._read(path, documents.parse_profile, key) for path in self._batches(key)]
        batches = [profile for profile in profiles if profile is not None]
        if not batches:
            return None
        costs = dict(cost for batch in batches for cost in batch.costs)
        return replace(batches[0], costs=tuple(sorted(costs.items())))

    def put_profile(self, key: Key, profile: Profile) -> None:
        """Add the costs of `profile` to those stored under `key`."""
        text = documents.dump_profile(profile, key)
        batch = documents.digest(text)[:40]
        self._write(self.folder / "profile" / f"{_name(key)}-{batch}.json", text)

    def family(self, key: Key, is_legal: Callable[[BlockOption], bool]) -> OptionFamily | None:
        """Return the options of a block that are stored under `key`. None, with a warning unless
        the file is missing, if it cannot be used or `is_legal` rejects one of the options."""

        def parse(text: str, key: Key) -> OptionFamily:
            family = documents.parse_family(text, key)
            if not family.options or not all(map(is_legal, family.options)):
                raise PlanFormatError("an option that is not legal for its block")
            return family

        return self._read(self._path("options", key), parse, key)

    def put_family(self, key: Key, family: OptionFamily) -> None:
        self._write(self._path("options", key), documents.dump_family(family, key))

    def plan(self, key: Key, is_right: Callable[[Plan], bool]) -> Plan | None:
        """Return the plan stored under `key`; its graph has no calls (an outline). None, with a
        warning unless the file is missing, if it cannot be used or `is_right` rejects the plan."""

        def parse(text: str, key: Key) -> Plan:
            plans = plan_file.parse_plans(text, key)
            if len(plans) != 1 or not is_right(plans[0]):
                raise PlanFormatError("a plan of another graph, profile or budget")
            return plans[0]

        return self._read(self._path("plan", key), parse, key)

    def put_plan(self, key: Key, plan: Plan) -> None:
        self._write(self._path("plan", key), plan_file.dump_plans([plan], key))

    def entries(self) -> Iterator[Entry]:
        """Yield every file of the cache, read and checked as far as possible without its model."""
        for kind, path in self._files():
            with suppress(FileNotFoundError):
                status = path.lstat()
                key, problem = _examine(kind, path)
                yield Entry(kind, path, status.st_size, status.st_mtime_ns, key, problem)

    def clear(self, kinds: Iterable[str] = KINDS) -> tuple[int, int]:
        """Delete the cache's files of these kinds ("profile", "options", "plan"); other files in
        the folder stay. Returns the number of files and their bytes."""
        chosen = set(kinds)
        count = size_bytes = 0
        for kind, path in list(self._files()):
            with suppress(FileNotFoundError):
                if kind in chosen:
                    size = path.lstat().st_size
                    path.unlink()
                    count, size_bytes = count + 1, size_bytes + size
        return count, size_bytes

    def _files(self) -> Iterator[tuple[str, Path]]:
        for kind in KINDS:
            with suppress(FileNotFoundError, NotADirectoryError):
                for path in sorted((self.folder / kind).iterdir()):
                    if _OWN.fullmatch(path.name):
                        yield kind, path

    def _batches(self, key: Key) -> list[Path]:
        """Oldest first: each has the costs of one measurement. [] if the folder cannot be read."""
        aged: list[tuple[int, Path]] = []
        with suppress(OSError):
            for path in (self.folder / "profile").glob(f"{_name(key)}-*.json"):
                with suppress(FileNotFoundError):
                    aged.append((path.lstat().st_mtime_ns, path))
        return [path for _, path in sorted(aged)]

    def _path(self, kind: str, key: Key) -> Path:
        return self.folder / kind / f"{_name(key)}.json"

    def _read(self, path: Path, parse: Callable[[str, Key], T], key: Key) -> T | None:
        """None if there is no file; with a warning for one that cannot be read or parsed. The
        latter is renamed."""
        try:
            return parse(documents.read_text(path), key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _warn(f"cache entry {path} cannot be read ({error}); it is made again")
        except PlanFormatError as error:
            aside = path.with_suffix(".damaged")
            with suppress(OSError):
                os.replace(path, aside)
            _warn(
                f"cache entry {path} cannot be used ({error}); set aside as {aside.name} and "
                "made again"
            )
        return None

    def _write(self, path: Path, text: str) -> None:
        """Whole or not at all. Only warns if that fails: a missing file costs time, not the
        plan."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            plan_file.write_whole(path, text)
        except OSError as error:
            _warn(
                f"the cache folder {self.folder} cannot be written ({error.strerror}), so all is "
                "made again next time; set ROCKPLAN_CACHE_DIR to a folder that can, or pass "
                "Options(cache=False)"
            )


def default_folder() -> Path:
    """Return ROCKPLAN_CACHE_DIR, else the cache folder of the platform."""
    named = os.environ.get("ROCKPLAN_CACHE_DIR")
    return Path(named) if named else Path(platformdirs.user_cache_dir("rockplan"))


def _name(key: Key) -> str:
    return documents.digest(dict(key))[:40]


def _examine(kind: str, path: Path) -> tuple[Key, str]:
    """({}, ...) if the key cannot be read; '' if nothing speaks against the use of the file."""
    if path.suffix != ".json":
        return {}, "set aside" if path.suffix == ".damaged" else "left by an interrupted write"
    try:
        text = documents.read_text(path)
        key: Key = documents.load(text)["key"]
        _PARSERS[kind](text)
    except (OSError, PlanFormatError) as error:
        return {}, str(error)
    if not path.name.startswith(_name(key)):
        return key, "its name is not that of its key"
    return key, ""


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
