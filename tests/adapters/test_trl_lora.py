"""Tests EEPO in TRL's trainer with LoRA adapters, with and without a KL penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="needs the extra: pip install 'eepo[trl]'")
peft = pytest.importorskip("peft", reason="needs the extra: pip install 'eepo[lora]'")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

Build = Callable[..., Any]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def adapter(trainer: Any, name: str = "default") -> dict[str, Tensor]:
    named = trainer.model.named_parameters()
    return {key: weight.detach().clone() for key, weight in named if f".{name}." in key}


def record_outputs(trainer: Any) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    score = trainer._generate_and_score_completions

    def record(inputs: Any) -> Any:
        outputs.append(score(inputs))
        return outputs[-1]

    trainer._generate_and_score_completions = record
    return outputs


def logprobs(model: Any, output: dict[str, Any]) -> Tensor:
    """Score completions with a plain model, from full logits."""
    prompts, completions = output["prompt_ids"], output["completion_ids"]
    ids = torch.cat([prompts, completions], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    width = completions.shape[1]
    scored = logits[:, -width - 1 : -1].log_softmax(-1)
    return scored.gather(2, completions.unsqueeze(2)).squeeze(2) * output["completion_mask"]


@pytest.mark.parametrize("credit", ["importance", "full"])
def test_a_new_adapter_is_held_near_the_base_model(
    build: Build, sharp_model: Callable[[], Any], credit: str
) -> None:
    settings = {"beta": 0.1, "credit": credit, "gate": "always", "unlearn_kl_target": 1e-2}
    trainer = build(peft_config=peft.LoraConfig(**LORA), learning_rate=1e-2, **settings)
    outputs = record_outputs(trainer)
    trainer.train()
    for output in outputs:
        expected, mask = logprobs(sharp_model(), output), output["completion_mask"]
        reference = output["ref_per_token_logps"] * mask
        torch.testing.assert_close(reference, expected, atol=1e-3, rtol=1e-3)
        # The denominators are not those of the reference.
        old = output["old_per_token_logps"]
        assert (old - expected).abs().max() > 1e-2 or output is outputs[0]
    log = trainer.state.log_history[-2]
    assert log["eepo/kl"] > 1e-4
    assert any(weight.any() for name, weight in adapter(trainer).items() if "lora_B" in name)


def test_unlearning_moves_the_adapter_only_and_restores_it(build: Build, fingerprint: Any) -> None:
    trainer = build(peft_config=peft.LoraConfig(**LORA), gate="always", unlearn_kl_target=1e-2)
    base = {n: w.clone() for n, w in trainer.model.named_parameters() if "lora_" not in n}
    stages: list[str] = []
    sample, generate = trainer._sample_stage, trainer._generate

    def record_stage(prompts: list[Any]) -> Any:
        stages.append(fingerprint(adapter(trainer)))
        return sample(prompts)

    def check(prompts: list[Any]) -> Any:
        before = fingerprint(adapter(trainer))
        rows = generate(prompts)
        assert fingerprint(adapter(trainer)) == before
        return rows

    trainer._sample_stage, trainer._generate = record_stage, check
    trainer.train()
    assert all(first != second for first, second in zip(stages[0::2], stages[1::2], strict=True))
    assert all(torch.equal(dict(trainer.model.named_parameters())[n], w) for n, w in base.items())


def test_a_pretrained_adapter_is_held_near_its_first_state(
    build: Build, sharp_model: Callable[[], Any]
) -> None:
    def pretrained() -> Any:
        torch.manual_seed(0)
        model = peft.get_peft_model(sharp_model(), peft.LoraConfig(**LORA))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data = 0.2 * torch.randn(weight.shape)
        return model

    trainer = build(
        model=pretrained(), beta=0.1, gate="always", unlearn_kl_target=1e-2, learning_rate=1e-2
    )
    outputs, first = record_outputs(trainer), adapter(trainer, "ref")
    assert first
    trainer.train()
    trained = {name for name in trainer.unlearner.weights() if "lora_" in name}
    assert trained
    assert not any(".ref." in name for name in trained)
    assert all(torch.equal(weight, first[name]) for name, weight in adapter(trainer, "ref").items())
    expected = logprobs(pretrained(), outputs[-1])
    reference = outputs[-1]["ref_per_token_logps"] * outputs[-1]["completion_mask"]
    torch.testing.assert_close(reference, expected, atol=1e-3, rtol=1e-3)


def test_a_plain_model_is_never_in_a_reference_pass(sharp_model: Callable[[], Any]) -> None:
    """Models of `transformers` have methods that are named like the switches of an adapter."""
    from eepo.adapters.trl.reference_pass import is_reference_pass

    model = sharp_model()
    assert not is_reference_pass(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    assert not is_reference_pass(adapted)
    with adapted.disable_adapter():
        assert is_reference_pass(adapted)
