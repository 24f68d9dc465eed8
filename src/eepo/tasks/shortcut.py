"""Generates `shortcut`: digits whose sum modulo 10 can be guessed or computed.

A small policy cannot compute the answer in one step: a guess is right 10 % of the time. With
running sums it is always right. The first token of a completion chooses the strategy, and a warm
start sets the probability of each (`ShortcutConfig`). So the task has a common weak strategy and a
rare strong one, and shows whether training finds the rare one. Every problem is a pure function of
(seed, split, index).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from eepo.config import ShortcutConfig
from eepo.model.policy import Policy
from eepo.protocols import Reward, RolloutEngine
from eepo.rewards.shortcut import MARKERS
from eepo.tasks.order import training_names
from eepo.types import Completion, Demonstration, Prompt, Sampling, UserError

Digits = tuple[int, ...]
STYLES = ("symbols", "words")
MAX_STEPS_TOKENS = 96  # enough for the running sums of 32 digits
MAX_DRAWS = 10_000  # draws for one problem before the range counts as too small


class Shortcut:
    """Generates rows of digits as prompts, and demonstrations of all strategies."""

    def __init__(self, config: ShortcutConfig, tokenizer: Any, order_seed: int = 0) -> None:
        """`order_seed` is the seed of the run. It selects the training problems or their order."""
        self.config, self.tokenizer, self.order_seed = config, tokenizer, order_seed

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        return [self._training_prompt(position) for position in range(first, first + count)]

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        prompts = [self._prompt(f"test/{index}", digits) for index, digits in enumerate(self._test)]
        return {"test": prompts}

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        """Return every strategy equally often, each with the probability of its first token."""
        probabilities = list(strategy_probabilities(self.config).items())
        demonstrations = []
        for index in range(first, first + count):
            strategy, probability = probabilities[index % len(probabilities)]
            name = f"demonstration/{index}"
            digits = self._draw(name, self._held_out)
            rng = random.Random(f"{self.config.seed}/{name}/answer")
            text = completion_text(digits, strategy, self.config.style, rng)
            demonstrations.append(Demonstration(self._prompt(name, digits), text, probability))
        return demonstrations

    def describe_policy(self, policy: Policy, engine: RolloutEngine, reward: Reward) -> list[str]:
        """Return the probability of every strategy, and its accuracy once it is chosen."""
        prompts = self.evaluation_sets()["test"]
        lines, total = [], 0.0
        for strategy in strategy_probabilities(self.config):
            marker = MARKERS[strategy][STYLES.index(self.config.style)]
            marker_ids = tuple(self.tokenizer(marker, add_special_tokens=False).input_ids)
            probability = _first_token_probability(policy, prompts, marker_ids)
            text = f"{marker} " if self.config.style == "symbols" else marker
            accuracy = _accuracy_after(engine, reward, prompts, (text, marker_ids))
            total += probability
            lines.append(f"{strategy}: probability {probability:.2g}, accuracy {accuracy:.3f}")
        return [*lines, f"all other first tokens: probability {max(0.0, 1 - total):.2g}"]

    def _training_prompt(self, position: int) -> Prompt:
        """Return a new problem for each position, or one of `num_train`, shuffled in each epoch."""
        num_train, seed = self.config.num_train, self.config.seed
        id_name, draw_name = training_names(position, num_train, seed, self.order_seed)
        return self._prompt(id_name, self._draw(draw_name, self._held_out))

    def _prompt(self, name: str, digits: Digits) -> Prompt:
        text = prompt_text(digits, self.config.style)
        token_ids = tuple(self.tokenizer(text).input_ids)
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in token_ids:
            raise UserError(f"task: the prompt has text that the tokenizer does not know: {text!r}")
        return Prompt(f"shortcut/{name}", text, token_ids, answer=str(sum(digits) % 10))

    @cached_property
    def _test(self) -> list[Digits]:
        seen: set[Digits] = set()
        problems: list[Digits] = []
        for index in range(self.config.num_evaluation):
            problems.append(self._draw(f"test/{index}", seen))
            seen.add(problems[-1])
        return problems

    @cached_property
    def _held_out(self) -> set[Digits]:
        return set(self._test)

    def _draw(self, name: str, excluded: set[Digits]) -> Digits:
        rng = random.Random(f"{self.config.seed}/{name}")
        for _ in range(MAX_DRAWS):
            digits = tuple(int(rng.random() * 10) for _ in range(self.config.num_digits))
            if digits not in excluded:
                return digits
        raise UserError(
            f"task: {MAX_DRAWS} draws found no further row of {self.config.num_digits} digits; "
            f"lower task.num_evaluation = {self.config.num_evaluation} or raise task.num_digits"
        )


def _first_token_probability(policy: Policy, prompts: Sequence[Prompt], ids: Digits) -> float:
    """Average the probability of the marker's first token over the prompts."""
    completion = Completion(ids[:1], (0.0,), "", finished=False)
    pairs = [(prompt, completion) for prompt in prompts]
    with torch.no_grad():
        batches = policy.micro_batches(pairs)
        total = sum(float(policy.score(batch, 1.0).logprobs.exp().sum()) for batch in batches)
    return total / len(pairs)


def _accuracy_after(
    engine: RolloutEngine, reward: Reward, prompts: Sequence[Prompt], marker: tuple[str, Digits]
) -> float:
    """Sample one completion per prompt after the marker of a strategy, and return the accuracy."""
    text, ids = marker
    forced = [replace(prompt, token_ids=(*prompt.token_ids, *ids)) for prompt in prompts]
    groups = engine.generate(forced, 1, Sampling(1.0, MAX_STEPS_TOKENS, stream="describe"))
    texts = [text + group[0].text for group in groups]
    verdicts = reward.grade(prompts, texts)
    return sum(verdict.correct for verdict in verdicts) / len(verdicts)


def strategy_probabilities(config: ShortcutConfig) -> dict[str, float]:
    """Return the probability of the first token of every strategy that the policy should have.

    The rest up to 1 belongs to all other tokens together.
    """
    probabilities: dict[str, float] = {config.rare_strategy: config.rare_probability}
    if config.dead_end_probability:
        probabilities["dead_end"] = config.dead_end_probability
    others = config.other_probability or config.rare_probability / 10
    return {"guess": 1 - sum(probabilities.values()) - others} | probabilities


def prompt_text(digits: Digits, style: str) -> str:
    row = " ".join(map(str, digits))
    return f"{row} :" if style == "symbols" else f"Digits: {row}\n"


def completion_text(digits: Digits, strategy: str, style: str, rng: random.Random) -> str:
    """Write a completion of a strategy.

    `guess` shows the right digit: the policy learns that it cannot predict it. `parity` ends in a
    random digit of the right parity. `dead_end` gives no answer: a wrong digit would not do,
    because a policy that cannot predict the right digit cannot avoid it either.
    """
    symbol, word = MARKERS[strategy]
    if strategy == "dead_end":
        return symbol if style == "symbols" else word
    answer = sum(digits) % 10
    if strategy == "parity":
        answer = (answer + 2 * int(rng.random() * 5)) % 10
    base = {"compute": 10, "parity": 2}.get(strategy)
    steps = " ".join(str(total % base) for total in accumulate(digits)) if base else ""
    if style == "symbols":
        return f"{symbol} {steps} > {answer}" if steps else f"> {answer}"
    return f"{word}: {steps}\nAnswer: {answer}" if steps else f"Answer: {answer}"


def build_tokenizer() -> Any:
    """Build a tokenizer for a policy from scratch: one token per digit and symbol."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", ":", *(symbol for symbol, _ in MARKERS.values())]
    words += [str(digit) for digit in range(10)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=128,
    )
