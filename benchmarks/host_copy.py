"""Measures how long sampling waits for the copy that undoes a failed step, on a GPU.

    python benchmarks/host_copy.py --shape 1.5B --queued 16 64 256 1000000

`StepBackup` copies weights and moments to host memory while the step samples. A loop of matrix
products, each with a small copy to the host, stands for sampling. `--queued` are sizes in MiB: what
is queued on the GPU before the copying thread waits. With a large size everything is queued at
once, and the small copies wait behind it.
"""

from __future__ import annotations

import argparse
import time

import shapes
import torch

from eepo.model import step_backup
from eepo.model.optimizers import build_optimizer
from eepo.model.step_backup import StepBackup

NUM_TURNS, PRODUCTS_PER_TURN = 150, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.5B", choices=shapes.SHAPES)
    sizes = [16, 64, 256, 1_000_000]
    parser.add_argument("--queued", type=int, nargs="+", default=sizes, metavar="MiB")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("host_copy.py needs a GPU")
    device = torch.device("cuda")
    model = shapes.new_model(args.shape, torch.float32, device)
    optimizer = build_optimizer("adamw", model.parameters(), 1e-7, 0.0, 0)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # creates the moments
    optimizer.zero_grad(set_to_none=True)
    sampling_seconds(device)
    print(f"{args.shape}: sampling alone {sampling_seconds(device):.3f} s")
    backup = StepBackup(optimizer, "adamw", print)
    print(f"first copy, with its allocation: {copy_seconds(backup):.2f} s", flush=True)
    print("| queued, MiB | copy alone, s | sampling during the copy, s | then, s |")
    print("| --- | --- | --- | --- |")
    for size in args.queued:
        step_backup.QUEUED_BYTES = size * 2**20
        alone = min(copy_seconds(backup) for _ in range(2))
        backup.take()
        during = sampling_seconds(device)
        then = finish(backup)
        print(f"| {size} | {alone:.3f} | {during:.3f} | {then:.3f} |", flush=True)


def copy_seconds(backup: StepBackup) -> float:
    started = time.perf_counter()
    backup.take()
    finish(backup)
    return time.perf_counter() - started


def finish(backup: StepBackup) -> float:
    """Wait for the copy, as the first optimizer update does, and return the seconds."""
    started = time.perf_counter()
    backup._wait()
    shapes.synchronize(backup.device)
    return time.perf_counter() - started


def sampling_seconds(device: torch.device) -> float:
    """Return the seconds of the loop. Each turn waits for its small copy only."""
    matrix = torch.zeros(4096, 4096, device=device, dtype=torch.bfloat16)
    flag, on_host = torch.zeros(1, device=device), torch.zeros(1).pin_memory()
    copied = torch.cuda.Event()
    torch.cuda.current_stream(device).synchronize()
    started = time.perf_counter()
    for _ in range(NUM_TURNS):
        for _ in range(PRODUCTS_PER_TURN):
            matrix @ matrix
        on_host.copy_(flag, non_blocking=True)
        copied.record()
        copied.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
