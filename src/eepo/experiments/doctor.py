"""Look at a recipe before hours are spent on it: one finding after the other, each with what to change.

A check that fails hides none of those after it that can still run. Nothing is trained and nothing is written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from eepo import recipe
from eepo.algorithm import group_advantages
from eepo.config import CountdownConfig, DatasetConfig, RunConfig, SumsConfig
from eepo.model import loading, memory
from eepo.protocols import Reward, Task
from eepo.rewards import build_reward
from eepo.rollout import vllm
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks import build_task
from eepo.types import Completion, Prompt, Sampling, UserError, Verdict, mean_entropy

GOLD_PROMPTS = 200  # of training, and of each evaluation set, whose gold answer is graded
GOLD_SHARE = 0.98  # under it the reward is called wrong; above it, single golds are
PREVIEW = 600  # characters of a prompt
SAMPLES = 4  # completions for each prompt, at most
SAMPLING_SECONDS = 60.0  # of sampling, about
PROBED_TOKENS = 8  # sampled first, to know how long a token takes
UNKNOWN_PROMPT = 256  # tokens of a prompt, where the data could not be read

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "warn", "fail", "skip"]
    name: str
    text: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.level:4}  {self.name}: {self.text}" + (
            f" -> {self.advice}" if self.advice else ""
        )


def examine(name: str, overrides: Sequence[str] = (), num_prompts: int = 8) -> Iterator[Finding]:
    """All findings, as they are made: what is cheap to know comes first, and weights are loaded only if they fit."""
    config, failed = attempt("recipe", lambda: recipe.load_run(name, overrides))
    yield from failed
    if config is None:
        return
    yield Finding("ok", "recipe", describe(config))
    device, failed = attempt("device", lambda: loading.pick_device(config.model.device))
    yield from failed
    if config.rollout.engine == "vllm":
        yield look_at_vllm()
    tokenizer, failed = attempt("tokenizer", lambda: loading.load_tokenizer(config.model))
    yield from failed
    problems: Problems | None = None
    if tokenizer is not None:
        problems, failed = attempt("data", lambda: Problems.read(config, tokenizer))
        yield from failed
    if problems is not None:
        yield from look_at_data(config, problems)
        yield look_at_template(config, tokenizer, problems.training[0])
    else:
        yield unseen(
            "prompt, gold answers, samples",
            f"without {'data' if tokenizer is not None else 'a tokenizer'}",
        )
    shape, failed = attempt("model", lambda: memory.shape_of(*loading.load_shape(config.model)))
    yield from failed
    fits = False
    if shape is not None and device is not None:
        found = list(
            look_at_shape(config, shape, device, problems.longest if problems else UNKNOWN_PROMPT)
        )
        fits = not any(finding.level == "fail" for finding in found)
        yield from found
    else:
        yield unseen("memory, disk, samples", f"without a {'model' if shape is None else 'device'}")
    if problems is not None:
        runnable = device if fits else None
        if shape is not None and device is not None and not fits:
            yield unseen("samples", "as the model cannot be run this way")
        yield from look_at_reward(config, tokenizer, runnable, problems, num_prompts)


def attempt(name: str, action: Callable[[], Kind]) -> tuple[Kind | None, list[Finding]]:
    """What `action` gives, or the finding that it failed: a user's mistake, or a card that is too small."""
    try:
        return action(), []
    except (UserError, torch.OutOfMemoryError) as error:
        return None, [Finding("fail", name, str(error).splitlines()[0])]


def unseen(names: str, reason: str) -> Finding:
    """A check that cannot be made is said to be missing, or its silence would pass for health."""
    return Finding("skip", names, f"not looked at, {reason}")


def describe(config: RunConfig) -> str:
    algorithm, training = config.algorithm, config.training
    method = "GRPO" if algorithm.num_stages == 1 else f"EEPO in {algorithm.num_stages} stages"
    return (
        f"{config.name}: {method}, {training.num_steps} steps of {training.prompts_per_step} prompts x "
        f"{algorithm.group_size} completions of at most {algorithm.max_new_tokens} tokens"
    )


def look_at_vllm() -> Finding:
    """Whether it is there; it is not started, which takes its time and its share of the card."""
    _, failed = attempt("engine", vllm.check_installed)
    text = f"vLLM {vllm.installed_version()} is installed; samples below are drawn by transformers"
    return failed[0] if failed else Finding("ok", "engine", text)


# --- data and prompts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problems:
    task: Task
    num_train: int  # 0: without end
    training: list[Prompt]  # some
    evaluation: dict[str, list[Prompt]]  # all

    @classmethod
    def read(cls, config: RunConfig, tokenizer: Any) -> Problems:
        task = build_task(config.task, tokenizer, config.training.seed)
        number: int = getattr(task, "num_train", getattr(config.task, "num_train", 0))
        return cls(
            task,
            number,
            task.training_prompts(0, min(number or GOLD_PROMPTS, GOLD_PROMPTS)),
            task.evaluation_sets(),
        )

    @property
    def longest(self) -> int:
        everything = [
            *self.training,
            *(prompt for prompts in self.evaluation.values() for prompt in prompts),
        ]
        return max(len(prompt.token_ids) for prompt in everything)


def look_at_data(config: RunConfig, problems: Problems) -> Iterator[Finding]:
    sets = ", ".join(f"{name} ({len(prompts)})" for name, prompts in problems.evaluation.items())
    asked, number = config.training.num_steps * config.training.prompts_per_step, problems.num_train
    training = (
        f"{number:,} training problems, {asked / number:.1f} epochs"
        if number
        else "endless training problems"
    )
    text = f"{training}; evaluation: {sets or 'none'}; the longest prompt seen has {problems.longest} tokens"
    if sets:
        yield Finding("ok", "data", text)
    else:
        yield Finding(
            "warn",
            "data",
            text,
            "name sets in task.evaluation, or nobody will know what was learned",
        )
    for note in getattr(problems.task, "notes", []):
        yield Finding("warn", "data", note)
    if 0 < number < config.training.prompts_per_step:
        text = f"one step asks {config.training.prompts_per_step} prompts, and there are {number}"
        yield Finding("warn", "data", text, f"training.prompts_per_step = {number} or fewer")


def look_at_template(config: RunConfig, tokenizer: Any, prompt: Prompt) -> Finding:
    """The prompt as the model will see it, and whether the model's name speaks of another form."""
    template, path = getattr(config.task, "template", ""), config.model.path
    preview = prompt.text if len(prompt.text) <= PREVIEW else prompt.text[:PREVIEW] + " ..."
    text = f"{len(prompt.token_ids)} tokens: {preview!r}"
    instructed = re.search(r"instruct|chat|-it\b", path, re.IGNORECASE) is not None
    if template == "boxed" and instructed and tokenizer.chat_template:
        return Finding(
            "warn", "prompt", text, f'{path} was taught a chat form; try task.template = "chat"'
        )
    if template == "chat" and re.search(r"\bbase\b", path, re.IGNORECASE):
        return Finding(
            "warn", "prompt", text, f'{path} looks like a base model; try task.template = "boxed"'
        )
    return Finding("ok", "prompt", text)


# --- memory, disk, length ---------------------------------------------------------------------------------------------


def look_at_shape(
    config: RunConfig, shape: memory.Shape, device: torch.device, prompt_tokens: int
) -> Iterator[Finding]:
    dtype = loading.pick_dtype(config.rollout.dtype, device)
    yield Finding(
        "ok", "model", f"{config.model.path}: {shape.num_parameters / 1e6:,.1f} million parameters on {device}, "
        f"trained in float32, sampled in {str(dtype).removeprefix('torch.')}",
    )  # fmt: skip
    if text := loading.two_types(config, device):
        yield Finding("warn", "precision", text, "make rollout.dtype and model.compute_dtype one")
    yield look_at_length(config, shape, prompt_tokens)
    free = memory.free_memory(device)
    if free is not None:
        yield look_at_memory(config, shape, device, prompt_tokens, free)
    yield look_at_disk(config, shape, memory.free_disk(Path.cwd()))


def look_at_length(config: RunConfig, shape: memory.Shape, prompt_tokens: int) -> Finding:
    new, positions = config.algorithm.max_new_tokens, shape.positions
    text = f"prompts of up to {prompt_tokens} + {new} new tokens; the model has {positions or 'any number of'} positions"
    if positions is None or prompt_tokens + new <= positions:
        return Finding("ok", "length", text)
    room = positions - prompt_tokens
    advice = (
        f"algorithm.max_new_tokens = {room}" if room > 0 else "a smaller task.max_prompt_tokens"
    )
    return Finding("fail", "length", text, advice)


def look_at_memory(
    config: RunConfig, shape: memory.Shape, device: torch.device, prompt_tokens: int, free: int
) -> Finding:
    dtype, cuda = loading.pick_dtype(config.rollout.dtype, device), device.type == "cuda"
    needs = memory.needs(shape, config, prompt_tokens, dtype, cuda)
    held = ", ".join(f"{name} {memory.gib(size)}" for name, size in needs.held.items())
    phases = ", ".join(f"{name} {memory.gib(size)}" for name, size in needs.phases.items())
    text = f"about {memory.gib(needs.total)} of {memory.gib(free)} free; held: {held}; then the largest of: {phases}"
    if needs.cache:
        room = min(
            1.0, max(0, free - sum(needs.held.values()) - needs.phases["sampling"]) / needs.cache
        )
        text += f"; the cache takes what is left: {100 * room:.0f} % of its rows may be at their longest"
    if needs.total <= 0.85 * free:
        return Finding("ok", "memory", text)
    advice = advise_memory(config, shape, prompt_tokens, dtype, cuda, int(0.85 * free))
    return Finding("fail" if needs.total > free else "warn", "memory", text, advice)


def advise_memory(
    config: RunConfig,
    shape: memory.Shape,
    prompt_tokens: int,
    dtype: torch.dtype,
    cuda: bool,
    room: int,
) -> str:
    """Knobs that compute the same, if they are enough; else an optimizer that does not, and says so."""
    changes = memory.smaller(shape, config, prompt_tokens, dtype, cuda, room)
    if changes is not None:
        return _settings(changes)
    rounded = memory.rounder(shape, config, prompt_tokens, dtype, cuda, room)
    if rounded is None:
        return "a smaller model, a larger device, or algorithm.kl_coef = 0 (no reference)"
    name, others = rounded
    beside = f", and {_settings(others)}" if others else ""
    return f'training.optimizer = "{name}" (it rounds its moments: not quite the same run){beside}'


def _settings(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {str(value).lower()}" for key, value in changes.items())


def look_at_disk(config: RunConfig, shape: memory.Shape, free: int) -> Finding:
    size = memory.checkpoint_bytes(shape, config)
    kept = config.training.keep_checkpoints
    text = f"checkpoints take up to {memory.gib(size)} ({kept} kept); {memory.gib(free)} free in this folder"
    if size <= free:
        return Finding("ok", "disk", text)
    return Finding(
        "fail", "disk", text, "training.keep_checkpoints = 1, or an --out on another disk"
    )


# --- reward -----------------------------------------------------------------------------------------------------------


def look_at_reward(
    config: RunConfig,
    tokenizer: Any,
    device: torch.device | None,
    problems: Problems,
    num_prompts: int,
) -> Iterator[Finding]:
    """Gold answers first; then samples, if there is a device on which the model fits."""
    reward, failed = attempt("reward", lambda: build_reward(config.reward, config.task))
    yield from failed
    if reward is None:
        return
    try:
        yield from look_at_gold(config, problems, reward)
        if device is not None:
            yield from look_at_samples(
                config, tokenizer, device, reward, problems.training[:num_prompts]
            )
    finally:
        getattr(reward, "close", lambda: None)()  # its processes


def look_at_gold(config: RunConfig, problems: Problems, reward: Reward) -> Iterator[Finding]:
    """A gold answer that earns less than 1 teaches the policy that right is wrong."""
    pairs = gold_completions(config, problems)
    verdicts, failed = attempt("gold answers", lambda: reward.grade(*zip(*pairs, strict=True)))
    yield from failed
    if verdicts is None:
        return
    wrong = [
        (*pair, verdict)
        for pair, verdict in zip(pairs, verdicts, strict=True)
        if verdict.reward != 1.0
    ]
    if not wrong:
        yield Finding("ok", "gold answers", f"all {len(pairs)} that were graded earn reward 1")
        return
    few = "; ".join(
        f"{p.id}: {_short(text)} earns {verdict.reward:g} ({verdict.reason})"
        for p, text, verdict in wrong[:3]
    )
    own = ":" not in config.reward.name  # a user's function may want another form than ours
    failing = own and 1 - len(wrong) / len(pairs) < GOLD_SHARE
    advice = (
        "mend these answers in the data, or choose another reward.name"
        if own
        else "check the reward's function"
    )
    text = f"{len(wrong)} of {len(pairs)} do not earn reward 1: {few}"
    yield Finding("fail" if failing else "warn", "gold answers", text, advice)


def gold_completions(config: RunConfig, problems: Problems) -> list[tuple[Prompt, str]]:
    """Completions that must earn the reward: the task's demonstrations, or gold answers in a box."""
    if isinstance(config.task, CountdownConfig | SumsConfig):
        return problems.task.demonstrations(0, GOLD_PROMPTS)
    chosen = problems.training + [
        p for prompts in problems.evaluation.values() for p in prompts[:GOLD_PROMPTS]
    ]
    return [(prompt, f"\\boxed{{{_gold(prompt)}}}") for prompt in chosen]


def _gold(prompt: Prompt) -> str:
    return str(
        prompt.answer["entry"]["answer"] if isinstance(prompt.answer, dict) else prompt.answer
    )


# --- samples ----------------------------------------------------------------------------------------------------------


def look_at_samples(
    config: RunConfig, tokenizer: Any, device: torch.device, reward: Reward, prompts: list[Prompt]
) -> Iterator[Finding]:
    engine, failed = attempt("model", lambda: load_engine(config, tokenizer, device))
    yield from failed
    if engine is None:
        return
    num_samples = min(SAMPLES, config.algorithm.group_size)
    drawn, failed = attempt("samples", lambda: draw(engine, config, prompts, num_samples))
    yield from failed
    if drawn is None:
        return
    groups, limit = drawn
    texts = [completion.text for group in groups for completion in group]
    owners = [prompt for prompt in prompts for _ in range(num_samples)]
    verdicts, failed = attempt("reward", lambda: reward.grade(owners, texts))
    yield from failed
    if verdicts is not None:
        yield from judge_samples(config, groups, verdicts, limit)


def load_engine(config: RunConfig, tokenizer: Any, device: torch.device) -> TransformersEngine:
    dtype = loading.pick_dtype(config.rollout.dtype, device)
    model = loading.load_model(replace(config.model, gradient_checkpointing=False), device, dtype)
    return TransformersEngine(model, tokenizer, config.rollout.max_rows, config.rollout.stop)


def draw(
    engine: TransformersEngine, config: RunConfig, prompts: list[Prompt], num_samples: int
) -> tuple[list[list[Completion]], int]:
    """Groups as the run would sample them, and the length they were cut at: shorter where it would take minutes."""
    sampling = Sampling(config.algorithm.temperature, PROBED_TOKENS, config.training.seed, "doctor")
    started = time.perf_counter()
    engine.generate(prompts, num_samples, sampling)
    seconds = (time.perf_counter() - started) / PROBED_TOKENS
    limit = min(
        config.algorithm.max_new_tokens, max(PROBED_TOKENS, int(SAMPLING_SECONDS / seconds))
    )
    return engine.generate(prompts, num_samples, replace(sampling, max_new_tokens=limit)), limit


def judge_samples(
    config: RunConfig, groups: list[list[Completion]], verdicts: list[Verdict], limit: int
) -> Iterator[Finding]:
    completions = [completion for group in groups for completion in group]
    rewards = torch.tensor([verdict.reward for verdict in verdicts]).view(len(groups), -1)  # [Q, n]
    length = sum(len(completion.token_ids) for completion in completions) / len(completions)
    yield Finding(
        "ok", "samples", f"{len(groups)} prompts x {rewards.shape[1]}: mean length {length:.0f} tokens, "
        f"entropy {mean_entropy(completions):.2f} nats a token",
    )  # fmt: skip
    yield judge_endings(config, completions, limit)
    yield judge_format(config, completions, verdicts)
    yield judge_rewards(rewards)


def judge_endings(config: RunConfig, completions: list[Completion], limit: int) -> Finding:
    share = sum(not completion.finished for completion in completions) / len(completions)
    wanted = config.algorithm.max_new_tokens
    text = f"{share:.0%} of completions are cut off at {limit} tokens"
    if limit < wanted and share > 0:
        return Finding(
            "warn", "truncation", f"{text}, where this check ended them to stay under a minute"
        )
    if share == 1:
        advice = f"none ever ended: algorithm.max_new_tokens = {2 * wanted}, a rollout.stop, or another task.template"
        return Finding("warn", "truncation", text, advice)
    if share > 0.2:
        return Finding("warn", "truncation", text, f"algorithm.max_new_tokens = {2 * wanted}")
    return Finding("ok", "truncation", text)


def judge_format(
    config: RunConfig, completions: list[Completion], verdicts: list[Verdict]
) -> Finding:
    share = sum(verdict.answer is not None for verdict in verdicts) / len(verdicts)
    text = f"an answer is found in {share:.0%} of completions"
    if share >= 0.5:
        return Finding("ok", "format", text)
    lost = next(
        c for c, verdict in zip(completions, verdicts, strict=True) if verdict.answer is None
    )
    advice = "another task.template, or a warm start (eepo warmup)"
    if isinstance(config.task, DatasetConfig) and not lost.finished:
        advice = f"algorithm.max_new_tokens = {2 * config.algorithm.max_new_tokens} (the first was cut off), or {advice}"
    return Finding("warn", "format", f"{text}; one without: {_short(lost.text, 200)}", advice)


def judge_rewards(rewards: torch.Tensor) -> Finding:  # [Q, n]
    """A group whose rewards are all the same has no advantage: nothing is learned from it."""
    zero = (
        float((group_advantages(rewards) == 0).all(1).float().mean())
        if rewards.shape[1] > 1
        else 1.0
    )
    text = f"mean {float(rewards.mean()):.3f}; no advantage in {zero:.0%} of groups of {rewards.shape[1]}"
    if not rewards.any():
        advice = "easier problems, a warm start, a larger algorithm.group_size; or the grader is wrong: see eepo grade"
        return Finding("warn", "reward", text, advice)
    if bool((rewards == 1).all()):
        return Finding(
            "warn", "reward", text, "harder problems: there is nothing left to learn from these"
        )
    return Finding("ok", "reward", text)


def _short(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
