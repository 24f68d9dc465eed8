"""Work that a step avoids or runs in the background. None of it may change the result of a step."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.algorithm import EEPO, StepMetrics
from eepo.algorithm.probe import Probe
from eepo.rewards.countdown import CountdownReward
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Rollout, Sampling, Verdict

TIMEOUT = 60  # seconds; only a failing test takes that long


@pytest.fixture
def build(build_eepo: Any) -> Callable[..., EEPO]:
    """Return `build_eepo` with several micro-batches per pass and a visible unlearning step."""
    sgd = partial(torch.optim.SGD, lr=1e-2)
    defaults = {"optimizer": sgd, "micro_batch_tokens": 150, "unlearn_lr": 1e-2}
    return lambda **options: build_eepo(**(defaults | options))


# --- grading


class SignallingEngine(TransformersEngine):
    """Sets an event when it starts to sample for the second time."""

    num_calls = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.second_call = threading.Event()

    def generate(self, *args: Any) -> list[list[Completion]]:
        self.num_calls += 1
        if self.num_calls == 2:
            self.second_call.set()
        return super().generate(*args)


class WaitingReward(CountdownReward):
    """Does not grade stage 1 before stage 2 is being sampled."""

    second_call: threading.Event
    has_overlapped: bool | None = None

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        if self.has_overlapped is None:
            self.has_overlapped = self.second_call.wait(TIMEOUT)
        return super().grade(prompts, texts)


def test_stage_1_is_graded_while_stage_2_is_sampled(
    build: Any, sampling: Sampling, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    reward = WaitingReward()
    overlapping = build(reward=reward, engine=SignallingEngine, gate="always")
    reward.second_call = overlapping.engine.second_call
    rollout = overlapping.step(demo_prompts[:4], sampling, StepMetrics())
    assert reward.has_overlapped is True
    plain = build(gate="always")
    expected = plain.step(demo_prompts[:4], sampling, StepMetrics())
    assert rollout.rewards == expected.rewards
    assert rollout.verdicts == expected.verdicts
    assert [[verdict.reward for verdict in group] for group in rollout.verdicts] == rollout.rewards
    assert not rollout.pending
    weights = [
        fingerprint(list(algorithm.policy.model.parameters())) for algorithm in (overlapping, plain)
    ]
    assert weights[0] == weights[1]


class BrokenReward(CountdownReward):
    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        raise ZeroDivisionError("the grader has a bug")


@pytest.mark.parametrize("unlearn_on", ["all", "rewarded"])
def test_an_error_in_the_grader_is_raised_by_the_step(
    unlearn_on: str,
    build: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
    fingerprint: Any,
) -> None:
    algorithm = build(reward=BrokenReward(), gate="always", unlearn_on=unlearn_on)
    before = fingerprint(list(algorithm.policy.model.parameters()))
    with pytest.raises(ZeroDivisionError, match="the grader has a bug"):
        algorithm.step(demo_prompts[:2], sampling, StepMetrics())
    assert fingerprint(list(algorithm.policy.model.parameters())) == before
    algorithm.reward = CountdownReward()
    assert algorithm.step(demo_prompts[:2], sampling, StepMetrics()).rewards


def test_verdicts_that_arrive_late_or_out_of_order_are_assigned_correctly() -> None:
    prompts = [Prompt("a", "", (1,)), Prompt("b", "", (2,))]
    rollout = Rollout(prompts)
    futures: list[Future[list[Verdict]]] = [Future(), Future()]
    for stage, future in enumerate(futures, 1):
        groups = [
            [Completion((stage, sample), (0.0, 0.0), "", True) for sample in range(2)]
            for _ in prompts
        ]
        rollout.add_stage(stage, groups, future)
    assert rollout.rewards == [[], []]
    futures[1].set_result([Verdict(reward, None) for reward in (5.0, 6.0, 7.0, 8.0)])
    futures[0].set_result([Verdict(reward, None) for reward in (1.0, 2.0, 3.0, 4.0)])
    assert [reward for _, reward in rollout.of_stage(2)] == [5.0, 6.0, 7.0, 8.0]
    assert rollout.rewards == [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]
    rollout.wait_for_rewards()
    assert rollout.rewards == [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]


# --- rows of the gradient pass


def theta_prime_minus_theta(algorithm: EEPO) -> dict[str, Tensor]:
    loaded, theta = algorithm.engine.weights(), algorithm.policy.named_weights()
    assert loaded is not None
    return {name: (loaded[name] - weight).clone() for name, weight in theta}


def assert_same_step(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    size = max(change.abs().max().item() for change in expected.values())
    assert size > 1e-5
    for name, change in expected.items():
        assert (actual[name].double() - change).abs().max() <= 2e-3 * size, name


def record_gradient_rows(algorithm: EEPO, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that receives the rows of every gradient pass."""
    calls: list[list[int]] = []
    gradient = algorithm.policy.gradient

    def recorded(pairs: Any, temperature: float, loss: Any, rows: Any = None) -> Any:
        calls.append(list(rows))
        return gradient(pairs, temperature, loss, rows)

    monkeypatch.setattr(algorithm.policy, "gradient", recorded)
    return calls


@pytest.mark.parametrize(("most", "rows"), [(1, [0]), (3, [0, 3, 6]), (7, [0, 1, 2, 4, 5, 7, 8])])
def test_unlearn_max_completions_takes_the_step_of_evenly_spaced_completions(
    most: int,
    rows: list[int],
    build: Any,
    sample_stage1: Any,
    demo_prompts: list[Prompt],
    plain_scores: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step equals that of a batch with only these completions."""
    algorithm, metrics = build(gate="always", unlearn_max_completions=most), StepMetrics()
    rollout = sample_stage1(algorithm, demo_prompts[:5])  # 10 completions
    calls = record_gradient_rows(algorithm, monkeypatch)
    algorithm.unlearn(rollout, metrics)
    assert calls == [rows]

    model = copy.deepcopy(algorithm.policy.model).double()
    pairs, ceiling = rollout.pairs(range(5)), 1 - algorithm.options.unlearn_eps
    for row in rows:
        p = plain_scores(model, *pairs[row]).logprobs.exp().clamp(max=ceiling)
        (-torch.log(1 - p).mean() / len(rows)).backward()
    expected = {name: -1e-2 * weight.grad for name, weight in model.named_parameters()}
    assert_same_step(theta_prime_minus_theta(algorithm), expected)
    assert metrics.result()["gate_share"] == 1.0


def test_gate_share_covers_only_the_evenly_spaced_completions(
    build: Any, sample_stage1: Any, demo_prompts: list[Prompt], plain_scores: Any
) -> None:
    algorithm = build(gate="token", gate_window=1, gate_threshold=0.4, unlearn_max_completions=4)
    rollout, metrics = sample_stage1(algorithm, demo_prompts[:4]), StepMetrics()
    algorithm.unlearn(rollout, metrics)
    pairs, model = rollout.pairs(range(4)), algorithm.policy.model
    with torch.no_grad():
        entropies = [plain_scores(model, *pairs[row]).entropies for row in (0, 2, 4, 6)]
    share = (torch.cat(entropies) < 0.4).double().mean().item()
    assert 0 < share < 1
    assert metrics.result()["gate_share"] == pytest.approx(share)


def without_entropies(rollout: Rollout) -> Rollout:
    """Return what an engine without entropies gives. No row can then be left out."""
    groups = [[replace(completion, entropies=()) for completion in g] for g in rollout.groups]
    return replace(rollout, groups=groups)


def test_leaving_out_rows_above_the_gate_does_not_change_the_step(
    build: Any, sample_stage1: Any, demo_prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = {"temperature": 2.0, "gate": "token", "gate_window": 1}
    completions = sample_stage1(build(**knobs), demo_prompts[:8]).completions()
    lowest = sorted(min(completion.entropies) for completion in completions)
    threshold = lowest[10] / 2  # six rows have no entropy below twice the threshold
    assert lowest[0] < 0.9 * threshold
    results = []
    for change in (lambda rollout: rollout, without_entropies):
        algorithm, metrics = build(**knobs, gate_threshold=threshold), StepMetrics()
        calls = record_gradient_rows(algorithm, monkeypatch)
        algorithm.unlearn(change(sample_stage1(algorithm, demo_prompts[:8])), metrics)
        results.append((len(calls[0]), theta_prime_minus_theta(algorithm), metrics.result()))
    (num_candidates, step, row), (num_rows, expected_step, expected) = results
    assert (num_candidates, num_rows) == (10, 16)
    assert_same_step(step, expected_step)
    for name in ("gate_share", "unlearn/kl", "unlearn/loss_before", "unlearn/loss_after"):
        assert row[name] == pytest.approx(expected[name], rel=1e-3)
    assert 0 < row["gate_share"] < 1


IS_SELECTED: dict[str, Callable[[float, list[float]], bool]] = {
    "rewarded": lambda reward, group: reward > 0,
    "unrewarded": lambda reward, group: reward == 0,
    "zero_variance": lambda reward, group: group in ([0.0] * len(group), [1.0] * len(group)),
}


@pytest.mark.parametrize("choice", IS_SELECTED)
def test_only_selected_rows_are_in_the_gradient_pass(
    choice: str,
    build: Any,
    sample_stage1: Any,
    demo_prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = build(gate="always", unlearn_on=choice)
    rollout = sample_stage1(algorithm, demo_prompts[:12])
    calls = record_gradient_rows(algorithm, monkeypatch)
    algorithm.unlearn(rollout, StepMetrics())
    rewards = [(reward, group) for group in rollout.rewards for reward in group]
    selected = [row for row, case in enumerate(rewards) if IS_SELECTED[choice](*case)]
    assert calls == [selected]
    assert 0 < len(selected) < len(rewards)
    expected = {"rewarded": {1.0}, "unrewarded": {0.0}, "zero_variance": {0.0, 1.0}}[choice]
    assert {rewards[row][0] for row in selected} == expected


# --- engines without access to their weights


class UnreadableEngine(TransformersEngine):
    """Behaves like an engine in another process: its weights cannot be read."""

    def weights(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("unlearn_lr", [1e-2, "auto"])
def test_an_engine_whose_weights_cannot_be_read_takes_the_same_step(
    unlearn_lr: float | str,
    build: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
    fingerprint: Any,
) -> None:
    results = []
    for engine in (UnreadableEngine, TransformersEngine):
        algorithm = build(engine=engine, gate="always", unlearn_lr=unlearn_lr)
        metrics = StepMetrics()
        algorithm.step(demo_prompts[:4], sampling, metrics)
        clock = ("seconds", "tokens_per_second")
        row = {name: v for name, v in metrics.result().items() if not name.startswith(clock)}
        results.append((row, fingerprint(list(algorithm.policy.model.parameters()))))
    assert results[0] == results[1]


# --- memory


@pytest.mark.parametrize("unlearn_lr", [1e-2, "auto"])
def test_a_step_leaves_no_reference_cycle_that_holds_the_probe(
    unlearn_lr: float | str, build: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    """Cycles are freed by the garbage collector, many steps later. The probe is large."""
    algorithm = build(gate="always", unlearn_lr=unlearn_lr)
    gc.collect()
    gc.disable()
    try:
        algorithm.step(demo_prompts[:2], sampling, metrics := StepMetrics())
        assert "unlearn/kl" in metrics.result()
        assert not [item for item in gc.get_objects() if type(item) is Probe]
    finally:
        gc.enable()
