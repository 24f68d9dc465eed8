"""Kernels as they are compiled, on a real card and at real sizes; the interpreter's tests are small ones."""

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
def test_draws_of_a_real_vocabulary(num_rows: int, temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator(device=GPU).manual_seed(num_rows)
    logits = (3 * torch.randn(num_rows, VOCABULARY, device=GPU, generator=generator)).to(dtype)
    every = torch.arange(num_rows, device=GPU)
    state = RowState(
        tokens=every + 100,
        positions=every + 7,
        num_sampled=torch.ones_like(every),
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
    reference.sample_tokens(*given, *plain)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sampling.sample_tokens(*given, state, outputs)
    assert torch.cuda.max_memory_allocated() - before <= 2048 * num_rows  # what the blocks found
    same = (outputs.tokens == plain[1].tokens).all(1)
    assert same.float().mean() >= 0.99  # sums in another order may step over a neighbour
    torch.testing.assert_close(
        outputs.logprobs[same], plain[1].logprobs[same], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(outputs.entropies, plain[1].entropies, rtol=1e-4, atol=1e-4)
    assert torch.equal(state.positions, plain[0].positions)
    assert torch.equal(outputs.lengths[same], plain[1].lengths[same])


class Wordless:
    eos_token_id = 1

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return [""] * len(rows)


def peaked_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=997, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=1, bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(GPU).eval()
    for weight in model.parameters():
        weight.data.mul_(5)  # far from uniform
    return model


PROMPTS = [Prompt(str(place), "", tuple(range(5, 9 + 30 * place))) for place in range(5)]


def test_compiled_engine_with_fused_products_samples_the_same_tokens_as_the_plain_engine() -> None:
    """And its decode step has four products in each layer, the head's, and one for the angles of positions."""
    model = peaked_model(torch.float32)
    engine = PagedEngine(copy.deepcopy(model), Wordless())
    assert engine.unsupported_reason() == ""
    assert compile_fused(engine.model)
    sampling = Sampling(temperature=0.0, max_new_tokens=40)
    for factor in (1.0, 1.1):  # the second time from weights that are pushed
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factor)
        engine.load_weights(model.named_parameters())
        engine._free_buffers()  # the second time graphs are captured again
        got, expected = (
            one.generate(PROMPTS, 2, sampling)
            for one in (engine, TransformersEngine(model, Wordless()))
        )
        pairs = [
            pair
            for ours, theirs in zip(got, expected, strict=True)
            for pair in zip(ours, theirs, strict=True)
        ]
        same = [ours.token_ids == theirs.token_ids for ours, theirs in pairs]
        assert sum(same) >= 0.9 * len(same)  # a tie, broken by rounding, changes all that follows
        firsts = [ours.token_ids[:1] == theirs.token_ids[:1] for ours, theirs in pairs]
        assert sum(firsts) >= 0.9 * len(firsts)  # of the prefill
    assert engine.graphs.enabled
    buffers = engine._buffers
    assert buffers is not None
    with torch.inference_mode(), torch.profiler.profile() as seen:
        buffers._run_step(8)
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts.get("aten::mm", 0) + counts.get("aten::addmm", 0) == 3 * 4 + 2


def test_a_compiled_engine_rounds_no_worse_than_the_plain_one() -> None:
    """In bf16 draws part at the first tie. Their log-probabilities are told from those of float32 weights."""
    model = peaked_model(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    engine = PagedEngine(copy.deepcopy(model), Wordless())
    assert engine.unsupported_reason() == ""
    assert compile_fused(engine.model)

    @torch.inference_mode()
    def error(sampler: Any) -> float:
        errors = []
        for prompt, group in zip(
            PROMPTS, sampler.generate(PROMPTS, 8, Sampling(1.0, 40)), strict=True
        ):
            for one in group:
                ids = torch.tensor([*prompt.token_ids, *one.token_ids], device=GPU)
                logits = exact(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, ids[len(prompt.token_ids) :, None])[
                    :, 0
                ]
                errors.append((torch.tensor(one.logprobs, device=GPU) - expected).abs())
        return torch.cat(errors).mean().item()

    ours, plain = error(engine), error(TransformersEngine(model, Wordless()))
    assert 0 < plain < 0.5
    assert ours < 1.3 * plain


@pytest.mark.parametrize("compiled", [False, True])
def test_a_shared_prompt_teaches_what_its_copies_teach(compiled: bool) -> None:
    """In bf16, so against fp32: it may be no further from that than the copies are."""
    torch.manual_seed(0)
    shape = Qwen2Config(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                        num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).to(GPU)
    exact = copy.deepcopy(model).cpu()
    generator = torch.Generator().manual_seed(1)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 1000, (number,), generator=generator).tolist())

    groups = [
        (Prompt(str(i), "", ids(40 + 9 * i)), [ids(20 + 13 * (i + j) % 50) for j in range(6)])
        for i in range(4)
    ]
    shared = [
        (prompt, Completion(own, (0.0,) * len(own), "", True))
        for prompt, group in groups
        for own in group
    ]
    order = [
        row for place in range(6) for row in range(place, len(shared), 6)
    ]  # no prompt twice in a row

    def loss(batch: MicroBatch, scores: Scores) -> torch.Tensor:
        shares = batch.pick([1.0 + row % 5 for row in range(len(shared))]).unsqueeze(1)
        return (shares * (scores.logprobs - 0.5 * scores.entropies)).sum() / 1000

    policy = Policy(model)
    assert policy.packed
    if compiled:
        assert compile_layers(model)
    sizes, gradients = [], []
    for rows in (None, order):
        [batch] = policy.micro_batches(shared, rows)
        assert isinstance(batch.inputs, Packed)
        sizes.append(batch.inputs.input_ids.numel())
        gradients.append(policy.gradient(shared, 1.0, loss, rows))
    assert sizes[0] < 0.6 * sizes[1]
    expected = Policy(exact).gradient(shared, 1.0, loss)

    def error(got: dict[str, torch.Tensor]) -> float:
        gaps = [(got[name].cpu() - gradient).square().sum() for name, gradient in expected.items()]
        return float(sum(gaps).sqrt() / sum(one.square().sum() for one in expected.values()).sqrt())  # type: ignore[union-attr]

    together, apart = map(error, gradients)
    assert apart < 0.05
    assert together < 1.3 * apart + 1e-3
    if not compiled:
        plain = Policy(copy.deepcopy(exact).to(GPU), compute=torch.float32)
        assert not plain.packed
        assert error(plain.gradient(shared, 1.0, loss)) < 1e-4
