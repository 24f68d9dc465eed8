"""The KL that rounding alone makes of an unlearning step: KL(θ‖θ′) by rate, as the policy scores, and in fp32.

    python benchmarks/kl_floor.py                            # the shipped policy on countdown
    python benchmarks/kl_floor.py --model package:smollm2    # on sums

For small steps KL grows as the square of the rate. Where the policy computes in bf16 (on a GPU) rounding hides small
steps, or, where weights lie halfway between two bf16 numbers, blows them up; what `unlearn_lr = "auto"` then meets is
rounding.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eepo.algorithm import unlearn_loss
from eepo.algorithm.probe import Probe
from eepo.config import AlgorithmConfig, CountdownConfig, SumsConfig
from eepo.model.batching import MicroBatch
from eepo.model.loading import resolve
from eepo.model.policy import Policy, Scores
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks.countdown import Countdown
from eepo.tasks.sums import Sums
from eepo.types import Sampling

RATES = [10.0**power for power in range(-7, 0)]
NUM_PROMPTS, GROUP = 16, 8


def plain_kl(model: torch.nn.Module, moved: torch.nn.Module, probe: Probe) -> float:
    """In fp32, without autocast: what the step really does."""
    total, count = 0.0, 0
    for prompt, completion in (probe.pairs[row] for row in probe.rows):
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=probe.policy.device)
        own = torch.tensor(completion.token_ids, device=ids.device)[:, None]
        theta, prime = (
            one(ids)
            .logits[0, len(prompt.token_ids) - 1 : -1]
            .double()
            .log_softmax(-1)
            .gather(1, own)
            for one in (model, moved)
        )
        gap = prime - theta
        total, count = total + float((gap.exp() - 1 - gap).sum()), count + len(own)
    return total / count


def stepped(model: torch.nn.Module, gradient: Mapping[str, Tensor], lr: float) -> torch.nn.Module:
    moved = copy.deepcopy(model)
    for name, weight in moved.named_parameters():
        weight.sub_(lr * gradient[name])
    return moved


def main(name: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    small = name.startswith("builtin:")
    task = Countdown(CountdownConfig(), tokenizer) if small else Sums(SumsConfig(), tokenizer)
    prompts = task.training_prompts(0, NUM_PROMPTS)
    engine = TransformersEngine(copy.deepcopy(model), tokenizer, stop="" if small else "\n")
    groups = engine.generate(prompts, GROUP, Sampling(1.0, 24, stream="floor"))
    pairs = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    plain = copy.deepcopy(model)  # a policy on a GPU takes packed rows, and no others
    policy, options = Policy(model), AlgorithmConfig(gate="always")

    def loss(batch: MicroBatch, scores: Scores) -> Tensor:
        return unlearn_loss(scores, batch.mask, batch.mask, options) * len(batch.rows) / len(pairs)

    gradient = policy.gradient(pairs, 1.0, loss)
    probe = Probe(policy, pairs, range(len(pairs)), options.probe_completions, 1.0, loss)
    print(f"{name} on {device}\n\n| η | KL as scored | KL in fp32 |\n|---|---|---|")
    with torch.no_grad():
        for lr in RATES:
            exact = plain_kl(plain, stepped(plain, gradient, lr), probe)
            print(f"| {lr:.0e} | {probe.measure(gradient, lr).kl:.2e} | {exact:.2e} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:countdown")
    main(parser.parse_args().model)
