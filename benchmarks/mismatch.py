"""How far a policy in fp32 is from itself with its matrices rounded to bf16: KL(θ‖bf16 θ) a token.

    eepo train smollm2/sums_grpo --out runs/mm --set training.learning_rate=2e-6 --set training.prompts_per_step=8 \\
        --set training.prompts_per_mini_batch=4 --set training.num_steps=20 \\
        --set training.checkpoint_every=5 --set training.keep_checkpoints=9
    python benchmarks/mismatch.py package:smollm2 runs/mm/checkpoints/step-*

A run that samples in fp32 and trains with products in bf16 has this between its two policies, at least (activations
are rounded, too). Published weights are often bf16 already and lose nothing; after a few small steps they do.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from kl_floor import GROUP, NUM_PROMPTS, plain_kl
from transformers import AutoModelForCausalLM, AutoTokenizer

from eepo.algorithm.probe import Probe
from eepo.config import SumsConfig
from eepo.model.loading import resolve
from eepo.model.policy import Policy
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks.sums import Sums
from eepo.types import Sampling, UserError


@torch.no_grad()
def rounded(model: Any) -> Any:
    found = copy.deepcopy(model)
    for weight in found.parameters():
        if weight.ndim > 1:
            weight.copy_(weight.bfloat16().float())
    return found


@torch.no_grad()
def mismatch(name: str) -> float:
    folder = resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = Sums(SumsConfig(), tokenizer).training_prompts(999, NUM_PROMPTS)
    engine = TransformersEngine(copy.deepcopy(model), tokenizer, stop="\n")
    groups = engine.generate(prompts, GROUP, Sampling(1.0, 12, stream="mismatch"))
    pairs = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    probe = Probe(
        Policy(model), pairs, range(len(pairs)), len(pairs), 1.0, lambda _batch, _scores: None
    )
    return plain_kl(model, rounded(model), probe)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="package:smollm2, or a folder of it: on sums")
    models = parser.parse_args().models
    print("| model | KL(θ‖bf16 θ) |\n|---|---|")
    try:
        for model in models:
            print(f"| {model} | {mismatch(model):.2e} |", flush=True)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
