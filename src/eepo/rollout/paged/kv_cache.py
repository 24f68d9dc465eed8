"""Keys and values in pages, as the paged engine's model reads and writes them: at prefill, and token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eepo import kernels
from eepo.model.attention import attend_with, packed_attention
from eepo.model.batching import send
from eepo.rollout.paged.scheduler import PAGE, SCRATCH


class PagedCache:
    """Keys and values of all layers in pages, and the attention that reads and writes them."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        self.size: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.page_bytes = (
            2 * self.num_layers * self.num_heads * PAGE * self.size * model.dtype.itemsize
        )
        self.pool: Tensor | None = None  # [layers, 2, pages, heads, PAGE, size]
        self.prefill: Prefill | None = (
            None  # the prompts of this pass; None: one new token in each row
        )
        self.tables: Tensor | None = None  # [R, pages of a row]
        self.positions: Tensor | None = None  # [R]

    def make(self, num_pages: int, tables: Tensor, positions: Tensor) -> None:
        """Empty, except that a page nobody wrote holds zeros: the scratch page is read."""
        shape = (self.num_layers, 2, num_pages, self.num_heads, PAGE, self.size)
        self.pool = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        self.pool[:, :, SCRATCH] = 0
        self.tables, self.positions = tables, positions
        attend_with(self.model, self.attend)

    @torch.compiler.disable
    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """What `transformers` calls in each layer: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
        if (
            self.pool is None
            or self.tables is None
            or self.positions is None
            or options.get("s_aux") is not None
        ):
            raise NotImplementedError("paged attention knows no sinks")
        keys, values = self.pool[module.layer_idx]
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        if self.prefill is not None:
            if softcap:
                raise NotImplementedError("packed attention knows no caps")
            plan = self.prefill
            keys[plan.pages, :, plan.offsets] = key[0].transpose(0, 1)
            values[plan.pages, :, plan.offsets] = value[0].transpose(0, 1)
            return packed_attention(
                query, key, value, plan.starts, plan.longest, scale, sliding_window or 0
            ), None
        paged_attention = kernels.chosen("paged_attention", query.device)
        new = [part[0].transpose(0, 1) for part in (query, key, value)]
        out = paged_attention(
            *new,
            keys,
            values,
            self.tables,
            self.positions,
            scale,
            softcap or 0.0,
            sliding_window or 0,
        )
        return out.unsqueeze(0), None

    def try_out(self, ids: Tensor) -> Tensor:
        """Hidden states of the last two tokens: the first by prefill, the second by a decode step after it."""
        device, length = ids.device, ids.shape[1]
        self.make(
            3,
            torch.tensor([[1, 2]], dtype=torch.int32, device=device),
            torch.tensor([length - 1], device=device),
        )
        self.prefill = Prefill.of([ids[0, :-1].tolist()], [[1, 2]], device)
        first = self.prefill.run(self.model)[0]
        self.prefill = None
        second = self.decode(ids[0, -1:], torch.tensor([length - 1], device=device))
        self.pool = None
        return torch.stack([first, second[0]])

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:  # [B], [B] -> [B, H]
        """Rows lie side by side in one sequence, as prompts do in a prefill: a compiled layer then is one for both."""
        output = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        )
        return output.last_hidden_state[0]


@dataclass
class Prefill:
    """Prompts laid end to end, and where each token's keys and values go."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    starts: Tensor  # [P + 1] int32
    longest: int
    pages: Tensor  # [N]
    offsets: Tensor  # [N]

    @classmethod
    def of(
        cls, prompts: list[Sequence[int]], pages: list[list[int]], device: torch.device
    ) -> Prefill:
        ids = [token for prompt in prompts for token in prompt]
        places = [place for prompt in prompts for place in range(len(prompt))]
        own = [
            table[place // PAGE]
            for prompt, table in zip(prompts, pages, strict=True)
            for place in range(len(prompt))
        ]
        flat = send_numbers(
            [places, ids, own], device
        )  # places first: compiled code asks where a tensor begins
        starts = send_numbers([0, *accumulate(map(len, prompts))], device).int()
        return cls(flat[1:2], flat[:1], starts, max(map(len, prompts)), flat[2], flat[0] % PAGE)

    def run(self, model: Any) -> Tensor:  # [P, H]
        output = model.base_model(
            input_ids=self.input_ids, position_ids=self.position_ids, use_cache=False
        )
        return output.last_hidden_state[0, self.starts[1:].long() - 1]


def send_numbers(numbers: Sequence[Any], device: torch.device) -> Tensor:
    return send(torch.tensor(numbers, dtype=torch.int64), device)
