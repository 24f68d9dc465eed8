"""`rollout.stop`: a completion ends with the first token that contains the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eepo.rollout.stopping import tokens_containing
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling, UserError

# As byte-level vocabularies write them: Ċ is a newline.
WORDS = ["<eos>", "a", "b", "7", "Ċ", "ĊĊ", "aĊ", "Ġ"]
STOP_TOKENS = [4, 5, 6]


@pytest.fixture(scope="module")
def byte_level_tokenizer() -> Any:
    """A byte-level tokenizer, as pretrained models have."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("a", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="module")
def sampled(
    byte_level_tokenizer: Any, new_model: Callable[..., Any]
) -> Callable[[str], list[Completion]]:
    """Samples 64 completions of at most 12 tokens. The random numbers do not depend on the stop."""
    prompts = [Prompt(f"p{index}", "a", (1, 2, 1 + index % 3)) for index in range(8)]

    def sample(stop: str) -> list[Completion]:
        model = new_model("llama", vocab_size=len(WORDS), eos_token_id=0, pad_token_id=0)
        groups = TransformersEngine(model, byte_level_tokenizer, stop=stop).generate(
            prompts, 8, Sampling(2.0, 12, seed=1)
        )
        return [completion for group in groups for completion in group]

    return sample


def test_tokens_containing_returns_all_tokens_with_the_text(byte_level_tokenizer: Any) -> None:
    assert tokens_containing("\n", byte_level_tokenizer) == STOP_TOKENS
    assert tokens_containing("\n\n", byte_level_tokenizer) == [5]
    assert tokens_containing("", byte_level_tokenizer) == []


def test_a_text_that_no_token_contains_is_refused(byte_level_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"rollout\.stop = '\\nq': no token"):
        tokens_containing("\nq", byte_level_tokenizer)


def test_a_completion_ends_with_the_first_token_that_contains_the_text(
    sampled: Callable[[str], list[Completion]],
) -> None:
    completions = sampled("\n")
    stopped = [c for c in completions if c.token_ids[-1] in STOP_TOKENS]
    assert len(stopped) > 20
    assert {c.token_ids[-1] for c in stopped} == set(STOP_TOKENS)
    assert all(c.finished and "\n" in c.text for c in stopped)
    assert not any(set(c.token_ids[:-1]) & {0, *STOP_TOKENS} for c in completions)


def test_end_tokens_and_the_length_limit_still_apply(
    sampled: Callable[[str], list[Completion]],
) -> None:
    completions = sampled("\n\n")
    assert any(c.token_ids[-1] == 0 and c.finished for c in completions)
    cut = [c for c in completions if not c.finished]
    assert all(len(c.token_ids) == 12 and c.token_ids[-1] not in (0, 5) for c in cut)


def test_a_stop_text_changes_no_token_before_the_stop(
    sampled: Callable[[str], list[Completion]],
) -> None:
    for free, stopped in zip(sampled(""), sampled("\n"), strict=True):
        end = next(
            (i for i, token in enumerate(free.token_ids) if token in STOP_TOKENS),
            len(free.token_ids) - 1,
        )
        assert stopped.token_ids == free.token_ids[: end + 1]
        assert stopped.logprobs == pytest.approx(free.logprobs[: end + 1], abs=1e-5)
