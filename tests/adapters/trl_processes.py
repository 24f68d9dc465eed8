"""A short EEPO run on the CPU that saves what it did. test_trl_processes.py starts it.

    python -m torch.distributed.run ... trl_processes.py MODEL_FOLDER OUT [SETTING=JSON ...]

Sampling is greedy, so that completions do not depend on the process that samples them. If the
environment asks for FSDP, as after `accelerate launch --config_file examples/fsdp2.yaml`, the
weights are sharded.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_generation import VLLMGeneration

from eepo.adapters.trl import EEPOConfig, EEPOTrainer

PROMPTS = ["3 5 7 9 = 24 :", "1 2 6 8 = 40 :", "4 4 10 11 = 33 :", "2 3 12 5 = 51 :"]
SETTINGS = {
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "optim": "sgd",  # Adam would turn a rounding difference into a whole step
    "gate_threshold": 1.0,
    "unlearn_lr": 0.03,
    "generation_kwargs": {"do_sample": False},
    "shuffle_dataset": False,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 1,
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}


class ShardedTrainer(EEPOTrainer):
    """Makes `accelerate` use FSDP2 on the CPU. By default it shards weights only on GPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True


def use_fake_server(folder: str) -> None:
    """Replace the vLLM server. As in TRL, only the first process talks to it."""
    server = runpy.run_path(str(Path(__file__).with_name("trl_server.py")))["Server"]

    def connect(generation: Any) -> None:
        if generation.accelerator.is_main_process:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            generation.vllm_client = server(model)

    VLLMGeneration._init_vllm = connect


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 5) for text in completions]


def main(folder: str, out: str, *settings: str) -> None:
    torch.set_num_threads(1)
    pairs = [setting.split("=", 1) for setting in settings]
    overrides = {name: json.loads(value) for name, value in pairs}
    if overrides.get("use_vllm"):
        use_fake_server(folder)
    trainer = (ShardedTrainer if os.environ.get("ACCELERATE_USE_FSDP") == "true" else EEPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=EEPOConfig(f"{out}.run", **(SETTINGS | overrides)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    # Weights before each stage is sampled, and after each rollout.
    recorded: dict[str, list[Tensor]] = {"sampled": [], "restored": []}
    gaps = [torch.zeros(())]

    def weights() -> Tensor:
        """Gather all weights into one flat tensor."""
        parts = [weight.detach() for weight in trainer.model.parameters()]
        full = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
        return torch.cat([part.flatten() for part in full])

    def record_weights(name: str, function: Any, before: bool) -> Any:
        def wrapped(prompts: list[Any]) -> Any:
            if before:
                recorded[name].append(weights())
            rows = function(prompts)
            if not before:
                recorded[name].append(weights())
            return rows

        return wrapped

    score = trainer._generate_and_score_completions

    def record_gap(inputs: Any) -> Any:
        output = score(inputs)
        if "sampling_per_token_logps" in output:
            gap = output["sampling_per_token_logps"] - output["old_per_token_logps"]
            gaps.append(gap.abs().max())
        return output

    trainer._generate_and_score_completions = record_gap
    trainer._sample_stage = record_weights("sampled", trainer._sample_stage, before=True)
    trainer._generate = record_weights("restored", trainer._generate, before=False)
    trainer.train()
    search = torch.tensor(list(asdict(trainer.unlearner.lr_search).values()), dtype=torch.float64)
    searches = trainer.accelerator.gather(search).view(-1, len(search))
    assert (searches == search).all(), f"the processes disagree: {searches}"
    result = {name: torch.stack(rows) for name, rows in recorded.items()}
    result |= {
        "end": weights(),
        "gap": trainer.accelerator.gather(torch.stack(gaps)).max(),
        "lr": search[0],
        "gate_history": torch.tensor(trainer.unlearner.gate.history, dtype=torch.float64),
    }
    sharded = isinstance(next(trainer.model.parameters()), torch.distributed.tensor.DTensor)
    if trainer.accelerator.is_main_process:
        processes = str(trainer.accelerator.num_processes)
        save_file(result, out, {"processes": processes, "sharded": str(sharded)})


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without this, a process sometimes aborts in torch's threads at its end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
