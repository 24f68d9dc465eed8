"""Samples from any `transformers` decoder, in this process. Part of the built-in engine.

Each prompt is prefilled once and shared by its samples. Finished rows leave the batch.
Log-probabilities come from the same pass that samples. There is no scheduler and no paged cache:
`max_rows` bounds memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from eepo.kernels.reference import sample
from eepo.rollout.randomness import row_key, uniforms
from eepo.rollout.stopping import end_tokens
from eepo.types import Completion, Prompt, Sampling

# Finished rows are removed once less than this share of the rows is still running.
COMPACT_BELOW = 0.75


class TransformersEngine:
    """Samples with the model's own attention and KV cache, on any device.

    The engine owns `model`: pass a copy that is not trained.
    """

    def __init__(self, model: Any, tokenizer: Any, max_rows: int = 1024, stop: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._weights = dict(model.named_parameters())
        self.end_tokens = torch.tensor(end_tokens(model, tokenizer, stop), device=self.device)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        missing = set(self._weights)
        for name, weight in weights:
            if self._weights[name].data_ptr() != weight.data_ptr():  # else it is shared
                self._weights[name].copy_(weight)
            missing.discard(name)
        if missing:
            raise ValueError(
                f"load_weights got no values for {len(missing)} weights, such as {min(missing)}"
            )

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def release_memory(self) -> None:
        """Do nothing: no memory is kept between calls."""

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Sample prompts of similar length together, which needs little padding."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
        groups: list[list[Completion]] = [[] for _ in prompts]
        for start in range(0, len(order), self.max_rows):
            indices = order[start : start + self.max_rows]
            batch = self._generate_batch([prompts[i] for i in indices], num_samples, sampling)
            for index, group in zip(indices, batch, strict=True):
                groups[index] = group
        return groups

    def _generate_batch(
        self, prompts: list[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Prefill all prompts together, then decode as many samples as `max_rows` allows."""
        groups: list[list[Completion]] = [[] for _ in prompts]
        cache, logits, attention_mask = self._prefill(prompts)
        per_pass = min(num_samples, max(1, self.max_rows // len(prompts)))
        for first in range(0, num_samples, per_pass):
            samples = range(first, min(first + per_pass, num_samples))
            rows = _Rows(copy.deepcopy(cache), logits, attention_mask, len(samples))
            keys = [
                row_key(sampling, prompt, sampling.first_sample + s)
                for prompt in prompts
                for s in samples
            ]
            completions = self._decode(rows, torch.tensor(keys, device=self.device), sampling)
            for index, group in enumerate(groups):
                group += completions[index * len(samples) : (index + 1) * len(samples)]
        return groups

    def _prefill(self, prompts: list[Prompt]) -> tuple[DynamicCache, Tensor, Tensor]:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        attention_mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        # Padding is on the left, so the next position of every row is the same column.
        for row, prompt in enumerate(prompts):
            input_ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            attention_mask[row, longest - len(prompt.token_ids) :] = 1
        attention_mask = attention_mask.to(self.device)
        cache = _growing_cache(self.model.config)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(input_ids.to(self.device), attention_mask, positions, cache)
        return cache, logits, attention_mask

    def _forward(
        self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:  # [B, V] fp32
        """Return the logits of the last position."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _decode(self, rows: _Rows, keys: Tensor, sampling: Sampling) -> list[Completion]:
        sampled = _SampledTokens(len(keys), sampling.max_new_tokens, self.device)
        for position in range(sampling.max_new_tokens):
            tokens, logprobs, entropies = sample(
                rows.logits, uniforms(keys[rows.completions], position), sampling.temperature
            )
            ended = torch.isin(tokens, self.end_tokens)
            sampled.write(rows, position, tokens, logprobs, entropies, ended)
            rows.stop(ended)
            if position + 1 == sampling.max_new_tokens or not rows.running.any():
                break
            tokens = rows.compact(tokens)
            rows.logits = self._forward(tokens.unsqueeze(1), *rows.next_column(), rows.cache)
        return sampled.to_completions(self.tokenizer)


class _Rows:
    """Holds the rows in the batch: KV cache, next logits, attention mask, completion indices."""

    def __init__(
        self, cache: DynamicCache, logits: Tensor, attention_mask: Tensor, num_samples: int
    ) -> None:
        cache.batch_repeat_interleave(num_samples)
        self.cache = cache
        self.logits = logits.repeat_interleave(num_samples, 0)
        self.attention_mask = attention_mask.repeat_interleave(num_samples, 0)
        self.completions = torch.arange(len(self.logits), device=logits.device)  # [B] indices
        self.running = torch.ones_like(self.completions, dtype=torch.bool)  # [B]

    def stop(self, ended: Tensor) -> None:
        self.running &= ~ended

    def compact(self, tokens: Tensor) -> Tensor:
        """Remove finished rows once there are enough of them; return the tokens of the others."""
        if self.running.sum() > COMPACT_BELOW * len(self.running):
            return tokens
        kept = self.running.nonzero().squeeze(1)
        self.cache.batch_select_indices(kept)
        self.completions = self.completions[kept]
        self.attention_mask = self.attention_mask[kept]
        self.running = self.running[kept]
        return tokens[kept]

    def next_column(self) -> tuple[Tensor, Tensor]:
        """Return the attention mask and the positions for one more token in each row."""
        self.attention_mask = nn.functional.pad(self.attention_mask, (0, 1), value=1)
        return self.attention_mask, self.attention_mask.sum(-1, keepdim=True) - 1


class _SampledTokens:
    """Collects the sampled tokens, with one row per completion."""

    def __init__(self, num_completions: int, max_new_tokens: int, device: torch.device) -> None:
        shape = num_completions, max_new_tokens
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.entropies = torch.zeros(shape, device=device)
        self.lengths = torch.zeros(num_completions, dtype=torch.long, device=device)
        self.finished = torch.zeros(num_completions, dtype=torch.bool, device=device)

    def write(
        self,
        rows: _Rows,
        position: int,
        tokens: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        ended: Tensor,
    ) -> None:
        running = rows.running
        indices = rows.completions[running]
        self.tokens[indices, position] = tokens[running]
        self.logprobs[indices, position] = logprobs[running]
        self.entropies[indices, position] = entropies[running]
        self.lengths[indices] = position + 1
        self.finished[indices] = ended[running]

    def to_completions(self, tokenizer: Any) -> list[Completion]:
        lengths, finished = self.lengths.tolist(), self.finished.tolist()
        longest = max(lengths)
        columns = [
            [
                tuple(row[:length])
                for row, length in zip(matrix[:, :longest].tolist(), lengths, strict=True)
            ]
            for matrix in (self.tokens, self.logprobs, self.entropies)
        ]
        return build_completions(columns, finished, tokenizer)


def build_completions(
    columns: list[list[tuple[Any, ...]]], finished: list[Any], tokenizer: Any
) -> list[Completion]:
    """Build completions from their tokens, log-probabilities and entropies, in this order."""
    texts = tokenizer.batch_decode([list(ids) for ids in columns[0]], skip_special_tokens=True)
    return [
        Completion(
            token_ids=tokens,
            logprobs=logprobs,
            text=text,
            finished=bool(done),
            entropies=entropies,
        )
        for tokens, logprobs, entropies, text, done in zip(*columns, texts, finished, strict=True)
    ]


class _GrowingLayer(DynamicLayer):
    """Keeps keys and values in buffers that double when full. `DynamicLayer` copies per token."""

    buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if self.buffers is None or self.buffers[0].shape[-2] < end:
            self.buffers = (_grown(self.keys, end), _grown(self.values, end))
        keys, values = self.buffers
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.buffers = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.buffers = None


def _grown(old: Tensor, min_length: int) -> Tensor:
    """Copy `old` into a longer buffer."""
    new = old.new_empty(*old.shape[:2], max(2 * old.shape[2], min_length + 32), old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new


def _growing_cache(config: Any) -> DynamicCache:
    """Return the model's own cache, with its plain layers replaced by growing ones.

    Other layers, such as those of sliding windows, stay as they are.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        _GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    if not cache.layers:
        cache.layer_class_to_replicate = _GrowingLayer
    return cache
