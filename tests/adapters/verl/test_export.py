"""Tests `eepo export-verl --out` with the real verl: prompts, a run of the script, its checkpoint.

The run is also the source of the log and the checkpoint that `eepo report` and `eepo import-verl`
read.
"""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs its own environment: make test-verl")

import json
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import read_table
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from typer.testing import CliRunner
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl_runs import VerlRun, run_command

from eepo import recipe
from eepo.adapters.verl.cluster import Cluster
from eepo.adapters.verl.export import quote
from eepo.adapters.verl.export_folder import export_folder
from eepo.adapters.verl.launch import CONFIG, store_config
from eepo.cli import app
from eepo.reports import read_runs
from eepo.tasks.dataset import Dataset

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_STEPS, NUM_PROMPTS = 2, 3
Export = Callable[..., Path]


def write_problems(path: Path, numbers: range) -> None:
    rows = [{"problem": f" What is {n} + <|im_end|>1?\n", "answer": str(n + 1)} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def export(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return a function that exports a tiny recipe, with some knobs changed."""
    data = tmp_path_factory.mktemp("data")
    write_problems(data / "sums.jsonl", range(4))  # fewer than a run needs: two epochs
    write_problems(data / "unseen.jsonl", range(10, 13))
    text = f"""
    name = "eepo"
    [model]
    path = "{model}"
    micro_batch_tokens = 128
    [task]
    name = "dataset"
    data_dir = "{data}"
    train = "sums.jsonl"
    evaluation = ["unseen.jsonl"]
    [algorithm]
    group_size = 4
    max_new_tokens = 8
    gate = "always"
    unlearn_lr = "auto"
    kl_coef = 0  # verl keeps the reference in pinned memory, which needs a GPU
    [training]
    num_steps = {NUM_STEPS}
    prompts_per_step = {NUM_PROMPTS}
    prompts_per_mini_batch = {NUM_PROMPTS}
    learning_rate = 0.01
    [evaluation]
    start = true
    every = 1
    """
    (data / "recipe.toml").write_text(textwrap.dedent(text))

    def run(*knobs: str) -> Path:
        out = tmp_path_factory.mktemp("out") / "a run"  # a space in the path
        config = recipe.load_run(data / "recipe.toml", knobs)
        export_folder(config, Cluster(gpus=2, tensor_parallel=2), out)
        return out

    return run


def task_of(out: Path, tokenizer: Any) -> Dataset:
    config = recipe.load_run(out / "recipe.toml")
    return Dataset(config.task, tokenizer, config.training.seed)


def composed(out: Path) -> Any:
    """Return verl's config of the exported script, read by a shell and by verl's parser."""
    script = (out / "train.sh").read_text()
    script = script.replace("python -m eepo.adapters.verl", r"printf '%s\0'")
    words = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    store_config(ConfigStore.instance())
    with initialize_config_module("verl.trainer.config", version_base=None):
        line = [word for word in words.decode().split("\0") if word and "hydra." not in word]
        return compose(CONFIG, line)


def verl_prompts(file: Path, config: Any, tokenizer: Any) -> list[list[int]]:
    """Return the token ids that verl's data set and agent loop make from a file's rows."""
    kwargs = config.data.apply_chat_template_kwargs
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type="qwen2", chat_template_kwargs=kwargs
    )
    rows = RLHFDataset([str(file)], tokenizer, config.data)
    return [builder.build_initial_tokens(list(row["raw_prompt"])) for row in rows]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", ["chat", "boxed", "{problem}\n"])
def test_verl_sees_the_tokens_of_our_prompts(
    export: Export, model: Path, monkeypatch: pytest.MonkeyPatch, template: str, adds_bos: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    if adds_bos:
        special = [("<|im_start|>", tokenizer.bos_token_id)]
        processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = processor
    monkeypatch.setattr("eepo.model.loading.load_tokenizer", lambda _: tokenizer)
    out = export(f"task.template={json.dumps(template)}")
    config, task = composed(out), task_of(out, tokenizer)
    train = [list(p.token_ids) for p in task.training_prompts(0, NUM_STEPS * NUM_PROMPTS)]
    assert verl_prompts(out / "train.parquet", config, tokenizer) == train
    val = [list(prompt.token_ids) for prompt in task.evaluation_sets()["unseen"]]
    assert verl_prompts(out / "val.parquet", config, tokenizer) == val
    # Without the raw template, verl would render the prompt a second time.
    config.data.apply_chat_template_kwargs = {}
    assert verl_prompts(out / "val.parquet", config, tokenizer) != val


@given(text=st.text(st.sampled_from("a'\"\\ ,=[{$(#"), max_size=8))
def test_hydra_reads_back_quoted_texts(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"a={quote(text)}"])
    assert override.value() == text


@pytest.fixture(scope="module")
def exported_run(export: Export) -> VerlRun:
    out = export()
    settings = [*tiny.cpu_settings(), f'trainer.rollout_data_dir="{out}/rollouts"']
    return run_command(["bash", str(out / "train.sh"), *settings], out)


def test_the_script_trains_on_the_prompts_of_every_step(exported_run: VerlRun, model: Path) -> None:
    task = task_of(exported_run.folder, AutoTokenizer.from_pretrained(model))
    for step in range(1, NUM_STEPS + 1):
        first = (step - 1) * NUM_PROMPTS
        prompts = [list(p.token_ids) for p in task.training_prompts(first, NUM_PROMPTS)]
        # Only stage 2 is sampled from these weights. θ is also evaluated.
        sampled = {json.dumps(row["prompt"]) for row in exported_run.completions(2 * step)}
        assert sampled == {json.dumps(prompt) for prompt in prompts}
        rewards = [row["score"] for row in exported_run.rollout_dump(step)]
        assert len(rewards) == 4 * NUM_PROMPTS


def test_a_report_reads_the_log_of_the_script(exported_run: VerlRun) -> None:
    (log,) = (exported_run.folder / "logs").glob("*.jsonl")
    data = {row["step"]: row["data"] for row in map(json.loads, log.read_text().splitlines())}
    (run,) = read_runs([exported_run.folder])
    assert (run.name, run.seed, run.last_step) == ("eepo", 0, NUM_STEPS)
    for key, source in {
        "reward": "critic/score/mean",
        "length": "response_length/mean",
        "stage1/entropy": "eepo/stage1/entropy",
        "stage2/reward": "eepo/stage2/reward",
        "stage2/length": "eepo/stage2/length",
        "unlearn/kl": "eepo/unlearn/kl",
        "gate_share": "eepo/gate_share",
        "clip_share": "actor/pg_clipfrac",
        "seconds/update": "timing_s/update_actor",
    }.items():
        expected = {step: data[step][source] for step in (1, 2)}
        assert run.series(key) == pytest.approx(expected), key
    assert [row["set"] for row in run.evaluations] == ["unseen"] * 3
    greedy = {row["step"]: row["greedy"] for row in run.evaluations}
    assert greedy == {step: data[step]["val-core/unseen/acc/mean@1"] for step in (0, 1, 2)}


def test_a_checkpoint_becomes_a_model_folder_for_eval(
    exported_run: VerlRun, tmp_path: Path
) -> None:
    """The merged weights are those that verl pushed to rollout after the last step, in bf16."""
    run = exported_run.folder
    result = CliRunner().invoke(app, ["import-verl", str(run)])
    assert result.exit_code == 0, result.output
    merged = load_file(run / "final/model.safetensors")
    pushed = load_file(exported_run.weights(2 * NUM_STEPS + 1))
    assert {name for name in pushed if name not in merged} <= {"lm_head.weight"}  # tied
    for name, weight in merged.items():
        assert torch.equal(weight.float(), pushed[name].bfloat16().float()), name
    data = recipe.load_run(run / "recipe.toml").task.data_dir
    command = ["eval", str(run), "--benchmarks", f"{data}/unseen.jsonl", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "evaluation")])
    assert result.exit_code == 0, result.output
    again = CliRunner().invoke(app, ["import-verl", str(run)])
    assert "already exists" in str(again.exception)


def test_rows_have_the_layout_of_verl(export: Export) -> None:
    rows = read_table(export() / "train.parquet").to_pylist()
    assert len(rows) == NUM_STEPS * NUM_PROMPTS
    assert rows[0].keys() >= {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert rows[0]["reward_model"]["style"] == "rule"
