"""Checks that the examples are short, use the public API, and run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NOTEBOOK = FOLDER / "demo.ipynb"
# A reward function may call a built-in grader (docs/grader.md).
PUBLIC = {"eepo", "eepo.adapters.trl", "eepo.rewards.guess_or_reason"}
MAX_LINES = 60


def cells(path: Path) -> list[str]:
    """Return the code cells of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def sources() -> dict[str, str]:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in SCRIPTS}
    return scripts | {NOTEBOOK.name: "\n".join(cells(NOTEBOOK)) + "\n"}


def run(folder: Path, *arguments: object) -> str:
    """Run Python in a folder, without a hub, and return its output."""
    command = [sys.executable, *map(str, arguments)]
    offline = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "HF_HOME": str(folder / "hub")}
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def test_there_are_examples() -> None:
    names = {path.stem for path in SCRIPTS}
    assert names == {"custom_reward", "strict_maths", "trl_gsm8k"}


@pytest.mark.parametrize("name", sources())
def test_examples_are_short_use_the_public_api_and_choose_no_device(name: str) -> None:
    source = sources()[name]
    assert source.count("\n") <= MAX_LINES
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules |= {each.name for each in node.names}
    ours = {module for module in modules if module.partition(".")[0] == "eepo"}
    assert ours
    assert ours <= PUBLIC
    assert "use_cpu" not in source
    assert "device" not in source.replace("per_device", "")


@pytest.mark.slow
def test_the_custom_reward_trains(tmp_path: Path) -> None:
    printed = run(tmp_path, FOLDER / "custom_reward.py", "out", 1)
    assert "pass@k on held-out problems: {'1': 0." in printed
    (row,) = map(json.loads, (tmp_path / "out/run/metrics.jsonl").open())
    assert row["reward"] > 0.1  # the policy that ships solves about half of such problems


def test_the_reward_of_the_example_is_exact_and_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import custom_reward

    numbers, target = [2, 3, 4, 6], 24
    for completion, expected in {
        "(6 - 2) * (4 + 3 - 1)": 0.0,  # a number too many
        "6 * 4 * (3 - 2)": 1.0,
        "6 * 4 + 3 - 2": 0.25,
        "6 * 4": 0.0,
        "6 * 4 * (3 - 2": 0.0,
        "__import__('os').getpid() * 6": 0.0,
        "(" * 5000: 0.0,
        "": 0.0,
    }.items():
        assert custom_reward.reward(completion, numbers, target) == expected, completion


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell_in_a_new_process(tmp_path: Path) -> None:
    """As in a notebook, the main module has no file. The test trains fewer steps."""
    code = "\n".join(cells(NOTEBOOK))
    assert "STEPS = 50\n" in code
    (tmp_path / "code.py").write_text(code.replace("STEPS = 50\n", "STEPS = 2\n"))
    printed = run(tmp_path, "-c", "exec(open('code.py').read())")
    assert "GRPO: greedy" in printed
    assert "EEPO: greedy" in printed


@pytest.fixture
def local_hub(tmp_path: Path, chat_model: Callable[[Path], None]) -> Path:
    """Write a tiny chat model and eight problems of GSM8K's form, as folders."""
    chat_model(tmp_path / "model")
    rows = [{"question": f"{n} + 1?", "answer": f"So.\n#### {n + 1}"} for n in range(8)]
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    (tmp_path / "gsm8k" / "main" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: main/train.jsonl\n---\n"
    )
    return tmp_path


@pytest.mark.slow
def test_the_trl_example_trains_a_local_model(local_hub: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")
    options = "--model model --data gsm8k --steps 1 --max-tokens 8 --out out"
    run(local_hub, FOLDER / "trl_gsm8k.py", *options.split())
    state = json.loads((local_hub / "out/checkpoint-1/trainer_state.json").read_text())
    log = state["log_history"][0]
    assert log["eepo/kl"] > 0
    assert log["rewards/correct/mean"] == 0  # a random model: the grader ran and found no answer
