"""Grades completions in the background, while the GPU goes on sampling."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from eepo.protocols import Reward
from eepo.types import Completion, Prompt, Verdict


class BackgroundGrader:
    """Runs a reward in the order of submission, one batch at a time.

    Its threads are daemons, so that Python can end while a batch is graded. It would wait for the
    threads of a `ThreadPoolExecutor`.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def submit(
        self, reward: Reward, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
    ) -> Future[list[Verdict]]:
        """Start to grade all groups. The verdicts are flat, group by group."""
        owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
        texts = [completion.text for group in groups for completion in group]
        verdicts: Future[list[Verdict]] = Future()
        previous = self._last

        def grade() -> None:
            if previous:
                previous.join()
            try:
                verdicts.set_result(reward.grade(owners, texts))
            except BaseException as error:
                verdicts.set_exception(error)

        self._last = threading.Thread(target=grade, name="grading", daemon=True)
        self._last.start()
        return verdicts
