"""Outcome-based exploration: counts of answers, the bonus, and the history in checkpoints."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from eepo.algorithm import outcome_bonus, rollout_advantages
from eepo.algorithm.outcome_bonus import AnswerHistory, centred_bonus
from eepo.config import AlgorithmConfig
from eepo.types import Prompt, Rollout, Verdict

EPOCHS = itertools.count()
OPTIONS = AlgorithmConfig(outcome_bonus=0.5, group_size=4)


def rollout_of(answers: dict[str, list[str | None]]) -> Rollout:
    """Return a rollout with these answers. Ids differ in every epoch, so they are all new."""
    rollout = Rollout([Prompt(f"train/{next(EPOCHS)}", name, (1,)) for name in answers])
    rollout.verdicts = [[Verdict(0.0, answer) for answer in group] for group in answers.values()]
    rollout.rewards = [[0.0] * len(group) for group in answers.values()]
    return rollout


def centred(values: list[float]) -> list[float]:
    return [0.5 * (value - sum(values) / len(values)) for value in values]


def test_the_bonus_is_the_inverse_root_of_how_often_the_answer_was_given() -> None:
    history = AnswerHistory(OPTIONS)
    first = history.bonus(rollout_of({"a": ["7", "7", "7", "9"]}))
    assert first is not None
    assert first[0] == pytest.approx(centred([1 / math.sqrt(3)] * 3 + [1.0]))
    second = history.bonus(rollout_of({"a": ["7", "8", "9", None], "b": ["7", "7", "7", "7"]}))
    assert second is not None
    assert second[0] == pytest.approx(centred([1 / 2, 1.0, 1 / math.sqrt(2), 0.0]))
    assert second[1] == [0.0] * 4  # equal answers: nothing to prefer


def test_a_group_that_always_fails_learns_from_a_new_answer() -> None:
    rollout = rollout_of({"a": ["7", "7", "7", "9"]})
    bonus = AnswerHistory(OPTIONS).bonus(rollout)
    [advantages] = rollout_advantages(rollout.rewards, [1, 1, 1, 1], OPTIONS, bonus)
    assert advantages[3] > 0 > advantages[0]
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)


def test_failure_weight_applies_to_the_sum_of_advantage_and_bonus() -> None:
    rollout = rollout_of({"a": ["7", "7", "7", "9"]})
    options = AlgorithmConfig(outcome_bonus=0.5, group_size=4, failure_weight=0.0)
    bonus = AnswerHistory(options).bonus(rollout)
    [advantages] = rollout_advantages(rollout.rewards, [1, 1, 1, 1], options, bonus)
    assert advantages[:3] == [0.0] * 3
    assert advantages[3] > 0


def test_without_a_bonus_nothing_is_counted() -> None:
    history = AnswerHistory(AlgorithmConfig())
    assert history.bonus(rollout_of({"a": ["7", "8"]})) is None
    assert history.state() == {}


def test_a_resumed_history_gives_the_same_bonus() -> None:
    first = AnswerHistory(OPTIONS)
    first.bonus(rollout_of({"a": ["7", "7", "8", "x" * 100_000], "b": ["1", "2", "3", "\ud800"]}))
    state = json.loads(json.dumps(first.state()))
    assert len(json.dumps(state)) < 1000  # answers are hostile: only digests are kept
    second = AnswerHistory(OPTIONS)
    second.load_state(state)
    step = {"b": ["1", "9", "\ud800", "4"], "a": ["7", "8", "9", None]}
    assert second.bonus(rollout_of(step)) == first.bonus(rollout_of(step))
    assert second.state() == first.state()


def test_a_later_step_does_not_change_a_state() -> None:
    """The trainer keeps the state before each step. It does not copy all counters."""
    history = AnswerHistory(OPTIONS)
    history.bonus(rollout_of({"a": ["7"] * 4, "b": ["8"] * 4}))
    state = history.state()
    before = json.dumps(state)
    history.bonus(rollout_of({"a": ["7", "7", "9", "9"], "c": ["1"] * 4}))
    assert json.dumps(state) == before
    shared = [counts for counts in history.state()["answers"].values() if len(counts) == 1]
    assert any(counts is other for counts in shared for other in state["answers"].values())
    history.load_state(state)
    history.bonus(rollout_of({"a": ["7"] * 4}))
    assert json.dumps(state) == before


def test_the_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome_bonus, "MAX_PROMPTS", 2)
    history = AnswerHistory(OPTIONS)
    for name in ("a", "b", "a", "c"):
        history.bonus(rollout_of({name: ["1", "2"]}))
    counts = [sum(answers.values()) for answers in history.state()["answers"].values()]
    assert counts == [4, 2]  # of "a" and "c"


def test_the_mean_of_a_group_is_zero() -> None:
    assert sum(centred_bonus([1, 4, 9, 0])) == pytest.approx(0.0)
    assert centred_bonus([3, 3, 3]) == [0.0] * 3
