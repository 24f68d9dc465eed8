"""The paper's models × methods: each is read, has the paper's numbers, and becomes a trainer of a tiny stand-in."""

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

# recipe: model, template, longest completion, benchmarks
MODELS = {
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "boxed", 4096, FOUR),
    "llama-3.2-3b-instruct": ("meta-llama/Llama-3.2-3B-Instruct", "chat", 6144, FOUR),
    "qwen3-8b-base": ("Qwen/Qwen3-8B-Base", "boxed", 6144, (*FOUR, "aime25")),
    "qwen3-14b-base": ("Qwen/Qwen3-14B-Base", "boxed", 6144, (*FOUR, "aime25")),
}

# recipe: stages, completions a prompt, temperature, entropy coefficient, upper clip
METHODS = {
    "grpo": (1, 8, 1.0, 1e-5, 0.2),
    "higher_temperature": (1, 8, 1.2, 1e-5, 0.2),
    "more_entropy": (1, 8, 1.0, 1e-3, 0.2),
    "clip_higher": (1, 8, 1.0, 1e-5, 0.28),
    "more_rollouts": (1, 16, 1.0, 1e-5, 0.2),
    "eepo": (2, 8, 1.0, 1e-5, 0.2),
    "eepo_higher_temperature": (2, 8, 1.2, 1e-5, 0.2),
    "eepo_more_entropy": (2, 8, 1.0, 1e-3, 0.2),
    "eepo_clip_higher": (2, 8, 1.0, 1e-5, 0.28),
    "eepo_more_rollouts": (2, 16, 1.0, 1e-5, 0.2),
}

# (recipe, card's recipe): the model's shape, its optimizer, bytes that PyTorch sees on such a card
CARDS = {
    ("qwen2.5-3b", "one-80gb"): (
        Shape(3_085_938_688, 36, 2048, 11008, 2, 128, 151936, 32768), "adamw_bf16", 79 * 2**30,
    ),
    ("llama-3.2-3b-instruct", "one-80gb"): (
        Shape(3_212_749_824, 28, 3072, 8192, 8, 128, 128256, 131072), "adamw_bf16", 79 * 2**30,
    ),
    ("qwen3-8b-base", "one-141gb"): (
        Shape(8_190_735_360, 36, 4096, 12288, 8, 128, 151936, 32768), "adamw_8bit", 139 * 2**30,
    ),
}  # fmt: skip

every_combination = pytest.mark.parametrize(
    ("model", "method"), [(m, n) for m in MODELS for n in METHODS]
)


def numbers(config: RunConfig) -> tuple[int, int, float, float, float]:
    a = config.algorithm
    return a.num_stages, a.group_size, a.temperature, a.entropy_coef, a.clip_high


def test_the_table_above_names_every_file() -> None:
    shipped = {
        path.stem for folder in recipe.recipe_folders() for path in folder.glob("paper/*.toml")
    }
    assert shipped == {"math", *MODELS, *METHODS, *(card for _, card in CARDS)}


@every_combination
def test_a_combination_has_the_papers_numbers(model: str, method: str) -> None:
    config = recipe.load_run(f"paper/{model}+{method}")
    assert config.name == method
    assert numbers(config) == METHODS[method]
    assert isinstance(config.task, DatasetConfig)
    shape = (
        config.model.path,
        config.task.template,
        config.algorithm.max_new_tokens,
        config.task.evaluation,
    )
    assert shape == MODELS[model]
    training = config.training
    assert (training.prompts_per_step, training.prompts_per_mini_batch, training.learning_rate) == (
        128,
        64,
        5e-7,
    )
    assert training.num_steps == 2 * 8521 // 128
    algorithm = config.algorithm
    assert (algorithm.clip_low, algorithm.kl_coef, algorithm.advantage_baseline) == (
        0.2,
        1e-4,
        "group",
    )
    if algorithm.num_stages == 2:
        assert (algorithm.gate, algorithm.gate_threshold, algorithm.gate_window) == (
            "token",
            0.3,
            3,
        )
        assert (algorithm.unlearn_lr, algorithm.unlearn_loss, algorithm.unlearn_on) == (
            3e-3,
            "comp",
            "all",
        )


@pytest.mark.parametrize("method", ["grpo", "eepo", "eepo_more_rollouts"])
@pytest.mark.parametrize(("model", "card"), CARDS)
def test_a_card_s_recipe_laid_over_both_makes_room_and_changes_nothing_else(
    model: str, card: str, method: str
) -> None:
    shape, optimizer, room = CARDS[model, card]
    alone, config = (
        recipe.load_run(f"paper/{model}+{method}"),
        recipe.load_run(f"paper/{model}+{method}+{card}"),
    )
    assert config.training == dataclasses.replace(alone.training, optimizer=optimizer)
    assert (config.name, config.algorithm, config.task) == (alone.name, alone.algorithm, alone.task)
    estimate = memory.Budget(shape, config, 1024, torch.bfloat16, True, room).estimate()
    assert estimate.total < 0.9 * room
    # The cache must hold all rows at a quarter of their full length.
    left = room - estimate.persistent_total - estimate.phases["sampling"]
    assert estimate.kv_cache / 4 < left
    alone_estimate = memory.Budget(shape, alone, 1024, torch.bfloat16, True, room).estimate()
    assert alone_estimate.total > 0.85 * room


@pytest.mark.parametrize("method", METHODS)
def test_a_method_says_the_same_on_every_model_and_nothing_about_it(method: str) -> None:
    """So the order of laying one over the other is the only thing that composes."""
    folder = next(folder for folder in recipe.recipe_folders() if (folder / "paper").is_dir())
    assert set(recipe.read_toml(folder / "paper" / f"{method}.toml")) == {"name", "algorithm"}


@pytest.fixture(scope="module")
def stand_in(new_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder with room for the longest completions, a byte for a token, and a chat template."""
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
    """Files named and shaped as a user's would be: a training set as on the hub, and every benchmark."""
    folder = tmp_path_factory.mktemp("problems")
    rows = [
        {"question": f"What is ${n} + {n}$?", "gt_answer": str(2 * n), "level": 3}
        for n in range(20)
    ]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        "task.train=own.jsonl",
        *more,
    ]
    progress = Progress(Console(file=io.StringIO()))
    return build_trainer(recipe.load_run(name, changes), out, resume=False, progress=progress)


@every_combination
def test_a_combination_becomes_a_trainer(
    model: str, method: str, stand_in: Path, problems: Path, tmp_path: Path
) -> None:
    trainer = build(f"paper/{model}+{method}", tmp_path, stand_in, problems)
    assert trainer.algorithm.options == trainer.config.algorithm
    assert trainer.algorithm.reference is not None
    assert tuple(trainer.task.evaluation_sets()) == MODELS[model][3]
    prompt = trainer.task.training_prompts(0, 1)[0]
    assert "\\boxed{}" in prompt.text
    assert prompt.text.startswith("[user]") == (model == "llama-3.2-3b-instruct")


def test_a_combination_takes_a_step(stand_in: Path, problems: Path, tmp_path: Path) -> None:
    """The whole of the paper's EEPO but for its sizes."""
    small = ("algorithm.max_new_tokens=6", "training.num_steps=1", "training.prompts_per_step=4")
    quick = ("training.prompts_per_mini_batch=2", "evaluation.num_samples=1", "evaluation.every=0")
    build("paper/qwen3-8b-base+eepo", tmp_path, stand_in, problems, *small, *quick).run()
    sets = [
        json.loads(line)["set"]
        for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()
    ]
    assert sets == list(MODELS["qwen3-8b-base"][3])
