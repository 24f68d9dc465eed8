"""All of EEPO and GRPO on one page. `EEPO.step` is Algorithm 1; the mathematics it calls stands below it, pure.

θ is the policy, θ′ the engine's copy that is only sampled from. Q prompts, G completions each, in `num_stages`
stages: one is GRPO, two are the paper's EEPO, more are ours (each forgets all before it). B, T: a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from eepo.algorithm.advantages import advantage_weights
from eepo.algorithm.metrics import StepMetrics
from eepo.algorithm.probe import Probe, lr_for_kl
from eepo.config import AlgorithmConfig
from eepo.model.batching import MicroBatch, evenly
from eepo.model.policy import Policy, Scores
from eepo.protocols import Reward, RolloutEngine
from eepo.types import Prompt, Rollout, Sampling, UserError, mean_entropy


@dataclass
class EEPO:
    policy: Policy  # θ
    reference: Policy | None  # what the KL term holds θ to; None without one
    engine: RolloutEngine  # θ′
    reward: Reward
    optimizer: torch.optim.Optimizer
    options: AlgorithmConfig
    mini_batch: int  # prompts in one optimizer step
    max_grad_norm: float
    gate_history: list[float] = field(default_factory=list)  # stage-1 entropies of the last steps
    auto_lr: float = 1e-3  # what unlearn_lr = "auto" chose last
    grader: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1)
    )  # grades beside the GPU's work
    unlearn_scale: float = (
        1.0  # times η, or times the KL target of "auto": lowered when a run explores too far
    )

    def step(self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics) -> Rollout:
        """One policy iteration."""
        rollout = Rollout(prompts)
        with metrics.phase("sync"):
            self.engine.load_weights(self.policy.named_weights())  # θ′ ← θ
        self.sample(rollout, 1, sampling, metrics)
        for stage in range(2, self.options.num_stages + 1):
            with metrics.phase("unlearn"):
                self.unlearn(rollout, metrics)  # θ′ ← θ − η ∇L
            self.sample(rollout, stage, sampling, metrics)
        with metrics.phase("reward"):
            rollout.settle()
        parts = (
            self.options.num_stages if self.options.advantage_baseline == "stage" else 1
        )  # of a group
        advantages = torch.cat(
            [group_advantages(part) for part in torch.tensor(rollout.rewards).chunk(parts, 1)], 1
        )
        (
            values,
            logprobs,
            stages,
        ) = (  # weights beyond the paper: all one, unless a knob says otherwise
            torch.as_tensor(one).unflatten(-1, (self.options.num_stages, -1))
            for one in (advantages, rollout.mean_logprobs(), rollout.stages)
        )
        rollout.advantages = (
            (values * advantage_weights(values, logprobs, stages, self.options)).flatten(1).tolist()
        )
        metrics.record_rollout(rollout)
        for first in range(0, len(prompts), self.mini_batch):
            self.update(rollout, range(first, min(first + self.mini_batch, len(prompts))), metrics)
        return rollout  # nothing to undo: the next sync overwrites θ′

    def sample(
        self, rollout: Rollout, stage: int, sampling: Sampling, metrics: StepMetrics
    ) -> None:
        """G / num_stages completions for each prompt from θ′, and their grading begun: it goes on beside the next."""
        num_samples = self.options.group_size // self.options.num_stages
        with metrics.phase(f"stage{stage}"):
            own_draws = replace(sampling, first_sample=(stage - 1) * num_samples)
            groups = self.engine.generate(rollout.prompts, num_samples, own_draws)
            self.engine.release_memory()
        prompts = [prompt for prompt in rollout.prompts for _ in range(num_samples)]
        texts = [completion.text for group in groups for completion in group]
        rollout.add_stage(stage, groups, self.grader.submit(self.reward.grade, prompts, texts))

    def unlearn(self, rollout: Rollout, metrics: StepMetrics) -> None:
        """Stream θ − η ∇L of all completions so far into the engine; θ is only read. Nothing gated: θ′ stays θ."""
        options, dtype = self.options, self.engine.dtype
        if rollout.stages[-1] == 1:
            first = [completion for group in rollout.groups for completion in group]
            self.gate_history = [*self.gate_history, mean_entropy(first)][-options.gate_window :]
        low_entropy = sum(self.gate_history) / len(self.gate_history) < options.gate_threshold
        if options.gate == "never" or (options.gate == "step" and not low_entropy):
            return
        pairs = rollout.pairs(range(len(rollout.prompts)))
        rows = evenly(len(pairs), options.unlearn_max_completions)
        wanted = [True] * len(pairs)
        if options.unlearn_on != "all":
            rollout.settle()
            wanted = [
                one for group in rollout.rewards for one in to_unlearn(group, options.unlearn_on)
            ]

        def loss(batch: MicroBatch, scores: Scores, seen_by: Probe | None = None) -> Tensor | None:
            gate = unlearn_gate(scores, batch.mask, options) & batch.pick(wanted).bool().unsqueeze(
                1
            )
            if (
                seen_by
            ):  # the pass for the gradient: what it sees serves the gate, the probe and the metrics
                metrics.record_gate(gate)
                seen_by.see(
                    batch, scores
                )  # given, not closed over: a cycle would hold the gradient for many steps
            value = unlearn_loss(scores, batch.mask, gate, options) * len(batch.rows) / len(rows)
            return (
                value if seen_by or gate.any() else None
            )  # in that pass, asking would keep the GPU waiting

        def load(gradient: Mapping[str, Tensor], lr: float) -> Mapping[str, Tensor]:
            theta, moved = (
                self.policy.named_weights,
                partial(unlearned_weights, gradient=gradient, lr=lr, dtype=dtype),
            )
            self.engine.load_weights(metrics.counting_changes(moved(theta()), theta()))
            return self.engine.weights() or dict(moved(theta()))

        own = [
            row for row in rows if rollout.stages[row % len(rollout.stages)] == 1
        ]  # of stage 1: sampled under θ
        probe = Probe(
            self.policy,
            pairs,
            own,
            options.probe_completions,
            options.temperature,
            loss,
            load,
            len(rows),
        )
        metrics.record_gateable(pairs[row][1] for row in rows)
        surely_shut = (
            2 * options.gate_threshold if options.gate == "token" else torch.inf
        )  # sampling rounds otherwise
        worth = [
            row
            for row in rows
            if wanted[row] and min(pairs[row][1].entropies, default=0.0) < surely_shut
        ]
        gradient = self.policy.gradient(
            pairs, options.temperature, partial(loss, seen_by=probe), worth
        )
        if not any(
            part.any() for part in gradient.values()
        ):  # nothing gated, or all of it saturated
            return
        if options.unlearn_lr == "auto":
            target = options.unlearn_kl_target * self.unlearn_scale
            lr = self.auto_lr = lr_for_kl(
                lambda lr: probe.measure(gradient, lr).kl, target, self.auto_lr
            )
        else:
            lr = options.unlearn_lr * self.unlearn_scale
        metrics.record_unlearning(
            lr, effect := probe.measure(gradient, lr)
        )  # θ′ is loaded to be measured, and stays
        rollout.record_forgetting(effect.logprobs_after)

    def update(self, rollout: Rollout, rows: range, metrics: StepMetrics) -> None:
        """One GRPO step of the optimizer on the groups of `rows`. Each token weighs the same."""
        options, pairs = self.options, rollout.pairs(rows)
        advantages = [advantage for row in rows for advantage in rollout.advantages[row]]
        num_tokens, clip = (
            sum(len(one.token_ids) for _, one in pairs),
            (options.clip_low, options.clip_high),
        )
        for batch in self.policy.micro_batches(pairs):
            reference = None
            if self.reference is not None:
                with metrics.phase("reference"), torch.no_grad():
                    reference = self.reference.score(batch, options.temperature).logprobs
            with metrics.phase("update"):
                scores = self.policy.score(batch, options.temperature)
                sampled = batch.pad(
                    [completion.logprobs for _, completion in pairs]
                )  # under the weights that sampled
                loss = policy_loss(
                    scores.logprobs, sampled, batch.pick(advantages), batch.mask, *clip
                )
                loss = loss - options.entropy_coef * token_mean(scores.entropies, batch.mask)
                if reference is not None:
                    loss = loss + options.kl_coef * kl_penalty(
                        scores.logprobs, reference, batch.mask
                    )
                (loss * batch.mask.sum() / num_tokens).backward()
            metrics.record_update(
                batch, scores, sampled, batch.pick(advantages), rollout.stages * len(rows), clip
            )
        with metrics.phase("update"):
            norm = torch.nn.utils.clip_grad_norm_(
                self.policy.model.parameters(), self.max_grad_norm
            )
            if (
                not norm.isfinite()
            ):  # one such step would destroy θ, and the next checkpoints what was good
                mend = "begin a new run with a lower unlearn_lr or learning_rate, perhaps from a checkpoint of this one"
                raise UserError(f"the gradient is {float(norm)}; {mend} (model.path = its folder)")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        metrics.record_grad_norm(float(norm))


def group_advantages(rewards: Tensor) -> Tensor:  # [Q, G] -> [Q, G]
    """(r − mean) / (std + 1e-6) within each group; equal rewards give zeros."""
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = centred / (rewards.std(1, keepdim=True, correction=1) + 1e-6)
    equal = (rewards == rewards[:, :1]).all(
        1, keepdim=True
    )  # exactly, whatever rounding the mean brought
    return torch.where(equal, 0.0, advantages)


def token_gate(
    entropies: Tensor, mask: Tensor, threshold: float, window: int
) -> Tensor:  # [B, T] -> bool [B, T]
    """True where the mean entropy of the last `window` completion tokens (fewer at the start) is under `threshold`."""
    mask = mask.bool()
    kept = torch.where(mask, entropies, 0.0).double()
    sums = torch.nn.functional.pad(kept, (window, 0)).unfold(1, window + 1, 1)[..., 1:].sum(-1)
    counts = (
        torch.nn.functional.pad(mask.double(), (window, 0))
        .unfold(1, window + 1, 1)[..., 1:]
        .sum(-1)
    )
    return (sums / counts.clamp(min=1) < threshold) & mask


def to_unlearn(rewards: list[float], choice: str) -> list[bool]:
    """Of one prompt's completions: what earned reward, or none; if "zero_variance", all where equal rewards teach nothing."""
    return [
        {"rewarded": one > 0, "unrewarded": one <= 0, "zero_variance": len({*rewards}) == 1}[choice]
        for one in rewards
    ]


def unlearn_gate(scores: Scores, mask: Tensor, options: AlgorithmConfig) -> Tensor:  # bool [B, T]
    """Which tokens are unlearned, once the step's own gate is open."""
    if options.gate == "token":
        return token_gate(
            scores.entropies.detach(), mask, options.gate_threshold, options.gate_window
        )
    return mask


def complementary_loss(  # [B, T] each; complements: log(1 − p) from the other tokens
    logprobs: Tensor, mask: Tensor, gate: Tensor, eps: float,
    saturation: str = "stop", complements: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean over completions of (1 / T_k) Σ gate · −log(1 − p): descending it makes what was sampled less likely.

    "stop" is the paper's p ← min(p, 1 − ε): finite, but without gradient where p is larger. "exact" takes
    log(1 − p) as computed from the other tokens, whose gradient on the sampled logit is p itself.
    """
    if saturation == "exact":
        if complements is None:
            raise ValueError('saturation = "exact" needs complements, log(1 − p) of every token')
        penalty = -complements
    else:
        ceiling = torch.log1p(torch.tensor(-eps, dtype=torch.float64)).item()
        penalty = -_log1mexp(logprobs.clamp(max=ceiling))
    return completion_mean(penalty, mask, gate)


def unlearn_loss(scores: Scores, mask: Tensor, gate: Tensor, options: AlgorithmConfig) -> Tensor:
    """The paper's complementary loss, or ascent on the NLL for the ablation."""
    if options.unlearn_loss == "nll":
        return completion_mean(scores.logprobs, mask, gate)
    return complementary_loss(
        scores.logprobs, mask, gate, options.unlearn_eps, options.saturation, scores.complements
    )


def unlearned_weights(
    weights: Iterable[tuple[str, Tensor]],
    gradient: Mapping[str, Tensor],
    lr: float,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Stream θ − η·grad, one new tensor at a time: the step in fp32, then rounded to what the engine samples in."""
    for name, weight in weights:
        moved = weight.float() - lr * gradient[name].float() if name in gradient else weight
        yield name, moved.to(dtype)


def policy_loss(
    policy_logprobs: Tensor, rollout_logprobs: Tensor,  # [B, T] under θ, and under the weights that sampled: θ or θ′
    advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float,  # [B], [B, T]
) -> Tensor:  # fmt: skip
    """The clipped surrogate, negated, as a mean over tokens."""
    ratio = torch.where(mask.bool(), policy_logprobs - rollout_logprobs, 0.0).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -token_mean(
        torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]), mask
    )


def kl_penalty(policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """KL(θ ‖ reference) by the k3 estimator, as a mean over tokens."""
    gap = torch.where(mask.bool(), reference_logprobs - policy_logprobs, 0.0)
    return token_mean(gap.exp() - 1 - gap, mask)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:  # [B, T] -> scalar
    return torch.where(mask.bool(), values, 0.0).sum() / mask.sum().clamp(min=1)


def completion_mean(values: Tensor, mask: Tensor, gate: Tensor) -> Tensor:  # [B, T] -> scalar
    """Mean over rows of (1 / T_k) Σ gated values. T_k counts all tokens of a completion, gated or not."""
    gated = torch.where(gate.bool() & mask.bool(), values, 0.0).sum(1)
    return (gated / mask.sum(1).clamp(min=1)).mean()


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0, without cancellation at either end. The unused branch gets a harmless input."""
    near_zero = x > -0.6931
    small = torch.log(-torch.expm1(torch.where(near_zero, x, -0.5)))
    return torch.where(near_zero, small, torch.log1p(-torch.where(near_zero, -1.0, x).exp()))
