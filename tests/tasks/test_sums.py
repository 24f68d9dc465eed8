"""Checks that sums are reproducible, right, in range, and held out for evaluation."""

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
# There are 45 sums of two one-digit numbers.
FEW_SUMS = SumsConfig(max_digits=1, num_examples=3, num_evaluation=20)


class CharacterTokenizer:
    """Encodes every character as its code point. No text is unknown."""

    unk_token_id = None

    def __call__(self, text: str) -> Any:
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})


def terms_of(line: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, line.split("=")[0].split("+"))))


def asked_terms(prompts: list[Prompt]) -> list[tuple[int, ...]]:
    return [terms_of(prompt.text.splitlines()[-1]) for prompt in prompts]


def task(config: SumsConfig = SMALL, order_seed: int = 0) -> Sums:
    return Sums(config, CharacterTokenizer(), order_seed)


def test_prompts_are_examples_and_a_question_without_its_answer() -> None:
    prompt = task().training_prompts(0, 1)[0]
    *solved, question = prompt.text.splitlines()
    assert len(solved) == 4
    assert all(re.fullmatch(r"\d+ \+ \d+ = \d+", line) for line in solved)
    assert all(sum(terms_of(line)) == int(line.split("=")[1]) for line in solved)
    assert re.fullmatch(r"\d+ \+ \d+ = ", question)
    assert prompt.answer == str(sum(terms_of(question)))
    assert prompt.token_ids == tuple(map(ord, prompt.text))


def test_prompts_without_examples_are_only_the_question() -> None:
    prompt = task(replace(SMALL, num_examples=0, num_terms=3)).training_prompts(0, 1)[0]
    assert re.fullmatch(r"\d+ \+ \d+ \+ \d+ = ", prompt.text)


def test_training_prompts_are_a_pure_function_of_position() -> None:
    whole = task().training_prompts(0, 12)
    fresh = task()
    fresh.evaluation_sets()
    for position in reversed(range(12)):
        assert fresh.training_prompts(position, 1) == [whole[position]]
    assert len({prompt.id for prompt in whole}) == 12


def test_all_prompts_show_the_same_examples_and_none_asks_for_them() -> None:
    sums = task(FEW_SUMS)
    prompts = sums.training_prompts(0, 300)
    for evaluation_prompts in sums.evaluation_sets().values():
        prompts += evaluation_prompts
    shown = {tuple(prompt.text.splitlines()[:-1]) for prompt in prompts}
    assert len(shown) == 1
    assert not set(map(terms_of, shown.pop())) & set(asked_terms(prompts))


def test_evaluation_sums_never_occur_in_training_or_demonstrations() -> None:
    sums = task(FEW_SUMS)
    sets = sums.evaluation_sets()
    held_out = asked_terms(sets["in_range"]) + asked_terms(sets["out_of_range"])
    assert len(set(held_out)) == 40
    trained = asked_terms(sums.training_prompts(0, 400))
    assert len(set(trained)) == 22  # all that remain
    assert not set(held_out) & set(trained)
    demonstrated = [demonstration.prompt for demonstration in sums.demonstrations(0, 400)]
    assert not set(held_out) & set(asked_terms(demonstrated))
    finite = task(replace(FEW_SUMS, num_train=30))
    assert not set(held_out) & set(asked_terms(finite.training_prompts(0, 60)))


def test_terms_cover_their_range() -> None:
    sums = task(replace(SMALL, max_digits=2, num_evaluation=40))
    sets = sums.evaluation_sets()
    assert list(sets) == ["in_range", "out_of_range"]
    prompts = sums.training_prompts(0, 1500) + sets["in_range"]
    trained = [term for terms in asked_terms(prompts) for term in terms]
    assert (min(trained), max(trained)) == (1, 99)
    # Short terms are as frequent as long ones.
    assert 0.4 < sum(term < 10 for term in trained) / len(trained) < 0.6
    assert all(100 <= term <= 999 for terms in asked_terms(sets["out_of_range"]) for term in terms)


def test_demonstrations_are_answers_in_both_ranges() -> None:
    demonstrations = task().demonstrations(0, 40)
    prompts = [demonstration.prompt for demonstration in demonstrations]
    assert [each.text for each in demonstrations] == [prompt.answer for prompt in prompts]
    assert sum(max(terms) >= 100 for terms in asked_terms(prompts)) == 20


def test_run_seed_changes_training_prompts_but_not_evaluation() -> None:
    first, second = task(order_seed=0), task(order_seed=1)
    first_prompts, second_prompts = (each.training_prompts(0, 20) for each in (first, second))
    assert asked_terms(first_prompts) != asked_terms(second_prompts)
    assert first.evaluation_sets() == second.evaluation_sets()


def test_task_seed_changes_every_set() -> None:
    first, second = task(), task(replace(SMALL, seed=1))
    first_prompts, second_prompts = (each.training_prompts(0, 10) for each in (first, second))
    assert asked_terms(first_prompts) != asked_terms(second_prompts)
    first_sets, second_sets = first.evaluation_sets(), second.evaluation_sets()
    assert asked_terms(first_sets["in_range"]) != asked_terms(second_sets["in_range"])


def test_each_epoch_has_every_sum_once_in_a_different_order() -> None:
    sums = task(replace(SMALL, num_train=15))
    epochs = [sums.training_prompts(15 * epoch, 15) for epoch in range(3)]
    texts = [[prompt.text for prompt in epoch] for epoch in epochs]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted(texts[2])
    assert texts[0] != texts[1] != texts[2] != texts[0]
    assert len({prompt.id for epoch in epochs for prompt in epoch}) == 45


def test_more_sums_than_exist_are_refused() -> None:
    with pytest.raises(UserError, match=r"lower task\.num_evaluation = 60"):
        task(replace(FEW_SUMS, num_evaluation=60)).evaluation_sets()
    with pytest.raises(UserError, match="no further sum of 2 terms of 1 to 1 digits"):
        task(replace(FEW_SUMS, num_evaluation=42)).training_prompts(0, 1)


def test_build_task_builds_it(tokenizer: Any) -> None:
    sums = build_task(SMALL, tokenizer, order_seed=3)
    assert isinstance(sums, Sums)
    assert sums.order_seed == 3


def test_a_tokenizer_that_lacks_a_number_is_refused(tokenizer: Any) -> None:
    """The numbers of the tokenizer end at 199."""
    with pytest.raises(UserError, match="the prompt has text that the tokenizer does not know"):
        build_task(replace(SMALL, max_digits=3), tokenizer).training_prompts(0, 50)
