"""The doctor, on healthy recipes and on ones with a known illness."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eepo import cli, recipe
from eepo.config import ModelConfig, ReasoningGymConfig, RunConfig
from eepo.experiments import doctor
from eepo.experiments.doctor import Finding, examine
from eepo.model import memory
from eepo.types import Completion, Prompt, Verdict

SMALL = ("task.num_evaluation=5",)


@pytest.fixture(autouse=True)
def few_golds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "GOLD_PROMPTS", 12)


def found(name: str | Path, *overrides: str, **options: Any) -> dict[str, Finding]:
    """By name; the worst of each."""
    order = {"ok": 0, "skip": 1, "warn": 2, "fail": 3}
    worst: dict[str, Finding] = {}
    for finding in examine(str(name), overrides, **options):
        if finding.name not in worst or order[finding.level] > order[worst[finding.name].level]:
            worst[finding.name] = finding
    return worst


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.level for name, finding in findings.items() if finding.level != "ok"}


@pytest.fixture
def maths(tmp_path: Path) -> Path:
    """Eight problems that the built-in policy's tokenizer knows the words of."""
    rows = [{"problem": f"{n} + {n} =", "answer": str(2 * n)} for n in range(1, 9)]
    path = tmp_path / "maths.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def maths_recipe(path: Path, **task: str) -> Path:
    knobs = {"name": "dataset", "train": str(path), "template": "{problem}"} | task
    lines = ["[model]", 'device = "cpu"', "[algorithm]", "max_new_tokens = 20", "[task]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in knobs.items()]
    recipe_path = path.with_suffix(".toml")
    recipe_path.write_text("\n".join(lines))
    return recipe_path


# --- healthy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo/grpo", "demo/eepo"])
def test_a_healthy_recipe_has_nothing_to_mend(name: str) -> None:
    findings = found(name, *SMALL)
    assert levels(findings) == {}
    checks = [
        "recipe",
        "data",
        "prompt",
        "model",
        "length",
        "memory",
        "disk",
        "gold answers",
        "samples",
    ]
    assert list(findings) == [*checks, "truncation", "format", "reward"]
    assert findings["data"].text.startswith(
        "endless training problems; evaluation: in_range (5), out_of_range (5)"
    )
    assert "all 12" in findings["gold answers"].text
    assert "0.9 million parameters on cpu" in findings["model"].text


def test_the_number_of_prompts_is_the_users() -> None:
    assert "3 prompts x 4" in found("demo/grpo", *SMALL, num_prompts=3)["samples"].text


# --- known illnesses --------------------------------------------------------------------------------------------------


def test_a_recipe_that_cannot_be_read_is_the_only_finding() -> None:
    findings = found("demo/grpo", "algorithm.group_size=7", "algorithm.num_stages=2")
    assert levels(findings) == {"recipe": "fail"} and len(findings) == 1  # noqa: PT018
    assert "group_size must be even, got 7" in findings["recipe"].text


def test_a_wrong_model_path_does_not_hide_the_rest() -> None:
    findings = found("demo/grpo", 'model.path="./nowhere"', 'model.device="cuda:77"')
    skipped = {"prompt, gold answers, samples": "skip", "memory, disk, samples": "skip"}
    assert levels(findings) == {"tokenizer": "fail", "model": "fail", "device": "fail"} | skipped
    assert 'model.path = "./nowhere": no config.json there' in findings["model"].text


def test_a_data_file_without_the_column_is_named(maths: Path) -> None:
    findings = found(maths_recipe(maths, answer_column="gold"))
    assert findings["data"].level == "fail"
    assert "gold" in findings["data"].text
    assert findings["memory"].level == "ok", "what does not need the data still runs"
    assert findings["prompt, gold answers, samples"].text == "not looked at, without data"
    assert "samples" not in findings


def test_short_completions_are_cut_off_and_it_says_by_what_to_mend_it() -> None:
    findings = found("demo/grpo", *SMALL, "algorithm.max_new_tokens=3")
    assert levels(findings)["truncation"] == "warn"
    assert "100% of completions are cut off at 3 tokens" in findings["truncation"].text
    assert "algorithm.max_new_tokens = 6" in findings["truncation"].advice


def test_completions_longer_than_the_model_are_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "load_engine", lambda *_: pytest.fail("weights were loaded"))
    findings = found("demo/grpo", *SMALL, "algorithm.max_new_tokens=125")
    assert levels(findings) == {"length": "fail", "samples": "skip"}
    assert (
        findings["length"].advice == "algorithm.max_new_tokens = 121"
    )  # 128 positions, prompts of 7
    assert "gold answers" in findings


def test_what_does_not_fit_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 60 * 2**20)
    monkeypatch.setattr(doctor, "load_engine", lambda *_: pytest.fail("weights were loaded"))
    findings = found("demo/grpo", *SMALL)
    assert levels(findings) == {"memory": "fail", "samples": "skip"}
    assert "of 60 MiB free" in findings["memory"].text
    assert findings["memory"].advice.startswith("model.gradient_checkpointing = true")


def test_rounded_moments_are_advised_where_nothing_else_helps_and_said_to_be_another_run() -> None:
    config = recipe.load_run(
        "demo/grpo", ("training.prompts_per_mini_batch=1", "training.prompts_per_step=1")
    )
    shape = memory.Shape(10**9, 2, 8, 32, 2, 4, 50, 64)
    finding = doctor.look_at_memory(config, shape, torch.device("cpu"), 8, 22 * 10**9)
    assert finding.level == "warn"
    assert finding.advice.startswith(
        'training.optimizer = "adamw_bf16" (it rounds its moments: not quite the same'
    )
    hopeless = doctor.look_at_memory(config, shape, torch.device("cpu"), 8, 10**9)
    assert "a smaller model" in hopeless.advice


def test_a_full_disk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_disk", lambda folder: 2**20)
    assert found("demo/grpo", *SMALL)["disk"].level == "fail"


def test_gold_answers_that_earn_nothing_fail_with_their_names(maths: Path) -> None:
    """Where the answer column holds what no grader can read."""
    rows = [json.loads(line) for line in maths.read_text().splitlines()]
    rows[3]["answer"] = "see the figure, page 12 \\frac{"
    maths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    findings = found(maths_recipe(maths))
    assert findings["gold answers"].level == "fail"
    assert "1 of 8 do not earn reward 1" in findings["gold answers"].text
    assert "see the figure" in findings["gold answers"].text
    assert "mend these answers" in findings["gold answers"].advice


def test_data_notes_and_missing_evaluation_are_said(maths: Path) -> None:
    findings = found(maths_recipe(maths))
    assert "8 training problems" in findings["data"].text or "there are 8" in findings["data"].text
    every = [finding.line() for finding in examine(str(maths_recipe(maths)), ())]
    assert any("evaluation: none" in line and "task.evaluation" in line for line in every)
    assert any("one step asks 128 prompts, and there are 8" in line for line in every)


def test_problems_that_the_policy_never_solves_are_seen(maths: Path) -> None:
    rows = [json.loads(line) | {"answer": "12345"} for line in maths.read_text().splitlines()]
    maths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    findings = found(maths_recipe(maths))
    assert findings["gold answers"].level == "ok"
    assert levels(findings)["reward"] == "warn"
    assert "mean 0.000; no advantage in 100% of groups of 4" in findings["reward"].text
    assert "easier problems" in findings["reward"].advice


# --- single judgements ------------------------------------------------------------------------------------------------


def completion(finished: bool = True) -> Completion:
    return Completion((1, 2), (-0.5, -0.5), "text", finished, (0.5, 0.5))


def test_truncation_is_not_blamed_on_the_recipe_where_the_doctor_cut() -> None:
    config = recipe.load_run("demo/grpo", ["algorithm.max_new_tokens=100"])
    cut = [completion(False), completion()]
    assert "under a minute" in doctor.judge_endings(config, cut, limit=50).text
    assert doctor.judge_endings(config, cut, limit=100).advice == "algorithm.max_new_tokens = 200"
    assert doctor.judge_endings(config, [completion()] * 9 + cut, limit=100).level == "ok"
    assert "none ever ended" in doctor.judge_endings(config, [completion(False)], limit=100).advice


def test_format_is_the_share_of_completions_with_an_answer() -> None:
    config = recipe.load_run("demo/grpo")
    two = [completion(), completion()]
    assert doctor.judge_format(config, two, [Verdict(0.0, "1"), Verdict(0.0, None)]).level == "ok"
    bad = doctor.judge_format(config, two, [Verdict(0.0, None), Verdict(0.0, None)])
    assert bad.level == "warn"
    assert "0% of completions; one without: 'text'" in bad.text


@pytest.mark.parametrize(
    ("rewards", "level", "words"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], "warn", "no advantage in 100%"),
        ([[1.0, 1.0], [1.0, 1.0]], "warn", "mean 1.000"),
        ([[1.0, 0.0], [1.0, 1.0]], "ok", "mean 0.750; no advantage in 50%"),
    ],
)
def test_rewards_that_teach_nothing_are_seen(
    rewards: list[list[float]], level: str, words: str
) -> None:
    finding = doctor.judge_rewards(torch.tensor(rewards))
    assert finding.level == level
    assert words in finding.text


@pytest.mark.parametrize(
    ("path", "template", "has_chat", "advice"),
    [
        ("acme/Tiny-1B-Instruct", "boxed", True, 'task.template = "chat"'),
        ("acme/Tiny-1B-Instruct", "boxed", False, ""),
        ("acme/Tiny-1B-Instruct", "chat", True, ""),
        ("acme/Tiny-1B-Base", "chat", True, 'task.template = "boxed"'),
        ("acme/Tiny-1B-Base", "boxed", True, ""),
    ],
)
def test_the_prompt_is_shown_whole_and_its_form_is_held_against_the_models_name(
    path: str, template: str, has_chat: bool, advice: str
) -> None:
    class Tokenizer:
        chat_template = "{{ messages }}" if has_chat else None

    config = RunConfig(model=ModelConfig(path=path), task=ReasoningGymConfig(template=template))
    finding = doctor.look_at_template(
        config, Tokenizer(), Prompt("p", "a\x1b[31m\nb" + "c" * 1000, (1, 2, 3))
    )
    assert advice in finding.advice
    assert (finding.level == "ok") == (advice == "")
    assert r"3 tokens: 'a\x1b[31m\nbcc" in finding.text
    assert "\x1b" not in finding.line()
    assert len(finding.text) < 700


def test_a_users_reward_may_want_another_form(maths: Path) -> None:
    config = recipe.load_run(maths_recipe(maths))
    config = dataclasses.replace(
        config, reward=dataclasses.replace(config.reward, name="mine:grade")
    )

    class Strict:
        def grade(self, prompts: Any, texts: Any) -> list[Verdict]:
            return [Verdict(0.0, text, "another form") for text in texts]

    problems = doctor.Problems(None, 1, [Prompt("p", "", (1,), "7")], {})  # type: ignore[arg-type]
    (finding,) = doctor.look_at_gold(config, problems, Strict())
    assert (finding.level, finding.advice) == ("warn", "check the reward's function")
    assert r"p: '\\boxed{7}' earns 0 (another form)" in finding.text


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(cli.app, ["doctor", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output.splitlines()


def test_the_command_prints_a_line_for_each_finding_and_ends_well() -> None:
    code, lines = command("demo/grpo", "--set", SMALL[0], "--samples", "2", "--device", "cpu")
    assert code == 0
    assert lines[0].startswith("ok    recipe: grpo: GRPO, 40 steps of 64 prompts x 8 completions")
    assert all(line.startswith(("ok    ", "warn  ")) for line in lines[:-1])
    assert any("samples: 2 prompts x 4" in line for line in lines)
    assert lines[-1].startswith("0 failed, ")


def test_the_command_fails_where_a_check_does() -> None:
    code, lines = command("demo/grpo", "--device", "abacus")
    assert code == 1
    assert any(
        line.startswith('fail  device: model.device = "abacus" cannot be used here')
        for line in lines
    )
    assert lines[-1].startswith("1 failed")


@pytest.mark.parametrize(("free", "share"), [(60 * 10**9, "100 %"), (20 * 10**9, "0 %")])
def test_on_a_gpu_it_says_how_much_of_the_cache_fits(free: int, share: str) -> None:
    config = recipe.load_run("countdown/grpo")
    shape = memory.Shape(1_500_000_000, 28, 1536, 8960, 2, 128, 1000, 4096)
    finding = doctor.look_at_memory(config, shape, torch.device("cuda"), 8, free)
    assert (
        f"the cache takes what is left: {share} of its rows may be at their longest" in finding.text
    )
