"""Whole steps on a small model.

θ is only read by unlearning. θ′ unlearns, later stages sample from it, and the update uses both.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from eepo.algorithm import EEPO, SearchResult, StepMetrics, lr_search
from eepo.algorithm.probe import Effect, Probe
from eepo.config import AlgorithmConfig
from eepo.model.policy import Policy
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Rollout, Sampling, Verdict, mean_entropy

Weights = dict[str, Tensor]


def weights_of(model: Any) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum((tensor.double() ** 2).sum().item() for tensor in tensors))


def assert_moved(actual: Weights, start: Weights, step: Weights) -> None:
    """Check `actual` = `start` + `step`, within 1 % of the step and the rounding of fp32."""
    size, rounding = norm(step.values()), 2.0**-24 * norm(start.values())
    assert size > 20 * rounding
    error = norm(actual[name].double() - start[name].double() - step[name] for name in step)
    assert error < 0.01 * size + rounding


def scaled(factor: float, tensors: Weights) -> Weights:
    return {name: factor * tensor for name, tensor in tensors.items()}


def reference_gradient(
    model: Any, rollout: Rollout, options: AlgorithmConfig, plain_scores: Any
) -> tuple[Weights, float, float]:
    """Return ∇L by plain autograd in float64, L, and the share of gated tokens."""
    model = copy.deepcopy(model).double()
    model.zero_grad()
    pairs = rollout.pairs(range(len(rollout.prompts)))
    rewards = [(reward, group) for group in rollout.rewards for reward in group]
    is_selected = {
        "all": lambda reward, group: True,
        "rewarded": lambda reward, group: reward > 0,
        "unrewarded": lambda reward, group: reward == 0,
        "zero_variance": lambda reward, group: len(set(group)) == 1,
    }[options.unlearn_on]
    num_gated = num_tokens = 0
    total = 0.0
    for (prompt, completion), (reward, group) in zip(pairs, rewards, strict=True):
        scores = plain_scores(model, prompt, completion, options.temperature)
        length, terms = len(completion.token_ids), []
        entropies = scores.entropies.tolist()
        num_tokens += length
        for t in range(length):
            window = entropies[max(0, t + 1 - options.gate_window) : t + 1]
            if options.gate == "token" and sum(window) / len(window) >= options.gate_threshold:
                continue
            if not is_selected(reward, group):
                continue
            num_gated += 1
            p = scores.logprobs[t].exp()
            if options.unlearn_loss == "nll":
                terms.append(p.log())
            elif options.saturation == "exact":
                terms.append(-scores.complements[t])
            else:
                terms.append(-torch.log(1 - p.clamp(max=1 - options.unlearn_eps)))
        if terms:
            loss = torch.stack(terms).sum() / length / len(pairs)
            loss.backward()
            total += loss.item()
    gradient = {name: weight.grad for name, weight in model.named_parameters()}
    return gradient, total, num_gated / num_tokens


def stage1_of(rollout: Rollout) -> Rollout:
    """Return the part of a rollout that stage 1 sampled."""
    size = rollout.stages.count(1)
    groups = [group[:size] for group in rollout.groups]
    return Rollout(rollout.prompts, groups, [rewards[:size] for rewards in rollout.rewards])


# --- unlearning: θ′ = θ − η ∇L, and θ is only read

VARIANTS: list[dict[str, Any]] = [
    {"gate": "token"},
    {"gate": "token", "saturation": "exact", "gate_threshold": 0.6},
    {"gate": "always"},
    {"gate": "always", "saturation": "exact"},
    {"gate": "token", "unlearn_loss": "nll", "unlearn_lr": 1.0},
    {"gate": "always", "unlearn_loss": "nll"},
    {"gate": "token", "unlearn_lr": "auto"},
    {"gate": "always", "unlearn_lr": "auto", "saturation": "exact"},
    {"gate": "token", "unlearn_on": "rewarded", "gate_window": 5},
    {"gate": "always", "unlearn_on": "rewarded", "saturation": "exact", "unlearn_lr": "auto"},
    {"gate": "always", "unlearn_on": "zero_variance"},
    {"gate": "always", "unlearn_on": "unrewarded"},
    {"gate": "always", "temperature": 0.8, "unlearn_eps": 0.05},
    {"gate": "step", "gate_threshold": 10.0},
]


def variant_id(variant: dict[str, Any]) -> str:
    return "-".join(map(str, variant.values()))


@pytest.fixture(scope="module")
def trained(
    build_eepo: Any, sample_stage1: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> SimpleNamespace:
    """EEPO after one update, so that its optimizer has state, with stage 1 of the next step.

    The policy has gradients. Unlearning must not clear them.
    """
    algorithm = build_eepo(micro_batch_tokens=150)
    algorithm.step(demo_prompts[:4], sampling, StepMetrics())
    assert all(state["step"] == 1 for state in algorithm.optimizer.state.values())
    for weight in algorithm.policy.model.parameters():
        weight.grad = torch.full_like(weight, 0.5)
    rollout = sample_stage1(algorithm, demo_prompts[4:10])
    assert 0 < sum(map(sum, rollout.rewards)) < 12
    return SimpleNamespace(algorithm=algorithm, rollout=rollout)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_unlearning_loads_theta_minus_the_step_and_does_not_change_theta(
    variant: dict[str, Any], trained: SimpleNamespace, plain_scores: Any, fingerprint: Any
) -> None:
    knobs = {"unlearn_lr": 1e-2, "unlearn_kl_target": 3e-3, "group_size": 4} | variant
    options, parts = AlgorithmConfig(**knobs), trained.algorithm
    model, optimizer = parts.policy.model, parts.optimizer
    algorithm = EEPO(
        parts.policy, None, parts.engine, parts.reward, optimizer, options, 64, max_grad_norm=1.0
    )

    def policy_state() -> str:
        tensors = [(weight, weight.grad) for weight in model.parameters()]
        return fingerprint([tensors, optimizer.state_dict()])

    before, metrics = policy_state(), StepMetrics()
    algorithm.unlearn(trained.rollout, metrics)
    assert policy_state() == before

    gradient, loss, gate_share = reference_gradient(model, trained.rollout, options, plain_scores)
    row = metrics.result()
    assert 0 < gate_share <= 1
    assert row["gate_share"] == pytest.approx(gate_share)
    lr = row["unlearn/lr"]
    theta, theta_prime = weights_of(model), weights_of(parts.engine.model)
    assert_moved(theta_prime, theta, scaled(-lr, gradient))
    assert row["unlearn/loss_before"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    assert row["unlearn/loss_after"] < row["unlearn/loss_before"]
    num_changed = sum((theta_prime[name] != theta[name]).sum().item() for name in theta)
    num_weights = sum(weight.numel() for weight in theta.values())
    assert row["unlearn/weights_changed_share"] == pytest.approx(num_changed / num_weights)
    if options.unlearn_lr == "auto":
        assert row["unlearn/kl"] == pytest.approx(3e-3, rel=0.5)
        assert algorithm.lr_search.lr == lr
    else:
        assert lr == options.unlearn_lr


@pytest.mark.parametrize(
    "variant",
    [
        {"gate": "never"},
        {"gate": "token", "gate_threshold": 0.0},
        {"gate": "step", "gate_threshold": 0.0},
        {"gate": "always", "unlearn_on": "rewarded"},
        {"gate": "token", "unlearn_on": "rewarded", "unlearn_lr": "auto"},
    ],
    ids=variant_id,
)
def test_if_nothing_is_gated_theta_prime_stays_theta(
    variant: dict[str, Any], build_eepo: Any, sample_stage1: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build_eepo(**variant)
    rollout = sample_stage1(algorithm, demo_prompts[:3])
    rollout.rewards = [[0.0] * len(group) for group in rollout.rewards]
    metrics = StepMetrics()
    algorithm.unlearn(rollout, metrics)
    assert len(algorithm.engine.loads) == 1  # the sync
    assert metrics.result()["gate_share"] == 0.0
    for name, weight in algorithm.policy.named_weights():
        assert torch.equal(algorithm.engine.model.get_parameter(name), weight)


def test_a_bf16_engine_loads_the_fp32_step_rounded_once(
    build_eepo: Any, sample_stage1: Any, demo_prompts: list[Prompt], plain_scores: Any
) -> None:
    algorithm = build_eepo(gate="always", dtype=torch.bfloat16, unlearn_lr=3e-3)
    with torch.no_grad():
        for weight in algorithm.policy.model.parameters():
            weight.mul_(1.001)  # no longer bf16 numbers
    rollout, metrics = sample_stage1(algorithm, demo_prompts[:4]), StepMetrics()
    algorithm.unlearn(rollout, metrics)
    model, options = algorithm.policy.model, algorithm.options
    gradient, _, _ = reference_gradient(model, rollout, options, plain_scores)
    num_equal = num_changed = num_weights = 0
    for name, weight in algorithm.policy.named_weights():
        loaded = algorithm.engine.loads[-1][name]
        assert loaded.dtype == torch.bfloat16
        expected = (weight.double() - 3e-3 * gradient[name]).float().to(torch.bfloat16)
        num_equal += (loaded == expected).sum().item()
        num_changed += (loaded != weight.to(torch.bfloat16)).sum().item()
        num_weights += weight.numel()
    assert num_equal / num_weights > 0.999
    changed_share = metrics.result()["unlearn/weights_changed_share"]
    assert changed_share == pytest.approx(num_changed / num_weights)


@pytest.mark.parametrize(("saturation", "lr"), [("stop", 2e-2), ("exact", 3e-2)])
def test_unlearning_makes_stage_1_less_likely_and_raises_the_entropy_of_stage_2(
    saturation: str,
    lr: float,
    build_eepo: Any,
    sample_stage1: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
) -> None:
    algorithm = build_eepo(group_size=8, gate="always", unlearn_lr=lr, saturation=saturation)
    rollout, metrics = sample_stage1(algorithm, demo_prompts), StepMetrics()
    stage1_pairs = rollout.pairs(range(len(demo_prompts)))
    algorithm.unlearn(rollout, metrics)
    algorithm.sample(rollout, 2, sampling, metrics)

    def mean_logprob(weights: Weights | None) -> float:
        total = num_tokens = 0.0
        with torch.no_grad():
            for batch in algorithm.policy.micro_batches(stage1_pairs):
                total += algorithm.policy.score(batch, 1.0, weights).logprobs.sum().item()
                num_tokens += batch.mask.sum().item()
        return total / num_tokens

    assert mean_logprob(algorithm.engine.loads[-1]) < mean_logprob(None) - 0.05
    first, second = (mean_entropy([c for c, _ in rollout.of_stage(stage)]) for stage in (1, 2))
    assert second > 1.04 * first


# --- measuring and logging have no side effects


@pytest.mark.parametrize("unlearn_lr", [1e-2, "auto"])
def test_stage_2_samples_from_theta_prime_even_if_the_probe_measures_nothing(
    unlearn_lr: float | str,
    build_eepo: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
    demo_model: Any,
    plain_scores: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The KL of the fixed effect is the target, so the search ends at the rate it starts with."""
    effect = Effect(loss_before=1.0, loss_after=0.5, kl=1e-3)
    monkeypatch.setattr(Probe, "measure", lambda probe, weights: effect)
    algorithm = build_eepo(gate="always", unlearn_lr=unlearn_lr, unlearn_kl_target=1e-3)
    lr, metrics = algorithm.lr_search.lr if unlearn_lr == "auto" else unlearn_lr, StepMetrics()
    rollout = algorithm.step(demo_prompts[:4], sampling, metrics)
    assert metrics.result()["unlearn/lr"] == lr
    assert metrics.result()["unlearn/kl"] == effect.kl

    gradient, _, _ = reference_gradient(
        demo_model, stage1_of(rollout), algorithm.options, plain_scores
    )
    theta_prime = algorithm.engine.loads[-1]
    assert_moved(theta_prime, weights_of(demo_model), scaled(-lr, gradient))
    engine = TransformersEngine(copy.deepcopy(demo_model), algorithm.engine.tokenizer)
    engine.load_weights(theta_prime.items())
    stage_2 = Sampling(1.0, 24, 1, "train/0", first_sample=2)
    assert engine.generate(rollout.prompts, 2, stage_2) == [group[2:] for group in rollout.groups]


@pytest.mark.parametrize("unlearn_lr", [1e-2, "auto"])
def test_metrics_that_record_nothing_change_neither_completions_nor_weights(
    unlearn_lr: float | str,
    build_eepo: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
    fingerprint: Any,
) -> None:
    results = []
    for metrics in (StepMetrics(), MagicMock()):
        algorithm = build_eepo(gate="always", unlearn_lr=unlearn_lr, mini_batch=2)
        rollout = algorithm.step(demo_prompts[:4], sampling, metrics)
        weights = fingerprint(list(algorithm.policy.model.parameters()))
        loads = fingerprint(algorithm.engine.loads)
        results.append((rollout.groups, rollout.advantages, weights, loads))
    assert results[0] == results[1]


# --- the step gate


def stage1_with_entropy(prompt: Prompt, entropy: float) -> Rollout:
    """Return stage 1 of one prompt, whose tokens all have this entropy."""
    completions = [
        Completion(ids, (-0.1,) * len(ids), "", True, (entropy,) * len(ids))
        for ids in ((5, 6, 1), (7, 1))
    ]
    rollout = Rollout([prompt])
    verdicts: Future[list[Verdict]] = Future()
    verdicts.set_result([Verdict(1.0, "a"), Verdict(0.0, None)])
    rollout.add_stage(1, [completions], verdicts)
    return rollout


def test_step_gate_follows_the_mean_entropy_of_the_last_steps(
    build_eepo: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build_eepo(gate="step", gate_window=2, gate_threshold=0.5)
    algorithm.engine.loads = []
    has_unlearned = []
    for entropy in (0.9, 0.05, 0.9, 0.9, 0.3, 0.2, 0.9):
        num_loads = len(algorithm.engine.loads)
        metrics = StepMetrics()
        algorithm.unlearn(stage1_with_entropy(demo_prompts[0], entropy), metrics)
        has_unlearned.append(len(algorithm.engine.loads) > num_loads)
        assert metrics.result()["gate_share"] == float(has_unlearned[-1])
    # means: .9, .475, .475, .9, .6, .25, .55
    assert has_unlearned == [False, True, True, False, False, True, False]
    assert algorithm.gate.history == [0.2, 0.9]


def test_one_step_of_low_entropy_opens_the_step_gate(
    build_eepo: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build_eepo(gate="step", gate_threshold=0.5)
    algorithm.engine.loads = []
    algorithm.unlearn(stage1_with_entropy(demo_prompts[0], 0.4), StepMetrics())
    assert len(algorithm.engine.loads) == 1


def test_step_gate_records_stage_1_only(
    build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    algorithm = build_eepo(gate="step", gate_threshold=0.0, num_stages=4)
    algorithm.step(demo_prompts[:2], sampling, StepMetrics())
    assert len(algorithm.gate.history) == 1


# --- state


def test_state_is_json_and_restores_the_next_step_bit_for_bit(
    build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    """The history opens the gate, and the last rate is where the search starts."""
    knobs = {"gate": "step", "gate_window": 3, "unlearn_lr": "auto", "gate_threshold": 0.5}
    saved, restored, new = (build_eepo(**knobs) for _ in range(3))
    saved.gate.history = [0.1, 0.02]
    saved.lr_search, saved.unlearn_scale = SearchResult(3e-3, slope=5.0), 0.25
    state = json.loads(json.dumps(saved.state()))
    restored.load_state(state)
    assert restored.state() == saved.state() == state
    results = []
    for algorithm in (saved, restored, new):
        algorithm.step(demo_prompts[:4], sampling, StepMetrics())
        weights = fingerprint(list(algorithm.policy.model.parameters()))
        results.append((weights, algorithm.state()))
    assert results[0] == results[1] != results[2]
    assert state["gate_history"] == [0.1, 0.02]  # a loaded state is not shared


@pytest.mark.parametrize("knobs", [{"gate": "step"}, {"outcome_bonus": 0.5}], ids=str)
def test_a_later_step_does_not_change_a_state(
    knobs: dict[str, Any], build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    """The trainer undoes a failed step with the state that it took before."""
    algorithm = build_eepo(unlearn_lr="auto", **knobs)
    for _ in range(2):
        state = algorithm.state()
        before = json.dumps(state)
        algorithm.step(demo_prompts[:2], sampling, StepMetrics())
        assert json.dumps(state) == before
        assert algorithm.state() != state


# --- the update


def test_ratios_are_1_in_stage_1_and_relative_to_theta_prime_in_stage_2(
    build_eepo: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
    demo_model: Any,
    plain_scores: Any,
) -> None:
    algorithm, metrics = build_eepo(gate="always", unlearn_lr=1e-2), StepMetrics()
    rollout = algorithm.step(demo_prompts[:6], sampling, metrics)
    row = metrics.result()
    assert row["stage1/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert row["stage1/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert row["stage1/clip_share"] == 0.0
    assert len(algorithm.engine.loads) == 2

    theta_prime, gaps = copy.deepcopy(demo_model), []
    theta_prime.load_state_dict(algorithm.engine.loads[-1], strict=False)
    theta_prime.tie_weights()
    with torch.no_grad():
        for prompt, group in zip(rollout.prompts, rollout.groups, strict=True):
            for completion, stage in zip(group, rollout.stages, strict=True):
                policy = plain_scores(demo_model, prompt, completion).logprobs
                sampled = policy
                if stage == 2:
                    sampled = plain_scores(theta_prime, prompt, completion).logprobs
                    gaps.append(policy - sampled)
                assert completion.logprobs == pytest.approx(sampled.tolist(), abs=1e-4)
    gap = torch.cat(gaps)
    assert gap.abs().max() > 0.3
    assert row["stage2/ratio_mean"] == pytest.approx(gap.exp().mean().item(), rel=1e-3)
    assert row["stage2/ratio_max"] == pytest.approx(gap.exp().max().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("has_reference", "normalisation"),
    [(False, "mini_batch"), (True, "mini_batch"), (True, "group")],
)
def test_the_update_is_grpo_on_both_stages(
    has_reference: bool,
    normalisation: str,
    build_eepo: Any,
    demo_prompts: list[Prompt],
    demo_model: Any,
    plain_scores: Any,
) -> None:
    """One step of plain SGD equals the whole objective by plain autograd in float64."""
    reference = copy.deepcopy(demo_model)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in reference.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    algorithm = build_eepo(
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0),
        reference=Policy(copy.deepcopy(reference)) if has_reference else None,
        max_grad_norm=1e9,
        micro_batch_tokens=120,
        gate="always",
        unlearn_lr=1e-2,
        temperature=0.9,
        clip_low=0.1,
        clip_high=0.3,
        kl_coef=0.3,
        entropy_coef=0.1,
        loss_normalisation=normalisation,
    )
    metrics = StepMetrics()
    rollout = algorithm.step(demo_prompts[:6], Sampling(0.9, 24, 1, "train/0"), metrics)
    assert metrics.result()["stage2/clip_share"] > 0

    policy, reference = copy.deepcopy(demo_model).double(), reference.double()
    policy.zero_grad()
    num_tokens = sum(len(completion.token_ids) for completion in rollout.completions())
    groups = zip(rollout.prompts, rollout.groups, rollout.rewards, strict=True)
    for prompt, group, rewards in groups:
        mean = sum(rewards) / 4
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
        group_tokens = sum(len(completion.token_ids) for completion in group)
        divisor = num_tokens if normalisation == "mini_batch" else 6 * group_tokens
        for completion, reward in zip(group, rewards, strict=True):
            advantage = (reward - mean) / (std + 1e-6)
            scores = plain_scores(policy, prompt, completion, 0.9)
            sampled = torch.tensor(completion.logprobs, dtype=torch.float64)
            ratio = (scores.logprobs - sampled).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage)
            objective = surrogate + 0.1 * scores.entropies
            if has_reference:
                with torch.no_grad():
                    target = plain_scores(reference, prompt, completion, 0.9).logprobs
                gap = target - scores.logprobs
                objective = objective - 0.3 * (gap.exp() - 1 - gap)
            (-objective.sum() / divisor).backward()
    step = {name: -weight.grad for name, weight in policy.named_parameters()}
    assert_moved(weights_of(algorithm.policy.model), weights_of(demo_model), step)
    assert metrics.result()["grad_norm"] == pytest.approx(norm(step.values()), rel=1e-3)


def test_each_mini_batch_is_an_optimizer_step_with_a_clipped_gradient(
    build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    algorithm = build_eepo(
        mini_batch=2,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0),
        max_grad_norm=1e-3,
        num_stages=1,
    )
    model = algorithm.policy.model
    history = [weights_of(model)]
    algorithm.optimizer.register_step_post_hook(lambda *_: history.append(weights_of(model)))
    rollout = algorithm.step(demo_prompts[4:9], sampling, StepMetrics())
    assert len(history) == 4  # 2 + 2 + 1 prompts
    assert all(weight.grad is None for weight in model.parameters())
    for number, (before, after) in enumerate(itertools.pairwise(history)):
        distance = norm(after[name] - before[name] for name in before)
        advantages = rollout.advantages[2 * number : 2 * number + 2]
        if any(any(group) for group in advantages):
            assert distance == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize("baseline", ["group", "stage"])
def test_advantages_are_normalised_over_the_group_or_each_stage(
    baseline: str, build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    algorithm = build_eepo(advantage_baseline=baseline, group_size=8)
    rollout = algorithm.step(demo_prompts[:6], sampling, StepMetrics())
    assert len({tuple(group) for group in rollout.rewards}) > 3
    size = 8 if baseline == "group" else 4
    for rewards, advantages in zip(rollout.rewards, rollout.advantages, strict=True):
        expected = []
        for first in range(0, 8, size):
            part = rewards[first : first + size]
            mean = sum(part) / size
            std = math.sqrt(sum((reward - mean) ** 2 for reward in part) / (size - 1))
            expected += [(reward - mean) / (std + 1e-6) for reward in part]
        assert advantages == pytest.approx(expected, abs=1e-5)


def test_stage2_negative_advantages_can_be_set_to_0(
    build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    default, positive_only = (
        build_eepo(
            group_size=8, gate="always", unlearn_lr=1e-3, stage2_negative_advantages=use_negative
        ).step(demo_prompts[:6], sampling, StepMetrics())
        for use_negative in (True, False)
    )
    assert default.rewards == positive_only.rewards
    assert any(advantage < 0 for row in default.advantages for advantage in row[4:])
    for before, after in zip(default.advantages, positive_only.advantages, strict=True):
        assert after == [*before[:4], *(max(0.0, advantage) for advantage in before[4:])]


@pytest.mark.parametrize("use_negative", [True, False])
def test_failure_weight_scales_negative_advantages(
    use_negative: bool, build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    default, scaled_down = (
        build_eepo(
            group_size=8,
            gate="always",
            unlearn_lr=1e-3,
            stage2_negative_advantages=use_negative,
            failure_weight=weight,
        ).step(demo_prompts[:6], sampling, StepMetrics())
        for weight in (1, 0.25)
    )
    assert default.rewards == scaled_down.rewards
    before = list(itertools.chain(*default.advantages))
    after = list(itertools.chain(*scaled_down.advantages))
    assert min(before) < 0 < max(before)
    expected = [advantage if advantage > 0 else advantage / 4 for advantage in before]
    assert after == pytest.approx(expected)


# --- more stages, and the limit of GRPO


def test_each_of_four_stages_unlearns_all_completions_before_it(
    build_eepo: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
    demo_model: Any,
    plain_scores: Any,
) -> None:
    algorithm = build_eepo(group_size=8, num_stages=4, gate="always", unlearn_lr=1e-2)
    metrics = StepMetrics()
    rollout = algorithm.step(demo_prompts[:3], sampling, metrics)
    assert rollout.stages == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [len(group) for group in rollout.groups] == [8, 8, 8]
    loads, theta = algorithm.engine.loads, weights_of(demo_model)
    assert len(loads) == 4
    assert all(torch.equal(loads[0][name], theta[name]) for name in theta)
    for load, size in zip(loads[1:], (2, 4, 6), strict=True):
        groups = [group[:size] for group in rollout.groups]
        earlier = Rollout(rollout.prompts, groups, [rewards[:size] for rewards in rollout.rewards])
        gradient, _, _ = reference_gradient(demo_model, earlier, algorithm.options, plain_scores)
        assert_moved(load, theta, scaled(-1e-2, gradient))

    engine = TransformersEngine(copy.deepcopy(demo_model), algorithm.engine.tokenizer)
    engine.load_weights(loads[3].items())
    # KL(θ ‖ θ′) is measured on stage 1 only: θ sampled it.
    stage1_pairs = stage1_of(rollout).pairs(range(3))
    with torch.no_grad():
        after, before = (
            torch.cat([plain_scores(model, *pair).logprobs for pair in stage1_pairs])
            for model in (engine.model, demo_model)
        )
    gap = after - before
    kl = (gap.exp() - 1 - gap).mean().item()
    assert metrics.result()["unlearn/kl"] == pytest.approx(kl, rel=1e-2)
    for stage, load in enumerate(loads, 1):
        engine.load_weights(load.items())
        first = 2 * (stage - 1)
        groups = engine.generate(
            rollout.prompts, 2, Sampling(1.0, 24, 1, "train/0", first_sample=first)
        )
        assert groups == [group[first : first + 2] for group in rollout.groups]


@pytest.mark.parametrize("shut", [{"gate": "never"}, {"gate": "token", "gate_threshold": 0.0}])
def test_with_the_gate_shut_a_step_equals_grpo_bit_for_bit(
    shut: dict[str, Any], build_eepo: Any, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    """Both sample 20 rows at a time, so that every matrix product has the same shape."""
    trained, rollouts = [], []
    for options in ({"num_stages": 2} | shut, {"num_stages": 1}):
        algorithm = build_eepo(group_size=8, max_rows=20, **options)
        for step in range(2):
            prompts = demo_prompts[5 * step : 5 * step + 5]
            at_step = Sampling(1.0, 24, 1, f"train/{step}")
            rollouts.append(algorithm.step(prompts, at_step, StepMetrics()))
        weights = list(algorithm.policy.model.parameters())
        trained.append(fingerprint([weights, algorithm.optimizer.state_dict()]))
    assert rollouts[0].groups == rollouts[2].groups
    assert rollouts[1].groups == rollouts[3].groups
    assert rollouts[1].advantages == rollouts[3].advantages
    assert any(any(group) for group in rollouts[0].advantages)
    assert trained[0] == trained[1]


def test_a_step_is_repeatable_bit_for_bit(
    build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    trained = []
    for _ in range(2):
        algorithm = build_eepo(gate="token")
        algorithm.step(demo_prompts[:4], sampling, StepMetrics())
        trained.append(fingerprint(list(algorithm.policy.model.parameters())))
    assert trained[0] == trained[1]


def test_auto_above_the_floor_of_a_bf16_engine_unlearns_and_below_it_warns(
    build_eepo: Any,
    sampling: Sampling,
    demo_prompts: list[Prompt],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding alone has a KL. A search for the whole KL would stop at a step that does nothing."""
    monkeypatch.setattr(lr_search, "_WARNED", set())
    rows = {}
    for target in (1e-2, 1e-9):
        algorithm = build_eepo(
            gate="always", dtype=torch.bfloat16, unlearn_lr="auto", unlearn_kl_target=target
        )
        metrics = StepMetrics()
        algorithm.step(demo_prompts[:4], sampling, metrics)
        rows[target] = metrics.result()
    above, below = rows.values()
    assert above["unlearn/kl"] == pytest.approx(1e-2, rel=0.3)
    assert above["unlearn/loss_after"] < above["unlearn/loss_before"]
    assert 0 < above["unlearn/kl_floor"] < 1e-2
    assert below["unlearn/kl_floor"] > 1e-9
    (warning,) = caplog.records
    assert "unlearn_kl_target = 1e-09 is below" in warning.getMessage()
