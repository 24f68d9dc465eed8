"""The completions that an unlearning step covers, and the weights θ′ that it gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.algorithm.unlearning import (
    UnlearnBatch,
    changed_share,
    largest_entry,
    rows_to_unlearn,
    unlearned_weights,
)
from eepo.config import AlgorithmConfig
from eepo.types import Completion, Prompt, Rollout, UserError, Verdict

# --- completions


def rollout_of(rewards: list[list[float]], num_stages: int = 1, graded: bool = True) -> Rollout:
    """Return a rollout whose groups are split evenly into stages."""
    rollout = Rollout([Prompt(str(index), "", (1,)) for index in range(len(rewards))])
    size = len(rewards[0]) // num_stages
    for stage in range(1, num_stages + 1):
        columns = slice((stage - 1) * size, stage * size)
        groups = [[Completion((2, 3), (-0.1, -0.2), "", True)] * size for _ in rewards]
        future: Future[list[Verdict]] = Future()
        if graded:
            future.set_result([Verdict(reward, None) for row in rewards for reward in row[columns]])
        rollout.add_stage(stage, groups, future)
    return rollout


def test_all_completions_are_selected_without_waiting_for_rewards() -> None:
    rollout = rollout_of([[1.0, 0.0], [0.0, 0.0]], graded=False)
    batch = UnlearnBatch.of(rollout, AlgorithmConfig(unlearn_on="all"))
    assert batch.rows == [0, 1, 2, 3]
    assert batch.selected == [True] * 4
    assert batch.num_tokens == 8
    assert rollout.pending


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("rewarded", [True, False, False, False]),
        ("unrewarded", [False, True, True, True]),
        ("zero_variance", [False, False, True, True]),
    ],
)
def test_completions_are_selected_by_the_rewards_of_their_group(
    choice: Any, expected: list[bool]
) -> None:
    rollout = rollout_of([[1.0, 0.0], [0.0, 0.0]])
    batch = UnlearnBatch.of(rollout, AlgorithmConfig(unlearn_on=choice, gate="always"))
    assert batch.selected == expected
    assert batch.rows == [0, 1, 2, 3]  # the loss is a mean over all completions
    assert batch.candidate_rows == [row for row in range(4) if expected[row]]


def test_stage1_rows_are_those_that_theta_sampled() -> None:
    rollout = rollout_of([[0.0] * 6, [0.0] * 6], num_stages=3)
    batch = UnlearnBatch.of(rollout, AlgorithmConfig(num_stages=3, group_size=6))
    assert batch.stage1_rows == [0, 1, 6, 7]


def test_unlearn_max_completions_spaces_rows_evenly() -> None:
    rollout = rollout_of([[0.0] * 4] * 3, num_stages=1)
    batch = UnlearnBatch.of(rollout, AlgorithmConfig(unlearn_max_completions=4))
    assert batch.rows == batch.stage1_rows == [0, 3, 6, 9]
    assert batch.num_tokens == 8


@pytest.mark.parametrize("num_prompts", [8, 64, 128])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("most", [2, 4, 8, 13, 32])
def test_unlearn_max_completions_takes_the_stages_in_turn(
    num_prompts: int, size: int, most: int
) -> None:
    """Evenly spaced rows are often the same column, so they would all be of stage 1."""
    stages, options = [1] * size + [2] * size, AlgorithmConfig(unlearn_max_completions=most)
    rows = rows_to_unlearn(stages, num_prompts, options)
    count = min(most, num_prompts * len(stages))
    assert len(set(rows)) == count
    assert rows == sorted(rows)
    of_stage_1 = sum(stages[row % len(stages)] == 1 for row in rows)
    assert 0.25 * count <= of_stage_1 <= 0.75 * count


@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_an_error(entry: float) -> None:
    gradient = {"a": torch.tensor([0.5, -2.0]), "b": torch.tensor([0.0])}
    assert largest_entry(gradient) == 2.0
    assert largest_entry({}) == 0.0
    with pytest.raises(UserError, match="the unlearning gradient is not finite"):
        largest_entry(gradient | {"c": torch.tensor([1.0, entry])})


def test_rows_far_above_the_token_gate_are_no_candidates() -> None:
    """Engines round entropies differently, so only rows above twice the threshold are left out."""
    entropies = [(0.9, 0.61), (0.9, 0.59), (), (0.1, 0.9)]
    pairs = [(Prompt("", "", (1,)), Completion((2, 3), (), "", True, e)) for e in entropies]
    rows = [0, 1, 2, 3]
    for gate, expected in (("token", [1, 2, 3]), ("always", [0, 1, 2, 3]), ("step", [0, 1, 2, 3])):
        options = AlgorithmConfig(gate=gate, gate_threshold=0.3)
        batch = UnlearnBatch(pairs, rows, [True] * 4, rows, options)
        assert batch.candidate_rows == expected


# --- weights


def test_the_step_is_taken_in_fp32_and_then_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(65536, generator=generator)
    gradient = torch.randn(65536, generator=generator)
    ((_, moved),) = unlearned_weights([("w", weight)], {"w": gradient}, 3e-3, torch.bfloat16)
    stepped_in_bf16 = weight.bfloat16() - 3e-3 * gradient.bfloat16()
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, (weight - 3e-3 * gradient).to(torch.bfloat16))
    assert not torch.equal(moved, stepped_in_bf16)
    # Rounding acts as dithering: on average the whole step arrives.
    step, change = -3e-3 * gradient, moved.float() - weight.bfloat16().float()
    slope = (change * step).sum() / (step * step).sum()
    assert slope.item() == pytest.approx(1.0, abs=0.05)


def test_a_step_below_half_a_bf16_unit_moves_weights_near_a_rounding_boundary() -> None:
    # The first weight is just below the middle of two bf16 numbers.
    weight = torch.tensor([1.0 + 2**-8 - 2**-12, 1.0])
    gradient = torch.tensor([-1.0, -1.0])
    ((_, moved),) = unlearned_weights([("w", weight)], {"w": gradient}, 2**-10, torch.bfloat16)
    assert moved.tolist() == [1.0 + 2**-7, 1.0]
    stepped_in_bf16 = weight.bfloat16() - 2**-10 * gradient.bfloat16()
    assert stepped_in_bf16.tolist() == [1.0, 1.0]


def test_bf16_weights_and_gradients_still_step_in_fp32() -> None:
    weight, gradient = torch.tensor([1.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    ((_, moved),) = unlearned_weights([("w", weight)], {"w": gradient}, 1e-3, torch.float32)
    assert moved.item() == pytest.approx(0.999, abs=1e-7)


def test_weights_without_gradient_are_passed_on_and_no_input_is_changed() -> None:
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    gradient = {"a": torch.tensor([10.0, -10.0])}
    moved = dict(unlearned_weights(weights.items(), gradient, 0.1, torch.float32))
    assert moved["a"].tolist() == [0.0, 3.0]
    assert moved["b"].tolist() == [3.0]
    assert list(moved) == ["a", "b"]
    assert weights["a"].tolist() == [1.0, 2.0]
    assert gradient["a"].tolist() == [10.0, -10.0]


def test_weights_are_streamed_one_at_a_time() -> None:
    read: list[str] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b", "c"):
            read.append(name)
            yield name, torch.ones(1)

    stream = unlearned_weights(source(), {}, 0.1, torch.float32)
    assert read == []
    for number, (name, _) in enumerate(stream, 1):
        assert read == ["a", "b", "c"][:number]
        assert name == read[-1]
    assert list(itertools.islice(stream, 1)) == []


def test_changed_share_compares_after_rounding_to_the_dtype_of_the_engine() -> None:
    theta = {"a": torch.tensor([1.0, 1.0 + 2**-12, 2.0]), "b": torch.tensor([0.5])}
    rollout_weights = {
        "a": torch.tensor([1.0, 1.0, 2.5], dtype=torch.bfloat16),
        "b": torch.tensor([0.5], dtype=torch.bfloat16),
    }
    assert changed_share(theta.items(), rollout_weights) == 1 / 4
