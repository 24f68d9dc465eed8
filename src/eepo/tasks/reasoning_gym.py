"""Uses the generators of reasoning-gym as a task with endless problems.

Each problem is a pure function of its position. Positions are grouped into chunks, and each chunk
has its own seed, because some generators prepare all entries at once or have a limited number of
them. Evaluation uses other seeds, and its problems never occur in training.
"""

from __future__ import annotations

import json
import random
from functools import cached_property, lru_cache
from typing import Any

from eepo.config import ReasoningGymConfig
from eepo.rewards import gym_datasets
from eepo.tasks.templates import render
from eepo.types import Demonstration, Prompt, UserError

CHUNK_SIZE = 500  # entries that share a seed
MAX_DRAWS = 100  # entries tried for one position before the data set counts as too small


class ReasoningGym:
    """Draws problems from one data set of reasoning-gym."""

    def __init__(self, config: ReasoningGymConfig, tokenizer: Any, order_seed: int = 0) -> None:
        """`order_seed` is the seed of the run. It selects the training problems only."""
        gym_datasets.check_allowed(config.dataset)
        gym_datasets.import_package()
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
        prompts = [
            self._prompt(f"evaluation/{index}", entry)
            for index, entry in enumerate(self._evaluation_entries)
        ]
        return {self.config.dataset: prompts}

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        """Return prompts with the boxed answer. The data sets have no worked solutions."""
        demonstrations = []
        for position in range(first, first + count):
            entry = self._draw("demonstration", position, self._held_out)
            prompt = self._prompt(f"demonstration/{position}", entry)
            demonstrations.append(Demonstration(prompt, f"\\boxed{{{entry['answer']}}}"))
        return demonstrations

    def _prompt(self, name: str, entry: dict[str, Any]) -> Prompt:
        text, token_ids = render(entry["question"], self.config.template, self.tokenizer)
        return Prompt(
            id=f"reasoning_gym/{self.config.dataset}/{name}",
            text=text,
            token_ids=token_ids,
            answer={"dataset": self.config.dataset, "entry": entry},
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
        """Return the entry at a position of a split.

        If its question is excluded, or its answer is empty and thus impossible to give, return a
        substitute. Each position has its own sequence of substitutes.
        """
        dataset, seed = self.config.dataset, f"{self.config.seed}/{split}"
        entry = _entry(dataset, f"{seed}/{position // CHUNK_SIZE}", position % CHUNK_SIZE)
        for index in range(MAX_DRAWS):
            if entry["question"] not in excluded and entry["answer"].strip():
                return entry
            entry = _entry(dataset, f"{seed}/substitutes/{position}", index)
        raise UserError(
            f'task.dataset = "{dataset}" has too few different problems for task.num_evaluation = '
            f"{self.config.num_evaluation}; lower task.num_evaluation"
        )


def _entry(dataset: str, seed: str, index: int) -> dict[str, Any]:
    """Return an entry as JSON stores it, because a grading process receives it as JSON.

    Tuples become lists, and fractions become text.
    """
    entry = gym_datasets.read_entry(_open_chunk(dataset, seed), index)
    return json.loads(json.dumps(entry, default=str))


@lru_cache(maxsize=8)  # evaluation, training and substitutes are read alternately
def _open_chunk(dataset: str, seed: str) -> Any:
    return gym_datasets.open_dataset(dataset, CHUNK_SIZE, random.Random(seed).getrandbits(31))
