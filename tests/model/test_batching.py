"""Micro-batches hold every row once, in bounds, with each target under the position that predicts it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eepo.model.batching import MicroBatch, Packed, evenly, micro_batches
from eepo.types import Completion, Prompt

CPU = torch.device("cpu")
Pairs = list[tuple[Prompt, Completion]]

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=14)


def pairs_of(shapes: list[tuple[int, int]]) -> Pairs:
    """Token ids that never repeat, so that a misplaced one is seen."""
    fresh = itertools.count(1)
    pairs = []
    for index, (num_prompt, num_completion) in enumerate(shapes):
        prompt = Prompt(str(index), "", tuple(next(fresh) for _ in range(num_prompt)))
        ids = tuple(next(fresh) for _ in range(num_completion))
        pairs.append((prompt, Completion(ids, tuple(-float(i) for i in ids), "", True)))
    return pairs


def size(batch: MicroBatch) -> int:
    return batch.inputs.input_ids.numel()


@given(lengths, st.integers(1, 120), st.booleans())
def test_every_row_once_within_the_token_bound(
    shapes: list[tuple[int, int]], max_tokens: int, packed: bool
) -> None:
    batches = list(micro_batches(pairs_of(shapes), max_tokens, CPU, packed))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(shapes)))
    for batch in batches:
        assert size(batch) <= max_tokens or len(batch.rows) == 1
        whole = [sum(shapes[row]) for row in batch.rows]
        assert size(batch) == (sum(whole) if packed else max(whole) * len(whole))
        assert batch.mask.shape == (len(batch.rows), max(shapes[row][1] for row in batch.rows))


@given(lengths, st.integers(1, 120), st.booleans())
def test_tensors_are_the_rows_they_name(
    shapes: list[tuple[int, int]], max_tokens: int, packed: bool
) -> None:
    pairs = pairs_of(shapes)
    for batch in micro_batches(pairs, max_tokens, CPU, packed):
        flat = batch.inputs.input_ids.flatten()
        # the state at a position predicts the token after it
        assert torch.equal(flat[batch.predictors + 1], batch.targets)
        assert torch.equal(batch.spread(batch.targets) > 0, batch.mask)
        targets = batch.spread(batch.targets)
        for place, row in enumerate(batch.rows):
            prompt, completion = pairs[row]
            whole, length = prompt.token_ids + completion.token_ids, len(completion.token_ids)
            assert tuple(targets[place, :length].tolist()) == completion.token_ids
            assert batch.mask[place].tolist() == [True] * length + [False] * (
                batch.mask.shape[1] - length
            )
            if isinstance(batch.inputs, Packed):
                start, end = batch.inputs.starts[place : place + 2].tolist()
                assert tuple(flat[start:end].tolist()) == whole
                assert batch.inputs.position_ids[0, start:end].tolist() == list(range(len(whole)))
                assert batch.inputs.longest >= len(whole)
            else:
                assert tuple(batch.inputs.input_ids[place, : len(whole)].tolist()) == whole
                filled = [1] * len(whole) + [0] * (batch.inputs.input_ids.shape[1] - len(whole))
                assert batch.inputs.attention_mask[place].tolist() == filled


grouped = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1
)


@given(grouped, st.integers(1, 120))
def test_completions_of_one_prompt_share_it(
    groups: list[tuple[int, list[int]]], max_tokens: int
) -> None:
    """A token is there once; each sequence still finds all of its own, in order."""
    fresh = itertools.count(1)
    pairs = []
    for index, (num_prompt, completions) in enumerate(groups):
        prompt = Prompt(str(index), "", tuple(next(fresh) for _ in range(num_prompt)))
        pairs += [
            (prompt, Completion(tuple(next(fresh) for _ in range(n)), (0.0,) * n, "", True))
            for n in completions
        ]
    seen = []
    for batch in micro_batches(pairs, max_tokens, CPU, packed=True):
        assert size(batch) <= max_tokens or len(batch.rows) == 1
        inputs = batch.inputs
        assert isinstance(inputs, Packed)
        flat, positions = inputs.input_ids[0], inputs.position_ids[0]
        assert len(flat.unique()) == len(flat)
        assert (inputs.whole is not None) == (len(groups) < len(pairs))
        places = inputs.whole.places if inputs.whole else torch.arange(len(flat))
        starts = inputs.whole.starts if inputs.whole else inputs.starts
        states = iter(batch.predictors.tolist())
        for place, row in enumerate(batch.rows):
            prompt, completion = pairs[row]
            own = places[starts[place] : starts[place + 1]]
            assert tuple(flat[own].tolist()) == prompt.token_ids + completion.token_ids
            assert positions[own].tolist() == list(range(len(own)))
            begin, end = inputs.starts[place : place + 2].tolist()
            assert own[begin - end :].tolist() == list(range(begin, end))  # what is its own ends it
            assert [next(states) for _ in completion.token_ids] == own[
                len(prompt.token_ids) - 1 : -1
            ].tolist()
            assert inputs.longest >= len(own)
        assert starts[-1] == len(places)
        seen += batch.rows
    assert seen == list(range(len(pairs)))


def test_prompts_that_read_alike_are_shared_whoever_made_them() -> None:
    pairs = [(Prompt(name, "", (1, 2)), Completion((3,), (0.0,), "", True)) for name in "ab"]
    [batch] = micro_batches(pairs, 100, CPU, packed=True)
    assert batch.inputs.input_ids.tolist() == [[1, 2, 3, 3]]


def test_some_rows_keep_their_places() -> None:
    pairs = pairs_of([(1, 2), (5, 7), (2, 4), (3, 1), (4, 7)])
    batches = list(micro_batches(pairs, 100, CPU, rows=[3, 1, 4]))
    assert [batch.rows for batch in batches] == [[1, 4, 3]]
    assert list(micro_batches(pairs, 100, CPU, rows=[])) == []


@given(st.integers(1, 40), st.integers(0, 50))
def test_evenly_takes_what_it_may(count: int, most: int) -> None:
    places = evenly(count, most)
    assert len(places) == (min(count, most) if most else count)
    assert places == sorted(set(places))
    assert all(0 <= place < count for place in places)
    assert max((b - a for a, b in itertools.pairwise(places)), default=0) <= -(
        -count // len(places)
    )


def test_pad_and_pick_follow_the_rows_when_they_are_sorted_by_length() -> None:
    shapes = [(1, 2), (5, 7), (2, 4), (3, 1), (4, 7)]
    pairs = pairs_of(shapes)
    per_row = [10.0 * row for row in range(len(pairs))]
    seen = 0
    for batch in micro_batches(pairs, 24, CPU):
        padded = batch.pad([completion.logprobs for _, completion in pairs])
        torch.testing.assert_close(padded, -batch.spread(batch.targets).float())
        assert batch.pick(per_row).tolist() == [per_row[row] for row in batch.rows]
        seen += len(batch.rows)
    assert seen == len(pairs)


def test_a_row_longer_than_the_bound_goes_alone() -> None:
    batches = list(micro_batches(pairs_of([(3, 40), (2, 2), (2, 3)]), 12, CPU))
    assert [batch.rows for batch in batches] == [[0], [2, 1]]


@pytest.mark.parametrize("seed", range(3))
def test_sorting_by_length_keeps_padding_small(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(4, rng.randint(1, 100)) for _ in range(200)]
    padded = sum(size(batch) for batch in micro_batches(pairs_of(shapes), 1024, CPU))
    assert padded < 1.1 * sum(map(sum, shapes))
