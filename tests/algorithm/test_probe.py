"""The probe measures what an unlearning step does, without changing the policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.algorithm import SearchResult, lr_for_kl
from eepo.algorithm.probe import Effect, Probe, probe_rows, unlearn_gradient
from eepo.algorithm.unlearning import UnlearnBatch
from eepo.config import AlgorithmConfig
from eepo.model.policy import Policy
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling

Pairs = list[tuple[Prompt, Completion]]
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def demo_pairs(demo_model: Any, tokenizer: Any, demo_prompts: list[Prompt]) -> Pairs:
    engine = TransformersEngine(copy.deepcopy(demo_model), tokenizer)
    groups = engine.generate(demo_prompts[:8], 3, Sampling(1.0, 24, stream="probe"))
    prompts = demo_prompts[:8]
    return [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]


@pytest.fixture(scope="module")
def demo_policy(demo_model: Any) -> Policy:
    return Policy(copy.deepcopy(demo_model))


def is_selected(row: int) -> bool:
    """Leave some rows out of the loss, so that a loss over the wrong rows is noticed."""
    return row % 5 != 3


def unlearn_batch(pairs: Pairs, stage1_rows: list[int] | None = None, **knobs: Any) -> UnlearnBatch:
    """Return a batch whose loss is the mean log-probability: descending it unlearns."""
    rows = list(range(len(pairs)))
    options = AlgorithmConfig(**{"gate": "always", "unlearn_loss": "nll"} | knobs)
    selected = [is_selected(row) for row in rows]
    return UnlearnBatch(pairs, rows, selected, stage1_rows or rows, options)


@pytest.fixture(scope="module")
def gradient(demo_policy: Policy, demo_pairs: Pairs) -> Weights:
    batch = unlearn_batch(demo_pairs)
    gradient, num_gated = unlearn_gradient(demo_policy, batch, Probe(demo_policy, batch))
    lengths = [len(c.token_ids) for row, (_, c) in enumerate(demo_pairs) if is_selected(row)]
    assert int(num_gated) == sum(lengths)
    return gradient


def moved_weights(policy: Policy, gradient: Weights, lr: float) -> Weights:
    return {name: weight - lr * gradient[name] for name, weight in policy.named_weights()}


def moved_model(policy: Policy, gradient: Weights, lr: float) -> Any:
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.sub_(lr * gradient[name])
    return model


def plain_kl(model: Any, moved: Any, pairs: Pairs, plain_scores: Any) -> float:
    """Average k3 over all tokens in float64, one row at a time."""
    with torch.no_grad():
        after, before = (
            torch.cat([plain_scores(scorer, *pair).logprobs for pair in pairs])
            for scorer in (moved, model)
        )
    gaps = after - before
    return (gaps.exp() - 1 - gaps).mean().item()


@pytest.mark.parametrize(("target", "start"), [(1e-3, 1e-3), (1e-2, 1e-1), (1e-4, 1e-1)])
def test_the_rate_of_the_search_meets_the_kl_target(
    target: float,
    start: float,
    demo_policy: Policy,
    demo_pairs: Pairs,
    gradient: Weights,
    plain_scores: Any,
) -> None:
    probe = Probe(demo_policy, unlearn_batch(demo_pairs))
    tries: list[float] = []

    def kl_of(lr: float) -> float:
        tries.append(lr)
        return probe.measure(moved_weights(demo_policy, gradient, lr)).kl

    found = lr_for_kl(kl_of, target, SearchResult(start))
    lr = found.lr
    moved = moved_model(demo_policy, gradient, lr)
    kl = plain_kl(demo_policy.model, moved, demo_pairs, plain_scores)
    assert kl == pytest.approx(target, rel=0.5)
    assert len(tries) > 1
    tries.clear()
    assert lr_for_kl(kl_of, target, found) == found
    assert tries == [lr]  # the last answer is good enough, so one try suffices


def test_an_effect_equals_a_plain_pass_and_the_policy_stays_unchanged(
    demo_policy: Policy,
    demo_pairs: Pairs,
    gradient: Weights,
    plain_scores: Any,
    fingerprint: Any,
) -> None:
    def policy_state() -> str:
        return fingerprint([(weight, weight.grad) for weight in demo_policy.model.parameters()])

    before = policy_state()
    stage1_rows = list(range(0, len(demo_pairs), 2))
    batch = unlearn_batch(demo_pairs, stage1_rows, probe_completions=6)
    effect = Probe(demo_policy, batch).measure(moved_weights(demo_policy, gradient, 3e-3))
    assert policy_state() == before

    probed = [stage1_rows[0], *stage1_rows[1::3]]  # 6 // 4 from the start, the others spread
    moved = moved_model(demo_policy, gradient, 3e-3)
    probed_pairs = [demo_pairs[row] for row in probed]
    kl = plain_kl(demo_policy.model, moved, probed_pairs, plain_scores)
    assert effect.kl == pytest.approx(kl, rel=1e-2)
    assert 0 < sum(map(is_selected, probed)) < len(probed)
    with torch.no_grad():
        for model, loss in ((demo_policy.model, effect.loss_before), (moved, effect.loss_after)):
            means = [
                plain_scores(model, *demo_pairs[row]).logprobs.mean().item()
                for row in probed
                if is_selected(row)
            ]
            assert loss == pytest.approx(sum(means) / len(probed), rel=1e-3)
        totals = {
            row: plain_scores(moved, *demo_pairs[row]).logprobs.sum().item() for row in probed
        }
    assert effect.logprobs_after == pytest.approx(totals, rel=1e-3)
    assert effect.loss_after < effect.loss_before


def test_equal_weights_have_no_effect(demo_policy: Policy, demo_pairs: Pairs) -> None:
    probe = Probe(demo_policy, unlearn_batch(demo_pairs, [0, 5]))
    effect = probe.measure(dict(demo_policy.named_weights()))
    assert effect.kl == 0.0
    assert effect.loss_after == effect.loss_before


def test_rows_that_are_not_unlearned_still_count_for_the_kl(
    demo_policy: Policy, demo_pairs: Pairs, gradient: Weights
) -> None:
    weights, rows = moved_weights(demo_policy, gradient, 3e-3), list(range(6))
    options = AlgorithmConfig(gate="always", unlearn_loss="nll")

    def measure(flag: bool) -> Effect:
        batch = UnlearnBatch(demo_pairs, rows, [flag] * len(demo_pairs), rows, options)
        return Probe(demo_policy, batch).measure(weights)

    nothing, everything = measure(False), measure(True)
    assert nothing.kl == everything.kl > 0
    assert nothing.loss_before == nothing.loss_after == 0.0
    assert everything.loss_before < 0


@pytest.mark.parametrize(
    ("num_rows", "most", "expected"),
    [
        (3, 64, [0, 1, 2]),
        (12, 6, [0, 1, 4, 7, 10]),
        (8, 4, [0, 1, 4, 7]),
        (16, 8, [0, 1, 2, 5, 8, 11, 14]),
        (5, 1, [0]),
    ],
)
def test_a_quarter_of_the_probed_rows_is_from_the_start_and_the_others_are_spread(
    num_rows: int, most: int, expected: list[int]
) -> None:
    assert probe_rows(range(num_rows), most) == expected
    assert len(expected) <= most


def test_recorded_scores_equal_those_computed_by_the_probe(
    demo_model: Any, demo_pairs: Pairs, gradient: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient pass records some of the probed rows. The probe scores only the others."""
    policy, stage1_rows = Policy(copy.deepcopy(demo_model), 150), [0, 2, 3, 7, 10]
    batch = unlearn_batch(demo_pairs[:12], stage1_rows)
    recording, fresh = Probe(policy, batch), Probe(policy, batch)
    assert sorted(fresh.rows) == stage1_rows
    unlearn_gradient(policy, batch, recording)
    scored: list[int] = []
    score = policy.score

    def counting_score(batch: Any, *others: Any) -> Any:
        scored.extend(batch.rows)
        return score(batch, *others)

    monkeypatch.setattr(policy, "score", counting_score)
    with torch.no_grad():
        recorded, computed = recording.before, fresh.before
    assert not is_selected(3)
    assert sorted(scored) == sorted([3, *stage1_rows])
    for (batch_a, scores_a), (batch_b, scores_b) in zip(recorded, computed, strict=True):
        assert batch_a.rows == batch_b.rows
        for column_a, column_b in zip(
            vars(scores_a).values(), vars(scores_b).values(), strict=True
        ):
            assert not column_a.requires_grad
            torch.testing.assert_close(column_a, column_b, rtol=1e-5, atol=1e-5)
    weights = moved_weights(policy, gradient, 1e-2)
    actual, expected = recording.measure(weights), fresh.measure(weights)
    assert actual.kl == pytest.approx(expected.kl, rel=1e-3)
    assert actual.loss_before == pytest.approx(expected.loss_before, rel=1e-5)
    assert actual.logprobs_after == pytest.approx(expected.logprobs_after, rel=1e-5)
