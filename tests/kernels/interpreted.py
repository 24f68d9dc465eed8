"""Kernels equal their plain versions, in Triton's interpreter on the CPU.

`test_interpreter.py` runs this file. The interpreter is slow, so tests use a handful of rows and
blocks of 16.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from eepo import kernels
from eepo.kernels import reference
from eepo.kernels.row_state import Outputs, RowState
from eepo.model import lm_head as model_head

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from eepo.kernels import lm_head as head_module
from eepo.kernels import paged_attention as attention_module
from eepo.kernels import sampling
from eepo.rollout.paged.engine import PagedEngine
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Prompt, Sampling

CPU = torch.device("cpu")
INF = math.inf
LARGEST = 2**53 - 1  # uniform random number, in units of 2^-53


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 16)
    monkeypatch.setattr(head_module, "BLOCK", 16)


def test_the_interpreted_kernels_are_selected() -> None:
    assert kernels.available(CPU)
    assert kernels.select("sample_tokens", CPU) is sampling.sample_tokens
    assert kernels.select("paged_attention", CPU) is attention_module.paged_attention


# --- sampling


def key_of(number: int, position: int) -> int:
    """Return the key whose uniform number at `position` is number · 2^-53: splitmix64, inverted."""
    wrap = (1 << 64) - 1

    def unshift(value: int, bits: int) -> int:
        original = value
        for _ in range(64 // bits + 1):
            original = value ^ (original >> bits)
        return original

    z = unshift(number << 11, 31)
    z = unshift((z * pow(reference.MIX_2, -1, 1 << 64)) & wrap, 27)
    z = unshift((z * pow(reference.MIX_1, -1, 1 << 64)) & wrap, 30)
    key = (z - (position + 1) * reference.GOLDEN) & wrap
    return key - (1 << 64) if key >> 63 else key


def state_and_outputs(num_slots: int, num_lines: int, width: int) -> tuple[RowState, Outputs]:
    """Create live slots that have sampled some tokens, each with its own line in the outputs."""
    slots = torch.arange(num_slots)
    state = RowState(
        tokens=slots + 100,
        positions=slots * 3 + 7,
        num_sampled=slots % (width - 1),
        limits=torch.full((num_slots,), width),
        keys=slots * 7919 - 12345,
        outputs=num_lines - 1 - slots,
        live=torch.ones(num_slots, dtype=torch.int32),
    )
    outputs = Outputs(
        tokens=torch.full((num_lines, width), -5, dtype=torch.int32),
        logprobs=torch.full((num_lines, width), -5.0),
        entropies=torch.full((num_lines, width), -5.0),
        lengths=torch.full((num_lines,), -5, dtype=torch.int32),
        finished=torch.full((num_lines,), -5, dtype=torch.int32),
    )
    return state, outputs


def sample_with_both(
    logits: Tensor,
    sources: list[int],
    slots: list[int],
    temperature: float,
    end_tokens: list[int],
    state: Any,
    outputs: Any,
) -> tuple[RowState, Outputs]:
    """Sample with the kernels and the plain version, compare, and return the kernels' results."""
    inverse = torch.tensor([1 / temperature if temperature else 0.0])
    inputs = logits, torch.tensor(sources), torch.tensor(slots), inverse, torch.tensor(end_tokens)
    from_plain = copy.deepcopy((state, outputs))
    reference.sample_tokens(*inputs, *from_plain)
    from_kernel = copy.deepcopy((state, outputs))
    sampling.sample_tokens(*inputs, *from_kernel)
    for ours, theirs in zip(from_kernel, from_plain, strict=True):
        for field in fields(ours):
            got, expected = getattr(ours, field.name), getattr(theirs, field.name)
            if got.dtype.is_floating_point:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5, msg=field.name)
            else:
                assert torch.equal(got, expected), field.name
    return from_kernel


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


# A partial block, a full one; a number of blocks that is a power of two, and one that is not
@pytest.mark.parametrize("vocabulary", [5, 16, 49, 80])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_sampled_tokens_equal_those_of_the_plain_version(
    vocabulary: int, temperature: float
) -> None:
    state, outputs = state_and_outputs(5, 6, 4)
    sample_with_both(
        random_logits(5, vocabulary),
        [0, 1, 2, 3, 4],
        [4, 2, 0, 1, 3],
        temperature,
        [1, -1],
        state,
        outputs,
    )


def test_rows_may_share_logits_and_logits_may_have_gaps() -> None:
    state, outputs = state_and_outputs(4, 4, 3)
    wide = random_logits(4, 96)[:, :40]  # rows with gaps between them
    assert not wide.is_contiguous()
    sample_with_both(wide, [2, 2, 0], [0, 3, 1], 1.0, [1], state, outputs)


def test_empty_slots_are_unchanged() -> None:
    state, outputs = state_and_outputs(4, 4, 3)
    state.live[1] = state.live[2] = 0
    after, written = sample_with_both(
        random_logits(4, 20), [0, 1, 2, 3], [0, 1, 2, 3], 1.0, [1], state, outputs
    )
    for field in fields(state):
        assert torch.equal(getattr(after, field.name)[1:3], getattr(state, field.name)[1:3])
    assert written.lengths[state.outputs].tolist()[1:3] == [-5, -5]
    assert (written.tokens[state.outputs[1:3]] == -5).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_ends_at_any_end_token_or_at_its_limit(temperature: float) -> None:
    state, outputs = state_and_outputs(5, 5, 6)
    state.limits = torch.tensor([1, 2, 3, 6, 6])
    logits = torch.full((5, 40), -30.0)
    for row, token in enumerate([9, 3, 35, 36, 8]):
        logits[row, token] = 30.0
    after, written = sample_with_both(
        logits, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], temperature, [3, 8, 36, -1], state, outputs
    )
    assert after.live.tolist() == [0, 0, 0, 0, 0]
    assert written.finished[state.outputs].tolist() == [0, 1, 0, 1, 1]
    assert after.tokens.tolist() == [9, 3, 35, 36, 8]


def test_greedy_selects_the_first_of_equally_likely_tokens() -> None:
    logits = torch.zeros(3, 50)
    logits[1, [20, 40]] = 2.0
    logits[2, 49] = 1.0
    state, outputs = state_and_outputs(3, 3, 3)
    after, _ = sample_with_both(logits, [0, 1, 2], [0, 1, 2], 0.0, [-1], state, outputs)
    assert after.tokens.tolist() == [0, 20, 49]


@pytest.mark.parametrize("number", [0, 1, 2**52, LARGEST - 1, LARGEST])
def test_random_numbers_near_0_and_1_select_possible_tokens(number: int) -> None:
    """The first, the last and an inner block hold no possible token."""
    logits = torch.full((2, 80), -INF)
    logits[0, [18, 25, 50]] = torch.tensor([0.0, 1.0, 0.5])
    logits[1, 40:60] = random_logits(1, 20)
    state, outputs = state_and_outputs(2, 2, 3)
    state.keys = torch.tensor([key_of(number, position) for position in state.num_sampled.tolist()])
    assert reference.uniforms(state.keys, state.num_sampled).tolist() == [number * 2.0**-53] * 2
    after, written = sample_with_both(logits, [0, 1], [0, 1], 1.0, [-1], state, outputs)
    logprobs = written.logprobs[state.outputs, state.num_sampled]
    assert logprobs.isfinite().all()
    assert written.entropies[state.outputs, state.num_sampled].isfinite().all()
    if number == 0:
        assert after.tokens.tolist() == [18, 40]
    if number == LARGEST:
        assert after.tokens.tolist() == [50, 59]


def test_a_random_number_of_0_stays_in_a_block_of_tiny_mass() -> None:
    logits = torch.full((1, 48), -100.0)
    logits[0, 40] = 3.0
    state, outputs = state_and_outputs(1, 1, 3)
    state.keys = torch.tensor([key_of(0, 0)])
    inverse = torch.tensor([1.0])
    sampling.sample_tokens(
        logits, torch.tensor([0]), torch.tensor([0]), inverse, torch.tensor([-1]), state, outputs
    )
    assert 0 <= state.tokens.item() < 48
    assert outputs.logprobs[0, 0] == pytest.approx(
        float(logits.log_softmax(1)[0, state.tokens.item()]), abs=1e-4
    )


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_huge_logits_do_not_overflow(size: float) -> None:
    logits = random_logits(3, 40).sign() * size
    logits[0] = -size
    logits[1, 7] = 2 * size
    state, outputs = state_and_outputs(3, 3, 3)
    inverse, end_tokens = torch.tensor([1.0]), torch.tensor([-1])
    rows = torch.arange(3)
    sampling.sample_tokens(logits, rows, rows, inverse, end_tokens, state, outputs)
    expected = logits.double().log_softmax(1)
    tokens = state.tokens
    assert tokens[1] == 7
    got = outputs.logprobs[state.outputs, state.num_sampled - 1]
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected[rows, tokens], rtol=0, atol=1e-6 * size)
    assert outputs.entropies[state.outputs, state.num_sampled - 1].isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_at_the_borders_of_blocks(temperature: float) -> None:
    """The last block is partial."""
    for token in (0, 15, 16, 31, 32, 36):
        state, outputs = state_and_outputs(1, 1, 3)
        state.keys = torch.tensor([key_of(int((token + 0.5) / 37 * 2**53), 0)])
        after, written = sample_with_both(
            torch.full((1, 37), -2.5), [0], [0], temperature, [-1], state, outputs
        )
        assert after.tokens.item() == (token if temperature else 0)
        assert written.entropies[0, 0] == pytest.approx(math.log(37), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_a_token_of_the_vocabulary(temperature: float) -> None:
    """A diverged model must not cause reads or writes out of bounds."""
    state, outputs = state_and_outputs(2, 2, 3)
    logits, rows = random_logits(2, 37), torch.arange(2)
    # Not all of a row: the interpreter finds no maximum there.
    logits[0, ::2] = logits[1, 36] = math.nan
    inverse = torch.tensor([temperature])
    sampling.sample_tokens(logits, rows, rows, inverse, torch.tensor([-1]), state, outputs)
    assert all(0 <= token < 37 for token in state.tokens.tolist())


# --- paged attention


def cache_of(
    num_rows: int,
    num_key_heads: int,
    size: int,
    page: int,
    positions: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Create keys and values that are NaN where unwritten, and tables that scatter the pages."""
    generator = torch.Generator().manual_seed(3)
    width = max(positions) // page + 2
    order = (torch.randperm(num_rows * width, generator=generator) + 1).view(num_rows, width)
    pages = torch.full((2, num_rows * width + 1, num_key_heads, page, size), math.nan, dtype=dtype)
    tables = torch.zeros(num_rows, width, dtype=torch.int32)
    for row, position in enumerate(positions):
        num_pages = position // page + 1
        tables[row, :num_pages] = order[row, :num_pages]
        for index in range(position):
            entry = torch.randn((2, num_key_heads, size), generator=generator).to(dtype)
            pages[:, order[row, index // page], :, index % page] = entry
    pages[:, 0] = 0  # the scratch page
    return pages[0], pages[1], tables


def attend_with_both(
    heads: int,
    key_heads: int,
    size: int,
    positions: list[int],
    page: int = 16,
    dtype: Any = torch.float32,
    **options: Any,
) -> None:
    generator = torch.Generator().manual_seed(4)
    num_rows, page = len(positions), 16
    # [1, heads, rows, size] as in a model: rows are not contiguous
    query, key, value = (
        torch.randn(1, n, num_rows, size, generator=generator).to(dtype)[0].transpose(0, 1)
        for n in (heads, key_heads, key_heads)
    )
    keys, values, tables = cache_of(num_rows, key_heads, size, page, positions, dtype)
    position_tensor, scale = torch.tensor(positions), size**-0.5
    ours, theirs = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    got = attention_module.paged_attention(
        query, key, value, *ours, tables, position_tensor, scale, **options
    )
    expected = reference.paged_attention(
        query, key, value, *theirs, tables, position_tensor, scale, **options
    )
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, **close)
    # Only the new token was written.
    for pages, expected_pages in zip(ours, theirs, strict=True):
        assert torch.equal(pages.nan_to_num(99.0), expected_pages.nan_to_num(99.0))


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(number: int) -> None:
        monkeypatch.setattr(attention_module, "num_splits", lambda num_programs: number)

    return set_to


@pytest.mark.parametrize(("heads", "key_heads", "size"), [
    (2, 2, 16), (6, 1, 8), (7, 1, 24), (8, 1, 12), (12, 2, 16), (17, 1, 16), (2, 1, 80),
])  # fmt: skip
def test_group_sizes_and_head_sizes(heads: int, key_heads: int, size: int, splits: Any) -> None:
    splits(1)
    attend_with_both(heads, key_heads, size, [5, 0, 18])


@pytest.mark.parametrize("number", [1, 2, 8])
def test_positions_at_page_borders_and_empty_splits(number: int, splits: Any) -> None:
    splits(number)
    attend_with_both(2, 1, 16, [0, 1, 15, 16, 17, 32, 47, 64])


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 100])
def test_sliding_windows(window: int, number: int, splits: Any) -> None:
    splits(number)
    attend_with_both(2, 1, 8, [0, 16, 17, 40], window=window)


@pytest.mark.parametrize("number", [1, 2])
def test_softcaps_with_and_without_a_window(number: int, splits: Any) -> None:
    splits(number)
    attend_with_both(2, 1, 16, [3, 20], softcap=0.7)
    attend_with_both(2, 1, 16, [3, 20], softcap=5.0, window=6)


def test_half_precision(splits: Any) -> None:
    """fp16 only: the interpreter multiplies bf16 numbers as if they were integers."""
    for number in (1, 2):
        splits(number)
        attend_with_both(4, 2, 16, [3, 20, 33], dtype=torch.float16)


def test_tables_and_positions_may_have_more_rows_than_the_query() -> None:
    keys, values, tables = cache_of(3, 1, 16, 16, [4, 20, 8], torch.float32)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 16, generator=generator) for n in (2, 1, 1))
    inputs = query, key, value, keys, values, tables, torch.tensor([4, 20, 8]), 0.25
    torch.testing.assert_close(
        attention_module.paged_attention(*inputs), reference.paged_attention(*inputs)
    )


def test_the_number_of_splits_falls_with_the_number_of_programs() -> None:
    expected = {1: 16, 16: 16, 64: 4, 128: 2, 255: 2, 256: 1, 4096: 1}
    assert {number: attention_module.num_splits(number) for number in expected} == expected


def test_fewer_pages_are_loaded_ahead_if_shared_memory_is_small() -> None:
    """bf16 pages of 64 tokens, head sizes 64 to 256, GPUs with 227 and 99 KB per program."""
    stages, page = attention_module.num_stages, 2 * 2 * 64
    assert [stages(page * size, 227 << 10) for size in (64, 128, 256)] == [5, 5, 3]
    assert [stages(page * size, 99 << 10) for size in (64, 128)] == [5, 3]


# --- LM head


def head_with_both(
    logits: Tensor, targets: Tensor, scale: float, tolerance: float = 2e-5
) -> list[Tensor]:
    """Compute statistics and gradient with kernels and plain torch, compare, return the former."""
    torch.manual_seed(0)
    upstream = [torch.randn(len(logits)) for _ in range(3)]
    results = []
    for plain in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EEPO_KERNELS", "0" if plain else "1")
            statistics = model_head._statistics(logits.clone(), targets, scale)
            lse, _, entropies, complements = statistics
            inputs = [targets, lse, entropies, complements, *upstream]
            gradient = model_head._gradient(logits.clone(), inputs, scale, torch.float32)
            results.append([*statistics, gradient])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=tolerance)
    return results[0]


@pytest.mark.parametrize("vocabulary", [3, 16, 37])
@pytest.mark.parametrize("scale", [1.0, 1.6])
def test_statistics_and_gradient_equal_the_plain_version(vocabulary: int, scale: float) -> None:
    logits = random_logits(4, vocabulary)
    head_with_both(logits, torch.tensor([0, 2, vocabulary - 1, 1]), scale)


def test_the_gradient_has_the_requested_dtype() -> None:
    logits, targets = random_logits(4, 37), torch.tensor([0, 2, 36, 1])
    lse, _, entropies, complements = model_head._statistics(logits.clone(), targets, 1.0)
    inputs = [targets, lse, entropies, complements, *(torch.randn(4) for _ in range(3))]
    exact, rounded = (
        model_head._gradient(logits.clone(), inputs, 1.0, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=2**-7, atol=1e-6)


def test_a_nearly_certain_token_has_an_exact_complement() -> None:
    logits = random_logits(3, 40)
    logits[0, 5], logits[1, 39], logits[2, 0] = 60.0, 95.0, -60.0
    _, logprobs, entropies, complements, gradient = head_with_both(
        logits, torch.tensor([5, 39, 0]), 1.0
    )
    assert complements[0].item() == pytest.approx(
        logits[0].double()[torch.arange(40) != 5].logsumexp(0).item() - 60
    )
    assert logprobs[:2].tolist() == [0.0, 0.0]
    assert gradient.isfinite().all()
    assert entropies.min() >= -1e-5


def test_impossible_tokens_cause_no_nan() -> None:
    """A model may forbid tokens, also all tokens of a block."""
    logits = random_logits(3, 64)
    logits[0, :20] = logits[1, 20:] = -INF
    logits[2, ::2] = -INF
    results = head_with_both(logits, torch.tensor([30, 3, 33]), 1.0)
    assert all(tensor.isfinite().all() for tensor in results)


def test_rows_of_logits_may_have_gaps_between_them() -> None:
    wide = random_logits(3, 60)
    targets = torch.tensor([1, 2, 30])
    got = head_module.statistics(wide[:, :37], targets, 1.0)
    expected = head_module.statistics(wide[:, :37].contiguous(), targets, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# --- paged engine with kernels


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=53, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data.mul_(5)  # far from uniform
    return model


class NoTokenizer:
    eos_token_id = 1

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return [""] * len(rows)


def test_the_engine_samples_the_same_tokens_with_kernels(splits: Any) -> None:
    splits(1)
    prompts = [
        Prompt(str(index), "", ids) for index, ids in enumerate([(5, 9, 30), (7,), (3, 3, 8, 40)])
    ]
    sampling = Sampling(temperature=0.8, max_new_tokens=4, seed=3)
    model = tiny_model()
    engine = PagedEngine(copy.deepcopy(model), NoTokenizer())
    assert engine.unsupported_reason() == ""
    got = engine.generate(prompts, 2, sampling)
    expected = TransformersEngine(model, NoTokenizer()).generate(prompts, 2, sampling)
    for ours, theirs in zip(got, expected, strict=True):
        for completion, plain in zip(ours, theirs, strict=True):
            assert completion.token_ids == plain.token_ids
            assert completion.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
