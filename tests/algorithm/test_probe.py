"""The probe measures what a step would do without doing it, and finds the step that does a given amount."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.algorithm import completion_mean
from eepo.algorithm.probe import LR_BOUNDS, MAX_TRIES, Found, Probe, lr_above_floor, lr_for_kl
from eepo.model.batching import MicroBatch
from eepo.model.policy import Policy, Scores
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling

Pairs = list[tuple[Prompt, Completion]]


@pytest.fixture(scope="module")
def demo_pairs(demo_model: Any, tokenizer: Any, demo_prompts: list[Prompt]) -> Pairs:
    engine = TransformersEngine(copy.deepcopy(demo_model), tokenizer)
    groups = engine.generate(demo_prompts[:8], 3, Sampling(1.0, 24, stream="probe"))
    return [(prompt, c) for prompt, group in zip(demo_prompts, groups, strict=False) for c in group]


@pytest.fixture(scope="module")
def demo_policy(demo_model: Any) -> Policy:
    return Policy(copy.deepcopy(demo_model))


def row_weight(row: int) -> float:
    """Rows are told apart, so that a loss that looks at the wrong ones is seen."""
    return 1.0 + row % 5


def loss_over(pairs: Pairs) -> Any:
    """The mean over `pairs` of each completion's weighted mean log-probability: descending it forgets."""
    weights = [row_weight(row) for row in range(len(pairs))]

    def loss(batch: MicroBatch, scores: Scores) -> Tensor:
        values = scores.logprobs * batch.pick(weights)[:, None]
        return completion_mean(values, batch.mask, batch.mask) * len(batch.rows) / len(pairs)

    return loss


@pytest.fixture(scope="module")
def gradient(demo_policy: Policy, demo_pairs: Pairs) -> dict[str, Tensor]:
    return demo_policy.gradient(demo_pairs, 1.0, loss_over(demo_pairs))


class Counting:
    """KL of a rate, and how often it was asked for."""

    def __init__(self, kl_of: Callable[[float], float]) -> None:
        self.kl_of, self.rates = kl_of, list[float]()

    def __call__(self, lr: float) -> float:
        self.rates.append(lr)
        return self.kl_of(lr)


def plain_kl(model: Any, moved: Any, pairs: Pairs, plain_scores: Any) -> float:
    """k3 on what was sampled, in float64, one row after another."""
    with torch.no_grad():
        gaps = torch.cat(
            [
                plain_scores(moved, *pair).logprobs - plain_scores(model, *pair).logprobs
                for pair in pairs
            ]
        )
    return (gaps.exp() - 1 - gaps).mean().item()


def stepped(model: Any, gradient: dict[str, Tensor], lr: float) -> Any:
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in moved.named_parameters():
            weight.sub_(lr * gradient[name])
    return moved


@pytest.mark.parametrize(("target", "start"), [(1e-3, 1e-3), (1e-2, 1e-1), (1e-4, 1e-1)])
def test_the_rate_found_meets_its_kl(
    target: float,
    start: float,
    demo_policy: Policy,
    demo_pairs: Pairs,
    gradient: dict[str, Tensor],
    plain_scores: Any,
) -> None:
    rows = list(range(len(demo_pairs)))
    probe = Probe(demo_policy, demo_pairs, rows, 64, 1.0, loss_over(demo_pairs))
    kl_of = Counting(lambda lr: probe.measure(gradient, lr).kl)
    lr = lr_for_kl(kl_of, target, start)
    kl = plain_kl(
        demo_policy.model, stepped(demo_policy.model, gradient, lr), demo_pairs, plain_scores
    )
    assert kl == pytest.approx(target, rel=0.15)
    assert len(kl_of.rates) > 1
    kl_of.rates.clear()
    assert lr_for_kl(kl_of, target, lr) == lr
    assert kl_of.rates == [lr]  # its own answer is good enough: one look


def test_an_effect_is_measured_as_a_plain_pass_would(
    demo_policy: Policy,
    demo_pairs: Pairs,
    gradient: dict[str, Tensor],
    plain_scores: Any,
    fingerprint: Any,
) -> None:
    before = fingerprint([(weight, weight.grad) for weight in demo_policy.model.parameters()])
    rows = list(range(0, len(demo_pairs), 2))
    effect = Probe(demo_policy, demo_pairs, rows, 6, 1.0, loss_over(demo_pairs)).measure(
        gradient, 3e-3
    )
    assert (
        fingerprint([(weight, weight.grad) for weight in demo_policy.model.parameters()]) == before
    )

    kept = [rows[0], *rows[1::3]]  # at most 6 of 12: the first quarter, then evenly spread
    chosen = [demo_pairs[row] for row in kept]
    moved = stepped(demo_policy.model, gradient, 3e-3)
    assert effect.kl == pytest.approx(
        plain_kl(demo_policy.model, moved, chosen, plain_scores), rel=1e-2
    )
    with torch.no_grad():
        for model, got in ((demo_policy.model, effect.loss_before), (moved, effect.loss_after)):
            means = [
                plain_scores(model, *demo_pairs[row]).logprobs.mean().item() * row_weight(row)
                for row in kept
            ]
            assert got == pytest.approx(sum(means) / len(means), rel=1e-3)
        whole = {row: plain_scores(moved, *demo_pairs[row]).logprobs.sum().item() for row in kept}
    assert effect.logprobs_after == pytest.approx(whole, rel=1e-3)
    assert effect.loss_after < effect.loss_before


def test_no_step_has_no_effect(
    demo_policy: Policy, demo_pairs: Pairs, gradient: dict[str, Tensor]
) -> None:
    probe = Probe(demo_policy, demo_pairs, [0, 5], 64, 1.0, loss_over(demo_pairs))
    for effect in (probe.measure(gradient, 0.0), probe.measure({}, 1.0)):
        assert effect.kl == 0.0
        assert effect.loss_after == effect.loss_before


def test_rows_without_loss_still_count_for_the_kl(
    demo_policy: Policy, demo_pairs: Pairs, gradient: dict[str, Tensor]
) -> None:
    rows = list(range(6))
    silent = Probe(demo_policy, demo_pairs, rows, 64, 1.0, lambda batch, scores: None).measure(
        gradient, 3e-3
    )
    heard = Probe(demo_policy, demo_pairs, rows, 64, 1.0, loss_over(demo_pairs)).measure(
        gradient, 3e-3
    )
    assert silent.kl == heard.kl > 0
    assert silent.loss_before == silent.loss_after == 0.0


@pytest.mark.parametrize("start", [1e-6, 1e-3, 1.0])
def test_few_looks_suffice_where_kl_grows_as_the_square(start: float) -> None:
    kl_of = Counting(lambda lr: 40 * lr**2)
    lr = lr_for_kl(kl_of, 1e-3, start)
    assert lr == pytest.approx(math.sqrt(1e-3 / 40), rel=0.06)
    assert len(kl_of.rates) <= MAX_TRIES


@pytest.mark.parametrize("power", [1, 3, 4, 6])
def test_a_kl_that_grows_faster_or_slower_than_the_square_is_met_too(power: int) -> None:
    """On a trained policy the fourth power and more were measured."""
    lr = lr_for_kl(lambda lr: (100 * lr) ** power, 1e-3, 3e-3)
    assert (100 * lr) ** power == pytest.approx(1e-3, rel=0.15)


def test_a_step_that_blows_up_is_made_smaller() -> None:
    lr = lr_for_kl(
        lambda lr: math.nan if lr > 0.5 else math.inf if lr > 0.05 else 40 * lr**2, 1e-3, 3.0
    )
    assert lr == pytest.approx(math.sqrt(1e-3 / 40), rel=0.06)


def test_a_step_without_effect_grows_within_bounds() -> None:
    kl_of = Counting(lambda lr: 0.0)
    assert 1e-3 < lr_for_kl(kl_of, 1e-3, 1e-3) <= LR_BOUNDS[1]
    assert len(kl_of.rates) == MAX_TRIES
    assert lr_for_kl(lambda lr: math.nan, 1e-3, 1e-8) == LR_BOUNDS[0]


def test_what_rounding_adds_to_every_kl_is_not_taken_for_the_steps() -> None:
    """4 η² is the step's own, and .0015 comes with any step: the default target lies below that."""
    found = lr_above_floor(lambda lr: 4 * lr**2 + 1.5e-3, 1e-3, 1e-2, rounds=True)
    assert found.lr == pytest.approx((1e-3 / 4) ** 0.5, rel=0.06)
    assert (found.kl, found.floor) == (
        pytest.approx(1e-3, rel=0.11),
        pytest.approx(1.5e-3, rel=0.01),
    )
    exact = lr_above_floor(lambda lr: 4 * lr**2, 1e-3, 1e-2, rounds=False)
    assert (exact.lr, exact.floor) == (pytest.approx((1e-3 / 4) ** 0.5, rel=0.06), 0)


@pytest.mark.parametrize("rounds", [True, False])
def test_where_no_rate_moves_anything_the_search_begins_where_it_began(rounds: bool) -> None:
    assert lr_above_floor(lambda lr: 0.0, 1e-3, 1e-2, rounds) == Found(1e-2, 0.0, 0.0)
