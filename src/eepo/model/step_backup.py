"""A copy of θ and the optimizer's state in host memory, so that a failed step can be undone.

If memory runs out after a step's first optimizer update, θ is neither that of the last step nor
that of the next one. With the copy, the run can still save its last finished step.

θ changes only in optimizer updates. So a GPU makes the copy while the step samples, on a stream of
its own, and the first update waits for it. A thread issues the copies a few at a time: if all were
queued at once, the work of sampling would wait behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from eepo.model.memory import format_bytes, free_memory, host_copy_bytes, host_copy_fits
from eepo.model.pinned import PinnedMemory
from eepo.runs.memory_errors import is_out_of_memory

ALIGNMENT = 64  # bytes
QUEUED_BYTES = 16 * 2**20  # what the thread queues before it waits for the GPU

Key = tuple[int, str]  # index of the weight, and entry of its state ("": the weight itself)


class StepBackup:
    """Copies everything that `optimizer` changes. Call `take` before a step, `close` at the end.

    `name` is that of the optimizer in recipes. Prints a note if the copy does not fit.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, name: str, note: Callable[[str], None]
    ) -> None:
        self.optimizer, self.name, self.note = optimizer, name, note
        self.enabled = True
        self.updated = False  # whether an update has begun since `take`
        self.weights: list[nn.Parameter] = [w for g in optimizer.param_groups for w in g["params"]]
        self.device = self.weights[0].device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="step backup")
        self._copying: Future[None] | None = None
        self._copies: dict[Key, Tensor] = {}
        self._pinned: list[PinnedMemory] = []  # what the copies are slices of
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def take(self) -> None:
        """Start to copy. On a GPU this returns before the copy is complete."""
        self._wait()
        self.updated = False
        if self.enabled:
            self._allocate()
        if self._stream is None:
            self._copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._copying = self._executor.submit(self._copy)

    @torch.no_grad()
    def restore(self) -> bool:
        """Undo all updates since `take`. Return False if there is no copy to do so."""
        self._wait()
        if not self.updated:
            return True
        if not self.enabled:
            return False
        for index, weight in enumerate(self.weights):
            if not any((index, name) in self._copies for name in self.optimizer.state[weight]):
                del self.optimizer.state[weight]  # the failed step was its first
        for key, tensor in self._tensors():
            tensor.copy_(self._copies[key])
        self.updated = False
        return True

    def close(self) -> None:
        """Free the copies, and remove the hook: with it, they would live as long as the weights.

        Nothing may be called after this.
        """
        self._hook.remove()
        self._executor.shutdown()
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._copies.clear()
            self._pinned.clear()

    def _before_update(self) -> None:
        self.updated = True
        self._wait()

    def _wait(self) -> None:
        """Let the current stream continue only after the copy."""
        if self._copying is not None and self._stream is not None:
            self._copying.result()
            self._copying = None
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _tensors(self) -> Iterator[tuple[Key, Tensor]]:
        for index, weight in enumerate(self.weights):
            yield (index, ""), weight.detach()
            for name, tensor in self.optimizer.state.get(weight, {}).items():
                yield (index, name), tensor

    def _allocate(self) -> None:
        """Allocate what has no copy yet: all weights in the first step, moments in the second."""
        missing = {key: tensor for key, tensor in self._tensors() if key not in self._copies}
        if not missing or not (self._copies or self._fits()):
            return
        size = _padded_size(missing.values())
        try:
            self._copies |= _slices(self._new_buffer(size), missing)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._give_up(f"{format_bytes(size)} could not be allocated")

    def _fits(self) -> bool:
        """Decide once, before the first copy, whether weights and moments fit together."""
        size = host_copy_bytes(sum(weight.numel() for weight in self.weights), self.name)
        free = free_memory(torch.device("cpu"))
        if host_copy_fits(size, free):
            return True
        self._give_up(f"it needs {format_bytes(size)}, {format_bytes(free or 0)} are free")
        return False

    def _new_buffer(self, size: int) -> Tensor:
        if self._stream is None:
            return torch.empty(size, dtype=torch.uint8)
        self._pinned.append(PinnedMemory(size))
        return self._pinned[-1].bytes

    def _give_up(self, reason: str) -> None:
        self.enabled = False
        self._copies.clear()
        self._pinned.clear()
        self.note(
            f"note: no copy of weights and optimizer in host memory ({reason}); if memory runs out "
            "in an update, the run continues from its last checkpoint"
        )

    def _copy(self) -> None:
        queued = 0
        with torch.cuda.stream(self._stream):  # does nothing if it is None
            for key, tensor in self._tensors() if self.enabled else ():
                for target, source in zip(_parts(self._copies[key]), _parts(tensor), strict=True):
                    target.copy_(source, non_blocking=True)
                    queued += source.nbytes
                    if self._stream is not None and queued >= QUEUED_BYTES:
                        self._stream.synchronize()
                        queued = 0


def _slices(buffer: Tensor, tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """Return a slice of `buffer` with the dtype and shape of each tensor."""
    copies, start = {}, 0
    for key, tensor in tensors.items():
        flat = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        copies[key] = flat.view(tensor.shape)
        start += _padded(tensor.nbytes)
    return copies


def _padded_size(tensors: Iterable[Tensor]) -> int:
    return sum(_padded(tensor.nbytes) for tensor in tensors)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor with more than `QUEUED_BYTES` along its first dimension."""
    if tensor.nbytes <= QUEUED_BYTES:
        return (tensor,)
    rows = max(1, QUEUED_BYTES * len(tensor) // tensor.nbytes)
    return tensor.split(rows)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
