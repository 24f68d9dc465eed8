"""Which errors mean that memory ran out, and what the advice is."""

from __future__ import annotations

import dataclasses
import errno

import pytest
import torch

from eepo.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainingConfig
from eepo.model.out_of_memory import advice, caught
from eepo.runs.knobs import FREE_TO_CHANGE
from eepo.runs.memory_errors import is_out_of_memory

GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.02 GiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000 bytes. Error code 12 (Cannot allocate memory)"
)
RUN = RunConfig(
    algorithm=AlgorithmConfig(group_size=8, max_new_tokens=1024),
    training=TrainingConfig(prompts_per_step=128, prompts_per_mini_batch=64),
)


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError(GPU),
        RuntimeError(CPU),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_all_allocators_are_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)
    with caught() as failures:
        raise error
    assert len(failures) == 1
    assert failures[0].startswith("out of memory")


def test_the_error_of_a_real_allocation_is_recognised() -> None:
    with caught() as failures:
        torch.empty(10**15)
    assert failures == ["out of memory (tried to allocate 4000000000000000 bytes)"]


def test_the_amount_on_a_gpu_is_named() -> None:
    with caught() as failures:
        raise torch.cuda.OutOfMemoryError(GPU)
    assert failures == ["out of memory (tried to allocate 2.50 GiB)"]


def test_an_error_that_follows_from_a_lack_of_memory_is_recognised() -> None:
    with caught() as failures:
        try:
            raise torch.cuda.OutOfMemoryError(GPU)
        finally:  # as the end of the capture of a CUDA graph does
            raise RuntimeError("CUDA error: operation failed due to a previous error")
    assert failures == ["out of memory (tried to allocate 2.50 GiB)"]


def test_other_errors_are_raised() -> None:
    with pytest.raises(RuntimeError, match="shape"), caught():
        raise RuntimeError("shape mismatch")
    with pytest.raises(KeyError), caught():
        raise KeyError("out of memory")
    with pytest.raises(FileNotFoundError), caught():
        raise FileNotFoundError(errno.ENOENT, "out of memory")


def change(run: RunConfig, section: str, **knobs: object) -> RunConfig:
    changed = dataclasses.replace(getattr(run, section), **knobs)
    return dataclasses.replace(run, **{section: changed})


@pytest.mark.parametrize("phase", ["stage1", "stage2", "sync"])
def test_sampling_gets_half_of_the_rows_that_are_in_use(phase: str) -> None:
    # 1024 rows are allowed, but a stage has only 128 · 4 = 512.
    assert advice(RUN, phase) == (
        "sampling",
        "rollout.max_rows is 512, try 256",
        " --set rollout.max_rows=256",
    )
    small = change(RUN, "rollout", max_rows=64)
    assert advice(small, phase)[2] == " --set rollout.max_rows=32"


@pytest.mark.parametrize(
    ("phase", "name"), [("unlearn", "unlearning"), ("update", "update"), ("reference", "update")]
)
def test_gradients_get_checkpointing_then_smaller_batches(phase: str, name: str) -> None:
    steps, run = [], RUN
    for _ in range(10):
        found, _, option = advice(run, phase)
        assert found == name
        if not option:
            break
        knob, _, value = option.removeprefix(" --set model.").partition("=")
        steps.append((knob, value))
        run = change(run, "model", **{knob: True if value == "true" else int(value)})
    assert steps == [
        ("gradient_checkpointing", "true"),
        ("micro_batch_tokens", "8192"),
        ("micro_batch_tokens", "4096"),
        ("micro_batch_tokens", "2048"),
        ("micro_batch_tokens", "1024"),
        ("head_tokens", "2048"),
        ("head_tokens", "1024"),
        ("head_tokens", "512"),
        ("head_tokens", "256"),
    ]


def test_the_knobs_may_change_when_a_run_is_resumed() -> None:
    vllm = change(RUN, "rollout", engine="vllm")
    all_advice = [advice(RUN, "stage1"), advice(RUN, "update"), advice(vllm, "stage1")]
    knobs = {option.removeprefix(" --set ").partition("=")[0] for _, _, option in all_advice}
    assert len(knobs) == 3
    assert knobs <= FREE_TO_CHANGE


def test_vllm_gets_a_smaller_share_of_the_gpu() -> None:
    run = change(RUN, "rollout", engine="vllm")
    assert advice(run, "stage1")[2] == " --set rollout.gpu_memory_share=0.3"
    assert "gradient_checkpointing" in advice(run, "update")[2]


def test_without_a_knob_the_advice_is_a_larger_device() -> None:
    tight = RunConfig(
        model=ModelConfig(gradient_checkpointing=True, micro_batch_tokens=1024, head_tokens=256),
        rollout=RolloutConfig(max_rows=1),
    )
    for phase in ("stage1", "update", "evaluation"):
        _, words, option = advice(tight, phase)
        assert option == ""
        assert "larger device" in words
