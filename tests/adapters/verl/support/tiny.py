"""A tiny verl run: a byte-level model, prompts in a Parquet file, a reward and a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pandas
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
NUM_PROMPTS = 12


def write_model(folder: Path) -> None:
    """Write a model with 40,000 weights, high entropy, and a head tied to the embedding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|im_start|>", "<|im_end|>", "<|pad|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, **special
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=vocabulary["<|im_end|>"],
        pad_token_id=vocabulary["<|pad|>"],
    )
    # numpy gives the same weights on every processor.
    model, generator = Qwen2ForCausalLM(config), numpy.random.default_rng(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.copy_(torch.from_numpy(generator.normal(0, 0.3, weight.shape)))
    model.save_pretrained(folder)


def write_prompts(path: Path) -> None:
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"say {chr(97 + i) * (1 + i % 4)}"}],
            "reward_model": {"style": "rule", "ground_truth": chr(97 + i)},
            "extra_info": {"index": i},
        }
        for i in range(NUM_PROMPTS)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Return a reward that differs between completions."""
    return float(sum(map(ord, solution_str)) % 2)


def command_line(model: Path, prompts: Path, out: Path, num_steps: int) -> list[str]:
    """Return overrides of verl's `ppo_trainer`: 2 FSDP2 ranks in fp32, 3 prompts, 4 completions."""
    return [
        *cpu_settings(),
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=3",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "data.shuffle=false",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.optim.optimizer=Adam",
        "+actor_rollout_ref.actor.optim.override_optimizer_config.eps=0.01",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "algorithm.rollout_correction.bypass_mode=true",
        f"reward.custom_reward_function.path={__file__}",
        "trainer.n_gpus_per_node=2",
        "trainer.val_before_train=false",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.default_local_dir={out}/checkpoints",
        f"trainer.rollout_data_dir={out}/rollouts",
        "trainer.save_freq=1",
        f"hydra.run.dir={out}/hydra",
    ]


def cpu_settings() -> list[str]:
    """Return the settings that a run on the CPU needs: rollouts by `transformers`, all in fp32."""
    return [
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.policy_loss.loss_mode=recording",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
        "actor_rollout_ref.rollout.name=transformers",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "+ray_kwargs.ray_init.num_gpus=2",
        "+ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=false",
    ]
