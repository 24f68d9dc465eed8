"""All knobs of a recipe, with defaults (the paper's), allowed ranges and help texts.

`recipe.py` reads TOML files into these classes and reports every mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal

# Benchmarks that `task.evaluation` and `eepo eval` know by name, with their titles in tables
BENCHMARK_TITLES = {
    "minerva_math": "Minerva Math",
    "olympiadbench": "OlympiadBench",
    "amc23": "AMC 23",
    "aime24": "AIME 24",
    "aime25": "AIME 25",
    "math500": "MATH-500",
    "gsm8k": "GSM8K",
}
AUTO_COMPILE_PARAMETERS = 100_000_000  # below this, steps are too short to gain from compilation


def knob(
    default: Any,
    help: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare a field with a help text and a range.

    `above` is an exclusive bound; `least` and `most` are inclusive.
    """
    metadata = {"help": help, "above": above, "least": least, "most": most}
    return field(default=default, metadata=metadata)


def should_compile(choice: str, num_parameters: int) -> bool:
    """Apply `model.compile` to a model of this size."""
    return choice == "on" or (choice == "auto" and num_parameters >= AUTO_COMPILE_PARAMETERS)


@dataclass(frozen=True)
class ModelConfig:
    """The initial policy, and how it is trained in memory."""

    path: str = knob(
        "builtin:countdown",
        "A folder, a run, a GGUF file, a hub name, builtin:countdown, builtin:shortcut or "
        "package:smollm2.",
    )
    revision: str = knob("main", "Revision of a hub model.")
    trust_remote_code: bool = knob(False, "Run Python code that comes with the model.")
    device: str = knob("auto", "auto, cpu, cuda or cuda:N.")
    gradient_checkpointing: bool = knob(False, "Recompute activations: less memory, slower.")
    compile: Literal["auto", "on", "off"] = knob(
        "auto", "Compile the layers on a GPU. auto: models with at least 100M parameters."
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "Dtype of matrix products in training. auto: bfloat16 on a GPU, else float32."
    )
    micro_batch_tokens: int = knob(16384, "Tokens per forward pass, with padding.", least=1)
    head_tokens: int = knob(4096, "Positions whose logits are in memory at once.", least=1)
    lora_rank: int = knob(
        0, "Train a LoRA adapter of this rank. 0: train all weights.", least=0, most=1024
    )
    lora_alpha: float = knob(
        32.0, "LoRA alpha: the adapter's output is multiplied by lora_alpha / lora_rank.", above=0
    )
    lora_targets: tuple[str, ...] = knob(
        (), "Linear layers with an adapter, such as q_proj. Empty: all of the decoder layers."
    )


@dataclass(frozen=True)
class CountdownConfig:
    """Countdown: reach a target with four numbers. Ranges are inclusive.

    Targets from `out_of_range_min_target` to `out_of_range_max_target` are only evaluated.
    """

    name: Literal["countdown"] = "countdown"
    num_numbers: int = knob(4, "Numbers per problem.", least=2, most=6)
    max_number: int = knob(12, "Largest number.", least=2, most=99)
    min_target: int = knob(10, "Smallest target in training.", least=0)
    max_target: int = knob(60, "Largest target in training.", least=0)
    out_of_range_min_target: int = knob(61, "Smallest target of the harder set.", least=0)
    out_of_range_max_target: int = knob(99, "Largest target of the harder set.", least=0)
    num_train: int = knob(0, "Size of the training set. 0: a new problem every time.", least=0)
    num_evaluation: int = knob(200, "Problems per evaluation set.", least=1)
    template: str = knob("{numbers} = {target} :", "Prompt with {numbers} and {target}.")
    seed: int = knob(0, "Seed of the problem sets; training.seed orders them.", least=0)


@dataclass(frozen=True)
class SumsConfig:
    """Sums of integers after solved examples: a task for a small pretrained model.

    The harder evaluation set has numbers with one digit more than `max_digits`.
    """

    name: Literal["sums"] = "sums"
    num_terms: int = knob(2, "Numbers per sum.", least=2, most=6)
    max_digits: int = knob(2, "Largest number of digits in training.", least=1, most=6)
    num_examples: int = knob(4, "Solved sums before the question.", least=0, most=32)
    num_train: int = knob(0, "Size of the training set. 0: a new problem every time.", least=0)
    num_evaluation: int = knob(200, "Problems per evaluation set.", least=1)
    seed: int = knob(0, "Seed of the problem sets.", least=0)


@dataclass(frozen=True)
class ShortcutConfig:
    """Digits to add modulo 10: guess the answer, or compute it with running sums.

    The probabilities describe the policy that a warm start creates. Training does not use them.
    """

    name: Literal["shortcut"] = "shortcut"
    num_digits: int = knob(8, "Digits per problem.", least=2, most=32)
    style: Literal["symbols", "words"] = knob(
        "symbols", "symbols: for a policy from scratch. words: for a pretrained model."
    )
    rare_strategy: Literal["compute", "parity"] = knob(
        "compute", "compute: always right. parity: right 20 % of the time."
    )
    rare_probability: float = knob(
        1e-5, "Probability that the policy starts with the rare strategy (p).", above=0, most=0.5
    )
    dead_end_probability: float = knob(
        0.0, "Probability of a strategy that is always wrong.", least=0, most=0.4
    )
    other_probability: float = knob(
        0.0, "Probability of all other first tokens together. 0: p / 10.", least=0, most=0.1
    )
    num_train: int = knob(0, "Size of the training set. 0: a new problem every time.", least=0)
    num_evaluation: int = knob(200, "Problems in the evaluation set.", least=1)
    seed: int = knob(0, "Seed of the problem sets.", least=0)


@dataclass(frozen=True)
class DatasetConfig:
    """Problems with answers: .jsonl, .json or .parquet files, or hub data sets."""

    name: Literal["dataset"] = "dataset"
    train: str = knob("", "Training data: a file, or a hub name (owner/name or owner/name:config).")
    train_split: str = knob("train", "Split of a hub data set.")
    evaluation: tuple[str, ...] = knob(
        (), "Evaluation sets: benchmarks by name (math500, amc23, ...), files or hub data sets."
    )
    evaluation_split: str = knob("test", "Split of hub data sets for evaluation.")
    num_held_out: int = knob(
        0, "Training problems that are only evaluated, as the set in_distribution.", least=0
    )
    data_dir: str = knob("", "Folder with data files. Empty: the current folder, then the hub.")
    problem_column: str = knob("problem", "Column with the problem text.")
    answer_column: str = knob(
        "answer", "Column with the answer, or a solution that ends in \\boxed{} or ####."
    )
    level_column: str = knob("level", "Column with the difficulty level.")
    levels: tuple[int, ...] = knob((), "Keep only these levels. Empty: all.")
    skip_unanswered: bool = knob(False, "Skip and count training rows without an answer.")
    template: str = knob(
        "boxed",
        "boxed: an instruction for base models. chat: the model's chat template. "
        "Or a text with {problem}; after chat: it is the user message.",
    )
    num_examples: int = knob(
        0, "Training problems with bare answers before each problem.", least=0, most=64
    )
    reason_probability: float = knob(
        0.0,
        "0: `eepo warmup` teaches solutions. Above 0: also bare answers. The first token of each "
        "solution then gets this probability.",
        least=0,
        most=0.5,
    )
    max_prompt_tokens: int = knob(1024, "Skip and count longer prompts.", least=1)


@dataclass(frozen=True)
class ReasoningGymConfig:
    """A data set of reasoning-gym (extra `reasoning_gym`), graded by its own scorer."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = knob("chain_sum", "Name of the data set.")
    template: str = knob("boxed", "boxed, chat or a text with {problem}.")
    num_evaluation: int = knob(200, "Problems in the evaluation set.", least=1)
    seed: int = knob(0, "Seed of the problems.", least=0)


@dataclass(frozen=True)
class CustomTaskConfig:
    """A task that you write: a class, built with (tokenizer, seed) and your options."""

    name: str = knob("", "module:Class or file.py:Class.")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Keyword arguments of the class."}
    )


TaskConfig = (
    CountdownConfig
    | SumsConfig
    | ShortcutConfig
    | DatasetConfig
    | ReasoningGymConfig
    | CustomTaskConfig
)


@dataclass(frozen=True)
class RewardConfig:
    """How completions are graded, in processes that can be killed."""

    name: str = knob(
        "auto",
        "auto: the task's grader. Or math, guess_or_reason, exact, countdown, shortcut, "
        "reasoning_gym, module:function or file.py:function.",
    )
    num_workers: int = knob(0, "Grading processes. 0: one per core, at most 8.", least=0, most=256)
    cpu_seconds: float = knob(
        1.0, "CPU time per completion; the process is killed after it.", above=0, most=3600
    )
    wall_seconds: float = knob(
        60.0, "Wall-clock time per completion, for graders that wait.", above=0, most=86400
    )
    memory_mb: int = knob(
        1024,
        "Memory limit of a grading process in MB, in addition to what it uses after start-up.",
        least=64,
    )


@dataclass(frozen=True)
class AlgorithmConfig:
    """GRPO and EEPO. `num_stages = 1` is GRPO, 2 is EEPO; 3 and more go beyond the paper."""

    group_size: int = knob(8, "Completions per prompt (G), over all stages.", least=2)
    num_stages: int = knob(2, "Stages per step; unlearning runs between them.", least=1)
    temperature: float = knob(1.0, "Sampling temperature in training.", above=0)
    max_new_tokens: int = knob(4096, "Longest completion in tokens.", least=1)

    gate: Literal["token", "step", "always", "never"] = knob(
        "token", "What opens unlearning: low entropy per token or per step, always or never."
    )
    gate_threshold: float = knob(0.3, "Entropy below which the gate opens (α), in nats.", least=0)
    gate_window: int = knob(3, "Tokens or steps that the entropy is averaged over (m).", least=1)
    unlearn_lr: float | Literal["auto"] = knob(
        3e-3, "Learning rate of the unlearning step (η). auto: meet unlearn_kl_target.", least=0
    )
    unlearn_kl_target: float = knob(1e-2, "KL(θ‖θ′) for unlearn_lr = auto, per token.", above=0)
    unlearn_loss: Literal["comp", "nll"] = knob(
        "comp", "comp: complementary loss. nll: gradient ascent on the NLL (ablation)."
    )
    unlearn_on: Literal["all", "rewarded", "unrewarded", "zero_variance"] = knob(
        "all", "Completions to unlearn. zero_variance: groups whose rewards are all equal."
    )
    unlearn_max_completions: int = knob(
        0, "Completions per unlearning step, evenly spaced. 0: all.", least=0
    )
    unlearn_eps: float = knob(1e-4, "ε of saturation = stop.", above=0, most=0.5)
    saturation: Literal["stop", "exact"] = knob(
        "stop", "stop: no gradient above p = 1 − ε (the paper). exact: log(1 − p) without a limit."
    )
    probe_completions: int = knob(64, "Stage-1 completions that measure KL(θ‖θ′).", least=1)

    dynamic_sampling: int = knob(
        0,
        "Largest number of rounds. A round replaces groups with equal rewards by groups of new "
        "prompts. 0: off.",
        least=0,
    )

    advantage: Literal["grpo", "dr_grpo", "maxrl", "passk"] = knob(
        "grpo",
        "grpo: (r - mean) / std. dr_grpo: r - mean. maxrl: (r - mean) / mean. passk: what a "
        "completion adds to pass@k, k = pass_k (docs/methods.md).",
    )
    pass_k: int = knob(4, "k of advantage = passk.", least=1)
    outcome_bonus: float = knob(
        0.0, "Weight of a bonus for answers that are rare in the prompt's history.", least=0
    )
    advantage_baseline: Literal["group", "stage"] = knob(
        "group", "Normalise rewards over the whole group, or within each stage of it."
    )
    credit: Literal["importance", "full"] = knob(
        "importance",
        "Denominator of the ratio for stage 2 and later. importance: the weights that sampled "
        "(the paper). full: the policy before the update, so that discoveries count in full.",
    )
    stage2_negative_advantages: bool = knob(
        True, "Use negative advantages of stage 2 and later. false: set them to 0."
    )
    failure_weight: float = knob(
        1.0, "Factor of negative advantages. 1: GRPO. 0: only positive ones.", least=0, most=1
    )
    success_weight: float = knob(
        1.0,
        "Factor of positive advantages. 1: GRPO. 0.1: negative-sample reinforcement.",
        least=0,
        most=1,
    )

    loss: Literal["grpo", "gspo", "cispo", "clip_cov", "kl_cov"] = knob(
        "grpo",
        "grpo: clipped token ratios. gspo: clipped ratios of completions. cispo: capped weights, "
        "no token is dropped. clip_cov, kl_cov: limit tokens that lower entropy most.",
    )
    cov_share: float = knob(
        2e-4, "Share of tokens that clip_cov or kl_cov selects; at least one.", above=0, most=1
    )
    cov_low: float = knob(1.0, "Smallest covariance that clip_cov selects.")
    cov_high: float = knob(5.0, "Largest covariance that clip_cov selects.")
    cov_kl_coef: float = knob(1.0, "Weight of kl_cov's penalty on the selected tokens.", least=0)
    engine_ratio_cap: float | Literal["off"] = knob(
        "off",
        "Truncated importance sampling: weigh tokens by policy / engine, at most this.",
        above=0,
    )
    clip_low: float = knob(0.2, "Lower clipping of the ratio.", above=0, most=1)
    clip_high: float = knob(0.2, "Upper clipping of the ratio.", above=0)
    loss_normalisation: Literal["mini_batch", "group", "completion", "constant"] = knob(
        "mini_batch",
        "Mean over tokens. mini_batch: all tokens of a mini-batch weigh the same. group: all groups"
        " weigh the same, and all tokens within a group (the paper's equation). completion: all "
        "completions weigh the same. constant: sums over tokens, divided by max_new_tokens.",
    )
    kl_coef: float = knob(1e-4, "Weight of the KL to the initial policy.", least=0)
    entropy_coef: float = knob(1e-5, "Weight of the entropy bonus.", least=0)
    entropy_target: float | Literal["off"] = knob(
        "off", "Change the weight step by step so that stage-1 entropy stays above this.", above=0
    )
    entropy_coef_step: float = knob(
        1e-4, "Change of the weight per step with entropy_target.", above=0
    )
    entropy_coef_max: float = knob(5e-3, "Largest weight with entropy_target.", above=0)


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop and the optimizer."""

    num_steps: int = knob(100, "Training steps.", least=0)
    max_seconds: float = knob(
        0.0, "Stop after the first step that reaches this training time. 0: no limit.", least=0
    )
    prompts_per_step: int = knob(128, "Prompts per step.", least=1)
    prompts_per_mini_batch: int = knob(64, "Prompts per optimizer step.", least=1)
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit"] = knob(
        "adamw", "AdamW with moments of 8, 4 or 2 bytes per weight."
    )
    learning_rate: float = knob(5e-7, "Learning rate, constant.", least=0)
    weight_decay: float = knob(0.01, "Weight decay.", least=0)
    max_grad_norm: float = knob(1.0, "Clip the gradient to this norm.", above=0)
    seed: int = knob(0, "Seed of sampling and of the order of prompts.", least=0)
    checkpoint_every: int = knob(20, "Steps between checkpoints. 0: only at the end.", least=0)
    keep_checkpoints: int = knob(2, "Newest checkpoints to keep.", least=1)
    log_completions: int = knob(4, "Prompts per step whose completions are logged.", least=0)


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples, from its own copy of the weights."""

    engine: Literal["builtin", "vllm"] = knob(
        "builtin", "vllm needs the extra of that name (docs/engines.md)."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "Dtype of the rollout weights. auto: bfloat16 on a GPU, else float32."
    )
    max_rows: int = knob(1024, "Completions sampled at the same time.", least=1)
    stop: str = knob("", "Also end a completion at the first token that contains this text.")
    gpu_memory_share: float = knob(
        0.4, "Share of the GPU for vLLM's weights and KV cache.", above=0, most=1
    )
    merge_lora: bool = knob(
        True,
        "With LoRA: sample from a copy with the adapter merged into it. false: share the base "
        "weights and apply the adapter, with half the memory.",
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation: quick every `every` steps, full at the end.

    Each problem is answered once greedily and `num_samples` times by sampling.
    """

    start: bool = knob(False, "Also run the full evaluation before training.")
    every: int = knob(0, "Steps between quick evaluations. 0: none.", least=0)
    quick_problems: int = knob(64, "Problems per set in a quick evaluation. 0: all.", least=0)
    quick_samples: int = knob(4, "Samples per problem in a quick evaluation.", least=1)
    num_problems: int = knob(0, "Problems per set in the full evaluation. 0: all.", least=0)
    num_samples: int = knob(32, "Samples per problem in the full evaluation.", least=1)
    temperature: float = knob(1.0, "Sampling temperature.", above=0)
    seed: int = knob(1234, "Seed of the samples.", least=0)


@dataclass(frozen=True)
class AlarmConfig:
    """Alarms: a bound that is violated for `patience` steps in a row. Each bound may be "off"."""

    action: Literal["warn", "stop", "halve_unlearn_lr"] = knob(
        "warn", "What an alarm does besides its message."
    )
    patience: int = knob(5, "Steps in a row before an alarm.", least=1)
    entropy_below: float | Literal["off"] = knob(
        0.01, "Stage-1 entropy, nats per token: the policy has collapsed.", least=0
    )
    entropy_above: float | Literal["off"] = knob(
        4.0, "Entropy of any stage, nats per token: it writes noise.", least=0
    )
    truncated_share_above: float | Literal["off"] = knob(
        0.5, "Share of truncated completions in any stage.", least=0, most=1
    )
    zero_advantage_share_above: float | Literal["off"] = knob(
        0.95, "Share of groups without any advantage.", least=0, most=1
    )
    mismatch_kl_above: float | Literal["off"] = knob(
        0.01, "KL between engine and policy, nats per token.", least=0
    )
    lost_share_above: float | Literal["off"] = knob(
        0.1, "Share of a later stage's successes that the update ignores.", least=0, most=1
    )
    dead_stage_above: float | Literal["off"] = knob(
        0.05,
        "Alarm if the best stage earns more than this while another earns less than 5 % of it.",
        least=0,
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go besides the run folder. Each logger needs its extra."""

    to: Literal["none", "tensorboard", "wandb", "trackio"] = knob("none", "The logger.")
    project: str = knob("eepo", "Project in wandb or trackio. The run is named by its folder.")


@dataclass(frozen=True)
class RunConfig:
    """A training recipe."""

    name: str = knob("run", "Name of the method in reports.")
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
    """Shape of a new small decoder, for a warm start without a pretrained model."""

    family: Literal["llama", "qwen3"] = knob("llama", "Architecture.")
    hidden_size: int = knob(192, "Width.", least=8)
    intermediate_size: int = knob(512, "Width of the MLP.", least=8)
    num_layers: int = knob(4, "Layers.", least=1)
    num_heads: int = knob(4, "Attention heads.", least=1)
    max_positions: int = knob(128, "Longest sequence.", least=8)


@dataclass(frozen=True)
class SupervisedConfig:
    """The loop of the warm start.

    The learning rate rises for `ramp_steps`, then falls along a cosine to a tenth.
    """

    num_steps: int = knob(1000, "Training steps.", least=1)
    batch_size: int = knob(256, "Demonstrations per step.", least=1)
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit"] = knob(
        "adamw", "AdamW with moments of 8, 4 or 2 bytes per weight."
    )
    learning_rate: float = knob(1e-3, "Peak learning rate.", above=0)
    ramp_steps: int = knob(50, "Steps until the peak.", least=0)
    weight_decay: float = knob(0.01, "Weight decay.", least=0)
    max_grad_norm: float = knob(1.0, "Clip the gradient to this norm.", above=0)
    seed: int = knob(0, "Seed of the new weights.", least=0)
    num_workers: int = knob(0, "Processes that generate demonstrations.", least=0)
    checkpoint_every: int = knob(500, "Steps between checkpoints. 0: only at the end.", least=0)
    save_dtype: Literal["float32", "bfloat16"] = knob("float32", "Dtype of the final weights.")


@dataclass(frozen=True)
class WarmupConfig:
    """A warm-start recipe. `model.path = "scratch"` builds the model of `[scratch]`."""

    name: str = knob("warmup", "Name of the run.")
    model: ModelConfig = ModelConfig(path="scratch")
    scratch: ScratchConfig = ScratchConfig()
    task: TaskConfig = CountdownConfig()
    reward: RewardConfig = RewardConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    max_new_tokens: int = knob(64, "Longest completion in the final evaluation.", least=1)


def check_run(config: RunConfig) -> str | None:
    """Return the first violated rule between knobs as an error line, or None."""
    size, stages = config.algorithm.group_size, config.algorithm.num_stages
    if size % stages:
        allowed = "even" if stages == 2 else f"a multiple of num_stages = {stages}"
        return f"algorithm.group_size must be {allowed}, got {size}"
    if config.algorithm.advantage_baseline == "stage" and size == stages:
        return (
            f'algorithm.advantage_baseline = "stage" needs group_size >= 2 * num_stages = '
            f"{2 * stages}, got {size}"
        )
    prompts, mini = config.training.prompts_per_step, config.training.prompts_per_mini_batch
    if prompts % mini:
        return (
            f"training.prompts_per_mini_batch must divide prompts_per_step = {prompts}, got {mini}"
        )
    broken = check_methods(config.algorithm) or _check_kl_cov(config)
    return broken or check_engine(config) or check_reward(config.reward) or check_task(config.task)


def check_methods(options: AlgorithmConfig) -> str | None:
    """Return the first combination of methods that makes no sense as an error line, or None."""
    stage_size = options.group_size // options.num_stages
    size = stage_size if options.advantage_baseline == "stage" else options.group_size
    if options.advantage == "passk" and options.pass_k > size:
        return (
            f"algorithm.pass_k must be at most {size}, the completions that an advantage is "
            f"computed from, got {options.pass_k}"
        )
    if options.success_weight == options.failure_weight == 0:
        return "algorithm.success_weight and failure_weight are both 0: nothing would be learned"
    if options.loss == "gspo" and options.loss_normalisation != "completion":
        return (
            'algorithm.loss = "gspo" needs loss_normalisation = "completion": its ratio belongs to '
            f'a whole completion, got "{options.loss_normalisation}"'
        )
    if options.loss == "clip_cov" and options.cov_low >= options.cov_high:
        return (
            f"algorithm.cov_low must be below cov_high = {options.cov_high:g}, "
            f"got {options.cov_low:g}"
        )
    if options.dynamic_sampling and options.gate == "step" and options.num_stages > 1:
        return (
            'algorithm.dynamic_sampling cannot be combined with gate = "step": the entropy of '
            "every round would count as a step"
        )
    if options.dynamic_sampling and options.outcome_bonus:
        return (
            "algorithm.dynamic_sampling replaces groups with equal rewards, from which "
            f"outcome_bonus = {options.outcome_bonus:g} would learn; use one of the two"
        )
    if options.entropy_target != "off" and options.entropy_coef > options.entropy_coef_max:
        return (
            f"algorithm.entropy_coef must be at most entropy_coef_max = "
            f"{options.entropy_coef_max:g} with entropy_target, got {options.entropy_coef:g}"
        )
    return None


def _check_kl_cov(config: RunConfig) -> str | None:
    """Reject kl_cov where its penalty would be 0, or a distance to θ′ instead of to θ."""
    prompts, mini = config.training.prompts_per_step, config.training.prompts_per_mini_batch
    options = config.algorithm
    if options.loss != "kl_cov":
        return None
    if prompts == mini:
        return (
            'algorithm.loss = "kl_cov" needs prompts_per_mini_batch below prompts_per_step = '
            f"{prompts}: the penalty is 0 in the first mini-batch, got {mini}"
        )
    if options.num_stages > 1 and options.credit == "importance":
        return (
            'algorithm.loss = "kl_cov" needs credit = "full" with several stages: the penalty '
            'would pull θ towards the weights that sampled stage 2, got "importance"'
        )
    return None


def check_warmup(config: WarmupConfig) -> str | None:
    return check_reward(config.reward) or check_task(config.task)


def check_engine(config: RunConfig) -> str | None:
    """Reject temperatures that vLLM changes silently: it raises those below 0.01."""
    temperatures = {
        "algorithm": config.algorithm.temperature,
        "evaluation": config.evaluation.temperature,
    }
    for section, value in temperatures.items():
        if config.rollout.engine == "vllm" and value < 0.01:
            return (
                f'{section}.temperature must be at least 0.01 with rollout.engine = "vllm", '
                f"got {value}"
            )
    return None


def check_reward(reward: RewardConfig) -> str | None:
    cpu, wall = reward.cpu_seconds, reward.wall_seconds
    if wall >= cpu:
        return None
    return f"reward.wall_seconds must be at least cpu_seconds = {cpu:g}, got {wall:g}"


def check_task(task: TaskConfig) -> str | None:
    if isinstance(task, CountdownConfig):
        return _check_countdown(task)
    if isinstance(task, ShortcutConfig):
        return _check_shortcut(task)
    if isinstance(task, DatasetConfig | ReasoningGymConfig):
        return check_template(task.template)
    return None


def check_template(template: str) -> str | None:
    """Only {problem} is replaced, so other braces (LaTeX) are allowed."""
    if template in ("boxed", "chat") or "{problem}" in template:
        return None
    return (
        f'task.template must be "boxed", "chat" or a text with {{problem}}, got {_cut(template)!r}'
    )


def _check_countdown(task: CountdownConfig) -> str | None:
    if _template_fields(task.template) != {"numbers", "target"}:
        return (
            "task.template must contain {numbers} and {target} and no other field, "
            f"got {_cut(task.template)!r}"
        )
    low, high = task.min_target, task.max_target
    far_low, far_high = task.out_of_range_min_target, task.out_of_range_max_target
    if low > high:
        return f"task.min_target must be at most max_target = {high}, got {low}"
    if far_low > far_high:
        return (
            f"task.out_of_range_min_target must be at most out_of_range_max_target = {far_high}, "
            f"got {far_low}"
        )
    if far_low <= high and low <= far_high:
        return (
            f"task.out_of_range_min_target..max_target must not overlap {low}..{high}, "
            f"got {far_low}..{far_high}"
        )
    return None


def _check_shortcut(task: ShortcutConfig) -> str | None:
    total = task.rare_probability + task.dead_end_probability + task.other_probability
    if total < 0.9:
        return None
    return (
        "task.rare_probability + dead_end_probability + other_probability must be below 0.9, "
        f"so that the policy can guess, got {total:g}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def _template_fields(template: str) -> set[str]:
    """Return the replacement fields of a format string; empty if it is not valid."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        return set()
    return {
        f"{name}{spec}{conversion or ''}" for _, name, spec, conversion in parts if name is not None
    }
