"""Truncated importance sampling between engine and policy."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from eepo.algorithm import StepMetrics
from eepo.algorithm.credit import engine_weights, old_logprobs
from eepo.algorithm.updates import MiniBatch
from eepo.types import Prompt, Rollout, Sampling


def test_weights_are_the_truncated_quotient_of_policy_and_engine() -> None:
    old = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
    sampled = torch.tensor([[-1.5, -3.5], [-2.0, 0.0]])
    weights = engine_weights(old, sampled, torch.tensor([True, False]), cap=2.0)
    assert weights[0].tolist() == pytest.approx([math.exp(0.5), 2.0])
    assert weights[1].tolist() == [1.0, 1.0]


def with_engine_error(rollout: Rollout, error: float) -> Rollout:
    """Shift the log-probabilities that the engine reports, in turn up and down."""
    for group in rollout.groups:
        for column, completion in enumerate(group):
            signs = itertools.cycle([error, -error])
            shifted = tuple(p + next(signs) for p in completion.logprobs)
            group[column] = replace(completion, logprobs=shifted)
    return rollout


@pytest.mark.parametrize("credit", ["importance", "full"])
def test_the_ratio_is_1_and_the_weight_corrects_for_the_engine(
    credit: str, build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    """Stage 1 only is corrected: θ′ sampled stage 2, and θ's probabilities do not describe it."""
    algorithm = build_eepo(
        gate="always", unlearn_lr=1e-2, credit=credit, engine_ratio_cap=1.2, group_size=8
    )
    rollout = algorithm.collect(demo_prompts[:6], sampling, StepMetrics())
    rollout.wait_for_rewards()
    rollout = with_engine_error(rollout, 0.3)
    rollout.advantages = [[1.0] * 8 for _ in rollout.prompts]
    parts = rollout.mini_batches(3)
    first, second = old_logprobs(algorithm.policy, rollout, parts, algorithm.options)
    for rows, old in zip(parts, (first, second), strict=True):
        mini_batch = MiniBatch.of(rollout, rows, old, algorithm.options)
        for batch in algorithm.policy.micro_batches(mini_batch.pairs):
            with torch.no_grad():
                scores = algorithm.policy.score(batch, 1.0)
            terms = mini_batch.terms(batch, scores, None)
            loss = mini_batch.token_loss(batch, terms)
            of_stage_1 = batch.pick([float(stage == 1) for stage in mini_batch.stages]).bool()
            stage1 = batch.mask & of_stage_1[:, None]
            assert terms.log_ratio[stage1].abs().max() < 1e-4
            # −ratio · weight · A with weights exp(±0.3), the larger one capped at 1.2
            values = {round(value, 2) for value in loss.values[stage1].tolist()}
            assert values == {-round(math.exp(-0.3), 2), -1.2}
            if credit == "full":
                assert terms.log_ratio[batch.mask].abs().max() < 1e-4
                assert (loss.values[batch.mask & ~stage1] + 1.0).abs().max() < 1e-4
            else:
                assert terms.log_ratio[batch.mask & ~stage1].abs().max() > 0.1


def test_the_mismatch_is_still_measured(
    build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    rows = []
    for cap in ("off", 2.0):
        algorithm = build_eepo(num_stages=1, engine_ratio_cap=cap, dtype=torch.bfloat16)
        metrics = StepMetrics()
        algorithm.step(demo_prompts[:6], sampling, metrics)
        rows.append(metrics.result())
    assert rows[0]["mismatch_kl"] == rows[1]["mismatch_kl"] > 1e-7
    assert rows[0]["stage1/ratio_max"] > 1.001
    assert rows[1]["stage1/ratio_max"] == 1.0
