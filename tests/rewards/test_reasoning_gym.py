"""Checks reasoning-gym's scorers as a reward, on gold answers and on hostile ones."""

from __future__ import annotations

import pytest

pytest.importorskip("reasoning_gym")

from eepo.config import ReasoningGymConfig, RewardConfig
from eepo.rewards import build_reward, gym_datasets
from eepo.rewards.reasoning_gym import grade
from eepo.tasks.reasoning_gym import _entry
from eepo.types import Prompt, UserError

SLOW = {"futoshiki", "zebra_puzzles", "sokoban"}
HOSTILE = [
    "nan", "inf", "-inf", "1e999", "-1e999", "9" * 1900, "[]", "{}", "[[]]", "null", "()", "1/0",
    ",", "zzz", "0j", "[" * 900, "__import__('os').abort()", "\x00", "٣", "True",
]  # fmt: skip


def problem(name: str, index: int) -> dict[str, object]:
    return {"dataset": name, "entry": _entry(name, "reward", index)}


def boxed(answer: str) -> str:
    return f"So it must be \\boxed{{{answer}}}"


@pytest.mark.parametrize("name", sorted(gym_datasets.ALLOWED - SLOW))
def test_gold_earns_one_and_no_hostile_answer_always_does(name: str) -> None:
    problems = [problem(name, index) for index in range(4)]
    for gold in problems:
        answer = gold["entry"]["answer"]  # type: ignore[index]
        if answer.strip():
            assert grade(gold, boxed(answer)).reward == 1.0
    rewards = {text: [grade(gold, boxed(text)).reward for gold in problems] for text in HOSTILE}
    assert all(0.0 <= reward <= 1.0 for values in rewards.values() for reward in values)
    always_right = {text for text, values in rewards.items() if min(values) == 1.0}
    assert always_right <= {"True"}  # four yes-or-no questions may share one answer


def test_answer_must_be_marked_as_final() -> None:
    chain = problem("chain_sum", 0)
    gold = chain["entry"]["answer"]  # type: ignore[index]
    assert grade(chain, f"<answer>{gold}</answer>").reward == 1.0
    assert grade(chain, f"I add the numbers and think about {gold} for a while").answer is None


def test_partial_scores_are_the_reward() -> None:
    words = problem("word_sorting", 0)
    gold = words["entry"]["answer"].split(", ")  # type: ignore[index]
    verdict = grade(words, boxed(", ".join([gold[1], gold[0], *gold[2:]])))
    assert 0.0 < verdict.reward < 1.0
    assert verdict.reason.startswith("score 0.")


def test_answers_that_a_scorer_cannot_read_earn_nothing() -> None:
    """The scorer of prime_factorization raises on everything but whole numbers."""
    verdict = grade(problem("prime_factorization", 0), boxed("two times three"))
    assert (verdict.reward, verdict.answer) == (0.0, "two times three")
    assert "cannot read it: ValueError" in verdict.reason


def test_refused_data_sets_are_not_graded() -> None:
    with pytest.raises(UserError, match='"n_queens" of reasoning-gym is refused'):
        grade({"dataset": "n_queens", "entry": {"answer": "", "metadata": {}}}, boxed("1"))


def test_an_answer_that_exhausts_memory_affects_only_itself() -> None:
    """A scorer that expands a decimal with a huge exponent would take all memory."""
    reward = build_reward(RewardConfig(num_workers=1), ReasoningGymConfig())
    power, chain = problem("power_function", 0), problem("chain_sum", 1)
    prompts = [Prompt("a", "", (), power), Prompt("b", "", (), chain)]
    texts = [boxed("1e999999999999"), boxed(chain["entry"]["answer"])]  # type: ignore[index]
    try:
        verdicts = reward.grade(prompts, texts)
    finally:
        reward.close()  # type: ignore[attr-defined]
    assert verdicts[0].reward < 1.0
    assert verdicts[1].reward == 1.0
