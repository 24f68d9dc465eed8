"""Locks a run folder, so that two processes never write to the same run.

The kernel releases the lock when its process ends, also when it is killed. The file `.lock` exists
while the run is active, and after a kill. It says who holds the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from eepo.runs.jsonl import parse_json
from eepo.types import UserError

LOCK = ".lock"
OWNER_SECONDS = 1.0  # for the owner of a lock to write its name
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_open_files: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


class RunLock:
    """Holds the lock of a run folder until `release`, or until the process ends.

    `force` also takes the folder from a process of another host. File systems may not share locks
    between hosts, so such a process may still be active.
    """

    def __init__(self, folder: Path, force: bool = False) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _lock(self.path, force)
        except FileExistsError:
            raise UserError(f"--out {folder} is a file; give a folder") from None
        except OSError as error:
            raise UserError(f"--out {folder} cannot be written: {error.strerror}") from error
        owner = _read_owner(self._file)
        if owner and not _is_this_machine(owner) and not force:
            self._file.close()
            raise UserError(
                f"--out {folder} was last used by {_describe(owner)}, which did not end normally; "
                "if it is no longer active, add --force"
            )
        _open_files.add(self._file)
        self._write_owner()

    def release(self) -> None:
        """Remove the lock, once. In a forked child, the file is closed: do nothing there."""
        if self._file.closed:
            return
        self.path.unlink(missing_ok=True)
        self._file.close()
        self._remove_new_folders()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _write_owner(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(json.dumps(_this_process()).encode() + b"\n")
        self._file.flush()

    def _remove_new_folders(self) -> None:
        """Remove the folders that this lock created, if the run wrote nothing into them."""
        with suppress(OSError):
            for path in self._new_folders:
                path.rmdir()


def _lock(path: Path, force: bool) -> IO[bytes]:
    """Return the locked file. Raise an error if another process has the lock."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _wait_for_owner(file)
            file.close()
            raise UserError(f"--out {path.parent} is in use by {_describe(owner)}") from None
        except OSError as error:  # the file system has no locks
            if not force:
                file.close()
                raise UserError(
                    f"--out {path.parent} cannot be locked ({error.strerror}); "
                    "if no other process uses it, add --force"
                ) from error
        # The previous owner may have removed the file after it was opened here.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _this_process() -> dict[str, Any]:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": platform.node(), "boot": _boot(), "pid": os.getpid(), "started": started}


def _boot() -> str:
    """Return an id of the running kernel. Containers of one machine share it."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _is_this_machine(owner: dict[str, Any]) -> bool:
    """Return whether this kernel would know if the owner still held the lock."""
    here = _this_process()
    return owner.get("host") == here["host"] or owner.get("boot") == here["boot"] != ""


def _wait_for_owner(file: IO[bytes]) -> dict[str, Any]:
    """Return the owner of a lock. It may still have to write its name."""
    deadline = time.monotonic() + OWNER_SECONDS
    while not (owner := _read_owner(file)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return owner


def _read_owner(file: IO[bytes]) -> dict[str, Any]:
    file.seek(0)
    try:
        owner = parse_json(file.read(10_000), LOCK)
    except UserError:  # empty or damaged
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    pid, host, started = (owner.get(key) for key in ("pid", "host", "started"))
    return f"process {pid} on host {host} (started {started})"


def _close_in_child() -> None:
    """Close the inherited files of locks: a forked child must not keep a lock alive."""
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
