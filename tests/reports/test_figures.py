from __future__ import annotations

import io
import json

import numpy as np
import pytest
from matplotlib.image import imread

from eepo.reports.captions import dots, draws, smoothing
from eepo.reports.collapse import accuracy_by_entropy, collapse_figure
from eepo.reports.curves import evaluation_curve, metric_curve, over_seeds, smooth
from eepo.reports.figure_list import PICTURES, draw_pictures, image_bytes
from eepo.reports.figures import (
    cost_figure,
    exploration_figure,
    pass_at_k_figure,
    unlearning_figure,
)
from eepo.reports.palette import KNOWN, looks
from eepo.reports.panels import WIDTH
from eepo.reports.records import read_run
from eepo.reports.second_half import chances_figure

NAMES = (
    "exploration",
    "collapse",
    "pass_at_k",
    "cost",
    "unlearning",
    "second_half_recovery",
    "forgetting",
)


@pytest.fixture
def runs(write_run):
    return [read_run(write_run(name, seed)) for name in ("grpo", "eepo") for seed in (0, 1)]


def test_every_figure_is_drawn_and_none_is_blank(runs):
    drawn = draw_pictures(runs)
    assert [picture.name for picture, _ in drawn] == [*NAMES]
    for picture, figure in drawn:
        pixels = imread(io.BytesIO(image_bytes(figure, "png")))[..., :3]
        for method in ("eepo",) if picture.name == "forgetting" else ("grpo", "eepo"):
            colour = [int(KNOWN[method][0][place : place + 2], 16) / 255 for place in (1, 3, 5)]
            assert (np.abs(pixels - colour).max(-1) < 0.02).sum() > 100


def test_no_text_leaves_the_figure_or_overlaps(runs, write_run):
    """Titles and legends, where a long name would do harm."""
    runs = [
        *runs,
        read_run(write_run("eepo_with_a_rather_long_name", 0)),
        read_run(write_run("higher_temperature", 0)),
    ]
    for picture, figure in draw_pictures(runs):
        figure.canvas.draw()
        boxes = [axes.title.get_window_extent() for axes in figure.axes if axes.get_visible()]
        boxes += [
            legend.get_window_extent() for axes in figure.axes if (legend := axes.get_legend())
        ]
        boxes += [legend.get_window_extent() for legend in figure.legends]
        for place, box in enumerate(boxes):
            assert box.x0 >= -1, picture.name
            assert box.x1 <= figure.bbox.x1 + 1, picture.name
            assert box.y0 >= -1, picture.name
            assert not any(box.overlaps(other) for other in boxes[place + 1 :]), picture.name


def test_figures_have_the_width_of_a_page_and_text_that_can_be_read_there(runs):
    for picture, figure in draw_pictures(runs):
        wide = 0.72 * WIDTH if picture.name == "pass_at_k" else WIDTH
        assert figure.get_figwidth() == pytest.approx(wide)
        texts = [axes.title for axes in figure.axes] + [
            tick for axes in figure.axes for tick in axes.get_xticklabels()
        ]
        assert min(text.get_fontsize() for text in texts) >= 6
        assert f'width="{72 * wide:g}pt"' in image_bytes(figure, "svg").decode()


def test_accuracy_stands_against_the_entropy_of_the_policy_that_was_evaluated(write_run):
    """Evaluated after step s; entropy of that policy is what step s + 1 sampled with."""
    run = read_run(write_run("grpo"))
    entropy = run.series("entropy")
    path = accuracy_by_entropy([run], "in_range")
    assert [accuracy for _, accuracy in path] == evaluation_curve(
        [run], "in_range", "mean"
    ).mean.tolist()
    assert [found for found, _ in path] == [entropy[step] for step in (1, 11, 21, 30)]


def test_figures_without_data_are_left_out(write_run):
    folder = write_run("grpo")
    (folder / "evaluations.jsonl").unlink()
    assert [picture.name for picture, _ in draw_pictures([read_run(folder)])] == [
        "exploration",
        "cost",
        "second_half_recovery",
    ]
    (folder / "metrics.jsonl").write_text("")
    assert all(picture.figure([read_run(folder)]) is None for picture in PICTURES)


def test_second_chances_are_shares_of_what_was_missed_in_the_whole_run(runs, write_run):
    _, bars = chances_figure(runs).axes
    waves = [0.05 * ((step * 7) % 5) for step in range(1, 31)]
    missed = sum(0.4 + wave for wave in waves)
    expected = [sum(base + wave / 4 for wave in waves) / missed for base in (0.1, 0.2)]
    assert [patch.get_width() for patch in bars.patches] == pytest.approx(expected)
    assert [tick.get_text() for tick in bars.get_yticklabels()] == ["grpo", "eepo"]
    folder = write_run("old")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["missed_share"], row["second_half_recovery"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert chances_figure([read_run(folder)]) is None


def test_the_same_runs_give_the_same_bytes(runs):
    first, second = (image_bytes(pass_at_k_figure(runs), "svg") for _ in range(2))
    assert first == second


def test_a_name_is_not_a_formula(write_run):
    runs = [read_run(write_run(r"a$\\frac$b"))]
    assert all(image_bytes(figure, "png") for figure in (pass_at_k_figure(runs), cost_figure(runs)))


def test_means_and_bands_over_seeds():
    """A curve ends where the shorter seed does, and a step that one seed lacks takes the others."""
    curve = over_seeds([{1: 1.0, 2: 2.0, 3: 3.0, 4: 9.0}, {1: 3.0, 3: 5.0}], reach=3)
    assert list(curve.steps) == [1, 2, 3]
    assert list(curve.mean) == [2.0, 2.0, 4.0]
    assert list(curve.low) == [1.0, 2.0, 3.0]
    assert list(curve.high) == [3.0, 2.0, 5.0]


def test_a_curve_ends_where_the_first_seed_stopped(write_run):
    whole, stopped = write_run(seed=0), write_run(seed=1)
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:7]))
    assert metric_curve([read_run(whole), read_run(stopped)], "entropy").steps[-1] == 7


def test_smoothing_keeps_a_straight_line_and_lessens_noise():
    line = np.arange(200.0)
    assert np.allclose(smooth(line)[10:-10], line[10:-10])
    noise = np.tile([0.0, 1.0], 100)
    assert smooth(noise).std() < 0.3 * noise.std()
    assert (smooth(np.arange(10.0)) == np.arange(10.0)).all()


def test_colours_stay_with_their_method():
    alone, among = looks(["mine"]), looks(["mine", "grpo", "eepo", "start"])
    assert alone["mine"] == among["mine"]
    assert (
        len({colour for colour, _ in looks([*KNOWN, "a", "b", "c", "d"]).values()})
        == len(KNOWN) + 4
    )


def test_a_curve_is_over_the_same_problems_at_every_step(write_run):
    """The quick look asks 2 problems, the full evaluation 4: its point on the curve is over those 2."""
    folder = write_run("grpo", correct=[32, 0, 32, 32])
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    for row in lines:
        if row["kind"] == "quick":
            row["num_problems"] = 2
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    curve = evaluation_curve([read_run(folder)], "in_range", "mean")
    assert curve.mean[-1] == pytest.approx(0.5)


def keep_lines(path, keep):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if keep(row)))


def with_quick_start(folder, mean):
    """Its own look at the start was quick, with fewer draws."""
    row = {
        "step": 0,
        "kind": "quick",
        "set": "in_range",
        "num_problems": 4,
        "num_samples": 4,
        "greedy": 0.5,
    }
    row |= {"mean": mean, "pass@k": {"1": mean}}
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return folder


def starting_heights(runs):
    """Of the lines in the first panel, one for each method and measure."""
    return {
        line.get_ydata()[0]
        for line in collapse_figure(runs).axes[0].lines
        if line.get_linestyle() == "--"
    }


def test_one_starting_policy_stands_at_one_height(write_run):
    judged = write_run("grpo")
    looked = with_quick_start(write_run("eepo", start=False), 0.25)
    runs = [read_run(folder) for folder in (judged, looked)]
    assert starting_heights(runs) == {8 / 4 / 32}
    assert "over 4 or 32 draws of each problem, or over 32 where a full" in draws(runs)
    other = read_run(
        with_quick_start(write_run("other", start=False, settings='[model]\npath = "other"'), 0.5)
    )
    assert starting_heights([*runs, other]) == {8 / 4 / 32, 0.5}, (
        "another policy keeps its own evaluation"
    )


def test_a_single_step_is_a_dot_over_a_whole_number(write_run):
    folder = write_run("eepo")
    keep_lines(folder / "metrics.jsonl", lambda row: row["step"] == 1)
    run = read_run(folder)
    for figure in (exploration_figure([run]), unlearning_figure([run]), cost_figure([run])):
        for axes in (axes for axes in figure.axes if axes.get_xlabel() == "step"):
            assert {line.get_marker() for line in axes.lines} == {"o"}
            low, high = axes.get_xlim()
            assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1]
    first, second = exploration_figure([run]).axes[0].lines
    assert (first.get_markerfacecolor(), second.get_markerfacecolor()) == (
        KNOWN["eepo"][0],
        "white",
    )
    assert dots([run]) == "A single step is a dot, a hollow one of a later stage."


def test_captions_tell_of_smoothing_where_there_is_some(write_run):
    folder = write_run("grpo")
    assert smoothing([read_run(folder)]) == dots([read_run(folder)]) == ""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "stage1/entropy": 1.0}) + "\n" for step in range(31, 41)
        )
    run = read_run(folder)
    assert smoothing([run]).endswith("faint lines are the raw values.")
    values = metric_curve([run], "stage1/entropy").mean
    assert (smooth(values[:39]) == values[:39]).all()
    assert (smooth(values) != values).any()
    told = [picture.name for picture in PICTURES if smoothing in picture.notes]
    assert told == ["exploration", "collapse", "cost", "unlearning", "second_half_recovery"]
