"""Writes the records of a run folder: recipe, environment, and JSON Lines files.

Lines are flushed as they are written, so a killed run keeps all complete lines. On resume, the
lines of steps after the checkpoint are dropped, because those steps run again.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import eepo
from eepo.runs.jsonl import parse_json
from eepo.runs.writing import writing
from eepo.types import UserError

METRICS, EVALUATIONS, COMPLETIONS = "metrics.jsonl", "evaluations.jsonl", "completions.jsonl"
ALARMS = "alarms.jsonl"
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "tokenizers")


def resume_command(folder: Path, command: str = "train") -> str:
    """Return the command that resumes the run in `folder`. Its recipe holds every knob."""
    recipe = shlex.quote(str(folder / "recipe.toml"))
    return f"eepo {command} {recipe} --out {shlex.quote(str(folder))} --resume"


class RunLog:
    """Appends to the records in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, unfinished lines, and leftovers of a killed rewind."""
        for leftover in self.folder.glob(".*.jsonl.*"):
            leftover.unlink()
        for name in (METRICS, EVALUATIONS, COMPLETIONS, ALARMS):
            path = self.folder / name
            if path.exists():
                before = path.read_text(encoding="utf-8")
                kept = [line for line in before.splitlines(keepends=True) if line.endswith("\n")]
                steps = (parse_json(line.encode(), str(path))["step"] for line in kept)
                pairs = zip(kept, steps, strict=True)
                after = "".join(line for line, at in pairs if at <= step)
                if after != before:
                    write_atomically(path, after)


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and rename it: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def environment(device: str) -> dict[str, Any]:
    """Describe the software and hardware, so that the numbers can be reproduced."""
    return {
        "eepo": eepo.__version__,
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
