"""Tests the unlearning step on FSDP2 shards, with one rank on the CPU. They do not need verl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from eepo.adapters.verl import complements, unlearning
from eepo.algorithm import complementary_loss, token_gate
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores


class TiedModel(nn.Module):
    """A model whose head is tied to its embedding, with a layer that is not used."""

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
    """Return a sharded model, and an optimizer that has taken a step and so has a state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(TiedModel(), mesh=init_device_mesh("cpu", (1,)))
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


def test_the_state_dict_has_theta_prime_and_theta_is_unchanged(sharded: Any) -> None:
    model, optimizer = sharded
    theta, moments = full(model.state_dict()), state_of(optimizer)
    fingerprint = unlearning.fingerprint(model, optimizer)
    loss(model).backward()
    gradient = {
        n: w.grad.full_tensor().clone() for n, w in model.named_parameters() if w.grad is not None
    }
    shards = unlearning.take_rollout_weights(model, lr=0.5)
    assert all(weight.grad is None for weight in model.parameters())
    with unlearning.rollout_weights(model, shards):
        theta_prime = full(model.state_dict())
    for name, weight in theta.items():
        source = {"head.weight": "embedding.weight"}.get(name, name)  # tied
        expected = weight - 0.5 * gradient[source] if source in gradient else weight
        torch.testing.assert_close(theta_prime[name], expected, atol=1e-7, rtol=0)
    assert not torch.equal(theta_prime["head.weight"], theta["head.weight"])
    after = full(model.state_dict())
    assert all(torch.equal(after[name], theta[name]) for name in theta)
    pairs = zip(moments, state_of(optimizer), strict=True)
    assert all(torch.equal(before, after) for before, after in pairs)
    assert unlearning.fingerprint(model, optimizer) == fingerprint


@pytest.mark.parametrize("change", ["weight", "moment", "swap"])
def test_the_fingerprint_changes_with_one_bit(sharded: Any, change: str) -> None:
    model, optimizer = sharded
    before = unlearning.fingerprint(model, optimizer)
    with torch.no_grad():
        local = model.middle.weight.to_local()
        if change == "moment":
            local = optimizer.state[model.middle.weight]["exp_avg"].to_local()
        if change == "swap":
            local[0, :2] = local[0, :2].flip(0)
        else:
            local.view(torch.int32)[0, 0] ^= 1
    assert unlearning.fingerprint(model, optimizer) != before


def test_changed_rollout_weights_are_counted_after_rounding(sharded: Any) -> None:
    model, _ = sharded
    total = sum(weight.numel() for weight in model.parameters())
    shards = {n: w.detach().clone() for n, w in model.named_parameters()}
    assert unlearning.count_changes(model, shards, torch.float32) == (0, total)
    shards["middle.bias"].to_local().mul_(1 + 1e-5)  # lost in bfloat16
    assert unlearning.count_changes(model, shards, torch.float32) == (8, total)
    assert unlearning.count_changes(model, shards, torch.bfloat16)[0] < 8


def test_the_gradient_norm_covers_all_shards(sharded: Any) -> None:
    model, _ = sharded
    loss(model).backward()
    squares = sum(
        float(w.grad.full_tensor().square().sum()) for w in model.parameters() if w.grad is not None
    )
    assert unlearning.gradient_norm(model) == pytest.approx(squares**0.5, rel=1e-5)


def batch(*lengths: int) -> tuple[Scores, Tensor, Tensor]:
    """Return random scores [B, T], mask [B, T] and selected rows [B] for rows of these lengths.

    A length of 0 is a row of padding.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    logprobs = -torch.rand(shape, generator=generator) * 3
    scores = Scores(logprobs, torch.rand(shape, generator=generator))
    return scores, mask.long(), torch.arange(len(lengths)) % 2 == 1


def cut(scores: Scores, mask: Tensor, rows: slice) -> tuple[Scores, Tensor, Tensor]:
    """Return some rows of a batch, all selected."""
    part = Scores(scores.logprobs[rows], scores.entropies[rows])
    return part, mask[rows], torch.ones(len(mask[rows]))


@pytest.mark.parametrize("gate", ["token", "step", "always"])
def test_micro_batch_losses_add_up_to_the_whole_loss_without_padding(gate: Any) -> None:
    options = AlgorithmConfig(gate=gate, gate_threshold=0.5)
    scores, mask, _ = batch(5, 3, 6, 2, 4, 0)
    open_gate = token_gate(scores.entropies, mask, 0.5, 3) if gate == "token" else mask
    real = slice(0, 5)
    expected = complementary_loss(
        scores.logprobs[real], mask[real], open_gate[real], options.unlearn_eps
    )
    parts = [cut(scores, mask, rows) for rows in (slice(0, 2), slice(2, 6))]
    results = [unlearning.micro_batch_loss(*part, options, num_completions=5) for part in parts]
    torch.testing.assert_close(sum(value for value, _ in results), expected)
    assert sum(sums["gated"] for _, sums in results) == int(open_gate.sum())
    assert sum(sums["tokens"] for _, sums in results) == 20


def test_only_selected_rows_are_unlearned() -> None:
    scores, mask, selected = batch(5, 3, 6, 2)
    options = AlgorithmConfig(gate="always")
    value, sums = unlearning.micro_batch_loss(scores, mask, selected, options, num_completions=4)
    gate = mask * selected.long()[:, None]
    expected = complementary_loss(scores.logprobs, mask, gate, options.unlearn_eps)
    torch.testing.assert_close(value, expected)
    assert sums["gated"] == 3 + 2
    assert sums["tokens"] == 16


class PackedEngine:
    """Two ranks of sequence parallelism: verl gathers the parts and cuts off the padding."""

    def __init__(self, other_rank: Tensor) -> None:
        self.other_rank = other_rank

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        return torch.cat([tensor, self.other_rank])[:-pad_size]


def jagged(*lengths: int) -> Tensor:
    """Return random token ids below 7 for rows of these lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(7, (length,), generator=generator) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def expected_complements(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return log(1 − p) of every token, in float64, one token at a time."""
    values = []
    for row, target in zip(logits.double() / temperature, targets.tolist(), strict=True):
        p = row.softmax(0)
        values.append(torch.log(p[:target].sum() + p[target + 1 :].sum()))
    return torch.stack(values)


@pytest.mark.parametrize("chunk", [2, 512])
def test_complements_of_padded_logits(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Values and gradients equal those of a plain reference, also for almost certain tokens."""
    monkeypatch.setattr(complements, "CHUNK", chunk)
    input_ids, temperature = jagged(3, 5, 4), 0.7
    targets = input_ids.values().roll(-1)
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1)) * 5
    logits.requires_grad_()
    arguments = {"input_ids_rmpad_rolled": targets, "temperature": torch.full((3,), temperature)}
    result = complements.packed_complements(None, logits, arguments, input_ids)
    reference = logits.detach().double().requires_grad_()
    rows = torch.cat([reference[0, :3], reference[1], reference[2, :4]])
    expected = expected_complements(rows, targets, temperature)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
    assert expected.min() < -5  # p > 0.99
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad.double(), reference.grad, atol=1e-5, rtol=1e-4)


def test_complements_of_packed_logits_are_gathered_over_ranks() -> None:
    input_ids = jagged(3, 2)
    targets = input_ids.values().roll(-1)
    logits = torch.randn(1, 6, 7, generator=torch.Generator().manual_seed(2))
    parts = [
        complements.log_complements(logits[0, 3:], torch.cat([targets[3:], targets[:1]]), ones(3)),
        logits[:, :3],
    ]
    arguments = {
        "input_ids_rmpad_rolled": targets[:3],
        "temperature_rmpad": ones(3),
        "pad_size": 1,
    }
    engine = PackedEngine(parts[0])
    result = complements.packed_complements(engine, parts[1], arguments, input_ids)
    expected = expected_complements(logits[0, :5], targets, 1.0)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def ones(count: int) -> Tensor:
    return torch.ones(count)


def test_the_engine_returns_complements_only_inside_the_block() -> None:
    class Engine:
        def prepare_model_outputs(
            self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
        ) -> dict[str, Any]:
            return {"log_probs": None}

    engine, input_ids = Engine(), jagged(2, 3)
    call = {
        "output": SimpleNamespace(logits=torch.randn(2, 3, 7)),
        "output_args": {
            "input_ids_rmpad_rolled": input_ids.values().roll(-1),
            "temperature": torch.ones(2),
        },
        "micro_batch": {"input_ids": input_ids},
        "logits_processor_func": None,
    }
    with complements.complements_in_output(engine):
        output = engine.prepare_model_outputs(**call)
        assert output["complements"].offsets().tolist() == [0, 2, 5]
    assert engine.prepare_model_outputs(**call) == {"log_probs": None}
