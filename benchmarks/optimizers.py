"""What smaller moments cost and save: quality over seeds, then the step's speed beside torch's own AdamW.

    python benchmarks/optimizers.py                        # rounding; then a small decoder learns countdown, on the CPU
    python benchmarks/optimizers.py --params 494e6         # speed and memory of one step, on the GPU if there is one

Quality: the same decoder from scratch, on the same demonstrations in the same order, once with each optimizer; a seed
changes its weights at the start and the order. Differences are to `adamw`, seed by seed. Speed: tensors with the shapes
of the Qwen decoder nearest to `--params`; a step's bytes are those it cannot avoid (weights and moments read and
written, gradients read), and the floor is a plain copy of memory measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eepo.assemble import new_model
from eepo.config import CountdownConfig, ScratchConfig
from eepo.evaluation.estimates import seed_interval
from eepo.model import optimizers
from eepo.model.optimizers import BETA_2, MOMENT_BYTES, build_optimizer
from eepo.model.policy import Policy
from eepo.tasks.countdown import Countdown, build_tokenizer
from eepo.types import Completion, Prompt

NAMES = tuple(MOMENT_BYTES)
NEAREST = "adamw_bf16, to the nearest"  # what we do not do, to see why
AT_RANDOM = optimizers.round_to_bf16
SHAPES = [  # weights, hidden, layers, feed-forward, width of keys and values, is the head a matrix of its own
    (494e6, 896, 24, 4864, 128, False),
    (1.54e9, 1536, 28, 8960, 256, False),
    (3.09e9, 2048, 36, 11008, 256, False),
    (8.19e9, 4096, 36, 12288, 1024, True),
]
VOCABULARY = 151_936
Pairs = list[tuple[Prompt, Completion]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, help="measure speed, with about this many weights")
    parser.add_argument("--repeats", type=int, default=10, help="steps whose median time counts")
    parser.add_argument("--steps", type=int, default=300, help="of training, for quality")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()
    if options.params:
        speed(options.params, options.repeats)
    else:
        stalling()
        accumulation()
        quality(options)


# --- quality ----------------------------------------------------------------------------------------------------------


def quality(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    pairs = demonstrations(tokenizer, options.steps * options.batch + 512)
    held_out, training = pairs[:512], pairs[512:]
    losses: dict[str, list[float]] = {name: [] for name in (*NAMES, NEAREST)}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for seed in range(options.seeds):
        order = torch.randperm(
            len(training), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        batches = [
            [training[i] for i in order[k : k + options.batch]]
            for k in range(0, len(order), options.batch)
        ]
        for name in losses:
            loss, step_seconds = train(
                name, seed, batches, held_out, tokenizer, options.learning_rate
            )
            losses[name].append(loss)
            seconds[name].append(step_seconds)
        print(
            f"seed {seed}:",
            ", ".join(f"{name} {values[-1]:.4f}" for name, values in losses.items()),
            flush=True,
        )
    print(
        f"{options.seeds} seeds, {options.steps} steps of {options.batch}; loss on 512 other demonstrations"
    )
    print(
        "| optimizer | bytes a weight | loss | difference to adamw | of it in % | optimizer's ms a step |"
    )
    print("|---|---|---|---|---|---|")
    for name in losses:
        print(f"| {name} | {MOMENT_BYTES.get(name, 4):.2f} | {row(losses[name], losses['adamw'])} "
              f"| {1e3 * statistics.median(seconds[name]):.1f} |")  # fmt: skip


def row(losses: list[float], peer: list[float]) -> str:
    gaps = [ours - theirs for ours, theirs in zip(losses, peer, strict=True)]
    interval = seed_interval(gaps) or (float("nan"), float("nan"))
    mean, base = statistics.mean(gaps), statistics.mean(peer)
    share = f"{100 * mean / base:+.2f} [{100 * interval[0] / base:+.2f}, {100 * interval[1] / base:+.2f}]"
    return f"{statistics.mean(losses):.4f} | {mean:+.4f} [{interval[0]:+.4f}, {interval[1]:+.4f}] | {share}"


def demonstrations(tokenizer: Any, number: int) -> Pairs:
    drawn = Countdown(CountdownConfig(num_evaluation=1), tokenizer).demonstrations(0, number)
    ids = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for _, text in drawn]
    ended = [Completion((*row, tokenizer.eos_token_id), (), "", True) for row in ids]
    return [(prompt, completion) for (prompt, _), completion in zip(drawn, ended, strict=True)]


def train(
    name: str, seed: int, batches: list[Pairs], held_out: Pairs, tokenizer: Any, lr: float
) -> tuple[float, float]:
    """Loss a token on `held_out` after one pass, and the optimizer's own seconds a step."""
    policy = Policy(
        new_model(
            ScratchConfig(hidden_size=64, intermediate_size=192, num_layers=2), tokenizer, seed
        )
    )
    optimizer = build_optimizer(name.split(",")[0], policy.model.parameters(), lr, 0.01, seed)
    optimizers.round_to_bf16 = to_the_nearest if name == NEAREST else AT_RANDOM
    spent = 0.0
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20, 1.1 - step / len(batches))
        loss_sum(policy, batch).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        started = time.perf_counter()
        optimizer.step()
        spent += time.perf_counter() - started
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        return float(loss_sum(policy, held_out)), spent / len(batches)


def to_the_nearest(values: Tensor, draws: Tensor) -> Tensor:
    return values.bfloat16()


def loss_sum(policy: Policy, pairs: Pairs) -> Tensor:
    num_tokens = sum(len(completion.token_ids) for _, completion in pairs)
    parts = [policy.score(batch, 1.0).logprobs.sum() for batch in policy.micro_batches(pairs)]
    return -torch.stack(parts).sum() / num_tokens


def stalling() -> None:
    """A second moment of random gradients of size 1, and after step 2,000 of size 0.01."""
    print(
        "| step | fp32 | bf16, to the nearest | bf16, at random | spread of the last to the first |"
    )
    print("|---|---|---|---|---|")
    exact, nearest, random = torch.zeros(20_000), torch.zeros(20_000), torch.zeros(20_000)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4001):
        squares = (
            torch.randn(20_000, generator=generator) * (1 if step <= 2000 else 0.01)
        ).square()
        draws = torch.randint(0, 2**16, (20_000,), generator=generator, dtype=torch.int32)
        exact, nearest, random = (
            moment + (1 - BETA_2) * (squares - moment) for moment in (exact, nearest, random)
        )
        nearest, random = (
            nearest.bfloat16().float(),
            optimizers.round_to_bf16(random, draws).float(),
        )
        if step in (250, 1000, 2000, 3000, 4000):
            means = " | ".join(f"{float(moment.mean()):.3f}" for moment in (exact, nearest, random))
            print(f"| {step} | {means} | {float((random / exact).std()):.1%} |")


def accumulation() -> None:
    """Why gradients stay in fp32: what a sum over micro-batches loses in bf16, rounded to the nearest."""
    print(
        "\n| micro-batches | error of a bf16 sum, share of the gradient: parts that agree | parts that mostly cancel |"
    )
    print("|---|---|---|")
    for number in (4, 16, 64, 256, 1024):
        print(f"| {number} | {bf16_error(number, 1.0):.1%} | {bf16_error(number, 0.03):.1%} |")


def bf16_error(number: int, signal: float) -> float:
    """Of `number` parts, each `signal` plus noise of size 1."""
    generator = torch.Generator().manual_seed(0)
    exact, rounded = torch.zeros(20_000), torch.zeros(20_000, dtype=torch.bfloat16)
    for _ in range(number):
        part = signal + (torch.randn(20_000, generator=generator) if signal < 1 else 0.1)
        exact += part
        rounded = (rounded.float() + part).bfloat16()
    return float((rounded.float() - exact).norm() / exact.norm())


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(params: float, repeats: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = decoder_weights(params, device)
    number = sum(weight.numel() for weight in weights)
    copy_rate = copy_bandwidth(device)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{number / 1e6:,.0f} million weights, {len(weights)} tensors; {where}; a copy: {copy_rate / 1e9:,.0f} GB/s"
    )
    print(
        "| optimizer | state, GB | first step, s | ms a step | GB/s | share of a copy's | beside its state, GB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in NAMES:
        print(speed_row(name, weights, number, copy_rate, repeats, device))


def speed_row(
    name: str,
    weights: list[nn.Parameter],
    number: int,
    copy_rate: float,
    repeats: int,
    device: torch.device,
) -> str:
    optimizer = build_optimizer(name, weights, 5e-7, 0.01, 0)
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-5)
    first = seconds_of(optimizer.step, device)
    for _ in range(2):
        optimizer.step()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = statistics.median(seconds_of(optimizer.step, device) for _ in range(repeats))
    beside = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else float("nan")
    rate = number * (4 + 4 + 4 + 2 * MOMENT_BYTES[name]) / step
    state = MOMENT_BYTES[name] * number / 1e9
    return (
        f"| {name} | {state:.2f} | {first:.1f} | {1e3 * step:.2f} | {rate / 1e9:,.0f} | {rate / copy_rate:.0%} "
        f"| {beside / 1e9:.2f} |"
    )


def decoder_weights(params: float, device: torch.device) -> list[nn.Parameter]:
    _, hidden, layers, wide, narrow, own_head = min(
        SHAPES, key=lambda shape: abs(shape[0] - params)
    )
    layer = [
        (hidden, hidden),
        (hidden,),
        (narrow, hidden),
        (narrow,),
        (narrow, hidden),
        (narrow,),
        (hidden, hidden),
    ]
    layer += [(wide, hidden), (wide, hidden), (hidden, wide), (hidden,), (hidden,)]
    shapes = [(VOCABULARY, hidden)] * (2 if own_head else 1) + layer * layers + [(hidden,)]
    return [nn.Parameter(torch.full(shape, 0.02, device=device)) for shape in shapes]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = [seconds_of(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * source.numel() * source.element_size() / statistics.median(times)


def seconds_of(action: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
