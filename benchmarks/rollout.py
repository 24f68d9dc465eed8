"""Tokens a second of our engines and their peers, on one model, the same prompts and the same lengths, in one run.

    python benchmarks/rollout.py --shape 0.5B --rows 1024 --new 256
    python benchmarks/rollout.py --shape 0.5B --completions 4096 --lengths longtail --mean 208 --new 2048

Lengths are forced: random weights never end. `generate` gets a stop for each row, vLLM its own limit for each request.
All of them sample at temperature 1 and, but for `generate`, return the log-probability of each token. The floor counts
matrix work at the measured matrix rate and cache, weights and logits at the measured copy rate, one after the other.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import shapes
import torch

from eepo.compiled import compile_layers
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Prompt, Sampling


def ours(model: Any, args: argparse.Namespace, prompts: list[Prompt], lengths: list[int], compiled: bool) -> Any:
    own = copy.deepcopy(model)
    by_row = {(prompts[place // args.samples].id, place % args.samples): n for place, n in enumerate(lengths)}
    engine = shapes.Forced(own, args.rows, by_row)
    problem = engine.unusable()
    if problem:
        sys.exit(f"the paged engine cannot be used here: {problem}")
    if compiled and not compile_layers(own):
        return None
    sampling = Sampling(1.0, args.new)
    return lambda: sum(
        len(one.token_ids) for group in engine.generate(prompts, args.samples, sampling) for one in group
    )


def plain(model: Any, args: argparse.Namespace, prompts: list[Prompt], lengths: list[int]) -> Any:
    """The engine that runs everywhere; it knows no forced lengths."""
    if args.lengths != "fixed":
        return None
    engine = TransformersEngine(copy.deepcopy(model), shapes.NoTokenizer(), max_rows=args.rows)
    engine._eos.fill_(-1)
    sampling = Sampling(1.0, args.new)
    return lambda: sum(
        len(one.token_ids) for group in engine.generate(prompts, args.samples, sampling) for one in group
    )


def generate(model: Any, args: argparse.Namespace, prompts: list[Prompt], lengths: list[int]) -> Any:
    """`transformers`' own, batch after batch of `rows`."""
    ids = torch.tensor([prompt.token_ids for prompt in prompts for _ in range(args.samples)], device=model.device)
    limits = torch.tensor(lengths, device=model.device)

    def run() -> int:
        for start in range(0, len(ids), args.rows):
            own = limits[start : start + args.rows]
            stop = [lambda tokens, _scores, own=own, **_: tokens.shape[1] - args.prompt >= own]
            model.generate(
                ids[start : start + args.rows], attention_mask=torch.ones_like(ids[start : start + args.rows]),
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=int(own.max()), eos_token_id=None,
                pad_token_id=0, stopping_criteria=stop if args.lengths != "fixed" else None,
            )  # fmt: skip
        return sum(lengths)

    return run


def vllm(model: Any, args: argparse.Namespace, prompts: list[Prompt], lengths: list[int]) -> Any:
    """In process, eager off, with log-probabilities at the sampling temperature."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    from vllm import LLM, SamplingParams, TokensPrompt

    folder = tempfile.mkdtemp()
    model.config.save_pretrained(folder)
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=args.rows,
        max_model_len=args.prompt + args.new + 8, gpu_memory_utilization=args.vllm_memory,
        logprobs_mode="processed_logprobs", disable_log_stats=True,
    )  # fmt: skip
    asked = [TokensPrompt(prompt_token_ids=list(p.token_ids)) for p in prompts for _ in range(args.samples)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for n in lengths
    ]

    def run() -> int:
        engine.reset_prefix_cache()  # as after every push of weights
        return sum(len(one.outputs[0].token_ids) for one in engine.generate(asked, params, use_tqdm=False))

    return run


PEERS: dict[str, Callable[..., Any]] = {
    "eepo": lambda *given: ours(*given, compiled=False),
    "eepo, compiled": lambda *given: ours(*given, compiled=True),
    "eepo, plain": plain,
    "generate": generate,
    "vllm": vllm,
}


def floor_seconds(model: Any, args: argparse.Namespace, lengths: list[int], matrix: float, copies: float) -> float:
    """Of all decode steps, if every live row cost its matrix work and bytes, and the weights were read once a step."""
    parameters, shape = shapes.num_parameters(model), model.config
    head = shape.hidden_size // shape.num_attention_heads
    cached = 4 * shape.num_hidden_layers * shape.num_key_value_heads * head  # bytes a token, in bf16
    tokens = sum(lengths)
    looked_back = sum(n * args.prompt + n * (n + 1) // 2 for n in lengths)
    steps = max(max(lengths), tokens / args.rows)
    moved = looked_back * cached + steps * 2 * parameters + tokens * shape.vocab_size * 8  # fp32, written and read
    return tokens * 2 * parameters / matrix + moved / copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, default=1024, help="live at a time")
    parser.add_argument("--completions", type=int, help="in all; as many as rows unless given")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens, at most")
    parser.add_argument("--lengths", choices=("fixed", "longtail"), default="fixed")
    parser.add_argument("--mean", type=float, default=208)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default="eepo,eepo+compiled,generate,vllm", help="comma between them")
    parser.add_argument("--vllm-memory", type=float, default=0.5)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = args.completions or args.rows
    prompts = shapes.prompts(count // args.samples, args.prompt)
    lengths = [args.new] * count if args.lengths == "fixed" else shapes.long_tail(count, args.mean, args.new)
    model = shapes.new_model(args.shape, torch.bfloat16, device)
    floor = floor_seconds(model, args, lengths, shapes.matrix_rate(device), shapes.copy_rate(device))
    steps = max(max(lengths), sum(lengths) / args.rows)
    rows: list[list[str]] = []
    rates: dict[str, float] = {}
    for name in _names(args.peers):
        started = time.perf_counter()
        try:
            work = PEERS[name](model, args, prompts, lengths)
        except ImportError as error:
            rows.append([name, f"not installed: {error}", "", "", ""])
            continue
        if work is None:
            continue
        warm = time.perf_counter()
        tokens = work()
        shapes.wait(device)
        print(f"{name}: made in {warm - started:.1f} s, first call {time.perf_counter() - warm:.1f} s", flush=True)
        seconds = shapes.median_seconds(work, args.repeats, device, warm=0)
        rates[name] = tokens / seconds
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device.type == "cuda" else ""
        share = f"{100 * floor / seconds:.0f} %"
        rows.append([name, f"{tokens / seconds:,.0f}", f"{1000 * seconds / steps:.2f}", share, memory])
        print(" | ".join(rows[-1]), flush=True)
        del work
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    mean = sum(lengths) / count
    print(f"\n{args.shape}, {count} completions over {args.rows} rows, {args.prompt} + {mean:.0f} tokens "
          f"({args.lengths}, at most {max(lengths)}), median of {args.repeats}, "
          f"floor {1000 * floor / steps:.2f} ms")  # fmt: skip
    print(shapes.table(["engine", "tokens/s", "ms a step", "share of the floor", "GB"], rows))
    best = max((rate for name, rate in rates.items() if name.startswith("eepo")), default=0.0)
    for name, rate in rates.items():
        if not name.startswith("eepo"):
            print(f"ours is {best / rate:.1f} times {name}")


def _names(text: str) -> list[str]:
    return [name.replace("+", ", ") for name in text.split(",")]


if __name__ == "__main__":
    main()
