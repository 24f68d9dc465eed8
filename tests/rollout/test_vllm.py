"""The vLLM engine, for real: it samples from the weights pushed last, and from no others (`make test-vllm`)."""

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
        "vLLM is not installed here: make test-vllm has an environment with it",
        allow_module_level=True,
    )

POSITIONS = 512
GREEDY = Sampling(temperature=0.0, max_new_tokens=24)
WARM = Sampling(temperature=0.7, max_new_tokens=12, seed=5, stream="train/3")
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def build(new_model: Build) -> Build:
    """Heads of 32, the smallest for which vLLM has a kernel on the CPU."""

    def model(family: str, seed: int = 0) -> Any:
        return new_model(
            family, seed=seed, max_position_embeddings=POSITIONS, hidden_size=64, head_dim=32
        )

    return model


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    """An untied and a tied head."""
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
    """With the weights of seed 0, whatever a test before pushed."""
    push(engines(family), build(family))
    return engines(family)


@pytest.fixture(scope="module")
def long_prompts(tokenizer: Any) -> list[Prompt]:
    """Longer than two blocks of the prefix cache: short ones are never answered from it."""
    rng = random.Random(0)
    lengths = (300, 300, 410, 290)
    return [
        Prompt(f"long/{place}", "", tuple(rng.randrange(2, len(tokenizer)) for _ in range(length)))
        for place, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def prompts(ragged_pairs: Any) -> list[Prompt]:
    return [prompt for prompt, _ in ragged_pairs(5, seed=4)]


def push(engine: VLLMEngine, model: Any) -> None:
    engine.load_weights(Policy(model).named_weights())


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def greedy_of_transformers(
    model: Any, prompts: list[Prompt], ends: set[int]
) -> list[list[tuple[int, ...]]]:
    """Prompt by prompt, so that nothing is padded; cut after the first end."""
    groups = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        row = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_new_tokens, do_sample=False,
            eos_token_id=sorted(ends),
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        groups.append([tuple(row)])
    return groups


# --- weights


def test_greedy_follows_every_push_token_for_token(
    engine: VLLMEngine,
    build: Build,
    family: str,
    tokenizer: Any,
    long_prompts: list[Prompt],
    prompts: list[Prompt],
) -> None:
    asked = [*long_prompts, *prompts]
    answers = []
    for seed in (0, 1, 0):  # θ, θ′ and θ again
        model = build(family, seed)
        push(engine, model)
        answers.append(tokens(engine.generate(asked, 1, GREEDY)))
        assert answers[-1] == greedy_of_transformers(model, asked, {tokenizer.eos_token_id})
    assert answers[0] == answers[2] != answers[1]


def test_without_emptying_the_prefix_cache_the_answers_would_be_those_of_earlier_weights(
    engine: VLLMEngine,
    build: Build,
    family: str,
    long_prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.generate(long_prompts, 1, GREEDY)
    other = build(family, seed=1)
    push(engine, other)
    right = tokens(engine.generate(long_prompts, 1, GREEDY))
    push(engine, build(family))
    engine.generate(long_prompts, 1, GREEDY)
    monkeypatch.setattr(engine, "_reset_cache", lambda: None)
    push(engine, other)
    assert tokens(engine.generate(long_prompts, 1, GREEDY)) != right


def test_a_small_step_is_felt(
    engine: VLLMEngine, build: Build, family: str, long_prompts: list[Prompt], plain_scores: Any
) -> None:
    """As unlearning makes one: log-probabilities are those of θ′, not of θ."""
    moved = build(family)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.mul_(1.01)
    push(engine, moved)
    [[drawn]] = engine.generate(long_prompts[:1], 1, WARM)
    after = plain_scores(moved, long_prompts[0], drawn, 0.7).logprobs.tolist()
    before = plain_scores(build(family), long_prompts[0], drawn, 0.7).logprobs.tolist()
    assert drawn.logprobs == pytest.approx(after, abs=1e-4)
    assert drawn.logprobs != pytest.approx(before, abs=1e-2)


def test_the_engine_starts_with_the_models_weights_and_holds_a_copy(
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


def test_a_missing_weight_is_refused(engine: VLLMEngine, build: Build, family: str) -> None:
    weights = [
        (name, weight)
        for name, weight in build(family).named_parameters()
        if name != "model.norm.weight"
    ]
    with pytest.raises(ValueError, match=r"1 weights stale, such as model\.norm\.weight"):
        engine.load_weights(weights)


def test_other_probabilities_than_the_policys_are_refused(
    engine: VLLMEngine, build: Build, family: str
) -> None:
    engine._check_family(build(family))
    with pytest.raises(
        UserError, match=r"computes other probabilities for .*ForCausalLM than transformers"
    ):
        engine._check_family(build(family, seed=1))


# --- draws


def test_logprobs_are_the_policys_at_the_sampling_temperature(
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


def test_a_row_draws_the_same_tokens_in_any_company(
    engine: VLLMEngine, prompts: list[Prompt]
) -> None:
    whole = engine.generate(prompts, 4, WARM)
    assert len({completion.token_ids for completion in whole[0]}) > 1
    order = [3, 1, 4, 0, 2]
    assert tokens(engine.generate([prompts[p] for p in order], 4, WARM)) == tokens(
        [whole[p] for p in order]
    )
    assert tokens(engine.generate(prompts[2:3], 4, WARM)) == tokens(whole[2:3])
    second = engine.generate(prompts, 2, replace(WARM, first_sample=2))
    assert tokens(second) == tokens([group[2:] for group in whole])
    assert tokens(engine.generate(prompts, 4, replace(WARM, stream="train/4"))) != tokens(whole)


def test_frequencies_match_probabilities(
    engine: VLLMEngine, build: Build, family: str, prompts: list[Prompt]
) -> None:
    number, prompt = 3000, prompts[0]
    drawn = flat(engine.generate([prompt], number, Sampling(1.0, 1, seed=11)))
    with torch.no_grad():
        expected = number * build(family)(torch.tensor([prompt.token_ids])).logits[
            0, -1
        ].double().softmax(0)
    counts = torch.bincount(
        torch.tensor([c.token_ids[0] for c in drawn]), minlength=len(expected)
    ).double()
    common = expected >= 5
    cells = [
        *zip(counts[common], expected[common], strict=True),
        (counts[~common].sum(), expected[~common].sum()),
    ]
    chi_square = sum(float((count - mean) ** 2 / mean) for count, mean in cells)
    free = len(cells) - 1
    assert free >= 5
    assert chi_square < free + 4 * (2 * free) ** 0.5


# --- ends


def test_completions_end_with_their_only_end_or_at_the_limit(
    build: Build, tokenizer: Any, prompts: list[Prompt]
) -> None:
    model = build("llama")
    model.generation_config.eos_token_id = list(range(1, model.config.vocab_size, 8))
    ends = {*model.generation_config.eos_token_id, tokenizer.eos_token_id}
    engine = VLLMEngine(model, tokenizer, torch.float32)
    drawn = flat(engine.generate(prompts, 8, WARM))
    finished = [completion for completion in drawn if completion.finished]
    cut_off = [completion for completion in drawn if not completion.finished]
    assert finished
    assert cut_off
    for completion in finished:
        assert completion.token_ids[-1] in ends
        assert completion.text == tokenizer.decode(
            list(completion.token_ids), skip_special_tokens=True
        )
    assert not any(ends & set(completion.token_ids[:-1]) for completion in drawn)
    assert {len(completion.token_ids) for completion in cut_off} == {WARM.max_new_tokens}
    length = max(len(completion.token_ids) for completion in finished)
    again = flat(engine.generate(prompts, 8, replace(WARM, max_new_tokens=length)))
    assert any(completion.finished and len(completion.token_ids) == length for completion in again)
    assert [completion.finished for completion in again] == [
        completion.finished for completion in drawn
    ]


def test_a_completion_also_ends_at_the_stop_text(
    build: Build, tokenizer: Any, prompts: list[Prompt]
) -> None:
    model = build("llama")
    drawn = flat(VLLMEngine(model, tokenizer, torch.float32, stop="=").generate(prompts, 16, WARM))
    [equals] = tokenizer.convert_tokens_to_ids(["="])
    stopped = [completion for completion in drawn if completion.token_ids[-1] == equals]
    assert stopped
    assert all(
        completion.finished and completion.text.rstrip().endswith("=") for completion in stopped
    )
    assert not any(equals in completion.token_ids[:-1] for completion in drawn)


def test_what_there_is_no_room_for_is_refused(
    engine: VLLMEngine, long_prompts: list[Prompt]
) -> None:
    assert engine.max_tokens == POSITIONS
    with pytest.raises(
        UserError, match="max_new_tokens = 300 after a prompt of 410 tokens is more than the 512"
    ):
        engine.generate(long_prompts, 1, Sampling(1.0, 300))
    with pytest.raises(UserError, match=r"temperature 0\.001 .* give 0 or at least 0\.01"):
        engine.generate(long_prompts, 1, Sampling(0.001, 8))


# --- the host process


def test_the_process_keeps_its_random_states_and_its_threads(
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
    'rollout.engine="vllm"', "training.num_steps=4", "training.prompts_per_step=8", "training.prompts_per_mini_batch=8",
    "task.num_evaluation=4", "evaluation.num_samples=2", "evaluation.every=2", "evaluation.quick_problems=2",
    "training.checkpoint_every=2",
]  # fmt: skip


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """Without times."""
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Through the command line, in a process of its own."""
    out = tmp_path_factory.mktemp("vllm") / "run"
    knobs = [part for knob in KNOBS for part in ("--set", knob)]
    command = [sys.executable, "-m", "eepo", "train", "demo/eepo", "--out", str(out), *knobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def test_a_run_trains_unlearns_and_evaluates(whole_run: Path) -> None:
    metrics = rows(whole_run, "metrics.jsonl")
    assert len(metrics) == 4
    assert any(row["unlearn/weights_changed_share"] > 0 for row in metrics)
    for row in metrics:
        assert row["stage1/ratio_mean"] == pytest.approx(1, abs=1e-3)  # sampled from θ itself
        assert row["grad_norm"] > 0
    apart = [abs(row["stage2/ratio_mean"] - 1) for row in metrics]
    assert max(apart) > 1e-3  # sampled from θ′
    assert {row["kind"] for row in rows(whole_run, "evaluations.jsonl")} == {"quick", "full"}


def test_a_resumed_run_equals_one_that_never_stopped(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shorter = [knob.replace("num_steps=4", "num_steps=2") for knob in KNOBS]
    for knobs, resume in ((shorter, False), (KNOBS, True)):
        quiet = Progress(Console(file=io.StringIO()))
        build_trainer(recipe.load_run("demo/eepo", knobs), out, resume, quiet).run()
    for got, expected in zip(
        rows(out, "metrics.jsonl"), rows(whole_run, "metrics.jsonl"), strict=True
    ):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_entropies_of_the_sampled_tokens_are_near_the_policys(whole_run: Path) -> None:
    """An estimate, without bias: over all tokens of a step it is close to that of the full distributions."""
    for row in rows(whole_run, "metrics.jsonl"):
        assert row["entropy"] == pytest.approx(row["policy_entropy"], rel=0.25)
