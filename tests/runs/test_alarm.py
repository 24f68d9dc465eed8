"""Alarms: which metrics violate a bound, when an alarm is reported, and what it does."""

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
from eepo.experiments.lines import read_lines
from eepo.runs import checkpoint
from eepo.runs.alarm import ADVICE, MESSAGES, AlarmMonitor, active_alarms, alarms
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import ALARMS, METRICS, RunLog
from eepo.trainer import Interrupted
from eepo.types import UserError

HEALTHY = {
    "stage1/reward": 0.5,
    "stage2/reward": 0.4,
    "stage1/entropy": 0.6,
    "stage2/entropy": 0.8,
    "stage1/truncated_share": 0.1,
    "stage2/truncated_share": 0.2,
    "zero_advantage_share": 0.4,
}
PATIENCE_3 = AlarmConfig(patience=3, entropy_above=3.0)


def steps(number: int, first: int = 1, **values: float) -> list[dict[str, Any]]:
    """Return rows of healthy metrics, except for `values` (`stage1__entropy` is stage1/entropy)."""
    changed = {key.replace("__", "/"): value for key, value in values.items()}
    return [{"step": first + index} | HEALTHY | changed for index in range(number)]


# --- bounds


def test_a_healthy_run_has_no_alarms() -> None:
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
        ({"stage2__lost_share": 0.4}, "lost_share_above", 0.4, 2, False),
    ],
)
def test_a_bound_violated_for_patience_steps_in_a_row_is_an_alarm(
    values: dict[str, float], name: str, value: float, stage: int | None, over_exploring: bool
) -> None:
    (alarm,) = alarms(steps(3, **values), PATIENCE_3)
    assert (alarm.name, alarm.stage, alarm.over_exploring) == (name, stage, over_exploring)
    assert alarm.value == pytest.approx(value)
    assert alarm.bound == getattr(PATIENCE_3, name)
    assert name in str(alarm)
    assert alarms(steps(2, **values), PATIENCE_3) == []
    not_in_a_row = [*steps(2, **values), *steps(1, 3), *steps(2, 4, **values)]
    assert alarms(not_in_a_row, PATIENCE_3) == []
    off = dataclasses.replace(PATIENCE_3, **{name: "off"})
    assert alarms(steps(3, **values), off) == []


@pytest.mark.parametrize(
    "values",
    [
        {"stage1__entropy": 0.01},
        {"stage2__entropy": 0.001},  # only stage 1 shows the entropy of the policy
        {"stage2__truncated_share": 0.5},
        {"zero_advantage_share": 0.95},
        # Nothing is solved yet, so no stage is worse than the other.
        {"stage1__reward": 0.0, "stage2__reward": 0.0},
        # Hardly anything is solved, so a stage without reward is chance.
        {"stage1__reward": 0.049, "stage2__reward": 0.0},
        {"stage1__reward": 0.5, "stage2__reward": 0.026},
        {"stage1__entropy": float("nan")},
        {"stage2__lost_share": 0.1},
        {"stage1__lost_share": 0.9},  # θ sampled it: only later updates of the step can lower it
    ],
)
def test_values_on_or_inside_a_bound_are_no_alarm(values: dict[str, float]) -> None:
    assert alarms(steps(5, **values), PATIENCE_3) == []


def test_with_one_stage_unlearning_is_never_the_cause() -> None:
    rows = [{"step": 1, "stage1/reward": 0.0, "stage1/entropy": 9.0, "stage1/truncated_share": 0.9}]
    raised = alarms(rows, AlarmConfig(patience=1, entropy_above=3.0))
    assert [(alarm.name, alarm.over_exploring) for alarm in raised] == [
        ("entropy_above", False),
        ("truncated_share_above", False),
    ]


def test_rows_without_the_metrics_are_no_alarm() -> None:
    assert alarms([{"step": step} for step in range(5)], PATIENCE_3) == []


def test_every_bound_has_a_message_and_advice() -> None:
    bounds = {field.name for field in dataclasses.fields(AlarmConfig)} - {"action", "patience"}
    assert set(MESSAGES) == set(ADVICE) == bounds


def test_by_default_the_broken_runs_of_a_study_are_reported_and_the_others_are_not() -> None:
    """The records have one row per step. Runs of EEPO as published learned to write noise."""
    folder = Path(__file__).parents[2] / "docs" / "results" / "maths"
    runs = [
        run for name in ("large", "large_greedy") for run in read_lines(folder / f"{name}.jsonl")
    ]
    first = {}
    for run in runs:
        rows = run["metrics"]
        raised = [{alarm.name for alarm in alarms(rows[:end], AlarmConfig())} for end in range(21)]
        steps_on = [end for end, names in enumerate(raised) if "entropy_above" in names]
        first[run["method"], run["seed"]] = min(steps_on, default=None)
    assert first == {
        ("base", 0): None,
        ("grpo", 0): None,
        ("grpo", 1): None,
        ("eepo_full", 0): None,
        ("eepo_paper", 0): 8,
        ("eepo_paper", 1): 8,
    }


# --- the monitor


def events_of(monitor: AlarmMonitor, rows: list[dict[str, Any]]) -> list[tuple[int, str, str, str]]:
    return [
        (event.step, event.state, event.alarm.name, event.action)
        for row in rows
        for event in monitor.events(row)
    ]


def test_an_alarm_is_reported_once_at_its_start_and_once_at_its_end(tmp_path: Path) -> None:
    rows = [*steps(6, stage2__reward=0.0), *steps(4, 7), *steps(3, 11, stage2__reward=0.0)]
    assert events_of(AlarmMonitor(PATIENCE_3, tmp_path), rows) == [
        (3, "on", "dead_stage_above", "warn"),
        (7, "off", "dead_stage_above", "warn"),
        (13, "on", "dead_stage_above", "warn"),
    ]


def test_halving_is_repeated_if_the_alarm_lasts_another_patience(tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENCE_3, action="halve_unlearn_lr")
    rows = [*steps(9, stage2__reward=0.0), *steps(1, 10)]
    events = events_of(AlarmMonitor(config, tmp_path), rows)
    states = [(step, state) for step, state, _, _ in events]
    assert states == [(3, "on"), (6, "still"), (9, "still"), (10, "off")]
    assert [action for *_, action in events] == ["halve_unlearn_lr"] * 3 + ["warn"]


def test_a_collapse_never_halves_unlearning(tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENCE_3, action="halve_unlearn_lr")
    assert events_of(AlarmMonitor(config, tmp_path), steps(9, stage1__entropy=0.001)) == [
        (3, "on", "entropy_below", "warn")
    ]


@pytest.mark.parametrize("action", ["warn", "stop", "halve_unlearn_lr"])
def test_a_monitor_of_a_resumed_run_reports_the_same_events(action: str, tmp_path: Path) -> None:
    config = dataclasses.replace(PATIENCE_3, action=action)
    rows = [
        *steps(8, stage2__reward=0.0),
        *steps(2, 9, stage1__entropy=0.001),
        *steps(5, 11, stage1__entropy=0.0),
    ]
    uninterrupted = events_of(AlarmMonitor(config, tmp_path), rows)
    assert len(uninterrupted) >= 3
    for cut in range(len(rows) + 1):
        log = RunLog(tmp_path / str(cut))
        monitor, before = AlarmMonitor(config, log.folder), []
        for row in rows[:cut]:
            log.append(METRICS, row)
            events = monitor.events(row)
            log.append(ALARMS, *(event.row() for event in events))
            before += [(e.step, e.state, e.alarm.name, e.action) for e in events]
        after = events_of(AlarmMonitor(config, log.folder), rows[cut:])
        assert before + after == uninterrupted


def test_a_bound_changed_on_resume_applies_to_earlier_rows_too(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(METRICS, *steps(5, stage1__entropy=0.3))
    tighter = dataclasses.replace(PATIENCE_3, entropy_below=0.4)
    assert events_of(AlarmMonitor(tighter, tmp_path), steps(1, 6, stage1__entropy=0.3)) == [
        (6, "on", "entropy_below", "warn")
    ]


def test_active_alarms_are_those_that_have_not_ended() -> None:
    rows = [
        {"step": 3, "alarm": "a", "state": "on"},
        {"step": 4, "alarm": "b", "state": "on"},
        {"step": 6, "alarm": "a", "state": "still"},
        {"step": 7, "alarm": "b", "state": "off"},
    ]
    assert active_alarms(rows) == {"a": rows[2]}


# --- in a run


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(**sections: dict[str, Any]) -> RunConfig:
    """Return a recipe with a patience of 2 and an entropy bound that every step violates."""
    tables: dict[str, Any] = {
        "task": {"num_evaluation": 1},
        "algorithm": {
            "group_size": 4,
            "max_new_tokens": 10,
            "kl_coef": 0.0,
            "gate": "always",
            "unlearn_lr": 1e-3,
        },
        "training": {
            "num_steps": 5,
            "prompts_per_step": 2,
            "prompts_per_mini_batch": 2,
            "checkpoint_every": 1,
        },
        "evaluation": {"num_samples": 1},
        "alarm": {
            "patience": 2,
            "entropy_above": 0.0,
            "entropy_below": "off",
            "truncated_share_above": "off",
            "zero_advantage_share_above": "off",
            "dead_stage_above": "off",
        },
    }
    return recipe.parse(
        RunConfig, {key: tables.get(key, {}) | sections.get(key, {}) for key in tables}, "test"
    )


def run(config: RunConfig, out: Path, resume: bool = False) -> str:
    screen = io.StringIO()
    build_trainer(config, out, resume, Progress(Console(file=screen, width=200))).run()
    return screen.getvalue()


def test_a_warning_is_printed_and_recorded(tmp_path: Path) -> None:
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


def test_stop_saves_a_checkpoint_and_prints_how_to_resume(
    tmp_path: Path,
) -> None:
    config = tiny(alarm={"action": "stop"}, training={"checkpoint_every": 0})
    with pytest.raises(Interrupted) as caught:
        run(config, tmp_path)
    line = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert len(line.splitlines()) == 1
    for part in ("after step 2", "entropy_above", "--resume", "--set alarm.action=warn"):
        assert part in line
    assert ADVICE["entropy_above"] in line
    latest = checkpoint.latest(tmp_path / "checkpoints")
    assert latest is not None
    assert checkpoint.step_of(latest) == 2
    changed = tiny(alarm={"action": "warn"}, training={"checkpoint_every": 0})
    run(changed, tmp_path, resume=True)
    assert [row["step"] for row in read_records(tmp_path / METRICS)] == [1, 2, 3, 4, 5]
    assert len(list(read_records(tmp_path / ALARMS))) == 1


def test_an_alarm_at_the_last_step_does_not_stop_the_run(tmp_path: Path) -> None:
    run(tiny(alarm={"action": "stop"}, training={"num_steps": 2}), tmp_path)
    assert (tmp_path / "final").is_dir()
    assert len(list(read_records(tmp_path / ALARMS))) == 1


def rates(folder: Path) -> list[float]:
    return [row["unlearn/lr"] for row in read_records(folder / METRICS)]


@pytest.mark.slow
def test_halving_starts_with_the_next_step_and_survives_a_resume(tmp_path: Path) -> None:
    config = tiny(alarm={"action": "halve_unlearn_lr"})
    run(config, tmp_path / "full")
    assert rates(tmp_path / "full") == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4]
    assert [row["state"] for row in read_records(tmp_path / "full" / ALARMS)] == ["on", "still"]
    short = dataclasses.replace(config, training=dataclasses.replace(config.training, num_steps=3))
    run(short, tmp_path / "resumed")
    lost = {"step": 4, "state": "on", "alarm": "entropy_below", "value": 0, "bound": 1}
    with (tmp_path / "resumed" / ALARMS).open("a") as file:  # after the checkpoint, and unfinished
        file.write(json.dumps(lost | {"stage": None}) + '\n{"st')
    run(config, tmp_path / "resumed", resume=True)
    assert rates(tmp_path / "resumed") == rates(tmp_path / "full")
    assert (tmp_path / "resumed" / ALARMS).read_bytes() == (tmp_path / "full" / ALARMS).read_bytes()


@pytest.mark.slow
def test_with_unlearn_lr_auto_the_kl_target_is_halved(tmp_path: Path) -> None:
    automatic = {"unlearn_lr": "auto", "unlearn_kl_target": 1e-3}
    run(
        tiny(alarm={"action": "halve_unlearn_lr"}, algorithm=automatic, training={"num_steps": 3}),
        tmp_path,
    )
    first, second, third = (row["unlearn/kl"] for row in read_records(tmp_path / METRICS))
    assert first == pytest.approx(1e-3, rel=0.11)
    assert second == pytest.approx(1e-3, rel=0.11)
    assert third == pytest.approx(5e-4, rel=0.11)


def test_a_checkpoint_without_unlearn_scale_resumes_at_the_full_rate(tmp_path: Path) -> None:
    run(tiny(training={"num_steps": 1}), tmp_path)
    path = tmp_path / "checkpoints" / "step-000001" / checkpoint.STATE
    state = json.loads(path.read_text())
    assert state.pop("unlearn_scale") == 1.0
    path.write_text(json.dumps(state))
    (path.parent / "checksums.json").unlink()  # older versions wrote none
    shutil.rmtree(tmp_path / "final")
    run(tiny(training={"num_steps": 2}), tmp_path, resume=True)
    assert rates(tmp_path) == [1e-3, 1e-3]
