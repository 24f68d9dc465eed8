"""One step with real parts: θ is only read, θ′ forgets, later stages sample from it, and the update knows it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.algorithm import EEPO
from eepo.algorithm.metrics import StepMetrics
from eepo.config import AlgorithmConfig
from eepo.model.policy import Policy
from eepo.rewards.countdown import CountdownReward
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Rollout, Sampling, Verdict, mean_entropy

SAMPLING = Sampling(temperature=1.0, max_new_tokens=24, seed=1, stream="train/0")

Pairs = list[tuple[Prompt, Completion]]
Weights = dict[str, Tensor]


class WatchedEngine(TransformersEngine):
    """Keeps what it was given, load after load."""

    loads: list[Weights]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        kept = {name: weight.detach().clone() for name, weight in weights}
        self.__dict__.setdefault("loads", []).append(kept)
        super().load_weights(kept.items())


@pytest.fixture
def build(demo_model: Any, tokenizer: Any) -> Callable[..., Any]:
    """EEPO on a copy of the demo policy."""

    def make(
        *,
        mini_batch: int = 64,
        max_rows: int = 1024,
        optimizer: Any = None,
        reference: Any = None,
        max_grad_norm: float = 1.0,
        dtype: torch.dtype = torch.float32,
        micro_batch_tokens: int = 16384,
        **options: Any,
    ) -> EEPO:
        model = copy.deepcopy(demo_model)
        optimizer = optimizer or (lambda weights: torch.optim.AdamW(weights, lr=1e-4))
        return EEPO(
            policy=Policy(model, micro_batch_tokens),
            reference=reference,
            engine=WatchedEngine(copy.deepcopy(model).to(dtype), tokenizer, max_rows),
            reward=CountdownReward(),
            optimizer=optimizer(model.parameters()),
            options=AlgorithmConfig(**({"max_new_tokens": 24, "group_size": 4} | options)),
            mini_batch=mini_batch,
            max_grad_norm=max_grad_norm,
        )

    return make


def first_stage(algorithm: EEPO, prompts: list[Prompt], sampling: Sampling = SAMPLING) -> Rollout:
    """Sync, and stage 1."""
    rollout = Rollout(prompts)
    algorithm.engine.load_weights(algorithm.policy.named_weights())
    algorithm.sample(rollout, 1, sampling, StepMetrics())
    rollout.settle()
    return rollout


def weights_of(model: Any) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def reference_gradient(
    model: Any, rollout: Rollout, options: AlgorithmConfig, plain_scores: Any
) -> tuple[Weights, float, float]:
    """∇L by plain autograd in float64, L, and the share of tokens that were gated."""
    copied = copy.deepcopy(model).double()
    copied.zero_grad()
    pairs = [
        (prompt, c)
        for prompt, group in zip(rollout.prompts, rollout.groups, strict=True)
        for c in group
    ]
    rewards = [reward for group in rollout.rewards for reward in group]
    stuck = {
        prompt.id
        for prompt, group in zip(rollout.prompts, rollout.rewards, strict=True)
        if len({*group}) < 2
    }
    gated = total = 0
    loss = torch.zeros((), dtype=torch.float64)
    for (prompt, completion), reward in zip(pairs, rewards, strict=True):
        scores = plain_scores(copied, prompt, completion, options.temperature)
        length, terms = len(completion.token_ids), []
        entropies = scores.entropies.tolist()
        total += length
        for t in range(length):
            last = entropies[max(0, t + 1 - options.gate_window) : t + 1]
            if options.gate == "token" and not sum(last) / len(last) < options.gate_threshold:
                continue
            if options.unlearn_on == "rewarded" and reward == 0:
                continue
            if options.unlearn_on == "unrewarded" and reward > 0:
                continue
            if options.unlearn_on == "zero_variance" and prompt.id not in stuck:
                continue
            gated += 1
            p = scores.logprobs[t].exp()
            if options.unlearn_loss == "nll":
                terms.append(p.log())
            elif options.saturation == "exact":
                terms.append(-scores.complements[t])
            else:
                terms.append(-torch.log(1 - p.clamp(max=1 - options.unlearn_eps)))
        if terms:
            own = torch.stack(terms).sum() / length / len(pairs)
            own.backward()
            loss += own.detach()
    return (
        {name: weight.grad for name, weight in copied.named_parameters()},
        loss.item(),
        gated / total,
    )


def assert_moved(got: Weights, start: Weights, step: Weights) -> None:
    """`got` is `start` + `step`, to a hundredth of a step and what fp32 rounds away."""

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.sqrt(sum((tensor.double() ** 2).sum().item() for tensor in tensors))

    size, rounding = norm(step.values()), 2.0**-24 * norm(start.values())
    assert size > 20 * rounding
    assert (
        norm(got[name].double() - start[name].double() - step[name] for name in step)
        < 0.01 * size + rounding
    )


# --- θ is only read, and θ′ is θ − η ∇L

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


@pytest.fixture(scope="module")
def started(demo_model: Any, tokenizer: Any, demo_prompts: list[Prompt]) -> SimpleNamespace:
    """A policy after one real update, so that its optimizer has state, with gradients that nobody may clear."""
    model = copy.deepcopy(demo_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = WatchedEngine(copy.deepcopy(model), tokenizer)
    policy = Policy(model, micro_batch_tokens=150)
    options = AlgorithmConfig(group_size=4, max_new_tokens=24)
    algorithm = EEPO(policy, None, engine, CountdownReward(), optimizer, options, 64, 1.0)
    algorithm.step(demo_prompts[:4], SAMPLING, StepMetrics())
    assert all(state["step"] == 1 for state in optimizer.state.values())
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 0.5)
    rollout = first_stage(algorithm, demo_prompts[4:10])
    assert 0 < sum(map(sum, rollout.rewards)) < 12
    return SimpleNamespace(
        model=model, optimizer=optimizer, engine=engine, policy=policy, rollout=rollout
    )


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values()))
)
def test_unlearning_streams_theta_minus_the_step_and_leaves_theta_alone(
    variant: dict[str, Any], started: SimpleNamespace, plain_scores: Any, fingerprint: Any
) -> None:
    options = AlgorithmConfig(
        **({"unlearn_lr": 1e-2, "unlearn_kl_target": 3e-3, "group_size": 4} | variant)
    )
    algorithm = EEPO(
        started.policy, None, started.engine, CountdownReward(), started.optimizer, options, 64, 1.0
    )

    def state() -> str:
        held = [(weight, weight.grad) for weight in started.model.parameters()]
        return fingerprint([held, started.optimizer.state_dict()])

    before, metrics = state(), StepMetrics()
    algorithm.unlearn(started.rollout, metrics)
    assert state() == before

    gradient, loss, gate_share = reference_gradient(
        started.model, started.rollout, options, plain_scores
    )
    row = metrics.result()
    assert 0 < gate_share <= 1
    assert row["gate_share"] == pytest.approx(gate_share)
    lr = row["unlearn/lr"]
    step = {name: -lr * value for name, value in gradient.items()}
    start, moved = weights_of(started.model), weights_of(started.engine.model)
    assert_moved(moved, start, step)
    assert row["unlearn/loss_before"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    assert row["unlearn/loss_after"] < row["unlearn/loss_before"]
    changed = sum((moved[name] != start[name]).sum().item() for name in start)
    assert row["unlearn/weights_changed_share"] == pytest.approx(
        changed / sum(weight.numel() for weight in start.values())
    )
    if options.unlearn_lr == "auto":
        assert row["unlearn/kl"] == pytest.approx(3e-3, rel=0.15)
        assert algorithm.auto_lr == lr
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
    ids=lambda variant: "-".join(map(str, variant.values())),
)
def test_nothing_gated_leaves_theta_prime_as_theta(
    variant: dict[str, Any], build: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build(**variant)
    rollout = first_stage(algorithm, demo_prompts[:3])
    rollout.rewards = [[0.0] * len(group) for group in rollout.rewards]
    metrics = StepMetrics()
    algorithm.unlearn(rollout, metrics)
    assert len(algorithm.engine.loads) == 1  # the sync
    assert metrics.result()["gate_share"] == 0.0
    for name, weight in algorithm.policy.named_weights():
        assert torch.equal(algorithm.engine.model.get_parameter(name), weight)


def test_a_bf16_engine_gets_the_fp32_step_rounded_once(
    build: Any, demo_prompts: list[Prompt], plain_scores: Any
) -> None:
    algorithm = build(gate="always", dtype=torch.bfloat16, unlearn_lr=3e-3)
    with torch.no_grad():
        for weight in algorithm.policy.model.parameters():
            weight.mul_(1.001)  # no longer what bf16 can tell
    rollout, metrics = first_stage(algorithm, demo_prompts[:4]), StepMetrics()
    algorithm.unlearn(rollout, metrics)
    gradient, _, _ = reference_gradient(
        algorithm.policy.model, rollout, algorithm.options, plain_scores
    )
    same = moved = total = 0
    for name, weight in algorithm.policy.named_weights():
        loaded = algorithm.engine.loads[-1][name]
        assert loaded.dtype == torch.bfloat16
        expected = (weight.double() - 3e-3 * gradient[name]).float().to(torch.bfloat16)
        same += (loaded == expected).sum().item()
        moved += (loaded != weight.to(torch.bfloat16)).sum().item()
        total += weight.numel()
    assert same / total > 0.999
    assert metrics.result()["unlearn/weights_changed_share"] == pytest.approx(moved / total)


# --- the effect of forgetting


@pytest.mark.parametrize(("saturation", "lr"), [("stop", 2e-2), ("exact", 3e-2)])
def test_forgetting_makes_stage_1_unlikely_and_stage_2_more_random(
    saturation: str, lr: float, build: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build(group_size=8, gate="always", unlearn_lr=lr, saturation=saturation)
    rollout, metrics = first_stage(algorithm, demo_prompts), StepMetrics()
    pairs = rollout.pairs(range(len(demo_prompts)))
    algorithm.unlearn(rollout, metrics)
    algorithm.sample(rollout, 2, SAMPLING, metrics)

    def mean_logprob(weights: Weights | None) -> float:
        total = number = 0.0
        with torch.no_grad():
            for batch in algorithm.policy.micro_batches(pairs):
                total += algorithm.policy.score(batch, 1.0, weights).logprobs.sum().item()
                number += batch.mask.sum().item()
        return total / number

    assert mean_logprob(algorithm.engine.loads[-1]) < mean_logprob(None) - 0.05
    first, second = (mean_entropy([c for c, _ in rollout.of_stage(stage)]) for stage in (1, 2))
    assert second > 1.04 * first


# --- the step's own gate


def scripted_stage(prompt: Prompt, entropy: float) -> Rollout:
    """Stage 1 of one prompt, whose tokens are said to have this entropy."""
    completions = [
        Completion(ids, (-0.1,) * len(ids), "", True, (entropy,) * len(ids))
        for ids in ((5, 6, 1), (7, 1))
    ]
    rollout = Rollout([prompt])
    verdicts: Future[list[Verdict]] = Future()
    verdicts.set_result([Verdict(1.0, "a"), Verdict(0.0, None)])
    rollout.add_stage(1, [completions], verdicts)
    return rollout


def test_the_step_gate_follows_the_mean_entropy_of_the_last_steps(
    build: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build(gate="step", gate_window=2, gate_threshold=0.5)
    algorithm.engine.loads = []
    opened = []
    for entropy in (0.9, 0.05, 0.9, 0.9, 0.3, 0.2, 0.9):
        before = len(algorithm.engine.loads)
        metrics = StepMetrics()
        algorithm.unlearn(scripted_stage(demo_prompts[0], entropy), metrics)
        opened.append(len(algorithm.engine.loads) > before)
        assert metrics.result()["gate_share"] == float(opened[-1])
    # means: .9, .475, .475, .9, .6, .25, .55
    assert opened == [False, True, True, False, False, True, False]
    assert algorithm.gate_history == [0.2, 0.9]


def test_one_step_with_low_entropy_opens_the_step_gate_at_once(
    build: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build(gate="step", gate_threshold=0.5)
    algorithm.engine.loads = []
    algorithm.unlearn(scripted_stage(demo_prompts[0], 0.4), StepMetrics())
    assert len(algorithm.engine.loads) == 1


def test_later_stages_do_not_enter_the_step_gates_history(
    build: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build(gate="step", gate_threshold=0.0, num_stages=4)
    algorithm.step(demo_prompts[:2], SAMPLING, StepMetrics())
    assert len(algorithm.gate_history) == 1


# --- the whole step


def test_ratios_are_1_for_stage_1_and_those_of_theta_prime_for_stage_2(
    build: Any, demo_prompts: list[Prompt], demo_model: Any, plain_scores: Any
) -> None:
    algorithm, metrics = build(gate="always", unlearn_lr=1e-2), StepMetrics()
    rollout = algorithm.step(demo_prompts[:6], SAMPLING, metrics)
    row = metrics.result()
    assert row["stage1/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert row["stage1/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert row["stage1/clip_share"] == 0.0
    assert len(algorithm.engine.loads) == 2

    forgetful, ratios, gaps = copy.deepcopy(demo_model), [], []
    forgetful.load_state_dict(algorithm.engine.loads[-1], strict=False)
    forgetful.tie_weights()
    with torch.no_grad():
        for prompt, group in zip(rollout.prompts, rollout.groups, strict=True):
            for completion, stage in zip(group, rollout.stages, strict=True):
                policy = plain_scores(demo_model, prompt, completion).logprobs
                sampled = (
                    policy if stage == 1 else plain_scores(forgetful, prompt, completion).logprobs
                )
                assert completion.logprobs == pytest.approx(sampled.tolist(), abs=1e-4)
                if stage == 2:
                    ratios.append((policy - sampled).exp())
                    gaps.append((policy - sampled).abs())
    assert torch.cat(gaps).max() > 0.3
    assert row["stage2/ratio_mean"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-3)
    assert row["stage2/ratio_max"] == pytest.approx(torch.cat(ratios).max().item(), rel=1e-3)


@pytest.mark.parametrize("kl", [False, True])
def test_the_update_is_grpo_on_both_stages(
    kl: bool, build: Any, demo_prompts: list[Prompt], demo_model: Any, plain_scores: Any
) -> None:
    """One optimizer step of plain SGD against the whole objective by plain autograd in float64."""
    anchor = copy.deepcopy(demo_model)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in anchor.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    algorithm = build(
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0),
        reference=Policy(copy.deepcopy(anchor)) if kl else None,
        max_grad_norm=1e9,
        micro_batch_tokens=120,
        gate="always",
        unlearn_lr=1e-2,
        temperature=0.9,
        clip_low=0.1,
        clip_high=0.3,
        kl_coef=0.3,
        entropy_coef=0.1,
    )
    metrics = StepMetrics()
    sampling = Sampling(0.9, 24, 1, "train/0")
    rollout = algorithm.step(demo_prompts[:6], sampling, metrics)
    assert metrics.result()["stage2/clip_share"] > 0

    double, anchor = copy.deepcopy(demo_model).double(), anchor.double()
    double.zero_grad()
    num_tokens = sum(len(completion.token_ids) for group in rollout.groups for completion in group)
    for prompt, group, rewards in zip(
        rollout.prompts, rollout.groups, rollout.rewards, strict=True
    ):
        mean = sum(rewards) / 4
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
        for completion, reward in zip(group, rewards, strict=True):
            advantage = (reward - mean) / (deviation + 1e-6)
            scores = plain_scores(double, prompt, completion, 0.9)
            ratio = (scores.logprobs - torch.tensor(completion.logprobs, dtype=torch.float64)).exp()
            gain = (
                torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage)
                + 0.1 * scores.entropies
            )
            if kl:
                with torch.no_grad():
                    held = plain_scores(anchor, prompt, completion, 0.9).logprobs
                gain = gain - 0.3 * ((held - scores.logprobs).exp() - 1 - (held - scores.logprobs))
            (-gain.sum() / num_tokens).backward()
    step = {name: -weight.grad for name, weight in double.named_parameters()}
    assert_moved(weights_of(algorithm.policy.model), weights_of(demo_model), step)
    norm = math.sqrt(sum((value**2).sum().item() for value in step.values()))
    assert metrics.result()["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_mini_batches_are_optimizer_steps_of_their_own_and_gradients_are_clipped(
    build: Any, demo_prompts: list[Prompt]
) -> None:
    algorithm = build(
        mini_batch=2,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0),
        max_grad_norm=1e-3,
        num_stages=1,
    )
    trail = [weights_of(algorithm.policy.model)]
    algorithm.optimizer.register_step_post_hook(
        lambda *_: trail.append(weights_of(algorithm.policy.model))
    )
    rollout = algorithm.step(demo_prompts[4:9], SAMPLING, StepMetrics())
    assert len(trail) == 4  # 2 + 2 + 1 prompts
    assert all(weight.grad is None for weight in algorithm.policy.model.parameters())
    for place, (before, after) in enumerate(itertools.pairwise(trail)):
        moved = math.sqrt(sum(((after[name] - before[name]) ** 2).sum().item() for name in before))
        rewarding = any(any(group) for group in rollout.advantages[2 * place : 2 * place + 2])
        assert not rewarding or moved == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize("baseline", ["group", "stage"])
def test_advantages_are_over_the_group_or_over_each_stage(
    baseline: str, build: Any, demo_prompts: list[Prompt]
) -> None:
    rollout = build(advantage_baseline=baseline, group_size=8).step(
        demo_prompts[:6], SAMPLING, StepMetrics()
    )
    assert len({tuple(group) for group in rollout.rewards}) > 3
    for rewards, advantages in zip(rollout.rewards, rollout.advantages, strict=True):
        size, expected = 8 if baseline == "group" else 4, []
        for first in range(0, 8, size):
            part = rewards[first : first + size]
            mean = sum(part) / size
            deviation = math.sqrt(sum((reward - mean) ** 2 for reward in part) / (size - 1))
            expected += [(reward - mean) / (deviation + 1e-6) for reward in part]
        assert advantages == pytest.approx(expected, abs=1e-5)


def test_later_stages_are_praised_but_not_punished_if_so_asked(
    build: Any, demo_prompts: list[Prompt]
) -> None:
    options = {"group_size": 8, "gate": "always", "unlearn_lr": 1e-3}
    usual, kind = (
        build(later_advantages=choice, **options).step(demo_prompts[:6], SAMPLING, StepMetrics())
        for choice in ("all", "positive")
    )
    assert usual.rewards == kind.rewards
    assert any(one < 0 for row in usual.advantages for one in row[4:])
    for before, after in zip(usual.advantages, kind.advantages, strict=True):
        assert after == [*before[:4], *(max(0.0, one) for one in before[4:])]


@pytest.mark.parametrize("later", ["all", "positive"])
def test_failures_count_less_if_so_asked(
    later: str, build: Any, demo_prompts: list[Prompt]
) -> None:
    options = {"group_size": 8, "gate": "always", "unlearn_lr": 1e-3, "later_advantages": later}
    usual, mild = (
        build(failure_weight=weight, **options).step(demo_prompts[:6], SAMPLING, StepMetrics())
        for weight in (1, 0.25)
    )
    assert usual.rewards == mild.rewards
    before, after = (
        [one for row in rollout.advantages for one in row] for rollout in (usual, mild)
    )
    assert min(before) < 0 < max(before)
    assert after == pytest.approx([one if one > 0 else one / 4 for one in before])


@pytest.mark.parametrize("num_stages", [1, 2])
def test_rare_successes_weigh_more_if_so_asked(
    num_stages: int, build: Any, demo_prompts: list[Prompt]
) -> None:
    """Each stage by itself: the likelihoods of two models are not compared."""
    options = {"group_size": 8, "num_stages": num_stages, "gate": "always", "unlearn_lr": 1e-3}
    usual, leaning = (
        build(rare_weight=weight, **options).step(demo_prompts[:6], SAMPLING, StepMetrics())
        for weight in (0.0, 0.5)
    )
    assert usual.rewards == leaning.rewards
    seen, size = 0, 8 // num_stages
    for group, before, after in zip(
        usual.groups, usual.advantages, leaning.advantages, strict=True
    ):
        for first in range(0, 8, size):
            good = [place for place in range(first, first + size) if before[place] > 0]
            likely = {
                place: sum(group[place].logprobs) / len(group[place].logprobs) for place in good
            }
            order = sorted(good, key=lambda place, likely=likely: likely[place])
            for place in range(first, first + size):
                weight = (
                    1.5 - order.index(place) / (len(good) - 1)
                    if place in good and len(good) > 1
                    else 1.0
                )
                assert after[place] == pytest.approx(before[place] * weight, rel=1e-5) or _tied(
                    likely, place
                )
            assert sum(after[place] for place in good) == pytest.approx(
                sum(before[place] for place in good), rel=1e-5
            )
            seen += len(good) > 1
    assert seen > 1


def _tied(likely: dict[int, float], place: int) -> bool:
    return sum(abs(one - likely[place]) < 1e-6 for one in likely.values()) > 1


def test_four_stages_forget_all_earlier_ones(
    build: Any, demo_prompts: list[Prompt], demo_model: Any, plain_scores: Any
) -> None:
    algorithm = build(group_size=8, num_stages=4, gate="always", unlearn_lr=1e-2)
    metrics = StepMetrics()
    rollout = algorithm.step(demo_prompts[:3], SAMPLING, metrics)
    assert rollout.stages == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [len(group) for group in rollout.groups] == [8, 8, 8]
    loads = algorithm.engine.loads
    assert len(loads) == 4
    start = weights_of(demo_model)
    assert all(torch.equal(loads[0][name], start[name]) for name in start)
    for load, seen in zip(loads[1:], (2, 4, 6), strict=True):
        earlier = Rollout(
            rollout.prompts, [g[:seen] for g in rollout.groups], [r[:seen] for r in rollout.rewards]
        )
        gradient, _, _ = reference_gradient(demo_model, earlier, algorithm.options, plain_scores)
        assert_moved(load, start, {name: -1e-2 * value for name, value in gradient.items()})
    again = TransformersEngine(copy.deepcopy(demo_model), algorithm.engine.tokenizer)
    again.load_weights(loads[3].items())
    with torch.no_grad():  # KL(θ ‖ θ′) is told on what θ itself sampled: stage 1
        first = [
            (prompt, c)
            for prompt, group in zip(rollout.prompts, rollout.groups, strict=True)
            for c in group[:2]
        ]
        gaps = [
            plain_scores(again.model, *pair).logprobs - plain_scores(demo_model, *pair).logprobs
            for pair in first
        ]
    gap = torch.cat(gaps)
    assert metrics.result()["unlearn/kl"] == pytest.approx(
        (gap.exp() - 1 - gap).mean().item(), rel=1e-2
    )
    for stage, load in enumerate(loads, 1):  # places of a group, in the order of the stages
        again.load_weights(load.items())
        place = 2 * (stage - 1)
        own = Sampling(1.0, 24, 1, "train/0", first_sample=place)
        assert again.generate(rollout.prompts, 2, own) == [
            group[place : place + 2] for group in rollout.groups
        ]


@pytest.mark.parametrize("shut", [{"gate": "never"}, {"gate": "token", "gate_threshold": 0.0}])
def test_with_the_gate_shut_a_step_is_grpo_bit_for_bit(
    shut: dict[str, Any], build: Any, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    """Rows are sampled 20 at a time in both, so that every matrix product has the same shape."""
    trained, rollouts = [], []
    for options in ({"num_stages": 2} | shut, {"num_stages": 1}):
        algorithm = build(group_size=8, max_rows=20, **options)
        for step in range(2):
            sampling = Sampling(1.0, 24, 1, f"train/{step}")
            rollouts.append(
                algorithm.step(demo_prompts[5 * step : 5 * step + 5], sampling, StepMetrics())
            )
        trained.append(
            fingerprint(
                [list(algorithm.policy.model.parameters()), algorithm.optimizer.state_dict()]
            )
        )
    assert rollouts[0].groups == rollouts[2].groups
    assert rollouts[1].groups == rollouts[3].groups
    assert rollouts[1].advantages == rollouts[3].advantages
    assert any(any(group) for group in rollouts[0].advantages)
    assert trained[0] == trained[1]


def test_a_step_is_repeatable_bit_for_bit(
    build: Any, demo_prompts: list[Prompt], fingerprint: Any
) -> None:
    trained = []
    for _ in range(2):
        algorithm = build(gate="token")
        algorithm.step(demo_prompts[:4], SAMPLING, StepMetrics())
        trained.append(fingerprint(list(algorithm.policy.model.parameters())))
    assert trained[0] == trained[1]
