"""The mathematics of one step against plain loops in float64."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eepo.algorithm import (
    complementary_loss,
    completion_mean,
    group_advantages,
    kl_penalty,
    policy_loss,
    token_gate,
    token_mean,
    unlearn_loss,
    unlearned_weights,
)
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores

NAN, INF = math.nan, math.inf


@st.composite
def ragged(draw: st.DrawFn, values: st.SearchStrategy[float]) -> list[list[float]]:
    """1 to 4 rows of 1 to 9 values."""
    return draw(st.lists(st.lists(values, min_size=1, max_size=9), min_size=1, max_size=4))


def padded(
    rows: list[list[float]], filler: float = 0.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Values [B, T] with `filler` on padding, and their mask."""
    longest = max(map(len, rows))
    values = torch.tensor([row + [filler] * (longest - len(row)) for row in rows], dtype=dtype)
    return values, torch.tensor(
        [[True] * len(row) + [False] * (longest - len(row)) for row in rows]
    )


# --- advantages


@given(
    st.integers(2, 9).flatmap(
        lambda size: st.lists(st.lists(st.floats(-5, 5), min_size=size, max_size=size), min_size=1)
    )
)
def test_advantages_are_rewards_standardised_within_their_group(rewards: list[list[float]]) -> None:
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()
    for group, got in zip(rewards, advantages, strict=True):
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
        expected = [
            0.0 if len(set(group)) == 1 else (reward - mean) / (deviation + 1e-6)
            for reward in group
        ]
        assert got == pytest.approx(expected, abs=1e-6)


def test_advantages_of_one_right_answer_in_four() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64))
    assert advantages.tolist()[0] == pytest.approx(
        [0.75 / 0.500001, *[-0.25 / 0.500001] * 3], rel=1e-9
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7, 1 / 3, 1e-8, -0.3])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 16])
def test_equal_rewards_give_exact_zeros_whatever_their_mean_rounds_to(
    reward: float, size: int
) -> None:
    rewards = torch.stack([torch.full((size,), reward), torch.arange(size).float()])
    advantages = group_advantages(rewards)
    assert advantages[0].tolist() == [0.0] * size
    assert advantages[1].max() > 0.5


# --- gate


@given(ragged(st.floats(0, 2)), st.floats(0, 2), st.integers(1, 15))
def test_the_gate_is_the_mean_of_the_last_entropies_under_the_threshold(
    rows: list[list[float]], threshold: float, window: int
) -> None:
    entropies, mask = padded(rows)
    gate = token_gate(entropies, mask, threshold, window).tolist()
    for row, got in zip(rows, gate, strict=True):
        assert got[len(row) :] == [False] * (len(got) - len(row))
        for t in range(len(row)):
            last = row[max(0, t - window + 1) : t + 1]
            if abs(statistics.fmean(last) - threshold) > 1e-9:  # a tie may round either way
                assert got[t] == (statistics.fmean(last) < threshold)


def test_the_gate_is_strict_and_the_window_shorter_at_the_start() -> None:
    entropies = torch.tensor([[0.5, 0.25, 0.0, 1.0, 0.0, 0.0]])
    gate = token_gate(entropies, torch.ones(1, 6), 0.375, 3)
    assert gate.tolist() == [
        [False, False, True, False, True, True]
    ]  # means .5, .375, .25, .4167, .3333, .3333


def test_threshold_0_opens_nothing() -> None:
    entropies = torch.tensor([[0.0, 0.0, 0.3], [0.0, 1.0, 0.0]])
    assert not token_gate(entropies, torch.ones(2, 3), 0.0, 3).any()


@pytest.mark.parametrize("window", [1, 3, 50])
def test_padding_neither_opens_the_gate_nor_moves_it(window: int) -> None:
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    clean = torch.tensor([[0.1, 0.4, 0.0, 0.0], [0.1, 0.1, 0.9, 0.1]])
    dirty = torch.tensor([[0.1, 0.4, NAN, INF], [0.1, 0.1, 0.9, 0.1]])
    gate = token_gate(dirty, mask, 0.3, window)
    assert torch.equal(gate, token_gate(clean, mask, 0.3, window))
    assert gate[0].tolist()[2:] == [False, False]


# --- complementary loss


def softmax_scores(logits: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """log p and log(1 − p) of `token`, each [1, 1], from plain logits."""
    others = torch.cat([logits[:token], logits[token + 1 :]])
    logprob = logits[token] - logits.logsumexp(0)
    return logprob.view(1, 1), (others.logsumexp(0) - logits.logsumexp(0)).view(1, 1)


@pytest.mark.parametrize("saturation", ["stop", "exact"])
@pytest.mark.parametrize("level", [-6.0, 0.0, 2.0, 6.0])
def test_the_gradient_on_the_sampled_logit_is_p(saturation: str, level: float) -> None:
    logits = torch.tensor([0.3, level, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    logprob, complement = softmax_scores(logits, 1)
    one = torch.ones(1, 1, dtype=torch.bool)
    complementary_loss(logprob, one, one, 1e-4, saturation, complement).backward()
    assert logits.grad is not None
    assert logits.grad[1].item() == pytest.approx(logprob.exp().item(), rel=1e-6)


@pytest.mark.parametrize("saturation", ["stop", "exact"])
def test_each_token_weighs_one_over_its_completion_and_the_batch(saturation: str) -> None:
    """p / (T_k · B) on every sampled logit, and T_k counts tokens whose gate is shut."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    gate = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    log_p = logits.log_softmax(-1)
    complements = torch.cat([log_p[..., :2], log_p[..., 3:]], -1).logsumexp(
        -1
    )  # token 2 was sampled everywhere
    complementary_loss(log_p[..., 2], mask, gate, 1e-4, saturation, complements).backward()
    lengths = torch.tensor([4.0, 2.0, 3.0])
    expected = torch.where(mask & gate, log_p[..., 2].exp() / lengths[:, None] / 3, 0.0)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[..., 2], expected.detach())


@pytest.mark.parametrize("saturation", ["stop", "exact"])
@pytest.mark.parametrize("level", [-3.0, 0.0, 4.0])
def test_a_step_down_makes_the_sampled_tokens_less_likely(saturation: str, level: float) -> None:
    logits = torch.tensor([0.1, level, -0.5], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    before, complement = softmax_scores(logits, 1)
    complementary_loss(before, one, one, 1e-4, saturation, complement).backward()
    with torch.no_grad():
        after, _ = softmax_scores(logits - 0.1 * logits.grad, 1)
    assert after.item() < before.item() - 1e-4


def test_ascent_on_the_nll_makes_the_sampled_tokens_less_likely() -> None:
    logits = torch.tensor([0.1, 1.0, -0.5], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    before, complement = softmax_scores(logits, 1)
    options = AlgorithmConfig(unlearn_loss="nll")
    loss = unlearn_loss(Scores(before, torch.zeros(1, 1), complement), one, one, options)
    assert loss.item() == pytest.approx(before.item())  # minus the NLL
    loss.backward()
    with torch.no_grad():
        after, _ = softmax_scores(logits - 0.1 * logits.grad, 1)
    assert after.item() < before.item() - 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logprob", [0.0, -1e-38, -1e-8, -1e-4, -1e-3, -50.0, -200.0])
def test_stop_is_finite_and_flat_above_its_ceiling(logprob: float, dtype: torch.dtype) -> None:
    logprobs = torch.tensor([[logprob]], dtype=dtype, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    loss = complementary_loss(logprobs, one, one, 1e-3)
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


def test_exact_pushes_down_a_token_whose_probability_rounds_to_1() -> None:
    """fp32, a gap of 40: log p is 0.0 exactly, and the other tokens still tell log(1 − p)."""
    logits = torch.tensor([0.0, 40.0, -1.0], requires_grad=True)
    logprob, complement = softmax_scores(logits, 1)
    assert logprob.item() == 0.0
    one = torch.ones(1, 1, dtype=torch.bool)
    loss = complementary_loss(logprob, one, one, 1e-4, "exact", complement)
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
def test_value_and_gradient_equal_a_plain_loop(
    rows: list[list[float]], eps: float, gate_bits: int, dtype: torch.dtype
) -> None:
    logprobs, mask = padded(rows, filler=NAN, dtype=dtype)
    gate = torch.tensor(
        [gate_bits >> place & 1 for place in range(mask.numel())], dtype=torch.bool
    ).view(mask.shape)
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
                kept = p < 1 - eps
                total += -math.log(-math.expm1(x) if kept else eps) / len(row) / len(rows)
                gradient[k, t] = p / -math.expm1(x) / len(row) / len(rows) if kept else 0.0
    near_the_ceiling = (exact.exp() - (1 - eps)).abs() < 1e-6  # may round to either side
    assert loss.item() == pytest.approx(
        total, rel=2e-3 if near_the_ceiling.any() else 1e-4, abs=1e-9
    )
    assert logprobs.grad is not None
    got = torch.where(near_the_ceiling, 0.0, logprobs.grad.double())
    torch.testing.assert_close(
        got, torch.where(near_the_ceiling, 0.0, gradient), rtol=1e-4, atol=1e-12
    )


def test_a_gate_on_padding_has_no_effect() -> None:
    logprobs = torch.tensor([[-0.5, -1.0, NAN], [-0.2, 0.0, -INF]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    opened = complementary_loss(logprobs, mask, torch.ones(2, 3, dtype=torch.bool), 1e-4)
    assert opened.item() == complementary_loss(logprobs, mask, mask, 1e-4).item()
    opened.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[~mask].tolist() == [0.0, 0.0, 0.0]
    assert (logprobs.grad[mask] > 0).all()


def test_completion_mean_counts_all_tokens_of_a_completion() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    gate = torch.tensor([[0, 1, 0, 0], [1, 1, 1, 1]])
    assert completion_mean(values, mask, gate).item() == pytest.approx((2 / 4 + 11 / 2) / 2)


def test_exact_without_complements_is_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="complements"):
        complementary_loss(-one, one, one, 1e-4, "exact")


# --- policy loss

log_ratios = st.floats(-1.0, 1.0)


@given(
    ragged(st.tuples(log_ratios, st.floats(-5, 0))),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.5),
    st.data(),
)
def test_policy_loss_is_the_clipped_surrogate(
    rows: list[list[tuple[float, float]]], clip_low: float, clip_high: float, data: st.DataObject
) -> None:
    advantages = [data.draw(st.floats(-3, 3)) for _ in rows]
    gaps, mask = padded([[gap for gap, _ in row] for row in rows])
    sampled, _ = padded([[old for _, old in row] for row in rows], filler=NAN)
    current = torch.where(mask, sampled + gaps, INF).requires_grad_()
    loss = policy_loss(
        current, sampled, torch.tensor(advantages, dtype=torch.float64), mask, clip_low, clip_high
    )
    loss.backward()

    total, number, gradient = 0.0, sum(map(len, rows)), torch.zeros_like(gaps)
    edge = torch.zeros_like(mask)
    for k, advantage in enumerate(advantages):
        for t in range(len(rows[k])):
            ratio = math.exp(current[k, t].item() - sampled[k, t].item())
            within = min(max(ratio, 1 - clip_low), 1 + clip_high)
            total -= min(ratio * advantage, within * advantage) / number
            pushed = (advantage > 0 and ratio > 1 + clip_high) or (
                advantage < 0 and ratio < 1 - clip_low
            )
            gradient[k, t] = 0.0 if pushed else -ratio * advantage / number
            edge[k, t] = min(abs(ratio - 1 + clip_low), abs(ratio - 1 - clip_high)) < 1e-9
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert current.grad is not None
    torch.testing.assert_close(
        torch.where(edge, 0.0, current.grad), torch.where(edge, 0.0, gradient)
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.3),  # a good token is not pushed past 1 + clip_high
        (1.5, -1.0, 1.5),  # a bad one that grew counts in full
        (0.5, 1.0, -0.5),  # a good one that shrank counts in full
        (0.5, -1.0, 0.9),  # a bad one is not pushed past 1 − clip_low
    ],
)
def test_clipping_is_one_sided_and_asymmetrical(
    ratio: float, advantage: float, expected: float
) -> None:
    current = torch.tensor([[math.log(ratio)]])
    loss = policy_loss(
        current, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), 0.1, 0.3
    )
    assert loss.item() == pytest.approx(expected)


@given(ragged(st.tuples(st.floats(-6, 0), st.floats(-6, 0))))
def test_kl_penalty_is_k3(rows: list[list[tuple[float, float]]]) -> None:
    current, mask = padded([[new for new, _ in row] for row in rows], filler=-INF)
    reference, _ = padded([[old for _, old in row] for row in rows], filler=NAN)
    current.requires_grad_()
    loss = kl_penalty(current, reference, mask)
    loss.backward()
    gaps = [old - new for row in rows for new, old in row]
    assert loss.item() == pytest.approx(
        statistics.fmean(math.exp(gap) - 1 - gap for gap in gaps), rel=1e-9, abs=1e-12
    )
    assert current.grad is not None
    expected = torch.tensor([(1 - math.exp(gap)) / len(gaps) for gap in gaps], dtype=torch.float64)
    torch.testing.assert_close(current.grad[mask], expected)
    assert not current.grad[~mask].any()


def test_k3_is_never_negative_and_estimates_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.2, 0.3]).log()
    drawn = torch.multinomial(p.exp(), 40_000, replacement=True, generator=generator)
    estimate = kl_penalty(p[drawn][None], q[drawn][None], torch.ones(1, 40_000))
    assert estimate.item() == pytest.approx(((p - q) * p.exp()).sum().item(), rel=0.03)


def test_token_mean_weighs_tokens_not_rows() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, NAN, INF]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert token_mean(values, mask).item() == 4.0
    assert token_mean(values, torch.zeros(2, 3, dtype=torch.bool)).item() == 0.0


# --- unlearned weights


def test_the_step_is_taken_in_fp32_and_then_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(65536, generator=generator)
    gradient = torch.randn(65536, generator=generator)
    ((_, moved),) = unlearned_weights([("w", weight)], {"w": gradient}, 3e-3, torch.bfloat16)
    in_bf16 = weight.bfloat16() - 3e-3 * gradient.bfloat16()
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, (weight - 3e-3 * gradient).to(torch.bfloat16))
    assert not torch.equal(moved, in_bf16)
    step, arrived = -3e-3 * gradient, moved.float() - weight.bfloat16().float()
    slope = (arrived * step).sum() / (step * step).sum()
    assert slope.item() == pytest.approx(
        1.0, abs=0.05
    )  # rounding dithers: on average the step arrives whole


def test_a_step_below_half_a_bf16_unit_still_moves_weights_near_a_border() -> None:
    weight = torch.tensor(
        [1.0 + 2**-8 - 2**-12, 1.0]
    )  # the first lies just under the middle of two bf16 numbers
    gradient = torch.tensor([-1.0, -1.0])
    ((_, moved),) = unlearned_weights([("w", weight)], {"w": gradient}, 2**-10, torch.bfloat16)
    assert moved.tolist() == [1.0 + 2**-7, 1.0]
    assert (weight.bfloat16() - 2**-10 * gradient.bfloat16()).tolist() == [1.0, 1.0]  # swallowed


def test_a_bf16_gradient_and_a_bf16_weight_still_step_in_fp32() -> None:
    weight, gradient = torch.tensor([1.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    ((_, moved),) = unlearned_weights([("w", weight)], {"w": gradient}, 1e-3, torch.float32)
    assert moved.item() == pytest.approx(0.999, abs=1e-7)


def test_weights_without_gradient_pass_and_nothing_is_edited() -> None:
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    gradient = {"a": torch.tensor([10.0, -10.0])}
    moved = dict(unlearned_weights(weights.items(), gradient, 0.1, torch.float32))
    assert moved["a"].tolist() == [0.0, 3.0]
    assert moved["b"].tolist() == [3.0]
    assert list(moved) == ["a", "b"]
    assert weights["a"].tolist() == [1.0, 2.0]
    assert gradient["a"].tolist() == [10.0, -10.0]


def test_weights_are_streamed_one_at_a_time() -> None:
    taken: list[str] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b", "c"):
            taken.append(name)
            yield name, torch.ones(1)

    stream = unlearned_weights(source(), {}, 0.1, torch.float32)
    assert taken == []
    for number, (name, _) in enumerate(stream, 1):
        assert taken == ["a", "b", "c"][:number]
        assert name == taken[-1]
    assert list(itertools.islice(stream, 1)) == []
