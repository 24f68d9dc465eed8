"""The figure of strategies, for runs whose grader labels completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eepo.reports.records import Run
from eepo.reports.strategies import new_labels, strategies_figure, with_all_labels
from eepo.reports.summary import strategy_sentences


def run(name: str, rows: list[dict[str, Any]]) -> Run:
    metrics = [{"step": step, **row} for step, row in enumerate(rows, 1)]
    return Run(Path(name), name, 0, {}, {}, metrics, [], [], [], 0)


def labelled(compute: float, stage2: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"reward": compute, "stage1/reward": compute, "stage1/label/guess": 1.0}
    if compute:
        row |= {"stage1/label/compute": compute, "stage1/label/guess": 1 - compute}
    if stage2 is not None:
        row |= {"stage2/label/compute": stage2, "stage2/reward": stage2}
    return row


def test_labels_that_are_missing_in_a_step_count_as_0() -> None:
    runs = with_all_labels([run("grpo", [labelled(0.0)]), run("eepo", [labelled(0.5)])])
    assert runs[0].metrics[0]["stage1/label/compute"] == 0.0
    assert "stage2/label/compute" not in runs[0].metrics[0]
    assert runs[1].metrics[0]["stage1/label/compute"] == 0.5


def test_the_label_that_grew_is_shown_and_the_common_one_is_not() -> None:
    runs = [run("grpo", [labelled(0.0)] * 3), run("eepo", [labelled(0.0, 0.2), labelled(0.9, 0.8)])]
    assert new_labels(runs) == ["compute"]
    figure = strategies_figure(runs)
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["reward of the policy (stage 1)", "share of completions: compute"]
    lines = [len(axes.get_lines()) for axes in figure.axes]
    assert lines[0] == 2
    assert lines[1] == 3  # stage 1 of both methods, stage 2 of EEPO


def test_a_label_that_hardly_grew_is_not_shown() -> None:
    assert new_labels([run("eepo", [labelled(0.0), labelled(0.04)])]) == []


def test_runs_without_labels_have_no_such_figure_or_sentence() -> None:
    plain = [run("grpo", [{"reward": 0.1, "stage1/reward": 0.1}] * 2)]
    assert strategies_figure(plain) is None
    assert strategy_sentences(plain) == []


def test_the_sentence_gives_reward_and_share_of_every_method() -> None:
    runs = [run("grpo", [labelled(0.0)] * 6), run("eepo", [labelled(0.0)] + [labelled(0.9)] * 5)]
    (sentence,) = strategy_sentences(runs)
    assert "grpo earns 0% reward and uses it in 0%" in sentence
    assert "eepo earns 90% reward and uses it in 90%" in sentence
