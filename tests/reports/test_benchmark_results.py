"""Reads runs and folders of eepo eval into rows of a table, and into the runs of a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eepo.evaluation.estimates import pass_at_k, seed_interval
from eepo.reports.benchmark_results import ACCURACY, read_results
from eepo.reports.benchmark_tables import comparison_table, format_markdown
from eepo.reports.figures import pass_at_k_figure
from eepo.reports.measures import comparison_rows, measure_value, shown_measures
from eepo.reports.page import write_report
from eepo.reports.records import by_method, read_runs
from eepo.types import UserError

Write = Callable[..., Path]


@pytest.fixture
def comparison(write_run: Write, tmp_path: Path) -> Path:
    """Write two methods with two seeds, as eepo compare does."""
    outer = tmp_path / "compare"
    correct = {
        ("grpo", 0): [32, 0, 8, 0],
        ("grpo", 1): [32, 32, 8, 0],
        ("eepo", 0): [32, 32, 32, 0],
    }
    for (name, seed), counts in (correct | {("eepo", 1): [0, 0, 0, 0]}).items():
        (outer / name).mkdir(parents=True, exist_ok=True)
        write_run(name, seed, counts).rename(outer / name / f"seed-{seed}")
    return outer


def means(result: Any, measure: str = ACCURACY) -> dict[str, float]:
    return {name: b["measures"][measure]["mean"] for name, b in result.benchmarks.items()}


# --- rows of a table


def test_the_final_evaluation_of_a_run_is_a_row(write_run: Write) -> None:
    (result,) = read_results([write_run("grpo", correct=[32, 17, 8, 0])])
    assert (result.label, result.num_seeds) == ("grpo", 1)
    assert means(result) == {"in_range": 0.5, "out_of_range": 0.0}
    assert result.benchmarks["in_range"]["title"] == "in range"
    assert result.average[ACCURACY]["mean"] == 0.25
    assert result.average[ACCURACY]["low"] < 0.25 < result.average[ACCURACY]["high"] <= 0.5


def test_the_seeds_of_a_comparison_are_one_row_with_an_interval_over_seeds(
    comparison: Path,
) -> None:
    results = read_results([comparison])
    assert [(result.label, result.num_seeds) for result in results] == [("eepo", 2), ("grpo", 2)]
    greedy = results[1].benchmarks["in_range"]["measures"][ACCURACY]
    assert greedy["mean"] == pytest.approx((0.25 + 0.5) / 2)
    assert (greedy["low"], greedy["high"]) == seed_interval([0.25, 0.5])
    text = format_markdown(comparison_table(results))
    assert "| grpo (2 seeds) | 37.5 [" in text
    assert "95 % t-interval of the mean over seeds." in text


def test_runs_comparisons_and_evaluations_can_be_mixed(
    comparison: Path, write_run: Write, write_evaluation: Write
) -> None:
    base = write_evaluation("base", correct=[8, 2, 0, 0])
    write_evaluation("other")
    sources = [base, f"More={write_run('clip_higher')}", comparison, base.parent / "other"]
    results = read_results(sources)
    assert [result.label for result in results] == ["base", "More", "eepo", "grpo", "other"]
    assert [result.num_seeds for result in results] == [1, 1, 2, 2, 1]
    table = format_markdown(comparison_table(results))
    assert "of one seed, 95 % bootstrap interval over problems" in table
    assert [result.label for result in read_results([base.parent])] == ["base", "other"]


def test_the_evaluation_of_a_run_is_merged_with_the_run(
    write_run: Write, write_evaluation: Write
) -> None:
    recipe = '[reward]\nname = "math"\n[task]\nname = "dataset"\n'
    run = write_run("grpo", correct=[32, 17, 8, 0], settings="max_new_tokens = 4096\n" + recipe)
    more = write_evaluation("grpo", run=run, sets=["amc23", "in_range"])
    (result,) = read_results([run, more])
    assert list(result.benchmarks) == ["in_range", "out_of_range", "amc23"]
    assert result.benchmarks["in_range"]["num_samples"] == 32, "the run has more samples"
    assert result.benchmarks["amc23"]["num_samples"] == 8
    mean = sum(means(result).values()) / 3
    assert result.average[ACCURACY]["mean"] == pytest.approx(mean)


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_pass_at_k_is_computed_for_any_k(k: int, write_evaluation: Write, write_run: Write) -> None:
    sources = [
        write_evaluation("base", correct=[8, 2, 0]),
        write_run("grpo", correct=[32, 4, 0, 0]),
    ]
    base, grpo = read_results(sources, f"samples/pass@{k}", ["in_range"])
    expected = (1 + pass_at_k(8, 2, k)) / 3
    assert means(base, f"samples/pass@{k}") == {"in_range": pytest.approx(expected)}
    expected = (1 + pass_at_k(32, 4, k)) / 4
    assert grpo.average[f"samples/pass@{k}"]["mean"] == pytest.approx(expected)


def test_benchmarks_can_be_selected(write_evaluation: Write) -> None:
    folder = write_evaluation("base", sets=["in_distribution", "amc23", "aime24"])
    (result,) = read_results([folder], on=["aime24", "amc23"])
    assert list(result.benchmarks) == ["aime24", "amc23"]
    with pytest.raises(UserError, match="--on math500 must be one of in_distribution, amc23"):
        read_results([folder], on=["math500"])


def test_too_large_k_is_refused(write_evaluation: Write) -> None:
    message = "--measure pass@9: the evaluations have at most 8 samples per problem"
    with pytest.raises(UserError, match=message):
        read_results([write_evaluation("base")], "samples/pass@9")


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_wrong_folders_are_refused_with_what_is_allowed(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = f"{folder}: .*give run folders, the folder of a comparison or a sweep, or folders of"
    with pytest.raises(UserError, match=message):
        read_results([tmp_path / folder])


def test_unfinished_evaluations_and_runs_are_refused(
    write_evaluation: Write, write_run: Write
) -> None:
    folder = write_evaluation("base")
    (folder / "results.json").unlink()
    with pytest.raises(UserError, match="the evaluation is not finished; the same eepo eval"):
        read_results([folder])
    run = write_run("grpo", start=False)
    lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (run / "evaluations.jsonl").write_text("".join(line for line in lines if '"quick"' in line))
    with pytest.raises(UserError, match="no full evaluation yet"):
        read_results([run])
    started = write_run("eepo")
    lines = (started / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (started / "evaluations.jsonl").write_text("".join(row for row in lines if '"step": 0,' in row))
    with pytest.raises(UserError, match="evaluated only at its start"):
        read_results([started])


def test_two_models_with_one_name_need_labels(write_run: Write, tmp_path: Path) -> None:
    first = write_run("eepo").rename(tmp_path / "first")
    second = write_run("eepo", settings="clip_high = 0.28\n").rename(tmp_path / "second")
    with pytest.raises(UserError, match=r"are both eepo with seed 0; .* LABEL=FOLDER"):
        read_results([first, second])
    results = read_results([f"A={first}", f"B={second}"])
    assert [result.label for result in results] == ["A", "B"]


def test_a_label_needs_a_folder_with_one_method(comparison: Path) -> None:
    with pytest.raises(UserError, match=r"several methods \(eepo, grpo\)"):
        read_results([f"Mine={comparison}"])
    (result,) = read_results([f"Mine={comparison / 'eepo'}"])
    assert (result.label, result.num_seeds) == ("Mine", 2)


def test_seeds_that_were_evaluated_differently_are_refused(
    write_run: Write, write_evaluation: Write
) -> None:
    runs = [write_run("grpo", seed) for seed in (0, 1)]
    folders = [write_evaluation(f"grpo-{seed}", run=run) for seed, run in enumerate(runs)]
    path = folders[1] / "results.json"
    path.write_text(path.read_text().replace('"max_new_tokens": 4096', '"max_new_tokens": 12'))
    with pytest.raises(UserError, match=r"different max_new_tokens \(4096, 12\)"):
        read_results(folders)


# --- runs of a report


def test_an_evaluation_is_read_as_a_run_without_steps(write_evaluation: Write) -> None:
    (run,) = read_runs([write_evaluation("base", correct=[8, 2, 0])])
    assert (run.name, run.last_step, run.is_evaluation) == ("base", 0, True)
    row = run.full_evaluation("in_range")
    assert row is not None
    assert row["mean"] == pytest.approx(10 / 24)
    assert measure_value(row, "pass@3") == pytest.approx((1 + pass_at_k(8, 2, 3)) / 3)
    assert measure_value(row, "pass@9") is None
    assert shown_measures([run]) == ["greedy", "mean", "pass@8", "distinct"]


def test_greedy_evaluations_do_not_hide_pass_at_k(
    write_evaluation: Write, write_run: Write
) -> None:
    runs = read_runs([write_run("grpo"), write_evaluation("base", num_samples=0)])
    assert shown_measures(runs) == ["greedy", "mean", "pass@8", "pass@32", "distinct"]
    base = next(row for row in comparison_rows(runs) if row.method == "base")
    assert base.measures["greedy"] is not None
    assert base.measures["pass@8"] is None
    assert base.num_completions is None
    figure = pass_at_k_figure(runs)
    assert figure is not None


def test_distinct_answers_of_different_numbers_of_samples_are_not_compared(
    write_run: Write, write_evaluation: Write
) -> None:
    runs = read_runs([write_run("grpo"), write_evaluation("base")])  # 32 and 8 samples
    assert shown_measures(runs) == ["greedy", "mean", "pass@8"]


def test_an_evaluation_is_added_to_its_run(write_run: Write, write_evaluation: Write) -> None:
    run = write_run("grpo", 1)
    folders = [write_evaluation("a", run=run, sets=["amc23"]), run, write_evaluation("b")]
    runs = read_runs(folders)
    assert [(run.name, run.seed, run.is_evaluation) for run in runs] == [
        ("grpo", 1, False),
        ("b", 0, True),
    ]
    sets = ["in_range", "out_of_range", "amc23"]
    assert [name for name in sets if runs[0].full_evaluation(name)] == sets


def test_another_run_with_the_same_name_and_seed_is_not_merged(
    write_run: Write, write_evaluation: Write, tmp_path: Path
) -> None:
    first = write_run("grpo").rename(tmp_path / "first")
    evaluation = write_evaluation("a", run=first)
    second = write_run("grpo", settings="clip_high = 0.28\n")
    with pytest.raises(UserError, match="are both grpo with seed 0"):
        by_method(read_runs([second, evaluation]))


def test_the_pass_at_k_figure_draws_powers_of_two_from_runs_and_evaluations(
    write_run: Write, write_evaluation: Write
) -> None:
    runs = read_runs([write_run("grpo"), write_evaluation("base", correct=[8, 2, 0])])
    figure = pass_at_k_figure(runs)
    assert figure is not None
    lines = [list(map(int, line.get_xdata())) for line in figure.axes[0].lines]
    assert [1, 2, 4, 8, 16, 32] in lines
    assert [1, 2, 4, 8] in lines


def test_a_report_of_evaluations_alone_has_the_pass_at_k_figure_and_no_steps(
    write_evaluation: Write, tmp_path: Path
) -> None:
    folders = [write_evaluation("base"), write_evaluation("tuned", correct=[8, 8, 1])]
    page = write_report(folders, tmp_path / "report.html").read_text()
    assert "base: seed 0, evaluated only" in page
    figures = sorted(path.stem for path in (tmp_path / "report_figures").glob("*.png"))
    assert figures == ["pass_at_k"]
