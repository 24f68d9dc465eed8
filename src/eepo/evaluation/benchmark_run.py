"""Evaluate on benchmarks: every problem once greedily, as the paper does, and then `num_samples` times drawn.

Completions are graded and written down part by part. A stopped evaluation goes on with the first part that is not
whole: parts are the same again, and draws belong to the row, so nothing tells afterwards that it was stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eepo.evaluation.results import write_results
from eepo.evaluation.sets import PromptSet
from eepo.evaluation.store import Store
from eepo.protocols import Reward, RolloutEngine
from eepo.runs.progress import Progress
from eepo.types import Completion, Prompt, Sampling, UserError, Verdict


@dataclass(frozen=True)
class BenchmarkOptions:
    """What `eepo eval` can be told."""

    model: str
    benchmarks: tuple[str, ...]
    data_dir: str = ""  # empty: from the hub
    num_samples: int = 0  # for each problem, beside the greedy one
    temperature: float = 1.0
    seed: int = 0
    max_new_tokens: int = 4096
    max_prompt_tokens: int = 1024  # longer prompts are left out, and counted
    limit: int = 0  # only so many problems of each benchmark, its first ones; 0: all
    template: str | None = None  # None: the run's own, else "boxed"
    reward: str = "math"  # the grader, by the name that recipes use
    max_rows: int = 128  # completions sampled at the same time
    device: str = "auto"
    revision: str = "main"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class _Pass:
    """Once through all problems of a benchmark."""

    kind: str  # greedy | sample
    num_samples: int  # for each problem
    sampling: Sampling
    first_line: int  # in the benchmark's file


@dataclass
class BenchmarkEvaluation:
    """`engine` holds the weights to be judged; `store` is open."""

    engine: RolloutEngine
    reward: Reward
    sets: list[PromptSet]
    store: Store
    num_samples: int
    sampling: Sampling  # of the samples; its stream is set here, for each benchmark
    max_rows: int
    progress: Progress

    def run(self) -> Path:
        """Sample and grade what is missing; returns the file of the results."""
        for one in self.sets:
            for once in self._passes(one):
                self._finish(one, once)
        return write_results(self.store.folder)

    def _passes(self, one: PromptSet) -> list[_Pass]:
        length, seed = self.sampling.max_new_tokens, self.sampling.seed
        passes = [_Pass("greedy", 1, Sampling(0.0, length), first_line=0)]
        if self.num_samples:
            drawn = Sampling(
                self.sampling.temperature, length, seed, stream=f"benchmark/{one.name}"
            )
            passes.append(_Pass("sample", self.num_samples, drawn, first_line=len(one.prompts)))
        return passes

    def _finish(self, one: PromptSet, once: _Pass) -> None:
        part = max(1, self.max_rows // once.num_samples)  # problems
        done, right = self._go_on(one, once, part)
        title = one.title + (f", {once.num_samples} samples" if once.kind == "sample" else "")
        with self.progress.bar(title, len(one.prompts), done) as bar:
            for start in range(done, len(one.prompts), part):
                prompts = one.prompts[start : start + part]
                rows = self._evaluate(prompts, once)
                self.store.append(one.name, rows)
                right += sum(row["reward"] >= 1 for row in rows)
                share = right / once.num_samples / (start + len(prompts))
                bar.advance(len(prompts), note=f"{share:.1%} right")

    def _go_on(self, one: PromptSet, once: _Pass, part: int) -> tuple[int, int]:
        """How many problems are done, always a whole number of parts, and how many completions of them are right."""
        rows = self.store.rows(one.name)[once.first_line :]
        expected = [
            (prompt.id, once.kind) for prompt in one.prompts for _ in range(once.num_samples)
        ]
        if [(row["id"], row["kind"]) for row in rows[: len(expected)]] != expected[: len(rows)]:
            raise UserError(
                f"{self.store.path(one.name)}: lines are missing or out of order; remove the file"
            )
        done = min(len(one.prompts), len(rows) // once.num_samples)
        if done < len(one.prompts):
            done -= done % part
            self.store.keep(one.name, once.first_line + done * once.num_samples)
        return done, sum(row["reward"] >= 1 for row in rows[: done * once.num_samples])

    def _evaluate(self, prompts: Sequence[Prompt], once: _Pass) -> list[dict[str, Any]]:
        try:
            groups = self.engine.generate(prompts, once.num_samples, once.sampling)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"--max-rows {self.max_rows}: no memory for so many completions at the same time; "
                "give fewer, and the evaluation goes on where it stopped"
            ) from error
        triples = [
            (prompt, index, completion)
            for prompt, group in zip(prompts, groups, strict=True)
            for index, completion in enumerate(group)
        ]
        verdicts = self.reward.grade(
            [prompt for prompt, _, _ in triples], [c.text for _, _, c in triples]
        )
        return [
            _row(once.kind, *triple, verdict)
            for triple, verdict in zip(triples, verdicts, strict=True)
        ]


def weights_digest(model: Any, per_tensor: int = 64) -> str:
    """Tells weights apart by some values of every tensor: a run trained on is another model at the same path."""
    total = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // per_tensor)]
        total.update(f"{name}{tuple(weight.shape)}{some.double().tolist()}".encode())
    return total.hexdigest()[:16]


def _row(
    kind: str, prompt: Prompt, index: int, completion: Completion, verdict: Verdict
) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "kind": kind,
        "index": index,
        **({"prompt": prompt.text, "gold": prompt.answer} if kind == "greedy" else {}),
        "text": completion.text,
        "num_tokens": len(completion.token_ids),
        "finished": completion.finished,
        "reward": verdict.reward,
        "answer": verdict.answer,
        "reason": verdict.reason,
    }
