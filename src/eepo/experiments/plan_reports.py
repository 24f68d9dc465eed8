"""Selects the lines of an experiment for tables and figures, and writes these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import REPORT, TUNE, FigureEntry, Selection, TableEntry
from eepo.reports.figure_list import image_bytes
from eepo.reports.paired_tables import TableRow, regime_tables
from eepo.reports.plan_figures import FIGURES, PLAN_FIGURES, FigureData, MethodStyle
from eepo.reports.run_lines import Line, line_sets, line_title
from eepo.runs.runlog import write_atomically
from eepo.types import UserError

TABLES = "tables.md"


def plan_tables(experiment: Experiment, selection: Selection, against: str = "") -> str:
    """Return the tables as Markdown: those that the plan lists, or those of a selection."""
    plan = experiment.plan
    plan.check_selection(selection)
    text = _tables_text(experiment, selection, against)
    if not text:
        raise UserError(
            f"{experiment.out} has no finished run of {plan.source} that matches; "
            "run it with: eepo plan run"
        )
    return text


def write_plan_figures(
    experiment: Experiment, selection: Selection, kinds: Sequence[str], into: Path
) -> list[Path]:
    """Draw the figures that the plan lists, or those of a selection; return their files."""
    experiment.plan.check_selection(selection)
    for kind in kinds:
        if kind not in FIGURES:
            raise UserError(f"--figure {kind} must be one of {', '.join(FIGURES)}")
    files = _write_figures(experiment, selection, kinds, into)
    if not files:
        raise UserError(f"{experiment.out} has no finished run for these figures")
    return files


def write_reports(experiment: Experiment) -> list[Path]:
    """Write the tables, and the figures that the plan lists, into the experiment's folder.

    Return the files.
    """
    text = _tables_text(experiment, Selection())
    if not text:  # no run of a reporting phase is finished
        return []
    tables = experiment.out / TABLES
    write_atomically(tables, text)
    figures = []
    for entry in experiment.plan.figures:
        figures += _entry_figures(experiment, entry, experiment.out / "figures")
    return [tables, *figures]


def _tables_text(experiment: Experiment, selection: Selection, against: str = "") -> str:
    """Return the tables as Markdown, or "" if no run that they show is finished."""
    listed = experiment.plan.tables if selection == Selection() and not against else ()
    parts = []
    for entry in listed or [TableEntry(selection, against)]:
        if listed and not _can_compare(experiment, entry):
            continue
        tables = _entry_tables(experiment, entry)
        parts += [f"## {entry.heading}"] if entry.heading and tables else []
        parts += tables
    return "\n\n".join(parts) + "\n" if parts else ""


def _can_compare(experiment: Experiment, entry: TableEntry) -> bool:
    """Return whether the method that an entry compares with has a finished run."""
    lines = experiment.done(*_phases(experiment, entry.selection))
    return not entry.against or any(
        entry.against in (line["method"], line_title(line)) for line in lines
    )


def _write_figures(
    experiment: Experiment, selection: Selection, kinds: Sequence[str], into: Path
) -> list[Path]:
    listed = experiment.plan.figures if selection == Selection() else ()
    entries = listed or [
        FigureEntry(kind, selection) for kind in FIGURES if kinds or kind not in PLAN_FIGURES
    ]
    files = []
    for entry in entries:
        if not kinds or entry.kind in kinds:
            files += _entry_figures(experiment, entry, into)
    return files


def _phases(experiment: Experiment, selection: Selection) -> Sequence[str]:
    phases = experiment.plan.phases
    if selection.phases:
        return selection.phases
    return [REPORT] if REPORT in phases else [name for name in phases if name != TUNE]


def _entry_tables(experiment: Experiment, entry: TableEntry) -> list[str]:
    """Return the tables of an entry. A regime without the method `against` is left out."""
    plan, selection = experiment.plan, entry.selection
    lines = experiment.done(*_phases(experiment, selection))
    if not lines:
        return []
    titles = list(dict.fromkeys(map(line_title, lines)))
    if entry.against and entry.against not in {*titles, *(line["method"] for line in lines)}:
        raise UserError(
            f"--against {entry.against!r} has no finished run; allowed: {', '.join(titles)}"
        )
    benchmarks = plan.benchmarks.sets if plan.benchmarks else ()
    tables = []
    for regime in selection.regimes or plan.regimes:
        rows = _rows(experiment, [line for line in lines if line["regime"] == regime])
        if entry.against:
            rows = _compare_with(rows, entry.against)
        chosen = [
            row
            for row in rows
            if not selection.methods or row.lines[0]["method"] in selection.methods
        ]
        if chosen:
            tables += regime_tables(regime, chosen, rows, entry.label, entry.seconds, benchmarks)
    return tables


def _rows(experiment: Experiment, lines: Sequence[Line]) -> list[TableRow]:
    """Group lines by method and value, in the order of the plan and of its values."""
    plan = experiment.plan
    order = [*plan.methods]

    def position(line: Line) -> tuple[int, int]:
        name, values = line["method"], []
        if name in plan.methods:
            values = [point.value for point in plan.points(line["regime"], name)]
        return (
            order.index(name) if name in order else len(order),
            values.index(line["value"]) if line["value"] in values else len(values),
        )

    groups: dict[str, list[Line]] = {}
    for line in sorted(lines, key=position):
        groups.setdefault(line_title(line), []).append(line)
    untrained = {method.name for method in plan.methods.values() if not method.train}
    return [
        TableRow(title, own, _against(experiment, own[0]), own[0]["method"] in untrained)
        for title, own in groups.items()
    ]


def _against(experiment: Experiment, line: Line) -> str:
    """Return the title of the method that the plan compares with, at the same value."""
    method = experiment.plan.methods.get(line["method"])
    return line_title(line | {"method": method.against}) if method and method.against else ""


def _compare_with(rows: Sequence[TableRow], against: str) -> list[TableRow]:
    """Compare all rows with one of them, on the seeds that both have."""
    other = next((r for r in rows if against in (r.title, r.lines[0]["method"])), None)
    if other is None:
        return []
    seeds = {line["seed"] for line in other.lines}
    compared = []
    for row in rows:
        common = [line for line in row.lines if other.is_start or line["seed"] in seeds]
        if common:
            compared.append(replace(row, lines=common, compared_with=other.title))
    return compared


def _entry_figures(experiment: Experiment, entry: FigureEntry, into: Path) -> list[Path]:
    plan, selection = experiment.plan, entry.selection
    lines = _figure_lines(experiment, selection)
    if entry.sets:
        known = line_sets(lines)
        for name in entry.sets:
            if lines and name not in known:
                raise UserError(
                    f"{plan.source}: figures.sets has {name!r}; evaluated: {', '.join(known)}"
                )
        lines = [_only_sets(line, entry.sets) for line in lines]
    regimes = [name for name in plan.regimes if not selection.regimes or name in selection.regimes]
    if entry.kind in PLAN_FIGURES:
        groups = {"": lines}
    else:
        groups = {name: [line for line in lines if line["regime"] == name] for name in regimes}
    files = []
    for regime, own in groups.items():
        figure = FIGURES[entry.kind](_figure_data(experiment, own)) if own else None
        if figure is not None:
            default = "_".join(part for part in (plan.name, regime, entry.kind) if part)
            into.mkdir(parents=True, exist_ok=True)
            file = into / f"{entry.name or default}.png"
            file.write_bytes(image_bytes(figure, "png"))
            files.append(file)
    return files


def _only_sets(line: Line, sets: Sequence[str]) -> Line:
    """Keep the evaluations of these sets, in this order."""
    rows = [row for name in sets for row in line["evaluations"] if row["set"] == name]
    return line | {"evaluations": rows}


def _figure_lines(experiment: Experiment, selection: Selection) -> list[Line]:
    """Return lines in the order of methods and regimes, so that legends have this order.

    Trained methods with every value are always shown: they are the lines to compare with.
    """
    plan = experiment.plan
    always = [m.name for m in plan.methods.values() if m.points and m.every_value and m.trains]
    order, regimes = [*plan.methods], [*(selection.regimes or plan.regimes)]
    lines = [
        line
        for line in experiment.done(*_phases(experiment, selection))
        if line["method"] in order
        and line["regime"] in regimes
        and (not selection.methods or line["method"] in (*selection.methods, *always))
    ]
    return sorted(
        lines, key=lambda line: (order.index(line["method"]), regimes.index(line["regime"]))
    )


def _figure_data(experiment: Experiment, lines: Sequence[Line]) -> FigureData:
    plan = experiment.plan
    methods = {}
    for method in plan.methods.values():
        values = tuple(point.value for point in method.points) if method.every_value else ()
        weights = plan.label(method.weights) if method.weights else ""
        label, knob = plan.label(method.name), method.tuned_knob
        methods[method.name] = MethodStyle(label, values, weights, knob)
    return FigureData(lines, methods, plan.labels, plan.num_steps)
