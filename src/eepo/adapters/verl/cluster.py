"""The GPUs of a verl run, and the checks that work divides evenly among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eepo.config import RunConfig
from eepo.evaluation.options import option
from eepo.types import UserError


@dataclass(frozen=True)
class Cluster:
    """The machines of a run, and how many GPUs serve one copy of the model while sampling."""

    gpus: int = option(8, min=1, help="GPUs of each machine.")
    nodes: int = option(1, min=1, help="Machines.")
    tensor_parallel: int = option(1, min=1, help="GPUs of each rollout server.")

    @property
    def num_gpus(self) -> int:
        return self.gpus * self.nodes

    def settings(self) -> Iterator[tuple[str, object]]:
        """Yield verl's keys and their values."""
        yield "trainer.n_gpus_per_node", self.gpus
        yield "trainer.nnodes", self.nodes
        yield "actor_rollout_ref.rollout.tensor_model_parallel_size", self.tensor_parallel

    def check(self, config: RunConfig) -> None:
        """Raise an error if servers or completions cannot be divided among the GPUs."""
        if self.gpus % self.tensor_parallel:
            raise UserError(
                f"--gpus {self.gpus} must be a multiple of --tensor-parallel "
                f"{self.tensor_parallel}: a rollout server uses GPUs of one machine"
            )
        prompts, group = config.training.prompts_per_mini_batch, config.algorithm.group_size
        if prompts * group % self.num_gpus:
            raise UserError(
                f"training.prompts_per_mini_batch × algorithm.group_size = {prompts} × {group} = "
                f"{prompts * group} must be a multiple of --gpus × --nodes = {self.num_gpus}"
            )

    def check_heads(self, num_heads: int) -> None:
        """Raise an error if the model's attention heads cannot be divided among the GPUs."""
        if num_heads % self.tensor_parallel:
            raise UserError(
                f"--tensor-parallel {self.tensor_parallel} must divide the model's {num_heads} "
                "attention heads"
            )
