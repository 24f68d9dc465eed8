"""Tokens per second of the built-in engine and its peers, with the same model, prompts and lengths.

    python benchmarks/rollout.py --shape 0.5B --cases fixed:1024:256,longtail:1024:2048
    python benchmarks/rollout.py --shape 3B --cases fixed:1024:256

A case is kind:completions:max_new_tokens[:repeats]. At most `--rows` completions run at a time.
Lengths are forced, since random weights never end: `generate` gets a stopping criterion per row,
vLLM a limit per request. All engines sample at temperature 1. All but `generate` return the
log-probability of each token. The roofline is a lower bound of the time: matrix products at the
measured matrix rate, then KV cache, weights and logits at the measured copy rate.
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

from eepo.rollout.fused_linear import compile_fused
from eepo.rollout.transformers import TransformersEngine
from eepo.types import Completion, Prompt, Sampling

HEADER = ["engine", "tokens/s", "ms per step", "share of the roofline", "GB", "first call, s"]


@dataclass(frozen=True)
class Case:
    """The completions to sample."""

    kind: str  # fixed | longtail
    num_completions: int
    max_new_tokens: int
    prompts: list[Prompt]
    lengths: list[int]  # of the completions
    num_samples: int  # per prompt
    repeats: int

    @classmethod
    def parse(cls, text: str, args: argparse.Namespace) -> Case:
        kind, count, max_new_tokens, *repeats = text.split(":")
        lengths = [int(max_new_tokens)] * int(count)
        if kind == "longtail":
            lengths = shapes.long_tail(int(count), args.mean, int(max_new_tokens))
        return cls(
            kind=kind,
            num_completions=int(count),
            max_new_tokens=int(max_new_tokens),
            prompts=shapes.prompts(int(count) // args.samples, args.prompt),
            lengths=lengths,
            num_samples=args.samples,
            repeats=int(repeats[0] if repeats else args.repeats),
        )

    def min_steps(self, num_rows: int) -> float:
        """Return the fewest decode steps that can sample all completions."""
        return max(max(self.lengths), sum(self.lengths) / num_rows)


Sampler = Callable[[Case], int]  # samples a case and returns the number of tokens


def paged_engine(
    model: Any, args: argparse.Namespace, cases: list[Case], compiled: bool
) -> Sampler | None:
    rollout_model = copy.deepcopy(model)
    engine = shapes.FixedLengthEngine(rollout_model, args.rows, {})
    reason = engine.unsupported_reason()
    if reason:
        sys.exit(f"the paged engine does not support this model here: {reason}")
    if compiled and not compile_fused(rollout_model):
        return None

    def run(case: Case) -> int:
        rows = [(prompt.id, s) for prompt in case.prompts for s in range(case.num_samples)]
        engine.lengths = dict(zip(rows, case.lengths, strict=True))
        sampling = Sampling(1.0, case.max_new_tokens)
        return _num_tokens(engine.generate(case.prompts, case.num_samples, sampling))

    return run


def plain_engine(model: Any, args: argparse.Namespace, cases: list[Case]) -> Sampler:
    """Use `TransformersEngine`, which cannot force lengths."""
    engine = TransformersEngine(copy.deepcopy(model), shapes.NoTokenizer(), max_rows=args.rows)
    engine.end_tokens.fill_(-1)

    def run(case: Case) -> int:
        sampling = Sampling(1.0, case.max_new_tokens)
        return _num_tokens(engine.generate(case.prompts, case.num_samples, sampling))

    return run


def _num_tokens(groups: list[list[Completion]]) -> int:
    return sum(len(completion.token_ids) for group in groups for completion in group)


def generate(model: Any, args: argparse.Namespace, cases: list[Case]) -> Sampler:
    """Use `generate` of `transformers`, in batches of `--rows`."""

    def run(case: Case) -> int:
        ids = torch.tensor(
            [p.token_ids for p in case.prompts for _ in range(case.num_samples)],
            device=model.device,
        )
        all_limits = torch.tensor(case.lengths, device=model.device)
        for start in range(0, len(ids), args.rows):
            batch = ids[start : start + args.rows]
            limits = all_limits[start : start + args.rows]
            stop = [lambda tokens, _, n=limits, **__: tokens.shape[1] - args.prompt >= n]
            model.generate(
                batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, max_new_tokens=int(limits.max()), eos_token_id=None,
                pad_token_id=0, stopping_criteria=stop if case.kind != "fixed" else None,
            )  # fmt: skip
        return sum(case.lengths)

    return run


def vllm(model: Any, args: argparse.Namespace, cases: list[Case]) -> Sampler:
    """Use vLLM in this process, with CUDA graphs and log-probabilities."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    from vllm import LLM, SamplingParams, TokensPrompt

    folder = tempfile.mkdtemp()
    model.config.save_pretrained(folder)
    longest = args.prompt + max(case.max_new_tokens for case in cases)
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        max_num_seqs=args.rows, max_model_len=longest + 8, disable_log_stats=True,
        gpu_memory_utilization=args.vllm_memory, logprobs_mode="processed_logprobs",
    )  # fmt: skip

    def run(case: Case) -> int:
        engine.reset_prefix_cache()  # as after every load of weights
        requests = [
            TokensPrompt(prompt_token_ids=list(p.token_ids))
            for p in case.prompts
            for _ in range(case.num_samples)
        ]
        options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        params = [SamplingParams(max_tokens=length, **options) for length in case.lengths]
        outputs = engine.generate(requests, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


PEERS: dict[str, Callable[..., Sampler | None]] = {
    "eepo": partial(paged_engine, compiled=False),
    "eepo, compiled": partial(paged_engine, compiled=True),
    "eepo, plain": plain_engine,
    "generate": generate,
    "vllm": vllm,
}


@dataclass(frozen=True)
class Rates:
    """Measured rates of the device."""

    matrix: float  # FLOP/s
    copy: float  # bytes/s


def roofline_seconds(model: Any, args: argparse.Namespace, case: Case, rates: Rates) -> float:
    """Return a lower bound for all decode steps: each step reads the weights once."""
    num_parameters, config = shapes.num_parameters(model), model.config
    head_dim = config.hidden_size // config.num_attention_heads
    # Bytes of keys and values per token, in bf16.
    cache_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    num_tokens = sum(case.lengths)
    num_attended = sum(n * args.prompt + n * (n + 1) // 2 for n in case.lengths)
    logits_bytes = num_tokens * config.vocab_size * 8  # fp32, written and read
    weights_bytes = case.min_steps(args.rows) * 2 * num_parameters
    moved = num_attended * cache_bytes + weights_bytes + logits_bytes
    return num_tokens * 2 * num_parameters / rates.matrix + moved / rates.copy


def measure(
    sampler: Sampler, case: Case, args: argparse.Namespace, roofline: float, device: torch.device
) -> list[str]:
    """Run a case and return the columns of `HEADER` after the name."""
    started = time.perf_counter()
    num_tokens = sampler(case)
    shapes.synchronize(device)
    first = time.perf_counter() - started
    seconds = shapes.median_seconds(lambda: sampler(case), case.repeats, device, warm=0)
    memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device.type == "cuda" else ""
    return [
        f"{num_tokens / seconds:,.0f}",
        f"{1000 * seconds / case.min_steps(args.rows):.2f}",
        f"{100 * roofline / seconds:.0f} %",
        memory,
        f"{first:.1f}",
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=shapes.SHAPES, default="0.5B")
    add("--cases", default="fixed:1024:256", help="see above, comma-separated")
    add("--rows", type=int, default=1024, help="completions that run at a time")
    add("--samples", type=int, default=8, help="completions per prompt")
    add("--prompt", type=int, default=128, help="tokens per prompt")
    add("--mean", type=float, default=208, help="mean of long-tailed lengths")
    add("--repeats", type=int, default=3)
    add("--peers", default="eepo;eepo, compiled;generate;vllm", help="semicolon-separated")
    add("--only-fixed", default="eepo, plain", help="peers to skip in cases other than fixed")
    add("--vllm-memory", type=float, default=0.5, help="share of the GPU's memory for vLLM")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [Case.parse(text, args) for text in args.cases.split(",")]
    model = shapes.new_model(args.shape, torch.bfloat16, device)
    rates = Rates(shapes.matrix_rate(device), shapes.copy_rate(device))
    rooflines = [roofline_seconds(model, args, case, rates) for case in cases]
    tables: list[list[list[str]]] = [[] for _ in cases]
    for name in args.peers.split(";"):
        started = time.perf_counter()
        try:
            sampler = PEERS[name](model, args, cases)
        except ImportError as error:
            print(f"{name} is skipped, since it is not installed: {error}", flush=True)
            continue
        print(f"{name}: built in {time.perf_counter() - started:.1f} s", flush=True)
        for case, roofline, table in zip(cases, rooflines, tables, strict=True):
            skipped = name in args.only_fixed.split(";") and case.kind != "fixed"
            if sampler is None or skipped:
                continue
            row = [name, *measure(sampler, case, args, roofline, device)]
            table.append(row)
            title = f"{case.kind} {case.num_completions} x {case.max_new_tokens}"
            print(f"{title}: {' | '.join(row)}", flush=True)
        del sampler
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    for case, roofline, table in zip(cases, rooflines, tables, strict=True):
        _print_table(case, table, args, roofline)


def _print_table(
    case: Case, rows: list[list[str]], args: argparse.Namespace, roofline: float
) -> None:
    mean_length = sum(case.lengths) / case.num_completions
    print(
        f"\n{args.shape}, {case.num_completions} completions over {args.rows} rows, "
        f"{args.prompt} + {mean_length:.0f} tokens ({case.kind}, at most {max(case.lengths)}), "
        f"median of {case.repeats}, "
        f"roofline {1000 * roofline / case.min_steps(args.rows):.2f} ms per step"
    )
    print(shapes.table(HEADER, rows))
    rates = {row[0]: float(row[1].replace(",", "")) for row in rows}
    best = max((rate for name, rate in rates.items() if name.startswith("eepo")), default=0.0)
    for name, rate in rates.items():
        if not name.startswith("eepo"):
            print(f"eepo is {best / rate:.1f} times {name}")


if __name__ == "__main__":
    main()
