"""verl's actor-and-rollout worker, which can also forget: θ′ is computed beside θ and goes out with the next push."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.profiler import DistProfiler
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import no_padding_2_padding

from eepo.adapters.verl import unlearning
from eepo.adapters.verl.search import FIRST_STAGE, find_rate
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores

WANTED = "eepo_wanted"  # a column of the rows


def engine_loss(
    model_output: dict[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    options: AlgorithmConfig,
    num_rows: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The unlearning loss as verl's engines call it. FSDP averages over ranks, ours is a sum over them: × dp_size."""
    logprobs = no_padding_2_padding(model_output["log_probs"], data)  # [B, T]
    entropies = no_padding_2_padding(model_output["entropy"], data)
    mask = data.select("response_mask").to_padded_tensor()["response_mask"]
    scores = Scores(logprobs.float(), entropies.float())
    loss, counts = unlearning.micro_batch_loss(scores, mask, data[WANTED], options, num_rows)
    return loss * data["dp_size"], counts


class UnlearningWorker(ActorRolloutRefWorker):
    """`unlearn` keeps θ′; the next `update_weights` sends it in place of θ, and forgets it."""

    rollout_weights: unlearning.Shards | None = None
    fingerprint: list[int] | None = None  # of θ before unlearning; only in debug mode

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="purple", role="eepo_unlearn")
    def unlearn(self, data: TensorDict) -> TensorDict:
        """One forward and backward pass over the completions in `data`. Neither θ nor the optimizer takes a step."""
        errand: unlearning.Errand = tu.pop(data, "eepo_errand")
        options, engine = errand.options, self.actor.engine
        if errand.debug:
            self.fingerprint = unlearning.fingerprint(engine.module, engine.optimizer)
        first = engine.get_data_parallel_rank() * len(
            data
        )  # verl cuts a batch into equal slices, rank after rank
        for name, flags in ((WANTED, errand.wanted), (FIRST_STAGE, errand.first_stage)):
            data[name] = torch.tensor(flags[first : first + len(data)])
        tu.maybe_fix_3d_position_ids(data)
        tu.assign_non_tensor(data, **self._batching())
        with engine.train_mode():
            engine.optimizer_zero_grad()
            loss = partial(engine_loss, options=options, num_rows=errand.num_completions)
            output = engine.forward_backward_batch(data, loss)
            norm = unlearning.gradient_norm(engine.module)
            metrics = {"grad_norm": norm, **self._totals(output["metrics"])}
            if 0 < norm < math.inf:
                if options.unlearn_lr == "auto":
                    found = find_rate(engine, data, options, errand.start_lr)
                    metrics |= {"lr": found.lr, "kl": found.kl, "kl_floor": found.floor}
                else:
                    metrics["lr"] = options.unlearn_lr
                self.rollout_weights = unlearning.take_rollout_weights(engine.module, metrics["lr"])
                metrics["weights_changed_share"] = self._changed_share(self.rollout_weights)
        if self.rollout_weights is not None:
            homes = dict(
                engine.module.named_parameters()
            )  # verl may have moved θ to the CPU on leaving train_mode
            self.rollout_weights = {
                n: shard.to(homes[n].device) for n, shard in self.rollout_weights.items()
            }
        return tu.get_tensordict({}, non_tensor_dict={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """verl's own push: of θ′ once after `unlearn`, else of θ."""
        if self.rollout_weights is None:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        shards, self.rollout_weights = self.rollout_weights, None
        engine = self.actor.engine
        with unlearning.rollout_weights(engine.module, shards):
            pushed = await super().update_weights(global_steps=global_steps, mode=mode)
        before, self.fingerprint = self.fingerprint, None
        if before is not None and before != unlearning.fingerprint(engine.module, engine.optimizer):
            raise RuntimeError("unlearning changed the policy's weights or the optimizer's state")
        return pushed

    def _batching(self) -> dict[str, Any]:
        """How to cut micro-batches: as for verl's own update."""
        engine, model = self.actor.engine_config, self.actor.model_config
        return {
            "calculate_entropy": True,
            "use_remove_padding": model.get("use_remove_padding", False),
            "use_dynamic_bsz": engine.use_dynamic_bsz,
            "max_token_len_per_gpu": engine.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": engine.micro_batch_size_per_gpu,
            "use_fused_kernels": engine.use_fused_kernels,
        }

    def _totals(self, counts: dict[str, list[float]]) -> dict[str, float]:
        """Over all micro-batches and ranks, the same on each."""
        names = ("gated", "tokens", "entropy", "loss")
        sums = torch.tensor(
            [sum(counts[name]) for name in names], device=get_device_name(), dtype=torch.float64
        )
        torch.distributed.all_reduce(sums, group=self.actor.engine.get_data_parallel_group())
        return dict(zip(names, sums.tolist(), strict=True))

    def _changed_share(self, shards: unlearning.Shards) -> float:
        dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        counts = unlearning.count_changes(self.actor.engine.module, shards, dtype)
        sums = torch.tensor(counts, device=get_device_name(), dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        return float(sums[0] / sums[1])
