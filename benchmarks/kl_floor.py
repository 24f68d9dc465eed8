"""Measure KL(θ‖θ′) of an unlearning step by learning rate: as the policy scores, and in fp32.

    python benchmarks/kl_floor.py                            # the built-in policy on countdown
    python benchmarks/kl_floor.py --model package:smollm2    # SmolLM2 on sums

For small steps KL grows with the square of the learning rate. Where the policy computes in bf16 (on
a GPU), rounding can hide small steps. It can also enlarge them, if weights lie halfway between two
bf16 numbers. Below that floor, `unlearn_lr = "auto"` would meet a KL target with rounding alone.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eepo.algorithm import k3, unlearned_weights
from eepo.algorithm.probe import Probe, unlearn_gradient
from eepo.algorithm.unlearning import UnlearnBatch
from eepo.config import AlgorithmConfig, CountdownConfig, SumsConfig
from eepo.model.loading import resolve
from eepo.model.policy import Policy
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks.countdown import Countdown
from eepo.tasks.sums import Sums
from eepo.types import Completion, Prompt, Sampling

LEARNING_RATES = [10.0**power for power in range(-7, 0)]
NUM_PROMPTS, GROUP = 16, 8


def fp32_kl(model: Any, other: Any, pairs: Sequence[tuple[Prompt, Completion]]) -> float:
    """Return KL(model‖other) per token, computed in fp32 without autocast."""
    total, num_tokens = 0.0, 0
    for prompt, completion in pairs:
        logprobs, other_logprobs = (_logprobs(m, prompt, completion) for m in (model, other))
        total += float(k3(other_logprobs - logprobs).sum())
        num_tokens += len(completion.token_ids)
    return total / num_tokens


def _logprobs(model: Any, prompt: Prompt, completion: Completion) -> Tensor:
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=model.device)
    logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1]
    return logits.double().log_softmax(-1).gather(1, ids[0, len(prompt.token_ids) :, None])


def stepped(model: Any, gradient: Mapping[str, Tensor], lr: float) -> Any:
    moved = copy.deepcopy(model)
    for name, weight in moved.named_parameters():
        weight.sub_(lr * gradient[name])
    return moved


def main(name: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    builtin = name.startswith("builtin:")
    task = Countdown(CountdownConfig(), tokenizer) if builtin else Sums(SumsConfig(), tokenizer)
    prompts = task.training_prompts(0, NUM_PROMPTS)
    engine = TransformersEngine(copy.deepcopy(model), tokenizer, stop="" if builtin else "\n")
    groups = engine.generate(prompts, GROUP, Sampling(1.0, 24, stream="floor"))
    pairs = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    fp32_model = copy.deepcopy(model)  # on a GPU, the policy's model accepts packed batches only
    policy, rows = Policy(model), list(range(len(pairs)))
    options = AlgorithmConfig(gate="always")
    batch = UnlearnBatch(pairs, rows, [True] * len(pairs), rows, options)
    probe = Probe(policy, batch)
    gradient, _ = unlearn_gradient(policy, batch, probe)
    probed = [pairs[row] for row in probe.rows]
    print(f"{name} on {device}\n\n| η | KL as scored | KL in fp32 |\n|---|---|---|")
    with torch.no_grad():
        for lr in LEARNING_RATES:
            weights = unlearned_weights(policy.named_weights(), gradient, lr, torch.float32)
            scored = probe.measure(dict(weights)).kl
            exact = fp32_kl(fp32_model, stepped(fp32_model, gradient, lr), probed)
            print(f"| {lr:.0e} | {scored:.2e} | {exact:.2e} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:countdown")
    main(parser.parse_args().model)
