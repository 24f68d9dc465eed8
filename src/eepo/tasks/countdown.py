"""Generates countdown problems: use each given number once to reach a target.

Most problems have many right answers, which makes exploration visible. Every problem is a pure
function of (seed, split, index). It is generated from a random expression, so it has a solution.
Training draws targets from one range. A second range is evaluated only. Evaluation problems never
occur in training or in demonstrations.
"""

from __future__ import annotations

import operator
import random
from functools import cached_property
from typing import Any

from eepo.config import CountdownConfig
from eepo.tasks.order import training_names
from eepo.types import Demonstration, Prompt, UserError

Identity = tuple[tuple[int, ...], int]  # sorted numbers and target

_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
MAX_DRAWS = 100_000  # expressions drawn for one problem before the ranges count as impossible


class Countdown:
    """Generates countdown problems as prompts."""

    def __init__(self, config: CountdownConfig, tokenizer: Any, order_seed: int = 0) -> None:
        """`order_seed` is the seed of the run. It selects the training problems or their order."""
        self.config = config
        self.tokenizer = tokenizer
        self.order_seed = order_seed
        self._training_targets = range(config.min_target, config.max_target + 1)
        self._out_of_range_targets = range(
            config.out_of_range_min_target, config.out_of_range_max_target + 1
        )

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

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        """Return solved problems of both ranges. A warm start is broad, like pretraining."""
        demonstrations = []
        for index in range(first, first + count):
            name = f"demonstration/{index}"
            targets = self._training_targets if index % 2 else self._out_of_range_targets
            numbers, target, expression = self._draw(name, targets, self._held_out)
            prompt = self._prompt(name, numbers, target)
            demonstrations.append(Demonstration(prompt, expression))
        return demonstrations

    def _training_prompt(self, position: int) -> Prompt:
        """Return a new problem for each position, or one of `num_train`, shuffled in each epoch."""
        num_train, seed = self.config.num_train, self.config.seed
        id_name, draw_name = training_names(position, num_train, seed, self.order_seed)
        numbers, target, _ = self._draw(draw_name, self._training_targets, self._held_out)
        return self._prompt(id_name, numbers, target)

    def _prompt(self, name: str, numbers: list[int], target: int) -> Prompt:
        text = self.config.template.format(numbers=" ".join(map(str, numbers)), target=target)
        token_ids = tuple(self.tokenizer(text).input_ids)
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in token_ids:
            raise UserError(f"task: the prompt has text that the tokenizer does not know: {text!r}")
        return Prompt(
            id=f"countdown/{name}",
            text=text,
            token_ids=token_ids,
            answer={"numbers": numbers, "target": target},
        )

    @cached_property
    def _evaluation_problems(self) -> dict[str, list[tuple[list[int], int, str]]]:
        seen: set[Identity] = set()
        sets: dict[str, list[tuple[list[int], int, str]]] = {"in_range": [], "out_of_range": []}
        for name, targets in (
            ("in_range", self._training_targets),
            ("out_of_range", self._out_of_range_targets),
        ):
            for index in range(self.config.num_evaluation):
                problem = self._draw(f"{name}/{index}", targets, frozenset(seen))
                seen.add(_identity(problem[0], problem[1]))
                sets[name].append(problem)
        return sets

    @cached_property
    def _held_out(self) -> frozenset[Identity]:
        sets = self._evaluation_problems.values()
        return frozenset(
            _identity(numbers, target) for problems in sets for numbers, target, _ in problems
        )

    def _draw(
        self, name: str, targets: range, excluded: frozenset[Identity]
    ) -> tuple[list[int], int, str]:
        """Draw numbers and an expression until its value is in `targets`.

        Return the numbers, the target and the expression.
        """
        config = self.config
        rng = random.Random(f"{config.seed}/{name}")
        for _ in range(MAX_DRAWS):
            numbers = [1 + int(rng.random() * config.max_number) for _ in range(config.num_numbers)]
            drawn = _draw_expression(numbers, rng)
            if drawn and drawn[0] in targets and _identity(numbers, drawn[0]) not in excluded:
                return numbers, drawn[0], drawn[1]
        raise UserError(
            f"task: no countdown problem found with targets {targets.start}..{targets.stop - 1} "
            f"from {config.num_numbers} numbers up to {config.max_number} in {MAX_DRAWS} draws; "
            "widen the target range or lower the number of problems"
        )


def build_tokenizer(max_number: int = 199) -> Any:
    """Build a tokenizer for a policy from scratch, with one token per number and sign."""
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
    """Combine random parts until one is left; return its value and text.

    Return None if an intermediate value is not a positive whole number.
    """
    parts = [(number, str(number), 3) for number in numbers]  # value, text, precedence
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
    """Join two parts (value, text, precedence), with brackets where needed."""
    if (sign == "-" and left[0] <= right[0]) or (sign == "/" and left[0] % right[0]):
        return None
    value = _APPLY[sign](left[0], right[0])
    precedence = 1 if sign in "+-" else 2
    left_text = f"({left[1]})" if left[2] < precedence else left[1]
    right_precedence = precedence + (sign in "-/")  # a-(b-c) and a/(b*c) need brackets
    right_text = f"({right[1]})" if right[2] < right_precedence else right[1]
    return value, f"{left_text}{sign}{right_text}", precedence
