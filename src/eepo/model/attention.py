"""Attention over packed sequences, for all models that use `transformers`' attention registry.

A model whose config names an attention function from the registry calls it in every layer and does
not build its own mask.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from eepo.model.batching import FullSequences, Packed, PackedLayout
from eepo.types import first_line

log = logging.getLogger(__name__)
ATTENTION_NAME = "eepo"  # in `transformers`' registry
# Relative difference of hidden states that bf16 rounding explains in shallow models. Deep models
# round more: see `attention_mismatch`.
TOLERANCE = 0.02


def set_attention(model: Any, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Make `model` call `function` with the arguments of `transformers`' attention functions.

    The model's modules hold the function. The registry would keep it, and the model, alive forever.
    """
    # Other layer types differ in their masks only, which our attention does not see.
    supported = {"full_attention", "sliding_attention"}
    unsupported = (
        set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - supported
    )
    if unsupported:
        raise NotImplementedError(f"unsupported layer types: {', '.join(sorted(unsupported))}")
    for module in model.modules():
        module.eepo_attend = function
    model.config._attn_implementation = ATTENTION_NAME


def _call_module_attention(module: Any, *args: Any, **options: Any) -> tuple[Tensor, None]:
    return module.eepo_attend(module, *args, **options)


AttentionInterface.register(ATTENTION_NAME, _call_module_attention)


class Packing:
    """Lets one model attend over packed sequences, once `enable_if_equivalent` has succeeded.

    Every forward pass attends over the batch given to the last `set_batch`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.enabled = False
        # With gradient checkpointing the backward pass attends again, over the same batch.
        self._cu_seqlens: Tensor | None = None
        self._full: FullSequences | None = None
        # Its length is max_seqlen: in compiled layers a tensor's size may vary, an int may not.
        self._sized_by_max_seqlen = torch.empty(0)

    def set_batch(self, inputs: Packed) -> None:
        """Set the sequences that the next forward pass attends over."""
        self._cu_seqlens, self._full = inputs.layout.cu_seqlens, inputs.layout.full
        self._sized_by_max_seqlen = self._cu_seqlens.new_empty(inputs.layout.max_seqlen)

    def enable_if_equivalent(self) -> bool:
        """Use packed attention if it reproduces the model's hidden states; else log the reason."""
        default = self.model.config._attn_implementation
        batch = _two_sequences(self.model.device)
        assert batch.layout.full is not None
        ids = batch.input_ids[:, batch.layout.full.token_indices]

        def one_by_one() -> Tensor:
            return torch.cat([self._hidden(ids[:, :4]), self._hidden(ids[:, 4:])[:, 2:]], 1)

        expected = one_by_one()
        try:
            set_attention(self.model, self._attend)
            self.set_batch(batch)
            packed = self._hidden(batch.input_ids, batch.position_ids)
            reason = attention_mismatch(self.model, packed, expected, one_by_one)
        except (NotImplementedError, TypeError, RuntimeError, AttributeError) as error:
            reason = first_line(error)
        self.model.config._attn_implementation = default if reason else ATTENTION_NAME
        if reason:
            log.warning("%s is trained on padded batches: %s", type(self.model).__name__, reason)
        self.enabled = not reason
        return self.enabled

    @torch.no_grad()
    def _hidden(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=input_ids.is_cuda):
            output = self.model.base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False
            )
            return output.last_hidden_state.float()

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if options.get("softcap") or options.get("s_aux") is not None:
            raise NotImplementedError("packed attention supports neither softcaps nor sinks")
        if self._cu_seqlens is None:
            raise NotImplementedError("packed attention needs `set_batch` first")
        max_seqlen = self._sized_by_max_seqlen.shape[0]
        layout = PackedLayout(self._cu_seqlens, max_seqlen, self._full)
        window = options.get("sliding_window") or 0
        return packed_attention(query, key, value, layout, options.get("scaling"), window), None


def _two_sequences(device: torch.device) -> Packed:
    """Build two short sequences that share a prompt of two tokens, to test a model with."""
    full = FullSequences(
        token_indices=torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 6], device=device),
        cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32, device=device),
    )
    cu_seqlens = torch.tensor([0, 4, 7], dtype=torch.int32, device=device)
    return Packed(
        input_ids=torch.arange(1, 8, device=device).unsqueeze(0),
        position_ids=torch.tensor([[0, 1, 2, 3, 2, 3, 4]], device=device),
        layout=PackedLayout(cu_seqlens, max_seqlen=5, full=full),
    )


def attention_mismatch(
    model: Any, hidden: Tensor, expected: Tensor, recompute: Callable[[], Tensor]
) -> str:
    """Describe by how much `hidden` states differ from `expected`; "" if rounding explains it.

    Rounding errors grow with depth. A difference above TOLERANCE is accepted if it is at most three
    times the difference between the model's eager attention (used by `recompute`) and its default.
    """
    difference = _relative_difference(hidden, expected)
    if difference <= TOLERANCE:
        return ""
    model.config._attn_implementation = "eager"
    rounding = _relative_difference(recompute(), expected)
    if difference <= 3 * rounding:
        return ""
    return f"hidden states differ by {difference:.1g}, rounding explains {rounding:.1g}"


def _relative_difference(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).float().norm() / expected.float().norm())


def packed_attention(
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, N, D]
    value: Tensor,  # [1, K, N, D]
    layout: PackedLayout,
    scale: float | None,
    window: int = 0,  # tokens that a token attends to, itself included; 0: no limit
) -> Tensor:  # [1, N, H, D]
    """Attend causally within each sequence: flash attention on a GPU, a dense mask elsewhere.

    A sequence whose prompt is stored earlier attends over its full sequence. The gradients of
    shared keys and values are summed in fp32.
    """
    dtype = value.dtype if value.dtype in (torch.bfloat16, torch.float16) else None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    if layout.full is not None:
        indices = layout.full.token_indices
        key = key.float().index_select(2, indices).to(key.dtype)
        value = value.float().index_select(2, indices).to(value.dtype)
    if query.is_cuda and dtype is not None and _flash_attention is not None:
        # [tokens, heads, D]
        rows = [part[0].transpose(0, 1).to(dtype) for part in (query, key, value)]
        return _flash_attention(*rows, layout, scale, window).unsqueeze(0)
    mask = _dense_mask(layout, query.shape[2], key.shape[2], window)
    out = scaled_dot_product_attention(
        query, key, value.to(key.dtype), mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _key_cu_seqlens(layout: PackedLayout) -> Tensor:
    return layout.cu_seqlens if layout.full is None else layout.full.cu_seqlens


def _dense_mask(layout: PackedLayout, num_queries: int, num_keys: int, window: int) -> Tensor:
    sequence, remaining = _distance_to_end(layout.cu_seqlens, num_queries)
    key_sequence, key_remaining = _distance_to_end(_key_cu_seqlens(layout), num_keys)
    distance = key_remaining - remaining[:, None]  # from a key forward to the query
    mask = (sequence[:, None] == key_sequence) & (distance >= 0)
    if window:
        mask &= distance < window
    return mask


def _distance_to_end(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence, counted from 1, and its distance to that sequence's end."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True)
    return sequence, cu_seqlens[sequence] - tokens


def _find_flash_attention() -> Callable[..., Tensor] | None:
    """Wrap torch's `varlen_attn`, if this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Older releases accept grouped heads without the option.
    has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if has_option else {}

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        scale: float | None,
        window: int,
    ) -> Tensor:
        cu_seqlens = layout.cu_seqlens, _key_cu_seqlens(layout)
        max_seqlens = layout.max_seqlen, layout.max_seqlen
        # Tokens back and ahead. A sequence with fewer queries than keys has the last queries.
        window_size = (window - 1 if window else -1, 0)
        return varlen_attn(  # type: ignore[return-value]
            query, key, value, *cu_seqlens, *max_seqlens,
            scale=scale, window_size=window_size, **options,
        )  # fmt: skip

    return attend


_flash_attention = _find_flash_attention()
