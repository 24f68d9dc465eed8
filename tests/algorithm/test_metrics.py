"""Metrics of a step, compared with values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from eepo.algorithm.losses import PolicyTerms, grpo_token_loss
from eepo.algorithm.metrics import StepMetrics, rollout_metrics, second_half_metrics
from eepo.algorithm.probe import Effect
from eepo.config import AlgorithmConfig
from eepo.model.batching import micro_batches
from eepo.types import Completion, Prompt, Rollout, Verdict

REWARDS = [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [-1, 0, 0.5, 0]]


def test_second_half_metrics_count_groups_whose_second_half_earns_the_first_reward() -> None:
    """A negative reward counts as no reward."""
    rewards = [list(map(float, group)) for group in REWARDS]
    assert second_half_metrics(rewards) == {
        "missed_share": 3 / 5,
        "second_half_recovery": 2 / 5,
    }


@pytest.mark.parametrize("stages", [[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 3, 4]])
def test_second_half_metrics_do_not_depend_on_the_number_of_stages(stages: list[int]) -> None:
    completion = Completion((3,), (-0.5,), "3", finished=True)
    rollout = Rollout([Prompt("p", "", (1,))] * 5, [[completion] * 4] * 5)
    rollout.rewards = [list(map(float, group)) for group in REWARDS]
    rollout.stages, rollout.advantages = stages, [[0.0] * 4] * 5
    row = rollout_metrics(rollout)
    assert row["missed_share"] == 3 / 5
    assert row["second_half_recovery"] == 2 / 5
    metrics = StepMetrics()
    metrics.record_rollout(rollout)
    assert row.items() <= metrics.result().items()


def test_rollout_metrics_are_means_per_stage_and_over_all_stages() -> None:
    short = Completion((3,), (-0.5,), "3", finished=True, entropies=(0.2,))
    long = Completion((3, 4, 5), (-1.0,) * 3, "345", finished=False, entropies=(0.4,) * 3)
    rollout = Rollout([Prompt("p", "", (1,)), Prompt("q", "", (1,))], [[short, long]] * 2)
    rollout.rewards, rollout.stages = [[1.0, 0.0], [0.5, 0.5]], [1, 2]
    rollout.verdicts = [[Verdict(1.0, "3"), Verdict(0.0, None)], [Verdict(0.5, "3")] * 2]
    rollout.advantages = [[0.7, -0.7], [0.0, 0.0]]
    row = rollout_metrics(rollout)
    expected = {
        "reward": 0.5,
        "stage1/reward": 0.75,
        "stage2/reward": 0.25,
        "entropy": 0.35,
        "stage1/entropy": 0.2,
        "stage2/entropy": 0.4,
        "length": 2.0,
        "stage1/length": 1.0,
        "stage2/length": 3.0,
        "truncated_share": 0.5,
        "stage1/truncated_share": 0.0,
        "stage2/truncated_share": 1.0,
        "no_answer_share": 0.25,
        "zero_advantage_share": 0.5,
        "missed_share": 0.0,
        "second_half_recovery": 0.0,
    }
    assert row == pytest.approx(expected)


def test_mismatch_kl_covers_stage_1_before_the_first_update(ragged_pairs: Any) -> None:
    pairs, stages = ragged_pairs(4), [1, 2, 1, 2]
    [batch] = micro_batches(pairs, 10_000, torch.device("cpu"), packed=False)
    gaps = torch.tensor([0.1 if stages[row] == 1 else 5.0 for row in batch.rows])[:, None]
    logprobs = torch.where(batch.mask, gaps.expand(batch.mask.shape), 9.0)
    zeros, nowhere = torch.zeros(batch.mask.shape), torch.zeros_like(batch.mask)
    metrics = StepMetrics()
    # Denominators other than the engine's log-probabilities do not change the mismatch.
    terms = PolicyTerms(logprobs, zeros + 0.7, torch.ones(4), batch.mask, nowhere)
    metrics.update.record_batch(batch, terms, nowhere, zeros, zeros, stages)
    metrics.update.record_grad_norm(1.0)
    after_update = replace(terms, logprobs=logprobs + 1)
    metrics.update.record_batch(batch, after_update, nowhere, zeros, zeros, stages)
    assert metrics.result()["mismatch_kl"] == pytest.approx(math.exp(0.1) - 1 - 0.1, rel=1e-4)


def test_clip_share_counts_ratios_that_the_advantage_pushes_outside(ragged_pairs: Any) -> None:
    """Rows 0 and 1 have ratio e, rows 2 and 3 have 1 / e. Rows 0 and 2 have positive advantages."""
    [batch] = micro_batches(ragged_pairs(4), 10_000, torch.device("cpu"), packed=False)
    gaps = batch.pick([1.0, 1.0, -1.0, -1.0])[:, None].expand(batch.mask.shape)
    logprobs, sampled = torch.where(batch.mask, gaps, 0.0), torch.zeros(batch.mask.shape)
    advantages, metrics = batch.pick([1.0, -1.0, 1.0, -1.0]), StepMetrics()
    terms = PolicyTerms(logprobs, sampled, advantages, batch.mask, torch.zeros_like(batch.mask))
    clipped = grpo_token_loss(terms, AlgorithmConfig()).clipped
    metrics.update.record_batch(batch, terms, clipped, sampled, sampled, [1, 1, 1, 2])
    row = metrics.result()
    num_tokens = dict(zip(batch.rows, batch.mask.sum(1).tolist(), strict=True))
    stage1_tokens = num_tokens[0] + num_tokens[1] + num_tokens[2]
    assert row["stage1/clip_share"] == pytest.approx(num_tokens[0] / stage1_tokens)
    assert row["stage2/clip_share"] == 1.0
    assert row["stage1/ratio_max"] == pytest.approx(math.e)
    assert row["stage2/ratio_mean"] == pytest.approx(1 / math.e)


def test_gate_share_sums_over_unlearning_steps_and_other_values_are_of_the_last() -> None:
    metrics = StepMetrics()
    for lr, num_gated in ((1e-3, 2.0), (2e-3, 5.0)):
        metrics.unlearning.record_gate(torch.tensor(num_gated), 10)
        metrics.unlearning.record_step(lr, Effect(2.0, 1.0, lr), changed_share=0.5)
    row = metrics.result()
    assert row["gate_share"] == pytest.approx(7 / 20)
    assert row["unlearn/lr"] == row["unlearn/kl"] == 2e-3
    assert (row["unlearn/loss_before"], row["unlearn/loss_after"]) == (2.0, 1.0)
    assert row["unlearn/weights_changed_share"] == 0.5


def test_without_unlearning_there_are_no_unlearning_metrics() -> None:
    row = StepMetrics().result()
    assert row["gate_share"] == 0.0
    assert not [name for name in row if name.startswith("unlearn/")]


def test_phases_with_the_same_name_are_added_up() -> None:
    metrics = StepMetrics()
    for _ in range(2):
        with metrics.phase("update"):
            pass
    with metrics.phase("sync"):
        pass
    row = metrics.result()
    seconds = {name for name in row if name.startswith("seconds/")}
    assert seconds == {"seconds/update", "seconds/sync", "seconds/total"}
    assert 0 < row["seconds/update"] + row["seconds/sync"] <= row["seconds/total"]
