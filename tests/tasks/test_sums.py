"""Sums: repeatable by position, right, in their ranges, and never shared between training and evaluation."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from eepo.config import SumsConfig
from eepo.tasks import build_task
from eepo.tasks.sums import Sums
from eepo.types import Prompt, UserError

SMALL = SumsConfig(num_evaluation=10)
CROWDED = SumsConfig(max_digits=1, num_examples=3, num_evaluation=20)  # of the 45 there are


class Letters:
    """A tokenizer that knows every character, and that nothing is unknown."""

    unk_token_id = None

    def __call__(self, text: str) -> Any:
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})


def terms_of(line: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, line.split("=")[0].split("+"))))


def asked(prompts: list[Prompt]) -> list[tuple[int, ...]]:
    return [terms_of(prompt.text.splitlines()[-1]) for prompt in prompts]


def task(config: SumsConfig = SMALL, order_seed: int = 0) -> Sums:
    return Sums(config, Letters(), order_seed)


def test_a_prompt_is_solved_sums_and_a_question_that_ends_right_before_its_answer() -> None:
    prompt = task().training_prompts(0, 1)[0]
    *solved, question = prompt.text.splitlines()
    assert len(solved) == 4
    assert all(re.fullmatch(r"\d+ \+ \d+ = \d+", line) for line in solved)
    assert all(sum(terms_of(line)) == int(line.split("=")[1]) for line in solved)
    assert re.fullmatch(r"\d+ \+ \d+ = ", question)
    assert prompt.answer == str(sum(terms_of(question)))
    assert prompt.token_ids == tuple(map(ord, prompt.text))


def test_without_examples_there_is_only_the_question() -> None:
    prompt = task(replace(SMALL, num_examples=0, num_terms=3)).training_prompts(0, 1)[0]
    assert re.fullmatch(r"\d+ \+ \d+ \+ \d+ = ", prompt.text)


def test_training_prompts_are_a_pure_function_of_position() -> None:
    whole = task().training_prompts(0, 12)
    fresh = task()
    fresh.evaluation_sets()
    assert [fresh.training_prompts(position, 1)[0] for position in reversed(range(12))] == whole[
        ::-1
    ]
    assert len({prompt.id for prompt in whole}) == 12


def test_all_prompts_show_the_same_examples_and_nobody_asks_for_them() -> None:
    sums = task(CROWDED)
    prompts = sums.training_prompts(0, 300) + [
        p for ps in sums.evaluation_sets().values() for p in ps
    ]
    shown = {tuple(prompt.text.splitlines()[:-1]) for prompt in prompts}
    assert len(shown) == 1
    assert not set(map(terms_of, shown.pop())) & set(asked(prompts))


def test_evaluation_sums_never_occur_in_training_or_demonstrations_in_any_order() -> None:
    sums = task(CROWDED)
    sets = sums.evaluation_sets()
    held_out = asked(sets["in_range"]) + asked(sets["out_of_range"])
    assert len(set(held_out)) == 40
    trained = asked(sums.training_prompts(0, 400))
    assert len(set(trained)) == 22  # all that are left
    assert not set(held_out) & set(trained)
    assert not set(held_out) & set(asked([prompt for prompt, _ in sums.demonstrations(0, 400)]))
    finite = task(replace(CROWDED, num_train=30))
    assert not set(held_out) & set(asked(finite.training_prompts(0, 60)))


def test_terms_stay_in_their_ranges_and_reach_both_ends() -> None:
    sums = task(replace(SMALL, max_digits=2, num_evaluation=40))
    sets = sums.evaluation_sets()
    assert list(sets) == ["in_range", "out_of_range"]
    trained = [
        term for terms in asked(sums.training_prompts(0, 1500) + sets["in_range"]) for term in terms
    ]
    assert (min(trained), max(trained)) == (1, 99)
    assert (
        0.4 < sum(term < 10 for term in trained) / len(trained) < 0.6
    )  # short terms are as frequent as long ones
    assert all(100 <= term <= 999 for terms in asked(sets["out_of_range"]) for term in terms)


def test_demonstrations_are_the_answers_of_both_ranges() -> None:
    pairs = task().demonstrations(0, 40)
    assert all(text == prompt.answer for prompt, text in pairs)
    assert sum(max(terms) >= 100 for terms in asked([prompt for prompt, _ in pairs])) == 20


def test_the_seed_of_a_run_moves_training_prompts_and_leaves_evaluation_alone() -> None:
    one, other = task(order_seed=0), task(order_seed=1)
    assert asked(one.training_prompts(0, 20)) != asked(other.training_prompts(0, 20))
    assert one.evaluation_sets() == other.evaluation_sets()


def test_the_task_seed_moves_every_set() -> None:
    one, other = task(), task(replace(SMALL, seed=1))
    assert asked(one.training_prompts(0, 10)) != asked(other.training_prompts(0, 10))
    assert asked(one.evaluation_sets()["in_range"]) != asked(other.evaluation_sets()["in_range"])


def test_each_epoch_covers_every_sum_once_in_an_order_of_its_own() -> None:
    sums = task(replace(SMALL, num_train=15))
    epochs = [sums.training_prompts(15 * epoch, 15) for epoch in range(3)]
    texts = [[prompt.text for prompt in epoch] for epoch in epochs]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted(texts[2])
    assert texts[0] != texts[1] != texts[2] != texts[0]
    assert len({prompt.id for epoch in epochs for prompt in epoch}) == 45


def test_more_sums_than_there_are_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"lower task\.num_evaluation = 60"):
        task(replace(CROWDED, num_evaluation=60)).evaluation_sets()
    with pytest.raises(UserError, match="no further sum of 2 terms of 1 to 1 digits"):
        task(replace(CROWDED, num_evaluation=42)).training_prompts(0, 1)


def test_a_recipe_reaches_it_by_name(tokenizer: Any) -> None:
    sums = build_task(SMALL, tokenizer, order_seed=3)
    assert isinstance(sums, Sums)
    assert sums.order_seed == 3


def test_a_vocabulary_that_lacks_the_sum_is_refused(tokenizer: Any) -> None:
    with pytest.raises(
        UserError, match="does not know all of the prompt"
    ):  # its numbers end at 199
        build_task(replace(SMALL, max_digits=3), tokenizer).training_prompts(0, 50)
