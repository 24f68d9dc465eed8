"""A replacement for a vLLM server and its client. TRL's code around them is unchanged."""

from __future__ import annotations

from typing import Any

import torch


class Server:
    """Replaces `VLLMClient`: takes weights, samples token by token, returns log-probabilities."""

    def __init__(self, model: Any) -> None:
        self.model, self.pushes, self.requests = model, [], []
        self.generator = torch.Generator().manual_seed(0)  # separate from the trainer's

    def update_named_params(self, metadata: list[Any], named: Any) -> None:
        weights = dict(named)
        assert [name for name, _, _ in metadata] == list(weights)
        self.model.load_state_dict(weights, strict=False)
        self.pushes.append({name: weight.clone() for name, weight in weights.items()})

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], n: int, max_tokens: int, temperature: float, **_: Any
    ) -> dict[str, Any]:
        self.requests.append((n, prompts))
        ids: list[list[int]] = []
        logprobs: list[list[list[float]]] = []
        for prompt in (prompt for prompt in prompts for _ in range(n)):
            ids.append([])
            logprobs.append([])
            for _ in range(max_tokens):
                input_ids = torch.tensor([prompt + ids[-1]])
                logits = self.model(input_ids=input_ids, use_cache=False).logits[0, -1]
                scores = (logits / temperature).log_softmax(-1)
                ids[-1].append(int(scores.exp().multinomial(1, generator=self.generator)))
                logprobs[-1].append([float(scores[ids[-1][-1]])])
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logprobs}
