"""How a problem is put to the model: as plain text for base models, in the model's own chat form, or in the user's."""

from __future__ import annotations

from typing import Any

from eepo.types import UserError

INSTRUCTION = "Think it through step by step, then write the final answer within \\boxed{}."
BOXED = f"Solve the following problem. {INSTRUCTION}\n\nProblem:\n{{problem}}\n\nSolution:\n"


def render(problem_text: str, template: str, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
    """The prompt's text and tokens. `template`: "boxed", "chat", or a text in which {problem} is replaced."""
    if template == "chat":
        text = _chat(problem_text, tokenizer)
        special = False  # the chat template writes all of them, a beginning-of-sequence token too
    else:
        text = (BOXED if template == "boxed" else template).replace("{problem}", problem_text)
        special = not (
            tokenizer.bos_token and text.startswith(tokenizer.bos_token)
        )  # never two of them
    # verbose=False: a prompt over the limit is counted and left out, which is no reason to warn of indexing errors
    return text, tuple(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)


def _chat(problem_text: str, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            'task.template = "chat": the model\'s tokenizer has no chat template; use "boxed" or a text with {problem}'
        )
    message = {"role": "user", "content": f"{problem_text}\n\n{INSTRUCTION}"}
    text: str = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return text
