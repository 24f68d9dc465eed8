"""Damages one file of a run, then resumes it. Three outcomes are allowed:

- the run continues, and equals a run that was never damaged;
- one line says what is damaged; once the file is restored, the run equals the other one;
- a record is damaged, the run says so and continues without the lost rows, and keeps a copy. A
  flipped bit that leaves a valid row is not found, but changes nothing else.
"""

from __future__ import annotations

import fnmatch
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from commands import Outcome, run_fork, start_fork
from comparison import NOT_COMPARED, differences, files
from kills import check_ended
from scenarios import Scenario, Workspace
from table import Findings

# When the process that makes a stopped run is killed: the number of lines in a record
STOP_AT = {
    "train": ("metrics.jsonl", 5),
    "warmup": ("metrics.jsonl", 5),
    "eval": ("completions/problems.jsonl", 14),
}
# What follows from the rows of a record: a checkpoint counts them, alarms need those of metrics.
_FROM_ROWS = re.compile(r"checkpoints/step-\d+/(state|checksums)\.json: other values|alarms\.jsonl")


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def zero(data: bytes, rng: random.Random) -> bytes:
    return bytes(len(data))


def empty(data: bytes, rng: random.Random) -> bytes:
    return b""


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": truncate,
    "zeroed": zero,
    "empty": empty,
    "one bit flipped": flip_bit,
}
WAYS = (*CHANGES, "missing")


def damage(path: Path, way: str, rng: random.Random) -> None:
    if way == "missing":
        path.unlink()
    else:
        path.write_bytes(CHANGES[way](path.read_bytes(), rng))


def try_damage(workspace: Workspace, rng: random.Random) -> Findings:
    """Damage a random file of a stopped or of a finished run."""
    scenario = workspace.scenario(rng.choices(list(STOP_AT), [4, 1, 1])[0])
    before = scenario.reference if rng.random() < 0.3 else stopped(workspace, scenario)
    out = workspace.new_folder(f"damage-{scenario.name}-{rng.getrandbits(32):08x}") / "out"
    shutil.copytree(before, out)
    way = rng.choice(WAYS)
    name = rng.choice(sorted(name for name, path in files(out).items() if path.stat().st_size))
    damage(out / name, way, rng)
    findings, where = Findings(), f"{out}: {name} {way}"
    if scenario.name == "train" and "/" not in name:  # the report reads no checkpoints
        _check_report(findings, out, workspace.folder, where)
    outcome = run_fork(scenario.command(out), workspace.folder)
    if outcome.is_one_line_error:
        shutil.copy2(before / name, out / name)
        outcome = run_fork(scenario.command(out), workspace.folder)
        where += ", then restored"
    if check_ended(findings, outcome, where):
        lines = [line for line in differences(scenario.reference, out) if not _is_kept_copy(line)]
        for line in lines if not _may_differ(name, lines, outcome, out) else ():
            findings.add("differences", f"{where}: {line}; {outcome.last_line()}")
    if not findings.failures:
        shutil.rmtree(out.parent)
    return findings


def _check_report(findings: Findings, out: Path, folder: Path, where: str) -> None:
    """Write a report of the damaged run: a page, or one line."""
    outcome = run_fork(["report", str(out), "--out", str(out.parent / "report.html")], folder)
    if not outcome.is_one_line_error:
        check_ended(findings, outcome, f"{where}: report")


def stopped(workspace: Workspace, scenario: Scenario) -> Path:
    """Return the folder of a run that was killed after some steps."""
    folder = workspace.folder / "stopped" / scenario.name
    record, number = STOP_AT[scenario.name]

    def is_due() -> bool:
        path = folder / record
        return path.exists() and path.read_bytes().count(b"\n") >= number

    if not folder.exists():
        outcome = start_fork(scenario.command(folder), workspace.folder).wait(is_due)
        if outcome.code != -9:
            raise SystemExit(f"{scenario.name} ended before it was killed: {outcome.last_line()}")
        (folder / ".lock").unlink(missing_ok=True)
    return folder


def _is_kept_copy(line: str) -> bool:
    """Return whether a line is about a file that a resumed run keeps: what was damaged, or cut."""
    name, _, rest = line.partition(" ")
    return rest == "is left over" and ("/damaged-step-" in f"/{name}" or ".bak-" in name)


def _may_differ(name: str, lines: list[str], outcome: Outcome, out: Path) -> bool:
    """Return whether `lines` are what a damaged record, or a file without a promise, may cost."""
    is_record = name.endswith(".jsonl")
    if is_record:
        lines = [line for line in lines if not _FROM_ROWS.match(line)]
    if any(not line.startswith((f"{name}:", f"{name} ")) for line in lines):
        return False
    if any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in NOT_COMPARED):
        return True
    if lines == [f"{name} is missing"] and name.endswith("checksums.json"):
        return True  # folders of older versions have no checksums
    if name.startswith("checkpoints/"):  # nothing reads a checkpoint that is not the newest
        return Path(name).parts[1] != max(path.name for path in (out / "checkpoints").iterdir())
    announced = f"{Path(name).name} is damaged" in outcome.output
    one_row = all(line.endswith(" differs") for line in lines)
    return is_record and (announced or one_row)
