"""Plain versions of the kernels equal computations row by row, head by head, token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eepo import kernels
from eepo.kernels import reference
from eepo.kernels.row_state import Outputs, RowState

CPU = torch.device("cpu")
INF = math.inf


def test_the_plain_versions_are_selected_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.available(CPU)
    assert kernels.select("sample_tokens", CPU) is reference.sample_tokens
    assert kernels.select("paged_attention", CPU) is reference.paged_attention


@pytest.fixture
def no_cached_reason() -> Iterator[None]:
    """Clear the cached answer whether Triton is available, before and after the test."""
    kernels.triton_unavailable_reason.cache_clear()
    yield
    kernels.triton_unavailable_reason.cache_clear()


@pytest.mark.usefixtures("no_cached_reason")
def test_kernels_need_triton_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CC", "gcc")
    assert kernels.available(gpu)
    monkeypatch.setenv("EEPO_KERNELS", "0")
    assert not kernels.available(gpu)
    monkeypatch.delenv("EEPO_KERNELS")
    kernels.triton_unavailable_reason.cache_clear()
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert not kernels.available(gpu)
    assert kernels.unavailable_reason() == "Triton is not installed"
    assert kernels.select("sample_tokens", gpu) is reference.sample_tokens
    assert (
        "eepo.kernels.sampling" not in sys.modules
        or kernels.select("sample_tokens", gpu) is reference.sample_tokens
    )


@pytest.mark.usefixtures("no_cached_reason")
def test_triton_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in kernels.unavailable_reason()
    assert not kernels.available(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(CPU)  # the interpreter needs no compiler
    monkeypatch.delenv("TRITON_INTERPRET")
    kernels.triton_unavailable_reason.cache_clear()
    (tmp_path / "clang").write_text("")
    (tmp_path / "clang").chmod(0o755)
    assert kernels.unavailable_reason() == ""


# --- sampling


def new_state(num_slots: int, width: int) -> tuple[RowState, Outputs]:
    state = RowState.empty(num_slots, CPU)
    state.live.fill_(1)
    state.limits.fill_(width)
    state.outputs = torch.arange(num_slots)
    state.keys = torch.arange(num_slots) * 31 - 40
    outputs = Outputs(
        torch.zeros(num_slots, width, dtype=torch.int32),
        torch.zeros(num_slots, width),
        torch.zeros(num_slots, width),
        torch.zeros(num_slots, dtype=torch.int32),
        torch.zeros(num_slots, dtype=torch.int32),
    )
    return state, outputs


def plain_row(
    logits: list[float], key: int, position: int, temperature: float
) -> tuple[int, float, float]:
    """Return token, log-probability and entropy, computed with Python floats."""
    maximum = max(logits)
    scale = temperature or 1.0
    masses = [math.exp((logit - maximum) / scale) for logit in logits]
    probabilities = [mass / sum(masses) for mass in masses]
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    if temperature == 0:
        token = logits.index(maximum)
    else:
        remaining = float(reference.uniforms(torch.tensor([key]), position))
        token = 0
        while remaining >= probabilities[token]:
            remaining -= probabilities[token]
            token += 1
    return token, math.log(probabilities[token]), entropy


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_are_sampled_independently_until_they_end(temperature: float) -> None:
    """Six steps of four slots with permuted logits, end tokens, a limit and an empty slot."""
    generator = torch.Generator().manual_seed(1)
    state, outputs = new_state(4, 6)
    state.live[3] = 0
    state.limits[1] = 2
    end_tokens, keys = {2, 9}, state.keys.tolist()
    inverse = torch.tensor([1 / temperature if temperature else 0.0])
    expected: list[list[tuple[int, float, float]]] = [[], [], [], []]
    live = {0, 1, 2}
    for _ in range(6):
        logits = 2 * torch.randn(4, 12, generator=generator)
        sources = torch.tensor([1, 0, 2, 3])
        for source, slot in zip(sources, [2, 0, 1, 3], strict=True):
            if slot in live:
                row = logits[source].tolist()
                expected[slot].append(plain_row(row, keys[slot], len(expected[slot]), temperature))
                limit = 2 if slot == 1 else 6
                if expected[slot][-1][0] in end_tokens or len(expected[slot]) == limit:
                    live.remove(slot)
        slots = torch.tensor([2, 0, 1, 3])
        inputs = logits, sources, slots, inverse, torch.tensor([2, 9])
        reference.sample_tokens(*inputs, state, outputs)
    assert state.live.tolist() == [0, 0, 0, 0]
    assert outputs.lengths.tolist() == [len(row) for row in expected]
    assert outputs.lengths[3] == 0
    assert state.positions.tolist() == state.num_sampled.tolist() == [len(row) for row in expected]
    for slot, row in enumerate(expected[:3]):
        tokens, logprobs, entropies = zip(*row, strict=True)
        assert outputs.tokens[slot, : len(row)].tolist() == list(tokens)
        assert outputs.logprobs[slot, : len(row)].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert outputs.entropies[slot, : len(row)].tolist() == pytest.approx(entropies, abs=1e-5)
        assert outputs.finished[slot] == (tokens[-1] in end_tokens)
        assert state.tokens[slot] == tokens[-1]


def test_entropies_are_finite_with_impossible_tokens() -> None:
    logits = torch.tensor([[-INF, 0.0, math.log(3.0), -INF]])
    for temperature in (0.0, 1.0):
        token, logprob, entropy = reference.sample(
            logits, torch.tensor([0.9], dtype=torch.float64), temperature
        )
        assert token.item() == 2
        assert logprob.item() == pytest.approx(math.log(0.75))
        assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


# --- paged attention


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, window: int
) -> Tensor:
    """Attend with the last token's query [D] over L keys and values [L, D]."""
    scores = [float(query.double() @ key.double()) * scale for key in keys]
    if softcap:
        scores = [softcap * math.tanh(score / softcap) for score in scores]
    first = max(0, len(scores) - window) if window else 0
    masses = [math.exp(score) if index >= first else 0.0 for index, score in enumerate(scores)]
    return sum(mass * value.double() for mass, value in zip(masses, values, strict=True)) / sum(
        masses
    )


@pytest.mark.parametrize(
    ("softcap", "window"), [(0.0, 0), (0.8, 0), (0.0, 1), (0.0, 5), (2.0, 9), (0.0, 1000)]
)
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 1), (6, 2)])
def test_a_token_attends_to_its_row_and_itself(
    heads: int, key_heads: int, softcap: float, window: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    page, size, positions = 4, 6, [0, 3, 4, 11]
    rows = [
        torch.randn(2, position + 1, key_heads, size, generator=generator) for position in positions
    ]
    pages = torch.full((2, 20, key_heads, page, size), math.nan)  # unwritten entries are not read
    tables = torch.zeros(5, 4, dtype=torch.int32)
    pages[:, 0] = 0
    free_pages = iter([7, 3, 12, 1, 9, 5, 15, 2])
    for row, position in enumerate(positions):
        for index in range(position + 1):
            if index % page == 0:
                tables[row, index // page] = next(free_pages)
            if index < position:
                pages[:, tables[row, index // page].long(), :, index % page] = rows[row][:, index]
    query = torch.randn(4, heads, size, generator=generator)
    new = torch.stack([part[:, -1] for part in rows], 1)  # [2, rows, key heads, size]
    all_positions = torch.tensor([*positions, 0])  # with a slot that has no query
    got = reference.paged_attention(
        query, *new, *pages, tables, all_positions, 0.4, softcap, window
    )
    for row, (keys, values) in enumerate(rows):
        for head in range(heads):
            cached = keys[:, head // (heads // key_heads)], values[:, head // (heads // key_heads)]
            expected = plain_attention(query[row, head], *cached, 0.4, softcap, window)
            torch.testing.assert_close(got[row, head].double(), expected, rtol=1e-5, atol=1e-5)
        last = positions[row]
        written = pages[:, tables[row, last // page].long(), :, last % page]
        assert torch.equal(written, rows[row][:, -1])
