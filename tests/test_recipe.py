"""Recipes are read strictly, every mistake is a one-line error, and a dump reads back."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from eepo import recipe
from eepo.config import (
    AlgorithmConfig,
    CountdownConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    WarmupConfig,
)
from eepo.types import UserError

RECIPES = Path(__file__).parents[1] / "recipes"
SHIPPED = sorted(RECIPES.rglob("*.toml"))
WARMUPS = [path for path in SHIPPED if path.stem.startswith("warmup")]
RUNS = [path for path in SHIPPED if path not in WARMUPS]


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def error_line(path: Path | str, overrides: tuple[str, ...] = (), load=recipe.load_run) -> str:
    """Return the error message, and check that it is one line."""
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    line = str(caught.value)
    assert line.strip() == line
    assert len(line.splitlines()) == 1, f"more than one line: {line!r}"
    return line


def in_section(section: str, line: str) -> str:
    return f"[{section}]\n{line}\n"


# --- shipped recipes


def test_both_kinds_of_recipes_are_shipped() -> None:
    assert RUNS
    assert WARMUPS


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_shipped_training_recipe_is_valid_and_its_dump_reads_back(
    path: Path, tmp_path: Path
) -> None:
    config = recipe.load_run(path)
    assert recipe.load_run(write(tmp_path, recipe.dump(config))) == config


@pytest.mark.parametrize("path", WARMUPS, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_shipped_warmup_recipe_is_valid_and_its_dump_reads_back(
    path: Path, tmp_path: Path
) -> None:
    config = recipe.load_warmup(path)
    assert recipe.load_warmup(write(tmp_path, recipe.dump(config))) == config


@pytest.mark.parametrize("name", ["countdown/eepo", "countdown/eepo.toml", "demo/grpo"])
def test_shipped_recipes_are_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe.find(name).resolve() == (RECIPES / name).with_suffix(".toml").resolve()


def test_recipes_in_a_folder_have_different_names() -> None:
    for folder in {path.parent for path in RUNS}:
        names = [recipe.load_run(path).name for path in RUNS if path.parent == folder]
        # A recipe with the default name only extends others.
        names = [name for name in names if name != RunConfig.name]
        assert len(names) == len(set(names)), f"{folder}: {names}"


def test_an_empty_recipe_has_the_defaults(tmp_path: Path) -> None:
    assert recipe.load_run(write(tmp_path, "")) == RunConfig()
    assert recipe.load_warmup(write(tmp_path, "")) == WarmupConfig()


# --- mistakes: one line with the key, the value and what is allowed

MISTAKES = {
    # unknown keys
    "misspelt top-level key": ('nam = "x"', ["nam ", '"x"', "allowed: name"]),
    "misspelt section": ("[trainig]\nseed = 1", ["trainig", "1", "training"]),
    "misspelt nested key": (in_section("training", "sead = 3"), ["training.sead", "3", "seed"]),
    "knob of another section": (
        in_section("algorithm", "seed = 3"),
        ["algorithm.seed", "3", "group_size"],
    ),
    "section inside a section": (
        "[training.deep]\nx = 1",
        ["training.deep", '{"x": 1}', "num_steps"],
    ),
    "warmup section in a run": (
        "[supervised]\nnum_steps = 1",
        ["warm-start recipe", "eepo warmup"],
    ),
    "sections of both kinds of recipes": (
        "[training]\nseed = 1\n[supervised]\nnum_steps = 1",
        ["unknown key supervised", "allowed: name"],
    ),
    # wrong types
    "string for a whole number": (
        in_section("training", 'seed = "one"'),
        ["training.seed", '"one"', "whole number"],
    ),
    "digits in quotes": (
        in_section("training", 'seed = "1"'),
        ["training.seed", '"1"', "whole number"],
    ),
    "float for a whole number": (
        in_section("training", "seed = 1.5"),
        ["training.seed", "1.5", "whole number"],
    ),
    "whole float for a whole number": (
        in_section("training", "seed = 1.0"),
        ["training.seed", "1.0", "whole number"],
    ),
    "bool for a whole number": (
        in_section("training", "seed = true"),
        ["training.seed", "true", "whole number"],
    ),
    "bool for a number": (
        in_section("training", "learning_rate = true"),
        ["training.learning_rate", "true", "number >= 0"],
    ),
    "string for a number": (
        in_section("training", 'learning_rate = "1e-4"'),
        ["training.learning_rate", '"1e-4"', "a number"],
    ),
    "number for a string": ("name = 3", ["name", "3", "a string"]),
    "list for a string": ('name = ["a", "b"]', ["name", '["a", "b"]', "a string"]),
    "list for a number": (
        in_section("training", "seed = [1, 2]"),
        ["training.seed", "[1, 2]", "whole number"],
    ),
    "list for a choice": (
        in_section("algorithm", 'gate = ["token"]'),
        ["algorithm.gate", '["token"]', '"step"'],
    ),
    "table for a number": (
        in_section("training", "seed = {a = 1}"),
        ["training.seed", '{"a": 1}', "whole number"],
    ),
    "date for a number": (
        in_section("training", "seed = 2020-01-02"),
        ["training.seed", "2020-01-02", "whole number"],
    ),
    "string for true or false": (
        in_section("evaluation", 'start = "yes"'),
        ["evaluation.start", '"yes"', "true or"],
    ),
    "number for true or false": (
        in_section("evaluation", "start = 1"),
        ["evaluation.start", "1", "true or false"],
    ),
    "number for a section": ("training = 3", ["training", "3", "section"]),
    "list of tables for a section": ("[[training]]\nseed = 1", ["training", "seed", "section"]),
    # not a number
    "nan": (
        in_section("training", "learning_rate = nan"),
        ["training.learning_rate", "NaN", "number >= 0"],
    ),
    "inf": (
        in_section("training", "learning_rate = inf"),
        ["training.learning_rate", "Infinity", "number >= 0"],
    ),
    "minus inf": (
        in_section("algorithm", "unlearn_lr = -inf"),
        ["algorithm.unlearn_lr", "-Infinity", "number >= 0"],
    ),
    "nan for the unlearning rate": (
        in_section("algorithm", "unlearn_lr = nan"),
        ["algorithm.unlearn_lr", "NaN"],
    ),
    "huge whole number": (
        in_section("training", f"seed = 1{'0' * 400}"),
        ["training.seed", "1000", "whole number"],
    ),
    "huge number": (
        in_section("training", f"learning_rate = 1{'0' * 400}"),
        ["training.learning_rate", "1000", "number >= 0"],
    ),
    # choices
    "choice not allowed": (
        in_section("algorithm", 'gate = "sometimes"'),
        ["algorithm.gate", '"sometimes"', '"token", "step", "always", "never"'],
    ),
    "removed choice": (
        in_section("algorithm", 'unlearn_on = "stuck"'),
        ["algorithm.unlearn_on", '"stuck"', '"all", "rewarded", "unrewarded", "zero_variance"'],
    ),
    "choice in other case": (
        in_section("algorithm", 'saturation = "Stop"'),
        ["algorithm.saturation", '"Stop"'],
    ),
    "choice of a task": (
        in_section("task", 'name = "chess"'),
        ["task.name", '"chess"', '"countdown"'],
    ),
    "choice of an engine": (
        in_section("rollout", 'engine = "llama.cpp"'),
        ["rollout.engine", '"builtin"'],
    ),
    "word for the unlearning rate": (
        in_section("algorithm", 'unlearn_lr = "fast"'),
        ["algorithm.unlearn_lr", '"fast"', "number >= 0", '"auto"'],
    ),
    "bool for the unlearning rate": (
        in_section("algorithm", "unlearn_lr = true"),
        ["algorithm.unlearn_lr", '"auto"'],
    ),
    # ranges
    "negative learning rate": (
        in_section("training", "learning_rate = -1e-6"),
        ["training.learning_rate", "-1e-06", ">= 0"],
    ),
    "negative unlearning rate": (
        in_section("algorithm", "unlearn_lr = -0.003"),
        ["algorithm.unlearn_lr", "-0.003", ">= 0"],
    ),
    "zero temperature": (
        in_section("algorithm", "temperature = 0"),
        ["algorithm.temperature", "0", "> 0"],
    ),
    "zero temperature at evaluation": (
        in_section("evaluation", "temperature = 0.0"),
        ["evaluation.temperature", "0.0", "> 0"],
    ),
    "negative temperature": (
        in_section("algorithm", "temperature = -1.0"),
        ["algorithm.temperature", "-1.0", "> 0"],
    ),
    "clip above 1": (
        in_section("algorithm", "clip_low = 1.5"),
        ["algorithm.clip_low", "1.5", "> 0 and <= 1"],
    ),
    "eps above a half": (
        in_section("algorithm", "unlearn_eps = 0.6"),
        ["algorithm.unlearn_eps", "0.6", "<= 0.5"],
    ),
    "eps of zero": (
        in_section("algorithm", "unlearn_eps = 0"),
        ["algorithm.unlearn_eps", "0", "> 0"],
    ),
    "negative coefficient": (
        in_section("algorithm", "kl_coef = -1e-4"),
        ["algorithm.kl_coef", "-0.0001", ">= 0"],
    ),
    "negative threshold": (
        in_section("algorithm", "gate_threshold = -1"),
        ["algorithm.gate_threshold", "-1", ">= 0"],
    ),
    "window of zero": (
        in_section("algorithm", "gate_window = 0"),
        ["algorithm.gate_window", "0", ">= 1"],
    ),
    "group of one": (
        in_section("algorithm", "group_size = 1"),
        ["algorithm.group_size", "1", ">= 2"],
    ),
    "no stage": (in_section("algorithm", "num_stages = 0"), ["algorithm.num_stages", "0", ">= 1"]),
    "no tokens": (
        in_section("algorithm", "max_new_tokens = 0"),
        ["algorithm.max_new_tokens", "0", ">= 1"],
    ),
    "negative steps": (
        in_section("training", "num_steps = -1"),
        ["training.num_steps", "-1", ">= 0"],
    ),
    "no prompts": (
        in_section("training", "prompts_per_step = 0"),
        ["training.prompts_per_step", "0", ">= 1"],
    ),
    "keep no checkpoint": (
        in_section("training", "keep_checkpoints = 0"),
        ["training.keep_checkpoints", "0", ">= 1"],
    ),
    "no rows": (in_section("rollout", "max_rows = 0"), ["rollout.max_rows", "0", ">= 1"]),
    "too many numbers": (
        in_section("task", "num_numbers = 7"),
        ["task.num_numbers", "7", ">= 2 and <= 6"],
    ),
    "too large numbers": (
        in_section("task", "max_number = 100"),
        ["task.max_number", "100", "<= 99"],
    ),
    # rules between knobs
    "odd group": (in_section("algorithm", "group_size = 7"), ["algorithm.group_size", "7", "even"]),
    "group not a multiple of stages": (
        in_section("algorithm", "group_size = 8\nnum_stages = 3"),
        ["algorithm.group_size", "8", "multiple of num_stages = 3"],
    ),
    "stage baseline of one completion": (
        in_section("algorithm", 'group_size = 2\nadvantage_baseline = "stage"'),
        ["algorithm.advantage_baseline", '"stage"', ">= 2 * num_stages = 4", "2"],
    ),
    "mini-batch does not divide": (
        in_section("training", "prompts_per_step = 128\nprompts_per_mini_batch = 48"),
        ["training.prompts_per_mini_batch", "48", "128"],
    ),
    "mini-batch above the batch": (
        in_section("training", "prompts_per_step = 32"),
        ["training.prompts_per_mini_batch", "64", "32"],
    ),
    "wall-clock limit below the CPU limit": (
        in_section("reward", "cpu_seconds = 100"),
        ["reward.wall_seconds", "60", "at least cpu_seconds = 100"],
    ),
    "minimum target above the maximum": (
        in_section("task", "min_target = 50\nmax_target = 40"),
        ["task.min_target", "50", "max_target = 40"],
    ),
    "minimum out-of-range target above the maximum": (
        in_section("task", "out_of_range_min_target = 99\nout_of_range_max_target = 70"),
        ["task.out_of_range_min_target", "99", "70"],
    ),
    "overlapping targets": (
        in_section("task", "max_target = 70"),
        ["task.out_of_range_min_target", "10..70", "61..99", "overlap"],
    ),
    "out-of-range targets inside the range": (
        in_section("task", "out_of_range_min_target = 20\nout_of_range_max_target = 30"),
        ["task.out_of_range_min_target", "10..60", "20..30", "overlap"],
    ),
}


@pytest.mark.parametrize(("text", "fragments"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(
    text: str, fragments: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    line = error_line(path)
    assert line.startswith(str(path))
    for fragment in fragments:
        assert fragment in line


WARMUP_MISTAKES = {
    "unknown key": (
        in_section("supervised", "num_step = 3"),
        ["supervised.num_step", "3", "num_steps"],
    ),
    "training section": (
        "[training]\nseed = 1",
        ["is a training recipe, not a warm-start recipe", "eepo train"],
    ),
    "no steps": (in_section("supervised", "num_steps = 0"), ["supervised.num_steps", "0", ">= 1"]),
    "zero learning rate": (
        in_section("supervised", "learning_rate = 0"),
        ["supervised.learning_rate", "0", "> 0"],
    ),
    "unknown family": (
        in_section("scratch", 'family = "mamba"'),
        ["scratch.family", '"mamba"', '"llama", "qwen3"'],
    ),
    "overlapping targets": (
        in_section("task", "max_target = 70"),
        ["task.out_of_range_min_target", "10..70"],
    ),
}


@pytest.mark.parametrize(("text", "fragments"), WARMUP_MISTAKES.values(), ids=WARMUP_MISTAKES)
def test_a_mistake_in_a_warmup_recipe_is_one_line(
    text: str, fragments: list[str], tmp_path: Path
) -> None:
    line = error_line(write(tmp_path, text), load=recipe.load_warmup)
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize(
    "text",
    ['"a\\nb" = 1', '[training]\n"a\\nb" = 1', '["x\\ny"]\na = 1', 'name = ["a\\nb"]'],
    ids=repr,
)
def test_line_breaks_in_keys_and_values_are_escaped(text: str, tmp_path: Path) -> None:
    error_line(write(tmp_path, text))


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    path = write(tmp_path, in_section("training", f'seed = "{"x" * 5000}"'), "r.toml")
    assert len(error_line(path)) < 400


def test_an_odd_group_size_is_allowed_with_one_stage(tmp_path: Path) -> None:
    text = in_section("algorithm", "group_size = 7\nnum_stages = 1")
    assert recipe.load_run(write(tmp_path, text)).algorithm.group_size == 7


def test_a_whole_number_is_converted_to_a_float(tmp_path: Path) -> None:
    config = recipe.load_run(write(tmp_path, in_section("algorithm", "temperature = 2")))
    assert type(config.algorithm.temperature) is float
    assert config.algorithm.temperature == 2.0


@pytest.mark.parametrize(
    ("value", "expected"), [("0", 0.0), ("3e-3", 3e-3), ("1", 1.0), ('"auto"', "auto")]
)
def test_the_unlearning_rate_is_a_number_or_auto(
    value: str, expected: float | str, tmp_path: Path
) -> None:
    config = recipe.load_run(write(tmp_path, in_section("algorithm", f"unlearn_lr = {value}")))
    assert config.algorithm.unlearn_lr == expected


def test_inclusive_bounds_are_allowed(tmp_path: Path) -> None:
    text = in_section(
        "algorithm",
        "clip_low = 1\nunlearn_eps = 0.5\ngate_threshold = 0\nkl_coef = 0\ngroup_size = 2",
    )
    algorithm = recipe.load_run(write(tmp_path, text)).algorithm
    assert (algorithm.clip_low, algorithm.unlearn_eps, algorithm.gate_threshold) == (1.0, 0.5, 0.0)


# --- files


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("countdown/epo", "countdown/eepo"),
        ("eepo", "countdown/eepo or demo/eepo or paper/eepo"),
        ("paper/qwen2.5-3b+eeop", "eepo"),
    ],
)
def test_a_misspelt_recipe_gets_suggestions(name: str, meant: str) -> None:
    assert f"no such recipe; did you mean {meant}? give a TOML file or one of: " in error_line(name)


def test_the_wrong_kind_of_recipe_names_the_right_command() -> None:
    line = error_line("countdown/warmup")
    assert line == "countdown/warmup is a warm-start recipe: eepo warmup countdown/warmup --out DIR"
    line = error_line("countdown/eepo", ("supervised.num_steps=2",), recipe.load_warmup)
    assert line == (
        "countdown/eepo is a training recipe, not a warm-start recipe: "
        "eepo train countdown/eepo --out DIR"
    )


@pytest.mark.parametrize(
    "name", ["explore/mild", "explore/mended", "countdown/eepo_mended", "demo/grpo+explore/mild"]
)
def test_an_old_recipe_name_is_an_error_with_the_new_names(name: str) -> None:
    line = error_line(name)
    missing = name.split("+")[-1]
    assert line.startswith(f"{missing}: no such recipe; ")
    assert "explore/downweight_failures" in line
    assert "countdown/eepo_unlearn_failures" in line


def test_a_missing_recipe_is_an_error_with_the_shipped_names(tmp_path: Path) -> None:
    line = error_line(tmp_path / "nowhere.toml")
    assert "nowhere.toml" in line
    assert "countdown/eepo" in line


@pytest.mark.parametrize("name", ["", ".", "/", "countdown"])
def test_a_name_that_is_no_file_is_an_error_with_the_shipped_names(name: str) -> None:
    assert "countdown/eepo" in error_line(name)


@pytest.mark.parametrize(
    "text",
    [
        "name = ",
        "name = 'a\nb'",
        "[training\nseed = 1",
        "seed == 1",
        'name = "a"\nname = "b"',
        "x = {a = 1\n}",
    ],
    ids=repr,
)
def test_invalid_toml_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    line = error_line(path)
    assert str(path) in line
    assert "not valid TOML" in line


def test_invalid_utf8_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b'name = "\xff\xfe"')
    assert "not valid TOML" in error_line(path)


# --- files that cannot be read, and values that no knob can hold


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


UNUSABLE_VALUES = {
    "integer of 5,000 digits": ("9" * 5000, "digits"),
    "integer of 9,000 hexadecimal digits": ("0x" + "f" * 9000, "digits"),
    "list of 2,000 levels": (deep(2000), "nested"),
    "list of 200 levels": (deep(200), "nested"),
    "table of 500 levels": ("{a." + ".".join("b" * 500) + " = 1}", "nested"),
    "NUL character": (r'"a\u0000b"', "NUL"),
}


@pytest.mark.parametrize(("value", "reason"), UNUSABLE_VALUES.values(), ids=UNUSABLE_VALUES)
@pytest.mark.parametrize("knob", ["training.seed", "model.path", "nothing"])
def test_an_unusable_value_is_one_short_line(
    value: str, reason: str, knob: str, tmp_path: Path
) -> None:
    for line in (
        error_line(write(tmp_path, f"{knob} = {value}")),
        error_line("countdown/eepo", (f"{knob}={value}",)),
    ):
        assert reason in line
        assert len(line) < 1000


def test_a_key_of_500_levels_is_an_error(tmp_path: Path) -> None:
    key = ".".join(["training"] * 500)
    assert "nested" in error_line(write(tmp_path, f"{key} = 1"))
    assert "unknown key" in error_line("countdown/eepo", (f"{key}=1",))


def test_a_set_with_invalid_utf8_is_an_error() -> None:
    """Python represents such bytes of a command line as lone surrogates."""
    assert "invalid UTF-8" in error_line("countdown/eepo", ("name=a\udcff",))
    assert "training" in error_line("countdown/eepo", ("training.\udcff=1",))


def test_a_set_holds_one_value() -> None:
    line = error_line("countdown/eepo", ("training.seed=1\nother=2",))
    assert r"1\nother=2" in line


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "a/" * 3000, "\udcff"])
def test_a_name_that_no_file_can_have_is_an_unknown_recipe(name: str, tmp_path: Path) -> None:
    assert "no such recipe" in error_line(name)
    assert "no such" in error_line(f"countdown/eepo+{name}")


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000])
def test_extends_with_a_name_that_no_file_can_have_is_an_error(name: str, tmp_path: Path) -> None:
    assert "no such file" in error_line(write(tmp_path, f'extends = "{name}"'))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_a_recipe_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """/proc/self/mem can be opened, but address 0 cannot be read, even by root."""
    assert "Input/output error" in error_line("/proc/self/mem")
    (tmp_path / "link.toml").symlink_to("/proc/self/mem")
    assert "Input/output error" in error_line(write(tmp_path, 'extends = "link.toml"'))


# --- extends


@pytest.mark.parametrize("base", ["demo/grpo", "paper/qwen2.5-3b", "smollm2/countdown_grpo"])
def test_explore_recipes_extend_any_recipe(base: str) -> None:
    plain = recipe.load_run(base)
    grpo = recipe.load_run(f"{base}+explore/downweight_failures")
    eepo = recipe.load_run(f"{base}+explore/eepo_unlearn_failures")
    assert [run.algorithm.failure_weight for run in (plain, grpo, eepo)] == [1, 0.25, 0.25]
    assert (grpo.algorithm.num_stages, eepo.algorithm.num_stages) == (1, 2)
    assert (eepo.algorithm.unlearn_on, eepo.algorithm.unlearn_lr) == ("unrewarded", "auto")
    assert plain.training == grpo.training == eepo.training
    assert plain.task == eepo.task


def test_a_recipe_overrides_the_recipe_that_it_extends(tmp_path: Path) -> None:
    write(
        tmp_path,
        'name = "base"\n[training]\nseed = 1\nnum_steps = 2\n[task]\nseed = 9\n',
        "base.toml",
    )
    path = write(
        tmp_path,
        'extends = "base.toml"\nname = "top"\n[training]\nseed = 5\n[evaluation]\nevery = 3\n',
    )
    config = recipe.load_run(path)
    assert config.name == "top"
    assert config.training == TrainingConfig(seed=5, num_steps=2)
    assert config.task == CountdownConfig(seed=9)
    assert config.evaluation.every == 3


def test_extends_can_be_nested_across_folders(tmp_path: Path) -> None:
    write(
        tmp_path,
        'name = "a"\n[training]\nseed = 1\nnum_steps = 1\nprompts_per_step = 64\n',
        "deep/a.toml",
    )
    write(tmp_path, 'extends = "deep/a.toml"\n[training]\nseed = 2\nnum_steps = 2\n', "b.toml")
    path = write(tmp_path, 'extends = "../b.toml"\n[training]\nseed = 3\n', "side/c.toml")
    config = recipe.load_run(path)
    assert config.name == "a"
    assert config.training == TrainingConfig(seed=3, num_steps=2, prompts_per_step=64)


def test_a_mistake_in_an_extended_recipe_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "[training]\nsead = 1\n", "base.toml")
    assert "training.sead" in error_line(write(tmp_path, 'extends = "base.toml"'))


@pytest.mark.parametrize("value", ['"nowhere.toml"', '""', '"."', "3", '["base.toml"]', "true"])
def test_extends_without_such_a_file_is_an_error(value: str, tmp_path: Path) -> None:
    write(tmp_path, "", "base.toml")
    line = error_line(write(tmp_path, f"extends = {value}"))
    assert f"extends = {value}" in line


def test_a_cycle_of_extends_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "b.toml"', "a.toml")
    write(tmp_path, 'extends = "c.toml"', "b.toml")
    line = error_line(write(tmp_path, 'extends = "a.toml"', "c.toml"))
    assert "extends" in line
    assert all(name in line for name in ("a.toml", "b.toml", "c.toml"))


def test_a_chain_of_extends_is_read_up_to_a_limit(tmp_path: Path) -> None:
    """The chain is not read by recursion: Python would end it with a traceback."""
    write(tmp_path, "[training]\nseed = 5\n", "0.toml")
    for number in range(1, 1500):
        write(tmp_path, f'extends = "{number - 1}.toml"', f"{number}.toml")
    assert recipe.load_run(tmp_path / "99.toml").training.seed == 5
    line = error_line(tmp_path / "1499.toml")
    assert "1499.toml" in line
    assert "more than 100 files" in line


def test_a_recipe_that_extends_itself_is_an_error(tmp_path: Path) -> None:
    assert "extends" in error_line(write(tmp_path, 'extends = "recipe.toml"'))


# --- --set


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.seed=7", ("training", "seed", 7)),
        (" training.seed = 7 ", ("training", "seed", 7)),
        ("training.learning_rate=1e-4", ("training", "learning_rate", 1e-4)),
        ("training.learning_rate=1", ("training", "learning_rate", 1.0)),
        ("evaluation.start=true", ("evaluation", "start", True)),
        ("model.path=runs/warm", ("model", "path", "runs/warm")),
        ('model.path="runs/warm"', ("model", "path", "runs/warm")),
        ("model.path='a=b'", ("model", "path", "a=b")),
        ("model.path=a=b", ("model", "path", "a=b")),
        ("task.template={numbers} -> {target}", ("task", "template", "{numbers} -> {target}")),
        ("algorithm.gate=step", ("algorithm", "gate", "step")),
        ("algorithm.unlearn_lr=auto", ("algorithm", "unlearn_lr", "auto")),
        ("algorithm.unlearn_lr=0.5", ("algorithm", "unlearn_lr", 0.5)),
    ],
)
def test_set_changes_one_knob_of_any_type(
    override: str, expected: tuple[str, str, object], tmp_path: Path
) -> None:
    section, key, value = expected
    config = recipe.load_run(write(tmp_path, 'name = "x"\n'), [override])
    default = RunConfig(name="x")
    changed = dataclasses.replace(getattr(default, section), **{key: value})
    assert config == dataclasses.replace(default, **{section: changed})
    assert type(getattr(getattr(config, section), key)) is type(value)


def test_set_overrides_the_recipe_and_the_last_set_wins(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "x"\n[training]\nseed = 1\nnum_steps = 4\n')
    config = recipe.load_run(path, ["training.seed=2", "name=y", "training.seed=3"])
    assert (config.name, config.training.seed, config.training.num_steps) == ("y", 3, 4)


def test_set_is_checked_against_rules_between_knobs(tmp_path: Path) -> None:
    line = error_line(write(tmp_path, ""), ("algorithm.group_size=7",))
    assert "algorithm.group_size" in line
    assert "7" in line


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("training.seed", ["training.seed", "section.key=value"]),
        ("", ["--set", "section.key=value"]),
        ("=3", ["=3", "section.key=value"]),
        (".seed=3", [".seed=3", "section.key=value"]),
        ("training.=3", ["training.=3", "section.key=value"]),
        ("training..seed=3", ["training..seed=3", "section.key=value"]),
        ("training.seed=", ["training.seed", '""', "whole number"]),
        ("training.seed=one", ["training.seed", '"one"', "whole number"]),
        ("training.seed=1.5", ["training.seed", "1.5", "whole number"]),
        ("training.sead=1", ["training.sead", "1", "seed"]),
        ("trainig.seed=1", ["trainig", "training"]),
        ("training=1", ["training", "1", "section"]),
        ("name.first=1", ["name.first=1", "name", "section"]),
        ("algorithm.unlearn_lr=fast", ["algorithm.unlearn_lr", '"fast"', '"auto"']),
        ("algorithm.gate=maybe", ["algorithm.gate", '"maybe"', '"token"']),
        ("training.learning_rate=nan", ["training.learning_rate", "NaN"]),
        ("no\nsense", ["section.key=value"]),
        ("tra\nining.seed=1", ["allowed"]),
    ],
    ids=repr,
)
def test_an_invalid_set_is_a_one_line_error(
    override: str, fragments: list[str], tmp_path: Path
) -> None:
    line = error_line(write(tmp_path, 'name = "x"\n'), (override,))
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("algorithm.unlern_lr=1", "algorithm.unlearn_lr"),
        ("unlearn_lr=1", "algorithm.unlearn_lr"),
        ("trainig.seed=1", "training.seed"),
        ("algorithm.seed=1", "task.seed or training.seed or evaluation.seed"),
        ("trainig=1", "training"),
        ("algorithm.later_advantages=1", "algorithm.stage2_negative_advantages"),
        ("alarm.rewarded_ratio_below=1", "alarm.lost_share_above"),
    ],
)
def test_an_unknown_knob_in_set_gets_suggestions(override: str, meant: str, tmp_path: Path) -> None:
    line = error_line(write(tmp_path, ""), (override,))
    key = override.partition("=")[0]
    assert line.startswith(f"--set: unknown key {key} = 1; did you mean {meant}? allowed: ")


@pytest.mark.parametrize("line", ["rare_weight = 0.5", 'later_advantages = "positive"'])
def test_a_removed_knob_is_an_error_with_the_allowed_knobs(line: str, tmp_path: Path) -> None:
    path = write(tmp_path, in_section("algorithm", line))
    knob, _, value = line.partition(" = ")
    message = error_line(path)
    assert message.startswith(f"{path}: unknown key algorithm.{knob} = {value}; ")
    assert "allowed: group_size, num_stages" in message
    renamed = "did you mean algorithm.stage2_negative_advantages?"
    assert (renamed in message) == (knob == "later_advantages")


def test_a_knob_of_another_task_is_not_suggested_again(tmp_path: Path) -> None:
    line = error_line(write(tmp_path, ""), ("task.levels=[1]",))
    assert line.startswith("--set: unknown key task.levels = [1]; allowed: name, num_numbers")


def test_an_unknown_knob_in_a_recipe_gets_suggestions(tmp_path: Path) -> None:
    path = write(tmp_path, in_section("algorithm", "unlern_lr = 1"))
    assert error_line(path, ("training.seed=1",)).startswith(
        f"{path}: unknown key algorithm.unlern_lr = 1; "
        "did you mean algorithm.unlearn_lr? allowed: group_size"
    )


def test_an_error_names_the_recipe_or_set_as_its_source(tmp_path: Path) -> None:
    path = write(tmp_path, in_section("training", "num_steps = 1.5"))
    assert error_line(path, ("training.seed=1",)).startswith(f"{path}: training.num_steps = 1.5")
    assert error_line(path, ("training.num_steps=2.5",)).startswith(
        "--set: training.num_steps = 2.5"
    )
    assert error_line(path, ("task.name=chess", "training.num_steps=2")).startswith(
        '--set: task.name = "chess"'
    )


# --- dump


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        "a\nb",
        "tab\there",
        'say "hi"',
        "it's",
        "back\\slash \\n",
        "θ′ ← θ 数学 🦜",
        "\r\x01\x1b\x7f",
        "]#=",
    ],
    ids=ascii,
)
def test_any_string_reads_back_from_the_dump(text: str, tmp_path: Path) -> None:
    config = RunConfig(
        name=text,
        model=ModelConfig(path=text),
        task=CountdownConfig(template=text + "{numbers} {target}"),
    )
    assert recipe.load_run(write(tmp_path, recipe.dump(config))) == config


@pytest.mark.parametrize(
    "number", [0.0, 1.0, 0.1, 1e-7, 5e-7, 1 / 3, 1e16, 1e22, 5e-324, 1.7976931348623157e308]
)
def test_any_number_reads_back_from_the_dump_exactly(number: float, tmp_path: Path) -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(unlearn_lr=number, kl_coef=number),
        training=TrainingConfig(learning_rate=number, seed=2**62),
    )
    read = recipe.load_run(write(tmp_path, recipe.dump(config)))
    assert read == config
    assert type(read.training.learning_rate) is float


def test_the_dump_has_every_knob() -> None:
    """A run's recipe must not change when defaults change."""
    for config in (RunConfig(), WarmupConfig()):
        knobs = json.loads(json.dumps(dataclasses.asdict(config)))  # TOML has lists, not tuples
        assert tomllib.loads(recipe.dump(config)) == knobs


@pytest.mark.parametrize("task", ["countdown", "dataset"])
def test_a_long_template_is_cut_in_the_error(task: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe.parse(RunConfig, {"task": {"name": task, "template": "x" * 20_000}}, "test")
    assert "task.template" in str(caught.value)
    assert len(str(caught.value)) < 400
