"""The trained model θ: log-probabilities and entropies of ragged completions, in bounded memory.

θ stays in fp32: bf16 weights would round small steps away. Logits exist only for `head_tokens`
positions at a time and are computed again in the backward pass. Nothing here edits weights; the
trainer's optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eepo.model.attention import Packing
from eepo.model.batching import MicroBatch, Packed, Padded, micro_batches
from eepo.model.lm_head import LMHead
from eepo.types import Completion, Prompt, UserError


@dataclass
class Scores:
    """Scores of completion tokens, 0 on padding."""

    logprobs: Tensor  # [B, T] log p of the target
    entropies: Tensor  # [B, T] of the full next-token distribution
    complements: Tensor | None = None  # [B, T] log(1 − p), as logsumexp over the other tokens


class Policy:
    """Wraps a `transformers` causal model with fp32 weights; `score` is its only forward pass.

    Matrix products are in `compute_dtype`, by default bf16 on a GPU and fp32 elsewhere. A model
    that is never trained (a reference) may store its matrices in `matrix_dtype`: see
    `_cast_matrices`.
    """

    def __init__(
        self,
        model: Any,
        micro_batch_tokens: int = 16384,
        head_tokens: int = 4096,
        compute_dtype: torch.dtype | None = None,
        matrix_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = self._set_dtypes(model)
        self.micro_batch_tokens = micro_batch_tokens
        self._scorer = _Scorer(model, head_tokens)
        self.device = next(model.parameters()).device
        _check_head(self._scorer, self.device)
        if compute_dtype is None:
            in_bf16 = self.device.type == "cuda" or matrix_dtype is not None
            compute_dtype = torch.bfloat16 if in_bf16 else torch.float32
        self.compute_dtype = compute_dtype
        self._autocast = compute_dtype == torch.bfloat16
        can_pack = self.device.type == "cuda" and self._autocast
        self.packed = can_pack and self._scorer.packing.enable_if_equivalent()
        if self._autocast:
            # bf16 embeddings (of a reference or an engine) must not make the residual stream bf16.
            model.get_input_embeddings().register_forward_hook(_output_to_fp32)
        if matrix_dtype is not None:
            _cast_matrices(model, matrix_dtype)

    def _set_dtypes(self, model: Any) -> Any:
        return model.float()

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every trained weight once, detached; a tied head is not repeated."""
        for name, weight in self.model.named_parameters():
            yield name, weight.detach()

    def named_weights(
        self, trained: Iterable[tuple[str, Tensor]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight of the rollout model once; `trained` takes the place of θ."""
        yield from self.trained_weights() if trained is None else trained

    def micro_batches(
        self, pairs: Sequence[tuple[Prompt, Completion]], rows: Sequence[int] | None = None
    ) -> Iterator[MicroBatch]:
        """Cut all `pairs`, or only these `rows` of them, into micro-batches."""
        return micro_batches(pairs, self.micro_batch_tokens, self.device, self.packed, rows)

    def score(
        self,
        batch: MicroBatch,
        temperature: float,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Scores:
        """Score `batch` under θ, or under other `weights` (θ′, for example) without touching θ."""
        # Autocast's cache holds bf16 copies of all weights during a pass: 2 bytes per weight.
        cached = not self.model.is_gradient_checkpointing
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self._autocast, cache_enabled=cached
        ):
            if weights is None:
                return self._scorer(batch, temperature)
            replaced = {f"model.{name}": weight for name, weight in weights.items()}
            return torch.func.functional_call(self._scorer, replaced, (batch, temperature))

    def gradient(
        self,
        pairs: Sequence[tuple[Prompt, Completion]],
        temperature: float,
        loss: Callable[[MicroBatch, Scores], Tensor | None],
        rows: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Return the gradient of the loss, summed over micro-batches of `pairs` or these `rows`.

        The model's `.grad` fields keep their values. A micro-batch whose loss is None costs no
        backward pass; if all losses are None, the gradient is empty.
        """
        weights = dict(self.model.named_parameters())
        saved = {name: weight.grad for name, weight in weights.items()}
        try:
            for weight in weights.values():
                weight.grad = None
            for batch in self.micro_batches(pairs, rows):
                value = loss(batch, self.score(batch, temperature))
                if value is not None:
                    value.backward()  # accumulates in place; autograd.grad would need a second copy
            return {
                name: weight.grad for name, weight in weights.items() if weight.grad is not None
            }
        finally:
            for name, weight in weights.items():
                weight.grad = saved[name]


class _Scorer(nn.Module):
    """Joins model and head in one module: `functional_call` replaces the weights of both."""

    def __init__(self, model: Any, head_tokens: int) -> None:
        super().__init__()
        self.model: Any = model
        self.head_tokens = head_tokens
        self.packing = Packing(model)

    def forward(self, batch: MicroBatch, temperature: float) -> Scores:
        # [C, H]: only the states that predict completion tokens
        hidden = self.hidden_states(batch.inputs).flatten(0, 1)[batch.predictors]
        head = LMHead.from_model(self.model)
        dtype = product_dtype(head.weight)
        columns = head.scores(hidden, batch.targets, temperature, self.head_tokens, dtype)
        return Scores(*(batch.scatter(column) for column in columns))

    def hidden_states(self, inputs: Padded | Packed) -> Tensor:
        if self.packing.enabled != isinstance(inputs, Packed):
            expected = "packed" if self.packing.enabled else "padded"
            got = "packed" if isinstance(inputs, Packed) else "padded"
            raise ValueError(f"the policy scores {expected} micro-batches, got a {got} one")
        if isinstance(inputs, Packed):
            self.packing.set_batch(inputs)
            options = {"input_ids": inputs.input_ids, "position_ids": inputs.position_ids}
        else:
            options = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
        return self.model.base_model(**options, use_cache=False).last_hidden_state


def _output_to_fp32(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.float()


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which autocast computes a product with `weight`."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _cast_matrices(model: Any, dtype: torch.dtype) -> None:
    """Store in `dtype` what autocast casts for every product; norms and residual stream stay fp32.

    Scores change only by the rounding of the embedding, and not at all if the weights were
    published in `dtype`.
    """
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data = weight.data.to(dtype)


@torch.no_grad()
def _check_head(scorer: _Scorer, device: torch.device) -> None:
    """Refuse a family whose logits our head does not reproduce: ratios would be silently wrong."""
    ids = torch.arange(1, 5, device=device).unsqueeze(0)
    mask = torch.ones_like(ids)
    head = LMHead.from_model(scorer.model)
    in_fp32 = head.weight.dtype == torch.float32
    with torch.autocast(device.type, torch.bfloat16, enabled=not in_fp32):
        output = scorer.model(input_ids=ids, attention_mask=mask, use_cache=False)
        hidden = scorer.hidden_states(Padded(ids, mask))[0]
    expected, logits = output.logits[0].float(), head.logits(hidden.to(head.weight.dtype))
    tolerance = 1e-3 if in_fp32 else 0.03 * float(expected.abs().max())
    if not torch.allclose(logits, expected, atol=tolerance, rtol=1e-3):
        family = type(scorer.model).__name__
        raise UserError(
            f"model: {family} is not supported: it transforms its logits in an unknown way"
        )
