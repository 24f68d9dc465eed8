"""Tests EEPO in TRL's trainer with an fp32 adapter on a frozen base in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")
peft = pytest.importorskip("peft", reason="needs the extra: pip install 'eepo[lora]'")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

EEPO = {"gate": "always", "credit": "full", "saturation": "exact", "unlearn_kl_target": 1e-2}


@pytest.mark.slow
def test_an_adapter_on_a_bf16_base_is_unlearned_and_the_base_stays(
    build: Callable[..., Any], sharp_model: Callable[[], Any]
) -> None:
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    trainer = build(model=sharp_model().bfloat16(), peft_config=lora, bf16=True, **EEPO)
    dtypes = {(weight.requires_grad, weight.dtype) for weight in trainer.model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    named = trainer.model.named_parameters()
    base = {name: weight.clone() for name, weight in named if not weight.requires_grad}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in base.items())
    kls = [row["eepo/kl"] for row in trainer.state.log_history if "eepo/kl" in row]
    assert len(kls) == 3
    assert all(3e-3 < kl < 3e-2 for kl in kls)  # bf16 is too coarse here for a closer match
