"""Scores of a target token from logits: log p, entropy and log(1 − p), and their gradient.

Sums run over the *other* tokens, and the target is added last. So log(1 − p) is exact where p is
close to 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _statistics_kernel(
    logits, stride, targets, out_lse, out_logprob, out_entropy, out_complement, scale, vocabulary,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the scores of one row. One program per row."""
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * stride
    target = tl.load(targets + program)
    offsets = tl.arange(0, BLOCK)
    maximum = float("-inf")
    total = 0.0
    weighted = 0.0
    for block in range(NUM_BLOCKS):
        token = block * BLOCK + offsets
        other = (token < vocabulary) & (token != target)
        values = tl.load(row + token, mask=other, other=float("-inf")).to(tl.float32) * scale
        new_maximum = tl.maximum(maximum, tl.max(values, 0))
        # -inf if no other token so far is possible
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        masses = tl.exp(values - shift)
        rescale = tl.exp(maximum - shift)
        total = total * rescale + tl.sum(masses, 0)
        weighted = weighted * rescale + tl.sum(tl.where(masses > 0, masses * values, 0.0), 0)
        maximum = new_maximum
    target_logit = tl.load(row + target).to(tl.float32) * scale
    others = maximum + tl.log(total)
    high = tl.maximum(others, target_logit)
    lse = high + tl.log(tl.exp(others - high) + tl.exp(target_logit - high))
    mean = weighted * tl.exp(maximum - lse) + tl.exp(target_logit - lse) * target_logit
    tl.store(out_lse + program, lse)
    tl.store(out_logprob + program, target_logit - lse)
    tl.store(out_entropy + program, lse - mean)
    tl.store(out_complement + program, others - lse)


@triton.jit
def _gradient_kernel(
    logits, stride, targets, lses, entropies, complements, d_logprobs, d_entropies, d_complements,
    out, scale, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient on one block of logits. One program per row and block."""
    program = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits + program.to(tl.int64) * stride + token
    inside = token < vocabulary
    lse = tl.load(lses + program)
    d_logprob, d_entropy = tl.load(d_logprobs + program), tl.load(d_entropies + program)
    d_complement = tl.load(d_complements + program)
    logp = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32) * scale - lse
    p = tl.exp(logp)
    is_target = token == tl.load(targets + program)
    share = tl.where(is_target, 0.0, tl.exp(logp - tl.load(complements + program)))
    gradient = d_logprob * (is_target.to(tl.float32) - p)
    gradient -= d_entropy * tl.where(p > 0, p * (logp + tl.load(entropies + program)), 0.0)
    gradient += d_complement * (share - p)
    out_pointers = out + program.to(tl.int64) * vocabulary + token
    tl.store(out_pointers, (gradient * scale).to(out.dtype.element_ty), mask=inside)


def statistics(
    logits: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logsumexp, log p, entropy and log(1 − p), each [N] fp32, of `logits` times `scale`."""
    lse, logprob, entropy, complement = torch.empty(
        4, len(logits), dtype=torch.float32, device=logits.device
    )
    _statistics_kernel[(len(logits),)](
        logits, logits.stride(0), targets, lse, logprob, entropy, complement, scale,
        logits.shape[1],
        NUM_BLOCKS=triton.cdiv(logits.shape[1], BLOCK), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return lse, logprob, entropy, complement


def gradient(logits: Tensor, inputs: list[Tensor], scale: float, dtype: torch.dtype) -> Tensor:
    """Return the gradient on `logits` [N, V] in `dtype`, the dtype of the products that follow.

    `inputs`, each [N]: targets, logsumexp, entropy, log(1 − p), and the upstream gradients of
    log p, entropy and log(1 − p).
    """
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
        logits, logits.stride(0), *inputs, out, scale, logits.shape[1], BLOCK=BLOCK, num_warps=8
    )
    return out
