"""What a step says of itself, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eepo.algorithm.metrics import StepMetrics
from eepo.model.batching import micro_batches
from eepo.model.policy import Scores
from eepo.types import Completion, Prompt, Rollout


@pytest.mark.parametrize("stages", [[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 3, 4]])
def test_second_chances_are_those_of_a_groups_second_half(stages: list[int]) -> None:
    rewards = [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [-1, 0, 0.5, 0]]
    one = Completion((3,), (-0.5,), "3", finished=True)
    rollout = Rollout(
        [Prompt("p", "", (1,))] * 5, [[one] * 4] * 5, [list(map(float, group)) for group in rewards]
    )
    rollout.stages, rollout.advantages = stages, [[0.0] * 4] * 5
    metrics = StepMetrics()
    metrics.record_rollout(rollout)
    assert metrics.values["missed_share"] == 3 / 5  # a reward below 0 is none
    assert metrics.values["second_half_recovery"] == 2 / 5


def test_a_mismatch_is_that_of_stage_1_before_the_first_update(ragged_pairs: Any) -> None:
    pairs = ragged_pairs(4)
    [batch] = micro_batches(pairs, 10_000, torch.device("cpu"), packed=False)
    stages = [1, 2, 1, 2]
    gaps = torch.tensor([0.1 if stages[row] == 1 else 5.0 for row in batch.rows])[:, None].expand(
        batch.mask.shape
    )
    sampled = torch.zeros(batch.mask.shape)
    scores = Scores(torch.where(batch.mask, gaps, 9.0), torch.zeros(batch.mask.shape))
    metrics = StepMetrics()
    metrics.record_update(batch, scores, sampled, torch.ones(4), stages, (0.2, 0.2))
    metrics.record_grad_norm(1.0)
    scores = Scores(scores.logprobs + 1, scores.entropies)
    metrics.record_update(batch, scores, sampled, torch.ones(4), stages, (0.2, 0.2))  # θ has moved
    assert metrics.result()["mismatch_kl"] == pytest.approx(math.exp(0.1) - 1 - 0.1, rel=1e-4)
