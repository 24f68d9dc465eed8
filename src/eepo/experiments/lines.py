"""Summarises a finished run as one line of JSON, and keeps these lines in a file.

A line has the final evaluations, and the metrics as means over a few steps. It is all that tables
and figures of a plan need, so the folder of the run may be deleted.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eepo.evaluation.results import RESULTS
from eepo.reports.run_lines import Line
from eepo.runs.jsonl import parse_json, read_records
from eepo.runs.runlog import EVALUATIONS, METRICS
from eepo.types import UserError

KEPT_METRICS = re.compile(
    r"entropy|reward|gate_share|missed_share|second_half_recovery|mismatch_kl"
    r"|unlearn/(kl|lr)|seconds/total|memory/(peak|held)"
    r"|stage[12]/(entropy|reward|length|clip_share|label/.+)|stage2/(rewarded_ratio_min|lost_share)"
)
LINE_KEYS = ("regime", "method", "value", "seed", "seconds", "evaluations", "metrics", "knobs")
MAX_ROWS = 30  # of metrics
STAGE_1_LABEL = "stage1/label/"
BENCHMARKS = "benchmarks"  # folder of a run's benchmark evaluation


def summarize_run(folder: Path) -> Line:
    """Return what a line says about the run in `folder`."""
    metrics = with_all_labels(list(read_records(folder / METRICS)))
    size = max(1, -(-len(metrics) // MAX_ROWS))
    evaluations = [
        {name: _shorten(value) for name, value in row.items() if name != "problems"}
        | _outcomes(row.get("problems", ()))
        for row in read_records(folder / EVALUATIONS)
        if row["kind"] == "full"
    ]
    return {
        "num_steps": len(metrics),
        "steps_to_50": steps_to_reward(metrics, 0.5),
        "steps_to_90": steps_to_reward(metrics, 0.9),
        **steps_to_half(metrics),
        "seconds": round(sum(row["seconds/total"] for row in metrics), 1),
        "evaluations": evaluations + _benchmark_rows(folder, len(metrics)),
        "metrics": [
            _mean_row(metrics[first : first + size]) for first in range(0, len(metrics), size)
        ],
    }


def steps_to_reward(rows: Sequence[dict[str, Any]], reward: float, window: int = 5) -> int | None:
    """Return the first step at which the mean stage-1 reward of the last steps exceeds `reward`."""
    return _first_step_above([row.get("stage1/reward", 0.0) for row in rows], reward, window)


def steps_to_half(rows: Sequence[dict[str, Any]], window: int = 5) -> dict[str, Any]:
    """Return when half of the stage-1 completions have each label: the step, and the seconds.

    Runs whose grader gives no labels have nothing to return.
    """
    names = sorted({name for row in rows for name in row if name.startswith(STAGE_1_LABEL)})
    found: dict[str, Any] = {}
    for name in names:
        step = _first_step_above([row.get(name, 0.0) for row in rows], 0.5, window)
        seconds = round(sum(row["seconds/total"] for row in rows[:step]), 1) if step else None
        found[name.removeprefix(STAGE_1_LABEL)] = {"step": step, "seconds": seconds}
    return {"steps_to_half": found} if found else {}


def _first_step_above(values: Sequence[float], limit: float, window: int) -> int | None:
    for end in range(window, len(values) + 1):
        if statistics.fmean(values[end - window : end]) > limit:
            return end
    return None


def read_lines(path: Path) -> list[Line]:
    """Read the lines of a phase; nothing if the file does not exist."""
    lines = list(read_records(path)) if path.is_file() else []
    for line in lines:
        missing = [key for key in LINE_KEYS if key not in line] if isinstance(line, dict) else [""]
        if missing:
            raise UserError(
                f"{path}: a line is no summary of a run; each needs {', '.join(LINE_KEYS)}"
            )
    return lines


def append_line(path: Path, line: Line) -> None:
    """Append a line. A line that was cut off, such as by a full disk, is removed before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(0)
            complete = file.read().rfind(b"\n") + 1
            if complete < end:
                file.truncate(complete)
        file.write(json.dumps(line).encode() + b"\n")


def with_all_labels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set the share of a label to 0 in steps that did not have it, so that means count them."""
    names = {name for row in rows for name in row if "/label/" in name}
    filled = []
    for row in rows:
        stages = {name.partition("/")[0] for name in row}
        filled.append({name: 0.0 for name in names if name.partition("/")[0] in stages} | row)
    return filled


def _mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average some steps. The row has the number of the last step."""
    names = dict.fromkeys(name for row in rows for name in row if KEPT_METRICS.fullmatch(name))
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    means = {name: _shorten(statistics.fmean(some)) for name, some in values.items() if some}
    return {"step": rows[-1]["step"]} | means


def _shorten(value: Any) -> Any:
    """Round floats to four digits, also inside of a table."""
    if isinstance(value, dict):
        return {name: _shorten(inner) for name, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _outcomes(problems: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of all problems in a short form. Intervals over problems need them.

    `eepo eval --sample-limit` samples only the first problems.
    """
    if not problems:
        return {}
    greedy = "".join("1" if problem["greedy"] else "0" for problem in problems)
    correct = [problem["correct"] for problem in problems if "correct" in problem]
    return {"outcomes": {"greedy": greedy, "correct": correct}}


def _benchmark_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the results on benchmarks in the form of evaluations: a set for each benchmark."""
    file = folder / BENCHMARKS / RESULTS
    if not file.is_file():
        return []
    results = parse_json(file.read_bytes(), str(file))
    num_samples = results["settings"]["num_samples"]
    rows = []
    for name, benchmark in results["benchmarks"].items():
        means = {key: value["mean"] for key, value in benchmark["measures"].items()}
        row = {
            "step": step,
            "kind": "full",
            "set": name,
            "num_problems": benchmark["num_problems"],
            "num_samples": num_samples,
            "greedy": means["greedy/accuracy"],
            "length": means["greedy/length"],
            "truncated_share": means["greedy/truncated_share"],
        }
        if num_samples:
            prefix = "samples/pass@"
            row["mean"] = means[f"samples/mean@{num_samples}"]
            row["majority"] = means[f"samples/majority@{num_samples}"]
            row["pass@k"] = {
                key.removeprefix(prefix): mean
                for key, mean in means.items()
                if key.startswith(prefix)
            }
        row = {key: _shorten(value) for key, value in row.items()}
        rows.append(row | _outcomes(benchmark.get("problems", ())))
    return rows
