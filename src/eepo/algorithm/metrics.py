"""Collects the metrics of one training step, one object per phase. docs/metrics.md lists them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from eepo.algorithm.losses import PolicyTerms, k3
from eepo.algorithm.probe import Effect
from eepo.config import AlgorithmConfig
from eepo.model.batching import MicroBatch
from eepo.types import Rollout, mean_entropy

LOST_RATIO = 1e-2  # a completion with a smaller token ratio hardly counts in the update


class StepMetrics:
    """Metrics of one step. All values but times and memory are repeatable."""

    def __init__(
        self,
        device: torch.device | None = None,
        on_phase: Callable[[str], None] | None = None,  # gets the name of a phase that begins
    ) -> None:
        self.timer = PhaseTimer(device)
        self.unlearning = UnlearningMetrics()
        self.update = UpdateMetrics()
        self.last_phase = ""  # the phase that began last; it says where a step failed
        self._device, self._on_phase = device, on_phase
        self._rollout: dict[str, float] = {}
        self._num_tokens = 0
        if device is not None and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step; the row has it as `seconds/name`."""
        self.last_phase = name
        if self._on_phase is not None:
            self._on_phase(name)
        return self.timer.phase(name)

    def record_rollout(self, rollout: Rollout, options: AlgorithmConfig | None = None) -> None:
        """Describe the completions. `options` are those of the step, which methods may change."""
        self._rollout = rollout_metrics(rollout)
        if rollout.first_round is not None:
            self._rollout |= first_round_metrics(rollout)
        groups = [*rollout.groups, *rollout.dropped]
        self._num_tokens = sum(len(c.token_ids) for group in groups for c in group)
        if options is not None and options.entropy_target != "off":
            self._rollout["entropy_coef"] = options.entropy_coef

    def result(self) -> dict[str, float]:
        """Return the step's row for `metrics.jsonl`."""
        seconds = self.timer.seconds()
        row = self._rollout | self.unlearning.result() | self.update.result()
        row |= {f"seconds/{name}": value for name, value in seconds.items()}
        row["tokens_per_second"] = self._num_tokens / seconds["total"]
        if self._device is not None and self._device.type == "cuda":
            row["memory/peak"] = torch.cuda.max_memory_allocated(self._device) / 1e9
            row["memory/held"] = torch.cuda.max_memory_reserved(self._device) / 1e9
        return row


class PhaseTimer:
    """Measures the seconds of each phase. On a GPU it uses CUDA events, so it never waits."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the phase `name`."""
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events.append((name, start, end))
            start.record()
            yield
            end.record()
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all phases, and `total` since the step began."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds) | {"total": time.perf_counter() - self._started}


class UnlearningMetrics:
    """What the unlearning steps of one training step did. `lr` and the rest are of the last."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_gated: Tensor | float = 0.0  # on the device: reading it would wait for the GPU
        self._last: dict[str, float] = {}

    def record_gate(self, num_gated: Tensor | float, num_tokens: int) -> None:
        """Count the gated tokens, and the tokens that the gate chose from."""
        self._num_gated = self._num_gated + num_gated
        self._num_tokens += num_tokens

    def record_step(self, lr: float, effect: Effect, changed_share: float) -> None:
        self._last = {
            "unlearn/lr": lr,
            "unlearn/loss_before": effect.loss_before,
            "unlearn/loss_after": effect.loss_after,
            "unlearn/kl": effect.kl,
            "unlearn/kl_floor": effect.kl_floor,
            "unlearn/weights_changed_share": changed_share,
        }

    def result(self) -> dict[str, float]:
        gate_share = float(self._num_gated) / self._num_tokens if self._num_tokens else 0.0
        return self._last | {"gate_share": gate_share}


class UpdateMetrics:
    """Ratios, entropy and gradient norms of the policy update. Sums stay on the device."""

    def __init__(self) -> None:
        self._grad_norms: list[float] = []
        self._ratios: dict[int, StageRatios] = defaultdict(StageRatios)
        self._mismatch: Tensor | float = 0.0
        self._mismatch_tokens: Tensor | int = 0
        self._entropy: Tensor | float = 0.0
        self._num_tokens = 0

    @torch.no_grad()
    def record_batch(
        self,
        batch: MicroBatch,
        terms: PolicyTerms,
        clipped: Tensor,  # bool [B, T]
        entropies: Tensor,  # [B, T]
        rollout_logprobs: Tensor,  # [B, T] as the engine reported them
        stages: list[int],  # of every row that the micro-batch was cut from
    ) -> None:
        ratio, positive = terms.log_ratio.exp(), terms.advantages[:, None] > 0
        batch_stages = batch.pick([float(stage) for stage in stages])
        for stage in sorted(set(stages)):
            in_stage = batch.mask & (batch_stages == stage)[:, None]
            self._ratios[stage].add(ratio, clipped, positive, in_stage)
        if not self._grad_norms:  # before the first update, θ is what stage 1 was sampled from
            in_stage_1 = batch.mask & (batch_stages == 1)[:, None]
            gap = torch.where(in_stage_1, terms.logprobs - rollout_logprobs, 0.0)
            mismatch = k3(gap.double())
            self._mismatch = self._mismatch + mismatch.sum()
            self._mismatch_tokens = self._mismatch_tokens + in_stage_1.sum()
        self._entropy = self._entropy + entropies.double().sum()  # 0 on padding
        self._num_tokens += len(batch.targets)

    def record_grad_norm(self, norm: float) -> None:
        self._grad_norms.append(norm)

    def result(self) -> dict[str, float]:
        row = {
            "mismatch_kl": float(self._mismatch) / max(int(self._mismatch_tokens), 1),
            "policy_entropy": float(self._entropy) / max(self._num_tokens, 1),
            "grad_norm": sum(self._grad_norms) / max(len(self._grad_norms), 1),
        }
        for stage, ratios in sorted(self._ratios.items()):
            row |= {f"stage{stage}/{name}": value for name, value in ratios.result().items()}
        return row


class StageRatios:
    """Sums over the ratios π_θ / (denominator) of one stage's tokens.

    The ratios of completions with a positive advantage tell how much of what the stage found
    reaches the update. The smallest token ratio matters most: at the token that θ would not have
    sampled. If it is below `LOST_RATIO`, the completion hardly counts. A mean would hide this when
    stage 2 also finds completions that θ samples often.
    """

    def __init__(self) -> None:
        self._sum = self._count = self._clipped = self._max = torch.zeros(())
        self._positive_sum = self._positive_count = torch.zeros(())  # tokens
        self._smallest_sum = self._num_lost = self._num_positive = torch.zeros(())  # completions

    def add(self, ratio: Tensor, clipped: Tensor, positive: Tensor, in_stage: Tensor) -> None:
        """Add a micro-batch: [B, T] each, but `positive` is [B, 1]."""
        kept = torch.where(in_stage, ratio, 0.0)
        self._sum = self._sum + kept.double().sum()
        self._count = self._count + in_stage.sum()
        self._clipped = self._clipped + (clipped & in_stage).sum()
        self._max = torch.maximum(self._max.to(ratio.device), kept.max())
        rewarded = in_stage & positive
        self._positive_sum = self._positive_sum + torch.where(rewarded, ratio, 0.0).double().sum()
        self._positive_count = self._positive_count + rewarded.sum()
        smallest = torch.where(rewarded, ratio, torch.inf).amin(1)
        has_tokens = rewarded.any(1)
        self._smallest_sum = self._smallest_sum + torch.where(has_tokens, smallest, 0.0).sum()
        self._num_lost = self._num_lost + (smallest < LOST_RATIO).sum()
        self._num_positive = self._num_positive + has_tokens.sum()

    def result(self) -> dict[str, float]:
        count = max(float(self._count), 1.0)
        row = {
            "ratio_mean": float(self._sum) / count,
            "ratio_max": float(self._max),
            "clip_share": float(self._clipped) / count,
        }
        if int(self._num_positive):
            row["rewarded_ratio_mean"] = float(self._positive_sum) / float(self._positive_count)
            row["rewarded_ratio_min"] = float(self._smallest_sum) / float(self._num_positive)
            row["lost_share"] = float(self._num_lost) / float(self._num_positive)
        return row


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Summarise the completions of a step, per stage and over all stages."""
    row: dict[str, float] = {}
    for stage in sorted(set(rollout.stages)):
        completions, rewards = zip(*rollout.of_stage(stage), strict=True)
        row |= {
            f"stage{stage}/reward": sum(rewards) / len(rewards),
            f"stage{stage}/entropy": mean_entropy(completions),
            f"stage{stage}/length": sum(len(c.token_ids) for c in completions) / len(completions),
            f"stage{stage}/truncated_share": _share(not c.finished for c in completions),
            **_label_shares(rollout, stage),
        }
    all_completions = rollout.completions()
    all_rewards = [reward for group in rollout.rewards for reward in group]
    verdicts = [verdict for group in rollout.verdicts for verdict in group]
    return row | {
        "reward": sum(all_rewards) / len(all_completions),
        "entropy": mean_entropy(all_completions),
        "length": sum(len(c.token_ids) for c in all_completions) / len(all_completions),
        "truncated_share": _share(not c.finished for c in all_completions),
        "no_answer_share": _share(verdict.answer is None for verdict in verdicts),
        "zero_advantage_share": _share(not any(group) for group in rollout.advantages),
        **second_half_metrics(rollout.rewards),
    }


def first_round_metrics(rollout: Rollout) -> dict[str, float]:
    """Describe the completions before dynamic sampling, which drops solved and unsolved prompts.

    So the reward means the same as without dynamic sampling.
    """
    assert rollout.first_round is not None
    row = rollout_metrics(rollout.first_round)
    del row["zero_advantage_share"]  # of the groups that are trained on
    return row | {"dropped_groups": float(len(rollout.dropped))}


def _label_shares(rollout: Rollout, stage: int) -> dict[str, float]:
    """Return the share of every label that the grader gave to a completion of this step."""
    columns = [column for column, at in enumerate(rollout.stages) if at == stage]
    labels = [group[column].label for group in rollout.verdicts for column in columns]
    names = sorted({verdict.label for group in rollout.verdicts for verdict in group} - {""})
    return {f"stage{stage}/label/{name}": labels.count(name) / len(labels) for name in names}


def second_half_metrics(rewards: list[list[float]]) -> dict[str, float]:
    """Count groups whose second half earns reward where the first half earned none.

    GRPO's value is the chance baseline.
    """
    middle = len(rewards[0]) // 2
    second_halves = [g[middle:] for g in rewards if not any(reward > 0 for reward in g[:middle])]
    recovered = [half for half in second_halves if any(reward > 0 for reward in half)]
    return {
        "missed_share": len(second_halves) / len(rewards),
        "second_half_recovery": len(recovered) / len(rewards),
    }


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / max(len(values), 1)
