"""The token gate, the step gate, and the choice of completions to unlearn."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eepo.algorithm import StepGate, completions_to_unlearn, token_gate, unlearn_gate
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores

NAN, INF = math.nan, math.inf
ENTROPIES = st.lists(st.lists(st.floats(0, 2), min_size=1, max_size=9), min_size=1, max_size=4)


# --- token gate


@given(ENTROPIES, st.floats(0, 2), st.integers(1, 15))
def test_token_gate_opens_where_the_window_mean_is_below_the_threshold(
    rows: list[list[float]], threshold: float, window: int
) -> None:
    longest = max(map(len, rows))
    padded = [row + [0.0] * (longest - len(row)) for row in rows]
    mask = torch.tensor([[t < len(row) for t in range(longest)] for row in rows])
    gate = token_gate(torch.tensor(padded, dtype=torch.float64), mask, threshold, window)
    for row, actual in zip(rows, gate.tolist(), strict=True):
        assert not any(actual[len(row) :])
        for t in range(len(row)):
            mean = statistics.fmean(row[max(0, t - window + 1) : t + 1])
            if abs(mean - threshold) > 1e-9:  # a tie may be rounded either way
                assert actual[t] == (mean < threshold)


def test_token_gate_is_strict_and_its_window_is_shorter_at_the_start() -> None:
    entropies = torch.tensor([[0.5, 0.25, 0.0, 1.0, 0.0, 0.0]])
    gate = token_gate(entropies, torch.ones(1, 6), 0.375, 3)
    # window means: .5, .375, .25, .4167, .3333, .3333
    assert gate.tolist() == [[False, False, True, False, True, True]]


def test_threshold_0_gates_no_token() -> None:
    entropies = torch.tensor([[0.0, 0.0, 0.3], [0.0, 1.0, 0.0]])
    assert not token_gate(entropies, torch.ones(2, 3), 0.0, 3).any()


@pytest.mark.parametrize("window", [1, 3, 50])
def test_padding_is_never_gated_and_does_not_change_the_gate(window: int) -> None:
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    clean = torch.tensor([[0.1, 0.4, 0.0, 0.0], [0.1, 0.1, 0.9, 0.1]])
    dirty = torch.tensor([[0.1, 0.4, NAN, INF], [0.1, 0.1, 0.9, 0.1]])
    gate = token_gate(dirty, mask, 0.3, window)
    assert torch.equal(gate, token_gate(clean, mask, 0.3, window))
    assert gate[0].tolist()[2:] == [False, False]


@pytest.mark.parametrize("gate", ["step", "always"])
def test_only_the_token_gate_selects_tokens(gate: str) -> None:
    mask = torch.tensor([[True, True, False]])
    scores = Scores(torch.zeros(1, 3), torch.tensor([[0.1, 5.0, 0.0]]))
    by_token = unlearn_gate(scores, mask, AlgorithmConfig(gate="token", gate_window=1))
    assert by_token.tolist() == [[True, False, False]]
    assert torch.equal(unlearn_gate(scores, mask, AlgorithmConfig(gate=gate)), mask)


# --- step gate


def test_step_gate_compares_the_mean_of_the_last_steps_with_the_threshold() -> None:
    gate = StepGate(AlgorithmConfig(gate="step", gate_window=2, gate_threshold=0.5))
    is_open = []
    for entropy in (0.9, 0.05, 0.9, 0.9, 0.3, 0.2, 0.9):
        gate.record(entropy)
        is_open.append(gate.is_open())
    # means: .9, .475, .475, .9, .6, .25, .55
    assert is_open == [False, True, True, False, False, True, False]
    assert gate.history == [0.2, 0.9]
    assert gate.mean_entropy == pytest.approx(0.55)


def test_step_gate_is_strict() -> None:
    gate = StepGate(AlgorithmConfig(gate="step", gate_threshold=0.5), history=[0.5])
    assert not gate.is_open()


@pytest.mark.parametrize(("kind", "is_open"), [("token", True), ("always", True), ("never", False)])
@pytest.mark.parametrize("history", [[], [9.0], [0.0]])
def test_other_gates_do_not_depend_on_the_history(
    kind: str, is_open: bool, history: list[float]
) -> None:
    assert StepGate(AlgorithmConfig(gate=kind), history).is_open() == is_open


# --- completions to unlearn


@pytest.mark.parametrize(
    ("choice", "rewards", "expected"),
    [
        ("all", [1.0, 0.0, -1.0, NAN], [True, True, True, True]),
        ("rewarded", [1.0, 0.0, -1.0, 0.5], [True, False, False, True]),
        ("unrewarded", [1.0, 0.0, -1.0, 0.5], [False, True, True, False]),
        ("zero_variance", [1.0, 1.0, 1.0], [True, True, True]),
        ("zero_variance", [0.0, 0.0, 0.0], [True, True, True]),
        ("zero_variance", [0.0, 0.5, 0.0], [False, False, False]),
        # A completion without a reward is left out, and does not count as a different reward.
        ("rewarded", [1.0, NAN, 0.0], [True, False, False]),
        ("unrewarded", [1.0, NAN, 0.0], [False, False, True]),
        ("zero_variance", [1.0, NAN, 1.0], [True, False, True]),
        ("zero_variance", [1.0, NAN, 0.0], [False, False, False]),
        ("zero_variance", [NAN, NAN], [False, False]),
    ],
)
def test_completions_are_selected_by_their_rewards(
    choice: str, rewards: list[float], expected: list[bool]
) -> None:
    assert completions_to_unlearn(rewards, choice) == expected
