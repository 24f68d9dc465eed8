"""EEPO inside TRL's `GRPOTrainer`: an import and two class names change in a script (docs/trl.md).

TRL samples, grades and updates. Here stands what EEPO adds to a rollout: half of every group from θ, one step of
unlearning, the other half from θ′, and each half's log-probabilities under the weights that sampled it. Gate and loss
are `algorithm.py`'s. TRL samples from the very model it trains, so θ′ is written into it and θ comes back bit for bit.

A generation batch holds every prompt G times in a row, G even: even rows are stage 1, odd rows stage 2. That stays true
where a process's slice cuts a group, as long as every slice is even.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter
from torch.nn.utils.rnn import pad_sequence

from eepo import recipe
from eepo.advantages import advantage_weights
from eepo.algorithm import kl_penalty, token_gate, unlearn_loss, unlearned_weights
from eepo.config import AlgorithmConfig, RunConfig
from eepo.policy import Scores
from eepo.types import UserError

OLDEST, TOO_NEW = (1, 15), (1, 17)  # as in pyproject.toml; tests/adapters/test_trl.py says what is relied on
STATE_FILE = "eepo.json"  # in every checkpoint
KNOBS = (
    "gate", "gate_threshold", "gate_window", "unlearn_lr", "unlearn_loss", "unlearn_eps", "later_advantages",
    "failure_weight",
)  # fmt: skip


def check_trl() -> None:
    """Before anything of TRL is touched: another version may sample, order or score in another way."""
    wanted = f"trl>={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}"
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise UserError(
            f"eepo.adapters.trl needs {wanted}, and trl is not installed: pip install 'eepo[trl]'"
        ) from None
    if not OLDEST <= tuple(map(int, found.split(".")[:2])) < TOO_NEW:
        raise UserError(f"eepo.adapters.trl needs {wanted}, found trl {found}: pip install '{wanted}'")


check_trl()
from trl import GRPOConfig, GRPOTrainer  # noqa: E402  (only a version that passed)


@dataclass
class EEPOConfig(GRPOConfig):
    """`GRPOConfig`, and EEPO's knobs with the names, meanings and defaults they have in a recipe's [algorithm]."""

    gate: Literal["token", "step", "always", "never"] = field(
        default="token",
        metadata={"help": "What is unlearned: tokens of low entropy, whole steps of low entropy, all, or nothing."},
    )
    gate_threshold: float = field(default=0.3, metadata={"help": "Entropy (nats) under which the gate opens."})
    gate_window: int = field(default=3, metadata={"help": "Tokens, or steps, whose mean entropy the gate looks at."})
    unlearn_lr: float = field(default=3e-3, metadata={"help": "Step size of the unlearning step."})
    unlearn_loss: Literal["comp", "nll"] = field(
        default="comp", metadata={"help": "-log(1 - p) of what was sampled, or ascent on its NLL."}
    )
    unlearn_eps: float = field(default=1e-4, metadata={"help": "p counts as at most 1 - unlearn_eps."})
    later_advantages: Literal["all", "positive"] = field(
        default="all", metadata={"help": "'positive': stage 2 is not punished for failing."}
    )
    failure_weight: float = field(
        default=1.0, metadata={"help": "How much what does worse than its group counts, from 0 to 1."}
    )

    def __post_init__(self) -> None:
        self._check_knobs()
        super().__post_init__()
        if self.gate != "never":
            self._check_neighbours()

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The same knobs as `algorithm.py` reads them, each checked as in a recipe."""
        return recipe.parse(
            RunConfig, {"algorithm": {name: getattr(self, name) for name in KNOBS}}, "EEPOConfig"
        ).algorithm

    def _check_knobs(self) -> None:
        if isinstance(self.unlearn_lr, str):
            raise UserError(f"unlearn_lr = {self.unlearn_lr!r} must be a number here")
        if self.algorithm.gate != "never" and (self.num_generations or 0) % 2:
            raise UserError(f"num_generations must be even, one half for each stage, got {self.num_generations}")

    def _check_neighbours(self) -> None:
        """TRL's settings under which stages, gradient or restored weights would be silently wrong."""
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if rows % 2:
            raise UserError(f"per_device_train_batch_size * steps_per_generation must be even, got {rows}")
        if self.fp16:
            raise UserError("fp16 = True must be False: without loss scaling the unlearning gradient underflows")
        if self.use_transformers_continuous_batching:
            raise UserError("use_transformers_continuous_batching = True must be False: it rounds the trained weights")
        optim = str(getattr(self.optim, "value", self.optim))
        if any(word in optim for word in ("layerwise", "lomo")):
            raise UserError(f"optim = {optim} must not update weights during a backward pass; try adamw_torch")


@dataclass
class MicroBatch:
    """Some completions, padded as TRL pads: prompts on the left, completions on the right."""

    input_ids: Tensor  # [B, P + T]
    attention_mask: Tensor  # [B, P + T]
    mask: Tensor  # [B, T] bool: True on completion tokens


class EEPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with two-stage rollouts. Evaluation, and gate = "never" but for `failure_weight`, are TRL's own."""

    _tag_names = ["trl", "eepo"]  # noqa: RUF012  (as TRL declares it)
    _name = "EEPO"
    _paper = {"title": "EEPO: Exploration-Enhanced Policy Optimization via Sample-Then-Forget"}  # noqa: RUF012

    def __init__(self, model: Any, reward_funcs: Any = None, args: EEPOConfig | None = None, **others: Any) -> None:
        args = EEPOConfig("eepo-output") if args is None else args
        if not isinstance(args, EEPOConfig):
            raise UserError(f"args must be an EEPOConfig, got {type(args).__name__}")
        self.options = args.algorithm
        self.gate_history: list[float] = []  # stage-1 entropies of the last steps
        self._rollout_logprobs: list[Tensor] | None = None  # of each row, while TRL scores a two-stage rollout
        self.num_generations: int  # G, TRL's
        super().__init__(model, reward_funcs, args, **others)
        if self.options.gate != "never":
            self._check_host()

    def _check_host(self) -> None:
        """What only the built trainer knows."""
        if self.tools or self.rollout_func is not None or self.environment_factories is not None:
            raise UserError("tools, rollout_func and environment_factory must be left out: stages split plain rollouts")
        if self._is_vlm:
            raise UserError(
                f"processing_class must be a tokenizer: text only, got {type(self.processing_class).__name__}"
            )
        if hasattr(self.model, "peft_config") and self.beta != 0.0:
            raise UserError(f"beta must be 0 with a PEFT model, got {self.beta}")
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and weight.dtype != torch.float32:
                raise UserError(
                    f'model: {name} is {weight.dtype}, must be float32 (dtype="float32"): other types round the '
                    "unlearning step away; bf16 = True computes in bfloat16 all the same"
                )
        kind = str(self.accelerator.distributed_type).rpartition(".")[2]
        if kind in ("DEEPSPEED", "MEGATRON_LM") or (kind == "FSDP" and not self.accelerator.is_fsdp2):
            raise UserError(f"accelerate: distributed_type = {kind} must be none, DDP or FSDP with fsdp_version 2")
        window, every = self.args.gradient_accumulation_steps, self.args.steps_per_generation * self.num_iterations
        if kind == "FSDP" and every % window:
            raise UserError(
                f"with FSDP steps_per_generation * num_iterations must be a multiple of "
                f"gradient_accumulation_steps = {window}, got {every}"
            )

    # --- the rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if not self.model.training or self.options.gate == "never":
            return super()._generate(prompts)
        if prompts[0::2] != prompts[1::2]:
            raise UserError("train_dataset: the sampler must give each prompt num_generations times in a row")
        first = self._sample(prompts[0::2])
        batches = self._micro_batches(first)
        before, gradient = self._forget(batches)
        with self._unlearned(gradient):
            second = self._sample(prompts[1::2])
            after = self._score(self._micro_batches(second), "stage2")
            if gradient is not None:
                self._record_kl(before, batches[0])
        self._rollout_logprobs = interleaved(before, after)
        return tuple(interleaved(*parts) for parts in zip(first, second, strict=True))

    def _sample(self, prompts: list[Any]) -> tuple[Any, ...]:
        """One stage: G / 2 rows of each prompt. A vLLM server is asked for `num_generations` of every distinct one."""
        whole = self.num_generations
        self.num_generations = whole // 2
        try:
            return super()._generate(prompts)
        finally:
            self.num_generations = whole

    def _forget(self, batches: list[MicroBatch]) -> tuple[list[Tensor], dict[str, Tensor] | None]:
        """Log-probabilities of stage 1 under θ, and ∇L over all processes; None where the gate lets nothing through.

        An update may be half accumulated: its gradients are set aside.
        """
        num_rows = sum(len(batch.mask) for batch in batches)
        logprobs: list[Tensor] = []
        sums = torch.zeros(4, dtype=torch.float64, device=self.accelerator.device)  # tokens, entropies, gated, loss
        weights = self._weights()
        with own_gradients(weights), self._gradients_reduced():
            for batch in batches:
                scores = self._forward(batch)
                gate = self._gate(scores, batch)
                loss = unlearn_loss(scores, batch.mask, gate, self.options) * len(batch.mask) / num_rows
                loss.backward()
                logprobs += rows_of(scores.logprobs.detach(), batch.mask)
                entropy = scores.entropies.detach()[batch.mask].sum()
                sums += torch.stack([batch.mask.sum(), entropy, gate.sum(), loss.detach()]).to(sums)
            gradient = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        opened = self._record_stage_1(self.accelerator.reduce(sums, "sum").tolist())
        if not opened:
            return logprobs, None
        if not self.accelerator.is_fsdp2:  # FSDP took the mean over processes itself
            gradient = {name: self.accelerator.reduce(part, "mean") for name, part in gradient.items()}
        return logprobs, gradient

    def _gate(self, scores: Scores, batch: MicroBatch) -> Tensor:  # bool [B, T]
        if self.options.gate == "token":
            return token_gate(
                scores.entropies.detach(), batch.mask, self.options.gate_threshold, self.options.gate_window
            )
        return batch.mask

    def _record_stage_1(self, sums: list[float]) -> bool:
        """Remember the step's entropy; True where something is to be unlearned."""
        num_tokens, entropies, gated, loss = sums
        self.gate_history = [*self.gate_history, entropies / num_tokens][-self.options.gate_window :]
        low_entropy = sum(self.gate_history) / len(self.gate_history) < self.options.gate_threshold
        opened = low_entropy if self.options.gate == "step" else gated > 0
        self._record("stage1_entropy", entropies / num_tokens)
        self._record("gated_share", gated / num_tokens if opened else 0.0)
        self._record("unlearn_loss", loss / self.accelerator.num_processes if opened else 0.0)
        return opened

    @contextmanager
    def _unlearned(self, gradient: dict[str, Tensor] | None) -> Iterator[None]:
        """θ′ in the model, and in vLLM from its next use; θ in both afterwards. Without a gradient θ′ is θ."""
        if gradient is None:
            yield
            return
        try:
            with moved(self._weights(), gradient, float(self.options.unlearn_lr)):
                self._forget_copies()
                yield
        finally:
            self._forget_copies()

    def _forget_copies(self) -> None:
        """The weights have changed: whatever was made of them before must not be sampled from."""
        self._last_loaded_step = -1  # TRL pushes weights to vLLM where this is not the current step
        self._reshard()

    def _reshard(self) -> None:
        """FSDP leaves the last layers gathered after a forward pass."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _weights(self) -> dict[str, Parameter]:
        """What is trained: under FSDP the shards, not a gathered copy."""
        self._reshard()
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    @contextmanager
    def _gradients_reduced(self) -> Iterator[None]:
        """FSDP leaves gradients unreduced in all but the last micro-batch of an update; ours are always whole."""
        if self.accelerator.is_fsdp2:
            self.model.set_requires_gradient_sync(True)
        yield
        if self.accelerator.is_fsdp2:
            self.model.set_requires_gradient_sync(self.accelerator.sync_gradients)

    # --- scoring

    def _micro_batches(self, stage: tuple[Any, ...]) -> list[MicroBatch]:
        """As many rows at a time as TRL's own update takes."""
        prompts, completions = ([torch.tensor(ids) for ids in part] for part in stage[:2])
        size, device = self.args.per_device_train_batch_size, self.accelerator.device
        return [
            micro_batch(prompts[row : row + size], completions[row : row + size], self._tokenizer.pad_token_id, device)
            for row in range(0, len(prompts), size)
        ]

    def _forward(self, batch: MicroBatch) -> Scores:
        width = batch.mask.shape[1]
        logprobs, entropies, *_ = super()._get_per_token_logps_and_entropies(
            self.model, batch.input_ids, batch.attention_mask, width, compute_entropy=True
        )
        return Scores(logprobs.float(), entropies.float())

    @torch.no_grad()
    def _score(self, batches: list[MicroBatch], name: str) -> list[Tensor]:
        """Log-probabilities of each row under the model as it stands."""
        logprobs: list[Tensor] = []
        sums = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for batch in batches:
            scores = self._forward(batch)
            logprobs += rows_of(scores.logprobs, batch.mask)
            sums += torch.stack([batch.mask.sum(), scores.entropies[batch.mask].sum()]).to(sums)
        num_tokens, entropies = self.accelerator.reduce(sums, "sum").tolist()
        self._record(f"{name}_entropy", entropies / num_tokens)
        return logprobs

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Where TRL asks for "old" log-probabilities of a two-stage rollout, those of the weights that sampled.

        It also holds what vLLM reports against these: under θ, stage 2 would look like a broken engine and be zeroed.
        """
        if self._rollout_logprobs is not None and model is self.model:
            return padded(self._rollout_logprobs, attention_mask[:, -logits_to_keep:].shape), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            output = super()._generate_and_score_completions(inputs)
            if self._rollout_logprobs is not None:
                mask = output["completion_mask"]  # without what TRL masks, as its own log-probabilities are
                output["old_per_token_logps"] = padded(self._rollout_logprobs, mask.shape) * mask
                self._record_rewards()
            if self.model.training:
                output["advantages"] = self._weighed(output["advantages"])
        finally:
            self._rollout_logprobs = None
        return output

    def _weighed(self, advantages: Tensor) -> Tensor:  # [B] -> [B]
        stages = torch.ones_like(advantages)
        if self._rollout_logprobs is not None:
            stages[1::2] = 2
        return advantages * advantage_weights(advantages, advantages, stages, self.options)  # nobody asks who is rare

    # --- records

    def _record(self, name: str, value: float) -> None:
        self._metrics["train"][f"eepo/{name}"].append(value)

    @torch.no_grad()
    def _record_kl(self, before: list[Tensor], batch: MicroBatch) -> None:
        """KL(θ‖θ′) a token, on the one micro-batch of stage 1 that each process can afford."""
        after = self._forward(batch).logprobs
        kl = kl_penalty(padded(before, after.shape), after, batch.mask)
        self._record("kl", self.accelerator.reduce(kl, "mean").item())

    def _record_rewards(self) -> None:
        """TRL's log holds the rewards of the last generation batch, of all processes, in the order of its rows."""
        parts = torch.tensor(
            [list(self._logs["rewards"][name]) for name in self.reward_func_names]
        )  # [functions, rows]
        rewards = (parts * self.reward_weights.cpu()[:, None]).nansum(0)
        self._record("stage1_reward", rewards[0::2].mean().item())
        self._record("stage2_reward", rewards[1::2].mean().item())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            (folder / STATE_FILE).write_text(json.dumps({"gate_history": self.gate_history}), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE_FILE).is_file():
            self.gate_history = json.loads((Path(checkpoint) / STATE_FILE).read_text(encoding="utf-8"))["gate_history"]


def micro_batch(prompts: list[Tensor], completions: list[Tensor], pad_id: int, device: torch.device) -> MicroBatch:
    """Ragged token ids -> padded."""
    ids, masks = [], []
    for rows, side in ((prompts, "left"), (completions, "right")):
        ids.append(pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side=side))
        masks.append(pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side))
    return MicroBatch(torch.cat(ids, 1).to(device), torch.cat(masks, 1).to(device), masks[1].bool().to(device))


def rows_of(values: Tensor, mask: Tensor) -> list[Tensor]:  # [B, T] -> B of [T_k]
    return [row[: int(length)] for row, length in zip(values, mask.sum(1), strict=True)]


def padded(rows: list[Tensor], shape: torch.Size) -> Tensor:  # [T_k] each -> [B, T]
    """The first B rows, zero on the right."""
    grid = rows[0].new_zeros(shape)
    for place, row in zip(grid, rows, strict=False):
        place[: len(row)] = row
    return grid


def interleaved(first: Any, second: Any) -> Any:
    """Rows of both stages, in turn, in every part of what TRL returns of a rollout, whichever parts a version has."""
    if type(first) is not type(second):
        raise TypeError(f"stages returned a {type(first).__name__} and a {type(second).__name__}")
    if isinstance(first, dict):
        return {name: interleaved(first[name], second[name]) for name in first}
    if isinstance(first, list):
        return [row for pair in zip(first, second, strict=True) for row in pair]
    return first


@contextmanager
def own_gradients(weights: dict[str, Parameter]) -> Iterator[None]:
    """Inside, every `.grad` starts empty; what was there is back afterwards."""
    kept = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.grad = kept[name]


@contextmanager
@torch.no_grad()
def moved(weights: dict[str, Parameter], gradient: dict[str, Tensor], lr: float) -> Iterator[None]:
    """θ − lr · gradient in place of θ. The gradient's memory holds θ meanwhile: exact, and no third copy."""
    named = [(name, weights[name]) for name in gradient]
    for name, stepped in unlearned_weights(named, gradient, lr, torch.float32):
        gradient[name].copy_(weights[name])
        weights[name].copy_(stepped)
    try:
        yield
    finally:
        for name, kept in gradient.items():
            weights[name].copy_(kept)
