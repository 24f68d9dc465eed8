"""Formats the runs of a plan as Markdown tables: training, and final measures paired by seed.

Intervals are over seeds. If the lines have the outcome of each problem, they are over seeds and
problems.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eepo.evaluation.estimates import Groups, seed_and_problem_interval, seed_interval
from eepo.evaluation.results import set_title
from eepo.reports.measures import shown_measures
from eepo.reports.run_lines import (
    Line,
    as_run,
    final_problem_values,
    find_final_value,
    line_sets,
)
from eepo.reports.speed_table import HEAD, Goal, half_of, reward_after, reward_of_90, speed_cells

SECONDS = "seconds"
TRAINING_COLUMNS = {
    "entropy": "entropy",
    "stage1/entropy": "of stage 1",
    "stage2/entropy": "of stage 2",
    "reward": "reward",
    "stage1/reward": "of stage 1",
    "stage2/reward": "of stage 2",
    "unlearn/kl": "KL",
    "unlearn/lr": "η",
    "gate_share": "gated",
    "missed_share": "missed",
    "second_half_recovery": "recovered",
    SECONDS: "seconds",
}


@dataclass(frozen=True)
class TableRow:
    """Holds the lines of one method at one value, one line per seed."""

    title: str
    lines: Sequence[Line]
    compared_with: str = ""  # title of the row that differences are to; "": of the first row
    is_start: bool = False  # a model that is not trained: one line, for all seeds


@dataclass(frozen=True)
class _Value:
    """Reads a value of a line; None if the line does not have it."""

    read: Callable[[Line], float | None]
    per_problem: Callable[[Line], Groups] = lambda line: ()  # empty if not recorded


def regime_tables(
    regime: str,
    rows: Sequence[TableRow],
    others: Sequence[TableRow],
    label: str = "",
    seconds: Sequence[float] = (),
    benchmarks: Sequence[str] = (),
) -> list[str]:
    """Return the tables of one regime: training, speed, and one for each evaluation set.

    `others` are all rows that `rows` may be compared with. Its first row is the baseline. With a
    label of the grader, a table says when half of the completions have it. With `seconds`, a table
    has the reward after so much training. With several `benchmarks`, a table has their average.
    """
    every_line = [line for row in others for line in row.lines]
    prefix = f"{regime}, " if regime else ""
    tables = []
    columns = _training_columns(every_line)
    trained = [row for row in rows if row.lines[0]["metrics"]]
    if trained:
        heads = ["", "seeds", *(TRAINING_COLUMNS[name] for name in columns)]
        cells = [_training_cells(row, columns) for row in trained]
        tables.append(_table(f"{prefix}training", heads, cells))
    goals: dict[str, Goal] = {"steps to 90 % reward": reward_of_90}
    if label:
        goals[f"steps until half of the completions are: {label}"] = half_of(label)
    for title, goal in goals.items():
        if any(goal(line) for row in trained for line in row.lines):
            cells = [speed_cells(row.title, row.lines, goal) for row in trained]
            tables.append(_table(f"{prefix}{title}", HEAD, cells))
    by_title = {row.title: row for row in others}
    if seconds and trained:
        heads = ["", *(f"after {each:g} s" for each in seconds)]
        cells = [_reward_cells(row, by_title, seconds) for row in trained]
        tables.append(_table(f"{prefix}reward of stage 1 at equal time", heads, cells))
    return tables + _final_tables(prefix, rows, by_title, every_line, benchmarks)


def _final_tables(
    prefix: str,
    rows: Sequence[TableRow],
    by_title: Mapping[str, TableRow],
    lines: Sequence[Line],  # of all rows
    benchmarks: Sequence[str],
) -> list[str]:
    """Return a table of final measures for each evaluation set and for the benchmarks' average."""
    tables = []
    known = line_sets(lines)
    contents: list[tuple[str, Sequence[str]]] = [(set_title(name), [name]) for name in known]
    if len(benchmarks) > 1 and {*benchmarks} <= {*known}:
        contents.append(("average of the benchmarks", benchmarks))
    for title, sets in contents:
        measures = _measures(lines, sets)
        values = [_measure_over_sets(sets, measure) for measure in measures]
        cells = [_compared_cells(row, by_title, values) for row in rows]
        tables.append(_table(f"{prefix}{title}", ["", *measures], cells))
    return tables


def _measure_over_sets(eval_sets: Sequence[str], measure: str) -> _Value:
    """Read the mean of a final measure over evaluation sets."""

    def mean(line: Line) -> float | None:
        values = [find_final_value(line, name, measure) for name in eval_sets]
        present = [value for value in values if value is not None]
        return statistics.mean(present) if len(present) == len(values) else None

    def per_problem(line: Line) -> Groups:
        groups = [final_problem_values(line, name, measure) for name in eval_sets]
        return groups if all(groups) else ()

    return _Value(mean, per_problem)


def paired_difference(
    lines: Sequence[Line], others: Sequence[Line], eval_set: str, measure: str
) -> list[float]:
    """Return the difference of a measure for each seed that both have."""
    return _differences(_pairs(lines, others), _measure_over_sets([eval_set], measure))


def _pairs(lines: Sequence[Line], others: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Return the lines of each seed that both have."""
    by_seed, baseline = ({line["seed"]: line for line in some} for some in (lines, others))
    return [(by_seed[seed], baseline[seed]) for seed in sorted(by_seed.keys() & baseline.keys())]


def _differences(pairs: Sequence[tuple[Line, Line]], value: _Value) -> list[float]:
    values = [(value.read(line), value.read(other)) for line, other in pairs]
    return [own - other for own, other in values if own is not None and other is not None]


def _problem_differences(pairs: Sequence[tuple[Line, Line]], value: _Value) -> list[Groups]:
    """Return the differences of each seed, problem by problem.

    Empty if a line lacks them, or if lines differ in their number of problems.
    """
    values = [(value.per_problem(line), value.per_problem(other)) for line, other in pairs]
    sizes = {tuple(map(len, groups)) for pair in values for groups in pair}
    if len(sizes) != 1 or sizes == {()}:
        return []
    return [
        [
            [a - b for a, b in zip(group, other_group, strict=True)]
            for group, other_group in zip(own, others, strict=True)
        ]
        for own, others in values
    ]


def _measures(lines: Sequence[Line], eval_sets: Sequence[str]) -> list[str]:
    """Return the measures of a table of these sets. Each set may have its number of samples."""
    only = [
        line | {"evaluations": [row for row in line["evaluations"] if row["set"] in eval_sets]}
        for line in lines
    ]
    greedy, mean, *rest = shown_measures([as_run(line) for line in only])
    rows = [row for line in only for row in line["evaluations"]]
    if not any(_has_distinct(row) for row in rows):
        rest = [name for name in rest if name != "distinct"]
    return [mean, greedy, *rest]


def _has_distinct(row: Mapping[str, Any]) -> bool:
    """Return whether distinct answers say more than pass@k: a problem had several correct ones."""
    most = row.get("pass@k", {}).get(str(row["num_samples"]))
    return "distinct" in row and row["distinct"] != most


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return f"### {title}\n\n" + "\n".join(
        f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)
    )


def _training_columns(lines: Sequence[Line]) -> list[str]:
    """Return the metrics that at least one run has: older runs have fewer."""
    known = {name for line in lines for row in line["metrics"] for name in row}
    return [name for name in TRAINING_COLUMNS if name in known or name == SECONDS]


def _training_cells(row: TableRow, columns: Sequence[str]) -> list[str]:
    """Return means over seeds. Metrics of steps are averaged over the last third of the steps."""
    cells = [row.title, str(len(row.lines))]
    for name in columns:
        if name == SECONDS:
            cells.append(f"{statistics.mean(line[SECONDS] for line in row.lines):.0f}")
            continue
        late = [
            step[name]
            for line in row.lines
            for step in line["metrics"][-max(1, len(line["metrics"]) // 3) :]
            if name in step
        ]
        cells.append(f"{statistics.mean(late):.3g}" if late else "")
    return cells


def _reward_cells(
    row: TableRow, by_title: Mapping[str, TableRow], seconds: Sequence[float]
) -> list[str]:
    """Return the mean reward after some seconds of training, with its difference."""
    values = [_Value(partial(reward_after, seconds=each)) for each in seconds]
    return _compared_cells(row, by_title, values)


def _compared_cells(
    row: TableRow, by_title: Mapping[str, TableRow], values: Iterable[_Value]
) -> list[str]:
    """Return the mean of each value, and its difference, bold if the interval excludes 0."""
    first = next(iter(by_title))
    compared_with = row.compared_with or first
    is_usual = compared_with in (first, row.title)
    title = row.title if is_usual else f"{row.title} (to {compared_with})"
    cells = [title]
    for value in values:
        present = [number for number in map(value.read, row.lines) if number is not None]
        cell = f"{statistics.mean(present):.3f}" if present else ""
        if row.title != compared_with:
            cell += _difference(_row_pairs(row, by_title.get(compared_with)), value)
        cells.append(cell)
    return cells


def _row_pairs(row: TableRow, other: TableRow | None) -> list[tuple[Line, Line]]:
    """Return the lines of each seed that both rows have."""
    if other is None:
        return []
    if other.is_start:
        return [(line, other.lines[0]) for line in row.lines]
    return _pairs(row.lines, other.lines)


def _difference(pairs: Sequence[tuple[Line, Line]], value: _Value) -> str:
    differences = _differences(pairs, value)
    per_problem = _problem_differences(pairs, value)
    interval = seed_and_problem_interval(per_problem) if per_problem else seed_interval(differences)
    if interval is None:
        return ""
    low, high = interval
    text = f"{statistics.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"<br>**{text}**" if low > 0 or high < 0 else f"<br>{text}"
