"""EEPO on a copy of the demo policy, with an engine that keeps every weight that it loads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eepo.algorithm import EEPO, StepMetrics
from eepo.config import AlgorithmConfig
from eepo.model.policy import Policy
from eepo.rewards.countdown import CountdownReward
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Prompt, Rollout, Sampling


class RecordingEngine(TransformersEngine):
    """Keeps a copy of the weights of every `load_weights` call."""

    loads: list[dict[str, Tensor]]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        loaded = {name: weight.detach().clone() for name, weight in weights}
        self.__dict__.setdefault("loads", []).append(loaded)
        super().load_weights(loaded.items())


@pytest.fixture(scope="session")
def sampling() -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=24, seed=1, stream="train/0")


@pytest.fixture(scope="session")
def build_eepo(demo_model: Any, tokenizer: Any) -> Callable[..., EEPO]:
    """Return a function that builds EEPO; other keywords are knobs of the algorithm."""

    def build(
        *,
        engine: type[TransformersEngine] = RecordingEngine,
        reward: Any = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        reference: Policy | None = None,
        mini_batch: int = 64,
        max_grad_norm: float = 1.0,
        max_rows: int = 1024,
        dtype: torch.dtype = torch.float32,
        micro_batch_tokens: int = 16384,
        **options: Any,
    ) -> EEPO:
        model = copy.deepcopy(demo_model)
        optimizer = optimizer or (lambda weights: torch.optim.AdamW(weights, lr=1e-4))
        return EEPO(
            policy=Policy(model, micro_batch_tokens),
            reference=reference,
            engine=engine(copy.deepcopy(model).to(dtype), tokenizer, max_rows),
            reward=reward or CountdownReward(),
            optimizer=optimizer(model.parameters()),
            options=AlgorithmConfig(**({"max_new_tokens": 24, "group_size": 4} | options)),
            mini_batch=mini_batch,
            max_grad_norm=max_grad_norm,
        )

    return build


@pytest.fixture(scope="session")
def sample_stage1(sampling: Sampling) -> Callable[[EEPO, list[Prompt]], Rollout]:
    """Return a function that syncs θ′, samples stage 1 and waits for its rewards."""

    def sample(algorithm: EEPO, prompts: list[Prompt]) -> Rollout:
        rollout = Rollout(prompts)
        algorithm.engine.load_weights(algorithm.policy.named_weights())
        at_temperature = replace(sampling, temperature=algorithm.options.temperature)
        algorithm.sample(rollout, 1, at_temperature, StepMetrics())
        rollout.wait_for_rewards()
        return rollout

    return sample
