"""Recipes of the paper: every model × method has the paper's values and builds a trainer."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eepo import recipe
from eepo.assemble import build_trainer
from eepo.config import DatasetConfig, RunConfig
from eepo.model import memory
from eepo.model.memory import Shape
from eepo.runs.progress import Progress

FOUR = ("minerva_math", "olympiadbench", "amc23", "aime24")

# recipe: model, template, max_new_tokens, benchmarks
MODELS = {
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "boxed", 4096, FOUR),
    "llama-3.2-3b-instruct": ("meta-llama/Llama-3.2-3B-Instruct", "chat", 6144, FOUR),
    "qwen3-8b-base": ("Qwen/Qwen3-8B-Base", "boxed", 6144, (*FOUR, "aime25")),
    "qwen3-14b-base": ("Qwen/Qwen3-14B-Base", "boxed", 6144, (*FOUR, "aime25")),
}

# recipe: num_stages, group_size, temperature, entropy_coef, clip_high
METHODS = {
    "grpo": (1, 8, 1.0, 1e-5, 0.2),
    "higher_temperature": (1, 8, 1.2, 1e-5, 0.2),
    "more_entropy": (1, 8, 1.0, 1e-3, 0.2),
    "clip_higher": (1, 8, 1.0, 1e-5, 0.28),
    "more_rollouts": (1, 16, 1.0, 1e-5, 0.2),
    "eepo": (2, 8, 1.0, 1e-5, 0.2),
    "eepo_step_gate": (2, 8, 1.0, 1e-5, 0.2),
    "eepo_higher_temperature": (2, 8, 1.2, 1e-5, 0.2),
    "eepo_more_entropy": (2, 8, 1.0, 1e-3, 0.2),
    "eepo_clip_higher": (2, 8, 1.0, 1e-5, 0.28),
    "eepo_more_rollouts": (2, 16, 1.0, 1e-5, 0.2),
}

# (recipe of the model, recipe of the GPU): shape of the model, optimizer, memory of the GPU
GPUS = {
    ("qwen2.5-3b", "one-80gb"): (
        Shape(3_085_938_688, 36, 2048, 11008, 2, 128, 151936, 32768),
        "adamw_bf16",
        79 * 2**30,
    ),
    ("llama-3.2-3b-instruct", "one-80gb"): (
        Shape(3_212_749_824, 28, 3072, 8192, 8, 128, 128256, 131072),
        "adamw_bf16",
        79 * 2**30,
    ),
    ("qwen3-8b-base", "one-141gb"): (
        Shape(8_190_735_360, 36, 4096, 12288, 8, 128, 151936, 32768),
        "adamw_8bit",
        139 * 2**30,
    ),
}

every_combination = pytest.mark.parametrize(
    ("model", "method"), [(m, n) for m in MODELS for n in METHODS]
)


def method_values(config: RunConfig) -> tuple[int, int, float, float, float]:
    a = config.algorithm
    return a.num_stages, a.group_size, a.temperature, a.entropy_coef, a.clip_high


def test_the_tables_above_list_every_recipe() -> None:
    shipped = {
        path.stem for folder in recipe.recipe_folders() for path in folder.glob("paper/*.toml")
    }
    assert shipped == {"math", "lora", *MODELS, *METHODS, *(gpu for _, gpu in GPUS)}


@every_combination
def test_every_combination_has_the_values_of_the_paper(model: str, method: str) -> None:
    config = recipe.load_run(f"paper/{model}+{method}")
    assert config.name == method
    assert method_values(config) == METHODS[method]
    assert isinstance(config.task, DatasetConfig)
    algorithm, task, training = config.algorithm, config.task, config.training
    values = config.model.path, task.template, algorithm.max_new_tokens, task.evaluation
    assert values == MODELS[model]
    assert training.prompts_per_step == 128
    assert training.prompts_per_mini_batch == 64
    assert training.learning_rate == 5e-7
    assert training.num_steps == 2 * 8521 // 128
    assert algorithm.clip_low == 0.2
    assert algorithm.kl_coef == 1e-4
    assert algorithm.advantage_baseline == "group"
    if algorithm.num_stages == 2:
        gate = algorithm.gate, algorithm.gate_threshold, algorithm.gate_window
        assert gate == ("step" if method == "eepo_step_gate" else "token", 0.3, 3)
        unlearning = algorithm.unlearn_lr, algorithm.unlearn_loss, algorithm.unlearn_on
        assert unlearning == (3e-3, "comp", "all")


@pytest.mark.parametrize("method", ["grpo", "eepo", "eepo_more_rollouts"])
@pytest.mark.parametrize(("model", "gpu"), GPUS)
def test_a_gpu_recipe_saves_memory_and_changes_nothing_else(
    model: str, gpu: str, method: str
) -> None:
    shape, optimizer, gpu_memory = GPUS[model, gpu]
    plain = recipe.load_run(f"paper/{model}+{method}")
    config = recipe.load_run(f"paper/{model}+{method}+{gpu}")
    assert config.training == dataclasses.replace(plain.training, optimizer=optimizer)
    assert (config.name, config.algorithm, config.task) == (plain.name, plain.algorithm, plain.task)
    estimate = memory.Budget(shape, config, 1024, torch.bfloat16, True, gpu_memory).estimate()
    assert estimate.total < 0.9 * gpu_memory
    # The cache must hold all rows at a quarter of their full length.
    left = gpu_memory - estimate.persistent_total - estimate.phases["sampling"]
    assert estimate.kv_cache / 4 < left
    plain_estimate = memory.Budget(shape, plain, 1024, torch.bfloat16, True, gpu_memory).estimate()
    assert plain_estimate.total > 0.85 * gpu_memory


@pytest.mark.parametrize("method", ["grpo", "eepo"])
def test_lora_trains_8b_on_48_gb_and_3b_on_24_gb(method: str) -> None:
    sizes = {  # parameters of the adapter, and outside the decoder layers
        "qwen3-8b-base": (GPUS["qwen3-8b-base", "one-141gb"][0], 43_646_976, 1_244_664_832, 48),
        "qwen2.5-3b": (GPUS["qwen2.5-3b", "one-80gb"][0], 29_933_568, 311_166_976, 24),
    }
    for model, (shape, adapter, outside, gigabytes) in sizes.items():
        config = recipe.load_run(f"paper/{model}+{method}+lora")
        assert (config.name, config.model.lora_rank) == (method, 16)
        shape = dataclasses.replace(
            shape, num_adapter_parameters=adapter, num_outside_layers=outside
        )
        budget = memory.Budget(shape, config, 1024, torch.bfloat16, True, gigabytes * 2**30)
        estimate = budget.estimate()
        assert 0.5 * budget.free < estimate.total < 0.85 * budget.free


@pytest.mark.parametrize("method", METHODS)
def test_a_method_sets_only_its_name_and_the_algorithm(method: str) -> None:
    """A method then combines with every model in the same way."""
    folder = next(folder for folder in recipe.recipe_folders() if (folder / "paper").is_dir())
    assert set(recipe.read_toml(folder / "paper" / f"{method}.toml")) == {"name", "algorithm"}


@pytest.fixture(scope="module")
def stand_in(new_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder with long positions, a byte-level tokenizer and a chat template."""
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
    )
    folder = tmp_path_factory.mktemp("stand-in")
    shape = {
        "vocab_size": len(alphabet),
        "max_position_embeddings": 8192,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    new_model("qwen3", **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training set in the format of the hub, and a file per benchmark."""
    folder = tmp_path_factory.mktemp("problems")
    rows = [
        {"question": f"What is ${n} + {n}$?", "gt_answer": str(2 * n), "level": 3}
        for n in range(20)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for index, name in enumerate((*FOUR, "aime25")):
        held_out = [
            {"problem": f"Find the {index}-th root of {n}, where ${n} > 0$.", "answer": str(n)}
            for n in range(5)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    return folder


def build(name: str, out: Path, stand_in: Path, problems: Path, *more: str) -> Any:
    changes = [
        f"model.path={stand_in}",
        "model.device=cpu",
        f"task.data_dir={problems}",
        "task.train=train.jsonl",
        "task.num_held_out=4",
        *more,
    ]
    progress = Progress(Console(file=io.StringIO()))
    return build_trainer(recipe.load_run(name, changes), out, resume=False, progress=progress)


@every_combination
def test_every_combination_builds_a_trainer(
    model: str, method: str, stand_in: Path, problems: Path, tmp_path: Path
) -> None:
    # The math grader takes a second to start, in each of these tests.
    trainer = build(f"paper/{model}+{method}", tmp_path, stand_in, problems, "reward.name=exact")
    assert trainer.algorithm.options == trainer.config.algorithm
    assert trainer.algorithm.reference is not None
    assert tuple(trainer.task.evaluation_sets()) == ("in_distribution", *MODELS[model][3])
    prompt = trainer.task.training_prompts(0, 1)[0]
    assert "\\boxed{}" in prompt.text
    assert prompt.text.startswith("[user]") == (model == "llama-3.2-3b-instruct")


@pytest.mark.parametrize("overlay", ["", pytest.param("+lora", marks=pytest.mark.slow)])
def test_the_papers_eepo_trains_a_step_at_small_sizes(
    overlay: str, stand_in: Path, problems: Path, tmp_path: Path
) -> None:
    small = ("algorithm.max_new_tokens=6", "training.num_steps=1", "training.prompts_per_step=4")
    quick = ("training.prompts_per_mini_batch=2", "evaluation.num_samples=1", "evaluation.every=0")
    name = f"paper/qwen3-8b-base+eepo{overlay}"
    build(name, tmp_path, stand_in, problems, *small, *quick).run()
    sets = [
        json.loads(line)["set"]
        for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()
    ]
    assert sets == ["in_distribution", *MODELS["qwen3-8b-base"][3]]


def test_curves_use_whole_benchmarks_and_a_held_out_slice_of_the_training_set() -> None:
    """The paper's figure of entropy collapse shows accuracy in and out of distribution."""
    for model in MODELS:
        config = recipe.load_run(f"paper/{model}+grpo")
        assert isinstance(config.task, DatasetConfig)
        assert config.task.num_held_out == 200
        assert config.evaluation.every > 0
        assert config.evaluation.quick_problems == 0
