"""Writes the records of a run folder: recipe, environment, and JSON Lines files.

Lines are flushed as they are written, so a killed run keeps all complete lines. Before a checkpoint
is saved, they are flushed to the disk. On resume, the lines of steps after the checkpoint are
dropped, because those steps run again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eepo.runs.jsonl import parse_json, read_records
from eepo.runs.rewind import rewind
from eepo.runs.writing import flush_to_disk, writing
from eepo.types import UserError

METRICS, EVALUATIONS, COMPLETIONS = "metrics.jsonl", "evaluations.jsonl", "completions.jsonl"
ALARMS = "alarms.jsonl"
RECORDS = (METRICS, EVALUATIONS, COMPLETIONS, ALARMS)
LAST_CHECKPOINT = "last_checkpoint.json"  # {"step": N}: tells "never saved" from "lost"
FINISHED = "finished.json"  # {"step": N, "num_sets": N}: the run is complete at this step
LEFTOVER = re.compile(r"\..+\.(toml|json|jsonl|txt|md|tex|bak-\d+)\.\d+")  # see write_atomically
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "tokenizers")


def resume_command(folder: Path, command: str = "train") -> str:
    """Return the command that resumes the run in `folder`. Its recipe holds every knob."""
    recipe = shlex.quote(str(folder / "recipe.toml"))
    return f"eepo {command} {recipe} --out {shlex.quote(str(folder))} --resume"


class RunLog:
    """Appends to the records in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_rows = dict.fromkeys(RECORDS, 0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder} cannot be created: {error.strerror}") from error

    def write_recipe(self, text: str) -> None:
        write_atomically(self.folder / "recipe.toml", text)

    def write_environment(self, device: str) -> None:
        write_atomically(
            self.folder / "environment.json", json.dumps(environment(device), indent=2) + "\n"
        )

    def append(self, name: str, *rows: dict[str, Any]) -> None:
        path = self.folder / name
        with writing(path), path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=True) + "\n")
        if name in self.num_rows:
            self.num_rows[name] += len(rows)

    def has_evaluation(self, step: int, *kinds: str) -> bool:
        path = self.folder / EVALUATIONS
        rows = read_records(path) if path.exists() else ()
        return any(row["step"] == step and row.get("kind") in kinds for row in rows)

    def flush_to_disk(self) -> None:
        """Wait until all records are on the disk: a checkpoint must not go further than they do."""
        for path in [*(self.folder / name for name in RECORDS), self.folder]:
            if path.exists():
                flush_to_disk(path)

    def write_last_checkpoint(self, step: int) -> None:
        write_atomically(self.folder / LAST_CHECKPOINT, json.dumps({"step": step}) + "\n")

    def write_finished(self, step: int, num_sets: int) -> None:
        """Mark the run as complete. `num_sets` is the number of its evaluation sets."""
        text = json.dumps({"step": step, "num_sets": num_sets}) + "\n"
        write_atomically(self.folder / FINISHED, text)

    def rewind(
        self, step: int, num_expected: Mapping[str, int] | None = None, keep_copies: bool = False
    ) -> list[str]:
        """Drop the lines after `step`, unfinished lines, and temporary files of a killed process.

        `num_expected` has the number of rows that each file must have up to `step`. Return a line
        for each damaged file, and with `keep_copies` a line that names the copies.
        """
        remove_temporary_files(self.folder)
        notes, copies = [], []
        for name in RECORDS:
            expected = (num_expected or {}).get(name, 0)
            done = rewind(self.folder / name, step, expected, name == METRICS, keep_copies)
            self.num_rows[name] = done.num_rows
            if done.is_damaged:
                notes.append(done.line())
            elif done.copy:
                copies.append(done.copy.name)
        if copies:
            notes.append(f"the rows after step {step} are dropped; copies: {', '.join(copies)}")
        return notes


def needs_no_evaluation(folder: Path, step: int) -> bool:
    """Return whether the run is complete at `step` although its task has no evaluation sets."""
    try:
        finished = parse_json((folder / FINISHED).read_bytes(), FINISHED)
    except (FileNotFoundError, UserError):  # unfinished, damaged, or of an older version
        return False
    return finished == {"step": step, "num_sets": 0}


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and rename it: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            temporary.write_text(text, encoding="utf-8")
            flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporary_files(folder: Path) -> None:
    """Remove what killed processes left in `write_atomically`. The caller has the folder's lock."""
    for path in folder.glob(".*"):
        if LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def environment(device: str) -> dict[str, Any]:
    """Describe the software and hardware, so that the numbers can be reproduced."""
    return {
        "eepo": _version("eepo"),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "num_cores": os.cpu_count(),
        "device": device,
        "packages": {name: _version(name) for name in PACKAGES},
        "command": " ".join(sys.argv),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the git commit of the running source tree, or None outside of one."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
