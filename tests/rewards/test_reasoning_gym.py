"""reasoning-gym's scorers as a reward: gold answers earn 1, hostile ones earn nothing and break nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("reasoning_gym")

from eepo.config import ReasoningGymConfig, RewardConfig
from eepo.rewards import build_reward, gym_datasets
from eepo.rewards.reasoning_gym import judge
from eepo.tasks.reasoning_gym import _entry
from eepo.types import Prompt, UserError

SLOW = {"futoshiki", "zebra_puzzles", "sokoban"}
HOSTILE = [
    "nan", "inf", "-inf", "1e999", "-1e999", "9" * 1900, "[]", "{}", "[[]]", "null", "()", "1/0", ",", "zzz", "0j",
    "[" * 900, "__import__('os').abort()", "\x00", "٣", "True",
]  # fmt: skip


def problem(name: str, index: int) -> dict[str, object]:
    return {"dataset": name, "entry": _entry(name, "reward", index)}


def boxed(answer: str) -> str:
    return f"So it must be \\boxed{{{answer}}}"


@pytest.mark.parametrize("name", sorted(gym_datasets.ALLOWED - SLOW))
def test_gold_earns_one_and_nothing_hostile_earns_it_every_time(name: str) -> None:
    problems = [problem(name, index) for index in range(4)]
    golds = [
        judge(p, boxed(p["entry"]["answer"])) for p in problems if p["entry"]["answer"].strip()
    ]  # type: ignore
    assert [verdict.reward for verdict in golds] == [1.0] * len(golds)
    paid = {text: [judge(p, boxed(text)).reward for p in problems] for text in HOSTILE}
    assert all(0.0 <= reward <= 1.0 for rewards in paid.values() for reward in rewards)
    always = {text for text, rewards in paid.items() if min(rewards) == 1.0}
    assert always <= {"True"}  # a yes-or-no question may have four times the same answer


def test_an_answer_must_be_given_as_one() -> None:
    chain = problem("chain_sum", 0)
    gold = chain["entry"]["answer"]  # type: ignore[index]
    assert judge(chain, f"<answer>{gold}</answer>").reward == 1.0
    assert judge(chain, f"I add the numbers and think about {gold} for a while").answer is None


def test_partial_scores_are_the_reward() -> None:
    words = problem("word_sorting", 0)
    gold = words["entry"]["answer"].split(", ")  # type: ignore[index]
    verdict = judge(words, boxed(", ".join([gold[1], gold[0], *gold[2:]])))
    assert 0.0 < verdict.reward < 1.0
    assert verdict.reason.startswith("score 0.")


def test_what_a_scorer_cannot_read_earns_nothing() -> None:
    """prime_factorization's scorer raises on anything but whole numbers."""
    verdict = judge(problem("prime_factorization", 0), boxed("two times three"))
    assert (verdict.reward, verdict.answer) == (0.0, "two times three")
    assert "cannot read it: ValueError" in verdict.reason


def test_refused_scorers_are_refused_here_too() -> None:
    with pytest.raises(UserError, match='"n_queens" of reasoning-gym is refused'):
        judge({"dataset": "n_queens", "entry": {"answer": "", "metadata": {}}}, boxed("1"))


def test_in_its_grading_process_a_bomb_costs_only_itself() -> None:
    """A decimal with a huge exponent, written out, would take all memory."""
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
