"""The paged KV cache: attention writes and reads keys and values in pages of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eepo import kernels
from eepo.model.attention import packed_attention, set_attention
from eepo.model.batching import PackedLayout, to_device
from eepo.rollout.paged.scheduler import PAGE_SIZE, SCRATCH_PAGE


class PagedKVCache:
    """Holds the keys and values of all layers in pages, and computes attention over them."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        self.model = model
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        values_per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        self.page_bytes: int = values_per_token * PAGE_SIZE * model.dtype.itemsize
        self.pages: Tensor | None = None  # [layers, 2, pages, K, PAGE_SIZE, head_dim]
        # The prompts of the current pass. None: the pass decodes one new token per row.
        self.prefill: Prefill | None = None
        self.page_tables: Tensor | None = None  # [R, pages of a row]
        self.positions: Tensor | None = None  # [R]

    def allocate(self, num_pages: int, page_tables: Tensor, positions: Tensor) -> None:
        """Allocate the pages and route the model's attention through this cache.

        Pages are not initialised, except the scratch page, which is read before it is written.
        """
        shape = (self.num_layers, 2, num_pages, self.num_kv_heads, PAGE_SIZE, self.head_dim)
        self.pages = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        self.pages[:, :, SCRATCH_PAGE] = 0
        self.page_tables, self.positions = page_tables, positions
        set_attention(self.model, self.attend)

    def free(self) -> None:
        self.pages = None

    @torch.compiler.disable
    def attend(
        self,
        module: Any,
        query: Tensor,  # [1, H, N, D]
        key: Tensor,  # [1, K, N, D]
        value: Tensor,  # [1, K, N, D]
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # [1, N, H, D]
        """Write new keys and values into pages and attend over the cached ones.

        The signature is that of attention functions in `transformers`.
        """
        if options.get("s_aux") is not None:
            raise NotImplementedError("paged attention does not support attention sinks")
        if self.pages is None:
            raise RuntimeError("the KV cache is not allocated")
        scaling = options.get("scaling")
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        window, softcap = options.get("sliding_window") or 0, options.get("softcap") or 0.0
        keys, values = self.pages[module.layer_idx]
        if self.prefill is not None:
            if softcap:
                raise NotImplementedError("packed attention does not support softcapping")
            self.prefill.write(keys, key)
            self.prefill.write(values, value)
            return packed_attention(query, key, value, self.prefill.layout, scale, window), None
        paged_attention = kernels.select("paged_attention", query.device)
        new = [part[0].transpose(0, 1) for part in (query, key, value)]
        cached = keys, values, self.page_tables, self.positions
        out = paged_attention(*new, *cached, scale, softcap, window)
        return out.unsqueeze(0), None

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:  # [B], [B] -> [B, H]
        """Run the model on one new token per row and return the hidden states.

        Rows form one sequence, as prompts do in a prefill, so one compiled layer serves both.
        """
        output = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        )
        return output.last_hidden_state[0]

    def last_two_hidden_states(self, ids: Tensor) -> Tensor:  # [1, N] -> [2, H]
        """Run a short sequence through the cache, to compare it with the model's own attention.

        All tokens but the last go through a prefill, the last one through a decode step.
        """
        device, length = ids.device, ids.shape[1]
        page_tables = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
        positions = torch.tensor([length - 1], device=device)
        self.allocate(3, page_tables, positions)
        self.prefill = Prefill.of_prompts([ids[0, :-1].tolist()], [[1, 2]], device)
        prefilled = self.prefill.run(self.model)[0]
        self.prefill = None
        decoded = self.decode(ids[0, -1:], positions)
        self.free()
        return torch.stack([prefilled, decoded[0]])


@dataclass
class Prefill:
    """Prompts concatenated to one sequence, and the page and offset of each of their tokens."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    layout: PackedLayout
    pages: Tensor  # [N]
    offsets: Tensor  # [N]

    @classmethod
    def of_prompts(
        cls, prompts: list[Sequence[int]], page_tables: list[list[int]], device: torch.device
    ) -> Prefill:
        ids = [token for prompt in prompts for token in prompt]
        positions = [position for prompt in prompts for position in range(len(prompt))]
        pages = [
            table[position // PAGE_SIZE]
            for prompt, table in zip(prompts, page_tables, strict=True)
            for position in range(len(prompt))
        ]
        # Positions come first: compiled code is specialised on where a tensor's storage begins.
        flat = int_tensor([positions, ids, pages], device)
        cu_seqlens = int_tensor([0, *accumulate(map(len, prompts))], device).int()
        layout = PackedLayout(cu_seqlens, max(map(len, prompts)))
        return cls(flat[1:2], flat[:1], layout, flat[2], flat[0] % PAGE_SIZE)

    def run(self, model: Any) -> Tensor:  # [P, H]
        """Run the model on the prompts and return the hidden state of each prompt's last token."""
        output = model.base_model(
            input_ids=self.input_ids, position_ids=self.position_ids, use_cache=False
        )
        return output.last_hidden_state[0, self.layout.cu_seqlens[1:].long() - 1]

    def write(self, layer_pages: Tensor, new: Tensor) -> None:
        """Write the new keys or values, [1, K, N, D], into one layer's pages."""
        layer_pages[self.pages, :, self.offsets] = new[0].transpose(0, 1)


def int_tensor(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Copy (nested) integers to the device without blocking the host."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)
