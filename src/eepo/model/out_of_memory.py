"""Turns a lack of memory into one line that says which knob to change before the run is resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from eepo.config import RunConfig
from eepo.model.memory import next_change
from eepo.runs.memory_errors import describe, is_out_of_memory

# Phases whose memory is that of an update. All other phases sample, or load weights to sample from.
_UPDATES = {"unlearn": "unlearning", "reference": "update", "update": "update"}


@contextmanager
def caught() -> Iterator[list[str]]:
    """End the block if memory runs out. The yielded list then has one entry: what happened.

    The error itself is dropped: its traceback would keep the activations in memory.
    """
    failures: list[str] = []
    try:
        yield failures
    except (RuntimeError, MemoryError, ImportError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        failures.append(describe(error))


def advice(config: RunConfig, phase: str) -> tuple[str, str, str]:
    """Return the phase and what to change, in words, and an option of the resuming command.

    `phase` is the name of a phase in the metrics, or "evaluation". The option is empty if no knob
    is left that a resumed run may change.
    """
    name = _UPDATES.get(phase, phase if phase == "evaluation" else "sampling")
    if phase not in _UPDATES and config.rollout.engine == "vllm":
        share = config.rollout.gpu_memory_share
        return name, *_suggestion("rollout.gpu_memory_share", share, f"{share * 0.75:.2g}")
    config = _effective(config, phase)
    change = next_change(config, "update" if phase in _UPDATES else "sampling")
    if change is None:
        return name, "no knob is left that a resumed run may change: use a larger device", ""
    section, knob, value = change
    before = getattr(getattr(config, section), knob)
    return name, *_suggestion(f"{section}.{knob}", before, value)


def _suggestion(knob: str, before: object, after: object) -> tuple[str, str]:
    old, new = (str(v).lower() if isinstance(v, bool) else str(v) for v in (before, after))
    return f"{knob} is {old}, try {new}", f" --set {knob}={new}"


def _effective(config: RunConfig, phase: str) -> RunConfig:
    """Lower `max_rows` and `micro_batch_tokens` to what a step can use at most.

    Half of a limit that is never reached would change nothing.
    """
    options, training = config.algorithm, config.training
    rows = training.prompts_per_step * options.group_size // options.num_stages
    row_tokens = 2 * options.max_new_tokens  # few prompts are longer than the completions
    mini_batch_tokens = training.prompts_per_mini_batch * options.group_size * row_tokens
    model, rollout = config.model, config.rollout
    max_rows = rollout.max_rows if phase == "evaluation" else min(rollout.max_rows, rows)
    tokens = min(model.micro_batch_tokens, mini_batch_tokens)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, micro_batch_tokens=tokens),
        rollout=dataclasses.replace(rollout, max_rows=max_rows),
    )
