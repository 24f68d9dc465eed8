"""Provides a byte-level tokenizer with an optional BOS token and a chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{{ bos_token }}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    def build(*, bos: bool = True, chat: str | None = CHAT) -> Any:
        special = ["<bos>", "<eos>", "<user>", "<assistant>"]
        words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", 0)]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<bos>" if bos else None,
            eos_token="<eos>",
            extra_special_tokens=["<user>", "<assistant>"],
            chat_template=chat if chat is None or bos else chat.replace("{{ bos_token }}", ""),
        )

    return build
