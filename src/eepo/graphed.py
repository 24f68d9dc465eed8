"""A model's layers as two CUDA graphs, forward and backward, over packed tokens.

A processor takes longer to launch the thousands of kernels of one micro-batch than a small model takes to run them.
Replayed as graphs they cost it nothing. The price is that sizes are few (tokens, rows and lengths are rounded up, and
what is missing is filled with sequences nobody reads), and that activations of the largest stay reserved.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eepo.attention import Packing
from eepo.batching import Packed

log = logging.getLogger(__name__)

SMALLEST = 8  # of the sizes: this part of the tokens of a full micro-batch


class GraphedPass:
    """Hidden states of packed sequences under the model's own weights; gradients are added to the weights' `.grad`."""

    def __init__(self, model: Any, packing: Packing, num_tokens: int, capture: bool = True) -> None:
        self.model, self.packing, self.num_tokens, self.capture = model, packing, num_tokens, capture
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)  # what a gradient flows back to
        self._passes: dict[tuple[int, int, int, bool], _Pass] = {}
        self._memory: Any = None  # of all graphs: no two of them are ever under way

    def hidden_states(self, inputs: Packed) -> Tensor | None:  # [1, N, H]
        """Good until the next call. None for more tokens than a micro-batch has: one long row, say."""
        num_tokens = inputs.input_ids.shape[1]
        if num_tokens > self.num_tokens:
            return None
        size = sizes(num_tokens, len(inputs.starts) - 1, inputs.longest, self.num_tokens)
        key = (*size, torch.is_grad_enabled())
        if key not in self._passes:
            self._passes[key] = self._new_pass(*size)
        found = self._passes[key]
        fill(found.inputs, inputs)
        self.packing.inputs = found.inputs
        hidden = _Replay.apply(self._anchor, found) if torch.is_grad_enabled() else found.forward()
        return hidden[:, :num_tokens]

    def _new_pass(self, num_tokens: int, num_rows: int, longest: int) -> _Pass:
        device = self.model.device
        ids = torch.zeros(2, 1, num_tokens, dtype=torch.int64, device=device)
        starts = torch.full((num_rows + 1,), num_tokens, dtype=torch.int32, device=device)
        starts[0] = 0
        new = _Pass(self.model, Packed(ids[0], ids[1], starts, longest))
        if torch.is_grad_enabled():
            for weight in self.model.base_model.parameters():
                if weight.requires_grad and weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        if self.capture:
            self.packing.inputs = new.inputs
            try:
                new.record(self._memory)
                self._memory = self._memory or new.graphs[0].pool()
            except RuntimeError as error:
                log.warning("training without CUDA graphs: %s", str(error).strip().splitlines()[0])
                self.capture, new.graphs = False, []
        return new


@dataclass
class _Pass:
    """One size. Its inputs stay where they are; `forward` and `backward` run over whatever lies there."""

    model: Any
    inputs: Packed

    def __post_init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.hidden: Tensor | None = None
        self.gradient: Tensor | None = None

    def forward(self) -> Tensor:
        if self.graphs:
            self.graphs[0].replay()
        else:
            self.hidden = self._run()
        assert self.hidden is not None
        return self.hidden.detach()

    def backward(self, gradient: Tensor) -> None:
        if any(weight.grad is None for weight in self.model.base_model.parameters() if weight.requires_grad):
            raise RuntimeError("gradients were taken away from a graphed model; Policy.clear_gradients keeps them")
        if len(self.graphs) > 1 and self.gradient is not None:
            self.gradient.copy_(gradient)
            self.graphs[1].replay()
        elif self.hidden is not None:
            self.hidden.backward(gradient)

    def record(self, memory: Any) -> None:
        """Warmed up with a gradient of zeros, which adds nothing to what has been summed so far."""
        with_gradient = torch.is_grad_enabled()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                hidden = self._run()
                if with_gradient:
                    hidden.backward(torch.zeros_like(hidden))
        torch.cuda.current_stream().wait_stream(beside)
        forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=memory, capture_error_mode="thread_local"):
            hidden = self._run()
        graphs = [forward]
        if with_gradient:
            self.gradient = torch.zeros_like(hidden)
            backward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(backward, pool=forward.pool(), capture_error_mode="thread_local"):
                hidden.backward(self.gradient)
            graphs.append(backward)
        self.graphs, self.hidden = graphs, hidden.detach()

    def _run(self) -> Tensor:
        device = self.model.device.type
        enabled = torch.is_autocast_enabled(device)
        with torch.autocast(device, torch.get_autocast_dtype(device), enabled=enabled, cache_enabled=False):
            output = self.model.base_model(
                input_ids=self.inputs.input_ids, position_ids=self.inputs.position_ids, use_cache=False
            )
        return output.last_hidden_state


class _Replay(torch.autograd.Function):
    """Puts a pass into autograd's graph. The gradients of weights do not go through it: the pass adds them itself."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, found: _Pass) -> Tensor:
        ctx.found = found
        with torch.enable_grad():
            return found.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.found.backward(gradients[0])
        return torch.zeros((), device=gradients[0].device), None


def sizes(num_tokens: int, num_rows: int, longest: int, most: int) -> tuple[int, int, int]:
    """Tokens, rows and length rounded up to a size that is often met. `most` is the largest number of tokens."""
    part = most
    while part // 2 >= max(num_tokens, most // SMALLEST):
        part //= 2
    length = min(_power_of_two(max(longest, 64)), part)
    fillers = -(-(part - num_tokens) // length)
    return part, _power_of_two(num_rows + fillers), length


def fill(into: Packed, inputs: Packed) -> None:
    """Copy `inputs` to the front; behind them come sequences of zeros, then empty ones."""
    num_tokens, size = inputs.input_ids.shape[1], into.input_ids.shape[1]
    rest = torch.arange(size - num_tokens, device=into.input_ids.device)
    into.input_ids[:, :num_tokens], into.input_ids[:, num_tokens:] = inputs.input_ids, 0
    into.position_ids[:, :num_tokens], into.position_ids[:, num_tokens:] = inputs.position_ids, rest % into.longest
    num_rows = len(inputs.starts) - 1
    later = torch.arange(1, len(into.starts) - num_rows, device=into.starts.device, dtype=torch.int32)
    into.starts[: num_rows + 1] = inputs.starts
    into.starts[num_rows + 1 :] = (num_tokens + later * into.longest).clamp(max=size)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
