"""Tables of how fast runs reach a goal, and of their reward at equal time."""

from __future__ import annotations

from typing import Any

import pytest

from eepo.reports.paired_tables import TableRow, regime_tables
from eepo.reports.speed_table import NEVER, half_of, reward_after, seconds_until, speed_cells


def line(seed: int, steps: int | None, **more: Any) -> dict[str, Any]:
    rows = [{"step": 4, "seconds/total": 1.0}, {"step": 8, "seconds/total": 2.0}]
    plain = {"regime": "r", "method": "m", "value": "", "evaluations": [], "knobs": []}
    return plain | {"seed": seed, "steps_to_90": steps, "metrics": rows, "seconds": 12.0} | more


def test_seconds_count_only_the_steps_until_the_reward() -> None:
    assert seconds_until(line(0, None), 8) == 4 + 8
    assert seconds_until(line(0, None), 5) == 4 + 2
    assert seconds_until(line(0, None), 3) == 3


def test_the_row_shows_every_seed_in_order_and_the_median_run() -> None:
    lines = [
        line(seed, steps, completions_per_step=256) for seed, steps in [(2, 8), (0, 3), (1, 5)]
    ]
    assert speed_cells("m", lines) == ["m", "3 of 3", "3, 5, 8", "5", "1,280", "6"]


def test_runs_that_fail_count_as_the_slowest() -> None:
    one_failed = [line(0, 3), line(1, None), line(2, 8)]
    assert speed_cells("m", one_failed) == ["m", "2 of 3", f"3, {NEVER}, 8", "8", "", "12"]
    most_failed = [line(0, 3), line(1, None)]
    assert speed_cells("m", most_failed) == ["m", "1 of 2", f"3, {NEVER}", *[NEVER] * 3]


def test_the_table_is_shown_only_if_a_run_reached_the_reward() -> None:
    def titles(*steps: int | None) -> list[str]:
        row = TableRow("m", [line(seed, each) for seed, each in enumerate(steps)])
        return [table.splitlines()[0] for table in regime_tables("r", [row], [row])]

    assert titles(None, None) == ["### r, training"]
    assert titles(None, 8) == ["### r, training", "### r, steps to 90 % reward"]


def test_with_a_label_a_table_says_when_half_of_the_completions_have_it() -> None:
    found = [{"reason": {"step": step}, "guess": {"step": 1}} for step in (8, None, 3)]
    lines = [line(seed, None, steps_to_half=each) for seed, each in enumerate(found)]
    cells = ["m", "2 of 3", f"8, {NEVER}, 3", "8", "", "12"]
    assert speed_cells("m", lines, half_of("reason")) == cells
    row = TableRow("m", lines)
    (_, table) = regime_tables("r", [row], [row], "reason")
    assert table.startswith("### r, steps until half of the completions are: reason\n")
    assert table.endswith(f"| {' | '.join(cells)} |")
    assert len(regime_tables("r", [row], [row], "other")) == len(regime_tables("r", [row], [row]))


def rewarded(seed: int, seconds: float, *rewards: float) -> dict[str, Any]:
    """Return a line with a reward for every second step."""
    rows = [
        {"step": 2 * number, "seconds/total": seconds, "stage1/reward": reward}
        for number, reward in enumerate(rewards, 1)
    ]
    return line(seed, None, metrics=rows)


def test_the_reward_at_a_time_is_a_mean_of_the_last_five_steps_until_then() -> None:
    run = rewarded(0, 1.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # a row takes two seconds
    assert reward_after(run, 1.9) is None, "the first steps take longer"
    assert reward_after(run, 2) == 0.1
    assert reward_after(run, 4.9) == pytest.approx(0.15)
    assert reward_after(run, 8) == pytest.approx((0.2 + 0.3 + 0.4) / 3)
    assert reward_after(run, 1000) == pytest.approx((0.3 + 0.4 + 0.5) / 3), "it has ended"
    assert reward_after(line(0, None), 1000) is None, "an old line has no such rewards"


def test_a_table_compares_rewards_at_equal_time_paired_by_seed() -> None:
    fast = TableRow("fast", [rewarded(seed, 1.0, 0.0, 0.4 + seed / 100) for seed in (0, 1)])
    slow = TableRow("slow", [rewarded(seed, 2.0, 0.1, 0.9) for seed in (0, 1)])
    *_, table = regime_tables("r", [fast, slow], [fast, slow], seconds=[4, 8.5])
    title, head, first, second = (row for row in table.splitlines() if row and "---" not in row)
    assert title == "### r, reward of stage 1 at equal time"
    assert head == "|  | after 4 s | after 8.5 s |"
    assert first == "| fast | 0.203 | 0.203 |"
    assert second.startswith("| slow | 0.100<br>**-0.103 [")
    assert "| 0.500<br>**+0.297 [" in second
