"""Reads TRL's log: the `log_history` in a `trainer_state.json`, in our metric names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eepo.reports.stage_metrics import complete_stages, only_numbers, rename
from eepo.runs.jsonl import parse_json
from eepo.types import UserError

Row = dict[str, Any]

STATE = "trainer_state.json"
NAMES = {
    "reward": "reward",
    "entropy": "policy_entropy",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "truncated_share",
    "frac_reward_zero_std": "zero_advantage_share",
    "clip_ratio/region_mean": "clip_share",
    "grad_norm": "grad_norm",
    "step_time": "seconds/total",
    "eepo/stage1_reward": "stage1/reward",
    "eepo/stage2_reward": "stage2/reward",
    "eepo/stage1_entropy": "stage1/entropy",
    "eepo/stage2_entropy": "stage2/entropy",
    "eepo/stage1_length": "stage1/length",
    "eepo/stage2_length": "stage2/length",
    "eepo/gated_share": "gate_share",
    "eepo/unlearn_loss": "unlearn/loss_before",
    "eepo/unlearn_lr": "unlearn/lr",
    "eepo/kl": "unlearn/kl",
    "eepo/kl_floor": "unlearn/kl_floor",
}
PREFIX = "eepo/"  # of the adapter's metrics, whose names are ours otherwise


def find_state(folder: Path) -> Path | None:
    """Return the state file of an output folder, of its newest checkpoint, or of a checkpoint."""
    if (folder / STATE).is_file():
        return folder / STATE
    states = [path for path in folder.glob(f"checkpoint-*/{STATE}") if _step(path) >= 0]
    return max(states, key=_step, default=None)


def read_trl_log(file: Path) -> list[Row]:
    """Return the rows of `metrics.jsonl`: one for each logged step, without evaluations."""
    try:
        state = parse_json(file.read_bytes(), str(file))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise UserError(f"{file}: not the state of a TRL trainer (no log_history)")
    rows = [only_numbers(entry) for entry in history if isinstance(entry, dict)]
    steps = [row for row in rows if {"step", "reward"} <= row.keys()]
    return [complete_stages({"step": row["step"]} | rename(row, NAMES, PREFIX)) for row in steps]


def _step(state: Path) -> int:
    number = state.parent.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1
