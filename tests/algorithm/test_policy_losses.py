"""GSPO, CISPO, Clip-Cov and KL-Cov against their formulas, with gradients, on small tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eepo.algorithm import token_mean, token_weights
from eepo.algorithm.cispo import cispo_loss
from eepo.algorithm.covariance import clip_cov_loss, covariances, kl_cov_loss, selected_tokens
from eepo.algorithm.losses import PolicyTerms, TokenLoss, grpo_token_loss
from eepo.algorithm.sequence_ratio import gspo_loss
from eepo.config import AlgorithmConfig

LENGTHS = [3, 1, 2]
ADVANTAGES = [1.5, -0.5, -1.0]
MASK = torch.tensor([[t < length for t in range(3)] for length in LENGTHS])


def gaps() -> Tensor:
    """Return log ratios inside and outside of the clipping range, and NaN on padding."""
    values = [[0.1, 0.4, -0.5], [-0.6, math.nan, math.nan], [0.9, -0.05, math.nan]]
    return torch.tensor(values, dtype=torch.float64)


def make_terms(selected: Tensor | None = None) -> PolicyTerms:
    old = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, 0.0, 0.0], [-0.2, -4.0, 0.0]]).double()
    logprobs = (old + gaps()).requires_grad_()
    chosen = torch.zeros_like(MASK) if selected is None else selected
    return PolicyTerms(logprobs, old, torch.tensor(ADVANTAGES).double(), MASK, chosen)


def tokens() -> list[tuple[int, int]]:
    return [(row, t) for row, length in enumerate(LENGTHS) for t in range(length)]


def gradient(terms: PolicyTerms, loss: TokenLoss, weights: list[float] | None = None) -> Tensor:
    """Return the gradient of the mean over tokens on the log-probabilities, times the tokens."""
    rows = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    (token_mean(loss.values, MASK, rows) * MASK.sum()).backward()
    assert terms.logprobs.grad is not None
    return terms.logprobs.grad


# --- GSPO


def test_gspo_is_the_mean_over_completions_of_the_clipped_sequence_ratio() -> None:
    options = AlgorithmConfig(
        loss="gspo", loss_normalisation="completion", clip_low=0.1, clip_high=0.2
    )
    terms = make_terms()
    loss = gspo_loss(terms, options)
    weights = token_weights(LENGTHS, 1, options)
    total, gradients = 0.0, {}
    for row, length in enumerate(LENGTHS):
        ratio = math.exp(sum(gaps()[row, :length].tolist()) / length)
        advantage = ADVANTAGES[row]
        clipped = min(max(ratio, 0.9), 1.2)
        total -= min(ratio * advantage, clipped * advantage) / len(LENGTHS)
        kept = ratio * advantage <= clipped * advantage
        for t in range(length):
            slope = -advantage * ratio / length / len(LENGTHS)
            gradients[row, t] = slope if kept else 0.0
            assert loss.clipped[row, t].item() == (not kept)
    mean = token_mean(loss.values, MASK, torch.tensor(weights, dtype=torch.float64))
    assert mean.item() == pytest.approx(total)
    actual = gradient(terms, loss, weights) / MASK.sum()
    assert {at: actual[at].item() for at in tokens()} == pytest.approx(gradients)
    assert sum(value == 0 for value in gradients.values()) in range(1, 6)


# --- CISPO


def test_cispo_weighs_the_gradient_of_every_token_by_the_capped_ratio() -> None:
    options = AlgorithmConfig(loss="cispo", clip_low=0.3, clip_high=0.5)
    terms = make_terms()
    loss = cispo_loss(terms, options)
    actual = gradient(terms, loss)
    for row, t in tokens():
        ratio = math.exp(gaps()[row, t].item())
        weight = min(max(ratio, 0.7), 1.5)
        value = -weight * ADVANTAGES[row] * terms.logprobs[row, t].item()
        assert loss.values[row, t].item() == pytest.approx(value)
        assert actual[row, t].item() == pytest.approx(-weight * ADVANTAGES[row])
        assert loss.clipped[row, t].item() == (weight != ratio)
    assert 0 < loss.clipped[MASK].sum() < MASK.sum()


def test_cispo_equals_grpo_while_the_ratio_is_1() -> None:
    """Both gradients are −A on every token of the first mini-batch."""
    gradients = []
    for function in (cispo_loss, grpo_token_loss):
        logprobs = torch.full((3, 3), -1.0, dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
        nowhere = torch.zeros_like(MASK)
        terms = PolicyTerms(logprobs, logprobs.detach(), advantages, MASK, nowhere)
        gradients.append(gradient(terms, function(terms, AlgorithmConfig())))
    assert torch.equal(*gradients)


# --- Clip-Cov and KL-Cov


def test_clip_cov_removes_the_gradient_of_selected_tokens() -> None:
    selected = torch.zeros_like(MASK)
    selected[0, 0] = selected[2, 1] = True
    terms, plain = make_terms(selected), make_terms()
    actual = gradient(terms, clip_cov_loss(terms, AlgorithmConfig(loss="clip_cov")))
    expected = gradient(plain, grpo_token_loss(plain, AlgorithmConfig()))
    assert expected[0, 0] != 0
    assert expected[2, 1] != 0
    assert torch.equal(actual[MASK], torch.where(selected, 0.0, expected)[MASK])
    assert clip_cov_loss(make_terms(selected), AlgorithmConfig()).clipped[0, 0]


def test_kl_cov_has_no_clipping_and_a_penalty_on_selected_tokens() -> None:
    selected = torch.zeros_like(MASK)
    selected[0, 1] = selected[1, 0] = True
    terms = make_terms(selected)
    loss = kl_cov_loss(terms, AlgorithmConfig(loss="kl_cov", cov_kl_coef=2.0))
    actual = gradient(terms, loss)
    for row, t in tokens():
        gap = gaps()[row, t].item()
        coef = 2.0 if selected[row, t] else 0.0
        value = -math.exp(gap) * ADVANTAGES[row] + coef * abs(gap)
        slope = -math.exp(gap) * ADVANTAGES[row] + coef * math.copysign(1, gap)
        assert loss.values[row, t].item() == pytest.approx(value)
        assert actual[row, t].item() == pytest.approx(slope)
    assert not loss.clipped.any()


def test_covariances_are_products_of_differences_to_the_means() -> None:
    logprobs, advantages = torch.tensor([-1.0, -3.0, -2.0]), torch.tensor([1.0, 1.0, -0.5])
    expected = [1.0 * 0.5, -1.0 * 0.5, 0.0 * -1.0]
    assert covariances(logprobs, advantages).tolist() == pytest.approx(expected)


def test_kl_cov_selects_the_largest_covariances() -> None:
    parts = torch.tensor([0.1, 3.0, -2.0, 2.0, 0.0, 9.0])
    options = AlgorithmConfig(loss="kl_cov", cov_share=0.5)
    chosen = selected_tokens(parts, torch.zeros(6, dtype=torch.bool), options, seed=0)
    assert chosen.tolist() == [False, True, False, True, False, True]
    fewest = AlgorithmConfig(loss="kl_cov", cov_share=1e-4)
    chosen = selected_tokens(parts, torch.zeros(6, dtype=torch.bool), fewest, seed=0)
    assert chosen.nonzero().flatten().tolist() == [5]  # at least one


def test_clip_cov_selects_at_random_within_the_bounds_and_not_what_is_clipped() -> None:
    parts = torch.cat([torch.full((50,), 2.0), torch.full((25,), 0.5), torch.full((25,), 7.0)])
    clipped = torch.arange(100) < 10
    options = AlgorithmConfig(loss="clip_cov", cov_share=0.2, cov_low=1.0, cov_high=5.0)
    choices = [selected_tokens(parts, clipped, options, seed) for seed in range(40)]
    for chosen in choices:
        assert chosen.sum() == 20
        assert not chosen[:10].any()
        assert not chosen[50:].any()
    assert torch.stack(choices)[:, 10:50].any(0).all()  # every candidate is chosen at times
    assert torch.equal(choices[3], selected_tokens(parts, clipped, options, 3))


def test_clip_cov_selects_nothing_if_no_token_is_within_the_bounds() -> None:
    nowhere = torch.zeros(4, dtype=torch.bool)
    options = AlgorithmConfig(loss="clip_cov", cov_share=1.0)
    assert not selected_tokens(torch.tensor([0.5, -3.0, 8.0, 1.0]), nowhere, options, 0).any()
