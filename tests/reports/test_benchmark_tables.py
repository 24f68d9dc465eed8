"""Tables of results: the cells, what a careless reader must be told, and names that would break a format."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo.reports.benchmark_tables import (
    accuracy_grid,
    latex,
    latex_text,
    markdown,
    measures_grid,
    model_label,
    read_result,
    terminal,
    write_tables,
)
from eepo.types import UserError

TITLES = {"minerva_math": "Minerva Math", "amc23": "AMC 23", "aime24": "AIME 24"}


def told(mean: float, width: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "low": mean - width, "high": mean + width}


def write(
    folder: Path,
    model: str,
    accuracies: Sequence[float],
    num_samples: int = 0,
    left_out: int = 0,
    **settings: Any,
) -> Path:
    """An evaluation's folder with these greedy accuracies on the first benchmarks."""
    measures = [
        {"greedy/accuracy": told(value), "greedy/format_share": told(0.9, 0)}
        for value in accuracies
    ]
    for one in measures:
        one["greedy/length"] = told(1234.4, 56)
        if num_samples:
            one |= {
                f"samples/{name}": told(0.5)
                for name in ("mean@2", "majority@2", "pass@1", "pass@2")
            }
    average = {
        key: told(sum(one[key]["mean"] for one in measures) / len(measures)) for key in measures[0]
    }
    folder.mkdir()
    results = {
        "settings": {
            "model": model, "template": "boxed", "max_new_tokens": 4096, "num_samples": num_samples,
            "temperature": 0.6, "limit": 0, **settings,
        },
        "benchmarks": {
            name: {"title": title, "num_problems": 40, "num_left_out": left_out, "measures": one}
            for (name, title), one in zip(TITLES.items(), measures, strict=False)
        },
        "average": average,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def cells(line: str) -> list[str]:
    return [
        cell.strip()
        for cell in line.strip().strip("|").replace("\\\\", "").split("&" if "&" in line else "|")
    ]


def test_models_are_rows_and_benchmarks_columns_with_the_average_last(tmp_path: Path) -> None:
    places = [
        write(tmp_path / "a", "Qwen/Qwen2.5-3B", [0.118, 0.2]),
        write(tmp_path / "b", "runs/eepo", [0.2351, 0.45]),
    ]
    text = latex(accuracy_grid([read_result(place) for place in places]))
    rows = [cells(line) for line in text.splitlines() if "&" in line]
    assert [re.sub(r"\\textbf|[{}]", "", cell) for cell in rows[0]][0::2] == ["Method", "AMC 23"]
    assert rows[1:] == [["Qwen2.5-3B", "11.8", "20.0", "15.9"], ["eepo", "23.5", "45.0", "34.3"]]
    assert "\\begin{tabular}{lccc}" in text


def test_markdown_has_the_intervals(tmp_path: Path) -> None:
    grid = accuracy_grid([read_result(write(tmp_path / "a", "acme/m", [0.25]))])
    head, rule, line, *_ = markdown(grid).splitlines()
    assert (cells(head), cells(rule)) == (
        ["Method", "Minerva Math", "Average"],
        ["---", "---:", "---:"],
    )
    assert cells(line) == ["m", "25.0 [15.0, 35.0]", "25.0 [15.0, 35.0]"]


def test_every_measure_of_one_model(tmp_path: Path) -> None:
    grid = measures_grid(read_result(write(tmp_path / "a", "acme/m", [0.25, 0.35], num_samples=2)))
    assert [(label, row[0].number) for label, row in grid.rows] == [
        ("greedy pass@1", "25.0"),
        ("greedy answer found", "90.0"),
        ("greedy tokens", "1,234"),
        ("mean@2", "50.0"),
        ("majority@2", "50.0"),
        ("pass@2", "50.0"),
    ]
    assert "2 samples at temperature 0.6" in grid.caption


def test_where_all_problems_are_alike_no_interval_is_claimed(tmp_path: Path) -> None:
    grid = measures_grid(read_result(write(tmp_path / "a", "acme/m", [0.25])))
    assert {label: row[0].interval for label, row in grid.rows}["greedy answer found"] == ""


def test_an_average_over_other_benchmarks_is_left_out(tmp_path: Path) -> None:
    places = [
        write(tmp_path / "a", "acme/all", [0.1, 0.2, 0.3]),
        write(tmp_path / "b", "acme/two", [0.1, 0.2]),
    ]
    grid = accuracy_grid([read_result(place) for place in places])
    assert [[cell.number for cell in row] for _, row in grid.rows] == [
        ["10.0", "20.0", "30.0", "20.0"],
        ["10.0", "20.0", "–", "–"],
    ]


def test_rows_that_were_asked_otherwise_are_said_not_to_compare(tmp_path: Path) -> None:
    places = [
        write(tmp_path / "a", "acme/one", [0.1]),
        write(tmp_path / "b", "acme/two", [0.1], template="chat", max_new_tokens=8192),
    ]
    results = [read_result(place) for place in places]
    assert (
        "not comparable: they differ in template, max_new_tokens." in accuracy_grid(results).caption
    )
    assert "not comparable" not in accuracy_grid(results[:1]).caption


def test_rows_over_other_numbers_of_problems_are_said_not_to_compare(tmp_path: Path) -> None:
    places = [write(tmp_path / name, f"acme/{name}", [0.1]) for name in ("a", "b")]
    path = places[1] / "results.json"
    path.write_text(path.read_text().replace('"num_problems": 40', '"num_problems": 39'))
    assert (
        "differ in number of problems."
        in accuracy_grid([read_result(place) for place in places]).caption
    )


def test_problems_left_out_are_said(tmp_path: Path) -> None:
    grid = accuracy_grid([read_result(write(tmp_path / "a", "acme/m", [0.1], left_out=3))])
    assert "3 of Minerva Math" in grid.caption
    assert "Minerva Math 40" in grid.caption


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("Qwen/Qwen2.5-3B", "Qwen2.5-3B"),
        ("builtin:countdown", "countdown"),
        ("runs/eepo/", "eepo"),
        ("runs/eepo/final", "eepo"),
        ("../runs/eepo/checkpoints/step-000040", "step-000040"),
    ],
)
def test_the_name_of_a_row_is_the_last_part_that_says_something(model: str, label: str) -> None:
    assert model_label(model) == label


def test_a_row_may_be_given_another_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "x=y", "acme/m", [0.1])
    assert read_result(folder).label == "m", "a folder's own = is no label"
    assert read_result(f"- Higher Temp.={folder}").label == "- Higher Temp."


def test_names_that_would_break_latex_or_markdown(tmp_path: Path) -> None:
    name = "a_b%c&d#e$f{g}~h^i\\j|k<l"
    write_tables([f"{name}={write(tmp_path / 'a', 'acme/m', [0.1])}"], tmp_path / "out")
    tex, text = ((tmp_path / "out" / f"results.{kind}").read_text() for kind in ("tex", "md"))
    row = next(line for line in tex.splitlines() if line.startswith("a\\_b"))
    assert row == (
        "a\\_b\\%c\\&d\\#e\\$f\\{g\\}\\textasciitilde{}h\\textasciicircum{}i\\textbackslash{}j|k<l & 10.0 & 10.0 \\\\"
    )
    assert "| a_b%c&d#e$f{g}~h^i\\\\j\\|k&lt;l | 10.0 [0.0, 20.0] |" in text
    assert tex.count("{") - tex.count("\\{") == tex.count("}") - tex.count("\\}")


def test_latex_text_stays_on_its_line() -> None:
    assert latex_text("two\nlines – done") == "two lines -- done"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_cell_is_cut_off_on_the_terminal(width: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "acme/[red]m", [0.1, 0.2, 0.3])
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal(measures_grid(read_result(folder)), width))
    console.print(terminal(accuracy_grid([read_result(folder)]), width))
    text = console.file.getvalue()
    assert "…" not in text
    assert "[red]m" in text
    for number in ("10.0", "0.0–20.0", "20.0–40.0", "1,234"):
        assert number in text


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"settings": {}}'])
def test_folders_without_results_are_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        write_tables([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
