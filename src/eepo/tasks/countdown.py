"""Countdown: given some numbers and a target, write an expression that uses each number once and hits the target.

Most problems have many right answers, so exploration can be seen. Every problem is a pure function of (seed, split,
index) and is made by drawing an expression first, so it has a solution. Training draws targets from one range; a
second range is only evaluated. Evaluation problems never occur in training or in demonstrations.
"""

from __future__ import annotations

import operator
import random
from functools import cached_property
from typing import Any

from eepo.config import CountdownConfig
from eepo.tasks.order import place
from eepo.types import Prompt, UserError

_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
MAX_DRAWS = 100_000  # expressions tried for one problem before the ranges are called impossible


class Countdown:
    def __init__(self, config: CountdownConfig, tokenizer: Any, order_seed: int = 0) -> None:
        """`order_seed` is the run's: which fresh problems come, or a finite set's order. Evaluation never moves."""
        self.config = config
        self.tokenizer = tokenizer
        self.order_seed = order_seed
        self._trained = range(config.min_target, config.max_target + 1)
        self._unseen = range(config.out_of_range_min_target, config.out_of_range_max_target + 1)

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        return [self._training_prompt(position) for position in range(first, first + count)]

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        return {
            name: [
                self._prompt(f"{name}/{index}", numbers, target)
                for index, (numbers, target, _) in enumerate(problems)
            ]
            for name, problems in self._evaluation_problems.items()
        }

    def demonstrations(self, first: int, count: int) -> list[tuple[Prompt, str]]:
        """Both ranges: a warm start is broad, as pretraining is; reinforcement is what narrows."""
        pairs = []
        for index in range(first, first + count):
            targets = self._trained if index % 2 else self._unseen
            numbers, target, expression = self._draw(
                f"demonstration/{index}", targets, self._held_out
            )
            pairs.append((self._prompt(f"demonstration/{index}", numbers, target), expression))
        return pairs

    def _training_prompt(self, position: int) -> Prompt:
        """Endless fresh problems, or `num_train` of them in an order of its own for each epoch."""
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
        numbers, target, _ = self._draw(draw, self._trained, self._held_out)
        return self._prompt(name, numbers, target)

    def _prompt(self, name: str, numbers: list[int], target: int) -> Prompt:
        text = self.config.template.format(numbers=" ".join(map(str, numbers)), target=target)
        ids = tuple(self.tokenizer(text).input_ids)
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in ids:
            raise UserError(f"task: the model's tokenizer does not know all of the prompt {text!r}")
        return Prompt(
            id=f"countdown/{name}",
            text=text,
            token_ids=ids,
            answer={"numbers": numbers, "target": target},
        )

    @cached_property
    def _evaluation_problems(self) -> dict[str, list[tuple[list[int], int, str]]]:
        seen: set[tuple[tuple[int, ...], int]] = set()
        sets: dict[str, list[tuple[list[int], int, str]]] = {"in_range": [], "out_of_range": []}
        for name, targets in (("in_range", self._trained), ("out_of_range", self._unseen)):
            for index in range(self.config.num_evaluation):
                problem = self._draw(f"{name}/{index}", targets, frozenset(seen))
                seen.add(_identity(problem[0], problem[1]))
                sets[name].append(problem)
        return sets

    @cached_property
    def _held_out(self) -> frozenset[tuple[tuple[int, ...], int]]:
        problems = [
            problem for problems in self._evaluation_problems.values() for problem in problems
        ]
        return frozenset(_identity(numbers, target) for numbers, target, _ in problems)

    def _draw(
        self, name: str, targets: range, excluded: frozenset[tuple[tuple[int, ...], int]]
    ) -> tuple[list[int], int, str]:
        """Numbers, a target in `targets`, and an expression that hits it."""
        rng = random.Random(f"{self.config.seed}/{name}")
        for _ in range(MAX_DRAWS):
            numbers = [
                1 + int(rng.random() * self.config.max_number)
                for _ in range(self.config.num_numbers)
            ]
            drawn = _draw_expression(numbers, rng)
            if drawn and drawn[0] in targets and _identity(numbers, drawn[0]) not in excluded:
                return numbers, drawn[0], drawn[1]
        raise UserError(
            f"task: no countdown problem found with targets {targets.start}..{targets.stop - 1} from "
            f"{self.config.num_numbers} numbers up to {self.config.max_number} in {MAX_DRAWS} draws; "
            "widen the target range or ask for fewer problems"
        )


def build_tokenizer(max_number: int = 199) -> Any:
    """A tokenizer for a policy from scratch: one token for each number and sign. Spaces only separate."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"()+-*/=:", *map(str, range(max_number + 1))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d+|\D"), "isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=128,
    )


def _identity(numbers: list[int], target: int) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(numbers)), target


def _draw_expression(numbers: list[int], rng: random.Random) -> tuple[int, str] | None:
    """Combine two random parts until one is left; None if a step leaves the whole numbers above 0."""
    parts = [
        (number, str(number), 3) for number in numbers
    ]  # value, text, how tightly its top sign binds
    while len(parts) > 1:
        left = parts.pop(int(rng.random() * len(parts)))
        right = parts.pop(int(rng.random() * len(parts)))
        combined = _combine(left, right, "+-*/"[int(rng.random() * 4)])
        if combined is None:
            return None
        parts.append(combined)
    return parts[0][0], parts[0][1]


def _combine(
    left: tuple[int, str, int], right: tuple[int, str, int], sign: str
) -> tuple[int, str, int] | None:
    if (sign == "-" and left[0] <= right[0]) or (sign == "/" and left[0] % right[0]):
        return None
    value = _APPLY[sign](left[0], right[0])
    binding = 1 if sign in "+-" else 2
    left_text = f"({left[1]})" if left[2] < binding else left[1]
    tight = binding + (sign in "-/")  # a-(b-c), a/(b*c)
    right_text = f"({right[1]})" if right[2] < tight else right[1]
    return value, f"{left_text}{sign}{right_text}", binding
