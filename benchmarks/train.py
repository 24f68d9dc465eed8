"""Tokens a second, share of the matrix rate and peak memory of a training step's forward and backward passes.

    python benchmarks/train.py --shape 0.5B --tokens 10240 --length 640

Ours is a GRPO loss through `Policy.score`; the peer in the same run is what a plain loop does: bf16 autocast over fp32
weights, whole fp32 logits, log-softmax. Both take gradients in fp32. The share counts 6 operations a weight and token;
what is computed twice does not count. In groups, eight rows have one prompt, which is computed once: their tokens are
counted as if it were not, so the share is what they would have cost.
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

from eepo.algorithm import policy_loss, token_mean
from eepo.model.compilation import compile_layers
from eepo.model.policy import Policy


def ours(
    model: Any,
    args: argparse.Namespace,
    compiled: bool = False,
    checkpointing: bool = False,
    group: int = 1,
) -> Callable[[], None] | None:
    own = copy.deepcopy(model)
    if checkpointing:
        own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        own.train()
    policy = Policy(own, args.tokens, args.head)
    if compiled and not compile_layers(own):
        return None
    number = args.micro_batches * args.tokens // args.length
    asked = [
        prompt for prompt in shapes.prompts(-(-number // group), args.prompt) for _ in range(group)
    ][:number]
    pairs = [
        (prompt, shapes.completion_of(args.length - args.prompt, place))
        for place, prompt in enumerate(asked)
    ]
    advantages = [1.0 if place % 2 else -1.0 for place in range(len(pairs))]

    def run() -> None:
        for batch in policy.micro_batches(pairs):
            scores = policy.score(batch, 1.0)
            sampled = batch.pad([completion.logprobs for _, completion in pairs])
            loss = policy_loss(
                scores.logprobs, sampled, batch.pick(advantages), batch.mask, 0.2, 0.2
            )
            (loss - 1e-5 * token_mean(scores.entropies, batch.mask)).backward()
        own.zero_grad(set_to_none=True)

    return run


def plain(model: Any, args: argparse.Namespace) -> Callable[[], None]:
    own = copy.deepcopy(model)
    ids = torch.randint(
        1000, 150000, (args.tokens // args.length, args.length), device=model.device
    )

    def run() -> None:
        for _ in range(args.micro_batches):
            with torch.autocast(model.device.type, torch.bfloat16):
                logits = own(input_ids=ids, use_cache=False).logits
            logprobs = logits.float().log_softmax(-1)[:, args.prompt - 1 : -1]
            logprobs.gather(2, ids[:, args.prompt :, None]).mean().neg().backward()
        own.zero_grad(set_to_none=True)

    return run


PEERS: dict[str, Callable[..., Any]] = {
    "eepo": ours,
    "eepo, compiled": partial(ours, compiled=True),
    "eepo, compiled, groups of 8": partial(ours, compiled=True, group=8),
    "eepo, checkpointing": partial(ours, checkpointing=True),
    "eepo, compiled, checkpointing": partial(ours, compiled=True, checkpointing=True),
    "plain": plain,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=shapes.SHAPES, default="0.5B")
    parser.add_argument("--tokens", type=int, default=10240, help="in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="whose gradients make a step")
    parser.add_argument("--length", type=int, default=640, help="of a row")
    parser.add_argument(
        "--prompt", type=int, default=128, help="of these: tokens that are not trained on"
    )
    parser.add_argument(
        "--head", type=int, default=4096, help="positions whose logits exist at a time"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", default=";".join(PEERS), help="semicolon between them")
    args = parser.parse_args()
    if args.tokens % args.length:
        parser.error(f"--tokens = {args.tokens} must be a multiple of --length = {args.length}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = shapes.new_model(args.shape, torch.float32, device)
    work_of_token = 6 * shapes.num_parameters(model)
    matrix = shapes.matrix_rate(device)
    rows = []
    for name in args.peers.split(";"):
        work = PEERS[name](model, args)
        if work is None:
            continue
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds = shapes.median_seconds(work, args.repeats, device, warm=3)
        rate = args.micro_batches * args.tokens / seconds
        used = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")
        own = used - before / 1e9 if device.type == "cuda" else float("nan")
        rows.append(
            [
                name,
                f"{rate:,.0f}",
                f"{100 * rate * work_of_token / matrix:.0f} %",
                f"{used:.1f}",
                f"{own:.1f}",
            ]
        )
        print(rows[-1], flush=True)
        del work
    print(f"\n{args.shape}, {args.micro_batches} x {args.tokens} tokens in rows of {args.length}, "
          f"median of {args.repeats}, "
          f"matrix rate {matrix / 1e12:.0f} TFLOP/s")  # fmt: skip
    print(
        shapes.table(
            [
                "what",
                "tokens/s",
                "share of the matrix rate",
                "GB at the peak",
                "GB over the weights",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
