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
    return {row.method: row for row in comparison_rows(runs) if row.set == name}


def test_numbers_of_one_seed(write_run):
    """32 samples; right: all, none, 8, none. By hand: mean (32 + 8) / 128; pass@8 (1 + 0 + p + 0) / 4."""
    row = rows_of([read_run(write_run(correct=[32, 0, 8, 0]))])["grpo"]
    assert row.measures["greedy"].mean == 0.25
    assert row.measures["mean"].mean == 0.3125
    missed = math.comb(24, 8) / math.comb(32, 8)
    assert row.measures["pass@8"].mean == pytest.approx((2 - missed) / 4)
    assert row.measures["pass@32"].mean == 0.5
    assert row.measures["distinct"].mean == 1.5
    assert row.seconds.mean == 60.0
    assert row.seconds.low is None
    assert row.num_completions.mean == 960
    interval = row.measures["mean"]
    assert interval.over == "problems"
    assert 0 <= interval.low < 0.3125 < interval.high <= 1


def test_numbers_over_seeds(write_run):
    """Means 0.25 and 0.5: half-width 12.706 · 0.1768 / √2, with one degree of freedom."""
    runs = [
        read_run(write_run(seed=0, correct=[32, 0, 0, 0])),
        read_run(write_run(seed=1, correct=[32, 32, 0, 0])),
    ]
    found = rows_of(runs)["grpo"].measures["mean"]
    half = 12.706 * math.sqrt(0.03125) / math.sqrt(2)
    assert found.over == "seeds"
    assert (found.mean, found.low, found.high) == pytest.approx((0.375, 0.375 - half, 0.375 + half))


def test_the_starting_policy_counts_once(write_run):
    runs = [read_run(write_run(seed=seed)) for seed in (0, 1)]
    start = rows_of(runs)["start"]
    assert start.num_seeds == 1
    assert start.measures["mean"].mean == 8 / 128
    assert start.measures["mean"].over == "problems"
    assert start.seconds is None


def test_without_a_step_0_evaluation_there_is_no_start_row(write_run):
    assert "start" not in rows_of([read_run(write_run(start=False))])


def test_pass_at_the_largest_k_where_32_is_missing(write_run):
    run = read_run(write_run())
    for row in run.evaluations:
        row["pass@k"] = {"1": 0.1, "2": 0.2, "4": 0.3}
    assert shown_measures([run]) == ["greedy", "mean", "pass@4", "distinct"]


def test_a_run_without_evaluations_still_has_its_cost(write_run):
    folder = write_run()
    (folder / "evaluations.jsonl").unlink()
    (row,) = comparison_rows([read_run(folder)])
    assert row.measures == {"greedy": None, "mean": None, "distinct": None}
    assert row.seconds.mean == 60.0
    assert "| – | grpo | 1 | – |" in markdown_table([row])


def test_captions_say_what_the_brackets_are_over(write_run):
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
    """Seeds differ by far more than methods: paired, +25, +25 and +12.5 points exclude 0; unpaired they would not."""
    grpo = {0: [0, 0, 0, 0], 1: [32, 0, 0, 0], 2: [32, 32, 0, 0]}
    eepo = {2: [32, 32, 16, 0], 0: [32, 0, 0, 0], 1: [32, 32, 0, 0]}
    runs = [read_run(write_run("grpo", seed, correct)) for seed, correct in grpo.items()]
    runs += [read_run(write_run("eepo", seed, correct)) for seed, correct in eepo.items()]
    half = (
        4.303 * math.sqrt(0.0625**2 * 4 / 3 / 1) / math.sqrt(3)
    )  # differences 0.25, 0.25, 0.125: sd 0.0722
    low, high = 100 * (0.625 / 3 - half), 100 * (0.625 / 3 + half)
    text = summary(runs)
    assert "eepo against grpo on in range, paired over 3 seeds" in text
    assert f"mean +20.8 points [{low:+.1f}, {high:+.1f}]" in text
    assert re.search(r"(Every interval excludes 0|Intervals that exclude 0: [^;]*\bmean\b)", text)
    assert "about one in twenty still excludes 0" in text


def test_a_wide_interval_is_not_called_a_difference(write_run):
    runs = [read_run(write_run("grpo", seed, [16, 0, 0, 0])) for seed in (0, 1)]
    runs += [
        read_run(write_run("eepo", 0, [32, 32, 0, 0])),
        read_run(write_run("eepo", 1, [16, 1, 0, 0])),
    ]
    assert (
        summary(runs).count("No interval excludes 0, so no difference is shown.") == 2
    )  # in range, out of range
    assert "Intervals that exclude 0" not in summary(runs)


def test_no_spread_is_not_certainty(write_run):
    runs = [read_run(write_run("grpo", seed, [16, 0, 0, 0])) for seed in (0, 1)]
    runs += [read_run(write_run("eepo", seed, [32, 0, 0, 0])) for seed in (0, 1)]
    assert "the same in every seed, so its spread is unknown" in summary(runs)
    assert "Every interval" not in summary(runs)
    assert "Intervals that exclude 0" not in summary(runs)


def test_one_seed_shows_no_difference(write_run):
    runs = [
        read_run(write_run("grpo", 0, [0, 0, 0, 0])),
        read_run(write_run("eepo", 0, [32, 32, 32, 32])),
    ]
    assert "mean 100.0 % against 0.0 %" in summary(runs)
    assert "One seed cannot show a difference" in summary(runs)
    assert "exclude" not in summary(runs)


def test_seeds_without_partners_are_not_compared(write_run):
    runs = [read_run(write_run("grpo", seed)) for seed in (0, 1)] + [read_run(write_run("eepo", 2))]
    assert "fewer than two seeds in common" in summary(runs)


def test_cautions(write_run):
    stopped = write_run("grpo", 0)
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:12]))
    other = write_run("grpo", 1, settings="clip_high = 0.28\n[task]\nmax_target = 99")
    text = summary([read_run(stopped), read_run(other)])
    assert "grpo with seed 0 stopped at step 12 of 30." in text
    assert "Not like for like: the runs also differ in task.max_target." in text
    assert "not seeds of one recipe: they differ in algorithm.clip_high" in text
    assert "Only grpo is here" in text


def test_unequal_rollouts_are_said(write_run):
    """prompts_per_step is 4 and 20 steps were made: 8 or 16 completions each."""
    runs = [read_run(write_run("grpo")), read_run(write_run("more_rollouts"))]
    assert "equal rollouts" not in summary(runs)
    recipe = runs[1].folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("group_size = 8", "group_size = 16"))
    assert "Not at equal rollouts" in summary([runs[0], read_run(runs[1].folder)])


# --- at equal time ----------------------------------------------------------------------------------------------------


def timed_run(write_run, name, seed, correct, num_steps, max_seconds):
    """A step takes 2 s (conftest); cut to `num_steps` of them."""
    folder = write_run(name, seed, correct)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:num_steps]))
    with (folder / "recipe.toml").open("a") as file:  # its last table is [training]
        file.write(f"max_seconds = {max_seconds}\n")
    return read_run(folder)


def test_equal_time_is_said_with_steps_and_seconds_and_is_not_called_unequal(write_run):
    """Seed 1 of the baseline took 40 s, so that is what seed 1 of the other one has."""
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
        "At equal training time, seed by seed, evaluations not counted: "
        "grpo 20 to 30 steps in 40.0 to 60.0 s; fast 21 to 30 steps in 42.0 to 60.0 s."
    )
    assert (
        "fast against grpo on in range at equal training time, paired over 2 seeds" in sentences[1]
    )
    assert not any("Not at equal" in sentence or "stopped" in sentence for sentence in sentences)
    assert not any(
        "not seeds of one recipe" in sentence and "max_seconds" in sentence
        for sentence in sentences
    )


def test_a_run_cut_before_its_time_is_named(write_run):
    runs = [read_run(write_run("grpo", 0)), timed_run(write_run, "slow", 0, [8, 0, 0, 0], 12, 60.0)]
    text = summary(runs)
    assert "slow with seed 0 stopped at step 12, after 24.0 s of 60.0." in text


def test_other_seconds_than_the_baselines_are_not_equal_time(write_run):
    runs = [read_run(write_run("grpo", 0)), timed_run(write_run, "slow", 0, [8, 0, 0, 0], 20, 40.0)]
    text = summary(runs)
    assert "At equal training time" not in text
    assert "Not at equal rollouts" in text


def test_a_shown_difference_says_which_way(write_run):
    runs = [read_run(write_run("grpo", seed, [16, 16, 16, 16])) for seed in (0, 1, 2)]
    runs += [read_run(write_run("eepo", seed, [1, 1 + seed, 1, 1])) for seed in (0, 1, 2)]
    assert re.search(r"exclude 0: [^;]*mean \(eepo lower\)", summary(runs))
    assert re.search(r"; for [^.]*greedy[^.]* no difference is shown\.", summary(runs))
