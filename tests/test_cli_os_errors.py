"""Tests that errors of the operating system are one line: full disks, long names, wrong folders."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

from eepo import cli
from eepo.model import memory
from eepo.runs.runlog import COMPLETIONS, METRICS

TINY = (
    "training.num_steps=3",
    "training.prompts_per_step=2",
    "training.prompts_per_mini_batch=2",
    "algorithm.group_size=4",
    "algorithm.max_new_tokens=12",
    "task.num_evaluation=2",
    "evaluation.num_samples=2",
    "evaluation.every=0",
)
LONG = "x" * 300  # no file system allows such a name

pytestmark = pytest.mark.usefixtures("one_thread")

Eepo = Callable[..., SimpleNamespace]
Limit = Callable[[int], AbstractContextManager[None]]


def settings(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.fixture
def eepo(run_eepo: Eepo) -> Eepo:
    return run_eepo


def assert_one_line(result: SimpleNamespace, *fragments: str) -> None:
    assert result.code in (1, 2), result.out + result.err
    assert result.err.startswith("eepo: "), result.err
    assert len(result.err.splitlines()) == 1, result.err
    for fragment in fragments:
        assert fragment in result.err


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that several tests read."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        words = ["eepo", "train", "countdown/eepo", "--out", str(out), *settings(*TINY)]
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code
    return out


# --- a full disk


@pytest.mark.parametrize(
    ("num_bytes", "file"),
    [(1000, "recipe.toml"), (5500, COMPLETIONS), (100_000, "checkpoints")],
)
def test_training_on_a_full_disk_names_the_file(
    num_bytes: int, file: str, eepo: Eepo, file_size_limit: Limit
) -> None:
    overrides = (*TINY, "training.log_completions=100")
    with file_size_limit(num_bytes):
        result = eepo("train", "countdown/eepo", "--out", "run", *settings(*overrides))
    assert result.code == 1
    assert_one_line(result, f"run/{file}", os.strerror(errno.EFBIG), "EEPO_DEBUG=1")


@pytest.mark.slow
def test_a_run_that_met_a_full_disk_can_be_resumed(eepo: Eepo, file_size_limit: Limit) -> None:
    words = ("train", "countdown/eepo", "--out", "run", "--resume", *settings(*TINY))
    with file_size_limit(100_000):
        assert_one_line(eepo(*words))
    result = eepo(*words)
    assert result.code == 0, result.err
    assert len(Path("run", METRICS).read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_report_on_a_full_disk_names_the_file(
    finished_run: Path, eepo: Eepo, file_size_limit: Limit
) -> None:
    with file_size_limit(3000):
        result = eepo("report", finished_run, "--out", "new/report.html")
    assert_one_line(result, "new/report_figures", os.strerror(errno.EFBIG))


def test_a_sweep_on_a_full_disk_names_the_file(eepo: Eepo, file_size_limit: Limit) -> None:
    grid = ("--grid", "training.learning_rate=1e-3,1e-4", "--seeds", "1")
    with file_size_limit(1000):
        result = eepo("sweep", "countdown/eepo", *grid, "--out", "sweep", *settings(*TINY))
    assert_one_line(result, "recipe.toml", os.strerror(errno.EFBIG))


def test_grading_on_a_full_disk_names_the_file(eepo: Eepo, file_size_limit: Limit) -> None:
    Path("in.jsonl").write_text('{"gold": "1", "completion": "1"}\n' * 100)
    with file_size_limit(1000):
        words = ("grade", "in.jsonl", "--reward", "exact", "--workers", 1, "--out", "out.jsonl")
        assert_one_line(eepo(*words), "out.jsonl", os.strerror(errno.EFBIG))
    assert not Path("out.jsonl").exists()


@pytest.mark.slow
def test_an_evaluation_on_a_full_disk_names_the_file(
    finished_run: Path, eepo: Eepo, file_size_limit: Limit
) -> None:
    rows = "".join(f'{{"question": "{n}+1 = 3 :", "answer": "2"}}\n' for n in range(1, 9))
    Path("amc23.jsonl").write_text(rows)
    words = ("eval", finished_run, "--benchmarks", "amc23", "--data-dir", ".", "--out", "results")
    with file_size_limit(1500):
        result = eepo(*words, "--template", "{problem}", "--max-new-tokens", 8)
    assert_one_line(result, "results/", os.strerror(errno.EFBIG))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
@pytest.mark.parametrize("words", [["--version"], ["train", "--help"]])
def test_output_to_a_full_disk_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "eepo", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ran.returncode == 1
    assert_one_line(SimpleNamespace(code=1, out="", err=ran.stderr), os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_training_on_a_small_disk_is_one_line(small_disk: Path, eepo: Eepo) -> None:
    """The error comes before the first step, and not at the first checkpoint."""
    words = ("train", "countdown/eepo", "--out", small_disk / "run", *settings(*TINY))
    assert_one_line(
        eepo(*words), "disk/run", "a checkpoint and the final weights take", "1 MiB are free"
    )
    assert not (small_disk / "run" / METRICS).exists()


def test_a_warm_start_needs_space_for_a_checkpoint(
    eepo: Eepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_disk", lambda folder: 2**20)
    result = eepo("warmup", "countdown/warmup", "--out", "start")
    assert_one_line(result, "--out start: a checkpoint and the final weights take 13 MiB")


def test_only_runs_that_write_a_checkpoint_need_space_for_it(eepo: Eepo) -> None:
    words = ("train", "countdown/eepo", "--out", "run", "--resume", *settings(*TINY))
    longer = (*words, "--set", "training.num_steps=4")
    assert eepo(*words).code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_disk", lambda folder: 2**20)
        assert eepo(*words).code == 0  # it is finished
        assert_one_line(eepo(*longer), "--out run: a checkpoint", "but 1 MiB are free")
        unfinished = Path("run/checkpoints/.step-000004.4242/model.safetensors")
        unfinished.parent.mkdir()
        unfinished.write_bytes(bytes(13 * 2**20))  # a failed save; the next start removes it
        result = eepo(*longer)
    assert not unfinished.exists()
    assert result.code == 0, result.err
    assert len(Path("run", METRICS).read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_read_only_disk_is_one_line(small_disk: Path, finished_run: Path, eepo: Eepo) -> None:
    shutil.copy(finished_run / "recipe.toml", small_disk / "recipe.toml")
    shutil.copy(finished_run / METRICS, small_disk / METRICS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    read_only = os.strerror(errno.EROFS)
    for words in (
        ["train", "countdown/eepo", "--out", small_disk / "new", *settings(*TINY)],
        ["train", small_disk / "recipe.toml", "--out", small_disk, "--resume"],
        ["report", finished_run, "--out", small_disk / "report.html"],
        ["sweep", "countdown/eepo", "--grid", "training.learning_rate=1,2", "--out", small_disk],
        ["compare", "countdown/eepo", "--out", small_disk / "new", *settings(*TINY)],
    ):
        result = eepo(*words)
        assert_one_line(result, str(small_disk))
        assert read_only in result.err or words[0] == "sweep", result.err
    result = eepo("report", small_disk, "--out", "report.html")
    assert result.code == 0, result.err


# --- names and folders


WRONG_PLACES = {
    "train": ["train", "countdown/eepo", "--out", "{}", *settings(*TINY)],
    "warmup": ["warmup", "countdown/warmup", "--out", "{}"],
    "compare": ["compare", "countdown/eepo", "--out", "{}", *settings(*TINY)],
    "demo": ["demo", "--out", "{}"],
    "sweep": ["sweep", "countdown/eepo", "--grid", "training.learning_rate=1,2", "--out", "{}"],
    "report": ["report", "{run}", "--out", "{}"],
    "grade": ["grade", "in.jsonl", "--reward", "exact", "--workers", "1", "--out", "{}"],
    "recipe": ["train", "{}", "--out", "run"],
    "runs": ["report", "{}"],
    "watched runs": ["watch", "{}"],
    "sweeps": ["hyper", "{}"],
    "evaluations": ["table", "{}"],
    "graded file": ["grade", "{}"],
    "model": ["train", "countdown/eepo", "--out", "run", "--set", "model.path={}"],
    "evaluated model": ["eval", "{}", "--benchmarks", "amc23", "--data-dir", "."],
    "benchmark folder": ["eval", "{run}", "--benchmarks", "amc23", "--data-dir", "{}"],
    "line of a sweep": [
        *("sweep", "countdown/eepo", "--grid", "training.learning_rate=1,2", "--out", "sweep"),
        *("--line", "{}"),
    ],
}


@pytest.mark.parametrize("arguments", WRONG_PLACES.values(), ids=WRONG_PLACES)
@pytest.mark.parametrize("place", [LONG, f"{LONG}/new", "file/new"], ids=["long", "below", "file"])
def test_a_place_that_cannot_exist_is_one_line(
    arguments: list[str],
    place: str,
    finished_run: Path,
    eepo: Eepo,
    request: pytest.FixtureRequest,
) -> None:
    if arguments[0] == "watch" and place != LONG:
        pytest.skip("a watched folder may still be missing")
    if "model" in request.node.callspec.id and place == "file/new":
        pytest.skip("this could be a model on the hub")
    Path("file").write_text("a file")
    Path("in.jsonl").write_text('{"gold": "1", "completion": "1"}\n')
    Path("amc23.jsonl").write_text('{"question": "1+1 =", "answer": "2"}\n')
    words = [word.replace("{}", place).replace("{run}", str(finished_run)) for word in arguments]
    assert_one_line(eepo(*words))


def test_a_model_in_the_home_of_nobody_is_one_line(eepo: Eepo) -> None:
    Path("amc23.jsonl").write_text('{"question": "1+1 =", "answer": "2"}\n')
    for words in (
        ["train", "countdown/eepo", "--out", "run", "--set", "model.path=~nobody-here/model"],
        ["eval", "~nobody-here/model", "--benchmarks", "amc23", "--data-dir", "."],
    ):
        assert_one_line(eepo(*words), "~nobody-here/model")


@pytest.mark.parametrize("file", ["recipe.toml", METRICS, "checkpoints"])
def test_a_run_with_a_folder_or_a_file_in_a_wrong_place_is_one_line(
    file: str, finished_run: Path, eepo: Eepo
) -> None:
    run = Path("run")
    shutil.copytree(finished_run, run)
    if (run / file).is_dir():
        shutil.rmtree(run / file)
        (run / file).write_text("no folder")
    else:
        (run / file).unlink()
        (run / file).mkdir()
    words = ("train", finished_run / "recipe.toml", "--out", run, "--resume")
    result = eepo(*words, *settings("training.num_steps=4"))
    assert_one_line(result, file)
    if file in ("recipe.toml", METRICS):
        assert_one_line(eepo("report", run), file)


GRIDS = {
    "integer of 5,000 digits": "9" * 5000,
    "quoted and an integer of 5,000 digits": "'a'," + "9" * 5000,
    "quoted and an integer of 9,000 hexadecimal digits": "'a',0x" + "f" * 9000,
    "quoted and 2,000 brackets": "'a'," + "[" * 2000,
}


@pytest.mark.parametrize("values", GRIDS.values(), ids=GRIDS)
def test_an_unusable_grid_is_one_line(values: str, eepo: Eepo) -> None:
    grid = ("--grid", f"training.learning_rate={values}")
    assert_one_line(eepo("sweep", "countdown/eepo", *grid, "--out", "sweep"), "--grid")


# --- what stays visible


def test_the_traceback_is_shown_on_request(eepo: Eepo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EEPO_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["eepo", "report", LONG])
    with pytest.raises(OSError, match="File name too long"):
        cli.main()


def test_an_os_error_that_a_library_made_up_keeps_its_traceback(
    eepo: Eepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no number of the operating system, so it may be a bug."""

    def bug(*args: object) -> None:
        raise OSError("could not get source code")

    monkeypatch.setattr("eepo.assemble.build_trainer", bug)
    monkeypatch.setattr(sys, "argv", ["eepo", "train", "countdown/eepo", "--out", "run"])
    with pytest.raises(OSError, match="could not get source code"):
        cli.main()


def assert_escaped(text: str) -> None:
    assert "\x1b[31m" not in text
    assert "\x9b" not in text
    assert r"red\x1b[31m\x9b2J" in text


@pytest.mark.slow
def test_control_characters_of_a_name_do_not_reach_the_terminal(eepo: Eepo) -> None:
    name = "red\x1b[31m\x9b2J"
    out = f"run{name}"
    overrides = (*TINY, "training.num_steps=1", f"name={name}")
    for words in (
        ["train", "countdown/eepo", "--out", out, *settings(*overrides)],
        ["report", out, "--out", f"{out}.html"],
    ):
        result = eepo(*words)
        assert result.code == 0, result.err
        assert_escaped(result.out + result.err)


def test_control_characters_of_a_mistyped_name_do_not_reach_the_terminal(eepo: Eepo) -> None:
    name = "red\x1b[31m\x9b2J"
    for words in (["train", name, "--out", "run"], ["report", name], ["report", LONG + name]):
        assert_escaped(eepo(*words).err)


@pytest.mark.slow
def test_damaged_lines_are_skipped_and_counted_by_a_report(finished_run: Path, eepo: Eepo) -> None:
    shutil.copytree(finished_run, "run")
    with Path("run", METRICS).open("ab") as file:
        file.write(b'{"step": 2, "rew\n' + bytes(20) + b"\n")
    result = eepo("report", "run", "--out", "report.html")
    assert result.code == 0, result.err
    assert "note: run/metrics.jsonl: 2 damaged lines skipped" in result.out
    assert "metrics.jsonl: 2 damaged lines skipped" in Path("report.html").read_text()
