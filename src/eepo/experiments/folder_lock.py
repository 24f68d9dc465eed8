"""Locks the folder of an experiment, so that two commands do not run it at the same time."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from eepo.types import UserError

LOCK = ".lock"


class FolderLock:
    """Holds the lock. Its file lists the titles of the runs that are running."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @property
    def descriptor(self) -> int:
        """Return the file descriptor. A process that inherits it holds the lock, too."""
        return self._file.fileno()

    def list_running(self, titles: Sequence[str]) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump(list(titles), self._file)
        self._file.flush()


@contextmanager
def locked_folder(out: Path) -> Iterator[FolderLock]:
    """Create and lock a folder.

    Every run inherits the lock. So a run that outlives a killed experiment is not started twice.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be created ({error.strerror})") from error
    with (out / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"--out {out}: an experiment, or a run of a killed one, is still running there"
            ) from error
        lock = FolderLock(file)
        yield lock
        lock.list_running([])


def running_titles(out: Path) -> list[str]:
    """Return the titles of the runs that are running in a folder."""
    path = out / LOCK
    if not path.is_file():
        return []
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                titles = json.load(file)
            except ValueError:  # it is being written
                return []
            return [str(title) for title in titles]
    return []
