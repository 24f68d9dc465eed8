"""Makes the paper's tables from runs: the paper's layout, with its numbers next to ours."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from eepo.evaluation.estimates import grouped_bootstrap_interval
from eepo.evaluation.results import set_title
from eepo.reports.benchmark_tables import MISSING, Cell, ResultTable
from eepo.reports.measures import (
    Estimate,
    estimate,
    estimate_over_seeds,
    measure_value,
    pass_at_k_curve,
    problem_values,
)
from eepo.reports.paper_numbers import BASE, FIVE, FOUR, PaperTable, relative_gain
from eepo.reports.records import Row, Run, evaluation_sets

GREEDY = "greedy"
IN_DISTRIBUTION = "in_distribution"  # held-out training problems are no column of the tables
Methods = Mapping[str, Sequence[Run]]  # method -> a run for each seed


def table_sets(methods: Methods) -> list[str]:
    """Return the evaluation sets that are columns of a table, the paper's in its order."""
    sets = evaluation_sets([run for runs in methods.values() for run in runs])
    papers = [name for name in FIVE if name in sets]
    return [*papers, *(name for name in sets if name not in (*papers, IN_DISTRIBUTION))]


def paper_table(table: PaperTable, methods: Methods, base_name: str) -> ResultTable:
    """Return a table of the paper with our numbers, and the paper's in parentheses.

    `base_name` is the name of our model. The paper's averages are left out if ours are over other
    evaluation sets.
    """
    sets, rows = table_sets(methods), []
    columns = [set_title(name) for name in sets] if table.sets else []
    same_sets = has_papers_sets(table, methods)
    for method, label in table.labels.items():
        runs = methods.get(method, [])
        cells = []
        for name in sets if table.sets else ():
            ours = estimate(final_rows(runs, name), GREEDY) if runs else None
            cells.append(_cell(ours, table.number(method, name)))
        papers = table.average(method) if same_sets else None
        cells.append(_cell(average(runs, sets, GREEDY), papers))
        cells.append(_gain_cell(table, method, methods, sets))
        label = base_name if method == BASE else label
        seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
        rows.append((label + seeds, cells))
    return ResultTable(
        " ".join(_notes(table, methods, sets, same_sets)),
        "Method",
        [*columns, "Average", "Relative gain, %"],
        rows,
    )


def has_papers_sets(table: PaperTable, methods: Methods) -> bool:
    """Return whether our average is over the sets of the paper's."""
    return set(table_sets(methods)) == set(table.sets or FOUR)


def papers_own_table(table: PaperTable) -> ResultTable:
    """Return the paper's numbers alone, for runs on other evaluation sets."""
    rows = []
    for method, numbers in table.numbers.items():
        cells = [Cell(f"{number:.1f}") for number in numbers]
        gain = table.gain(method)
        cells.append(Cell("" if gain is None else f"{gain:+.1f}"))
        rows.append((table.model if method == BASE else table.labels[method], cells))
    columns = [*map(set_title, table.sets), "Average", "Relative gain, %"]
    return ResultTable("The paper's numbers: greedy pass@1 in percent.", "Method", columns, rows)


def sampled_table(methods: Methods, labels: Mapping[str, str]) -> ResultTable:
    """Return accuracy of samples, pass@k, length and truncation, averaged over the sets."""
    sets = table_sets(methods)
    rows = [row for runs in methods.values() for name in sets for row in final_rows(runs, name)]
    ks = [k for k in pass_at_k_curve([row for row in rows if row.get("pass@k")]) if k > 1]
    shown = [k for k in (8, 32) if k in ks] or ks[-1:]
    measures = {"greedy": "Greedy", "mean": "Mean of samples"}
    measures |= {f"pass@{k}": f"pass@{k}" for k in shown}
    table = []
    for method, runs in methods.items():
        if not runs:
            continue
        cells = [_cell(average(runs, sets, measure), None) for measure in measures]
        length, cut_off = (_mean_of(runs, sets, key) for key in ("length", "truncated_share"))
        cells.append(Cell(MISSING if length is None else f"{length:,.0f}"))
        cells.append(Cell(MISSING if cut_off is None else f"{100 * cut_off:.1f}"))
        table.append((labels.get(method, method), cells))
    caption = (
        f"Averages over the evaluation sets, in percent; brackets: {_brackets(methods)}. Tokens: "
        "mean length of completions. Cut off: completions that reached the length limit."
    )
    return ResultTable(caption, "Method", [*measures.values(), "Tokens", "Cut off"], table)


def average(runs: Sequence[Run], sets: Sequence[str], measure: str) -> Estimate | None:
    """Estimate the mean over sets, each with the same weight; None if a run lacks a set."""
    by_run = [[row for name in sets if (row := run.final_evaluation(name))] for run in runs]
    values = [[measure_value(row, measure) for row in rows] for rows in by_run]
    complete = [
        statistics.fmean(value for value in one if value is not None)
        for one in values
        if one and len(one) == len(sets) and None not in one
    ]
    if len(complete) != 1 or len(runs) > 1:
        return estimate_over_seeds(complete)
    problems = [problem_values(row, measure) for row in by_run[0]]
    if not all(problems):
        return Estimate(complete[0])
    return Estimate(complete[0], *grouped_bootstrap_interval(problems), over="problems")


def final_rows(runs: Sequence[Run], eval_set: str) -> list[Row]:
    return [row for run in runs if (row := run.final_evaluation(eval_set))]


def _cell(ours: Estimate | None, papers: float | None) -> Cell:
    number = MISSING if ours is None else f"{100 * ours.mean:.1f}"
    if papers is not None:
        number += f" ({papers:.1f})"
    if ours is None or ours.low is None or ours.high is None or ours.high - ours.low < 1e-9:
        return Cell(number)
    return Cell(number, f"{100 * ours.low:.1f}, {100 * ours.high:.1f}")


def _gain_cell(table: PaperTable, method: str, methods: Methods, sets: Sequence[str]) -> Cell:
    if method not in table.gains:
        return Cell("")
    means = [average(methods.get(name, []), sets, GREEDY) for name in (method, table.gains[method])]
    ours = relative_gain(*(mean.mean if mean else None for mean in means))
    number = MISSING if ours is None else f"{ours:+.1f}"
    papers = table.gain(method) if has_papers_sets(table, methods) else None
    return Cell(number if papers is None else f"{number} ({papers:+.1f})")


def _mean_of(runs: Sequence[Run], sets: Sequence[str], key: str) -> float | None:
    values = [row[key] for name in sets for row in final_rows(runs, name) if key in row]
    return statistics.fmean(values) if values else None


def _notes(table: PaperTable, methods: Methods, sets: Sequence[str], same_sets: bool) -> list[str]:
    shared = same_sets or set(sets) & set(table.sets)
    papers = f": ours (in parentheses: the paper's, for {table.model})" if shared else ""
    notes = [
        f"Greedy pass@1 in percent{papers}; brackets: {_brackets(methods)}.",
        "Average: over the evaluation sets, with equal weights.",
        "Relative gain of the average: over the method that the row builds on, else over GRPO."
        if not table.sets
        else "Relative gain of the average: over GRPO.",
    ]
    if not same_sets:
        titles = ", ".join(map(set_title, table.sets or FOUR))
        notes.append(f"The paper's averages are left out: they are over {titles}.")
    rows = [row for runs in methods.values() for name in sets for row in final_rows(runs, name)]
    counts = {set_title(row["set"]): row["num_problems"] for row in rows}
    notes.append(f"Problems: {', '.join(f'{name} {count:,}' for name, count in counts.items())}.")
    return notes


def _brackets(methods: Methods) -> str:
    if any(len(runs) > 1 for runs in methods.values()):
        return "95 % t-interval over seeds; of one seed, bootstrap interval over problems"
    return (
        "95 % bootstrap interval over the problems of ONE seed, which is no evidence about methods"
    )
