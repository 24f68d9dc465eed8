"""Builds trainers, warm starts and evaluations from their settings. Nothing else does."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from eepo import recipe
from eepo.algorithm import EEPO
from eepo.config import (
    DatasetConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SupervisedConfig,
    TaskConfig,
    TrainingConfig,
    WarmupConfig,
)
from eepo.evaluation.benchmark_prompts import benchmark_sets
from eepo.evaluation.benchmark_run import BenchmarkEvaluation, weights_digest
from eepo.evaluation.defaults import describe_evaluation, fill_up
from eepo.evaluation.evaluate import Evaluator
from eepo.evaluation.options import OPTION_NAMES, BenchmarkOptions
from eepo.evaluation.sets import PromptSet, task_sets
from eepo.evaluation.store import Store
from eepo.evaluation.trained_run import TrainedRun, find_run
from eepo.model import loading, lora, memory
from eepo.model.optimizers import build_optimizer
from eepo.model.policies import (
    add_adapter,
    base_dtype,
    build_policy,
    build_reference,
    weights_writer,
)
from eepo.model.scratch import new_model
from eepo.protocols import Reward, Task
from eepo.rewards import build_grader, build_reward, reward_columns
from eepo.rewards.isolation import PooledReward
from eepo.rollout.builtin import builtin_engine
from eepo.rollout.engines import build_engine
from eepo.rollout.vllm import check_installed
from eepo.runs import resume as resuming
from eepo.runs.alarm import AlarmMonitor
from eepo.runs.checkpoint import Checkpointer
from eepo.runs.knobs import check_same
from eepo.runs.lock import RunLock
from eepo.runs.loggers import build_logger, check_logger
from eepo.runs.progress import Progress
from eepo.runs.resume import Start
from eepo.runs.runlog import RunLog, resume_command
from eepo.tasks import build_task, build_tokenizer
from eepo.trainer import Trainer
from eepo.types import Prompt, UserError
from eepo.warmup import Warmup


def build_trainer(
    config: RunConfig, out: Path, resume: bool, progress: Progress, force: bool = False
) -> Trainer:
    """Return a trainer at step 0, or at the newest intact checkpoint in `out`.

    It holds the lock of the folder. `force` overrides the checks of `RunLock` and `find_start`.
    """
    check_logger(config.logging)
    lock = RunLock(out, force)
    with lock.released_on_error():
        start = find_start(config, out, resume, force, progress)
        return _trainer(config, start, lock, progress)


def _trainer(config: RunConfig, start: Start, lock: RunLock, progress: Progress) -> Trainer:
    out = lock.folder
    device = loading.pick_device(config.model.device)
    tokenizer = loading.load_tokenizer(config.model)
    task = _task(config.task, config.reward, tokenizer, config.training.seed, progress)
    reward = _open(build_reward(config.reward, config.task))
    _check_engine(config.rollout)
    lora.check(config, device)
    # Only now the weights, which can take minutes: what is missing has been reported.
    free = memory.free_memory(device)
    saved = start.checkpoint
    base = loading.load_model(config.model, device, base_dtype(config.model, device))
    model = base if config.model.lora_rank else _model_at(config.model, saved, device, base)
    limit = config.algorithm.max_new_tokens
    check_length(model, _prompts(task, config), "algorithm.max_new_tokens =", limit)
    if start.step < config.training.num_steps:
        check_disk(out, memory.checkpoint_bytes(_shape(model, config.model), config, 1))
    if mismatch := loading.dtype_mismatch(config, device):
        progress.print(f"note: {mismatch}; use the same rollout.dtype and model.compute_dtype")
    keep = _cache_bytes(model, config, free) if free and device.type == "cuda" else None
    if not config.rollout.merge_lora:
        add_adapter(model, config, saved)
    # The engine copies the model before the policy replaces its attention.
    engine = build_engine(model, tokenizer, config.rollout, config.model, keep)
    if config.rollout.merge_lora:
        add_adapter(model, config, saved)
    policy = build_policy(model, config.model, merges=config.rollout.merge_lora)
    optimizer = _optimizer(model, config.training)
    reference = build_reference(policy, base, config.model) if config.algorithm.kl_coef else None
    algorithm = EEPO(
        policy=policy,
        reference=reference,
        engine=engine,
        reward=reward,
        optimizer=optimizer,
        options=config.algorithm,
        mini_batch=config.training.prompts_per_mini_batch,
        max_grad_norm=config.training.max_grad_norm,
    )
    logger = build_logger(config.logging, out, start.step, dataclasses.asdict(config), progress)
    folder, keep_checkpoints = out / "checkpoints", config.training.keep_checkpoints
    writer = weights_writer(policy)
    trainer = Trainer(
        config=config,
        algorithm=algorithm,
        policy=policy,
        evaluator=Evaluator(engine, reward),
        checkpointer=Checkpointer(folder, model, tokenizer, optimizer, keep_checkpoints, writer),
        task=task,
        log=open_log(config, out, start, progress),
        progress=progress,
        alarm_monitor=AlarmMonitor(config.alarm, out),
        logger=logger,
        lock=lock,
    )
    torch.manual_seed(config.training.seed)  # no part of a run uses it; checkpoints contain it
    if saved:
        trainer.restore(saved)
    return trainer


def build_warmup(
    config: WarmupConfig, out: Path, resume: bool, progress: Progress, force: bool = False
) -> Warmup:
    """Return a warm start at step 0, or at the newest intact checkpoint in `out`."""
    lock = RunLock(out, force)
    with lock.released_on_error():
        start = find_start(config, out, resume, force, progress)
        return _warmup(config, start, lock, progress)


def _warmup(config: WarmupConfig, start: Start, lock: RunLock, progress: Progress) -> Warmup:
    out, saved = lock.folder, start.checkpoint
    if config.model.lora_rank:
        raise UserError(
            f"model.lora_rank = {config.model.lora_rank} in a warm start, which trains all "
            "weights; allowed: 0"
        )
    device = loading.pick_device(config.model.device)
    scratch = config.model.path == "scratch"
    tokenizer = build_tokenizer(config.task) if scratch else loading.load_tokenizer(config.model)
    task = _task(config.task, config.reward, tokenizer, 0, progress)
    task.evaluation_sets()  # a wrong set is an error now, and not after the last step
    reward = _open(build_reward(config.reward, config.task))
    _check_engine(config.rollout)
    if saved:
        model = _model_at(config.model, saved, device, None)
    elif scratch:
        model = new_model(config.scratch, tokenizer, config.supervised.seed).to(device)
    else:
        model = loading.load_model(config.model, device)
    if start.step < config.supervised.num_steps:
        number = sum(weight.numel() for weight in model.parameters())
        check_disk(out, memory.saved_bytes(number, number, config.supervised.optimizer, 1))
    # The engine copies the model before the policy replaces its attention.
    engine = build_engine(model, tokenizer, config.rollout, config.model)
    policy = build_policy(model, config.model)
    optimizer = _optimizer(model, config.supervised)
    warmup = Warmup(
        config=config,
        policy=policy,
        evaluator=Evaluator(engine, reward),
        checkpointer=Checkpointer(out / "checkpoints", model, tokenizer, optimizer, keep=2),
        task=task,
        log=open_log(config, out, start, progress),
        progress=progress,
        lock=lock,
    )
    torch.manual_seed(config.supervised.seed)
    if saved:
        warmup.restore(saved)
    return warmup


def build_evaluation(
    options: BenchmarkOptions, out: Path, progress: Progress
) -> BenchmarkEvaluation:
    """Return an evaluation, at the start or where the one in `out` was stopped.

    User errors are raised before the weights are loaded.
    """
    run = find_run(options.model)
    settings = fill_up(options, run)
    where = ModelConfig(options.model, options.revision, options.trust_remote_code, options.device)
    device, tokenizer = loading.pick_device(where.device), loading.load_tokenizer(where)
    if run and not options.benchmarks:
        sets, reward = _sets_of_run(run, options, tokenizer, progress)
    else:
        if tokenizer.chat_template and options.template is None and not run:
            progress.print(
                f'prompts use the template "{settings.template}"; the model also has a chat '
                "template, which --template chat selects"
            )
        sets = benchmark_sets(options, settings, run, tokenizer)
        reward = build_grader(RewardConfig(name=settings.reward))
    dtype = loading.pick_dtype(settings.dtype, device)
    store = Store(out)
    _open(reward)
    description = describe_evaluation(options, settings, run, sets) | {"dtype": str(dtype)}
    description["path"] = loading.resolve(options.model)
    store.check(description)
    model = loading.load_model(where, device, dtype)
    prompts = (prompt for prompt_set in sets for prompt in prompt_set.prompts)
    check_length(model, prompts, "--max-new-tokens", settings.max_new_tokens)
    description["weights"] = weights_digest(model)
    store.open(description, _describe(device), run.recipe_text() if run else "")
    engine = builtin_engine(model, tokenizer, settings.max_rows, settings.stop)
    sampling = settings.sampling(options.seed)
    return BenchmarkEvaluation(
        engine, reward, sets, store, options.num_samples, sampling, engine.max_rows, progress,
        options.sample_limit,
    )  # fmt: skip


def _sets_of_run(
    run: TrainedRun, options: BenchmarkOptions, tokenizer: Any, progress: Progress
) -> tuple[list[PromptSet], Reward]:
    """Return the evaluation sets of the run's task, and its grader."""
    kind: type[RunConfig | WarmupConfig] = RunConfig if run.seed is not None else WarmupConfig
    config = recipe.load(kind, run.folder / "recipe.toml")
    names = ("data_dir", "template", "max_prompt_tokens")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    if changes and not isinstance(config.task, DatasetConfig):
        raise UserError(
            f"{OPTION_NAMES[next(iter(changes))]} needs --benchmarks: the run has the task "
            f'"{config.task.name}"'
        )
    config_task = dataclasses.replace(config.task, **changes)
    reward = config.reward if options.reward is None else RewardConfig(name=options.reward)
    task = _task(config_task, reward, tokenizer, run.seed or 0, progress)
    sets = task_sets(task, options.limit)
    if not sets:
        raise UserError(
            f"{options.model}: the task of this run has no evaluation sets; give --benchmarks"
        )
    if options.reward is not None:
        return sets, build_grader(reward)
    return sets, build_reward(reward, config_task)


def check_length(model: Any, prompts: Iterable[Prompt], knob: str, max_new_tokens: int) -> None:
    """Check that prompts and completions fit into the model's positions.

    A model that runs out of positions writes noise or fails in the middle of a run.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if positions is not None and longest + max_new_tokens > positions:
        room = f"at most {positions - longest}, or " if longest < positions else ""
        raise UserError(
            f"{knob} {max_new_tokens} after a prompt of {longest} tokens exceeds the model's "
            f"{positions} positions; use {room}shorter prompts"
        )


def check_disk(out: Path, needed: int) -> None:
    """Raise an error if the next checkpoint and the final weights do not fit.

    Otherwise a run would end at its first checkpoint, and lose all steps before.
    """
    free = memory.free_disk(out) + resuming.leftover_bytes(out)
    if needed > free:
        raise UserError(
            f"--out {out}: a checkpoint and the final weights take {memory.format_bytes(needed)}, "
            f"but {memory.format_bytes(free)} are free; free some space, or use an --out on "
            "another disk"
        )


def check_folder(
    config: RunConfig | WarmupConfig, out: Path, resume: bool, force: bool = False, advice: str = ""
) -> None:
    """Raise an error if `out` holds something else than this run. This writes nothing.

    `advice` ends the error message if the run in `out` has other knobs.
    """
    recipe_file = out / "recipe.toml"
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    if not recipe_file.exists():
        if (names := resuming.run_files(out)) and not (resume and force):
            raise UserError(
                f"--out {out} has {', '.join(names)} of a run, but no recipe.toml; use another "
                "folder, or continue that run with --resume --force"
            )
        return
    if not resume:
        raise UserError(
            f"--out {out} already contains a run; add --resume to continue it, or use another "
            "folder"
        )
    check_same(
        config, recipe.load(type(config), recipe_file), recipe_file, advice or _advice(config, out)
    )


def find_start(
    config: RunConfig | WarmupConfig, out: Path, resume: bool, force: bool, progress: Progress
) -> Start:
    """Return where the run in `out` continues. The caller has the folder's lock."""
    check_folder(config, out, resume, force)
    recipe_file = out / "recipe.toml"
    before = recipe.load(type(config), recipe_file) if recipe_file.exists() else config
    loop = before.training if isinstance(before, RunConfig) else before.supervised
    command = _resume_command(config, out)
    start = resuming.find_start(out, loop.checkpoint_every, force, command)
    for note in start.notes:
        progress.print(f"note: {note}")
    return start


def open_log(
    config: RunConfig | WarmupConfig, out: Path, start: Start, progress: Progress
) -> RunLog:
    """Open the records of a run, and drop those after `start`."""
    log = RunLog(out)
    for note in resuming.open_records(log, start):
        progress.print(f"note: {note}")
    log.write_recipe(recipe.dump(config))
    if start.checkpoint is None:
        log.write_environment(_describe(loading.pick_device(config.model.device)))
    return log


def _advice(config: RunConfig | WarmupConfig, out: Path) -> str:
    """Say how to resume. The usual cause of a difference is a forgotten --set."""
    command = _resume_command(config, out)
    return f"repeat the same --set, or use another --out, or continue with: {command}"


def _resume_command(config: RunConfig | WarmupConfig, out: Path) -> str:
    return resume_command(out, "warmup" if isinstance(config, WarmupConfig) else "train")


def _task(
    config: TaskConfig, reward: RewardConfig, tokenizer: Any, order_seed: int, progress: Progress
) -> Task:
    """Build the task, and print its notes about the data."""
    task = build_task(config, tokenizer, order_seed, reward_columns(reward.name))
    for note in getattr(task, "notes", ()):
        progress.print(f"note: {note}")
    return task


def _open(reward: Reward) -> Reward:
    """Start the grading process, if the grader has one, so that a missing package is reported."""
    if isinstance(reward, PooledReward):
        reward.start()
    return reward


def _check_engine(config: RolloutConfig) -> None:
    if config.engine == "vllm":
        check_installed()


def _prompts(task: Task, config: RunConfig) -> Iterator[Prompt]:
    """Yield all prompts; if training prompts are unlimited, those of one step."""
    number: int = getattr(task, "num_train", 0) or config.training.prompts_per_step
    yield from task.training_prompts(0, number)
    for prompts in task.evaluation_sets().values():
        yield from prompts


def _model_at(config: ModelConfig, folder: Path | None, device: torch.device, base: Any) -> Any:
    """Load the weights of a checkpoint; without one, copy the `base`."""
    if folder is None:
        return copy.deepcopy(base)
    return loading.load_model(dataclasses.replace(config, path=str(folder.resolve())), device)


def _cache_bytes(model: Any, config: RunConfig, free: int) -> int:
    dtype = loading.pick_dtype(config.rollout.dtype, model.device)
    return memory.cache_bytes(_shape(model, config.model), config, dtype, free)


def _shape(model: Any, config: ModelConfig) -> memory.Shape:
    shape = memory.shape_of(model.config, sum(weight.numel() for weight in model.parameters()))
    return lora.with_adapter(shape, config)


def _optimizer(model: Any, loop: TrainingConfig | SupervisedConfig) -> torch.optim.Optimizer:
    return build_optimizer(
        loop.optimizer,
        [weight for weight in model.parameters() if weight.requires_grad],
        loop.learning_rate,
        loop.weight_decay,
        loop.seed,
    )


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device}, {torch.get_num_threads()} threads"
