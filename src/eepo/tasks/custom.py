"""Uses a class of the user as a task, and checks what it returns."""

from __future__ import annotations

import inspect
import json
import reprlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from eepo.config import CustomTaskConfig
from eepo.rewards.user_code import find_source, load_module, split_name
from eepo.types import Demonstration, Prompt, UserError


class CustomTask:
    """Wraps the user's class, which is built with (tokenizer, seed) and `task.options`.

    It needs `training_prompts`. `evaluation_sets`, `demonstrations`, `num_train` and `notes` are
    optional. A prompt without `token_ids` is tokenized here.
    """

    def __init__(self, config: CustomTaskConfig, tokenizer: Any, order_seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self._where = f'task.name = "{config.name}"'
        find_source(config.name, "task.name")
        module, (_, name) = load_module(config.name), split_name(config.name)
        build = getattr(module, name, None)
        if not callable(build):
            raise UserError(f"{self._where}: {module.__file__} has no class {name}")
        self._check_options(build, config.options)
        self.task = build(tokenizer, order_seed, **config.options)
        if not callable(getattr(self.task, "training_prompts", None)):
            raise UserError(f"{self._where}: it needs a method training_prompts(first, count)")
        self.num_train: int = getattr(self.task, "num_train", 0)
        self.notes: list[str] = list(getattr(self.task, "notes", ()))

    def training_prompts(self, first: int, count: int) -> list[Prompt]:
        prompts = self._checked(self.task.training_prompts(first, count), "training_prompts")
        self._check_count(prompts, "training_prompts", first, count)
        return prompts

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        """Return the user's sets; none if the class has no such method."""
        if not hasattr(self.task, "evaluation_sets"):
            return {}
        sets = self.task.evaluation_sets()
        if not isinstance(sets, dict):
            raise UserError(
                f"{self._where}: evaluation_sets must return a dict of lists of eepo.Prompt, "
                f"got {reprlib.repr(sets)}"
            )
        checked = {
            str(name): self._checked(prompts, f"evaluation set {str(name)!r}")
            for name, prompts in sets.items()
        }
        if empty := [name for name, prompts in checked.items() if not prompts]:
            raise UserError(f"{self._where}: evaluation set {empty[0]!r} has no prompts")
        return checked

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        if not hasattr(self.task, "demonstrations"):
            raise UserError(f"{self._where}: a warm start needs demonstrations(first, count)")
        found = self._listed(
            self.task.demonstrations(first, count), Demonstration, "demonstrations"
        )
        self._check_count(found, "demonstrations", first, count)
        prompts = self._checked([each.prompt for each in found], "demonstrations")
        return [replace(each, prompt=prompt) for each, prompt in zip(found, prompts, strict=True)]

    def _check_options(self, build: Any, options: dict[str, Any]) -> None:
        try:
            inspect.signature(build).bind(self.tokenizer, 0, **options)
        except TypeError as error:
            raise UserError(
                f"{self._where}: it is built with (tokenizer, seed, **task.options): {error}"
            ) from None

    def _checked(self, prompts: Any, source: str) -> list[Prompt]:
        """Tokenize prompts, and raise an error for those that would fail later."""
        prompts = self._listed(prompts, Prompt, source)
        for prompt in prompts:
            if not _is_json((prompt.answer, dict(prompt.columns))):
                raise UserError(
                    f"{self._where}: answer and columns of prompt {prompt.id!r} must be JSON, "
                    f"got {prompt.answer!r}"
                )
        if len({prompt.id for prompt in prompts}) < len(prompts):
            raise UserError(f"{self._where}: {source} has two prompts with the same id")
        return [self._tokenized(prompt) for prompt in prompts]

    def _listed(self, items: Any, kind: type, source: str) -> list[Any]:
        """Return the items of an iterable. Raise an error if it is none, or has a wrong item."""
        expected = f"{self._where}: {source}: expected a list of eepo.{kind.__name__}, got"
        if not isinstance(items, Iterable):
            raise UserError(f"{expected} {reprlib.repr(items)}")
        items = list(items)
        if wrong := [item for item in items if not isinstance(item, kind)]:
            raise UserError(f"{expected} a list with {reprlib.repr(wrong[0])}")
        return items

    def _check_count(self, items: list[Any], method: str, first: int, count: int) -> None:
        if len(items) != count:
            raise UserError(
                f"{self._where}: {method}({first}, {count}) must return {count} "
                f"{method.removeprefix('training_')}, got {len(items)}"
            )

    def _tokenized(self, prompt: Prompt) -> Prompt:
        token_ids = prompt.token_ids or self.tokenizer(prompt.text).input_ids
        if not token_ids:
            raise UserError(f"{self._where}: prompt {prompt.id!r} has no text")
        return replace(prompt, token_ids=tuple(token_ids))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
