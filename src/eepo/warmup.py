"""Supervised warm start: trains a model on a task's demonstrations.

It maximises the likelihood of completions given prompts, with a cosine schedule and nothing else:
no packing of documents, no data mixture.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eepo.config import SupervisedConfig, WarmupConfig
from eepo.evaluation.evaluate import Evaluator
from eepo.evaluation.sets import task_sets
from eepo.model.optimizers import clipped_step
from eepo.model.policy import Policy, Scores
from eepo.protocols import Task
from eepo.runs.checkpoint import Checkpointer, weights_damage
from eepo.runs.lock import RunLock
from eepo.runs.progress import Progress
from eepo.runs.resume import FINAL, save_checkpoint
from eepo.runs.runlog import EVALUATIONS, METRICS, RunLog
from eepo.types import Completion, Prompt, Sampling

Pairs = list[tuple[Prompt, Completion]]
FirstTokens = list[float | None]  # per pair: the probability that the first token should have
FIRST_TOKEN_WEIGHT = 0.3  # factor of the first-token loss in the total loss


@dataclass
class Warmup:
    config: WarmupConfig
    policy: Policy
    evaluator: Evaluator
    checkpointer: Checkpointer
    task: Task
    log: RunLog
    progress: Progress
    lock: RunLock  # of the run folder
    step: int = 0  # finished steps

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint. The policy has its weights already."""
        self.step = self.checkpointer.load(folder)["step"]

    def run(self) -> Path:
        """Train to the last step, evaluate, and return the folder of the final weights."""
        try:
            self._train()
            return self._finish()
        finally:
            self.lock.release()

    def _train(self) -> None:
        settings = self.config.supervised
        batches = _Demonstrations(self.task, self.checkpointer.tokenizer, settings, self.step)
        loader = DataLoader(
            batches,
            batch_size=None,
            num_workers=settings.num_workers,
            generator=torch.Generator(),  # else the loader draws from torch's global state
        )
        with self.progress.bar(f"warm up {self.config.name}", settings.num_steps, self.step) as bar:
            for pairs, first_tokens in loader:
                row = self._one_step(pairs, first_tokens)
                self.log.append(METRICS, row)
                bar.advance(note=f"loss {row['loss']:.4f}")
                if self._checkpoint_due():
                    save_checkpoint(self.checkpointer, self.log, self.step, {})

    def _finish(self) -> Path:
        final = self.log.folder / FINAL
        damage, evaluated = weights_damage(final), self.log.has_evaluation(self.step, "full")
        if evaluated and not damage:  # a finished warm start is resumed
            return final
        if damage and final.exists():
            self.progress.print(f"note: {final} is damaged: {damage}; it is written again")
        if not evaluated:
            self._evaluate()
        for line in describe_policy(self.task, self.policy, self.evaluator):
            self.progress.print(line)
        self.policy.model.to(getattr(torch, self.config.supervised.save_dtype))
        return self.checkpointer.save_final(final)

    def _checkpoint_due(self) -> bool:
        """Also save the last step: the evaluation after it may take long and be interrupted."""
        settings = self.config.supervised
        every = settings.checkpoint_every
        return self.step == settings.num_steps or (every > 0 and self.step % every == 0)

    def _one_step(self, pairs: Pairs, first_tokens: FirstTokens) -> dict[str, float]:
        started = time.perf_counter()
        settings = self.config.supervised
        lr = learning_rate(self.step, settings)
        for group in self.checkpointer.optimizer.param_groups:
            group["lr"] = lr
        num_tokens = sum(len(completion.token_ids) for _, completion in pairs)
        total = torch.zeros((), device=self.policy.device)
        for batch in self.policy.micro_batches(pairs):
            scores = self.policy.score(batch, temperature=1.0)
            has_target = batch.pick([target is not None for target in first_tokens]).bool()
            logprobs = scores.logprobs.clone()
            logprobs[:, 0] = torch.where(has_target, 0.0, logprobs[:, 0])
            loss = -logprobs.sum() / num_tokens
            if has_target.any():
                targets = batch.pick([1.0 if p is None else p for p in first_tokens])
                errors = torch.where(has_target, first_token_loss(scores, targets), 0.0)
                loss = loss + FIRST_TOKEN_WEIGHT * errors.sum() / len(pairs)
            loss.backward()
            total += loss.detach()
        norm = clipped_step(
            self.policy.model.parameters(),
            self.checkpointer.optimizer,
            settings.max_grad_norm,
            "start a new run with a lower supervised.learning_rate",
        )
        self.step += 1
        return {
            "step": self.step,
            "loss": float(total),
            "grad_norm": norm,
            "lr": lr,
            "seconds/total": time.perf_counter() - started,
        }

    def _evaluate(self) -> None:
        settings = self.config.evaluation
        sampling = Sampling(
            settings.temperature, self.config.max_new_tokens, settings.seed, "evaluation"
        )
        prompt_sets = task_sets(self.task, settings.num_problems)
        sets = {each.name: each.prompts for each in prompt_sets}
        self.evaluator.engine.load_weights(self.policy.named_weights())
        with self.progress.bar("evaluate", sum(map(len, sets.values()))) as bar:
            results = self.evaluator.evaluate(sets, settings.num_samples, sampling, bar.advance)
        rows: list[dict[str, Any]] = [
            {"step": self.step, "kind": "full", "set": name} | result.row(with_problems=True)
            for name, result in results.items()
        ]
        self.log.append(EVALUATIONS, *rows)
        for row in rows:
            k = max(row["pass@k"], key=int)
            accuracy = f"greedy {row['greedy']:.3f}, mean {row['mean']:.3f}"
            self.progress.print(f"{row['set']}: {accuracy}, pass@{k} {row['pass@k'][k]:.3f}")


def learning_rate(step: int, settings: SupervisedConfig) -> float:
    """Rise linearly for `ramp_steps`, then fall along a cosine to a tenth of the peak."""
    peak, ramp_steps = settings.learning_rate, settings.ramp_steps
    if step < ramp_steps:
        return peak * (step + 1) / ramp_steps
    done = (step - ramp_steps) / max(1, settings.num_steps - ramp_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def first_token_loss(scores: Scores, targets: Tensor) -> Tensor:  # [B] -> [B]
    """Pull the log-odds of the first token to those of `targets`.

    Maximum likelihood would need millions of demonstrations for a probability of 1e-5. Log-odds
    resolve probabilities near 0 and near 1, and their gradient vanishes at neither end.
    """
    if scores.complements is None:
        raise ValueError("the policy gives no log(1 − p)")
    actual = scores.logprobs[:, 0] - scores.complements[:, 0]
    wanted = torch.logit(targets.clamp(max=1 - 1e-7))
    return torch.nn.functional.smooth_l1_loss(actual, wanted, reduction="none")


def describe_policy(task: Task, policy: Policy, evaluator: Evaluator) -> list[str]:
    """Return what a task has to say about the policy that it was taught, if anything."""
    describe = getattr(task, "describe_policy", None)
    return describe(policy, evaluator.engine, evaluator.reward) if describe else []


class _Demonstrations(Dataset[tuple[Pairs, FirstTokens]]):
    """Maps a batch number to its demonstrations. Worker processes can generate them."""

    def __init__(self, task: Task, tokenizer: Any, settings: SupervisedConfig, first: int) -> None:
        self.task, self.tokenizer, self.batch_size = task, tokenizer, settings.batch_size
        self.first, self.last = first, settings.num_steps

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> tuple[Pairs, FirstTokens]:
        if index >= len(self):
            raise IndexError
        start = (self.first + index) * self.batch_size
        demonstrations = self.task.demonstrations(start, self.batch_size)
        pairs = [(each.prompt, self._completion(each.text)) for each in demonstrations]
        return pairs, [each.first_token_probability for each in demonstrations]

    def _completion(self, text: str) -> Completion:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        ids = (*ids, self.tokenizer.eos_token_id)
        return Completion(ids, logprobs=(), text=text, finished=True)
