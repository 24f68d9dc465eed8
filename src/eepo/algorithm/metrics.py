"""What one step tells of itself: a flat dictionary, filled as the step goes. Names are `docs/metrics.md`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eepo.algorithm.probe import Effect
from eepo.model.batching import MicroBatch
from eepo.model.policy import Scores
from eepo.types import Completion, Rollout, mean_entropy


class StepMetrics:
    """Collects; `result()` gives the row for the run log. But for times and memory, everything is repeatable."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.values: dict[str, float] = {}
        self._device = device  # whose work a phase waits for, if it is a GPU
        self.seconds: dict[str, float] = defaultdict(float)
        self._marks: list[tuple[str, list[torch.cuda.Event]]] = []
        if device is not None and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._started = time.perf_counter()
        self._num_tokens = 0
        self._gated: Tensor | float = (
            0.0  # sums stay on the device until `result`: reading one would wait for it
        )
        self._gateable = 0
        self._changed: Tensor | int = 0  # weights of θ′, at its last load
        self._changeable = 0
        self._grad_norms: list[float] = []
        self._stages: dict[int, _Ratios] = defaultdict(_Ratios)
        self._mismatch: Tensor | float = 0.0
        self._mismatch_tokens: Tensor | int = 0
        self._policy_entropy: Tensor | float = 0.0
        self._policy_tokens = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to `seconds/name`. On a GPU its own clock tells, so that nobody has to wait for it."""
        if self._device is not None and self._device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._marks.append((name, marks))
            marks[0].record()
            yield
            marks[1].record()
        else:
            started = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - started

    def _read_clock(self) -> None:
        for name, (begin, end) in self._marks:
            end.synchronize()
            self.seconds[name] += begin.elapsed_time(end) / 1000
        self._marks.clear()

    def record_rollout(self, rollout: Rollout) -> None:
        for stage in sorted(set(rollout.stages)):
            completions, rewards = zip(*rollout.of_stage(stage), strict=True)
            self.values |= {
                f"stage{stage}/reward": sum(rewards) / len(rewards),
                f"stage{stage}/entropy": mean_entropy(completions),
                f"stage{stage}/length": sum(len(c.token_ids) for c in completions)
                / len(completions),
                f"stage{stage}/truncated_share": sum(not c.finished for c in completions)
                / len(completions),
            }
        everything = [completion for group in rollout.groups for completion in group]
        all_rewards = [reward for group in rollout.rewards for reward in group]
        self._num_tokens = sum(len(completion.token_ids) for completion in everything)
        self.values |= {
            "reward": sum(all_rewards) / len(everything),
            "entropy": mean_entropy(everything),
            "length": self._num_tokens / len(everything),
            "truncated_share": sum(not completion.finished for completion in everything)
            / len(everything),
            "no_answer_share": _share_without_answer(rollout),
            "zero_advantage_share": sum(not any(group) for group in rollout.advantages)
            / len(rollout.advantages),
            **_second_chances(rollout.rewards),
        }

    def record_gate(self, gate: Tensor) -> None:
        self._gated = self._gated + gate.sum()

    def record_gateable(self, completions: Iterable[Completion]) -> None:
        """All that a gate might have chosen from."""
        self._gateable += sum(len(completion.token_ids) for completion in completions)

    def record_unlearning(self, lr: float, effect: Effect) -> None:
        self.values |= {
            "unlearn/lr": lr,
            "unlearn/loss_before": effect.loss_before,
            "unlearn/loss_after": effect.loss_after,
            "unlearn/kl": effect.kl,
        }

    def counting_changes(
        self, weights: Iterable[tuple[str, Tensor]], before: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass θ′ through, and note which share of it differs from θ after rounding to the engine's type."""
        self._changed, self._changeable = 0, 0
        for (name, new), (_, old) in zip(weights, before, strict=True):
            self._changed = self._changed + (new != old.to(new.dtype)).sum()
            self._changeable += new.numel()
            yield name, new

    @torch.no_grad()
    def record_update(
        self,
        batch: MicroBatch,
        scores: Scores,
        sampled: Tensor,
        advantages: Tensor,
        stages: list[int],
        clip: tuple[float, float],
    ) -> None:
        gap = torch.where(batch.mask, scores.logprobs - sampled, 0.0)
        ratio = gap.exp()
        up, down = advantages[:, None] > 0, advantages[:, None] < 0
        clipped = ((ratio > 1 + clip[1]) & up) | ((ratio < 1 - clip[0]) & down)
        own = batch.pick([float(stage) for stage in stages])
        for stage in sorted(set(stages)):
            self._stages[stage].add(ratio, clipped, batch.mask & (own == stage)[:, None])
        if (
            not self._grad_norms
        ):  # before the step's first update θ is what stage 1 was sampled from
            first = batch.mask & (own == 1)[:, None]
            off = torch.where(first, gap, 0.0).double()
            self._mismatch = self._mismatch + (off.exp() - 1 - off).sum()  # k3
            self._mismatch_tokens = self._mismatch_tokens + first.sum()
        self._policy_entropy = (
            self._policy_entropy + scores.entropies.double().sum()
        )  # zero on padding
        self._policy_tokens += len(batch.targets)

    def record_grad_norm(self, norm: float) -> None:
        self._grad_norms.append(norm)

    def result(self) -> dict[str, float]:
        self._read_clock()
        total = time.perf_counter() - self._started
        row = dict(self.values)
        row["gate_share"] = float(self._gated) / self._gateable if self._gateable else 0.0
        if self._changeable:
            row["unlearn/weights_changed_share"] = int(self._changed) / self._changeable
        row["mismatch_kl"] = float(self._mismatch) / max(int(self._mismatch_tokens), 1)
        row["policy_entropy"] = float(self._policy_entropy) / max(self._policy_tokens, 1)
        row["grad_norm"] = sum(self._grad_norms) / max(len(self._grad_norms), 1)
        for stage, ratios in sorted(self._stages.items()):
            row |= {f"stage{stage}/{name}": value for name, value in ratios.summary().items()}
        row |= {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        row["seconds/total"] = total
        row["tokens_per_second"] = self._num_tokens / total
        if self._device is not None and self._device.type == "cuda":
            row["memory/peak"] = torch.cuda.max_memory_allocated(self._device) / 1e9
            row["memory/held"] = torch.cuda.max_memory_reserved(self._device) / 1e9
        return row


def _share_without_answer(rollout: Rollout) -> float:
    """Of all completions: gains are often only formatting, and this is where that shows."""
    verdicts = [verdict for group in rollout.verdicts for verdict in group]
    return sum(verdict.answer is None for verdict in verdicts) / max(len(verdicts), 1)


def _second_chances(rewards: list[list[float]]) -> dict[str, float]:
    """Does the second half of a group find what the first did not? Of GRPO, too: EEPO's is to be held against it."""
    middle = len(rewards[0]) // 2
    missed = [
        group[middle:] for group in rewards if not any(reward > 0 for reward in group[:middle])
    ]
    rescued = [late for late in missed if any(reward > 0 for reward in late)]
    return {
        "missed_share": len(missed) / len(rewards),
        "second_half_recovery": len(rescued) / len(rewards),
    }


class _Ratios:
    """π_θ over the probability at sampling, of one stage's tokens."""

    def __init__(self) -> None:
        self.sum = self.count = self.clipped = self.max = torch.zeros(())

    def add(self, ratio: Tensor, clipped: Tensor, here: Tensor) -> None:  # each [B, T]
        self.sum = self.sum + torch.where(here, ratio, 0.0).double().sum()
        self.count = self.count + here.sum()
        self.clipped = self.clipped + (clipped & here).sum()
        self.max = torch.maximum(self.max.to(ratio.device), torch.where(here, ratio, 0.0).max())

    def summary(self) -> dict[str, float]:
        count = max(float(self.count), 1.0)
        return {
            "ratio_mean": float(self.sum) / count,
            "ratio_max": float(self.max),
            "clip_share": float(self.clipped) / count,
        }
