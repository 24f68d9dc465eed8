"""The vLLM engine with a real vLLM: it samples from the weights loaded last (`make test-vllm`)."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.model.policy import Policy
from eepo.rollout.vllm import VLLMEngine, installed_version
from eepo.runs.progress import Progress
from eepo.types import Completion, Prompt, Sampling, UserError

if installed_version() is None:
    pytest.skip(
        "vLLM is not installed; `make test-vllm` creates an environment with it",
        allow_module_level=True,
    )

POSITIONS = 512
GREEDY = Sampling(temperature=0.0, max_new_tokens=24)
WARM = Sampling(temperature=0.7, max_new_tokens=12, seed=5, stream="train/3")
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def build(new_model: Build) -> Build:
    """Builds tiny models with heads of 32 dimensions, the fewest that vLLM supports on a CPU."""

    def model(family: str, seed: int = 0) -> Any:
        return new_model(
            family, seed=seed, max_position_embeddings=POSITIONS, hidden_size=64, head_dim=32
        )

    return model


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    """Families with an untied and with a tied head."""
    return request.param


@pytest.fixture(scope="module")
def engines(build: Build, tokenizer: Any) -> Iterator[Callable[[str], VLLMEngine]]:
    started: dict[str, VLLMEngine] = {}

    def get(family: str) -> VLLMEngine:
        if family not in started:
            started[family] = VLLMEngine(build(family), tokenizer, torch.float32, max_rows=64)
        return started[family]

    yield get
    started.clear()


@pytest.fixture
def engine(engines: Callable[[str], VLLMEngine], build: Build, family: str) -> VLLMEngine:
    """An engine with the weights of seed 0, whatever an earlier test loaded."""
    load(engines(family), build(family))
    return engines(family)


@pytest.fixture(scope="module")
def long_prompts(tokenizer: Any) -> list[Prompt]:
    """Prompts longer than two blocks of the prefix cache, which is not used for short ones."""
    rng = random.Random(0)
    lengths = (300, 300, 410, 290)
    return [
        Prompt(f"long/{index}", "", tuple(rng.randrange(2, len(tokenizer)) for _ in range(length)))
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def prompts(ragged_pairs: Any) -> list[Prompt]:
    return [prompt for prompt, _ in ragged_pairs(5, seed=4)]


def load(engine: VLLMEngine, model: Any) -> None:
    engine.load_weights(Policy(model).named_weights())


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def greedy_of_transformers(
    model: Any, prompts: list[Prompt], ends: set[int]
) -> list[list[tuple[int, ...]]]:
    """Generate prompt by prompt, without padding, up to the first end token."""
    groups = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        row = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_new_tokens,
            do_sample=False, eos_token_id=sorted(ends),
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        groups.append([tuple(row)])
    return groups


# --- weights


def test_greedy_tokens_follow_every_load_weights(
    engine: VLLMEngine,
    build: Build,
    family: str,
    tokenizer: Any,
    long_prompts: list[Prompt],
    prompts: list[Prompt],
) -> None:
    all_prompts = [*long_prompts, *prompts]
    results = []
    for seed in (0, 1, 0):  # θ, θ′ and θ again
        model = build(family, seed)
        load(engine, model)
        results.append(tokens(engine.generate(all_prompts, 1, GREEDY)))
        assert results[-1] == greedy_of_transformers(model, all_prompts, {tokenizer.eos_token_id})
    assert results[0] == results[2] != results[1]


def test_without_clearing_the_prefix_cache_old_weights_would_be_used(
    engine: VLLMEngine,
    build: Build,
    family: str,
    long_prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.generate(long_prompts, 1, GREEDY)
    other = build(family, seed=1)
    load(engine, other)
    expected = tokens(engine.generate(long_prompts, 1, GREEDY))
    load(engine, build(family))
    engine.generate(long_prompts, 1, GREEDY)
    monkeypatch.setattr(engine, "_reset_prefix_cache", lambda: None)
    load(engine, other)
    assert tokens(engine.generate(long_prompts, 1, GREEDY)) != expected


def test_a_small_change_of_weights_changes_logprobs(
    engine: VLLMEngine, build: Build, family: str, long_prompts: list[Prompt], plain_scores: Any
) -> None:
    """As after unlearning: log-probabilities are those of θ′, not of θ."""
    moved = build(family)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.mul_(1.01)
    load(engine, moved)
    [[completion]] = engine.generate(long_prompts[:1], 1, WARM)
    after = plain_scores(moved, long_prompts[0], completion, 0.7).logprobs.tolist()
    before = plain_scores(build(family), long_prompts[0], completion, 0.7).logprobs.tolist()
    assert completion.logprobs == pytest.approx(after, abs=1e-4)
    assert completion.logprobs != pytest.approx(before, abs=1e-2)


def test_the_engine_starts_with_a_copy_of_the_models_weights(
    build: Build, tokenizer: Any, long_prompts: list[Prompt]
) -> None:
    model = build("qwen2")
    expected = greedy_of_transformers(model, long_prompts, {tokenizer.eos_token_id})
    engine = VLLMEngine(model, tokenizer, torch.float32)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert tokens(engine.generate(long_prompts, 1, GREEDY)) == expected
    engine.load_weights(weights.items())
    for weight in weights.values():
        weight.zero_()
    assert tokens(engine.generate(long_prompts, 1, GREEDY)) == expected


def test_load_weights_refuses_a_missing_weight(
    engine: VLLMEngine, build: Build, family: str
) -> None:
    weights = [
        (name, weight)
        for name, weight in build(family).named_parameters()
        if name != "model.norm.weight"
    ]
    with pytest.raises(ValueError, match=r"no values for 1 weights, such as model\.norm\.weight"):
        engine.load_weights(weights)


def test_logprobs_that_differ_from_the_policys_are_refused(
    engine: VLLMEngine, build: Build, family: str
) -> None:
    engine._check_logprobs(build(family))
    differ = r"log-probabilities of .*ForCausalLM differ from those of transformers by"
    with pytest.raises(UserError, match=differ):
        engine._check_logprobs(build(family, seed=1))


# --- sampling


def test_logprobs_are_those_of_the_policy_at_the_sampling_temperature(
    engine: VLLMEngine, build: Build, family: str, prompts: list[Prompt], plain_scores: Any
) -> None:
    model = build(family)
    for sampling in (WARM, replace(WARM, temperature=1.3), GREEDY):
        for prompt, group in zip(prompts, engine.generate(prompts, 3, sampling), strict=True):
            for completion in group:
                expected = plain_scores(
                    model, prompt, completion, sampling.temperature or 1.0
                ).logprobs.tolist()
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)
                assert completion.entropies == ()
                assert completion.entropy_sum() == pytest.approx(-sum(completion.logprobs))


def test_tokens_of_a_row_do_not_depend_on_the_batch(
    engine: VLLMEngine, prompts: list[Prompt]
) -> None:
    whole = engine.generate(prompts, 4, WARM)
    assert len({completion.token_ids for completion in whole[0]}) > 1
    order = [3, 1, 4, 0, 2]
    assert tokens(engine.generate([prompts[index] for index in order], 4, WARM)) == tokens(
        [whole[index] for index in order]
    )
    assert tokens(engine.generate(prompts[2:3], 4, WARM)) == tokens(whole[2:3])
    second = engine.generate(prompts, 2, replace(WARM, first_sample=2))
    assert tokens(second) == tokens([group[2:] for group in whole])
    assert tokens(engine.generate(prompts, 4, replace(WARM, stream="train/4"))) != tokens(whole)


def test_frequencies_match_probabilities(
    engine: VLLMEngine, build: Build, family: str, prompts: list[Prompt]
) -> None:
    num_samples, prompt = 3000, prompts[0]
    sampled = flat(engine.generate([prompt], num_samples, Sampling(1.0, 1, seed=11)))
    with torch.no_grad():
        expected = num_samples * build(family)(torch.tensor([prompt.token_ids])).logits[
            0, -1
        ].double().softmax(0)
    counts = torch.bincount(
        torch.tensor([c.token_ids[0] for c in sampled]), minlength=len(expected)
    ).double()
    common = expected >= 5
    cells = [
        *zip(counts[common], expected[common], strict=True),
        (counts[~common].sum(), expected[~common].sum()),
    ]
    chi_square = sum(float((count - mean) ** 2 / mean) for count, mean in cells)
    degrees_of_freedom = len(cells) - 1
    assert degrees_of_freedom >= 5
    assert chi_square < degrees_of_freedom + 4 * (2 * degrees_of_freedom) ** 0.5


# --- end tokens


def test_completions_end_with_an_end_token_or_at_the_limit(
    build: Build, tokenizer: Any, prompts: list[Prompt]
) -> None:
    model = build("llama")
    model.generation_config.eos_token_id = list(range(1, model.config.vocab_size, 8))
    ends = {*model.generation_config.eos_token_id, tokenizer.eos_token_id}
    engine = VLLMEngine(model, tokenizer, torch.float32)
    sampled = flat(engine.generate(prompts, 8, WARM))
    finished = [completion for completion in sampled if completion.finished]
    cut_off = [completion for completion in sampled if not completion.finished]
    assert finished
    assert cut_off
    for completion in finished:
        assert completion.token_ids[-1] in ends
        assert completion.text == tokenizer.decode(
            list(completion.token_ids), skip_special_tokens=True
        )
    assert not any(ends & set(completion.token_ids[:-1]) for completion in sampled)
    assert {len(completion.token_ids) for completion in cut_off} == {WARM.max_new_tokens}
    length = max(len(completion.token_ids) for completion in finished)
    again = flat(engine.generate(prompts, 8, replace(WARM, max_new_tokens=length)))
    assert any(completion.finished and len(completion.token_ids) == length for completion in again)
    assert [completion.finished for completion in again] == [
        completion.finished for completion in sampled
    ]


def test_a_completion_also_ends_at_the_stop_text(
    build: Build, tokenizer: Any, prompts: list[Prompt]
) -> None:
    model = build("llama")
    sampled = flat(
        VLLMEngine(model, tokenizer, torch.float32, stop="=").generate(prompts, 16, WARM)
    )
    [equals] = tokenizer.convert_tokens_to_ids(["="])
    stopped = [completion for completion in sampled if completion.token_ids[-1] == equals]
    assert stopped
    assert all(
        completion.finished and completion.text.rstrip().endswith("=") for completion in stopped
    )
    assert not any(equals in completion.token_ids[:-1] for completion in sampled)


def test_too_long_or_too_cold_requests_are_refused(
    engine: VLLMEngine, long_prompts: list[Prompt]
) -> None:
    assert engine.max_tokens == POSITIONS
    with pytest.raises(
        UserError,
        match="max_new_tokens = 300 after a prompt of 410 tokens exceeds vLLM's limit of 512",
    ):
        engine.generate(long_prompts, 1, Sampling(1.0, 300))
    with pytest.raises(UserError, match=r"temperature 0\.001 .* allowed: 0, or at least 0\.01"):
        engine.generate(long_prompts, 1, Sampling(0.001, 8))


# --- the host process


def test_random_states_and_thread_settings_are_restored(
    build: Build, tokenizer: Any, prompts: list[Prompt]
) -> None:
    threads, switch = torch.get_num_threads(), torch.set_num_threads
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    engine = VLLMEngine(build("llama"), tokenizer, torch.float32)
    engine.generate(prompts, 2, WARM)
    engine.generate(prompts, 1, GREEDY)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    assert torch.get_num_threads() == threads
    assert torch.set_num_threads is switch


# --- runs

KNOBS = [
    'rollout.engine="vllm"', "training.num_steps=4", "training.prompts_per_step=8",
    "training.prompts_per_mini_batch=8", "training.checkpoint_every=2", "task.num_evaluation=4",
    "evaluation.num_samples=2", "evaluation.every=2", "evaluation.quick_problems=2",
    "model.device=cpu", "algorithm.gate_threshold=1.0", "algorithm.unlearn_lr=auto",
    "algorithm.unlearn_kl_target=2e-2", "algorithm.kl_coef=0.0", "training.learning_rate=1e-4",
]  # fmt: skip


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """Read a JSON Lines file without its timings."""
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run through the command line, in another process."""
    out = tmp_path_factory.mktemp("vllm") / "run"
    knobs = [part for knob in KNOBS for part in ("--set", knob)]
    command = [sys.executable, "-m", "eepo", "train", "countdown/eepo", "--out", str(out), *knobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def test_a_run_trains_unlearns_and_evaluates(whole_run: Path) -> None:
    metrics = rows(whole_run, "metrics.jsonl")
    assert len(metrics) == 4
    assert any(row["unlearn/weights_changed_share"] > 0 for row in metrics)
    for row in metrics:
        assert row["stage1/ratio_mean"] == pytest.approx(1, abs=1e-3)  # sampled from θ
        assert row["grad_norm"] > 0
    differences = [abs(row["stage2/ratio_mean"] - 1) for row in metrics]
    assert max(differences) > 1e-3  # sampled from θ′
    assert {row["kind"] for row in rows(whole_run, "evaluations.jsonl")} == {"quick", "full"}


def test_a_resumed_run_equals_an_uninterrupted_run(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shorter = [knob.replace("num_steps=4", "num_steps=2") for knob in KNOBS]
    for knobs, resume in ((shorter, False), (KNOBS, True)):
        quiet = Progress(Console(file=io.StringIO()))
        build_trainer(recipe.load_run("countdown/eepo", knobs), out, resume, quiet).run()
    for got, expected in zip(
        rows(out, "metrics.jsonl"), rows(whole_run, "metrics.jsonl"), strict=True
    ):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_estimated_entropies_are_close_to_the_policys(whole_run: Path) -> None:
    """The estimate from sampled tokens is unbiased: over a step it is close to the exact mean."""
    for row in rows(whole_run, "metrics.jsonl"):
        assert row["entropy"] == pytest.approx(row["policy_entropy"], rel=0.25)
