"""A run is a folder. This writes and reads its records: recipe, environment, and one JSON line for each event.

Lines are flushed as they are written, so a killed run keeps everything up to its last whole line. On resume, lines
from steps after the checkpoint are dropped: those steps happen again.
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
from eepo.types import UserError

METRICS, EVALUATIONS, COMPLETIONS = "metrics.jsonl", "evaluations.jsonl", "completions.jsonl"
ALARMS = "alarms.jsonl"
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "tokenizers")


def resume_command(folder: Path, command: str = "train") -> str:
    """What goes on with the run in `folder` whatever --set it was started with: its own recipe holds every knob."""
    return f"eepo {command} {shlex.quote(str(folder / 'recipe.toml'))} --out {shlex.quote(str(folder))} --resume"


class RunLog:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder} cannot be made: {error.strerror}") from error

    def write_recipe(self, text: str) -> None:
        write_whole(self.folder / "recipe.toml", text)

    def write_environment(self, device: str) -> None:
        write_whole(
            self.folder / "environment.json", json.dumps(environment(device), indent=2) + "\n"
        )

    def append(self, name: str, *rows: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=True) + "\n")

    def rewind(self, step: int) -> None:
        """Drop every line after `step`, a torn last one, and what a killed rewind left."""
        for left in self.folder.glob(".*.jsonl.*"):
            left.unlink()
        for name in (METRICS, EVALUATIONS, COMPLETIONS, ALARMS):
            path = self.folder / name
            if path.exists():
                before = path.read_text(encoding="utf-8")
                kept = [line for line in before.splitlines(keepends=True) if line.endswith("\n")]
                after = "".join(line for line in kept if json.loads(line)["step"] <= step)
                if after != before:
                    write_whole(path, after)


def write_whole(path: Path, text: str) -> None:
    """Write aside and rename: a reader sees the old file or the new one, never half of one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def environment(device: str) -> dict[str, Any]:
    """What someone needs to know to get the same numbers."""
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
    """Of the source tree that is running, if it is one."""
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
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
