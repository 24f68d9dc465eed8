"""What the runs did, against plain references: what was sampled from which weights, and what was trained on."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")

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
from verl_runs import GROUP, VerlRun, entropy

from eepo.adapters.verl.stages import row_weights, wanted_rows
from eepo.config import AlgorithmConfig

EPS = 1e-4
Rows = list[dict[str, Any]]


def build(model: Path, weights: Path) -> Any:
    """In float64: a reference, not a peer."""
    reference = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    reference.load_state_dict(load_file(weights), strict=False)
    return reference.double().eval()


def logits(reference: Any, row: dict[str, Any]) -> Tensor:  # [T, V] that predict the completion
    whole = torch.tensor([row["prompt"] + row["ids"]])
    return reference(whole).logits[0, len(row["prompt"]) - 1 : -1]


def logprobs(reference: Any, row: dict[str, Any]) -> Tensor:  # [T]
    return logits(reference, row).log_softmax(-1).gather(1, torch.tensor(row["ids"])[:, None])[:, 0]


def unlearning_gradient(
    reference: Any, rows: Rows, threshold: float | None, window: int
) -> dict[str, Tensor]:
    """Of the mean over completions of (1 / T) Σ −log(1 − p) over gated tokens, one row at a time."""
    for row in rows:
        logp = logits(reference, row).log_softmax(-1)
        entropies = (-logp.exp() * logp).sum(-1).tolist()
        p = logp.gather(1, torch.tensor(row["ids"])[:, None])[:, 0].exp().clamp(max=1 - EPS)
        loss = 0 * p.sum()  # a row may have nothing gated
        for t in range(len(p)):
            last = entropies[max(0, t - window + 1) : t + 1]
            if threshold is None or sum(last) / len(last) < threshold:
                loss = loss - torch.log(1 - p[t])
        (loss / len(p) / len(rows)).backward()
    return {name: weight.grad for name, weight in reference.named_parameters()}


def assert_unlearned(
    model: Path, before: Path, after: Path, rows: Rows, threshold: float | None, window: int
) -> None:
    """after − before is −1 · gradient, to what fp32 weights can hold."""
    gradient = unlearning_gradient(build(model, before), rows, threshold, window)
    theta, moved = load_file(before), load_file(after)
    wrong = (
        sum(
            float((moved[n].double() - theta[n].double() + gradient[n]).square().sum())
            for n in theta
        )
        ** 0.5
    )
    size = sum(float(part.square().sum()) for part in gradient.values()) ** 0.5
    assert size > 0.05
    assert wrong < 1e-4 * size


def same_weights(one: Path, other: Path) -> bool:
    left, right = load_file(one), load_file(other)
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def test_a_shut_gate_is_stock_grpo(stock: VerlRun, eepo: VerlRun) -> None:
    def drawn(run: VerlRun) -> Counter[str]:
        return Counter(
            str((row["prompt"], row["ids"], row["logprobs"])) for row in run.completions(1)
        )

    assert drawn(stock) == drawn(eepo)
    theta, ours = load_file(stock.weights(2)), load_file(eepo.weights(2))
    moved = max(
        float((theta[name] - load_file(stock.weights(1))[name]).abs().max()) for name in theta
    )
    assert max(float((theta[name] - ours[name]).abs().max()) for name in theta) < 1e-4 * moved


def test_a_shut_gate_costs_no_push_and_no_sleep(eepo: VerlRun) -> None:
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


def test_the_token_gate_and_every_stage_so_far(model: Path, resumed: VerlRun) -> None:
    """Four stages of two completions: each later θ′ forgets all rows before it, and starts from the same θ."""
    rows: Rows = []
    for push in (1, 2, 3):
        rows += resumed.completions(push)
        assert len(rows) == 6 * push
        assert_unlearned(
            model, resumed.weights(1), resumed.weights(push + 1), rows, threshold=4.2, window=2
        )
    assert 0.1 < resumed.metrics()[2]["eepo/gate_share"] < 0.9


def test_eta_meets_a_kl_and_some_failures_are_forgotten(model: Path, kl_met: VerlRun) -> None:
    """Pushes: θ, θ′, θ. Which five of stage 1's rows are looked at hangs on verl's random uids; the weights tell."""
    metrics, rows = kl_met.metrics()[1], kl_met.completions(1)
    lr = metrics["eepo/unlearn/lr"]
    theta, theta_prime = (build(model, kl_met.weights(push)) for push in (1, 2))
    failed = [row for row, one in enumerate(rows) if scored(model, one) == 0]
    assert 1 < len(failed) < 6
    parts = {
        row: flat(unlearning_gradient(build(model, kl_met.weights(1)), [rows[row]], None, 3))
        for row in failed
    }
    moved = flat(dict(theta_prime.named_parameters())) - flat(dict(theta.named_parameters()))
    told = [
        five
        for five in combinations(range(6), 5)
        if (moved + lr * sum(parts[row] for row in failed if row in five) / 5).norm()
        < 1e-3 * moved.norm()
    ]
    gaps = [(logprobs(theta_prime, row) - logprobs(theta, row)).detach() for row in rows]
    kls = [kl_of(torch.cat([gaps[row] for row in five])) for five in told]
    assert (
        min(abs(kl - metrics["eepo/unlearn/kl"]) for kl in kls) < 1e-3 * metrics["eepo/unlearn/kl"]
    )
    assert 0.02 / 1.1 <= metrics["eepo/unlearn/kl"] <= 0.02 * 1.1
    assert metrics["eepo/unlearn/kl_floor"] == 0  # nothing is rounded here
    assert metrics["eepo/unlearn/completions"] == 5
    assert (
        json.loads((kl_met.folder / "checkpoints/global_step_1/eepo.json").read_text())["auto_lr"]
        == lr
        != 1e-3
    )


def scored(model: Path, row: dict[str, Any]) -> float:
    text = AutoTokenizer.from_pretrained(model).decode(row["ids"], skip_special_tokens=True)
    return compute_score("", text, "")


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in sorted(tensors)])


def kl_of(gaps: Tensor) -> float:
    return float((gaps.exp() - 1 - gaps).mean())


def test_who_is_unlearned_is_decided_for_whole_groups() -> None:
    keys = [
        "a-1_0_0",
        "b-1_0_0",
        "a-1_1_0",
        "b-1_1_0",
        "a-2_0_0",
        "a-1_0_1",
        "b-1_1_1",
    ]  # two sessions of two rows
    rewards = [
        0.0,
        1.0,
        0.0,
        1.0,
        0.0,
        1.0,
        1.0,
    ]  # on all rows of a session, as verl writes it, or on the last
    unrewarded = wanted_rows(keys, rewards, "unrewarded")
    assert [key for key in keys if unrewarded[key]] == ["a-1_1_0", "a-2_0_0"]
    rewarded = wanted_rows(keys, rewards, "rewarded")
    assert [key for key in keys if rewarded[key]] == [
        "a-1_0_0",
        "b-1_0_0",
        "b-1_1_0",
        "a-1_0_1",
        "b-1_1_1",
    ]
    stuck = wanted_rows(keys, rewards, "zero_variance")
    assert [key for key in keys if stuck[key]] == ["b-1_0_0", "b-1_1_0", "b-1_1_1"]


def test_denominators_are_those_of_the_weights_that_sampled(model: Path, eepo: VerlRun) -> None:
    handed = {tuple(row["denominators"]) for row in eepo.loss_rows()}
    theta, theta_prime = build(model, eepo.weights(2)), build(model, eepo.weights(3))
    for push, sampler in ((2, theta), (3, theta_prime)):
        assert len(eepo.completions(push)) == 6
        for row in eepo.completions(push):
            denominators = torch.tensor(row["logprobs"], dtype=torch.float32)
            assert tuple(denominators.tolist()) in handed
            torch.testing.assert_close(
                denominators.double(), logprobs(sampler, row), atol=2e-5, rtol=0
            )
    gaps = [
        (torch.tensor(row["logprobs"]) - logprobs(theta, row)).abs().max()
        for row in eepo.completions(3)
    ]
    assert min(gaps) > 1e-2  # θ would have been another denominator


def test_the_update_is_at_theta_and_not_at_theta_prime(model: Path, eepo: VerlRun) -> None:
    theta = build(model, eepo.weights(2))
    policy = {tuple(row["denominators"]): row["policy"] for row in eepo.loss_rows()}
    for row in eepo.completions(2) + eepo.completions(3):
        current = policy[tuple(torch.tensor(row["logprobs"], dtype=torch.float32).tolist())]
        torch.testing.assert_close(
            torch.tensor(current).double(), logprobs(theta, row), atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("step", [1, 2])
def test_groups_are_whole_and_every_row_knows_its_stage(eepo: VerlRun, step: int) -> None:
    stages: dict[str, list[int]] = {}
    for row in eepo.dumped(step):
        group, stage = row["uid"].rsplit("_", 2)[0].rsplit("-", 1)
        stages.setdefault(group, []).append(int(stage))
    assert [sorted(found) for found in stages.values()] == [[1, 1, 2, 2]] * 3


class Trained(NamedTuple):
    """A completion, and what the policy loss was handed of it."""

    prompt: tuple[int, ...]
    push: int
    likely: float  # mean log-probability under the weights that sampled
    plain: float  # advantage over the whole group
    handed: float


def trained(model: Path, run: VerlRun, pushes: range) -> list[Trained]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    handed = {tuple(row["denominators"]): row["advantages"][0] for row in run.loss_rows()}
    by_prompt: dict[tuple[int, ...], list[tuple[int, dict[str, Any]]]] = {}
    for push in pushes:
        for row in run.completions(push):
            by_prompt.setdefault(tuple(row["prompt"]), []).append((push, row))
    found: list[Trained] = []
    for prompt, rows in by_prompt.items():
        texts = [tokenizer.decode(row["ids"], skip_special_tokens=True) for _, row in rows]
        rewards = torch.tensor([compute_score("", text, "") for text in texts])
        plain = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        for (push, row), advantage in zip(rows, plain, strict=True):
            key = tuple(torch.tensor(row["logprobs"], dtype=torch.float32).tolist())
            found.append(
                Trained(prompt, push, sum(row["logprobs"]) / len(key), advantage, handed[key])
            )
    return found


def test_advantages_are_over_the_whole_group(model: Path, eepo: VerlRun) -> None:
    rows = trained(model, eepo, range(2, 4))
    assert Counter(row.prompt for row in rows).most_common()[0][1] == GROUP
    assert [row.handed for row in rows] == pytest.approx([row.plain for row in rows], abs=1e-4)


def test_advantages_are_weighed_if_so_asked(model: Path, resumed: VerlRun) -> None:
    """Failures a quarter in stage 1 and nothing later; of two successes in a stage the unlikelier three times."""
    rows = trained(model, resumed, range(1, 5))
    pairs: dict[tuple[tuple[int, ...], int], list[Trained]] = {}
    for row in rows:
        pairs.setdefault((row.prompt, row.push), []).append(row)
    seen: Counter[float] = Counter()
    for (_, push), pair in pairs.items():
        both = all(row.plain > 0 for row in pair)
        for row, other in zip(pair, pair[::-1], strict=True):
            weight = (0.5 if row.likely > other.likely else 1.5) if both else 1.0
            if row.plain < 0:
                weight = 0.25 if push == 1 else 0.0
            seen[weight] += abs(row.plain) > 0.1
            assert row.handed == pytest.approx(weight * row.plain, abs=1e-4)
    assert min(seen[weight] for weight in (0.0, 0.25, 0.5, 1.5)) > 0


def test_rows_of_a_session_weigh_the_same_within_a_prompts_stage() -> None:
    keys = ["a-1_0_0", "a-1_1_0", "a-1_2_0", "a-2_0_0", "a-1_0_1", "b-1_0_0", "pad_0_0"]
    signs = [
        0.0,
        1.0,
        -1.0,
        1.0,
        1.0,
        1.0,
        0.0,
    ]  # a's session 0 has two rows, the first of them without an answer
    likely = [
        (-1.0, 1.0),
        (-5.0, 2.0),
        (-9.0, 1.0),
        (-7.0, 1.0),
        (-6.0, 3.0),
        (-3.0, 1.0),
        (0.0, 0.0),
    ]
    weights = row_weights(
        keys, signs, likely, AlgorithmConfig(rare_weight=0.5, failure_weight=0.75), staged=True
    )
    assert weights == [0.5, 1.5, 0.75, 1.0, 0.5, 1.0, 1.0]
    plain = ["0f-3e_0_0", "0f-3e_1_0"]  # without stages, verl's own uids
    likely = [(-2.0, 1.0), (-1.0, 1.0)]
    assert row_weights(
        plain, [1.0, 1.0], likely, AlgorithmConfig(rare_weight=1.0), staged=False
    ) == [2.0, 0.0]


def test_each_stage_has_metrics(eepo: VerlRun) -> None:
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


def test_the_gates_history_is_in_the_checkpoint(
    eepo: VerlRun, resumed: VerlRun, stage_1_entropies: tuple[float, float]
) -> None:
    saved = [
        json.loads((eepo.folder / f"checkpoints/global_step_{n}/eepo.json").read_text())
        for n in (1, 2)
    ]
    assert saved[0]["gate_history"] == pytest.approx(stage_1_entropies[:1], abs=1e-4)
    assert saved[1]["gate_history"] == pytest.approx(stage_1_entropies, abs=1e-3)
    kept = json.loads((resumed.folder / "checkpoints/global_step_2/eepo.json").read_text())
    assert kept["auto_lr"] == 0.5  # as in the checkpoint it began with: this run's own η is fixed
    now = entropy(resumed.completions(1))
    assert resumed.metrics()[2]["eepo/gate_entropy"] == pytest.approx(
        (saved[0]["gate_history"][0] + now) / 2
    )


def test_a_resumed_run_goes_on_from_the_same_theta(eepo: VerlRun, resumed: VerlRun) -> None:
    assert same_weights(eepo.weights(2), resumed.weights(1))
    assert not same_weights(eepo.weights(2), eepo.weights(3))
    drawn = [
        {str(row["ids"]) for row in run.completions(push)}
        for run, push in ((eepo, 2), (resumed, 1))
    ]
    assert drawn[0] == drawn[1]  # of stage 1, two of each prompt
    assert list(resumed.metrics()) == [2]
