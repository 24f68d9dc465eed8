"""Builds trainers for the tests of the TRL adapter. TRL is imported only when a test needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eepo.types import Prompt

GROUP = 4  # completions per prompt


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return rewards that differ within a group, also for an untrained model."""
    return [float(sum(map(ord, text)) % 5) for text in completions]


@pytest.fixture
def build(
    tmp_path: Path, sharp_model: Callable[[], Any], tokenizer: Any, demo_prompts: list[Prompt]
) -> Callable[..., Any]:
    """Return a function that builds an `EEPOTrainer`, or with `eepo=False` a `GRPOTrainer`.

    The data set has 8 prompts. A generation batch has two groups of 4 completions.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from eepo.adapters.trl import EEPOConfig, EEPOTrainer

    def make(eepo: bool = True, model: Any = None, **settings: Any) -> Any:
        arguments = {"reward_funcs": reward}
        for name in ("tools", "rollout_func", "peft_config", "reward_funcs"):
            if name in settings:
                arguments[name] = settings.pop(name)
        data = Dataset.from_list([{"prompt": prompt.text} for prompt in demo_prompts[:8]])
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 2 * GROUP,
            "per_device_eval_batch_size": 2 * GROUP,
            "num_generations": GROUP,
            "max_completion_length": 8,
            "max_steps": 3,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
        }
        args = (EEPOConfig if eepo else GRPOConfig)(**(defaults | settings))
        return (EEPOTrainer if eepo else GRPOTrainer)(
            model=sharp_model() if model is None else model,
            args=args,
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer,
            **arguments,
        )

    return make


@pytest.fixture(scope="session")
def sharp_model(new_model: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that builds the same tiny decoder each time.

    Its head is scaled, so that some tokens are certain and others are not.
    """

    def make() -> Any:
        model = new_model("llama", seed=3)
        with torch.no_grad():
            model.lm_head.weight.mul_(4)
        return model

    return make
