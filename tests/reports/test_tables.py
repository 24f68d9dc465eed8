from __future__ import annotations

import math
import re

import pytest
from rich.console import Console

from eepo.reports.measures import comparison_rows, shown_measures
from eepo.reports.records import read_run
from eepo.reports.summary import summary_sentences
from eepo.reports.tables import html_table, markdown_table, table_caption, terminal_table


def rows_of(runs, name="in_range"):
    return {row.method: row for row in comparison_rows(runs) if row.eval_set == name}


def test_measures_of_one_seed(write_run):
    """Correct of 32 samples: 32, 0, 8, 0. mean = (32 + 8) / 128, pass@8 = (1 + 0 + p + 0) / 4."""
    row = rows_of([read_run(write_run(correct=[32, 0, 8, 0]))])["grpo"]
    assert row.measures["greedy"].mean == 0.25
    assert row.measures["mean"].mean == 0.3125
    all_wrong = math.comb(24, 8) / math.comb(32, 8)
    assert row.measures["pass@8"].mean == pytest.approx((2 - all_wrong) / 4)
    assert row.measures["pass@32"].mean == 0.5
    assert row.measures["distinct"].mean == 1.5
    assert row.seconds.mean == 60.0
    assert row.seconds.low is None
    assert row.num_completions.mean == 960
    interval = row.measures["mean"]
    assert interval.over == "problems"
    assert 0 <= interval.low < 0.3125 < interval.high <= 1


def test_measures_over_seeds(write_run):
    """Means 0.25 and 0.5: half-width 12.706 · 0.1768 / √2, with one degree of freedom."""
    runs = [
        read_run(write_run(seed=0, correct=[32, 0, 0, 0])),
        read_run(write_run(seed=1, correct=[32, 32, 0, 0])),
    ]
    estimate = rows_of(runs)["grpo"].measures["mean"]
    half = 12.706 * math.sqrt(0.03125) / math.sqrt(2)
    assert estimate.over == "seeds"
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx(
        (0.375, 0.375 - half, 0.375 + half)
    )


def test_the_starting_policy_counts_once(write_run):
    runs = [read_run(write_run(seed=seed)) for seed in (0, 1)]
    start = rows_of(runs)["start"]
    assert start.num_seeds == 1
    assert start.measures["mean"].mean == 8 / 128
    assert start.measures["mean"].over == "problems"
    assert start.seconds is None


def test_no_start_row_without_an_evaluation_at_step_0(write_run):
    assert "start" not in rows_of([read_run(write_run(start=False))])


def test_pass_at_k_is_shown_at_the_largest_k_if_32_is_missing(write_run):
    run = read_run(write_run())
    for row in run.evaluations:
        row |= {"num_samples": 4, "pass@k": {"1": 0.1, "2": 0.2, "4": 0.3}}
    assert shown_measures([run]) == ["greedy", "mean", "pass@4", "distinct"]


def test_a_run_without_evaluations_shows_its_cost(write_run):
    folder = write_run()
    (folder / "evaluations.jsonl").unlink()
    (row,) = comparison_rows([read_run(folder)])
    assert row.measures == {"greedy": None, "mean": None, "distinct": None}
    assert row.seconds.mean == 60.0
    assert "| – | grpo | 1 | – |" in markdown_table([row])


def test_captions_explain_the_brackets(write_run):
    one = [read_run(write_run("grpo", 0)), read_run(write_run("eepo", 0))]
    caption = table_caption(comparison_rows(one))
    assert "problems of ONE seed, which is not evidence about methods" in caption
    assert "over seeds" not in caption
    two = [*one, read_run(write_run("grpo", 1)), read_run(write_run("eepo", 1))]
    caption = table_caption(comparison_rows(two))
    assert "95 % t-interval of the mean over seeds" in caption
    assert "ONE seed" not in caption
    mixed = table_caption(comparison_rows(two[:3]))
    assert "over seeds" in mixed
    assert "ONE seed" in mixed


def test_the_three_tables_show_the_same_cells(write_run):
    rows = comparison_rows([read_run(write_run("a|b[red]<i>"))])
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(rows))
    text = console.export_text()
    assert "a|b[red]<i>" in text
    assert "50.0 %" in text
    assert "a\\|b[red]<i>" in markdown_table(rows)
    assert "50.0 %" in markdown_table(rows)
    assert "a|b[red]&lt;i&gt;" in html_table(rows)
    assert "50.0 %" in html_table(rows)


def summary(runs):
    return " ".join(summary_sentences(runs))


def test_differences_are_paired_by_seed(write_run):
    """Seeds differ more than methods: +25, +25, +12.5 points exclude 0 only if they are paired."""
    grpo = {0: [0, 0, 0, 0], 1: [32, 0, 0, 0], 2: [32, 32, 0, 0]}
    eepo = {2: [32, 32, 16, 0], 0: [32, 0, 0, 0], 1: [32, 32, 0, 0]}
    runs = [read_run(write_run("grpo", seed, correct)) for seed, correct in grpo.items()]
    runs += [read_run(write_run("eepo", seed, correct)) for seed, correct in eepo.items()]
    # differences 0.25, 0.25, 0.125: standard deviation 0.0722
    half = 4.303 * math.sqrt(0.0625**2 * 4 / 3 / 1) / math.sqrt(3)
    low, high = 100 * (0.625 / 3 - half), 100 * (0.625 / 3 + half)
    text = summary(runs)
    assert "eepo against grpo on in range, paired over 3 seeds" in text
    assert f"mean +20.8 points [{low:+.1f}, {high:+.1f}]" in text
    assert re.search(r"Significant \(interval excludes 0\): [^.]*\bmean\b", text)
    assert "about 1 in 20 excludes 0" in text


def test_a_wide_interval_is_not_called_significant(write_run):
    runs = [read_run(write_run("grpo", seed, [16, 0, 0, 0])) for seed in (0, 1)]
    runs += [
        read_run(write_run("eepo", 0, [32, 32, 0, 0])),
        read_run(write_run("eepo", 1, [16, 1, 0, 0])),
    ]
    verdict = "No significant difference: no interval excludes 0."
    assert summary(runs).count(verdict) == 2  # in range, out of range
    assert "Significant" not in summary(runs)


def test_zero_spread_is_not_called_significant(write_run):
    runs = [read_run(write_run("grpo", seed, [16, 0, 0, 0])) for seed in (0, 1)]
    runs += [read_run(write_run("eepo", seed, [32, 0, 0, 0])) for seed in (0, 1)]
    assert "equal in every seed, so the spread is unknown" in summary(runs)
    assert "Significant" not in summary(runs)


def test_one_seed_shows_no_difference(write_run):
    runs = [
        read_run(write_run("grpo", 0, [0, 0, 0, 0])),
        read_run(write_run("eepo", 0, [32, 32, 32, 32])),
    ]
    assert "mean 100.0 % against 0.0 %" in summary(runs)
    assert "One seed cannot show a difference" in summary(runs)
    assert "exclude" not in summary(runs)


def test_methods_without_common_seeds_are_not_compared(write_run):
    runs = [read_run(write_run("grpo", seed)) for seed in (0, 1)] + [read_run(write_run("eepo", 2))]
    assert "fewer than two seeds in common" in summary(runs)


def test_warnings_about_comparability(write_run):
    stopped = write_run("grpo", 0)
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:12]))
    other = write_run("grpo", 1, settings="clip_high = 0.28\n[task]\nmax_target = 99")
    text = summary([read_run(stopped), read_run(other)])
    assert "grpo, seed 0: recorded up to step 12 of 30." in text
    assert "Not directly comparable: the runs also differ in task.max_target." in text
    assert "not seeds of one recipe: they differ in algorithm.clip_high" in text
    assert "Only one method (grpo), so there is nothing to compare." in text


def test_unequal_rollouts_are_reported(write_run):
    """Both runs have 30 steps of 4 prompts, with 8 or 16 completions each."""
    runs = [read_run(write_run("grpo")), read_run(write_run("more_rollouts"))]
    assert "equal rollouts" not in summary(runs)
    recipe = runs[1].folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("group_size = 8", "group_size = 16"))
    assert "Unequal rollouts: " in summary([runs[0], read_run(runs[1].folder)])


# ---- equal training time


def timed_run(write_run, name, seed, correct, num_steps, max_seconds):
    """Cut a run to `num_steps` steps of 2 s each."""
    folder = write_run(name, seed, correct)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:num_steps]))
    with (folder / "recipe.toml").open("a") as file:  # its last table is [training]
        file.write(f"max_seconds = {max_seconds}\n")
    return read_run(folder)


def test_equal_time_is_reported_with_steps_and_seconds(write_run):
    """Seed 1 of the baseline took 40 s, so the limit for seed 1 of the other method is 40 s."""
    runs = [
        timed_run(write_run, "grpo", seed, [16, seed, 0, 0], 30 - 10 * seed, 0.0) for seed in (0, 1)
    ]
    for run in runs:
        text = (run.folder / "recipe.toml").read_text()
        (run.folder / "recipe.toml").write_text(
            text.replace("num_steps = 30", f"num_steps = {run.last_step}")
        )
    runs = [read_run(run.folder) for run in runs]
    runs += [
        timed_run(write_run, "fast", seed, [30, 2 * seed, 0, 0], 30 - 9 * seed, 60.0 - 20 * seed)
        for seed in (0, 1)
    ]
    sentences = summary_sentences(runs)
    assert sentences[0] == (
        "Equal training time for each seed, without evaluations: "
        "grpo 20 to 30 steps in 40.0 to 60.0 s; fast 21 to 30 steps in 42.0 to 60.0 s."
    )
    assert (
        "fast against grpo on in range at equal training time, paired over 2 seeds" in sentences[1]
    )
    assert not any("Unequal" in sentence or "stopped" in sentence for sentence in sentences)
    assert not any(
        "not seeds of one recipe" in sentence and "max_seconds" in sentence
        for sentence in sentences
    )


def test_a_run_that_stopped_before_its_time_limit_is_named(write_run):
    runs = [read_run(write_run("grpo", 0)), timed_run(write_run, "slow", 0, [8, 0, 0, 0], 12, 60.0)]
    text = summary(runs)
    assert "slow, seed 0: recorded up to step 12, after 24.0 of 60.0 s." in text


def test_a_time_limit_other_than_the_baselines_is_not_equal_time(write_run):
    runs = [read_run(write_run("grpo", 0)), timed_run(write_run, "slow", 0, [8, 0, 0, 0], 20, 40.0)]
    text = summary(runs)
    assert "qual training time" not in text
    assert "Unequal rollouts: " in text


def test_a_significant_difference_has_a_direction(write_run):
    runs = [read_run(write_run("grpo", seed, [16, 16, 16, 16])) for seed in (0, 1, 2)]
    runs += [read_run(write_run("eepo", seed, [1, 1 + seed, 1, 1])) for seed in (0, 1, 2)]
    assert re.search(r"excludes 0\): [^.]*mean \(eepo lower\)", summary(runs))
    assert re.search(r" Not significant: [^.]*greedy[^.]*\.", summary(runs))
