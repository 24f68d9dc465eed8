"""Grades completions in the background, while the GPU goes on sampling."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from eepo.protocols import Reward
from eepo.types import Completion, Prompt, Verdict


class BackgroundGrader:
    """Runs a reward in one thread, in the order of submission."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grading")

    def submit(
        self, reward: Reward, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
    ) -> Future[list[Verdict]]:
        """Start to grade all groups. The verdicts are flat, group by group."""
        owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
        texts = [completion.text for group in groups for completion in group]
        return self._executor.submit(reward.grade, owners, texts)
