"""Prepares the plan of a shorthand command such as `eepo compare`, and writes it to OUT/plan.toml.

So OUT is complete: `eepo plan run OUT/plan.toml --out OUT` does the same, and `eepo plan show`,
`tables` and `figures` work on it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.experiments.experiment import Experiment, Run
from eepo.experiments.plan import Selection
from eepo.experiments.plan_file import parse_plan
from eepo.experiments.runner import make_schedule
from eepo.experiments.toml_tables import dump_tables
from eepo.runs.runlog import write_atomically
from eepo.types import UserError

PLAN = "plan.toml"


@dataclass(frozen=True)
class Draft:
    """Holds a plan whose recipes are not written yet."""

    tables: Mapping[str, Any]  # of the plan
    recipes: Mapping[str, str]  # file name in OUT -> TOML
    out: Path
    advice: str  # if a run in `out` has other settings

    def check(self) -> tuple[Experiment, list[Run]]:
        """Check the plan and the runs that are in `out` already. This writes nothing there.

        Return all runs. Their recipes exist after `write`.
        """
        with tempfile.TemporaryDirectory() as temporary:
            self._write_recipes(Path(temporary))
            source = str(self.out / PLAN)
            plan = parse_plan(self.tables, source, Path(temporary))
            experiment = Experiment(plan, self.out, self.advice)
            runs = make_schedule(experiment, Selection()).known_runs()
        plan = dataclasses.replace(plan, folder=self.out)
        return Experiment(plan, self.out, self.advice), runs

    def write(self) -> None:
        try:
            self._write_recipes(self.out)
        except OSError as error:
            raise UserError(f"--out {self.out}: cannot be written ({error.strerror})") from error
        write_atomically(self.out / PLAN, dump_tables(self.tables))

    def _write_recipes(self, folder: Path) -> None:
        for name, text in self.recipes.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                write_atomically(file, text)
