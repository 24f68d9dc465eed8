"""Formats benchmark results in the layout of the paper's tables.

Rows are models, columns are benchmarks, the last column is the average. Tables are written for the
terminal, in Markdown and in LaTeX.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eepo.reports.benchmark_results import ACCURACY, COMPARED_SETTINGS, ModelResult
from eepo.runs.runlog import write_atomically
from eepo.types import UserError, printable

MISSING = "–"
LABELS = {
    "accuracy": "pass@1",
    "format_share": "answer found",
    "truncated_share": "cut off",
    "length": "tokens",
}


@dataclass(frozen=True)
class Cell:
    number: str
    interval: str = ""

    def text(self) -> str:
        return f"{self.number} [{self.interval}]" if self.interval else self.number


@dataclass(frozen=True)
class ResultTable:
    """Holds a table before it is formatted for the terminal, Markdown or LaTeX."""

    caption: str
    row_heading: str  # the heading of the first column
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


def write_benchmark_tables(results: Sequence[ModelResult], out: Path, measure: str) -> list[Path]:
    """Write `results.md` and `results.tex` to `out`.

    The first table compares all rows, then each row has a table with every measure.
    """
    tables = [comparison_table(results, measure), *map(measures_table, results)]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be created: {error.strerror}") from error
    latex = "% needs \\usepackage{booktabs}\n" + "\n".join(map(format_latex, tables))
    write_atomically(out / "results.md", "\n".join(map(format_markdown, tables)))
    write_atomically(out / "results.tex", latex)
    return [out / "results.md", out / "results.tex"]


def parse_measure(name: str) -> str:
    """Return the measure in `results.json` behind a name on the command line."""
    if name == "greedy":
        return ACCURACY
    k = "1" if name == "mean" else name.removeprefix("pass@")
    if not (name == "mean" or name.startswith("pass@")) or not k.isdecimal() or int(k) < 1:
        raise UserError(f"--measure {name} must be greedy, mean or pass@K, such as pass@8")
    return f"samples/pass@{int(k)}"


# ---- contents


def comparison_table(results: Sequence[ModelResult], measure: str = ACCURACY) -> ResultTable:
    """Compare rows by one measure on each benchmark."""
    titles = _titles(results)
    name = "Greedy pass@1" if measure == ACCURACY else measure.removeprefix("samples/")
    notes = [
        f"{name} in percent; brackets: {_interval_note(results)}. "
        "Average: over benchmarks, with equal weights.",
        *_problem_notes(results, measure),
        *_difference_notes(results, measure),
    ]
    rows = [(_row_label(result), _cells(result, measure, list(titles))) for result in results]
    return ResultTable(" ".join(notes), "Method", [*titles.values(), "Average"], rows)


def _row_label(result: ModelResult) -> str:
    seeds = f" ({result.num_seeds} seeds)" if result.num_seeds > 1 else ""
    return f"{result.label}{seeds}"


def _interval_note(results: Sequence[ModelResult]) -> str:
    has_seeds = [result.num_seeds > 1 for result in results]
    over_seeds = "95 % t-interval of the mean over seeds"
    over_problems = "95 % bootstrap interval over problems"
    if all(has_seeds):
        return over_seeds
    return f"{over_seeds}; of one seed, {over_problems}" if any(has_seeds) else over_problems


def measures_table(result: ModelResult) -> ResultTable:
    """List every measure of one model, so that accuracy is shown beside the share of answers."""
    titles = _titles([result])
    all_measures = [list(benchmark["measures"]) for benchmark in result.benchmarks.values()]
    measures = max(all_measures, key=len, default=[])
    rows = [
        (measure_label(measure), _cells(result, measure, list(titles)))
        for measure in measures
        if measure != "samples/pass@1"  # equal to the mean of the samples
    ]
    caption = _settings_caption(result)
    return ResultTable(caption, "Measure", [*titles.values(), "Average"], rows)


def _settings_caption(result: ModelResult) -> str:
    settings = result.settings
    parts = ["greedy"]
    if settings["num_samples"]:
        limit = settings.get("sample_limit")
        which = f" of the first {limit} problems" if limit else ""
        temperature = settings["temperature"]
        parts.append(f"{settings['num_samples']} samples{which} at temperature {temperature}")
    if template := settings["template"]:
        parts.append(f"template {template if template in ('boxed', 'chat') else 'custom'}")
    parts.append(f"at most {settings['max_new_tokens']} new tokens")
    return (
        f"{_row_label(result)}: {'; '.join(parts)}. All values except tokens are in percent; "
        f"brackets: {_interval_note([result])}."
    )


def measure_label(measure: str) -> str:
    kind, _, name = measure.partition("/")
    return f"{kind} {LABELS[name]}" if name in LABELS else name


def _titles(results: Sequence[ModelResult]) -> dict[str, str]:
    return {
        name: benchmark["title"]
        for result in results
        for name, benchmark in result.benchmarks.items()
    }


def _cells(result: ModelResult, measure: str, benchmarks: Sequence[str]) -> list[Cell]:
    """Omit the average if it is over other benchmarks than the table's."""
    values = [
        result.benchmarks.get(name, {}).get("measures", {}).get(measure) for name in benchmarks
    ]
    same_benchmarks = set(benchmarks) == set(result.benchmarks)
    values.append(result.average.get(measure) if same_benchmarks else None)
    number_format, factor = ("{:,.0f}", 1) if measure.endswith("/length") else ("{:.1f}", 100)
    return [_cell(value, number_format, factor) if value else Cell(MISSING) for value in values]


def _cell(value: dict[str, float], number_format: str, factor: float) -> Cell:
    """Omit the interval if its width is 0: the bootstrap cannot estimate it from equal values."""
    mean, low, high = (number_format.format(factor * value[key]) for key in ("mean", "low", "high"))
    return Cell(mean, f"{low}, {high}" if value["high"] - value["low"] > 1e-9 else "")


def _num_problems(benchmark: dict[str, Any], measure: str) -> int:
    """Return the number of problems behind a measure: `--sample-limit` samples only some."""
    key = "num_problems" if measure == ACCURACY else "num_sampled_problems"
    return int(benchmark.get(key) or benchmark["num_problems"])


def _problem_notes(results: Sequence[ModelResult], measure: str) -> list[str]:
    benchmarks = [benchmark for result in results for benchmark in result.benchmarks.values()]
    counts = {benchmark["title"]: _num_problems(benchmark, measure) for benchmark in benchmarks}
    texts = [f"{title} {count:,}" for title, count in counts.items()]
    notes = [f"Problems: {', '.join(texts)}."]
    skipped = {
        benchmark["title"]: benchmark["num_left_out"]
        for benchmark in benchmarks
        if benchmark["num_left_out"]
    }
    if skipped:
        texts = [f"{count} of {title}" for title, count in skipped.items()]
        notes.append(f"Skipped because the prompt is too long: {', '.join(texts)}.")
    return notes


def _difference_notes(results: Sequence[ModelResult], measure: str) -> list[str]:
    """Warn if rows are not comparable."""
    keys = COMPARED_SETTINGS if measure == ACCURACY else (*COMPARED_SETTINGS, "temperature")
    differing = [
        key for key in keys if len({str(result.settings.get(key)) for result in results}) > 1
    ]
    counts = {
        (name, _num_problems(benchmark, measure))
        for result in results
        for name, benchmark in result.benchmarks.items()
    }
    if len(counts) > len(dict(counts)):
        differing.append("number of problems")
    if not differing:
        return []
    return [f"Rows are not comparable: they differ in {', '.join(differing)}."]


# ---- formats


def format_terminal(table: ResultTable, width: int = 80) -> Group:
    """Put intervals below their numbers, and split columns into blocks that fit the width."""
    label_width = min(24, 2 + max(len(label) for label, _ in table.rows))
    num_columns = max(1, (width - label_width) // 13)
    starts = range(0, len(table.columns), num_columns)
    blocks = [_terminal_block(table, slice(start, start + num_columns)) for start in starts]
    return Group(*blocks, Text(table.caption.replace("brackets", "ranges")))


def _terminal_block(table: ResultTable, columns: slice) -> Table:
    """Use `Text` cells: the name of a model may contain rich markup."""
    block = Table(box=SIMPLE, pad_edge=False)
    block.add_column(table.row_heading.lower(), overflow="fold")
    for column in table.columns[columns]:
        heading = printable(column)
        heading = heading.replace(" ", "\n") if len(heading) > 8 else heading
        block.add_column(Text(heading), justify="right")
    for label, cells in table.rows:
        numbers = [
            Text.assemble(cell.number, "\n", (cell.interval.replace(", ", "–"), "dim"))
            for cell in cells[columns]
        ]
        block.add_row(Text(printable(label)), *numbers)
    return block


def format_markdown(table: ResultTable) -> str:
    lines = [[table.row_heading, *table.columns], ["---", *["---:"] * len(table.columns)]]
    for label, cells in table.rows:
        lines.append([label, *(cell.text() for cell in cells)])
    text = "\n".join("| " + " | ".join(map(_escape_markdown, line)) + " |" for line in lines)
    return f"{text}\n\n{_escape_markdown(table.caption)}\n"


def _escape_markdown(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def format_latex(table: ResultTable) -> str:
    """Omit intervals, as the paper does: Markdown and JSON have them."""
    headings = [f"\\textbf{{{_stack_words(text)}}}" for text in [table.row_heading, *table.columns]]
    rows = [
        " & ".join(map(escape_latex, [label, *(cell.number for cell in cells)]))
        for label, cells in table.rows
    ]
    caption = re.sub(r";? brackets: [^.]*\.", ".", table.caption)
    return "\n".join(
        [
            "\\begin{table*}[h]",
            "\\centering",
            f"\\caption{{{escape_latex(caption)}}}",
            f"\\begin{{tabular}}{{l{'c' * len(table.columns)}}}",
            "\\toprule",
            f"{' & '.join(headings)} \\\\",
            "\\midrule",
            *(f"{row} \\\\" for row in rows),
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table*}",
            "",
        ]
    )


def escape_latex(text: str) -> str:
    escapes = {character: f"\\{character}" for character in "&%$#_{}"}
    escapes |= {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        MISSING: "--",
    }
    return "".join(escapes.get(character, character) for character in " ".join(text.split()))


def _stack_words(title: str) -> str:
    """Put a long title on two lines."""
    words = title.split(" ", 1)
    if len(title) <= 8 or len(words) == 1:
        return escape_latex(title)
    upper, lower = map(escape_latex, words)
    return f"\\begin{{tabular}}[c]{{@{{}}c@{{}}}}{upper}\\\\ {lower}\\end{{tabular}}"
