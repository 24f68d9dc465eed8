"""A sweep's tables and the hyperparameter figure, from crafted runs with known numbers."""

import json
import shutil

import pytest

from eepo.reports.sweep_figure import curves, hyper_figure, main_knob, write_hyper
from eepo.reports.sweep_tables import (
    best_point,
    check_measure,
    end_of_training,
    make_scale,
    read_method,
    read_sweep,
    sweep_sentences,
    write_tables,
)
from eepo.types import UserError


@pytest.fixture
def write_sweep(tmp_path, write_run):
    """write_sweep("t", {"algorithm.temperature": {0.8: {0: [32, 0, 0, 0]}}}): value → seed → correct of 32."""

    def write(name, knob, points, recipe="grpo"):
        folder, (section, key) = tmp_path / name, knob.split(".")
        (folder / "recipes").mkdir(parents=True)
        (folder / "recipe.toml").write_text(f'name = "{recipe}"\n[algorithm]\nclip_high = 0.2\n')
        for value, seeds in points.items():
            point = f"{knob}={value}".replace("/", "_")
            text = f'extends = "../recipe.toml"\nname = "x"\n[{section}]\n{key} = {json.dumps(value)}\n'
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


def test_points_stand_by_size_and_are_named_by_their_knobs(temperatures):
    assert [point.label for point in temperatures.points] == [
        "temperature=0.8",
        "temperature=1.2",
        "temperature=1.5",
    ]
    assert temperatures.name == "grpo"
    assert [run.seed for run in temperatures.points[0].runs] == [0, 1, 2]
    assert {run.name for run in temperatures.points[0].runs} == {"temperature=0.8"}


def test_the_best_point_and_those_it_cannot_be_told_apart_from(temperatures):
    """1.5 is far below in every seed; 0.8 is level in one of three."""
    scale = make_scale(temperatures.runs, "mean", "in_range")
    best, close, flattered = sweep_sentences(temperatures, scale)
    assert best.startswith("Best of 3 points by mean, in range: temperature=1.2 with 49.7 % [")
    assert best.endswith(", 3 seeds.")
    assert close == "The data do not tell it apart from: temperature=0.8."
    assert "flattered" in flattered


def test_one_seed_is_said_to_show_nothing(write_sweep):
    result = read_sweep(write_sweep("t", "algorithm.temperature", {1: {0: GOOD}, 2: {0: POOR}}))
    text = " ".join(sweep_sentences(result, make_scale(result.runs, "mean", "")))
    assert (
        "temperature=1 with 37.5 %, one seed, which says nothing of the spread." in text
    )  # (50 % and 25 %) / 2
    assert "The data do not tell it apart from: temperature=2." in text


def test_points_that_lack_seeds_or_all_runs_are_named(write_sweep):
    points = {"token": {0: GOOD, 1: GOOD}, "step": {0: POOR}, "never": {}}
    folder = write_sweep("g", "algorithm.gate", points)
    failed = folder / "algorithm.gate=never" / "seed-0"
    failed.mkdir(parents=True)
    (failed / "log.txt").write_text("eepo: no\n")
    result = read_sweep(folder)
    text = " ".join(sweep_sentences(result, make_scale(result.runs, "greedy", "")))
    assert "With fewer finished seeds than the others' 2: gate=step." in text
    assert "Without a finished run: gate=never." in text


def test_a_run_without_its_full_evaluation_does_not_count(write_sweep):
    folder = write_sweep("t", "algorithm.temperature", {1: {0: GOOD, 1: GOOD}})
    file = folder / "algorithm.temperature=1" / "seed-1" / "evaluations.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [row for row in rows if row["kind"] == "quick" or row["step"] == 0]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert [run.seed for run in read_sweep(folder).runs] == [0]


def test_rows_for_programs_hold_means_intervals_and_the_end_of_training(temperatures):
    scale = make_scale(temperatures.runs, "pass@32", "")
    _, file = write_tables(temperatures, scale)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["knobs"] for row in rows] == [{"algorithm.temperature": t} for t in (0.8, 1.2, 1.5)]
    mean = rows[1]["measures"]["in_range"]["mean"]
    assert mean["mean"] == pytest.approx((0.5 + 0.5 + 63 / 128) / 3)
    assert mean["low"] < mean["mean"] < mean["high"]
    assert mean["over"] == "seeds"
    assert rows[2]["score"]["mean"] == pytest.approx(0.25)
    steps = [0.3 + 0.01 * step + 0.05 * ((step * 7) % 5) for step in (28, 29, 30)]
    assert rows[0]["end_of_training"]["stage1/reward"]["mean"] == pytest.approx(sum(steps) / 3)


def test_stages_have_their_own_numbers_at_the_end(write_run):
    found = end_of_training(read_method(write_run("eepo")))
    assert {"stage1/reward", "stage2/reward", "stage1/entropy", "stage2/entropy"} <= found.keys()
    assert found["stage2/entropy"].mean > found["stage1/entropy"].mean


def test_the_page_has_the_words_and_both_tables(temperatures):
    page = write_tables(temperatures, make_scale(temperatures.runs, "mean", ""))[0].read_text()
    assert "- Best of 3 points by mean, average of in range, out of range: temperature=1.2" in page
    assert "| in range | temperature=1.5 | 3 |" in page
    assert "| temperature=1.5 | " in page.partition("## End of training")[2]


def test_lines_are_compared_with_the_best_point_pair_by_pair(temperatures, write_run):
    lines = [
        run
        for seed in (0, 1, 2)
        for run in read_method(write_run("eepo", seed, [32, 32, 8 + seed, 0]))
    ]
    scale = make_scale([*temperatures.runs, *lines], "mean", "in_range")
    text = " ".join(sweep_sentences(temperatures, scale, lines))
    assert "eepo against temperature=1.2 on in range, paired over 3 seeds" in text
    assert "mean (eepo higher)" in text


def test_mistakes_are_named(temperatures, tmp_path):
    with pytest.raises(UserError, match=r"--on nowhere must be one of in_range, out_of_range"):
        make_scale(temperatures.runs, "mean", "nowhere")
    with pytest.raises(
        UserError, match=r"pass@3 is not in .*; allowed: greedy, mean, distinct, pass@1, "
    ):
        make_scale(temperatures.runs, "pass@3", "")
    with pytest.raises(
        UserError, match=r"--measure best must be one of greedy, .*, pass@1, pass@2, pass@4$"
    ):
        check_measure("best", 4)
    with pytest.raises(UserError, match="not a sweep's folder"):
        read_sweep(tmp_path / "nothing")


# --- the figure -------------------------------------------------------------------------------------------------------


def test_every_sweep_has_a_panel_and_the_line_crosses_all(temperatures, write_sweep, write_run):
    clips = read_sweep(
        write_sweep(
            "c", "algorithm.clip_high", {0.2: {0: FAIR, 1: GOOD}, 0.28: {0: GOOD, 1: GOOD}}, "clip"
        )
    )
    lines = [
        run
        for seed in (0, 1)
        for run in read_method(write_run("eepo", seed, [32, 32, 32, 16 * seed]))
    ]
    scale = make_scale([*temperatures.runs, *clips.runs, *lines], "mean", "in_range")
    figure = hyper_figure([temperatures, clips], lines, scale)
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
        [scale.estimate(point.runs).mean for point in temperatures.points]
    )


def test_the_knob_with_most_values_is_the_axis_and_the_others_tell_lines_apart(write_sweep):
    folder = write_sweep(
        "two", "algorithm.unlearn_lr", {"auto": {0: GOOD}, 1e-4: {0: FAIR}, 1e-3: {0: POOR}}, "eepo"
    )
    for file in sorted((folder / "recipes").iterdir()):
        gate = "step" if "auto" in file.name else "token"
        file.write_text(file.read_text() + f'gate = "{gate}"\n')
    result = read_sweep(folder)
    assert main_knob(result) == "algorithm.unlearn_lr"
    assert {label: len(points) for label, points in curves(result, main_knob(result)).items()} == {
        "eepo, gate=step": 1,
        "eepo, gate=token": 2,
    }
    axes = hyper_figure([result], [], make_scale(result.runs, "mean", "")).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.0001", "0.001", "auto"], (
        "numbers, then words"
    )


def test_a_knob_that_only_some_points_change_is_the_recipes_own_in_the_others(write_sweep):
    folder = write_sweep("mixed", "algorithm.temperature", {1: {0: GOOD}, 2: {0: FAIR}})
    changed = folder / "recipes" / "algorithm.temperature=2.toml"
    changed.write_text(changed.read_text() + "clip_high = 0.3\n")
    assert [point.knobs["algorithm.clip_high"] for point in read_sweep(folder).points] == [0.2, 0.3]


def test_the_figure_is_written_as_png_and_svg(temperatures, tmp_path):
    scale = make_scale(temperatures.runs, "distinct", "")
    png, svg = write_hyper([temperatures], [], scale, tmp_path / "deep" / "figure.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(png.read_bytes()) > 5000
    assert "temperature" in svg.read_text() or "<path" in svg.read_text()
    again = write_hyper([temperatures], [], scale, tmp_path / "again.svg")
    assert again[1].read_bytes() == svg.read_bytes(), "the same runs give the same file"
    with pytest.raises(UserError, match="is a folder"):
        write_hyper([temperatures], [], scale, tmp_path)


def test_seeds_of_a_method_are_read_from_their_folder(write_sweep):
    folder = write_sweep("t", "algorithm.temperature", {1: {0: GOOD, 1: POOR}})
    assert [run.seed for run in read_method(folder / "algorithm.temperature=1")] == [0, 1]
    assert [run.seed for run in read_method(folder / "algorithm.temperature=1" / "seed-1")] == [1]


def test_the_best_point_is_by_the_measure_asked_for(write_sweep):
    """Half of one problem's samples right and three more found once, against one problem always right."""
    result = read_sweep(
        write_sweep("t", "algorithm.temperature", {1: {0: [32, 0, 0, 0]}, 2: {0: [4, 4, 4, 4]}})
    )
    by = {
        m: best_point(result, make_scale(result.runs, m, "in_range")).label
        for m in ("mean", "pass@32")
    }
    assert by == {"mean": "temperature=1", "pass@32": "temperature=2"}
