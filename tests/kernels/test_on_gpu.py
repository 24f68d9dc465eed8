"""Kernels as they are compiled, on a real card and at real sizes; the interpreter's tests are small ones."""

from __future__ import annotations

import copy

import pytest
import torch

from eepo import kernels
from eepo.kernels import draw as draw_module
from eepo.kernels import reference
from eepo.kernels.rows import Outputs, RowState

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.available(GPU), reason="needs a CUDA GPU and Triton"
)
VOCABULARY = 151_936


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_rows", [1, 64, 256, 257, 1024])
def test_draws_of_a_real_vocabulary(num_rows: int, temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator(device=GPU).manual_seed(num_rows)
    logits = (3 * torch.randn(num_rows, VOCABULARY, device=GPU, generator=generator)).to(dtype)
    every = torch.arange(num_rows, device=GPU)
    state = RowState(
        tokens=every + 100,
        positions=every + 7,
        num_drawn=torch.ones_like(every),
        limits=torch.full_like(every, 4),
        keys=every * 7919 - 12345,
        outputs=every.flip(0).clone(),
        live=torch.ones_like(every, dtype=torch.int32),
    )
    shape = num_rows, 4
    outputs = Outputs(
        tokens=torch.zeros(shape, dtype=torch.int32, device=GPU),
        logprobs=torch.zeros(shape, device=GPU),
        entropies=torch.zeros(shape, device=GPU),
        lengths=torch.zeros(num_rows, dtype=torch.int32, device=GPU),
        finished=torch.zeros(num_rows, dtype=torch.int32, device=GPU),
    )
    inverse = torch.tensor([1 / temperature if temperature else 0.0], device=GPU)
    given = logits, every, every, inverse, torch.tensor([1], device=GPU)
    plain = copy.deepcopy((state, outputs))
    reference.draw(*given, *plain)
    draw_module.draw(*given, state, outputs)
    same = (outputs.tokens == plain[1].tokens).all(1)
    assert same.float().mean() >= 0.99  # sums in another order may step over a neighbour
    torch.testing.assert_close(outputs.logprobs[same], plain[1].logprobs[same], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.entropies, plain[1].entropies, rtol=1e-4, atol=1e-4)
    assert torch.equal(state.positions, plain[0].positions)
    assert torch.equal(outputs.lengths[same], plain[1].lengths[same])
