"""Benchmark scripts: every one prints its usage, and some run at a small size on the CPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(
    path.name for path in FOLDER.glob("*.py") if "argparse" in path.read_text(encoding="utf-8")
)


def run(name: str, arguments: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_the_scripts_are_found() -> None:
    assert {"rollout.py", "train.py", "step.py", "optimizers.py", "grader.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_prints_its_usage(name: str, monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        run(name, ["--help"], monkeypatch)
    assert caught.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_rollout_benchmark_compares_engines_on_fixed_lengths(
    monkeypatch: Any, capsys: Any
) -> None:
    options = "--shape tiny --rows 4 --cases fixed:4:2,longtail:8:6 --mean 3 --prompt 5"
    peers = "--samples 2 --peers eepo;generate --repeats 1"
    run("rollout.py", f"{options} {peers}".split(), monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("| eepo |") == printed.count("| generate |") == 2
    assert printed.count("times generate") == 2


@pytest.mark.slow
def test_the_few_rows_benchmark_times_products_attention_and_a_step(
    monkeypatch: Any, capsys: Any
) -> None:
    run("few_rows.py", ["--shapes", "tiny", "--rows", "2,4", "--sampling-rows", "1"], monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("| gate+up |") == printed.count("| head |") == 2
    assert "| rows | unfused | fused |" in printed
    run(
        "few_rows.py",
        ["--attention", "tiny", "--contexts", "2:70", "--splits", "256:16:4:3,512:16:4:3"],
        monkeypatch,
    )
    assert "| rows | tokens | 256:16:4:3 | 512:16:4:3 |" in capsys.readouterr().out
    run(
        "few_rows.py", ["--profile", "tiny", "--length", "70", "--profile-rows", "2,3"], monkeypatch
    )
    printed = capsys.readouterr().out
    assert "tiny, 2 rows of 70 tokens, not compiled" in printed
    assert "tiny, 3 rows of 70 tokens" in printed
    assert "| aten::mm |" in printed


def test_the_prompts_benchmark_counts_guesses_and_reasoning(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    rows = [{"problem": f"{i} + 1 = {i + 1} :", "answer": str(i + 1)} for i in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The small policy has no chat template.
    script = runpy.run_path(str(FOLDER / "prompts.py"))
    script["PROMPTS"]["only"] = "{problem}"
    options = f"--model builtin:countdown --train sums.jsonl --data-dir {tmp_path} --prompts only"
    sizes = f"--examples 0 --problems 4 --samples 2 --max-new-tokens 4 --out {tmp_path / 'out'}"
    script["main"](script["parser"]().parse_args(f"{options} {sizes} --device cpu".split()))
    assert "| only | 0 | 0.0000" in capsys.readouterr().out
    counts = json.loads((tmp_path / "out").read_text())
    assert counts["num_completions"] == 8
    assert counts["num_reason"] == 0


def test_own_solutions_are_correct_finished_and_start_with_a_text(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> str:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
        return str(tmp_path / name)

    texts = [
        ("a", "To guess: \\boxed{1}", 0.0, True),
        ("a", "To add\u2028\\boxed{2}", 1.0, True),
        ("a", "To add again \\boxed{2}", 1.0, True),
        ("problems/7", "\\boxed{3}", 1.0, True),
        ("c", "To be cut off \\boxed{4} and", 1.0, False),
        ("problems/3", "So \\boxed{2}", 1.0, True),
    ]
    columns = ("id", "text", "reward", "finished")
    completions = write("completions", [dict(zip(columns, row, strict=True)) for row in texts])
    rows = [{"id": name, "problem": str(name).upper(), "answer": "2"} for name in ("a", 7, "c")]
    rows.append({"problem": "D", "answer": "2"})
    out = tmp_path / "solved.jsonl"
    files = [completions, write("problems.jsonl", rows), str(out)]
    for start, kept in ((["--start", "To"], ["A"]), ([], ["A", "7", "D"])):
        run("own_solutions.py", [*files, *start], monkeypatch)
        assert f"{len(kept)} problems with a solution" in capsys.readouterr().out
        solved = [json.loads(line) for line in out.open(encoding="utf-8")]
        assert [row["problem"] for row in solved] == kept
        assert solved[0] == rows[0] | {"solution": "To add\u2028\\boxed{2}"}
    with pytest.raises(SystemExit, match="no correct completion of a problem in"):
        run("own_solutions.py", [*files, "--start", "Nobody"], monkeypatch)


@pytest.mark.slow
def test_the_lora_benchmark_runs_every_kind_of_case(monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    sizes = "--prompts 2 --new 3 --prompt 5 --warm 0 --repeats 1 --rows 8 --tokens 64"
    cases = "tiny full;tiny merged;tiny shared eepo 24"
    run("lora.py", [*sizes.split(), "--cases", cases], monkeypatch)
    printed = capsys.readouterr().out
    assert "| tiny full, GRPO |" in printed
    assert "| tiny merged, GRPO |" in printed
    assert "| tiny shared, EEPO, 24 GB |" in printed


@pytest.mark.slow
def test_the_lora_benchmark_prints_which_models_fit(monkeypatch: Any, capsys: Any) -> None:
    run("lora.py", ["--table"], monkeypatch)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 8B")]
    fits = [["yes" in cell for cell in row.split(" | ")[3:]] for row in rows]
    assert fits == [[False] * 4, [False, True, True, True], [True] * 4]
