"""Reads and writes the folder of an evaluation: its settings, and one JSON line per completion.

`settings.json` describes the evaluation and the weights. An evaluation with other settings is
refused in the same folder. The lines of a benchmark are in the order of sampling, so their number
tells where to continue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eepo.evaluation.options import OPTION_NAMES
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import RunLog, write_atomically
from eepo.types import UserError

SETTINGS, COMPLETIONS = "settings.json", "completions"
RUN_RECIPE = "run_recipe.toml"  # of the evaluated run, if the model is one
# Samples may be added to a greedy evaluation later. After that, these settings are fixed.
SAMPLE_SETTINGS = ("num_samples", "temperature", "seed", "sample_limit")
SETTING_DEFAULTS = {"sample_limit": 0}  # for folders of versions without these settings
# The columns that estimates need. Texts are not kept in memory, as they may take gigabytes.
COLUMNS = {
    "id": str,
    "kind": str,
    "num_tokens": int,
    "finished": bool,
    "reward": int | float,
    "answer": str | None,
}


class Store:
    """Accesses the folder of one evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def settings(self) -> dict[str, Any]:
        """Return the settings; empty before the first evaluation."""
        path = self.folder / SETTINGS
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"--out {self.folder} is a file; give a folder")
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: not the settings of an evaluation: {error}") from error

    def check(self, settings: dict[str, Any]) -> None:
        """Refuse settings that differ from those in the folder. New benchmarks may be added."""
        before = self.settings()
        if not before:
            return
        may_differ = {"benchmarks"}
        if before.get("num_samples") == 0:
            may_differ.update(SAMPLE_SETTINGS)
        for key, new in settings.items():
            if key not in may_differ and before.get(key, SETTING_DEFAULTS.get(key)) != new:
                name = OPTION_NAMES.get(key, f"{key} =")
                raise UserError(
                    f"{name} {new!r}, but the evaluation in {self.folder} has "
                    f"{before.get(key)!r}; give another --out"
                )
        for name, new in settings.get("benchmarks", {}).items():
            if before["benchmarks"].get(name, new) != new:
                raise UserError(
                    f"{name}: its problems or prompts differ from those of the evaluation in "
                    f"{self.folder}; give another --out"
                )

    def open(self, settings: dict[str, Any], device: str, run_recipe: str = "") -> None:
        """Start or continue the evaluation with these settings.

        `run_recipe` is the text of the recipe of the evaluated run, if there is one.
        """
        self.check(settings)
        before = self.settings()
        log = RunLog(self.folder)
        (self.folder / COMPLETIONS).mkdir(exist_ok=True)
        if not before:
            log.write_environment(device)
        if run_recipe:
            write_atomically(self.folder / RUN_RECIPE, run_recipe)
        merged = settings | {"benchmarks": before.get("benchmarks", {}) | settings["benchmarks"]}
        write_atomically(self.folder / SETTINGS, json.dumps(merged, indent=2) + "\n")

    def path(self, benchmark: str) -> Path:
        return self.folder / COMPLETIONS / f"{benchmark}.jsonl"

    def rows(self, benchmark: str) -> list[dict[str, Any]]:
        """Return the columns that estimates need."""
        path = self.path(benchmark)
        try:
            lines = read_records(path) if path.is_file() else iter(())
            return [_needed_columns(row, path) for row in lines]
        except UserError as error:
            raise UserError(f"{error}; remove the file to evaluate again") from error

    def truncate(self, benchmark: str, num_lines: int) -> None:
        """Keep the first `num_lines` lines; the others are incomplete."""
        path = self.path(benchmark)
        if path.is_file():
            with path.open("r+b") as file:
                for _ in range(num_lines):
                    file.readline()
                file.truncate(file.tell())

    def append(self, benchmark: str, rows: Sequence[dict[str, Any]]) -> None:
        RunLog(self.path(benchmark).parent).append(self.path(benchmark).name, *rows)


def _needed_columns(row: Any, path: Path) -> dict[str, Any]:
    """Return the columns that estimates need. Raise an error if one is missing or of a wrong type.

    A damaged line can still be valid JSON.
    """
    for name, types in COLUMNS.items():
        if not isinstance(row, dict) or name not in row:
            raise UserError(f"{path}: a row has no {name}")
        if not isinstance(row[name], types):
            raise UserError(f"{path}: a row has {name} = {repr(row[name])[:60]}")
    return {name: row[name] for name in COLUMNS}
