"""A language model's head: hidden states to logits, and to what training asks of them, a few positions at a time.

Logits of bf16 products are kept in fp32, here and where rollouts are sampled: rounded to bf16 they would be off by a
sixteenth, and so would the ratio of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from eepo import kernels


@dataclass(frozen=True)
class Head:
    """Of one model: its matrix, and the ways in which families bend logits after it."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    scale: float
    cap: float

    @classmethod
    def of(cls, model: Any) -> Head:
        """As it is now: `functional_call` may have put other weights there."""
        projection, config = model.get_output_embeddings(), model.config
        scale = (getattr(config, "logit_scale", None) or 1.0) / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        cap = getattr(config, "final_logit_softcapping", None) or 0.0
        return cls(projection.weight, getattr(projection, "bias", None), scale, cap)

    def logits(self, hidden: Tensor) -> Tensor:  # [N, H] -> [N, V] fp32
        logits = wide_product(hidden, self.weight)
        if self.bias is not None:
            logits += self.bias
        if self.scale != 1.0:
            logits *= self.scale
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits

    def unbend(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """The gradient before scale and cap, from the one after them."""
        if self.cap:
            gradient = gradient * (1 - (logits / self.cap) ** 2)
        return gradient * self.scale if self.scale != 1.0 else gradient

    def scores(
        self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log p of `targets` [N], entropies [N], log(1 − p) [N]; products in `dtype`, `chunk` positions at a time."""
        return _Scores.apply(
            hidden, self.weight, self.bias, targets, self, 1 / temperature, chunk, dtype
        )


class _Scores(torch.autograd.Function):
    """Logits of a chunk live until its four numbers a row are known, and come back in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        scale: float,
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        rounded, matrix = hidden.to(dtype), _Rounded(head, dtype)
        parts = [
            _stats(matrix.logits(piece), wanted, scale)
            for piece, wanted in zip(rounded.split(chunk), targets.split(chunk), strict=True)
        ]
        lse, logprobs, entropies, complements = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        ctx.save_for_backward(rounded, targets, lse, entropies, complements, weight)
        ctx.head, ctx.scale, ctx.chunk, ctx.hidden_dtype = head, scale, chunk, hidden.dtype
        return logprobs, entropies, complements

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rounded, targets, lse, entropies, complements, weight = ctx.saved_tensors
        matrix = _Rounded(ctx.head, rounded.dtype)
        d_hidden = torch.empty_like(rounded)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        d_bias = torch.zeros_like(ctx.head.bias) if ctx.head.bias is not None else None
        for start in range(0, len(rounded), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            given = [
                one[part].contiguous() for one in (targets, lse, entropies, complements, *upstream)
            ]
            bent = bool(ctx.head.cap) or ctx.head.scale != 1.0
            exact = bent or d_bias is not None
            gradient = _gradient(
                matrix.logits(rounded[part]),
                given,
                ctx.scale,
                torch.float32 if exact else rounded.dtype,
            )
            if bent:
                gradient = ctx.head.unbend(matrix.logits(rounded[part]), gradient)
            if d_bias is not None:
                d_bias += gradient.sum(0)
            gradient = gradient.to(rounded.dtype)
            d_hidden[part] = gradient @ matrix.weight
            d_weight = _add_product(d_weight, gradient.t(), rounded[part])
            del gradient  # before the logits of the next chunk
        return (
            d_hidden.to(ctx.hidden_dtype),
            d_weight.to(weight.dtype),
            d_bias,
            None,
            None,
            None,
            None,
            None,
        )


class _Rounded(Head):
    """A head whose matrix is in the type of the products."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        super().__init__(head.weight.detach().to(dtype), head.bias, head.scale, head.cap)


def wide_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """[N, H], [V, H] -> [N, V] fp32, which half types sum in anyway."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, matrix.t(), out_dtype=torch.float32)
    return linear(rows, matrix).float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in fp32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.addmm(total, left, right, out_dtype=torch.float32)
    return total.addmm_(left.float(), right.float())


def _stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logsumexp, log p, entropy, log(1 − p), each [N], of logits times `scale`."""
    if kernels.available(logits.device):
        from eepo.kernels import lm_head as head

        return head.stats(logits, targets, scale)
    logits = logits * scale
    lse = logits.logsumexp(-1)
    own = logits.gather(1, targets.unsqueeze(1))
    logprobs = logits - lse.unsqueeze(1)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)
    others = logits.scatter_(1, targets.unsqueeze(1), -torch.inf).logsumexp(-1)
    return lse, own.squeeze(1) - lse, entropies, others - lse


def _gradient(logits: Tensor, given: list[Tensor], scale: float, dtype: torch.dtype) -> Tensor:
    """On `logits`, which it may write over, in `dtype`; `given` as in `kernels.head.gradient`."""
    if kernels.available(logits.device):
        from eepo.kernels import lm_head as head

        return head.gradient(logits, given, scale, dtype)
    targets, lse, entropies, complements, d_logprobs, d_entropies, d_complements = given
    logprobs = logits.mul_(scale).sub_(lse.unsqueeze(1))
    p = logprobs.exp()
    own = targets.unsqueeze(1)
    gradient = -p * (d_logprobs + d_complements).unsqueeze(1)
    gradient -= d_entropies.unsqueeze(1) * p * (logprobs.clamp(min=-1e30) + entropies.unsqueeze(1))
    if d_complements.any():
        others = (logprobs - complements.unsqueeze(1)).exp_().scatter_(1, own, 0.0)
        gradient += d_complements.unsqueeze(1) * others
    return gradient.scatter_add_(1, own, d_logprobs.unsqueeze(1)).mul_(scale).to(dtype)
