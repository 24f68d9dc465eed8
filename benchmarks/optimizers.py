"""Measure compact optimizers: quality over seeds, and speed compared with torch's AdamW.

    python benchmarks/optimizers.py                  # rounding and quality, on the CPU
    python benchmarks/optimizers.py --params 494e6   # speed and memory of a step, on a GPU if any

Quality: train the same decoder from scratch with each optimizer, on the same demonstrations in the
same order. A seed changes the initial weights and the order. Differences are to `adamw` with the
same seed.

Speed: tensors have the shapes of the Qwen decoder nearest to `--params`. A step's bytes are those
it cannot avoid: weights and moments read and written, gradients read. They are compared with a
plain copy in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eepo.config import CountdownConfig, ScratchConfig
from eepo.evaluation.estimates import seed_interval
from eepo.model import optimizers
from eepo.model.optimizers import BETA_2, MOMENT_BYTES, build_optimizer
from eepo.model.policy import Policy
from eepo.model.scratch import new_model
from eepo.tasks.countdown import Countdown, build_tokenizer
from eepo.types import Completion, Prompt

NAMES = tuple(MOMENT_BYTES)
NEAREST = "adamw_bf16, to nearest"  # for comparison with stochastic rounding
STOCHASTIC = optimizers.round_to_bf16
SHAPES = [  # weights, hidden size, layers, feed-forward, width of keys and values, untied head
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
    parser.add_argument("--params", type=float, help="measure speed with about this many weights")
    parser.add_argument("--repeats", type=int, default=10, help="steps to take the median time of")
    parser.add_argument("--steps", type=int, default=300, help="training steps, for quality")
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


# --- quality --------------------------------------------------------------------------------------


def quality(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    pairs = demonstrations(tokenizer, options.steps * options.batch + 512)
    held_out, training = pairs[:512], pairs[512:]
    losses: dict[str, list[float]] = {name: [] for name in (*NAMES, NEAREST)}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for seed in range(options.seeds):
        batches = shuffled_batches(training, options.batch, seed)
        for name in losses:
            lr = options.learning_rate
            loss, step_seconds = train(name, seed, batches, held_out, tokenizer, lr)
            losses[name].append(loss)
            seconds[name].append(step_seconds)
        latest = ", ".join(f"{name} {values[-1]:.4f}" for name, values in losses.items())
        print(f"seed {seed}: {latest}", flush=True)
    steps = f"{options.steps} steps of {options.batch}"
    print(f"{options.seeds} seeds, {steps}; loss on 512 other demonstrations")
    print("| optimizer | bytes per weight | loss | difference to adamw | in % | ms per update |")
    print("|---|---|---|---|---|---|")
    for name in losses:
        milliseconds = 1e3 * statistics.median(seconds[name])
        cells = difference_cells(losses[name], losses["adamw"])
        print(f"| {name} | {MOMENT_BYTES.get(name, 4):.2f} | {cells} | {milliseconds:.1f} |")


def shuffled_batches(pairs: Pairs, size: int, seed: int) -> list[Pairs]:
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    starts = range(0, len(order), size)
    return [[pairs[index] for index in order[start : start + size]] for start in starts]


def difference_cells(losses: list[float], baseline: list[float]) -> str:
    """Format mean loss and the difference to the baseline, absolute and in percent."""
    differences = [ours - theirs for ours, theirs in zip(losses, baseline, strict=True)]
    low, high = seed_interval(differences) or (float("nan"), float("nan"))
    mean, percent = statistics.mean(differences), 100 / statistics.mean(baseline)
    absolute = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    relative = f"{mean * percent:+.2f} [{low * percent:+.2f}, {high * percent:+.2f}]"
    return f"{statistics.mean(losses):.4f} | {absolute} | {relative}"


def demonstrations(tokenizer: Any, number: int) -> Pairs:
    task = Countdown(CountdownConfig(num_evaluation=1), tokenizer)
    pairs = []
    for demonstration in task.demonstrations(0, number):
        ids = tokenizer(demonstration.text, add_special_tokens=False).input_ids
        completion = Completion((*ids, tokenizer.eos_token_id), (), "", True)
        pairs.append((demonstration.prompt, completion))
    return pairs


def train(
    name: str, seed: int, batches: list[Pairs], held_out: Pairs, tokenizer: Any, lr: float
) -> tuple[float, float]:
    """Return the loss per token on `held_out` after one epoch, and the seconds per update."""
    shape = ScratchConfig(hidden_size=64, intermediate_size=192, num_layers=2)
    policy = Policy(new_model(shape, tokenizer, seed))
    optimizer = build_optimizer(name.split(",")[0], policy.model.parameters(), lr, 0.01, seed)
    optimizers.round_to_bf16 = round_to_nearest if name == NEAREST else STOCHASTIC
    spent = 0.0
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20, 1.1 - step / len(batches))
        mean_loss(policy, batch).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        started = time.perf_counter()
        optimizer.step()
        spent += time.perf_counter() - started
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        return float(mean_loss(policy, held_out)), spent / len(batches)


def round_to_nearest(values: Tensor, random_bits: Tensor) -> Tensor:
    return values.bfloat16()


def mean_loss(policy: Policy, pairs: Pairs) -> Tensor:
    num_tokens = sum(len(completion.token_ids) for _, completion in pairs)
    parts = [policy.score(batch, 1.0).logprobs.sum() for batch in policy.micro_batches(pairs)]
    return -torch.stack(parts).sum() / num_tokens


def stalling() -> None:
    """Print the second moment of random gradients of size 1, and of size 0.01 after step 2,000."""
    print("| step | fp32 | bf16, to nearest | bf16, stochastic | std of stochastic / fp32 |")
    print("|---|---|---|---|---|")
    exact, nearest, stochastic = (torch.zeros(20_000) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4001):
        size = 1 if step <= 2000 else 0.01
        squares = (torch.randn(20_000, generator=generator) * size).square()
        bits = torch.randint(0, 2**16, (20_000,), generator=generator, dtype=torch.int32)
        exact, nearest, stochastic = (
            moment + (1 - BETA_2) * (squares - moment) for moment in (exact, nearest, stochastic)
        )
        nearest = nearest.bfloat16().float()
        stochastic = optimizers.round_to_bf16(stochastic, bits).float()
        if step in (250, 1000, 2000, 3000, 4000):
            moments = exact, nearest, stochastic
            means = " | ".join(f"{float(moment.mean()):.3f}" for moment in moments)
            print(f"| {step} | {means} | {float((stochastic / exact).std()):.1%} |")


def accumulation() -> None:
    """Print the error of gradients that are summed over micro-batches in bf16."""
    print("\n| micro-batches | relative error of a bf16 sum: equal signs | mostly cancelling |")
    print("|---|---|---|")
    for number in (4, 16, 64, 256, 1024):
        print(f"| {number} | {bf16_error(number, 1.0):.1%} | {bf16_error(number, 0.03):.1%} |")


def bf16_error(number: int, signal: float) -> float:
    """Return the relative error of the sum of `number` gradients, each `signal` plus noise."""
    generator = torch.Generator().manual_seed(0)
    exact, rounded = torch.zeros(20_000), torch.zeros(20_000, dtype=torch.bfloat16)
    for _ in range(number):
        part = signal + (torch.randn(20_000, generator=generator) if signal < 1 else 0.1)
        exact += part
        rounded = (rounded.float() + part).bfloat16()
    return float((rounded.float() - exact).norm() / exact.norm())


# --- speed ----------------------------------------------------------------------------------------


def speed(params: float, repeats: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = decoder_weights(params, device)
    num_weights = sum(weight.numel() for weight in weights)
    copy_rate = copy_bandwidth(device)
    on_gpu = device.type == "cuda"
    hardware = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{num_weights / 1e6:,.0f} million weights, {len(weights)} tensors; {hardware}; "
        f"copy: {copy_rate / 1e9:,.0f} GB/s"
    )
    print(
        "| optimizer | state, GB | first step, s | ms per step | GB/s | relative to a copy "
        "| temporary, GB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in NAMES:
        print(speed_row(name, weights, copy_rate, repeats, device))


def speed_row(
    name: str,
    weights: list[nn.Parameter],
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
    temporary = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else math.nan
    num_weights = sum(weight.numel() for weight in weights)
    rate = num_weights * (4 + 4 + 4 + 2 * MOMENT_BYTES[name]) / step
    state = MOMENT_BYTES[name] * num_weights / 1e9
    return (
        f"| {name} | {state:.2f} | {first:.1f} | {1e3 * step:.2f} | {rate / 1e9:,.0f} "
        f"| {rate / copy_rate:.0%} | {temporary / 1e9:.2f} |"
    )


def decoder_weights(params: float, device: torch.device) -> list[nn.Parameter]:
    nearest = min(SHAPES, key=lambda shape: abs(shape[0] - params))
    _, hidden, layers, wide, narrow, untied_head = nearest
    query, key_or_value = [(hidden, hidden), (hidden,)], [(narrow, hidden), (narrow,)]
    attention = [*query, *key_or_value, *key_or_value, (hidden, hidden)]
    feed_forward = [(wide, hidden), (wide, hidden), (hidden, wide)]
    layer = [*attention, *feed_forward, (hidden,), (hidden,)]
    shapes = [(VOCABULARY, hidden)] * (2 if untied_head else 1) + layer * layers + [(hidden,)]
    return [nn.Parameter(torch.full(shape, 0.02, device=device)) for shape in shapes]


def copy_bandwidth(device: torch.device) -> float:
    """Measure copies, in bytes read and written per second."""
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
