"""The plain forms of the kernels against computations of one row, one head and one token after another."""

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


def test_without_a_gpu_the_plain_forms_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.available(CPU)
    assert kernels.select("sample_tokens", CPU) is reference.sample_tokens
    assert kernels.select("paged_attention", CPU) is reference.paged_attention


@pytest.fixture
def unsure() -> Iterator[None]:
    """What this machine lacks is looked up again, before and after."""
    kernels.triton_unavailable_reason.cache_clear()
    yield
    kernels.triton_unavailable_reason.cache_clear()


@pytest.mark.usefixtures("unsure")
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


@pytest.mark.usefixtures("unsure")
def test_triton_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in kernels.unavailable_reason()
    assert not kernels.available(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(CPU)  # where it interprets it needs none
    monkeypatch.delenv("TRITON_INTERPRET")
    kernels.triton_unavailable_reason.cache_clear()
    (tmp_path / "clang").write_text("")
    (tmp_path / "clang").chmod(0o755)
    assert kernels.unavailable_reason() == ""


# --- draw


def new_books(num_slots: int, width: int) -> tuple[RowState, Outputs]:
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
    """Token, log-probability and entropy, in Python's own numbers."""
    top = max(logits)
    scale = temperature or 1.0
    masses = [math.exp((logit - top) / scale) for logit in logits]
    probabilities = [mass / sum(masses) for mass in masses]
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    if temperature == 0:
        token = logits.index(top)
    else:
        left = float(reference.uniforms(torch.tensor([key]), position))
        token = 0
        while left >= probabilities[token]:
            left -= probabilities[token]
            token += 1
    return token, math.log(probabilities[token]), entropy


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_draw_by_themselves_until_they_end(temperature: float) -> None:
    """Six steps of four slots that read one another's logits; ends, limits and a slot that is dead from the start."""
    generator = torch.Generator().manual_seed(1)
    state, outputs = new_books(4, 6)
    state.live[3] = 0
    state.limits[1] = 2
    ends, keys = {2, 9}, state.keys.tolist()
    inverse = torch.tensor([1 / temperature if temperature else 0.0])
    expected: list[list[tuple[int, float, float]]] = [[], [], [], []]
    alive = {0, 1, 2}
    for _ in range(6):
        logits = 2 * torch.randn(4, 12, generator=generator)
        sources = torch.tensor([1, 0, 2, 3])
        for place, slot in enumerate([2, 0, 1, 3]):
            if slot in alive:
                row = logits[sources[place]].tolist()
                expected[slot].append(plain_row(row, keys[slot], len(expected[slot]), temperature))
                if expected[slot][-1][0] in ends or len(expected[slot]) == (2 if slot == 1 else 6):
                    alive.remove(slot)
        reference.sample_tokens(
            logits,
            sources,
            torch.tensor([2, 0, 1, 3]),
            inverse,
            torch.tensor([2, 9]),
            state,
            outputs,
        )
    assert state.live.tolist() == [0, 0, 0, 0]
    assert outputs.lengths.tolist() == [len(row) for row in expected]
    assert outputs.lengths[3] == 0
    assert state.positions.tolist() == state.num_sampled.tolist() == [len(row) for row in expected]
    for slot, row in enumerate(expected[:3]):
        tokens, logprobs, entropies = zip(*row, strict=True)
        assert outputs.tokens[slot, : len(row)].tolist() == list(tokens)
        assert outputs.logprobs[slot, : len(row)].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert outputs.entropies[slot, : len(row)].tolist() == pytest.approx(entropies, abs=1e-5)
        assert outputs.finished[slot] == (tokens[-1] in ends)
        assert state.tokens[slot] == tokens[-1]


def test_impossible_tokens_leave_entropies_finite() -> None:
    logits = torch.tensor([[-INF, 0.0, math.log(3.0), -INF]])
    for temperature in (0.0, 1.0):
        token, logprob, entropy = reference.sample(
            logits, torch.tensor([0.9], dtype=torch.float64), temperature
        )
        assert token.item() == 2
        assert logprob.item() == pytest.approx(math.log(0.75))
        assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


# --- attention over pages


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, window: int
) -> Tensor:
    """One head's query [D] over its L places [L, D], the last of which is its own."""
    scores = [float(query.double() @ key.double()) * scale for key in keys]
    if softcap:
        scores = [softcap * math.tanh(score / softcap) for score in scores]
    first = max(0, len(scores) - window) if window else 0
    masses = [math.exp(score) if place >= first else 0.0 for place, score in enumerate(scores)]
    return sum(mass * value.double() for mass, value in zip(masses, values, strict=True)) / sum(
        masses
    )


@pytest.mark.parametrize(
    ("softcap", "window"), [(0.0, 0), (0.8, 0), (0.0, 1), (0.0, 5), (2.0, 9), (0.0, 1000)]
)
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 1), (6, 2)])
def test_a_token_attends_to_its_own_row_and_itself(
    heads: int, key_heads: int, softcap: float, window: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    page, size, positions = 4, 6, [0, 3, 4, 11]
    whole = [
        torch.randn(2, position + 1, key_heads, size, generator=generator) for position in positions
    ]
    pages = torch.full(
        (2, 20, key_heads, page, size), math.nan
    )  # what nobody wrote must not be read
    tables = torch.zeros(5, 4, dtype=torch.int32)
    pages[:, 0] = 0
    fresh = iter([7, 3, 12, 1, 9, 5, 15, 2])
    for row, position in enumerate(positions):
        for place in range(position + 1):
            if place % page == 0:
                tables[row, place // page] = next(fresh)
            if place < position:
                pages[:, tables[row, place // page].long(), :, place % page] = whole[row][:, place]
    query = torch.randn(4, heads, size, generator=generator)
    new = torch.stack([part[:, -1] for part in whole], 1)  # [2, rows, key heads, size]
    where = torch.tensor([*positions, 0])  # and a slot that is not asked for
    got = reference.paged_attention(query, *new, *pages, tables, where, 0.4, softcap, window)
    for row, (keys, values) in enumerate(whole):
        for head in range(heads):
            own = head // (heads // key_heads)
            expected = plain_attention(
                query[row, head], keys[:, own], values[:, own], 0.4, softcap, window
            )
            torch.testing.assert_close(got[row, head].double(), expected, rtol=1e-5, atol=1e-5)
        place = positions[row]
        assert torch.equal(
            pages[:, tables[row, place // page].long(), :, place % page], whole[row][:, -1]
        )
