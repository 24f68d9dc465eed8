"""Lines of a plan: when half of the completions have a label."""

from __future__ import annotations

from eepo.experiments.lines import steps_to_half


def rows(shares: list[float]) -> list[dict[str, float]]:
    return [
        {"stage1/label/reason": share, "stage1/label/guess": 1 - share, "seconds/total": 2.0}
        for share in shares
    ]


def test_the_step_and_the_seconds_until_half_of_the_completions_reason() -> None:
    found = steps_to_half(rows([0.0] * 10 + [1.0] * 10))["steps_to_half"]
    assert found["reason"] == {"step": 13, "seconds": 26.0}  # 3 of the last 5 steps
    assert found["guess"] == {"step": 5, "seconds": 10.0}


def test_a_label_that_stays_rare_has_no_step() -> None:
    found = steps_to_half(rows([0.1] * 20))["steps_to_half"]
    assert found["reason"] == {"step": None, "seconds": None}


def test_runs_without_labels_have_no_entry() -> None:
    assert steps_to_half([{"stage1/reward": 1.0, "seconds/total": 1.0}] * 9) == {}
