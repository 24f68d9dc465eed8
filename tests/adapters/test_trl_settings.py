"""Tests the settings that the TRL adapter rejects, the TRL internals it needs, and its examples."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from eepo.types import UserError

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")

import trl.trainer.utils
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from eepo.adapters import trl as adapter
from eepo.adapters.trl import EEPOConfig, EEPOTrainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

Build = Callable[..., Any]


# --- wrong settings


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
            "unlearn_lr = 'auto' must be a number; set unlearn_kl_target",
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
        (
            {"unlearn_on": "stuck"},
            'unlearn_on = "stuck" must be one of "all", "rewarded", "unrewarded", "zero_variance"',
        ),
        (
            {"stage2_negative_advantages": "positive"},
            'stage2_negative_advantages = "positive" must be true or false',
        ),
        ({"unlearn_eps": 0.0}, "unlearn_eps = 0.0 must be"),
        ({"unlearn_loss": "kl"}, 'unlearn_loss = "kl" must be one of "comp", "nll"'),
        ({"credit": "half"}, 'credit = "half" must be one of "importance", "full"'),
        ({"saturation": "never"}, 'saturation = "never" must be one of "stop", "exact"'),
        ({"unlearn_max_completions": -1}, "unlearn_max_completions = -1 must be"),
        (
            {"credit": "full", "use_vllm": True, "off_policy_mask_threshold": 0.5},
            'off_policy_mask_threshold = 0.5 must be None with credit = "full" and use_vllm',
        ),
        (
            {"use_transformers_continuous_batching": True},
            "use_transformers_continuous_batching = True must be False",
        ),
        ({"optim": "galore_adamw_layerwise"}, "optim = .*layerwise must not"),
    ],
)
def test_a_wrong_setting_gives_one_error_line(
    build: Build, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line) as error:
        build(**settings)
    assert "\n" not in str(error.value)


def test_fp16_from_the_launcher_is_rejected(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="fp16 must be off"):
        build()


def test_dropout_is_rejected_with_a_kl_target(build: Build, sharp_model: Any) -> None:
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


def test_an_odd_number_of_rows_per_process_is_rejected(build: Build) -> None:
    config = build(num_generations=2, per_device_train_batch_size=6).args
    # As with two processes, whose batches together are whole groups.
    config.per_device_train_batch_size = 3
    with pytest.raises(
        UserError, match=r"per_device_train_batch_size \* steps_per_generation must be even, got 3"
    ):
        config._check_trl_settings()


def test_unsupported_arguments_of_the_trainer_are_rejected(build: Build, new_model: Any) -> None:
    with pytest.raises(UserError, match="args must be an EEPOConfig, got GRPOConfig"):
        EEPOTrainer(
            model=new_model("llama"),
            reward_funcs=len,
            args=GRPOConfig("x", use_cpu=True, bf16=False),
        )
    with pytest.raises(UserError, match=r"embed_tokens.weight is torch.bfloat16, must be float32"):
        build(model=new_model("llama").bfloat16())
    with pytest.raises(
        UserError, match="tools, rollout_func and environment_factory must not be set"
    ):
        build(rollout_func=lambda prompts, trainer: {})
    build(gate="never", model=new_model("llama").bfloat16())  # GRPO has no such limits


def test_prompts_that_are_not_repeated_in_a_row_are_rejected(build: Build) -> None:
    trainer = build(gate="always")
    trainer.model.train()
    with pytest.raises(UserError, match="each prompt num_generations times in a row"):
        trainer._generate(["1 2 = 3 :", "4 5 = 9 :"] * 4)


@pytest.mark.parametrize("version", ["1.14.2", "1.17.0", "2.0.0", "0.29.1"])
def test_other_trl_versions_are_rejected(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    line = rf"needs trl>=1.15,<1.17, but trl {version} is installed: pip install"
    with pytest.raises(UserError, match=line):
        adapter.check_trl()


def test_a_missing_trl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(
        UserError,
        match=r"needs trl>=1.15,<1.17, but trl is not installed: pip install 'eepo\[trl\]'",
    ):
        adapter.check_trl()


def test_the_version_range_is_that_of_the_extra() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    versions = (adapter.OLDEST_TRL, adapter.FIRST_UNSUPPORTED_TRL)
    low, high = (".".join(map(str, version)) for version in versions)
    assert f'trl = ["trl>={low},<{high}"]' in text


def test_knobs_are_command_line_options() -> None:
    line = (
        "--output_dir x --use_cpu --bf16 false --gate step --gate_window 5 --unlearn_lr 1e-3 "
        "--unlearn_on zero_variance --unlearn_kl_target 3e-2 --stage2_negative_advantages false "
        "--credit full --saturation exact --unlearn_max_completions 64"
    )
    (config,) = HfArgumentParser(EEPOConfig).parse_args_into_dataclasses(line.split())
    assert (config.gate, config.gate_window, config.unlearn_lr) == ("step", 5, 1e-3)
    assert (config.unlearn_on, config.unlearn_kl_target) == ("zero_variance", 3e-2)
    assert (config.algorithm.unlearn_lr, config.algorithm.unlearn_kl_target) == ("auto", 3e-2)
    assert config.algorithm.gate_window == 5
    assert config.algorithm.stage2_negative_advantages is False
    assert (config.algorithm.credit, config.algorithm.saturation) == ("full", "exact")
    assert config.algorithm.unlearn_max_completions == 64


# --- TRL internals that the adapter relies on: an upgrade of TRL may break them


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def returned_tuple(function: Any) -> ast.Tuple:
    """Return the tuple of the function's last statement."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    last = definition.body[-1]  # type: ignore[attr-defined]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Tuple)
    return last.value


def test_trl_signatures_and_return_values_are_as_expected() -> None:
    assert parameters(GRPOTrainer._generate) == ["self", "prompts"]
    assert [ast.unparse(part) for part in returned_tuple(GRPOTrainer._generate).elts][:5] == [
        "prompt_ids",
        "completion_ids",
        "tool_mask",
        "completions",
        "logprobs",
    ]
    assert len(returned_tuple(GRPOTrainer._generate).elts) == 8
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    grading = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
    assert parameters(GRPOTrainer._calculate_rewards) == grading
    log_extra = inspect.getsource(GRPOTrainer._log_completion_extra)
    assert "self._pending_extra_logs[column]" in log_extra
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
    assert len(returned_tuple(GRPOTrainer._get_per_token_logps_and_entropies).elts) == 3
    assert parameters(GRPOTrainer._save_checkpoint) == ["self", "model", "trial"]
    assert parameters(GRPOTrainer._load_optimizer_and_scheduler) == ["self", "checkpoint"]
    assert parameters(VLLMGeneration.sync_weights) == ["self"]
    assert parameters(VLLMGeneration.generate)[1:4] == ["prompts", "images", "num_generations"]


def test_trl_pushes_weights_and_computes_old_logprobs_as_expected() -> None:
    generate = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "if self.state.global_step != self._last_loaded_step:" in generate
    score = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    old_logprobs = "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies"
    assert score.index(old_logprobs) < score.index("ref_model")
    assert 'output["old_per_token_logps"] = old_per_token_logps' in score
    # `saturation = "exact"` uses the fused head and the backbone's last hidden states.
    scoring = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "model(**model_inputs, labels=labels, fused_lm_head=True)" in scoring
    fused_head = inspect.getsource(trl.trainer.utils.add_fused_lm_head)
    assert "backbone_outputs.last_hidden_state[:, :-1]" in fused_head
    generate = inspect.getsource(GRPOTrainer._generate)
    assert "num_generations = self.num_generations if mode" in generate
