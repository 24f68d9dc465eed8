"""Tests the folder of `eepo export-verl --out`, and the parts of `import-verl` without verl.

tests/adapters/verl trains with such a folder and merges a checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("pyarrow", reason="needs the extra: pip install 'eepo[data]'")

from pyarrow.parquet import read_table
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from eepo import recipe
from eepo.adapters.verl.cluster import Cluster
from eepo.adapters.verl.data import RAW_TEMPLATE, raw_text
from eepo.adapters.verl.export_folder import Export, export_folder
from eepo.adapters.verl.merge import find_checkpoint, merge_checkpoint
from eepo.cli import app
from eepo.config import RunConfig
from eepo.tasks.dataset import Dataset
from eepo.tasks.templates import render
from eepo.types import Prompt, UserError

CHATML = (
    "{% for message in messages %}<eos>{{ message.role }}\n{{ message.content | trim }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<eos>assistant\n{% endif %}"
)
Load = Callable[..., RunConfig]


def byte_tokenizer() -> Any:
    """Return a tokenizer of bytes with one special token."""
    tokens = [*sorted(ByteLevel.alphabet()), "<eos>"]
    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that loads a recipe with 5 training and 2 evaluation problems."""
    for name, numbers in (("sums", range(5)), ("unseen", range(7, 9))):
        rows = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in numbers]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    text = f"""name = "eepo"
model = {{ path = "builtin:countdown" }}
algorithm = {{ group_size = 4, max_new_tokens = 8 }}
training = {{ num_steps = 3, prompts_per_step = 4, prompts_per_mini_batch = 2, seed = 3 }}
[task]
name = "dataset"
data_dir = "{tmp_path}"
train = "sums.jsonl"
evaluation = ["unseen.jsonl"]
template = "{{problem}}"
"""
    (tmp_path / "recipe.toml").write_text(text)
    return lambda *knobs: recipe.load_run(tmp_path / "recipe.toml", knobs)


def export(config: RunConfig, out: Path, **cluster: int) -> Export:
    return export_folder(config, Cluster(**({"gpus": 2} | cluster)), out)


def test_the_files_have_the_layout_of_verl(load: Load, tmp_path: Path) -> None:
    written = export(load(), tmp_path / "out")
    assert (written.num_train, written.num_val) == (12, 2)
    (first, second) = read_table(tmp_path / "out/val.parquet").to_pylist()
    assert first == {
        "data_source": "unseen",
        "prompt": [{"role": "user", "content": "7 + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"index": 0, "split": "val", "id": first["extra_info"]["id"]},
    }
    assert second["extra_info"]["index"] == 1
    assert recipe.load_run(tmp_path / "out/recipe.toml") == load()


def test_training_rows_are_the_prompts_of_every_step(
    load: Load, tmp_path: Path, tokenizer: Any
) -> None:
    export(load(), tmp_path / "out")
    rows = read_table(tmp_path / "out/train.parquet").to_pylist()
    prompts = Dataset(load().task, tokenizer, order_seed=3).training_prompts(0, 12)
    texts = [row["prompt"][0]["content"] for row in rows]
    assert texts == [prompt.text for prompt in prompts]
    assert len(set(texts[:5])) == len(set(texts[5:10])) == 5  # two epochs
    assert texts[:5] != texts[5:10]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", ["chat", "boxed", "{problem}\n", "<eos>{problem}"])
def test_the_raw_template_gives_the_tokens_of_our_prompt(template: str, adds_bos: bool) -> None:
    """verl calls `apply_chat_template` with the template of the exported command."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = CHATML, "<eos>"
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", tokenizer.eos_token_id)]
        )
    text, ids = render(" 1 + 1 = ? \n", template, tokenizer)
    messages = [{"role": "user", "content": raw_text(Prompt("p", text, ids), tokenizer)}]
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=RAW_TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    assert tuple(rendered) == ids


def test_special_tokens_that_no_text_gives_are_rejected() -> None:
    tokenizer = byte_tokenizer()
    ids = (*tokenizer("1 + 1").input_ids, tokenizer.eos_token_id)  # EOS at the end
    with pytest.raises(UserError, match="prompt p: the tokenizer adds special tokens"):
        raw_text(Prompt("p", "1 + 1", ids), tokenizer)


def test_the_script_names_files_by_absolute_paths(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = export(load(), Path("out"))
    script = written.script.read_text()
    for key, path in {
        "data.train_files": tmp_path / "out/train.parquet",
        "data.val_files": tmp_path / "out/val.parquet",
        "trainer.default_local_dir": tmp_path / "out/checkpoints",
    }.items():
        assert f"{key}={path} " in script
    model = script.split("model.path=")[1].split()[0]
    assert (Path(model) / "config.json").is_file()


def test_without_evaluation_sets_verl_does_not_evaluate(load: Load, tmp_path: Path) -> None:
    written = export(load("task.evaluation=[]"), tmp_path / "out")
    assert written.num_val == 0
    assert "trainer.test_freq=-1 " in written.script.read_text()
    assert "trainer.val_before_train=false " in written.script.read_text()
    assert (tmp_path / "out/val.parquet").is_file()


def test_a_folder_keeps_the_export_of_its_recipe(load: Load, tmp_path: Path) -> None:
    export(load(), tmp_path / "out")
    export(load(), tmp_path / "out")
    with pytest.raises(UserError, match="already contains an export of another recipe"):
        export(load("training.seed=4"), tmp_path / "out")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(UserError, match="already contains a run of eepo train"):
        export(load(), tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file; give a folder"):
        export(load(), tmp_path / "file")


@pytest.mark.parametrize(
    ("knob", "cluster", "message"),
    [
        ("training.seed=1", {"gpus": 3}, "must be a multiple of --gpus × --nodes = 3"),
        (
            "training.seed=1",
            {"gpus": 8, "tensor_parallel": 8},
            "divide the model's 4 attention heads",
        ),
        ("training.num_steps=0", {}, "training.num_steps = 0 cannot be exported"),
        ("task.train=missing.jsonl", {}, "missing.jsonl: no such file"),
    ],
)
def test_nothing_is_written_after_a_mistake(
    load: Load, tmp_path: Path, knob: str, cluster: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        export(load(knob), tmp_path / "out", **cluster)
    assert not (tmp_path / "out").exists()


def test_the_command_prints_how_to_train(load: Load, tmp_path: Path) -> None:
    load()
    out = tmp_path / "an export"
    line = ["export-verl", str(tmp_path / "recipe.toml"), "--out", str(out), "--gpus", "2"]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert "12 training rows, 2 evaluation rows" in result.output
    assert f"bash '{out}/train.sh'" in result.output


# --- eepo import-verl


def write_checkpoint(folder: Path, step: int, latest: int | None = None) -> Path:
    checkpoint = folder / f"checkpoints/global_step_{step}"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor/fsdp_config.json").write_text("{}")
    note = folder / "checkpoints/latest_checkpointed_iteration.txt"
    note.write_text(str(latest or step))
    return checkpoint


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path, 9)
    write_checkpoint(tmp_path, 10, latest=9)  # verl was killed while it wrote the second
    for source in (tmp_path, tmp_path / "checkpoints", first):
        assert find_checkpoint(source) == first


def test_import_of_something_else_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no verl checkpoint; allowed: a folder of eepo"):
        find_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 3, latest=4)
    with pytest.raises(UserError, match="global_step_4: no FSDP shards of verl"):
        find_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 4)
    (tmp_path / "final").mkdir()
    with pytest.raises(UserError, match="final already exists; use another folder"):
        merge_checkpoint(tmp_path)


def test_import_without_verl_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "verl.model_merger.base_model_merger", None)
    write_checkpoint(tmp_path, 1)
    with pytest.raises(UserError, match=r"merging needs verl: pip install 'eepo\[verl\]'"):
        merge_checkpoint(tmp_path)
