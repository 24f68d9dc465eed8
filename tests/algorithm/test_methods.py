"""Every method in whole steps: off is GRPO, micro-batches add up, EEPO's stages, resumed runs."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from eepo import recipe
from eepo.algorithm import EEPO, StepMetrics
from eepo.algorithm.registry import ADVANTAGES, LOSSES, SELECT_TOKENS
from eepo.assemble import build_trainer
from eepo.config import AlgorithmConfig, RunConfig
from eepo.runs.checkpoint import latest
from eepo.runs.jsonl import read_records
from eepo.runs.progress import Progress
from eepo.runs.runlog import COMPLETIONS, METRICS
from eepo.types import Prompt, Sampling, UserError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "methods").glob("*.toml"))
KNOBS = {path.stem: recipe.read_toml(path)["algorithm"] for path in RECIPES}
# Larger than in the recipes, so that they matter in a few steps of a small policy.
STRONG: dict[str, dict[str, Any]] = {
    "clip_cov": {"cov_share": 0.1, "cov_low": 0.1},
    "kl_cov": {"cov_share": 0.1},
    "target_entropy": {"entropy_target": 0.9, "entropy_coef_step": 0.1, "entropy_coef_max": 1.0},
    "passk": {"pass_k": 2},
    "gspo": {"clip_low": 0.01, "clip_high": 0.01},
}
METHODS = {name: knobs | STRONG.get(name, {}) for name, knobs in KNOBS.items()}

pytestmark = pytest.mark.usefixtures("one_thread")


def weights_of(algorithm: EEPO) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in algorithm.policy.named_weights()}


def prompts_for(knobs: dict[str, Any], prompts: list[Prompt], number: int = 6) -> list[Prompt]:
    return prompts[: number * (1 + knobs.get("dynamic_sampling", 0))]


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.3)


# --- the registry


def test_the_knobs_name_the_methods_of_the_registry() -> None:
    hints = get_type_hints(AlgorithmConfig)
    assert get_args(hints["advantage"]) == tuple(ADVANTAGES)
    assert get_args(hints["loss"]) == tuple(LOSSES)
    assert set(SELECT_TOKENS) < set(LOSSES)


def test_every_method_has_a_recipe_and_a_row_in_the_docs() -> None:
    names = (set(ADVANTAGES) | set(LOSSES)) - {"grpo"}
    assert names < set(KNOBS)
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert [name for name in KNOBS if f"`+{name}`" not in page] == []


# --- recipes


def test_methods_are_added_to_any_recipe_and_to_its_name() -> None:
    config = recipe.load_run("shortcut/eepo+dr_grpo+clip_cov")
    assert config.name == "eepo+dr_grpo+clip_cov"
    assert (config.algorithm.advantage, config.algorithm.loss) == ("dr_grpo", "clip_cov")
    assert config.algorithm.credit == "full"
    assert recipe.load_run("paper/qwen2.5-3b+eepo+maxrl").name == "eepo+maxrl"
    full_name = recipe.load_run("shortcut/eepo+methods/dr_grpo+methods/clip_cov")
    assert full_name == config


NONSENSE = {
    "shortcut/grpo+gspo+cispo": "gspo and cispo cannot be combined: algorithm.loss",
    "shortcut/grpo+dr_grpo+maxrl": "dr_grpo and maxrl cannot be combined: algorithm.advantage",
    "shortcut/grpo+dr_grpo+gspo": "algorithm.loss_normalisation",
    "shortcut/grpo+kl_cov": "needs prompts_per_mini_batch below prompts_per_step = 32",
    "shortcut/eepo+kl_cov": "needs prompts_per_mini_batch below prompts_per_step = 32",
    "shortcut/grpo+dynamic_sampling+outcome_bonus": "use one of the two",
    "paper/qwen2.5-3b+eepo_step_gate+dynamic_sampling": 'gate = "step"',
}


@pytest.mark.parametrize("name", NONSENSE)
def test_combinations_that_make_no_sense_are_one_line_errors(name: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe.load_run(name)
    assert NONSENSE[name] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage=passk", "algorithm.pass_k=9"], "pass_k must be at most 8"),
        (
            ["algorithm.advantage=passk", "algorithm.pass_k=5", "algorithm.num_stages=2",
             "algorithm.advantage_baseline=stage"],
            "pass_k must be at most 4",
        ),
        (["algorithm.success_weight=0", "algorithm.failure_weight=0"], "nothing would be learned"),
        (["algorithm.loss=gspo"], 'needs loss_normalisation = "completion"'),
        (["algorithm.loss=clip_cov", "algorithm.cov_low=5"], "cov_low must be below cov_high = 5"),
        (["algorithm.entropy_target=0.3", "algorithm.entropy_coef=0.1"], "entropy_coef_max"),
        (["algorithm.loss=kl_cov", "algorithm.num_stages=2"], 'needs credit = "full"'),
        (["algorithm.loss=gsop"], '"grpo", "gspo", "cispo", "clip_cov", "kl_cov"'),
    ],
)  # fmt: skip
def test_knobs_that_contradict_each_other_are_errors(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe.load_run("countdown/grpo", overrides)
    assert message in str(caught.value)


# --- whole steps


@pytest.mark.parametrize(
    "name",
    [
        # What changes only rewards or prompts is slow: it has GRPO's loss.
        pytest.param(name, marks=() if "advantage" not in knobs else pytest.mark.slow)
        for name, knobs in METHODS.items()
        if name not in ("negative_samples", "outcome_bonus", "dynamic_sampling")
    ],
)
def test_micro_batches_add_up_to_the_whole_mini_batch(
    name: str, build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    """Two mini-batches, so that ratios differ from 1."""
    knobs = METHODS[name] | {"num_stages": 1}
    trained = []
    for micro_batch_tokens in (16384, 100):
        algorithm = build_eepo(
            mini_batch=2, optimizer=sgd, micro_batch_tokens=micro_batch_tokens, **knobs
        )
        before = weights_of(algorithm)
        algorithm.step(prompts_for(knobs, demo_prompts, 4), sampling, StepMetrics())
        trained.append({key: w - before[key] for key, w in weights_of(algorithm).items()})
    whole, parts = trained
    size = max(step.abs().max().item() for step in whole.values())
    assert size > 1e-5
    for key in whole:
        torch.testing.assert_close(parts[key], whole[key], rtol=0, atol=2e-3 * size)


@pytest.fixture(scope="module")
def train_steps(build_eepo: Any, demo_prompts: list[Prompt], fingerprint: Any) -> Any:
    """Return a function that trains two steps with these knobs, and hashes the weights."""

    def train(**knobs: Any) -> str:
        algorithm = build_eepo(mini_batch=2, optimizer=sgd, num_stages=1, **knobs)
        for step in range(2):
            stream = Sampling(1.0, 12, 1, f"train/{step}")
            algorithm.step(prompts_for(knobs, demo_prompts, 4), stream, StepMetrics())
        return str(fingerprint(weights_of(algorithm)))

    return train


@pytest.fixture(scope="module")
def grpo_weights(train_steps: Any) -> str:
    return str(train_steps())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_changes_the_update(name: str, train_steps: Any, grpo_weights: str) -> None:
    assert train_steps(**METHODS[name]) != grpo_weights


def test_neutral_values_of_all_methods_are_grpo_bit_for_bit(
    train_steps: Any, grpo_weights: str
) -> None:
    """The weight of the entropy bonus is that of GRPO: the target is never reached."""
    neutral = {"advantage": "grpo", "success_weight": 1.0, "outcome_bonus": 0.0, "loss": "grpo"}
    assert train_steps(**neutral, engine_ratio_cap="off", dynamic_sampling=0) == grpo_weights


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["importance", "full"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_work_with_both_stages_of_eepo(
    name: str, credit: str, build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    knobs = METHODS[name] | {"gate": "always", "unlearn_lr": 1e-2, "credit": credit}
    algorithm = build_eepo(mini_batch=3, group_size=8, **knobs)
    before = weights_of(algorithm)
    metrics = StepMetrics()
    rollout = algorithm.step(prompts_for(knobs, demo_prompts), sampling, metrics)
    row = metrics.result()
    assert row["unlearn/kl"] > 0
    assert rollout.stages == [1] * 4 + [2] * 4
    assert any(any(group) for group in rollout.advantages)
    assert all(torch.isfinite(weight).all() for weight in weights_of(algorithm).values())
    assert any(not torch.equal(before[key], w) for key, w in weights_of(algorithm).items())


def test_negative_samples_weigh_positive_advantages_by_a_tenth(
    build_eepo: Any, sampling: Sampling, demo_prompts: list[Prompt]
) -> None:
    rollouts = []
    for knobs in ({}, KNOBS["negative_samples"]):
        algorithm = build_eepo(num_stages=1, group_size=8, **knobs)
        rollouts.append(algorithm.step(demo_prompts[:6], sampling, StepMetrics()))
    plain, weighted = ([a for group in r.advantages for a in group] for r in rollouts)
    assert max(plain) > 0 > min(plain)
    assert weighted == pytest.approx([a / 10 if a > 0 else a for a in plain])


# --- resumed runs are bit-equal

RESUMED: dict[str, dict[str, dict[str, Any]]] = {
    "target_entropy": {"algorithm": METHODS["target_entropy"]},
    # Four prompts, which come in every step: the history matters.
    "outcome_bonus": {"algorithm": METHODS["outcome_bonus"], "task": {"num_train": 4}},
    "dynamic_sampling": {"algorithm": METHODS["dynamic_sampling"]},
    "clip_cov": {"algorithm": METHODS["clip_cov"]},
}


def config_of(name: str, num_steps: int) -> RunConfig:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": "builtin:shortcut"},
        "task": {"name": "shortcut", "num_evaluation": 1},
        "algorithm": {"group_size": 4, "max_new_tokens": 8, "kl_coef": 0.0, "num_stages": 1},
        "training": {
            "num_steps": num_steps,
            "prompts_per_step": 4,
            "prompts_per_mini_batch": 2,
            "learning_rate": 3e-4,
            "checkpoint_every": 2,
        },
        "evaluation": {"num_samples": 1},
    }
    for section, knobs in RESUMED[name].items():
        tables[section] |= knobs
    return recipe.parse(RunConfig, tables, "test")


def train(config: RunConfig, out: Path, resume: bool = False) -> Path:
    build_trainer(config, out, resume, Progress(Console(file=io.StringIO()))).run()
    return out


def records(folder: Path) -> list[dict[str, Any]]:
    clock = ("seconds", "tokens_per_second")
    return [
        {key: value for key, value in row.items() if not key.startswith(clock)}
        for row in read_records(folder / METRICS)
    ]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_run(name: str, tmp_path: Path) -> None:
    whole = train(config_of(name, 4), tmp_path / "whole")
    part = train(config_of(name, 2), tmp_path / "part")
    shutil.rmtree(part / "final")
    train(config_of(name, 4), part, resume=True)
    assert records(part) == records(whole)
    assert (part / COMPLETIONS).read_bytes() == (whole / COMPLETIONS).read_bytes()
    left, right = (load_file(folder / "final" / "model.safetensors") for folder in (whole, part))
    assert all(torch.equal(left[key], right[key]) for key in left)
    last = [latest(folder / "checkpoints") for folder in (whole, part)]
    states = [json.loads((folder / "state.json").read_text()) for folder in last if folder]
    for state in states:
        del state["num_rows"]  # the first part has an evaluation of its own
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("name", "key"), [("target_entropy", "entropy_coef"), ("outcome_bonus", "answers")]
)
def test_the_state_of_a_method_matters_after_a_restart(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its state in the checkpoint, the resumed run would be different."""
    whole = train(config_of(name, 4), tmp_path / "whole")
    part = train(config_of(name, 2), tmp_path / "part")
    load = EEPO.load_state
    monkeypatch.setattr(
        EEPO, "load_state", lambda self, s: load(self, {k: v for k, v in s.items() if k != key})
    )
    train(config_of(name, 4), part, resume=True)
    left, right = (load_file(folder / "final" / "model.safetensors") for folder in (whole, part))
    assert any(not torch.equal(left[key], right[key]) for key in left)


def test_dynamic_sampling_continues_after_the_prompts_that_it_used(tmp_path: Path) -> None:
    """Every step begins with the prompt after the last one that was sampled."""
    folder = train(config_of("dynamic_sampling", 3), tmp_path / "run")
    rows = records(folder)
    assert sum(row["dropped_groups"] for row in rows) > 0
    used = sum(4 + int(row["dropped_groups"]) for row in rows)
    last = latest(folder / "checkpoints")
    assert last is not None
    assert f'"num_prompts_seen": {used},' in (last / "state.json").read_text()
