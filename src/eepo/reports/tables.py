"""The comparison as a table: on the terminal, in HTML, in Markdown. All three show the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eepo.reports.measures import LABELS, START, ComparisonRow, Estimate, comparison_rows

__all__ = ["comparison_rows", "html_table", "markdown_table", "table_caption", "terminal_table"]

MISSING = "–"


def table_caption(rows: Sequence[ComparisonRow]) -> str:
    """What the numbers are, and what the brackets are over. Says it plainly when the brackets prove nothing."""
    trained = [row for row in rows if row.method != START]
    parts = [
        "greedy: share of problems solved by the most likely completion; mean: share of drawn completions that are "
        "right; pass@k: chance that k drawn completions hold a right one; distinct correct: different right answers "
        "found for a problem, on average."
    ]
    if any(row.num_seeds > 1 for row in trained):
        parts.append(
            "Brackets: 95 % t-interval of the mean over seeds; with few seeds it may reach past 0 or 100 %."
        )
    if any(row.num_seeds == 1 for row in trained):
        single = (
            "Brackets"
            if all(row.num_seeds == 1 for row in trained)
            else "Brackets of methods with one seed"
        )
        parts.append(
            f"{single}: 95 % interval over the problems of ONE seed, which is not evidence about methods."
        )
    if any(row.method == START for row in rows):
        parts.append("start: the policy before training; its interval is over problems.")
    return " ".join(parts)


def headings(rows: Sequence[ComparisonRow]) -> list[str]:
    measures = [LABELS.get(measure, measure) for measure in _measures(rows)]
    return ["set", "method", "seeds", *measures, "training time", "completions"]


def cells(row: ComparisonRow, measures: Sequence[str]) -> list[str]:
    return [
        plain(row.set) or MISSING,
        row.method,
        MISSING if row.method == START else str(row.num_seeds),
        *(measure_text(row.measures.get(measure), measure) for measure in measures),
        _number(row.seconds, "{:,.0f}", " s"),
        f"{row.num_completions.mean:,.0f}" if row.num_completions else MISSING,
    ]


def plain(name: str) -> str:
    """An evaluation set's name for reading."""
    return name.replace("_", " ")


def measure_text(found: Estimate | None, measure: str) -> str:
    """Shares in percent, distinct answers as a count."""
    if measure == "distinct":
        return _number(found, "{:.2f}", "")
    return _number(found, "{:.1f}", " %", scale=100)


def terminal_table(rows: Sequence[ComparisonRow]) -> Group:
    """One table for each evaluation set, intervals under their numbers, so that 80 columns are enough."""
    sets = dict.fromkeys(row.set for row in rows)
    tables = [_set_table(name, [row for row in rows if row.set == name]) for name in sets]
    return Group(*tables, Text(table_caption(rows).replace("Brackets", "Ranges")))


def _set_table(name: str, rows: Sequence[ComparisonRow]) -> Table:
    """`Text` cells, because a method's name is the user's and may hold rich's own markup."""
    table = Table(title=Text(plain(name)), title_justify="left", box=SIMPLE, pad_edge=False)
    measures = _measures(rows)
    table.add_column("method\nseeds", overflow="fold")
    for measure in measures:
        table.add_column(
            "distinct\ncorrect" if measure == "distinct" else measure, justify="right", no_wrap=True
        )
    table.add_column("time\ndrawn", justify="right")
    for row in rows:
        _, method, seeds, *numbers, seconds, completions = cells(row, measures)
        seconds = seconds.partition(" [")[0]
        found = [_two_lines(*number.rstrip("]").partition(" [")[::2]) for number in numbers]
        table.add_row(_two_lines(method, seeds), *found, _two_lines(seconds, completions))
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
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n'
        f'<p class="caption">{escape(table_caption(rows))}</p>'
    )


def _html_cell(cell: str) -> str:
    """The interval under its number, so that the table fits a page."""
    number, bracket, rest = cell.partition(" [") if cell.endswith("]") else (cell, "", "")
    below = f'<br><span class="caption">[{escape(rest)}</span>' if bracket else ""
    return f"<td>{escape(number)}{below}</td>"


def markdown_table(rows: Sequence[ComparisonRow]) -> str:
    head = headings(rows)
    rule = ["---" if heading in ("set", "method") else "---:" for heading in head]
    lines = [head, rule, *(cells(row, _measures(rows)) for row in rows)]
    text = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
    return f"{text}\n\n{table_caption(rows)}\n"


def _measures(rows: Sequence[ComparisonRow]) -> list[str]:
    return list(rows[0].measures) if rows else []


def _number(found: Estimate | None, form: str, unit: str, scale: float = 1) -> str:
    if found is None:
        return MISSING
    text = form.format(found.mean * scale) + unit
    if found.low is None or found.high is None:
        return text
    return f"{text} [{form.format(found.low * scale)}, {form.format(found.high * scale)}]"
