"""Formats a problem as a prompt, as plain text, by a chat template, or by a user's template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eepo.types import UserError

INSTRUCTION = "Think it through step by step, then write the final answer within \\boxed{}."
BOXED = f"Solve the following problem. {INSTRUCTION}\n\nProblem:\n{{problem}}\n\nSolution:\n"
CHAT = "chat:"  # a template that starts with it is the text of a user message

Example = tuple[str, str]  # a problem, and the completion that the model should see for it


def render(
    problem_text: str, template: str, tokenizer: Any, examples: Sequence[Example] = ()
) -> tuple[str, tuple[int, ...]]:
    """Return the text and the token ids of one prompt, as `render_all` does for many."""
    return render_all([problem_text], template, tokenizer, examples)[0]


def render_all(
    problem_texts: Sequence[str], template: str, tokenizer: Any, examples: Sequence[Example] = ()
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the texts and the token ids of prompts. One call is faster than a call per prompt.

    `template` is "boxed" (plain text, for base models), "chat" (the model's chat template), or a
    text in which {problem} is replaced. If that text starts with "chat:", the rest is the user
    message in the model's chat template. `examples` come before the problem, in the same form.
    """
    if template == "chat" or template.startswith(CHAT):
        texts = [_chat(each, template, tokenizer, examples) for each in problem_texts]
        with_bos = texts  # the chat template contains all special tokens
    else:
        form = BOXED if template == "boxed" else template
        solved = [_fill(form, problem) + completion for problem, completion in examples]
        texts = ["\n\n".join([*solved, _fill(form, each)]) for each in problem_texts]
        bos = tokenizer.bos_token
        with_bos = [text for text in texts if bos and text.startswith(bos)]
    token_ids = _token_ids(with_bos, tokenizer, add_special_tokens=False)  # never two BOS tokens
    without_bos = [text for text in texts if text not in token_ids]
    token_ids |= _token_ids(without_bos, tokenizer, add_special_tokens=True)
    return [(text, token_ids[text]) for text in texts]


def _token_ids(
    texts: Sequence[str], tokenizer: Any, add_special_tokens: bool
) -> dict[str, tuple[int, ...]]:
    if not texts:
        return {}
    # verbose=False suppresses the warning about long prompts: the caller drops and counts them.
    encoding = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)
    return dict(zip(texts, map(tuple, encoding.input_ids), strict=True))


def _chat(problem_text: str, template: str, tokenizer: Any, examples: Sequence[Example]) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            'task.template = "chat": the model\'s tokenizer has no chat template; '
            'use "boxed" or a text with {problem}'
        )
    form = f"{{problem}}\n\n{INSTRUCTION}" if template == "chat" else template.removeprefix(CHAT)
    messages = []
    for problem, completion in examples:
        messages.append({"role": "user", "content": _fill(form, problem)})
        messages.append({"role": "assistant", "content": completion})
    messages.append({"role": "user", "content": _fill(form, problem_text)})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _fill(form: str, problem_text: str) -> str:
    return form.replace("{problem}", problem_text)
