"""The copy with which a failed step is undone."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eepo.model import memory, step_backup
from eepo.model.optimizers import build_optimizer
from eepo.model.step_backup import StepBackup
from eepo.rollout.paged.engine import PagedEngine
from eepo.types import Prompt, Sampling

NAMES = ["adamw", "adamw_bf16", "adamw_8bit"]


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def new_parts(
    name: str, device: str = "cpu"
) -> tuple[list[nn.Parameter], torch.optim.Optimizer, list[str]]:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(5, 7), (3,), ()]
    weights = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    return weights, build_optimizer(name, weights, 0.1, 0.01, seed=0), []


def update(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def values(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [t for w in weights for t in optimizer.state.get(w, {}).values()]
    return [tensor.detach().clone() for tensor in (*weights, *states)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_before", [0, 1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_updates_are_undone(name: str, num_before: int, device: str) -> None:
    weights, optimizer, notes = new_parts(name, device)
    backup = StepBackup(optimizer, name, notes.append)
    for _ in range(num_before):
        backup.take()
        update(weights, optimizer)
    before = values(weights, optimizer)
    backup.take()
    update(weights, optimizer)
    update(weights, optimizer)
    assert backup.restore()
    after = values(weights, optimizer)
    assert len(before) == len(after)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not notes


@pytest.mark.parametrize("device", DEVICES)
def test_large_tensors_are_copied_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_backup, "QUEUED_BYTES", 60)  # two rows of 28 bytes, of five
    weights, optimizer, notes = new_parts("adamw", device)
    backup = StepBackup(optimizer, "adamw", notes.append)
    assert [len(part) for part in step_backup._parts(weights[0])] == [2, 2, 1]
    update(weights, optimizer)
    before = values(weights, optimizer)
    backup.take()
    update(weights, optimizer)
    assert backup.restore()
    assert all(torch.equal(*pair) for pair in zip(before, values(weights, optimizer), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_are_captured_while_the_copy_is_made(new_model: Any, tokenizer: Any) -> None:
    weight = nn.Parameter(torch.zeros(2**30, device="cuda"))  # 4 GiB: about 0.1 s
    backup = StepBackup(torch.optim.SGD([weight], lr=0.1), "adamw", print)
    backup.take()  # allocates
    model = new_model("llama").to("cuda", torch.bfloat16)
    engine = PagedEngine(model, tokenizer, max_rows=8, keep_bytes=0)
    assert engine.unsupported_reason() == ""
    for _ in range(5):
        engine.release_memory()  # with the graphs, so that they are captured again
        backup.take()
        engine.generate([Prompt("p", "", (2, 3, 4))], 8, Sampling(1.0, 20))
    assert engine.graphs.enabled
    backup.take()  # raises an error of the thread


def test_without_an_update_there_is_nothing_to_undo() -> None:
    weights, optimizer, notes = new_parts("adamw")
    backup = StepBackup(optimizer, "adamw", notes.append)
    update(weights, optimizer)
    backup.take()
    with torch.no_grad():
        weights[0].fill_(2.0)  # not by the optimizer: `restore` does not even look
    assert backup.restore()
    assert bool((weights[0] == 2).all())


def test_a_copy_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer, notes = new_parts("adamw")
    monkeypatch.setattr(step_backup, "free_memory", lambda device: 300)
    backup = StepBackup(optimizer, "adamw", notes.append)
    backup.take()  # 156 bytes of weights are more than half
    assert len(notes) == 1
    assert "in host memory (it needs 0 MiB, 0 MiB are free)" in notes[0]
    assert backup.restore()
    update(weights, optimizer)
    assert not backup.restore()
    backup.take()
    assert len(notes) == 1


@pytest.mark.parametrize(("free", "is_copied"), [(936, True), (935, False)])
def test_whether_weights_and_moments_fit_is_decided_once(
    free: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """39 weights and their moments take 468 bytes. What is free later includes the first copy."""
    weights, optimizer, notes = new_parts("adamw")
    found = iter([free])
    monkeypatch.setattr(step_backup, "free_memory", lambda device: next(found))
    backup = StepBackup(optimizer, "adamw", notes.append)
    for _ in range(3):
        backup.take()
        update(weights, optimizer)
    assert backup.restore() == is_copied
    assert len(notes) == (not is_copied)


def test_memory_is_allocated_only_for_what_has_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer, notes = new_parts("adamw")
    backup = StepBackup(optimizer, "adamw", notes.append)
    sizes, allocate = [], backup._new_buffer

    def count(size: int) -> torch.Tensor:
        sizes.append(size)
        return allocate(size)

    monkeypatch.setattr(backup, "_new_buffer", count)
    for _ in range(4):
        backup.take()
        update(weights, optimizer)
    assert len(sizes) == 2, "weights in the first step, moments in the second"


@pytest.mark.parametrize("device", DEVICES)
def test_a_closed_backup_keeps_nothing_in_memory(device: str) -> None:
    """Not even until Python's garbage collector looks for cycles."""
    weights, optimizer, notes = new_parts("adamw", device)
    backup = StepBackup(optimizer, "adamw", notes.append)
    for _ in range(2):
        backup.take()
        update(weights, optimizer)
    parts = [*weights, *backup._copies.values(), *optimizer.state[weights[0]].values()]
    alive = [weakref.ref(part) for part in (*parts, *backup._pinned, optimizer, backup)]
    gc.collect()
    gc.disable()
    try:
        backup.close()
        del backup, optimizer, parts
        weights.clear()
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def test_an_allocation_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer, notes = new_parts("adamw")
    backup = StepBackup(optimizer, "adamw", notes.append)
    backup.take()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(StepBackup, "_new_buffer", fail)
    update(weights, optimizer)
    backup.take()  # now with moments
    assert "could not be allocated" in notes[0]
    update(weights, optimizer)
    assert not backup.restore()


@pytest.mark.parametrize(
    ("limit", "free"),
    [("3000\n", 3000 - 1200 + 500), ("1000\n", 300), ("max\n", None), (None, None)],
)
def test_the_limit_of_a_container_counts(
    limit: str | None, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    without = memory.free_memory(cpu)
    if limit:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1200\n")
        (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 500\n")
    found = memory.free_memory(cpu)
    assert found is not None
    if free is None:
        assert without is not None
        assert found > without / 2
    else:
        assert found == free
