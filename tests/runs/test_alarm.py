"""The alarm: what breaks a bound and what does not, when it speaks, what it does, and that a resumed run agrees."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import AlarmConfig, RunConfig
from eepo.runs import checkpoint
from eepo.runs.alarm import ADVICE, MESSAGES, AlarmMonitor, alarms, active_alarms
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import ALARMS, METRICS, RunLog
from eepo.trainer import Interrupted
from eepo.types import UserError

HEALTHY = {
    "stage1/reward": 0.5, "stage2/reward": 0.4, "stage1/entropy": 0.6, "stage2/entropy": 0.8,
    "stage1/truncated_share": 0.1, "stage2/truncated_share": 0.2, "zero_advantage_share": 0.4,
}  # fmt: skip
PATIENCE_3 = AlarmConfig(patience=3, entropy_above=3.0)


def steps(number: int, first: int = 1, **values: float) -> list[dict[str, Any]]:
    named = {key.replace("__", "/"): value for key, value in values.items()}
    return [{"step": first + place} | HEALTHY | named for place in range(number)]


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_healthy_run_raises_none() -> None:
    assert alarms(steps(10), PATIENCE_3) == []
    assert alarms(steps(10), AlarmConfig()) == []
    assert alarms([], AlarmConfig(patience=1)) == []


@pytest.mark.parametrize(
    ("values", "name", "value", "stage", "over_exploring"),
    [
        ({"stage1__entropy": 0.009}, "entropy_below", 0.009, None, False),
        ({"stage2__entropy": 3.1}, "entropy_above", 3.1, 2, True),
        ({"stage1__entropy": 3.2, "stage2__entropy": 4.0}, "entropy_above", 3.2, 1, True),
        ({"stage2__truncated_share": 0.6}, "truncated_share_above", 0.6, 2, True),
        (
            {"stage1__truncated_share": 0.7, "stage2__truncated_share": 0.9},
            "truncated_share_above",
            0.7,
            1,
            False,
        ),
        ({"zero_advantage_share": 0.96}, "zero_advantage_share_above", 0.96, None, False),
        ({"mismatch_kl": 0.03}, "mismatch_kl_above", 0.03, None, False),
        ({"stage2__reward": 0.0}, "dead_stage_above", 0.5, 2, True),
        ({"stage2__reward": 0.024}, "dead_stage_above", 0.5, 2, True),
        ({"stage1__reward": 0.0}, "dead_stage_above", 0.4, 1, False),
    ],
)
def test_a_bound_broken_for_as_long_as_patience_lasts(
    values: dict[str, float], name: str, value: float, stage: int | None, over_exploring: bool
) -> None:
    (found,) = alarms(steps(3, **values), PATIENCE_3)
    assert (found.name, found.stage, found.over_exploring) == (name, stage, over_exploring)
    assert found.value == pytest.approx(value)
    assert found.bound == getattr(PATIENCE_3, name)
    assert name in str(found)
    assert alarms(steps(2, **values), PATIENCE_3) == [], "too early"
    assert alarms([*steps(2, **values), *steps(1, 3), *steps(2, 4, **values)], PATIENCE_3) == [], (
        "not in a row"
    )
    off = dataclasses.replace(PATIENCE_3, **{name: "off"})
    assert alarms(steps(3, **values), off) == []


@pytest.mark.parametrize(
    "values",
    [
        {"stage1__entropy": 0.01},
        {"stage2__entropy": 0.001},  # θ′ is not the policy
        {"stage2__truncated_share": 0.5},
        {"zero_advantage_share": 0.95},
        {
            "stage1__reward": 0.0,
            "stage2__reward": 0.0,
        },  # nothing solved yet: no stage is worse than the other
        {"stage1__reward": 0.049, "stage2__reward": 0.0},  # chance, where hardly anything is solved
        {"stage1__reward": 0.5, "stage2__reward": 0.026},
        {"stage1__entropy": float("nan")},
    ],
)
def test_on_the_bound_is_not_over_it(values: dict[str, float]) -> None:
    assert alarms(steps(5, **values), PATIENCE_3) == []


def test_grpo_has_one_stage_and_nothing_to_halve() -> None:
    rows = [{"step": 1, "stage1/reward": 0.0, "stage1/entropy": 9.0, "stage1/truncated_share": 0.9}]
    found = alarms(rows, AlarmConfig(patience=1, entropy_above=3.0))
    assert [(alarm.name, alarm.over_exploring) for alarm in found] == [
        ("entropy_above", False), ("truncated_share_above", False),
    ]  # fmt: skip


def test_rows_without_the_metrics_raise_none() -> None:
    assert alarms([{"step": step} for step in range(5)], PATIENCE_3) == []


def test_every_bound_has_words_and_advice() -> None:
    bounds = {field.name for field in dataclasses.fields(AlarmConfig)} - {"action", "patience"}
    assert set(MESSAGES) == set(ADVICE) == bounds


# --- the guard --------------------------------------------------------------------------------------------------------


def feed(guard: AlarmMonitor, rows: list[dict[str, Any]]) -> list[tuple[int, str, str, str]]:
    return [
        (event.step, event.state, event.alarm.name, event.action)
        for row in rows
        for event in guard.events(row)
    ]


def test_it_speaks_once_when_an_alarm_starts_and_once_when_it_ends(tmp_path: Path) -> None:
    rows = [*steps(6, stage2__reward=0.0), *steps(4, 7), *steps(3, 11, stage2__reward=0.0)]
    assert feed(AlarmMonitor(PATIENCE_3, tmp_path), rows) == [
        (3, "on", "dead_stage_above", "warn"),
        (7, "off", "dead_stage_above", "warn"),
        (13, "on", "dead_stage_above", "warn"),
    ]


def test_halving_is_tried_again_when_patience_runs_out_again(tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENCE_3, action="halve_unlearn_lr")
    rows = [*steps(9, stage2__reward=0.0), *steps(1, 10)]
    said = feed(AlarmMonitor(config, tmp_path), rows)
    assert [(step, state) for step, state, _, _ in said] == [
        (3, "on"),
        (6, "still"),
        (9, "still"),
        (10, "off"),
    ]
    assert [action for *_, action in said] == ["halve_unlearn_lr"] * 3 + ["warn"]


def test_halving_never_answers_a_collapse(tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENCE_3, action="halve_unlearn_lr")
    assert feed(AlarmMonitor(config, tmp_path), steps(9, stage1__entropy=0.001)) == [
        (3, "on", "entropy_below", "warn")
    ]


@pytest.mark.parametrize("action", ["warn", "stop", "halve_unlearn_lr"])
def test_a_guard_that_begins_in_the_middle_says_what_one_from_the_start_says(
    action: str, tmp_path: Path
) -> None:
    config = dataclasses.replace(PATIENCE_3, action=action)
    rows = [
        *steps(8, stage2__reward=0.0),
        *steps(2, 9, stage1__entropy=0.001),
        *steps(5, 11, stage1__entropy=0.0),
    ]
    whole = feed(AlarmMonitor(config, tmp_path), rows)
    assert len(whole) >= 3
    for cut in range(len(rows) + 1):
        log = RunLog(tmp_path / str(cut))
        before = AlarmMonitor(config, log.folder)
        said = []
        for row in rows[:cut]:
            log.append(METRICS, row)
            events = before.events(row)
            log.append(ALARMS, *(event.row() for event in events))
            said += [(event.step, event.state, event.alarm.name, event.action) for event in events]
        assert said + feed(AlarmMonitor(config, log.folder), rows[cut:]) == whole


def test_a_bound_changed_on_resume_is_judged_anew(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, *steps(5, stage1__entropy=0.3))
    tighter = dataclasses.replace(PATIENCE_3, entropy_below=0.4)
    assert feed(AlarmMonitor(tighter, tmp_path), steps(1, 6, stage1__entropy=0.3)) == [
        (6, "on", "entropy_below", "warn")
    ]


def test_standing_alarms_are_those_last_said_to_be_on() -> None:
    rows = [
        {"step": 3, "alarm": "a", "state": "on"}, {"step": 4, "alarm": "b", "state": "on"},
        {"step": 6, "alarm": "a", "state": "still"}, {"step": 7, "alarm": "b", "state": "off"},
    ]  # fmt: skip
    assert active_alarms(rows) == {"a": rows[2]}


# --- in a run ---------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(**sections: dict[str, Any]) -> RunConfig:
    """Of two steps' patience, with a bound that every step breaks in stage 1 and 2."""
    tables: dict[str, Any] = {
        "task": {"num_evaluation": 1},
        "algorithm": {"group_size": 4, "max_new_tokens": 10, "kl_coef": 0.0, "gate": "always", "unlearn_lr": 1e-3},
        "training": {"num_steps": 5, "prompts_per_step": 2, "prompts_per_mini_batch": 2, "checkpoint_every": 1},
        "evaluation": {"num_samples": 1},
        "alarm": {
            "patience": 2, "entropy_above": 0.0, "truncated_share_above": "off", "zero_advantage_share_above": "off",
            "dead_stage_above": "off", "entropy_below": "off",
        },
    }  # fmt: skip
    return recipe.parse(
        RunConfig, {key: tables.get(key, {}) | sections.get(key, {}) for key in tables}, "test"
    )


def run(config: RunConfig, out: Path, resume: bool = False) -> str:
    screen = io.StringIO()
    build_trainer(config, out, resume, Progress(Console(file=screen, width=200))).run()
    return screen.getvalue()


def test_a_warning_is_on_the_screen_and_in_the_log(tmp_path: Path) -> None:
    screen = run(tiny(), tmp_path)
    assert screen.count("alarm at step 2: the entropy of stage 1 is") == 1
    assert "(entropy_above = 0)" in screen
    (row,) = read_records(tmp_path / ALARMS)
    (second,) = [metrics for metrics in read_records(tmp_path / METRICS) if metrics["step"] == 2]
    expected = {
        "step": 2,
        "state": "on",
        "alarm": "entropy_above",
        "bound": 0.0,
        "stage": 1,
        "action": "warn",
    }
    assert row == expected | {"value": second["stage1/entropy"]}


def test_stop_saves_the_step_says_how_to_go_on_and_does_not_stop_there_again(
    tmp_path: Path,
) -> None:
    config = tiny(alarm={"action": "stop"}, training={"checkpoint_every": 0})
    with pytest.raises(Interrupted) as caught:
        run(config, tmp_path)
    line = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert len(line.splitlines()) == 1
    for part in (
        "after step 2",
        "entropy_above",
        ADVICE["entropy_above"],
        "--resume",
        "--set alarm.action=warn",
    ):
        assert part in line
    latest = checkpoint.latest(tmp_path / "checkpoints")
    assert latest is not None
    assert checkpoint.step_of(latest) == 2
    changed = tiny(alarm={"action": "warn"}, training={"checkpoint_every": 0})
    run(changed, tmp_path, resume=True)
    assert [row["step"] for row in read_records(tmp_path / METRICS)] == [1, 2, 3, 4, 5]
    assert len(list(read_records(tmp_path / ALARMS))) == 1


def test_an_alarm_at_the_last_step_stops_nothing(tmp_path: Path) -> None:
    run(tiny(alarm={"action": "stop"}, training={"num_steps": 2}), tmp_path)
    assert (tmp_path / "final").is_dir()
    assert len(list(read_records(tmp_path / ALARMS))) == 1


def rates(folder: Path) -> list[float]:
    return [row["unlearn/lr"] for row in read_records(folder / METRICS)]


def test_halving_takes_hold_with_the_next_step_and_outlives_a_resume(tmp_path: Path) -> None:
    config = tiny(alarm={"action": "halve_unlearn_lr"})
    run(config, tmp_path / "whole")
    assert rates(tmp_path / "whole") == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4]
    assert [row["state"] for row in read_records(tmp_path / "whole" / ALARMS)] == ["on", "still"]
    short = dataclasses.replace(config, training=dataclasses.replace(config.training, num_steps=3))
    run(short, tmp_path / "cut")
    with (tmp_path / "cut" / ALARMS).open("a") as file:  # of steps after the checkpoint, and torn
        file.write(
            '{"step": 4, "state": "on", "alarm": "entropy_below", "value": 0, "bound": 1, "stage": null}\n{"st'
        )
    run(config, tmp_path / "cut", resume=True)
    assert rates(tmp_path / "cut") == rates(tmp_path / "whole")
    assert (tmp_path / "cut" / ALARMS).read_bytes() == (tmp_path / "whole" / ALARMS).read_bytes()


def test_with_an_automatic_rate_the_kl_target_is_halved(tmp_path: Path) -> None:
    automatic = {"unlearn_lr": "auto", "unlearn_kl_target": 1e-3}
    run(
        tiny(alarm={"action": "halve_unlearn_lr"}, algorithm=automatic, training={"num_steps": 3}),
        tmp_path,
    )
    first, second, third = (row["unlearn/kl"] for row in read_records(tmp_path / METRICS))
    assert first == pytest.approx(1e-3, rel=0.11)
    assert second == pytest.approx(1e-3, rel=0.11)
    assert third == pytest.approx(5e-4, rel=0.11)


def test_a_checkpoint_from_before_alarms_existed_goes_on_at_full_rate(tmp_path: Path) -> None:
    run(tiny(training={"num_steps": 1}), tmp_path)
    path = tmp_path / "checkpoints" / "step-000001" / checkpoint.STATE
    state = json.loads(path.read_text())
    assert state.pop("unlearn_scale") == 1.0
    path.write_text(json.dumps(state))
    shutil.rmtree(tmp_path / "final")
    run(tiny(training={"num_steps": 2}), tmp_path, resume=True)
    assert rates(tmp_path) == [1e-3, 1e-3]
