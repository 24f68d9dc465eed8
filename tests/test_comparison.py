"""Several recipes over several seeds: one folder a run, the same prompts for all, nothing done twice."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eepo import checkpoint, recipe
from eepo.comparison import compare
from eepo.config import RunConfig
from eepo.progress import Progress
from eepo.runlog import COMPLETIONS, EVALUATIONS, METRICS, read_lines
from eepo.trainer import Trainer
from eepo.types import UserError


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    return list(read_lines(folder / name))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    out = tmp_path_factory.mktemp("compared")
    return out, compare(both(), 2, out, quiet())


def test_each_recipe_and_seed_has_its_folder_from_the_recipes_own_seed_on(compared: tuple[Path, list[Path]]) -> None:
    out, folders = compared
    expected = [out / name / f"seed-{seed}" for name in ("grpo", "eepo") for seed in (3, 4)]
    assert folders == expected
    for folder in folders:
        written = recipe.load_run(folder / "recipe.toml")
        assert (written.name, written.training.seed) == (folder.parent.name, int(folder.name.removeprefix("seed-")))
        assert len(rows(folder, METRICS)) == 2
        assert (folder / "final" / "config.json").is_file()


def test_both_methods_are_given_the_same_prompts_and_as_many_completions(compared: tuple[Path, list[Path]]) -> None:
    _, folders = compared
    asked = [[(row["step"], row["prompt_id"], row["prompt"]) for row in rows(f, COMPLETIONS)] for f in folders]
    grpo, grpo_other, eepo, eepo_other = asked
    assert grpo == eepo
    assert grpo_other == eepo_other
    assert grpo != grpo_other, "a seed brings its own prompts"
    assert len(asked[0]) == 2 * 2 * 4


def test_seeds_draw_different_completions_and_methods_share_the_first_half(compared: tuple[Path, list[Path]]) -> None:
    _, (grpo, grpo_other, eepo, _) = compared
    texts = {f: [row["text"] for row in rows(f, COMPLETIONS) if row["step"] == 1] for f in (grpo, grpo_other, eepo)}
    assert texts[grpo] != texts[grpo_other]
    first_halves = [place for place in range(8) if place % 4 < 2]
    assert [texts[grpo][place] for place in first_halves] == [texts[eepo][place] for place in first_halves]


def test_one_run_judges_the_starting_policy_for_all(compared: tuple[Path, list[Path]]) -> None:
    _, folders = compared
    starts = [sum(row["step"] == 0 and row["kind"] == "full" for row in rows(f, EVALUATIONS)) for f in folders]
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
    assert {path: content for path, (_, content) in after.items()} == {path: b for path, (_, b) in before.items()}
    assert {path: time for path, (time, _) in after.items()} == {path: time for path, (time, _) in before.items()}


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
            compare([tiny("grpo", 1, num_steps=1), tiny("eepo", 2, num_steps=1)], 2, tmp_path, quiet())
    done = [tmp_path / name / "seed-3" / METRICS for name in ("grpo", "eepo")]
    before = [path.read_bytes() for path in done]
    folders = compare([tiny("grpo", 1, num_steps=1), tiny("eepo", 2, num_steps=1)], 2, tmp_path, quiet())
    assert [len(rows(folder, METRICS)) for folder in folders] == [1, 1, 1, 1]
    assert [path.read_bytes() for path in done] == before


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
        compare([tiny(name.format(folder=tmp_path), 1, num_steps=0)], 1, tmp_path / "deep" / "out", quiet())
    assert list(tmp_path.rglob("recipe.toml")) == []
