"""Cells of docs/support.md that say `rejected`, where no other test has the error line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")

# isort: split
from eepo.adapters.trl.checks import check_trainer
from eepo.adapters.verl.options import STAGES_NEED
from eepo.config import ModelConfig
from eepo.model.loading import load_model, pick_device
from eepo.types import UserError

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"


def cell(feature: str, column: int) -> str:
    """Return a cell of the matrix; columns are eepo's trainer, TRL and verl."""
    rows = [line.split("|") for line in SUPPORT.read_text(encoding="utf-8").splitlines()]
    [row] = [row for row in rows if len(row) > 4 and row[1].strip() == feature]
    return row[1 + column].strip()


def trl_trainer(**changes: Any) -> SimpleNamespace:
    """Return what the checks of the TRL adapter look at."""
    plain = {
        "environment_factories": None,
        "tools": None,
        "rollout_func": None,
        "_is_vlm": False,
        "processing_class": object(),
        "model": SimpleNamespace(named_parameters=lambda: iter(())),
        "options": SimpleNamespace(unlearn_lr=1e-3),
        "accelerator": SimpleNamespace(distributed_type="NO", is_fsdp2=False),
        "args": SimpleNamespace(gradient_accumulation_steps=1, steps_per_generation=1),
        "num_iterations": 1,
    }
    return SimpleNamespace(**(plain | changes))


def test_the_trl_adapter_accepts_a_plain_trainer() -> None:
    check_trainer(trl_trainer())


@pytest.mark.parametrize(
    ("feature", "kind"),
    [
        ("DeepSpeed", "DistributedType.DEEPSPEED"),
        ("FSDP1, Megatron", "DistributedType.MEGATRON_LM"),
        ("FSDP1, Megatron", "DistributedType.FSDP"),
    ],
)
def test_the_trl_adapter_rejects_other_ways_to_shard(feature: str, kind: str) -> None:
    assert cell(feature, 2) == "rejected"
    accelerator = SimpleNamespace(distributed_type=kind, is_fsdp2=False)
    with pytest.raises(UserError, match="must be none, DDP or FSDP with fsdp_version 2"):
        check_trainer(trl_trainer(accelerator=accelerator))


def test_the_trl_adapter_rejects_vision_models_and_tools() -> None:
    assert cell("vision models", 2) == cell("tools, multi-turn", 2) == "rejected"
    with pytest.raises(UserError, match="processing_class must be a tokenizer"):
        check_trainer(trl_trainer(_is_vlm=True))
    with pytest.raises(UserError, match="tools, rollout_func and environment_factory"):
        check_trainer(trl_trainer(tools=[print]))


def test_stages_in_verl_need_fsdp2_the_synchronous_trainer_and_no_lora() -> None:
    allowed = {need.key: need.allowed for need in STAGES_NEED}
    assert cell("DeepSpeed", 3) == "rejected: not `fsdp2`"
    assert cell("asynchronous training", 3) == cell("FSDP1, Megatron", 3) == "rejected"
    assert "EEPO's stages: rejected" in cell("LoRA", 3)
    assert allowed["actor_rollout_ref.actor.strategy"] == ("fsdp2",)
    assert allowed["trainer.v1.trainer_mode"] == ("sync",)
    assert allowed["actor_rollout_ref.model.lora_rank"] == (None, 0)


@pytest.mark.slow  # transformers imports the family
@pytest.mark.parametrize(("family", "text"), [("qwen2_vl", "qwen2_vl_text"), ("llava", "llama")])
def test_our_trainer_rejects_vision_models(family: str, text: str, tmp_path: Path) -> None:
    assert cell("vision models", 1) == "rejected at load, or text only"
    AutoConfig.for_model(family, text_config={"model_type": text}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="could not be loaded: Unrecognized configuration class"):
        load_model(ModelConfig(path=str(tmp_path)), pick_device("cpu"))
