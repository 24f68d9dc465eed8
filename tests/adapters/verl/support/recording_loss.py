"""verl's policy loss, which also records its arguments: denominators, policy and advantages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss


@register_policy_loss("recording")
def policy_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **others: Any
) -> Any:
    path = Path(os.environ["EEPO_TEST_RECORDS"]) / f"loss-rank{os.environ['RANK']}.jsonl"
    with path.open("a") as stream:
        for row, mask in enumerate(response_mask.bool()):
            entry = {
                "denominators": old_log_prob[row][mask].tolist(),
                "policy": log_prob[row][mask].tolist(),
                "advantages": advantages[row][mask].tolist(),
                "has_weights": others.get("rollout_is_weights") is not None,
            }
            stream.write(json.dumps(entry) + "\n")
    return compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, response_mask, **others)
