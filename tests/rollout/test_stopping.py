"""`rollout.stop`: a completion ends with the first token that holds the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eepo.rollout.stopping import tokens_with
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling, UserError

WORDS = [
    "<eos>",
    "a",
    "b",
    "7",
    "Ċ",
    "ĊĊ",
    "aĊ",
    "Ġ",
]  # as byte-level vocabularies write them: Ċ is a new line
HOLDING = [4, 5, 6]


@pytest.fixture(scope="module")
def letters() -> Any:
    """Byte-level, as the tokenizers of pretrained models are."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("a", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="module")
def sampled(letters: Any, new_model: Callable[..., Any]) -> Callable[[str], list[Completion]]:
    """64 completions of at most 12 tokens, with the same draws whatever the stop."""
    prompts = [Prompt(f"p{index}", "a", (1, 2, 1 + index % 3)) for index in range(8)]

    def sample(stop: str) -> list[Completion]:
        model = new_model("llama", vocab_size=len(WORDS), eos_token_id=0, pad_token_id=0)
        groups = TransformersEngine(model, letters, stop=stop).generate(
            prompts, 8, Sampling(2.0, 12, seed=1)
        )
        return [completion for group in groups for completion in group]

    return sample


def test_every_token_that_holds_the_text_is_found_and_no_other(letters: Any) -> None:
    assert tokens_with("\n", letters) == HOLDING
    assert tokens_with("\n\n", letters) == [5]
    assert tokens_with("", letters) == []


def test_a_text_that_no_token_holds_is_refused_as_it_would_never_stop(letters: Any) -> None:
    with pytest.raises(UserError, match=r"rollout\.stop = '\\nq': no token"):
        tokens_with("\nq", letters)


def test_a_completion_ends_with_the_first_token_that_holds_the_text(
    sampled: Callable[[str], list[Completion]],
) -> None:
    completions = sampled("\n")
    stopped = [c for c in completions if c.token_ids[-1] in HOLDING]
    assert len(stopped) > 20
    assert {c.token_ids[-1] for c in stopped} == set(HOLDING)
    assert all(c.finished and "\n" in c.text for c in stopped)
    assert not any(set(c.token_ids[:-1]) & {0, *HOLDING} for c in completions)


def test_its_own_end_and_the_length_limit_still_count(
    sampled: Callable[[str], list[Completion]],
) -> None:
    completions = sampled("\n\n")
    assert any(c.token_ids[-1] == 0 and c.finished for c in completions)
    cut = [c for c in completions if not c.finished]
    assert all(len(c.token_ids) == 12 and c.token_ids[-1] not in (0, 5) for c in cut)


def test_stopping_cuts_a_completion_and_changes_nothing_before(
    sampled: Callable[[str], list[Completion]],
) -> None:
    for free, stopped in zip(sampled(""), sampled("\n"), strict=True):
        end = next(
            (i for i, token in enumerate(free.token_ids) if token in HOLDING),
            len(free.token_ids) - 1,
        )
        assert stopped.token_ids == free.token_ids[: end + 1]
        assert stopped.logprobs == pytest.approx(free.logprobs[: end + 1], abs=1e-5)
