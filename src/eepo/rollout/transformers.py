"""The embedded engine: samples from a `transformers` model of any decoder family, in process.

Each prompt is prefilled once and shared by its samples; finished rows leave the batch; log-probabilities come from
the same pass that samples. There is no scheduler and no paging: `max_rows` bounds memory.
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

COMPACT_BELOW = 0.75  # rows are copied together once fewer than this share of them still run


class TransformersEngine:
    """Owns `model`: give it a copy that nobody trains."""

    def __init__(self, model: Any, tokenizer: Any, max_rows: int = 1024, stop: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._weights = dict(model.named_parameters())
        self._eos = torch.tensor(end_tokens(model, tokenizer, stop), device=self.device)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        missing = set(self._weights)
        for name, weight in weights:
            self._weights[name].copy_(weight)
            missing.discard(name)
        if missing:
            raise ValueError(
                f"load_weights left {len(missing)} weights stale, such as {min(missing)}"
            )

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def release_memory(self) -> None:
        """Nothing is kept between calls."""

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Prompts of like length go together, so that little is padding; results come back in the given order."""
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place].token_ids))
        groups: list[list[Completion]] = [[] for _ in prompts]
        for start in range(0, len(order), self.max_rows):
            places = order[start : start + self.max_rows]
            for place, group in zip(
                places,
                self._groups([prompts[p] for p in places], num_samples, sampling),
                strict=True,
            ):
                groups[place] = group
        return groups

    def _groups(
        self, prompts: list[Prompt], num_samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """All samples of prompts that fit together: one prefill, then as many samples at a time as `max_rows` lets."""
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
            for place, group in enumerate(groups):
                group += completions[place * len(samples) : (place + 1) * len(samples)]
        return groups

    def _prefill(self, prompts: list[Prompt]) -> tuple[DynamicCache, Tensor, Tensor]:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        attention_mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(
            prompts
        ):  # padded on the left: every row's next position is the same column
            input_ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            attention_mask[row, longest - len(prompt.token_ids) :] = 1
        attention_mask = attention_mask.to(self.device)
        cache = _growing_cache(self.model.config)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(input_ids.to(self.device), attention_mask, positions, cache)
        return cache, logits, attention_mask

    def _forward(
        self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Logits [B, V] of the last position, fp32."""
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
        drawn = _Drawn(len(keys), sampling.max_new_tokens, self.device)
        for position in range(sampling.max_new_tokens):
            tokens, logprobs, entropies = sample(
                rows.logits, uniforms(keys[rows.owner], position), sampling.temperature
            )
            ended = torch.isin(tokens, self._eos)
            drawn.write(rows.owner, rows.running, position, tokens, logprobs, entropies, ended)
            rows.stop(ended)
            if position + 1 == sampling.max_new_tokens or not rows.running.any():
                break
            tokens = rows.compact(tokens)
            rows.logits = self._forward(tokens.unsqueeze(1), *rows.next_column(), rows.cache)
        return drawn.completions(self.tokenizer)


class _Rows:
    """The rows in flight: their cache, next logits, attention mask, and which completion each one belongs to."""

    def __init__(
        self, cache: DynamicCache, logits: Tensor, attention_mask: Tensor, num_samples: int
    ) -> None:
        cache.batch_repeat_interleave(num_samples)
        self.cache = cache
        self.logits = logits.repeat_interleave(num_samples, 0)
        self.attention_mask = attention_mask.repeat_interleave(num_samples, 0)
        self.owner = torch.arange(len(self.logits), device=logits.device)
        self.running = torch.ones_like(self.owner, dtype=torch.bool)

    def stop(self, ended: Tensor) -> None:
        self.running &= ~ended

    def compact(self, tokens: Tensor) -> Tensor:
        """Let finished rows leave, once enough of them have; returns the tokens of the rows that stay."""
        if self.running.sum() > COMPACT_BELOW * len(self.running):
            return tokens
        stay = self.running.nonzero().squeeze(1)
        self.cache.batch_select_indices(stay)
        self.owner, self.attention_mask = self.owner[stay], self.attention_mask[stay]
        self.running = self.running[stay]
        return tokens[stay]

    def next_column(self) -> tuple[Tensor, Tensor]:
        """Attention mask and positions for one more token in each row."""
        self.attention_mask = nn.functional.pad(self.attention_mask, (0, 1), value=1)
        return self.attention_mask, self.attention_mask.sum(-1, keepdim=True) - 1


class _Drawn:
    """What was sampled so far, one line for each completion."""

    def __init__(self, num_rows: int, max_new_tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_rows, max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(num_rows, max_new_tokens, device=device)
        self.entropies = torch.zeros(num_rows, max_new_tokens, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.finished = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def write(
        self,
        owner: Tensor,
        running: Tensor,
        position: int,
        tokens: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        ended: Tensor,
    ) -> None:
        rows = owner[running]
        self.tokens[rows, position] = tokens[running]
        self.logprobs[rows, position] = logprobs[running]
        self.entropies[rows, position] = entropies[running]
        self.lengths[rows] = position + 1
        self.finished[rows] = ended[running]

    def completions(self, tokenizer: Any) -> list[Completion]:
        lengths, finished = self.lengths.tolist(), self.finished.tolist()
        columns = [
            [
                tuple(row[:length])
                for row, length in zip(matrix[:, : max(lengths)].tolist(), lengths, strict=True)
            ]
            for matrix in (self.tokens, self.logprobs, self.entropies)
        ]
        texts = tokenizer.batch_decode([list(ids) for ids in columns[0]], skip_special_tokens=True)
        return [
            Completion(
                token_ids=tokens, logprobs=logprobs, text=text, finished=done, entropies=entropies
            )
            for tokens, logprobs, entropies, text, done in zip(
                *columns, texts, finished, strict=True
            )
        ]


class _GrowingLayer(DynamicLayer):
    """Keys and values in a buffer that doubles when full, instead of one concatenation for each token."""

    buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if self.buffers is None or self.buffers[0].shape[-2] < end:
            self.buffers = (_roomier(self.keys, end), _roomier(self.values, end))
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


def _roomier(old: Tensor, least: int) -> Tensor:
    new = old.new_empty(*old.shape[:2], max(2 * old.shape[2], least + 32), old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new


def _growing_cache(config: Any) -> DynamicCache:
    """The family's own cache (sliding windows and all), with its plain layers replaced by growing ones."""
    cache = DynamicCache(config=config)
    cache.layers = [
        _GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    if not cache.layers:
        cache.layer_class_to_replicate = _GrowingLayer
    return cache
