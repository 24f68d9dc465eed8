"""Formats the comparison as a table for the terminal, HTML and Markdown, with the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eepo.evaluation.results import set_title
from eepo.reports.measures import LABELS, START, ComparisonRow, Estimate
from eepo.types import printable

MISSING = "–"


def table_caption(rows: Sequence[ComparisonRow]) -> str:
    """Explain the measures and the brackets, and say so if the brackets are no evidence."""
    trained = [row for row in rows if row.method != START]
    parts = [
        "greedy: share of problems solved by greedy decoding; mean: share of sampled completions "
        "that are correct; pass@k: probability that at least one of k sampled completions is "
        "correct; distinct correct: mean number of different correct answers per problem."
    ]
    if any(row.num_seeds > 1 for row in trained):
        parts.append(
            "Brackets: 95 % t-interval of the mean over seeds; with few seeds it can extend below "
            "0 or above 100 %."
        )
    if any(row.num_seeds == 1 for row in trained):
        all_single = all(row.num_seeds == 1 for row in trained)
        brackets = "Brackets" if all_single else "Brackets of methods with one seed"
        parts.append(
            f"{brackets}: 95 % interval over the problems of ONE seed, "
            "which is not evidence about methods."
        )
    if any(row.method == START for row in rows):
        parts.append("start: the policy before training; its interval is over problems.")
    return " ".join(parts)


def headings(rows: Sequence[ComparisonRow]) -> list[str]:
    measures = [LABELS.get(measure, measure) for measure in _measures(rows)]
    return ["set", "method", "seeds", *measures, "training time", "completions"]


def cells(row: ComparisonRow, measures: Sequence[str]) -> list[str]:
    return [
        set_title(row.eval_set) or MISSING,
        row.method,
        MISSING if row.method == START else str(row.num_seeds),
        *(measure_text(row.measures.get(measure), measure) for measure in measures),
        _estimate_text(row.seconds, "{:,.0f}", " s"),
        f"{row.num_completions.mean:,.0f}" if row.num_completions else MISSING,
    ]


def measure_text(estimate: Estimate | None, measure: str) -> str:
    """Format shares in percent and distinct answers as a count."""
    if measure == "distinct":
        return _estimate_text(estimate, "{:.2f}", "")
    return _estimate_text(estimate, "{:.1f}", " %", factor=100)


def terminal_table(rows: Sequence[ComparisonRow]) -> Group:
    """Return one table for each evaluation set.

    Intervals are below their numbers, so that the table fits into 80 columns.
    """
    sets = dict.fromkeys(row.eval_set for row in rows)
    tables = [_set_table(name, [row for row in rows if row.eval_set == name]) for name in sets]
    return Group(*tables, Text(table_caption(rows).replace("Brackets", "Ranges")))


def _set_table(eval_set: str, rows: Sequence[ComparisonRow]) -> Table:
    """Use `Text` cells: the name of a method may contain rich markup."""
    title = Text(printable(set_title(eval_set)))
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    measures = _measures(rows)
    table.add_column("method\nseeds", overflow="fold")
    for measure in measures:
        heading = "distinct\ncorrect" if measure == "distinct" else measure
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("time\nsampled", justify="right")
    for row in rows:
        _, method, seeds, *numbers, seconds, completions = cells(row, measures)
        seconds = seconds.partition(" [")[0]
        estimates = [_two_lines(*number.rstrip("]").partition(" [")[::2]) for number in numbers]
        table.add_row(
            _two_lines(printable(method), seeds), *estimates, _two_lines(seconds, completions)
        )
    return table


def _two_lines(upper: str, lower: str) -> Text:
    return Text.assemble(upper, "\n", (lower.replace(", ", "–"), "dim"))


def html_table(rows: Sequence[ComparisonRow]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings(rows))
    body = "\n".join(
        "<tr>" + "".join(_html_cell(cell) for cell in cells(row, _measures(rows))) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n"
        f'<p class="caption">{escape(table_caption(rows))}</p>'
    )


def _html_cell(cell: str) -> str:
    """Put the interval below its number, so that the table fits a page."""
    number, bracket, interval = cell.partition(" [") if cell.endswith("]") else (cell, "", "")
    second_line = f'<br><span class="caption">[{escape(interval)}</span>' if bracket else ""
    return f"<td>{escape(number)}{second_line}</td>"


def markdown_table(rows: Sequence[ComparisonRow]) -> str:
    head = headings(rows)
    alignments = ["---" if heading in ("set", "method") else "---:" for heading in head]
    lines = [head, alignments, *(cells(row, _measures(rows)) for row in rows)]
    return f"{markdown_lines(lines)}\n\n{table_caption(rows)}\n"


def markdown_lines(lines: Sequence[Sequence[str]]) -> str:
    """Join cells to a Markdown table, and escape |."""
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _measures(rows: Sequence[ComparisonRow]) -> list[str]:
    return list(rows[0].measures) if rows else []


def _estimate_text(
    estimate: Estimate | None, number_format: str, unit: str, factor: float = 1
) -> str:
    if estimate is None:
        return MISSING
    text = number_format.format(estimate.mean * factor) + unit
    if estimate.low is None or estimate.high is None:
        return text
    low, high = (number_format.format(end * factor) for end in (estimate.low, estimate.high))
    return f"{text} [{low}, {high}]"
