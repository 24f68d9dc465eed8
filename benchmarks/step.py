"""Measures the seconds of a whole step by phase: GRPO, EEPO in several settings, TRL's GRPOTrainer.

    python benchmarks/step.py --shape 1.5B --lengths longtail --mean 500 --new 2048
    python benchmarks/step.py --shape 0.5B --peers "grpo;eepo;eepo 32 full auto exact;trl"

A step has 128 prompts with 8 completions each, two optimizer steps of 64 prompts, and a KL to a
reference. Every stage-1 completion is unlearned (gate "always"). Weights and rewards are random;
logits are scaled so that tokens have probabilities like those of a trained model. TRL's trainer
gets the same shape, batch and (fixed) lengths, bf16 weights and no checkpointing. It samples with
`generate`, or with vLLM in the same process ("trl, vllm"). EEPO inside it needs fp32 weights, so
there is also a TRL peer with fp32 weights.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import shapes
import torch

from eepo.algorithm import EEPO
from eepo.algorithm.metrics import StepMetrics
from eepo.config import AlgorithmConfig, ModelConfig
from eepo.model.compilation import compile_layers
from eepo.model.optimizers import build_optimizer
from eepo.model.policy import Policy
from eepo.model.step_backup import StepBackup
from eepo.rollout.fused_linear import compile_fused
from eepo.types import Prompt, Sampling, Verdict

NUM_PROMPTS, MINI_BATCH, GROUP = 128, 64, 8
PHASES = ("sync", "stage1", "unlearn", "stage2", "reward", "reference", "update")


class Drawn:
    """A reward by lot, so that advantages are not zero."""

    def __init__(self) -> None:
        self.lots = random.Random(0)

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        return [Verdict(float(self.lots.random() < 0.5), "0") for _ in texts]


def ours(
    args: argparse.Namespace, device: torch.device, host_copy: bool = True, **options: Any
) -> list[dict[str, float]]:
    """The metrics of each measured step.

    `host_copy`: before each step, copy weights and optimizer to host memory, as `eepo train` does.
    """
    prompts = shapes.prompts(args.prompts, args.prompt)
    lengths = _lengths(args)
    by_row = {(prompts[place // GROUP].id, place % GROUP): n for place, n in enumerate(lengths)}
    model = shapes.new_model(args.shape, torch.float32, device)
    shapes.sharpen(model)
    training = ModelConfig(micro_batch_tokens=args.tokens, head_tokens=args.head)
    rollout_model = copy.deepcopy(model).to(torch.bfloat16)
    engine = shapes.FixedLengthEngine(rollout_model, args.rows, by_row, training)
    frozen = copy.deepcopy(model).requires_grad_(False)
    reference = Policy(frozen, args.tokens, args.head, matrix_dtype=torch.bfloat16)
    policy = Policy(model, args.tokens, args.head)
    problem = engine.unsupported_reason()
    if problem:
        raise SystemExit(f"the paged engine cannot be used here: {problem}")
    if args.compile:
        for each in (model, reference.model):
            compile_layers(each)
        compile_fused(engine.model)
    algorithm = EEPO(
        policy=policy, reference=reference, engine=engine, reward=Drawn(),
        optimizer=build_optimizer("adamw", model.parameters(), 1e-7, 0.01, 0),
        options=AlgorithmConfig(
            **({"group_size": GROUP, "max_new_tokens": args.new, "unlearn_lr": 1e-6} | options)
        ),
        mini_batch=args.prompts // 2, max_grad_norm=1.0,
    )  # fmt: skip
    backup = StepBackup(algorithm.optimizer, "adamw", print) if host_copy else None
    rows = []
    for turn in range(args.warm + args.repeats):
        metrics = StepMetrics(device)
        if backup:
            backup.take()
        algorithm.step(prompts, Sampling(1.0, args.new, stream=str(turn)), metrics)
        shapes.synchronize(device)
        rows.append(metrics.result())
        print(f"  step {turn}: {rows[-1]['seconds/total']:.2f} s", flush=True)
    return rows[args.warm :]


class Clock:
    """Adds up the seconds that methods take. A mark keeps the sums of that moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.marks: list[dict[str, float]] = []

    def _now(self) -> float:
        shapes.synchronize(self.device)
        return time.perf_counter()

    def time(self, owner: Any, method: str, name: str) -> None:
        """Replace a method of `owner` by one that adds its seconds to the sum `name`."""
        inner = getattr(owner, method)

        def timed(*given: Any, **also: Any) -> Any:
            begin = self._now()
            result = inner(*given, **also)
            self.sums[name] += self._now() - begin
            return result

        setattr(owner, method, timed)

    def mark(self) -> None:
        self.marks.append({**self.sums, "seconds/total": self._now()})

    def differences(self, every: int) -> list[dict[str, float]]:
        """Return what was added to each sum between every so many marks."""
        return [
            {name: total - before.get(name, 0.0) for name, total in after.items()}
            for before, after in itertools.pairwise(self.marks[::every])
        ]


def trl(
    args: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    **knobs: Any,
) -> list[dict[str, float]]:
    """Time pairs of optimizer steps of TRL: a generation has two, as ours.

    "stage1" is everything that `_generate` does; for EEPO that is both stages and unlearning.
    `knobs` select EEPO, another way to sample or an adapter.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    adapter = knobs.pop("peft_config", None)
    config, trainer_class = GRPOConfig, GRPOTrainer
    if "gate" in knobs:
        from eepo.adapters.trl import EEPOConfig, EEPOTrainer

        config, trainer_class = EEPOConfig, EEPOTrainer
    lots = random.Random(0)
    model, tokenizer = _saved_model(args, device, dtype)
    clock = Clock(device)

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *given: Any, **also: Any) -> None:
            clock.mark()

    trainer = trainer_class(
        model=model, args=config(**_trl_options(args, device, "use_vllm" in knobs), **knobs),
        processing_class=tokenizer, callbacks=[EndOfStep()], peft_config=adapter,
        train_dataset=Dataset.from_dict({"prompt": _texts(args, lots)}),
        reward_funcs=lambda completions, **_: [float(lots.random() < 0.5) for _ in completions],
    )  # fmt: skip
    clock.time(trainer, "_generate", "seconds/stage1")
    clock.time(trainer, "_generate_and_score_completions", "seconds/scored")
    clock.mark()
    trainer.train()
    steps = clock.differences(every=2)  # a step has two optimizer steps
    print("  TRL's steps: " + ", ".join(f"{one['seconds/total']:.1f}" for one in steps), flush=True)
    for step in steps:
        step["seconds/reference"] = step["seconds/scored"] - step["seconds/stage1"]
        step["seconds/update"] = step["seconds/total"] - step["seconds/scored"]
    return steps[args.warm :]


def _saved_model(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Return a model and a tokenizer, also saved where TRL and vLLM look for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{place}": place for place in range(5000)} | {"<pad>": 5000, "<end>": 5001}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    model = shapes.new_model(args.shape, dtype, device)
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.name_or_path = model.config._name_or_path = folder
    return model, tokenizer


def _texts(args: argparse.Namespace, lots: random.Random) -> list[str]:
    return [
        " ".join(f"w{lots.randrange(4000)}" for _ in range(args.prompt))
        for _ in range(args.prompts)
    ]


def _trl_options(args: argparse.Namespace, device: torch.device, with_vllm: bool) -> dict[str, Any]:
    """TRL's settings for the same batch. Without an end token, completions have equal lengths."""
    rows_at_once, on_gpu = args.trl_rows, device.type == "cuda"
    mini_batch = args.prompts // 2 * GROUP
    generation = {"ignore_eos": True} if with_vllm else {"eos_token_id": None, "top_k": 0}
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": rows_at_once,
        "gradient_accumulation_steps": mini_batch // rows_at_once,
        "steps_per_generation": 2 * mini_batch // rows_at_once,
        "num_generations": GROUP, "max_completion_length": args.new, "temperature": 1.0,
        "beta": 1e-4, "bf16": on_gpu, "use_cpu": not on_gpu,
        "gradient_checkpointing": False, "learning_rate": 1e-7,
        "max_steps": 2 * (args.warm + args.repeats), "save_strategy": "no",
        "report_to": "none", "logging_steps": 1000, "disable_tqdm": True, "num_iterations": 1,
        "generation_kwargs": generation,
    }  # fmt: skip


VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
PEERS: dict[str, Any] = {
    "grpo": lambda *given: ours(*given, num_stages=1),
    "grpo, no host copy": lambda *given: ours(*given, host_copy=False, num_stages=1),
    "eepo": lambda *given: ours(*given, num_stages=2, gate="always"),
    "eepo, gate shut": lambda *given: ours(*given, num_stages=2, gate="token"),
    "trl": trl,
    "trl, fp32": lambda *given: trl(*given, torch.float32),
    "trl, vllm": lambda *given: trl(*given, **VLLM),
    "trl, vllm, eepo": lambda *given: trl(
        *given, torch.float32, gate="always", unlearn_lr=1e-6, **VLLM
    ),
    "trl, vllm, eepo full": lambda *given: trl(
        *given, torch.float32, gate="always", unlearn_lr=1e-6, credit="full", **VLLM
    ),
    "trl, eepo": lambda *given: trl(*given, torch.float32, gate="always", unlearn_lr=1e-6),
}


def peer(name: str) -> Any:
    """Return the function of a peer.

    "eepo 32 full auto exact" is EEPO with at most 32 unlearned completions, full credit, a search
    for the unlearning rate, and exact saturation; each word may be left out.
    """
    if name in PEERS:
        return PEERS[name]
    first, *words = name.split()
    meanings: dict[str, dict[str, Any]] = {
        "full": {"credit": "full"},
        "auto": {"unlearn_lr": "auto", "unlearn_kl_target": 1e-2},
        "exact": {"saturation": "exact"},
    }
    options: dict[str, Any] = {"num_stages": 2, "gate": "always"}
    for word in words:
        options |= {"unlearn_max_completions": int(word)} if word.isdigit() else meanings[word]
    if first != "eepo":
        raise SystemExit(f"--peers: no peer {name!r}; allowed: {', '.join(PEERS)}, eepo WORDS")
    return lambda *given: ours(*given, **options)


def _lengths(args: argparse.Namespace) -> list[int]:
    count = args.prompts * GROUP
    return (
        [args.new] * count
        if args.lengths == "fixed"
        else shapes.long_tail(count, args.mean, args.new)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=shapes.SHAPES, default="0.5B")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--rows", type=int, default=1024, help="sampled at a time")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens, at most")
    parser.add_argument("--lengths", choices=("fixed", "longtail"), default="fixed")
    parser.add_argument("--mean", type=float, default=500)
    parser.add_argument("--tokens", type=int, default=16384, help="in a micro-batch")
    parser.add_argument("--head", type=int, default=2048)
    parser.add_argument("--trl-rows", type=int, default=16, help="in a micro-batch of TRL's")
    parser.add_argument(
        "--warm", type=int, default=2, help="steps first: a cache finds its size in two"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers", default="grpo;eepo;eepo 128", help="semicolon between them")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table: list[list[str]] = []
    totals: dict[str, float] = {}
    for name in args.peers.split(";"):
        print(name, flush=True)
        rows = peer(name)(args, device)
        median = {key: statistics.median(row.get(key, 0.0) for row in rows) for key in rows[0]}
        totals[name] = median["seconds/total"]
        shown = [median.get(f"seconds/{phase}") for phase in PHASES]
        ratio = f"{totals[name] / totals['grpo']:.2f}" if "grpo" in totals else ""
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.0f}" if device.type == "cuda" else ""
        cells = ["" if one is None else f"{one:.2f}" for one in shown]
        table.append([name, *cells, f"{totals[name]:.2f}", ratio, memory])
        print(
            f"  {dict(zip([*PHASES, 'step', 'to GRPO', 'GB'], table[-1][1:], strict=True))}",
            flush=True,
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    lengths = _lengths(args)
    mean_length = sum(lengths) / len(lengths)
    print(
        f"\n{args.shape}, {args.prompts} x {GROUP}, {args.prompt} + {mean_length:.0f} tokens "
        f"({args.lengths}, at most {max(lengths)}), median of {args.repeats}, seconds"
    )
    print(shapes.table(["", *PHASES, "step", "to GRPO", "GB"], table))


if __name__ == "__main__":
    main()
