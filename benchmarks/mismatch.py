"""Measure the KL per token between an fp32 policy and the same policy with bf16 matrices.

    eepo train smollm2/sums_grpo --out runs/mm --set training.learning_rate=2e-6 \\
        --set training.prompts_per_step=8 --set training.prompts_per_mini_batch=4 \\
        --set training.num_steps=20 --set training.checkpoint_every=5 \\
        --set training.keep_checkpoints=9
    python benchmarks/mismatch.py package:smollm2 runs/mm/checkpoints/step-*

A run that samples in fp32 and trains in bf16 has at least this KL between its two policies; rounded
activations add to it. Weights are often published in bf16 and then lose nothing at first. After a
few small training steps they do.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from kl_floor import GROUP, NUM_PROMPTS, fp32_kl
from transformers import AutoModelForCausalLM, AutoTokenizer

from eepo.config import SumsConfig
from eepo.model.loading import resolve
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks.sums import Sums
from eepo.types import Sampling, UserError


@torch.no_grad()
def with_bf16_matrices(model: Any) -> Any:
    rounded = copy.deepcopy(model)
    for weight in rounded.parameters():
        if weight.ndim > 1:
            weight.copy_(weight.bfloat16().float())
    return rounded


@torch.no_grad()
def mismatch(name: str) -> float:
    folder = resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = Sums(SumsConfig(), tokenizer).training_prompts(999, NUM_PROMPTS)
    engine = TransformersEngine(copy.deepcopy(model), tokenizer, stop="\n")
    groups = engine.generate(prompts, GROUP, Sampling(1.0, 12, stream="mismatch"))
    pairs = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    return fp32_kl(model, with_bf16_matrices(model), pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="package:smollm2 or folders trained from it")
    models = parser.parse_args().models
    print("| model | KL(θ‖bf16 θ) |\n|---|---|")
    try:
        for model in models:
            print(f"| {model} | {mismatch(model):.2e} |", flush=True)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
