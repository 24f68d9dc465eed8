"""Adds unlearning to verl's actor-and-rollout worker: it computes θ′ and pushes it once."""

from __future__ import annotations

import math
from contextlib import nullcontext
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
from eepo.adapters.verl.complements import COMPLEMENTS, complements_in_output
from eepo.adapters.verl.search import IN_STAGE1, search_lr
from eepo.config import AlgorithmConfig
from eepo.model.policy import Scores

REQUEST = "eepo_unlearn_request"  # key of the `UnlearnRequest` in a batch
SELECTED = "eepo_selected"  # bool column: the row is unlearned


def engine_loss(
    model_output: dict[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    options: AlgorithmConfig,
    num_completions: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute the unlearning loss with the signature that verl's engines call.

    FSDP averages gradients over ranks, but the loss is a sum over them. So multiply by dp_size.
    """
    names = ("log_probs", "entropy", COMPLEMENTS)  # the last only with saturation = exact
    columns = [model_output[name] for name in names if name in model_output]
    scores = Scores(*(no_padding_2_padding(column, data).float() for column in columns))  # [B, T]
    mask = data.select("response_mask").to_padded_tensor()["response_mask"]
    loss, sums = unlearning.micro_batch_loss(scores, mask, data[SELECTED], options, num_completions)
    return loss * data["dp_size"], sums


class UnlearningWorker(ActorRolloutRefWorker):
    """`unlearn` computes θ′. The next `update_weights` sends it instead of θ and drops it."""

    rollout_weights: unlearning.Shards | None = None
    fingerprint: list[int] | None = None  # of θ before unlearning; only in debug mode

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="purple", role="eepo_unlearn")
    def unlearn(self, data: TensorDict) -> TensorDict:
        """Run one forward and backward pass over `data`, and keep θ′ = θ − η ∇L.

        Neither θ nor the optimizer's state changes.
        """
        request: unlearning.UnlearnRequest = tu.pop(data, REQUEST)
        engine = self.actor.engine
        if request.debug:
            self.fingerprint = unlearning.fingerprint(engine.module, engine.optimizer)
        self._add_columns(data, request)
        loss = partial(
            engine_loss, options=request.options, num_completions=request.num_completions
        )
        needs_complements = request.options.saturation == "exact"
        with engine.train_mode():
            engine.optimizer_zero_grad()
            with complements_in_output(engine) if needs_complements else nullcontext():
                output = engine.forward_backward_batch(data, loss)
            norm = unlearning.gradient_norm(engine.module)
            metrics = {"grad_norm": norm, **self._totals(output["metrics"])}
            if 0 < norm < math.inf:
                metrics |= self._step(data, request)
        if self.rollout_weights is not None:
            # verl may have moved θ to the CPU at the end of train_mode.
            theta = dict(engine.module.named_parameters())
            self.rollout_weights = {
                name: shard.to(theta[name].device) for name, shard in self.rollout_weights.items()
            }
        return tu.get_tensordict({}, non_tensor_dict={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Push weights as verl does: θ′ once after `unlearn`, otherwise θ."""
        if self.rollout_weights is None:
            return await super().update_weights(global_steps=global_steps, mode=mode)
        shards, self.rollout_weights = self.rollout_weights, None
        engine = self.actor.engine
        with unlearning.rollout_weights(engine.module, shards):
            result = await super().update_weights(global_steps=global_steps, mode=mode)
        before, self.fingerprint = self.fingerprint, None
        if before is not None and before != unlearning.fingerprint(engine.module, engine.optimizer):
            raise RuntimeError("unlearning changed the policy's weights or the optimizer's state")
        return result

    def _add_columns(self, data: TensorDict, request: unlearning.UnlearnRequest) -> None:
        """Add this rank's flags and the micro-batch settings of verl's update to `data`."""
        # verl cuts a batch into equal slices, rank after rank.
        start = self.actor.engine.get_data_parallel_rank() * len(data)
        for name, flags in ((SELECTED, request.selected), (IN_STAGE1, request.in_stage1)):
            data[name] = torch.tensor(flags[start : start + len(data)])
        tu.maybe_fix_3d_position_ids(data)
        engine, model = self.actor.engine_config, self.actor.model_config
        tu.assign_non_tensor(
            data,
            calculate_entropy=True,
            use_remove_padding=model.get("use_remove_padding", False),
            use_dynamic_bsz=engine.use_dynamic_bsz,
            max_token_len_per_gpu=engine.max_token_len_per_gpu,
            micro_batch_size_per_gpu=engine.micro_batch_size_per_gpu,
            use_fused_kernels=engine.use_fused_kernels,
        )

    def _step(self, data: TensorDict, request: unlearning.UnlearnRequest) -> dict[str, float]:
        """Choose η, turn the gradient into θ′, and return metrics."""
        engine, options = self.actor.engine, request.options
        metrics: dict[str, float]
        if options.unlearn_lr == "auto":
            result = search_lr(engine, data, options, request.start_lr)
            metrics = {"lr": result.lr, "kl": result.kl, "kl_floor": result.floor}
        else:
            metrics = {"lr": options.unlearn_lr}
        self.rollout_weights = unlearning.take_rollout_weights(engine.module, metrics["lr"])
        return metrics | {"weights_changed_share": self._changed_share(self.rollout_weights)}

    def _totals(self, sums: dict[str, list[float]]) -> dict[str, float]:
        """Add up the sums of all micro-batches and ranks."""
        names = ("gated", "tokens", "entropy", "loss")
        values = [sum(sums[name]) for name in names]
        totals = torch.tensor(values, device=get_device_name(), dtype=torch.float64)
        torch.distributed.all_reduce(totals, group=self.actor.engine.get_data_parallel_group())
        return dict(zip(names, totals.tolist(), strict=True))

    def _changed_share(self, shards: unlearning.Shards) -> float:
        dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        counts = unlearning.count_changes(self.actor.engine.module, shards, dtype)
        totals = torch.tensor(counts, device=get_device_name(), dtype=torch.float64)
        torch.distributed.all_reduce(totals)
        return float(totals[0] / totals[1])
