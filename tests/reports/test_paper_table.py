"""Tests of the paper's numbers and of tables in its layout."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eepo.reports.benchmark_tables import format_latex, format_markdown
from eepo.reports.paper_figures import FIGURES, HyperPanel, PaperData, shown_set
from eepo.reports.paper_numbers import FOUR, TABLES, relative_gain
from eepo.reports.paper_page import PageContents, page_text
from eepo.reports.paper_table import (
    average,
    paper_table,
    papers_own_table,
    sampled_table,
)
from eepo.reports.records import Run, by_method, read_run

IN_RANGE, OUT_OF_RANGE = "in_range", "out_of_range"


@pytest.fixture
def make(write_run: Any) -> Any:
    """Return make("grpo", seed, correct): a run, evaluated on sets of the given names."""

    def run(
        name: str,
        seed: int = 0,
        correct: Sequence[int] = (32, 0, 8, 0),
        sets: Sequence[str] = (IN_RANGE, OUT_OF_RANGE),
        start: bool = True,
    ) -> Run:
        records = read_run(write_run(name, seed=seed, correct=correct, start=start))
        first = [row for row in records.evaluations if row["set"] == IN_RANGE]
        rows = [row | {"set": eval_set} for eval_set in sets for row in first]
        return dataclasses.replace(records, evaluations=rows)

    return run


def untrained(run: Run) -> Run:
    """Return a run that was only evaluated at the start."""
    rows = [row for row in run.evaluations if row["kind"] == "full" and row["step"]]
    at_start = [row | {"step": 0} for row in rows]
    return dataclasses.replace(run, name="base", metrics=[], evaluations=at_start)


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "table4"])
def test_averages_of_the_paper_are_those_of_its_benchmarks(name: str) -> None:
    """Rounding of five numbers to one digit can change an average by 0.05."""
    table = TABLES[name]
    for numbers in table.numbers.values():
        assert len(numbers) == len(table.sets) + 1
        assert statistics.fmean(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.11)


def test_relative_gains_are_those_of_the_papers_abstract() -> None:
    gains = [TABLES[name].gain("eepo") for name in ("table1", "table2", "table3")]
    assert [f"{gain:.1f}" for gain in gains] == ["24.3", "33.0", "10.4"]
    variants = TABLES["on_variants"]
    assert variants.gain("eepo_more_entropy") == pytest.approx(100 * 4.0 / 23.9)
    assert relative_gain(1.0, None) is None
    assert relative_gain(1.0, 0.0) is None


def test_a_table_has_the_papers_rows_and_its_numbers_next_to_ours(make: Any) -> None:
    grpo = make("grpo", correct=(32, 0, 0, 0), sets=FOUR)
    eepo = make("eepo", correct=(32, 32, 0, 0), sets=FOUR)
    base = untrained(make("start", correct=(0, 0, 0, 0), sets=FOUR))
    table = paper_table(TABLES["table1"], by_method([base, grpo, eepo]), "My model")
    labels = [label for label, _ in table.rows]
    assert labels == [
        "My model", "GRPO", "- Higher Temp.", "- Increased Ent.", "- DAPO Clip High.",
        "- More rollouts.", "EEPO",
    ]  # fmt: skip
    assert table.columns == [
        "Minerva Math", "OlympiadBench", "AMC 23", "AIME 24", "Average", "Relative gain, %",
    ]  # fmt: skip
    numbers = {label: [cell.number for cell in cells] for label, cells in table.rows}
    assert numbers["My model"] == [
        "0.0 (11.8)", "0.0 (7.9)", "0.0 (20.0)", "0.0 (0.0)", "0.0 (9.9)", "",
    ]  # fmt: skip
    assert numbers["GRPO"][2:5] == ["25.0 (30.3)", "25.0 (3.3)", "25.0 (21.0)"]
    assert numbers["EEPO"][4:] == ["50.0 (26.1)", "+100.0 (+24.3)"]
    assert numbers["- Higher Temp."][4:] == ["– (21.5)", "– (+2.4)"], "not run yet"
    assert "of ONE seed" in table.caption
    assert "| EEPO | 50.0 (23.5) [0.0, 100.0] |" in format_markdown(table)
    latex = format_latex(table)
    assert "EEPO & 50.0 (23.5) & 50.0 (29.3)" in latex
    assert "bootstrap" not in latex, "LaTeX tables have no intervals"


def test_several_seeds_have_intervals_over_seeds(make: Any) -> None:
    runs = [make("grpo", 0, (32, 0, 0, 0)), make("grpo", 1, (32, 32, 0, 0))]
    mean = average(runs, [IN_RANGE, OUT_OF_RANGE], "greedy")
    assert mean is not None
    assert mean.mean == pytest.approx(0.375)
    assert mean.over == "seeds"
    table = paper_table(TABLES["table1"], by_method(runs), "m")
    assert table.rows[1][0] == "GRPO (2 seeds)"
    assert "t-interval over seeds" in table.caption


def test_an_average_over_other_sets_is_not_compared_with_the_papers(make: Any) -> None:
    methods = by_method([make("grpo"), make("eepo", correct=(32, 32, 0, 0))])
    table = paper_table(TABLES["table1"], methods, "m")
    assert table.columns == ["in range", "out of range", "Average", "Relative gain, %"]
    assert [cell.number for cell in table.rows[-1][1]] == ["50.0", "50.0", "50.0", "+100.0"]
    assert "they are over Minerva Math, OlympiadBench, AMC 23, AIME 24" in table.caption
    own = papers_own_table(TABLES["table1"])
    assert [cell.number for cell in own.rows[-1][1]] == [
        "23.5", "29.3", "45.0", "6.7", "26.1", "+24.3",
    ]  # fmt: skip


def test_held_out_training_problems_are_no_column(make: Any) -> None:
    run = make("grpo", sets=("in_distribution", *FOUR))
    table = paper_table(TABLES["table1"], by_method([run]), "m")
    assert table.columns[0] == "Minerva Math"
    assert table.rows[1][1][-2].number == "25.0 (21.0)"


def test_on_variants_compares_each_method_with_the_one_below_it(make: Any) -> None:
    methods = by_method(
        [
            make("more_entropy", correct=(32, 0, 0, 0), sets=FOUR),
            make("eepo_more_entropy", correct=(32, 32, 0, 0), sets=FOUR),
        ]
    )
    table = paper_table(TABLES["on_variants"], methods, "m")
    assert table.columns == ["Average", "Relative gain, %"]
    rows = {label: [cell.number for cell in cells] for label, cells in table.rows}
    assert rows["EEPO + Increased Entropy"] == ["50.0 (27.9)", "+100.0 (+16.7)"]
    assert rows["GRPO"] == ["– (21.0)", ""]


def test_sampled_measures_are_averages_over_the_sets(make: Any) -> None:
    table = sampled_table(by_method([make("grpo", correct=(32, 16, 0, 0))]), {})
    assert table.columns == [
        "Greedy", "Mean of samples", "pass@8", "pass@32", "Tokens", "Cut off",
    ]  # fmt: skip
    (row,) = table.rows
    assert [cell.number for cell in row[1]] == ["25.0", "37.5", "50.0", "50.0", "20", "0.0"]


def test_every_figure_is_drawn_from_runs(make: Any) -> None:
    sets = ("in_distribution", *FOUR)
    runs = [make(name, seed, sets=sets) for name in ("grpo", "eepo") for seed in (0, 1)]
    panel = HyperPanel("more_entropy", "algorithm.entropy_coef", {"1e-3": [0.5]}, "1e-05")
    data = PaperData(runs, [panel], {"grpo": [0.4, 0.5], "eepo": [0.6]})
    assert shown_set(runs) == "amc23"
    figures = {figure.number: figure.draw(data) for figure in FIGURES}
    assert [number for number, figure in figures.items() if figure is not None] == [
        2, 4, 5, 6, 7, 8,
    ]  # fmt: skip
    titles = [axes.get_title() for axes in figures[2].axes if axes.get_visible()]
    assert titles[:2] == ["accuracy, in distribution", "accuracy, AMC 23"]
    (axes,) = figures[5].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1e-5", "1e-3"]
    assert [axes.get_title() for axes in figures[7].axes] == [
        "greedy accuracy, AMC 23",
        "pass@k, AMC 23",
    ]


def test_figures_without_data_are_left_out(make: Any) -> None:
    nothing = [figure.draw(PaperData([])) for figure in FIGURES]
    assert nothing == [None] * len(FIGURES)
    only_grpo = PaperData([make("grpo")])
    drawn = [figure.number for figure in FIGURES if figure.draw(only_grpo) is not None]
    assert drawn == [2, 6, 7, 8], "no unlearning, no hyperparameters"


def test_the_page_shows_settings_hardware_times_and_choices(make: Any) -> None:
    runs = [make("grpo"), make("eepo")]
    text = page_text(
        PageContents("Title", "eepo reproduce x", ["- 2 runs"], [], FIGURES[:1], runs, {"a": "b"})
    )
    for part in (
        "| `training.num_steps` | 30 |",
        "| `algorithm.num_stages` | 1 | 2 |",
        "torch 2.10",
        "| grpo | 1 | 30 | 2.00 | 60.0 s |",
        "![Figure 2](figures/figure2.png)",
        "| grader |",
        "| a | b |",
    ):
        assert part in text, part


def test_a_run_without_any_record_of_its_environment_is_shown(make: Any) -> None:
    bare = dataclasses.replace(make("grpo"), environment={}, folder=Path(), recipe={})
    assert "| – | – |" in page_text(PageContents("T", "c", [], [], [], [bare], {}))
