"""An evaluation is a folder: its settings, and every completion as one JSON line, for reading and for going on.

`settings.json` says what was asked of which weights; another evaluation is refused there. Lines of a benchmark stand in
the order in which they are sampled, so how many there are says where to go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eepo.runs.jsonl import read_records
from eepo.runs.runlog import RunLog, write_whole
from eepo.types import UserError

SETTINGS, COMPLETIONS = "settings.json", "completions"
SAMPLES = ("num_samples", "temperature", "seed")  # may be added to a greedy evaluation, not changed
OPTIONS = {
    "num_samples": "--samples"
} | {  # settings under the name by which `eepo eval` knows them
    name: f"--{name.replace('_', '-')}"
    for name in (
        "max_new_tokens",
        "max_prompt_tokens",
        "limit",
        "temperature",
        "seed",
        "template",
        "reward",
    )
}
UNREAD = (
    "prompt",
    "gold",
    "text",
    "reason",
)  # what no estimate needs: completions may fill gigabytes


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def settings(self) -> dict[str, Any]:
        """Empty where nothing was evaluated yet."""
        path = self.folder / SETTINGS
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"--out {self.folder} is a file; give a folder")
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise UserError(f"{path}: not the settings of an evaluation: {error}") from error

    def check(self, settings: dict[str, Any]) -> None:
        """Name the first setting that makes this another evaluation. Further benchmarks do not."""
        before = self.settings()
        free = ("benchmarks", *(SAMPLES if before.get("num_samples") == 0 else ()))
        for key, new in settings.items():
            if before and key not in free and before.get(key) != new:
                said = f"{OPTIONS[key]} {new!r}" if key in OPTIONS else f"{key} = {new!r}"
                raise UserError(
                    f"{said}, but the evaluation in {self.folder} has {before.get(key)!r}; give another --out"
                )
        for name, new in settings.get("benchmarks", {}).items():
            if before and before["benchmarks"].get(name, new) != new:
                raise UserError(
                    f"{name}: its problems or prompts are not those of the evaluation in {self.folder}; "
                    "give another --out"
                )

    def open(self, settings: dict[str, Any], device: str) -> None:
        """Begin, or go on with, the evaluation of these settings."""
        self.check(settings)
        before = self.settings()
        log = RunLog(self.folder)
        (self.folder / COMPLETIONS).mkdir(exist_ok=True)
        if not before:
            log.write_environment(device)
        merged = settings | {"benchmarks": before.get("benchmarks", {}) | settings["benchmarks"]}
        write_whole(self.folder / SETTINGS, json.dumps(merged, indent=2) + "\n")

    def path(self, benchmark: str) -> Path:
        return self.folder / COMPLETIONS / f"{benchmark}.jsonl"

    def rows(self, benchmark: str) -> list[dict[str, Any]]:
        """What estimates need of each line."""
        path = self.path(benchmark)
        try:
            lines = read_records(path) if path.is_file() else iter(())
            return [
                {key: value for key, value in row.items() if key not in UNREAD} for row in lines
            ]
        except ValueError as error:
            raise UserError(
                f"{path}: a line is damaged ({error}); remove the file to evaluate again"
            ) from error

    def keep(self, benchmark: str, num_lines: int) -> None:
        """Cut off what comes after: a torn line, or a part that was not finished."""
        path = self.path(benchmark)
        if path.is_file():
            with path.open("r+b") as file:
                for _ in range(num_lines):
                    file.readline()
                file.truncate(file.tell())

    def append(self, benchmark: str, rows: Sequence[dict[str, Any]]) -> None:
        RunLog(self.path(benchmark).parent).append(self.path(benchmark).name, *rows)
