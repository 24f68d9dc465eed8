"""Real maths data, where there is some: EEPO_DATA_DIR names a folder of .jsonl files (problem, answer in each line)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from eepo.config import DatasetConfig, RewardConfig
from eepo.rewards import build_reward
from eepo.tasks.problems import read_problems
from eepo.types import Prompt

FOLDER = Path(os.environ.get("EEPO_DATA_DIR") or "no-such-folder")
FILES = sorted(
    path for path in FOLDER.glob("*.jsonl") if '"answer"' in path.open(encoding="utf-8").readline()
)


@pytest.mark.skipif(not FILES, reason="EEPO_DATA_DIR names no folder with maths data")
def test_golds_earn_their_reward_and_others_do_not() -> None:
    reward = build_reward(RewardConfig(name="math", num_workers=2), DatasetConfig())
    for path in FILES:
        problems = read_problems(str(path))
        random.Random(0).shuffle(problems)
        golds = [problem.answer for problem in problems[:200]]
        others = [gold + "7" if gold[-1].isdigit() else f"{gold} + 1" for gold in golds]
        prompts = [Prompt("", "", (), gold) for gold in golds]
        own = reward.grade(prompts, [rf"So it is \boxed{{{gold}}}." for gold in golds])
        wrong = reward.grade(prompts, [rf"So it is \boxed{{{other}}}." for other in others])
        assert [gold for gold, verdict in zip(golds, own, strict=True) if not verdict.correct] == []
        assert [
            pair
            for pair, verdict in zip(zip(golds, others, strict=True), wrong, strict=True)
            if verdict.correct
        ] == []
