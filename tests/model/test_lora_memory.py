"""Tests of the memory estimate with LoRA, against numbers computed by hand for a small shape."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eepo.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainingConfig
from eepo.experiments.doctor import Finding, advise_memory, examine
from eepo.model import memory
from eepo.model.memory import Budget, MemoryEstimate, Shape

SHAPE = Shape(
    num_parameters=1000,
    num_layers=2,
    hidden_size=8,
    intermediate_size=32,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=50,
    max_positions=64,
)
LORA_SHAPE = dataclasses.replace(SHAPE, num_adapter_parameters=20, num_outside_layers=400)
RUN = RunConfig(
    model=ModelConfig(micro_batch_tokens=40, head_tokens=8, lora_rank=2),
    algorithm=AlgorithmConfig(num_stages=1, group_size=4, max_new_tokens=10, kl_coef=0.1),
    training=TrainingConfig(prompts_per_step=8, prompts_per_mini_batch=4),
    rollout=RolloutConfig(max_rows=16),
)


def estimate(shape: Shape, merges: bool = True, cuda: bool = True) -> MemoryEstimate:
    rollout = dataclasses.replace(RUN.rollout, merge_lora=merges)
    config = dataclasses.replace(RUN, rollout=rollout)
    dtype = torch.bfloat16 if cuda else torch.float32
    return Budget(shape, config, 10, dtype, cuda=cuda, free=0).estimate()


def test_a_base_takes_2_bytes_and_an_adapter_12() -> None:
    merged = {"policy": 2 * 1000 + 4 * 20, "optimizer": 8 * 20, "rollout copy": 2 * (1000 - 400)}
    assert estimate(LORA_SHAPE).persistent == merged
    assert estimate(LORA_SHAPE, merges=False).persistent == merged | {"rollout copy": 2 * 20}
    on_cpu = estimate(LORA_SHAPE, cuda=False).persistent
    assert on_cpu == {"policy": 4 * 1020, "optimizer": 8 * 20, "rollout copy": 4 * 600}


def test_an_update_has_gradients_of_the_adapter_and_casts_no_base() -> None:
    full, adapter = (estimate(shape).phases["update"] for shape in (SHAPE, LORA_SHAPE))
    assert full - adapter == 4 * (1000 - 20) + 2 * (1000 - 20)  # gradients, bf16 copies
    on_cpu = [estimate(shape, cuda=False).phases["update"] for shape in (SHAPE, LORA_SHAPE)]
    assert on_cpu[0] - on_cpu[1] == 4 * (1000 - 20)


def test_checkpoints_hold_the_adapter_and_final_the_whole_model() -> None:
    one = 4 * 20 + 8 * 20
    assert memory.checkpoint_bytes(LORA_SHAPE, RUN, 3) == 3 * one + 4 * (1000 + 20)


def test_advice_shares_the_base_before_it_rounds_moments() -> None:
    least = ModelConfig(  # no knob is left that saves memory without a change of results
        **{"lora_rank": 2, "gradient_checkpointing": True},
        **{"micro_batch_tokens": 40, "head_tokens": 8},
    )
    config = dataclasses.replace(RUN, model=least)
    shared = dataclasses.replace(config, rollout=RolloutConfig(max_rows=1, merge_lora=False))
    free = Budget(LORA_SHAPE, shared, 10, torch.bfloat16, cuda=True, free=0).estimate().total
    budget = Budget(LORA_SHAPE, config, 10, torch.bfloat16, cuda=True, free=free)
    assert advise_memory(budget) == "rollout.merge_lora = false"
    tiny = dataclasses.replace(budget, free=10)
    assert advise_memory(tiny) == "a smaller model, or a larger device"
    full = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, lora_rank=0))
    without = Budget(SHAPE, full, 10, torch.bfloat16, cuda=True, free=10)
    assert "model.lora_rank = 16 (train an adapter)" in advise_memory(without)


def model_finding(*knobs: str) -> Finding:
    findings = examine("shortcut/eepo", ["model.lora_rank=8", "model.device=cpu", *knobs], 1)
    return next(finding for finding in findings if finding.name in ("model", "precision"))


def test_doctor_shows_the_size_of_the_adapter_and_checks_it() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    finding = model_finding()
    assert finding.level == "ok"
    assert "an adapter of 0.0 million parameters trained in float32 on a base" in finding.text
    finding = model_finding('model.lora_targets=["wte"]')
    assert finding.level == "fail"
    assert '"wte" is no linear layer' in finding.text
    finding = model_finding("rollout.merge_lora=false", 'rollout.dtype="bfloat16"')
    assert finding.level == "fail"
    assert "needs one dtype" in finding.text
