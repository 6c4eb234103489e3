"""Cache: profiles and option families on disk, so that a second plan measures and solves nothing.

One JSON file for each entry, named by what it depends on. Writes go to a temporary file that then
takes the place of the entry, so readers never see half of one and several processes may plan at
once. An entry that cannot be read is named in a warning, set aside with the ending '.damaged',
and made again. Nothing that is read is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs

from rockplan import serial
from rockplan.block import BlockOption, OptionFamily
from rockplan.errors import PlanFormatError
from rockplan.profile import Profile

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cache:
    """Entries below one folder."""

    folder: Path

    def profile(self, key: str) -> Profile | None:
        """What is known of one device, torch version and number of threads."""
        return self._read(self._path("profile", key), serial.parse_profile)

    def put_profile(self, key: str, profile: Profile) -> None:
        """Keep `profile` together with what is known already under `key`."""
        before = self.profile(key)
        if before is not None:
            costs = dict(before.costs) | dict(profile.costs)
            profile = Profile(
                profile.source,
                profile.device,
                profile.torch_version,
                profile.threads,
                tuple(sorted(costs.items())),
            )
        self._write(self._path("profile", key), serial.dump_profile(profile))

    def family(self, digest: str, is_legal: Callable[[BlockOption], bool]) -> OptionFamily | None:
        """The options of the block class `digest`, if every one of them is legal."""

        def parse(text: str) -> OptionFamily:
            found = serial.parse_family(text)
            if not found.options or not all(map(is_legal, found.options)):
                raise PlanFormatError("an option that is not legal for its block")
            return found

        return self._read(self._path("options", digest), parse)

    def put_family(self, digest: str, family: OptionFamily) -> None:
        self._write(self._path("options", digest), serial.dump_family(family))

    def _path(self, kind: str, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self.folder / f"v{serial.VERSION}" / kind / f"{name}.json"

    def _read(self, path: Path, parse: Callable[[str], T]) -> T | None:
        try:
            return parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (PlanFormatError, UnicodeDecodeError) as error:
            aside = path.with_suffix(".damaged")
            with contextlib.suppress(OSError):
                os.replace(path, aside)
            warnings.warn(
                f"cache entry {path} cannot be used ({error}); set aside as {aside.name} and "
                "made again",
                stacklevel=2,
            )
            return None

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def default_folder() -> Path:
    """ROCKPLAN_CACHE_DIR, else the cache folder of the platform."""
    named = os.environ.get("ROCKPLAN_CACHE_DIR")
    return Path(named) if named else Path(platformdirs.user_cache_dir("rockplan"))
