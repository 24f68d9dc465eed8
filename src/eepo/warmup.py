"""Supervised warm start: teach a model a task's own demonstrations, from scratch or from a base model.

It is maximum likelihood on completions given prompts, no more: no packing, no mixture, no schedule but a cosine.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from eepo.config import WarmupConfig
from eepo.evaluation.evaluate import evaluate
from eepo.model.policy import Policy
from eepo.protocols import Reward, RolloutEngine, Task
from eepo.runs import checkpoint
from eepo.runs.progress import Progress
from eepo.runs.runlog import EVALUATIONS, METRICS, RunLog
from eepo.types import Completion, Prompt, Sampling

Pairs = list[tuple[Prompt, Completion]]


@dataclass
class Warmup:
    config: WarmupConfig
    policy: Policy
    engine: RolloutEngine
    reward: Reward
    optimizer: torch.optim.Optimizer
    task: Task
    tokenizer: Any
    log: RunLog
    progress: Progress
    step: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.log.folder / "checkpoints"

    def restore(self, folder: Path) -> None:
        self.step = checkpoint.load_training(folder, self.policy.model, self.optimizer)["step"]

    def run(self) -> Path:
        settings = self.config.supervised
        batches = _Demonstrations(
            self.task, self.tokenizer, settings.batch_size, self.step, settings.num_steps
        )
        loader = DataLoader(batches, batch_size=None, num_workers=settings.num_workers)
        with self.progress.bar(f"warm up {self.config.name}", settings.num_steps, self.step) as bar:
            for pairs in loader:
                row = self._one_step(pairs)
                self.log.append(METRICS, row)
                bar.advance(note=f"loss {row['loss']:.4f}")
                last = (
                    self.step == settings.num_steps
                )  # evaluating may take long, and be interrupted
                if last or (
                    settings.checkpoint_every and self.step % settings.checkpoint_every == 0
                ):
                    checkpoint.save(
                        self.checkpoints,
                        self.step,
                        self.policy.model,
                        self.tokenizer,
                        self.optimizer,
                        {},
                    )
                    checkpoint.prune(self.checkpoints, keep=1)
        final = self.log.folder / "final"
        if not final.exists():  # else: a finished warm start, looked at again
            self._evaluate()
            model = self.policy.model.to(getattr(torch, settings.save_dtype))
            checkpoint.save_final(final, model, self.tokenizer)
        return final

    def _one_step(self, pairs: Pairs) -> dict[str, float]:
        started = time.perf_counter()
        settings = self.config.supervised
        rate = learning_rate(
            self.step, settings.num_steps, settings.ramp_steps, settings.learning_rate
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        num_tokens = sum(len(completion.token_ids) for _, completion in pairs)
        total = torch.zeros((), device=self.policy.device)
        for batch in self.policy.micro_batches(pairs):
            loss = -self.policy.score(batch, temperature=1.0).logprobs.sum() / num_tokens
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.model.parameters(), settings.max_grad_norm
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - started
        return {
            "step": self.step,
            "loss": float(total),
            "grad_norm": float(norm),
            "lr": rate,
            "seconds/total": seconds,
        }

    def _evaluate(self) -> None:
        settings = self.config.evaluation
        self.engine.load_weights(self.policy.named_weights())
        sampling = Sampling(
            settings.temperature, self.config.max_new_tokens, settings.seed, "evaluation"
        )
        sets = self.task.evaluation_sets()
        rows: list[dict[str, Any]] = []
        with self.progress.bar("evaluate", sum(map(len, sets.values()))) as bar:
            for name, prompts in sets.items():
                result = evaluate(
                    self.engine, self.reward, prompts, settings.num_samples, sampling, bar.advance
                )
                rows.append(
                    {"step": self.step, "kind": "full", "set": name}
                    | result.row(with_problems=True)
                )
        self.log.append(EVALUATIONS, *rows)
        for row in rows:
            largest = max(row["pass@k"], key=int)
            accuracy = f"greedy {row['greedy']:.3f}, mean {row['mean']:.3f}"
            self.progress.say(
                f"{row['set']}: {accuracy}, pass@{largest} {row['pass@k'][largest]:.3f}"
            )


def learning_rate(step: int, num_steps: int, ramp_steps: int, peak: float) -> float:
    """Up in a line, down along a cosine to a tenth."""
    if step < ramp_steps:
        return peak * (step + 1) / ramp_steps
    done = (step - ramp_steps) / max(1, num_steps - ramp_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class _Demonstrations(Dataset[Pairs]):
    """Batch number -> its demonstrations, as completions that end. Drawn in worker processes where asked."""

    def __init__(self, task: Task, tokenizer: Any, batch_size: int, first: int, last: int) -> None:
        self.task, self.tokenizer, self.batch_size = task, tokenizer, batch_size
        self.first, self.last = first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> Pairs:
        if index >= len(self):
            raise IndexError
        drawn = self.task.demonstrations((self.first + index) * self.batch_size, self.batch_size)
        return [(prompt, self._completion(text)) for prompt, text in drawn]

    def _completion(self, text: str) -> Completion:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return Completion(
            (*ids, self.tokenizer.eos_token_id), logprobs=(), text=text, finished=True
        )
