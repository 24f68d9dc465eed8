"""Encodes stages in verl's row keys, selects rows to unlearn, and computes metrics per stage.

verl's row keys are `{uid}_{session}_{index}`. A session is one completion; an agent's session may
have several rows. Every stage requests its prompts under the uids `{group}-{stage}`, so that it
does not overwrite the rows of other stages. Before training, all rows get the uid of their group
back: verl normalises advantages over rows of equal uid, which are the group's rows of all stages.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from eepo.algorithm import advantage_weights, completions_to_unlearn
from eepo.algorithm.metrics import second_half_metrics
from eepo.config import AlgorithmConfig
from eepo.model.batching import evenly_spaced


def is_padding(key: str) -> bool:
    """Return whether verl added this row to fill up a batch."""
    return key.startswith("pad")


def stage_of(key: str) -> int | None:
    """Return the stage of a row; None for padding."""
    return None if is_padding(key) else int(key.rsplit("_", 2)[0].rsplit("-", 1)[1])


def group_of(key: str) -> str:
    return key.rsplit("_", 2)[0].rsplit("-", 1)[0]


def session_of(key: str) -> str:
    return key.rsplit("_", 1)[0]


def staged_prompts(prompts: TensorDict, stage: int, num_samples: int) -> TensorDict:
    """Give prompts the uids of a stage and ask for `num_samples` completions of each."""
    staged = prompts.clone(recurse=False)
    tu.assign_non_tensor_stack(staged, "uid", [f"{uid}-{stage}" for uid in prompts["uid"]])
    tu.assign_non_tensor_data(staged, "__rollout_n__", num_samples)
    return staged


def concatenate(batches: list[KVBatchMeta]) -> KVBatchMeta:
    keys = [key for batch in batches for key in batch.keys]
    tags = [tag for batch in batches for tag in batch.tags]
    return KVBatchMeta(partition_id=batches[-1].partition_id, keys=keys, tags=tags)


class StagedBuffer:
    """Wraps a replay buffer, so that a training batch has the rows of all stages."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.finished_stages: list[KVBatchMeta] = []  # of this step

    def add_stage(self, **request: Any) -> None:
        """Wait for the rows of the stage that was requested last, and keep them."""
        batch, _ = self.buffer.sample(partition_id="train", **request)
        self.finished_stages.append(batch)

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        batch, metrics = self.buffer.sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id != "train" or not self.finished_stages:
            return batch, metrics
        batch = concatenate([*self.finished_stages, batch])
        self.finished_stages = []
        groups = tu.get_tensordict({"uid": [group_of(key) for key in batch.keys]})
        tq.kv_batch_put(keys=batch.keys, partition_id=partition_id, fields=groups)
        return batch, metrics


def rows_to_unlearn(
    batch: KVBatchMeta, options: AlgorithmConfig
) -> tuple[KVBatchMeta, dict[str, bool]]:
    """Choose at most `unlearn_max_completions` rows, and say which of them `unlearn_on` selects."""
    rewards = [0.0] * len(batch.keys)
    if options.unlearn_on != "all":
        rewards = [float(row.sum()) for row in _columns(batch, "rm_scores")["rm_scores"].unbind()]
    selected = select_rows(batch.keys, rewards, options.unlearn_on)
    # Rows arrive in the order in which they finished. Sort them by prompt before spacing them out.
    order = sorted(range(len(batch.keys)), key=lambda row: batch.keys[row])
    rows = [order[index] for index in evenly_spaced(len(order), options.unlearn_max_completions)]
    keys, tags = [batch.keys[row] for row in rows], [batch.tags[row] for row in rows]
    chosen = KVBatchMeta(partition_id=batch.partition_id, keys=keys, tags=tags)
    return chosen, {key: selected[key] for key in keys}


def select_rows(keys: list[str], rewards: list[float], choice: str) -> dict[str, bool]:
    """Apply `unlearn_on` to each group: a prompt's sessions of all stages so far.

    verl writes a session's reward on all of its rows, or only on the last one.
    """
    groups: dict[str, dict[str, float]] = {}
    for key, reward in zip(keys, rewards, strict=True):
        sessions, session = groups.setdefault(group_of(key), {}), session_of(key)
        sessions[session] = max(sessions.get(session, 0.0), reward, key=abs)
    selected: dict[str, bool] = {}
    for sessions in groups.values():
        flags = completions_to_unlearn(list(sessions.values()), choice)
        selected |= dict(zip(sessions, flags, strict=True))
    return {key: selected[session_of(key)] for key in keys}


def weight_advantages(batch: KVBatchMeta, options: AlgorithmConfig, staged: bool) -> None:
    """Multiply the stored advantages by their weights."""
    rows = _columns(batch, "advantages")["advantages"].unbind()  # [tokens] each: a value or 0
    weights = row_weights(batch.keys, [float(row.sum()) for row in rows], options, staged)
    weighted = [row * weight for row, weight in zip(rows, weights, strict=True)]
    nested = {"advantages": torch.nested.as_nested_tensor(weighted, layout=torch.jagged)}
    fields = TensorDict(nested, len(weighted))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def row_weights(
    keys: list[str],
    advantages: list[float],  # of each row; only the sign counts
    options: AlgorithmConfig,
    staged: bool,
) -> list[float]:
    """Return the factor of each row's advantage: the same for all rows of a session, 1 for padding.

    The row with the largest absolute advantage decides: others of the session may have 0.
    """
    sessions: dict[str, float] = {}
    for key, advantage in zip(keys, advantages, strict=True):
        session = session_of(key)
        sessions[session] = max(sessions.get(session, 0.0), advantage, key=abs)
    signs = torch.tensor([sessions[session_of(key)] for key in keys])
    stages = torch.tensor([(stage_of(key) or 1) if staged else 1 for key in keys])
    weights = advantage_weights(signs, stages, options).tolist()
    return [1.0 if is_padding(key) else w for key, w in zip(keys, weights, strict=True)]


def entropy_sum(batch: KVBatchMeta) -> tuple[float, int]:
    """Return Σ −log p under the weights that sampled, and the number of tokens.

    The sum is an unbiased estimate of the sum of entropies.
    """
    data = _columns(batch, "rollout_log_probs", "response_mask")
    mask = data["response_mask"].values().bool()
    return -float(data["rollout_log_probs"].values()[mask].double().sum()), int(mask.sum())


def stage_metrics(batch: KVBatchMeta, max_length: int, staged: bool) -> dict[str, float]:
    """Compute means over each stage's rows, as `eepo/stageN/...`. Without stages, all are stage 1.

    Also count the groups that only the second half solved.
    """
    names = ("rollout_log_probs", "response_mask", "rm_scores", "advantages")
    data = _columns(batch, *names)
    columns = {name: data[name].unbind() for name in names}  # rows of different lengths
    stages: dict[int, list[int]] = {}
    for row, key in enumerate(batch.keys):
        if not is_padding(key):
            stages.setdefault((stage_of(key) or 1) if staged else 1, []).append(row)
    rewards = [float(row.sum()) for row in columns["rm_scores"]]
    halves = second_half_metrics(grouped_rewards(batch.keys, rewards, staged))
    metrics = {f"eepo/{name}": value for name, value in halves.items()}
    for stage, rows in sorted(stages.items()):
        stage_columns = {name: [values[row] for row in rows] for name, values in columns.items()}
        means = _stage_means(stage_columns, max_length)
        metrics |= {f"eepo/stage{stage}/{name}": value for name, value in means.items()}
    return metrics


def grouped_rewards(keys: list[str], rewards: list[float], staged: bool) -> list[list[float]]:
    """Return the rewards of each group's sessions, in the order of stages and sessions."""
    groups: dict[str, dict[tuple[int, int], float]] = {}
    for key, reward in zip(keys, rewards, strict=True):
        if is_padding(key):
            continue
        uid, session, _ = key.rsplit("_", 2)
        place = (stage_of(key) or 1) if staged else 1, int(session)
        sessions = groups.setdefault(group_of(key) if staged else uid, {})
        sessions[place] = max(sessions.get(place, 0.0), reward, key=abs)
    return [[sessions[place] for place in sorted(sessions)] for sessions in groups.values()]


def _stage_means(columns: dict[str, list[torch.Tensor]], max_length: int) -> dict[str, float]:
    masks = [mask.bool() for mask in columns["response_mask"]]
    num_rows = len(masks)
    num_tokens = max(sum(int(mask.sum()) for mask in masks), 1)

    def token_mean(name: str) -> float:
        pairs = zip(columns[name], masks, strict=True)
        return sum(float(row[mask].sum()) for row, mask in pairs) / num_tokens

    return {
        "completions": num_rows,
        "reward": sum(float(row.sum()) for row in columns["rm_scores"]) / num_rows,
        "entropy": -token_mean("rollout_log_probs"),
        "advantage": token_mean("advantages"),
        "length": sum(len(mask) for mask in masks) / num_rows,
        "truncated_share": sum(len(mask) >= max_length for mask in masks) / num_rows,
    }


def _columns(batch: KVBatchMeta, *names: str) -> TensorDict:
    return tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names)
    )
