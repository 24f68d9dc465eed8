"""One process at a time holds the lock of a run folder. Neither a kill nor a fork keeps it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eepo.runs import lock
from eepo.runs.lock import LOCK, RunLock
from eepo.types import UserError


def error_of(folder: Path, force: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        RunLock(folder, force)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize("force", [False, True])
def test_a_second_lock_is_refused_with_host_and_process(force: bool, tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    owner = f"process {os.getpid()} on host {platform.node()} (started 20"
    assert error_of(tmp_path, force).startswith(f"--out {tmp_path} is in use by {owner}")
    first.release()
    RunLock(tmp_path).release()


def test_a_released_lock_leaves_no_file(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    held.release()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_an_error_releases_the_lock_and_removes_a_new_folder(tmp_path: Path) -> None:
    for folder in (tmp_path / "new" / "folder", tmp_path):
        held = RunLock(folder)
        with pytest.raises(ZeroDivisionError), held.released_on_error():
            raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    held = RunLock(tmp_path)
    with held.released_on_error():
        pass
    error_of(tmp_path)


def owned_by(folder: Path, **changes: Any) -> Path:
    """Write the lock file of a process that was killed."""
    RunLock(folder)._file.close()
    owner = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps(owner | changes))
    return folder


def test_a_lock_of_another_host_needs_force(tmp_path: Path) -> None:
    owned_by(tmp_path, host="elsewhere", boot="other", pid=123)
    before = (tmp_path / LOCK).read_bytes()
    line = error_of(tmp_path)
    assert "was last used by process 123 on host elsewhere" in line
    assert "--force" in line
    assert (tmp_path / LOCK).read_bytes() == before
    RunLock(tmp_path, force=True).release()
    RunLock(tmp_path).release()


SAME_MACHINE = {
    "killed process": {"pid": 2**22 + 1},
    "another container": {"host": "elsewhere"},
    "before a reboot": {"boot": "other"},
}


@pytest.mark.skipif(not lock.BOOT_ID.exists(), reason="needs the boot id of Linux")
@pytest.mark.parametrize("changes", SAME_MACHINE.values(), ids=SAME_MACHINE)
def test_a_stale_lock_of_this_machine_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    RunLock(owned_by(tmp_path, **changes)).release()


def test_the_owner_may_write_its_name_after_it_has_the_lock(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timer = threading.Timer(0.2, lambda: os.write(file.fileno(), b'{"pid": 7, "host": "a"}'))
        timer.start()
        assert "is in use by process 7 on host a" in error_of(tmp_path)
        timer.join()
        file.truncate(0)
        assert error_of(tmp_path) == f"--out {tmp_path} is in use by another process"


@pytest.mark.parametrize("text", [b"", b"\0" * 50, b"[1]", b'{"host": ', b"\xff\n"])
def test_a_damaged_lock_file_is_taken(text: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(text)
    RunLock(tmp_path).release()


def test_a_file_system_without_locks_needs_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    assert "cannot be locked (No locks available)" in error_of(tmp_path)
    assert "--force" in error_of(tmp_path)
    RunLock(tmp_path, force=True).release()


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "Not a directory" in error_of(tmp_path / "file" / "run")
    assert error_of(tmp_path / "file") == f"--out {tmp_path / 'file'} is a file; give a folder"


def test_the_lock_is_exclusive_while_others_release_and_remove_it(tmp_path: Path) -> None:
    """The file is removed on release, so a lock may be taken on a file that is already gone."""
    inside, overlaps = threading.Lock(), []

    def work(index: int) -> None:
        count = 0
        while count < 50:
            try:
                held = RunLock(tmp_path)
            except UserError:
                continue
            if inside.acquire(blocking=False):
                time.sleep(1e-4)
                inside.release()
            else:
                overlaps.append(index)
            count += 1
            held.release()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps


OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from eepo.runs.lock import RunLock

held = RunLock(Path(sys.argv[1]))
if sys.argv[2] == "fork":
    if os.fork() == 0:
        held.release()  # must not remove the lock of the parent
        print(os.getpid(), flush=True)  # the child does: by now it has closed its file
        time.sleep(60)
        os._exit(0)
else:
    print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_a_child_does_not_keep_the_lock_of_a_killed_process(how: str, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), how], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        assert f"in use by process {owner.pid} on host" in error_of(tmp_path)
        owner.kill()
        owner.wait()
        os.kill(child, 0)  # the child is still there
        RunLock(tmp_path).release()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        os.kill(child, signal.SIGKILL)
