"""Behaviour that depends on how a recipe is turned into objects."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eepo import assemble
from eepo.algorithm import StepMetrics
from eepo.assemble import build_trainer, check_length
from eepo.config import (
    AlgorithmConfig,
    CountdownConfig,
    DatasetConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
    WarmupConfig,
)
from eepo.evaluation.options import BenchmarkOptions
from eepo.model.policy import Policy, Scores
from eepo.runs.progress import Progress
from eepo.trainer import Trainer
from eepo.types import Prompt, Sampling, UserError

TINY = RunConfig(
    task=CountdownConfig(num_evaluation=2),
    algorithm=AlgorithmConfig(group_size=4, max_new_tokens=12, kl_coef=0.0),
    training=TrainingConfig(
        num_steps=1, prompts_per_step=4, prompts_per_mini_batch=4, learning_rate=1e-4
    ),
)


def build(config: RunConfig, out: Path) -> Trainer:
    return build_trainer(config, out, resume=False, progress=Progress(Console(file=io.StringIO())))


def test_a_bf16_engine_rounds_weights_but_not_rotary_frequencies(tmp_path: Path) -> None:
    """Rounded frequencies are wrong by radians after 1,000 tokens, so θ′ would not be θ."""
    config = dataclasses.replace(TINY, rollout=RolloutConfig(dtype="bfloat16"))
    trainer = build(config, tmp_path / "run")
    engine = trainer.evaluator.engine
    assert engine.dtype == torch.bfloat16
    engine_frequencies, policy_frequencies = (
        dict(model.named_buffers())["model.rotary_emb.inv_freq"]
        for model in (engine.model, trainer.policy.model)
    )
    assert engine_frequencies.dtype == torch.float32
    assert torch.equal(engine_frequencies, policy_frequencies)


def test_training_and_evaluation_share_one_engine_and_one_policy(tmp_path: Path) -> None:
    trainer = build(TINY, tmp_path / "run")
    assert trainer.algorithm.engine is trainer.evaluator.engine
    assert trainer.algorithm.reward is trainer.evaluator.reward
    assert trainer.algorithm.policy is trainer.policy
    assert trainer.checkpointer.model is trainer.policy.model
    assert trainer.checkpointer.optimizer is trainer.algorithm.optimizer


def test_a_gradient_that_is_not_finite_is_an_error_and_leaves_the_weights(tmp_path: Path) -> None:
    trainer = build(TINY, tmp_path / "run")
    algorithm, prompts = trainer.algorithm, trainer.task.training_prompts(0, 4)
    before = {name: weight.clone() for name, weight in algorithm.policy.named_weights()}
    score = algorithm.policy.score

    def score_nan(*args: Any) -> Scores:
        scores = score(*args)
        scores.logprobs = scores.logprobs * torch.nan
        return scores

    algorithm.options = dataclasses.replace(algorithm.options, num_stages=1)
    algorithm.policy.score = score_nan
    with pytest.raises(UserError, match="the gradient norm is nan"):
        algorithm.step(prompts, Sampling(1.0, 12), StepMetrics())
    after = dict(algorithm.policy.named_weights())
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_prompt_with_unknown_tokens_is_an_error(tmp_path: Path) -> None:
    far = dataclasses.replace(TINY.task, out_of_range_min_target=300, out_of_range_max_target=500)
    with pytest.raises(UserError, match="tokenizer does not know"):
        build(dataclasses.replace(TINY, task=far), tmp_path / "run")


def with_max_new_tokens(number: int) -> RunConfig:
    algorithm = dataclasses.replace(TINY.algorithm, max_new_tokens=number)
    return dataclasses.replace(TINY, algorithm=algorithm)


def test_more_tokens_than_the_model_has_positions_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        build(with_max_new_tokens(127), tmp_path / "run")
    sets = build(TINY, tmp_path / "short").task.evaluation_sets()
    longest = max(len(prompt.token_ids) for prompts in sets.values() for prompt in prompts)
    assert str(caught.value) == (
        f"algorithm.max_new_tokens = 127 after a prompt of {longest} tokens exceeds the model's "
        f"128 positions; use at most {128 - longest}, or shorter prompts"
    )
    assert build(with_max_new_tokens(128 - longest), tmp_path / "fits")


def test_a_prompt_as_long_as_the_model_is_an_error_that_asks_for_shorter_prompts(
    new_model: Any,
) -> None:
    model = new_model("llama", max_position_embeddings=8)
    message = "tokens exceeds the model's 8 positions; use shorter prompts$"
    with pytest.raises(UserError, match=message):
        check_length(model, [Prompt("", "", (5,) * 8)], "--max-new-tokens", 1)


def test_the_engine_is_copied_before_the_policy_changes_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later copy would have the policy's packed attention and its hooks."""
    policy_on_cpu = assemble.build_policy

    def policy_as_on_gpu(model: Any, config: ModelConfig, merges: bool) -> Policy:
        policy = policy_on_cpu(model, config, merges=merges)
        policy.packed = policy._scorer.packing.enable_if_equivalent()
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output)
        return policy

    monkeypatch.setattr(assemble, "build_policy", policy_as_on_gpu)
    trainer = build(TINY, tmp_path / "run")
    engine = trainer.evaluator.engine
    assert trainer.policy.model.config._attn_implementation == "eepo"
    assert engine.model.config._attn_implementation == "sdpa"
    assert not engine.model.get_input_embeddings()._forward_hooks
    metrics = StepMetrics()
    sampling = Sampling(temperature=1.0, max_new_tokens=12, stream="train/0")
    trainer.algorithm.step(trainer.task.training_prompts(0, 4), sampling, metrics)
    assert metrics.result()["stage1/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_the_kv_cache_may_keep_memory_that_training_does_not_need(demo_model: Any) -> None:
    config, free = RunConfig(), 64 << 30
    assert assemble._cache_bytes(demo_model, config, 0) == 0
    cache_bytes = assemble._cache_bytes(demo_model, config, free)
    larger_model = dataclasses.replace(config.model, micro_batch_tokens=65536)
    larger = dataclasses.replace(config, model=larger_model)
    assert 0 < assemble._cache_bytes(demo_model, larger, free) < cache_bytes < free


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if weights are loaded or created."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the weights were loaded first")

    monkeypatch.setattr(assemble.loading, "load_model", refuse)
    monkeypatch.setattr(assemble, "new_model", refuse)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["train", "warmup", "eval"])
@pytest.mark.parametrize("missing", ["data", "package"])
def test_missing_data_or_packages_are_reported_before_weights_are_loaded(
    command: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grader.py").write_text("import no_such_package\n\ndef grade(gold, text): ...\n")
    (tmp_path / "some.jsonl").write_text('{"problem": "1 2 3 4 = 10 :", "answer": "5"}\n')
    file = "none.jsonl" if missing == "data" else "some.jsonl"
    task = DatasetConfig(train=file, template="{problem}")
    reward = RewardConfig(name="grader:grade", num_workers=1)
    out, progress = tmp_path / "run", Progress(Console(file=io.StringIO()))
    run = dataclasses.replace(TINY, task=task, reward=reward)
    warmup = WarmupConfig(task=task, reward=reward)
    evaluation = BenchmarkOptions(
        "builtin:countdown", (file,), template="{problem}", reward="grader:grade"
    )
    builds = {
        "train": lambda: build_trainer(run, out, resume=False, progress=progress),
        "warmup": lambda: assemble.build_warmup(warmup, out, resume=False, progress=progress),
        "eval": lambda: assemble.build_evaluation(evaluation, out, progress),
    }
    message = "none.jsonl" if missing == "data" else "the grading process did not start"
    with pytest.raises(UserError, match=message):
        builds[command]()
    assert not out.exists()


@pytest.mark.usefixtures("no_weights")
def test_a_missing_engine_is_reported_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eepo.rollout.vllm.installed_version", lambda: None)
    config = dataclasses.replace(TINY, rollout=RolloutConfig(engine="vllm"))
    with pytest.raises(UserError, match="vLLM is not installed"):
        build(config, tmp_path / "run")
