"""A LoRA policy against the plain model with merged weights, and errors before weights load."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor
from transformers import AutoModelForCausalLM

from eepo.algorithm.unlearning import changed_share, load_unlearned
from eepo.config import ModelConfig, RolloutConfig, RunConfig
from eepo.model import loading, lora, memory
from eepo.model.compilation import decoder_layers
from eepo.model.lora_files import LoraWeights, load_adapter, save_adapter, save_shards
from eepo.model.lora_policy import LoraPolicy
from eepo.model.policy import Policy
from eepo.rollout.engines import build_engine
from eepo.types import UserError

peft = pytest.importorskip("peft", reason="peft is not installed")
CPU = torch.device("cpu")
LORA = ModelConfig(lora_rank=4, lora_alpha=8.0)


def adapted(model: Any, config: ModelConfig = LORA, scale: float = 0.3) -> Any:
    """Add an adapter whose B is random instead of 0."""
    lora.add_adapter(model, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, weight in lora.adapter_weights(model).items():
        if "lora_B" in name:
            weight.data = scale * torch.randn(weight.shape, generator=generator)
    return model


def logprobs(policy: Policy, pairs: Any, weights: Any = None) -> Tensor:
    [batch] = policy.micro_batches(pairs)
    with torch.no_grad():
        return policy.score(batch, 1.0, weights).logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_merged_weights_are_the_same_function_as_base_plus_adapter(
    family: str, new_model: Callable[..., Any], ragged_pairs: Any
) -> None:
    plain = new_model(family)
    policy, pairs = LoraPolicy(adapted(copy.deepcopy(plain))), ragged_pairs(6)
    with torch.no_grad():
        for name, weight in policy.named_weights():
            dict(plain.named_parameters())[name].copy_(weight)
    torch.testing.assert_close(logprobs(policy, pairs), logprobs(Policy(plain), pairs))
    merged = dict(policy.named_weights())
    torch.testing.assert_close(logprobs(policy, pairs, merged), logprobs(policy, pairs))
    doubled = dict(policy.named_weights((n, 2 * w) for n, w in policy.trained_weights()))
    assert (logprobs(policy, pairs, doubled) - logprobs(policy, pairs)).abs().max() > 0.01


def test_a_new_adapter_changes_nothing_and_is_the_only_trained_part(demo_copy: Any) -> None:
    before = {name: weight.clone() for name, weight in demo_copy.named_parameters()}
    lora.add_adapter(demo_copy, LORA, seed=0)
    policy = LoraPolicy(demo_copy)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_weights())
    assert {name for name, _ in policy.named_weights()} == set(before)
    trained = dict(policy.trained_weights())
    shape = lora.with_adapter(memory.shape_of(*loading.load_shape(LORA)), LORA)
    assert shape.num_adapter_parameters == sum(weight.numel() for weight in trained.values())
    assert shape.num_outside_layers == before["model.embed_tokens.weight"].numel() + 128
    assert all(
        "lora_" in name and weight.dtype == torch.float32 for name, weight in trained.items()
    )


def test_the_seed_alone_determines_a_new_adapter(demo_model: Any, fingerprint: Any) -> None:
    def new_adapter(seed: int) -> str:
        torch.rand(1)  # the global state does not matter
        model = copy.deepcopy(demo_model)
        lora.add_adapter(model, LORA, seed)
        return fingerprint(dict(LoraPolicy(model).trained_weights()))

    assert new_adapter(0) == new_adapter(0) != new_adapter(1)


def test_the_reference_is_the_base_at_no_memory(
    new_model: Callable[..., Any], ragged_pairs: Any
) -> None:
    plain, pairs = new_model("llama"), ragged_pairs(6)
    policy = LoraPolicy(adapted(copy.deepcopy(plain)))
    reference = policy.reference()
    assert reference.model is policy.model
    changed = logprobs(policy, pairs)
    assert torch.equal(logprobs(reference, pairs), logprobs(Policy(plain), pairs))
    assert torch.equal(logprobs(policy, pairs), changed)  # the adapter is on again
    assert (logprobs(reference, pairs) - changed).abs().max() > 0.01


def test_a_frozen_head_gets_no_gradient_and_adapters_get_the_same_as_by_autograd(
    new_model: Callable[..., Any], ragged_pairs: Any, plain_scores: Any
) -> None:
    model, pairs = adapted(new_model("llama")), ragged_pairs(4)
    policy = LoraPolicy(model)
    gradient = policy.gradient(pairs, 1.0, lambda batch, scores: -scores.logprobs.sum())
    assert set(gradient) == set(lora.adapter_weights(model))
    sum(-plain_scores(model, *pair).logprobs.sum() for pair in pairs).backward()
    for name, weight in lora.adapter_weights(model).items():
        torch.testing.assert_close(gradient[name], weight.grad, atol=1e-4, rtol=1e-4)
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("merges", [True, False])
def test_unlearning_moves_the_adapter_in_the_engine_and_never_the_policy(
    merges: bool, demo_model: Any, tokenizer: Any, ragged_pairs: Any, fingerprint: Any
) -> None:
    model, rollout = copy.deepcopy(demo_model), RolloutConfig(merge_lora=merges)
    if not merges:
        adapted(model)
    engine = build_engine(model, tokenizer, rollout, LORA)
    if merges:
        adapted(model)
    policy, pairs = LoraPolicy(model, merges=merges), ragged_pairs(6)
    engine.load_weights(policy.named_weights())
    before = fingerprint(dict(model.named_parameters()))
    torch.testing.assert_close(logprobs(policy, pairs, engine.weights()), logprobs(policy, pairs))
    gradient = policy.gradient(pairs, 1.0, lambda batch, scores: scores.logprobs.sum())
    weights = load_unlearned(engine, policy, gradient, 1e-2)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in lora.adapter_weights(moved).items():
            weight -= 1e-2 * gradient[name]
    expected = logprobs(LoraPolicy(moved), pairs)
    torch.testing.assert_close(logprobs(policy, pairs, weights), expected)
    assert (expected - logprobs(policy, pairs)).abs().max() > 1e-3
    assert changed_share(policy.named_weights(), weights) > 0.9
    assert fingerprint(dict(model.named_parameters())) == before


def test_an_engine_shares_all_base_matrices_or_only_those_outside_the_layers(
    demo_model: Any, tokenizer: Any
) -> None:
    def shared(merges: bool) -> set[str]:
        model, rollout = copy.deepcopy(demo_model), RolloutConfig(merge_lora=merges)
        if not merges:
            lora.add_adapter(model, LORA, 0)
        engine: Any = build_engine(model, tokenizer, rollout, LORA)
        own = dict(model.named_parameters())
        return {n for n, w in engine.weights().items() if w.data_ptr() == own[n].data_ptr()}

    assert shared(True) == {"model.embed_tokens.weight"}
    assert len(shared(False)) == 1 + 4 * 7  # seven matrices in each of four layers
    assert not any("lora_" in name or "norm" in name for name in shared(False))


def test_a_bf16_base_keeps_a_fp32_adapter_and_scores_like_the_fp32_base(
    new_model: Callable[..., Any], ragged_pairs: Any
) -> None:
    plain, pairs = new_model("qwen3"), ragged_pairs(6)
    exact = LoraPolicy(adapted(copy.deepcopy(plain)))
    policy = LoraPolicy(adapted(plain.bfloat16()), 16384, 4096, torch.bfloat16)
    dtypes = {name: weight.dtype for name, weight in policy.model.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.base_layer.weight"] == torch.bfloat16
    assert dtypes["model.norm.weight"] == torch.float32
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    gap = (logprobs(policy, pairs) - logprobs(exact, pairs)).abs().mean()
    assert gap < 0.1
    reference = policy.reference()
    assert (logprobs(reference, pairs) - logprobs(policy, pairs)).abs().mean() > 5 * gap


def test_gradient_checkpointing_gives_the_same_gradient(
    new_model: Callable[..., Any], ragged_pairs: Any
) -> None:
    def gradient(checkpointing: bool) -> dict[str, Tensor]:
        model = adapted(new_model("llama"))
        if checkpointing:
            options = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.train()
        policy = LoraPolicy(model)
        return policy.gradient(ragged_pairs(4), 1.0, lambda b, s: s.logprobs.sum())

    torch.testing.assert_close(gradient(True), gradient(False))


@pytest.mark.slow
def test_a_compiled_layer_scores_alike_without_graph_breaks(
    new_model: Callable[..., Any], ragged_pairs: Any
) -> None:
    """A graph break in every layer would make compiled layers slower than uncompiled ones."""
    model, pairs = adapted(new_model("llama").bfloat16()), ragged_pairs(4)
    policy = LoraPolicy(model, 16384, 4096, torch.bfloat16)

    def results() -> list[Tensor]:
        merged = dict(policy.named_weights())
        scores = [logprobs(policy, pairs), logprobs(policy, pairs, merged)]
        gradient = policy.gradient(pairs, 1.0, lambda batch, scores: scores.logprobs.sum())
        return [*scores, logprobs(policy.reference(), pairs), *gradient.values()]

    expected = results()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decoder_layers(model)[0].compile(dynamic=True, backend="aot_eager")
    torch.testing.assert_close(results(), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_peft_and_transformers_read_what_is_saved(
    new_model: Callable[..., Any], ragged_pairs: Any, tmp_path: Path
) -> None:
    base, pairs = tmp_path / "base", ragged_pairs(4)
    new_model("llama").save_pretrained(base)
    config = dataclasses.replace(LORA, path=str(base))
    policy = LoraPolicy(adapted(loading.load_model(config, CPU), config))
    LoraWeights(policy).save_final(tmp_path / "final")
    expected = logprobs(policy, pairs)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.testing.assert_close(logprobs(Policy(merged), pairs), expected)
    plain = AutoModelForCausalLM.from_pretrained(base)
    by_peft = peft.PeftModel.from_pretrained(plain, tmp_path / "final" / "adapter")
    by_peft = by_peft.merge_and_unload()
    torch.testing.assert_close(logprobs(Policy(by_peft), pairs), expected)
    # A checkpoint is an adapter folder, and so is `model.path`.
    LoraWeights(policy).save(tmp_path / "checkpoint")
    path = ModelConfig(path=str(tmp_path / "checkpoint"))
    torch.testing.assert_close(logprobs(Policy(loading.load_model(path, CPU)), pairs), expected)
    assert loading.load_shape(path)[1] == sum(weight.numel() for weight in merged.parameters())


def test_the_merged_model_of_a_bf16_base_is_saved_and_loaded_in_fp32(
    new_model: Callable[..., Any], tmp_path: Path
) -> None:
    """In bf16, a small adapter would be rounded away."""
    new_model("llama").bfloat16().save_pretrained(tmp_path / "base")
    config = dataclasses.replace(LORA, path=str(tmp_path / "base"))
    base = loading.load_model(config, CPU, torch.bfloat16)
    policy = LoraPolicy(adapted(base, config, scale=1e-5), 64, 64, torch.bfloat16)
    LoraWeights(policy).save_final(tmp_path / "final")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "final").named_parameters())
    for name, weight in policy.merged_weights():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], weight.float())


def test_an_adapter_is_restored_bit_for_bit(demo_model: Any, tmp_path: Path) -> None:
    model, other = adapted(copy.deepcopy(demo_model)), copy.deepcopy(demo_model)
    save_adapter(model, tmp_path)
    lora.add_adapter(other, LORA, seed=7)
    load_adapter(other, tmp_path)
    for name, weight in lora.adapter_weights(model).items():
        assert torch.equal(weight, lora.adapter_weights(other)[name])


def test_large_models_are_saved_in_several_files(
    new_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eepo.model.lora_files.SHARD_BYTES", 20_000)
    model = new_model("llama")
    model.config.save_pretrained(tmp_path)
    save_shards(tmp_path, ((name, weight.detach()) for name, weight in model.named_parameters()))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not list(tmp_path.glob("shard-*"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in model.named_parameters())


# --- errors ---------------------------------------------------------------------------------------


def check(tmp_path: Path, model: ModelConfig, **rollout: Any) -> None:
    lora.check(RunConfig(model=model, rollout=RolloutConfig(**rollout)), CPU)


def test_targets_must_be_linear_layers_of_the_decoder(tmp_path: Path) -> None:
    for name, reason in [
        ("lm_head", "is tied to the embedding"),
        ("embed_tokens", "is not a linear layer inside the decoder layers"),
        ("c_attn", "is no linear layer of the model"),
    ]:
        message = rf'^model.lora_targets: "{name}" {reason}; allowed: q_proj, .*down_proj$'
        with pytest.raises(UserError, match=message):
            check(tmp_path, dataclasses.replace(LORA, lora_targets=(name,)))
    check(tmp_path, dataclasses.replace(LORA, lora_targets=("q_proj", "v_proj")))


def test_targets_that_share_a_weight_are_one_line(
    new_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model("llama")
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    monkeypatch.setattr(loading, "meta_model", lambda config: model)
    message = r"layers.1.mlp.up_proj is tied to model.layers.0.mlp.up_proj; allowed: layers that"
    with pytest.raises(UserError, match=message):
        check(tmp_path, LORA)
    check(tmp_path, dataclasses.replace(LORA, lora_targets=("q_proj",)))


def test_an_architecture_without_known_targets_is_one_line(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_embd=32, n_head=2, n_layer=2, architectures=["GPT2LMHeadModel"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(UserError, match="GPT2LMHeadModel has no linear layers with known n"):
        check(tmp_path, dataclasses.replace(LORA, path=str(tmp_path)))


def test_a_quantized_base_is_one_line(new_model: Callable[..., Any], tmp_path: Path) -> None:
    new_model("llama").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    with pytest.raises(UserError, match=r"is quantized \(gptq\); LoRA needs .* not quantized$"):
        check(tmp_path, dataclasses.replace(LORA, path=str(tmp_path)))


def test_sharing_the_base_needs_the_builtin_engine_and_one_dtype(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r'^rollout.merge_lora = false with rollout.engine = "vllm"'
    ):
        check(tmp_path, LORA, merge_lora=False, engine="vllm")
    with pytest.raises(UserError, match=r"rollouts are in bfloat16 .* and training in float32"):
        check(tmp_path, LORA, merge_lora=False, dtype="bfloat16")
    check(tmp_path, LORA, merge_lora=True, dtype="bfloat16")


def test_a_missing_peft_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^model.lora_rank = 4: peft is not installed; pip install"
    ):
        check(tmp_path, LORA)


def test_an_adapter_folder_without_a_base_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    with pytest.raises(UserError, match=r"base_model_name_or_path = None; allowed"):
        loading.load_shape(ModelConfig(path=str(tmp_path)))
