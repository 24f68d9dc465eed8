"""Tests the tables and the figure of sweeps, with runs of known numbers."""

import json
import shutil

import pytest

from eepo.reports.sweep_figure import main_knob, points_by_line, sweep_figure, write_sweep_figure
from eepo.reports.sweep_tables import (
    best_point,
    check_measure,
    end_of_training,
    make_criterion,
    read_method,
    read_sweep,
    sweep_sentences,
    write_sweep_tables,
)
from eepo.types import UserError


@pytest.fixture
def write_sweep(tmp_path, write_run):
    """Return write_sweep(name, knob, points, recipe).

    `points` maps value → seed → correct samples of 32 for each problem.
    """

    def write(name, knob, points, recipe="grpo"):
        folder, (section, key) = tmp_path / name, knob.split(".")
        (folder / "recipes").mkdir(parents=True)
        (folder / "recipe.toml").write_text(f'name = "{recipe}"\n[algorithm]\nclip_high = 0.2\n')
        for value, seeds in points.items():
            point = f"{knob}={value}".replace("/", "_")
            change = f"[{section}]\n{key} = {json.dumps(value)}\n"
            text = f'extends = "../recipe.toml"\nname = "x"\n{change}'
            (folder / "recipes" / f"{point}.toml").write_text(text)
            for seed, correct in seeds.items():
                run = write_run(f"{recipe} {key}={value}".replace("/", "_"), seed, correct)
                shutil.move(run, folder / point / f"seed-{seed}")
        return folder

    return write


GOOD, FAIR, POOR = [32, 32, 0, 0], [32, 4, 0, 0], [8, 0, 0, 0]
TEMPERATURES = {
    1.5: {0: POOR, 1: POOR, 2: [9, 0, 0, 0]},
    0.8: {0: FAIR, 1: FAIR, 2: [32, 30, 0, 0]},
    1.2: {0: GOOD, 1: GOOD, 2: [32, 31, 0, 0]},
}


@pytest.fixture
def temperatures(write_sweep):
    return read_sweep(write_sweep("t", "algorithm.temperature", TEMPERATURES))


def test_points_are_sorted_by_value_and_named_by_their_knobs(temperatures):
    assert [point.label for point in temperatures.points] == [
        "temperature=0.8",
        "temperature=1.2",
        "temperature=1.5",
    ]
    assert temperatures.name == "grpo"
    assert [run.seed for run in temperatures.points[0].runs] == [0, 1, 2]
    assert {run.name for run in temperatures.points[0].runs} == {"temperature=0.8"}


def test_the_best_point_and_points_without_a_significant_difference(temperatures):
    """1.5 is much lower in every seed; 0.8 is almost equal in one of three."""
    criterion = make_criterion(temperatures.runs, "mean", "in_range")
    best, similar, selected = sweep_sentences(temperatures, criterion)
    assert best.startswith("Best of 3 points by mean, in range: temperature=1.2 with 49.7 % [")
    assert best.endswith(", 3 seeds.")
    assert similar == "No significant difference from: temperature=0.8."
    assert "biased upwards because it was selected" in selected


def test_with_one_seed_the_spread_is_unknown(write_sweep):
    result = read_sweep(write_sweep("t", "algorithm.temperature", {1: {0: GOOD}, 2: {0: POOR}}))
    text = " ".join(sweep_sentences(result, make_criterion(result.runs, "mean", "")))
    mean = 37.5  # of 50 % and 25 %
    assert f"temperature=1 with {mean} %, one seed, so the spread is unknown." in text
    assert "No significant difference from: temperature=2." in text


def test_points_with_missing_seeds_or_no_runs_are_named(write_sweep):
    points = {"token": {0: GOOD, 1: GOOD}, "step": {0: POOR}, "never": {}}
    folder = write_sweep("g", "algorithm.gate", points)
    failed = folder / "algorithm.gate=never" / "seed-0"
    failed.mkdir(parents=True)
    (failed / "log.txt").write_text("eepo: no\n")
    result = read_sweep(folder)
    text = " ".join(sweep_sentences(result, make_criterion(result.runs, "greedy", "")))
    assert "Fewer than 2 finished seeds: gate=step." in text
    assert "No finished run: gate=never." in text


def test_a_run_without_a_full_evaluation_is_omitted(write_sweep):
    folder = write_sweep("t", "algorithm.temperature", {1: {0: GOOD, 1: GOOD}})
    file = folder / "algorithm.temperature=1" / "seed-1" / "evaluations.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [row for row in rows if row["kind"] == "quick" or row["step"] == 0]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert [run.seed for run in read_sweep(folder).runs] == [0]


def test_sweep_jsonl_has_means_intervals_and_the_end_of_training(temperatures):
    criterion = make_criterion(temperatures.runs, "pass@32", "")
    _, file = write_sweep_tables(temperatures, criterion)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["knobs"] for row in rows] == [{"algorithm.temperature": t} for t in (0.8, 1.2, 1.5)]
    mean = rows[1]["measures"]["in_range"]["mean"]
    assert mean["mean"] == pytest.approx((0.5 + 0.5 + 63 / 128) / 3)
    assert mean["low"] < mean["mean"] < mean["high"]
    assert mean["over"] == "seeds"
    assert rows[2]["score"]["mean"] == pytest.approx(0.25)
    steps = [0.3 + 0.01 * step + 0.05 * ((step * 7) % 5) for step in (28, 29, 30)]
    assert rows[0]["end_of_training"]["stage1/reward"]["mean"] == pytest.approx(sum(steps) / 3)


def test_the_end_of_training_is_reported_for_each_stage(write_run):
    end = end_of_training(read_method(write_run("eepo")))
    assert {"stage1/reward", "stage2/reward", "stage1/entropy", "stage2/entropy"} <= end.keys()
    assert end["stage2/entropy"].mean > end["stage1/entropy"].mean


def test_sweep_md_has_sentences_and_both_tables(temperatures):
    criterion = make_criterion(temperatures.runs, "mean", "")
    page = write_sweep_tables(temperatures, criterion)[0].read_text()
    assert "- Best of 3 points by mean, average of in range, out of range: temperature=1.2" in page
    assert "| in range | temperature=1.5 | 3 |" in page
    assert "| temperature=1.5 | " in page.partition("## End of training")[2]


def test_other_methods_are_compared_with_the_best_point_by_seed(temperatures, write_run):
    line_runs = [
        run
        for seed in (0, 1, 2)
        for run in read_method(write_run("eepo", seed, [32, 32, 8 + seed, 0]))
    ]
    criterion = make_criterion([*temperatures.runs, *line_runs], "mean", "in_range")
    text = " ".join(sweep_sentences(temperatures, criterion, line_runs))
    assert "eepo against temperature=1.2 on in range, paired over 3 seeds" in text
    assert "mean (eepo higher)" in text


def test_invalid_options_and_folders_are_refused(temperatures, tmp_path):
    with pytest.raises(UserError, match=r"--on nowhere must be one of in_range, out_of_range"):
        make_criterion(temperatures.runs, "mean", "nowhere")
    with pytest.raises(
        UserError, match=r"pass@64 is not in .*; allowed: greedy, mean, distinct, pass@1, "
    ):
        make_criterion(temperatures.runs, "pass@64", "")
    with pytest.raises(
        UserError, match=r"--measure best must be one of greedy, .*, pass@1, pass@2, pass@4$"
    ):
        check_measure("best", 4)
    with pytest.raises(UserError, match="not the folder of a sweep"):
        read_sweep(tmp_path / "nothing")


# ---- the figure


def test_every_sweep_has_a_panel_with_the_dashed_line(temperatures, write_sweep, write_run):
    clips = read_sweep(
        write_sweep(
            "c", "algorithm.clip_high", {0.2: {0: FAIR, 1: GOOD}, 0.28: {0: GOOD, 1: GOOD}}, "clip"
        )
    )
    line_runs = [
        run
        for seed in (0, 1)
        for run in read_method(write_run("eepo", seed, [32, 32, 32, 16 * seed]))
    ]
    criterion = make_criterion([*temperatures.runs, *clips.runs, *line_runs], "mean", "in_range")
    figure = sweep_figure([temperatures, clips], line_runs, criterion)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in panels] == ["temperature", "clip_high"]
    assert [[tick.get_text() for tick in axes.get_xticklabels()] for axes in panels] == [
        ["0.8", "1.2", "1.5"],
        ["0.2", "0.28"],
    ]
    for axes in panels:
        (dashed,) = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
        assert list(dashed.get_ydata()) == pytest.approx([0.8125, 0.8125])  # seeds 0.75 and 0.875
    curve = next(
        line
        for line in panels[0].get_lines()
        if len(line.get_xdata()) == 3 and line.get_linestyle() == "-"
    )
    assert list(curve.get_ydata()) == pytest.approx(
        [criterion.estimate(point.runs).mean for point in temperatures.points]
    )


def test_the_knob_with_most_values_is_the_axis_and_other_knobs_split_lines(write_sweep):
    folder = write_sweep(
        "two", "algorithm.unlearn_lr", {"auto": {0: GOOD}, 1e-4: {0: FAIR}, 1e-3: {0: POOR}}, "eepo"
    )
    for file in sorted((folder / "recipes").iterdir()):
        gate = "step" if "auto" in file.name else "token"
        file.write_text(file.read_text() + f'gate = "{gate}"\n')
    result = read_sweep(folder)
    assert main_knob(result) == "algorithm.unlearn_lr"
    assert {
        label: len(points) for label, points in points_by_line(result, main_knob(result)).items()
    } == {
        "eepo, gate=step": 1,
        "eepo, gate=token": 2,
    }
    axes = sweep_figure([result], [], make_criterion(result.runs, "mean", "")).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.0001", "0.001", "auto"], (
        "numbers, then words"
    )


def test_a_knob_that_a_point_does_not_change_has_the_value_of_the_recipe(write_sweep):
    folder = write_sweep("mixed", "algorithm.temperature", {1: {0: GOOD}, 2: {0: FAIR}})
    changed = folder / "recipes" / "algorithm.temperature=2.toml"
    changed.write_text(changed.read_text() + "clip_high = 0.3\n")
    assert [point.knobs["algorithm.clip_high"] for point in read_sweep(folder).points] == [0.2, 0.3]


def test_the_figure_is_written_as_png_and_svg(temperatures, tmp_path):
    criterion = make_criterion(temperatures.runs, "distinct", "")
    png, svg = write_sweep_figure([temperatures], [], criterion, tmp_path / "deep" / "figure.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(png.read_bytes()) > 5000
    assert "temperature" in svg.read_text() or "<path" in svg.read_text()
    again = write_sweep_figure([temperatures], [], criterion, tmp_path / "again.svg")
    assert again[1].read_bytes() == svg.read_bytes(), "the same runs give the same file"
    with pytest.raises(UserError, match="is a folder"):
        write_sweep_figure([temperatures], [], criterion, tmp_path)


def test_seeds_of_a_method_are_read_from_their_folder(write_sweep):
    folder = write_sweep("t", "algorithm.temperature", {1: {0: GOOD, 1: POOR}})
    assert [run.seed for run in read_method(folder / "algorithm.temperature=1")] == [0, 1]
    assert [run.seed for run in read_method(folder / "algorithm.temperature=1" / "seed-1")] == [1]


def test_the_best_point_is_chosen_by_the_given_measure(write_sweep):
    """One problem that is always solved, against four that are rarely solved."""
    result = read_sweep(
        write_sweep("t", "algorithm.temperature", {1: {0: [32, 0, 0, 0]}, 2: {0: [4, 4, 4, 4]}})
    )
    best = {
        m: best_point(result, make_criterion(result.runs, m, "in_range")).label
        for m in ("mean", "pass@32")
    }
    assert best == {"mean": "temperature=1", "pass@32": "temperature=2"}
