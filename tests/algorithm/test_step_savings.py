"""What a step saves: grading beside sampling, rows that are shut, scores it has seen. None of it changes the step."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.algorithm import EEPO
from eepo.algorithm.metrics import StepMetrics
from eepo.algorithm.probe import Probe
from eepo.config import AlgorithmConfig
from eepo.model.batching import MicroBatch
from eepo.model.policy import Policy, Scores
from eepo.rewards.countdown import CountdownReward
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Rollout, Sampling, Verdict

SAMPLING = Sampling(temperature=1.0, max_new_tokens=24, seed=1, stream="train/0")
PATIENCE = 60  # seconds: only a failure takes that long
Pairs = list[tuple[Prompt, Completion]]


@pytest.fixture
def build(demo_model: Any, tokenizer: Any) -> Callable[..., EEPO]:
    def make(
        reward: Any = None, engine: type[TransformersEngine] = TransformersEngine, **options: Any
    ) -> EEPO:
        model = copy.deepcopy(demo_model)
        return EEPO(
            policy=Policy(model, 150),
            reference=None,
            engine=engine(copy.deepcopy(model), tokenizer),
            reward=reward or CountdownReward(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
            options=AlgorithmConfig(
                **({"max_new_tokens": 24, "group_size": 4, "unlearn_lr": 1e-2} | options)
            ),
            mini_batch=64,
            max_grad_norm=1.0,
        )

    return make


# --- grading


class Seen(TransformersEngine):
    """Says when it has begun to sample for the second time."""

    num_calls = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.second = threading.Event()

    def generate(self, *args: Any) -> list[list[Completion]]:
        self.num_calls += 1
        if self.num_calls == 2:
            self.second.set()
        return super().generate(*args)


class Patient(CountdownReward):
    """Does not grade stage 1 before stage 2 is being sampled."""

    second: threading.Event
    overlapped: bool | None = None

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        if self.overlapped is None:
            self.overlapped = self.second.wait(PATIENCE)
        return super().grade(prompts, texts)


def test_stage_1_is_graded_while_stage_2_is_sampled(
    build: Any, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    reward = Patient()
    overlapping, plain = build(reward, Seen, gate="always"), build(gate="always")
    reward.second = overlapping.engine.second
    rollout = overlapping.step(demo_prompts[:4], SAMPLING, StepMetrics())
    assert reward.overlapped is True
    expected = plain.step(demo_prompts[:4], SAMPLING, StepMetrics())
    assert rollout.rewards == expected.rewards
    assert rollout.verdicts == expected.verdicts
    assert [[verdict.reward for verdict in group] for group in rollout.verdicts] == rollout.rewards
    assert not rollout.grading
    assert fingerprint(list(overlapping.policy.model.parameters())) == fingerprint(
        list(plain.policy.model.parameters())
    )


class Broken(CountdownReward):
    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        raise ZeroDivisionError("the grader has a bug")


@pytest.mark.parametrize("unlearn_on", ["all", "rewarded"])
def test_what_a_grader_raises_comes_out_of_the_step(
    unlearn_on: str, build: Any, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    algorithm = build(Broken(), gate="always", unlearn_on=unlearn_on)
    before = fingerprint(list(algorithm.policy.model.parameters()))
    with pytest.raises(ZeroDivisionError, match="the grader has a bug"):
        algorithm.step(demo_prompts[:2], SAMPLING, StepMetrics())
    assert fingerprint(list(algorithm.policy.model.parameters())) == before
    algorithm.reward = CountdownReward()
    assert algorithm.step(demo_prompts[:2], SAMPLING, StepMetrics()).rewards


def test_verdicts_that_come_late_find_their_places() -> None:
    prompts = [Prompt("a", "", (1,)), Prompt("b", "", (2,))]
    rollout = Rollout(prompts)
    later: list[Future[list[Verdict]]] = [Future(), Future()]
    for stage, future in enumerate(later, 1):
        groups = [
            [Completion((stage, sample), (0.0, 0.0), "", True) for sample in range(2)]
            for _ in prompts
        ]
        rollout.add_stage(stage, groups, future)
    assert rollout.rewards == [[], []]
    later[1].set_result([Verdict(reward, None) for reward in (5.0, 6.0, 7.0, 8.0)])
    later[0].set_result([Verdict(reward, None) for reward in (1.0, 2.0, 3.0, 4.0)])
    assert [reward for _, reward in rollout.of_stage(2)] == [5.0, 6.0, 7.0, 8.0]
    assert rollout.rewards == [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]
    rollout.settle()
    assert rollout.rewards == [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]


# --- which rows are unlearned


def first_stage(algorithm: EEPO, prompts: list[Prompt]) -> Rollout:
    """Sync, and stage 1."""
    rollout = Rollout(prompts)
    algorithm.engine.load_weights(algorithm.policy.named_weights())
    algorithm.sample(
        rollout, 1, replace(SAMPLING, temperature=algorithm.options.temperature), StepMetrics()
    )
    rollout.settle()
    return rollout


def moves(algorithm: EEPO) -> dict[str, Tensor]:
    """θ′ − θ."""
    held = algorithm.engine.weights()
    return {
        name: (held[name] - weight).clone() for name, weight in algorithm.policy.named_weights()
    }


def assert_same_move(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    size = max(move.abs().max().item() for move in expected.values())
    assert size > 1e-5
    for name, move in expected.items():
        assert (got[name].double() - move).abs().max() <= 2e-3 * size, name


def scored_rows(algorithm: EEPO, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What `gradient` is asked for, call after call."""
    asked: list[list[int]] = []
    gradient = algorithm.policy.gradient

    def watched(pairs: Any, temperature: float, loss: Any, rows: Any = None) -> Any:
        asked.append(list(rows))
        return gradient(pairs, temperature, loss, rows)

    monkeypatch.setattr(algorithm.policy, "gradient", watched)
    return asked


@pytest.mark.parametrize("most", [1, 3, 7])
def test_some_completions_stand_for_all(
    most: int,
    build: Any,
    demo_prompts: list[Prompt],
    plain_scores: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is that of the evenly chosen ones, as if there were no others."""
    algorithm = build(gate="always", unlearn_max_completions=most)
    rollout, metrics = first_stage(algorithm, demo_prompts[:5]), StepMetrics()  # 10 completions
    chosen = {1: [0], 3: [0, 3, 6], 7: [0, 1, 2, 4, 5, 7, 8]}[most]
    asked = scored_rows(algorithm, monkeypatch)
    algorithm.unlearn(rollout, metrics)
    assert asked == [chosen]

    model = copy.deepcopy(algorithm.policy.model).double()
    pairs = rollout.pairs(range(5))
    for row in chosen:
        p = (
            plain_scores(model, *pairs[row])
            .logprobs.exp()
            .clamp(max=1 - algorithm.options.unlearn_eps)
        )
        (-torch.log(1 - p).mean() / len(chosen)).backward()
    assert_same_move(
        moves(algorithm), {name: -1e-2 * weight.grad for name, weight in model.named_parameters()}
    )
    assert metrics.result()["gate_share"] == 1.0


def test_the_gate_share_is_over_the_chosen_ones(
    build: Any, demo_prompts: list[Prompt], plain_scores: Any
) -> None:
    algorithm = build(gate="token", gate_window=1, gate_threshold=0.4, unlearn_max_completions=4)
    rollout, metrics = first_stage(algorithm, demo_prompts[:4]), StepMetrics()
    algorithm.unlearn(rollout, metrics)
    pairs = rollout.pairs(range(4))
    with torch.no_grad():
        entropies = torch.cat(
            [plain_scores(algorithm.policy.model, *pairs[row]).entropies for row in (0, 2, 4, 6)]
        )
    share = (entropies < 0.4).double().mean().item()
    assert 0 < share < 1
    assert metrics.result()["gate_share"] == pytest.approx(share)


def without_entropies(rollout: Rollout) -> Rollout:
    """As from an engine that cannot tell them: no row is then known to be shut."""
    groups = [
        [replace(completion, entropies=()) for completion in group] for group in rollout.groups
    ]
    return replace(rollout, groups=groups)


def test_rows_that_are_surely_shut_are_not_scored_and_the_step_is_the_same(
    build: Any, demo_prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = {"temperature": 2.0, "gate": "token", "gate_window": 1}
    drawn = [
        completion
        for group in first_stage(build(**warm), demo_prompts[:8]).groups
        for completion in group
    ]
    lowest = sorted(min(completion.entropies) for completion in drawn)
    threshold = lowest[10] / 2  # so that six of them are shut for sure
    assert lowest[0] < 0.9 * threshold
    found = []
    for change in (lambda rollout: rollout, without_entropies):
        algorithm, metrics = build(**warm, gate_threshold=threshold), StepMetrics()
        asked = scored_rows(algorithm, monkeypatch)
        algorithm.unlearn(change(first_stage(algorithm, demo_prompts[:8])), metrics)
        found.append((len(asked[0]), moves(algorithm), metrics.result()))
    (few, move, row), (all_of_them, same, other) = found
    assert (few, all_of_them) == (10, 16)
    assert_same_move(move, same)
    for name in ("gate_share", "unlearn/kl", "unlearn/loss_before", "unlearn/loss_after"):
        assert row[name] == pytest.approx(other[name], rel=1e-3)
    assert 0 < row["gate_share"] < 1


WANTED: dict[str, Callable[[float, list[float]], bool]] = {
    "rewarded": lambda reward, group: reward > 0,
    "unrewarded": lambda reward, group: reward == 0,
    "zero_variance": lambda reward, group: group in ([0.0] * len(group), [1.0] * len(group)),
}


@pytest.mark.parametrize("choice", WANTED)
def test_only_rows_that_are_to_be_unlearned_are_scored(
    choice: str, build: Any, demo_prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = build(gate="always", unlearn_on=choice)
    rollout = first_stage(algorithm, demo_prompts[:12])
    asked = scored_rows(algorithm, monkeypatch)
    algorithm.unlearn(rollout, StepMetrics())
    rewards = [(reward, group) for group in rollout.rewards for reward in group]
    assert asked == [[row for row, given in enumerate(rewards) if WANTED[choice](*given)]]
    assert 0 < len(asked[0]) < len(rewards)
    seen = {rewards[row][0] for row in asked[0]}
    assert seen == {"rewarded": {1.0}, "unrewarded": {0.0}, "zero_variance": {0.0, 1.0}}[choice]


# --- what the pass for the gradient has seen


def test_scores_seen_in_the_gradient_pass_are_those_computed_anew(
    build: Any, demo_prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = build()
    pairs = first_stage(algorithm, demo_prompts[:6]).pairs(range(6))
    policy, rows = algorithm.policy, [0, 2, 3, 7, 10]

    def loss(batch: MicroBatch, scores: Scores) -> Tensor:
        return (scores.logprobs.sum(1) / batch.mask.sum(1)).sum() / len(pairs)

    seeing, fresh = (Probe(policy, pairs, rows, 64, 1.0, loss) for _ in range(2))
    gradient = policy.gradient(
        pairs,
        1.0,
        lambda batch, scores: seeing.see(batch, scores) or loss(batch, scores),
        [0, 1, 2, 7, 8, 11],
    )
    scored: list[int] = []
    score = policy.score
    monkeypatch.setattr(
        policy, "score", lambda batch, *rest: scored.extend(batch.rows) or score(batch, *rest)
    )
    with torch.no_grad():
        mine, theirs = seeing.before, fresh.before
    assert sorted(scored) == sorted(
        [3, 10, *rows]
    )  # the first probe asks only for what it has not seen
    for (batch, scores, before), (other, anew, again) in zip(mine, theirs, strict=True):
        assert batch.rows == other.rows
        for column, same in zip(vars(scores).values(), vars(anew).values(), strict=True):
            assert not column.requires_grad
            torch.testing.assert_close(column, same, rtol=1e-5, atol=1e-5)
        assert float(before) == pytest.approx(float(again), rel=1e-5)
    ours, expected = seeing.measure(gradient, 1e-2), fresh.measure(gradient, 1e-2)
    assert ours.kl == pytest.approx(expected.kl, rel=1e-3)
    assert ours.logprobs_after == pytest.approx(expected.logprobs_after, rel=1e-5)


class Sealed(TransformersEngine):
    """As an engine in another process: its weights cannot be read."""

    def weights(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("unlearn_lr", [1e-2, "auto"])
def test_an_engine_whose_weights_cannot_be_read_makes_the_same_step(
    unlearn_lr: float | str, build: Any, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    rows, weights = [], []
    for engine in (Sealed, TransformersEngine):
        algorithm, metrics = (
            build(engine=engine, gate="always", unlearn_lr=unlearn_lr),
            StepMetrics(),
        )
        algorithm.step(demo_prompts[:4], SAMPLING, metrics)
        rows.append(
            {
                name: value
                for name, value in metrics.result().items()
                if not name.startswith("seconds")
            }
        )
        weights.append(fingerprint(list(algorithm.policy.model.parameters())))
    for name in ("tokens_per_second",):
        for row in rows:
            row.pop(name, None)
    assert rows[0] == rows[1]
    assert weights[0] == weights[1]


# --- memory


@pytest.mark.parametrize("unlearn_lr", [1e-2, "auto"])
def test_a_step_leaves_nothing_to_python_s_search_for_cycles(
    unlearn_lr: Any, build: Any, demo_prompts: list[Prompt]
) -> None:
    """A probe holds the gradient, as large as the policy; such searches may be many steps apart."""
    algorithm = build(gate="always", unlearn_lr=unlearn_lr)
    gc.collect()
    gc.disable()
    try:
        algorithm.step(demo_prompts[:2], SAMPLING, metrics := StepMetrics())
        assert "unlearn/kl" in metrics.values
        assert not [one for one in gc.get_objects() if type(one) is Probe]
    finally:
        gc.enable()
