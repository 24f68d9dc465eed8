"""AdamW with small moments: as good as torch's within stated bounds, unbiased, exact when resumed, and really small."""

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


def built(
    name: str, weights: list[nn.Parameter], lr: float = 1e-3, decay: float = 0.0, seed: int = 0
) -> Any:
    return build_optimizer(name, weights, lr, decay, seed)


def second_moment(optimizer: Any, weight: nn.Parameter) -> Tensor:
    state = optimizer.state[weight]
    if "exp_avg_sq_scale" in state:
        return from_codes(state["exp_avg_sq"], state["exp_avg_sq_scale"], 255)[: weight.numel()]
    return state["exp_avg_sq"].float().view(-1)


def draws(number: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 2**16, (number,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )


# --- against torch ----------------------------------------------------------------------------------------------------


def travelled(name: str, gradients: list[Tensor], lr: float = 5e-7, decay: float = 0.01) -> Tensor:
    """How far a weight goes when it is given these gradients."""
    weight = nn.Parameter(torch.linspace(-0.05, 0.05, gradients[0].numel()))
    before = weight.detach().clone()
    optimizer = built(name, [weight], lr, decay)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach() - before


@pytest.mark.parametrize(
    ("name", "distance", "bias"), [("adamw_bf16", 0.02, 0.002), ("adamw_8bit", 0.15, 0.04)]
)
def test_it_goes_where_torch_goes_with_tiny_gradients_of_very_different_sizes(
    name: str, distance: float, bias: float
) -> None:
    torch.manual_seed(0)
    sizes = torch.randn(3000).exp() * 1e-6  # within a block, from about 1e-7 to 1e-5
    gradients = [(torch.randn(3000) + 0.3) * sizes for _ in range(400)]
    ours, theirs = travelled(name, gradients), travelled("adamw", gradients)
    assert theirs.abs().mean() > 1e-5, "it must have gone somewhere"
    assert (ours - theirs).norm() / theirs.norm() < distance
    assert abs(float(ours.sum() / theirs.sum()) - 1) < bias


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_it_solves_a_regression(name: str) -> None:
    torch.manual_seed(0)
    inputs, truth = torch.randn(256, 300), torch.randn(300)
    weight = nn.Parameter(torch.zeros(300))
    optimizer = built(name, [weight], lr=0.02)
    for _ in range(400):
        weight.grad = torch.autograd.grad(((inputs @ (weight - truth)) ** 2).mean(), weight)[0]
        optimizer.step()
    assert ((inputs @ (weight - truth)) ** 2).mean() < 1e-3 * (truth**2).sum()


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_weight_decay_alone_shrinks_the_weights(name: str) -> None:
    weight = nn.Parameter(torch.full((300,), 2.0))
    optimizer = built(name, [weight], lr=0.01, decay=0.1)
    for _ in range(100):
        weight.grad = torch.zeros(300)
        optimizer.step()
    torch.testing.assert_close(
        weight.detach(), torch.full((300,), 2.0 * 0.999**100), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", COMPACT)
def test_decay_survives_rates_at_which_one_minus_it_is_one(name: str) -> None:
    """1 - 5e-7 · 0.01 is 1 in fp32: as a factor it would do nothing, added to the step it does its part."""
    torch.manual_seed(0)
    gradients = [torch.randn(20_000) for _ in range(100)]
    with_decay, without = (
        travelled(name, gradients, lr=5e-7, decay=decay) for decay in (0.01, 0.0)
    )
    start = torch.linspace(-0.05, 0.05, 20_000)
    expected = -100 * 5e-7 * 0.01 * start
    slope = ((with_decay - without) @ expected) / (expected @ expected)
    assert 0.7 < slope < 1.3


@pytest.mark.parametrize("name", COMPACT)
def test_a_weight_without_gradient_stays_and_has_no_state(name: str) -> None:
    moved, left = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
    optimizer = built(name, [left, moved], decay=0.1)
    moved.grad = torch.ones(10)
    optimizer.step()
    assert torch.equal(left.detach(), torch.ones(10))
    assert left not in optimizer.state
    assert (moved < 1).all()


@pytest.mark.parametrize("name", COMPACT)
def test_the_learning_rate_may_change_as_a_warm_start_changes_it(name: str) -> None:
    weight = nn.Parameter(torch.zeros(10))
    optimizer = built(name, [weight], lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.25
    weight.grad = torch.ones(10)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((10,), -0.25))


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_rounded_to_the_nearest_a_bf16_average_never_falls() -> None:
    """Why we round at random: a thousandth is less than half of bf16's distance between numbers."""
    moment = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        moment = (moment.float() * 0.999).bfloat16()
    assert moment == 1.0


@pytest.mark.parametrize("name", COMPACT)
def test_the_second_moment_rises_and_falls_as_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(4096))
    compact, plain = built(name, [ours]), built("adamw", [theirs])
    sizes = torch.rand(4096) + 0.5
    for size in [1e-3] * 150 + [1e-5] * 400:
        ours.grad = theirs.grad = size * sizes * torch.randn(4096).sign()
        compact.step()
        plain.step()
    found, expected = second_moment(compact, ours), second_moment(plain, theirs)
    assert abs(float((found / expected).mean()) - 1) < 0.02, "no bias"
    assert (found / expected).std() < (0.05 if name == "adamw_bf16" else 0.2)


def test_random_rounding_to_bf16_keeps_the_mean() -> None:
    value = 1.0 + 2.0**-7 * 0.3  # three tenths of the way between two neighbours
    for sign in (1, -1):
        rounded = optimizers.round_to_bf16(
            torch.full((100_000,), sign * value), draws(100_000)
        ).float()
        assert set(rounded.tolist()) == {sign * 1.0, sign * (1.0 + 2.0**-7)}
        assert abs(float(rounded.mean()) - sign * value) < 1e-4
    exact = torch.tensor([0.0, 1.5, -3.0, 1e-30]).bfloat16()
    assert torch.equal(optimizers.round_to_bf16(exact.float(), draws(4)), exact)


@pytest.mark.parametrize("levels", [127, 255])
def test_codes_are_near_what_they_stand_for_and_right_on_average(levels: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(40 * BLOCK).exp() * 1e-4
    shares = (values.view(-1, BLOCK) / values.view(-1, BLOCK).amax(1, keepdim=True)).view(-1)
    total = torch.zeros_like(values)
    for seed in range(200):
        codes, scales = to_codes(values, draws(len(values), seed), levels)
        back = from_codes(codes, scales, levels)
        gap = 4 / levels / shares**0.25 * 1.3  # a step of the fourth root, as a share of the value
        assert ((back - values).abs() <= gap * values).all()
        total += back
    assert abs(float((total / 200 / values).mean()) - 1) < 1e-3


def test_zeros_stay_zero_and_an_outlier_does_not_wipe_out_its_block() -> None:
    values = torch.zeros(2 * BLOCK)
    values[0], values[1:BLOCK:2] = 1.0, 1e-6  # beside an outlier a million times larger
    codes, scales = to_codes(values, draws(len(values)), 255)
    back = from_codes(codes, scales, 255)
    assert torch.equal(back[values == 0], values[values == 0])
    assert back[0] == 1.0
    small = back[1:BLOCK:2]
    assert ((small > 0.5e-6) & (small < 2e-6)).all()
    assert torch.equal(scales, torch.tensor([1.0, 0.0]))


def test_a_second_moment_too_small_for_its_block_is_rounded_up_not_to_zero() -> None:
    """0 would divide the next step by EPS alone."""
    weight = nn.Parameter(torch.zeros(BLOCK))
    optimizer = built("adamw_8bit", [weight], lr=1e-3)
    for _ in range(200):
        weight.grad = torch.full((BLOCK,), 1e-7)  # its square is 1e-14 of the largest
        weight.grad[0] = 1.0
        optimizer.step()
        assert (second_moment(optimizer, weight) > 0).all()
    assert weight.detach().abs().max() <= 200 * 1e-3 * 1.01


@pytest.mark.parametrize("name", COMPACT)
def test_rows_of_zeros_beside_others_do_not_move(name: str) -> None:
    """An embedding's rows for words that never occur."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(10, 100))
    optimizer = built(name, [weight])
    for _ in range(50):
        weight.grad = torch.randn(10, 100)
        weight.grad[3] = 0
        optimizer.step()
    assert torch.equal(weight.detach()[3], torch.ones(100))
    assert (weight.detach()[4] != 1).all()


def test_draws_are_uniform_and_differ_by_seed_step_tensor_and_place() -> None:
    device = torch.device("cpu")
    place = torch.empty(50_000)

    def drawn(seed: int = 0, step: int = 1, index: int = 2) -> Tensor:
        key = optimizers._numbers(1.0, 0.0, step, seed, device)[1]
        return optimizers._draws(place, key, index, 0)

    base = drawn()
    assert torch.equal(base, drawn())
    for half in (base & 0xFFFF, base >> 16 & 0xFFFF):
        assert abs(float(half.double().mean()) / 2**16 - 0.5) < 0.01
        counts = torch.bincount(half // 4096, minlength=16)
        assert (counts - 3125).abs().max() < 300
    for other in (drawn(seed=1), drawn(step=2), drawn(index=3)):
        assert (other == base).double().mean() < 1e-3
        both = torch.stack([base & 0xFFFF, other & 0xFFFF]).double()
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02
    neighbours = torch.stack([base[1:] & 0xFFFF, base[:-1] & 0xFFFF]).double()
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.02


# --- size, slices, state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", *COMPACT])
def test_bytes_a_weight_are_those_that_the_estimate_counts(name: str) -> None:
    weight = nn.Parameter(torch.zeros(64, BLOCK))
    optimizer = built(name, [weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = [tensor for key, tensor in optimizer.state[weight].items() if key != "step"]
    held = sum(tensor.numel() * tensor.element_size() for tensor in moments)
    assert held == optimizers.MOMENT_BYTES[name] * weight.numel()


@pytest.mark.parametrize("name", COMPACT)
def test_slices_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(2000) for _ in range(5)]
    whole = travelled(name, gradients)
    monkeypatch.setattr(optimizers, "SLICE", 2 * BLOCK)
    assert torch.equal(travelled(name, gradients), whole)


@pytest.mark.parametrize("name", COMPACT)
def test_a_restored_state_goes_on_exactly_and_keeps_its_types(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, gradients = nn.Linear(33, 17), [[torch.randn(17, 33), torch.randn(17)] for _ in range(6)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, some: list[list[Tensor]]) -> None:
        for step in some:
            for weight, gradient in zip(model.parameters(), step, strict=True):
                weight.grad = gradient
            optimizer.step()

    optimizer = built(name, list(model.parameters()), seed=5)
    train(model, optimizer, gradients[:3])
    again = copy.deepcopy(model)
    restored = built(name, list(again.parameters()), seed=5)
    saved = copy.deepcopy(optimizer.state_dict())
    shuffled = {index: dict(reversed(state.items())) for index, state in saved["state"].items()}
    restored.load_state_dict(saved | {"state": shuffled})  # a file does not keep the order of names
    train(model, optimizer, gradients[3:])
    train(again, restored, gradients[3:])
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
            "optimizer": name, "learning_rate": 3e-4, "prompts_per_step": 4, "prompts_per_mini_batch": 2, "seed": 3,
        },
        "evaluation": {"num_samples": 1},
    }  # fmt: skip

    def run(folder: Path, num_steps: int, resume: bool = False) -> Path:
        tables["training"]["num_steps"] = num_steps
        config = recipe.parse(RunConfig, tables, "test")
        build_trainer(config, folder, resume, Progress(Console(file=io.StringIO()))).run()
        return folder

    whole, parts = run(tmp_path / "whole", 4), run(tmp_path / "parts", 2)
    first = load_file(parts / "final" / "model.safetensors")
    run(parts, 4, resume=True)
    for file in (
        Path("final") / "model.safetensors",
        Path("checkpoints") / "step-000004" / checkpoint.TRAINING,
    ):
        ours, theirs = load_file(parts / file), load_file(whole / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() - {checkpoint.RNG})
    last = load_file(parts / "final" / "model.safetensors")
    assert any(not torch.equal(first[key], last[key]) for key in first)


def test_no_closure_is_taken() -> None:
    with pytest.raises(ValueError, match="closure"):
        CompactAdamW([nn.Parameter(torch.zeros(1))], 1.0, 0.0, eight_bit=False).step(lambda: 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", COMPACT)
def test_the_kernel_is_the_plain_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for switch in ("1", "0"):
        monkeypatch.setenv("EEPO_KERNELS", switch)
        torch.manual_seed(0)
        weights = [
            nn.Parameter(torch.randn(number, device="cuda"))
            for number in (7, 896, 2**16, 2**20, 100_000)
        ]
        optimizer = built(name, weights)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight) * 1e-4
            optimizer.step()
        results.append(torch.cat([weight.detach() for weight in weights]))
    assert (results[0] - results[1]).abs().mean() < 1e-6
