"""Writes prompts to Parquet files in verl's layout.

verl sends the messages of a row through a chat template. Our prompts are complete texts already, so
a row holds the text as one message, and `RAW_TEMPLATE` returns it unchanged. This also keeps the
date out of the prompts that some chat templates would insert while verl runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eepo.types import Prompt, UserError

RAW_TEMPLATE = "{{ messages[0].content }}"
RAW_TEMPLATE_KEY = "+data.apply_chat_template_kwargs.chat_template"


def verl_rows(
    prompts: Sequence[Prompt], data_source: str, split: str, tokenizer: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row for each prompt. verl reports accuracy for each `data_source`."""
    for index, prompt in enumerate(prompts):
        yield {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": raw_text(prompt, tokenizer)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(prompt.answer)},
            "extra_info": {"index": index, "split": split, "id": prompt.id},
        }


def raw_text(prompt: Prompt, tokenizer: Any) -> str:
    """Return the text that gives the prompt's tokens in verl.

    verl's chat template path adds no special tokens. If the tokenizer added some in front of a
    plain prompt, such as BOS, they become part of the text.
    """
    expected = list(prompt.token_ids)
    num_special = len(expected) - len(_encode(prompt.text, tokenizer))
    text = prompt.text
    if num_special > 0:
        text = tokenizer.decode(expected[:num_special]) + text
    if _encode(text, tokenizer) != expected:
        raise UserError(
            f"prompt {prompt.id}: the tokenizer adds special tokens that the text of a prompt "
            "cannot express, so verl would see another prompt"
        )
    return text


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a temporary file and rename it, so that no half-written file remains."""
    try:
        from pyarrow import Table
        from pyarrow.parquet import write_table
    except ImportError:
        raise UserError(
            f'{path}: writing parquet needs pyarrow: pip install "eepo[data]"'
        ) from None
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_table(Table.from_pylist(list(rows)), temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _encode(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids
