"""Tokens a second of our engines and their peers, on one model, the same prompts and the same lengths, in one run.

    python benchmarks/rollout.py --shape 0.5B --cases fixed:1024:256,longtail:1024:2048,longtail:4096:2048
    python benchmarks/rollout.py --shape 3B --cases fixed:1024:256

A case is lengths, completions, the most new tokens and, if not `--repeats`, how often it is repeated; at most `--rows`
completions are live at a time. Lengths are forced: random weights never end. `generate` gets a stop for each row, vLLM
its own limit for each request. All of them sample at temperature 1 and, but for `generate`, return the log-probability
of each token. The floor counts matrix work at the measured matrix rate and cache, weights and logits at the measured
copy rate, one after the other.
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
from dataclasses import dataclass
from functools import partial
from typing import Any

import shapes
import torch

from eepo.rollout.fused_linear import compile_packed
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Prompt, Sampling


@dataclass(frozen=True)
class Case:
    """What is to be sampled."""

    kind: str  # fixed | longtail
    count: int
    new: int
    prompts: list[Prompt]
    lengths: list[int]
    samples: int  # of each prompt
    repeats: int

    @classmethod
    def of(cls, text: str, args: argparse.Namespace) -> Case:
        kind, count, new, *repeats = text.split(":")
        lengths = [int(new)] * int(count)
        if kind == "longtail":
            lengths = shapes.long_tail(int(count), args.mean, int(new))
        prompts = shapes.prompts(int(count) // args.samples, args.prompt)
        return cls(
            kind,
            int(count),
            int(new),
            prompts,
            lengths,
            args.samples,
            int(repeats[0] if repeats else args.repeats),
        )

    def steps(self, rows: int) -> float:
        """The fewest that are needed."""
        return max(max(self.lengths), sum(self.lengths) / rows)


Sampler = Callable[[Case], int]  # does it, and returns how many tokens there were


def ours(model: Any, args: argparse.Namespace, cases: list[Case], compiled: bool) -> Sampler | None:
    own = copy.deepcopy(model)
    engine = shapes.Forced(own, args.rows, {})
    problem = engine.unusable()
    if problem:
        sys.exit(f"the paged engine cannot be used here: {problem}")
    if compiled and not compile_packed(own):
        return None

    def run(case: Case) -> int:
        rows = (
            (case.prompts[place // case.samples].id, place % case.samples)
            for place in range(case.count)
        )
        engine.lengths = dict(zip(rows, case.lengths, strict=True))
        groups = engine.generate(case.prompts, case.samples, Sampling(1.0, case.new))
        return sum(len(one.token_ids) for group in groups for one in group)

    return run


def plain(model: Any, args: argparse.Namespace, cases: list[Case]) -> Sampler:
    """The engine that runs everywhere; it knows no forced lengths."""
    engine = TransformersEngine(copy.deepcopy(model), shapes.NoTokenizer(), max_rows=args.rows)
    engine._eos.fill_(-1)

    def run(case: Case) -> int:
        groups = engine.generate(case.prompts, case.samples, Sampling(1.0, case.new))
        return sum(len(one.token_ids) for group in groups for one in group)

    return run


def generate(model: Any, args: argparse.Namespace, cases: list[Case]) -> Sampler:
    """`transformers`' own, batch after batch of `rows`."""

    def run(case: Case) -> int:
        ids = torch.tensor(
            [p.token_ids for p in case.prompts for _ in range(case.samples)], device=model.device
        )
        limits = torch.tensor(case.lengths, device=model.device)
        for start in range(0, len(ids), args.rows):
            some, own = ids[start : start + args.rows], limits[start : start + args.rows]
            stop = [lambda tokens, _scores, own=own, **_: tokens.shape[1] - args.prompt >= own]
            model.generate(
                some, attention_mask=torch.ones_like(some), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=int(own.max()), eos_token_id=None, pad_token_id=0,
                stopping_criteria=stop if case.kind != "fixed" else None,
            )  # fmt: skip
        return sum(case.lengths)

    return run


def vllm(model: Any, args: argparse.Namespace, cases: list[Case]) -> Sampler:
    """In process, its graphs on, with log-probabilities at the sampling temperature."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    from vllm import LLM, SamplingParams, TokensPrompt

    folder = tempfile.mkdtemp()
    model.config.save_pretrained(folder)
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=args.rows,
        max_model_len=args.prompt + max(case.new for case in cases) + 8, gpu_memory_utilization=args.vllm_memory,
        logprobs_mode="processed_logprobs", disable_log_stats=True,
    )  # fmt: skip

    def run(case: Case) -> int:
        engine.reset_prefix_cache()  # as after every push of weights
        asked = [
            TokensPrompt(prompt_token_ids=list(p.token_ids))
            for p in case.prompts
            for _ in range(case.samples)
        ]
        options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        params = [SamplingParams(max_tokens=length, **options) for length in case.lengths]
        return sum(
            len(one.outputs[0].token_ids) for one in engine.generate(asked, params, use_tqdm=False)
        )

    return run


PEERS: dict[str, Callable[..., Sampler | None]] = {
    "eepo": partial(ours, compiled=False),
    "eepo, compiled": partial(ours, compiled=True),
    "eepo, plain": plain,
    "generate": generate,
    "vllm": vllm,
}


def floor_seconds(
    model: Any, args: argparse.Namespace, case: Case, matrix: float, copies: float
) -> float:
    """Of all decode steps, if every live row cost its matrix work and bytes, and the weights were read once a step."""
    parameters, shape = shapes.num_parameters(model), model.config
    head = shape.hidden_size // shape.num_attention_heads
    cached = (
        4 * shape.num_hidden_layers * shape.num_key_value_heads * head
    )  # bytes a token, in bf16
    tokens = sum(case.lengths)
    looked_back = sum(n * args.prompt + n * (n + 1) // 2 for n in case.lengths)
    logits = tokens * shape.vocab_size * 8  # fp32, written and read
    moved = looked_back * cached + case.steps(args.rows) * 2 * parameters + logits
    return tokens * 2 * parameters / matrix + moved / copies


def measure(
    sampler: Sampler, case: Case, args: argparse.Namespace, floor: float, device: torch.device
) -> list[str]:
    """Tokens a second, ms a step, share of the floor, GB."""
    started = time.perf_counter()
    tokens = sampler(case)
    shapes.wait(device)
    first = time.perf_counter() - started
    seconds = shapes.median_seconds(lambda: sampler(case), case.repeats, device, warm=0)
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device.type == "cuda" else ""
    per_step = 1000 * seconds / case.steps(args.rows)
    return [
        f"{tokens / seconds:,.0f}",
        f"{per_step:.2f}",
        f"{100 * floor / seconds:.0f} %",
        memory,
        f"{first:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=shapes.SHAPES, default="0.5B")
    parser.add_argument("--cases", default="fixed:1024:256", help="as above, commas between")
    parser.add_argument("--rows", type=int, default=1024, help="live at a time")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--mean", type=float, default=208, help="of long-tailed lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peers", default="eepo;eepo, compiled;generate;vllm", help="semicolons between them"
    )
    parser.add_argument(
        "--only-fixed", default="eepo, plain", help="peers that are left out of other cases"
    )
    parser.add_argument("--vllm-memory", type=float, default=0.5)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [Case.of(text, args) for text in args.cases.split(",")]
    model = shapes.new_model(args.shape, torch.bfloat16, device)
    rates = shapes.matrix_rate(device), shapes.copy_rate(device)
    tables: dict[int, list[list[str]]] = {}
    for name in args.peers.split(";"):
        started = time.perf_counter()
        try:
            sampler = PEERS[name](model, args, cases)
        except ImportError as error:
            print(f"{name} is left out, as it is not installed: {error}", flush=True)
            continue
        print(f"{name}: made in {time.perf_counter() - started:.1f} s", flush=True)
        for number, case in enumerate(cases if sampler is not None else []):
            if name in args.only_fixed.split(";") and case.kind != "fixed":
                continue
            floor = floor_seconds(model, args, case, *rates)
            row = [name, *measure(sampler, case, args, floor, device)]  # type: ignore[arg-type]
            tables.setdefault(number, []).append(row)
            print(f"{case.kind} {case.count} x {case.new}: {' | '.join(row)}", flush=True)
        del sampler
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    for number, case in enumerate(cases):
        _print_table(case, tables.get(number, []), args, floor_seconds(model, args, case, *rates))


def _print_table(case: Case, rows: list[list[str]], args: argparse.Namespace, floor: float) -> None:
    print(f"\n{args.shape}, {case.count} completions over {args.rows} rows, {args.prompt} + "
          f"{sum(case.lengths) / case.count:.0f} tokens ({case.kind}, at most {max(case.lengths)}), median of "
          f"{case.repeats}, floor {1000 * floor / case.steps(args.rows):.2f} ms")  # fmt: skip
    print(
        shapes.table(
            ["engine", "tokens/s", "ms a step", "share of the floor", "GB", "first call, s"], rows
        )
    )
    rates = {row[0]: float(row[1].replace(",", "")) for row in rows}
    best = max((rate for name, rate in rates.items() if name.startswith("eepo")), default=0.0)
    for name, rate in rates.items():
        if not name.startswith("eepo"):
            print(f"ours is {best / rate:.1f} times {name}")


if __name__ == "__main__":
    main()
