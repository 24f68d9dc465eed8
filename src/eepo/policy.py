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
from torch.utils.checkpoint import checkpoint

from eepo.batching import MicroBatch, micro_batches
from eepo.types import Completion, Prompt, UserError


@dataclass
class Scores:
    """Of completion tokens, zero on padding."""

    logprobs: Tensor  # [B, T] log p of the target
    entropies: Tensor  # [B, T] of the full next-token distribution
    complements: Tensor | None = None  # [B, T] log(1 − p), as logsumexp over the other tokens; only where asked for


class Policy:
    """A `transformers` causal model with fp32 weights. `score` is the one way to ask it anything.

    One that is never trained (a reference) may hold its matrices in `dtype`: see `_hold_matrices`.
    """

    def __init__(
        self, model: Any, micro_batch_tokens: int = 16384, head_tokens: int = 4096, dtype: torch.dtype | None = None
    ) -> None:
        self.model = model.float()
        self.micro_batch_tokens = micro_batch_tokens
        self._scorer = _Scorer(model, head_tokens)
        self.device = next(model.parameters()).device
        _check_head(self._scorer, self.device)
        self._autocast = self.device.type == "cuda" or dtype is not None
        if dtype is not None:
            _hold_matrices(model, dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once (a tied head is its embedding), detached."""
        for name, weight in self.model.named_parameters():
            yield name, weight.detach()

    def micro_batches(self, pairs: Sequence[tuple[Prompt, Completion]]) -> Iterator[MicroBatch]:
        return micro_batches(pairs, self.micro_batch_tokens, self.device)

    def score(
        self,
        batch: MicroBatch,
        temperature: float,
        weights: Mapping[str, Tensor] | None = None,
        complements: bool = True,
    ) -> Scores:
        """Scores of `batch` under θ, or under `weights` in its place (θ′, say) without touching θ.

        Other weights give no gradients: the head is computed again in the backward pass, when θ is back.
        """
        if weights is not None and torch.is_grad_enabled():
            raise ValueError("score(weights=...) is for torch.no_grad(): its gradients would be those of θ's head")
        cached = not self.model.is_gradient_checkpointing  # bf16 copies of all weights, for one pass: 2 bytes a weight
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast, cache_enabled=cached):
            if weights is None:
                return self._scorer(batch, temperature, complements)
            named = {f"model.{name}": weight for name, weight in weights.items()}
            return torch.func.functional_call(self._scorer, named, (batch, temperature, complements))

    def gradient(
        self,
        pairs: Sequence[tuple[Prompt, Completion]],
        temperature: float,
        loss: Callable[[MicroBatch, Scores], Tensor | None],
    ) -> dict[str, Tensor]:
        """∇ Σ loss over the micro-batches of `pairs`, beside the model: its own `.grad` fields are left alone.

        A micro-batch whose loss is None costs no backward pass; if all are, the gradient is empty.
        """
        names, weights = zip(*self.model.named_parameters(), strict=True)
        total: dict[str, Tensor] = {}
        for batch in self.micro_batches(pairs):
            value = loss(batch, self.score(batch, temperature))
            if value is None:
                continue
            for name, gradient in zip(names, torch.autograd.grad(value, weights, allow_unused=True), strict=True):
                if gradient is not None:
                    total[name] = total[name] + gradient if name in total else gradient  # two names may share one
        return total


class _Scorer(nn.Module):
    """Model and head as one module, so that `functional_call` can put other weights under both."""

    def __init__(self, model: Any, head_tokens: int) -> None:
        super().__init__()
        self.model: Any = model
        self.head_tokens = head_tokens

    def forward(self, batch: MicroBatch, temperature: float, complements: bool) -> Scores:
        hidden = self.hidden_states(batch.input_ids, batch.attention_mask)
        index = batch.positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        hidden = hidden.gather(1, index)[batch.mask]  # [N, H]: completion positions only
        targets = batch.targets[batch.mask]
        chunks = [
            checkpoint(self._head, hidden_chunk, target_chunk, temperature, complements, use_reentrant=False)
            for hidden_chunk, target_chunk in zip(
                hidden.split(self.head_tokens), targets.split(self.head_tokens), strict=True
            )
        ]
        columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
        zeros = torch.zeros(batch.mask.shape, device=hidden.device)
        return Scores(*(zeros.masked_scatter(batch.mask, column) for column in columns))

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The head, with the three ways in which families bend logits after it."""
        logits = self.model.get_output_embeddings()(hidden).float()
        config = self.model.config
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scale := getattr(config, "logits_scaling", None):
            logits = logits / scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _head(self, hidden: Tensor, targets: Tensor, temperature: float, complements: bool) -> tuple[Tensor, ...]:
        logits = self.logits(hidden) / temperature
        logprobs = logits.log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        columns = (logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies)
        if not complements:
            return columns
        others = logits.scatter(1, targets.unsqueeze(1), -torch.inf)
        return (*columns, others.logsumexp(-1) - logits.logsumexp(-1))


def _hold_matrices(model: Any, dtype: torch.dtype) -> None:
    """Keep what autocast would cast for every product in that type; norms and the residual stream stay in fp32.

    So the scores do not change, but for the embedding's rounding: none, if the weights were published in `dtype`.
    """
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data = weight.data.to(dtype)
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.float())


@torch.no_grad()
def _check_head(scorer: _Scorer, device: torch.device) -> None:
    """Refuse a family whose logits are not what our head computes: its ratios would be silently wrong."""
    ids = torch.arange(1, 5, device=device).unsqueeze(0)
    ones = torch.ones_like(ids)
    expected = scorer.model(input_ids=ids, attention_mask=ones, use_cache=False).logits.float()
    ours = scorer.logits(scorer.hidden_states(ids, ones))
    if not torch.allclose(ours, expected, atol=1e-3, rtol=1e-3):
        family = type(scorer.model).__name__
        raise UserError(f"model: {family} changes its logits after the head in a way that eepo does not know")
