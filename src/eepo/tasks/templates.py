"""Formats a problem as a prompt, as plain text, by a chat template, or by a user's template."""

from __future__ import annotations

from typing import Any

from eepo.types import UserError

INSTRUCTION = "Think it through step by step, then write the final answer within \\boxed{}."
BOXED = f"Solve the following problem. {INSTRUCTION}\n\nProblem:\n{{problem}}\n\nSolution:\n"


def render(problem_text: str, template: str, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
    """Return the text and the token ids of the prompt.

    `template` is "boxed" (plain text, for base models), "chat" (the model's chat template), or a
    text in which {problem} is replaced.
    """
    if template == "chat":
        text = _chat(problem_text, tokenizer)
        add_special_tokens = False  # the chat template contains them, including BOS
    else:
        text = (BOXED if template == "boxed" else template).replace("{problem}", problem_text)
        has_bos = tokenizer.bos_token and text.startswith(tokenizer.bos_token)
        add_special_tokens = not has_bos  # never two BOS tokens
    # verbose=False suppresses the warning about long prompts: the caller drops and counts them.
    encoding = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return text, tuple(encoding.input_ids)


def _chat(problem_text: str, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            'task.template = "chat": the model\'s tokenizer has no chat template; '
            'use "boxed" or a text with {problem}'
        )
    message = {"role": "user", "content": f"{problem_text}\n\n{INSTRUCTION}"}
    text: str = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return text
