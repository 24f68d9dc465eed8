"""Pinned host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eepo.model.pinned import PinnedMemory

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_memory_is_pinned_as_long_as_the_object_exists() -> None:
    memory = PinnedMemory(1_000_003)
    kept = memory.bytes
    assert kept.is_pinned()
    assert kept[10:20].is_pinned()
    kept.copy_(torch.full((len(kept),), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert bool((kept == 7).all())
    del memory
    assert not kept.is_pinned()


@needs_gpu
def test_memory_that_cannot_be_registered_is_pinned_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = torch.cuda.cudart()

    def refused(*_: int) -> Any:
        return runtime.cudaHostRegister(0, 0, 0)

    assert int(refused()) != 0
    fake = SimpleNamespace(cudaHostRegister=refused)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    assert PinnedMemory(1000).bytes.is_pinned()
    assert torch.ones(3, device="cuda").sum().item() == 3, "the error does not come up later"


def test_no_bytes_need_no_gpu() -> None:
    assert PinnedMemory(0).bytes.numel() == 0
