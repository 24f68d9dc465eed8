"""reasoning-gym as a task: pure, endless, and never asking in training what evaluation asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from eepo.config import ReasoningGymConfig
from eepo.tasks import build_task
from eepo.tasks.reasoning_gym import CHUNK, MAX_DRAWS, ReasoningGym, _entry
from eepo.types import UserError


@pytest.fixture
def task(byte_tokenizer: Callable[..., Any]) -> Callable[..., ReasoningGym]:
    def build(order_seed: int = 0, **knobs: Any) -> ReasoningGym:
        return ReasoningGym(
            ReasoningGymConfig(**({"num_evaluation": 5} | knobs)), byte_tokenizer(), order_seed
        )

    return build


def questions(prompts: list[Any]) -> list[str]:
    return [prompt.answer["entry"]["question"] for prompt in prompts]


def test_the_registry_builds_it(byte_tokenizer: Callable[..., Any]) -> None:
    assert isinstance(build_task(ReasoningGymConfig(), byte_tokenizer(), 0), ReasoningGym)


def test_a_prompt_holds_its_question_and_all_that_its_scorer_needs(
    task: Callable[..., ReasoningGym],
) -> None:
    prompt = task(dataset="chain_sum").training_prompts(0, 1)[0]
    entry = prompt.answer["entry"]
    assert prompt.answer["dataset"] == "chain_sum"
    assert entry["question"] in prompt.text
    assert "\\boxed{}" in prompt.text
    assert len(prompt.token_ids) == len(prompt.text.encode()) + 1
    assert json.loads(json.dumps(prompt.answer)) == prompt.answer


def test_training_is_a_pure_function_of_position_across_chunks(
    task: Callable[..., ReasoningGym],
) -> None:
    whole = task().training_prompts(CHUNK - 3, 6)
    parts = [
        task().training_prompts(position, 1)[0]
        for position in reversed(range(CHUNK - 3, CHUNK + 3))
    ]
    assert whole == parts[::-1]
    assert len({prompt.id for prompt in whole}) == len(set(questions(whole))) == 6


def test_seeds_move_training_and_only_the_tasks_own_moves_evaluation(
    task: Callable[..., ReasoningGym],
) -> None:
    first, second, moved = task(0), task(1), task(0, seed=1)
    assert set(questions(first.training_prompts(0, 5))).isdisjoint(
        questions(second.training_prompts(0, 5))
    )
    assert first.evaluation_sets() == second.evaluation_sets()
    assert questions(first.evaluation_sets()["chain_sum"]) != questions(
        moved.evaluation_sets()["chain_sum"]
    )


def test_evaluation_is_never_asked_in_training_even_where_problems_are_few(
    task: Callable[..., ReasoningGym],
) -> None:
    """lcm's numbers are small: 300 of its problems and 500 of them share some."""
    few = task(dataset="lcm", num_evaluation=300)
    held_out = questions(few.evaluation_sets()["lcm"])
    assert len(set(held_out)) == 300
    unfiltered = [few._draw("train/0", position, set())["question"] for position in range(CHUNK)]
    assert set(unfiltered) & set(held_out), "the test must meet a problem that has to be replaced"
    assert set(questions(few.training_prompts(0, CHUNK))).isdisjoint(held_out)


def test_answers_that_nobody_could_give_are_left_out(task: Callable[..., ReasoningGym]) -> None:
    """ab: now and then all tokens cancel, and the gold answer is empty."""
    many = task(dataset="ab")
    raw = [many._draw("train/0", position, set()) for position in range(CHUNK)]
    assert all(entry["answer"].strip() for entry in raw)


def test_too_few_problems_are_said(task: Callable[..., ReasoningGym]) -> None:
    """As if evaluation held every problem that there is."""
    small = task(dataset="gcd", num_evaluation=3)
    all_of_them = {_entry("gcd", "0/evaluation/0", 0)["question"]}
    all_of_them |= {
        _entry("gcd", "0/evaluation/substitutes/0", index)["question"] for index in range(MAX_DRAWS)
    }
    with pytest.raises(
        UserError, match=r'"gcd" has too few different problems for task.num_evaluation = 3; ask'
    ):
        small._draw("evaluation", 0, all_of_them)


def test_fractions_in_an_entry_become_text(task: Callable[..., ReasoningGym]) -> None:
    for prompt in task(dataset="gsm_symbolic").training_prompts(0, 60):
        assert json.loads(json.dumps(prompt.answer)) == prompt.answer


def test_demonstrations_give_the_answer_in_a_box(task: Callable[..., ReasoningGym]) -> None:
    prompt, text = task().demonstrations(3, 1)[0]
    assert text == f"\\boxed{{{prompt.answer['entry']['answer']}}}"


def test_refused_data_sets_are_refused_when_the_task_is_built(
    task: Callable[..., ReasoningGym],
) -> None:
    with pytest.raises(
        UserError, match='"puzzle24" of reasoning-gym is refused: its scorer can evaluate'
    ):
        task(dataset="puzzle24")
