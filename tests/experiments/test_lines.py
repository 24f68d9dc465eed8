"""Lines of a plan: when half of the completions have a label."""

from __future__ import annotations

from eepo.experiments.lines import steps_to_half, with_all_labels


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


def test_a_step_without_a_label_counts_as_share_0() -> None:
    found = with_all_labels(
        [
            {"step": 1, "stage1/label/guess": 1.0},
            {"step": 2, "stage1/label/guess": 0.5, "stage1/label/reason": 0.5},
            {"step": 3, "stage1/reward": 0.0, "stage2/label/reason": 1.0},
            {"step": 4, "reward": 0.0},
        ]
    )
    assert [row.get("stage1/label/reason") for row in found] == [0.0, 0.5, 0.0, None]
    assert [row.get("stage2/label/reason") for row in found] == [None, None, 1.0, None]
