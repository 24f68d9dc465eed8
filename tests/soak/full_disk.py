"""Runs commands on a disk that is full after a random number of bytes, then continues them."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import run_fork
from comparison import differences, files
from kills import check_ended
from scenarios import Workspace
from table import Findings


def try_full_disk(workspace: Workspace, rng: random.Random) -> Findings:
    """The command must end with one line. With space again, it must finish as if never stopped."""
    scenario = workspace.scenario(rng.choice(["train", "rewarded", "warmup", "eval"]))
    folder = workspace.new_folder(f"disk-{scenario.name}-{rng.getrandbits(32):08x}")
    sizes = [path.stat().st_size for path in files(scenario.reference).values()]
    findings = Findings()
    if rng.random() < 0.5 and can_mount(workspace.folder):
        size = int(rng.uniform(0.05, 1.1) * sum(sizes))
        with small_disk(folder / "disk", size):
            out = folder / "disk" / "out"
            outcome = run_fork(scenario.command(out), workspace.folder)
            if out.exists():
                shutil.copytree(out, folder / "out")
        what = f"tmpfs of {size} bytes"
    else:
        size = int(max(sizes) ** rng.random())  # uniform in the logarithm
        outcome = run_fork(scenario.command(folder / "out"), workspace.folder, size)
        what = f"files of at most {size} bytes"
    where = f"{folder}: {what}"
    if not outcome.is_one_line_error and not check_ended(findings, outcome, where):
        return findings
    outcome = run_fork(scenario.command(folder / "out"), workspace.folder)
    if check_ended(findings, outcome, f"{where}, then continued"):
        for line in differences(scenario.reference, folder / "out"):
            findings.add("differences", f"{where}: {line}")
    if not findings.failures:
        shutil.rmtree(folder)
    return findings


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={max(4096, num_bytes)}", "tmpfs", str(folder)]
    subprocess.run(["mount", *options], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def can_mount(folder: Path) -> bool:
    probe = folder / "mount-probe"
    try:
        with small_disk(probe, 4096):
            return True
    except (OSError, subprocess.CalledProcessError):
        if probe.exists():
            probe.rmdir()
        return False
