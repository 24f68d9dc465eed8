"""Micro-batches hold every row once and respect the token limit; each target has its predictor."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eepo.model.batching import MicroBatch, Packed, evenly_spaced, micro_batches
from eepo.types import Completion, Prompt

CPU = torch.device("cpu")
Pairs = list[tuple[Prompt, Completion]]

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=14)


def pairs_of(shapes: list[tuple[int, int]]) -> Pairs:
    """Build pairs whose token ids never repeat, so that a misplaced token is noticed."""
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
def test_every_row_appears_once_within_the_token_limit(
    shapes: list[tuple[int, int]], max_tokens: int, packed: bool
) -> None:
    batches = list(micro_batches(pairs_of(shapes), max_tokens, CPU, packed))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(shapes)))
    for batch in batches:
        assert size(batch) <= max_tokens or len(batch.rows) == 1
        lengths = [sum(shapes[row]) for row in batch.rows]
        expected = sum(lengths) if packed else max(lengths) * len(lengths)
        assert size(batch) == expected
        assert batch.mask.shape == (len(batch.rows), max(shapes[row][1] for row in batch.rows))


@given(lengths, st.integers(1, 120), st.booleans())
def test_tensors_hold_the_tokens_of_their_rows(
    shapes: list[tuple[int, int]], max_tokens: int, packed: bool
) -> None:
    pairs = pairs_of(shapes)
    for batch in micro_batches(pairs, max_tokens, CPU, packed):
        flat = batch.inputs.input_ids.flatten()
        # The state at a position predicts the next token.
        assert torch.equal(flat[batch.predictors + 1], batch.targets)
        targets = batch.scatter(batch.targets)
        assert torch.equal(targets > 0, batch.mask)
        for index, row in enumerate(batch.rows):
            prompt, completion = pairs[row]
            sequence, length = prompt.token_ids + completion.token_ids, len(completion.token_ids)
            assert tuple(targets[index, :length].tolist()) == completion.token_ids
            padding = batch.mask.shape[1] - length
            assert batch.mask[index].tolist() == [True] * length + [False] * padding
            if isinstance(batch.inputs, Packed):
                start, end = batch.inputs.layout.cu_seqlens[index : index + 2].tolist()
                assert tuple(flat[start:end].tolist()) == sequence
                positions = batch.inputs.position_ids[0, start:end].tolist()
                assert positions == list(range(len(sequence)))
                assert batch.inputs.layout.max_seqlen >= len(sequence)
            else:
                assert tuple(batch.inputs.input_ids[index, : len(sequence)].tolist()) == sequence
                padding = batch.inputs.input_ids.shape[1] - len(sequence)
                mask = [1] * len(sequence) + [0] * padding
                assert batch.inputs.attention_mask[index].tolist() == mask


grouped = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1
)


@given(grouped, st.integers(1, 120))
def test_completions_of_one_prompt_share_its_tokens(
    groups: list[tuple[int, list[int]]], max_tokens: int
) -> None:
    """Every token is stored once, and each full sequence lists all of its tokens in order."""
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
        cu_seqlens, max_seqlen, full = inputs.layout
        assert (full is not None) == (len(groups) < len(pairs))
        token_indices = full.token_indices if full else torch.arange(len(flat))
        full_cu_seqlens = full.cu_seqlens if full else cu_seqlens
        predictors = iter(batch.predictors.tolist())
        for index, row in enumerate(batch.rows):
            prompt, completion = pairs[row]
            sequence = token_indices[full_cu_seqlens[index] : full_cu_seqlens[index + 1]]
            assert tuple(flat[sequence].tolist()) == prompt.token_ids + completion.token_ids
            assert positions[sequence].tolist() == list(range(len(sequence)))
            start, end = cu_seqlens[index : index + 2].tolist()
            # The tokens stored for this row alone are the end of its sequence.
            assert sequence[start - end :].tolist() == list(range(start, end))
            expected = sequence[len(prompt.token_ids) - 1 : -1].tolist()
            assert [next(predictors) for _ in completion.token_ids] == expected
            assert max_seqlen >= len(sequence)
        assert full_cu_seqlens[-1] == len(token_indices)
        seen += batch.rows
    assert seen == list(range(len(pairs)))


def test_prompts_with_equal_tokens_and_different_ids_are_shared() -> None:
    pairs = [(Prompt(name, "", (1, 2)), Completion((3,), (0.0,), "", True)) for name in "ab"]
    [batch] = micro_batches(pairs, 100, CPU, packed=True)
    assert batch.inputs.input_ids.tolist() == [[1, 2, 3, 3]]


def test_selected_rows_keep_their_indices() -> None:
    pairs = pairs_of([(1, 2), (5, 7), (2, 4), (3, 1), (4, 7)])
    batches = list(micro_batches(pairs, 100, CPU, rows=[3, 1, 4]))
    assert [batch.rows for batch in batches] == [[1, 4, 3]]
    assert list(micro_batches(pairs, 100, CPU, rows=[])) == []


@given(st.integers(1, 40), st.integers(0, 50))
def test_evenly_spaced_returns_at_most_that_many_indices(count: int, most: int) -> None:
    indices = evenly_spaced(count, most)
    assert len(indices) == (min(count, most) if most else count)
    assert indices == sorted(set(indices))
    assert all(0 <= index < count for index in indices)
    gaps = [after - before for before, after in itertools.pairwise(indices)]
    assert max(gaps, default=0) <= -(-count // len(indices))


def test_pad_and_pick_follow_the_rows_when_they_are_sorted_by_length() -> None:
    shapes = [(1, 2), (5, 7), (2, 4), (3, 1), (4, 7)]
    pairs = pairs_of(shapes)
    per_row = [10.0 * row for row in range(len(pairs))]
    seen = 0
    for batch in micro_batches(pairs, 24, CPU):
        padded = batch.pad([completion.logprobs for _, completion in pairs])
        torch.testing.assert_close(padded, -batch.scatter(batch.targets).float())
        assert batch.pick(per_row).tolist() == [per_row[row] for row in batch.rows]
        seen += len(batch.rows)
    assert seen == len(pairs)


def test_a_row_longer_than_the_limit_is_alone_in_its_batch() -> None:
    batches = list(micro_batches(pairs_of([(3, 40), (2, 2), (2, 3)]), 12, CPU))
    assert [batch.rows for batch in batches] == [[0], [2, 1]]


@pytest.mark.parametrize("seed", range(3))
def test_sorting_by_length_keeps_padding_small(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(4, rng.randint(1, 100)) for _ in range(200)]
    padded = sum(size(batch) for batch in micro_batches(pairs_of(shapes), 1024, CPU))
    assert padded < 1.1 * sum(map(sum, shapes))
