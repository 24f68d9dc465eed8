"""Several recipes over several seeds: one folder a run, the same prompts for all, nothing done twice."""

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
from eepo.runs import checkpoint
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
        "algorithm": {"num_stages": num_stages, "group_size": 4, "max_new_tokens": 12, "kl_coef": 0.0},
        "training": {
            "num_steps": num_steps, "prompts_per_step": 2, "prompts_per_mini_batch": 2, "learning_rate": 3e-4,
            "seed": seed,
        },
        "evaluation": {"num_samples": 2},
    }  # fmt: skip
    return recipe.parse(RunConfig, tables, "test")


def both() -> list[RunConfig]:
    return [tiny("grpo", 1), tiny("eepo", 2)]


def quiet() -> Progress:
    return Progress(Console(file=io.StringIO()))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(read_records(folder / name))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    out = tmp_path_factory.mktemp("compared")
    return out, compare(both(), 2, out, quiet())


def test_each_recipe_and_seed_has_its_folder_from_the_recipes_own_seed_on(
    compared: tuple[Path, list[Path]],
) -> None:
    out, folders = compared
    expected = [out / name / f"seed-{seed}" for name in ("grpo", "eepo") for seed in (3, 4)]
    assert folders == expected
    for folder in folders:
        written = recipe.load_run(folder / "recipe.toml")
        assert (written.name, written.training.seed) == (
            folder.parent.name,
            int(folder.name.removeprefix("seed-")),
        )
        assert len(rows(folder, METRICS)) == 2
        assert (folder / "final" / "config.json").is_file()


def test_both_methods_are_given_the_same_prompts_and_as_many_completions(
    compared: tuple[Path, list[Path]],
) -> None:
    _, folders = compared
    asked = [
        [(row["step"], row["prompt_id"], row["prompt"]) for row in rows(f, COMPLETIONS)]
        for f in folders
    ]
    grpo, grpo_other, eepo, eepo_other = asked
    assert grpo == eepo
    assert grpo_other == eepo_other
    assert grpo != grpo_other, "a seed brings its own prompts"
    assert len(asked[0]) == 2 * 2 * 4


def test_seeds_draw_different_completions_and_methods_share_the_first_half(
    compared: tuple[Path, list[Path]],
) -> None:
    _, (grpo, grpo_other, eepo, _) = compared
    texts = {
        f: [row["text"] for row in rows(f, COMPLETIONS) if row["step"] == 1]
        for f in (grpo, grpo_other, eepo)
    }
    assert texts[grpo] != texts[grpo_other]
    first_halves = [place for place in range(8) if place % 4 < 2]
    assert [texts[grpo][place] for place in first_halves] == [
        texts[eepo][place] for place in first_halves
    ]


def test_one_run_judges_the_starting_policy_for_all(compared: tuple[Path, list[Path]]) -> None:
    _, folders = compared
    starts = [
        sum(row["step"] == 0 and row["kind"] == "full" for row in rows(f, EVALUATIONS))
        for f in folders
    ]
    assert starts == [2, 0, 0, 0], "two evaluation sets, in the first run only"


def test_a_second_call_trains_and_writes_nothing_again(
    compared: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folders = compared
    before = {
        folder / name: ((folder / name).stat().st_mtime_ns, (folder / name).read_bytes())
        for folder in folders
        for name in (METRICS, EVALUATIONS, COMPLETIONS)
    }

    def trains(trainer: Trainer, bar: object) -> None:
        pytest.fail(f"{trainer.log.folder} is trained again")

    monkeypatch.setattr(Trainer, "_one_step", trains)
    assert compare(both(), 2, out, quiet()) == folders
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before}
    assert {path: content for path, (_, content) in after.items()} == {
        path: b for path, (_, b) in before.items()
    }
    assert {path: time for path, (time, _) in after.items()} == {
        path: time for path, (time, _) in before.items()
    }


def test_a_comparison_is_taken_up_where_it_stopped(tmp_path: Path) -> None:
    """Stopped in the third of four runs; the two before it are not trained again."""
    save, saved = checkpoint.save, []

    def dies_at_the_third(*args: Any) -> Path:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(args)
        return save(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", dies_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            compare(
                [tiny("grpo", 1, num_steps=1), tiny("eepo", 2, num_steps=1)], 2, tmp_path, quiet()
            )
    done = [tmp_path / name / "seed-3" / METRICS for name in ("grpo", "eepo")]
    before = [path.read_bytes() for path in done]
    folders = compare(
        [tiny("grpo", 1, num_steps=1), tiny("eepo", 2, num_steps=1)], 2, tmp_path, quiet()
    )
    assert [len(rows(folder, METRICS)) for folder in folders] == [1, 1, 1, 1]
    assert [path.read_bytes() for path in done] == before


def test_other_knobs_are_refused_before_anything_is_trained(
    compared: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = compared
    grpo, eepo = both()
    other = dataclasses.replace(eepo, algorithm=dataclasses.replace(eepo.algorithm, clip_high=0.3))
    monkeypatch.setattr(
        "eepo.experiments.compare.build_trainer", lambda *_, **__: pytest.fail("a run is started")
    )
    with pytest.raises(
        UserError, match=r"clip_high = 0.3, but .*eepo/seed-3/recipe.toml has 0.2; .*--set again"
    ):
        compare([grpo, other], 2, out, quiet())


def test_more_seeds_can_be_added_later(compared: tuple[Path, list[Path]]) -> None:
    out, folders = compared
    before = [(folder / METRICS).read_bytes() for folder in folders]
    more = compare(both(), 3, out, quiet())
    assert set(more) - set(folders) == {out / "grpo" / "seed-5", out / "eepo" / "seed-5"}
    assert [(folder / METRICS).read_bytes() for folder in folders] == before


def test_recipes_may_be_given_in_another_order_when_a_comparison_is_taken_up(
    compared: tuple[Path, list[Path]],
) -> None:
    out, folders = compared
    assert set(compare(both()[::-1], 2, out, quiet())) == set(folders)


def test_two_recipes_of_one_name_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'same'"):
        compare([tiny("same", 1), tiny("same", 2)], 1, tmp_path / "out", quiet())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a/b", "", "..", "../outside", "{folder}/absolute"])
def test_a_name_that_is_no_folder_name_is_refused(name: str, tmp_path: Path) -> None:
    """Whether the recipe's reader or the comparison says so."""
    with pytest.raises(UserError, match="name"):
        compare(
            [tiny(name.format(folder=tmp_path), 1, num_steps=0)],
            1,
            tmp_path / "deep" / "out",
            quiet(),
        )
    assert list(tmp_path.rglob("recipe.toml")) == []


# --- at equal time ----------------------------------------------------------------------------------------------------


def with_limits(config: RunConfig, num_steps: int, max_seconds: float) -> RunConfig:
    training = dataclasses.replace(config.training, num_steps=num_steps, max_seconds=max_seconds)
    return dataclasses.replace(config, training=training)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The second recipe draws a sixteenth of the baseline's completions, so it is the faster one."""
    out = tmp_path_factory.mktemp("timed")
    slow, fast = tiny("slow", 1), tiny("fast", 1)
    slow = dataclasses.replace(slow, algorithm=dataclasses.replace(slow.algorithm, group_size=64))
    return out, compare([slow, fast], 2, out, quiet(), equal_time=True)


def test_at_equal_time_a_run_ends_with_the_first_step_that_reaches_the_baselines_seconds(
    timed: tuple[Path, list[Path]],
) -> None:
    _, (slow, slow_other, fast, fast_other) = timed
    for baseline, other in ((slow, fast), (slow_other, fast_other)):
        budget, spent = (
            trained_seconds(baseline),
            [row["seconds/total"] for row in rows(other, METRICS)],
        )
        assert len(rows(baseline, METRICS)) == 2
        assert sum(spent[:-1]) < budget <= sum(spent)
        assert recipe.load_run(other / "recipe.toml").training.max_seconds == budget
        assert {row["step"] for row in rows(other, EVALUATIONS)} == {len(spent)}, (
            "the full evaluation is of the last"
        )
    assert len(rows(fast, METRICS)) > 2, "a faster method has more steps"


def test_a_comparison_at_equal_time_goes_on_without_another_step(
    timed: tuple[Path, list[Path]],
) -> None:
    out, folders = timed
    before = [(folder / METRICS).read_bytes() for folder in folders]
    slow, fast = (recipe.load_run(folders[place] / "recipe.toml") for place in (0, 2))
    assert compare([slow, with_limits(fast, 2, 0.0)], 2, out, quiet(), equal_time=True) == folders
    assert [(folder / METRICS).read_bytes() for folder in folders] == before


def test_runs_at_equal_rollouts_do_not_become_runs_at_equal_time(
    timed: tuple[Path, list[Path]], compared: tuple[Path, list[Path]]
) -> None:
    with pytest.raises(
        UserError, match=r"eepo/seed-3 holds a run ended by its number of steps.*another --out"
    ):
        compare(both(), 1, compared[0], quiet(), equal_time=True)
    with pytest.raises(UserError, match=r"fast/seed-3 holds a run ended by time.*another --out"):
        compare([tiny("fast", 1)], 1, timed[0], quiet())


def test_equal_time_needs_someone_to_be_equal_to(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--equal-time needs a baseline"):
        compare([tiny("grpo", 1)], 1, tmp_path / "out", quiet(), equal_time=True)
    assert not (tmp_path / "out").exists()


def test_seconds_of_earlier_steps_count_when_a_run_goes_on(tmp_path: Path) -> None:
    """Just the seconds that are spent: no step more. A breath more: one step more."""
    config = with_limits(tiny("grpo", 1), 2, 1000.0)
    build_trainer(config, tmp_path, resume=False, progress=quiet()).run()
    spent = trained_seconds(tmp_path)
    for limit, num_steps in ((spent, 2), (spent + 1e-6, 3)):
        longer = with_limits(config, 50, limit)
        build_trainer(longer, tmp_path, resume=True, progress=quiet()).run()
        assert len(rows(tmp_path, METRICS)) == num_steps
        assert is_finished(longer, tmp_path)
    assert not is_finished(with_limits(config, 50, trained_seconds(tmp_path) + 1e-6), tmp_path)
