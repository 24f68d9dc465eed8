"""AdamW with compact moments: close to torch's AdamW, unbiased, exact when resumed, small."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import RunConfig
from eepo.model import optimizers
from eepo.model.optimizers import BLOCK, CompactAdamW, build_optimizer, from_codes, to_codes
from eepo.runs import checkpoint
from eepo.runs.progress import Progress

COMPACT = ["adamw_bf16", "adamw_8bit"]
pytestmark = pytest.mark.usefixtures("one_thread")


def build(
    name: str, weights: list[nn.Parameter], lr: float = 1e-3, decay: float = 0.0, seed: int = 0
) -> Any:
    return build_optimizer(name, weights, lr, decay, seed)


def second_moment(optimizer: Any, weight: nn.Parameter) -> Tensor:
    state = optimizer.state[weight]
    if "exp_avg_sq_scale" in state:
        return from_codes(state["exp_avg_sq"], state["exp_avg_sq_scale"], 255)[: weight.numel()]
    return state["exp_avg_sq"].float().view(-1)


def random_bits(number: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 2**16, (number,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )


# --- compared with torch's AdamW ------------------------------------------------------------------


def distance_moved(
    name: str, gradients: list[Tensor], lr: float = 5e-7, decay: float = 0.01
) -> Tensor:
    """Return how far a weight moves with these gradients."""
    weight = nn.Parameter(torch.linspace(-0.05, 0.05, gradients[0].numel()))
    before = weight.detach().clone()
    optimizer = build(name, [weight], lr, decay)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach() - before


@pytest.mark.parametrize(
    ("name", "max_error", "max_bias"),
    [("adamw_bf16", 0.02, 0.002), ("adamw_8bit", 0.15, 0.04)],
)
def test_steps_match_torch_for_tiny_gradients_of_very_different_sizes(
    name: str, max_error: float, max_bias: float
) -> None:
    torch.manual_seed(0)
    sizes = torch.randn(3000).exp() * 1e-6  # within a block, from about 1e-7 to 1e-5
    gradients = [(torch.randn(3000) + 0.3) * sizes for _ in range(400)]
    ours, theirs = distance_moved(name, gradients), distance_moved("adamw", gradients)
    assert theirs.abs().mean() > 1e-5, "the weights must have moved"
    assert (ours - theirs).norm() / theirs.norm() < max_error
    assert abs(float(ours.sum() / theirs.sum()) - 1) < max_bias


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_a_regression_is_solved(name: str) -> None:
    torch.manual_seed(0)
    inputs, truth = torch.randn(256, 300), torch.randn(300)
    weight = nn.Parameter(torch.zeros(300))
    optimizer = build(name, [weight], lr=0.02)
    for _ in range(400):
        weight.grad = torch.autograd.grad(((inputs @ (weight - truth)) ** 2).mean(), weight)[0]
        optimizer.step()
    assert ((inputs @ (weight - truth)) ** 2).mean() < 1e-3 * (truth**2).sum()


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_weight_decay_alone_shrinks_the_weights(name: str) -> None:
    weight = nn.Parameter(torch.full((300,), 2.0))
    optimizer = build(name, [weight], lr=0.01, decay=0.1)
    for _ in range(100):
        weight.grad = torch.zeros(300)
        optimizer.step()
    torch.testing.assert_close(
        weight.detach(), torch.full((300,), 2.0 * 0.999**100), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", COMPACT)
def test_weight_decay_works_at_tiny_learning_rates(name: str) -> None:
    """1 - 5e-7 · 0.01 rounds to 1 in fp32, so decay is added to the step instead."""
    torch.manual_seed(0)
    gradients = [torch.randn(20_000) for _ in range(100)]
    with_decay, without = (
        distance_moved(name, gradients, lr=5e-7, decay=decay) for decay in (0.01, 0.0)
    )
    start = torch.linspace(-0.05, 0.05, 20_000)
    expected = -100 * 5e-7 * 0.01 * start
    slope = ((with_decay - without) @ expected) / (expected @ expected)
    assert 0.7 < slope < 1.3


@pytest.mark.parametrize("name", COMPACT)
def test_a_weight_without_a_gradient_is_unchanged_and_has_no_state(name: str) -> None:
    moved, left = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
    optimizer = build(name, [left, moved], decay=0.1)
    moved.grad = torch.ones(10)
    optimizer.step()
    assert torch.equal(left.detach(), torch.ones(10))
    assert left not in optimizer.state
    assert (moved < 1).all()


@pytest.mark.parametrize("name", COMPACT)
def test_the_learning_rate_of_a_group_may_change(name: str) -> None:
    weight = nn.Parameter(torch.zeros(10))
    optimizer = build(name, [weight], lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.25
    weight.grad = torch.ones(10)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((10,), -0.25))


# --- rounding -------------------------------------------------------------------------------------


def test_a_bf16_average_rounded_to_nearest_never_decreases() -> None:
    """The reason for stochastic rounding: 0.001 is less than half the spacing of bf16 numbers."""
    moment = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        moment = (moment.float() * 0.999).bfloat16()
    assert moment == 1.0


@pytest.mark.parametrize("name", COMPACT)
def test_the_second_moment_increases_and_decreases_as_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(4096))
    compact, plain = build(name, [ours]), build("adamw", [theirs])
    sizes = torch.rand(4096) + 0.5
    for size in [1e-3] * 150 + [1e-5] * 400:
        ours.grad = theirs.grad = size * sizes * torch.randn(4096).sign()
        compact.step()
        plain.step()
    ratio = second_moment(compact, ours) / second_moment(plain, theirs)
    assert abs(float(ratio.mean()) - 1) < 0.02, "biased"
    assert ratio.std() < (0.05 if name == "adamw_bf16" else 0.2)


def test_stochastic_rounding_to_bf16_keeps_the_mean() -> None:
    value = 1.0 + 2.0**-7 * 0.3  # 30 % of the way between two bf16 numbers
    for sign in (1, -1):
        values = torch.full((100_000,), sign * value)
        rounded = optimizers.round_to_bf16(values, random_bits(100_000)).float()
        assert set(rounded.tolist()) == {sign * 1.0, sign * (1.0 + 2.0**-7)}
        assert abs(float(rounded.mean()) - sign * value) < 1e-4
    exact = torch.tensor([0.0, 1.5, -3.0, 1e-30]).bfloat16()
    assert torch.equal(optimizers.round_to_bf16(exact.float(), random_bits(4)), exact)


@pytest.mark.parametrize("levels", [127, 255])
def test_8bit_codes_are_close_to_their_values_and_unbiased(levels: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(40 * BLOCK).exp() * 1e-4
    shares = (values.view(-1, BLOCK) / values.view(-1, BLOCK).amax(1, keepdim=True)).view(-1)
    total = torch.zeros_like(values)
    for seed in range(200):
        codes, scales = to_codes(values, random_bits(len(values), seed), levels)
        decoded = from_codes(codes, scales, levels)
        spacing = 4 / levels / shares**0.25 * 1.3  # of the codes, relative to the value
        assert ((decoded - values).abs() <= spacing * values).all()
        total += decoded
    assert abs(float((total / 200 / values).mean()) - 1) < 1e-3


def test_zeros_stay_zero_and_an_outlier_does_not_erase_its_block() -> None:
    values = torch.zeros(2 * BLOCK)
    values[0], values[1:BLOCK:2] = 1.0, 1e-6  # an outlier is a million times larger
    codes, scales = to_codes(values, random_bits(len(values)), 255)
    decoded = from_codes(codes, scales, 255)
    assert torch.equal(decoded[values == 0], values[values == 0])
    assert decoded[0] == 1.0
    small = decoded[1:BLOCK:2]
    assert ((small > 0.5e-6) & (small < 2e-6)).all()
    assert torch.equal(scales, torch.tensor([1.0, 0.0]))


def test_a_second_moment_too_small_for_its_block_is_rounded_up() -> None:
    """With 0, EPS alone would divide the next step."""
    weight = nn.Parameter(torch.zeros(BLOCK))
    optimizer = build("adamw_8bit", [weight], lr=1e-3)
    for _ in range(200):
        weight.grad = torch.full((BLOCK,), 1e-7)  # squared: 1e-14 of the largest
        weight.grad[0] = 1.0
        optimizer.step()
        assert (second_moment(optimizer, weight) > 0).all()
    assert weight.detach().abs().max() <= 200 * 1e-3 * 1.01


@pytest.mark.parametrize("name", COMPACT)
def test_rows_with_zero_gradients_do_not_move(name: str) -> None:
    """For example an embedding's rows for tokens that never occur."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(10, 100))
    optimizer = build(name, [weight])
    for _ in range(50):
        weight.grad = torch.randn(10, 100)
        weight.grad[3] = 0
        optimizer.step()
    assert torch.equal(weight.detach()[3], torch.ones(100))
    assert (weight.detach()[4] != 1).all()


def test_random_bits_are_uniform_and_depend_on_seed_step_tensor_and_index() -> None:
    like = torch.empty(50_000)

    def bits(seed: int = 0, step: int = 1, tensor_index: int = 2) -> Tensor:
        group = {"lr": 1.0, "weight_decay": 0.0}
        key = optimizers._step_scalars(group, step, seed, torch.device("cpu")).random_key
        return optimizers._random_bits(like, key, tensor_index, 0)

    base = bits()
    assert torch.equal(base, bits())
    for half in (base & 0xFFFF, base >> 16 & 0xFFFF):
        assert abs(float(half.double().mean()) / 2**16 - 0.5) < 0.01
        counts = torch.bincount(half // 4096, minlength=16)
        assert (counts - 3125).abs().max() < 300
    for other in (bits(seed=1), bits(step=2), bits(tensor_index=3)):
        assert (other == base).double().mean() < 1e-3
        both = torch.stack([base & 0xFFFF, other & 0xFFFF]).double()
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02
    neighbours = torch.stack([base[1:] & 0xFFFF, base[:-1] & 0xFFFF]).double()
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.02


# --- size, slices, state --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_bytes_per_weight_are_those_of_the_memory_estimate(name: str) -> None:
    weight = nn.Parameter(torch.zeros(64, BLOCK))
    optimizer = build(name, [weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = [tensor for key, tensor in optimizer.state[weight].items() if key != "step"]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in moments)
    assert num_bytes == optimizers.MOMENT_BYTES[name] * weight.numel()


@pytest.mark.parametrize("name", COMPACT)
def test_slices_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(2000) for _ in range(5)]
    unsliced = distance_moved(name, gradients)
    monkeypatch.setattr(optimizers, "SLICE", 2 * BLOCK)
    assert torch.equal(distance_moved(name, gradients), unsliced)


@pytest.mark.parametrize("name", COMPACT)
def test_a_restored_state_continues_exactly_and_keeps_its_dtypes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, gradients = nn.Linear(33, 17), [[torch.randn(17, 33), torch.randn(17)] for _ in range(6)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: slice) -> None:
        for step in gradients[steps]:
            for weight, gradient in zip(model.parameters(), step, strict=True):
                weight.grad = gradient
            optimizer.step()

    optimizer = build(name, list(model.parameters()), seed=5)
    train(model, optimizer, slice(0, 3))
    again = copy.deepcopy(model)
    restored = build(name, list(again.parameters()), seed=5)
    saved = copy.deepcopy(optimizer.state_dict())
    shuffled = {index: dict(reversed(state.items())) for index, state in saved["state"].items()}
    restored.load_state_dict(saved | {"state": shuffled})  # files do not keep the order
    train(model, optimizer, slice(3, None))
    train(again, restored, slice(3, None))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, tensor in optimizer.state[ours].items():
            assert tensor.dtype == restored.state[theirs][key].dtype
            assert torch.equal(tensor, restored.state[theirs][key])


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_a_run_that_is_resumed_equals_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "task": {"num_evaluation": 1},
        "algorithm": {"group_size": 4, "max_new_tokens": 12, "num_stages": 1, "kl_coef": 0.0},
        "training": {
            "optimizer": name,
            "learning_rate": 3e-4,
            "prompts_per_step": 4,
            "prompts_per_mini_batch": 2,
            "seed": 3,
        },
        "evaluation": {"num_samples": 1},
    }

    def run(folder: Path, num_steps: int, resume: bool = False) -> Path:
        tables["training"]["num_steps"] = num_steps
        config = recipe.parse(RunConfig, tables, "test")
        build_trainer(config, folder, resume, Progress(Console(file=io.StringIO()))).run()
        return folder

    straight, resumed = run(tmp_path / "straight", 4), run(tmp_path / "resumed", 2)
    first = load_file(resumed / "final" / "model.safetensors")
    run(resumed, 4, resume=True)
    for file in (
        Path("final") / "model.safetensors",
        Path("checkpoints") / "step-000004" / checkpoint.TRAINING,
    ):
        got, expected = load_file(resumed / file), load_file(straight / file)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in got.keys() - {checkpoint.RNG})
    last = load_file(resumed / "final" / "model.safetensors")
    assert any(not torch.equal(first[key], last[key]) for key in first)


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="closure"):
        CompactAdamW([nn.Parameter(torch.zeros(1))], 1.0, 0.0, eight_bit=False).step(lambda: 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", COMPACT)
def test_the_kernel_equals_the_plain_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for switch in ("1", "0"):
        monkeypatch.setenv("EEPO_KERNELS", switch)
        torch.manual_seed(0)
        weights = [
            nn.Parameter(torch.randn(number, device="cuda"))
            for number in (7, 896, 2**16, 2**20, 100_000)
        ]
        optimizer = build(name, weights)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight) * 1e-4
            optimizer.step()
        results.append(torch.cat([weight.detach() for weight in weights]))
    assert (results[0] - results[1]).abs().mean() < 1e-6
