"""What training asks of logits: log p of one token, entropy, log(1 − p); and the gradient of these on the logits.

Sums run over the *other* tokens, and the token itself is added last: log(1 − p) then loses nothing where p is near 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _stats_kernel(logits, stride, targets, out_lse, out_logprob, out_entropy, out_complement, scale, vocabulary,
                  NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * stride
    target = tl.load(targets + program)
    inside = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    weighted = 0.0
    for block in range(NUM_BLOCKS):
        place = block * BLOCK + inside
        other = (place < vocabulary) & (place != target)
        values = tl.load(row + place, mask=other, other=float("-inf")).to(tl.float32) * scale
        new_top = tl.maximum(top, tl.max(values, 0))
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)  # no other token so far can be
        masses = tl.exp(values - zero)
        fade = tl.exp(top - zero)
        total = total * fade + tl.sum(masses, 0)
        weighted = weighted * fade + tl.sum(tl.where(masses > 0, masses * values, 0.0), 0)
        top = new_top
    own = tl.load(row + target).to(tl.float32) * scale
    others = top + tl.log(total)
    high = tl.maximum(others, own)
    lse = high + tl.log(tl.exp(others - high) + tl.exp(own - high))
    mean = weighted * tl.exp(top - lse) + tl.exp(own - lse) * own
    tl.store(out_lse + program, lse)
    tl.store(out_logprob + program, own - lse)
    tl.store(out_entropy + program, lse - mean)
    tl.store(out_complement + program, others - lse)


@triton.jit
def _gradient_kernel(logits, stride, targets, lses, entropies, complements, d_logprob, d_entropy, d_complement, out,
                     scale, vocabulary, BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits + program.to(tl.int64) * stride + place
    inside = place < vocabulary
    lse = tl.load(lses + program)
    by_logprob, by_entropy = tl.load(d_logprob + program), tl.load(d_entropy + program)
    by_complement = tl.load(d_complement + program)
    logp = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32) * scale - lse
    p = tl.exp(logp)
    own = place == tl.load(targets + program)
    gradient = by_logprob * (own.to(tl.float32) - p)
    gradient -= by_entropy * tl.where(p > 0, p * (logp + tl.load(entropies + program)), 0.0)
    gradient += by_complement * (
        tl.where(own, 0.0, tl.exp(logp - tl.load(complements + program))) - p
    )
    own_place = out + program.to(tl.int64) * vocabulary + place
    tl.store(own_place, (gradient * scale).to(out.dtype.element_ty), mask=inside)


def stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N, V], [N] -> logsumexp, log p, entropy, log(1 − p), each [N] fp32, of logits times `scale`."""
    lse, logprob, entropy, complement = torch.empty(
        4, len(logits), dtype=torch.float32, device=logits.device
    )
    _stats_kernel[(len(logits),)](
        logits, logits.stride(0), targets, lse, logprob, entropy, complement, scale, logits.shape[1],
        NUM_BLOCKS=triton.cdiv(logits.shape[1], BLOCK), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return lse, logprob, entropy, complement


def gradient(logits: Tensor, given: list[Tensor], scale: float, dtype: torch.dtype) -> Tensor:
    """The gradient on the logits [N, V], in `dtype`: that of the products after it, so it is written only once.

    `given`: targets, logsumexp, entropy, log(1 − p), and what flows in on log p, entropy and log(1 − p); each [N].
    """
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
        logits, logits.stride(0), *given, out, scale, logits.shape[1], BLOCK=BLOCK, num_warps=8
    )
    return out
