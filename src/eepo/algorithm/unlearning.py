"""One unlearning step: which completions it covers, its loss, and the weights θ′ it gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from eepo.algorithm.gates import completions_to_unlearn, unlearn_gate
from eepo.algorithm.losses import unlearn_loss
from eepo.config import AlgorithmConfig
from eepo.model.batching import MicroBatch, evenly_spaced
from eepo.model.policy import Policy, Scores
from eepo.protocols import RolloutEngine
from eepo.types import Completion, Prompt, Rollout, UserError


@dataclass(frozen=True)
class UnlearnBatch:
    """The completions of all stages so far, and which of them are unlearned."""

    pairs: list[tuple[Prompt, Completion]]
    rows: list[int]  # indices of the pairs that the loss is a mean over
    selected: list[bool]  # per pair: `unlearn_on` selects it
    stage1_rows: list[int]  # the rows that θ sampled; only these can measure KL(θ‖θ′)
    options: AlgorithmConfig

    @classmethod
    def of(cls, rollout: Rollout, options: AlgorithmConfig) -> UnlearnBatch:
        """Select completions. This waits for rewards only where `unlearn_on` needs them."""
        pairs = rollout.pairs(range(len(rollout.prompts)))
        rows = rows_to_unlearn(rollout.stages, len(rollout.prompts), options)
        selected = [True] * len(pairs)
        if options.unlearn_on != "all":
            rollout.wait_for_rewards()
            masks = [completions_to_unlearn(group, options.unlearn_on) for group in rollout.rewards]
            selected = [flag for mask in masks for flag in mask]
        stage1_rows = [row for row in rows if rollout.stages[row % len(rollout.stages)] == 1]
        return cls(pairs, rows, selected, stage1_rows, options)

    @property
    def num_tokens(self) -> int:
        """Count the tokens that the gate chooses from."""
        return sum(len(self.pairs[row][1].token_ids) for row in self.rows)

    @property
    def candidate_rows(self) -> list[int]:
        """Leave out rows that cannot have a gated token: they would cost a pass for nothing.

        The engine's entropies are rounded differently, so allow twice the threshold.
        """
        limit = 2 * self.options.gate_threshold if self.options.gate == "token" else torch.inf
        return [
            row
            for row in self.rows
            if self.selected[row] and min(self.pairs[row][1].entropies, default=0.0) < limit
        ]

    def gate(self, batch: MicroBatch, scores: Scores) -> Tensor:  # bool [B, T]
        """Return the tokens to unlearn."""
        selected = batch.pick(self.selected).bool().unsqueeze(1)
        return unlearn_gate(scores, batch.mask, self.options) & selected

    def loss(self, batch: MicroBatch, scores: Scores, gate: Tensor) -> Tensor:
        """Return the part of this micro-batch in the mean over all `rows`."""
        loss = unlearn_loss(scores, batch.mask, gate, self.options)
        return loss * len(batch.rows) / len(self.rows)


def rows_to_unlearn(stages: list[int], num_prompts: int, options: AlgorithmConfig) -> list[int]:
    """Choose at most `unlearn_max_completions` rows, evenly spaced.

    With more than one stage, the chosen prompts give a completion of each stage in turn: evenly
    spaced rows could all be from the same stage.
    """
    rows = evenly_spaced(num_prompts * len(stages), options.unlearn_max_completions)
    num_stages = len(set(stages))
    if num_stages == 1:
        return rows
    size = len(stages) // num_stages  # completions of a stage, per prompt
    prompts = sorted({row // len(stages) for row in rows})
    moved = []
    for row in rows:
        prompt, column = divmod(row, len(stages))
        turn = prompts.index(prompt)
        shift = turn % num_stages * size + turn // num_stages
        moved.append(prompt * len(stages) + (column + shift) % len(stages))
    return sorted(moved)


def largest_entry(gradient: Mapping[str, Tensor]) -> float:
    """Return the largest absolute entry. Raise an error if any entry is not finite.

    Such a gradient would fill θ′ with NaN, and stage 2 would be noise.
    """
    size = float(get_total_norm(list(gradient.values()), norm_type=math.inf))
    if not math.isfinite(size):
        raise UserError(
            f"the unlearning gradient is not finite ({size}); start a new run with a lower "
            "learning_rate, for example from a checkpoint of this run (model.path = its folder)"
        )
    return size


def unlearned_weights(
    weights: Iterable[tuple[str, Tensor]],
    gradient: Mapping[str, Tensor],
    lr: float,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Stream θ − η·gradient, one new tensor at a time.

    The step is taken in fp32 and then rounded to the dtype of the engine: a step applied to bf16
    weights would be rounded away.
    """
    for name, weight in weights:
        moved = weight.float() - lr * gradient[name].float() if name in gradient else weight
        yield name, moved.to(dtype)


def load_unlearned(
    engine: RolloutEngine, policy: Policy, gradient: Mapping[str, Tensor], lr: float
) -> Mapping[str, Tensor]:
    """Load θ′ = θ − η·gradient into the engine, and return the weights as loaded."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        moved = unlearned_weights(policy.trained_weights(), gradient, lr, torch.float32)
        for name, weight in policy.named_weights(moved):
            yield name, weight.to(engine.dtype)

    engine.load_weights(weights())
    return engine.weights() or dict(weights())


def changed_share(
    theta: Iterable[tuple[str, Tensor]], rollout_weights: Mapping[str, Tensor]
) -> float:
    """Return the share of rollout weights that differ from θ after rounding to their dtype.

    Weights that an engine shares with the policy do not count.
    """
    changed: Tensor | int = 0
    total = 0
    for name, weight in theta:
        moved = rollout_weights[name]
        if moved.data_ptr() == weight.data_ptr():
            continue
        changed = changed + (moved != weight.to(moved.dtype)).sum()
        total += moved.numel()
    return int(changed) / total
