"""The trained model θ: log-probabilities and entropies of ragged completions, in bounded memory.

θ stays in fp32: a small step applied to bf16 weights is rounded away. Logits exist only for `head_tokens` positions
at a time and are computed again in the backward pass. Nothing here edits weights; the trainer's optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eepo.model.attention import Packing
from eepo.model.batching import MicroBatch, Packed, Padded, micro_batches
from eepo.model.lm_head import Head
from eepo.types import Completion, Prompt, UserError


@dataclass
class Scores:
    """Of completion tokens, zero on padding."""

    logprobs: Tensor  # [B, T] log p of the target
    entropies: Tensor  # [B, T] of the full next-token distribution
    complements: Tensor | None = None  # [B, T] log(1 − p), as logsumexp over the other tokens


class Policy:
    """A `transformers` causal model with fp32 weights. `score` is the one way to ask it anything.

    Products are in `compute`: bf16 on a GPU, unless it says otherwise. One that is never trained (a reference) may hold
    its matrices in `dtype`: see `_hold_matrices`.
    """

    def __init__(
        self,
        model: Any,
        micro_batch_tokens: int = 16384,
        head_tokens: int = 4096,
        compute: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model.float()
        self.micro_batch_tokens = micro_batch_tokens
        self._scorer = _Scorer(model, head_tokens)
        self.device = next(model.parameters()).device
        _check_head(self._scorer, self.device)
        usual = torch.bfloat16 if self.device.type == "cuda" or dtype is not None else torch.float32
        self._autocast = (compute or usual) == torch.bfloat16
        self.packed = self.device.type == "cuda" and self._autocast and self._scorer.packing.adopt()
        if (
            self._autocast
        ):  # embeddings in bf16 (a reference's, an engine's) must not round all that follows
            model.get_input_embeddings().register_forward_hook(
                lambda _module, _inputs, output: output.float()
            )
        if dtype is not None:
            _hold_matrices(model, dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once (a tied head is its embedding), detached."""
        for name, weight in self.model.named_parameters():
            yield name, weight.detach()

    def micro_batches(
        self, pairs: Sequence[tuple[Prompt, Completion]], rows: Sequence[int] | None = None
    ) -> Iterator[MicroBatch]:
        """Of all `pairs`, or of some `rows` of them."""
        return micro_batches(pairs, self.micro_batch_tokens, self.device, self.packed, rows)

    def score(
        self,
        batch: MicroBatch,
        temperature: float,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Scores:
        """Scores of `batch` under θ, or under `weights` in its place (θ′, say) without touching θ."""
        cached = (
            not self.model.is_gradient_checkpointing
        )  # bf16 copies of all weights, for one pass: 2 bytes a weight
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self._autocast, cache_enabled=cached
        ):
            if weights is None:
                return self._scorer(batch, temperature)
            named = {f"model.{name}": weight for name, weight in weights.items()}
            return torch.func.functional_call(self._scorer, named, (batch, temperature))

    def gradient(
        self,
        pairs: Sequence[tuple[Prompt, Completion]],
        temperature: float,
        loss: Callable[[MicroBatch, Scores], Tensor | None],
        rows: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """∇ Σ loss over the micro-batches of `pairs`, or of some `rows` of them, beside the model.

        Its own `.grad` fields are left alone. A micro-batch whose loss is None costs no backward pass; if all are, the
        gradient is empty.
        """
        weights = dict(self.model.named_parameters())
        aside = {name: weight.grad for name, weight in weights.items()}
        try:
            for weight in weights.values():
                weight.grad = None
            for batch in self.micro_batches(pairs, rows):
                value = loss(batch, self.score(batch, temperature))
                if value is not None:
                    value.backward()  # sums in place, which no list of gradients would
            return {
                name: weight.grad for name, weight in weights.items() if weight.grad is not None
            }
        finally:
            for name, weight in weights.items():
                weight.grad = aside[name]


class _Scorer(nn.Module):
    """Model and head as one module, so that `functional_call` can put other weights under both."""

    def __init__(self, model: Any, head_tokens: int) -> None:
        super().__init__()
        self.model: Any = model
        self.head_tokens = head_tokens
        self.packing = Packing(model)

    def forward(self, batch: MicroBatch, temperature: float) -> Scores:
        hidden = self.hidden_states(batch.inputs).flatten(0, 1)[
            batch.predictors
        ]  # [C, H]: completion tokens only
        head = Head.of(self.model)
        dtype = _product_dtype(head.weight)
        columns = head.scores(hidden, batch.targets, temperature, self.head_tokens, dtype)
        return Scores(*(batch.spread(column) for column in columns))

    def hidden_states(self, inputs: Padded | Packed) -> Tensor:
        if self.packing.adopted != isinstance(inputs, Packed):
            raise ValueError(
                "a policy that packs cannot score padded rows, nor one that pads packed ones"
            )
        if isinstance(inputs, Packed):
            self.packing.take(inputs)
            options = {"input_ids": inputs.input_ids, "position_ids": inputs.position_ids}
        else:
            options = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
        return self.model.base_model(**options, use_cache=False).last_hidden_state


def _product_dtype(weight: Tensor) -> torch.dtype:
    """What autocast would take a product in."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _hold_matrices(model: Any, dtype: torch.dtype) -> None:
    """Keep what autocast would cast for every product in that type; norms and the residual stream stay in fp32.

    So the scores do not change, but for the embedding's rounding: none, if the weights were published in `dtype`.
    """
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data = weight.data.to(dtype)


@torch.no_grad()
def _check_head(scorer: _Scorer, device: torch.device) -> None:
    """Refuse a family whose logits are not what our head computes: its ratios would be silently wrong."""
    ids = torch.arange(1, 5, device=device).unsqueeze(0)
    ones = torch.ones_like(ids)
    expected = scorer.model(input_ids=ids, attention_mask=ones, use_cache=False).logits.float()
    ours = Head.of(scorer.model).logits(scorer.hidden_states(Padded(ids, ones))[0])
    if not torch.allclose(ours, expected[0], atol=1e-3, rtol=1e-3):
        family = type(scorer.model).__name__
        raise UserError(
            f"model: {family} changes its logits after the head in a way that eepo does not know"
        )
