"""The alarms of a run: which bounds the last steps violated, and when to report them.

The rules are pure functions of rows of metrics.jsonl. alarms.jsonl records what was reported, so
a resumed run reports and does the same as a run that was never stopped.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.config import AlarmConfig
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import ALARMS, METRICS

Row = dict[str, Any]

# A stage is dead below this share of the best stage's reward. A noisy stage is sometimes lucky,
# so exactly 0 would be too strict.
DEAD_SHARE = 0.05
UNLEARN_LESS = "a lower unlearn_lr or unlearn_kl_target keeps later stages closer to the policy"
MESSAGES = {
    "entropy_below": "the policy's entropy is {value:.3g}",
    "entropy_above": "the entropy of stage {stage} is {value:.3g}",
    "truncated_share_above": "{value:.3g} of the completions of stage {stage} are truncated",
    "zero_advantage_share_above": "{value:.3g} of the groups have equal rewards",
    "mismatch_kl_above": "the KL between engine and policy is {value:.3g} per token",
    "lost_share_above": "{value:.3g} of the successes of stage {stage} hardly reach the update",
    "dead_stage_above": "stage {stage} earns almost no reward while another earns {value:.3g}",
}
ADVICE = {
    "entropy_below": (
        "the policy has collapsed: start again from an earlier checkpoint (model.path = its "
        "folder) with a lower learning_rate or failure_weight"
    ),
    "entropy_above": (
        f"the completions are noise: {UNLEARN_LESS}; a smaller entropy_coef or learning_rate "
        "may help, too"
    ),
    "truncated_share_above": (
        f"raise max_new_tokens; if only later stages are truncated, {UNLEARN_LESS}"
    ),
    "zero_advantage_share_above": (
        "nothing is learned: the problems are too easy or too hard, or the grader is wrong"
    ),
    "mismatch_kl_above": (
        "they round differently: use the same rollout.dtype and model.compute_dtype, "
        "or float32 for both, or add +engine_correction to the recipe"
    ),
    "lost_share_above": (
        'the importance ratio cancels what this stage finds: algorithm.credit = "full" counts it'
    ),
    "dead_stage_above": f"half of the samples are wasted: {UNLEARN_LESS}",
}


@dataclass(frozen=True)
class Alarm:
    """A violated bound."""

    name: str  # the knob of [alarm] with the bound
    value: float
    bound: float
    stage: int | None = None  # the first stage that violates it
    over_exploring: bool = False  # unlearning less would help

    def __str__(self) -> str:
        message = MESSAGES[self.name].format(value=self.value, stage=self.stage)
        return f"{message} ({self.name} = {self.bound:g})"


def alarms(rows: Sequence[Row], config: AlarmConfig) -> list[Alarm]:
    """Return the bounds that the last `patience` rows violated.

    Every row must violate the bound; for rewards, their mean must.
    """
    if len(rows) < config.patience:
        return []
    window = rows[-config.patience :]
    candidates = (
        _low_entropy(window, config.entropy_below),
        _any_stage("entropy", window, config.entropy_above),
        _any_stage("truncated_share", window, config.truncated_share_above),
        _above("zero_advantage_share", window, config.zero_advantage_share_above),
        _above("mismatch_kl", window, config.mismatch_kl_above),
        _lost_credit(window, config.lost_share_above),
        _dead_stage(window, config.dead_stage_above),
    )
    return [alarm for alarm in candidates if alarm is not None]


def _low_entropy(window: Sequence[Row], bound: Any) -> Alarm | None:
    """Check stage 1 only: unlearning raises the entropy of later stages."""
    if bound == "off" or not all(row.get("stage1/entropy", bound) < bound for row in window):
        return None
    return Alarm("entropy_below", window[-1]["stage1/entropy"], bound)


def _any_stage(metric: str, window: Sequence[Row], bound: Any) -> Alarm | None:
    """Return the first stage above the bound.

    Unlearning does not cause truncation in stage 1, so it is not the remedy there.
    """
    if bound == "off":
        return None
    stages = _stages(window[-1])
    for stage in stages:
        key = f"stage{stage}/{metric}"
        if all(row.get(key, bound) > bound for row in window):
            unlearning = stage > 1 or (metric == "entropy" and len(stages) > 1)
            return Alarm(f"{metric}_above", window[-1][key], bound, stage, unlearning)
    return None


def _above(metric: str, window: Sequence[Row], bound: Any) -> Alarm | None:
    if bound == "off" or not all(row.get(metric, bound) > bound for row in window):
        return None
    return Alarm(f"{metric}_above", window[-1][metric], bound)


def _lost_credit(window: Sequence[Row], bound: Any) -> Alarm | None:
    """Return the first later stage whose `lost_share` is above the bound in every row."""
    if bound == "off":
        return None
    for stage in _stages(window[-1])[1:]:
        key = f"stage{stage}/lost_share"
        if all(row.get(key, bound) > bound for row in window):
            return Alarm("lost_share_above", window[-1][key], bound, stage)
    return None


def _dead_stage(window: Sequence[Row], bound: Any) -> Alarm | None:
    """Return a stage with almost no reward while the mean of another is above the bound."""
    stages = _stages(window[-1])
    means = {
        stage: sum(row.get(f"stage{stage}/reward", 0.0) for row in window) / len(window)
        for stage in stages
    }
    best = max(means.values(), default=0.0)
    if bound == "off" or not best > bound:
        return None
    dead = [stage for stage in stages if means[stage] < DEAD_SHARE * best]
    if not dead:
        return None
    return Alarm("dead_stage_above", best, bound, dead[0], over_exploring=dead[0] > 1)


def _stages(row: Row) -> list[int]:
    matches = (re.fullmatch(r"stage(\d+)/reward", key) for key in row)
    return sorted(int(match[1]) for match in matches if match)


@dataclass(frozen=True)
class Event:
    """An alarm that starts, that is acted upon again, or that ends."""

    step: int
    state: str  # on | still | off
    alarm: Alarm
    action: str  # what is done now; warn: only the message

    def row(self) -> Row:
        """Return the row for alarms.jsonl."""
        return {
            "step": self.step,
            "state": self.state,
            "alarm": self.alarm.name,
            "value": self.alarm.value,
            "bound": self.alarm.bound,
            "stage": self.alarm.stage,
            "action": self.action,
        }

    def line(self) -> str:
        """Return the line for the console."""
        if self.state == "off":
            return f"alarm ended at step {self.step}: {self.alarm.name}"
        consequence = {
            "warn": "",
            "stop": "; stopping",
            "halve_unlearn_lr": "; unlearning is halved from the next step on",
        }[self.action]
        verb = " continues" if self.state == "still" else ""
        return f"alarm{verb} at step {self.step}: {self.alarm}{consequence}"


class AlarmMonitor:
    """Receives the row of every step and returns the alarms that start, continue or end."""

    def __init__(self, config: AlarmConfig, folder: Path) -> None:
        self.config = config
        self._rows: deque[Row] = deque(_read(folder / METRICS), maxlen=config.patience)
        self._active = active_alarms(_read(folder / ALARMS))

    def events(self, row: Row) -> list[Event]:
        self._rows.append(row)
        current = {alarm.name: alarm for alarm in alarms(list(self._rows), self.config)}
        events = [*self._started(row["step"], current), *self._ended(row["step"], current)]
        self._active = active_alarms([*self._active.values(), *(event.row() for event in events)])
        return events

    def _started(self, step: int, current: dict[str, Alarm]) -> Iterator[Event]:
        """Yield new alarms, and old ones that the last halving did not end within `patience`."""
        for name, alarm in current.items():
            action = self._action(alarm)
            if name not in self._active:
                yield Event(step, "on", alarm, action)
            elif action == "halve_unlearn_lr" and self._patience_is_over(name, step):
                yield Event(step, "still", alarm, action)

    def _patience_is_over(self, name: str, step: int) -> bool:
        return step - self._active[name]["step"] >= self.config.patience

    def _ended(self, step: int, current: dict[str, Alarm]) -> Iterator[Event]:
        for name, row in self._active.items():
            if name not in current:
                alarm = Alarm(name, row["value"], row["bound"], row["stage"])
                yield Event(step, "off", alarm, "warn")

    def _action(self, alarm: Alarm) -> str:
        """Halve unlearning only if unlearning is the cause: it would worsen a collapse."""
        if self.config.action == "halve_unlearn_lr" and not alarm.over_exploring:
            return "warn"
        return self.config.action


def active_alarms(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the last row of every alarm in alarms.jsonl that has not ended."""
    last = {row["alarm"]: row for row in rows}
    return {name: row for name, row in last.items() if row["state"] != "off"}


def _read(path: Path) -> Iterator[Row]:
    return read_records(path) if path.exists() else iter(())
