"""What TRL's adapter refuses, what it relies on in TRL, and its examples."""

from __future__ import annotations

import ast
import inspect
import runpy
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from eepo.types import UserError

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")

from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from eepo.adapters import trl as adapter
from eepo.adapters.trl import EEPOConfig, EEPOTrainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

Build = Callable[..., Any]


# --- mistakes


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"num_generations": 7, "per_device_train_batch_size": 7},
            "num_generations must be even.* got 7",
        ),
        (
            {"gate": "sometimes"},
            'gate = "sometimes" must be one of "token", "step", "always", "never"',
        ),
        ({"gate_window": 0}, "gate_window = 0 must be a whole number >= 1"),
        ({"gate_threshold": -1.0}, "gate_threshold = -1.0 must be"),
        (
            {"unlearn_lr": "auto"},
            "unlearn_lr = 'auto' must be a number here; unlearn_kl_target chooses it",
        ),
        ({"unlearn_kl_target": 0.0}, "unlearn_kl_target = 0.0 must be"),
        ({"unlearn_kl_target": 1e-3, "unlearn_lr": -1.0}, "unlearn_lr = -1.0 must be > 0"),
        (
            {"unlearn_on": "zero_variance", "num_generations": 2},
            'unlearn_on = "zero_variance" needs num_generations >= 4',
        ),
        (
            {"unlearn_on": "good"},
            'unlearn_on = "good" must be one of "all", "rewarded", "unrewarded", "zero_variance"',
        ),
        ({"unlearn_eps": 0.0}, "unlearn_eps = 0.0 must be"),
        ({"unlearn_loss": "kl"}, 'unlearn_loss = "kl" must be one of "comp", "nll"'),
        (
            {"use_transformers_continuous_batching": True},
            "use_transformers_continuous_batching = True must be False",
        ),
        ({"optim": "galore_adamw_layerwise"}, "optim = .*layerwise must not"),
    ],
)
def test_a_wrong_setting_is_one_line(build: Build, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        build(**settings)
    assert "\n" not in str(error.value)


def test_half_precision_is_refused_from_the_launcher_too(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="fp16 must be off"):
        build()


def test_dropout_is_refused_where_a_kl_is_asked_for(build: Build, sharp_model: Any) -> None:
    model = sharp_model()
    model.config.attention_dropout = 0.1
    build(model=model)
    with pytest.raises(
        UserError, match=r"attention_dropout = 0.1 must be 0 with unlearn_kl_target"
    ):
        build(model=model, unlearn_kl_target=1e-3)
    other = sharp_model()
    other.model.layers[0].mlp.act_fn = torch.nn.Sequential(
        other.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.2)
    )
    with pytest.raises(UserError, match=r"layers.0.mlp.act_fn.1 = 0.2 must be 0"):
        build(model=other, unlearn_kl_target=1e-3)


def test_every_process_needs_both_stages(build: Build) -> None:
    config = build(num_generations=2, per_device_train_batch_size=6).args
    config.per_device_train_batch_size = (
        3  # as with two processes, whose batches together are whole groups
    )
    with pytest.raises(
        UserError, match=r"per_device_train_batch_size \* steps_per_generation must be even, got 3"
    ):
        config._check_neighbours()


def test_a_trainer_that_could_only_be_wrong_is_refused(build: Build, new_model: Any) -> None:
    with pytest.raises(UserError, match="args must be an EEPOConfig, got GRPOConfig"):
        EEPOTrainer(
            model=new_model("llama"),
            reward_funcs=len,
            args=GRPOConfig("x", use_cpu=True, bf16=False),
        )
    with pytest.raises(UserError, match=r"embed_tokens.weight is torch.bfloat16, must be float32"):
        build(model=new_model("llama").bfloat16())
    with pytest.raises(
        UserError, match="tools, rollout_func and environment_factory must be left out"
    ):
        build(rollout_func=lambda prompts, trainer: {})
    build(gate="never", model=new_model("llama").bfloat16())  # GRPO may do as it likes


def test_prompts_out_of_order_are_refused(build: Build) -> None:
    trainer = build(gate="always")
    trainer.model.train()
    with pytest.raises(UserError, match="each prompt num_generations times in a row"):
        trainer._generate(["1 2 = 3 :", "4 5 = 9 :"] * 4)


@pytest.mark.parametrize("version", ["1.14.2", "1.17.0", "2.0.0", "0.29.1"])
def test_another_trl_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(
        UserError, match=rf"needs trl>=1.15,<1.17, found trl {version}: pip install"
    ):
        adapter.check_trl()


def test_no_trl_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match=r"trl is not installed: pip install 'eepo\[trl\]'"):
        adapter.check_trl()


def test_the_range_is_that_of_the_extra() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (low, high) = (".".join(map(str, version)) for version in (adapter.OLDEST, adapter.TOO_NEW))
    assert f'trl = ["trl>={low},<{high}"]' in text


def test_knobs_come_from_the_command_line_too() -> None:
    line = "--output_dir x --gate step --gate_window 5 --unlearn_lr 1e-3 --unlearn_on stuck --use_cpu --bf16 false"
    (config,) = HfArgumentParser(EEPOConfig).parse_args_into_dataclasses(
        [*line.split(), "--unlearn_kl_target", "3e-2"]
    )
    assert (config.gate, config.gate_window, config.unlearn_lr) == ("step", 5, 1e-3)
    assert (config.unlearn_on, config.unlearn_kl_target) == ("zero_variance", 3e-2)
    assert (config.algorithm.unlearn_lr, config.algorithm.unlearn_kl_target) == ("auto", 3e-2)
    assert config.algorithm.gate_window == 5


# --- what an upgrade of TRL must not change without notice


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def returned(function: Any) -> ast.Tuple:
    """The tuple in the function's last line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    last = definition.body[-1]  # type: ignore[attr-defined]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Tuple)
    return last.value


def test_signatures_and_arities_the_adapter_stands_on() -> None:
    assert parameters(GRPOTrainer._generate) == ["self", "prompts"]
    assert [ast.unparse(part) for part in returned(GRPOTrainer._generate).elts][:5] == [
        "prompt_ids",
        "completion_ids",
        "tool_mask",
        "completions",
        "logprobs",
    ]
    assert len(returned(GRPOTrainer._generate).elts) == 8
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    graded = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
    assert parameters(GRPOTrainer._calculate_rewards) == graded
    assert "self._pending_extra_logs[column]" in inspect.getsource(
        GRPOTrainer._log_completion_extra
    )
    scoring = parameters(GRPOTrainer._get_per_token_logps_and_entropies)
    assert scoring[:7] == [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ]
    assert len(returned(GRPOTrainer._get_per_token_logps_and_entropies).elts) == 3
    assert parameters(GRPOTrainer._save_checkpoint) == ["self", "model", "trial"]
    assert parameters(GRPOTrainer._load_optimizer_and_scheduler) == ["self", "checkpoint"]
    assert parameters(VLLMGeneration.sync_weights) == ["self"]
    assert parameters(VLLMGeneration.generate)[1:4] == ["prompts", "images", "num_generations"]


def test_where_trl_pushes_weights_and_asks_for_old_logprobs() -> None:
    generate = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "if self.state.global_step != self._last_loaded_step:" in generate
    score = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert score.index(
        "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies"
    ) < score.index("ref_model")
    assert 'output["old_per_token_logps"] = old_per_token_logps' in score
    assert "num_generations = self.num_generations if mode" in inspect.getsource(
        GRPOTrainer._generate
    )


# --- the examples

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_differ_in_three_lines() -> None:
    grpo, eepo = (
        (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        for name in ("trl_grpo.py", "trl_eepo.py")
    )
    pairs = [(theirs, ours) for theirs, ours in zip(grpo, eepo, strict=True) if theirs != ours]
    assert pairs[0] == (
        "from trl import GRPOConfig, GRPOTrainer",
        "from eepo.adapters.trl import EEPOConfig, EEPOTrainer",
    )
    assert [theirs.replace("GRPO", "EEPO") for theirs, _ in pairs[1:]] == [
        ours for _, ours in pairs[1:]
    ]
    assert len(pairs) == 3


@pytest.mark.parametrize("name", ["trl_grpo.py", "trl_eepo.py"])
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path), "1"])
    trainer = runpy.run_path(str(EXAMPLES / name))["trainer"]
    log = trainer.state.log_history[0]
    assert log["reward"] > 0.3  # the policy that ships can do more than half of them
    assert ("eepo/kl" in log) == (name == "trl_eepo.py")
    assert (tmp_path / "model.safetensors").is_file()
