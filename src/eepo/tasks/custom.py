"""Uses a class of the user as a task, and checks what it returns."""

from __future__ import annotations

import inspect
import json
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
        if len(prompts) != count:
            raise UserError(
                f"{self._where}: training_prompts({first}, {count}) must return {count} prompts, "
                f"got {len(prompts)}"
            )
        return prompts

    def evaluation_sets(self) -> dict[str, list[Prompt]]:
        """Return the user's sets; none if the class has no such method."""
        if not hasattr(self.task, "evaluation_sets"):
            return {}
        sets = self.task.evaluation_sets()
        if not isinstance(sets, dict):
            raise UserError(f"{self._where}: evaluation_sets() must return a dict of prompts")
        return {str(name): self._checked(sets[name], "evaluation_sets") for name in sets}

    def demonstrations(self, first: int, count: int) -> list[Demonstration]:
        if not hasattr(self.task, "demonstrations"):
            raise UserError(f"{self._where}: a warm start needs demonstrations(first, count)")
        found = list(self.task.demonstrations(first, count))
        prompts = self._checked([each.prompt for each in found], "demonstrations")
        return [replace(each, prompt=prompt) for each, prompt in zip(found, prompts, strict=True)]

    def _check_options(self, build: Any, options: dict[str, Any]) -> None:
        try:
            inspect.signature(build).bind(self.tokenizer, 0, **options)
        except TypeError as error:
            raise UserError(
                f"{self._where}: it is built with (tokenizer, seed, **task.options): {error}"
            ) from None

    def _checked(self, prompts: Iterable[Any], method: str) -> list[Prompt]:
        """Tokenize prompts, and raise an error for those that would fail later."""
        prompts = list(prompts)
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise UserError(f"{self._where}: {method} must return eepo.Prompt, got {prompt!r}")
            if not _is_json((prompt.answer, dict(prompt.columns))):
                raise UserError(
                    f"{self._where}: answer and columns of prompt {prompt.id!r} must be JSON, "
                    f"got {prompt.answer!r}"
                )
        if len({prompt.id for prompt in prompts}) < len(prompts):
            raise UserError(f"{self._where}: {method} returned two prompts with the same id")
        return [self._tokenized(prompt) for prompt in prompts]

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
