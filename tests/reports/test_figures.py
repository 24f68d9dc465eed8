from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
from matplotlib.image import imread

from eepo.reports.captions import describe_num_samples, describe_single_steps, describe_smoothing
from eepo.reports.collapse import accuracy_by_entropy, collapse_figure
from eepo.reports.curves import curve_over_seeds, evaluation_curve, metric_curve, smooth
from eepo.reports.figure_list import FIGURES, draw_figures, image_bytes
from eepo.reports.figures import (
    cost_figure,
    exploration_figure,
    pass_at_k_figure,
    unlearning_figure,
)
from eepo.reports.palette import KNOWN_STYLES, method_styles
from eepo.reports.panels import WIDTH
from eepo.reports.records import read_run
from eepo.reports.second_half import second_half_figure

NAMES = (
    "exploration",
    "collapse",
    "pass_at_k",
    "cost",
    "unlearning",
    "second_half_recovery",
    "unlearning_examples",
)


@pytest.fixture
def runs(write_run):
    return [read_run(write_run(name, seed)) for name in ("grpo", "eepo") for seed in (0, 1)]


def test_every_figure_is_drawn_and_none_is_blank(runs):
    drawn = draw_figures(runs)
    assert [spec.name for spec, _ in drawn] == [*NAMES]
    for spec, figure in drawn:
        pixels = imread(io.BytesIO(image_bytes(figure, "png")))[..., :3]
        for method in ("eepo",) if spec.name == "unlearning_examples" else ("grpo", "eepo"):
            colour = [
                int(KNOWN_STYLES[method][0][index : index + 2], 16) / 255 for index in (1, 3, 5)
            ]
            assert (np.abs(pixels - colour).max(-1) < 0.02).sum() > 100


def test_no_text_overlaps_or_leaves_the_figure(runs, write_run):
    """Checks titles and legends, with a long method name."""
    runs = [
        *runs,
        read_run(write_run("eepo_with_a_rather_long_name", 0)),
        read_run(write_run("higher_temperature", 0)),
    ]
    for spec, figure in draw_figures(runs):
        figure.canvas.draw()
        boxes = [axes.title.get_window_extent() for axes in figure.axes if axes.get_visible()]
        boxes += [
            legend.get_window_extent() for axes in figure.axes if (legend := axes.get_legend())
        ]
        boxes += [legend.get_window_extent() for legend in figure.legends]
        for index, box in enumerate(boxes):
            assert box.x0 >= -1, spec.name
            assert box.x1 <= figure.bbox.x1 + 1, spec.name
            assert box.y0 >= -1, spec.name
            assert not any(box.overlaps(other) for other in boxes[index + 1 :]), spec.name


def test_figures_have_the_width_of_a_page_and_readable_text(runs):
    for spec, figure in draw_figures(runs):
        width = 0.72 * WIDTH if spec.name == "pass_at_k" else WIDTH
        assert figure.get_figwidth() == pytest.approx(width)
        texts = [axes.title for axes in figure.axes] + [
            tick for axes in figure.axes for tick in axes.get_xticklabels()
        ]
        assert min(text.get_fontsize() for text in texts) >= 6
        assert f'width="{72 * width:g}pt"' in image_bytes(figure, "svg").decode()


def test_accuracy_is_paired_with_the_entropy_of_the_evaluated_policy(write_run):
    """The policy evaluated after step s is the one that step s + 1 samples from."""
    run = read_run(write_run("grpo"))
    entropy = run.series("entropy")
    path = accuracy_by_entropy([run], "in_range")
    assert [accuracy for _, accuracy in path] == evaluation_curve(
        [run], "in_range", "mean"
    ).mean.tolist()
    assert [value for value, _ in path] == [entropy[step] for step in (1, 11, 21, 30)]


def test_figures_without_data_are_omitted(write_run):
    folder = write_run("grpo")
    (folder / "evaluations.jsonl").unlink()
    assert [spec.name for spec, _ in draw_figures([read_run(folder)])] == [
        "exploration",
        "cost",
        "second_half_recovery",
    ]
    (folder / "metrics.jsonl").write_text("")
    assert all(spec.draw([read_run(folder)]) is None for spec in FIGURES)


def test_recovery_bars_are_shares_of_the_missed_groups_of_the_whole_run(runs, write_run):
    _, bars = second_half_figure(runs).axes
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
    assert second_half_figure([read_run(folder)]) is None


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(runs):
    first, second = (image_bytes(pass_at_k_figure(runs), "svg") for _ in range(2))
    assert first == second


def test_without_a_success_pass_at_k_shows_no_negative_shares(write_run):
    figure = pass_at_k_figure([read_run(write_run(correct=(0, 0, 0, 0), start=False))])
    assert [axes.get_ylim() for axes in figure.axes] == [(0, 1), (0, 1)]


def test_a_method_name_is_not_parsed_as_a_formula(write_run):
    runs = [read_run(write_run(r"a$\\frac$b"))]
    assert all(image_bytes(figure, "png") for figure in (pass_at_k_figure(runs), cost_figure(runs)))


def test_means_and_bands_over_seeds():
    """A curve ends with the shorter seed. If a seed lacks a step, the mean is over the others."""
    curve = curve_over_seeds([{1: 1.0, 2: 2.0, 3: 3.0, 4: 9.0}, {1: 3.0, 3: 5.0}], last_step=3)
    assert list(curve.steps) == [1, 2, 3]
    assert list(curve.mean) == [2.0, 2.0, 4.0]
    assert list(curve.low) == [1.0, 2.0, 3.0]
    assert list(curve.high) == [3.0, 2.0, 5.0]


def test_a_curve_ends_where_the_first_seed_stopped(write_run):
    whole, stopped = write_run(seed=0), write_run(seed=1)
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:7]))
    assert metric_curve([read_run(whole), read_run(stopped)], "entropy").steps[-1] == 7


def test_smoothing_keeps_a_straight_line_and_reduces_noise():
    line = np.arange(200.0)
    assert np.allclose(smooth(line)[10:-10], line[10:-10])
    noise = np.tile([0.0, 1.0], 100)
    assert smooth(noise).std() < 0.3 * noise.std()
    assert (smooth(np.arange(10.0)) == np.arange(10.0)).all()


def test_a_method_keeps_its_colour_in_every_report():
    single, several = method_styles(["mine"]), method_styles(["mine", "grpo", "eepo", "start"])
    assert single["mine"] == several["mine"]
    assert method_styles(["GRPO"])["GRPO"] == KNOWN_STYLES["grpo"], "its label in a plan"
    styles = method_styles([*KNOWN_STYLES, "a", "b", "c", "d"])
    assert len({colour for colour, _ in styles.values()}) == len(KNOWN_STYLES) + 4


def test_a_curve_is_over_the_same_problems_at_every_step(write_run):
    """The quick evaluation has 2 problems, the full one 4: the curve is over the first 2."""
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
    """Add a quick evaluation of the start, with fewer samples."""
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


def start_accuracies(runs):
    """Return the first values of the mean lines in the first panel."""
    return {
        line.get_ydata()[0]
        for line in collapse_figure(runs).axes[0].lines
        if line.get_linestyle() == "--"
    }


def test_runs_with_the_same_start_share_its_accuracy(write_run):
    fully_evaluated = write_run("grpo")
    quickly_evaluated = with_quick_start(write_run("eepo", start=False), 0.25)
    runs = [read_run(folder) for folder in (fully_evaluated, quickly_evaluated)]
    assert start_accuracies(runs) == {8 / 4 / 32}
    assert (
        "over 4 or 32 samples per problem (quick evaluations) or 32 (full"
        in describe_num_samples(runs)
    )
    other = read_run(
        with_quick_start(write_run("other", start=False, settings='[model]\npath = "other"'), 0.5)
    )
    assert start_accuracies([*runs, other]) == {8 / 4 / 32, 0.5}, (
        "another starting policy keeps its evaluation"
    )


def test_entropies_of_different_orders_have_a_log_scale(runs):
    def scaled(run, factor):
        metrics = [{**row, "stage1/entropy": factor * row["stage1/entropy"]} for row in run.metrics]
        return dataclasses.replace(run, name=f"times_{factor}", metrics=metrics)

    usual = exploration_figure(runs).axes[0]
    assert usual.get_yscale() == "linear"
    assert usual.get_ylim()[0] == 0
    wide = exploration_figure([*runs, scaled(runs[0], 100)]).axes[0]
    assert wide.get_yscale() == "log"
    assert "log scale" in wide.get_title()


def test_a_model_without_training_is_not_in_the_legend_of_curves(runs):
    base = dataclasses.replace(runs[0], name="base", metrics=[])
    (legend,) = exploration_figure([base, *runs]).legends
    assert "base" not in [text.get_text() for text in legend.get_texts()]


def test_a_single_step_is_a_dot_with_one_integer_tick(write_run):
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
        KNOWN_STYLES["eepo"][0],
        "white",
    )
    assert describe_single_steps([run]) == "A single step is a dot (hollow for later stages)."


def test_captions_mention_smoothing_only_if_lines_are_smoothed(write_run):
    folder = write_run("grpo")
    assert describe_smoothing([read_run(folder)]) == describe_single_steps([read_run(folder)]) == ""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "stage1/entropy": 1.0}) + "\n" for step in range(31, 41)
        )
    run = read_run(folder)
    assert describe_smoothing([run]).endswith("faint lines are the raw values.")
    values = metric_curve([run], "stage1/entropy").mean
    assert (smooth(values[:39]) == values[:39]).all()
    assert (smooth(values) != values).any()
    smoothed = [spec.name for spec in FIGURES if describe_smoothing in spec.notes]
    assert smoothed == [
        "strategies",
        "exploration",
        "collapse",
        "cost",
        "unlearning",
        "second_half_recovery",
    ]
