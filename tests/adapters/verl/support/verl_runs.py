"""Runs verl in a separate process and reads what it recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
TIME_LIMIT = 420  # seconds per run; a run takes about 60 on two free cores
GROUP = 4  # completions per prompt
TEMPERATURE = 0.2  # of the run with full credit: some of its tokens are almost certain


@dataclass(frozen=True)
class VerlRun:
    folder: Path

    def events(self) -> list[dict[str, Any]]:
        """Return the rollout server's events: pushes, completions and sleeps."""
        return _lines(self.folder / "records/events.jsonl")

    def completions(self, push: int) -> list[dict[str, Any]]:
        """Return the completions sampled from the weights of that push."""
        completions = [event for event in self.events() if event["event"] == "completion"]
        return [event for event in completions if event["push"] == push]

    def weights(self, push: int) -> Path:
        return self.folder / f"records/push-{push:03d}.safetensors"

    def loss_rows(self) -> list[dict[str, Any]]:
        """Return the arguments of the policy loss, without padding rows."""
        files = sorted(self.folder.glob("records/loss-rank*.jsonl"))
        return [row for file in files for row in _lines(file) if row["denominators"]]

    def metrics(self) -> dict[int, dict[str, float]]:
        return {line["step"]: line["data"] for line in _lines(self.folder / "metrics.jsonl")}

    def rollout_dump(self, step: int) -> list[dict[str, Any]]:
        """Return verl's dump of a step's completions."""
        return _lines(self.folder / f"rollouts/{step}.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stage_rows(completions: list[dict[str, Any]], first: int, last: int) -> list[dict[str, Any]]:
    """Slice the completions of each prompt, in the order of the requests."""
    by_prompt: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in completions:
        by_prompt.setdefault(tuple(row["prompt"]), []).append(row)
    return [row for rows in by_prompt.values() for row in rows[first:last]]


def entropy(rows: list[dict[str, Any]]) -> float:
    return -sum(sum(row["logprobs"]) for row in rows) / sum(len(row["logprobs"]) for row in rows)


def run_verl(
    module: str, model: Path, folder: Path, overrides: list[str], num_steps: int = 2
) -> VerlRun:
    """Run a module with verl's command line."""
    import tiny

    line = [*tiny.command_line(model, model / "prompts.parquet", folder, num_steps), *overrides]
    return run_command([sys.executable, "-m", module, *line], folder)


def run_command(command: list[str], folder: Path) -> VerlRun:
    """Run the real command. After the time limit, kill it and all processes of its Ray cluster."""
    import psutil

    (folder / "records").mkdir()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SUPPORT),
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,recording_loss",
        # verl registers its FSDP engine for this device, but it also runs on the CPU.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "EEPO_TEST_RECORDS": str(folder / "records"),
        "RAY_DEDUP_LOGS": "0",
    }
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(TIME_LIMIT)
        finally:
            if process.poll() is None:
                for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                    child.kill()
    assert code == 0, (folder / "log.txt").read_text()[-6000:]
    return VerlRun(folder)
