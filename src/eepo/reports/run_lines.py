"""Reads the lines of a plan: each line is the summary of one finished run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eepo.reports.measures import measure_value, problem_values
from eepo.reports.records import Run, evaluation_sets
from eepo.types import UserError

Line = dict[str, Any]


def line_title(line: Line) -> str:
    """Return the method and, if it was chosen among several, its value."""
    return f"{line['method']} {line['value']}".strip()


def as_run(line: Line, name: str = "") -> Run:
    """Return a line in the form that figures and tables of runs need."""
    return Run(
        folder=Path(line["regime"]),
        name=name or line["method"],
        seed=line["seed"],
        recipe={},
        environment={},
        metrics=line["metrics"],
        evaluations=line["evaluations"],
        alarms=[],
        completions=[],
        num_logged=0,
    )


def line_sets(lines: Iterable[Line]) -> list[str]:
    return evaluation_sets([as_run(line) for line in lines])


def find_final_value(line: Line, eval_set: str, measure: str) -> float | None:
    """Return a measure at the end of a run. A run that trains nothing has only the start."""
    row = as_run(line).final_evaluation(eval_set)
    return measure_value(row, measure) if row else None


def final_problem_values(line: Line, eval_set: str, measure: str) -> list[float]:
    """Return a measure at the end of a run for each problem; empty if it is not recorded."""
    row = as_run(line).final_evaluation(eval_set)
    outcomes = row.get("outcomes") if row else None
    if not row or not outcomes or measure == "distinct":
        return []
    if measure == "greedy":
        return [float(digit) for digit in outcomes["greedy"]]
    if not row["num_samples"]:
        return []
    problems = [{"correct": number} for number in outcomes["correct"]]
    return problem_values(row | {"problems": problems}, measure)


def final_value(line: Line, eval_set: str, measure: str) -> float:
    value = find_final_value(line, eval_set, measure)
    if value is None:
        raise UserError(
            f"{line_title(line)}, seed {line['seed']}: its evaluations have no {measure} on "
            f"{eval_set!r}; sets: {', '.join(line_sets([line])) or 'none'}"
        )
    return value
