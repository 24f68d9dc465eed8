"""A rollout backend for verl: one Ray actor with a plain `transformers` model.

It records every push of weights and every completion in the folder EEPO_TEST_RECORDS, so that a
test can check later what was sampled from which weights. The random numbers of a completion depend
only on its prompt, the version of the weights, and the number of earlier completions of the prompt.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

SERVER = "transformers_server_{}"


class TransformersServer:
    def __init__(self, path: str, max_new_tokens: int) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.max_new_tokens = max_new_tokens
        self.records = Path(os.environ["EEPO_TEST_RECORDS"])
        self.num_pushes = len(list(self.records.glob("push-*.safetensors")))
        self.version = -1
        self.asleep = True
        self.num_sampled: dict[tuple[int, tuple[int, ...]], int] = {}

    async def load(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.num_pushes += 1
        save_file(
            dict(self.model.named_parameters()),
            self.records / f"push-{self.num_pushes:03d}.safetensors",
        )
        self.version = version if version is not None else self.version
        self._write(event="push", push=self.num_pushes, version=version)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        assert not self.asleep, "a completion was requested while the server sleeps"
        count = self.num_sampled.get((self.version, tuple(prompt_ids)), 0)
        self.num_sampled[self.version, tuple(prompt_ids)] = count + 1
        # Python's generator gives the same numbers on every processor.
        generator = random.Random(f"{self.version} {count} {prompt_ids}")
        length = self.max_new_tokens - count % 3  # completions of different lengths
        temperature = sampling_params["temperature"] or 1.0
        ids, logprobs = self._sample(prompt_ids, length, temperature, generator)
        self._write(
            event="completion", push=self.num_pushes, prompt=prompt_ids, ids=ids, logprobs=logprobs
        )
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, extra_fields={"global_steps": self.version}
        )

    @torch.no_grad()
    def _sample(
        self, prompt: list[int], length: int, temperature: float, generator: random.Random
    ) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        while len(logprobs) < length:
            logp = (self.model(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)
            cumulative = logp.double().exp().cumsum(-1)
            ids.append(
                int(torch.searchsorted(cumulative, generator.random() * float(cumulative[-1])))
            )
            logprobs.append(float(logp[ids[-1]]))
        return ids[len(prompt) :], logprobs

    async def sleep(self) -> None:
        self.asleep = True
        self._write(event="sleep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep = False

    def _write(self, **entry: Any) -> None:
        with (self.records / "events.jsonl").open("a") as stream:
            stream.write(json.dumps(entry) + "\n")


class TransformersReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        name = SERVER.format(self.replica_rank)
        options = {"num_cpus": 0, "name": name}
        server = ray.remote(TransformersServer).options(**options)
        self._server_handle = server.remote(self.model_config.path, self.config.response_length)
        self._server_address = name
        self.servers = [self._server_handle]
        await self._server_handle.wake_up.remote()


class TransformersRollout(BaseRollout):
    """The trainer's side. All ranks gather the weights, and the first one sends them."""

    async def resume(self, tags: list[str]) -> None:
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(SERVER.format(0)).wake_up.remote(tags=tags)

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        gathered = {name: tensor.detach().clone() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(SERVER.format(0)).load.remote(gathered, global_steps)
