"""Random numbers belong to a row: splitmix64, keyed by everything that identifies the row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eepo.rollout.randomness import row_key, uniforms
from eepo.types import Prompt, Sampling

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8, seed=3, stream="train/17")
PROMPT = Prompt("countdown/train/5", "", (1, 2))
ROW_KEY = 4265524550256231254  # of SAMPLING, PROMPT, sample 2
FIRST_UNIFORM = 0.661678883116509


def test_uniforms_are_splitmix64() -> None:
    # The published test values for seed 1234567.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
    ]
    for position, value in enumerate(published):
        assert uniforms(torch.tensor([1234567]), position).item() == (value >> 11) * 2.0**-53


def test_negative_keys_wrap_like_unsigned_integers() -> None:
    def splitmix(key: int, position: int) -> float:
        wrap = (1 << 64) - 1
        z = (key + (position + 1) * 0x9E3779B97F4A7C15) & wrap
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    keys = [-1, -(1 << 63), (1 << 63) - 1, 0, -987654321012345678]
    for position in (0, 1, 4095):
        assert uniforms(torch.tensor(keys), position).tolist() == [
            splitmix(key, position) for key in keys
        ]


def test_row_keys_do_not_change_between_versions() -> None:
    assert row_key(SAMPLING, PROMPT, 2) == ROW_KEY
    assert uniforms(torch.tensor([ROW_KEY]), 0).item() == FIRST_UNIFORM


@pytest.mark.parametrize(
    ("sampling", "prompt", "sample"),
    [
        (replace(SAMPLING, seed=4), PROMPT, 2),
        (replace(SAMPLING, stream="train/18"), PROMPT, 2),
        (SAMPLING, Prompt("countdown/train/6", "", (1, 2)), 2),
        (SAMPLING, PROMPT, 3),
        (replace(SAMPLING, seed=31, stream="7"), PROMPT, 2),
    ],
)
def test_the_key_depends_on_seed_stream_prompt_and_sample(
    sampling: Sampling, prompt: Prompt, sample: int
) -> None:
    assert row_key(sampling, prompt, sample) != row_key(SAMPLING, PROMPT, 2)


def test_the_key_does_not_depend_on_anything_else() -> None:
    other = replace(SAMPLING, temperature=0.5, max_new_tokens=99, first_sample=4)
    assert row_key(other, replace(PROMPT, text="else", token_ids=(9,)), 2) == row_key(
        SAMPLING, PROMPT, 2
    )


def test_uniforms_of_neighbours_are_distinct_and_uncorrelated() -> None:
    values = torch.stack([uniforms(torch.arange(-500, 500), position) for position in range(100)])
    assert values.dtype == torch.float64
    assert values.min() >= 0
    assert values.max() < 1
    assert len(values.unique()) == values.numel()
    assert values.mean().item() == pytest.approx(0.5, abs=0.005)
    assert values.var().item() == pytest.approx(1 / 12, abs=0.001)
    counts = torch.histc(values.float(), 20, 0, 1)
    # Chi-square with 19 degrees of freedom exceeds 43.8 once in 1000 times.
    assert ((counts - 5000) ** 2 / 5000).sum() < 50
    centred = values - 0.5
    for neighbour in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(neighbour.mean().item() * 12) < 0.015
