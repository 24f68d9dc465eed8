"""Dynamic sampling: replace groups without a signal (DAPO, arXiv:2503.14476).

If all rewards of a group are equal, its advantages are 0. Such groups are replaced by groups of new
prompts, in at most `dynamic_sampling` rounds. A round samples as many prompts as are missing, with
all stages of EEPO. Groups that are still without a signal after the last round stay.

This needs more than a line in the registry: it decides what is sampled. So it wraps
`EEPO.collect`, and the trainer provides prompts for all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from eepo.algorithm.metrics import StepMetrics
from eepo.types import Prompt, Rollout, Sampling

Collect = Callable[[list[Prompt], Sampling, StepMetrics], Rollout]


def collect_groups(
    collect: Collect,
    prompts: list[Prompt],
    sampling: Sampling,
    metrics: StepMetrics,
    num_rounds: int,
) -> Rollout:
    """Sample the groups of a step.

    `prompts` has those of the step, and as many again for each round. Prompts that were sampled in
    vain are counted by `Rollout.dropped`.
    """
    size = len(prompts) // (num_rounds + 1)
    rollout, spare = collect(prompts[:size], sampling, metrics), prompts[size:]
    if num_rounds:
        with metrics.phase("reward"):
            rollout.wait_for_rewards()
        rollout.first_round = _copy(rollout)
    for number in range(1, num_rounds + 1):
        rows = [row for row, rewards in enumerate(rollout.rewards) if not has_signal(rewards)]
        if not rows:
            break
        # In a small data set a prompt may come again within a step: it gets other random numbers.
        of_round = replace(sampling, stream=f"{sampling.stream}/round{number}")
        fresh = collect(spare[: len(rows)], of_round, metrics)
        spare = spare[len(rows) :]
        with metrics.phase("reward"):
            fresh.wait_for_rewards()
        _replace(rollout, rows, fresh)
    return rollout


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ."""
    return len(set(rewards)) > 1


def _replace(rollout: Rollout, rows: Sequence[int], fresh: Rollout) -> None:
    """Replace groups of these `rows` by the groups of `fresh` that have a signal."""
    free = iter(rows)
    for source, rewards in enumerate(fresh.rewards):
        if has_signal(rewards):
            rollout.replace_group(next(free), fresh, source)
        else:
            rollout.dropped.append(fresh.groups[source])


def _copy(rollout: Rollout) -> Rollout:
    """Keep the groups as they are now. Groups themselves are replaced, never edited."""
    return replace(
        rollout,
        prompts=list(rollout.prompts),
        groups=list(rollout.groups),
        rewards=list(rollout.rewards),
        verdicts=list(rollout.verdicts),
    )
