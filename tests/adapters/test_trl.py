"""Tests EEPO in TRL's trainer, with the real TRL and tiny models."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.types import Completion, Prompt, UserError

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")

from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from eepo.adapters import weights as adapter_weights
from eepo.adapters.trl import EEPOTrainer, unlearning
from eepo.adapters.trl.batches import PaddedBatch
from eepo.algorithm import SearchResult

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

GROUP = 4
Build = Callable[..., Any]


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


class RolloutRecorder:
    """Records for every stage its weights and rows, and for every rollout TRL's scored batch."""

    def __init__(self, trainer: Any) -> None:
        self.stages: list[tuple[dict[str, Tensor], tuple[Any, ...]]] = []
        self.outputs: list[dict[str, Any]] = []
        sample, score = trainer._sample_stage, trainer._generate_and_score_completions

        def record_stage(prompts: list[Any]) -> Any:
            rows = sample(prompts)
            self.stages.append((weights(trainer), rows))
            return rows

        def record_output(inputs: Any) -> Any:
            self.outputs.append(score(inputs))
            return self.outputs[-1]

        trainer._sample_stage = record_stage
        trainer._generate_and_score_completions = record_output


def train(trainer: Any) -> Any:
    """Train right after building: a new trainer seeds the random number generator."""
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[tuple[float, float]]:
    log = trainer.state.log_history
    return [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]


# --- gate = "never" is GRPO


@pytest.mark.parametrize("credit", ["importance", "full"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}],
)
def test_gate_never_is_grpo_bit_for_bit(
    build: Build, fingerprint: Any, settings: dict[str, Any], credit: str
) -> None:
    grpo = train(build(eepo=False, **settings))
    never = train(build(gate="never", credit=credit, **settings))
    assert fingerprint(weights(never)) == fingerprint(weights(grpo))
    assert losses(never) == losses(grpo)
    unlearned = train(build(gate="always", **settings))
    assert fingerprint(weights(unlearned)) != fingerprint(weights(grpo))


def test_gate_never_allows_an_odd_group_size(build: Build) -> None:
    trainer = build(gate="never", num_generations=3, per_device_train_batch_size=3, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


# --- θ and θ′


@pytest.mark.parametrize("gate", ["token", "step", "always"])
def test_theta_is_restored_bit_for_bit_and_stage_2_uses_other_weights(
    build: Build, fingerprint: Any, gate: str
) -> None:
    trainer = build(gate=gate, gate_threshold=1e9)
    recorder, before = RolloutRecorder(trainer), []
    generate = trainer._generate

    def check(prompts: list[Any]) -> Any:
        before.append(fingerprint(weights(trainer)))
        rows = generate(prompts)
        assert fingerprint(weights(trainer)) == before[-1]
        return rows

    trainer._generate = check
    trainer.train()
    assert len(set(before)) == len(before) == 3  # every update changes θ
    sampled = [fingerprint(stage) for stage, _ in recorder.stages]
    assert sampled[0::2] == before
    assert not set(sampled[1::2]) & set(before)


def test_theta_is_restored_when_sampling_stage_2_fails(build: Build, fingerprint: Any) -> None:
    trainer = build(gate="always")
    before, sample = fingerprint(weights(trainer)), trainer._sample_stage

    def fail_in_stage_2(prompts: list[Any]) -> Any:
        if fingerprint(weights(trainer)) != before:
            raise RuntimeError("no more memory")
        return sample(prompts)

    trainer._sample_stage = fail_in_stage_2
    with pytest.raises(RuntimeError, match="no more memory"):
        trainer.train()
    assert fingerprint(weights(trainer)) == before


NOT_FINITE = "the unlearning gradient is not finite; start a new run with a lower learning_rate"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("target", [None, 1e-2])
def test_an_unlearning_gradient_that_is_not_finite_ends_the_run_before_theta_prime(
    build: Build, fingerprint: Any, value: float, target: float | None
) -> None:
    trainer = build(
        gate="always",
        unlearn_kl_target=target,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
    )
    recorder, generate, before = RolloutRecorder(trainer), trainer._generate, []
    weight = trainer.model.model.layers[0].mlp.up_proj.weight

    def gradients() -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in trainer.model.named_parameters()}

    def break_one_value(gradient: Tensor) -> Tensor:
        return gradient.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(value))

    def break_second_rollout(prompts: list[Any]) -> Any:
        before[:] = [fingerprint(weights(trainer))]
        if trainer.state.global_step == 0 and weight.grad is not None:
            before.append(fingerprint(gradients()))
            weight.register_hook(break_one_value)
        return generate(prompts)

    trainer._generate = break_second_rollout
    with pytest.raises(UserError, match=NOT_FINITE) as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert [fingerprint(weights(trainer)), fingerprint(gradients())] == before
    assert len(recorder.stages) == 3  # the broken rollout has no stage 2


def test_a_gradient_that_is_not_finite_on_another_process_ends_this_process(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FSDP every process has its shard of the gradient, and other processes would wait."""
    trainer = build(gate="always")
    finite = {"weight": torch.ones(3)}
    trainer.unlearner._check_finite(finite)
    reduce = trainer.accelerator.reduce
    monkeypatch.setattr(trainer.accelerator, "reduce", lambda sums, how: reduce(sums, how) + 1)
    with pytest.raises(UserError, match=NOT_FINITE):
        trainer.unlearner._check_finite(finite)


@dataclass
class PlainLoss:
    """The unlearning loss, one row and one token at a time, in float64."""

    scores_of: Any
    gate: str = "always"
    kind: str = "comp"
    threshold: float = 0.0
    temperature: float = 1.0

    def __call__(
        self, model: Any, rows: tuple[Any, ...], selected: list[bool] | None = None
    ) -> Tensor:
        """Average (1 / T) Σ gated −log(1 − p) over completions."""
        total = torch.zeros((), dtype=torch.float64)
        selected = selected or [True] * len(rows[1])
        for prompt_ids, ids, is_selected in zip(rows[0], rows[1], selected, strict=True):
            if is_selected:
                pair = Prompt("", "", tuple(prompt_ids)), Completion(tuple(ids), (), "", True)
                total = total + self.row_sum(model, *pair) / len(ids)
        return total / len(rows[1])

    def row_sum(self, model: Any, prompt: Prompt, completion: Completion) -> Tensor:
        scores = self.scores_of(model, prompt, completion, self.temperature)
        total = torch.zeros((), dtype=torch.float64)
        for t in range(len(completion.token_ids)):
            window = scores.entropies[max(0, t - 2) : t + 1].mean()
            if self.gate == "always" or window < self.threshold:
                logprob = scores.logprobs[t]
                p = logprob.exp().clamp(max=1 - 0.02)
                losses = {"nll": logprob, "exact": -scores.complements[t]}
                total = total + losses.get(self.kind, -torch.log(1 - p))
        return total


def assert_unlearned(
    theta: dict[str, Tensor], theta_prime: dict[str, Tensor], model: Any, lr: float
) -> None:
    """Check θ′ = θ − lr · gradient, with the gradients of `model` in float64."""
    for name, weight in model.named_parameters():
        step = theta_prime[name].double() - theta[name].double()
        torch.testing.assert_close(step, -lr * weight.grad, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("gate", "kind", "rows_at_once"),
    [("token", "comp", 8), ("always", "nll", 2), ("token", "exact", 4)],
)
def test_theta_prime_is_one_sgd_step_on_the_unlearning_loss(
    build: Build, sharp_model: Any, plain_scores: Any, gate: str, kind: str, rows_at_once: int
) -> None:
    lr, threshold, temperature = 0.05, 0.4, 0.8
    trainer = build(
        gate=gate,
        unlearn_loss="comp" if kind == "exact" else kind,
        saturation="exact" if kind == "exact" else "stop",
        unlearn_lr=lr,
        unlearn_eps=0.02,  # fp32 has too few digits of a smaller 1 - p for this test
        gate_threshold=threshold,
        temperature=temperature,
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=8 // rows_at_once,
        max_steps=1,
    )
    recorder = RolloutRecorder(trainer)
    trainer.train()
    (theta, first), (theta_prime, _) = recorder.stages
    model = sharp_model().double()
    PlainLoss(plain_scores, gate, kind, threshold, temperature)(model, first).backward()
    assert_unlearned(theta, theta_prime, model, lr)
    assert max(weight.grad.abs().max() for weight in model.parameters()) > 1e-3
    if gate == "token":
        assert 0.1 < trainer.state.log_history[0]["eepo/gated_share"] < 0.9


def test_exact_saturation_unlearns_tokens_above_the_limit(
    build: Build, sharp_model: Any, plain_scores: Any, fingerprint: Any
) -> None:
    """Almost all tokens of this model are certain: p > 1 - unlearn_eps."""
    lr, certain = 0.01, sharp_model()
    with torch.no_grad():
        certain.lm_head.weight.mul_(2)
    knobs = {"gate": "always", "unlearn_lr": lr, "unlearn_eps": 0.5, "max_steps": 1}
    recorders = {}
    for saturation in ("stop", "exact"):
        trainer = build(model=copy.deepcopy(certain), saturation=saturation, **knobs)
        recorders[saturation] = RolloutRecorder(trainer)
        trainer.train()
    (theta, first), (theta_prime, _) = recorders["exact"].stages
    assert first[1] == recorders["stop"].stages[0][1][1]
    model = copy.deepcopy(certain).double()
    PlainLoss(plain_scores, kind="exact")(model, first).backward()
    assert_unlearned(theta, theta_prime, model, lr)
    moved = {
        name: sum((after[key] - theta[key]).square().sum() for key in theta)
        for name, after in ((name, r.stages[1][0]) for name, r in recorders.items())
    }
    assert moved["exact"] > 2 * moved["stop"]


def test_exact_saturation_rejects_a_head_that_it_does_not_know(
    build: Build, sharp_model: Any
) -> None:
    """TRL multiplies logits by this attribute of the config. Our head does not."""
    model = sharp_model()
    model.config.output_multiplier = 3.0
    trainer = build(model=model, gate="always", saturation="exact", max_steps=1)
    with pytest.raises(UserError, match='saturation = "exact" does not support LlamaForCausalLM'):
        trainer.train()


def test_only_evenly_spaced_completions_are_unlearned_with_a_limit(
    build: Build, sharp_model: Any, plain_scores: Any
) -> None:
    lr, sizes = 0.05, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    trainer = build(
        gate="always",
        unlearn_max_completions=3,
        unlearn_lr=lr,
        unlearn_eps=0.02,
        max_steps=1,
        **sizes,
    )
    recorder = RolloutRecorder(trainer)
    trainer.train()
    (theta, first), (theta_prime, _) = recorder.stages
    assert len(first[1]) == 8
    model, rows = sharp_model().double(), (0, 2, 5)
    chosen = tuple([column[row] for row in rows] for column in first[:2])
    PlainLoss(plain_scores)(model, chosen).backward()
    assert_unlearned(theta, theta_prime, model, lr)
    log = trainer.state.log_history[0]
    assert log["eepo/gated_share"] == 1  # of the three completions
    entropies = []
    with torch.no_grad():
        for prompt_ids, ids in zip(*first[:2], strict=True):
            pair = Prompt("", "", tuple(prompt_ids)), Completion(tuple(ids), (), "", True)
            entropies.append(plain_scores(sharp_model(), *pair).entropies)
    mean = torch.cat(entropies).mean().item()  # of all completions
    assert log["eepo/stage1_entropy"] == pytest.approx(mean, rel=1e-4)


def test_the_kl_above_the_rounding_floor_meets_the_target_in_bf16(build: Build) -> None:
    trainer = build(gate="always", unlearn_kl_target=0.1, unlearn_lr=0.1, bf16=True, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["eepo/kl_floor"] > 0
    assert 0.1 / 1.5 < log["eepo/kl"] < 0.1 * 1.5


def test_a_search_starts_where_the_last_one_ended(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, results, search = [], [], unlearning.lr_above_floor

    def record(kl_of: Any, target: float, start: SearchResult, has_floor: bool) -> SearchResult:
        starts.append(start)
        results.append(search(kl_of, target, start, has_floor))
        return results[-1]

    monkeypatch.setattr(unlearning, "lr_above_floor", record)
    train(build(gate="always", unlearn_kl_target=1e-2, unlearn_lr=0.3))
    assert starts == [SearchResult(0.3), *results[:-1]]
    assert all(result.slope != SearchResult().slope for result in results)


def test_a_small_rounding_floor_is_not_measured_in_every_rollout(build: Build) -> None:
    trainer = build(gate="always", unlearn_kl_target=0.1, unlearn_lr=1e-3, bf16=True, max_steps=4)
    trainer.train()
    floors = [row["eepo/kl_floor"] for row in trainer.state.log_history if "eepo/kl" in row]
    assert floors == [trainer.unlearner.lr_search.floor] * 4
    assert 0 < 10 * floors[0] < 0.1
    assert trainer.unlearner.lr_search.floor_age == 4


def test_the_logged_kl_grows_with_the_unlearn_lr(build: Build) -> None:
    kls = []
    for lr in (1e-3, 3e-2):
        trainer = train(build(gate="always", unlearn_lr=lr, max_steps=1))
        kls.append(trainer.state.log_history[0]["eepo/kl"])
    assert 0 < 10 * kls[0] < kls[1]


@pytest.mark.parametrize("target", [1e-4, 1e-2])
def test_a_kl_target_is_met_and_theta_is_restored(
    build: Build, fingerprint: Any, target: float
) -> None:
    trainer = build(
        gate="always", unlearn_kl_target=target, unlearn_lr=0.3, per_device_train_batch_size=8
    )
    recorder, restored, generate = RolloutRecorder(trainer), [], trainer._generate

    def check(prompts: list[Any]) -> Any:
        before = fingerprint(weights(trainer))
        rows = generate(prompts)
        restored.append(fingerprint(weights(trainer)) == before)
        return rows

    trainer._generate = check
    trainer.train()
    assert restored == [True] * 3
    logs = [entry for entry in trainer.state.log_history if "eepo/kl" in entry]
    assert len(logs) == 3
    for log, (theta, _), (theta_prime, _) in zip(
        logs, recorder.stages[0::2], recorder.stages[1::2], strict=True
    ):
        assert target / 1.5 < log["eepo/kl"] < target * 1.5
        assert log["eepo/unlearn_lr"] < 0.3
        assert fingerprint(theta) != fingerprint(theta_prime)
    assert trainer.unlearner.lr_search.lr == logs[-1]["eepo/unlearn_lr"]


def test_a_kl_target_holds_for_all_rows_of_stage_1(
    build: Build, sharp_model: Any, plain_scores: Any
) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 1}
    trainer = build(gate="always", unlearn_kl_target=1e-2, **sizes)
    recorder = RolloutRecorder(trainer)
    trainer.train()
    (theta, first), (theta_prime, _) = recorder.stages
    assert len(first[1]) == 8  # four micro-batches
    gaps = []
    for prompt_ids, ids in zip(first[0], first[1], strict=True):
        pair = Prompt("", "", tuple(prompt_ids)), Completion(tuple(ids), (), "", True)
        logprobs = []
        for stage_weights in (theta, theta_prime):
            model = sharp_model()
            model.load_state_dict(stage_weights, strict=False)
            with torch.no_grad():
                logprobs.append(plain_scores(model, *pair).logprobs)
        gaps.append(logprobs[1] - logprobs[0])
    gap = torch.cat(gaps)
    assert (gap.exp() - 1 - gap).mean().item() == pytest.approx(1e-2, rel=0.5)


def test_completions_without_a_reward_are_not_unlearned_and_not_averaged(
    build: Build, tokenizer: Any
) -> None:
    def some_none(completions: list[str], **_: Any) -> list[float | None]:
        return [None if sum(map(ord, text)) % 2 else 0.0 for text in completions]

    sizes = {"per_device_train_batch_size": 16, "max_steps": 1}
    trainer = build(
        gate="always",
        unlearn_on="unrewarded",
        reward_funcs=[some_none, some_none],
        reward_weights=[1.0, 2.0],
        **sizes,
    )
    recorder = RolloutRecorder(trainer)
    trainer.train()
    first = recorder.stages[0][1]
    texts = tokenizer.batch_decode(first[1], skip_special_tokens=True)
    lengths = [len(ids) for ids in first[1]]
    graded = [reward is not None for reward in some_none(texts)]
    assert 0 < sum(graded) < len(graded)
    graded_tokens = sum(length for length, flag in zip(lengths, graded, strict=True) if flag)
    log = trainer.state.log_history[0]
    assert log["eepo/gated_share"] == pytest.approx(graded_tokens / sum(lengths))
    assert log["eepo/stage1_reward"] == 0


def test_theta_is_restored_when_the_step_runs_out_of_memory(
    sharp_model: Any, fingerprint: Any, monkeypatch: Any
) -> None:
    weights = dict(sharp_model().named_parameters())
    gradient = {name: torch.ones_like(weight) for name, weight in weights.items()}
    before, unlearned_weights = fingerprint(weights), adapter_weights.unlearned_weights

    def fail_at_the_fourth(*arguments: Any) -> Any:
        for index, pair in enumerate(unlearned_weights(*arguments)):
            if index == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield pair

    monkeypatch.setattr(adapter_weights, "unlearned_weights", fail_at_the_fourth)
    step = adapter_weights.unlearned_in_place(weights, gradient, 0.1)
    with pytest.raises(torch.OutOfMemoryError), step:
        pytest.fail("the block ran with an incomplete θ′")
    assert fingerprint(weights) == before


def test_the_lr_search_keeps_its_start_when_all_tokens_are_saturated(
    build: Build, sharp_model: Any
) -> None:
    certain = sharp_model()
    with torch.no_grad():
        certain.lm_head.weight.mul_(1e4)
    trainer = build(
        model=certain, gate="always", unlearn_kl_target=1e-3, unlearn_eps=0.5, max_steps=1
    )
    trainer.train()
    assert trainer.state.log_history[0]["eepo/kl"] == 0
    assert trainer.unlearner.lr_search.lr == trainer.args.unlearn_lr


def expected_selection(choice: str, texts: list[str]) -> list[bool]:
    """Return which completions of stage 1 are unlearned, for groups of two."""
    rewards = zero_or_one(texts)
    if choice == "zero_variance":
        return [rewards[row - row % 2] == rewards[row - row % 2 + 1] for row in range(len(rewards))]
    return [(reward > 0) == (choice == "rewarded") for reward in rewards]


def zero_or_one(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 2) for text in completions]


@pytest.mark.parametrize("choice", ["rewarded", "unrewarded", "zero_variance"])
def test_unlearn_on_selects_by_reward_and_grades_every_completion_once(
    build: Build, sharp_model: Any, plain_scores: Any, tokenizer: Any, choice: str
) -> None:
    graded: list[str] = []

    def counted(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        graded.extend(completions)
        log_extra("text", completions)
        return zero_or_one(completions)

    lr = 0.05
    knobs = {"gate": "always", "unlearn_on": choice, "unlearn_lr": lr, "unlearn_eps": 0.02}
    sizes = {"per_device_train_batch_size": 16, "max_steps": 1}
    trainer = build(reward_funcs=counted, **knobs, **sizes)
    recorder = RolloutRecorder(trainer)
    trainer.train()
    (theta, first), (theta_prime, second) = recorder.stages
    texts = [
        tokenizer.batch_decode(stage[1], skip_special_tokens=True) for stage in (first, second)
    ]
    selected = expected_selection(choice, texts[0])
    assert 0 < sum(selected) < len(selected)
    model = sharp_model().double()
    PlainLoss(plain_scores)(model, first, selected).backward()
    assert_unlearned(theta, theta_prime, model, lr)
    interleaved = [text for pair in zip(*texts, strict=True) for text in pair]
    assert sorted(graded) == sorted(interleaved)
    assert list(trainer._logs["completion"]) == list(trainer._logs["extra"]["text"]) == interleaved
    assert list(trainer._logs["rewards"]["counted"]) == zero_or_one(interleaved)
    log = trainer.state.log_history[0]
    assert log["eepo/stage1_reward"] == pytest.approx(sum(zero_or_one(texts[0])) / len(texts[0]))
    assert "eval_reward" in trainer.evaluate()  # one stage, graded in one call


def test_theta_prime_is_theta_when_no_completion_is_selected(
    build: Build, fingerprint: Any
) -> None:
    trainer = build(
        gate="always",
        unlearn_on="rewarded",
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        max_steps=1,
    )
    recorder = RolloutRecorder(trainer)
    trainer.train()
    assert fingerprint(recorder.stages[0][0]) == fingerprint(recorder.stages[1][0])
    assert trainer.state.log_history[0]["eepo/gated_share"] == 0


def test_theta_prime_is_theta_when_the_gate_is_shut(build: Build, fingerprint: Any) -> None:
    for gate in ("token", "step"):
        trainer = build(gate=gate, gate_threshold=0.0, max_steps=1)
        recorder = RolloutRecorder(trainer)
        trainer.train()
        first, second = (fingerprint(stage) for stage, _ in recorder.stages)
        assert first == second
        assert trainer.state.log_history[0]["eepo/gated_share"] == 0


# --- rollout log-probabilities


@pytest.mark.parametrize(
    "settings",
    [
        {},  # TRL sets every ratio to 1
        {"num_iterations": 2},  # TRL computes old log-probabilities
        {
            "per_device_train_batch_size": 2,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
        },
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "temperature": 0.7},
    ],
)
@pytest.mark.parametrize("credit", ["importance", "full"])
def test_old_logprobs_are_under_the_weights_that_sampled_or_with_full_credit_under_theta(
    build: Build, sharp_model: Any, plain_scores: Any, settings: dict[str, Any], credit: str
) -> None:
    trainer = build(gate="always", unlearn_lr=0.05, max_steps=2, credit=credit, **settings)
    recorder = RolloutRecorder(trainer)
    trainer.train()
    output = recorder.outputs[0]
    models = []
    for stage, _ in recorder.stages[:2]:
        models.append(sharp_model())
        models[-1].load_state_dict(stage, strict=False)
    with torch.no_grad():
        for row, mask in enumerate(output["completion_mask"].bool()):
            prompt_ids = output["prompt_ids"][row][output["prompt_mask"][row].bool()]
            prompt = Prompt("", "", tuple(prompt_ids.tolist()))
            ids = output["completion_ids"][row][mask]
            completion = Completion(tuple(ids.tolist()), (), "", True)
            assert list(completion.token_ids) == recorder.stages[row % 2][1][1][row // 2]
            expected = [
                plain_scores(model, prompt, completion, trainer.temperature).logprobs
                for model in models
            ]
            old = output["old_per_token_logps"][row][mask].double()
            denominator = expected[row % 2 if credit == "importance" else 0]
            torch.testing.assert_close(old, denominator, atol=1e-4, rtol=1e-4)
            assert (expected[0] - expected[1]).abs().max() > 1e-3
            assert not output["old_per_token_logps"][row][~mask].any()


def first_ratios(trainer: Any) -> Tensor:
    """Train, and return the ratio of every completion token in the first update."""
    score, compute_loss, ratios = trainer.scorer.forward, trainer._compute_loss, []

    def record(model: Any, inputs: Any) -> Any:
        loss = compute_loss(model, inputs)
        if not ratios:
            ids = [
                torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1)
                for kind in ("ids", "mask")
            ]
            mask = inputs["completion_mask"].bool()
            with torch.no_grad():
                now = score(PaddedBatch(list(range(len(mask))), *ids, mask)).logprobs
            ratios.append((now - inputs["old_per_token_logps"]).exp()[mask])
        return loss

    trainer._compute_loss = record
    trainer.train()
    return ratios[0]


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}])
def test_ratios_of_both_stages_start_at_1_with_full_credit(
    build: Build, settings: dict[str, Any]
) -> None:
    knobs = {"gate": "always", "unlearn_lr": 0.05, "max_steps": 2, **settings}
    ratios = {
        credit: first_ratios(build(credit=credit, **knobs)) for credit in ("importance", "full")
    }
    torch.testing.assert_close(ratios["full"], torch.ones_like(ratios["full"]), atol=1e-5, rtol=0)
    assert (ratios["importance"] - 1).abs().max() > 0.1


def test_full_credit_changes_nothing_when_nothing_is_unlearned(
    build: Build, fingerprint: Any
) -> None:
    runs = [
        train(build(gate="token", gate_threshold=0.0, credit=credit, num_iterations=2))
        for credit in ("importance", "full")
    ]
    assert fingerprint(weights(runs[0])) == fingerprint(weights(runs[1]))
    assert losses(runs[0]) == losses(runs[1])


def test_rows_keep_their_prompt_and_their_index_in_the_group(build: Build, tokenizer: Any) -> None:
    trainer = build(gate="always", max_steps=1)
    recorder = RolloutRecorder(trainer)
    trainer.train()
    prompts = [tuple(ids.tolist()) for ids in recorder.outputs[0]["prompt_ids"]]
    assert len(set(prompts)) == 2
    assert prompts == [prompts[0]] * GROUP + [prompts[GROUP]] * GROUP
    log = trainer.state.log_history[0]
    texts = [
        tokenizer.batch_decode(rows[1], skip_special_tokens=True) for _, rows in recorder.stages
    ]
    for stage in (0, 1):
        expected = sum(trainer.reward_funcs[0](texts[stage])) / GROUP
        assert log[f"eepo/stage{stage + 1}_reward"] == pytest.approx(expected)
        lengths = [len(ids) for ids in recorder.stages[stage][1][1]]
        assert log[f"eepo/stage{stage + 1}_length"] == pytest.approx(sum(lengths) / GROUP)


def test_groups_that_stage_1_missed_are_counted(build: Build) -> None:
    """A rollout has two groups of two completions per stage. Odd rows are stage 2."""
    rewards = iter([[0.0, 0, 0, 1, 0, 0, 0, 0], [0.0, 1, 0, 1, 0, 0, 1, 0]])
    trainer = build(gate="always", max_steps=2, reward_funcs=lambda **_: next(rewards))
    trainer.train()
    names = ("eepo/missed_share", "eepo/second_half_recovery")
    logged = [[entry[name] for name in names] for entry in trainer.state.log_history[:2]]
    assert logged == [[1.0, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("gate", "knobs", "weights_of_stages"),
    [
        ("always", {"failure_weight": 0.25}, [0.25, 0.25]),
        ("always", {"stage2_negative_advantages": False}, [1.0, 0.0]),
        ("never", {"failure_weight": 0.0}, [0.0, 0.0]),
    ],
)
def test_negative_advantages_are_multiplied_by_their_weight(
    build: Build, gate: str, knobs: dict[str, Any], weights_of_stages: list[float]
) -> None:
    """Even rows are stage 1, odd rows stage 2. TRL logs the advantages without weights."""
    sizes = {"num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 1}
    trainer = build(gate=gate, unlearn_lr=1e-2, **sizes, **knobs)
    recorder = RolloutRecorder(trainer)
    trainer.train()
    (output,) = recorder.outputs
    before = torch.tensor(list(trainer._logs["advantages"])).view(-1, 2)
    assert ((before < 0).any(0) & (before > 0).any(0)).all()
    expected = torch.where(before < 0, before * torch.tensor(weights_of_stages), before)
    torch.testing.assert_close(output["advantages"].view(-1, 2), expected)


def test_truncated_completions_stay_masked(build: Build) -> None:
    trainer = build(
        gate="always", mask_truncated_completions=True, max_completion_length=3, num_iterations=2
    )
    recorder = RolloutRecorder(trainer)
    trainer.train()
    for output in recorder.outputs:
        assert not output["old_per_token_logps"][output["completion_mask"] == 0].any()
    assert all(weight.isfinite().all() for weight in weights(trainer).values())


def test_a_rollout_keeps_accumulated_gradients(build: Build, fingerprint: Any) -> None:
    """An optimizer step has two rollouts. Before the second, gradients have been accumulated."""
    trainer = build(
        gate="always", gradient_accumulation_steps=2, steps_per_generation=1, max_steps=2
    )
    generate, num_gradients = trainer._generate, []

    def gradients() -> dict[str, Tensor]:
        named = trainer.model.named_parameters()
        return {name: weight.grad for name, weight in named if weight.grad is not None}

    def check(prompts: list[Any]) -> Any:
        num_gradients.append(len(gradients()))
        before = fingerprint(gradients())
        rows = generate(prompts)
        assert fingerprint(gradients()) == before
        return rows

    trainer._generate = check
    trainer.train()
    assert num_gradients[0] == 0
    assert num_gradients[1] > 0
    assert len(num_gradients) == 4


# --- evaluation, resuming


def test_evaluation_is_that_of_trl(build: Build, fingerprint: Any) -> None:
    expected = build(eepo=False).evaluate()
    trainer = build(gate="always")
    before, recorder = fingerprint(weights(trainer)), RolloutRecorder(trainer)
    metrics = trainer.evaluate()
    times = {name for name in metrics if name.endswith(("time", "per_second"))}
    assert metrics.keys() == expected.keys()
    assert all(metrics[name] == expected[name] for name in metrics.keys() - times)
    assert "eval_reward" in metrics
    assert recorder.stages == []
    assert trainer.unlearner.gate.history == []
    assert fingerprint(weights(trainer)) == before


def test_a_resumed_run_equals_an_uninterrupted_one_with_gate_step(
    build: Build, fingerprint: Any
) -> None:
    settings = {
        "gate": "step",
        "gate_threshold": 1e9,
        "gate_window": 3,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    uninterrupted = build(**settings)
    uninterrupted.train()
    resumed = build(**settings)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert len(resumed.unlearner.gate.history) == 3
    assert resumed.unlearner.gate.history == uninterrupted.unlearner.gate.history
    assert fingerprint(weights(resumed)) == fingerprint(weights(uninterrupted))


KL_TARGET = {
    "gate": "always",
    "unlearn_kl_target": 1e-1,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one_with_a_kl_target(
    build: Build, fingerprint: Any, bf16: bool
) -> None:
    uninterrupted = train(build(bf16=bf16, **KL_TARGET))
    resumed = build(bf16=bf16, **KL_TARGET)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert resumed.unlearner.lr_search == uninterrupted.unlearner.lr_search
    assert (resumed.unlearner.lr_search.floor > 0) == bf16
    assert fingerprint(weights(resumed)) == fingerprint(weights(uninterrupted))


def test_a_checkpoint_with_only_the_last_rate_can_be_resumed(build: Build) -> None:
    train(build(**KL_TARGET))
    resumed = build(**KL_TARGET)
    checkpoint = Path(resumed.args.output_dir) / "checkpoint-4"
    state = {"gate_history": [0.5], "auto_lr": 0.025}
    (checkpoint / "eepo.json").write_text(json.dumps(state), encoding="utf-8")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.unlearner.lr_search == SearchResult(0.025)
    assert resumed.unlearner.gate.history == [0.5]


def test_a_run_resumed_in_fp32_has_no_rounding_floor(build: Build) -> None:
    train(build(bf16=True, **KL_TARGET))
    resumed = build(**KL_TARGET)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    floors = [row["eepo/kl_floor"] for row in resumed.state.log_history if "eepo/kl" in row]
    assert [floor > 0 for floor in floors] == [True, True, False, False]


def test_a_resumed_run_uses_its_new_unlearn_lr(build: Build) -> None:
    settings = {"gate": "always", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(build(unlearn_lr=1e-2, **settings))
    resumed = build(unlearn_lr=0.0, **settings)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-1")
    kls = [entry["eepo/kl"] for entry in resumed.state.log_history if "eepo/kl" in entry]
    assert [kl > 0 for kl in kls] == [True, False]


def test_a_grpo_checkpoint_can_be_resumed(build: Build) -> None:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    build(eepo=False, **settings).train()
    trainer = build(gate="step", **settings)
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
    assert len(trainer.unlearner.gate.history) == 1


# --- vLLM's server mode: TRL's code with a replacement for the server

Server = runpy.run_path(str(Path(__file__).with_name("trl_server.py")))["Server"]


@pytest.fixture
def with_server(build: Build, sharp_model: Any, monkeypatch: pytest.MonkeyPatch) -> Build:
    def connect(generation: Any) -> None:
        generation.vllm_client = Server(sharp_model())

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", connect)
    server = {"gate": "always", "use_vllm": True, "vllm_mode": "server", "unlearn_lr": 0.02}
    return lambda **settings: build(**(server | settings))


def test_a_shut_gate_causes_no_second_push(with_server: Build) -> None:
    trainer = with_server(gate="token", gate_threshold=0.0, max_steps=2)
    trainer.train()
    assert len(trainer.vllm_generation.vllm_client.pushes) == 2
    assert len(trainer.vllm_generation.vllm_client.requests) == 4


def test_a_server_samples_stage_1_from_theta_and_stage_2_from_theta_prime(
    with_server: Build, fingerprint: Any
) -> None:
    trainer = with_server(max_steps=2, temperature=0.9)
    server, recorder = trainer.vllm_generation.vllm_client, RolloutRecorder(trainer)
    trainer.train()
    expected = [fingerprint(stage_weights) for stage_weights, _ in recorder.stages]
    assert [fingerprint(pushed) for pushed in server.pushes] == expected
    for n, prompts in server.requests:
        assert n == GROUP // 2
        assert len(prompts) == len(set(map(tuple, prompts))) == 2
    for output in recorder.outputs:
        torch.testing.assert_close(
            output["old_per_token_logps"], output["sampling_per_token_logps"], atol=1e-4, rtol=0
        )
        # TRL sets it to 0 for completions whose log-probabilities disagree.
        ratio = output["importance_sampling_ratio"]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-3, rtol=0)


def test_full_credit_keeps_trls_comparison_with_the_server(with_server: Build) -> None:
    """TRL compares what sampled with the server. The denominators are under θ."""
    trainer = with_server(max_steps=1, credit="full")
    recorder = RolloutRecorder(trainer)
    trainer.train()
    (output,) = recorder.outputs
    ratio = output["importance_sampling_ratio"]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-3, rtol=0)
    gap = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()
    assert gap[0::2].max() < 1e-4
    assert gap[1::2].amax(1).min() > 1e-2


def test_trl_rejects_stage_2_without_logprobs_under_theta_prime(
    with_server: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control for the test above: TRL computes the old log-probabilities, under θ."""
    monkeypatch.setattr(
        EEPOTrainer,
        "_get_per_token_logps_and_entropies",
        GRPOTrainer._get_per_token_logps_and_entropies,
    )
    trainer = with_server(max_steps=1)
    recorder = RolloutRecorder(trainer)
    trainer.train()
    ratio = recorder.outputs[0]["importance_sampling_ratio"]
    assert (ratio[0::2] - 1).abs().max() < 1e-3
    assert (ratio[1::2] - 1).abs().min() > 1e-2


def test_an_evaluation_after_a_rollout_samples_from_theta(
    with_server: Build, fingerprint: Any
) -> None:
    trainer = with_server(max_steps=1)
    server, theta = trainer.vllm_generation.vllm_client, fingerprint(weights(trainer))
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer._generate_and_score_completions(batch)  # no update follows: the step stays 0
    assert fingerprint(server.pushes[-1]) != theta
    trainer.evaluate()
    assert fingerprint(server.pushes[-1]) == theta
    assert server.requests[-1][0] == GROUP
