"""Grades real maths problems. EEPO_DATA_DIR is a folder of .jsonl files with problem and answer."""

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


@pytest.mark.skipif(not FILES, reason="EEPO_DATA_DIR is not a folder with maths data")
def test_correct_answers_are_rewarded_and_changed_answers_are_not() -> None:
    reward = build_reward(RewardConfig(name="math", num_workers=2), DatasetConfig())
    for path in FILES:
        problems = read_problems(str(path))
        random.Random(0).shuffle(problems)
        answers = [problem.answer for problem in problems[:200]]
        changed = [a + "7" if a[-1].isdigit() else f"{a} + 1" for a in answers]
        prompts = [Prompt("", "", (), answer) for answer in answers]
        on_answers = reward.grade(prompts, [rf"So it is \boxed{{{a}}}." for a in answers])
        on_changed = reward.grade(prompts, [rf"So it is \boxed{{{a}}}." for a in changed])
        rejected = [a for a, v in zip(answers, on_answers, strict=True) if not v.correct]
        accepted = [
            pair for *pair, v in zip(answers, changed, on_changed, strict=True) if v.correct
        ]
        assert rejected == []
        assert accepted == []
