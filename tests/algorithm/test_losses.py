"""Losses against plain loops in float64."""

from __future__ import annotations

import math
import statistics
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eepo.algorithm import (
    PolicyTerms,
    complementary_loss,
    completion_mean,
    grpo_token_loss,
    kl_penalty,
    regularised,
    token_mean,
    token_weights,
    unlearn_loss,
)
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores

NAN, INF = math.nan, math.inf


@st.composite
def ragged(draw: st.DrawFn, values: st.SearchStrategy[float]) -> list[list[float]]:
    """Draw 1 to 4 rows of 1 to 9 values."""
    return draw(st.lists(st.lists(values, min_size=1, max_size=9), min_size=1, max_size=4))


def padded(
    rows: list[list[float]], filler: float = 0.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return the values as [B, T] with `filler` on padding, and their mask."""
    longest = max(map(len, rows))
    values = torch.tensor([row + [filler] * (longest - len(row)) for row in rows], dtype=dtype)
    mask = torch.tensor([[t < len(row) for t in range(longest)] for row in rows])
    return values, mask


# --- unlearning


def softmax_scores(logits: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Return log p and log(1 − p) of `token`, each [1, 1], from plain logits."""
    others = torch.cat([logits[:token], logits[token + 1 :]])
    logprob = logits[token] - logits.logsumexp(0)
    return logprob.view(1, 1), (others.logsumexp(0) - logits.logsumexp(0)).view(1, 1)


@pytest.mark.parametrize("saturation", ["stop", "exact"])
@pytest.mark.parametrize("level", [-6.0, 0.0, 2.0, 6.0])
def test_gradient_on_the_sampled_logit_equals_p(saturation: str, level: float) -> None:
    logits = torch.tensor([0.3, level, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    logprob, complement = softmax_scores(logits, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    complementary_loss(logprob, mask, mask, 1e-4, saturation, complement).backward()
    assert logits.grad is not None
    assert logits.grad[1].item() == pytest.approx(logprob.exp().item(), rel=1e-6)


@pytest.mark.parametrize("saturation", ["stop", "exact"])
def test_each_token_is_weighted_by_completion_length_and_batch_size(saturation: str) -> None:
    """The gradient on a sampled logit is p / (T_k · B). T_k counts tokens that are not gated."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    gate = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    log_p = logits.log_softmax(-1)
    # Token 2 is the sampled token at every position.
    complements = torch.cat([log_p[..., :2], log_p[..., 3:]], -1).logsumexp(-1)
    complementary_loss(log_p[..., 2], mask, gate, 1e-4, saturation, complements).backward()
    lengths = torch.tensor([4.0, 2.0, 3.0])
    expected = torch.where(mask & gate, log_p[..., 2].exp() / lengths[:, None] / 3, 0.0)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[..., 2], expected.detach())


@pytest.mark.parametrize("saturation", ["stop", "exact"])
@pytest.mark.parametrize("level", [-3.0, 0.0, 4.0])
def test_descent_makes_the_sampled_token_less_likely(saturation: str, level: float) -> None:
    logits = torch.tensor([0.1, level, -0.5], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    before, complement = softmax_scores(logits, 1)
    complementary_loss(before, mask, mask, 1e-4, saturation, complement).backward()
    with torch.no_grad():
        after, _ = softmax_scores(logits - 0.1 * logits.grad, 1)
    assert after.item() < before.item() - 1e-4


def test_ascent_on_the_nll_makes_the_sampled_token_less_likely() -> None:
    logits = torch.tensor([0.1, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    before, complement = softmax_scores(logits, 1)
    options = AlgorithmConfig(unlearn_loss="nll")
    loss = unlearn_loss(Scores(before, torch.zeros(1, 1), complement), mask, mask, options)
    assert loss.item() == pytest.approx(before.item())  # minus the NLL
    loss.backward()
    with torch.no_grad():
        after, _ = softmax_scores(logits - 0.1 * logits.grad, 1)
    assert after.item() < before.item() - 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logprob", [0.0, -1e-38, -1e-8, -1e-4, -1e-3, -50.0, -200.0])
def test_stop_is_finite_and_has_no_gradient_above_the_ceiling(
    logprob: float, dtype: torch.dtype
) -> None:
    logprobs = torch.tensor([[logprob]], dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = complementary_loss(logprobs, mask, mask, 1e-3)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    if math.exp(logprob) > 1 - 1e-3:
        assert logprobs.grad.item() == 0.0
        assert loss.item() == pytest.approx(-math.log(1e-3), rel=1e-4)
    else:
        assert logprobs.grad.item() == pytest.approx(
            math.exp(logprob) / -math.expm1(logprob), rel=1e-3
        )


def test_exact_has_a_gradient_where_the_probability_rounds_to_1() -> None:
    """In fp32 with a logit gap of 40, log p is exactly 0.0; log(1 − p) uses the other tokens."""
    logits = torch.tensor([0.0, 40.0, -1.0], requires_grad=True)
    logprob, complement = softmax_scores(logits, 1)
    assert logprob.item() == 0.0
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = complementary_loss(logprob, mask, mask, 1e-4, "exact", complement)
    loss.backward()
    assert logits.grad is not None
    assert loss.item() == pytest.approx(40 - math.log(1 + math.exp(-1)), rel=1e-5)
    assert logits.grad[1].item() == pytest.approx(1.0)
    assert logits.grad.sum().item() == pytest.approx(0.0, abs=1e-6)


@given(
    ragged(st.floats(-30, -1e-7)),
    st.floats(1e-6, 0.5),
    st.integers(0, 2**36 - 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_complementary_loss_and_gradient_equal_a_plain_loop(
    rows: list[list[float]], eps: float, gate_bits: int, dtype: torch.dtype
) -> None:
    logprobs, mask = padded(rows, filler=NAN, dtype=dtype)
    bits = [gate_bits >> index & 1 for index in range(mask.numel())]
    gate = torch.tensor(bits, dtype=torch.bool).view(mask.shape)
    logprobs.requires_grad_()
    loss = complementary_loss(logprobs, mask, gate, eps)
    loss.backward()

    exact = logprobs.detach().double()
    total, gradient = 0.0, torch.zeros_like(exact)
    for k, row in enumerate(rows):
        for t in range(len(row)):
            if gate[k, t]:
                x = exact[k, t].item()
                p = math.exp(x)
                below_ceiling = p < 1 - eps
                weight = 1 / len(row) / len(rows)
                total -= math.log(-math.expm1(x) if below_ceiling else eps) * weight
                gradient[k, t] = p / -math.expm1(x) * weight if below_ceiling else 0.0
    at_ceiling = (exact.exp() - (1 - eps)).abs() < 1e-6  # may be rounded to either side
    tolerance = 2e-3 if at_ceiling.any() else 1e-4
    assert loss.item() == pytest.approx(total, rel=tolerance, abs=1e-9)
    assert logprobs.grad is not None
    actual = torch.where(at_ceiling, 0.0, logprobs.grad.double())
    expected = torch.where(at_ceiling, 0.0, gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-12)


def test_gate_on_padding_has_no_effect() -> None:
    logprobs = torch.tensor([[-0.5, -1.0, NAN], [-0.2, 0.0, -INF]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    all_gated = torch.ones(2, 3, dtype=torch.bool)
    loss = complementary_loss(logprobs, mask, all_gated, 1e-4)
    assert loss.item() == complementary_loss(logprobs, mask, mask, 1e-4).item()
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[~mask].tolist() == [0.0, 0.0, 0.0]
    assert (logprobs.grad[mask] > 0).all()


def test_completion_mean_divides_by_all_tokens_of_a_completion() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    gate = torch.tensor([[0, 1, 0, 0], [1, 1, 1, 1]])
    assert completion_mean(values, mask, gate).item() == pytest.approx((2 / 4 + 11 / 2) / 2)


def test_exact_without_complements_is_an_error() -> None:
    mask = torch.ones(1, 1)
    with pytest.raises(ValueError, match="complements"):
        complementary_loss(-mask, mask, mask, 1e-4, "exact")


# --- policy update

log_ratios = st.floats(-1.0, 1.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    options: AlgorithmConfig,
    weights: Tensor | None = None,
) -> Tensor:
    """Return GRPO's policy loss as an update computes it: the mean over token losses."""
    terms = PolicyTerms(logprobs, old_logprobs, advantages, mask, torch.zeros_like(mask))
    return token_mean(grpo_token_loss(terms, options).values, mask, weights)


@given(
    ragged(st.tuples(log_ratios, st.floats(-5, 0))),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.5),
    st.data(),
)
def test_policy_loss_equals_a_plain_clipped_surrogate(
    rows: list[list[tuple[float, float]]], clip_low: float, clip_high: float, data: st.DataObject
) -> None:
    advantages = [data.draw(st.floats(-3, 3)) for _ in rows]
    gaps, mask = padded([[gap for gap, _ in row] for row in rows])
    sampled, _ = padded([[old for _, old in row] for row in rows], filler=NAN)
    current = torch.where(mask, sampled + gaps, INF).requires_grad_()
    weights = torch.tensor(advantages, dtype=torch.float64)
    options = AlgorithmConfig(clip_low=clip_low, clip_high=clip_high)
    loss = policy_loss(current, sampled, weights, mask, options)
    loss.backward()

    total, num_tokens, gradient = 0.0, sum(map(len, rows)), torch.zeros_like(gaps)
    at_edge = torch.zeros_like(mask)
    for k, advantage in enumerate(advantages):
        for t in range(len(rows[k])):
            ratio = math.exp(current[k, t].item() - sampled[k, t].item())
            clipped_ratio = min(max(ratio, 1 - clip_low), 1 + clip_high)
            total -= min(ratio * advantage, clipped_ratio * advantage) / num_tokens
            too_high = advantage > 0 and ratio > 1 + clip_high
            too_low = advantage < 0 and ratio < 1 - clip_low
            gradient[k, t] = 0.0 if too_high or too_low else -ratio * advantage / num_tokens
            at_edge[k, t] = min(abs(ratio - 1 + clip_low), abs(ratio - 1 - clip_high)) < 1e-9
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert current.grad is not None
    actual, expected = (torch.where(at_edge, 0.0, grad) for grad in (current.grad, gradient))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.3),  # clipped at 1 + clip_high
        (1.5, -1.0, 1.5),  # not clipped: the gradient lowers the ratio
        (0.5, 1.0, -0.5),  # not clipped: the gradient raises the ratio
        (0.5, -1.0, 0.9),  # clipped at 1 − clip_low
    ],
)
def test_clipping_is_one_sided_and_asymmetric(
    ratio: float, advantage: float, expected: float
) -> None:
    current = torch.tensor([[math.log(ratio)]])
    sampled, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    options = AlgorithmConfig(clip_low=0.1, clip_high=0.3)
    loss = policy_loss(current, sampled, torch.tensor([advantage]), mask, options)
    assert loss.item() == pytest.approx(expected)


@given(ragged(st.tuples(st.floats(-6, 0), st.floats(-6, 0))))
def test_kl_penalty_equals_a_plain_k3_mean(rows: list[list[tuple[float, float]]]) -> None:
    current, mask = padded([[new for new, _ in row] for row in rows], filler=-INF)
    reference, _ = padded([[old for _, old in row] for row in rows], filler=NAN)
    current.requires_grad_()
    loss = kl_penalty(current, reference, mask)
    loss.backward()
    gaps = [old - new for row in rows for new, old in row]
    mean = statistics.fmean(math.exp(gap) - 1 - gap for gap in gaps)
    assert loss.item() == pytest.approx(mean, rel=1e-9, abs=1e-12)
    assert current.grad is not None
    expected = torch.tensor([(1 - math.exp(gap)) / len(gaps) for gap in gaps], dtype=torch.float64)
    torch.testing.assert_close(current.grad[mask], expected)
    assert not current.grad[~mask].any()


def test_k3_estimates_the_kl_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.2, 0.3]).log()
    tokens = torch.multinomial(p.exp(), 40_000, replacement=True, generator=generator)
    estimate = kl_penalty(p[tokens][None], q[tokens][None], torch.ones(1, 40_000))
    assert estimate.item() == pytest.approx(((p - q) * p.exp()).sum().item(), rel=0.03)


def test_token_mean_averages_over_tokens_not_rows() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, NAN, INF]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert token_mean(values, mask).item() == 4.0
    assert token_mean(values, torch.zeros(2, 3, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize(
    ("normalisation", "surrogate", "entropy", "kl"),
    [
        # All 8 tokens of the mini-batch weigh the same.
        (
            "mini_batch",
            (8 - 5 * 4 + 6 - 2) / 8,
            (1 + 5 * 2 + 3 + 5) / 8,
            (1 - math.log(2) + 3 - math.log(4)) / 8,
        ),
        # The mean of both groups: 6 tokens, and 2 tokens.
        (
            "group",
            ((8 - 5 * 4) / 6 + (6 - 2) / 2) / 2,
            ((1 + 5 * 2) / 6 + (3 + 5) / 2) / 2,
            ((1 - math.log(2)) / 6 + (3 - math.log(4)) / 2) / 2,
        ),
    ],
)
def test_the_loss_is_a_mean_over_the_tokens_of_a_mini_batch_or_over_groups(
    normalisation: Literal["mini_batch", "group"], surrogate: float, entropy: float, kl: float
) -> None:
    """Two groups of two completions, with 1, 5, 1 and 1 tokens and ratios of 1."""
    lengths, advantages = [1, 5, 1, 1], torch.tensor([8.0, -4.0, 6.0, -2.0])
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    logprobs = torch.full((4, 5), -0.7)
    entropies = torch.tensor([1.0, 2.0, 3.0, 5.0])[:, None].expand(4, 5)
    # k3 of a factor f is f - 1 - log f: the second and the fourth completion have none.
    reference = logprobs + torch.tensor([2.0, 1.0, 4.0, 1.0]).log()[:, None]
    options = AlgorithmConfig(loss_normalisation=normalisation, entropy_coef=0.5, kl_coef=0.25)
    weights = torch.tensor(token_weights(lengths, 2, options))
    loss = policy_loss(logprobs, logprobs, advantages, mask, options, weights)
    scores = Scores(logprobs, entropies)
    loss = regularised(loss, scores, reference, mask, options, weights)
    assert loss.item() == pytest.approx(-surrogate - 0.5 * entropy + 0.25 * kl)


@pytest.mark.parametrize("has_reference", [False, True])
def test_entropy_bonus_and_kl_penalty_are_added(has_reference: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = -torch.rand(2, 2, 4, generator=generator)
    entropies = torch.rand(2, 4, generator=generator)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    options = AlgorithmConfig(entropy_coef=0.2, kl_coef=0.4)
    scores, loss = Scores(logprobs, entropies), torch.tensor(3.0)
    total = regularised(loss, scores, reference if has_reference else None, mask, options)
    expected = 3.0 - 0.2 * entropies[mask].mean()
    if has_reference:
        gaps = (reference - logprobs)[mask]
        expected = expected + 0.4 * (gaps.exp() - 1 - gaps).mean()
    assert total.item() == pytest.approx(expected.item())
