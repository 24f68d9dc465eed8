"""Tests the benchmark tables: cells, warnings in captions, and escaping."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo.evaluation.trained_run import model_label
from eepo.reports.benchmark_results import ACCURACY, ModelResult, read_results
from eepo.reports.benchmark_tables import (
    comparison_table,
    escape_latex,
    format_latex,
    format_markdown,
    format_terminal,
    measures_table,
    parse_measure,
    write_benchmark_tables,
)
from eepo.types import UserError

TITLES = {"minerva_math": "Minerva Math", "amc23": "AMC 23", "aime24": "AIME 24"}


def estimate(mean: float, width: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "low": mean - width, "high": mean + width}


def write(
    folder: Path,
    model: str,
    accuracies: Sequence[float],
    num_samples: int = 0,
    left_out: int = 0,
    **settings: Any,
) -> Path:
    """Write an evaluation folder with greedy accuracies on the first benchmarks."""
    names = ("mean@2", "majority@2", "pass@1", "pass@2") if num_samples else ()
    benchmarks = [
        {
            "greedy/accuracy": estimate(value),
            "greedy/format_share": estimate(0.9, 0),
            "greedy/length": estimate(1234.4, 56),
            **{f"samples/{name}": estimate(0.5) for name in names},
        }
        for value in accuracies
    ]
    average = {
        key: estimate(sum(measures[key]["mean"] for measures in benchmarks) / len(benchmarks))
        for key in benchmarks[0]
    }
    folder.mkdir()
    results = {
        "settings": {
            "model": model, "template": "boxed", "max_new_tokens": 4096, "num_samples": num_samples,
            "temperature": 0.6, "limit": 0, **settings,
        },
        "benchmarks": {
            name: {
                "title": title, "num_problems": 40, "num_left_out": left_out, "measures": measures,
            }
            for (name, title), measures in zip(TITLES.items(), benchmarks, strict=False)
        },
        "average": average,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def read_result(source: str | Path) -> ModelResult:
    (result,) = read_results([source])
    return result


def cells(line: str) -> list[str]:
    return [
        cell.strip()
        for cell in line.strip().strip("|").replace("\\\\", "").split("&" if "&" in line else "|")
    ]


def test_models_are_rows_and_benchmarks_columns_with_the_average_last(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "a", "Qwen/Qwen2.5-3B", [0.118, 0.2]),
        write(tmp_path / "b", "runs/eepo", [0.2351, 0.45]),
    ]
    text = format_latex(comparison_table(read_results(folders)))
    rows = [cells(line) for line in text.splitlines() if "&" in line]
    assert [re.sub(r"\\textbf|[{}]", "", cell) for cell in rows[0]][0::2] == ["Method", "AMC 23"]
    assert rows[1:] == [["Qwen2.5-3B", "11.8", "20.0", "15.9"], ["eepo", "23.5", "45.0", "34.3"]]
    assert "\\begin{tabular}{lccc}" in text


def test_markdown_shows_intervals(tmp_path: Path) -> None:
    table = comparison_table(read_results([write(tmp_path / "a", "acme/m", [0.25])]))
    head, rule, line, *_ = format_markdown(table).splitlines()
    assert (cells(head), cells(rule)) == (
        ["Method", "Minerva Math", "Average"],
        ["---", "---:", "---:"],
    )
    assert cells(line) == ["m", "25.0 [15.0, 35.0]", "25.0 [15.0, 35.0]"]


def test_the_measures_table_lists_every_measure(tmp_path: Path) -> None:
    table = measures_table(
        read_result(write(tmp_path / "a", "acme/m", [0.25, 0.35], num_samples=2))
    )
    assert [(label, row[0].number) for label, row in table.rows] == [
        ("greedy pass@1", "25.0"),
        ("greedy answer found", "90.0"),
        ("greedy tokens", "1,234"),
        ("mean@2", "50.0"),
        ("majority@2", "50.0"),
        ("pass@2", "50.0"),
    ]
    assert "2 samples at temperature 0.6" in table.caption


def test_no_interval_if_all_problems_have_the_same_value(tmp_path: Path) -> None:
    table = measures_table(read_result(write(tmp_path / "a", "acme/m", [0.25])))
    assert {label: row[0].interval for label, row in table.rows}["greedy answer found"] == ""


def test_an_average_over_other_benchmarks_is_omitted(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "a", "acme/all", [0.1, 0.2, 0.3]),
        write(tmp_path / "b", "acme/two", [0.1, 0.2]),
    ]
    table = comparison_table(read_results(folders))
    assert [[cell.number for cell in row] for _, row in table.rows] == [
        ["10.0", "20.0", "30.0", "20.0"],
        ["10.0", "20.0", "–", "–"],
    ]


def test_rows_with_different_settings_are_marked_as_not_comparable(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "a", "acme/first", [0.1]),
        write(tmp_path / "b", "acme/two", [0.1], template="chat", max_new_tokens=8192),
    ]
    results = read_results(folders)
    assert (
        "not comparable: they differ in template, max_new_tokens."
        in comparison_table(results).caption
    )
    assert "not comparable" not in comparison_table(results[:1]).caption


def test_rows_with_different_numbers_of_problems_are_marked_as_not_comparable(
    tmp_path: Path,
) -> None:
    folders = [write(tmp_path / name, f"acme/{name}", [0.1]) for name in ("a", "b")]
    path = folders[1] / "results.json"
    path.write_text(path.read_text().replace('"num_problems": 40', '"num_problems": 39'))
    assert "differ in number of problems." in comparison_table(read_results(folders)).caption


def test_skipped_problems_are_counted_in_the_caption(tmp_path: Path) -> None:
    table = comparison_table(read_results([write(tmp_path / "a", "acme/m", [0.1], left_out=3)]))
    assert "3 of Minerva Math" in table.caption
    assert "Minerva Math 40" in table.caption


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
def test_a_row_is_labelled_by_the_last_informative_part_of_the_model(
    model: str, label: str
) -> None:
    assert model_label(model) == label


def test_a_row_can_be_given_a_label(tmp_path: Path) -> None:
    folder = write(tmp_path / "x=y", "acme/m", [0.1])
    assert read_result(folder).label == "m", "= in the name of a folder is not a label"
    assert read_result(f"- Higher Temp.={folder}").label == "- Higher Temp."


def test_special_characters_are_escaped_in_latex_and_markdown(tmp_path: Path) -> None:
    name = "a_b%c&d#e$f{g}~h^i\\j|k<l"
    source = f"{name}={write(tmp_path / 'a', 'acme/m', [0.1])}"
    write_benchmark_tables(read_results([source]), tmp_path / "out", ACCURACY)
    tex, text = ((tmp_path / "out" / f"results.{kind}").read_text() for kind in ("tex", "md"))
    row = next(line for line in tex.splitlines() if line.startswith("a\\_b"))
    assert row == (
        "a\\_b\\%c\\&d\\#e\\$f\\{g\\}\\textasciitilde{}h\\textasciicircum{}i\\textbackslash{}j|k<l"
        " & 10.0 & 10.0 \\\\"
    )
    assert "| a_b%c&d#e$f{g}~h^i\\\\j\\|k&lt;l | 10.0 [0.0, 20.0] |" in text
    assert tex.count("{") - tex.count("\\{") == tex.count("}") - tex.count("\\}")


def test_escaped_latex_is_one_line() -> None:
    assert escape_latex("two\nlines – done") == "two lines -- done"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_cell_is_cut_off_on_the_terminal(width: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "acme/[red]m", [0.1, 0.2, 0.3])
    console = Console(file=io.StringIO(), width=width)
    console.print(format_terminal(measures_table(read_result(folder)), width))
    console.print(format_terminal(comparison_table(read_results([folder])), width))
    text = console.file.getvalue()
    assert "…" not in text
    assert "[red]m" in text
    for number in ("10.0", "0.0–20.0", "20.0–40.0", "1,234"):
        assert number in text


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"settings": {}}'])
def test_damaged_results_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        read_results([tmp_path])


@pytest.mark.parametrize(
    ("name", "measure"),
    [("greedy", ACCURACY), ("mean", "samples/pass@1"), ("pass@08", "samples/pass@8")],
)
def test_measures_have_the_names_of_reports(name: str, measure: str) -> None:
    assert parse_measure(name) == measure


@pytest.mark.parametrize("name", ["best", "pass@", "pass@0", "pass@-1", "pass@x", "8"])
def test_unknown_measures_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--measure {name} must be greedy, mean or pass@K"):
        parse_measure(name)
