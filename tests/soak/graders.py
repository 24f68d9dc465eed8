"""Grades hostile answers, and grades with hostile rewards."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from cases import check_cases
from hostile_rewards import HOSTILE_REWARDS, RUN_VARIABLE, strays
from scenarios import Workspace
from table import Findings

from eepo.config import RewardConfig
from eepo.rewards.isolation import PooledReward
from eepo.types import Prompt, UserError

REWARDS_PER_TRY = 4


def try_hostile_rewards(workspace: Workspace, rng: random.Random) -> Findings:
    """Grade two completions with some of the functions. None of their processes may stay."""
    run = f"soak-{rng.getrandbits(64):016x}"

    def check(name: str) -> None:
        os.environ[RUN_VARIABLE] = run
        os.chdir(Path(__file__).parent)
        if wrong := wrong_outcome(name):
            raise AssertionError(wrong)

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
