"""Evaluate: each problem once greedily and `num_samples` times drawn; then pass@1, pass@k and distinct answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eepo.evaluation.estimates import pass_at_k, powers_of_two
from eepo.protocols import Reward, RolloutEngine
from eepo.types import Completion, Prompt, Sampling

CHUNK = 64  # prompts between two reports of progress


@dataclass(frozen=True)
class ProblemResult:
    id: str
    greedy: bool
    correct: int  # of the drawn samples
    distinct: int  # different correct answers among them
    length: float
    truncated: int
    no_answer: int  # of the drawn samples: the grader found none


@dataclass(frozen=True)
class Evaluation:
    num_samples: int
    problems: list[ProblemResult]
    seconds: float

    def row(self, with_problems: bool) -> dict[str, Any]:
        """As it stands in the run log."""
        results, number = self.problems, len(self.problems)
        row: dict[str, Any] = {
            "num_problems": number,
            "num_samples": self.num_samples,
            "greedy": sum(result.greedy for result in results) / number,
            "mean": sum(result.correct for result in results) / number / self.num_samples,
            "pass@k": {str(k): self.pass_at(k) for k in powers_of_two(self.num_samples)},
            "distinct": sum(result.distinct for result in results) / number,
            "length": sum(result.length for result in results) / number,
            "truncated_share": sum(result.truncated for result in results)
            / number
            / self.num_samples,
            "no_answer_share": sum(result.no_answer for result in results)
            / number
            / self.num_samples,
            "seconds": self.seconds,
        }
        if with_problems:
            keys = ("id", "greedy", "correct", "distinct")
            row["problems"] = [{key: getattr(result, key) for key in keys} for result in results]
        return row

    def pass_at(self, k: int) -> float:
        return sum(
            pass_at_k(self.num_samples, result.correct, k) for result in self.problems
        ) / len(self.problems)


def evaluate(
    engine: RolloutEngine,
    reward: Reward,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """`engine` must hold the weights to be judged. `progress` is told how many more prompts are done."""
    started = time.perf_counter()
    greedy_sampling = Sampling(temperature=0.0, max_new_tokens=sampling.max_new_tokens)
    results: list[ProblemResult] = []
    for start in range(0, len(prompts), CHUNK):
        chunk = list(prompts[start : start + CHUNK])
        greedy = engine.generate(chunk, 1, greedy_sampling)
        groups = engine.generate(chunk, num_samples, sampling)
        results += _grade(reward, chunk, greedy, groups)
        progress(len(chunk))
    return Evaluation(num_samples, results, time.perf_counter() - started)


def _grade(
    reward: Reward,
    prompts: list[Prompt],
    greedy: list[list[Completion]],
    groups: list[list[Completion]],
) -> list[ProblemResult]:
    pairs = [
        (prompt, c.text)
        for prompt, one, group in zip(prompts, greedy, groups, strict=True)
        for c in one + group
    ]
    verdicts = iter(reward.grade([prompt for prompt, _ in pairs], [text for _, text in pairs]))
    results = []
    for prompt, group in zip(prompts, groups, strict=True):
        greedy_right = next(verdicts).correct
        drawn = [next(verdicts) for _ in group]
        results.append(
            ProblemResult(
                id=prompt.id,
                greedy=greedy_right,
                correct=sum(verdict.correct for verdict in drawn),
                distinct=len({verdict.answer for verdict in drawn if verdict.correct}),
                length=sum(len(completion.token_ids) for completion in group) / len(group),
                truncated=sum(not completion.finished for completion in group),
                no_answer=sum(verdict.answer is None for verdict in drawn),
            )
        )
    return results
