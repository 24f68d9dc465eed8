"""Estimates the time of training steps and evaluations on one H200 from the shape of a model.

The formulas count operations and bytes. Their constants are fitted to measured steps and rollouts
of models with 0.5, 1.5 and 3 billion weights (`docs/performance.md`), which they meet within 30 %.
Larger models are extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass

from eepo.config import RunConfig
from eepo.model.memory import BF16_BYTES, Shape

MATRIX_RATE = 792e12  # operations per second of bf16 matrix products, measured
COPY_RATE = 4.3e12  # bytes per second, measured
DECODING_SHARE = 0.8  # of both rates, while sampling
TRAINING_SHARE = 0.58  # of the matrix rate
DECODE_STEP_SECONDS = 3e-4  # of a decode step, besides weights, KV cache and products
FORWARD, BACKWARD = 2, 4  # operations per weight and token
NUM_PROMPT_TOKENS = 150  # assumed


@dataclass(frozen=True)
class Lengths:
    """Describes the lengths of completions in tokens."""

    mean: float
    longest: int

    @property
    def mean_square(self) -> float:
        """Return E[L²] of exponential lengths, or of equal ones if the mean is the longest."""
        return min(2 * self.mean**2, self.mean * self.longest)


def sampling_seconds(
    shape: Shape, num_completions: int, max_rows: int, lengths: Lengths, prompt_tokens: int
) -> float:
    """Return the time to sample completions, `max_rows` at a time."""
    num_tokens = num_completions * lengths.mean
    num_steps: float = lengths.longest
    if num_completions > max_rows:  # rows that end make room for others
        num_steps += num_tokens / max_rows
    weights = BF16_BYTES * shape.num_parameters
    kv_bytes = 2 * BF16_BYTES * shape.num_layers * shape.num_key_value_heads * shape.head_dim
    read_tokens = num_completions * (lengths.mean_square / 2 + prompt_tokens * lengths.mean)
    moved = num_steps * weights + read_tokens * kv_bytes
    products = FORWARD * shape.num_parameters * num_tokens
    busy = moved / COPY_RATE + products / MATRIX_RATE
    return busy / DECODING_SHARE + num_steps * DECODE_STEP_SECONDS


def step_seconds(shape: Shape, config: RunConfig, lengths: Lengths, prompt_tokens: int) -> float:
    """Return the time of a training step."""
    algorithm, num_prompts = config.algorithm, config.training.prompts_per_step
    num_completions = num_prompts * algorithm.group_size
    stages = algorithm.num_stages
    seconds = stages * sampling_seconds(
        shape, num_completions // stages, config.rollout.max_rows, lengths, prompt_tokens
    )
    # A prompt is computed once for its group.
    num_tokens = num_completions * lengths.mean + num_prompts * prompt_tokens
    update: float = FORWARD + BACKWARD
    update += FORWARD if config.model.gradient_checkpointing else 0  # activations, once more
    passes = update + (FORWARD if algorithm.kl_coef > 0 else 0)
    if stages > 1 and algorithm.gate != "never":
        passes += update * (stages - 1) / stages
    operations = passes * shape.num_parameters * num_tokens
    return seconds + operations / (TRAINING_SHARE * MATRIX_RATE)


def evaluation_seconds(
    shape: Shape, config: RunConfig, lengths: Lengths, num_problems: int, num_samples: int
) -> float:
    """Return the time to answer every problem once greedily and `num_samples` times by sampling."""
    num_completions = num_problems * (1 + num_samples)
    return sampling_seconds(
        shape, num_completions, config.rollout.max_rows, lengths, NUM_PROMPT_TOKENS
    )


def run_seconds(shape: Shape, config: RunConfig, num_problems: int, mean_length: float) -> float:
    """Return the time of a whole run: its steps, quick evaluations and the final evaluation."""
    limit = config.algorithm.max_new_tokens
    lengths = Lengths(min(mean_length, limit), limit)
    evaluation, num_steps = config.evaluation, config.training.num_steps
    seconds = num_steps * step_seconds(shape, config, lengths, NUM_PROMPT_TOKENS)
    full = min(num_problems, evaluation.num_problems or num_problems)
    seconds += evaluation_seconds(shape, config, lengths, full, evaluation.num_samples)
    if evaluation.every and num_steps:
        quick = min(num_problems, evaluation.quick_problems or num_problems)
        each = evaluation_seconds(shape, config, lengths, quick, evaluation.quick_samples)
        seconds += (num_steps - 1) // evaluation.every * each
    return seconds
