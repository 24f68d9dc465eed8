"""The knobs, grouped by what they turn. Defaults are the paper's. Rules that a type cannot say stand in `metadata`.

Reading a recipe into these, with an error line for every mistake, is `recipe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal


def knob(
    default: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with a range: `above` is exclusive, `least` and `most` are inclusive."""
    return field(default=default, metadata={"above": above, "least": least, "most": most})


def compiles(choice: str, num_parameters: int) -> bool:
    """What `model.compile` says of a model of this size, where it can be compiled at all."""
    return choice == "on" or (
        choice == "auto" and num_parameters >= 100_000_000
    )  # else steps are too short for it


@dataclass(frozen=True)
class ModelConfig:
    """Where the policy starts. `path`: a folder, a run, a hub name, `builtin:countdown` or `package:smollm2`."""

    path: str = "builtin:countdown"
    revision: str = "main"
    trust_remote_code: bool = False
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    gradient_checkpointing: bool = False
    compile: Literal["auto", "on", "off"] = (
        "auto"  # layers, on a GPU; auto: of models with 100 million weights or more
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # of products in training; auto: bfloat16 on a GPU
    )
    micro_batch_tokens: int = knob(16384, least=1)  # padded tokens in one forward pass
    head_tokens: int = knob(4096, least=1)  # positions whose logits exist at one time


@dataclass(frozen=True)
class CountdownConfig:
    """Which problems. Ranges are inclusive; `out_of_range_*` is only evaluated, never trained on."""

    name: Literal["countdown"] = "countdown"
    num_numbers: int = knob(4, least=2, most=6)
    max_number: int = knob(12, least=2, most=99)
    min_target: int = knob(10, least=0)
    max_target: int = knob(60, least=0)
    out_of_range_min_target: int = knob(61, least=0)
    out_of_range_max_target: int = knob(99, least=0)
    num_train: int = knob(0, least=0)  # 0: a fresh problem every time
    num_evaluation: int = knob(200, least=1)  # problems in each evaluation set
    template: str = "{numbers} = {target} :"
    seed: int = knob(
        0, least=0
    )  # of the problem sets; the run's own seed says which of them come when


@dataclass(frozen=True)
class SumsConfig:
    """Sums of whole numbers after some solved ones: a task for a small pretrained model. Drawn afresh, as countdown is.

    Out of range: every number has one digit more than `max_digits`; only evaluated.
    """

    name: Literal["sums"] = "sums"
    num_terms: int = knob(2, least=2, most=6)
    max_digits: int = knob(2, least=1, most=6)
    num_examples: int = knob(4, least=0, most=32)  # solved sums before the question
    num_train: int = knob(0, least=0)  # 0: a fresh problem every time
    num_evaluation: int = knob(200, least=1)
    seed: int = knob(0, least=0)


@dataclass(frozen=True)
class DatasetConfig:
    """Problems with answers: .jsonl, .json or .parquet files, or hub data sets (owner/name or owner/name:config)."""

    name: Literal["dataset"] = "dataset"
    train: str = ""
    train_split: str = "train"  # of a hub data set
    evaluation: tuple[
        str, ...
    ] = ()  # benchmarks by name (math500, amc23, ...), files or hub data sets
    evaluation_split: str = "test"
    data_dir: str = (
        ""  # where files, and benchmarks as files, are looked for; empty: here, and the hub
    )
    problem_column: str = "problem"
    answer_column: str = "answer"  # a final answer, or a solution that ends in \\boxed{} or ####
    level_column: str = "level"
    levels: tuple[int, ...] = ()  # keep only these; empty: all
    skip_unanswered: bool = (
        False  # leave training rows without an answer out, and count them; false: they are errors
    )
    template: str = "boxed"  # boxed: an instruction for base models; chat: the model's own; or a text with {problem}
    max_prompt_tokens: int = knob(1024, least=1)  # longer prompts are left out, and counted


@dataclass(frozen=True)
class ReasoningGymConfig:
    """One of reasoning-gym's generators (extra `reasoning_gym`), graded by its own scorer."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = "chain_sum"
    template: str = "boxed"
    num_evaluation: int = knob(200, least=1)
    seed: int = knob(0, least=0)


TaskConfig = CountdownConfig | SumsConfig | DatasetConfig | ReasoningGymConfig


@dataclass(frozen=True)
class RewardConfig:
    """How completions are graded: by the task's own grader, one of ours by name, or the user's `module:function`."""

    name: str = "auto"  # auto | math | exact | countdown | reasoning_gym | module:function
    num_workers: int = knob(
        0, least=0, most=256
    )  # grading processes; 0: one for each core, at most 8
    cpu_seconds: float = knob(
        1.0, above=0, most=3600
    )  # for one completion; over it, its process is killed
    memory_mb: int = knob(1024, least=64)  # of one grading process, beyond what it starts with


@dataclass(frozen=True)
class AlgorithmConfig:
    """GRPO and what EEPO adds. `num_stages = 1` is GRPO, 2 the paper's EEPO, more is ours."""

    group_size: int = knob(8, least=2)
    num_stages: int = knob(2, least=1)
    temperature: float = knob(1.0, above=0)
    max_new_tokens: int = knob(4096, least=1)

    gate: Literal["token", "step", "always", "never"] = "token"
    gate_threshold: float = knob(0.3, least=0)
    gate_window: int = knob(3, least=1)
    unlearn_lr: float | Literal["auto"] = knob(3e-3, least=0)
    unlearn_kl_target: float = knob(1e-3, above=0)  # for unlearn_lr = "auto"
    unlearn_loss: Literal["comp", "nll"] = "comp"
    unlearn_on: Literal["all", "rewarded", "unrewarded", "zero_variance"] = (
        "all"  # stuck: groups whose rewards are equal
    )
    unlearn_max_completions: int = knob(
        0, least=0
    )  # in one unlearning step, evenly chosen; 0: all there are
    unlearn_eps: float = knob(1e-4, above=0, most=0.5)
    saturation: Literal["stop", "exact"] = "stop"
    probe_completions: int = knob(64, least=1)  # stage-1 completions on which KL(θ‖θ′) is measured

    advantage_baseline: Literal["group", "stage"] = "group"
    later_advantages: Literal["all", "positive"] = (
        "all"  # after stage 1; positive: what does worse is not punished
    )
    failure_weight: float = knob(
        1.0, least=0, most=1
    )  # of what does worse than its group, against what does better
    rare_weight: float = knob(
        0.0, least=0, most=1
    )  # how much more an unlikely success weighs than a likely one
    clip_low: float = knob(0.2, above=0, most=1)
    clip_high: float = knob(0.2, above=0)
    kl_coef: float = knob(1e-4, least=0)
    entropy_coef: float = knob(1e-5, least=0)


@dataclass(frozen=True)
class TrainingConfig:
    """The loop: how many prompts, how often, and the optimizer."""

    num_steps: int = knob(100, least=0)
    max_seconds: float = knob(
        0.0, least=0
    )  # of steps alone: the first step that reaches it is the last; 0: no limit
    prompts_per_step: int = knob(128, least=1)
    prompts_per_mini_batch: int = knob(64, least=1)
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit"] = (
        "adamw"  # its moments: 8, 4 or 2 bytes a weight
    )
    learning_rate: float = knob(5e-7, least=0)
    weight_decay: float = knob(0.01, least=0)
    max_grad_norm: float = knob(1.0, above=0)
    seed: int = knob(0, least=0)
    checkpoint_every: int = knob(20, least=0)  # 0: only at the end
    keep_checkpoints: int = knob(2, least=1)
    log_completions: int = knob(4, least=0)  # prompts per step whose groups are written down


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples, in its own copy of the weights."""

    engine: Literal["transformers", "vllm"] = (
        "transformers"  # vllm: needs the extra of that name (docs/engines.md)
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # auto: bfloat16 on a GPU, else float32
    )
    max_rows: int = knob(1024, least=1)  # completions sampled at the same time
    stop: str = ""  # a completion also ends with the first token that holds this text; empty: only at its own end
    gpu_memory_share: float = knob(
        0.4, above=0, most=1
    )  # of the card, for vllm's weights and cache while it samples


@dataclass(frozen=True)
class EvaluationConfig:
    """`every` steps a quick look, at the end the full one. Each problem: one greedy and `num_samples` drawn."""

    start: bool = False  # the full evaluation of the starting policy, too
    every: int = knob(0, least=0)  # 0: only at the end
    quick_problems: int = knob(64, least=1)
    quick_samples: int = knob(4, least=1)
    num_samples: int = knob(32, least=1)
    temperature: float = knob(1.0, above=0)
    seed: int = knob(1234, least=0)


@dataclass(frozen=True)
class AlarmConfig:
    """When a run is said to go wrong: a bound broken in `patience` steps in a row. Any bound may be "off"."""

    action: Literal["warn", "stop", "halve_unlearn_lr"] = "warn"
    patience: int = knob(5, least=1)
    entropy_below: float | Literal["off"] = knob(
        0.01, least=0
    )  # of the policy, in stage 1; nats a token
    entropy_above: float | Literal["off"] = knob("off", least=0)  # of any stage
    truncated_share_above: float | Literal["off"] = knob(0.5, least=0, most=1)  # of any stage
    zero_advantage_share_above: float | Literal["off"] = knob(0.95, least=0, most=1)
    mismatch_kl_above: float | Literal["off"] = knob(
        0.01, least=0
    )  # between engine and policy; nats a token
    dead_stage_above: float | Literal["off"] = knob(
        0.05, least=0
    )  # a stage earns nearly 0, another more than this


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go besides the run's folder. Each needs its package: pip install 'eepo[tensorboard]' and so on."""

    to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    project: str = "eepo"  # for wandb and trackio; the run's name there is that of its folder


@dataclass(frozen=True)
class RunConfig:
    """A whole training recipe."""

    name: str = "run"
    model: ModelConfig = ModelConfig()
    task: TaskConfig = CountdownConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    alarm: AlarmConfig = AlarmConfig()
    logging: LoggingConfig = LoggingConfig()


@dataclass(frozen=True)
class ScratchConfig:
    """A new small decoder, for a warm start from nothing."""

    family: Literal["llama", "qwen3"] = "llama"
    hidden_size: int = knob(192, least=8)
    intermediate_size: int = knob(512, least=8)
    num_layers: int = knob(4, least=1)
    num_heads: int = knob(4, least=1)
    max_positions: int = knob(128, least=8)


@dataclass(frozen=True)
class SupervisedConfig:
    """The warm start's loop. The learning rate rises for `ramp_steps`, then falls along a cosine to a tenth."""

    num_steps: int = knob(1000, least=1)
    batch_size: int = knob(256, least=1)
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit"] = "adamw"
    learning_rate: float = knob(1e-3, above=0)
    ramp_steps: int = knob(50, least=0)
    weight_decay: float = knob(0.01, least=0)
    max_grad_norm: float = knob(1.0, above=0)
    seed: int = knob(0, least=0)
    num_workers: int = knob(0, least=0)  # processes that draw demonstrations
    checkpoint_every: int = knob(500, least=0)  # 0: only at the end
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the final weights


@dataclass(frozen=True)
class WarmupConfig:
    """A whole warm-start recipe. `model.path = "scratch"` builds the model that `[scratch]` describes."""

    name: str = "warmup"
    model: ModelConfig = ModelConfig(path="scratch")
    scratch: ScratchConfig = ScratchConfig()
    task: TaskConfig = CountdownConfig()
    reward: RewardConfig = RewardConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    max_new_tokens: int = knob(64, least=1)  # of the evaluation at the end


def check_run(config: RunConfig) -> str | None:
    """Rules between knobs: the first one broken, as the line the user reads, or None."""
    size, stages = config.algorithm.group_size, config.algorithm.num_stages
    if size % stages:
        allowed = "even" if stages == 2 else f"a multiple of num_stages = {stages}"
        return f"algorithm.group_size must be {allowed}, got {size}"
    if config.algorithm.advantage_baseline == "stage" and size == stages:
        return f'algorithm.advantage_baseline = "stage" needs group_size >= 2 * num_stages = {2 * stages}, got {size}'
    prompts, mini = config.training.prompts_per_step, config.training.prompts_per_mini_batch
    if prompts % mini:
        return (
            f"training.prompts_per_mini_batch must divide prompts_per_step = {prompts}, got {mini}"
        )
    return check_engine(config) or check_task(config.task)


def check_engine(config: RunConfig) -> str | None:
    """vLLM raises temperatures under 0.01 without a word: the policy would be scored at another one."""
    for key, value in (
        ("algorithm", config.algorithm.temperature),
        ("evaluation", config.evaluation.temperature),
    ):
        if config.rollout.engine == "vllm" and value < 0.01:
            return (
                f'{key}.temperature must be at least 0.01 with rollout.engine = "vllm", got {value}'
            )
    return None


def check_task(task: TaskConfig) -> str | None:
    if isinstance(task, CountdownConfig):
        return _check_countdown(task)
    if isinstance(task, DatasetConfig | ReasoningGymConfig):
        return check_template(task.template)
    return None


def check_template(template: str) -> str | None:
    """Only {problem} is replaced, so braces of LaTeX may stand as they are."""
    if template in ("boxed", "chat") or "{problem}" in template:
        return None
    return f'task.template must be "boxed", "chat" or a text with {{problem}}, got {template!r}'


def _check_countdown(task: CountdownConfig) -> str | None:
    try:
        fields = {
            f"{name}{spec}{bent or ''}"
            for _, name, spec, bent in Formatter().parse(task.template)
            if name is not None
        }
    except ValueError:
        fields = set()
    if fields != {"numbers", "target"}:
        return f"task.template must hold {{numbers}} and {{target}} and no other field, got {task.template!r}"
    low, high = task.min_target, task.max_target
    far_low, far_high = task.out_of_range_min_target, task.out_of_range_max_target
    if low > high:
        return f"task.min_target must be at most max_target = {high}, got {low}"
    if far_low > far_high:
        return f"task.out_of_range_min_target must be at most out_of_range_max_target = {far_high}, got {far_low}"
    if far_low <= high and low <= far_high:
        return f"task.out_of_range_min_target..max_target must not overlap {low}..{high}, got {far_low}..{far_high}"
    return None
