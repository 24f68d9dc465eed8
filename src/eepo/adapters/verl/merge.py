"""Merges the FSDP shards of a verl checkpoint into a model folder, with verl's own merger.

The merger rounds weights to bfloat16, the dtype in which rollout servers and `eepo eval` on a GPU
use them anyway.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from eepo.types import UserError

LATEST = "latest_checkpointed_iteration.txt"  # verl's note of the newest complete checkpoint
SHARDS = "fsdp_config.json"  # in the folder with the shards
ALLOWED = "a folder of eepo export-verl, verl's checkpoint folder, or one global_step_N of it"


def merge_checkpoint(source: Path, out: Path | None = None) -> Path:
    """Write the newest checkpoint of `source`, or `source` itself, as a model folder.

    The default for `out` is `final` in the folder of the run, where `eepo eval` looks for weights.
    The run's recipe, if there is one, is copied: `eepo eval` takes the prompt template from it.
    """
    checkpoint = find_checkpoint(source)
    run = checkpoint.parent.parent
    out = out or run / "final"
    if out.exists():
        raise UserError(f"--out {out} already exists; use another folder")
    try:
        from verl.model_merger.base_model_merger import ModelMergerConfig
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    except ImportError as error:
        raise UserError(f"{error}; merging needs verl: pip install 'eepo[verl]'") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        target, actor = Path(temporary) / "model", checkpoint / "actor"
        target.mkdir()
        config = ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=str(actor),
            hf_model_config_path=str(actor / "huggingface"),
            target_dir=str(target),
        )
        FSDPModelMerger(config).merge_and_save()
        if (run / "recipe.toml").is_file():
            shutil.copy(run / "recipe.toml", target)
        target.rename(out)
    return out


def find_checkpoint(source: Path) -> Path:
    """Return the `global_step_N` folder that `source` means."""
    if (source / "actor" / SHARDS).is_file():
        return source
    for folder in (source, source / "checkpoints"):
        if (folder / LATEST).is_file():
            step = (folder / LATEST).read_text(encoding="utf-8").strip()
            checkpoint = folder / f"global_step_{step}"
            if (checkpoint / "actor" / SHARDS).is_file():
                return checkpoint
            raise UserError(f"{checkpoint}: no FSDP shards of verl (no actor/{SHARDS})")
    raise UserError(f"{source}: no verl checkpoint; allowed: {ALLOWED}")
