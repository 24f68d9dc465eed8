"""Generates sums: some solved examples, then one sum to solve.

A small pretrained model solves some of them, so there is reward to learn from. Every sum is a pure
function of (seed, split, index). The number of digits of each term is drawn first, so that short
terms are as frequent as long ones. Terms with one digit more than in training are evaluated only.
All prompts show the same examples. Neither the examples nor the evaluation problems occur in
training, in any order of their terms.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import Any

from eepo.config import SumsConfig
from eepo.tasks.order import training_names
from eepo.types import Demonstration, Prompt, UserError

Terms = tuple[int, ...]
MAX_DRAWS = 10_000  # draws for one sum before the range counts as too small


class Sums:
    """Generates sums as prompts."""

    def __init__(self, config: SumsConfig, tokenizer: Any, order_seed: int = 0) -> None:
        """`order_seed` is the seed of the run. It selects the training problems or their order."""
        self.config = config
        self.tokenizer = tokenizer
        self.order_seed = order_seed
        self._training_digits = range(1, config.max_digits + 1)  # digits of a term
        self._out_of_range_digits = range(config.max_digits + 1, config.max_digits + 2)

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        return [self._training_prompt(position) for position in range(first, first + count)]

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        return {
            name: [self._prompt(f"{name}/{index}", terms) for index, terms in enumerate(sums)]
            for name, sums in self._fixed_sums.items()
            if name != "example"
        }

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        """Return sums with results of both ranges. A warm start is broad, like pretraining."""
        demonstrations = []
        for index in range(first, first + count):
            name = f"demonstration/{index}"
            digits = self._training_digits if index % 2 else self._out_of_range_digits
            terms = self._draw(name, digits, self._held_out)
            demonstrations.append(Demonstration(self._prompt(name, terms), str(sum(terms))))
        return demonstrations

    def _training_prompt(self, position: int) -> Prompt:
        """Return a new problem for each position, or one of `num_train`, shuffled in each epoch."""
        num_train, seed = self.config.num_train, self.config.seed
        id_name, draw_name = training_names(position, num_train, seed, self.order_seed)
        return self._prompt(id_name, self._draw(draw_name, self._training_digits, self._held_out))

    def _prompt(self, name: str, terms: Terms) -> Prompt:
        """Build a prompt that ends right before the result."""
        examples = self._fixed_sums["example"]
        solved = [f"{_question(example)}{sum(example)}\n" for example in examples]
        text = "".join(solved) + _question(terms)
        token_ids = tuple(self.tokenizer(text).input_ids)
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in token_ids:
            raise UserError(f"task: the prompt has text that the tokenizer does not know: {text!r}")
        return Prompt(id=f"sums/{name}", text=text, token_ids=token_ids, answer=str(sum(terms)))

    @cached_property
    def _fixed_sums(self) -> dict[str, list[Terms]]:
        """Draw the examples and the evaluation problems, without duplicates."""
        num_evaluation = self.config.num_evaluation
        splits = {
            "example": (self.config.num_examples, self._training_digits),
            "in_range": (num_evaluation, self._training_digits),
            "out_of_range": (num_evaluation, self._out_of_range_digits),
        }
        seen: set[Terms] = set()
        sums: dict[str, list[Terms]] = {}
        for name, (count, digits) in splits.items():
            sums[name] = []
            for index in range(count):
                terms = self._draw(f"{name}/{index}", digits, seen)
                seen.add(_identity(terms))
                sums[name].append(terms)
        return sums

    @cached_property
    def _held_out(self) -> set[Terms]:
        return {_identity(terms) for sums in self._fixed_sums.values() for terms in sums}

    def _draw(self, name: str, digits: range, excluded: set[Terms]) -> Terms:
        rng = random.Random(f"{self.config.seed}/{name}")
        for _ in range(MAX_DRAWS):
            terms = tuple(_draw_term(rng, digits) for _ in range(self.config.num_terms))
            if _identity(terms) not in excluded:
                return terms
        raise UserError(
            f"task: {MAX_DRAWS} draws found no further sum of {self.config.num_terms} terms of "
            f"{digits.start} to {digits.stop - 1} digits; "
            f"lower task.num_evaluation = {self.config.num_evaluation} or raise task.max_digits"
        )


def _draw_term(rng: random.Random, digits: range) -> int:
    length = digits.start + int(rng.random() * len(digits))
    low, high = 10 ** (length - 1), 10**length
    return low + int(rng.random() * (high - low))


def _question(terms: Terms) -> str:
    """Write the sum with spaces: SmolLM2 solves twice as many sums as without them."""
    return " + ".join(map(str, terms)) + " = "


def _identity(terms: Terms) -> Terms:
    return tuple(sorted(terms))
