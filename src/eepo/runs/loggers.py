"""Metrics and evaluations as scalars elsewhere: TensorBoard, Weights & Biases, trackio. Each is an optional import.

The run's folder holds every number whatever happens here. So what is missing is said before training begins, and what
breaks later (a full disk, no network) is said once and costs the run nothing.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from eepo.config import LoggingConfig
from eepo.runs.progress import Progress
from eepo.runs.runlog import RunLog, write_whole
from eepo.types import UserError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
NOT_SCALARS = ("step", "kind", "set", "problems")
ID = "logger-id.txt"


class Logger(Protocol):
    def log(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class NoLogger:
    """`to = "none"`."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Event files under the run's folder. On resume, TensorBoard is told to forget the steps that happen again."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1 if step else None
        )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Steps are an axis of their own: those that happen again after a resume fall on themselves."""

    def __init__(self, config: LoggingConfig, folder: Path, recipe: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project=config.project,
            name=run_name(folder),
            id=run_id(folder),
            resume="allow",
            dir=str(folder),
            config=recipe,
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log({"step": step} | scalars)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A run is known by its name there, so the name carries a few letters of its own."""

    def __init__(self, config: LoggingConfig, folder: Path, recipe: dict[str, Any]) -> None:
        self.trackio = importlib.import_module("trackio")
        name = f"{run_name(folder)}-{run_id(folder)[:6]}"
        self.trackio.init(
            project=config.project, name=name, resume="allow", config=recipe, embed=False
        )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self.trackio.log(scalars, step=step)

    def close(self) -> None:
        self.trackio.finish()


class Careful:
    """A logger whose failure is one line on the screen, after which it is left alone."""

    def __init__(self, logger: Logger, name: str, progress: Progress) -> None:
        self.logger, self.name, self.progress = logger, name, progress

    def log(self, step: int, scalars: dict[str, float]) -> None:
        try:
            self.logger.log(step, scalars)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        try:
            self.logger.close()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        self.progress.say(
            f"warning: {self.name} failed and gets nothing more; training goes on: {said}"
        )
        self.logger = NoLogger()


def check_logger(config: LoggingConfig) -> None:
    """Before a model is loaded: is the package there?"""
    if config.to == "none":
        return
    found = find_spec(PACKAGES[config.to])
    if (
        found is None or found.origin is None
    ):  # without origin: a folder of that name, such as wandb's own records
        raise UserError(
            f'logging.to = "{config.to}" needs a package that is not installed: pip install "eepo[{config.to}]"'
        )


def build_logger(
    config: LoggingConfig, folder: Path, step: int, recipe: dict[str, Any], progress: Progress
) -> Logger:
    """Ready to log what comes after `step`. A service that refuses is an error now, before a run has begun."""
    if config.to == "none":
        return NoLogger()
    check_logger(config)
    RunLog(folder)  # makes it
    try:
        return Careful(_build(config, folder, step, recipe), config.to, progress)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f'logging.to = "{config.to}" cannot be opened: {said}') from error


def _build(config: LoggingConfig, folder: Path, step: int, recipe: dict[str, Any]) -> Logger:
    if config.to == "tensorboard":
        return TensorBoard(folder, step)
    return (WandB if config.to == "wandb" else Trackio)(config, folder, recipe)


def run_name(folder: Path) -> str:
    """That of its folder; a comparison's are all called seed-N, so the method's goes before it."""
    folder = folder.resolve()
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("seed-") else folder.name


def run_id(folder: Path) -> str:
    """The same for every resumption of a run, and of no other run."""
    path = folder / ID
    if not path.exists():
        write_whole(path, uuid.uuid4().hex + "\n")
    return path.read_text(encoding="utf-8").strip()


def metric_scalars(row: dict[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl under its own names."""
    return dict(_numbers(row, ""))


def evaluation_scalars(row: dict[str, Any]) -> dict[str, float]:
    """A line of evaluations.jsonl under `full/SET/greedy`, `quick/SET/pass@k/4` and so on: two curves, never one."""
    return dict(_numbers(row, f"{row['kind']}/{row['set']}/"))


def _numbers(row: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif name not in NOT_SCALARS and isinstance(value, int | float):
            yield prefix + name, float(value)
