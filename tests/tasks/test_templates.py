"""Checks that prompts contain the problem once and the right special tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eepo.tasks.templates import INSTRUCTION, render, render_all
from eepo.types import UserError

TRICKY = r"Let $S = \{x_{1}, x_{2}\}$; {problem} is {0} and {name}. Ünïcode → 漢"


def test_boxed_template_is_plain_text_with_problem_and_instruction(
    byte_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = byte_tokenizer(bos=False)
    text, token_ids = render(TRICKY, "boxed", tokenizer)
    assert text.count(TRICKY) == 1
    assert text.count("\\boxed{}") == 1
    assert not text.endswith(" ")  # the next token of a base model starts with a space
    assert tokenizer.decode(token_ids) == text
    assert not set(token_ids) & set(tokenizer.all_special_ids)


def test_prompts_have_exactly_one_bos_token(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    for template in ("boxed", "chat", "Q: {problem} A:", "<bos>Q: {problem} A:"):
        _, token_ids = render("What is 1+1?", template, tokenizer)
        assert token_ids[0] == tokenizer.bos_token_id
        assert token_ids.count(tokenizer.bos_token_id) == 1


def test_chat_template_of_the_model_is_used(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    text, token_ids = render(TRICKY, "chat", tokenizer)
    assert text == f"<bos><user>{TRICKY}\n\n{INSTRUCTION}<eos><assistant>"
    assert token_ids[-1] == tokenizer.convert_tokens_to_ids("<assistant>")
    assert tokenizer.decode(token_ids) == text


def test_chat_without_a_chat_template_is_refused(byte_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r'task\.template = "chat".*no chat template; use "boxed"'):
        render("x", "chat", byte_tokenizer(chat=None))


def test_only_the_problem_is_replaced_in_a_users_template(
    byte_tokenizer: Callable[..., Any],
) -> None:
    template = r"{problem}|{answer}|{}|\boxed{...}|{{x}}"
    text, _ = render(TRICKY, template, byte_tokenizer())
    assert text == TRICKY + r"|{answer}|{}|\boxed{...}|{{x}}"


def test_a_chat_message_can_be_written_by_the_user(byte_tokenizer: Callable[..., Any]) -> None:
    template = "chat:{problem}\n\nReply with only \\boxed{}."
    text, _ = render(TRICKY, template, byte_tokenizer())
    assert text == f"<bos><user>{TRICKY}\n\nReply with only \\boxed{{}}.<eos><assistant>"


def test_examples_are_earlier_turns_of_a_chat(byte_tokenizer: Callable[..., Any]) -> None:
    examples = [("1+1?", "\\boxed{2}"), ("2+2?", "\\boxed{4}")]
    text, token_ids = render("3+3?", "chat:Q {problem}", byte_tokenizer(), examples)
    turns = "<user>Q 1+1?<eos><assistant>\\boxed{2}<eos><user>Q 2+2?<eos><assistant>\\boxed{4}<eos>"
    assert text == f"<bos>{turns}<user>Q 3+3?<eos><assistant>"
    assert token_ids.count(0) == 1


def test_examples_come_first_in_a_plain_prompt(byte_tokenizer: Callable[..., Any]) -> None:
    text, token_ids = render("3+3?", "Q {problem} A ", byte_tokenizer(), [("1+1?", "\\boxed{2}")])
    assert text == "Q 1+1? A \\boxed{2}\n\nQ 3+3? A "
    assert token_ids.count(0) == 1


@pytest.mark.parametrize("template", ["boxed", "chat", "{problem}"])
def test_many_prompts_are_the_same_as_one_by_one(
    template: str, byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer()
    problems = ["1+1?", "<bos>2+2?", TRICKY, "1+1?"]  # one has its own BOS, one comes twice
    one_by_one = [render(problem, template, tokenizer) for problem in problems]
    assert render_all(problems, template, tokenizer) == one_by_one
    assert render_all([], template, tokenizer) == []
    if template == "{problem}":
        assert [ids.count(tokenizer.bos_token_id) for _, ids in one_by_one] == [1, 1, 1, 1]
