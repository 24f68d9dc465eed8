"""What only shows when a recipe has become objects."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eepo import assemble
from eepo.algorithm.metrics import StepMetrics
from eepo.assemble import build_trainer, check_length
from eepo.config import (
    AlgorithmConfig,
    CountdownConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from eepo.model.policy import Policy
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


def test_an_engine_in_bfloat16_rounds_weights_but_not_rotary_frequencies(tmp_path: Path) -> None:
    """Rounded frequencies turn by radians within a thousand tokens: θ′ would be another model than θ."""
    trainer = build(
        dataclasses.replace(TINY, rollout=RolloutConfig(dtype="bfloat16")), tmp_path / "run"
    )
    engine = trainer.algorithm.engine
    assert engine.dtype == torch.bfloat16
    frequencies = dict(engine.model.named_buffers())["model.rotary_emb.inv_freq"]
    assert frequencies.dtype == torch.float32
    own = dict(trainer.model.named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.equal(frequencies, own)


def test_a_gradient_that_is_not_a_number_stops_the_run_before_it_reaches_the_weights(
    tmp_path: Path,
) -> None:
    algorithm = build(TINY, tmp_path / "run").algorithm
    before = {name: weight.clone() for name, weight in algorithm.policy.named_weights()}
    prompts = build(TINY, tmp_path / "other").task.training_prompts(0, 4)
    score = algorithm.policy.score

    def broken(batch, temperature, *args, **kwargs):  # type: ignore[no-untyped-def]
        scores = score(batch, temperature, *args, **kwargs)
        scores.logprobs = scores.logprobs * torch.nan
        return scores

    algorithm.options = dataclasses.replace(algorithm.options, gate="never")
    algorithm.policy.score = broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match="gradient is nan"):
        algorithm.step(prompts, Sampling(1.0, 12), StepMetrics())
    assert all(
        torch.equal(weight, before[name]) for name, weight in algorithm.policy.named_weights()
    )


def test_a_prompt_that_the_tokenizer_does_not_know_is_refused(tmp_path: Path) -> None:
    far = dataclasses.replace(TINY.task, out_of_range_min_target=300, out_of_range_max_target=500)
    with pytest.raises(UserError, match="tokenizer does not know"):
        build(dataclasses.replace(TINY, task=far), tmp_path / "run")


def test_prompts_and_completions_longer_than_the_model_has_positions_are_refused(
    tmp_path: Path,
) -> None:
    def asked(number: int) -> Any:
        return dataclasses.replace(
            TINY, algorithm=dataclasses.replace(TINY.algorithm, max_new_tokens=number)
        )

    with pytest.raises(UserError) as refused:
        build(asked(127), tmp_path / "run")
    sets = build(TINY, tmp_path / "short").task.evaluation_sets()
    longest = max(len(prompt.token_ids) for prompts in sets.values() for prompt in prompts)
    assert str(refused.value) == (
        f"algorithm.max_new_tokens = 127 after a prompt of {longest} tokens is more than the model's 128 positions; "
        f"give at most {128 - longest}, or shorter prompts"
    )
    assert build(asked(128 - longest), tmp_path / "fits")


def test_a_prompt_that_leaves_no_room_is_told_to_be_shorter(new_model: Any) -> None:
    model = new_model("llama", max_position_embeddings=8)
    with pytest.raises(
        UserError, match=r"tokens is more than the model's 8 positions; give shorter prompts$"
    ):
        check_length(model, [Prompt("", "", (5,) * 8)], "--max-new-tokens", 1)


def test_the_engine_is_copied_before_the_policy_packs_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy made later would attend over the policy's own sequences, and hold its hooks."""
    as_on_the_cpu = assemble._policy

    def as_on_a_gpu(model: Any, config: ModelConfig) -> Policy:
        policy = as_on_the_cpu(model, config)
        policy.packed = policy._scorer.packing.adopt()
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output)
        return policy

    monkeypatch.setattr(assemble, "_policy", as_on_a_gpu)
    trainer = build(TINY, tmp_path / "run")
    engine = trainer.algorithm.engine
    assert trainer.model.config._attn_implementation == "eepo"
    assert engine.model.config._attn_implementation == "sdpa"
    assert not engine.model.get_input_embeddings()._forward_hooks
    row = StepMetrics()
    trainer.algorithm.step(
        trainer.task.training_prompts(0, 4),
        Sampling(temperature=1.0, max_new_tokens=12, stream="train/0"),
        row,
    )
    assert row.result()["stage1/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_a_cache_may_stay_where_the_policy_s_training_leaves_room(demo_model: Any) -> None:
    config = RunConfig()
    assert assemble._room_for_cache(demo_model, config, 0) == 0
    room = assemble._room_for_cache(demo_model, config, 64 << 30)
    larger = dataclasses.replace(
        config, model=dataclasses.replace(config.model, micro_batch_tokens=65536)
    )
    assert 0 < assemble._room_for_cache(demo_model, larger, 64 << 30) < room < 64 << 30
