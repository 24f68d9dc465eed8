"""The data types that all modules share. None of them knows a model, a file or a recipe."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

MAX_REWARD = 1e9  # advantages are computed in float32, where squares of huge rewards overflow


class UserError(Exception):
    """An error that the user can fix. The CLI shows it as one line, without a traceback.

    Characters that cannot be printed are escaped, so user input cannot break the line.
    """

    def __init__(self, line: str) -> None:
        super().__init__(printable(line))


def printable(text: str) -> str:
    """Escape characters that could change the terminal or the line, such as ESC and newlines."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else _escaped(character) for character in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; without a text, the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


@dataclass(frozen=True)
class Prompt:
    """One problem as the model sees it.

    `id` must be unique: the random numbers of the prompt's completions are derived from it.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: Any = None  # ground truth, in the form that the task's reward needs
    # Columns of the data set's row for a user's reward function. Values must be JSON.
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RowColumns:
    """Selects the columns of a data set that a reward function receives."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    all: bool = False
    gold: bool = True  # the reward needs the gold answer
    # Names of parameters that receive something else. A column of that name is an error.
    ambiguous: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return self.all or name in self.required or name in self.optional


NO_COLUMNS = RowColumns()


@dataclass(frozen=True)
class Completion:
    """One sampled continuation. `token_ids` ends with the end-of-sequence token if `finished`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # under the weights that sampled, at the sampling temperature
    text: str
    finished: bool  # False: truncated at the length limit
    entropies: tuple[float, ...] = ()  # per token; empty if the engine does not report them

    def entropy_sum(self) -> float:
        """Sum the token entropies. Without `entropies`, estimate the sum from the logprobs."""
        return sum(self.entropies) if self.entropies else -sum(self.logprobs)


@dataclass(frozen=True)
class Verdict:
    """A grader's decision on one completion."""

    reward: float  # from -1e9 to 1e9; other numbers, such as numpy's, are converted
    answer: str | None  # the extracted answer, equal for equal answers; None: no answer found
    reason: str = ""  # a few words: what matched, or why it did not
    label: str = ""  # a kind of completion, such as its strategy; shares of labels are logged

    def __post_init__(self) -> None:
        """Refuse values that would fail later, in a place that does not name the reward."""
        if type(self.reward) is not float or not abs(self.reward) <= MAX_REWARD:
            object.__setattr__(self, "reward", _as_reward(self.reward))
        if not isinstance(self.answer, str | None):
            _refuse("Verdict.answer", "a str or None", self.answer)
        if not isinstance(self.reason, str):
            _refuse("Verdict.reason", "a str", self.reason)
        if not isinstance(self.label, str):
            _refuse("Verdict.label", "a str", self.label)

    @property
    def correct(self) -> bool:
        """True for full reward. A partial reward does not count as accuracy."""
        return self.reward >= 1


def _refuse(name: str, allowed: str, value: object) -> NoReturn:
    raise UserError(f"{name} must be {allowed}, got {reprlib.repr(value)}")


def _as_reward(value: Any) -> float:
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan  # not a text
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array or a huge integer
        number = math.nan
    if not abs(number) <= MAX_REWARD:  # also true for nan
        raise UserError(f"the reward must be a number from -1e9 to 1e9, got {reprlib.repr(value)}")
    return number


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a completion to imitate, for a supervised warm start."""

    prompt: Prompt
    text: str
    # The probability that the policy should give to the first token of `text`.
    # Above 0 and up to 1. None: maximise its likelihood, as for all other tokens.
    first_token_probability: float | None = None

    def __post_init__(self) -> None:
        target = self.first_token_probability
        if target is not None and not 0 < target <= 1:
            _refuse("Demonstration.first_token_probability", "above 0 and up to 1", target)


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    The random numbers of a completion depend only on (seed, stream, prompt id, sample index,
    token position), not on batching.
    """

    temperature: float  # 0 is greedy
    max_new_tokens: int
    seed: int = 0
    stream: str = ""  # purpose, e.g. "train/17": other streams have other random numbers
    first_sample: int = 0  # sample index of the first completion; stage 2 continues after stage 1


@dataclass
class Rollout:
    """The completions of one step: Q groups of G completions, in the order of the stages."""

    prompts: list[Prompt]  # [Q]
    groups: list[list[Completion]] = field(default_factory=list)  # [Q][G]
    rewards: list[list[float]] = field(default_factory=list)  # [Q][G]
    verdicts: list[list[Verdict]] = field(default_factory=list)  # [Q][G]
    stages: list[int] = field(default_factory=list)  # [G], from 1: the stage of each column
    from_policy: list[bool] = field(default_factory=list)  # [G]: sampled from θ, not from θ′
    advantages: list[list[float]] = field(default_factory=list)  # [Q][G]
    # (q, g) -> log-probability under θ′, for the completions that the probe has measured
    logprobs_after: dict[tuple[int, int], float] = field(default_factory=dict)
    unlearned: bool = False  # the engine holds θ′ ≠ θ
    # verdicts of stages whose grading still runs
    pending: list[Future[list[Verdict]]] = field(default_factory=list)
    # groups that dynamic sampling has replaced or could not use, and the groups before that
    dropped: list[list[Completion]] = field(default_factory=list)
    first_round: Rollout | None = None

    def add_stage(
        self, stage: int, groups: list[list[Completion]], verdicts: Future[list[Verdict]]
    ) -> None:
        """Append n completions to every group. The flat `verdicts` [Q · n] may arrive later."""
        for row, group in enumerate(groups):
            if stage == 1:
                self.groups.append([])
                self.rewards.append([])
                self.verdicts.append([])
            self.groups[row] += group
        self.stages += [stage] * len(groups[0])
        self.from_policy += [not self.unlearned] * len(groups[0])
        self.pending.append(verdicts)

    def wait_for_rewards(self) -> None:
        """Wait until all completions are graded, and fill in `rewards` and `verdicts`."""
        while self.pending:
            flat = self.pending.pop(0).result()
            num_samples = len(flat) // len(self.prompts)
            for row in range(len(self.prompts)):
                graded = flat[row * num_samples : (row + 1) * num_samples]
                self.rewards[row] += [verdict.reward for verdict in graded]
                self.verdicts[row] += graded

    def record_unlearning(self, logprobs: Mapping[int, float]) -> None:
        """Note that the next stage is sampled from θ′, and keep log-probabilities under θ′.

        These are given by index in `pairs` of all groups so far.
        """
        self.unlearned = True
        group_size = len(self.stages)
        self.logprobs_after |= {divmod(i, group_size): value for i, value in logprobs.items()}

    def replace_group(self, row: int, other: Rollout, other_row: int) -> None:
        """Replace the group in `row` by a group of `other`, which has the same stages."""
        self.dropped.append(self.groups[row])
        for name in ("prompts", "groups", "rewards", "verdicts"):
            getattr(self, name)[row] = getattr(other, name)[other_row]
        self.from_policy = [
            a and b for a, b in zip(self.from_policy, other.from_policy, strict=True)
        ]
        kept = {at: value for at, value in self.logprobs_after.items() if at[0] != row}
        fresh = {at: value for at, value in other.logprobs_after.items() if at[0] == other_row}
        self.logprobs_after = kept | {(row, column): value for (_, column), value in fresh.items()}

    def completions(self) -> list[Completion]:
        """Return all completions, group by group."""
        return [completion for group in self.groups for completion in group]

    def pairs(self, rows: Iterable[int]) -> list[tuple[Prompt, Completion]]:
        """Return (prompt, completion) for all completions of the prompts in `rows`."""
        return [(self.prompts[row], completion) for row in rows for completion in self.groups[row]]

    def mini_batches(self, size: int) -> list[range]:
        """Split the prompts into ranges of at most `size`, one per optimizer step."""
        rows = range(len(self.prompts))
        return [rows[first : first + size] for first in range(0, len(rows), size)]

    def of_stage(self, stage: int) -> list[tuple[Completion, float]]:
        """Return the completions of one stage with their rewards. Wait for these if needed."""
        self.wait_for_rewards()
        return [
            (completion, reward)
            for group, rewards in zip(self.groups, self.rewards, strict=True)
            for completion, reward, at in zip(group, rewards, self.stages, strict=True)
            if at == stage
        ]


def mean_entropy(completions: Sequence[Completion]) -> float:
    """Average the entropy over all tokens."""
    return sum(c.entropy_sum() for c in completions) / sum(len(c.token_ids) for c in completions)
