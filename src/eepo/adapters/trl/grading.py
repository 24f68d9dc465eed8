"""Rewards of a rollout whose stages are graded together, or stage 1 before stage 2 is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eepo.adapters.trl.batches import interleave_stages
from eepo.algorithm import completions_to_unlearn
from eepo.algorithm.metrics import second_half_metrics


@dataclass
class GradedStage:
    """Rewards of stage 1, where `unlearn_on` needs them before stage 2."""

    rewards: Tensor  # [rows of all processes, reward functions]
    extra_columns: dict[str, list[Any]]  # logged by the reward functions


def total_rewards(rewards: Tensor, weights: Tensor) -> Tensor:  # [rows, functions] -> [rows]
    """Return weighted sums over the functions that gave a reward; NaN where none did."""
    total = (rewards.cpu() * weights.cpu()).nansum(1)
    return torch.where(rewards.cpu().isnan().all(1), torch.nan, total)


def rows_to_unlearn(
    totals: Tensor,  # [rows of all processes], in the order of the prompts
    num_samples: int,  # completions per prompt
    choice: str,
    rows: range,  # of one process
) -> list[bool]:
    """Apply `unlearn_on` to the groups of all processes. Return the result for `rows`."""
    groups = totals.view(-1, num_samples).tolist()
    selected = [flag for group in groups for flag in completions_to_unlearn(group, choice)]
    return selected[rows.start : rows.stop]


def interleave_rewards(first: Tensor, second: Tensor) -> Tensor:  # [n, functions] -> [2n, ...]
    """Alternate the rows of both stages."""
    return torch.stack([first, second], 1).flatten(0, 1)


def interleave_columns(
    first: dict[str, list[Any]], second: dict[str, list[Any]], num_rows: int
) -> None:
    """Merge the columns that the reward functions logged for stage 1 into stage 2's."""
    missing = [None] * num_rows
    for name in {*first, *second}:
        stage1, stage2 = first.get(name, missing), second.get(name, missing)
        same_length = len(stage1) == len(stage2)
        second[name] = interleave_stages(stage1, stage2) if same_length else [*stage1, *stage2]


def stage_rewards(totals: Tensor, num_samples: int) -> tuple[float, float, dict[str, float]]:
    """Return the mean reward of each stage, and what stage 2 finds that stage 1 missed."""
    stages = totals[0::2], totals[1::2]
    groups = torch.cat([stage.view(-1, num_samples) for stage in stages], 1)
    first, second = (stage.nanmean().item() for stage in stages)
    return first, second, second_half_metrics(groups.nan_to_num().tolist())
