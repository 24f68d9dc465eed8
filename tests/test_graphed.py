"""A graphed pass gives the scores and gradients of a plain one. Here it runs without graphs: the rest is the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eepo.batching import Packed
from eepo.graphed import GraphedPass, fill, sizes
from eepo.policy import Policy

TOKENS = 128


@pytest.fixture
def policies(new_model: Any) -> tuple[Policy, Policy]:
    """A padded one, and one that packs and replays."""
    model = new_model("qwen2")
    plain, graphed = Policy(copy.deepcopy(model), TOKENS, 7), Policy(copy.deepcopy(model), TOKENS, 7)
    graphed.packed = graphed._scorer.packing.adopt()
    graphed._scorer.graphs = GraphedPass(graphed.model, graphed._scorer.packing, TOKENS, capture=False)
    return plain, graphed


def losses(batch: Any, scores: Any) -> Any:
    return scores.logprobs.sum() + 0.1 * scores.entropies.sum() + 0.2 * scores.complements.sum()


def test_gradients_are_those_of_a_plain_pass(policies: tuple[Policy, Policy], ragged_pairs: Any) -> None:
    plain, graphed = policies
    pairs = ragged_pairs(30)
    expected = plain.gradient(pairs, 0.8, losses)
    for _ in range(2):  # the second time with passes that are there
        found = graphed.gradient(pairs, 0.8, losses)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)
    assert len({key[0] for key in graphed._scorer.graphs._passes}) >= 1  # type: ignore[union-attr]
    assert all(not weight.grad.any() for weight in graphed.model.parameters() if weight.grad is not None)


def test_gradients_add_up_over_micro_batches_and_are_cleared_in_place(
    policies: tuple[Policy, Policy], ragged_pairs: Any
) -> None:
    plain, graphed = policies
    pairs = ragged_pairs(12)
    for policy in policies:
        for batch in policy.micro_batches(pairs):
            losses(batch, policy.score(batch, 1.0)).backward()
    places = {}
    for (name, ours), theirs in zip(graphed.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
        places[name] = ours.grad.data_ptr()
    for policy in policies:
        policy.clear_gradients()
    assert all(weight.grad is None for weight in plain.model.parameters())
    for name, weight in graphed.model.named_parameters():
        assert weight.grad.data_ptr() == places[name]
        assert not weight.grad.any()


def test_scores_without_gradients_and_under_other_weights(policies: tuple[Policy, Policy], ragged_pairs: Any) -> None:
    pairs = ragged_pairs(9)
    others = {name: 1.1 * weight for name, weight in policies[0].named_weights()}
    for weights in (None, others):
        rows: list[dict[int, list[float]]] = []
        for policy in policies:
            found = {}
            with torch.no_grad():
                for batch in policy.micro_batches(pairs):
                    logprobs = policy.score(batch, 0.9, weights).logprobs
                    found |= {row: line[: int(m.sum())].tolist() for row, line, m in zip(batch.rows, logprobs, batch.mask, strict=True)}  # fmt: skip # noqa: E501
            rows.append(found)
        assert rows[0].keys() == rows[1].keys()
        for row, line in rows[0].items():
            assert rows[1][row] == pytest.approx(line, abs=1e-4)


def test_a_row_longer_than_a_micro_batch_goes_the_plain_way(policies: tuple[Policy, Policy], ragged_pairs: Any) -> None:
    graphed = policies[1]
    graphed._scorer.graphs = GraphedPass(graphed.model, graphed._scorer.packing, 8, capture=False)
    expected, found = (policy.gradient(ragged_pairs(5), 1.0, losses) for policy in policies)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), st.sampled_from([256, 1024, 4096]))
def test_what_is_filled_up_covers_all_tokens_and_nothing_twice(lengths: list[int], most: int) -> None:
    num_tokens = sum(lengths)
    if num_tokens > most:
        return
    part, num_rows, longest = sizes(num_tokens, len(lengths), max(lengths), most)
    assert num_tokens <= part <= most
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.arange(1, num_tokens + 1).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    into = Packed(
        torch.full((1, part), 7), torch.full((1, part), 7), torch.full((num_rows + 1,), 7, dtype=torch.int32), longest
    )
    fill(into, Packed(ids, positions, starts, max(lengths)))
    assert into.input_ids[0, :num_tokens].tolist() == ids[0].tolist()
    assert not into.input_ids[0, num_tokens:].any()
    assert into.starts[: len(lengths) + 1].tolist() == starts.tolist()
    assert int(into.starts[-1]) == part
    steps = into.starts.diff()
    assert int(steps.min()) >= 0
    assert int(steps.max()) <= longest
    for begin, end in zip(into.starts[:-1].tolist(), into.starts[1:].tolist(), strict=True):
        assert into.position_ids[0, begin:end].tolist() == list(range(end - begin))


def test_gradients_that_were_taken_away_are_missed(policies: tuple[Policy, Policy], ragged_pairs: Any) -> None:
    """A graph would go on adding to memory that nobody reads."""
    graphed = policies[1]
    [batch] = graphed.micro_batches(ragged_pairs(3))
    value = losses(batch, graphed.score(batch, 1.0))
    graphed.model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="clear_gradients"):
        value.backward()


def test_graphs_that_cannot_be_had_are_told_of(new_model: Any, caplog: Any) -> None:
    policy = Policy(new_model("qwen2"), graphs=True)
    assert policy._scorer.graphs is None
    assert len(caplog.records) == 1
    assert "model.cuda_graphs is not used" in caplog.text
