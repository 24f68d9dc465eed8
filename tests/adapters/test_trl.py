"""EEPO in TRL's trainer: real TRL, real generation, tiny models."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.types import Completion, Prompt

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")

from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from eepo.adapters import weights as step_weights
from eepo.adapters.trl import EEPOTrainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

GROUP = 4
Build = Callable[..., Any]


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


class Watched:
    """What a trainer's rollouts did: the weights each stage was sampled from, its rows, and TRL's scored batch."""

    def __init__(self, trainer: Any) -> None:
        self.stages: list[tuple[dict[str, Tensor], tuple[Any, ...]]] = []
        self.outputs: list[dict[str, Any]] = []
        sample, score = trainer._sample, trainer._generate_and_score_completions

        def watched_sample(prompts: list[Any]) -> Any:
            rows = sample(prompts)
            self.stages.append((weights(trainer), rows))
            return rows

        def watched_score(inputs: Any) -> Any:
            self.outputs.append(score(inputs))
            return self.outputs[-1]

        trainer._sample, trainer._generate_and_score_completions = watched_sample, watched_score


def trained(trainer: Any) -> Any:
    """At once: a trainer seeds the random numbers when it is built."""
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[tuple[float, float]]:
    return [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


# --- gate = "never" is GRPO


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}],
)
def test_gate_never_is_grpo_bit_for_bit(
    build: Build, fingerprint: Any, settings: dict[str, Any]
) -> None:
    theirs = trained(build(eepo=False, **settings))
    ours = trained(build(gate="never", **settings))
    assert fingerprint(weights(ours)) == fingerprint(weights(theirs))
    assert losses(ours) == losses(theirs)
    assert fingerprint(weights(trained(build(gate="always", **settings)))) != fingerprint(
        weights(theirs)
    )


def test_an_odd_group_is_fine_where_there_are_no_stages(build: Build) -> None:
    trainer = build(gate="never", num_generations=3, per_device_train_batch_size=3, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


# --- θ and θ′


@pytest.mark.parametrize("gate", ["token", "step", "always"])
def test_theta_comes_back_bit_for_bit_and_stage_2_sees_other_weights(
    build: Build, fingerprint: Any, gate: str
) -> None:
    trainer = build(gate=gate, gate_threshold=1e9)
    watched, before = Watched(trainer), []
    generate = trainer._generate

    def check(prompts: list[Any]) -> Any:
        before.append(fingerprint(weights(trainer)))
        rows = generate(prompts)
        assert fingerprint(weights(trainer)) == before[-1]
        return rows

    trainer._generate = check
    trainer.train()
    assert len(set(before)) == len(before) == 3  # and the update did move it
    sampled = [fingerprint(stage) for stage, _ in watched.stages]
    assert sampled[0::2] == before
    assert not set(sampled[1::2]) & set(before)


def test_theta_comes_back_when_sampling_stage_2_fails(build: Build, fingerprint: Any) -> None:
    trainer = build(gate="always")
    before, sample = fingerprint(weights(trainer)), trainer._sample

    def fail_in_stage_2(prompts: list[Any]) -> Any:
        if fingerprint(weights(trainer)) != before:
            raise RuntimeError("no more memory")
        return sample(prompts)

    trainer._sample = fail_in_stage_2
    with pytest.raises(RuntimeError, match="no more memory"):
        trainer.train()
    assert fingerprint(weights(trainer)) == before


def plain_loss(
    model: Any,
    rows: tuple[Any, ...],
    scores_of: Any,
    gate: str,
    kind: str,
    threshold: float,
    temperature: float,
    wanted: list[bool] | None = None,
) -> Tensor:
    """Mean over completions of (1 / T) Σ gated -log(1 - p), one row and one token at a time, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    chosen = [True] * len(rows[1]) if wanted is None else wanted
    for prompt_ids, ids, one in zip(rows[0], rows[1], chosen, strict=True):
        if not one:
            continue
        prompt, completion = Prompt("", "", tuple(prompt_ids)), Completion(tuple(ids), (), "", True)
        scores = scores_of(model, prompt, completion, temperature)
        for t in range(len(ids)):
            window = scores.entropies[max(0, t - 2) : t + 1].mean()
            if gate == "always" or window < threshold:
                p = scores.logprobs[t].exp().clamp(max=1 - 0.02)
                total = total + (scores.logprobs[t] if kind == "nll" else -torch.log(1 - p)) / len(
                    ids
                )
    return total / len(rows[1])


@pytest.mark.parametrize(
    ("gate", "kind", "rows_at_once"), [("token", "comp", 8), ("always", "nll", 2)]
)
def test_theta_prime_is_one_plain_step_down_the_unlearning_loss(
    build: Build, sharp_model: Any, plain_scores: Any, gate: str, kind: str, rows_at_once: int
) -> None:
    lr, threshold, temperature = 0.05, 0.4, 0.8
    trainer = build(
        gate=gate,
        unlearn_loss=kind,
        unlearn_lr=lr,
        unlearn_eps=0.02,  # where 1 - p is smaller, fp32 has fewer digits of it than this test asks for
        gate_threshold=threshold,
        temperature=temperature,
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=8 // rows_at_once,
        max_steps=1,
    )
    watched = Watched(trainer)
    trainer.train()
    (theta, first), (theta_prime, _) = watched.stages
    model = sharp_model().double()
    plain_loss(model, first, plain_scores, gate, kind, threshold, temperature).backward()
    for name, weight in model.named_parameters():
        step = theta_prime[name].double() - theta[name].double()
        torch.testing.assert_close(step, -lr * weight.grad, atol=2e-6, rtol=1e-3)
    assert max(weight.grad.abs().max() for weight in model.parameters()) > 1e-3
    if gate == "token":
        assert 0.1 < trainer.state.log_history[0]["eepo/gated_share"] < 0.9


def test_the_kl_it_reports_grows_with_the_step(build: Build) -> None:
    gentle, strong = (
        build(gate="always", unlearn_lr=1e-3, max_steps=1),
        build(gate="always", unlearn_lr=3e-2, max_steps=1),
    )
    for trainer in (gentle, strong):
        trainer.train()
    kls = [trainer.state.log_history[0]["eepo/kl"] for trainer in (gentle, strong)]
    assert 0 < 10 * kls[0] < kls[1]


@pytest.mark.parametrize("target", [1e-4, 1e-2])
def test_a_kl_target_is_met_and_theta_comes_back(
    build: Build, fingerprint: Any, target: float
) -> None:
    trainer = build(
        gate="always", unlearn_kl_target=target, unlearn_lr=0.3, per_device_train_batch_size=8
    )
    watched, restored, generate = Watched(trainer), [], trainer._generate

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
        logs, watched.stages[0::2], watched.stages[1::2], strict=True
    ):
        assert target / 1.11 < log["eepo/kl"] < target * 1.11
        assert log["eepo/unlearn_lr"] < 0.3
        assert fingerprint(theta) != fingerprint(theta_prime)
    assert trainer.auto_lr == logs[-1]["eepo/unlearn_lr"]


def test_a_kl_target_is_that_of_the_whole_stage_not_of_its_first_rows(
    build: Build, sharp_model: Any, plain_scores: Any
) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 1}
    trainer = build(gate="always", unlearn_kl_target=1e-2, **sizes)
    watched = Watched(trainer)
    trainer.train()
    (theta, first), (theta_prime, _) = watched.stages
    assert len(first[1]) == 8  # four micro-batches
    gaps = []
    for prompt_ids, ids in zip(first[0], first[1], strict=True):
        pair = Prompt("", "", tuple(prompt_ids)), Completion(tuple(ids), (), "", True)
        under = []
        for stage in (theta, theta_prime):
            model = sharp_model()
            model.load_state_dict(stage, strict=False)
            with torch.no_grad():
                under.append(plain_scores(model, *pair).logprobs)
        gaps.append(under[1] - under[0])
    gap = torch.cat(gaps)
    assert (gap.exp() - 1 - gap).mean().item() == pytest.approx(1e-2, rel=0.11)


def test_what_nobody_could_grade_is_neither_unlearned_nor_counted(
    build: Build, tokenizer: Any
) -> None:
    def unsure(completions: list[str], **_: Any) -> list[float | None]:
        return [None if sum(map(ord, text)) % 2 else 0.0 for text in completions]

    sizes = {"per_device_train_batch_size": 16, "max_steps": 1}
    trainer = build(
        gate="always",
        unlearn_on="unrewarded",
        reward_funcs=[unsure, unsure],
        reward_weights=[1.0, 2.0],
        **sizes,
    )
    watched = Watched(trainer)
    trainer.train()
    first = watched.stages[0][1]
    texts = tokenizer.batch_decode(first[1], skip_special_tokens=True)
    tokens = [(len(ids), one is not None) for ids, one in zip(first[1], unsure(texts), strict=True)]
    assert 0 < sum(known for _, known in tokens) < len(tokens)
    share = sum(length for length, known in tokens if known) / sum(length for length, _ in tokens)
    log = trainer.state.log_history[0]
    assert log["eepo/gated_share"] == pytest.approx(share)
    assert log["eepo/stage1_reward"] == 0


def test_a_step_that_finds_no_memory_leaves_theta(
    sharp_model: Any, fingerprint: Any, monkeypatch: Any
) -> None:
    weights = dict(sharp_model().named_parameters())
    gradient = {name: torch.ones_like(weight) for name, weight in weights.items()}
    before, steps = fingerprint(weights), step_weights.unlearned_weights

    def short(*given: Any) -> Any:
        for place, step in enumerate(steps(*given)):
            if place == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield step

    monkeypatch.setattr(step_weights, "unlearned_weights", short)
    with pytest.raises(torch.OutOfMemoryError), step_weights.moved(weights, gradient, 0.1):
        pytest.fail("θ′ was not whole")
    assert fingerprint(weights) == before


def test_where_all_is_saturated_the_rate_does_not_run_away(build: Build, sharp_model: Any) -> None:
    certain = sharp_model()
    with torch.no_grad():
        certain.lm_head.weight.mul_(1e4)
    trainer = build(
        model=certain, gate="always", unlearn_kl_target=1e-3, unlearn_eps=0.5, max_steps=1
    )
    trainer.train()
    assert trainer.state.log_history[0]["eepo/kl"] == 0
    assert trainer.auto_lr == trainer.args.unlearn_lr


def graded(choice: str, texts: list[str]) -> list[bool]:
    """Which of stage 1 are to be unlearned: groups of two."""
    rewards = zero_or_more(texts)
    if choice == "zero_variance":
        return [rewards[row - row % 2] == rewards[row - row % 2 + 1] for row in range(len(rewards))]
    return [(one > 0) == (choice == "rewarded") for one in rewards]


def zero_or_more(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 2) for text in completions]


@pytest.mark.parametrize("choice", ["rewarded", "unrewarded", "zero_variance"])
def test_only_what_its_rewards_choose_is_unlearned_and_nothing_is_graded_twice(
    build: Build, sharp_model: Any, plain_scores: Any, tokenizer: Any, choice: str
) -> None:
    asked: list[str] = []

    def counted(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        asked.extend(completions)
        log_extra("text", completions)
        return zero_or_more(completions)

    lr = 0.05
    trainer = build(
        gate="always", unlearn_on=choice, unlearn_lr=lr, unlearn_eps=0.02, reward_funcs=counted,
        per_device_train_batch_size=16, max_steps=1,
    )  # fmt: skip
    watched = Watched(trainer)
    trainer.train()
    (theta, first), (theta_prime, second) = watched.stages
    texts = [
        tokenizer.batch_decode(stage[1], skip_special_tokens=True) for stage in (first, second)
    ]
    wanted = graded(choice, texts[0])
    assert 0 < sum(wanted) < len(wanted)
    model = sharp_model().double()
    plain_loss(model, first, plain_scores, "always", "comp", 0.0, 1.0, wanted).backward()
    for name, weight in model.named_parameters():
        step = theta_prime[name].double() - theta[name].double()
        torch.testing.assert_close(step, -lr * weight.grad, atol=2e-6, rtol=1e-3)
    in_turn = [text for pair in zip(*texts, strict=True) for text in pair]
    assert sorted(asked) == sorted(in_turn)
    assert list(trainer._logs["completion"]) == list(trainer._logs["extra"]["text"]) == in_turn
    assert list(trainer._logs["rewards"]["counted"]) == zero_or_more(in_turn)
    log = trainer.state.log_history[0]
    assert log["eepo/stage1_reward"] == pytest.approx(sum(zero_or_more(texts[0])) / len(texts[0]))
    assert "eval_reward" in trainer.evaluate()  # one stage, all of it graded at once


def test_where_no_reward_chooses_anything_theta_prime_is_theta(
    build: Build, fingerprint: Any
) -> None:
    trainer = build(
        gate="always",
        unlearn_on="rewarded",
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        max_steps=1,
    )
    watched = Watched(trainer)
    trainer.train()
    assert fingerprint(watched.stages[0][0]) == fingerprint(watched.stages[1][0])
    assert trainer.state.log_history[0]["eepo/gated_share"] == 0


def test_a_shut_gate_leaves_theta_prime_theta(build: Build, fingerprint: Any) -> None:
    for gate in ("token", "step"):
        trainer = build(gate=gate, gate_threshold=0.0, max_steps=1)
        watched = Watched(trainer)
        trainer.train()
        first, second = (fingerprint(stage) for stage, _ in watched.stages)
        assert first == second
        assert trainer.state.log_history[0]["eepo/gated_share"] == 0


# --- rollout log-probabilities


@pytest.mark.parametrize(
    "settings",
    [
        {},  # TRL takes every ratio as 1 here
        {"num_iterations": 2},  # and here asks for old log-probabilities
        {
            "per_device_train_batch_size": 2,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
        },
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "temperature": 0.7},
    ],
)
def test_old_logprobs_are_those_of_the_weights_that_sampled(
    build: Build, sharp_model: Any, plain_scores: Any, settings: dict[str, Any]
) -> None:
    trainer = build(gate="always", unlearn_lr=0.05, max_steps=2, **settings)
    watched = Watched(trainer)
    trainer.train()
    output = watched.outputs[0]
    models = []
    for stage, _ in watched.stages[:2]:
        models.append(sharp_model())
        models[-1].load_state_dict(stage, strict=False)
    with torch.no_grad():
        for row, (ids, mask) in enumerate(
            zip(output["completion_ids"], output["completion_mask"].bool(), strict=True)
        ):
            prompt = Prompt(
                "", "", tuple(output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist())
            )
            completion = Completion(tuple(ids[mask].tolist()), (), "", True)
            assert list(completion.token_ids) == watched.stages[row % 2][1][1][row // 2]
            under = [
                plain_scores(model, prompt, completion, trainer.temperature).logprobs
                for model in models
            ]
            old = output["old_per_token_logps"][row][mask].double()
            torch.testing.assert_close(old, under[row % 2], atol=1e-4, rtol=1e-4)
            assert (under[0] - under[1]).abs().max() > 1e-3
            assert not output["old_per_token_logps"][row][~mask].any()


def test_rows_keep_their_prompt_and_their_place_in_the_group(build: Build, tokenizer: Any) -> None:
    trainer = build(gate="always", max_steps=1)
    watched = Watched(trainer)
    trainer.train()
    prompts = [tuple(ids.tolist()) for ids in watched.outputs[0]["prompt_ids"]]
    assert len(set(prompts)) == 2
    assert prompts == [prompts[0]] * GROUP + [prompts[GROUP]] * GROUP
    log = trainer.state.log_history[0]
    texts = [
        tokenizer.batch_decode(rows[1], skip_special_tokens=True) for _, rows in watched.stages
    ]
    for stage in (0, 1):
        expected = sum(trainer.reward_funcs[0](texts[stage])) / GROUP
        assert log[f"eepo/stage{stage + 1}_reward"] == pytest.approx(expected)


@pytest.mark.parametrize(("gate", "knobs", "kept"), [
    ("always", {"failure_weight": 0.25}, [0.25, 0.25]),
    ("always", {"later_advantages": "positive"}, [1.0, 0.0]),
    ("never", {"failure_weight": 0.0}, [0.0, 0.0]),
])  # fmt: skip
def test_failures_count_as_much_as_they_are_told_to(
    build: Build, gate: str, knobs: dict[str, Any], kept: list[float]
) -> None:
    """`kept` in stage 1, the even rows, and in stage 2; TRL's log has what they were."""
    sizes = {"num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 1}
    trainer = build(gate=gate, unlearn_lr=1e-2, **sizes, **knobs)
    watched = Watched(trainer)
    trainer.train()
    (output,) = watched.outputs
    before = torch.tensor(list(trainer._logs["advantages"])).view(-1, 2)
    assert ((before < 0).any(0) & (before > 0).any(0)).all()
    expected = torch.where(before < 0, before * torch.tensor(kept), before)
    torch.testing.assert_close(output["advantages"].view(-1, 2), expected)


def test_truncated_completions_that_trl_masks_stay_out(build: Build) -> None:
    trainer = build(
        gate="always", mask_truncated_completions=True, max_completion_length=3, num_iterations=2
    )
    watched = Watched(trainer)
    trainer.train()
    for output in watched.outputs:
        assert not output["old_per_token_logps"][output["completion_mask"] == 0].any()
    assert all(weight.isfinite().all() for weight in weights(trainer).values())


def test_an_update_under_way_keeps_its_gradients(build: Build, fingerprint: Any) -> None:
    """Two rollouts in one optimizer step: the second comes when the first one's gradients are accumulated."""
    trainer = build(
        gate="always", gradient_accumulation_steps=2, steps_per_generation=1, max_steps=2
    )
    generate, held = trainer._generate, []

    def check(prompts: list[Any]) -> Any:
        before = {
            name: weight.grad
            for name, weight in trainer.model.named_parameters()
            if weight.grad is not None
        }
        held.append(len(before))
        digest = fingerprint(before)
        rows = generate(prompts)
        after = {
            name: weight.grad
            for name, weight in trainer.model.named_parameters()
            if weight.grad is not None
        }
        assert fingerprint(after) == digest
        return rows

    trainer._generate = check
    trainer.train()
    assert held[0] == 0
    assert held[1] > 0
    assert len(held) == 4


# --- evaluation, resuming


def test_evaluation_is_one_stage_and_trls_own(build: Build, fingerprint: Any) -> None:
    other = build(eepo=False).evaluate()
    ours = build(gate="always")
    before, watched = fingerprint(weights(ours)), Watched(ours)
    mine = ours.evaluate()
    clocks = {name for name in mine if name.endswith(("time", "per_second"))}
    assert {name: mine[name] for name in mine.keys() - clocks} == {
        name: other[name] for name in other.keys() - clocks
    }
    assert "eval_reward" in mine
    assert watched.stages == []
    assert ours.gate_history == []
    assert fingerprint(weights(ours)) == before


def test_resuming_keeps_the_gate_history_and_equals_never_stopping(
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
    whole = build(**settings)
    whole.train()
    resumed = build(**settings)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert len(resumed.gate_history) == 3
    assert resumed.gate_history == whole.gate_history
    assert fingerprint(weights(resumed)) == fingerprint(weights(whole))


def test_resuming_keeps_the_rate_that_was_chosen_last(build: Build, fingerprint: Any) -> None:
    settings = {
        "gate": "always",
        "unlearn_kl_target": 1e-3,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = trained(build(**settings))
    resumed = build(**settings)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert resumed.auto_lr == whole.auto_lr
    assert fingerprint(weights(resumed)) == fingerprint(weights(whole))


def test_a_rate_that_is_given_anew_is_the_one_that_counts(build: Build) -> None:
    settings = {"gate": "always", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trained(build(unlearn_lr=1e-2, **settings))
    resumed = build(unlearn_lr=0.0, **settings)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-1")
    assert [entry["eepo/kl"] > 0 for entry in resumed.state.log_history if "eepo/kl" in entry] == [
        True,
        False,
    ]


def test_a_checkpoint_of_grpo_can_be_gone_on_with(build: Build) -> None:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    build(eepo=False, **settings).train()
    trainer = build(gate="step", **settings)
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
    assert len(trainer.gate_history) == 1


# --- vLLM's server mode: TRL's own code on both sides of a stand-in for the network

Server = runpy.run_path(str(Path(__file__).with_name("trl_server.py")))["Server"]


@pytest.fixture
def with_server(build: Build, sharp_model: Any, monkeypatch: pytest.MonkeyPatch) -> Build:
    def connect(generation: Any) -> None:
        generation.vllm_client = Server(sharp_model())

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", connect)
    server = {"gate": "always", "use_vllm": True, "vllm_mode": "server", "unlearn_lr": 0.02}
    return lambda **settings: build(**(server | settings))


def test_a_shut_gate_pushes_no_second_time(with_server: Build) -> None:
    trainer = with_server(gate="token", gate_threshold=0.0, max_steps=2)
    trainer.train()
    assert len(trainer.vllm_generation.vllm_client.pushed) == 2
    assert len(trainer.vllm_generation.vllm_client.asked) == 4


def test_a_server_samples_each_stage_from_the_weights_it_should(
    with_server: Build, fingerprint: Any
) -> None:
    trainer = with_server(max_steps=2, temperature=0.9)
    server, watched = trainer.vllm_generation.vllm_client, Watched(trainer)
    trainer.train()
    assert [fingerprint(pushed) for pushed in server.pushed] == [
        fingerprint(stage) for stage, _ in watched.stages
    ]
    for n, prompts in server.asked:
        assert n == GROUP // 2
        assert len(prompts) == len(set(map(tuple, prompts))) == 2
    for output in watched.outputs:
        torch.testing.assert_close(
            output["old_per_token_logps"], output["sampling_per_token_logps"], atol=1e-4, rtol=0
        )
        ratio = output[
            "importance_sampling_ratio"
        ]  # 0 is what TRL makes of a completion it takes for a broken one
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-3, rtol=0)


def test_without_the_sampling_weights_logprobs_stage_2_would_not_survive(
    with_server: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: TRL's own "old" log-probabilities, under θ."""
    monkeypatch.setattr(
        EEPOTrainer,
        "_get_per_token_logps_and_entropies",
        GRPOTrainer._get_per_token_logps_and_entropies,
    )
    trainer = with_server(max_steps=1)
    watched = Watched(trainer)
    trainer.train()
    ratio = watched.outputs[0]["importance_sampling_ratio"]
    assert (ratio[0::2] - 1).abs().max() < 1e-3
    assert (ratio[1::2] - 1).abs().min() > 1e-2


def test_an_evaluation_at_the_same_step_samples_theta_again(
    with_server: Build, fingerprint: Any
) -> None:
    trainer = with_server(max_steps=1)
    server, theta = trainer.vllm_generation.vllm_client, fingerprint(weights(trainer))
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer._generate_and_score_completions(batch)  # no update follows: the step stays 0
    assert fingerprint(server.pushed[-1]) != theta
    trainer.evaluate()
    assert fingerprint(server.pushed[-1]) == theta
    assert server.asked[-1][0] == GROUP
