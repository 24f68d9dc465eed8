"""The table of steps, completions and seconds to 90 % reward."""

from __future__ import annotations

from typing import Any

from eepo.reports.paired_tables import TableRow, regime_tables
from eepo.reports.speed_table import NEVER, seconds_to_reward, speed_cells


def line(seed: int, steps: int | None, **more: Any) -> dict[str, Any]:
    rows = [{"step": 4, "seconds/total": 1.0}, {"step": 8, "seconds/total": 2.0}]
    plain = {"regime": "r", "method": "m", "value": "", "evaluations": [], "knobs": []}
    return plain | {"seed": seed, "steps_to_90": steps, "metrics": rows, "seconds": 12.0} | more


def test_seconds_count_only_the_steps_until_the_reward() -> None:
    assert seconds_to_reward(line(0, 8)) == 4 + 8
    assert seconds_to_reward(line(0, 5)) == 4 + 2
    assert seconds_to_reward(line(0, 3)) == 3


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
