"""Attention over sequences laid end to end, without padding, for any family that asks `transformers` for its attention.

A model whose config names one of these attends through it; the model's own mask is then not built.
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

from eepo.model.batching import Packed, Whole

log = logging.getLogger(__name__)
CLOSE = 0.02  # relative, in bf16; deep models round more, see `strays`
NAME = "eepo"  # in `transformers`' registry


def attend_with(model: Any, function: Callable[..., tuple[Tensor, None]]) -> None:
    """From now on `model` attends by `function`, which gets what `transformers` gives its attention functions.

    Its parts hold the function, not the registry, which would never let go of it, nor of the model behind it.
    """
    known = {"full_attention", "sliding_attention"}  # others are told by their masks alone
    strange = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - known
    if strange:
        raise NotImplementedError(f"layers with {', '.join(sorted(strange))}")
    for module in model.modules():
        module.eepo_attend = function
    model.config._attn_implementation = NAME


def _attend(module: Any, *given: Any, **options: Any) -> tuple[Tensor, None]:
    return module.eepo_attend(module, *given, **options)


AttentionInterface.register(NAME, _attend)


class Packing:
    """Lets one model attend over packed sequences: from `adopt` on, over those that it was last told to `take`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.adopted = False
        self._starts: Tensor | None = (
            None  # of the sequences of a pass; its backward pass may compute it again
        )
        self._whole: Whole | None = None
        self._longest = torch.empty(
            0
        )  # as long as the longest: to compiled layers a size may vary, a number may not

    def take(self, inputs: Packed) -> None:
        """What the next forward pass attends over."""
        self._starts, self._whole = inputs.starts, inputs.whole
        self._longest = inputs.starts.new_empty(inputs.longest)

    def adopt(self) -> bool:
        """Whether this family, packed, says what it says padded; one that does not stays as it is."""
        usual = self.model.config._attn_implementation
        two = _two(self.model.device)
        ids = two.input_ids[:, two.whole.places]  # type: ignore[union-attr]

        def alone() -> Tensor:
            return torch.cat([self._hidden(ids[:, :4]), self._hidden(ids[:, 4:])[:, 2:]], 1)

        expected = alone()
        try:
            attend_with(self.model, self._attend)
            self.take(two)
            reason = strays(
                self.model, self._hidden(two.input_ids, two.position_ids), expected, alone
            )
        except (NotImplementedError, TypeError, RuntimeError, AttributeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self.model.config._attn_implementation = usual if reason else NAME
        if reason:
            log.warning("%s is trained with padding: %s", type(self.model).__name__, reason)
        self.adopted = not reason
        return self.adopted

    @torch.no_grad()
    def _hidden(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=input_ids.is_cuda):
            output = self.model.base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False
            )
            return output.last_hidden_state.float()

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        scaling: float | None = None, sliding_window: int | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if self._starts is None or options.get("softcap") or options.get("s_aux") is not None:
            raise NotImplementedError("packed attention has neither caps nor sinks")
        longest, window = self._longest.shape[0], sliding_window or 0
        return packed_attention(
            query, key, value, self._starts, longest, scaling, window, self._whole
        ), None


def _two(device: torch.device) -> Packed:
    """Two short sequences that begin alike, to try it on."""
    return Packed(
        input_ids=torch.arange(1, 8, device=device).unsqueeze(0),
        position_ids=torch.tensor([[0, 1, 2, 3, 2, 3, 4]], device=device),
        starts=torch.tensor([0, 4, 7], dtype=torch.int32, device=device),
        longest=5,
        whole=Whole(
            places=torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 6], device=device),
            starts=torch.tensor([0, 4, 9], dtype=torch.int32, device=device),
        ),
    )


def strays(model: Any, ours: Tensor, expected: Tensor, again: Callable[[], Tensor]) -> str:
    """By how much hidden states `ours` are off, in a few words; nothing if it is rounding.

    Rounding grows with depth. So what is not close may be as far off as the family's own eager attention, which `again`
    then uses, is from its usual one, a few times.
    """
    gap = _gap(ours, expected)
    if gap <= CLOSE:
        return ""
    model.config._attn_implementation = "eager"
    rounding = _gap(again(), expected)
    return (
        f"its attention is off by {gap:.1g}, rounding by {rounding:.1g}"
        if gap > 3 * rounding
        else ""
    )


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).float().norm() / theirs.float().norm())


def packed_attention(
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, N, D]
    value: Tensor,  # [1, K, N, D]
    starts: Tensor,  # [B + 1] int32: where each sequence begins, and the end
    longest: int,
    scale: float | None,
    window: int = 0,  # how far back a token looks; 0: to the start of its sequence
    whole: Whole | None = None,  # what each sequence looks back on, if not itself alone
) -> Tensor:  # [1, N, H, D]
    """Causal, each sequence by itself. Flash attention where there is one; otherwise under a mask of all by all.

    A sequence without its prompt is the end of a whole one. Gradients of what several look back on are summed in fp32.
    """
    dtype = value.dtype if value.dtype in (torch.bfloat16, torch.float16) else None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    key_starts = starts
    if whole is not None:
        key, value = (
            part.float().index_select(2, whole.places).to(part.dtype) for part in (key, value)
        )
        key_starts = whole.starts
    if query.is_cuda and dtype is not None and _varlen is not None:
        rows = [
            part[0].transpose(0, 1).to(dtype) for part in (query, key, value)
        ]  # [tokens, heads, D]
        return _varlen(*rows, starts, key_starts, longest, scale, window).unsqueeze(0)
    (sequence, left), (others, others_left) = (
        _from_end(starts, query.shape[2]),
        _from_end(key_starts, key.shape[2]),
    )
    back = others_left - left[:, None]  # how far each token lies before another one of its sequence
    mask = (sequence[:, None] == others) & (back >= 0)
    if window:
        mask &= back < window
    out = scaled_dot_product_attention(
        query, key, value.to(key.dtype), mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _from_end(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each token its sequence, counted from one, and how many of it are left."""
    own = torch.arange(count, device=starts.device)
    sequence = torch.searchsorted(starts, own, right=True)
    return sequence, starts[sequence] - own


def _find_varlen() -> Callable[..., Tensor] | None:
    """torch's own. Older releases group heads without being told."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    grouped: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        longest: int,
        scale: float | None,
        window: int,
    ) -> Tensor:
        looks = (
            window - 1 if window else -1,
            0,
        )  # back, ahead; where there are fewer queries, they are the last
        out = varlen_attn(
            q, k, v, starts, key_starts, longest, longest, scale=scale, window_size=looks, **grouped
        )
        return out  # type: ignore[return-value]

    return attend


_varlen = _find_varlen()
