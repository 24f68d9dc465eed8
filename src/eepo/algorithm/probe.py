"""Measures what an unlearning step does, on a few completions that θ sampled. Never changes θ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from eepo.algorithm.losses import k3
from eepo.algorithm.unlearning import UnlearnBatch
from eepo.model.batching import MicroBatch, to_device
from eepo.model.policy import Policy, Scores


@dataclass(frozen=True)
class Effect:
    """The difference between θ and θ′ on the probed completions."""

    loss_before: float  # unlearning loss under θ
    loss_after: float  # under θ′
    kl: float  # KL(θ‖θ′) per token
    kl_floor: float = 0.0  # KL from rounding alone, where it was measured and subtracted from `kl`
    logprobs_after: dict[int, float] = field(default_factory=dict)  # under θ′, by index in `pairs`


class Probe:
    """Compares θ with other weights on `probe_completions` of stage 1.

    `record` takes scores under θ that another pass has computed anyway. Only the missing ones are
    computed here.
    """

    def __init__(self, policy: Policy, unlearn_batch: UnlearnBatch) -> None:
        self.policy, self.unlearn_batch = policy, unlearn_batch
        options = unlearn_batch.options
        self.temperature = options.temperature
        self.rows = probe_rows(unlearn_batch.stage1_rows, options.probe_completions)
        self._position: dict[int, int] = {}  # of a recorded row among all recorded rows
        self._recorded: list[Tensor] = []  # [columns of scores, rows, T]

    def record(self, batch: MicroBatch, scores: Scores) -> None:
        """Keep the scores under θ of the probed rows in `batch`."""
        probed = set(self.rows)
        positions = [position for position, row in enumerate(batch.rows) if row in probed]
        if not positions:
            return
        for position in positions:
            self._position[batch.rows[position]] = len(self._position)
        columns = (scores.logprobs, scores.entropies, scores.complements)
        stacked = torch.stack([column.detach() for column in columns if column is not None])
        index = to_device(torch.tensor(positions), stacked.device)  # does not wait for the GPU
        self._recorded.append(stacked.index_select(1, index))

    @cached_property
    def before(self) -> list[tuple[MicroBatch, Scores]]:
        """Score all probed rows under θ, from what was recorded where possible."""
        pairs = self.unlearn_batch.pairs
        missing = [row for row in self.rows if row not in self._position]
        for batch in self.policy.micro_batches(pairs, missing):
            self.record(batch, self.policy.score(batch, self.temperature))
        longest = max(part.shape[2] for part in self._recorded)
        padded = [pad(part, (0, longest - part.shape[2])) for part in self._recorded]
        recorded = torch.cat(padded, 1)
        scored = []
        for batch in self.policy.micro_batches(pairs, self.rows):
            positions = [self._position[row] for row in batch.rows]
            columns = recorded[:, positions, : batch.mask.shape[1]]
            scored.append((batch, Scores(*columns)))
        return scored

    @torch.no_grad()
    def measure(self, weights: Mapping[str, Tensor]) -> Effect:
        """Compare `weights` with θ. Both losses use θ's gate, so they cover the same tokens."""
        unlearn_batch = self.unlearn_batch
        loss_before = loss_after = kl_sum = 0.0
        num_tokens = 0
        logprobs_after: dict[int, float] = {}
        for batch, before in self.before:
            after = self.policy.score(batch, self.temperature, weights)
            gap = torch.where(batch.mask, after.logprobs - before.logprobs, 0.0).double()
            kl_sum += float(k3(gap).sum())
            num_tokens += int(batch.mask.sum())
            totals = torch.where(batch.mask, after.logprobs, 0.0).double().sum(1).tolist()
            logprobs_after |= dict(zip(batch.rows, totals, strict=True))
            gate = unlearn_batch.gate(batch, before)
            loss_before += float(unlearn_batch.loss(batch, before, gate))
            loss_after += float(unlearn_batch.loss(batch, after, gate))
        scale = len(unlearn_batch.rows) / len(self.rows)  # the loss is a mean over all rows
        kl = kl_sum / num_tokens
        losses = loss_before * scale, loss_after * scale
        return Effect(*losses, kl, logprobs_after=logprobs_after)


def unlearn_gradient(
    policy: Policy, unlearn_batch: UnlearnBatch, probe: Probe
) -> tuple[dict[str, Tensor], Tensor | float]:
    """Return ∇L and the number of gated tokens. The probe keeps the scores of its rows."""
    num_gated: list[Tensor] = []  # on the device: reading them here would wait for the GPU

    def loss(batch: MicroBatch, scores: Scores) -> Tensor:
        gate = unlearn_batch.gate(batch, scores)
        num_gated.append(gate.sum())
        probe.record(batch, scores)
        return unlearn_batch.loss(batch, scores, gate)

    rows, temperature = unlearn_batch.candidate_rows, unlearn_batch.options.temperature
    gradient = policy.gradient(unlearn_batch.pairs, temperature, loss, rows)
    return gradient, sum(num_gated)


def probe_rows(rows: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` rows: a quarter from the start, the others evenly spread.

    Neighbouring rows at the start show all completions of some prompts.
    """
    first, others = rows[: most // 4], rows[most // 4 :]
    stride = math.ceil(len(others) / (most - len(first))) or 1
    return [*first, *others[::stride]]
