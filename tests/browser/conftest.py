"""Opens a report in headless Chromium. Every text of a model or a user is hostile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eepo.reports import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--virtual-time-budget=3000",
    "--enable-logging=stderr",
)  # fmt: skip
TIMEOUT_SECONDS = 60  # after that, the browser is considered hung

# If a text ran as code, it would change the title or add a node with this id.
MARK = (
    "document.title='ran';"
    "document.body.append(Object.assign(document.createElement('b'),{id:'ran'}))"
)
INJECTED = (
    f"<script>{MARK}</script>",
    f"</script><script>{MARK}</script>",
    f"</noscript></pre><img src=x onerror=\"{MARK}\"><svg onload=\"{MARK}\"></svg>",
    f"<!--<script>{MARK}</script>",
    f"\"><iframe srcdoc=\"<script>parent.{MARK}</script>\"></iframe>",
    f"<a href=\"javascript:{MARK}\" id=\"injected\">\u2028</a>]]>",
)  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """Holds a page after its scripts ran."""

    dom: str
    console: list[str]  # errors of scripts and of the policy

    def texts(self, tag: str) -> list[str]:
        return re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", self.dom, re.DOTALL)

    @property
    def count(self) -> str:
        return re.search(r'id="completions-count">([^<]*)<', self.dom)[1]


@pytest.fixture(scope="session")
def chromium() -> str:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    return browser


@pytest.fixture(scope="session")
def open_page(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Opened]:
    """Return open_page(path, "step=3", *flags): it opens a page and returns its DOM."""
    profile = tmp_path_factory.mktemp("profile")

    def run(path: Path, fragment: str = "", *flags: str) -> Opened:
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", *flags]
        done = subprocess.run(
            [*command, "--dump-dom", f"{path.as_uri()}#{fragment}"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
        return Opened(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])

    return run


@pytest.fixture
def injected() -> tuple[str, ...]:
    return INJECTED


@pytest.fixture(scope="session")
def report(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of two methods. Every text of the second one is hostile.

    Needs `chromium`, so that the report is not drawn without a browser.
    """
    folder = tmp_path_factory.mktemp("report")
    folders = [
        write_run(folder / "grpo", "grpo", "1+2"),
        write_run(folder / "hostile", INJECTED[1], *INJECTED),
    ]
    return write_report(folders, folder / "report.html")


def write_run(folder: Path, name: str, *texts: str) -> Path:
    """Write 3 steps with 2 stages of 8 completions. The first one of each stage is correct."""
    folder.mkdir()
    recipe = (
        f"name = {json.dumps(name)}\n[algorithm]\ngate = {json.dumps(texts[0])}\n"
        "[training]\nnum_steps = 3\n"
    )
    (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"device": texts[-1]}))
    _write_lines(folder / "metrics.jsonl", (_metrics(step, texts[0]) for step in (1, 2, 3)))
    _write_lines(folder / "evaluations.jsonl", (_evaluation(step, texts[0]) for step in (0, 3)))
    _write_lines(
        folder / "completions.jsonl",
        (row for step in (1, 2, 3) for row in _completions(step, texts)),
    )
    return folder


def _write_lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _metrics(step: int, label: str) -> dict[str, Any]:
    shared = {
        "step": step,
        "entropy": 1.0,
        "length": 5.0,
        "gate_share": 0.5,
        "unlearn/kl": 0.01,
        "seconds/total": 2.0,
    }
    shared |= {"missed_share": 0.5, "second_half_recovery": 0.25}
    for stage in (1, 2):  # a strategy that becomes common, for the figure of strategies
        shared |= {f"stage{stage}/label/guess": 1 - 0.2 * step}
        shared |= {f"stage{stage}/label/rare {label}": 0.2 * step}
    keys = ("entropy", "reward", "length", "clip_share")
    return shared | {f"stage{stage}/{key}": 0.1 * stage * step for stage in (1, 2) for key in keys}


def _evaluation(step: int, name: str) -> dict[str, Any]:
    return {
        "step": step, "kind": "full", "set": name, "num_problems": 1, "num_samples": 2,
        "greedy": 1.0, "mean": 0.5, "pass@k": {"1": 0.5, "2": 1.0}, "distinct": 1.0, "length": 5.0,
        "problems": [{"id": name, "greedy": True, "correct": 1, "distinct": 1}],
    }  # fmt: skip


def _completions(step: int, texts: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for index in range(16):
        text = texts[index % len(texts)]
        row = {
            "step": step, "prompt_id": text, "prompt": f"{text} = ?", "stage": 1 + index // 8,
            "finished": index != 3, "reward": float(index % 8 == 0), "reason": f"reason {text}",
            "advantage": 0.0, "text": f"{text} #{step}.{index}", "logprob": -1.0 - index,
        }  # fmt: skip
        yield row | ({"logprob_after": -2.0 - index} if index < 8 else {})
