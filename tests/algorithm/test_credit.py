"""Credit: the denominator of the ratio of stage 2."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eepo
from eepo.algorithm import EEPO, PolicyTerms, StepMetrics, grpo_token_loss
from eepo.algorithm.credit import OldLogprobs, old_logprobs
from eepo.algorithm.metrics import StageRatios
from eepo.config import AlgorithmConfig
from eepo.model.policy import Policy
from eepo.rewards.countdown import CountdownReward
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Prompt, Sampling

SAMPLING = Sampling(temperature=1.0, max_new_tokens=24, seed=1, stream="train/0")


@pytest.fixture
def build(demo_model: Any, tokenizer: Any) -> Callable[..., EEPO]:
    """Return EEPO on a copy of the demo policy, with plain SGD."""

    def make(mini_batch: int = 64, **options: Any) -> EEPO:
        model = copy.deepcopy(demo_model)
        defaults = {"max_new_tokens": 24, "group_size": 8, "gate": "always", "unlearn_lr": 1e-2}
        return EEPO(
            policy=Policy(model, 400),
            reference=None,
            engine=TransformersEngine(copy.deepcopy(model), tokenizer, max_rows=20),
            reward=CountdownReward(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-1),
            options=AlgorithmConfig(**(defaults | options)),
            mini_batch=mini_batch,
            max_grad_norm=1e9,
        )

    return make


def train_step(algorithm: EEPO, prompts: list[Prompt]) -> tuple[Any, dict[str, float]]:
    metrics = StepMetrics()
    rollout = algorithm.step(prompts, SAMPLING, metrics)
    return rollout, metrics.result()


def test_full_credit_makes_the_ratio_of_stage_2_exactly_1(
    build: Any, demo_prompts: list[Prompt]
) -> None:
    _, full = train_step(build(credit="full"), demo_prompts[:6])
    _, importance = train_step(build(credit="importance"), demo_prompts[:6])
    assert full["stage2/ratio_mean"] == full["stage2/ratio_max"] == 1.0
    assert full["stage2/rewarded_ratio_mean"] == full["stage2/rewarded_ratio_min"] == 1.0
    assert full["stage2/clip_share"] == full["stage2/lost_share"] == 0.0
    assert importance["stage2/ratio_max"] > 1.01
    assert importance["stage2/rewarded_ratio_min"] < 0.9
    for name in ("stage1/ratio_mean", "stage1/reward", "stage2/reward", "unlearn/kl"):
        assert full[name] == importance[name]


@pytest.mark.parametrize("mini_batch", [64, 3])
@pytest.mark.parametrize("credit", ["importance", "full"])
def test_without_unlearning_both_credits_equal_grpo_bit_for_bit(
    credit: str, mini_batch: int, build: Any, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    """Both sample 20 rows at a time, so every matrix product has the same shape."""
    trained = []
    for options in ({"gate": "never", "credit": credit}, {"num_stages": 1}):
        algorithm = build(mini_batch, **options)
        rollout, _ = train_step(algorithm, demo_prompts[:5])
        assert any(any(group) for group in rollout.advantages)
        trained.append(fingerprint(list(algorithm.policy.model.parameters())))
    assert trained[0] == trained[1]


def test_later_mini_batches_use_the_policy_before_the_first_update(
    build: Any, demo_prompts: list[Prompt], demo_model: Any, plain_scores: Any
) -> None:
    algorithm = build(mini_batch=2, credit="full")
    rollout, _ = train_step(algorithm, demo_prompts[:6])
    fresh = build(mini_batch=2, credit="full")
    denominators = old_logprobs(fresh.policy, rollout, rollout.mini_batches(2), algorithm.options)
    assert denominators[0].is_current == [stage > 1 for stage in rollout.stages] * 2
    scored = 0
    for rows, old in itertools.islice(
        zip(rollout.mini_batches(2), denominators, strict=True), 1, None
    ):
        pairs = rollout.pairs(rows)
        advantages = [value for row in rows for value in rollout.advantages[row]]
        stages = rollout.stages * len(rows)
        for i, (prompt, completion) in enumerate(pairs):
            if stages[i] == 1:
                assert old.logprobs[i] == completion.logprobs
                assert not old.is_current[i]
            elif advantages[i] == 0:
                assert old.is_current[i]  # the loss does not depend on it
            else:
                expected = plain_scores(demo_model, prompt, completion).logprobs.tolist()
                assert old.logprobs[i] == pytest.approx(expected, abs=1e-4)
                assert not old.is_current[i]
                scored += 1
    assert scored > 3


def test_importance_credit_needs_no_pass(
    build: Any, demo_prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = build(mini_batch=2)
    rollout, _ = train_step(algorithm, demo_prompts[:6])
    monkeypatch.setattr(algorithm.policy, "score", None)
    parts = rollout.mini_batches(2)
    for rows, old in zip(
        parts, old_logprobs(algorithm.policy, rollout, parts, algorithm.options), strict=True
    ):
        expected = [completion.logprobs for _, completion in rollout.pairs(rows)]
        assert old == OldLogprobs(expected, [False] * len(expected))


def test_importance_credit_is_grpo_in_expectation_and_full_credit_is_not() -> None:
    """Two tokens: a common one without reward, and a rare one with reward 1.

    θ samples the rare token with p = 0.01, θ′ with q = 0.4. Sum over both outcomes with their
    probabilities, by hand: GRPO's expected gradient on the logit of the rare token is
    Σ π(a) A(a) (1[a = rare] − p). Importance credit from q gives the same number; full credit
    gives q/p times as much for the rare token.
    """
    p, q = 0.01, 0.4
    advantage = {"common": -0.1, "rare": 0.9}

    def expected_gradient(sampler: float, denominator: float) -> float:
        """Differentiate the loss for both tokens, weighted by the probability of sampling them."""
        logits = torch.tensor([math.log(1 - p), math.log(p)], dtype=torch.float64)
        logits.requires_grad_()
        logprobs = logits.log_softmax(0)
        total = torch.zeros((), dtype=torch.float64)
        outcomes = [
            (0, advantage["common"], 1 - sampler, 1 - denominator),
            (1, advantage["rare"], sampler, denominator),
        ]
        for token, value, probability, old in outcomes:
            terms = PolicyTerms(
                logprobs[token].view(1, 1),
                torch.tensor([[math.log(old)]], dtype=torch.float64),
                torch.tensor([value], dtype=torch.float64),
                mask=torch.ones(1, 1, dtype=torch.bool),
                selected=torch.zeros(1, 1, dtype=torch.bool),
            )
            loss = grpo_token_loss(terms, AlgorithmConfig(clip_low=1.0, clip_high=1e9)).values.sum()
            total = total + probability * loss
        total.backward()
        assert logits.grad is not None
        return -logits.grad[1].item()

    grpo = expected_gradient(sampler=p, denominator=p)
    by_hand = (1 - p) * advantage["common"] * -p + p * advantage["rare"] * (1 - p)
    assert grpo == pytest.approx(by_hand)
    assert expected_gradient(sampler=q, denominator=q) == pytest.approx(grpo)
    full = expected_gradient(sampler=q, denominator=p)
    assert full == pytest.approx(
        (1 - q) * advantage["common"] * -p + q * advantage["rare"] * (1 - p)
    )
    assert full > 30 * grpo


def test_lost_share_counts_successes_with_a_tiny_token_ratio() -> None:
    ratios = StageRatios()
    ratio = torch.tensor([[1.0, 1e-3], [1.0, 0.5], [1e-5, 1.0], [1e-5, 1.0]])
    positive = torch.tensor([[True], [True], [True], [False]])
    in_stage = torch.tensor([[True, True], [True, True], [False, True], [True, True]])
    ratios.add(ratio, torch.zeros_like(in_stage), positive, in_stage)
    row = ratios.result()
    assert row["lost_share"] == pytest.approx(1 / 3)  # of the three successes, only the first
    assert row["rewarded_ratio_min"] == pytest.approx((1e-3 + 0.5 + 1.0) / 3)


@pytest.mark.slow
def test_importance_credit_loses_what_stage_2_discovers_and_an_alarm_says_so(
    tmp_path: Path,
) -> None:
    """The policy of shortcut computes with probability 1e-5, and θ′ in a fifth of stage 2."""
    shown = {}
    for credit in ("importance", "full"):
        options = {
            "algorithm.credit": credit,
            "algorithm.unlearn_on": "unrewarded",
            "training.num_steps": 2,
            "alarm.patience": 1,
            "evaluation.every": 0,
            "task.num_evaluation": 2,
        }
        run = eepo.train("shortcut/eepo", tmp_path / credit, set=options, quiet=True)
        alarms = run.folder / "alarms.jsonl"
        raised = alarms.read_text() if alarms.exists() else ""
        shown[credit] = run.metrics[0]["stage2/lost_share"], "lost_share_above" in raised
    assert shown["importance"][0] > 0.3
    assert shown["importance"][1]
    assert shown["full"] == (0.0, False)


# --- failures of stage 2


@pytest.mark.parametrize(
    ("credit", "clip_low", "expected"),
    [
        ("importance", 0.2, "towards noise"),
        ("importance", 1.0, "unchanged"),
        ("full", 0.2, "away from noise"),
    ],
)
def test_clipping_lets_failures_of_stage_2_push_the_policy_towards_noise(
    credit: str, clip_low: float, expected: str
) -> None:
    """One position at which every completion of stage 2 fails, in expectation over its tokens.

    θ prefers one token of 1,000. θ′ has unlearned it, and samples noise.
    """
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[0] += 12.0
    logits.requires_grad_()
    rollout_logits = logits.detach().clone()
    rollout_logits[0] -= 8.0
    logprobs, rollout = logits.log_softmax(0), rollout_logits.log_softmax(0)
    old = rollout if credit == "importance" else logprobs.detach()
    options = AlgorithmConfig(credit=credit, clip_low=clip_low)
    every_token = torch.ones(1000, 1, dtype=torch.bool)
    terms = PolicyTerms(
        logprobs[:, None], old[:, None], -torch.ones(1000), every_token, ~every_token
    )
    loss = (rollout.exp() * grpo_token_loss(terms, options).values[:, 0]).sum()
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    entropy = -(logprobs.exp() * logprobs).sum()
    (slope,) = torch.autograd.grad(entropy, logits)
    change = float(-(slope * gradient).sum())  # of the entropy along a step of descent
    outcome = "unchanged" if abs(change) < 1e-12 else "towards noise" if change > 0 else "away from"
    assert expected.startswith(outcome)
    assert (float(gradient[0]) > 1e-3) == (expected == "towards noise")
