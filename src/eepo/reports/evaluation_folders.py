"""Reads the folders that `eepo eval` writes, in the form of a run's evaluations."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.evaluation.results import RESULTS
from eepo.evaluation.store import RUN_RECIPE, SETTINGS
from eepo.evaluation.trained_run import model_label
from eepo.types import UserError

ALLOWED = "folders of eepo eval"


@dataclass(frozen=True)
class EvaluationFolder:
    """Holds the contents of one `results.json`."""

    folder: Path
    settings: dict[str, Any]
    benchmarks: dict[str, dict[str, Any]]
    average: dict[str, dict[str, float]]
    recipe: dict[str, Any]  # of the evaluated run; empty for a model without a run

    @property
    def method(self) -> str:
        return str(self.settings.get("method") or model_label(self.settings["model"]))

    @property
    def seed(self) -> int:
        return int(self.settings.get("run_seed") or 0)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each benchmark, with the keys of a run's full evaluation."""
        return [self._row(name, benchmark) for name, benchmark in self.benchmarks.items()]

    def _row(self, name: str, benchmark: dict[str, Any]) -> dict[str, Any]:
        means = {key: value["mean"] for key, value in benchmark["measures"].items()}
        problems, num_samples = benchmark.get("problems", []), benchmark.get("num_samples", 0)
        kind = "samples" if num_samples else "greedy"
        row = {
            "step": self.settings.get("step") or 0,
            "kind": "full",
            "set": name,
            "num_problems": benchmark["num_problems"],
            "num_samples": num_samples,
            "greedy": means.get("greedy/accuracy"),
            "mean": means.get(f"samples/mean@{num_samples}"),
            "pass@k": {
                measure.removeprefix("samples/pass@"): mean
                for measure, mean in means.items()
                if measure.startswith("samples/pass@")
            },
            "length": means.get(f"{kind}/length"),
            "truncated_share": means.get(f"{kind}/truncated_share"),
            "problems": problems,
        }
        if num_samples and problems:
            distinct = [each["distinct"] for each in problems if "distinct" in each]
            row["distinct"] = sum(distinct) / len(distinct)
        return row


def is_evaluation(folder: Path) -> bool:
    return (folder / RESULTS).is_file() or (folder / SETTINGS).is_file()


def read_evaluation(folder: Path) -> EvaluationFolder:
    path = folder / RESULTS
    if not path.is_file():
        raise UserError(
            f"{folder}: the evaluation is not finished; the same eepo eval command continues it"
        )
    recipe = folder / RUN_RECIPE
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        tables = tomllib.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}
        contents = results["settings"], results["benchmarks"], results["average"]
        evaluation = EvaluationFolder(folder, *contents, tables)
        _ = evaluation.method, evaluation.seed, evaluation.rows()  # all that reports need
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not the results of an evaluation") from error
    return evaluation
