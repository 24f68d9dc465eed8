"""Writes a folder from which verl trains a recipe: data, the recipe itself, and a script.

OUT/recipe.toml      the recipe, for `eepo eval` and `eepo report`
OUT/train.parquet    one row for each prompt of each step, in the order of `eepo train`
OUT/val.parquet      the evaluation sets
OUT/train.sh         the command
OUT/logs/            one file for each start of the script: verl empties a file that exists
OUT/checkpoints/     verl's checkpoints
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path

from eepo import recipe
from eepo.adapters.verl.cluster import Cluster
from eepo.adapters.verl.data import RAW_TEMPLATE, RAW_TEMPLATE_KEY, verl_rows, write_parquet
from eepo.adapters.verl.export import Setting, quote, settings, shell_lines, shell_word
from eepo.config import DatasetConfig, RunConfig
from eepo.model import loading
from eepo.runs.runlog import METRICS, RunLog, write_atomically
from eepo.tasks.dataset import Dataset
from eepo.types import UserError

TRAIN, VAL, SCRIPT = "train.parquet", "val.parquet", "train.sh"
LOGS, CHECKPOINTS = "logs", "checkpoints"
# An environment variable of verl. Ray passes it on, also to a cluster that is running already.
LOG_FILE_KEY = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"
SCRIPT_TEXT = """\
#!/usr/bin/env bash
# Trains the recipe of this folder with verl. Run it again to continue a stopped run: verl resumes
# from its newest checkpoint. Further settings may follow: bash train.sh trainer.save_freq=10
set -euo pipefail
mkdir -p {logs}
{command} \\
    "$@"
"""


@dataclasses.dataclass(frozen=True)
class Export:
    """Describes what was written."""

    script: Path
    num_train: int  # rows
    num_val: int
    notes: list[str]  # about the data, for the user


def export_folder(config: RunConfig, cluster: Cluster, out: Path) -> Export:
    """Write the folder. All mistakes in the recipe, the data and the options come first."""
    folder = out.resolve()
    local = _with_absolute_path(config)
    values = settings(local, cluster)
    _check_folder(config, out)
    if config.training.num_steps == 0:
        raise UserError("training.num_steps = 0 cannot be exported to verl; allowed: 1 or more")
    tokenizer = loading.load_tokenizer(local.model)
    if cluster.tensor_parallel > 1:
        cluster.check_heads(loading.load_shape(local.model)[0].num_attention_heads)
    assert isinstance(config.task, DatasetConfig)  # `settings` has checked it
    task = Dataset(config.task, tokenizer, config.training.seed)
    batch = config.training.prompts_per_step
    prompts = task.training_prompts(0, config.training.num_steps * batch)
    train = list(verl_rows(prompts, "train", "train", tokenizer))
    sets = task.evaluation_sets().items()
    val = [row for name, problems in sets for row in verl_rows(problems, name, "val", tokenizer)]
    values |= dict(_folder_settings(folder, has_evaluation=bool(val)))
    RunLog(folder).write_recipe(recipe.dump(config))
    write_parquet(folder / TRAIN, train)
    write_parquet(folder / VAL, val or train[:batch])  # verl needs a file, also if it never uses it
    command = shell_lines([*map(shell_word, values.items()), _log_file_word(folder)])
    logs = shlex.quote(str(folder / LOGS))
    write_atomically(folder / SCRIPT, SCRIPT_TEXT.format(logs=logs, command=command))
    return Export(out / SCRIPT, len(train), len(val), task.notes)


def _with_absolute_path(config: RunConfig) -> RunConfig:
    """Resolve the model's folder, because Ray may run verl in another working directory."""
    path = loading.resolve(config.model.path)
    if Path(path).is_dir():
        path = str(Path(path).resolve())
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))


def _folder_settings(folder: Path, has_evaluation: bool) -> Iterator[Setting]:
    """Yield what differs from a command without data files."""
    yield "data.train_files", str(folder / TRAIN)
    yield "data.val_files", str(folder / VAL)
    yield "data.shuffle", False  # the rows are in the order of the steps
    yield "data.filter_overlong_prompts", False  # long prompts are left out already
    yield RAW_TEMPLATE_KEY, RAW_TEMPLATE
    yield "trainer.default_local_dir", str(folder / CHECKPOINTS)
    yield "hydra.run.dir", str(folder / "hydra")
    if not has_evaluation:
        yield "trainer.test_freq", -1
        yield "trainer.val_before_train", False


def _log_file_word(folder: Path) -> str:
    """Return the setting of verl's log, whose name is the time at which the script starts."""
    before, _, after = quote(f"{folder / LOGS}/.jsonl").rpartition("/")
    return "".join(
        [shlex.quote(f"{LOG_FILE_KEY}={before}/"), '"$(date +%F-%H-%M-%S)"', shlex.quote(after)]
    )


def _check_folder(config: RunConfig, out: Path) -> None:
    """Refuse to mix two runs in one folder."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    if (out / METRICS).exists():
        raise UserError(f"--out {out} already contains a run of eepo train; use another folder")
    written = out / "recipe.toml"
    if written.is_file() and written.read_text(encoding="utf-8") != recipe.dump(config):
        raise UserError(
            f"--out {out} already contains an export of another recipe; use another folder"
        )
