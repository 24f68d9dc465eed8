"""Formats the runs of a plan as Markdown tables: training, and final measures paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from eepo.evaluation.estimates import seed_interval
from eepo.reports.measures import shown_measures
from eepo.reports.run_lines import Line, as_run, find_final_value, line_sets
from eepo.reports.speed_table import HEAD, Goal, half_of, reward_after, reward_of_90, speed_cells
from eepo.reports.tables import display_name

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


def regime_tables(
    regime: str,
    rows: Sequence[TableRow],
    others: Sequence[TableRow],
    label: str = "",
    seconds: Sequence[float] = (),
) -> list[str]:
    """Return the tables of one regime: training, speed, and one for each evaluation set.

    `others` are all rows that `rows` may be compared with. Its first row is the baseline. With a
    label of the grader, a table says when half of the completions have it. With `seconds`, a table
    has the reward after so much training.
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
    by_title = {row.title: row.lines for row in others}
    if seconds and trained:
        heads = ["", *(f"after {each:g} s" for each in seconds)]
        cells = [_reward_cells(row, by_title, seconds) for row in trained]
        tables.append(_table(f"{prefix}reward of stage 1 at equal time", heads, cells))
    measures = _measures(every_line)
    for eval_set in line_sets(every_line):
        cells = [_final_cells(row, by_title, eval_set, measures) for row in rows]
        tables.append(_table(f"{prefix}{display_name(eval_set)}", ["", *measures], cells))
    return tables


def paired_difference(
    lines: Sequence[Line], others: Sequence[Line], eval_set: str, measure: str
) -> list[float]:
    """Return the difference of a measure for each seed that both have."""
    return _paired(lines, others, lambda line: find_final_value(line, eval_set, measure))


def _paired(
    lines: Sequence[Line], others: Sequence[Line], value_of: Callable[[Line], float | None]
) -> list[float]:
    values, baseline = ({line["seed"]: value_of(line) for line in some} for some in (lines, others))
    pairs = [(values[seed], baseline[seed]) for seed in sorted(values.keys() & baseline.keys())]
    return [own - other for own, other in pairs if own is not None and other is not None]


def _measures(lines: Sequence[Line]) -> list[str]:
    greedy, mean, *rest = shown_measures([as_run(line) for line in lines])
    return [mean, greedy, *rest]


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


def _final_cells(
    row: TableRow,
    by_title: Mapping[str, Sequence[Line]],
    eval_set: str,
    measures: Sequence[str],
) -> list[str]:
    """Return the mean of each final measure, with its difference."""
    values = [partial(find_final_value, eval_set=eval_set, measure=each) for each in measures]
    return _compared_cells(row, by_title, values)


def _reward_cells(
    row: TableRow, by_title: Mapping[str, Sequence[Line]], seconds: Sequence[float]
) -> list[str]:
    """Return the mean reward after some seconds of training, with its difference."""
    return _compared_cells(row, by_title, [partial(reward_after, seconds=s) for s in seconds])


def _compared_cells(
    row: TableRow,
    by_title: Mapping[str, Sequence[Line]],
    value_functions: Iterable[Callable[[Line], float | None]],
) -> list[str]:
    """Return the mean of each value, and its difference, bold if the interval excludes 0."""
    first = next(iter(by_title))
    compared_with = row.compared_with or first
    title = row.title if compared_with == first else f"{row.title} (to {compared_with})"
    cells = [title]
    for value_of in value_functions:
        present = [value for value in map(value_of, row.lines) if value is not None]
        cell = f"{statistics.mean(present):.3f}" if present else ""
        if row.title != compared_with:
            cell += _difference(_paired(row.lines, by_title.get(compared_with, ()), value_of))
        cells.append(cell)
    return cells


def _difference(differences: Sequence[float]) -> str:
    interval = seed_interval(differences)
    if interval is None:
        return ""
    low, high = interval
    text = f"{statistics.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"<br>**{text}**" if low > 0 or high < 0 else f"<br>{text}"
