"""The collapse alarm: which bounds the last steps broke, and when to speak of it.

Judging is pure, over rows of metrics.jsonl. What was said before is in alarms.jsonl, so a resumed run says, and does,
what one never stopped would have.
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

DEAD = 0.05  # of what the best stage earns; exactly nothing is rare, since a noisy stage still has some luck
SMALLER_STEP = "a lower unlearn_lr or unlearn_kl_target makes later stages stray less"
SAID = {
    "entropy_below": "the policy's entropy is {value:.3g}",
    "entropy_above": "the entropy of stage {stage} is {value:.3g}",
    "truncated_share_above": "of stage {stage}'s completions {value:.3g} are cut off",
    "zero_advantage_share_above": "of the groups {value:.3g} have rewards that are all equal",
    "mismatch_kl_above": "what sampled and what is trained differ by a KL of {value:.3g} a token",
    "dead_stage_above": "stage {stage} earns next to nothing while another earns {value:.3g}",
}
ADVICE = {
    "entropy_below": "the policy repeats itself: a larger entropy_coef, clip_high or unlearn_lr keeps it exploring",
    "entropy_above": f"it writes noise: {SMALLER_STEP}, and a smaller entropy_coef or learning_rate helps",
    "truncated_share_above": f"raise max_new_tokens; if only later stages are cut off, {SMALLER_STEP}",
    "zero_advantage_share_above": "nothing is learned: the problems are too easy or too hard, or the grader is wrong",
    "mismatch_kl_above": "they round differently: make rollout.dtype and model.compute_dtype one, or both float32",
    "dead_stage_above": f"half of the samples are wasted: {SMALLER_STEP}",
}


@dataclass(frozen=True)
class Alarm:
    name: str  # the knob of [alarm] that holds the bound
    value: float
    bound: float
    stage: int | None = None  # the first one that broke it
    over_exploring: bool = False  # forgetting less would help

    def __str__(self) -> str:
        said = SAID[self.name].format(value=self.value, stage=self.stage)
        return f"{said} ({self.name} = {self.bound:g})"


def alarms(rows: Sequence[Row], config: AlarmConfig) -> list[Alarm]:
    """The bounds that the last `patience` rows broke: each of them, or for rewards their mean."""
    if len(rows) < config.patience:
        return []
    window = rows[-config.patience :]
    found = (
        _low_entropy(window, config.entropy_below),
        _any_stage("entropy_above", "entropy", window, config.entropy_above),
        _any_stage(
            "truncated_share_above", "truncated_share", window, config.truncated_share_above
        ),
        _over("zero_advantage_share", window, config.zero_advantage_share_above),
        _over("mismatch_kl", window, config.mismatch_kl_above),
        _dead_stage(window, config.dead_stage_above),
    )
    return [alarm for alarm in found if alarm is not None]


def _low_entropy(window: Sequence[Row], bound: Any) -> Alarm | None:
    """Of stage 1: later stages are sampled from weights that were made to be less sure."""
    if bound == "off" or not all(row.get("stage1/entropy", bound) < bound for row in window):
        return None
    return Alarm("entropy_below", window[-1]["stage1/entropy"], bound)


def _any_stage(name: str, metric: str, window: Sequence[Row], bound: Any) -> Alarm | None:
    """The first stage over the bound. Long completions of stage 1 are the policy's own, not what forgetting did."""
    if bound == "off":
        return None
    for stage in _stages(window[-1]):
        key = f"stage{stage}/{metric}"
        if all(row.get(key, bound) > bound for row in window):
            forgetting = stage > 1 or (metric == "entropy" and len(_stages(window[-1])) > 1)
            return Alarm(name, window[-1][key], bound, stage, forgetting)
    return None


def _over(metric: str, window: Sequence[Row], bound: Any) -> Alarm | None:
    if bound == "off" or not all(row.get(metric, bound) > bound for row in window):
        return None
    return Alarm(f"{metric}_above", window[-1][metric], bound)


def _dead_stage(window: Sequence[Row], bound: Any) -> Alarm | None:
    """A stage that earned hardly anything over the window, while another's mean there is over the bound."""
    stages = _stages(window[-1])
    means = {
        stage: sum(row.get(f"stage{stage}/reward", 0.0) for row in window) / len(window)
        for stage in stages
    }
    best = max(means.values(), default=0.0)
    if bound == "off" or not best > bound:
        return None
    dead = [stage for stage in stages if means[stage] < DEAD * best]
    return (
        Alarm("dead_stage_above", best, bound, dead[0], over_exploring=dead[0] > 1)
        if dead
        else None
    )


def _stages(row: Row) -> list[int]:
    return sorted(
        int(found[1]) for key in row if (found := re.fullmatch(r"stage(\d+)/reward", key))
    )


@dataclass(frozen=True)
class Event:
    """An alarm that starts, that is acted upon again, or that ends."""

    step: int
    state: str  # on | still | off
    alarm: Alarm
    action: str  # what is done about it now; warn: nothing but these words

    def row(self) -> Row:
        """For alarms.jsonl."""
        said = {"alarm": self.alarm.name, "value": self.alarm.value, "bound": self.alarm.bound}
        return (
            {"step": self.step, "state": self.state}
            | said
            | {"stage": self.alarm.stage, "action": self.action}
        )

    def line(self) -> str:
        """For the console."""
        if self.state == "off":
            return f"alarm over at step {self.step}: {self.alarm.name}"
        done = {
            "warn": "",
            "stop": "; stopping",
            "halve_unlearn_lr": "; unlearning is halved from the next step on",
        }
        return f"alarm{' goes on' * (self.state == 'still')} at step {self.step}: {self.alarm}{done[self.action]}"


class Guard:
    """Told every step's row; says what starts, goes on and ends."""

    def __init__(self, config: AlarmConfig, folder: Path) -> None:
        self.config = config
        self._rows: deque[Row] = deque(_read(folder / METRICS), maxlen=config.patience)
        self._standing = standing(_read(folder / ALARMS))

    def events(self, row: Row) -> list[Event]:
        """What is new with this step."""
        self._rows.append(row)
        found = {alarm.name: alarm for alarm in alarms(list(self._rows), self.config)}
        events = [*self._begun(row["step"], found), *self._ended(row["step"], found)]
        self._standing = standing([*self._standing.values(), *(event.row() for event in events)])
        return events

    def _begun(self, step: int, found: dict[str, Alarm]) -> Iterator[Event]:
        """New ones; and those that a halving did not end in `patience` steps are due for the next."""
        for name, alarm in found.items():
            action = self._action(alarm)
            if name not in self._standing:
                yield Event(step, "on", alarm, action)
            elif (
                action == "halve_unlearn_lr"
                and step - self._standing[name]["step"] >= self.config.patience
            ):
                yield Event(step, "still", alarm, action)

    def _ended(self, step: int, found: dict[str, Alarm]) -> Iterator[Event]:
        for name, said in self._standing.items():
            if name not in found:
                yield Event(
                    step, "off", Alarm(name, said["value"], said["bound"], said["stage"]), "warn"
                )

    def _action(self, alarm: Alarm) -> str:
        """Forgetting less mends only what forgetting did: it would make a collapse worse."""
        if self.config.action == "halve_unlearn_lr" and not alarm.over_exploring:
            return "warn"
        return self.config.action


def standing(rows: Iterable[Row]) -> dict[str, Row]:
    """Of the rows of alarms.jsonl: those alarms that are on, by name, each with what was last said of it."""
    last = {row["alarm"]: row for row in rows}
    return {name: row for name, row in last.items() if row["state"] != "off"}


def _read(path: Path) -> Iterator[Row]:
    return read_records(path) if path.exists() else iter(())
