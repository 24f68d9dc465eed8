"""Packed batches give the scores and gradients of padded ones; other families stay padded."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eepo.model import attention
from eepo.model.attention import Packing, packed_attention
from eepo.model.batching import MicroBatch, Packed, PackedLayout, micro_batches
from eepo.model.policy import Policy, Scores
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling

Pairs = list[tuple[Prompt, Completion]]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 4}),
    ("phi", {"num_key_value_heads": 2}),
    ("phi3", {"sliding_window": 5}),
    ("gemma3_text", {"sliding_window": 3, "query_pre_attn_scalar": 16}),
    ("cohere", {}),
    ("olmo2", {}),
]
NAMES = [family for family, _ in FAMILIES]


def pack(policy: Policy) -> Policy:
    """Turn packing on, as on a GPU."""
    policy.packed = policy._scorer.packing.enable_if_equivalent()
    return policy


def all_columns(batch: MicroBatch, scores: Scores) -> Tensor:
    """A loss in which every score of every row has a different weight."""
    columns = (scores.logprobs, scores.entropies, scores.complements)
    row_weights = batch.pick([1.0 + row % 3 for row in range(100)]).unsqueeze(1)
    weighted = zip((1.0, -0.5, 0.3), columns, strict=True)
    return sum((weight * row_weights * column).sum() for weight, column in weighted)  # type: ignore


def rows_of(policy: Policy, pairs: Pairs, weights: Any = None) -> list[tuple[Tensor, Tensor]]:
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for batch in policy.micro_batches(pairs):
            scores = policy.score(batch, 0.9, weights)
            for index, row in enumerate(batch.rows):
                mask = batch.mask[index]
                rows[row] = scores.logprobs[index][mask], scores.entropies[index][mask]
    return [rows[row] for row in range(len(pairs))]


def assert_same_gradient(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        error = (got[name] - gradient).abs().max()
        assert error <= 2e-5 * max(1.0, gradient.abs().max().item()), f"{name}: off by {error}"


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("family", "shape"), FAMILIES, ids=NAMES)
def test_packed_scores_and_gradients_equal_padded_ones(
    family: str, shape: dict[str, Any], group: int, new_model: Any, ragged_pairs: Any
) -> None:
    """Also where several completions share a prompt."""
    model, pairs = new_model(family, **shape), ragged_pairs(6, group=group)
    padded, packed = Policy(copy.deepcopy(model), 60, 7), pack(Policy(model, 60, 7))
    assert packed.packed
    assert not padded.packed
    torch.testing.assert_close(rows_of(packed, pairs), rows_of(padded, pairs), rtol=1e-5, atol=2e-5)
    assert_same_gradient(
        packed.gradient(pairs, 0.9, all_columns), padded.gradient(pairs, 0.9, all_columns)
    )


def test_a_sliding_window_changes_packed_scores(new_model: Any, ragged_pairs: Any) -> None:
    pairs = ragged_pairs(6)

    def logprobs(window: int) -> Tensor:
        policy = pack(Policy(new_model("mistral", sliding_window=window)))
        return torch.cat([row[0] for row in rows_of(policy, pairs)])

    assert (logprobs(4) - logprobs(64)).abs().max() > 0.1


@pytest.mark.parametrize(("family", "reason"), [
    ("gemma2", "packed attention supports neither softcaps nor sinks"),
    ("bloom", "hidden states differ by"),
    ("mpt", "has no attribute"),
])  # fmt: skip
def test_a_family_that_cannot_be_packed_stays_padded_and_warns_once(
    family: str, reason: str, new_model: Any, ragged_pairs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, pairs = new_model(family), ragged_pairs(4)
    default = model.config._attn_implementation
    before = rows_of(Policy(model), pairs)
    with caplog.at_level(logging.WARNING, "eepo.model.attention"):
        policy = pack(Policy(model))
    [record] = caplog.records
    assert record.getMessage().startswith(f"{type(model).__name__} is trained on padded batches: ")
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not policy.packed
    assert model.config._attn_implementation == default
    torch.testing.assert_close(rows_of(policy, pairs), before, rtol=0, atol=0)


def test_attention_sinks_are_not_packed(new_model: Any) -> None:
    model = new_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    assert not Packing(model).enable_if_equivalent()


def test_other_weights_are_scored_packed(new_model: Any, ragged_pairs: Any) -> None:
    model, other, pairs = new_model("qwen3"), new_model("qwen3", seed=1), ragged_pairs(5)
    expected = rows_of(Policy(copy.deepcopy(other)), pairs)
    got = rows_of(pack(Policy(model, 60)), pairs, dict(other.named_parameters()))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_a_padded_batch_for_a_packed_policy_raises_and_vice_versa(
    new_model: Any, ragged_pairs: Any
) -> None:
    packed, padded = pack(Policy(new_model("llama"))), Policy(new_model("llama"))
    pairs = ragged_pairs(3)
    [packed_batch], [padded_batch] = packed.micro_batches(pairs), padded.micro_batches(pairs)
    with pytest.raises(ValueError, match="scores packed micro-batches, got a padded one"):
        packed.score(padded_batch, 1.0)
    with pytest.raises(ValueError, match="scores padded micro-batches, got a packed one"):
        padded.score(packed_batch, 1.0)


def test_gradient_checkpointing_attends_over_the_same_batch_again(
    new_model: Any, ragged_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass recomputes attention for the batch that it differentiates."""
    model, pairs = new_model("qwen3"), ragged_pairs(6)
    expected = Policy(copy.deepcopy(model), 30).gradient(pairs, 0.9, all_columns)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = pack(Policy(model.train(), 30))
    num_batches, num_calls = len(list(policy.micro_batches(pairs))), 0

    def counting(*args: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return packed_attention(*args)

    monkeypatch.setattr(attention, "packed_attention", counting)
    got = policy.gradient(pairs, 0.9, all_columns)
    assert num_batches > 2
    assert num_calls == 2 * num_batches * model.config.num_hidden_layers  # forward and recomputed
    assert_same_gradient(got, expected)


def test_a_saved_model_does_not_mention_packing(
    new_model: Any, ragged_pairs: Any, tmp_path: Path
) -> None:
    policy, pairs = pack(Policy(new_model("llama"))), ragged_pairs(3)
    policy.model.save_pretrained(tmp_path)
    assert "eepo" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(
        rows_of(Policy(loaded), pairs), rows_of(policy, pairs), rtol=1e-5, atol=2e-5
    )


def test_an_engine_on_an_earlier_copy_samples_what_the_packed_policy_scores(
    new_model: Any, tokenizer: Any, ragged_pairs: Any
) -> None:
    model, prompts = new_model("llama"), [prompt for prompt, _ in ragged_pairs(4)]
    engine = TransformersEngine(copy.deepcopy(model), tokenizer)
    policy = pack(Policy(model, 40))
    engine.load_weights(policy.named_weights())
    groups = engine.generate(prompts, 2, Sampling(0.9, 8))
    pairs = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    for (_, completion), (logprobs, entropies) in zip(pairs, rows_of(policy, pairs), strict=True):
        assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=2e-5)
        assert completion.entropies == pytest.approx(entropies.tolist(), abs=2e-5)


def test_two_packed_models_keep_separate_batches(new_model: Any, ragged_pairs: Any) -> None:
    """A policy and its reference attend over different batches."""
    model, pairs, others = new_model("llama"), ragged_pairs(5), ragged_pairs(4, seed=3)
    policy, reference = pack(Policy(copy.deepcopy(model))), pack(Policy(model))
    expected = rows_of(policy, pairs)
    [batch] = policy.micro_batches(pairs)
    [other] = reference.micro_batches(others)
    scores = policy.score(batch, 0.9)
    reference.score(other, 0.9)
    got = [scores.logprobs[index][batch.mask[index]] for index in range(5)]
    logprobs = [expected[row][0] for row in batch.rows]
    torch.testing.assert_close(got, logprobs, rtol=1e-5, atol=1e-5)


# --- packed_attention


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 2)])
def test_each_sequence_attends_to_its_past_alone(heads: int, key_heads: int, window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 5, 3, 7]
    cu_seqlens = torch.tensor([0, 1, 6, 9, 16], dtype=torch.int32)
    query, key, value = (
        torch.randn(1, n, 16, 4, generator=generator) for n in (heads, key_heads, key_heads)
    )
    layout = PackedLayout(cu_seqlens, max(lengths))
    got = packed_attention(query, key, value, layout, 0.7, window)
    assert got.shape == (1, 16, heads, 4)
    for start, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        for index in range(start, start + length):
            first = max(start, index + 1 - window) if window else start
            for head in range(heads):
                key_head = head // (heads // key_heads)
                scores = 0.7 * key[0, key_head, first : index + 1] @ query[0, head, index]
                expected = scores.softmax(0) @ value[0, key_head, first : index + 1]
                torch.testing.assert_close(got[0, index, head], expected, rtol=1e-5, atol=1e-5)


def test_the_layout_has_int32_offsets_and_the_longest_length(ragged_pairs: Any) -> None:
    [batch] = micro_batches(ragged_pairs(4), 1000, torch.device("cpu"), packed=True)
    assert isinstance(batch.inputs, Packed)
    layout = batch.inputs.layout
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.max_seqlen == int(layout.cu_seqlens.diff().max())


def test_a_packed_model_is_garbage_collected(new_model: Any) -> None:
    """`transformers`' registry of attention functions lives as long as the process."""
    policy = pack(Policy(new_model("llama")))
    model = weakref.ref(policy.model)
    del policy
    gc.collect()
    assert model() is None


def test_unsupported_layer_types_are_not_packed(new_model: Any, caplog: Any) -> None:
    model = new_model("llama")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with caplog.at_level(logging.WARNING):
        assert not Packing(model).enable_if_equivalent()
    assert "chunked_attention" in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_a_deep_model_may_round_as_much_as_eager_and_sdpa_differ(new_model: Any) -> None:
    """With 40 layers of random bf16 weights, eager and sdpa differ by more than TOLERANCE."""
    model = new_model("qwen3", num_hidden_layers=40).to(torch.bfloat16)
    ids = torch.arange(1, 12).unsqueeze(0)

    @torch.no_grad()
    def hidden() -> Tensor:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    expected = hidden()
    model.config._attn_implementation = "eager"
    rounding = attention._relative_difference(hidden(), expected)
    assert rounding > attention.TOLERANCE
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    noise *= rounding * expected.float().norm() / noise.norm()
    assert attention.attention_mismatch(model, expected + 2 * noise, expected, hidden) == ""
    text = attention.attention_mismatch(model, expected + 5 * noise, expected, hidden)
    assert "hidden states differ by" in text
