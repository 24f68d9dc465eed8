"""Checks that benchmarks load by name, from files in a folder or from the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eepo.tasks.benchmarks import BENCHMARKS, load_benchmark
from eepo.types import UserError

DATA = Path(os.environ.get("EEPO_DATA_DIR") or "no-such-folder")
SIZES = {
    "minerva_math": 272,
    "olympiadbench": 675,
    "amc23": 40,
    "aime24": 30,
    "aime25": 30,
    "math500": 500,
    "gsm8k": 1319,
}


def test_benchmarks_load_from_each_of_their_file_names(tmp_path: Path) -> None:
    for benchmark in BENCHMARKS.values():
        for stem in benchmark.stems():
            path = tmp_path / f"{stem}.jsonl"
            path.write_text(json.dumps({"problem": f"{benchmark.title}?", "answer": stem}))
            (problem,) = load_benchmark(benchmark.name, str(tmp_path))
            assert (problem.text, problem.answer) == (f"{benchmark.title}?", stem)
            path.unlink()


def test_no_two_benchmarks_share_a_file_name() -> None:
    stems = [stem for benchmark in BENCHMARKS.values() for stem in benchmark.stems()]
    assert len(stems) == len(set(stems))


def test_files_saved_from_the_hub_may_have_the_hubs_columns(tmp_path: Path) -> None:
    row = {"question": "Which?", "final_answer": ["$2$", "$3$"], "answer": "not this"}
    (tmp_path / "olympiadbench.json").write_text(json.dumps([row]))
    (problem,) = load_benchmark("olympiadbench", str(tmp_path))
    assert (problem.text, problem.answer) == ("Which?", "2, 3")
    row = {"question": "How many?", "answer": "Some.\n#### 1,000"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row))
    (problem,) = load_benchmark("gsm8k", str(tmp_path))
    assert (problem.text, problem.answer) == ("How many?", "1000")


def test_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "amc23.jsonl").write_text("")
    with pytest.raises(UserError, match="the data set is empty"):
        load_benchmark("amc23", str(tmp_path))


def test_unknown_names_are_refused_with_a_list_of_all_names() -> None:
    with pytest.raises(UserError) as caught:
        load_benchmark("aime99", "")
    assert all(name in str(caught.value) for name in ["'aime99'", *BENCHMARKS])


def test_missing_files_are_refused_with_the_file_names_tried(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_benchmark("gsm8k", str(tmp_path))
    message = str(caught.value)
    assert str(tmp_path) in message
    for file in ("gsm8k.jsonl", "gsm8k.json", "gsm8k.parquet", "gsm8k_test.jsonl"):
        assert file in message


def test_benchmarks_load_from_the_hub_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)  # load_dataset also reads a local folder with the hub's name
    folder = tmp_path / "math-ai" / "amc23"
    folder.mkdir(parents=True)
    row = {"id": 0, "question": "How far?", "answer": 27.0}
    (folder / "test.jsonl").write_text(json.dumps(row))
    (problem,) = load_benchmark("amc23", "")
    assert (problem.id, problem.text, problem.answer) == ("amc23/0", "How far?", "27")
    with pytest.raises(UserError, match="hub data set math-ai/minervamath, split 'test'"):
        load_benchmark("minerva_math", "")


@pytest.mark.skipif(not DATA.is_dir(), reason="no maths data (EEPO_DATA_DIR)")
@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_real_files_are_read_completely(name: str) -> None:
    problems = load_benchmark(name, str(DATA))
    assert len(problems) == SIZES[name]
    assert all(problem.text and problem.answer for problem in problems)
