"""Tests of `eepo doctor`, on correct recipes and on recipes with a known mistake."""

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
from eepo.model import loading, memory
from eepo.types import Completion, Prompt, Verdict

SMALL = ("task.num_evaluation=5", "model.device=cpu", "algorithm.kl_coef=0.0")


@pytest.fixture(autouse=True)
def grade_few_gold_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "GOLD_PROMPTS", 12)


def examine_recipe(name: str | Path, *overrides: str, **options: Any) -> dict[str, Finding]:
    """Return the worst finding of each name."""
    order = {"ok": 0, "skip": 1, "warn": 2, "fail": 3}
    worst: dict[str, Finding] = {}
    for finding in examine(str(name), overrides, **options):
        if finding.name not in worst or order[finding.level] > order[worst[finding.name].level]:
            worst[finding.name] = finding
    return worst


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.level for name, finding in findings.items() if finding.level != "ok"}


@pytest.fixture
def math_file(tmp_path: Path) -> Path:
    """Write eight problems that the tokenizer of the built-in policy can encode."""
    rows = [{"problem": f"{n} + {n} =", "answer": str(2 * n)} for n in range(1, 9)]
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def math_recipe(path: Path, **task: str) -> Path:
    knobs = {"name": "dataset", "train": str(path), "template": "{problem}"} | task
    lines = ["[model]", 'device = "cpu"', "[algorithm]", "max_new_tokens = 20", "[task]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in knobs.items()]
    recipe_path = path.with_suffix(".toml")
    recipe_path.write_text("\n".join(lines))
    return recipe_path


# --- correct recipes ---


@pytest.mark.parametrize(
    "overrides", [["algorithm.num_stages=1"], ["algorithm.unlearn_lr=auto"]], ids=["grpo", "eepo"]
)
def test_a_correct_recipe_has_only_ok_findings(overrides: list[str]) -> None:
    findings = examine_recipe("countdown/eepo", *SMALL, *overrides)
    assert levels(findings) == {}
    checks = [
        "recipe",
        "data",
        "prompt",
        "model",
        "length",
        "memory",
        "host copy",
        "disk",
        "gold answers",
        "samples",
    ]
    assert list(findings) == [*checks, "truncation", "format", "reward"]
    assert findings["data"].text.startswith(
        "unlimited training problems; evaluation: in_range (5), out_of_range (5)"
    )
    assert "all 12" in findings["gold answers"].text
    assert "0.9 million parameters on cpu" in findings["model"].text


def test_num_prompts_sets_the_number_of_sampled_prompts() -> None:
    assert (
        "3 prompts x 4" in examine_recipe("countdown/grpo", *SMALL, num_prompts=3)["samples"].text
    )


# --- recipes with a known mistake ---


def test_a_recipe_that_cannot_be_read_is_the_only_finding() -> None:
    findings = examine_recipe("countdown/grpo", "algorithm.group_size=7", "algorithm.num_stages=2")
    assert levels(findings) == {"recipe": "fail"} and len(findings) == 1  # noqa: PT018
    assert "group_size must be even, got 7" in findings["recipe"].text


def test_a_wrong_model_path_skips_only_dependent_checks() -> None:
    findings = examine_recipe("countdown/grpo", 'model.path="./nowhere"', 'model.device="cuda:77"')
    failed = ("tokenizer", "model", "device")
    needs_tokenizer = ("data", "prompt", "gold answers", "samples")
    needs_model = ("precision", "length", "memory", "host copy", "disk")
    skipped = needs_tokenizer + needs_model
    expected = dict.fromkeys(failed, "fail") | dict.fromkeys(skipped, "skip")
    assert levels(findings) == expected
    for name in needs_tokenizer:
        assert findings[name].text == "not checked, because tokenizer failed"
    for name in needs_model:
        assert findings[name].text == "not checked, because model failed"
    assert 'model.path = "./nowhere": no config.json found there' in findings["model"].text


def test_a_missing_data_column_is_named_and_skips_only_dependent_checks(math_file: Path) -> None:
    findings = examine_recipe(math_recipe(math_file, answer_column="gold"))
    assert findings["data"].level == "fail"
    assert "gold" in findings["data"].text
    assert findings["memory"].level == "ok", "checks that do not need the data still run"
    for name in ("prompt", "gold answers", "samples"):
        assert findings[name].level == "skip"
        assert findings[name].text == "not checked, because data failed"


def test_truncated_completions_warn_and_propose_a_larger_limit() -> None:
    findings = examine_recipe("countdown/grpo", *SMALL, "algorithm.max_new_tokens=3")
    assert levels(findings)["truncation"] == "warn"
    assert "100% of completions are cut off at 3 tokens" in findings["truncation"].text
    assert "algorithm.max_new_tokens = 6" in findings["truncation"].advice


def test_too_long_completions_fail_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "load_engine", lambda *_: pytest.fail("weights were loaded"))
    findings = examine_recipe("countdown/grpo", *SMALL, "algorithm.max_new_tokens=125")
    assert levels(findings) == {"length": "fail", "samples": "skip"}
    # The model has 128 positions, the longest prompt has 7 tokens.
    assert findings["length"].advice == "algorithm.max_new_tokens = 121"
    assert "gold answers" in findings


def test_a_model_that_does_not_fit_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 60 * 2**20)
    monkeypatch.setattr(doctor, "load_engine", lambda *_: pytest.fail("weights were loaded"))
    findings = examine_recipe("countdown/grpo", *SMALL)
    assert levels(findings) == {"memory": "fail", "samples": "skip"}
    assert "of 60 MiB free" in findings["memory"].text
    assert findings["memory"].advice.startswith("model.gradient_checkpointing = true")


def budget(shape: memory.Shape, free: int, device: str, *overrides: str) -> memory.Budget:
    config = recipe.load_run("countdown/grpo", overrides)
    dtype = loading.pick_dtype(config.rollout.dtype, torch.device(device))
    return memory.Budget(shape, config, 8, dtype, device == "cuda", free)


def test_a_smaller_optimizer_is_proposed_last_with_a_warning_about_results() -> None:
    shape = memory.Shape(10**9, 2, 8, 32, 2, 4, 50, 64)
    knobs = ("training.prompts_per_mini_batch=1", "training.prompts_per_step=1")
    single = budget(shape, 22 * 10**9, "cpu", *knobs, "algorithm.kl_coef=0.0")
    finding = doctor.judge_memory(single)
    assert finding.level == "warn"
    assert finding.advice.startswith(
        'training.optimizer = "adamw_bf16" (rounds its moments: results may differ)'
    )
    hopeless = doctor.judge_memory(dataclasses.replace(single, free=10**9))
    assert "a smaller model" in hopeless.advice


def test_a_copy_that_does_not_fit_into_host_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy has 0.9 million weights: 12 bytes of each are copied."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**24)
    finding = examine_recipe("countdown/grpo", *SMALL)["host copy"]
    assert finding.level == "warn"
    assert "takes 10 MiB of 16 MiB free host memory, more than half" in finding.text
    assert "training.checkpoint_every" in finding.advice


def test_a_fixed_unlearning_rate_is_a_warning() -> None:
    findings = examine_recipe("countdown/eepo", *SMALL)
    assert levels(findings) == {"unlearning": "warn"}
    assert "unlearn_lr = 0.003 is fixed" in findings["unlearning"].text
    assert 'unlearn_lr = "auto"' in findings["unlearning"].advice


def test_a_full_disk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_disk", lambda folder: 2**20)
    assert examine_recipe("countdown/grpo", *SMALL)["disk"].level == "fail"


def test_gold_answers_that_earn_no_reward_fail_with_their_ids(math_file: Path) -> None:
    """One answer of the data is not a mathematical expression."""
    rows = [json.loads(line) for line in math_file.read_text().splitlines()]
    rows[3]["answer"] = "see the figure, page 12 \\frac{"
    math_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    findings = examine_recipe(math_recipe(math_file))
    assert findings["gold answers"].level == "fail"
    assert "1 of 8 do not earn reward 1" in findings["gold answers"].text
    assert "see the figure" in findings["gold answers"].text
    assert "correct these answers" in findings["gold answers"].advice


def test_few_problems_and_missing_evaluation_sets_warn(math_file: Path) -> None:
    findings = examine_recipe(math_recipe(math_file))
    assert (
        "8 training problems" in findings["data"].text
        or "there are only 8" in findings["data"].text
    )
    every = [finding.line() for finding in examine(str(math_recipe(math_file)), ())]
    assert any("evaluation: none" in line and "task.evaluation" in line for line in every)
    assert any("a step takes 128 prompts, but there are only 8" in line for line in every)


def test_problems_that_the_policy_never_solves_warn(math_file: Path) -> None:
    rows = [json.loads(line) | {"answer": "12345"} for line in math_file.read_text().splitlines()]
    math_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    findings = examine_recipe(math_recipe(math_file))
    assert findings["gold answers"].level == "ok"
    assert levels(findings)["reward"] == "warn"
    assert "mean 0.000; all advantages are 0 in 100% of groups of 4" in findings["reward"].text
    assert "easier problems" in findings["reward"].advice


# --- single checks ---


def completion(finished: bool = True) -> Completion:
    return Completion((1, 2), (-0.5, -0.5), "text", finished, (0.5, 0.5))


def test_truncation_by_the_limit_of_the_check_is_told_apart() -> None:
    config = recipe.load_run("countdown/grpo", ["algorithm.max_new_tokens=100"])
    cut = [completion(False), completion()]
    assert "under a minute" in doctor.judge_truncation(config, cut, limit=50).text
    assert (
        doctor.judge_truncation(config, cut, limit=100).advice == "algorithm.max_new_tokens = 200"
    )
    assert doctor.judge_truncation(config, [completion()] * 9 + cut, limit=100).level == "ok"
    assert (
        "no completion ended"
        in doctor.judge_truncation(config, [completion(False)], limit=100).advice
    )


def test_format_reports_the_share_of_completions_with_an_answer() -> None:
    config = recipe.load_run("countdown/grpo")
    two = [completion(), completion()]
    assert doctor.judge_format(config, two, [Verdict(0.0, "1"), Verdict(0.0, None)]).level == "ok"
    bad = doctor.judge_format(config, two, [Verdict(0.0, None), Verdict(0.0, None)])
    assert bad.level == "warn"
    assert "0% of completions; example without an answer: 'text'" in bad.text


@pytest.mark.parametrize(
    ("rewards", "level", "words"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], "warn", "all advantages are 0 in 100%"),
        ([[1.0, 1.0], [1.0, 1.0]], "warn", "mean 1.000"),
        ([[1.0, 0.0], [1.0, 1.0]], "ok", "mean 0.750; all advantages are 0 in 50%"),
    ],
)
def test_groups_without_advantages_warn(rewards: list[list[float]], level: str, words: str) -> None:
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
def test_prompt_is_shown_and_its_template_is_compared_with_the_model_name(
    path: str, template: str, has_chat: bool, advice: str
) -> None:
    class Tokenizer:
        chat_template = "{{ messages }}" if has_chat else None

    config = RunConfig(model=ModelConfig(path=path), task=ReasoningGymConfig(template=template))
    prompt = Prompt("p", "a\x1b[31m\nb" + "c" * 1000, (1, 2, 3))
    context = doctor.Context(config, num_prompts=1)
    context.tokenizer = Tokenizer()
    context.problems = doctor.Problems(None, 1, [prompt], {})  # type: ignore[arg-type]
    (finding,) = doctor.check_prompt(context)
    assert advice in finding.advice
    assert (finding.level == "ok") == (advice == "")
    assert r"3 tokens: 'a\x1b[31m\nbcc" in finding.text
    assert "\x1b" not in finding.line()
    assert len(finding.text) < 700


@pytest.mark.parametrize(
    ("accepted", "level"), [("7", "ok"), ("\\boxed{7}", "ok"), ("<answer>7</answer>", "warn")]
)
def test_gold_answers_of_a_user_function_are_tried_bare_and_boxed(
    accepted: str, level: str, math_file: Path
) -> None:
    """It may expect yet another format of the answer, so this is only a warning."""
    config = recipe.load_run(math_recipe(math_file))
    reward_config = dataclasses.replace(config.reward, name="mine:grade")

    class AcceptOne:
        def grade(self, prompts: Any, texts: Any) -> list[Verdict]:
            return [Verdict(float(text == accepted), text, "another format") for text in texts]

    context = doctor.Context(dataclasses.replace(config, reward=reward_config), num_prompts=1)
    context.reward = AcceptOne()
    prompt = Prompt("p", "", (1,), "7")
    context.problems = doctor.Problems(None, 1, [prompt], {})  # type: ignore[arg-type]
    (finding,) = doctor.check_gold_answers(context)
    assert finding.level == level
    if level == "warn":
        assert r"p: '\\boxed{7}' earns 0 (another format)" in finding.text
        assert "another format" in finding.advice


def test_every_check_needs_only_checks_before_it() -> None:
    names = [check.name for check in doctor.CHECKS]
    assert len(names) == len(set(names))
    for index, check in enumerate(doctor.CHECKS):
        assert set(check.needs) <= set(names[:index])


# --- the command ---


def command(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(cli.app, ["doctor", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output.splitlines()


def test_command_prints_one_line_per_finding_and_exits_with_0() -> None:
    code, lines = command("countdown/grpo", "--set", SMALL[0], "--samples", "2", "--device", "cpu")
    assert code == 0
    assert lines[0].startswith("ok    recipe: grpo: GRPO, 240 steps of 128 prompts x 8 completions")
    assert all(line.startswith(("ok    ", "warn  ")) for line in lines[:-1])
    assert any("samples: 2 prompts x 4" in line for line in lines)
    assert lines[-1].startswith("0 failed, ")


def test_command_exits_with_1_if_a_check_fails() -> None:
    code, lines = command("countdown/grpo", "--device", "abacus")
    assert code == 1
    start = 'fail  device: model.device = "abacus" is not available'
    assert any(line.startswith(start) for line in lines)
    assert lines[-1].startswith("1 failed")


@pytest.mark.parametrize(("free", "share"), [(60 * 10**9, "100 %"), (20 * 10**9, "0 %")])
def test_on_a_gpu_the_memory_line_says_how_much_of_the_kv_cache_fits(free: int, share: str) -> None:
    shape = memory.Shape(1_500_000_000, 28, 1536, 8960, 2, 128, 1000, 4096)
    finding = doctor.judge_memory(budget(shape, free, "cuda"))
    assert f"holds {share} of the KV cache of all rows at full length" in finding.text
