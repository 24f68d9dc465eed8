"""Measures LoRA: peak memory against the estimate, also on a part of the GPU, and seconds per step.

    python benchmarks/lora.py --table
    python benchmarks/lora.py
    python benchmarks/lora.py --cases "1.5B full compiled;1.5B merged compiled;8B shared 24"

`--table` needs no GPU: it prints the estimate for four models on four GPUs. A case is a shape, then
`full` (all weights are trained), `merged` (LoRA, the engine has a merged copy) or `shared` (LoRA,
the engine shares the base). Further words: a number of GiB that the process may use, `compiled`,
`eepo` (two stages; otherwise GRPO). `trl` is TRL's GRPOTrainer with PEFT, if TRL is installed. All
cases have random weights and a KL to the reference. Ours have gradient checkpointing, TRL has none,
which makes it faster.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import shapes
import step
import torch
from transformers import AutoModelForCausalLM

from eepo.algorithm import EEPO
from eepo.algorithm.metrics import StepMetrics
from eepo.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainingConfig
from eepo.model import lora, memory, out_of_memory
from eepo.model.compilation import compile_layers
from eepo.model.lora_policy import LoraPolicy
from eepo.model.optimizers import build_optimizer
from eepo.model.policy import Policy
from eepo.model.step_backup import StepBackup
from eepo.rollout.fused_linear import compile_fused
from eepo.types import Sampling

GROUP = step.GROUP
MODELS = ("1.5B", "3B", "8B", "14B")
GPUS = {"24 GB": 24, "48 GB": 48, "80 GB": 79, "141 GB": 139}  # in GiB
USABLE = 0.9  # share of a GPU in the table: the rest is for the driver and for fragmentation
DEFAULT_CASES = (
    "1.5B full compiled",
    "1.5B merged compiled",
    "1.5B shared compiled",
    "1.5B merged eepo 24",
    "8B merged eepo 48",
    "8B shared eepo 24",
    "1.5B trl",
)


@dataclass(frozen=True)
class Case:
    shape: str
    mode: str  # full, merged, shared or trl
    gigabytes: int | None = None
    compiled: bool = False
    eepo: bool = False

    @classmethod
    def parse(cls, text: str) -> Case:
        shape, mode, *words = text.split()
        if shape not in shapes.SHAPES or mode not in ("full", "merged", "shared", "trl"):
            raise SystemExit(f"--cases: {text!r} must be a shape, then full, merged, shared or trl")
        numbers = [int(word) for word in words if word.isdigit()]
        return cls(shape, mode, *numbers[:1], compiled="compiled" in words, eepo="eepo" in words)

    @property
    def name(self) -> str:
        limit = f", {self.gigabytes} GB" if self.gigabytes else ""
        method = "EEPO" if self.eepo else "GRPO"
        return f"{self.shape} {self.mode}, {method}{', compiled' * self.compiled}{limit}"

    def recipe(self, args: argparse.Namespace) -> RunConfig:
        """Return the knobs of the run that this case stands for."""
        return RunConfig(
            model=ModelConfig(
                gradient_checkpointing=True, compile="on" if self.compiled else "off",
                micro_batch_tokens=args.tokens, head_tokens=args.head,
                lora_rank=0 if self.mode == "full" else args.rank,
            ),
            algorithm=AlgorithmConfig(
                group_size=GROUP, num_stages=1 + self.eepo, max_new_tokens=args.new, gate="always",
                unlearn_lr=1e-6, kl_coef=1e-4,
            ),
            training=TrainingConfig(
                prompts_per_step=args.prompts, prompts_per_mini_batch=args.prompts // 2
            ),
            rollout=RolloutConfig(max_rows=args.rows, merge_lora=self.mode != "shared"),
        )  # fmt: skip


class PeakMetrics(StepMetrics):
    """Also records the peak of allocated memory in every phase, in bytes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with super().phase(name):
            yield
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        self.peaks[name] = max(peak, self.peaks.get(name, 0))


def shape_of(name: str, config: ModelConfig) -> memory.Shape:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.config(name))
    shape = memory.shape_of(model.config, shapes.num_parameters(model))
    return lora.add_sizes(shape, model, config) if config.lora_rank else shape


def build(
    case: Case, config: RunConfig, args: argparse.Namespace, device: torch.device
) -> tuple[EEPO, list[Any]]:
    """Build the algorithm of a case as `eepo train` does, with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    is_lora = bool(config.model.lora_rank)
    model = shapes.new_model(case.shape, dtype if is_lora else torch.float32, device)
    if case.mode == "shared":
        lora.add_adapter(model, config.model, seed=0)
    shared = lora.shared_weights(model, config.model, config.rollout, dtype)
    rollout_model = copy.deepcopy(model, {id(weight): weight for weight in shared})
    for weight in rollout_model.parameters():
        weight.data = weight.data.to(dtype)
    prompts = shapes.prompts(args.prompts, args.prompt)
    lengths = {(prompt.id, sample): args.new for prompt in prompts for sample in range(GROUP)}
    engine = shapes.FixedLengthEngine(rollout_model, args.rows, lengths)
    engine.keep_bytes = 0  # the cache is freed after sampling: the estimate does not count it
    if problem := engine.unsupported_reason():
        raise SystemExit(f"the paged engine cannot be used here: {problem}")
    sizes = config.model.micro_batch_tokens, config.model.head_tokens
    reference: Policy | None = None
    if not is_lora:
        frozen = copy.deepcopy(model).requires_grad_(False)
        reference = Policy(frozen, *sizes, matrix_dtype=dtype if dtype.itemsize == 2 else None)
    elif case.mode == "merged":
        lora.add_adapter(model, config.model, seed=0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if is_lora:
        policy: Policy = LoraPolicy(model, *sizes, dtype, merges=case.mode == "merged")
    else:
        policy = Policy(model, *sizes)
    if isinstance(policy, LoraPolicy):
        reference = policy.reference()
    if case.compiled:
        compile_layers(model)
        compile_fused(rollout_model)
        if not is_lora and reference is not None:
            compile_layers(reference.model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    algorithm = EEPO(
        policy=policy, reference=reference, engine=engine, reward=step.Drawn(),
        optimizer=build_optimizer("adamw", trained, 1e-7, 0.01, 0), options=config.algorithm,
        mini_batch=args.prompts // 2, max_grad_norm=1.0,
    )  # fmt: skip
    return algorithm, prompts


def measure(case: Case, args: argparse.Namespace, device: torch.device) -> list[str]:
    """Run a case and return its row of the table."""
    config = case.recipe(args)
    shape, on_gpu = shape_of(case.shape, config.model), device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    estimate = memory.Budget(shape, config, args.prompt, dtype, on_gpu, 0).estimate()
    expected = estimate.persistent_total + estimate.phases["update"]
    with out_of_memory.caught() as failures:
        algorithm, prompts = build(case, config, args, device)
        backup = StepBackup(algorithm.optimizer, "adamw", print)
        seconds, peaks = [], dict[str, int]()
        # One step is enough for the peak of a case with a limit; its time includes the warm-up.
        warm, repeats = (0, 1) if case.gigabytes else (args.warm, args.repeats)
        for turn in range(warm + repeats):
            metrics = PeakMetrics(device)
            backup.take()
            algorithm.step(prompts, Sampling(1.0, args.new, stream=str(turn)), metrics)
            shapes.synchronize(device)
            peaks = {name: max(p, peaks.get(name, 0)) for name, p in metrics.peaks.items()}
            row = metrics.result()
            print(f"  step {turn}: {row['seconds/total']:.2f} s", flush=True)
            seconds += [row] * (turn >= warm)
    if failures:
        return [case.name, failures[0], *[""] * 6]
    update = max(peaks.get(name, 0) for name in ("update", "unlearn", "reference"))
    error = f"{100 * (expected / update - 1):+.0f} %" if update else ""
    parts = [
        statistics.median(
            sum(row.get(f"seconds/{phase}", 0.0) for phase in phases) for row in seconds
        )
        for phases in (("total",), ("stage1", "stage2"), ("unlearn", "reference", "update"))
    ]
    times = [f"{part:.2f}" for part in parts]
    return [case.name, *times, f"{expected / 1e9:.1f}", f"{update / 1e9:.1f}", error,
            f"{max(peaks.values(), default=0) / 1e9:.1f}"]  # fmt: skip


def trl_row(case: Case, args: argparse.Namespace, device: torch.device) -> list[str]:
    """Time TRL's GRPOTrainer with the same adapter, batch and lengths."""
    if importlib.util.find_spec("trl") is None:
        return [case.name, "TRL is not installed", *[""] * 6]
    from peft import LoraConfig

    names = lora.target_names(shapes.new_model("tiny", torch.float32, device), ModelConfig())
    adapter = LoraConfig(r=args.rank, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")
    settings = argparse.Namespace(**(vars(args) | {"shape": case.shape, "trl_rows": args.trl_rows}))
    rows = step.trl(settings, device, peft_config=adapter)
    seconds = statistics.median(row["seconds/total"] for row in rows)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return [case.name, f"{seconds:.2f}", "", "", "", "", "", f"{peak:.1f}"]


@contextmanager
def limited(gigabytes: int | None, device: torch.device) -> Iterator[None]:
    """Let torch allocate at most so many GiB, and size the KV cache accordingly."""
    if gigabytes is None or device.type != "cuda":
        yield
        return
    share = min(1.0, gigabytes * 2**30 / torch.cuda.get_device_properties(device).total_memory)
    torch.cuda.set_per_process_memory_fraction(share, device)
    os.environ["EEPO_GPU_SHARE"] = str(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        del os.environ["EEPO_GPU_SHARE"]


def run_case(case: Case, args: argparse.Namespace) -> list[str]:
    """Return a case's row of the table."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    print(case.name, flush=True)
    with limited(case.gigabytes, device):
        row = (trl_row if case.mode == "trl" else measure)(case, args, device)
    print(f"  {row[1:]}", flush=True)
    return row


def memory_table(args: argparse.Namespace) -> str:
    """Return which models can be trained on which GPU, from the estimate."""
    rows = []
    for name in MODELS:
        for mode in ("full", "merged", "shared"):
            config = Case(name, mode, compiled=True).recipe(args)
            config = replace(config, training=TrainingConfig())  # the paper's 128 prompts
            shape = shape_of(name, config.model)
            cells = [_fit(shape, config, args.prompt, size) for size in GPUS.values()]
            label = {"full": "all weights", "merged": "LoRA", "shared": "LoRA, shared base"}[mode]
            total = memory.Budget(shape, config, args.prompt, torch.bfloat16, True, 0).estimate()
            rows.append([name, label, f"{total.total / 1e9:.0f} GB", *cells])
    return shapes.table(["model", "", "estimate", *GPUS], rows)


def _fit(shape: memory.Shape, config: RunConfig, prompt_tokens: int, gibibytes: int) -> str:
    """Return whether a run fits, and with which changes: "–" if it does not."""
    free = int(USABLE * gibibytes * 2**30)
    budget = memory.Budget(shape, config, prompt_tokens, torch.bfloat16, True, free)
    knobs = budget.memory_saving_knobs()
    if knobs is not None and "rollout.merge_lora" not in knobs:  # shared is a row of its own
        tokens = knobs.get("model.micro_batch_tokens")
        left = free - budget.estimate().persistent_total
        return f"yes, {tokens} tokens" if tokens else f"yes, {left / 1e9:.0f} GB left"
    choice = budget.smaller_optimizer() if not config.model.lora_rank else None
    return choice[0] if choice else "–"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the estimates, and stop")
    parser.add_argument("--cases", default=";".join(DEFAULT_CASES), help="semicolon between them")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rows", type=int, default=128, help="sampled at a time")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=8192, help="in a micro-batch")
    parser.add_argument("--head", type=int, default=2048)
    parser.add_argument("--trl-rows", type=int, default=16, help="in a micro-batch of TRL's")
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    if args.table:
        args.new, args.prompt, args.rows = 4096, 1024, 512  # the paper's
        print(memory_table(args))
        return
    table = []
    for case in [Case.parse(text) for text in args.cases.split(";")]:
        # A process of its own: memory that a failed case keeps would count for the next one.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            table.append(process.submit(run_case, case, args).result())
    print(
        f"\n{args.prompts} x {GROUP} completions, {args.prompt} + {args.new} tokens, rank "
        f"{args.rank}, median of {args.repeats}, seconds and GB"
    )
    head = ["", "step", "sampling", "training", "estimate", "measured", "error", "peak of all"]
    print(shapes.table(head, table))


if __name__ == "__main__":
    main()
