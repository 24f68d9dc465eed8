"""Tests of the memory estimate, against numbers computed by hand for a small shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eepo.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainingConfig
from eepo.model import loading, memory
from eepo.model.memory import Budget, MemoryEstimate, Shape
from eepo.types import UserError

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
RUN = RunConfig(
    model=ModelConfig(micro_batch_tokens=40, head_tokens=8),
    algorithm=AlgorithmConfig(num_stages=1, group_size=4, max_new_tokens=10, kl_coef=0.0),
    training=TrainingConfig(prompts_per_step=8, prompts_per_mini_batch=4),
    rollout=RolloutConfig(max_rows=16),
)


def budget(config: RunConfig, shape: Shape = SHAPE, free: int = 0) -> Budget:
    return Budget(shape, config, 10, torch.float32, cuda=False, free=free)


def estimate(
    config: RunConfig, dtype: torch.dtype = torch.float32, cuda: bool = False
) -> MemoryEstimate:
    return dataclasses.replace(budget(config), rollout_dtype=dtype, cuda=cuda).estimate()


def change(section: str, **knobs: Any) -> RunConfig:
    changed = dataclasses.replace(getattr(RUN, section), **knobs)
    return dataclasses.replace(RUN, **{section: changed})


def test_shape_is_read_without_loading_the_weights(demo_model: Any) -> None:
    shape = memory.shape_of(*loading.load_shape(ModelConfig()))
    assert shape.num_parameters == sum(weight.numel() for weight in demo_model.parameters())
    assert (shape.num_layers, shape.hidden_size) == (4, 128)
    assert (shape.vocab_size, shape.max_positions) == (211, 128)
    key_projection = demo_model.model.layers[0].self_attn.k_proj
    assert shape.num_key_value_heads * shape.head_dim == key_projection.out_features


def test_shape_of_a_family_that_omits_numbers() -> None:
    from transformers import GPT2Config

    shape = memory.shape_of(GPT2Config(n_embd=64, n_head=4, n_layer=3, n_positions=32), 5)
    assert shape == Shape(5, 3, 64, 256, 4, 16, 50257, 32)


def test_persistent_memory() -> None:
    assert estimate(RUN).persistent == {"policy": 4000, "optimizer": 8000, "rollout copy": 4000}
    assert estimate(RUN, torch.bfloat16).persistent["rollout copy"] == 2000
    with_kl = change("algorithm", kl_coef=1e-4)
    assert estimate(with_kl).persistent["reference"] == 4000
    assert estimate(with_kl, cuda=True).persistent["reference"] == 2000


def test_optimizer_moments_take_8_4_or_2_bytes_per_parameter() -> None:
    configs = [change("training", optimizer=name) for name in ("adamw", "adamw_bf16", "adamw_8bit")]
    sizes = [estimate(config).persistent["optimizer"] for config in configs]
    assert sizes == [8000, 4000, 2031]  # 8 bit: two scales of 4 bytes per 256 weights
    on_disk = [memory.checkpoint_bytes(SHAPE, config, 3) for config in configs]
    assert on_disk == [3 * (4000 + size) + 4000 for size in sizes]


def test_sampling_counts_the_kv_cache_and_one_distribution_per_row() -> None:
    # 16 rows of 10 + 10 tokens. KV: 2 x 2 layers x 2 heads x 4 x 4 bytes = 128 bytes per token.
    # The cache may be half as large again, because it grows by doubling.
    sampling = estimate(RUN).phases["sampling"]
    assert sampling == 16 * 20 * 128 * 3 // 2 + 16 * 50 * 32
    # With 4 rows at a time it takes a quarter.
    assert estimate(change("rollout", max_rows=4)).phases["sampling"] * 4 == sampling


def test_update_counts_gradients_activations_and_logits() -> None:
    # A layer keeps 6 x 4 x 8 + 4 x 4 x (8 + 32) = 832 bytes per token.
    # A micro-batch has 40 tokens. Logits exist for 8 of them at one time.
    assert estimate(RUN).phases["update"] == 4000 + 40 * 2 * 832 + 8 * 50 * 20
    # With checkpointing each layer keeps its fp32 input, and one layer is recomputed.
    checkpointing = change("model", gradient_checkpointing=True)
    expected = 4000 + 40 * (2 * 4 * 8 + 832) + 8 * 50 * 20
    assert estimate(checkpointing).phases["update"] == expected


def test_update_never_splits_a_row() -> None:
    # A row has 20 tokens, although 5 were asked for.
    small = estimate(change("model", micro_batch_tokens=5)).phases["update"]
    assert small == 4000 + 20 * 2 * 832 + 8 * 50 * 20


def test_prompt_tokens_have_no_logits() -> None:
    # Half of the 40 tokens belong to prompts.
    all_logits = estimate(change("model", head_tokens=999)).phases["update"]
    assert all_logits == 4000 + 40 * 2 * 832 + 20 * 50 * 20


def test_update_on_a_gpu_is_in_bf16() -> None:
    # Matrix products keep two bytes per value, and the weights are cast to bf16.
    layer = 192 + 4 * 2 * 40
    update = estimate(RUN, cuda=True).phases["update"]
    assert update == 4000 + 40 * 2 * layer + 8 * 50 * 6 + 2000
    # With checkpointing one matrix is cast at a time. The LM head, 50 x 8, is the largest.
    checkpointing = change("model", gradient_checkpointing=True)
    update = estimate(checkpointing, cuda=True).phases["update"]
    assert update == 4000 + 40 * (2 * 4 * 8 + layer) + 8 * 50 * 6 + 2 * 50 * 8


def test_compiled_layers_keep_less() -> None:
    # Norms and activations are recomputed: 2 x 4 x 8 + 2 x (4.5 x 8 + 3 x 32) = 328 bytes per
    # token instead of 512.
    compiled = change("model", compile="on")
    update = estimate(compiled, cuda=True).phases["update"]
    assert update == 4000 + 40 * 2 * 328 + 8 * 50 * 6 + 2000
    assert estimate(compiled).phases == estimate(RUN).phases


def test_on_a_gpu_sampling_needs_one_row_and_the_cache_is_separate() -> None:
    on_gpu = estimate(RUN, torch.bfloat16, cuda=True)
    assert on_gpu.phases["sampling"] == 20 * 64 + 16 * 50 * 6
    assert on_gpu.kv_cache == 16 * 20 * 64
    assert estimate(RUN).kv_cache == 0


def test_fp32_training_needs_the_same_on_gpu_and_cpu() -> None:
    on_gpu = estimate(change("model", compute_dtype="float32"), cuda=True)
    on_cpu = estimate(RUN)
    assert on_gpu.phases["update"] == on_cpu.phases["update"]
    assert on_gpu.persistent == on_cpu.persistent
    assert estimate(RUN, cuda=True).phases["update"] < on_gpu.phases["update"]


def test_total_counts_only_the_largest_phase() -> None:
    two_stages = estimate(change("algorithm", num_stages=2))
    assert two_stages.largest_phase == "sampling"
    assert two_stages.total == 16000 + two_stages.phases["sampling"]
    without_unlearning = estimate(change("algorithm", num_stages=2, gate="never"))
    assert two_stages.phases == without_unlearning.phases


def test_the_cache_keeps_what_training_leaves_with_a_safety_margin() -> None:
    """Qwen2.5-3B needs 73 GB: 12 bytes per weight, two bf16 copies, and 23 GB for the update."""
    shape = Shape(3_085_938_688, 36, 2048, 11008, 2, 128, 151936, 32768)
    model = ModelConfig(gradient_checkpointing=True)
    config = RunConfig(model=model, algorithm=AlgorithmConfig(max_new_tokens=1024))
    large, small, none = (
        memory.cache_bytes(shape, config, torch.bfloat16, free)
        for free in (140 << 30, 90 << 30, 80 << 30)
    )
    assert large - small == 50 << 30
    assert 5 << 30 < small < 6 << 30
    assert none == 0
    training = Budget(shape, config, 1024, torch.bfloat16, cuda=True, free=0).estimate()
    needed = sum(training.persistent.values()) + training.phases["update"]
    assert large == (140 << 30) - int(1.25 * needed)


def test_memory_saving_knobs_make_the_run_fit() -> None:
    run = dataclasses.replace(
        change("model", micro_batch_tokens=16384, head_tokens=4096),
        training=TrainingConfig(prompts_per_step=1024, prompts_per_mini_batch=1024),
    )
    big = dataclasses.replace(SHAPE, num_layers=40, vocab_size=50_000)
    total = budget(run, big).estimate().total
    for share in (0.9, 0.6, 0.3):
        too_large = budget(run, big, int(share * total))
        changes = too_large.memory_saving_knobs()
        assert changes
        changed = run
        for key, value in changes.items():
            section, knob = key.split(".")
            part = dataclasses.replace(getattr(changed, section), **{knob: value})
            changed = dataclasses.replace(changed, **{section: part})
        assert budget(changed, big).estimate().total <= share * total
    assert budget(run, big, total).memory_saving_knobs() == {}
    assert budget(run, big, 1000).memory_saving_knobs() is None


def test_a_smaller_optimizer_is_found_if_other_knobs_do_not_help() -> None:
    # 20 MB of weights, moments and gradients, and little else.
    wide = dataclasses.replace(SHAPE, num_parameters=10**6)
    assert budget(RUN, wide, 19 * 10**6).memory_saving_knobs() is None
    assert budget(RUN, wide, 19 * 10**6).smaller_optimizer() == ("adamw_bf16", {})
    choice = budget(RUN, wide, int(14.5 * 10**6)).smaller_optimizer()
    assert choice is not None
    assert choice[0] == "adamw_8bit"
    assert budget(RUN, wide, 13 * 10**6).smaller_optimizer() is None
    eight_bit = change("training", optimizer="adamw_8bit")
    assert budget(eight_bit, wide, 13 * 10**6).smaller_optimizer() is None


def test_disk_space_of_checkpoints() -> None:
    # 12 bytes per parameter in each checkpoint, and 4 in the final weights.
    assert memory.checkpoint_bytes(SHAPE, RUN, 3) == 3 * 12_000 + 4000


@pytest.mark.parametrize(
    ("num_steps", "every", "keep", "most"),
    [
        (100, 20, 2, 3),  # those that are kept, and the next one
        (100, 20, 1, 2),
        (100, 50, 2, 2),  # the run writes only two
        (100, 0, 2, 1),  # only at the end
        (30, 20, 2, 2),  # at step 20 and at the end
        (0, 20, 2, 1),
    ],
)
def test_short_runs_have_fewer_checkpoints(
    num_steps: int, every: int, keep: int, most: int
) -> None:
    training = change(
        "training", num_steps=num_steps, checkpoint_every=every, keep_checkpoints=keep
    ).training
    assert memory.most_checkpoints(training) == most


def test_free_memory_and_disk_of_this_machine_are_plausible(tmp_path: Path) -> None:
    free = memory.free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
    assert memory.free_disk(tmp_path) > 0


def test_runs_that_share_a_gpu_see_their_share_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    for name, size in {"memory_allocated": 10, "memory_reserved": 14}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    assert (memory.free_memory(gpu), memory.gpu_memory(gpu)) == (64, 100)
    monkeypatch.setenv("EEPO_GPU_SHARE", "0.25")
    assert (memory.free_memory(gpu), memory.gpu_memory(gpu)) == (15, 25)
    monkeypatch.setenv("EEPO_GPU_SHARE", "0.05")  # less than the run has allocated already
    assert memory.free_memory(gpu) == 0
    for wrong in ("", "0", "2", "half"):
        monkeypatch.setenv("EEPO_GPU_SHARE", wrong)
        message = f"EEPO_GPU_SHARE = '{wrong}' must be a number above 0 and up to 1"
        with pytest.raises(UserError, match=message):
            memory.gpu_share()


def test_memory_above_the_share_of_a_gpu_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has the GPU to itself keeps its memory: allocating it again takes time."""
    released = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(reserved))
    for share in ("1", "0.25"):
        monkeypatch.setenv("EEPO_GPU_SHARE", share)
        for reserved in (20, 26):
            monkeypatch.setattr(
                torch.cuda, "memory_reserved", lambda device, reserved=reserved: reserved
            )
            memory.release_shared_memory(torch.device("cuda"))
    assert released == [26]
    memory.release_shared_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("size", "text"), [(5 * 2**20, "5 MiB"), (2**30, "1.0 GiB"), (37 * 2**28, "9.2 GiB")]
)
def test_format_bytes(size: int, text: str) -> None:
    assert memory.format_bytes(size) == text
