"""Machine: the memory that Linux has for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUPS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of each cgroup version: controller, folder, files of the limit and the usage, and the line of
memory.stat that says how much of the usage the kernel frees on demand."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the least of what the machine has available and what each control group leaves to this
    process; None if Linux does not say it. root: of the file system."""
    known = [*_by_the_machine(root, "MemAvailable:"), *(left for _, left in _groups(root))]
    return max(min(known), 0) if known else None


def total_bytes(root: Path = Path("/")) -> int | None:
    """Return the least of what the machine has and what each control group allows; None if Linux
    does not say it. root: of the file system."""
    known = [*_by_the_machine(root, "MemTotal:"), *(limit for limit, _ in _groups(root))]
    return min(known) if known else None


def _by_the_machine(root: Path, line: str) -> Iterator[int]:
    for name, *words in _lines(root / "proc/meminfo"):
        if name == line:
            yield int(words[0]) * 1024


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(Bytes that it allows, bytes that it leaves) of this process's control group and of each
    above it that has a limit. (A container may see only its own.)"""
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
                    allowed_bytes = int(limits[0][0])
                    yield allowed_bytes, allowed_bytes - int(usages[0][0]) + unused_bytes


def _lines(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []


def is_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """True if files in the folder take memory and no disk (tmpfs). root: of the file system."""
    mounts = {line[1]: line[2] for line in _lines(root / "proc/self/mounts")}
    path = folder.resolve()
    kinds = (mounts[str(p)] for p in (path, *path.parents) if str(p) in mounts)
    return next(kinds, "") in ("tmpfs", "ramfs")
