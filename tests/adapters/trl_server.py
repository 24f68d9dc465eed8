"""In place of a vLLM server and the network to it. All that TRL does with them stays TRL's own code."""

from __future__ import annotations

from typing import Any

import torch


class Server:
    """In place of `VLLMClient`: takes weights, samples from them one token at a time, tells log-probabilities."""

    def __init__(self, model: Any) -> None:
        self.model, self.pushed, self.asked = model, [], []
        self.draws = torch.Generator().manual_seed(0)  # apart from the trainer's

    def update_named_params(self, metadata: list[Any], named: Any) -> None:
        pushed = dict(named)
        assert [name for name, _, _ in metadata] == list(pushed)
        self.model.load_state_dict(pushed, strict=False)
        self.pushed.append({name: weight.clone() for name, weight in pushed.items()})

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], n: int, max_tokens: int, temperature: float, **_: Any
    ) -> dict[str, Any]:
        self.asked.append((n, prompts))
        ids: list[list[int]] = []
        logprobs: list[list[list[float]]] = []
        for prompt in (prompt for prompt in prompts for _ in range(n)):
            ids.append([])
            logprobs.append([])
            for _ in range(max_tokens):
                logits = self.model(
                    input_ids=torch.tensor([prompt + ids[-1]]), use_cache=False
                ).logits[0, -1]
                scores = (logits / temperature).log_softmax(-1)
                ids[-1].append(int(scores.exp().multinomial(1, generator=self.draws)))
                logprobs[-1].append([float(scores[ids[-1][-1]])])
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logprobs}
