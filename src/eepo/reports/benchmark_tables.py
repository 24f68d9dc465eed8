"""Results on benchmarks as tables in the paper's layout: a row for each model, a column for each benchmark, the average
last. On the terminal, in Markdown and in LaTeX; all from the `results.json` of evaluation folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eepo.runs.runlog import write_whole
from eepo.types import UserError

ACCURACY = "greedy/accuracy"
MISSING = "–"
SAME = (
    "template",
    "max_new_tokens",
    "max_prompt_tokens",
    "limit",
    "reward",
)  # or rows are not comparable
LABELS = {
    "accuracy": "pass@1",
    "format_share": "answer found",
    "truncated_share": "cut off",
    "length": "tokens",
}


@dataclass(frozen=True)
class Result:
    label: str
    settings: dict[str, Any]
    benchmarks: dict[str, dict[str, Any]]
    average: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Cell:
    number: str
    interval: str = ""


@dataclass(frozen=True)
class Grid:
    caption: str
    corner: str  # what the rows are
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


def read_result(place: str | Path) -> Result:
    """From an evaluation's folder, or `LABEL=FOLDER` to call its row by another name."""
    label, equals, named = str(place).partition("=")
    folder = Path(named if equals and not Path(place).is_dir() else place)
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no results.json; give folders of finished evaluations")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        name = label if folder != Path(place) else model_label(told["settings"]["model"])
        return Result(name, told["settings"], told["benchmarks"], told["average"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the results of an evaluation") from error


def model_label(model: str) -> str:
    """The last part of a hub name or folder that says something."""
    parts = [
        part
        for part in re.split(r"[/\\:]", model)
        if part not in ("", ".", "..", "~", "final", "checkpoints")
    ]
    return parts[-1] if parts else Path(model).expanduser().resolve().name


def write_tables(places: Sequence[str | Path], out: Path) -> list[Path]:
    """`results.md` and `results.tex` in `out`: one table over all models, then one for each with every measure."""
    results = [read_result(place) for place in places]
    grids = [accuracy_grid(results), *map(measures_grid, results)]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}") from error
    write_whole(out / "results.md", "\n".join(map(markdown, grids)))
    write_whole(
        out / "results.tex", "% needs \\usepackage{booktabs}\n" + "\n".join(map(latex, grids))
    )
    return [out / "results.md", out / "results.tex"]


# ---- what stands in them


def accuracy_grid(results: Sequence[Result]) -> Grid:
    """Models against benchmarks, by greedy pass@1."""
    titles = _titles(results)
    notes = [
        "Greedy pass@1 in percent; brackets: 95 % bootstrap interval over problems. "
        "Average: over benchmarks, each of equal weight.",
        *_problem_notes(results),
        *_difference_notes(results),
    ]
    rows = [(result.label, _cells(result, ACCURACY, list(titles))) for result in results]
    return Grid(" ".join(notes), "Method", [*titles.values(), "Average"], rows)


def measures_grid(result: Result) -> Grid:
    """Every measure of one model; accuracy never without how often an answer was found at all."""
    titles = _titles([result])
    measures = max(
        (list(told["measures"]) for told in result.benchmarks.values()), key=len, default=[]
    )
    shown = [key for key in measures if key != "samples/pass@1"]  # of samples it is their mean
    settings = result.settings
    drawn = f" {settings['num_samples']} samples at temperature {settings['temperature']};"
    caption = (
        f"{result.label}: greedy;{drawn if settings['num_samples'] else ''} template {_short(settings['template'])}; "
        f"at most {settings['max_new_tokens']} new tokens. In percent, but for tokens; "
        "brackets: 95 % bootstrap interval over problems."
    )
    rows = [(measure_label(key), _cells(result, key, list(titles))) for key in shown]
    return Grid(caption, "Measure", [*titles.values(), "Average"], rows)


def measure_label(measure: str) -> str:
    kind, _, name = measure.partition("/")
    return f"{kind} {LABELS[name]}" if name in LABELS else name


def _titles(results: Sequence[Result]) -> dict[str, str]:
    return {name: told["title"] for result in results for name, told in result.benchmarks.items()}


def _cells(result: Result, measure: str, names: Sequence[str]) -> list[Cell]:
    """An average over other benchmarks than the table's is left out: it would be compared."""
    found = [result.benchmarks.get(name, {}).get("measures", {}).get(measure) for name in names]
    average = result.average.get(measure) if set(names) == set(result.benchmarks) else None
    form, scale = ("{:,.0f}", 1) if measure.endswith("/length") else ("{:.1f}", 100)
    return [_cell(one, form, scale) if one else Cell(MISSING) for one in (*found, average)]


def _cell(told: dict[str, float], form: str, scale: float) -> Cell:
    """Where all problems are alike the bootstrap knows no width: no interval is truer than one of zero."""
    number, low, high = (form.format(scale * told[key]) for key in ("mean", "low", "high"))
    return Cell(number, f"{low}, {high}" if told["low"] < told["high"] else "")


def _problem_notes(results: Sequence[Result]) -> list[str]:
    counts = {
        told["title"]: told["num_problems"]
        for result in results
        for told in result.benchmarks.values()
    }
    notes = [f"Problems: {', '.join(f'{title} {number:,}' for title, number in counts.items())}."]
    left_out = {
        told["title"]: told["num_left_out"]
        for result in results
        for told in result.benchmarks.values()
        if told["num_left_out"]
    }
    if left_out:
        told = ", ".join(f"{number} of {title}" for title, number in left_out.items())
        notes.append(f"Left out, as their prompts are too long: {told}.")
    return notes


def _difference_notes(results: Sequence[Result]) -> list[str]:
    """Rows that were asked otherwise are not comparable, and the table says so."""
    unlike = [key for key in SAME if len({str(result.settings.get(key)) for result in results}) > 1]
    counts = {
        (name, told["num_problems"])
        for result in results
        for name, told in result.benchmarks.items()
    }
    if len(counts) > len(dict(counts)):
        unlike.append("number of problems")
    return [f"Rows are not comparable: they differ in {', '.join(unlike)}."] if unlike else []


def _short(template: str) -> str:
    return template if template in ("boxed", "chat") else "of its own"


# ---- how they look


def terminal(grid: Grid, width: int = 80) -> Group:
    """Intervals under their numbers, and columns in as many blocks as the width needs."""
    first = min(24, 2 + max(len(label) for label, _ in grid.rows))
    at_once = max(1, (width - first) // 13)
    blocks = [
        _block(grid, start, start + at_once) for start in range(0, len(grid.columns), at_once)
    ]
    return Group(*blocks, Text(grid.caption.replace("brackets", "ranges")))


def _block(grid: Grid, start: int, end: int) -> Table:
    """`Text` cells, because a model's name may hold rich's own markup."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column(grid.corner.lower(), overflow="fold")
    for column in grid.columns[start:end]:
        table.add_column(
            Text(column.replace(" ", "\n") if len(column) > 8 else column), justify="right"
        )
    for label, cells in grid.rows:
        numbers = [
            Text.assemble(cell.number, "\n", (cell.interval.replace(", ", "–"), "dim"))
            for cell in cells[start:end]
        ]
        table.add_row(Text(label), *numbers)
    return table


def markdown(grid: Grid) -> str:
    lines = [[grid.corner, *grid.columns], ["---", *["---:"] * len(grid.columns)]]
    for label, cells in grid.rows:
        lines.append(
            [label, *(f"{c.number} [{c.interval}]" if c.interval else c.number for c in cells)]
        )
    table = "\n".join("| " + " | ".join(map(_markdown_text, line)) + " |" for line in lines)
    return f"{table}\n\n{_markdown_text(grid.caption)}\n"


def _markdown_text(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def latex(grid: Grid) -> str:
    """Without intervals, as in the paper: they stand in the Markdown and the JSON."""
    head = " & ".join(f"\\textbf{{{_stacked(column)}}}" for column in [grid.corner, *grid.columns])
    rows = [
        " & ".join(map(latex_text, [label, *(cell.number for cell in cells)]))
        for label, cells in grid.rows
    ]
    caption = re.sub(r";? brackets: [^.]*\.", ".", grid.caption)
    return "\n".join(
        [
            "\\begin{table*}[h]",
            "\\centering",
            f"\\caption{{{latex_text(caption)}}}",
            f"\\begin{{tabular}}{{l{'c' * len(grid.columns)}}}",
            "\\toprule",
            f"{head} \\\\",
            "\\midrule",
            *(f"{row} \\\\" for row in rows),
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table*}",
            "",
        ]
    )


def latex_text(text: str) -> str:
    """What TeX would take for an order, as a sign on the page."""
    signs = {sign: f"\\{sign}" for sign in "&%$#_{}"}
    signs |= {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        MISSING: "--",
    }
    return "".join(signs.get(sign, sign) for sign in " ".join(text.split()))


def _stacked(title: str) -> str:
    """A long title of two words on two lines."""
    words = title.split(" ", 1)
    if len(title) <= 8 or len(words) == 1:
        return latex_text(title)
    upper, lower = map(latex_text, words)
    return f"\\begin{{tabular}}[c]{{@{{}}c@{{}}}}{upper}\\\\ {lower}\\end{{tabular}}"
