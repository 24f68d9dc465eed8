"""The nouns. Everything above speaks in these; none of them knows a model, a file or a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class UserError(Exception):
    """Something the user can mend: shown as one line, without a traceback. What he typed cannot break that line."""

    def __init__(self, line: str) -> None:
        super().__init__(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        )


@dataclass(frozen=True)
class Prompt:
    """One problem as the model sees it. `id` owns the random numbers of its completions, so it must be unique."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: Any = None  # ground truth, whatever the task's reward needs


@dataclass(frozen=True)
class Completion:
    """One sampled continuation. `token_ids` ends with the end-of-sequence token when `finished`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[
        float, ...
    ]  # of the sampled tokens, under the weights that sampled, at the sampling temperature
    text: str
    finished: bool  # False: cut off at the length limit
    entropies: tuple[
        float, ...
    ] = ()  # of the full next-token distributions; empty if the engine cannot tell

    def entropy_sum(self) -> float:
        """Of its tokens; without `entropies`, an unbiased estimate from the sampled tokens."""
        return sum(self.entropies) if self.entropies else -sum(self.logprobs)


@dataclass(frozen=True)
class Verdict:
    """What a grader says of one completion."""

    reward: float
    answer: (
        str | None
    )  # the answer it gives, in a form that is equal for equal answers; None: no answer was found
    reason: str = ""  # in a few words: what matched, or why not

    @property
    def correct(self) -> bool:
        """Fully: a grader may pay a little for a wrong answer, and accuracy must not count that."""
        return self.reward >= 1


@dataclass(frozen=True)
class Sampling:
    """How to sample. A row's draws depend on (seed, stream, prompt id, sample index, position) and nothing else."""

    temperature: float  # 0 is greedy
    max_new_tokens: int
    seed: int = 0
    stream: str = (
        ""  # what this sampling is for, e.g. "train/17": keeps draws of different steps apart
    )
    first_sample: int = (
        0  # index of the first sample of each prompt: stage 2 goes on where stage 1 ended
    )


@dataclass
class Rollout:
    """What one step sampled: for each of Q prompts its group of G completions, stage after stage."""

    prompts: list[Prompt]  # [Q]
    groups: list[list[Completion]] = field(default_factory=list)  # [Q][G]
    rewards: list[list[float]] = field(default_factory=list)  # [Q][G]
    verdicts: list[list[Verdict]] = field(default_factory=list)  # [Q][G], the rewards' reasons
    stages: list[int] = field(
        default_factory=list
    )  # [G], from 1: which stage each place of a group comes from
    advantages: list[list[float]] = field(default_factory=list)  # [Q][G]
    forgotten: dict[tuple[int, int], float] = field(
        default_factory=dict
    )  # (q, g): log-probability under θ′, of some

    grading: list[Future[list[Verdict]]] = field(
        default_factory=list
    )  # of stages that have no rewards yet

    def add_stage(
        self, stage: int, groups: list[list[Completion]], verdicts: Future[list[Verdict]]
    ) -> None:
        """Append n completions to every group; the flat `verdicts`, [Q · n], may come later."""
        for row, group in enumerate(groups):
            if stage == 1:
                self.groups.append([])
                self.rewards.append([])
                self.verdicts.append([])
            self.groups[row] += group
        self.stages += [stage] * len(groups[0])
        self.grading.append(verdicts)

    def settle(self) -> None:
        """Wait for verdicts that are still to come."""
        while self.grading:
            flat = self.grading.pop(0).result()
            num_samples = len(flat) // len(self.prompts)
            for row in range(len(self.prompts)):
                graded = flat[row * num_samples : (row + 1) * num_samples]
                self.rewards[row] += [verdict.reward for verdict in graded]
                self.verdicts[row] += graded

    def mean_logprobs(
        self,
    ) -> list[list[float]]:  # [Q][G], a token: a long completion is not rare for being long
        return [
            [sum(one.logprobs) / max(1, len(one.logprobs)) for one in group]
            for group in self.groups
        ]

    def record_forgetting(self, logprobs_after: Mapping[int, float]) -> None:
        """`logprobs_after`: under θ′, by place in all `pairs` so far."""
        self.forgotten |= {
            divmod(place, len(self.stages)): value for place, value in logprobs_after.items()
        }

    def pairs(self, rows: Iterable[int]) -> list[tuple[Prompt, Completion]]:
        """Every completion of the prompts in `rows`, beside its prompt, group by group."""
        return [(self.prompts[row], completion) for row in rows for completion in self.groups[row]]

    def of_stage(self, stage: int) -> list[tuple[Completion, float]]:
        """Completions of one stage with their rewards, once these are there."""
        self.settle()
        return [
            (completion, reward)
            for group, rewards in zip(self.groups, self.rewards, strict=True)
            for completion, reward, own in zip(group, rewards, self.stages, strict=True)
            if own == stage
        ]


def mean_entropy(completions: Sequence[Completion]) -> float:
    """Over all their tokens."""
    return sum(c.entropy_sum() for c in completions) / sum(len(c.token_ids) for c in completions)
