"""Rows that know their stage, in verl's own key scheme, and the metrics of each stage.

verl keys a row `{uid}_{session}_{index}`. Each stage asks for its prompts under a uid of its own, `{group}-{stage}`, so
that no stage overwrites another's rows; before training all rows get their group's uid back, because advantages are
normalised over rows of equal uid: the whole group, both stages.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from eepo.algorithm import to_unlearn
from eepo.algorithm.advantages import advantage_weights
from eepo.config import AlgorithmConfig
from eepo.model.batching import evenly


def stage_uid(group: str, stage: int) -> str:
    return f"{group}-{stage}"


def stage_of(key: str) -> int | None:
    """None for rows that verl made up as padding."""
    return None if key.startswith("pad") else int(key.rsplit("_", 2)[0].rsplit("-", 1)[1])


def group_of(key: str) -> str:
    return key.rsplit("_", 2)[0].rsplit("-", 1)[0]


def staged_prompts(prompts: TensorDict, stage: int, num_samples: int) -> TensorDict:
    """The same prompts under this stage's uids; verl's agent loops draw `num_samples` completions for each."""
    staged = prompts.clone(recurse=False)
    tu.assign_non_tensor_stack(
        staged, "uid", [stage_uid(str(uid), stage) for uid in prompts["uid"]]
    )
    tu.assign_non_tensor_data(staged, "__rollout_n__", num_samples)
    return staged


def joined(batches: list[KVBatchMeta]) -> KVBatchMeta:
    keys = [key for batch in batches for key in batch.keys]
    tags = [tag for batch in batches for tag in batch.tags]
    return KVBatchMeta(partition_id=batches[-1].partition_id, keys=keys, tags=tags)


class StagedBuffer:
    """verl's replay buffer, or the user's own. Where the trainer samples a training batch it gets all stages."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.earlier: list[KVBatchMeta] = []  # rows of this step's finished stages

    def add_stage(self, **request: Any) -> None:
        """Wait for the stage that was asked for last."""
        batch, _ = self.buffer.sample(partition_id="train", **request)
        self.earlier.append(batch)

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        batch, metrics = self.buffer.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id != "train" or not self.earlier:
            return batch, metrics
        batch = joined([*self.earlier, batch])
        self.earlier = []
        groups = tu.get_tensordict({"uid": [group_of(key) for key in batch.keys]})
        tq.kv_batch_put(keys=batch.keys, partition_id=partition_id, fields=groups)
        return batch, metrics


def rows_to_unlearn(
    batch: KVBatchMeta, options: AlgorithmConfig
) -> tuple[KVBatchMeta, dict[str, bool]]:
    """The rows that unlearning looks at, no more than `unlearn_max_completions`, and which of them it unlearns."""
    rewards = [0.0] * len(batch.keys)
    if options.unlearn_on != "all":
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores"]
        )
        rewards = [float(row.sum()) for row in data["rm_scores"].unbind()]
    wanted = wanted_rows(batch.keys, rewards, options.unlearn_on)
    order = sorted(
        range(len(batch.keys)), key=lambda row: batch.keys[row]
    )  # prompt by prompt, not as they ended
    rows = [order[place] for place in evenly(len(order), options.unlearn_max_completions)]
    keys, tags = [batch.keys[row] for row in rows], [batch.tags[row] for row in rows]
    return KVBatchMeta(partition_id=batch.partition_id, keys=keys, tags=tags), {
        key: wanted[key] for key in keys
    }


def wanted_rows(keys: list[str], rewards: list[float], choice: str) -> dict[str, bool]:
    """By key. A group is a prompt's rows of all stages so far; a session's rows are one completion with one reward."""
    if choice == "all":
        return dict.fromkeys(keys, True)
    groups: dict[str, dict[str, float]] = {}
    for key, reward in zip(keys, rewards, strict=True):
        sessions = groups.setdefault(group_of(key), {})
        sessions[_session(key)] = max(
            sessions.get(_session(key), 0.0), reward, key=abs
        )  # on all its rows, or the last
    chosen = {
        session: one
        for sessions in groups.values()
        for session, one in zip(sessions, to_unlearn([*sessions.values()], choice), strict=True)
    }
    return {key: chosen[_session(key)] for key in keys}


def _session(key: str) -> str:
    return key.rsplit("_", 1)[0]


def weigh_advantages(batch: KVBatchMeta, options: AlgorithmConfig, staged: bool) -> None:
    """Write them back, times what `eepo.later_advantages`, `failure_weight` and `rare_weight` say."""
    fields = [
        "advantages",
        *(["rollout_log_probs", "response_mask"] if options.rare_weight else []),
    ]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    advantages = data["advantages"].unbind()  # ragged rows: [tokens] each, one value and zeros
    likely = [(0.0, 0.0)] * len(advantages)
    if options.rare_weight:
        rows = zip(data["rollout_log_probs"].unbind(), data["response_mask"].unbind(), strict=True)
        likely = [(float((row * mask).sum()), float(mask.sum())) for row, mask in rows]
    weights = row_weights(
        batch.keys, [float(row.sum()) for row in advantages], likely, options, staged
    )
    weighed = [row * weight for row, weight in zip(advantages, weights, strict=True)]
    nested = {"advantages": torch.nested.as_nested_tensor(weighed, layout=torch.jagged)}
    tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, len(weighed))
    )


def row_weights(
    keys: list[str],
    signs: list[float],
    likely: list[tuple[float, float]],
    options: AlgorithmConfig,
    staged: bool,
) -> list[float]:
    """Rows of one session are one completion, and a uid is one prompt's in one stage. Padding weighs 1.

    Of each row: something of its advantage's sign; the sum of its log-probabilities, and over how many tokens.
    """
    uids: dict[str, dict[str, list[int]]] = {}
    for row, key in enumerate(keys):
        if not key.startswith("pad"):
            uid, session, _ = key.rsplit("_", 2)
            uids.setdefault(uid, {}).setdefault(session, []).append(row)
    weights = [1.0] * len(keys)
    for sessions in uids.values():
        advantages = torch.tensor(
            [max((signs[row] for row in rows), key=abs) for rows in sessions.values()]
        )
        sums = [
            [sum(part) for part in zip(*(likely[row] for row in rows), strict=True)]
            for rows in sessions.values()
        ]
        logprobs = torch.tensor([total / max(count, 1) for total, count in sums])
        stage = stage_of(keys[next(iter(sessions.values()))[0]]) if staged else 1
        found = advantage_weights(advantages, logprobs, torch.tensor(stage), options).tolist()
        for rows, weight in zip(sessions.values(), found, strict=True):
            for row in rows:
                weights[row] = weight
    return weights


def row_entropies(batch: KVBatchMeta) -> tuple[float, int]:
    """Σ −log p under the weights that sampled, an unbiased estimate of Σ entropy; and over how many tokens."""
    fields = ["rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    mask = data["response_mask"].values().bool()
    return -float(data["rollout_log_probs"].values()[mask].double().sum()), int(mask.sum())


def stage_metrics(batch: KVBatchMeta, max_length: int) -> dict[str, float]:
    """Means over each stage's completions, as `eepo/stageN/…`."""
    fields = ["rollout_log_probs", "response_mask", "rm_scores", "advantages"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    columns = {name: data[name].unbind() for name in fields}  # ragged rows
    stages: dict[int, list[int]] = {}
    for row, key in enumerate(batch.keys):
        if (stage := stage_of(key)) is not None:
            stages.setdefault(stage, []).append(row)
    metrics: dict[str, float] = {}
    for stage, rows in sorted(stages.items()):
        masks = [columns["response_mask"][row].bool() for row in rows]
        num_tokens = max(sum(int(mask.sum()) for mask in masks), 1)
        entropy = -sum(
            float(columns["rollout_log_probs"][row][m].sum())
            for row, m in zip(rows, masks, strict=True)
        )
        advantage = sum(
            float(columns["advantages"][row][m].sum()) for row, m in zip(rows, masks, strict=True)
        )
        metrics |= {
            f"eepo/stage{stage}/completions": len(rows),
            f"eepo/stage{stage}/reward": sum(float(columns["rm_scores"][row].sum()) for row in rows)
            / len(rows),
            f"eepo/stage{stage}/entropy": entropy / num_tokens,
            f"eepo/stage{stage}/advantage": advantage / num_tokens,
            f"eepo/stage{stage}/length": sum(len(mask) for mask in masks) / len(rows),
            f"eepo/stage{stage}/truncated_share": sum(len(mask) >= max_length for mask in masks)
            / len(rows),
        }
    return metrics
