"""Tests EEPO in TRL with a real vLLM engine in the same process, on the CPU: `make test-vllm`.

The engine is that of `vllm_mode="colocate"`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs its own environment: make test-vllm")
pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from datasets import Dataset
from trl.generation import vllm_generation

from eepo.adapters.trl import EEPOConfig, EEPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [f"{first} 5 7 9 = 24 :" for first in range(1, 5)]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 5) for text in completions]


def push_together(llm: Any) -> list[dict[str, Tensor]]:
    """Load TRL's weights into the engine all at once, and return a list of all pushes.

    TRL loads one tensor at a time. On the CPU vLLM repacks weights while it loads them, so it
    accepts new weights only through its own reload. Here the tensors are collected, and reloaded
    when TRL ends a push by emptying the prefix cache.
    """
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    pushes: list[dict[str, Tensor]] = []
    collected: dict[str, Tensor] = {}
    empty_cache = llm.reset_prefix_cache

    def collect(weights: Any) -> set[str]:
        collected.update((name, weight.detach().clone()) for name, weight in weights)
        return set()

    def load_and_empty() -> Any:
        if collected:
            del model.load_weights
            llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(list(collected.items()))}
            )
            model.load_weights = collect
            pushes.append(dict(collected))
            collected.clear()
        return empty_cache()

    model.load_weights, llm.reset_prefix_cache = collect, load_and_empty
    return pushes


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: Any, new_model: Callable[..., Any], tokenizer: Any) -> Any:
    """Build one trainer for all tests: a process can have only one engine."""
    folder: Path = tmp_path_factory.mktemp("vllm")
    model = new_model("llama", head_dim=32)  # the smallest that vLLM supports on the CPU
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    model.name_or_path = str(folder / "model")
    args = EEPOConfig(
        str(folder / "run"),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_steps=3,
        learning_rate=1e-3,
        temperature=0.9,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gate="always",
        unlearn_lr=0.01,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
    )
    data = Dataset.from_list([{"prompt": text} for text in PROMPTS])
    with pytest.MonkeyPatch.context() as patch:
        # float32, so that log-probabilities can be compared closely.
        engine = partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
        patch.setattr(vllm_generation, "LLM", engine)
        trainer = EEPOTrainer(
            model, reward, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer
        )
    trainer.pushes = push_together(trainer.vllm_generation.llm)
    return trainer


def rollout(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def gap(output: dict[str, Any], rows: slice) -> float:
    """Return the largest difference between vLLM's log-probabilities and the trainer's."""
    mask = output["completion_mask"][rows].bool()
    difference = output["sampling_per_token_logps"] - output["old_per_token_logps"]
    return difference[rows][mask].abs().max().item()


def test_vllm_samples_stage_1_from_theta_and_stage_2_from_theta_prime(trainer: Any) -> None:
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    del trainer.pushes[:]
    output = rollout(trainer)
    assert gap(output, slice(0, None, 2)) < 1e-3
    assert gap(output, slice(1, None, 2)) < 1e-3
    ratio = output["importance_sampling_ratio"]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-2, rtol=0)
    theta, theta_prime = trainer.pushes
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert torch.equal(theta[name], weight)
    assert not all(torch.equal(theta[name], theta_prime[name]) for name in theta)


def test_logprobs_of_stage_2_differ_without_the_second_push(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the engine keeps θ, so its log-probabilities are not those of θ′."""
    monkeypatch.setattr(trainer.unlearner, "invalidate_copies", lambda: None)
    output = rollout(trainer)
    assert gap(output, slice(0, None, 2)) < 1e-3
    assert gap(output, slice(1, None, 2)) > 1e-2
    monkeypatch.undo()
    trainer.unlearner.invalidate_copies()


def test_training_pushes_both_stages_and_evaluation_uses_theta(trainer: Any) -> None:
    del trainer.pushes[:]
    trainer.train()
    assert len(trainer.pushes) == 6
    metrics = trainer.evaluate()
    assert metrics["eval_sampling/sampling_logp_difference/max"] < 1e-3
    assert len(trainer.pushes) == 7
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(trainer.pushes[-1][name], weight)
