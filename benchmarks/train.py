"""Measure forward and backward passes: tokens per second, matrix utilization, peak memory.

    python benchmarks/train.py --shape 0.5B --tokens 10240 --length 640

Ours is a GRPO loss through `Policy.score`. The peer in the same run is a plain loop: bf16 autocast
over fp32 weights, full fp32 logits, log-softmax. Both take gradients in fp32.

Utilization is the share of the measured matrix rate, with 6 operations per weight and token.
Recomputation does not count as work. "Groups of 8" means that eight rows share one prompt, which is
computed once; tokens are counted as if it were computed eight times.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import shapes
import torch

from eepo.algorithm import PolicyTerms, grpo_token_loss, token_mean
from eepo.config import AlgorithmConfig
from eepo.model.compilation import compile_layers
from eepo.model.policy import Policy


def ours(
    model: Any,
    args: argparse.Namespace,
    compiled: bool = False,
    checkpointing: bool = False,
    group: int = 1,
) -> Callable[[], None] | None:
    model = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    policy = Policy(model, args.tokens, args.head)
    if compiled and not compile_layers(model):
        return None
    num_rows = args.micro_batches * args.tokens // args.length
    groups = shapes.prompts(-(-num_rows // group), args.prompt)
    prompts = [prompt for prompt in groups for _ in range(group)][:num_rows]
    num_completion = args.length - args.prompt
    pairs = [
        (prompt, shapes.random_completion(num_completion, seed=row))
        for row, prompt in enumerate(prompts)
    ]
    advantages = [1.0 if row % 2 else -1.0 for row in range(num_rows)]
    options = AlgorithmConfig()

    def run() -> None:
        for batch in policy.micro_batches(pairs):
            scores = policy.score(batch, 1.0)
            sampled = batch.pad([completion.logprobs for _, completion in pairs])
            selected = torch.zeros_like(batch.mask)
            terms = PolicyTerms(
                scores.logprobs, sampled, batch.pick(advantages), batch.mask, selected
            )
            loss = token_mean(grpo_token_loss(terms, options).values, batch.mask)
            (loss - 1e-5 * token_mean(scores.entropies, batch.mask)).backward()
        model.zero_grad(set_to_none=True)

    return run


def plain(model: Any, args: argparse.Namespace) -> Callable[[], None]:
    model = copy.deepcopy(model)
    shape = args.tokens // args.length, args.length
    ids = torch.randint(1000, 150000, shape, device=model.device)

    def run() -> None:
        for _ in range(args.micro_batches):
            with torch.autocast(model.device.type, torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            logprobs = logits.float().log_softmax(-1)[:, args.prompt - 1 : -1]
            logprobs.gather(2, ids[:, args.prompt :, None]).mean().neg().backward()
        model.zero_grad(set_to_none=True)

    return run


PEERS: dict[str, Callable[..., Any]] = {
    "eepo": ours,
    "eepo, compiled": partial(ours, compiled=True),
    "eepo, compiled, groups of 8": partial(ours, compiled=True, group=8),
    "eepo, checkpointing": partial(ours, checkpointing=True),
    "eepo, compiled, checkpointing": partial(ours, compiled=True, checkpointing=True),
    "plain": plain,
}
COLUMNS = ["variant", "tokens/s", "matrix utilization", "peak GB", "GB above weights"]


def measure(
    work: Callable[[], None], args: argparse.Namespace, device: torch.device
) -> list[float]:
    """Return tokens per second, peak bytes, and peak bytes above those allocated before."""
    gc.collect()
    cuda = device.type == "cuda"
    allocated = float("nan")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    seconds = shapes.median_seconds(work, args.repeats, device, warm=3)
    peak = torch.cuda.max_memory_allocated() if cuda else float("nan")
    return [args.micro_batches * args.tokens / seconds, peak, peak - allocated]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=shapes.SHAPES, default="0.5B")
    parser.add_argument("--tokens", type=int, default=10240, help="tokens per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--length", type=int, default=640, help="tokens per row")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens per row")
    parser.add_argument("--head", type=int, default=4096, help="positions with logits at a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--peers", default=";".join(PEERS), help="variants, separated by semicolons"
    )
    args = parser.parse_args()
    if args.tokens % args.length:
        parser.error(f"--tokens = {args.tokens} must be a multiple of --length = {args.length}")
    return args


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = shapes.new_model(args.shape, torch.float32, device)
    operations_per_token = 6 * shapes.num_parameters(model)
    matrix_rate = shapes.matrix_rate(device)
    rows = []
    for name in args.peers.split(";"):
        work = PEERS[name](model, args)
        if work is None:
            continue
        rate, peak, above = measure(work, args, device)
        utilization = f"{100 * rate * operations_per_token / matrix_rate:.0f} %"
        rows.append([name, f"{rate:,.0f}", utilization, f"{peak / 1e9:.1f}", f"{above / 1e9:.1f}"])
        print(rows[-1], flush=True)
        del work
    print(
        f"\n{args.shape}, {args.micro_batches} x {args.tokens} tokens in rows of {args.length}, "
        f"median of {args.repeats}, matrix rate {matrix_rate / 1e12:.0f} TFLOP/s"
    )
    print(shapes.table(COLUMNS, rows))


if __name__ == "__main__":
    main()
