"""The η whose step moves θ by a given KL: tried on some of a worker's rows, all ranks together.

θ′ is scored by verl's own engine, so it is written over θ's shards for a moment, and θ comes back from a copy, bit for
bit. That copy and one forward pass a try are what the search costs.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.utils.padding import no_padding_2_padding

from eepo.adapters.weights import reshard, tried
from eepo.algorithm import kl_penalty
from eepo.algorithm.probe import Found, lr_above_floor
from eepo.config import AlgorithmConfig
from eepo.model.batching import evenly

FIRST_STAGE = "eepo_first_stage"  # a column of the rows: θ′'s would tell another KL


def find_rate(engine: Any, data: TensorDict, options: AlgorithmConfig, start: float) -> Found:
    """η, the same on every rank, and the KL(θ‖θ′) a token that it gives. The gradient is in the module, and stays."""
    rounds = getattr(engine, "_autocast_dtype", torch.bfloat16) != torch.float32
    probe = _rows(engine, data, options.probe_completions)
    mask = probe.select("response_mask").to_padded_tensor()["response_mask"].bool()
    mask = (mask & probe[FIRST_STAGE].unsqueeze(1)).to(get_device_name())
    engine.module.eval()  # dropout would be taken for a KL
    try:
        before = _logprobs(engine, probe)
        weights = {
            name: weight
            for name, weight in engine.module.named_parameters()
            if weight.grad is not None
        }
        with tried(weights, {name: weight.grad for name, weight in weights.items()}) as put:

            def kl_of(lr: float) -> float:
                put(lr)
                return _mean_kl(before, _logprobs(engine, probe), mask)

            return lr_above_floor(kl_of, options.unlearn_kl_target, start, rounds)
    finally:
        engine.module.train()


def _rows(engine: Any, data: TensorDict, num_wanted: int) -> TensorDict:
    """This rank's share of stage 1, evenly spread, filled up to whole micro-batches: a pass is all ranks' together."""
    whole = 1 if data["use_dynamic_bsz"] else data["micro_batch_size_per_gpu"]
    share = -(-num_wanted // (engine.get_data_parallel_size() * whole)) * whole
    count, first = min(share, len(data)), data[FIRST_STAGE].tolist()
    own, others = (
        [row for row, one in enumerate(first) if one == wanted] for wanted in (True, False)
    )
    rows = [own[place] for place in evenly(len(own), count)]
    probe = tu.index_select_tensor_dict(data, [*rows, *others[: count - len(rows)]])
    tu.assign_non_tensor(probe, calculate_entropy=False)
    return probe


def _logprobs(engine: Any, probe: TensorDict) -> Tensor:  # [B, T]
    """Under the module as it stands. Weights that FSDP left gathered would hide what is put into the shards next."""
    output = engine.forward_backward_batch(probe, None, forward_only=True)["model_output"]
    reshard(engine.module)
    return no_padding_2_padding(output["log_probs"], probe).double()


def _mean_kl(before: Tensor, after: Tensor, mask: Tensor) -> float:
    """Over all ranks, so that all of them go the same way; ranks that share a sequence count it alike."""
    num_tokens = mask.sum()
    sums = torch.stack([kl_penalty(before, after, mask) * num_tokens, num_tokens])
    torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1].clamp(min=1))
