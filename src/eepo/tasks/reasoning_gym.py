"""reasoning-gym's generators as a task: endless problems, each a pure function of its position.

A position belongs to a chunk, and a chunk has a seed of its own: some generators prepare all their entries at once, or
know only so many. Evaluation has other seeds, and what it asks is never asked in training.
"""

from __future__ import annotations

import json
import random
from functools import cached_property, lru_cache
from typing import Any

from eepo.config import ReasoningGymConfig
from eepo.rewards import gym_datasets
from eepo.tasks.templates import render
from eepo.types import Prompt, UserError

CHUNK = 500  # entries behind one seed
MAX_DRAWS = 100  # entries tried for one place before the data set is called too small


class ReasoningGym:
    def __init__(self, config: ReasoningGymConfig, tokenizer: Any, order_seed: int = 0) -> None:
        """`order_seed` is the run's: which problems come. Evaluation never moves."""
        gym_datasets.check(config.dataset)
        gym_datasets.package()
        self.config = config
        self.tokenizer = tokenizer
        self.order_seed = order_seed

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        prompts = []
        for position in range(first, first + count):
            entry = self._draw(f"train/{self.order_seed}", position, self._held_out)
            prompts.append(self._prompt(f"train/{self.order_seed}/{position}", entry))
        return prompts

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        entries = self._evaluation_entries
        return {
            self.config.dataset: [
                self._prompt(f"evaluation/{index}", entry) for index, entry in enumerate(entries)
            ]
        }

    def demonstrations(self, first: int, count: int) -> list[tuple[Prompt, str]]:
        """There are no solutions to show, only answers."""
        pairs = []
        for position in range(first, first + count):
            entry = self._draw("demonstration", position, self._held_out)
            pairs.append(
                (self._prompt(f"demonstration/{position}", entry), f"\\boxed{{{entry['answer']}}}")
            )
        return pairs

    def _prompt(self, name: str, entry: dict[str, Any]) -> Prompt:
        text, token_ids = render(entry["question"], self.config.template, self.tokenizer)
        answer = {"dataset": self.config.dataset, "entry": entry}
        return Prompt(
            id=f"reasoning_gym/{self.config.dataset}/{name}",
            text=text,
            token_ids=token_ids,
            answer=answer,
        )

    @cached_property
    def _evaluation_entries(self) -> list[dict[str, Any]]:
        seen: set[str] = set()
        entries = []
        for index in range(self.config.num_evaluation):
            entries.append(self._draw("evaluation", index, seen))
            seen.add(entries[-1]["question"])
        return entries

    @cached_property
    def _held_out(self) -> set[str]:
        return {entry["question"] for entry in self._evaluation_entries}

    def _draw(self, split: str, position: int, excluded: set[str]) -> dict[str, Any]:
        """The entry at a position of a split. Where its question is excluded, or its answer is empty and so cannot be
        given, one of that position's substitutes."""
        name, seed = self.config.dataset, f"{self.config.seed}/{split}"
        entry = _entry(name, f"{seed}/{position // CHUNK}", position % CHUNK)
        for index in range(MAX_DRAWS):
            if entry["question"] not in excluded and entry["answer"].strip():
                return entry
            entry = _entry(name, f"{seed}/substitutes/{position}", index)
        raise UserError(
            f'task.dataset = "{name}" has too few different problems for task.num_evaluation = '
            f"{self.config.num_evaluation}; ask for fewer"
        )


def _entry(name: str, seed: str, index: int) -> dict[str, Any]:
    """Through JSON, as the grading process will see it: tuples are lists there, and fractions text."""
    return json.loads(json.dumps(gym_datasets.entry_at(_chunk(name, seed), index), default=str))


@lru_cache(maxsize=8)  # evaluation, training, and a substitute's between them
def _chunk(name: str, seed: str) -> Any:
    return gym_datasets.open_dataset(name, CHUNK, random.Random(seed).getrandbits(31))
