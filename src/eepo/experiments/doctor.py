"""Checks a recipe before a long run and reports findings, each with advice what to change.

The checks run in the order in which they are defined below, cheap ones first. If a check fails,
only the checks that depend on it are skipped. Nothing is trained and nothing is written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from eepo import recipe
from eepo.algorithm import group_advantages
from eepo.config import CountdownConfig, DatasetConfig, RunConfig, ShortcutConfig, SumsConfig
from eepo.model import loading, lora, memory
from eepo.protocols import Reward, Task
from eepo.rewards import build_reward, reward_columns
from eepo.rollout import vllm
from eepo.rollout.transformers import TransformersEngine
from eepo.tasks import build_task
from eepo.types import Completion, Prompt, Sampling, UserError, Verdict, mean_entropy

GOLD_PROMPTS = 200  # gold answers graded per set: of training, and of each evaluation set
MIN_GOLD_SHARE = 0.98  # below this share of correct gold answers, the check fails
MEMORY_SHARE = 0.85  # above this share of the free memory, the check warns
PREVIEW_CHARACTERS = 600  # of the prompt that is shown
MAX_SAMPLES = 4  # completions per prompt
SAMPLING_SECONDS = 60.0  # approximate limit
PROBE_TOKENS = 8  # sampled first, to measure the seconds per token
UNKNOWN_PROMPT_TOKENS = 256  # assumed length of the longest prompt if the data cannot be read


@dataclass(frozen=True)
class Finding:
    """Reports the result of a check."""

    level: Literal["ok", "warn", "fail", "skip"]
    name: str
    text: str
    advice: str = ""

    def line(self) -> str:
        advice = f" -> {self.advice}" if self.advice else ""
        return f"{self.level:4}  {self.name}: {self.text}{advice}"


@dataclass(frozen=True)
class Problems:
    """Holds the prompts of a task."""

    task: Task
    num_train: int  # 0: the task generates as many as needed
    training: list[Prompt]  # the first ones
    evaluation: dict[str, list[Prompt]]  # all of them, by set

    @classmethod
    def read(cls, config: RunConfig, tokenizer: Any) -> Problems:
        columns = reward_columns(config.reward.name)
        task = build_task(config.task, tokenizer, config.training.seed, columns)
        num_train: int = getattr(task, "num_train", getattr(config.task, "num_train", 0))
        training = task.training_prompts(0, min(num_train or GOLD_PROMPTS, GOLD_PROMPTS))
        return cls(task, num_train, training, task.evaluation_sets())

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt."""
        sets = [self.training, *self.evaluation.values()]
        return max(len(prompt.token_ids) for prompts in sets for prompt in prompts)


@dataclass
class Context:
    """Holds the recipe and the objects that checks have loaded for later checks.

    A check may read an object only if it declares that it needs the check that loads it.
    """

    config: RunConfig
    num_prompts: int  # prompts to sample completions for
    longest_prompt: int = UNKNOWN_PROMPT_TOKENS
    device: torch.device = field(init=False)
    tokenizer: Any = field(init=False)
    problems: Problems = field(init=False)
    shape: memory.Shape = field(init=False)
    reward: Reward | None = None

    @property
    def rollout_dtype(self) -> torch.dtype:
        return loading.pick_dtype(self.config.rollout.dtype, self.device)

    def close(self) -> None:
        """End the processes of the grader, if it has any."""
        getattr(self.reward, "close", lambda: None)()


CheckFunction = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    name: str
    needs: tuple[str, ...]  # names of checks that must not have failed
    function: CheckFunction

    def run(self, context: Context) -> Iterator[Finding]:
        """Yield the findings. A mistake of the user or too little memory is a failure."""
        try:
            yield from self.function(context)
        except (UserError, torch.OutOfMemoryError) as error:
            yield Finding("fail", self.name, str(error).splitlines()[0])


CHECKS: list[Check] = []  # in the order of their definition


def check(name: str, needs: tuple[str, ...] = ()) -> Callable[[CheckFunction], CheckFunction]:
    """Add the decorated function to `CHECKS`."""

    def add(function: CheckFunction) -> CheckFunction:
        CHECKS.append(Check(name, needs, function))
        return function

    return add


def examine(name: str, overrides: Sequence[str] = (), num_prompts: int = 8) -> Iterator[Finding]:
    """Run all checks on a recipe and yield the findings as they are made."""
    try:
        config = recipe.load_run(name, overrides)
    except UserError as error:
        yield Finding("fail", "recipe", str(error))
        return
    yield Finding("ok", "recipe", describe(config))
    causes: dict[str, str] = {}  # failed or skipped check -> the failed check that is the cause
    with closing(Context(config, num_prompts)) as context:
        for check in CHECKS:
            cause = next((causes[need] for need in check.needs if need in causes), None)
            if cause:
                causes[check.name] = cause
                yield Finding("skip", check.name, f"not checked, because {cause} failed")
                continue
            for finding in check.run(context):
                if finding.level == "fail":
                    causes[check.name] = check.name
                yield finding


def describe(config: RunConfig) -> str:
    algorithm, training = config.algorithm, config.training
    method = "GRPO" if algorithm.num_stages == 1 else f"EEPO in {algorithm.num_stages} stages"
    return (
        f"{config.name}: {method}, {training.num_steps} steps of {training.prompts_per_step} "
        f"prompts x {algorithm.group_size} completions of at most {algorithm.max_new_tokens} tokens"
    )


# --- device, engine, data and prompts -----------------------------------------------------------


@check("device")
def check_device(context: Context) -> Iterable[Finding]:
    context.device = loading.pick_device(context.config.model.device)
    return ()


@check("engine")
def check_engine(context: Context) -> Iterator[Finding]:
    """Check that vLLM is installed. It is not started: that takes time and GPU memory."""
    if context.config.rollout.engine == "vllm":
        vllm.check_installed()
        version = vllm.installed_version()
        yield Finding(
            "ok", "engine", f"vLLM {version} is installed; transformers draws the samples below"
        )


@check("tokenizer")
def check_tokenizer(context: Context) -> Iterable[Finding]:
    context.tokenizer = loading.load_tokenizer(context.config.model)
    return ()


@check("data", needs=("tokenizer",))
def check_data(context: Context) -> Iterator[Finding]:
    config = context.config
    context.problems = problems = Problems.read(config, context.tokenizer)
    context.longest_prompt = problems.longest
    prompts_per_step, num_train = config.training.prompts_per_step, problems.num_train
    training = "unlimited training problems"
    if num_train:
        epochs = config.training.num_steps * prompts_per_step / num_train
        training = f"{num_train:,} training problems, {epochs:.1f} epochs"
    sets = ", ".join(f"{name} ({len(prompts)})" for name, prompts in problems.evaluation.items())
    text = (
        f"{training}; evaluation: {sets or 'none'}; longest prompt: {context.longest_prompt} tokens"
    )
    if sets:
        yield Finding("ok", "data", text)
    else:
        advice = "name evaluation sets in task.evaluation; without one, progress is not measured"
        yield Finding("warn", "data", text, advice)
    for note in getattr(problems.task, "notes", []):
        yield Finding("warn", "data", note)
    if 0 < num_train < prompts_per_step:
        text = f"a step takes {prompts_per_step} prompts, but there are only {num_train}"
        yield Finding("warn", "data", text, f"training.prompts_per_step = {num_train} or fewer")


@check("prompt", needs=("data",))
def check_prompt(context: Context) -> Iterator[Finding]:
    """Show a prompt as the model sees it, and compare its template with the name of the model."""
    prompt, path = context.problems.training[0], context.config.model.path
    template = getattr(context.config.task, "template", "")
    text = f"{len(prompt.token_ids)} tokens: {_shorten(prompt.text, PREVIEW_CHARACTERS)}"
    instruct = re.search(r"instruct|chat|-it\b", path, re.IGNORECASE)
    advice = ""
    if template == "boxed" and instruct and context.tokenizer.chat_template:
        advice = f'{path} is trained on a chat template; try task.template = "chat"'
    elif template == "chat" and re.search(r"\bbase\b", path, re.IGNORECASE):
        advice = f'{path} looks like a base model; try task.template = "boxed"'
    yield Finding("warn" if advice else "ok", "prompt", text, advice)


# --- model, memory and disk ---------------------------------------------------------------------


@check("model")
def check_model(context: Context) -> Iterable[Finding]:
    shape = memory.shape_of(*loading.load_shape(context.config.model))
    context.shape = lora.with_adapter(shape, context.config.model)
    return ()


@check("precision", needs=("model", "device"))
def check_precision(context: Context) -> Iterator[Finding]:
    """Show the size and the dtypes of the model; warn if training and sampling dtypes differ."""
    lora.check(context.config, context.device)
    millions = context.shape.num_parameters / 1e6
    dtype = str(context.rollout_dtype).removeprefix("torch.")
    yield Finding(
        "ok",
        "model",
        f"{context.config.model.path}: {millions:,.1f} million parameters on {context.device}, "
        f"{_trained_in(context)}, sampled in {dtype}",
    )
    if mismatch := loading.dtype_mismatch(context.config, context.device):
        advice = "set rollout.dtype and model.compute_dtype to the same dtype"
        yield Finding("warn", "precision", mismatch, advice)


def _trained_in(context: Context) -> str:
    if not context.config.model.lora_rank:
        return "trained in float32"
    base = loading.pick_dtype(context.config.model.compute_dtype, context.device)
    return (
        f"an adapter of {context.shape.num_trained / 1e6:,.1f} million parameters trained in "
        f"float32 on a base in {str(base).removeprefix('torch.')}"
    )


@check("unlearning")
def check_unlearning(context: Context) -> Iterator[Finding]:
    """Warn about a fixed rate: 3e-3 gave a KL of 1.2 with one model and of .06 with another."""
    rate = context.config.algorithm.unlearn_lr
    if context.config.algorithm.num_stages > 1 and rate != "auto" and rate > 0:
        text = f"unlearn_lr = {rate:g} is fixed, and moves some models much further than others"
        advice = 'unlearn_lr = "auto", or check in the first steps that unlearn/kl is below 0.1'
        yield Finding("warn", "unlearning", text, advice)


@check("length", needs=("model",))
def check_length(context: Context) -> Iterator[Finding]:
    prompt, new_tokens = context.longest_prompt, context.config.algorithm.max_new_tokens
    limit = context.shape.max_positions
    text = (
        f"prompts of up to {prompt} + {new_tokens} new tokens; "
        f"the model has {limit or 'any number of'} positions"
    )
    if limit is None or prompt + new_tokens <= limit:
        yield Finding("ok", "length", text)
    elif prompt < limit:
        yield Finding("fail", "length", text, f"algorithm.max_new_tokens = {limit - prompt}")
    else:
        yield Finding("fail", "length", text, "a smaller task.max_prompt_tokens")


@check("memory", needs=("model", "device"))
def check_memory(context: Context) -> Iterator[Finding]:
    free = memory.free_memory(context.device)
    if free is not None:
        yield judge_memory(
            memory.Budget(
                shape=context.shape,
                config=context.config,
                prompt_tokens=context.longest_prompt,
                rollout_dtype=context.rollout_dtype,
                cuda=context.device.type == "cuda",
                free=free,
            )
        )


def judge_memory(budget: memory.Budget) -> Finding:
    estimate, free = budget.estimate(), budget.free
    text = (
        f"about {memory.format_bytes(estimate.total)} of {memory.format_bytes(free)} free; "
        f"during the whole run: {_sizes(estimate.persistent)}; "
        f"in addition the larger of: {_sizes(estimate.phases)}"
    )
    if estimate.kv_cache:
        left = free - estimate.persistent_total - estimate.phases["sampling"]
        share = min(1.0, max(0, left) / estimate.kv_cache)
        text += f"; the rest holds {100 * share:.0f} % of the KV cache of all rows at full length"
    if estimate.total <= MEMORY_SHARE * free:
        return Finding("ok", "memory", text)
    advice = advise_memory(replace(budget, free=int(MEMORY_SHARE * free)))
    return Finding("fail" if estimate.total > free else "warn", "memory", text, advice)


def advise_memory(budget: memory.Budget) -> str:
    """Propose knobs that do not change the result; a smaller optimizer only if they do not help."""
    knobs = budget.memory_saving_knobs()
    if knobs is not None:
        return _settings(knobs)
    choice = budget.smaller_optimizer()
    if choice is None:
        if budget.config.model.lora_rank:
            return "a smaller model, or a larger device"
        return (
            "a smaller model, a larger device, model.lora_rank = 16 (train an adapter), or "
            "algorithm.kl_coef = 0 (no reference model)"
        )
    optimizer, knobs = choice
    others = f", and {_settings(knobs)}" if knobs else ""
    return f'training.optimizer = "{optimizer}" (rounds its moments: results may differ){others}'


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {memory.format_bytes(size)}" for name, size in sizes.items())


def _settings(knobs: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {str(value).lower()}" for key, value in knobs.items())


@check("host copy", needs=("model",))
def check_host_copy(context: Context) -> Iterator[Finding]:
    optimizer = context.config.training.optimizer
    size = memory.host_copy_bytes(context.shape.num_trained, optimizer)
    free = memory.free_memory(torch.device("cpu"))
    if free is None:
        return
    text = (
        f"the copy that undoes a failed step takes {memory.format_bytes(size)} of "
        f"{memory.format_bytes(free)} free host memory"
    )
    if memory.host_copy_fits(size, free):
        yield Finding("ok", "host copy", text)
    else:
        advice = (
            "a smaller training.checkpoint_every; if memory runs out in an update, the run "
            "continues from its last checkpoint"
        )
        yield Finding("warn", "host copy", f"{text}, more than half: it is left out", advice)


@check("disk", needs=("model",))
def check_disk(context: Context) -> Iterator[Finding]:
    num_checkpoints = memory.most_checkpoints(context.config.training)
    size = memory.checkpoint_bytes(context.shape, context.config, num_checkpoints)
    free = memory.free_disk(Path.cwd())
    text = (
        f"checkpoints take up to {memory.format_bytes(size)} "
        f"({context.config.training.keep_checkpoints} kept); "
        f"{memory.format_bytes(free)} free in this folder"
    )
    if size <= free:
        yield Finding("ok", "disk", text)
    else:
        advice = "training.keep_checkpoints = 1, or an --out on another disk"
        yield Finding("fail", "disk", text, advice)


# --- reward -------------------------------------------------------------------------------------


@check("reward")
def check_reward(context: Context) -> Iterable[Finding]:
    context.reward = build_reward(context.config.reward, context.config.task)
    return ()


@check("gold answers", needs=("data", "reward"))
def check_gold_answers(context: Context) -> Iterator[Finding]:
    assert context.reward is not None
    pairs = gold_completions(context.config, context.problems)
    verdicts = context.reward.grade(*zip(*pairs, strict=True))
    user_function = ":" in context.config.reward.name
    if user_function:  # it may expect the bare answer, without a box
        bare = [(prompt, _gold_answer(prompt)) for prompt, _ in pairs]
        others = context.reward.grade(*zip(*bare, strict=True))
        verdicts = [
            max(both, key=lambda v: v.reward) for both in zip(verdicts, others, strict=True)
        ]
    yield judge_gold_answers(pairs, verdicts, user_function)


def gold_completions(config: RunConfig, problems: Problems) -> list[tuple[Prompt, str]]:
    """Return completions that must earn reward 1: demonstrations, or gold answers in a box."""
    if isinstance(config.task, CountdownConfig | SumsConfig):
        demonstrations = problems.task.demonstrations(0, GOLD_PROMPTS)
        return [(demonstration.prompt, demonstration.text) for demonstration in demonstrations]
    if isinstance(config.task, ShortcutConfig):
        return [(prompt, f"> {prompt.answer}") for prompt in problems.training]
    prompts = list(problems.training)
    for evaluation_set in problems.evaluation.values():
        prompts += evaluation_set[:GOLD_PROMPTS]
    return [(prompt, f"\\boxed{{{_gold_answer(prompt)}}}") for prompt in prompts]


def _gold_answer(prompt: Prompt) -> str:
    answer = prompt.answer
    is_entry = isinstance(answer, dict) and "entry" in answer  # of reasoning-gym
    return str(answer["entry"]["answer"] if is_entry else answer)


def judge_gold_answers(
    pairs: Sequence[tuple[Prompt, str]], verdicts: Sequence[Verdict], user_function: bool
) -> Finding:
    """Check that gold answers earn reward 1: otherwise training punishes correct completions."""
    wrong = [
        f"{prompt.id}: {_shorten(text)} earns {verdict.reward:g} ({verdict.reason})"
        for (prompt, text), verdict in zip(pairs, verdicts, strict=True)
        if verdict.reward < 1
    ]
    if not wrong:
        return Finding("ok", "gold answers", f"all {len(pairs)} graded ones earn reward 1")
    text = f"{len(wrong)} of {len(pairs)} do not earn reward 1: {'; '.join(wrong[:3])}"
    if user_function:  # it may expect yet another format
        advice = "tried bare and in \\boxed{}: ignore this if your function expects another format"
        return Finding("warn", "gold answers", text, advice)
    level: Literal["warn", "fail"] = "warn"
    if 1 - len(wrong) / len(pairs) < MIN_GOLD_SHARE:
        level = "fail"
    advice = "correct these answers in the data, or choose another reward.name"
    return Finding(level, "gold answers", text, advice)


# --- samples ------------------------------------------------------------------------------------


# Loading the weights takes time, so nothing is sampled if the run could not finish anyway.
@check("samples", needs=("data", "model", "device", "length", "memory", "disk", "reward"))
def check_samples(context: Context) -> Iterator[Finding]:
    assert context.reward is not None
    config, prompts = context.config, context.problems.training[: context.num_prompts]
    engine = load_engine(config, context.tokenizer, context.device)
    groups, limit = sample(engine, config, prompts)
    completions = [completion for group in groups for completion in group]
    owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    verdicts = context.reward.grade(owners, [completion.text for completion in completions])
    rewards = torch.tensor([verdict.reward for verdict in verdicts]).view(len(groups), -1)  # [Q, n]
    length = sum(len(completion.token_ids) for completion in completions) / len(completions)
    yield Finding(
        "ok",
        "samples",
        f"{len(groups)} prompts x {rewards.shape[1]}: mean length {length:.0f} tokens, "
        f"entropy {mean_entropy(completions):.2f} nats per token",
    )
    yield judge_truncation(config, completions, limit)
    yield judge_format(config, completions, verdicts)
    yield judge_rewards(rewards)


def load_engine(config: RunConfig, tokenizer: Any, device: torch.device) -> TransformersEngine:
    dtype = loading.pick_dtype(config.rollout.dtype, device)
    model = loading.load_model(replace(config.model, gradient_checkpointing=False), device, dtype)
    return TransformersEngine(model, tokenizer, config.rollout.max_rows, config.rollout.stop)


def sample(
    engine: TransformersEngine, config: RunConfig, prompts: list[Prompt]
) -> tuple[list[list[Completion]], int]:
    """Return groups sampled as in the run, and the length limit that was used.

    The limit is lower than the recipe's if sampling would take much more than a minute.
    """
    algorithm = config.algorithm
    num_samples = min(MAX_SAMPLES, algorithm.group_size)
    sampling = Sampling(algorithm.temperature, PROBE_TOKENS, config.training.seed, "doctor")
    started = time.perf_counter()
    engine.generate(prompts, num_samples, sampling)
    seconds_per_token = (time.perf_counter() - started) / PROBE_TOKENS
    affordable = max(PROBE_TOKENS, int(SAMPLING_SECONDS / seconds_per_token))
    limit = min(algorithm.max_new_tokens, affordable)
    return engine.generate(prompts, num_samples, replace(sampling, max_new_tokens=limit)), limit


def judge_truncation(config: RunConfig, completions: list[Completion], limit: int) -> Finding:
    share = sum(not completion.finished for completion in completions) / len(completions)
    max_new_tokens = config.algorithm.max_new_tokens
    text = f"{share:.0%} of completions are cut off at {limit} tokens"
    if limit < max_new_tokens and share > 0:
        text += ", a limit of this check to stay under a minute"
        return Finding("warn", "truncation", text)
    advice = f"algorithm.max_new_tokens = {2 * max_new_tokens}"
    if share == 1:
        advice = f"no completion ended: {advice}, a rollout.stop, or another task.template"
    if share > 0.2:
        return Finding("warn", "truncation", text, advice)
    return Finding("ok", "truncation", text)


def judge_format(
    config: RunConfig, completions: list[Completion], verdicts: list[Verdict]
) -> Finding:
    no_answer = [
        completion
        for completion, verdict in zip(completions, verdicts, strict=True)
        if verdict.answer is None
    ]
    share = (len(completions) - len(no_answer)) / len(completions)
    text = f"the grader finds an answer in {share:.0%} of completions"
    if share >= 0.5:
        return Finding("ok", "format", text)
    example = no_answer[0]
    advice = "another task.template, or a warm start (eepo warmup)"
    if isinstance(config.task, DatasetConfig) and not example.finished:
        longer = f"algorithm.max_new_tokens = {2 * config.algorithm.max_new_tokens}"
        advice = f"{longer} (the example was cut off), or {advice}"
    text += f"; example without an answer: {_shorten(example.text, 200)}"
    return Finding("warn", "format", text, advice)


def judge_rewards(rewards: torch.Tensor) -> Finding:  # [Q, n]
    """Warn if all groups have equal rewards: their advantages are 0, so nothing is learned."""
    zero_share = 1.0
    if rewards.shape[1] > 1:
        zero_share = float((group_advantages(rewards) == 0).all(1).float().mean())
    text = (
        f"mean {float(rewards.mean()):.3f}; "
        f"all advantages are 0 in {zero_share:.0%} of groups of {rewards.shape[1]}"
    )
    if not rewards.any():
        advice = (
            "easier problems, a warm start or a larger algorithm.group_size; "
            "or check the grader with eepo grade"
        )
        return Finding("warn", "reward", text, advice)
    if bool((rewards == 1).all()):
        advice = "harder problems: the policy already solves these every time"
        return Finding("warn", "reward", text, advice)
    return Finding("ok", "reward", text)


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
