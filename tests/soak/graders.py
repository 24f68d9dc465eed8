"""Grades hostile answers, and grades with hostile rewards."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from cases import check_cases
from hostile_answers import hostile_answers
from hostile_rewards import HOSTILE_REWARDS, RUN_VARIABLE, strays
from scenarios import Workspace
from table import Failure, Findings

from eepo.config import RewardConfig
from eepo.rewards import POOLED
from eepo.rewards.isolation import PooledReward
from eepo.types import Prompt, UserError, Verdict

REWARDS_PER_TRY = 4
ANSWERS_PER_TRY = 100
ANSWER_SECONDS = 2.0
BUSY_TRIES = 4  # more gradings of an answer that took too long; the fastest one counts


def try_hostile_answers(workspace: Workspace, rng: random.Random) -> Findings:
    """Grade wrong answers one by one with the math grader, which must reject each in time."""
    reward: list[PooledReward] = []  # its process starts in the fork, with the first answer

    def check(pair: tuple[str, str]) -> float:
        if not reward:
            reward.append(PooledReward(POOLED["math"], RewardConfig(num_workers=1)))
            grade(reward[0], ("1", "2"))  # the start takes a second
        verdict, seconds = grade(reward[0], pair)
        for _ in range(BUSY_TRIES):  # the machine may be busy
            if seconds <= ANSWER_SECONDS:
                break
            verdict, again = grade(reward[0], pair)
            seconds = min(seconds, again)
        if verdict.reward > 0:
            raise Failure("wrong accepts", verdict.reason)
        if seconds > ANSWER_SECONDS:
            raise Failure("hangs", f"{seconds:.2f} s")
        return seconds

    pairs = list(hostile_answers(rng.getrandbits(32), ANSWERS_PER_TRY))
    return check_cases(check, pairs, lambda pair: f"gold {pair[0][:140]!r}, {pair[1][:140]!r}")


def grade(reward: PooledReward, pair: tuple[str, str]) -> tuple[Verdict, float]:
    gold, text = pair
    started = time.monotonic()
    [verdict] = reward.grade([Prompt("", "", (), gold)], [text])
    return verdict, time.monotonic() - started


def try_hostile_rewards(workspace: Workspace, rng: random.Random) -> Findings:
    """Grade two completions with some of the functions. None of their processes may stay."""
    run = f"soak-{rng.getrandbits(64):016x}"

    def check(name: str) -> None:
        os.environ[RUN_VARIABLE] = run
        os.chdir(Path(__file__).parent)
        if wrong := wrong_outcome(name):
            raise Failure("wrong accepts", wrong)

    names = rng.sample(sorted(HOSTILE_REWARDS), REWARDS_PER_TRY)
    findings = check_cases(check, names)
    time.sleep(0.1)
    if left := strays(run):
        findings.add("differences", f"{names}: processes {left} are left")
    return findings


def wrong_outcome(name: str) -> str:
    """Return what is wrong with the verdicts or the error of a hostile reward."""
    expected = HOSTILE_REWARDS[name]
    limits: dict[str, Any] = {"cpu_seconds": 0.2, "wall_seconds": 2.0, "memory_mb": 256}
    reward = PooledReward(f"hostile_rewards:{name}", RewardConfig(num_workers=1, **limits))
    try:
        verdicts = reward.grade([Prompt("", "", (), "1")] * 2, ["a", "b" * 100_000])
    except UserError as error:
        return "" if expected.error and expected.error in str(error) else f"{name}: {error}"
    finally:
        reward.close()
    if expected.error:
        return f"{name}: no error, but {verdicts}"
    wrong = [v for v in verdicts if not expected.allows(v.reward, v.reason)]
    return f"{name}: {wrong}" if wrong else ""
