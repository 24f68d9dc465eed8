"""Checks that reasoning-gym problems are reproducible, endless and held out for evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from eepo.config import ReasoningGymConfig
from eepo.tasks import build_task
from eepo.tasks.reasoning_gym import CHUNK_SIZE, MAX_DRAWS, ReasoningGym, _entry
from eepo.types import UserError


@pytest.fixture
def task(byte_tokenizer: Callable[..., Any]) -> Callable[..., ReasoningGym]:
    def build(order_seed: int = 0, **knobs: Any) -> ReasoningGym:
        config = ReasoningGymConfig(**({"num_evaluation": 5} | knobs))
        return ReasoningGym(config, byte_tokenizer(), order_seed)

    return build


def questions(prompts: list[Any]) -> list[str]:
    return [prompt.answer["entry"]["question"] for prompt in prompts]


def test_build_task_builds_it(byte_tokenizer: Callable[..., Any]) -> None:
    assert isinstance(build_task(ReasoningGymConfig(), byte_tokenizer(), 0), ReasoningGym)


def test_prompts_have_the_question_and_the_scorers_input(
    task: Callable[..., ReasoningGym],
) -> None:
    prompt = task(dataset="chain_sum").training_prompts(0, 1)[0]
    entry = prompt.answer["entry"]
    assert prompt.answer["dataset"] == "chain_sum"
    assert entry["question"] in prompt.text
    assert "\\boxed{}" in prompt.text
    assert len(prompt.token_ids) == len(prompt.text.encode()) + 1
    assert json.loads(json.dumps(prompt.answer)) == prompt.answer


def test_training_prompts_are_a_pure_function_of_position_across_chunks(
    task: Callable[..., ReasoningGym],
) -> None:
    positions = range(CHUNK_SIZE - 3, CHUNK_SIZE + 3)
    whole = task().training_prompts(positions.start, 6)
    parts = [task().training_prompts(position, 1)[0] for position in reversed(positions)]
    assert whole == parts[::-1]
    assert len({prompt.id for prompt in whole}) == len(set(questions(whole))) == 6


def test_run_seed_changes_training_and_task_seed_changes_evaluation(
    task: Callable[..., ReasoningGym],
) -> None:
    first, second, other_task_seed = task(0), task(1), task(0, seed=1)
    first_questions, second_questions = (
        set(questions(one_run.training_prompts(0, 5))) for one_run in (first, second)
    )
    assert first_questions.isdisjoint(second_questions)
    evaluation = first.evaluation_sets()
    assert evaluation == second.evaluation_sets()
    other_evaluation = other_task_seed.evaluation_sets()
    assert questions(evaluation["chain_sum"]) != questions(other_evaluation["chain_sum"])


def test_evaluation_problems_never_occur_in_training_even_if_problems_are_few(
    task: Callable[..., ReasoningGym],
) -> None:
    """lcm has small numbers, so 300 and 500 of its problems have some in common."""
    few = task(dataset="lcm", num_evaluation=300)
    held_out = questions(few.evaluation_sets()["lcm"])
    assert len(set(held_out)) == 300
    unfiltered = [
        few._draw("train/0", position, set())["question"] for position in range(CHUNK_SIZE)
    ]
    assert set(unfiltered) & set(held_out), "the test needs a problem to replace"
    assert set(questions(few.training_prompts(0, CHUNK_SIZE))).isdisjoint(held_out)


def test_problems_with_empty_answers_are_replaced(task: Callable[..., ReasoningGym]) -> None:
    """In ab all tokens may cancel, which leaves an empty gold answer."""
    many = task(dataset="ab")
    raw = [many._draw("train/0", position, set()) for position in range(CHUNK_SIZE)]
    assert all(entry["answer"].strip() for entry in raw)


def test_too_few_problems_are_an_error(task: Callable[..., ReasoningGym]) -> None:
    """Exclude every problem that the position can have."""
    small = task(dataset="gcd", num_evaluation=3)
    excluded = {_entry("gcd", "0/evaluation/0", 0)["question"]}
    excluded |= {
        _entry("gcd", "0/evaluation/substitutes/0", index)["question"] for index in range(MAX_DRAWS)
    }
    message = '"gcd" has too few different problems for task.num_evaluation = 3; lower'
    with pytest.raises(UserError, match=message):
        small._draw("evaluation", 0, excluded)


def test_fractions_in_an_entry_become_text(task: Callable[..., ReasoningGym]) -> None:
    for prompt in task(dataset="gsm_symbolic").training_prompts(0, 60):
        assert json.loads(json.dumps(prompt.answer)) == prompt.answer


def test_demonstrations_are_boxed_answers(task: Callable[..., ReasoningGym]) -> None:
    (demonstration,) = task().demonstrations(3, 1)
    answer = demonstration.prompt.answer["entry"]["answer"]
    assert demonstration.text == f"\\boxed{{{answer}}}"


def test_refused_data_sets_are_refused_when_the_task_is_built(
    task: Callable[..., ReasoningGym],
) -> None:
    message = '"puzzle24" of reasoning-gym is refused: its scorer can evaluate'
    with pytest.raises(UserError, match=message):
        task(dataset="puzzle24")
