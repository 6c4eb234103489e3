"""Machine: the memory that Linux has for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUPS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of each version: controller, folder, files of the limit and the usage, and which line of
memory.stat says how much of the usage is given back when memory is asked for."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """What the machine has available and each control group leaves to this process, the least;
    None where Linux does not say it. root: of the file system."""
    known = [*_by_the_machine(root), *_left_by_groups(root)]
    return max(min(known), 0) if known else None


def _by_the_machine(root: Path) -> Iterator[int]:
    for name, *words in _lines(root / "proc/meminfo"):
        if name == "MemAvailable:":
            yield int(words[0]) * 1024


def _left_by_groups(root: Path) -> Iterator[int]:
    """By the group of this process and all above it; a container may see the last alone."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = " ".join(line).split(":", 2)
        for controller, folder, limit, usage, given_back in _CGROUPS:
            if controller not in controllers.split(","):
                continue
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                at = root / "sys/fs/cgroup" / folder / group
                limits, usages = _lines(at / limit), _lines(at / usage)
                if limits and usages and limits[0][0] != "max":
                    stat = dict(line[:2] for line in _lines(at / "memory.stat"))
                    unused_bytes = int(stat.get(given_back, 0))
                    yield int(limits[0][0]) - int(usages[0][0]) + unused_bytes


def _lines(path: Path) -> list[list[str]]:
    """Words of the lines that have any; nothing where there is no such file."""
    try:
        return [line.split() for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []


def is_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """Does what is written there take memory, and no disk? root: of the file system."""
    mounts = {line[1]: line[2] for line in _lines(root / "proc/self/mounts")}
    path = folder.resolve()
    kinds = (mounts[str(p)] for p in (path, *path.parents) if str(p) in mounts)
    return next(kinds, "") in ("tmpfs", "ramfs")
