"""Each kernel equals its plain form, in Triton's interpreter on the CPU. `test_interpreter.py` starts this file.

The interpreter is slow: a handful of rows, and blocks of 16.
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
from eepo.model import lm_head as plain_head

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
LAST = 2**53 - 1  # the largest draw, in units of 2^-53


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 16)
    monkeypatch.setattr(head_module, "BLOCK", 16)


def test_these_are_the_kernels_that_would_be_chosen() -> None:
    assert kernels.available(CPU)
    assert kernels.chosen("sample_tokens", CPU) is sampling.sample_tokens
    assert kernels.chosen("paged_attention", CPU) is attention_module.paged_attention


# --- draw


def key_of(draw: int, position: int) -> int:
    """The row key whose random number at `position` is draw · 2^-53: splitmix64, backwards."""
    wrap = (1 << 64) - 1

    def unshift(value: int, bits: int) -> int:
        found = value
        for _ in range(64 // bits + 1):
            found = value ^ (found >> bits)
        return found

    z = unshift(draw << 11, 31)
    z = unshift((z * pow(reference.MIX_2, -1, 1 << 64)) & wrap, 27)
    z = unshift((z * pow(reference.MIX_1, -1, 1 << 64)) & wrap, 30)
    key = (z - (position + 1) * reference.GOLDEN) & wrap
    return key - (1 << 64) if key >> 63 else key


def books(num_slots: int, num_lines: int, width: int) -> tuple[RowState, Outputs]:
    """Slots in the midst of things, all alive: each with a position, a limit and a line of its own."""
    every = torch.arange(num_slots)
    state = RowState(
        tokens=every + 100,
        positions=every * 3 + 7,
        num_drawn=every % (width - 1),
        limits=torch.full((num_slots,), width),
        keys=every * 7919 - 12345,
        outputs=num_lines - 1 - every,
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


def drawn_by_both(
    logits: Tensor,
    sources: list[int],
    slots: list[int],
    temperature: float,
    ends: list[int],
    state: Any,
    outputs: Any,
) -> tuple[RowState, Outputs]:
    """What the kernels made of `state` and `outputs`, which is what the plain form makes of them."""
    inverse = torch.tensor([1 / temperature if temperature else 0.0])
    given = logits, torch.tensor(sources), torch.tensor(slots), inverse, torch.tensor(ends)
    theirs = copy.deepcopy((state, outputs))
    reference.sample_tokens(*given, *theirs)
    ours = copy.deepcopy((state, outputs))
    sampling.sample_tokens(*given, *ours)
    for one, other in zip(ours, theirs, strict=True):
        for part in fields(one):
            got, expected = getattr(one, part.name), getattr(other, part.name)
            if got.dtype.is_floating_point:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5, msg=part.name)
            else:
                assert torch.equal(got, expected), part.name
    return ours


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "vocabulary", [5, 16, 49, 80]
)  # one block, not a whole one; powers of two and not
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_draws_are_those_of_the_plain_form(vocabulary: int, temperature: float) -> None:
    state, outputs = books(5, 6, 4)
    drawn_by_both(
        random_logits(5, vocabulary),
        [0, 1, 2, 3, 4],
        [4, 2, 0, 1, 3],
        temperature,
        [1, -1],
        state,
        outputs,
    )


def test_rows_may_share_logits_and_lie_apart() -> None:
    state, outputs = books(4, 4, 3)
    wide = random_logits(4, 96)[:, :40]  # rows that do not touch
    assert not wide.is_contiguous()
    drawn_by_both(wide, [2, 2, 0], [0, 3, 1], 1.0, [1], state, outputs)


def test_dead_slots_are_left_alone() -> None:
    state, outputs = books(4, 4, 3)
    state.live[1] = state.live[2] = 0
    after, written = drawn_by_both(
        random_logits(4, 20), [0, 1, 2, 3], [0, 1, 2, 3], 1.0, [1], state, outputs
    )
    for part in fields(state):
        assert torch.equal(getattr(after, part.name)[1:3], getattr(state, part.name)[1:3])
    assert written.lengths[state.outputs].tolist()[1:3] == [-5, -5]
    assert (written.tokens[state.outputs[1:3]] == -5).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_ends_at_any_of_several_ends_or_at_its_limit(temperature: float) -> None:
    state, outputs = books(5, 5, 6)
    state.limits = torch.tensor([1, 2, 3, 6, 6])
    logits = torch.full((5, 40), -30.0)
    for row, token in enumerate([9, 3, 35, 36, 8]):
        logits[row, token] = 30.0
    after, written = drawn_by_both(
        logits, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], temperature, [3, 8, 36, -1], state, outputs
    )
    assert after.live.tolist() == [0, 0, 0, 0, 0]
    assert written.finished[state.outputs].tolist() == [0, 1, 0, 1, 1]
    assert after.tokens.tolist() == [9, 3, 35, 36, 8]


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.zeros(3, 50)
    logits[1, [20, 40]] = 2.0
    logits[2, 49] = 1.0
    state, outputs = books(3, 3, 3)
    after, _ = drawn_by_both(logits, [0, 1, 2], [0, 1, 2], 0.0, [-1], state, outputs)
    assert after.tokens.tolist() == [0, 20, 49]


@pytest.mark.parametrize("draw", [0, 1, 2**52, LAST - 1, LAST])
def test_draws_near_0_and_1_stay_on_tokens_that_can_be(draw: int) -> None:
    """Whole blocks are impossible, at both ends and between."""
    logits = torch.full((2, 80), -INF)
    logits[0, [18, 25, 50]] = torch.tensor([0.0, 1.0, 0.5])
    logits[1, 40:60] = random_logits(1, 20)
    state, outputs = books(2, 2, 3)
    state.keys = torch.tensor([key_of(draw, position) for position in state.num_drawn.tolist()])
    assert reference.uniforms(state.keys, state.num_drawn).tolist() == [draw * 2.0**-53] * 2
    after, written = drawn_by_both(logits, [0, 1], [0, 1], 1.0, [-1], state, outputs)
    lines = written.logprobs[state.outputs, state.num_drawn]
    assert lines.isfinite().all()
    assert written.entropies[state.outputs, state.num_drawn].isfinite().all()
    if draw == 0:
        assert after.tokens.tolist() == [18, 40]
    if draw == LAST:
        assert after.tokens.tolist() == [50, 59]


def test_a_draw_of_0_does_not_leave_a_block_that_hardly_weighs() -> None:
    logits = torch.full((1, 48), -100.0)
    logits[0, 40] = 3.0
    state, outputs = books(1, 1, 3)
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
def test_huge_logits_overflow_nothing(size: float) -> None:
    logits = random_logits(3, 40).sign() * size
    logits[0] = -size
    logits[1, 7] = 2 * size
    state, outputs = books(3, 3, 3)
    inverse, ends = torch.tensor([1.0]), torch.tensor([-1])
    every = torch.arange(3)
    sampling.sample_tokens(logits, every, every, inverse, ends, state, outputs)
    expected = logits.double().log_softmax(1)
    tokens = state.tokens
    assert tokens[1] == 7
    got = outputs.logprobs[state.outputs, state.num_drawn - 1]
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected[every, tokens], rtol=0, atol=1e-6 * size)
    assert outputs.entropies[state.outputs, state.num_drawn - 1].isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_of_one_row(temperature: float) -> None:
    """Draws at the borders of blocks, the last of which is not a whole one."""
    for token in (0, 15, 16, 31, 32, 36):
        state, outputs = books(1, 1, 3)
        state.keys = torch.tensor([key_of(int((token + 0.5) / 37 * 2**53), 0)])
        after, written = drawn_by_both(
            torch.full((1, 37), -2.5), [0], [0], temperature, [-1], state, outputs
        )
        assert after.tokens.item() == (token if temperature else 0)
        assert written.entropies[0, 0] == pytest.approx(math.log(37), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_draw_a_token_of_the_vocabulary(temperature: float) -> None:
    """A diverged model must not write beyond its books, nor read beyond its logits."""
    state, outputs = books(2, 2, 3)
    logits, every = random_logits(2, 37), torch.arange(2)
    logits[0, ::2], logits[1, 36] = (
        math.nan,
        math.nan,
    )  # the interpreter finds no largest where all are
    inverse = torch.tensor([temperature])
    sampling.sample_tokens(logits, every, every, inverse, torch.tensor([-1]), state, outputs)
    assert all(0 <= token < 37 for token in state.tokens.tolist())


# --- attention over pages


def cache_of(
    num_rows: int,
    num_key_heads: int,
    size: int,
    page: int,
    positions: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with NaN wherever nobody wrote, and tables that scatter each row's pages."""
    generator = torch.Generator().manual_seed(3)
    width = max(positions) // page + 2
    order = (torch.randperm(num_rows * width, generator=generator) + 1).view(num_rows, width)
    pages = torch.full((2, num_rows * width + 1, num_key_heads, page, size), math.nan, dtype=dtype)
    tables = torch.zeros(num_rows, width, dtype=torch.int32)
    for row, position in enumerate(positions):
        held = position // page + 1
        tables[row, :held] = order[row, :held]
        for place in range(position):
            shape = (2, num_key_heads, size)
            pages[:, order[row, place // page], :, place % page] = torch.randn(
                shape, generator=generator
            ).to(dtype)
    pages[:, 0] = 0  # scratch
    return pages[0], pages[1], tables


def attended_by_both(
    heads: int,
    key_heads: int,
    size: int,
    positions: list[int],
    page: int = 16,
    dtype: Any = torch.float32,
    **bends: Any,
) -> None:
    generator = torch.Generator().manual_seed(4)
    num_rows, page = len(positions), 16
    # [1, heads, rows, size], as a model hands it over: rows are not contiguous
    query, key, value = (
        torch.randn(1, n, num_rows, size, generator=generator).to(dtype)[0].transpose(0, 1)
        for n in (heads, key_heads, key_heads)
    )
    keys, values, tables = cache_of(num_rows, key_heads, size, page, positions, dtype)
    where, scale = torch.tensor(positions), size**-0.5
    ours, theirs = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    got = attention_module.paged_attention(query, key, value, *ours, tables, where, scale, **bends)
    expected = reference.paged_attention(query, key, value, *theirs, tables, where, scale, **bends)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, **close)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(
            mine.nan_to_num(99.0), other.nan_to_num(99.0)
        )  # the new token entered, and nothing else


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(number: int) -> None:
        monkeypatch.setattr(attention_module, "num_splits", lambda num_programs: number)

    return set_to


@pytest.mark.parametrize(("heads", "key_heads", "size"), [
    (2, 2, 16), (6, 1, 8), (7, 1, 24), (8, 1, 12), (12, 2, 16), (17, 1, 16), (2, 1, 80),
])  # fmt: skip
def test_groups_and_sizes_of_heads(heads: int, key_heads: int, size: int, splits: Any) -> None:
    splits(1)
    attended_by_both(heads, key_heads, size, [5, 0, 18])


@pytest.mark.parametrize("number", [1, 2, 8])
def test_places_at_the_borders_of_pages_and_parts_that_are_empty(number: int, splits: Any) -> None:
    splits(number)
    attended_by_both(2, 1, 16, [0, 1, 15, 16, 17, 32, 47, 64])


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 100])
def test_windows(window: int, number: int, splits: Any) -> None:
    splits(number)
    attended_by_both(2, 1, 8, [0, 16, 17, 40], window=window)


@pytest.mark.parametrize("number", [1, 2])
def test_caps_with_and_without_a_window(number: int, splits: Any) -> None:
    splits(number)
    attended_by_both(2, 1, 16, [3, 20], softcap=0.7)
    attended_by_both(2, 1, 16, [3, 20], softcap=5.0, window=6)


def test_half_types(splits: Any) -> None:
    """fp16 stands for both: the interpreter multiplies bf16 as if it were integers."""
    for number in (1, 2):
        splits(number)
        attended_by_both(4, 2, 16, [3, 20, 33], dtype=torch.float16)


def test_tables_and_positions_may_have_more_rows_than_there_are() -> None:
    keys, values, tables = cache_of(3, 1, 16, 16, [4, 20, 8], torch.float32)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 16, generator=generator) for n in (2, 1, 1))
    given = query, key, value, keys, values, tables, torch.tensor([4, 20, 8]), 0.25
    torch.testing.assert_close(
        attention_module.paged_attention(*given), reference.paged_attention(*given)
    )


def test_parts_are_few_where_rows_are_many() -> None:
    assert [attention_module.num_splits(n) for n in (1, 16, 64, 128, 255, 256, 4096)] == [
        16,
        16,
        4,
        2,
        2,
        1,
        1,
    ]


def test_a_program_reads_less_far_ahead_where_there_is_no_room() -> None:
    """Of 64 tokens, in bf16: heads of 64, 128 and 256 on cards with 227 and 99 KB for a program."""
    stages, page = attention_module.num_stages, 2 * 2 * 64
    assert [stages(page * size, 227 << 10) for size in (64, 128, 256)] == [5, 5, 3]
    assert [stages(page * size, 99 << 10) for size in (64, 128)] == [5, 3]


# --- the head


def head_both_ways(
    logits: Tensor, targets: Tensor, scale: float, tolerance: float = 2e-5
) -> list[Tensor]:
    """Stats, then the gradient, by the kernels; each checked against the plain form."""
    torch.manual_seed(0)
    upstream = [torch.randn(len(logits)) for _ in range(3)]
    results = []
    for plain in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EEPO_KERNELS", "0" if plain else "1")
            stats = plain_head._stats(logits.clone(), targets, scale)
            lse, _, entropies, complements = stats
            given = [targets, lse, entropies, complements, *upstream]
            results.append(
                [*stats, plain_head._gradient(logits.clone(), given, scale, torch.float32)]
            )
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=tolerance)
    return results[0]


@pytest.mark.parametrize("vocabulary", [3, 16, 37])
@pytest.mark.parametrize("scale", [1.0, 1.6])
def test_what_training_asks_of_logits(vocabulary: int, scale: float) -> None:
    logits = random_logits(4, vocabulary)
    head_both_ways(logits, torch.tensor([0, 2, vocabulary - 1, 1]), scale)


def test_the_gradient_comes_in_the_type_of_the_products_after_it() -> None:
    logits, targets = random_logits(4, 37), torch.tensor([0, 2, 36, 1])
    stats = plain_head._stats(logits.clone(), targets, 1.0)
    given = [targets, stats[0], *stats[2:], *(torch.randn(4) for _ in range(3))]
    exact, rounded = (
        plain_head._gradient(logits.clone(), given, 1.0, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=2**-7, atol=1e-6)


def test_a_token_that_is_all_but_certain_keeps_its_complement() -> None:
    logits = random_logits(3, 40)
    logits[0, 5], logits[1, 39], logits[2, 0] = 60.0, 95.0, -60.0
    _, logprobs, entropies, complements, gradient = head_both_ways(
        logits, torch.tensor([5, 39, 0]), 1.0
    )
    assert complements[0].item() == pytest.approx(
        logits[0].double()[torch.arange(40) != 5].logsumexp(0).item() - 60
    )
    assert logprobs[:2].tolist() == [0.0, 0.0]
    assert gradient.isfinite().all()
    assert entropies.min() >= -1e-5


def test_impossible_tokens_bring_no_nan() -> None:
    """A family may forbid tokens, whole blocks of them."""
    logits = random_logits(3, 64)
    logits[0, :20] = logits[1, 20:] = -INF
    logits[2, ::2] = -INF
    results = head_both_ways(logits, torch.tensor([30, 3, 33]), 1.0)
    assert all(one.isfinite().all() for one in results)


def test_rows_of_logits_may_lie_apart() -> None:
    wide = random_logits(3, 60)
    targets = torch.tensor([1, 2, 30])
    got = head_module.stats(wide[:, :37], targets, 1.0)
    expected = head_module.stats(wide[:, :37].contiguous(), targets, 1.0)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


# --- the engine, with kernels


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=53, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=1, bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data.mul_(5)  # far from uniform
    return model


class Wordless:
    eos_token_id = 1

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return [""] * len(rows)


def test_the_engine_draws_the_same_with_them(splits: Any) -> None:
    splits(1)
    prompts = [
        Prompt(str(place), "", ids) for place, ids in enumerate([(5, 9, 30), (7,), (3, 3, 8, 40)])
    ]
    sampling = Sampling(temperature=0.8, max_new_tokens=4, seed=3)
    model = tiny_model()
    engine = PagedEngine(copy.deepcopy(model), Wordless())
    assert engine.unusable() == ""
    got = engine.generate(prompts, 2, sampling)
    expected = TransformersEngine(model, Wordless()).generate(prompts, 2, sampling)
    assert [[one.token_ids for one in group] for group in got] == [
        [one.token_ids for one in g] for g in expected
    ]
    logprobs = [
        [lp for group in groups for one in group for lp in one.logprobs]
        for groups in (got, expected)
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
