"""A policy that trains a LoRA adapter on frozen base weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from eepo.model.batching import MicroBatch
from eepo.model.lora import ADAPTER, BASE_LAYER, adapter_weights
from eepo.model.policy import Policy, Scores


class LoraPolicy(Policy):
    """Scores with base weights plus adapter. `model` has an adapter (`lora.add_adapter`).

    With `merges`, `named_weights` are those of the model without adapter layers: the adapter is
    merged in fp32. Otherwise they are the model's own, for an engine that has the same adapter
    layers and shares the base weights.
    """

    def __init__(self, model: Any, *args: Any, merges: bool = True) -> None:
        self.merges = merges
        self.uses_adapter = True  # False: the policy before training
        super().__init__(model, *args)
        self._layers = _adapter_layers(model)

    def _set_dtypes(self, model: Any) -> Any:
        """Keep the base matrices as they were loaded; norms and biases are fp32."""
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.data = weight.data.float()
        return model

    def reference(self) -> LoraPolicy:
        """Return the policy before training: the same model with the adapter turned off."""
        reference = copy.copy(self)
        reference.uses_adapter = False
        return reference

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's weights, detached."""
        for name, weight in adapter_weights(self.model).items():
            yield name, weight.detach()

    def named_weights(
        self, trained: Iterable[tuple[str, Tensor]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight of the rollout model once, with `trained` in place of the adapter."""
        if self.merges:
            yield from self.merged_weights(trained)
            return
        adapter = {} if trained is None else dict(trained)
        for name, weight in self.model.named_parameters():
            yield name, adapter.get(name, weight.detach())

    def merged_weights(
        self, trained: Iterable[tuple[str, Tensor]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a model without adapter layers, merged in fp32."""
        adapter = dict(self.trained_weights() if trained is None else trained)
        for name, weight in self.model.named_parameters():
            if name not in adapter:
                yield _plain_name(name), self._merged(name, weight.detach(), adapter)

    def _merged(self, name: str, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        prefix, _, suffix = name.partition(f".{BASE_LAYER}.")
        if suffix != "weight":  # no target layer, or its bias
            return weight
        left, right = (
            adapter[f"{prefix}.{part}.{ADAPTER}.weight"] for part in ("lora_B", "lora_A")
        )
        return weight.float().addmm(left, right, alpha=self._layers[prefix].scaling[ADAPTER])

    def score(
        self,
        batch: MicroBatch,
        temperature: float,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Scores:
        """Score `batch` under θ, or under the `weights` of a rollout model."""
        if weights is None or not self.merges:
            with self._adapter(self.uses_adapter):
                return super().score(batch, temperature, weights)
        names = {_plain_name(name): name for name, _ in self.model.named_parameters()}
        with self._adapter(False):
            replaced = {names[name]: weight for name, weight in weights.items()}
            return super().score(batch, temperature, replaced)

    @contextmanager
    def _adapter(self, enabled: bool) -> Iterator[None]:
        """Turn the adapter on or off inside the block.

        peft's own switch would also change which weights are trained.
        """
        if enabled:
            yield
            return
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False


def _adapter_layers(model: Any) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)}


def _plain_name(name: str) -> str:
    """Return the name that a weight has without adapter layers."""
    return name.replace(f".{BASE_LAYER}.", ".")
