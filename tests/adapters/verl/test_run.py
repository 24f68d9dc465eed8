"""Compares real verl runs with plain references: sampling, unlearning and training."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs its own environment: make test-verl")

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tiny import compute_score
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl_runs import GROUP, TEMPERATURE, VerlRun, entropy

from eepo.adapters.verl.stages import grouped_rewards, row_weights, select_rows
from eepo.config import AlgorithmConfig

EPS = 1e-4
Rows = list[dict[str, Any]]


def build(model: Path, weights: Path) -> Any:
    """Load a reference model in float64."""
    reference = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    reference.load_state_dict(load_file(weights), strict=False)
    return reference.double().eval()


def logits(reference: Any, row: dict[str, Any], temperature: float = 1.0) -> Tensor:  # [T, V]
    """Return the logits that predict the completion."""
    input_ids = torch.tensor([row["prompt"] + row["ids"]])
    return reference(input_ids).logits[0, len(row["prompt"]) - 1 : -1] / temperature


def logprobs(reference: Any, row: dict[str, Any], temperature: float = 1.0) -> Tensor:  # [T]
    return (
        logits(reference, row, temperature)
        .log_softmax(-1)
        .gather(1, torch.tensor(row["ids"])[:, None])[:, 0]
    )


def unlearning_gradient(
    reference: Any, rows: Rows, threshold: float | None, window: int
) -> dict[str, Tensor]:
    """Return the gradient of the mean of (1 / T) Σ gated −log(1 − p), one row at a time."""
    for row in rows:
        logp = logits(reference, row).log_softmax(-1)
        entropies = (-logp.exp() * logp).sum(-1).tolist()
        p = logp.gather(1, torch.tensor(row["ids"])[:, None])[:, 0].exp().clamp(max=1 - EPS)
        loss = 0 * p.sum()  # a row may have no gated token
        for t in range(len(p)):
            in_window = entropies[max(0, t - window + 1) : t + 1]
            if threshold is None or sum(in_window) / len(in_window) < threshold:
                loss = loss - torch.log(1 - p[t])
        (loss / len(p) / len(rows)).backward()
    return {name: weight.grad for name, weight in reference.named_parameters()}


def exact_gradient(reference: Any, rows: Rows, limit: float) -> Tensor:
    """Return the flat gradient of the mean of −log(1 − p), p as a sum over the other tokens.

    Tokens with p above the limit have no gradient. The temperature is that of `full_credit`.
    """
    for row in rows:
        p = logits(reference, row, TEMPERATURE).softmax(-1)  # [T, V]
        sampled = torch.nn.functional.one_hot(torch.tensor(row["ids"]), p.shape[1]).bool()
        others = torch.where(sampled, 0.0, p).sum(-1)
        kept = others.detach() >= 1 - limit
        (-(torch.log(others) * kept).mean() / len(rows)).backward()
    return flat({name: weight.grad for name, weight in reference.named_parameters()})


def assert_unlearned(
    model: Path, before: Path, after: Path, rows: Rows, threshold: float | None, window: int
) -> None:
    """Check after = before − 1 · gradient, within the precision of fp32 weights."""
    gradient = flat(unlearning_gradient(build(model, before), rows, threshold, window))
    step = flat(load_file(after)).double() - flat(load_file(before)).double()
    assert gradient.norm() > 0.05
    assert (step + gradient).norm() < 1e-4 * gradient.norm()


def same_weights(first: Path, second: Path) -> bool:
    left, right = load_file(first), load_file(second)
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def test_a_step_with_a_shut_gate_equals_grpo(stock: VerlRun, eepo: VerlRun) -> None:
    def sampled(run: VerlRun) -> Counter[str]:
        rows = run.completions(1)
        return Counter(str((row["prompt"], row["ids"], row["logprobs"])) for row in rows)

    assert sampled(stock) == sampled(eepo)
    before, after = flat(load_file(stock.weights(1))), flat(load_file(stock.weights(2)))
    update = (after - before).abs().max()
    assert (after - flat(load_file(eepo.weights(2)))).abs().max() < 1e-4 * update


def test_a_shut_gate_causes_no_push_and_no_sleep(eepo: VerlRun) -> None:
    kinds = [event["event"] for event in eepo.events()]
    step_1 = ["push", *["completion"] * 12, "sleep"]
    step_2 = ["push", *["completion"] * 6, "sleep", "push", *["completion"] * 6, "sleep", "push"]
    assert kinds == ["sleep", *step_1, *step_2]
    assert eepo.metrics()[1]["eepo/gate_share"] == 0
    assert "eepo/unlearn/lr" not in eepo.metrics()[1]


def test_theta_prime_is_theta_minus_the_gradient_of_stage_1(model: Path, eepo: VerlRun) -> None:
    assert_unlearned(
        model, eepo.weights(2), eepo.weights(3), eepo.completions(2), threshold=None, window=2
    )


def test_every_stage_unlearns_all_earlier_stages_with_the_token_gate(
    model: Path, resumed: VerlRun
) -> None:
    """Four stages have two completions each. Every θ′ starts from the same θ."""
    rows: Rows = []
    for push in (1, 2, 3):
        rows += resumed.completions(push)
        assert len(rows) == 6 * push
        assert_unlearned(
            model, resumed.weights(1), resumed.weights(push + 1), rows, threshold=4.2, window=2
        )
    assert 0.1 < resumed.metrics()[2]["eepo/gate_share"] < 0.9


def test_a_kl_target_is_met_and_only_failures_are_unlearned(
    model: Path, kl_target: VerlRun
) -> None:
    """The pushes are θ, θ′ and θ.

    verl's random uids decide which five of the six stage-1 rows are used, so try all choices.
    """
    metrics, rows = kl_target.metrics()[1], kl_target.completions(1)
    lr = metrics["eepo/unlearn/lr"]
    theta, theta_prime = (build(model, kl_target.weights(push)) for push in (1, 2))
    failed = [index for index, row in enumerate(rows) if reward_of(model, row) == 0]
    assert 1 < len(failed) < 6
    parts = {
        row: flat(unlearning_gradient(build(model, kl_target.weights(1)), [rows[row]], None, 3))
        for row in failed
    }
    step = flat(dict(theta_prime.named_parameters())) - flat(dict(theta.named_parameters()))

    def explains_step(chosen: tuple[int, ...]) -> bool:
        gradient = sum(parts[row] for row in failed if row in chosen) / 5
        return bool((step + lr * gradient).norm() < 1e-3 * step.norm())

    choices = [chosen for chosen in combinations(range(6), 5) if explains_step(chosen)]
    gaps = [(logprobs(theta_prime, row) - logprobs(theta, row)).detach() for row in rows]
    kl = metrics["eepo/unlearn/kl"]
    kls = [kl_of(torch.cat([gaps[row] for row in chosen])) for chosen in choices]
    assert min(abs(expected - kl) for expected in kls) < 1e-3 * kl
    assert 0.02 / 1.5 <= kl <= 0.02 * 1.5
    assert metrics["eepo/unlearn/kl_floor"] == 0  # passes are in float32
    assert metrics["eepo/unlearn/completions"] == 5
    saved = json.loads((kl_target.folder / "checkpoints/global_step_1/eepo.json").read_text())
    assert saved["auto_lr"] == lr != 1e-3


def reward_of(model: Path, row: dict[str, Any]) -> float:
    text = AutoTokenizer.from_pretrained(model).decode(row["ids"], skip_special_tokens=True)
    return compute_score("", text, "")


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in sorted(tensors)])


def kl_of(gaps: Tensor) -> float:
    return float((gaps.exp() - 1 - gaps).mean())


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("unrewarded", ["a-1_1_0", "a-2_0_0"]),
        ("rewarded", ["a-1_0_0", "a-1_0_1", "b-1_0_0", "b-1_1_0", "b-1_1_1"]),
        ("zero_variance", ["b-1_0_0", "b-1_1_0", "b-1_1_1"]),
    ],
)
def test_rows_are_selected_by_the_rewards_of_their_group(choice: str, expected: list[str]) -> None:
    """Two sessions have two rows. Their reward is on both rows, or only on the last."""
    rewards = {
        "a-1_0_0": 0.0,
        "b-1_0_0": 1.0,
        "a-1_1_0": 0.0,
        "b-1_1_0": 1.0,
        "a-2_0_0": 0.0,
        "a-1_0_1": 1.0,
        "b-1_1_1": 1.0,
    }
    selected = select_rows(list(rewards), list(rewards.values()), choice)
    assert sorted(key for key in rewards if selected[key]) == expected
    assert all(select_rows(list(rewards), list(rewards.values()), "all").values())


def test_denominators_are_under_the_weights_that_sampled(model: Path, eepo: VerlRun) -> None:
    recorded = {tuple(row["denominators"]) for row in eepo.loss_rows()}
    theta, theta_prime = build(model, eepo.weights(2)), build(model, eepo.weights(3))
    for push, sampler in ((2, theta), (3, theta_prime)):
        assert len(eepo.completions(push)) == 6
        for row in eepo.completions(push):
            denominators = torch.tensor(row["logprobs"], dtype=torch.float32)
            assert tuple(denominators.tolist()) in recorded
            torch.testing.assert_close(
                denominators.double(), logprobs(sampler, row), atol=2e-5, rtol=0
            )
    gaps = [
        (torch.tensor(row["logprobs"]) - logprobs(theta, row)).abs().max()
        for row in eepo.completions(3)
    ]
    assert min(gaps) > 1e-2  # under θ they would differ


def test_denominators_are_under_theta_with_full_credit(model: Path, full_credit: VerlRun) -> None:
    """The pushes are θ, θ′ and the updated θ. The step has one update, so all ratios are 1."""
    theta, rows = build(model, full_credit.weights(1)), full_credit.loss_rows()
    assert len(rows) == 12
    for row in rows:
        torch.testing.assert_close(
            torch.tensor(row["denominators"]), torch.tensor(row["policy"]), atol=1e-5, rtol=0
        )
    for push in (1, 2):
        assert len(full_credit.completions(push)) == 6
        for row in full_credit.completions(push):
            expected = logprobs(theta, row, TEMPERATURE).detach()
            same_length = [
                r["denominators"] for r in rows if len(r["denominators"]) == len(expected)
            ]
            gaps = [(torch.tensor(values) - expected).abs().max() for values in same_length]
            assert min(gaps) < 2e-5
            rollout_gap = (torch.tensor(row["logprobs"]) - expected).abs().max()
            assert rollout_gap < 2e-5 if push == 1 else rollout_gap > 1e-2


def test_no_token_of_stage_2_is_masked_or_weighted_with_full_credit(full_credit: VerlRun) -> None:
    """verl's rollout correction could reject tokens or multiply their loss."""
    sampled = [row for push in (1, 2) for row in full_credit.completions(push)]
    num_tokens = sum(len(row["ids"]) for row in sampled)
    assert sum(len(row["denominators"]) for row in full_credit.loss_rows()) == num_tokens
    assert not any(row["has_weights"] for row in full_credit.loss_rows())


def test_exact_saturation_unlearns_tokens_above_the_limit(
    model: Path, full_credit: VerlRun
) -> None:
    """The run has unlearn_eps = 0.5, which exact saturation ignores."""
    rows, theta = full_credit.completions(1), full_credit.weights(1)
    step = flat(load_file(full_credit.weights(2))).double() - flat(load_file(theta)).double()
    exact = exact_gradient(build(model, theta), rows, limit=1.0)
    stopped = exact_gradient(build(model, theta), rows, limit=0.5)
    assert (step + exact).norm() < 1e-4 * exact.norm()
    assert (step + stopped).norm() > 1e-2 * exact.norm()
    assert full_credit.metrics()[1]["eepo/gate_share"] == 1


def test_policy_logprobs_of_the_update_are_under_theta(model: Path, eepo: VerlRun) -> None:
    theta = build(model, eepo.weights(2))
    policy = {tuple(row["denominators"]): row["policy"] for row in eepo.loss_rows()}
    for row in eepo.completions(2) + eepo.completions(3):
        current = policy[tuple(torch.tensor(row["logprobs"], dtype=torch.float32).tolist())]
        torch.testing.assert_close(
            torch.tensor(current).double(), logprobs(theta, row), atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("step", [1, 2])
def test_the_keys_of_all_rows_name_their_group_and_stage(eepo: VerlRun, step: int) -> None:
    stages: dict[str, list[int]] = {}
    for row in eepo.rollout_dump(step):
        group, stage = row["uid"].rsplit("_", 2)[0].rsplit("-", 1)
        stages.setdefault(group, []).append(int(stage))
    assert [sorted(group) for group in stages.values()] == [[1, 1, 2, 2]] * 3


class Advantage(NamedTuple):
    """The advantage of a completion: expected without weights, and as the policy loss got it."""

    prompt: tuple[int, ...]
    push: int
    expected: float  # over the whole group
    actual: float


def advantages_of(model: Path, run: VerlRun, pushes: range) -> list[Advantage]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    actual = {tuple(row["denominators"]): row["advantages"][0] for row in run.loss_rows()}
    by_prompt: dict[tuple[int, ...], list[tuple[int, dict[str, Any]]]] = {}
    for push in pushes:
        for row in run.completions(push):
            by_prompt.setdefault(tuple(row["prompt"]), []).append((push, row))
    advantages: list[Advantage] = []
    for prompt, rows in by_prompt.items():
        texts = [tokenizer.decode(row["ids"], skip_special_tokens=True) for _, row in rows]
        rewards = torch.tensor([compute_score("", text, "") for text in texts])
        expected = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        for (push, row), advantage in zip(rows, expected, strict=True):
            key = tuple(torch.tensor(row["logprobs"], dtype=torch.float32).tolist())
            advantages.append(Advantage(prompt, push, advantage, actual[key]))
    return advantages


def test_advantages_are_normalised_over_the_whole_group(model: Path, eepo: VerlRun) -> None:
    rows = advantages_of(model, eepo, range(2, 4))
    assert Counter(row.prompt for row in rows).most_common()[0][1] == GROUP
    expected = [row.expected for row in rows]
    assert [row.actual for row in rows] == pytest.approx(expected, abs=1e-4)


def test_negative_advantages_are_multiplied_by_their_weight(model: Path, resumed: VerlRun) -> None:
    """The weight is 0.25 in stage 1 and 0 in later stages."""
    seen: Counter[float] = Counter()
    for row in advantages_of(model, resumed, range(1, 5)):
        weight = 1.0
        if row.expected < 0:
            weight = 0.25 if row.push == 1 else 0.0
        seen[weight] += abs(row.expected) > 0.1
        assert row.actual == pytest.approx(weight * row.expected, abs=1e-4)
    assert min(seen[weight] for weight in (0.0, 0.25, 1.0)) > 0


def test_all_rows_of_a_session_have_the_same_weight() -> None:
    advantages = {
        "a-1_0_0": 0.0,  # the session's advantage is on its other row
        "a-1_1_0": 1.0,
        "a-1_2_0": 0.0,
        "a-2_0_0": -1.0,
        "a-1_0_1": 1.0,
        "a-1_2_1": -1.0,
        "pad_0_0": 0.0,
    }
    keys, values = list(advantages), list(advantages.values())
    options = AlgorithmConfig(failure_weight=0.75, stage2_negative_advantages=False)
    weights = row_weights(keys, values, options, staged=True)
    assert weights == [1.0, 1.0, 0.75, 0.0, 1.0, 0.75, 1.0]


def test_row_weights_without_stages_accept_the_uids_of_verl() -> None:
    options = AlgorithmConfig(failure_weight=0.5, stage2_negative_advantages=False)
    keys = ["0f-3e_0_0", "0f-3e_1_0"]
    assert row_weights(keys, [1.0, -1.0], options, staged=False) == [1.0, 0.5]


def test_every_stage_has_metrics(eepo: VerlRun) -> None:
    metrics = eepo.metrics()[2]
    for stage, push in ((1, 2), (2, 3)):
        assert metrics[f"eepo/stage{stage}/entropy"] == pytest.approx(
            entropy(eepo.completions(push)), abs=1e-4
        )
        lengths = [len(row["ids"]) for row in eepo.completions(push)]
        assert metrics[f"eepo/stage{stage}/length"] == pytest.approx(sum(lengths) / 6)
        assert metrics[f"eepo/stage{stage}/completions"] == 6
    assert metrics["eepo/unlearn/lr"] == 1
    assert metrics["eepo/unlearn/weights_changed_share"] > 0.9


def test_groups_that_the_first_half_missed_are_counted(eepo: VerlRun) -> None:
    for step in (1, 2):
        solved: dict[tuple[str, str], float] = {}  # by prompt and stage: the best score
        for row in eepo.rollout_dump(step):
            place = row["input"], row["uid"].split("_")[0][-1]
            solved[place] = max(solved.get(place, 0.0), row["score"])
        prompts = {prompt for prompt, _ in solved}
        missed = [prompt for prompt in prompts if not solved[prompt, "1"]]
        recovered = [prompt for prompt in missed if solved[prompt, "2"]]
        metrics = eepo.metrics()[step]
        assert metrics["eepo/missed_share"] == pytest.approx(len(missed) / 3)
        assert metrics["eepo/second_half_recovery"] == pytest.approx(len(recovered) / 3)


def test_rewards_are_grouped_in_the_order_of_stages_and_sessions() -> None:
    rewards = {"a-2_0_0": 3.0, "a-1_10_0": 2.0, "a-1_9_0": 0.0, "a-1_9_1": 1.0, "b-1_0_0": 5.0}
    keys, values = [*rewards, "pad_0_0"], [*rewards.values(), 7.0]
    assert grouped_rewards(keys, values, staged=True) == [[1.0, 2.0, 3.0], [5.0]]
    keys, values = ["0f-3e_1_0", "0f-3e_0_0", "0f-4e_0_0"], [1.0, 2.0, 3.0]
    assert grouped_rewards(keys, values, staged=False) == [[2.0, 1.0], [3.0]]


def test_checkpoints_hold_the_gate_history_and_the_unlearn_lr(
    eepo: VerlRun, resumed: VerlRun, stage_1_entropies: tuple[float, float]
) -> None:
    saved = [
        json.loads((eepo.folder / f"checkpoints/global_step_{n}/eepo.json").read_text())
        for n in (1, 2)
    ]
    assert saved[0]["gate_history"] == pytest.approx(stage_1_entropies[:1], abs=1e-4)
    assert saved[1]["gate_history"] == pytest.approx(stage_1_entropies, abs=1e-3)
    resumed_state = json.loads((resumed.folder / "checkpoints/global_step_2/eepo.json").read_text())
    assert resumed_state["auto_lr"] == 0.5  # of the first checkpoint: this run has a fixed η
    mean = (saved[0]["gate_history"][0] + entropy(resumed.completions(1))) / 2
    assert resumed.metrics()[2]["eepo/gate_entropy"] == pytest.approx(mean)


def test_a_resumed_run_starts_from_the_saved_theta(eepo: VerlRun, resumed: VerlRun) -> None:
    assert same_weights(eepo.weights(2), resumed.weights(1))
    assert not same_weights(eepo.weights(2), eepo.weights(3))
    sampled = [
        {str(row["ids"]) for row in run.completions(push)}
        for run, push in ((eepo, 2), (resumed, 1))
    ]
    assert sampled[0] == sampled[1]  # stage 1 has two completions per prompt in both runs
    assert list(resumed.metrics()) == [2]
