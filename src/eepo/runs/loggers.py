"""Sends metrics and evaluations to TensorBoard, Weights & Biases or trackio.

Each package is optional. A missing package is an error before training. A logger that fails later
(full disk, no network) is reported once and then ignored: the run folder has every number anyway.
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
from eepo.runs.runlog import RunLog, write_atomically
from eepo.types import UserError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
NOT_SCALARS = ("step", "kind", "set", "problems")
ID = "logger-id.txt"


class Logger(Protocol):
    def log(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class NoLogger:
    """Does nothing: `logging.to = "none"`."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes event files to the run folder. On resume, it purges the steps that run again."""

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
    """Logs to Weights & Biases. `step` is the x axis, so repeated steps overwrite themselves."""

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
    """Logs to trackio. It identifies runs by name, so the name contains part of the run id."""

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


class FailSafeLogger:
    """Wraps a logger. After its first error, print one warning and log nothing more."""

    def __init__(self, logger: Logger, name: str, progress: Progress) -> None:
        self.logger, self.name, self.progress = logger, name, progress

    def log(self, step: int, scalars: dict[str, float]) -> None:
        try:
            self.logger.log(step, scalars)
        except Exception as error:
            self._disable(error)

    def close(self) -> None:
        try:
            self.logger.close()
        except Exception as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        message = _one_line(error)
        self.progress.print(
            f"warning: {self.name} failed and is disabled; training continues: {message}"
        )
        self.logger = NoLogger()


def check_logger(config: LoggingConfig) -> None:
    """Raise an error if the package is missing. Call this before a model is loaded."""
    if config.to == "none":
        return
    spec = find_spec(PACKAGES[config.to])
    # A spec without origin is a folder of that name, such as the one that wandb writes.
    if spec is None or spec.origin is None:
        raise UserError(
            f'logging.to = "{config.to}" needs a package that is not installed: '
            f'pip install "eepo[{config.to}]"'
        )


def build_logger(
    config: LoggingConfig, folder: Path, step: int, recipe: dict[str, Any], progress: Progress
) -> Logger:
    """Return a logger for the steps after `step`. If it cannot be opened, raise an error now."""
    if config.to == "none":
        return NoLogger()
    check_logger(config)
    RunLog(folder)  # creates the folder
    try:
        return FailSafeLogger(_build(config, folder, step, recipe), config.to, progress)
    except Exception as error:
        message = _one_line(error)
        raise UserError(f'logging.to = "{config.to}" cannot be opened: {message}') from error


def _build(config: LoggingConfig, folder: Path, step: int, recipe: dict[str, Any]) -> Logger:
    if config.to == "tensorboard":
        return TensorBoard(folder, step)
    return (WandB if config.to == "wandb" else Trackio)(config, folder, recipe)


def run_name(folder: Path) -> str:
    """Return the folder's name. For `METHOD/seed-N`, return `METHOD-seed-N`."""
    folder = folder.resolve()
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("seed-") else folder.name


def run_id(folder: Path) -> str:
    """Return a unique id of the run. It stays the same when the run is resumed."""
    path = folder / ID
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex + "\n")
    return path.read_text(encoding="utf-8").strip()


def metric_scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl."""
    return dict(_numbers(row, ""))


def evaluation_scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of evaluations.jsonl, as `full/SET/greedy` and so on."""
    return dict(_numbers(row, f"{row['kind']}/{row['set']}/"))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _numbers(row: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif name not in NOT_SCALARS and isinstance(value, int | float):
            yield prefix + name, float(value)
