"""The unlearning step on FSDP2 shards: θ′ beside θ, and θ untouched to the bit. One rank, the CPU, no verl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from eepo.adapters.verl import unlearning
from eepo.algorithm import complementary_loss, token_gate
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores


class Tied(nn.Module):
    """A head that is its embedding, and a weight that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.unused = nn.Linear(3, 3)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded(process_group: None) -> Any:
    """FSDP2 and an optimizer that has taken a step, so that its state is not empty."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(Tied(), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def loss(model: nn.Module) -> Tensor:
    return model(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])).log_softmax(-1)[..., 9].mean()


def full(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.full_tensor().detach().clone() for name, tensor in tensors.items()}


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [getattr(value, "full_tensor", lambda value=value: value)().clone() for value in values]


def test_theta_prime_is_told_and_theta_is_untouched(sharded: Any) -> None:
    model, optimizer = sharded
    theta, moments, hashed = (
        full(model.state_dict()),
        state_of(optimizer),
        unlearning.fingerprint(model, optimizer),
    )
    loss(model).backward()
    gradient = {
        n: w.grad.full_tensor().clone() for n, w in model.named_parameters() if w.grad is not None
    }
    shards = unlearning.take_rollout_weights(model, lr=0.5)
    assert all(weight.grad is None for weight in model.parameters())
    with unlearning.rollout_weights(model, shards):
        told = full(model.state_dict())
    for name, weight in theta.items():
        source = {"head.weight": "embedding.weight"}.get(
            name, name
        )  # the tied head moves with its embedding
        expected = weight - 0.5 * gradient[source] if source in gradient else weight
        torch.testing.assert_close(told[name], expected, atol=1e-7, rtol=0)
    assert not torch.equal(told["head.weight"], theta["head.weight"])
    after = full(model.state_dict())
    assert all(torch.equal(after[name], theta[name]) for name in theta)
    assert all(
        torch.equal(one, other) for one, other in zip(moments, state_of(optimizer), strict=True)
    )
    assert unlearning.fingerprint(model, optimizer) == hashed


@pytest.mark.parametrize("what", ["weight", "moment", "swap"])
def test_the_fingerprint_sees_one_bit(sharded: Any, what: str) -> None:
    model, optimizer = sharded
    before = unlearning.fingerprint(model, optimizer)
    with torch.no_grad():
        local = model.middle.weight.to_local()
        if what == "moment":
            local = optimizer.state[model.middle.weight]["exp_avg"].to_local()
        if what == "swap":
            local[0, :2] = local[0, :2].flip(0)
        else:
            local.view(torch.int32)[0, 0] ^= 1
    assert unlearning.fingerprint(model, optimizer) != before


def test_how_many_rollout_weights_changed_after_rounding(sharded: Any) -> None:
    model, _ = sharded
    total = sum(weight.numel() for weight in model.parameters())
    shards = {n: w.detach().clone() for n, w in model.named_parameters()}
    assert unlearning.count_changes(model, shards, torch.float32) == (0, total)
    shards["middle.bias"].to_local().mul_(1 + 1e-5)  # lost in bfloat16
    assert unlearning.count_changes(model, shards, torch.float32) == (8, total)
    assert unlearning.count_changes(model, shards, torch.bfloat16)[0] < 8


def test_the_gradients_norm(sharded: Any) -> None:
    model, _ = sharded
    loss(model).backward()
    squares = sum(
        float(w.grad.full_tensor().square().sum()) for w in model.parameters() if w.grad is not None
    )
    assert unlearning.gradient_norm(model) == pytest.approx(squares**0.5, rel=1e-5)


def batch(*lengths: int) -> tuple[Scores, Tensor, Tensor]:
    """Scores [B, T], mask [B, T] and which rows to unlearn [B], of ragged rows; a length of 0 is a row of padding."""
    draws = torch.Generator().manual_seed(sum(lengths))
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    scores = Scores(-torch.rand(shape, generator=draws) * 3, torch.rand(shape, generator=draws))
    return scores, mask.long(), torch.arange(len(lengths)) % 2 == 1


def rows(scores: Scores, mask: Tensor, some: slice) -> tuple[Scores, Tensor, Tensor]:
    return (
        Scores(scores.logprobs[some], scores.entropies[some]),
        mask[some],
        torch.ones(len(mask[some])),
    )


@pytest.mark.parametrize("gate", ["token", "step", "always"])
def test_parts_add_up_to_the_loss_of_the_whole_and_padding_to_nothing(gate: Any) -> None:
    options = AlgorithmConfig(gate=gate, gate_threshold=0.5)
    scores, mask, _ = batch(5, 3, 6, 2, 4, 0)
    open_gate = token_gate(scores.entropies, mask, 0.5, 3) if gate == "token" else mask
    real = slice(0, 5)
    expected = complementary_loss(
        scores.logprobs[real], mask[real], open_gate[real], options.unlearn_eps
    )
    parts = [rows(scores, mask, some) for some in (slice(0, 2), slice(2, 6))]
    found = [unlearning.micro_batch_loss(*part, options, num_completions=5) for part in parts]
    torch.testing.assert_close(sum(value for value, _ in found), expected)
    assert sum(counts["gated"] for _, counts in found) == int(open_gate.sum())
    assert sum(counts["tokens"] for _, counts in found) == 20


def test_only_what_is_wanted_is_forgotten() -> None:
    scores, mask, wanted = batch(5, 3, 6, 2)
    options = AlgorithmConfig(gate="always")
    value, counts = unlearning.micro_batch_loss(scores, mask, wanted, options, num_completions=4)
    chosen = mask * wanted.long()[:, None]
    torch.testing.assert_close(
        value, complementary_loss(scores.logprobs, mask, chosen, options.unlearn_eps)
    )
    assert counts["gated"] == 3 + 2
    assert counts["tokens"] == 16
