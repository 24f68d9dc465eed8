"""The loop: prompts in, steps, evaluations, checkpoints, records out. It knows no algorithm beyond `EEPO.step`."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eepo.algorithm import EEPO
from eepo.algorithm.metrics import StepMetrics
from eepo.config import RunConfig
from eepo.evaluation.evaluate import evaluate
from eepo.model import memory
from eepo.protocols import Task
from eepo.runs import checkpoint
from eepo.runs.alarm import ADVICE, Event, Guard
from eepo.runs.jsonl import read_records
from eepo.runs.loggers import Logger, evaluation_scalars, metric_scalars
from eepo.runs.progress import Bar, Progress
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS, RunLog, resume_command
from eepo.types import Prompt, Rollout, Sampling, UserError


class Interrupted(UserError):
    """Asked to stop, by the user or an alarm; a checkpoint of the last whole step is on disk."""


class Stopped(Interrupted):
    """By the user, with Ctrl-C or SIGTERM."""


@dataclass
class Trainer:
    config: RunConfig
    algorithm: EEPO
    task: Task
    tokenizer: Any
    log: RunLog
    progress: Progress
    guard: Guard
    logger: Logger
    step: int = 0  # whole steps done
    num_prompts_seen: int = 0
    seconds: float = 0.0  # of these steps, as their records say

    @property
    def done(self) -> bool:
        settings = self.config.training
        return self.step >= settings.num_steps or 0 < settings.max_seconds <= self.seconds

    @property
    def checkpoints(self) -> Path:
        return self.log.folder / "checkpoints"

    @property
    def model(self) -> Any:
        return self.algorithm.policy.model

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint whose weights the policy already has: optimizer, counters, gate history."""
        state = checkpoint.load_training(folder, self.model, self.algorithm.optimizer)
        self.step, self.num_prompts_seen = state["step"], state["num_prompts_seen"]
        self.seconds = trained_seconds(self.log.folder)
        self.algorithm.gate_history, self.algorithm.auto_lr = (
            state["gate_history"],
            state["auto_lr"],
        )
        self.algorithm.unlearn_scale = state.get(
            "unlearn_scale", 1.0
        )  # older checkpoints have none

    def run(self) -> Path:
        """Train to the last step, save, evaluate; returns the folder of the final weights."""
        try:
            return self._run()
        finally:
            self.logger.close()

    def _run(self) -> Path:
        settings, title = (
            self.config.training,
            f"{self.config.name} seed {self.config.training.seed}",
        )
        if self.step == 0 and not self._evaluated("full", "quick"):
            self._evaluate_start()
        with self._training_bar(title) as bar, _stop_signals() as stop:
            while not self.done:
                alarm = self._heed(self._one_step(bar))
                due = settings.checkpoint_every and self.step % settings.checkpoint_every == 0
                if due or stop.is_set() or alarm or self.done:
                    self._save()
                if stop.is_set():
                    raise Stopped(
                        f"stopped after step {self.step}; go on with: {resume_command(self.log.folder)}"
                    )
                if alarm and not self.done:
                    raise Interrupted(self._stop_line(alarm))
        final, finished = self.log.folder / "final", self._evaluated("full")
        if not finished or not final.exists():
            checkpoint.save_final(final, self.model, self.tokenizer)
        if not finished:
            self._evaluate("full", self.config.evaluation.num_samples, None)
        if not self.step:
            self.log.append(METRICS)  # empty, but there: by it reports know a run
        return final

    def _training_bar(self, title: str) -> Bar:
        """Over steps or, where time is what ends the run, over seconds."""
        settings = self.config.training
        if settings.max_seconds:
            return self.progress.bar(
                f"train {title}, seconds", math.ceil(settings.max_seconds), self._along()
            )
        return self.progress.bar(f"train {title}", settings.num_steps, self._along())

    def _along(self) -> int:
        most = self.config.training.max_seconds
        return math.ceil(min(self.seconds, most)) if most else self.step

    def _stop_line(self, event: Event) -> str:
        return (
            f"stopped after step {self.step} by an alarm: {event.alarm}; {ADVICE[event.alarm.name]}; "
            f"go on as it is with: {resume_command(self.log.folder)} --set alarm.action=warn"
        )

    def _heed(self, row: dict[str, Any]) -> Event | None:
        """Say which alarms start or end with this step, and act on them; returns one that asks for a stop."""
        events = self.guard.events(row)
        for event in events:
            self.progress.say(event.line())
            self.log.append(ALARMS, event.row())
        actions = {event.action: event for event in events}
        if "halve_unlearn_lr" in actions:
            self.algorithm.unlearn_scale /= 2
        return actions.get("stop")

    def _one_step(self, bar: Bar) -> dict[str, Any]:
        """Returns its line of metrics."""
        prompts = self.task.training_prompts(
            self.num_prompts_seen, self.config.training.prompts_per_step
        )
        metrics = StepMetrics(self.algorithm.policy.device)
        options = self.config.algorithm
        stream = f"train/{self.step + 1}"
        sampling = Sampling(
            options.temperature, options.max_new_tokens, self.config.training.seed, stream
        )
        rollout = self.algorithm.step(prompts, sampling, metrics)
        memory.give_back(self.algorithm.policy.device)
        self.step += 1
        self.num_prompts_seen += len(prompts)
        row = {"step": self.step} | metrics.result()
        self.seconds += row["seconds/total"]
        self.log.append(METRICS, row)
        self.logger.log(self.step, metric_scalars(row))
        self.log.append(
            COMPLETIONS, *_completion_rows(self.step, rollout, self.config.training.log_completions)
        )
        bar.advance(
            self._along() - bar.done,
            note=f"reward {row['reward']:.3f}  entropy {row['entropy']:.3f}  {row['seconds/total']:.1f} s a step",
        )
        every = self.config.evaluation.every
        if every and self.step % every == 0 and not self.done:
            self._quick_look()
        return row

    def _evaluate_start(self) -> None:
        if self.config.evaluation.start:
            self._evaluate("full", self.config.evaluation.num_samples, None)
        elif self.config.evaluation.every:
            self._quick_look()

    def _quick_look(self) -> None:
        self._evaluate(
            "quick", self.config.evaluation.quick_samples, self.config.evaluation.quick_problems
        )

    def _evaluate(self, kind: str, num_samples: int, num_problems: int | None) -> None:
        """All sets, written at once, so that an interrupted evaluation leaves nothing half done."""
        settings, options = self.config.evaluation, self.config.algorithm
        self.algorithm.engine.load_weights(self.algorithm.policy.named_weights())
        sampling = Sampling(
            settings.temperature, options.max_new_tokens, settings.seed, "evaluation"
        )
        sets = {
            name: prompts[:num_problems] for name, prompts in self.task.evaluation_sets().items()
        }
        rows = []
        with self._evaluation_bar(kind, sets) as bar:
            for name, prompts in sets.items():
                result = evaluate(
                    self.algorithm.engine,
                    self.algorithm.reward,
                    prompts,
                    num_samples,
                    sampling,
                    bar.advance if bar else _silent,
                )
                rows.append(
                    {"step": self.step, "kind": kind, "set": name}
                    | result.row(with_problems=kind == "full")
                )
        self.algorithm.engine.release_memory()
        self.log.append(EVALUATIONS, *rows)
        for row in rows:
            self.logger.log(self.step, evaluation_scalars(row))

    @contextmanager
    def _evaluation_bar(self, kind: str, sets: dict[str, list[Prompt]]) -> Iterator[Bar | None]:
        """A bar of its own for the full evaluation; the quick one runs under the training's bar."""
        if kind == "quick":
            yield None
            return
        title = f"evaluate {self.config.name} seed {self.config.training.seed} at step {self.step}"
        with self.progress.bar(title, sum(map(len, sets.values()))) as bar:
            yield bar

    def _evaluated(self, *kinds: str) -> bool:
        path = self.log.folder / EVALUATIONS
        return path.exists() and any(
            row["step"] == self.step and row["kind"] in kinds for row in read_records(path)
        )

    def _save(self) -> None:
        state = {
            "num_prompts_seen": self.num_prompts_seen,
            "gate_history": self.algorithm.gate_history,
            "auto_lr": self.algorithm.auto_lr,
            "unlearn_scale": self.algorithm.unlearn_scale,
        }
        checkpoint.save(
            self.checkpoints, self.step, self.model, self.tokenizer, self.algorithm.optimizer, state
        )
        checkpoint.prune(self.checkpoints, self.config.training.keep_checkpoints)


def trained_seconds(folder: Path) -> float:
    """Of the steps in a run's records, added in their order, so that a resumed run has the very sum it had before."""
    total = 0.0
    for row in read_records(folder / METRICS):
        total += row["seconds/total"]
    return total


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Whether the run of `config` in `folder` has come to its end: the full evaluation is the last thing it writes."""
    if (
        not (folder / "final").is_dir()
        or not (folder / METRICS).is_file()
        or not (folder / EVALUATIONS).is_file()
    ):
        return False
    step = max((row["step"] for row in read_records(folder / METRICS)), default=0)
    judged = any(
        row["step"] == step and row["kind"] == "full" for row in read_records(folder / EVALUATIONS)
    )
    most = config.training.max_seconds
    return judged and (step >= config.training.num_steps or 0 < most <= trained_seconds(folder))


def _silent(done: int) -> None:
    pass


def _completion_rows(step: int, rollout: Rollout, num_prompts: int) -> Iterator[dict[str, Any]]:
    for row in range(min(num_prompts, len(rollout.prompts))):
        prompt = rollout.prompts[row]
        columns = zip(
            rollout.groups[row],
            rollout.verdicts[row],
            rollout.advantages[row],
            rollout.stages,
            strict=True,
        )
        for place, (completion, verdict, advantage, stage) in enumerate(columns):
            after = rollout.forgotten.get((row, place))
            yield {
                "step": step,
                "prompt_id": prompt.id,
                "prompt": prompt.text,
                "stage": stage,
                "reward": verdict.reward,
                "reason": verdict.reason,
                "advantage": advantage,
                "text": completion.text,
                "finished": completion.finished,
                "logprob": sum(completion.logprobs),
            } | ({} if after is None else {"logprob_after": after})


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks for a stop after this step; the second one is not held back."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, before[number])

    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
