"""Reads verl's log: rows {"step": ..., "data": {...}} of its logger `file`, in our metric names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eepo.reports.stage_metrics import complete_stages, only_numbers, rename
from eepo.runs.jsonl import read_records
from eepo.types import UserError

Row = dict[str, Any]

NAMES = {
    "critic/score/mean": "reward",
    "response_length/mean": "length",
    "response_length/clip_ratio": "truncated_share",
    "actor/entropy_loss": "policy_entropy",  # logged if the entropy bonus is used
    "actor/entropy": "policy_entropy",  # logged if verl scores rollouts before the update
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip_share",
    "actor/perf/max_memory_allocated_gb": "memory/peak",
    "actor/perf/max_memory_reserved_gb": "memory/held",
    "timing_s/update_weights": "seconds/sync",
    "timing_s/eepo_stage1": "seconds/stage1",
    "timing_s/eepo_stage2": "seconds/stage2",
    "timing_s/eepo_stage3": "seconds/stage3",
    "timing_s/reward": "seconds/reward",
    "timing_s/ref": "seconds/reference",
    "timing_s/update_actor": "seconds/update",
    "eepo/unlearn/loss": "unlearn/loss_before",
}
PREFIX = "eepo/"  # of the adapter's metrics, whose names are ours otherwise
# Accuracy on an evaluation set: the mean of all samples. One sample is greedy, as verl's default.
ACCURACY = re.compile(r"val-core/(.+)/(?:acc|reward)/mean@(\d+)")


def is_verl_log(path: Path) -> bool:
    """Return whether the first line of a file has verl's layout."""
    try:
        first = next(iter(islice(read_records(path), 1)), None)
    except UserError:
        return False
    return isinstance(first, dict) and set(first) == {"step", "data"}


def read_verl_log(files: Sequence[Path]) -> tuple[list[Row], list[Row]]:
    """Return the metrics and the evaluations of one run.

    A run has one file for each time that it was started, in this order. Steps that a later start
    repeats replace those of the earlier one.
    """
    data: dict[int, Row] = {}
    for file in files:
        rows = [_checked(row, file) for row in read_records(file)]
        first = min((row["step"] for row in rows), default=0)
        data = {step: values for step, values in data.items() if step < first}
        for row in rows:
            data[row["step"]] = data.get(row["step"], {}) | row["data"]
    metrics = [metrics_row(step, values) for step, values in data.items() if _is_step(values)]
    evaluations = [row for step, values in data.items() for row in evaluation_rows(step, values)]
    return metrics, mark_full(evaluations)


def metrics_row(step: int, values: Row) -> Row:
    """Return a row of `metrics.jsonl`."""
    row = {"step": step} | rename(values, NAMES, PREFIX)
    stages = [key for key in row if re.fullmatch(r"stage\d+/reward", key)]
    seconds = {name: values.get(f"timing_s/{name}", 0.0) for name in ("gen", "save_checkpoint")}
    row[f"seconds/stage{max(1, len(stages))}"] = seconds["gen"]
    if "timing_s/eepo_unlearn" in values:
        pushing = values.get("timing_s/eepo_push", 0.0)
        row["seconds/unlearn"] = values["timing_s/eepo_unlearn"] + pushing
    if "timing_s/step" in values:
        row["seconds/total"] = values["timing_s/step"] - seconds["save_checkpoint"]
    return complete_stages(row)


def evaluation_rows(step: int, values: Row) -> list[Row]:
    """Return rows of `evaluations.jsonl`, one for each set that was evaluated after this step."""
    rows = []
    for key, value in values.items():
        if match := ACCURACY.fullmatch(key):
            num_samples = int(match[2])
            measure = "greedy" if num_samples == 1 else "mean"
            row = {"step": step, "kind": "quick", "set": match[1], measure: value, "pass@k": {}}
            # verl does not log the number of problems.
            rows.append(row | {"num_samples": num_samples, "num_problems": 0})
    return rows


def mark_full(evaluations: Iterable[Row]) -> list[Row]:
    """Mark the first and the last evaluation of each set as full: verl always uses whole sets."""
    rows = list(evaluations)
    for name in {row["set"] for row in rows}:
        of_set = [row for row in rows if row["set"] == name]
        for row in (of_set[0], of_set[-1]):
            row["kind"] = "full"
    return rows


def _is_step(values: Row) -> bool:
    """Return whether a row is from training. At step 0, verl may log an evaluation only."""
    return "training/global_step" in values or any(key in NAMES for key in values)


def _checked(row: Any, file: Path) -> Row:
    is_row = isinstance(row, dict) and isinstance(row.get("data"), dict)
    if not is_row or not isinstance(row.get("step"), int):
        raise UserError(f'{file}: not a log of verl; its rows are {{"step": N, "data": {{...}}}}')
    return {"step": row["step"], "data": only_numbers(row["data"])}
