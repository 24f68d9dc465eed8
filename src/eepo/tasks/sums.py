"""Sums: some solved ones, then one to solve. A small pretrained model can do a few, so there is something to reward.

Every sum is a pure function of (seed, split, index), drawn afresh. The number of digits of each term is drawn first,
so that short terms are as frequent as long ones. A second range, terms of one digit more than training has, is only
evaluated. The solved ones are the same for all prompts. Neither they nor the evaluation's occur in training, in
whatever order their terms stand.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import Any

from eepo.config import SumsConfig
from eepo.tasks.order import place
from eepo.types import Prompt, UserError

Terms = tuple[int, ...]
MAX_DRAWS = 10_000  # tried for one sum before the range is called too small


class Sums:
    def __init__(self, config: SumsConfig, tokenizer: Any, order_seed: int = 0) -> None:
        """`order_seed` is the run's: which fresh sums come, or a finite set's order. Evaluation never moves."""
        self.config = config
        self.tokenizer = tokenizer
        self.order_seed = order_seed
        self._trained = range(1, config.max_digits + 1)  # digits of a term
        self._unseen = range(config.max_digits + 1, config.max_digits + 2)

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        return [self._training_prompt(position) for position in range(first, first + count)]

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        return {
            name: [self._prompt(f"{name}/{index}", terms) for index, terms in enumerate(sums)]
            for name, sums in self._fixed.items()
            if name != "example"
        }

    def demonstrations(self, first: int, count: int) -> list[tuple[Prompt, str]]:
        """Both ranges: a warm start is broad, as pretraining is; reinforcement is what narrows."""
        pairs = []
        for index in range(first, first + count):
            name = f"demonstration/{index}"
            terms = self._draw(name, self._trained if index % 2 else self._unseen, self._held_out)
            pairs.append((self._prompt(name, terms), str(sum(terms))))
        return pairs

    def _training_prompt(self, position: int) -> Prompt:
        """Endless fresh sums, or `num_train` of them in an order of its own for each epoch."""
        if not self.config.num_train:
            name = draw = f"train/{self.order_seed}/{position}"
        else:
            epoch, index = place(
                position, self.config.num_train, f"{self.config.seed}/{self.order_seed}"
            )
            name, draw = (
                f"train/{epoch}/{index}",
                f"train/{index}",
            )  # ids are unique where a step crosses two epochs
        return self._prompt(name, self._draw(draw, self._trained, self._held_out))

    def _prompt(self, name: str, terms: Terms) -> Prompt:
        """Ends right before the answer."""
        solved = [f"{_question(example)}{sum(example)}\n" for example in self._fixed["example"]]
        text = "".join(solved) + _question(terms)
        ids = tuple(self.tokenizer(text).input_ids)
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in ids:
            raise UserError(f"task: the model's tokenizer does not know all of the prompt {text!r}")
        return Prompt(id=f"sums/{name}", text=text, token_ids=ids, answer=str(sum(terms)))

    @cached_property
    def _fixed(self) -> dict[str, list[Terms]]:
        """The solved ones and the evaluation's, none of them twice."""
        number = self.config.num_evaluation
        wanted = {
            "example": (self.config.num_examples, self._trained),
            "in_range": (number, self._trained),
            "out_of_range": (number, self._unseen),
        }
        seen: set[Terms] = set()
        sets: dict[str, list[Terms]] = {}
        for name, (count, digits) in wanted.items():
            sets[name] = []
            for index in range(count):
                terms = self._draw(f"{name}/{index}", digits, seen)
                seen.add(_identity(terms))
                sets[name].append(terms)
        return sets

    @cached_property
    def _held_out(self) -> set[Terms]:
        return {_identity(terms) for sums in self._fixed.values() for terms in sums}

    def _draw(self, name: str, digits: range, excluded: set[Terms]) -> Terms:
        rng = random.Random(f"{self.config.seed}/{name}")
        for _ in range(MAX_DRAWS):
            terms = tuple(_draw_term(rng, digits) for _ in range(self.config.num_terms))
            if _identity(terms) not in excluded:
                return terms
        raise UserError(
            f"task: {MAX_DRAWS} draws found no further sum of {self.config.num_terms} terms of {digits.start} to "
            f"{digits.stop - 1} digits; lower task.num_evaluation = {self.config.num_evaluation}, raise task.max_digits"
        )


def _draw_term(rng: random.Random, digits: range) -> int:
    length = digits.start + int(rng.random() * len(digits))
    low, high = 10 ** (length - 1), 10**length
    return low + int(rng.random() * (high - low))


def _question(terms: Terms) -> str:
    """With spaces: SmolLM2 solves twice as many written so as without."""
    return " + ".join(map(str, terms)) + " = "


def _identity(terms: Terms) -> Terms:
    return tuple(sorted(terms))
