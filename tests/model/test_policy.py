"""Scores and gradients of micro-batches equal those of single rows, for every token limit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eepo.model.batching import MicroBatch
from eepo.model.policy import Policy, Scores
from eepo.types import Completion, Prompt, UserError

FAMILIES = ["qwen2", "qwen3", "llama"]
LIMITS = [(1, 7), (60, 4096), (16384, 1), (16384, 4096)]  # micro_batch_tokens, head_tokens
Pairs = list[tuple[Prompt, Completion]]


def scored_rows(
    policy: Policy, pairs: Pairs, temperature: float, weights: Any = None
) -> list[tuple[Tensor, ...]]:
    """Return logprobs, entropies and complements of each pair, without padding."""
    rows: list[tuple[Tensor, ...]] = [()] * len(pairs)
    for batch in policy.micro_batches(pairs):
        scores = policy.score(batch, temperature, weights)
        columns = (scores.logprobs, scores.entropies, scores.complements)
        for index, row in enumerate(batch.rows):
            mask = batch.mask[index]
            rows[row] = tuple(column[index][mask] for column in columns)
            assert all(not column[index][~mask].any() for column in columns)
    return rows


def assert_rows_close(got: list[tuple[Tensor, ...]], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for row, reference in zip(got, expected, strict=True):
        for column, plain in zip(row, reference, strict=True):
            torch.testing.assert_close(column.double(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_a_plain_forward_pass(
    family: str, temperature: float, new_model: Any, ragged_pairs: Any, plain_scores: Any
) -> None:
    model, pairs = new_model(family), ragged_pairs(6)
    with torch.no_grad():
        expected = [plain_scores(model, *pair, temperature) for pair in pairs]
        for micro_batch_tokens, head_tokens in LIMITS:
            policy = Policy(model, micro_batch_tokens, head_tokens)
            assert_rows_close(scored_rows(policy, pairs, temperature), expected)


def test_the_test_models_are_far_from_uniform(
    new_model: Any, ragged_pairs: Any, plain_scores: Any
) -> None:
    with torch.no_grad():
        scores = [plain_scores(new_model("qwen2"), *pair) for pair in ragged_pairs(6)]
    logprobs = torch.cat([score.logprobs for score in scores])
    assert logprobs.std() > 1


@pytest.mark.parametrize(("family", "transform"), [
    ("gemma2", {"final_logit_softcapping": 1.5, "query_pre_attn_scalar": 16}),
    ("granite", {"logits_scaling": 3.0}),
    ("cohere", {"logit_scale": 0.2}),
])  # fmt: skip
def test_softcaps_and_scales_of_logits_are_applied(
    family: str, transform: dict[str, float], new_model: Any, ragged_pairs: Any, plain_scores: Any
) -> None:
    model, pairs = new_model(family, **transform), ragged_pairs(5)
    with torch.no_grad():
        expected = [plain_scores(model, *pair, 0.8) for pair in pairs]
        got = scored_rows(Policy(model, 60, 5), pairs, 0.8)
        ids = torch.tensor([pairs[0][0].token_ids])
        bare = model.lm_head(model.model(ids).last_hidden_state)
        assert not torch.allclose(bare, model(ids).logits, atol=0.1)
    assert_rows_close(got, expected)


class Doubling(LlamaForCausalLM):
    """Transforms its logits without mentioning it in the config."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_an_unknown_transformation_of_logits_is_refused(new_model: Any) -> None:
    model = new_model("llama")
    model.__class__ = Doubling
    with pytest.raises(UserError, match="Doubling is not supported: it transforms its logits"):
        Policy(model)


def weighted_sum(scores: Any, weights: Tensor) -> Tensor:
    """Return a scalar to which every score contributes; `weights` is [3, T]."""
    return sum((weight * column).sum() for weight, column in zip(weights, scores, strict=True))  # type: ignore[return-value]


def token_weights(pairs: Pairs) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(3, len(completion.token_ids), generator=generator) for _, completion in pairs
    ]


def plain_gradient(
    model: Any, pairs: Pairs, weights: list[Tensor], plain_scores: Any
) -> dict[str, Tensor]:
    """Compute the gradient in float64, row by row."""
    copied = copy.deepcopy(model).double()
    copied.zero_grad()
    for pair, weight in zip(pairs, weights, strict=True):
        weighted_sum(plain_scores(copied, *pair, 0.9), weight.double()).backward()
    return {name: weight.grad for name, weight in copied.named_parameters()}


def loss_of(weights: list[Tensor]) -> Callable[[MicroBatch, Scores], Tensor]:
    def loss(batch: MicroBatch, scores: Scores) -> Tensor:
        columns = (scores.logprobs, scores.entropies, scores.complements)
        return sum(  # type: ignore[return-value]
            weighted_sum([column[index][batch.mask[index]] for column in columns], weights[row])
            for index, row in enumerate(batch.rows)
        )

    return loss


def assert_gradients_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        error = (got[name].double() - gradient).abs().max()
        assert error <= 1e-5 * max(1.0, gradient.abs().max().item()), f"{name}: off by {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_full_logits(
    family: str, new_model: Any, ragged_pairs: Any, plain_scores: Any
) -> None:
    model, pairs = new_model(family), ragged_pairs(5)
    weights = token_weights(pairs)
    expected = plain_gradient(model, pairs, weights, plain_scores)
    assert min(gradient.abs().max().item() for gradient in expected.values()) > 1e-3
    for micro_batch_tokens, head_tokens in [(1, 4096), (40, 7)]:
        got = Policy(model, micro_batch_tokens, head_tokens).gradient(pairs, 0.9, loss_of(weights))
        assert_gradients_close(got, expected)


def test_backward_gives_the_result_of_gradient(
    new_model: Any, ragged_pairs: Any, plain_scores: Any
) -> None:
    model, pairs = new_model("qwen3"), ragged_pairs(5)
    weights, policy = token_weights(pairs), Policy(model, 40, 7)
    expected = plain_gradient(model, pairs, weights, plain_scores)
    for batch in policy.micro_batches(pairs):
        loss_of(weights)(batch, policy.score(batch, 0.9)).backward()
    assert_gradients_close(
        {name: weight.grad for name, weight in model.named_parameters()}, expected
    )


@pytest.mark.parametrize("has_grad", [False, True])
def test_gradient_keeps_weights_and_grad_fields(
    has_grad: bool, new_model: Any, ragged_pairs: Any, fingerprint: Any
) -> None:
    model, pairs = new_model("llama"), ragged_pairs(5)
    if has_grad:
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, 0.25)
    before = fingerprint([(weight, weight.grad) for weight in model.parameters()])
    policy = Policy(model, 40)
    first = policy.gradient(pairs, 0.9, loss_of(token_weights(pairs)))
    assert fingerprint([(weight, weight.grad) for weight in model.parameters()]) == before
    second = policy.gradient(pairs, 0.9, loss_of(token_weights(pairs)))
    assert fingerprint(first) == fingerprint(second)


def test_a_micro_batch_without_a_loss_adds_nothing(new_model: Any, ragged_pairs: Any) -> None:
    pairs = ragged_pairs(6)
    policy, weights = Policy(new_model("llama"), 1), token_weights(pairs)
    loss = loss_of(weights)
    some = policy.gradient(
        pairs, 0.9, lambda batch, scores: loss(batch, scores) if batch.rows[0] < 2 else None
    )
    alone = policy.gradient(pairs[:2], 0.9, loss)
    assert_gradients_close(some, {name: gradient.double() for name, gradient in alone.items()})
    assert policy.gradient(pairs, 0.9, lambda batch, scores: None) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_score_like_a_model_with_these_weights(
    family: str, new_model: Any, ragged_pairs: Any, plain_scores: Any, fingerprint: Any
) -> None:
    model, other, pairs = new_model(family), new_model(family, seed=1), ragged_pairs(6)
    policy = Policy(model, 40, 7)
    before = fingerprint(list(model.parameters()))
    with torch.no_grad():
        expected = [plain_scores(other, *pair, 1.2) for pair in pairs]
        assert_rows_close(
            scored_rows(policy, pairs, 1.2, dict(Policy(other).named_weights())), expected
        )
        assert_rows_close(
            scored_rows(policy, pairs, 1.2), [plain_scores(model, *pair, 1.2) for pair in pairs]
        )
    assert fingerprint(list(model.parameters())) == before


def test_named_weights_yields_each_weight_once_and_detached(new_model: Any) -> None:
    for family, tied in (("qwen3", True), ("llama", False)):
        weights = dict(Policy(new_model(family)).named_weights())
        assert ("lm_head.weight" in weights) is not tied
        assert not any(weight.requires_grad for weight in weights.values())


def test_the_policy_is_converted_to_fp32(new_model: Any) -> None:
    policy = Policy(new_model("llama").bfloat16())
    assert {weight.dtype for _, weight in policy.named_weights()} == {torch.float32}


def test_a_dominant_token_has_a_finite_complement(new_model: Any, ragged_pairs: Any) -> None:
    """At a low temperature p rounds to 1, but log(1 − p) is finite and has a gradient."""
    policy, pairs = Policy(new_model("llama")), ragged_pairs(1)
    prompt = pairs[0][0]
    with torch.no_grad():
        most_likely = int(policy.model(torch.tensor([prompt.token_ids])).logits[0, -1].argmax())
    (batch,) = policy.micro_batches([(prompt, Completion((most_likely,), (0.0,), "", True))])
    scores = policy.score(batch, 0.005)
    assert scores.logprobs.item() == 0.0
    assert -10_000 < scores.complements.item() < -17
    gradients = torch.autograd.grad(scores.complements.sum(), list(policy.model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert max(gradient.abs().max().item() for gradient in gradients) > 1


def test_gradients_under_other_weights(demo_copy: Any, ragged_pairs: Any) -> None:
    """The backward pass recomputes logits after θ is back; it must still use the other weights."""
    policy, pairs = Policy(demo_copy), ragged_pairs(3)
    others = {name: (1.5 * weight).requires_grad_() for name, weight in policy.named_weights()}
    moved = Policy(copy.deepcopy(demo_copy))
    with torch.no_grad():
        for weight in moved.model.parameters():
            weight.mul_(1.5)
    [batch] = policy.micro_batches(pairs)
    policy.score(batch, 0.9, others).logprobs.sum().backward()
    expected = moved.gradient(pairs, 0.9, lambda batch, scores: scores.logprobs.sum())
    for name, gradient in expected.items():
        torch.testing.assert_close(others[name].grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_matrices_score_like_fp32_weights_under_autocast(
    family: str, new_model: Any, ragged_pairs: Any
) -> None:
    model, pairs = new_model(family), ragged_pairs(6)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data = weight.data.bfloat16().float()  # as if published in bf16
    reference = Policy(copy.deepcopy(model), 60, 7, matrix_dtype=torch.bfloat16)
    exact = Policy(copy.deepcopy(model), 60, 7)
    autocast = Policy(model, 60, 7, compute_dtype=torch.bfloat16)  # as on a GPU
    for weight in reference.model.parameters():
        assert weight.dtype == (torch.bfloat16 if weight.ndim > 1 else torch.float32)
    with torch.no_grad():
        rows = [scored_rows(policy, pairs, 1.0) for policy in (reference, autocast, exact)]
    for columns in zip(*rows, strict=True):
        for of_reference, of_autocast, of_exact in zip(*columns, strict=True):
            assert torch.equal(of_reference, of_autocast)
            assert not torch.equal(of_reference, of_exact)
