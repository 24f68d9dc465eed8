"""Evaluates a model on benchmarks: one greedy and `num_samples` sampled completions per problem.

With `sample_limit`, only the first problems of each benchmark are sampled.

Completions are graded and written in chunks of at most `max_rows` of one benchmark. A stopped
evaluation continues with the first incomplete chunk. Random draws depend on the prompt and the
sample index only.

On a CPU, each call of the engine samples one chunk. Chunks have the same boundaries after a stop,
so the result is the same as without it. On a GPU, a call samples several chunks, and the result
may differ by rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from eepo.evaluation.evaluate import rows_per_call
from eepo.evaluation.results import write_results
from eepo.evaluation.sets import PromptSet
from eepo.evaluation.store import Store
from eepo.model import out_of_memory
from eepo.protocols import Reward, RolloutEngine
from eepo.runs.lock import RunLock
from eepo.runs.progress import Bar, Progress
from eepo.runs.runlog import remove_temporary_files
from eepo.types import Completion, Prompt, Sampling, UserError, Verdict


@dataclass(frozen=True)
class _Pass:
    """Describes one pass over the problems."""

    kind: str  # greedy | sample
    title: str
    num_samples: int  # per problem
    sampling: Sampling
    limit: int = 0  # problems per benchmark; 0: all

    def prompts(self, prompt_set: PromptSet) -> list[Prompt]:
        return prompt_set.prompts[: self.limit or None]


@dataclass(frozen=True)
class _Chunk:
    """Holds problems of one benchmark, whose completions are written together."""

    prompt_set: PromptSet
    prompts: list[Prompt]

    def renamed_prompts(self) -> list[Prompt]:
        """Return the prompts with the benchmark in their ids.

        Random draws depend on the id. Two benchmarks may use the same id.
        """
        name = self.prompt_set.name
        return [replace(prompt, id=f"{name}/{prompt.id}") for prompt in self.prompts]


@dataclass
class BenchmarkEvaluation:
    """Evaluates the weights that `engine` holds, and writes to the open `store`."""

    engine: RolloutEngine
    reward: Reward
    sets: list[PromptSet]
    store: Store
    num_samples: int
    sampling: Sampling  # of the samples
    max_rows: int
    progress: Progress
    sample_limit: int = 0  # problems per benchmark that are sampled; 0: all

    def run(self) -> Path:
        """Sample and grade what is missing; return the path of the results."""
        # Another process would append the same completions. `force`: only a process of this
        # machine can refuse the lock, because the command has no option to override it.
        lock = RunLock(self.store.folder, force=True)
        try:
            remove_temporary_files(self.store.folder)
            for sampling_pass in self._passes():
                self._complete(sampling_pass)
            return write_results(self.store.folder)
        finally:
            lock.release()

    def _passes(self) -> list[_Pass]:
        temperature, length = self.sampling.temperature, self.sampling.max_new_tokens
        passes = [_Pass("greedy", "greedy completions", 1, Sampling(0.0, length))]
        if self.num_samples:
            title = f"{self.num_samples} samples per problem"
            sampling = Sampling(temperature, length, self.sampling.seed, "benchmark")
            passes.append(_Pass("sample", title, self.num_samples, sampling, self.sample_limit))
        return passes

    def _complete(self, sampling_pass: _Pass) -> None:
        """Evaluate the problems of this pass that are not done yet."""
        chunks, num_correct = [], 0
        for prompt_set in self.sets:
            missing, correct = self._missing_chunks(prompt_set, sampling_pass)
            chunks += missing
            num_correct += correct
        total = sum(len(sampling_pass.prompts(prompt_set)) for prompt_set in self.sets)
        done = total - sum(len(chunk.prompts) for chunk in chunks)
        with self.progress.bar(sampling_pass.title, total, done) as bar:
            for call in self._calls(chunks, sampling_pass.num_samples):
                self._show_progress_within(call, sampling_pass.num_samples, bar)
                for chunk, rows in zip(call, self._evaluate(call, sampling_pass), strict=True):
                    self.store.append(chunk.prompt_set.name, rows)
                    num_correct += _count_correct(rows)
                    done += len(chunk.prompts)
                    share = num_correct / sampling_pass.num_samples / done
                    bar.advance(len(chunk.prompts), note=f"{share:.1%} correct")

    def _calls(self, chunks: list[_Chunk], num_samples: int) -> Iterator[list[_Chunk]]:
        """Yield the chunks of each call of the engine.

        An engine with continuous batching gets several (`rows_per_call`), another engine one.
        """
        most_rows = rows_per_call(self.engine)
        call: list[_Chunk] = []
        num_rows = 0
        for chunk in chunks:
            chunk_rows = len(chunk.prompts) * num_samples
            if call and num_rows + chunk_rows > most_rows:
                yield call
                call, num_rows = [], 0
            call.append(chunk)
            num_rows += chunk_rows
        if call:
            yield call

    def _show_progress_within(self, call: list[_Chunk], num_samples: int, bar: Bar) -> None:
        """Let the bar show how many completions of a call have ended, if the engine reports it."""
        num_rows = num_samples * sum(len(chunk.prompts) for chunk in call)
        num_ended = 0

        def show(number: int) -> None:
            nonlocal num_ended
            num_ended += number
            bar.show_phase(f"{num_ended:,} of the next {num_rows:,} completions")

        if hasattr(self.engine, "on_finished"):
            self.engine.on_finished = show

    def _missing_chunks(
        self, prompt_set: PromptSet, sampling_pass: _Pass
    ) -> tuple[list[_Chunk], int]:
        """Return the chunks of a benchmark that are not done, and how many rows are correct so far.

        Rows of an incomplete chunk are removed from the store.
        """
        name, num_samples = prompt_set.name, sampling_pass.num_samples
        prompts = sampling_pass.prompts(prompt_set)
        size = max(1, self.max_rows // num_samples)  # problems per chunk
        num_greedy = len(prompt_set.prompts)
        first_line = num_greedy if sampling_pass.kind == "sample" else 0  # greedy rows come first
        rows = self.store.rows(name)[first_line:]
        kind = sampling_pass.kind
        expected = [(prompt.id, kind) for prompt in prompts for _ in range(num_samples)]
        written = [(row["id"], row["kind"]) for row in rows[: len(expected)]]
        if written != expected[: len(rows)]:
            raise UserError(
                f"{self.store.path(name)}: lines are missing or out of order; remove the file"
            )
        num_done = min(len(prompts), len(rows) // num_samples)
        if num_done < len(prompts):
            num_done -= num_done % size
            self.store.truncate(name, first_line + num_done * num_samples)
        starts = range(num_done, len(prompts), size)
        chunks = [_Chunk(prompt_set, prompts[start : start + size]) for start in starts]
        return chunks, _count_correct(rows[: num_done * num_samples])

    def _evaluate(self, call: list[_Chunk], sampling_pass: _Pass) -> list[list[dict[str, Any]]]:
        """Return the rows of each chunk."""
        renamed = [prompt for chunk in call for prompt in chunk.renamed_prompts()]
        with out_of_memory.caught() as failures:
            groups = self.engine.generate(
                renamed, sampling_pass.num_samples, sampling_pass.sampling
            )
        if failures:
            raise UserError(
                f"{failures[0]}; --max-rows is {self.max_rows}, try {max(1, self.max_rows // 2)}; "
                "the evaluation then continues"
            )
        prompts = [prompt for chunk in call for prompt in chunk.prompts]
        owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
        indices = [index for group in groups for index in range(len(group))]
        completions = [completion for group in groups for completion in group]
        verdicts = self.reward.grade(owners, [completion.text for completion in completions])
        rows = (
            _row(sampling_pass.kind, *columns)
            for columns in zip(owners, indices, completions, verdicts, strict=True)
        )
        sizes = [len(chunk.prompts) * sampling_pass.num_samples for chunk in call]
        return [list(islice(rows, size)) for size in sizes]


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
