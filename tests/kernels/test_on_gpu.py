"""Compiled kernels on a GPU, at real sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from eepo import kernels
from eepo.kernels import reference, sampling
from eepo.kernels.row_state import Outputs, RowState
from eepo.model.batching import MicroBatch, Packed
from eepo.model.compilation import compile_layers
from eepo.model.policy import Policy, Scores
from eepo.rollout.fused_linear import compile_fused
from eepo.rollout.paged.engine import PagedEngine
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.available(GPU),
    reason="needs a CUDA GPU and Triton",
)
VOCABULARY = 151_936


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_rows", [1, 64, 256, 257, 1024])
def test_sampling_from_a_real_vocabulary(
    num_rows: int, temperature: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator(device=GPU).manual_seed(num_rows)
    logits = (3 * torch.randn(num_rows, VOCABULARY, device=GPU, generator=generator)).to(dtype)
    rows = torch.arange(num_rows, device=GPU)
    state = RowState(
        tokens=rows + 100,
        positions=rows + 7,
        num_sampled=torch.ones_like(rows),
        limits=torch.full_like(rows, 4),
        keys=rows * 7919 - 12345,
        outputs=rows.flip(0).clone(),
        live=torch.ones_like(rows, dtype=torch.int32),
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
    inputs = logits, rows, rows, inverse, torch.tensor([1], device=GPU)
    plain = copy.deepcopy((state, outputs))
    reference.sample_tokens(*inputs, *plain)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sampling.sample_tokens(*inputs, state, outputs)
    assert torch.cuda.max_memory_allocated() - before <= 2048 * num_rows  # partial sums of blocks
    same = (outputs.tokens == plain[1].tokens).all(1)
    assert same.float().mean() >= 0.99  # another order of summation may select a neighbour
    torch.testing.assert_close(
        outputs.logprobs[same], plain[1].logprobs[same], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(outputs.entropies, plain[1].entropies, rtol=1e-4, atol=1e-4)
    assert torch.equal(state.positions, plain[0].positions)
    assert torch.equal(outputs.lengths[same], plain[1].lengths[same])


class NoTokenizer:
    eos_token_id = 1

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return [""] * len(rows)


def peaked_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=997, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(GPU).eval()
    for weight in model.parameters():
        weight.data.mul_(5)  # far from uniform
    return model


PROMPTS = [Prompt(str(index), "", tuple(range(5, 9 + 30 * index))) for index in range(5)]


def test_compiled_engine_with_fused_products_samples_the_same_tokens_as_the_plain_engine() -> None:
    """Its decode step has four products per layer, one for the head and one for rotary angles."""
    model = peaked_model(torch.float32)
    engine = PagedEngine(copy.deepcopy(model), NoTokenizer())
    assert engine.unsupported_reason() == ""
    assert compile_fused(engine.model)
    sampling = Sampling(temperature=0.0, max_new_tokens=40)
    for factor in (1.0, 1.1):  # the second time with new weights
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factor)
        engine.load_weights(model.named_parameters())
        engine._free_buffers()  # so that graphs are captured again
        got = engine.generate(PROMPTS, 2, sampling)
        expected = TransformersEngine(model, NoTokenizer()).generate(PROMPTS, 2, sampling)
        pairs = [
            pair
            for ours, theirs in zip(got, expected, strict=True)
            for pair in zip(ours, theirs, strict=True)
        ]
        same = [ours.token_ids == theirs.token_ids for ours, theirs in pairs]
        assert sum(same) >= 0.9 * len(same)  # rounding may change a token, and all later ones
        firsts = [ours.token_ids[:1] == theirs.token_ids[:1] for ours, theirs in pairs]
        assert sum(firsts) >= 0.9 * len(firsts)  # sampled after the prefill
    assert engine.graphs.enabled
    buffers = engine._buffers
    assert buffers is not None
    with torch.inference_mode(), torch.profiler.profile() as profile:
        buffers._run_step(8)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("aten::mm", 0) + counts.get("aten::addmm", 0) == 3 * 4 + 2


def test_a_compiled_engine_rounds_no_more_than_the_plain_one() -> None:
    """bf16 engines sample different tokens, so each is compared with fp32 on its own tokens."""
    model = peaked_model(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    engine = PagedEngine(copy.deepcopy(model), NoTokenizer())
    assert engine.unsupported_reason() == ""
    assert compile_fused(engine.model)

    @torch.inference_mode()
    def error(sampler: Any) -> float:
        errors = []
        groups = sampler.generate(PROMPTS, 8, Sampling(1.0, 40))
        for prompt, group in zip(PROMPTS, groups, strict=True):
            num_prompt = len(prompt.token_ids)
            for completion in group:
                ids = torch.tensor([*prompt.token_ids, *completion.token_ids], device=GPU)
                logprobs = exact(ids[None]).logits[0, num_prompt - 1 : -1].log_softmax(-1)
                expected = logprobs.gather(-1, ids[num_prompt:, None])[:, 0]
                errors.append((torch.tensor(completion.logprobs, device=GPU) - expected).abs())
        return torch.cat(errors).mean().item()

    ours, plain = error(engine), error(TransformersEngine(model, NoTokenizer()))
    assert 0 < plain < 0.5
    assert ours < 1.3 * plain


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_prompts_give_the_gradient_of_repeated_prompts(compiled: bool) -> None:
    """In bf16 both differ from fp32; shared prompts must not differ by more."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).to(GPU)
    exact = copy.deepcopy(model).cpu()
    generator = torch.Generator().manual_seed(1)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 1000, (number,), generator=generator).tolist())

    groups = [
        (Prompt(str(i), "", ids(40 + 9 * i)), [ids(20 + 13 * (i + j) % 50) for j in range(6)])
        for i in range(4)
    ]
    pairs = [
        (prompt, Completion(tokens, (0.0,) * len(tokens), "", True))
        for prompt, group in groups
        for tokens in group
    ]
    # No prompt twice in a row, so none is shared
    interleaved = [row for first in range(6) for row in range(first, len(pairs), 6)]

    def loss(batch: MicroBatch, scores: Scores) -> torch.Tensor:
        row_weights = batch.pick([1.0 + row % 5 for row in range(len(pairs))]).unsqueeze(1)
        return (row_weights * (scores.logprobs - 0.5 * scores.entropies)).sum() / 1000

    policy = Policy(model)
    assert policy.packed
    if compiled:
        assert compile_layers(model)
    sizes, gradients = [], []
    for rows in (None, interleaved):
        [batch] = policy.micro_batches(pairs, rows)
        assert isinstance(batch.inputs, Packed)
        sizes.append(batch.inputs.input_ids.numel())
        gradients.append(policy.gradient(pairs, 1.0, loss, rows))
    assert sizes[0] < 0.6 * sizes[1]
    expected = Policy(exact).gradient(pairs, 1.0, loss)

    def error(got: dict[str, torch.Tensor]) -> float:
        difference = torch.cat([(got[name].cpu() - expected[name]).flatten() for name in expected])
        size = torch.cat([gradient.flatten() for gradient in expected.values()])
        return float(difference.norm() / size.norm())

    shared_error, repeated_error = map(error, gradients)
    assert repeated_error < 0.05
    assert shared_error < 1.3 * repeated_error + 1e-3
    if not compiled:
        plain = Policy(copy.deepcopy(exact).to(GPU), compute_dtype=torch.float32)
        assert not plain.packed
        assert error(plain.gradient(pairs, 1.0, loss)) < 1e-4
