"""Searches the η that meets `unlearn_kl_target`, on some rows of each worker, all ranks together.

verl's engine scores θ′. So θ′ is written over θ's shards for a moment, and θ is restored from a
copy, bit for bit. The search costs that copy and one forward pass per try.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.utils.padding import no_padding_2_padding

from eepo.adapters.weights import reshard, trial_steps
from eepo.algorithm import SearchResult, k3, lr_above_floor
from eepo.config import AlgorithmConfig
from eepo.model.batching import evenly_spaced

IN_STAGE1 = "eepo_in_stage1"  # bool column: θ sampled the row, so it can measure KL(θ‖θ′)


def search_lr(
    engine: Any, data: TensorDict, options: AlgorithmConfig, start: float
) -> SearchResult:
    """Return η and its KL(θ‖θ′) per token, the same on every rank.

    The module's gradients are the direction of the step. They are kept.
    """
    has_floor = getattr(engine, "_autocast_dtype", torch.bfloat16) != torch.float32
    probe = _probe_rows(engine, data, options.probe_completions)
    mask = probe.select("response_mask").to_padded_tensor()["response_mask"].bool()
    mask = (mask & probe[IN_STAGE1].unsqueeze(1)).to(get_device_name())
    engine.module.eval()  # dropout noise would change the KL
    try:
        before = _logprobs(engine, probe)
        named = engine.module.named_parameters()
        weights = {name: weight for name, weight in named if weight.grad is not None}
        gradient = {name: weight.grad for name, weight in weights.items()}
        with trial_steps(weights, gradient) as take_step:

            def kl_of(lr: float) -> float:
                take_step(lr)
                return _mean_kl(before, _logprobs(engine, probe), mask)

            return lr_above_floor(kl_of, options.unlearn_kl_target, SearchResult(start), has_floor)
    finally:
        engine.module.train()


def _probe_rows(engine: Any, data: TensorDict, num_rows: int) -> TensorDict:
    """Choose this rank's share of `num_rows` from stage 1, evenly spaced.

    All ranks run a forward pass together, so other rows fill up the last micro-batch.
    """
    size = 1 if data["use_dynamic_bsz"] else data["micro_batch_size_per_gpu"]
    share = -(-num_rows // (engine.get_data_parallel_size() * size)) * size
    count, in_stage1 = min(share, len(data)), data[IN_STAGE1].tolist()
    stage1_rows = [row for row, flag in enumerate(in_stage1) if flag]
    other_rows = [row for row, flag in enumerate(in_stage1) if not flag]
    rows = [stage1_rows[index] for index in evenly_spaced(len(stage1_rows), count)]
    probe = tu.index_select_tensor_dict(data, [*rows, *other_rows[: count - len(rows)]])
    tu.assign_non_tensor(probe, calculate_entropy=False)
    return probe


def _logprobs(engine: Any, probe: TensorDict) -> Tensor:  # [B, T]
    """Score the rows under the module's current weights.

    Reshard afterwards: FSDP would reuse gathered weights and miss the next change of the shards.
    """
    output = engine.forward_backward_batch(probe, None, forward_only=True)["model_output"]
    reshard(engine.module)
    return no_padding_2_padding(output["log_probs"], probe).double()


def _mean_kl(before: Tensor, after: Tensor, mask: Tensor) -> float:
    """Estimate KL(θ‖θ′) per token over all ranks, so that all ranks take the same decisions.

    Ranks that share a sequence count it equally often.
    """
    gap = torch.where(mask, after - before, 0.0)
    sums = torch.stack([k3(gap).sum(), mask.sum()])
    torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1].clamp(min=1))
