"""The language-model head: logits and the scores that training needs, chunk by chunk.

Logits of bf16 products stay in fp32, here and where rollouts are sampled. In bf16 a logit can be
off by 1/16, and the ratio of policy and rollout probabilities with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from eepo import kernels


@dataclass(frozen=True)
class LMHead:
    """Holds a model's output matrix and the transformations that its family applies to logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    scale: float
    softcap: float  # 0: none

    @classmethod
    def from_model(cls, model: Any) -> LMHead:
        """Read the head's current weights, which `functional_call` may have replaced."""
        projection, config = model.get_output_embeddings(), model.config
        multiplier = getattr(config, "logit_scale", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        softcap = getattr(config, "final_logit_softcapping", None) or 0.0
        bias = getattr(projection, "bias", None)
        return cls(projection.weight, bias, multiplier / divisor, softcap)

    def logits(self, hidden: Tensor) -> Tensor:  # [N, H] -> [N, V] fp32
        logits = matmul_fp32(hidden, self.weight)
        if self.bias is not None:
            logits += self.bias
        if self.scale != 1.0:
            logits *= self.scale
        return logits.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else logits

    @property
    def transforms_logits(self) -> bool:
        return bool(self.softcap) or self.scale != 1.0

    def untransformed_gradient(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Propagate a gradient on the final logits back through softcap and scale."""
        if self.softcap:
            gradient = gradient * (1 - (logits / self.softcap) ** 2)
        return gradient * self.scale if self.scale != 1.0 else gradient

    def scores(
        self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p of `targets`, entropies and log(1 − p), each [N].

        Logits exist for `chunk` positions at a time. Matrix products are in `dtype`.
        """
        options = _ScoreOptions(1 / temperature, chunk, dtype)
        return _Scores.apply(hidden, self.weight, self.bias, targets, self, options)


class _ScoreOptions(NamedTuple):
    inverse_temperature: float
    chunk: int
    dtype: torch.dtype


class _Scores(torch.autograd.Function):
    """Scores all positions chunk by chunk; the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: LMHead,
        options: _ScoreOptions,
    ) -> tuple[Tensor, ...]:
        rounded, rounded_head = hidden.to(options.dtype), _with_weight_in(head, options.dtype)
        chunks = zip(rounded.split(options.chunk), targets.split(options.chunk), strict=True)
        parts = [
            _statistics(rounded_head.logits(states), ids, options.inverse_temperature)
            for states, ids in chunks
        ]
        lse, logprobs, entropies, complements = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(rounded, targets, lse, entropies, complements, weight)
        ctx.head, ctx.options, ctx.hidden_dtype = head, options, hidden.dtype
        return logprobs, entropies, complements

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rounded, targets, lse, entropies, complements, weight = ctx.saved_tensors
        head, (inverse_temperature, chunk, _) = ctx.head, ctx.options
        rounded_head = _with_weight_in(head, rounded.dtype)
        d_hidden = torch.empty_like(rounded)
        d_weight = None  # of a frozen head
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        d_bias = torch.zeros_like(head.bias) if head.bias is not None else None
        needs_fp32 = head.transforms_logits or d_bias is not None
        gradient_dtype = torch.float32 if needs_fp32 else rounded.dtype
        columns = (targets, lse, entropies, complements, *upstream)
        for start in range(0, len(rounded), chunk):
            part = slice(start, start + chunk)
            inputs = [column[part].contiguous() for column in columns]
            logits = rounded_head.logits(rounded[part])
            gradient = _gradient(logits, inputs, inverse_temperature, gradient_dtype)
            del logits  # may be overwritten
            if head.transforms_logits:
                logits = rounded_head.logits(rounded[part])
                gradient = head.untransformed_gradient(logits, gradient)
                del logits
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(rounded.dtype)
            d_hidden[part] = gradient @ rounded_head.weight
            if d_weight is not None:
                d_weight = _add_product(d_weight, gradient.t(), rounded[part])
            del gradient  # before the next chunk's logits are allocated
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden.to(ctx.hidden_dtype), d_weight, d_bias, None, None, None


def _with_weight_in(head: LMHead, dtype: torch.dtype) -> LMHead:
    return LMHead(head.weight.detach().to(dtype), head.bias, head.scale, head.softcap)


def matmul_fp32(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [N, H], [V, H] -> [N, V] in fp32, the dtype that half-precision sums have."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, matrix.t(), out_dtype=torch.float32)
    return linear(rows, matrix).float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right, in fp32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.addmm(total, left, right, out_dtype=torch.float32)
    return total.addmm_(left.float(), right.float())


def _statistics(
    logits: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logsumexp, log p, entropy and log(1 − p), each [N], of `logits` times `scale`."""
    if kernels.available(logits.device):
        from eepo.kernels import lm_head

        return lm_head.statistics(logits, targets, scale)
    logits = logits * scale
    lse = logits.logsumexp(-1)
    target_logits = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    logprobs = logits - lse.unsqueeze(1)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)
    others = logits.scatter_(1, targets.unsqueeze(1), -torch.inf).logsumexp(-1)
    return lse, target_logits - lse, entropies, others - lse


def _gradient(logits: Tensor, inputs: list[Tensor], scale: float, dtype: torch.dtype) -> Tensor:
    """Return the gradient on `logits` in `dtype`; may overwrite `logits`.

    `inputs` are those of `eepo.kernels.lm_head.gradient`.
    """
    if kernels.available(logits.device):
        from eepo.kernels import lm_head

        return lm_head.gradient(logits, inputs, scale, dtype)
    targets, lse, entropies, complements, d_logprobs, d_entropies, d_complements = inputs
    logprobs = logits.mul_(scale).sub_(lse.unsqueeze(1))
    p = logprobs.exp()
    target = targets.unsqueeze(1)
    gradient = -p * (d_logprobs + d_complements).unsqueeze(1)
    gradient -= d_entropies.unsqueeze(1) * p * (logprobs.clamp(min=-1e30) + entropies.unsqueeze(1))
    if d_complements.any():
        others = (logprobs - complements.unsqueeze(1)).exp_().scatter_(1, target, 0.0)
        gradient += d_complements.unsqueeze(1) * others
    return gradient.scatter_add_(1, target, d_logprobs.unsqueeze(1)).mul_(scale).to(dtype)
