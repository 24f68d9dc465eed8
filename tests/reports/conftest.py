"""Writes small run folders with known numbers, in the format of the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eepo.evaluation.estimates import pass_at_k, powers_of_two
from eepo.evaluation.results import set_title, write_results
from eepo.evaluation.store import Store
from eepo.evaluation.trained_run import find_run

NUM_STEPS, NUM_SAMPLES = 30, 32

WriteRun = Callable[..., Path]


def metrics_row(step: int, has_stage2: bool, level: float) -> dict[str, Any]:
    wave = 0.05 * ((step * 7) % 5)
    row: dict[str, Any] = {
        "step": step,
        "gate_share": 0.0,
        "policy_entropy": level,
        "grad_norm": 1.0,
    }
    for stage in (1, 2) if has_stage2 else (1,):
        row |= {
            f"stage{stage}/reward": 0.3 + 0.01 * step + wave - 0.03 * (stage - 1),
            f"stage{stage}/entropy": level * (0.96**step) + 0.2 * (stage - 1) + wave,
            f"stage{stage}/length": 20 + step + stage,
            f"stage{stage}/clip_share": 0.01 * stage + wave / 10,
        }
    row |= {key: row[f"stage1/{key}"] for key in ("reward", "entropy", "length")}
    row |= {"missed_share": 0.4 + wave, "second_half_recovery": 0.1 * (1 + has_stage2) + wave / 4}
    row |= {"seconds/stage1": 0.5, "seconds/update": 1.0, "seconds/total": 2.0}
    if has_stage2:
        row |= {"gate_share": 0.2 + wave, "seconds/stage2": 0.25}
        if step % 3:  # in some steps nothing is gated
            row |= {"unlearn/kl": 1e-3 * (1 + wave), "unlearn/weights_changed_share": 0.9}
    return row


def evaluation_row(step: int, kind: str, name: str, correct: Sequence[int]) -> dict[str, Any]:
    """`correct`: correct samples of NUM_SAMPLES, for each problem. Greedy is correct above half."""
    number = len(correct)
    problems = [
        {
            "id": f"p{index}",
            "greedy": num_correct * 2 > NUM_SAMPLES,
            "correct": num_correct,
            "distinct": min(num_correct, 3),
        }
        for index, num_correct in enumerate(correct)
    ]
    row: dict[str, Any] = {
        "step": step, "kind": kind, "set": name, "num_problems": number, "num_samples": NUM_SAMPLES,
        "greedy": sum(problem["greedy"] for problem in problems) / number,
        "mean": sum(correct) / number / NUM_SAMPLES,
        "pass@k": {
            str(k): sum(pass_at_k(NUM_SAMPLES, num_correct, k) for num_correct in correct) / number
            for k in powers_of_two(NUM_SAMPLES)
        },
        "distinct": sum(problem["distinct"] for problem in problems) / number,
        "length": 20.0, "truncated_share": 0.0, "seconds": 1.0,
    }  # fmt: skip
    return row | ({"problems": problems} if kind == "full" else {})


WriteEvaluation = Callable[..., Path]


@pytest.fixture
def write_evaluation(tmp_path: Path) -> WriteEvaluation:
    """Return write_evaluation("a", correct=[8, 0]): it writes a folder of eepo eval.

    With `run`, it is the evaluation of that run folder. Each problem has 8 samples.
    """

    def write(
        name: str,
        correct: Sequence[int] = (8, 2, 0),
        run: Path | None = None,
        sets: Sequence[str] = ("in_range", "out_of_range"),
        num_samples: int = 8,
    ) -> Path:
        trained = find_run(str(run)) if run else None
        store = Store(tmp_path / "evaluations" / name)
        description = {
            "model": str(run or f"acme/{name}"),
            "method": trained.method if trained else name,
            "run_seed": trained.seed if trained else None,
            "step": trained.step if trained else None,
            "template": "boxed",
            "max_new_tokens": 4096,
            "max_prompt_tokens": 1024,
            "limit": 0,
            "reward": "math",
            "num_samples": num_samples,
            "temperature": 1.0,
            "weights": name,
            "benchmarks": {
                key: {"title": set_title(key), "num_problems": len(correct), "num_left_out": 0}
                for key in sets
            },
        }
        store.open(description, "cpu", trained.recipe_text() if trained else "")
        for key in sets:
            greedy = [evaluation_line(index, 2 * n > 8) for index, n in enumerate(correct)]
            samples = [
                evaluation_line(index, sample < n, sample)
                for index, n in enumerate(correct)
                for sample in range(num_samples)
            ]
            store.append(key, greedy + samples)
        write_results(store.folder)
        return store.folder

    return write


def evaluation_line(problem: int, is_correct: bool, sample: int | None = None) -> dict[str, Any]:
    """Return a line of a completion; without `sample` it is the greedy one."""
    kind = {"kind": "greedy" if sample is None else "sample", "index": sample or 0}
    answer = {"answer": "yes" if is_correct else "no", "reward": float(is_correct)}
    return {"id": f"p{problem}", "num_tokens": 10, "finished": True} | kind | answer


def to_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Return write_run("grpo", seed=1, correct=[32, 0, 8, 0]): it writes a finished run."""

    def write(
        name: str = "grpo",
        seed: int = 0,
        correct: Sequence[int] = (32, 0, 8, 0),
        text: str = "1 + 2",
        level: float = 1.0,
        settings: str = "",
        start: bool = True,
    ) -> Path:
        folder = tmp_path / f"{name}-{seed}"
        folder.mkdir()
        has_stage2 = name.startswith("eepo")
        (folder / "recipe.toml").write_text(
            f'name = "{name}"\n'
            f"[algorithm]\nnum_stages = {1 + has_stage2}\ngroup_size = 8\n{settings}\n"
            f"[training]\nseed = {seed}\nnum_steps = {NUM_STEPS}\nprompts_per_step = 4\n"
        )
        (folder / "environment.json").write_text(
            json.dumps({"eepo": "0.1.0", "packages": {"torch": "2.10"}})
        )
        metrics = [
            metrics_row(step, has_stage2, level + 0.05 * seed) for step in range(1, NUM_STEPS + 1)
        ]
        (folder / "metrics.jsonl").write_text(to_lines(metrics))
        evaluations = [
            evaluation_row(step, "quick", name, [8 + step % 7, 3, 0, seed])
            for step in (10, 20)
            for name in ("in_range", "out_of_range")
        ]
        if start:
            evaluations += [
                evaluation_row(0, "full", name, [8, 0, 0, 0])
                for name in ("in_range", "out_of_range")
            ]
        halved = [num_correct // 2 for num_correct in correct]
        evaluations.append(evaluation_row(NUM_STEPS, "full", "in_range", correct))
        evaluations.append(evaluation_row(NUM_STEPS, "full", "out_of_range", halved))
        (folder / "evaluations.jsonl").write_text(to_lines(evaluations))
        completions = [
            {"step": step, "prompt_id": f"{step}/{prompt}", "prompt": "1 2 = 3 :",
             "stage": 1 + (index >= 4) * has_stage2, "reward": 1.0, "reason": "right",
             "advantage": 0.0, "text": f"{text} @{step}", "finished": True, "logprob": -1.0 - index}
            for step in range(1, NUM_STEPS + 1) for prompt in range(2) for index in range(8)
        ]  # fmt: skip
        for row in completions:
            # in some steps nothing is gated
            if has_stage2 and row["stage"] == 1 and row["step"] % 3:
                row["logprob_after"] = row["logprob"] - 0.5
        (folder / "completions.jsonl").write_text(to_lines(completions))
        return folder

    return write
