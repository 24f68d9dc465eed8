"""What a run needs, against numbers worked out by hand for a known shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eepo.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainingConfig
from eepo.model import loading, memory
from eepo.model.memory import Shape
from eepo.types import UserError

SHAPE = Shape(
    num_parameters=1000, num_layers=2, hidden_size=8, intermediate_size=32, num_key_value_heads=2, head_dim=4,
    vocabulary=50, positions=64,
)  # fmt: skip
RUN = RunConfig(
    model=ModelConfig(micro_batch_tokens=40, head_tokens=8),
    algorithm=AlgorithmConfig(num_stages=1, group_size=4, max_new_tokens=10, kl_coef=0.0),
    training=TrainingConfig(prompts_per_step=8, prompts_per_mini_batch=4),
    rollout=RolloutConfig(max_rows=16),
)


def needs(
    config: RunConfig, dtype: torch.dtype = torch.float32, cuda: bool = False
) -> memory.Needs:
    return memory.needs(SHAPE, config, prompt_tokens=10, rollout_dtype=dtype, cuda=cuda)


def change(section: str, **knobs: Any) -> RunConfig:
    return dataclasses.replace(
        RUN, **{section: dataclasses.replace(getattr(RUN, section), **knobs)}
    )


def test_the_shape_of_a_real_model_is_read_without_its_weights(demo_model: Any) -> None:
    shape = memory.shape_of(*loading.load_shape(ModelConfig()))
    assert shape.num_parameters == sum(weight.numel() for weight in demo_model.parameters())
    assert (shape.num_layers, shape.hidden_size, shape.vocabulary, shape.positions) == (
        4,
        128,
        211,
        128,
    )
    assert (
        shape.num_key_value_heads * shape.head_dim
        == demo_model.model.layers[0].self_attn.k_proj.out_features
    )


def test_families_that_leave_numbers_out_are_understood() -> None:
    from transformers import GPT2Config

    shape = memory.shape_of(GPT2Config(n_embd=64, n_head=4, n_layer=3, n_positions=32), 5)
    assert shape == Shape(5, 3, 64, 256, 4, 16, 50257, 32)


def test_what_is_held() -> None:
    assert needs(RUN).held == {"policy": 4000, "optimizer": 8000, "rollout copy": 4000}
    assert needs(RUN, torch.bfloat16).held["rollout copy"] == 2000
    assert needs(change("algorithm", kl_coef=1e-4)).held["reference"] == 4000
    assert needs(change("algorithm", kl_coef=1e-4), cuda=True).held["reference"] == 2000


def test_the_optimizer_s_moments_take_8_4_or_2_bytes() -> None:
    optimizers = ("adamw", "adamw_bf16", "adamw_8bit")
    held = [needs(change("training", optimizer=name)).held["optimizer"] for name in optimizers]
    assert held == [8000, 4000, 2031]  # two scales of 4 bytes for 256 weights
    on_disk = [
        memory.checkpoint_bytes(SHAPE, change("training", optimizer=name)) for name in optimizers
    ]
    assert on_disk == [3 * (4000 + size) + 4000 for size in held]


def test_sampling_holds_keys_values_and_one_distribution_a_row() -> None:
    # 16 rows of 10 + 10 tokens; keys and values: 2 x 2 layers x 2 heads x 4 x 4 bytes = 128 a token, half as much room
    assert needs(RUN).phases["sampling"] == 16 * 20 * 128 * 3 // 2 + 16 * 50 * 32
    # a stage of EEPO samples half of the group: 8 prompts x 4 / 2 = 16 rows still; with 4 rows at a time, a quarter
    assert (
        needs(change("rollout", max_rows=4)).phases["sampling"] * 4 == needs(RUN).phases["sampling"]
    )


def test_the_update_holds_gradients_activations_and_some_logits() -> None:
    # a layer keeps 6 x 4 x 8 + 4 x 4 x (8 + 32) = 832 bytes a token; 40 tokens, 8 of them with logits at one time
    assert needs(RUN).phases["update"] == 4000 + 40 * 2 * 832 + 8 * 50 * 20
    checkpointed = needs(change("model", gradient_checkpointing=True)).phases["update"]
    assert checkpointed == 4000 + 40 * (2 * 4 * 8 + 832) + 8 * 50 * 20
    # one row is never cut: 20 tokens, though 5 were asked for; and half of the 40 are the prompts', without logits
    assert (
        needs(change("model", micro_batch_tokens=5)).phases["update"]
        == 4000 + 20 * 2 * 832 + 8 * 50 * 20
    )
    assert (
        needs(change("model", head_tokens=999)).phases["update"]
        == 4000 + 40 * 2 * 832 + 20 * 50 * 20
    )
    # on a GPU, matrix products keep two bytes, and the weights exist once more in bf16
    assert (
        needs(RUN, cuda=True).phases["update"]
        == 4000 + 40 * 2 * (192 + 4 * 2 * 40) + 8 * 50 * 6 + 2000
    )
    # with checkpointing only one matrix at a time, at most the head's 50 x 8
    checkpointed = needs(change("model", gradient_checkpointing=True), cuda=True).phases["update"]
    assert checkpointed == 4000 + 40 * (2 * 4 * 8 + 192 + 4 * 2 * 40) + 8 * 50 * 6 + 2 * 50 * 8


def test_a_compiled_layer_keeps_less() -> None:
    # norms and activations are computed again: 2 x 4 x 8 + 2 x (4.5 x 8 + 3 x 32) = 328 bytes a token, not 512
    compiled = needs(change("model", compile="on"), cuda=True).phases["update"]
    assert compiled == 4000 + 40 * 2 * 328 + 8 * 50 * 6 + 2000
    assert needs(change("model", compile="on")).phases == needs(RUN).phases


def test_on_a_gpu_one_row_must_fit_and_the_cache_of_the_others_is_told_apart() -> None:
    found = needs(RUN, torch.bfloat16, cuda=True)
    assert found.phases["sampling"] == 20 * 64 + 16 * 50 * 6
    assert found.cache == 16 * 20 * 64
    assert needs(RUN).cache == 0


def test_products_in_fp32_take_as_much_on_a_gpu_as_elsewhere() -> None:
    exact, here = needs(change("model", compute_dtype="float32"), cuda=True), needs(RUN)
    assert exact.phases["update"] == here.phases["update"]
    assert exact.held == here.held
    assert needs(RUN, cuda=True).phases["update"] < exact.phases["update"]


def test_only_one_phase_happens_at_a_time() -> None:
    found = needs(change("algorithm", num_stages=2))
    assert found.largest_phase == "sampling"
    assert found.total == 16000 + found.phases["sampling"]
    assert (
        found.phases == needs(change("algorithm", num_stages=2, gate="never")).phases
    )  # unlearning needs no more


def test_a_cache_may_stay_where_training_surely_leaves_room() -> None:
    """Qwen2.5-3B: 12 bytes a weight, two copies in bf16 and the update's own 23 GB come to 73 GB; a quarter on top."""
    shape = Shape(3_085_938_688, 36, 2048, 11008, 2, 128, 151936, 32768)
    model = ModelConfig(gradient_checkpointing=True)
    config = RunConfig(model=model, algorithm=AlgorithmConfig(max_new_tokens=1024))
    large, small, none = (
        memory.spare(shape, config, torch.bfloat16, free)
        for free in (140 << 30, 90 << 30, 80 << 30)
    )
    assert large - small == 50 << 30
    assert 5 << 30 < small < 6 << 30
    assert none == 0
    training = memory.needs(shape, config, 1024, torch.bfloat16, cuda=True)
    assert large == (140 << 30) - int(
        1.25 * (sum(training.held.values()) + training.phases["update"])
    )


def test_advice_fits_and_is_needed() -> None:
    run = dataclasses.replace(
        change("model", micro_batch_tokens=16384, head_tokens=4096),
        training=TrainingConfig(prompts_per_step=1024, prompts_per_mini_batch=1024),
    )
    big = dataclasses.replace(SHAPE, num_layers=40, vocabulary=50_000)
    whole = memory.needs(big, run, 10, torch.float32, False).total
    for share in (0.9, 0.6, 0.3):
        changes = memory.smaller(big, run, 10, torch.float32, False, int(share * whole))
        assert changes
        changed = run
        for key, value in changes.items():
            section, knob = key.split(".")
            part = dataclasses.replace(getattr(changed, section), **{knob: value})
            changed = dataclasses.replace(changed, **{section: part})
        assert memory.needs(big, changed, 10, torch.float32, False).total <= share * whole
    assert memory.smaller(big, run, 10, torch.float32, False, whole) == {}
    assert memory.smaller(big, run, 10, torch.float32, False, 1000) is None


def test_rounded_moments_are_advised_only_where_nothing_else_fits() -> None:
    wide = dataclasses.replace(
        SHAPE, num_parameters=10**6
    )  # 20 MB with gradients, and little beside them
    args = (RUN, 10, torch.float32, False)
    assert memory.smaller(wide, *args, 19 * 10**6) is None
    assert memory.rounder(wide, *args, 19 * 10**6) == ("adamw_bf16", {})
    rounded = memory.rounder(wide, *args, int(14.5 * 10**6))
    assert rounded is not None
    assert rounded[0] == "adamw_8bit"
    assert memory.rounder(wide, *args, 13 * 10**6) is None
    eight_bit = change("training", optimizer="adamw_8bit")
    assert memory.rounder(wide, eight_bit, *args[1:], 13 * 10**6) is None


def test_disk_for_checkpoints() -> None:
    # 12 bytes a parameter in each of 2 kept and 1 being written, and 4 in the final weights
    assert memory.checkpoint_bytes(SHAPE, RUN) == 3 * 12_000 + 4000


def test_free_numbers_are_those_of_this_machine(tmp_path: Path) -> None:
    free = memory.free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
    assert memory.free_disk(tmp_path) > 0


def test_runs_that_share_a_card_measure_their_caches_by_their_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = torch.device("cuda")
    for name, size in {"memory_allocated": 10, "memory_reserved": 14}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    assert (memory.free_memory(card), memory.card_memory(card)) == (64, 100)
    monkeypatch.setenv("EEPO_GPU_SHARE", "0.25")
    assert (memory.free_memory(card), memory.card_memory(card)) == (15, 25)
    monkeypatch.setenv("EEPO_GPU_SHARE", "0.05")  # less than it has already
    assert memory.free_memory(card) == 0
    for wrong in ("", "0", "2", "half"):
        monkeypatch.setenv("EEPO_GPU_SHARE", wrong)
        with pytest.raises(
            UserError, match=f"EEPO_GPU_SHARE = '{wrong}' must be a number above 0 and up to 1"
        ):
            memory.gpu_share()


def test_what_a_shared_card_lends_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where others wait for it: to take memory again costs."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(held))
    for share in ("1", "0.25"):
        monkeypatch.setenv("EEPO_GPU_SHARE", share)
        for held in (20, 26):
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, held=held: held)
            memory.give_back(torch.device("cuda"))
    assert emptied == [26]
    memory.give_back(torch.device("cpu"))


@pytest.mark.parametrize(
    ("size", "text"), [(5 * 2**20, "5 MiB"), (2**30, "1.0 GiB"), (37 * 2**28, "9.2 GiB")]
)
def test_sizes_are_read_easily(size: int, text: str) -> None:
    assert memory.gib(size) == text
