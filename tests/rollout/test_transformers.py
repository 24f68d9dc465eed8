"""`TransformersEngine` samples the same tokens in every batching, as plain `transformers` does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eepo.rollout.transformers import TransformersEngine, sample
from eepo.types import Completion, Prompt, Sampling

INF = math.inf
FAMILIES = ["qwen2", "qwen3", "llama"]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=10, seed=5, stream="train/3")
GREEDY = Sampling(temperature=0.0, max_new_tokens=16)

Engines = Callable[..., TransformersEngine]


@pytest.fixture(scope="module")
def prompts(ragged_pairs: Any) -> list[Prompt]:
    return [prompt for prompt, _ in ragged_pairs(5, seed=4)]


@pytest.fixture(scope="module")
def ending_model(new_model: Any) -> Callable[..., Any]:
    """Builds a tiny model with many end tokens, so rows finish at different times."""

    def build(family: str, **shape: Any) -> Any:
        model = new_model(family, **shape)
        model.generation_config.eos_token_id = list(range(1, model.config.vocab_size, 8))
        return model

    return build


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


@pytest.fixture(scope="module")
def whole(ending_model: Any, tokenizer: Any, prompts: list[Prompt]) -> list[list[Completion]]:
    """All rows in one batch: every other batching must give the same tokens."""
    return TransformersEngine(ending_model("qwen3"), tokenizer, max_rows=1000).generate(
        prompts, 4, SAMPLING
    )


def test_rows_finish_at_different_times(whole: list[list[Completion]]) -> None:
    lengths = {len(completion.token_ids) for completion in flat(whole)}
    assert {1, 10} <= lengths
    assert len(lengths) > 4


@pytest.mark.parametrize(
    ("max_rows", "order"),
    [(1, [0, 1, 2, 3, 4]), (3, [3, 1, 4, 0, 2]), (9, [3, 1, 4, 0, 2]), (1000, [3, 1, 4, 0, 2])],
)
def test_tokens_of_a_row_do_not_depend_on_the_batch(
    max_rows: int,
    order: list[int],
    ending_model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    whole: list[list[Completion]],
) -> None:
    engine = TransformersEngine(ending_model("qwen3"), tokenizer, max_rows)
    groups = engine.generate([prompts[index] for index in order], 4, SAMPLING)
    assert tokens(groups) == tokens([whole[index] for index in order])
    for got, expected in zip(flat(groups), flat([whole[index] for index in order]), strict=True):
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert got.finished == expected.finished
        assert got.text == expected.text


def test_a_single_prompt_gives_the_same_tokens(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], whole: list[list[Completion]]
) -> None:
    engine = TransformersEngine(ending_model("qwen3"), tokenizer)
    assert tokens(engine.generate(prompts[3:4], 4, SAMPLING)) == tokens(whole[3:4])


def test_the_same_call_gives_the_same_bits(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], whole: list[list[Completion]]
) -> None:
    engine = TransformersEngine(ending_model("qwen3"), tokenizer, max_rows=1000)
    engine.generate(prompts[:2], 3, replace(SAMPLING, stream="other"))  # leaves no state behind
    assert engine.generate(prompts, 4, SAMPLING) == whole


def test_first_sample_continues_the_sample_indices(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], whole: list[list[Completion]]
) -> None:
    engine = TransformersEngine(ending_model("qwen3"), tokenizer)
    first = engine.generate(prompts, 3, SAMPLING)
    second = engine.generate(prompts, 1, replace(SAMPLING, first_sample=3))
    assert tokens([a + b for a, b in zip(first, second, strict=True)]) == tokens(whole)


def test_samples_of_one_prompt_differ(whole: list[list[Completion]]) -> None:
    assert all(len(set(group)) >= 3 for group in tokens(whole))


@pytest.mark.parametrize("change", [{"seed": 6}, {"stream": "train/4"}, {"first_sample": 4}])
def test_another_seed_stream_or_sample_index_gives_other_tokens(
    change: dict[str, Any],
    ending_model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    whole: list[list[Completion]],
) -> None:
    other = TransformersEngine(ending_model("qwen3"), tokenizer).generate(
        prompts, 4, replace(SAMPLING, **change)
    )
    assert all(a != b for a, b in zip(tokens(other), tokens(whole), strict=True))


def test_random_numbers_depend_on_the_prompt_id_and_not_on_its_index(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], whole: list[list[Completion]]
) -> None:
    engine = TransformersEngine(ending_model("qwen3"), tokenizer)
    renamed = [replace(prompt, id="x" + prompt.id) for prompt in prompts]
    assert tokens(engine.generate(renamed, 6, SAMPLING)) != tokens(whole)
    twins = engine.generate([prompts[0], replace(prompts[0], id="twin")], 4, SAMPLING)
    assert tokens(twins)[0] == tokens(whole)[0] != tokens(twins)[1]


@pytest.mark.parametrize(
    ("family", "temperature"),
    [("qwen2", 1.0), ("qwen3", 0.5), ("llama", 1.6), ("mistral", 1.0), ("gemma2", 0.7)],
)
def test_logprobs_and_entropies_are_those_of_a_full_pass(
    family: str,
    temperature: float,
    ending_model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    plain_scores: Any,
) -> None:
    window = {"sliding_window": 8} if family in ("mistral", "gemma2") else {}
    model = ending_model(family, **window)
    groups = TransformersEngine(model, tokenizer).generate(
        prompts, 2, replace(SAMPLING, temperature=temperature)
    )
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            with torch.no_grad():
                scores = plain_scores(model, prompt, completion, temperature)
            assert completion.logprobs == pytest.approx(scores.logprobs.tolist(), abs=1e-4)
            assert completion.entropies == pytest.approx(scores.entropies.tolist(), abs=1e-4)


def test_a_higher_temperature_raises_the_entropy(
    new_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    engine = TransformersEngine(new_model("llama"), tokenizer)
    entropies, logprobs = [], []
    for temperature in (0.3, 1.0, 3.0):
        sampled = flat(engine.generate(prompts, 8, replace(SAMPLING, temperature=temperature)))
        num_tokens = sum(len(completion.token_ids) for completion in sampled)
        entropies.append(sum(sum(completion.entropies) for completion in sampled) / num_tokens)
        logprobs.append(-sum(sum(completion.logprobs) for completion in sampled) / num_tokens)
    assert entropies[0] + 0.5 < entropies[1] < entropies[2] - 0.5
    assert logprobs == pytest.approx(entropies, rel=0.15)  # −log p estimates the entropy


def check_greedy(
    model: Any, tokenizer: Any, prompts: list[Prompt], max_rows: int = 1000
) -> list[Completion]:
    """Return the engine's completions, after a check against `generate` on left-padded prompts."""
    engine = TransformersEngine(copy.deepcopy(model), tokenizer, max_rows)
    completions = flat(engine.generate(prompts, 1, GREEDY))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(p.token_ids)) + list(p.token_ids) for p in prompts])
    mask = torch.tensor(
        [[0] * (longest - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts]
    )
    expected = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=GREEDY.max_new_tokens,
        pad_token_id=0,
    )[:, longest:].tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for completion, row in zip(completions, expected, strict=True):
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        assert list(completion.token_ids) == row[:stop]
        assert completion.finished == (row[stop - 1] in ends)
    return completions


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_with_and_without_end_tokens(
    family: str, new_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    model = new_model(family)
    endless = check_greedy(model, tokenizer, prompts)
    assert not any(completion.finished for completion in endless)
    rows = [completion.token_ids for completion in endless]
    model.generation_config.eos_token_id = [rows[0][0], rows[1][4], rows[2][9]]
    ended = check_greedy(model, tokenizer, prompts)
    assert any(completion.finished for completion in ended)
    assert len({len(completion.token_ids) for completion in ended}) >= 3
    assert [c.token_ids for c in check_greedy(model, tokenizer, prompts, max_rows=2)] == [
        c.token_ids for c in ended
    ]


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_greedy_equals_generate_with_a_sliding_window(
    family: str, new_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    model = new_model(family, sliding_window=8)
    check_greedy(model, tokenizer, prompts)
    wide = TransformersEngine(new_model(family, sliding_window=64), tokenizer).generate(
        prompts, 1, GREEDY
    )
    narrow = TransformersEngine(model, tokenizer).generate(prompts, 1, GREEDY)
    assert tokens(wide) != tokens(narrow)  # the window has an effect


def test_finished_rows_end_with_an_end_token_and_others_at_the_limit(
    ending_model: Any, whole: list[list[Completion]]
) -> None:
    ends = set(ending_model("qwen3").generation_config.eos_token_id)
    finished = [completion for completion in flat(whole) if completion.finished]
    truncated = [completion for completion in flat(whole) if not completion.finished]
    assert finished
    assert truncated
    for completion in finished:
        assert completion.token_ids[-1] in ends
        assert not ends & set(completion.token_ids[:-1])
    for completion in truncated:
        assert len(completion.token_ids) == SAMPLING.max_new_tokens
        assert not ends & set(completion.token_ids)
    for completion in flat(whole):
        assert len(completion.logprobs) == len(completion.entropies) == len(completion.token_ids)


def test_an_end_token_at_the_length_limit_counts_as_finished(
    ending_model: Any, tokenizer: Any, prompts: list[Prompt], whole: list[list[Completion]]
) -> None:
    length = max(len(completion.token_ids) for completion in flat(whole) if completion.finished)
    groups = TransformersEngine(ending_model("qwen3"), tokenizer).generate(
        prompts, 4, replace(SAMPLING, max_new_tokens=length)
    )
    for cut, full in zip(flat(groups), flat(whole), strict=True):
        assert cut.token_ids == full.token_ids[:length]
        assert cut.finished == full.finished
    assert any(
        completion.finished and len(completion.token_ids) == length for completion in flat(groups)
    )


@pytest.mark.parametrize(
    ("configured", "ends"), [(None, {1}), (7, {1, 7}), ([7, 9], {1, 7, 9}), (1, {1})]
)
def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(
    configured: Any, ends: set[int], new_model: Any, tokenizer: Any
) -> None:
    model = new_model("llama")
    model.generation_config.eos_token_id = configured
    with torch.no_grad():
        model.lm_head.weight.zero_()
    engine = TransformersEngine(model, tokenizer)
    prompt = Prompt("p", "", (3, 4))
    sampled = flat(engine.generate([prompt], 300, Sampling(1.0, 8)))
    assert {completion.token_ids[-1] for completion in sampled if completion.finished} == ends
    assert not any(ends & set(completion.token_ids[:-1]) for completion in sampled)


def test_text_does_not_contain_the_end_token(
    demo_copy: Any, tokenizer: Any, demo_prompts: list[Prompt]
) -> None:
    for completion in flat(
        TransformersEngine(demo_copy, tokenizer).generate(demo_prompts[:4], 2, SAMPLING)
    ):
        body = completion.token_ids[:-1] if completion.finished else completion.token_ids
        assert completion.text == tokenizer.decode(list(body))
        assert "<eos>" not in completion.text


# --- weights


def test_generate_uses_the_loaded_weights(
    new_model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    for family in ("qwen3", "llama"):  # a tied and an untied head
        engine, other = TransformersEngine(new_model(family), tokenizer), new_model(family, seed=1)
        before = engine.generate(prompts, 2, SAMPLING)
        weights = {name: weight.detach().clone() for name, weight in other.named_parameters()}
        engine.load_weights(weights.items())
        for weight in weights.values():
            weight.zero_()  # the engine holds a copy
        after = engine.generate(prompts, 2, SAMPLING)
        assert tokens(after) != tokens(before)
        assert after == TransformersEngine(other, tokenizer).generate(prompts, 2, SAMPLING)


def test_load_weights_refuses_a_missing_weight(new_model: Any, tokenizer: Any) -> None:
    model = new_model("llama")
    engine = TransformersEngine(copy.deepcopy(model), tokenizer)
    weights = [
        (name, weight) for name, weight in model.named_parameters() if name != "model.norm.weight"
    ]
    with pytest.raises(ValueError, match=r"no values for 1 weights, such as model\.norm\.weight"):
        engine.load_weights(weights)


def test_weights_are_rounded_to_the_engines_dtype(new_model: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(new_model("llama").bfloat16(), tokenizer)
    other = new_model("llama", seed=1)
    engine.load_weights(other.named_parameters())
    assert engine.dtype == torch.bfloat16
    for name, weight in engine.model.named_parameters():
        assert torch.equal(weight, other.get_parameter(name).to(torch.bfloat16))


def test_the_engine_computes_no_gradients(new_model: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(new_model("llama").train(), tokenizer)
    assert not engine.model.training
    assert not any(weight.requires_grad for weight in engine.model.parameters())


# --- sampling one token


def test_frequencies_match_probabilities() -> None:
    logits = torch.tensor([1.0, 0.0, -INF, -2.0, 0.5, -5.0, -INF])
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(20_000, generator=generator, dtype=torch.float64)
    for temperature in (1.0, 2.0):
        tokens, _, _ = sample(logits.expand(20_000, -1), uniforms, temperature)
        counts = torch.bincount(tokens, minlength=7).double()
        expected = 20_000 * (logits.double() / temperature).softmax(0)
        possible = expected > 0
        assert counts[~possible].sum() == 0
        chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert chi_square < 18.5  # 4 degrees of freedom: 1 in 1000


@given(
    st.lists(st.lists(st.floats(-8, 8), min_size=6, max_size=6), min_size=1, max_size=5),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.2, 3),
)
def test_sampling_inverts_the_cumulative_distribution(
    rows: list[list[float]], uniform: float, temperature: float
) -> None:
    logits = torch.tensor(rows)
    uniforms = torch.full((len(rows),), uniform, dtype=torch.float64)
    sampled, logprobs, entropies = sample(logits, uniforms, temperature)
    for row, token, logprob, entropy in zip(
        logits.tolist(), sampled.tolist(), logprobs, entropies, strict=True
    ):
        scale = max(row)
        weights = [math.exp((logit - scale) / temperature) for logit in row]
        probabilities = [weight / sum(weights) for weight in weights]
        assert sum(probabilities[:token]) <= uniform + 1e-6
        assert sum(probabilities[: token + 1]) >= uniform - 1e-6
        assert logprob.item() == pytest.approx(math.log(probabilities[token]), abs=1e-4)
        assert entropy.item() == pytest.approx(
            -sum(p * math.log(p) for p in probabilities), abs=1e-4
        )


def test_the_smallest_and_largest_uniforms_give_possible_tokens() -> None:
    logits = torch.tensor([[-INF, 0.0, 1.0, -INF]]).expand(2, -1)
    sampled, _, _ = sample(logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), 1.0)
    assert sampled.tolist() == [1, 2]


def test_temperature_0_takes_the_most_likely_token_and_returns_its_logprob_at_temperature_1() -> (
    None
):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    sampled, logprobs, _ = sample(logits, torch.tensor([0.99, 0.99], dtype=torch.float64), 0.0)
    assert sampled.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))
