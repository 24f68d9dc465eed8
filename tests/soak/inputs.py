"""Reads recipes, `--set` and data files of the generators: each is valid, or a one-line error."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from cases import check_cases
from fuzzed_files import fuzzed_files
from fuzzed_recipes import fuzzed_overrides, fuzzed_recipes
from scenarios import Workspace
from table import Findings

from eepo import recipe
from eepo.config import DatasetConfig
from eepo.tasks import build_task
from eepo.tasks.countdown import build_tokenizer

NUM_CASES = 50  # per try
VALID = 'name = "soak"\n'


def try_recipes(workspace: Workspace, rng: random.Random) -> Findings:
    """Read half of the recipes as training recipes, and the others as warm starts."""
    path = workspace.new_folder("recipes") / "recipe.toml"

    def check(text: str) -> None:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        (recipe.load_run if rng.random() < 0.5 else recipe.load_warmup)(str(path))

    return check_cases(check, list(fuzzed_recipes(rng.getrandbits(32), NUM_CASES)))


def try_overrides(workspace: Workspace, rng: random.Random) -> Findings:
    path = workspace.new_folder("overrides") / "recipe.toml"
    path.write_text(VALID)

    def check(override: str) -> None:
        recipe.load_run(str(path), [override])

    return check_cases(check, list(fuzzed_overrides(rng.getrandbits(32), NUM_CASES)))


def try_data_files(workspace: Workspace, rng: random.Random) -> Findings:
    """Read each file as a training set and as an evaluation set."""
    folder, tokenizer = workspace.new_folder("data"), build_tokenizer()
    valid = folder / "valid.jsonl"
    valid.write_text('{"problem": "What is 100 + 1?", "answer": "101"}\n')

    def check(file: tuple[str, bytes]) -> None:
        path = folder / f"data{file[0]}"
        path.write_bytes(file[1])
        roles: list[dict[str, Any]] = [
            {"train": str(path)},
            {"train": str(valid), "evaluation": (str(path),)},
            {"train": str(path), "skip_unanswered": True, "levels": (5,)},
        ]
        task = build_task(DatasetConfig(**rng.choice(roles)), tokenizer)
        task.training_prompts(0, 3)
        task.evaluation_sets()

    def describe(file: tuple[str, bytes]) -> str:
        kept = keep(file, workspace.folder / "failures")
        return f"{kept} {file[1][:80]!r}"

    findings = check_cases(check, list(fuzzed_files(rng.getrandbits(32), NUM_CASES)), describe)
    shutil.rmtree(folder)
    return findings


def keep(file: tuple[str, bytes], folder: Path) -> Path:
    """Keep a file that failed, for a test."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(list(folder.iterdir()))}{file[0]}"
    path.write_bytes(file[1])
    return path
