"""Reads the memory limits of this process's control groups (cgroups), in version 1 and 2.

Containers, batch systems and `systemd-run -p MemoryMax=...` set them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    limit: str
    used: str
    cached: str  # row of memory.stat: cached pages of files, which the kernel can drop


VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")
VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_below_limits(root: Path, own_groups: Path) -> int | None:
    """Return the smallest number of free bytes in all groups of this process; None: no limit.

    `root` is where the groups are mounted, and `own_groups` lists those of this process. A limit
    also holds for the groups below, so all groups from there up to the root count. Inside a
    container only the root may be visible. Cached pages of files count as free.
    """
    free = [
        _free(folder, files)
        for top, path, files in _hierarchies(root, own_groups)
        for folder in _folders(top, path)
    ]
    return min((size for size in free if size is not None), default=None)


def _hierarchies(root: Path, own_groups: Path) -> Iterator[tuple[Path, str, _Files]]:
    """Yield mount point, path of this process's group, and file names."""
    yield root, "/", VERSION_2
    yield root / "memory", "/", VERSION_1
    try:
        lines = own_groups.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:  # ID:CONTROLLERS:PATH; the ID of version 2 is 0
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":
            yield root, path, VERSION_2
        elif "memory" in controllers.split(","):
            yield root / "memory", path, VERSION_1


def _folders(top: Path, path: str) -> list[Path]:
    """Return the folders from `top` down to `path`."""
    names = [name for name in path.split("/") if name not in ("", ".", "..")]
    return [top.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def _free(folder: Path, files: _Files) -> int | None:
    try:
        limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
    except (OSError, ValueError):  # no such file, or the limit is the word "max"
        return None
    return max(0, limit - used + _cached(folder / "memory.stat", files.cached))


def _cached(table: Path, row: str) -> int:
    try:
        return int(dict(line.split() for line in table.read_text().splitlines())[row])
    except (OSError, ValueError, KeyError):
        return 0
