"""Evaluates a model on benchmarks: one greedy and `num_samples` sampled completions per problem.

Completions are graded and written chunk by chunk. A stopped evaluation continues with the first
incomplete chunk. The result is the same as without the stop: chunks have the same boundaries, and
random draws depend on the prompt and the sample index only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.evaluation.results import write_results
from eepo.evaluation.sets import PromptSet
from eepo.evaluation.store import Store
from eepo.model import out_of_memory
from eepo.protocols import Reward, RolloutEngine
from eepo.runs.lock import RunLock
from eepo.runs.progress import Progress
from eepo.runs.runlog import remove_temporary_files
from eepo.types import Completion, Prompt, Sampling, UserError, Verdict


@dataclass(frozen=True)
class _Pass:
    """Describes one pass over all problems of a benchmark."""

    kind: str  # greedy | sample
    num_samples: int  # per problem
    sampling: Sampling
    first_line: int  # index of its first line in the benchmark's file


@dataclass
class BenchmarkEvaluation:
    """Evaluates the weights that `engine` holds, and writes to the open `store`."""

    engine: RolloutEngine
    reward: Reward
    sets: list[PromptSet]
    store: Store
    num_samples: int
    sampling: Sampling  # of the samples; the stream is set for each benchmark
    max_rows: int
    progress: Progress

    def run(self) -> Path:
        """Sample and grade what is missing; return the path of the results."""
        # Another process would append the same completions. `force`: only a process of this
        # machine can refuse the lock, because the command has no option to override it.
        lock = RunLock(self.store.folder, force=True)
        try:
            remove_temporary_files(self.store.folder)
            for prompt_set in self.sets:
                for sampling_pass in self._passes(prompt_set):
                    self._complete(prompt_set, sampling_pass)
            return write_results(self.store.folder)
        finally:
            lock.release()

    def _passes(self, prompt_set: PromptSet) -> list[_Pass]:
        temperature, length = self.sampling.temperature, self.sampling.max_new_tokens
        passes = [_Pass("greedy", 1, Sampling(0.0, length), first_line=0)]
        if self.num_samples:
            stream = f"benchmark/{prompt_set.name}"
            sampling = Sampling(temperature, length, self.sampling.seed, stream)
            first_line = len(prompt_set.prompts)
            passes.append(_Pass("sample", self.num_samples, sampling, first_line))
        return passes

    def _complete(self, prompt_set: PromptSet, sampling_pass: _Pass) -> None:
        """Evaluate the problems of this pass that are not done yet."""
        prompts, num_samples = prompt_set.prompts, sampling_pass.num_samples
        chunk_size = max(1, self.max_rows // num_samples)  # problems per chunk
        num_done, num_correct = self._discard_incomplete_chunk(
            prompt_set, sampling_pass, chunk_size
        )
        title = prompt_set.title
        if sampling_pass.kind == "sample":
            title += f", {num_samples} samples"
        with self.progress.bar(title, len(prompts), num_done) as bar:
            for start in range(num_done, len(prompts), chunk_size):
                chunk = prompts[start : start + chunk_size]
                rows = self._evaluate(chunk, sampling_pass)
                self.store.append(prompt_set.name, rows)
                num_correct += _count_correct(rows)
                share = num_correct / num_samples / (start + len(chunk))
                bar.advance(len(chunk), note=f"{share:.1%} correct")

    def _discard_incomplete_chunk(
        self, prompt_set: PromptSet, sampling_pass: _Pass, chunk_size: int
    ) -> tuple[int, int]:
        """Remove the rows of an incomplete chunk from the store.

        Return how many problems are done and how many of their completions are correct.
        """
        name, prompts, num_samples = prompt_set.name, prompt_set.prompts, sampling_pass.num_samples
        kind, first_line = sampling_pass.kind, sampling_pass.first_line
        rows = self.store.rows(name)[first_line:]
        expected = [(prompt.id, kind) for prompt in prompts for _ in range(num_samples)]
        written = [(row["id"], row["kind"]) for row in rows[: len(expected)]]
        if written != expected[: len(rows)]:
            raise UserError(
                f"{self.store.path(name)}: lines are missing or out of order; remove the file"
            )
        num_done = min(len(prompts), len(rows) // num_samples)
        if num_done < len(prompts):
            num_done -= num_done % chunk_size
            self.store.truncate(name, first_line + num_done * num_samples)
        return num_done, _count_correct(rows[: num_done * num_samples])

    def _evaluate(self, prompts: Sequence[Prompt], sampling_pass: _Pass) -> list[dict[str, Any]]:
        with out_of_memory.caught() as failures:
            groups = self.engine.generate(
                prompts, sampling_pass.num_samples, sampling_pass.sampling
            )
        if failures:
            raise UserError(
                f"{failures[0]}; --max-rows is {self.max_rows}, try {max(1, self.max_rows // 2)}; "
                "the evaluation then continues"
            )
        owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
        indices = [index for group in groups for index in range(len(group))]
        completions = [completion for group in groups for completion in group]
        verdicts = self.reward.grade(owners, [completion.text for completion in completions])
        return [
            _row(sampling_pass.kind, *columns)
            for columns in zip(owners, indices, completions, verdicts, strict=True)
        ]


def weights_digest(model: Any, values_per_tensor: int = 64) -> str:
    """Return a digest of some values of every weight.

    It detects that a model at the same path was trained further.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        values = flat[:: max(1, len(flat) // values_per_tensor)]
        digest.update(f"{name}{tuple(weight.shape)}{values.double().tolist()}".encode())
    return digest.hexdigest()[:16]


def _count_correct(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row["reward"] >= 1 for row in rows)


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
        **({"label": verdict.label} if verdict.label else {}),
    }
