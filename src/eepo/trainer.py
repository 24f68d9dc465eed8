"""The training loop: prompts in; steps, evaluations, checkpoints and records out.

It knows no algorithm beyond `step`, `state` and `load_state`.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eepo.algorithm import StepMetrics
from eepo.config import RunConfig
from eepo.evaluation.evaluate import Evaluator
from eepo.evaluation.sets import task_sets
from eepo.model import memory, out_of_memory
from eepo.model.policy import Policy
from eepo.model.step_backup import StepBackup
from eepo.protocols import Task
from eepo.runs.alarm import ADVICE, AlarmMonitor, Event
from eepo.runs.checkpoint import (
    Checkpointer,
    checkpoint_damage,
    latest,
    step_of,
    weights_damage,
)
from eepo.runs.jsonl import read_records
from eepo.runs.lock import RunLock
from eepo.runs.loggers import Logger, evaluation_scalars, metric_scalars
from eepo.runs.progress import Bar, Progress
from eepo.runs.resume import FINAL, remove_old_final, save_checkpoint, set_final_aside
from eepo.runs.runlog import (
    ALARMS,
    COMPLETIONS,
    EVALUATIONS,
    METRICS,
    RunLog,
    needs_no_evaluation,
    resume_command,
)
from eepo.types import Prompt, Rollout, Sampling, UserError


class Interrupted(UserError):
    """The user or an alarm asked the run to stop. A checkpoint of the last step is on disk."""


class Stopped(Interrupted):
    """The user stopped the run with Ctrl-C or SIGTERM."""


class Algorithm(Protocol):
    """What the loop needs from an algorithm."""

    def step(self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics) -> Rollout: ...

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides θ and the optimizer's state, as JSON values.

        It is called before every step, so it must be fast. A later step must not change the
        returned values: with them, a step that fails is undone.
        """
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class Trainer:
    config: RunConfig
    algorithm: Algorithm
    policy: Policy
    evaluator: Evaluator
    checkpointer: Checkpointer
    task: Task
    log: RunLog
    progress: Progress
    alarm_monitor: AlarmMonitor
    logger: Logger
    lock: RunLock  # of the run folder
    step: int = 0  # finished steps
    num_prompts_seen: int = 0
    seconds: float = 0.0  # training time of the finished steps

    def __post_init__(self) -> None:
        optimizer, name = self.checkpointer.optimizer, self.config.training.optimizer
        self.backup = StepBackup(optimizer, name, self.progress.print)

    @property
    def done(self) -> bool:
        settings = self.config.training
        return self.step >= settings.num_steps or 0 < settings.max_seconds <= self.seconds

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint. The policy has its weights already."""
        state = self.checkpointer.load(folder)
        self.step, self.num_prompts_seen = state["step"], state["num_prompts_seen"]
        self.seconds = trained_seconds(self.log.folder)
        self.algorithm.load_state(state)

    def run(self) -> Path:
        """Train to the last step, save and evaluate; return the folder of the final weights."""
        with ExitStack() as at_end:  # each of these also if another one fails
            at_end.callback(self.backup.close)
            at_end.callback(self.lock.release)
            at_end.callback(self.logger.close)
            return self._run()

    def _run(self) -> Path:
        if not self.done:
            set_final_aside(self.log.folder)
        if self.step == 0 and not self.log.has_evaluation(0, "full", "quick"):
            self._evaluate_start()
        with self._training_bar() as bar, _stop_signals() as stop:
            while not self.done:
                alarm = self._handle_alarms(self._one_step(bar))
                if self._checkpoint_due() or stop.is_set() or alarm or self.done:
                    self._save()
                if stop.is_set():
                    command = resume_command(self.log.folder)
                    raise Stopped(f"stopped after step {self.step}; continue with: {command}")
                if alarm and not self.done:
                    raise Interrupted(self._stop_line(alarm))
        return self._finish()

    def _finish(self) -> Path:
        final = self.log.folder / FINAL
        evaluated = self.log.has_evaluation(self.step, "full")
        evaluated |= needs_no_evaluation(self.log.folder, self.step)
        damage = weights_damage(final)
        if damage and final.exists():
            self.progress.print(f"note: {final} is damaged: {damage}; it is written again")
        if not evaluated or damage:
            self.checkpointer.save_final(final)
        if not evaluated:
            self._full_evaluation()
        if not self.step:
            self.log.append(METRICS)  # an empty file: reports recognise a run by it
        self.log.write_finished(self.step, len(self.task.evaluation_sets()))
        remove_old_final(self.log.folder)
        return final

    def _checkpoint_due(self) -> bool:
        every = self.config.training.checkpoint_every
        return every > 0 and self.step % every == 0

    def _training_bar(self) -> Bar:
        """Count steps, or seconds if the run is limited by time."""
        settings = self.config.training
        title = f"train {self.config.name} seed {settings.seed}"
        if settings.max_seconds:
            total = math.ceil(settings.max_seconds)
            return self.progress.bar(f"{title}, seconds", total, self._bar_position())
        return self.progress.bar(title, settings.num_steps, self._bar_position())

    def _bar_position(self) -> int:
        limit = self.config.training.max_seconds
        return math.ceil(min(self.seconds, limit)) if limit else self.step

    def _stop_line(self, event: Event) -> str:
        return (
            f"stopped after step {self.step} by an alarm: {event.alarm}; "
            f"{ADVICE[event.alarm.name]}; continue anyway with: "
            f"{resume_command(self.log.folder)} --set alarm.action=warn"
        )

    def _handle_alarms(self, row: dict[str, Any]) -> Event | None:
        """Report alarms that start or end, and act on them. Return one that asks for a stop."""
        events = self.alarm_monitor.events(row)
        for event in events:
            self.progress.print(event.line())
            self.log.append(ALARMS, event.row())
        by_action = {event.action: event for event in events}
        if "halve_unlearn_lr" in by_action:
            state = self.algorithm.state()
            scale = state["unlearn_scale"] / 2
            self.algorithm.load_state(state | {"unlearn_scale": scale})
        return by_action.get("stop")

    def _one_step(self, bar: Bar) -> dict[str, Any]:
        """Train one step, write its records, and return its row of metrics."""
        settings, options = self.config.training, self.config.algorithm
        count = settings.prompts_per_step * (1 + options.dynamic_sampling)  # as many may be needed
        prompts = self.task.training_prompts(self.num_prompts_seen, count)
        metrics = StepMetrics(self.policy.device, on_phase=bar.show_phase)
        sampling = Sampling(
            options.temperature, options.max_new_tokens, settings.seed, f"train/{self.step + 1}"
        )
        rollout = self._algorithm_step(prompts, sampling, metrics)
        memory.release_shared_memory(self.policy.device)
        self.step += 1
        self.num_prompts_seen += len(rollout.prompts) + len(rollout.dropped)
        row = {"step": self.step} | metrics.result()
        self.seconds += row["seconds/total"]
        self.log.append(METRICS, row)
        self.logger.log(self.step, metric_scalars(row))
        logged = _completion_rows(self.step, rollout, settings.log_completions)
        self.log.append(COMPLETIONS, *logged)
        bar.advance(self._bar_position() - bar.done, note=_progress_note(row))
        every = self.config.evaluation.every
        if every and self.step % every == 0 and not self.done:
            self._quick_evaluation()
        return row

    def _algorithm_step(
        self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics
    ) -> Rollout:
        """Run one step. If it fails, undo it and save the last finished step."""
        state = self.algorithm.state()
        self.backup.take()
        try:
            with out_of_memory.caught() as failures:
                return self.algorithm.step(prompts, sampling, metrics)
        except UserError as error:  # of a reward, or a gradient that is not finite
            with self._naming(error):
                self._undo_step(state)
            raise
        with self._naming(self._out_of_memory(failures, metrics.last_phase)):
            self._undo_step(state)
        raise self._out_of_memory(failures, metrics.last_phase)

    @contextmanager
    def _naming(self, cause: UserError) -> Iterator[None]:
        """Add to an error of the block why the step is undone."""
        try:
            yield
        except (OSError, RuntimeError, MemoryError) as error:
            problem = f"step {self.step} could not be restored or saved ({error})"
            raise UserError(f"{problem} after this error: {cause}") from error

    def _undo_step(self, state: dict[str, Any]) -> None:
        self.checkpointer.optimizer.zero_grad(set_to_none=True)
        if self.backup.restore() and self.step:
            self.algorithm.load_state(state)
            if not self._is_saved():
                self._save()

    def _is_saved(self) -> bool:
        """Return whether the last finished step has an intact checkpoint."""
        saved = latest(self.checkpointer.folder)
        return saved is not None and step_of(saved) == self.step and not checkpoint_damage(saved)

    def _out_of_memory(self, failures: list[str], phase: str) -> UserError:
        """Say in which phase memory ran out, what to change, and which step is saved."""
        name, change, option = out_of_memory.advice(self.config, phase)
        saved = latest(self.checkpointer.folder)
        return UserError(
            f"{failures[0]} in the {name} after step {self.step}; {change}; "
            f"{f'step {step_of(saved)} is saved' if saved else 'no step is saved yet'}; "
            f"continue with: {resume_command(self.log.folder)}{option}"
        )

    def _evaluate_start(self) -> None:
        if self.config.evaluation.start:
            self._full_evaluation()
        elif self.config.evaluation.every:
            self._quick_evaluation()

    def _full_evaluation(self) -> None:
        settings = self.config.evaluation
        self._evaluate("full", settings.num_samples, settings.num_problems)

    def _quick_evaluation(self) -> None:
        settings = self.config.evaluation
        self._evaluate("quick", settings.quick_samples, settings.quick_problems)

    def _evaluate(self, kind: str, num_samples: int, num_problems: int) -> None:
        """Evaluate all sets, and write all rows at once: an interruption leaves no partial rows."""
        settings, options = self.config.evaluation, self.config.algorithm
        sampling = Sampling(
            settings.temperature, options.max_new_tokens, settings.seed, "evaluation"
        )
        sets = {each.name: each.prompts for each in task_sets(self.task, num_problems)}
        engine = self.evaluator.engine
        with out_of_memory.caught() as failures, self._evaluation_bar(kind, sets) as bar:
            engine.load_weights(self.policy.named_weights())
            advance = bar.advance if bar else _ignore_progress
            results = self.evaluator.evaluate(sets, num_samples, sampling, advance)
        if failures:
            raise self._out_of_memory(failures, "evaluation")
        engine.release_memory()
        rows = [
            {"step": self.step, "kind": kind, "set": name}
            | result.row(with_problems=kind == "full")
            for name, result in results.items()
        ]
        self.log.append(EVALUATIONS, *rows)
        for row in rows:
            self.logger.log(self.step, evaluation_scalars(row))

    @contextmanager
    def _evaluation_bar(self, kind: str, sets: dict[str, list[Prompt]]) -> Iterator[Bar | None]:
        """Show a bar for a full evaluation; a quick one runs under the bar of training."""
        if kind == "quick":
            yield None
            return
        seed = self.config.training.seed
        title = f"evaluate {self.config.name} seed {seed} at step {self.step}"
        with self.progress.bar(title, sum(map(len, sets.values()))) as bar:
            yield bar

    def _save(self) -> None:
        state = {"num_prompts_seen": self.num_prompts_seen} | self.algorithm.state()
        save_checkpoint(self.checkpointer, self.log, self.step, state)


def trained_seconds(folder: Path) -> float:
    """Add up the training time in a run's records.

    The order of the sum is that of training, so a resumed run has the same value bit for bit.
    """
    total = 0.0
    path = folder / METRICS
    for row in read_records(path, on_damage=lambda error: None) if path.exists() else ():
        total += row.get("seconds/total", 0.0)
    return total


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Return whether the run in `folder` is complete and undamaged.

    The full evaluation is the last record of a run, if its task has evaluation sets.
    """
    if not (folder / METRICS).is_file():
        return False
    damage: list[str] = []
    files = [path for path in (folder / METRICS, folder / EVALUATIONS) if path.is_file()]
    metrics, *others = (list(read_records(path, damage.append)) for path in files)
    step = max((row["step"] for row in metrics), default=0)
    evaluations = [row for rows in others for row in rows if row["step"] == step]
    evaluated = any(row.get("kind") == "full" for row in evaluations)
    evaluated |= needs_no_evaluation(folder, step)
    limit = config.training.max_seconds
    enough = step >= config.training.num_steps or 0 < limit <= trained_seconds(folder)
    return evaluated and enough and not damage and not weights_damage(folder / FINAL)


def _ignore_progress(num_done: int) -> None:
    pass


def _progress_note(row: dict[str, Any]) -> str:
    reward, entropy, seconds = row["reward"], row["entropy"], row["seconds/total"]
    return f"reward {reward:.3f}  entropy {entropy:.3f}  {seconds:.1f} s per step"


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
        for column, (completion, verdict, advantage, stage) in enumerate(columns):
            fields = {
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
            }
            if (row, column) in rollout.logprobs_after:
                fields["logprob_after"] = rollout.logprobs_after[row, column]
            yield fields


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop. The second one acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request_stop(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, previous[number])

    previous: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    for number in previous:
        signal.signal(number, request_stop)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
