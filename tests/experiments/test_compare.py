"""Tests of comparisons: recipes over seeds, at equal rollouts and at equal time."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import RunConfig
from eepo.experiments.compare import compare
from eepo.runs.checkpoint import Checkpointer
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import COMPLETIONS, EVALUATIONS, METRICS
from eepo.trainer import Trainer, is_finished, trained_seconds
from eepo.types import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(name: str, num_stages: int, seed: int = 3, num_steps: int = 2) -> RunConfig:
    tables: dict[str, Any] = {
        "name": name,
        "task": {"num_evaluation": 2},
        "algorithm": {
            "num_stages": num_stages,
            "group_size": 4,
            "max_new_tokens": 12,
            "kl_coef": 0.0,
        },
        "training": {
            "num_steps": num_steps,
            "prompts_per_step": 2,
            "prompts_per_mini_batch": 2,
            "learning_rate": 3e-4,
            "seed": seed,
        },
        "evaluation": {"num_samples": 2},
    }
    return recipe.parse(RunConfig, tables, "test")


def grpo_and_eepo() -> list[RunConfig]:
    return [tiny("grpo", 1), tiny("eepo", 2)]


def silent_progress() -> Progress:
    return Progress(Console(file=io.StringIO()))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(read_records(folder / name))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    out = tmp_path_factory.mktemp("compared")
    return out, compare(grpo_and_eepo(), 2, out, silent_progress())


def test_each_recipe_and_seed_has_a_folder_starting_at_the_recipe_seed(
    compared: tuple[Path, list[Path]],
) -> None:
    out, folders = compared
    expected = [out / name / f"seed-{seed}" for name in ("grpo", "eepo") for seed in (3, 4)]
    assert folders == expected
    for folder in folders:
        written = recipe.load_run(folder / "recipe.toml")
        assert written.name == folder.parent.name
        assert written.training.seed == int(folder.name.removeprefix("seed-"))
        assert len(rows(folder, METRICS)) == 2
        assert (folder / "final" / "config.json").is_file()


def test_both_methods_have_the_same_prompts_and_number_of_completions(
    compared: tuple[Path, list[Path]],
) -> None:
    _, folders = compared
    prompts = [
        [(row["step"], row["prompt_id"], row["prompt"]) for row in rows(folder, COMPLETIONS)]
        for folder in folders
    ]
    grpo_seed3, grpo_seed4, eepo_seed3, eepo_seed4 = prompts
    assert grpo_seed3 == eepo_seed3
    assert grpo_seed4 == eepo_seed4
    assert grpo_seed3 != grpo_seed4, "seeds have different prompts"
    assert len(grpo_seed3) == 2 * 2 * 4


def test_seeds_have_different_completions_and_methods_share_stage_1(
    compared: tuple[Path, list[Path]],
) -> None:
    _, folders = compared
    grpo_seed3, grpo_seed4, eepo_seed3, _ = (
        [row["text"] for row in rows(folder, COMPLETIONS) if row["step"] == 1] for folder in folders
    )
    assert grpo_seed3 != grpo_seed4
    stage1 = [index for index in range(8) if index % 4 < 2]
    assert [grpo_seed3[index] for index in stage1] == [eepo_seed3[index] for index in stage1]


def test_only_the_first_run_evaluates_the_starting_policy(
    compared: tuple[Path, list[Path]],
) -> None:
    _, folders = compared
    num_rows = [
        sum(row["step"] == 0 and row["kind"] == "full" for row in rows(folder, EVALUATIONS))
        for folder in folders
    ]
    assert num_rows == [2, 0, 0, 0], "there are two evaluation sets"


def test_a_second_call_trains_and_writes_nothing(
    compared: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folders = compared
    paths = [folder / name for folder in folders for name in (METRICS, EVALUATIONS, COMPLETIONS)]
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in paths]

    def fail(trainer: Trainer, bar: object) -> None:
        pytest.fail(f"{trainer.log.folder} is trained again")

    monkeypatch.setattr(Trainer, "_one_step", fail)
    assert compare(grpo_and_eepo(), 2, out, silent_progress()) == folders
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in paths] == before


def test_a_stopped_comparison_continues(tmp_path: Path) -> None:
    """It is stopped in the third of four runs. The first two are not trained again."""
    configs = [tiny("grpo", 1, num_steps=1), tiny("eepo", 2, num_steps=1)]
    save, saved = Checkpointer.save, []

    def stop_in_the_third_run(*args: Any) -> Path:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(args)
        return save(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "save", stop_in_the_third_run)
        with pytest.raises(KeyboardInterrupt):
            compare(configs, 2, tmp_path, silent_progress())
    done = [tmp_path / name / "seed-3" / METRICS for name in ("grpo", "eepo")]
    before = [path.read_bytes() for path in done]
    folders = compare(configs, 2, tmp_path, silent_progress())
    assert [len(rows(folder, METRICS)) for folder in folders] == [1, 1, 1, 1]
    assert [path.read_bytes() for path in done] == before


def test_other_knobs_are_refused_before_anything_is_trained(
    compared: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = compared
    grpo, eepo = grpo_and_eepo()
    other = dataclasses.replace(eepo, algorithm=dataclasses.replace(eepo.algorithm, clip_high=0.3))
    monkeypatch.setattr(
        "eepo.assemble.build_trainer", lambda *_, **__: pytest.fail("a run is started")
    )
    with pytest.raises(
        UserError, match=r"clip_high = 0.3, but .*eepo/seed-3/recipe.toml has 0.2; .*--set again"
    ):
        compare([grpo, other], 2, out, silent_progress())


def test_more_seeds_can_be_added_later(compared: tuple[Path, list[Path]]) -> None:
    out, folders = compared
    before = [(folder / METRICS).read_bytes() for folder in folders]
    more = compare(grpo_and_eepo(), 3, out, silent_progress())
    assert set(more) - set(folders) == {out / "grpo" / "seed-5", out / "eepo" / "seed-5"}
    assert [(folder / METRICS).read_bytes() for folder in folders] == before


def test_a_comparison_may_continue_with_recipes_in_another_order(
    compared: tuple[Path, list[Path]],
) -> None:
    out, folders = compared
    assert set(compare(grpo_and_eepo()[::-1], 2, out, silent_progress())) == set(folders)


def test_two_recipes_of_the_same_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'same'"):
        compare([tiny("same", 1), tiny("same", 2)], 1, tmp_path / "out", silent_progress())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a/b", "", "..", "../outside", "{folder}/absolute"])
def test_a_name_that_is_not_a_folder_name_is_refused(name: str, tmp_path: Path) -> None:
    """The error may come from the recipe or from the comparison."""
    out, full_name = tmp_path / "deep" / "out", name.format(folder=tmp_path)
    with pytest.raises(UserError, match="name"):
        compare([tiny(full_name, 1, num_steps=0)], 1, out, silent_progress())
    assert list(tmp_path.rglob("recipe.toml")) == []


CUSTOM_TASK = """
from eepo import Prompt

class Doubling:
    def __init__(self, tokenizer, seed, style):
        pass

    def training_prompts(self, first, count):
        return [Prompt(f"train/{p}", "1 + 1 = ", (), "2") for p in range(first, first + count)]

    def evaluation_sets(self):
        return {"test": [Prompt("test/0", "1 + 1 = ", (), "2")]}

def score(completion, gold):
    return float(gold in completion)
"""


def test_a_task_with_a_table_of_options_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compared_task.py").write_text(CUSTOM_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tables = {
        "name": "grpo",
        "task": {"name": "compared_task:Doubling", "options": {"style": {"deep": [1]}}},
        "reward": {"name": "compared_task:score", "num_workers": 1},
        "algorithm": {"num_stages": 1, "group_size": 2, "max_new_tokens": 4, "kl_coef": 0.0},
        "training": {"num_steps": 1, "prompts_per_step": 2, "prompts_per_mini_batch": 2},
        "evaluation": {"num_samples": 1},
    }
    config = recipe.parse(RunConfig, tables, "test")
    folders = compare([config], 1, tmp_path / "out", silent_progress())
    assert [len(rows(folder, METRICS)) for folder in folders] == [1]


# --- at equal time ---


def with_limits(config: RunConfig, num_steps: int, max_seconds: float) -> RunConfig:
    training = dataclasses.replace(config.training, num_steps=num_steps, max_seconds=max_seconds)
    return dataclasses.replace(config, training=training)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Compare at equal time. The second recipe is faster: it has 1/16 of the completions."""
    out = tmp_path_factory.mktemp("timed")
    slow, fast = tiny("slow", 1), tiny("fast", 1)
    slow = dataclasses.replace(slow, algorithm=dataclasses.replace(slow.algorithm, group_size=64))
    return out, compare([slow, fast], 2, out, silent_progress(), equal_time=True)


@pytest.mark.slow
def test_at_equal_time_a_run_ends_when_it_reaches_the_seconds_of_the_baseline(
    timed: tuple[Path, list[Path]],
) -> None:
    _, (slow_seed3, slow_seed4, fast_seed3, fast_seed4) = timed
    for baseline, other in ((slow_seed3, fast_seed3), (slow_seed4, fast_seed4)):
        limit = trained_seconds(baseline)
        seconds = [row["seconds/total"] for row in rows(other, METRICS)]
        assert len(rows(baseline, METRICS)) == 2
        assert sum(seconds[:-1]) < limit <= sum(seconds)
        assert recipe.load_run(other / "recipe.toml").training.max_seconds == limit
        evaluated_steps = {row["step"] for row in rows(other, EVALUATIONS)}
        assert evaluated_steps == {len(seconds)}, "the last step has the full evaluation"
    assert len(rows(fast_seed3, METRICS)) > 2, "a faster method has more steps"


@pytest.mark.slow
def test_a_finished_comparison_at_equal_time_trains_no_more_steps(
    timed: tuple[Path, list[Path]],
) -> None:
    out, folders = timed
    before = [(folder / METRICS).read_bytes() for folder in folders]
    slow, fast = (recipe.load_run(folders[index] / "recipe.toml") for index in (0, 2))
    assert (
        compare([slow, with_limits(fast, 2, 0.0)], 2, out, silent_progress(), equal_time=True)
        == folders
    )
    assert [(folder / METRICS).read_bytes() for folder in folders] == before


def test_runs_limited_by_steps_and_by_time_are_not_mixed(
    timed: tuple[Path, list[Path]], compared: tuple[Path, list[Path]]
) -> None:
    with pytest.raises(
        UserError, match=r"eepo/seed-3 contains a run limited by its number of steps.*another --out"
    ):
        compare(grpo_and_eepo(), 1, compared[0], silent_progress(), equal_time=True)
    with pytest.raises(
        UserError, match=r"fast/seed-3 contains a run limited by time.*another --out"
    ):
        compare([tiny("fast", 1)], 1, timed[0], silent_progress())


def test_equal_time_needs_two_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--equal-time needs a baseline"):
        compare([tiny("grpo", 1)], 1, tmp_path / "out", silent_progress(), equal_time=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_seconds_of_earlier_steps_count_after_a_resume(tmp_path: Path) -> None:
    """With the time already used there is no more step; with slightly more there is one."""
    config = with_limits(tiny("grpo", 1), 2, 1000.0)
    build_trainer(config, tmp_path, resume=False, progress=silent_progress()).run()
    seconds = trained_seconds(tmp_path)
    for limit, num_steps in ((seconds, 2), (seconds + 1e-6, 3)):
        longer = with_limits(config, 50, limit)
        build_trainer(longer, tmp_path, resume=True, progress=silent_progress()).run()
        assert len(rows(tmp_path, METRICS)) == num_steps
        assert is_finished(longer, tmp_path)
    assert not is_finished(with_limits(config, 50, trained_seconds(tmp_path) + 1e-6), tmp_path)
