"""Evaluates a policy during training: greedy accuracy, pass@k and distinct answers of a prompt set.

Each problem gets one greedy completion and `num_samples` sampled ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eepo.evaluation.estimates import pass_at_k, powers_of_two
from eepo.protocols import Reward, RolloutEngine
from eepo.types import Completion, Prompt, Sampling

PROMPTS_PER_CALL = 64  # at least; progress is reported after each call of the engine
CALL_SIZE = 4  # `rows_per_call`, relative to the rows that an engine samples at the same time


@dataclass(frozen=True)
class ProblemResult:
    """Holds the results of one problem. Only `greedy` is not about the sampled completions."""

    id: str
    greedy: bool  # whether the greedy completion is correct
    correct: int  # correct completions
    distinct: int  # different correct answers
    length: float  # mean number of tokens
    truncated: int  # completions that were cut off at the length limit
    no_answer: int  # completions in which the grader found no answer


@dataclass(frozen=True)
class SetResult:
    """Holds the results of all problems of one prompt set."""

    num_samples: int
    problems: list[ProblemResult]
    seconds: float

    def row(self, with_problems: bool) -> dict[str, Any]:
        """Return the row for the run log; `with_problems` adds the results of each problem."""
        row: dict[str, Any] = {
            "num_problems": len(self.problems),
            "num_samples": self.num_samples,
            "greedy": self._mean("greedy"),
            "mean": self._mean("correct") / self.num_samples,
            "pass@k": {str(k): self.pass_at(k) for k in powers_of_two(self.num_samples)},
            "distinct": self._mean("distinct"),
            "length": self._mean("length"),
            "truncated_share": self._mean("truncated") / self.num_samples,
            "no_answer_share": self._mean("no_answer") / self.num_samples,
            "seconds": self.seconds,
        }
        if with_problems:
            keys = ("id", "greedy", "correct", "distinct")
            row["problems"] = [{key: getattr(p, key) for key in keys} for p in self.problems]
        return row

    def pass_at(self, k: int) -> float:
        estimates = [pass_at_k(self.num_samples, p.correct, k) for p in self.problems]
        return sum(estimates) / len(estimates)

    def _mean(self, field: str) -> float:
        return sum(getattr(problem, field) for problem in self.problems) / len(self.problems)


def rows_per_call(engine: RolloutEngine) -> int:
    """Return how many completions a call should sample to keep `engine` busy; 0: any number.

    An engine with continuous batching replaces finished rows by waiting ones. Only at the end of a
    call does it wait for the longest completion, so a few large calls are faster than many small
    ones. Such an engine has the attribute `continuous_rows`: the rows it samples at the same time.
    """
    return CALL_SIZE * getattr(engine, "continuous_rows", 0)


def _no_progress(num_prompts: int) -> None:
    pass


@dataclass
class Evaluator:
    """Samples from the weights that `engine` holds, and grades the completions with `reward`."""

    engine: RolloutEngine
    reward: Reward

    def evaluate(
        self,
        sets: Mapping[str, Sequence[Prompt]],
        num_samples: int,
        sampling: Sampling,
        advance: Callable[[int], None] = _no_progress,
    ) -> dict[str, SetResult]:
        """Return the result of each named prompt set.

        `sampling` applies to the `num_samples` sampled completions. The greedy completion has the
        same length limit. `advance` is called with the number of prompts done since its last call.
        """
        return {
            name: self._evaluate_set(prompts, num_samples, sampling, advance)
            for name, prompts in sets.items()
        }

    def _evaluate_set(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        advance: Callable[[int], None],
    ) -> SetResult:
        started = time.perf_counter()
        greedy_sampling = Sampling(temperature=0.0, max_new_tokens=sampling.max_new_tokens)
        results: list[ProblemResult] = []
        per_call = max(PROMPTS_PER_CALL, rows_per_call(self.engine) // num_samples)
        for start in range(0, len(prompts), per_call):
            chunk = list(prompts[start : start + per_call])
            greedy = self.engine.generate(chunk, 1, greedy_sampling)
            samples = self.engine.generate(chunk, num_samples, sampling)
            results += self._grade(chunk, greedy, samples)
            advance(len(chunk))
        return SetResult(num_samples, results, time.perf_counter() - started)

    def _grade(
        self,
        prompts: Sequence[Prompt],
        greedy: Sequence[list[Completion]],
        samples: Sequence[list[Completion]],
    ) -> list[ProblemResult]:
        """Grade all completions in one call, so that the grader can work in parallel."""
        groups = [first + sampled for first, sampled in zip(greedy, samples, strict=True)]
        owners = [p for p, group in zip(prompts, groups, strict=True) for _ in group]
        verdicts = iter(self.reward.grade(owners, [c.text for group in groups for c in group]))
        results = []
        for prompt, completions in zip(prompts, samples, strict=True):
            greedy_verdict = next(verdicts)
            sample_verdicts = [next(verdicts) for _ in completions]
            results.append(
                ProblemResult(
                    id=prompt.id,
                    greedy=greedy_verdict.correct,
                    correct=sum(v.correct for v in sample_verdicts),
                    distinct=len({v.answer for v in sample_verdicts if v.correct}),
                    length=sum(len(c.token_ids) for c in completions) / len(completions),
                    truncated=sum(not c.finished for c in completions),
                    no_answer=sum(v.answer is None for v in sample_verdicts),
                )
            )
        return results
