"""Started several times over by test_trl.py: a short EEPO run on the CPU that writes down what it did.

    python -m torch.distributed.run ... trl_processes.py MODEL_FOLDER OUT.safetensors [SETTING=JSON ...]

Sampling is greedy, so that the completions do not depend on which process draws them. With FSDP in the environment, as
`accelerate launch --config_file examples/fsdp2.yaml` puts it there, the weights are shared out.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
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
    "optim": "sgd",  # Adam would make a whole step of a rounding difference
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


class Sharded(EEPOTrainer):
    """`accelerate` shares weights out over GPUs only, though FSDP2 itself runs on the CPU. This tells it to."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True


def serve(folder: str) -> None:
    """The stand-in for a vLLM server is reached by the first process alone, as TRL has it."""
    server = runpy.run_path(str(Path(__file__).with_name("trl_server.py")))["Server"]

    def connect(generation: Any) -> None:
        if generation.accelerator.is_main_process:
            generation.vllm_client = server(
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            )

    VLLMGeneration._init_vllm = connect


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 5) for text in completions]


def main(folder: str, out: str, *settings: str) -> None:
    torch.set_num_threads(1)
    own = {
        name: json.loads(value)
        for name, _, value in (setting.partition("=") for setting in settings)
    }
    if own.get("use_vllm"):
        serve(folder)
    trainer = (Sharded if os.environ.get("ACCELERATE_USE_FSDP") == "true" else EEPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=EEPOConfig(f"{out}.run", **(SETTINGS | own)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    seen: dict[str, list[Tensor]] = {"sampled": [], "restored": []}
    gaps = [torch.zeros(())]

    def weights() -> Tensor:
        """All of them, gathered, in one row."""
        parts = [weight.detach() for weight in trainer.model.parameters()]
        return torch.cat(
            [
                (part.full_tensor() if hasattr(part, "full_tensor") else part).flatten()
                for part in parts
            ]
        )

    def watch(name: str, function: Any, before: bool) -> Any:
        def watched(prompts: list[Any]) -> Any:
            if before:
                seen[name].append(weights())
            rows = function(prompts)
            if not before:
                seen[name].append(weights())
            return rows

        return watched

    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        output = score(inputs)
        if "sampling_per_token_logps" in output:
            gaps.append(
                (output["sampling_per_token_logps"] - output["old_per_token_logps"]).abs().max()
            )
        return output

    trainer._generate_and_score_completions = scored
    trainer._sample = watch("sampled", trainer._sample, before=True)
    trainer._generate = watch("restored", trainer._generate, before=False)
    trainer.train()
    found = {name: torch.stack(rows) for name, rows in seen.items()}
    found |= {
        "end": weights(),
        "gap": trainer.accelerator.gather(torch.stack(gaps)).max(),
        "gate_history": torch.tensor(trainer.gate_history, dtype=torch.float64),
    }
    sharded = isinstance(next(trainer.model.parameters()), torch.distributed.tensor.DTensor)
    if trainer.accelerator.is_main_process:
        save_file(
            found,
            out,
            {"processes": str(trainer.accelerator.num_processes), "sharded": str(sharded)},
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
