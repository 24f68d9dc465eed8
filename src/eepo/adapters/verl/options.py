"""The `eepo.*` section of a verl command line, and what of verl's own settings EEPO cannot work with.

Everything is refused here, before Ray starts: a mistake costs seconds, not the start of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eepo.config import AlgorithmConfig
from eepo.recipe import read_section
from eepo.types import UserError

WEIGHTS = ("failure_weight", "rare_weight")  # of advantages; with one stage, too
KNOBS = (
    "num_stages",
    "gate",
    "gate_threshold",
    "gate_window",
    "unlearn_lr",
    "unlearn_kl_target",
    "unlearn_loss",
    "unlearn_on",
    "unlearn_max_completions",
    "probe_completions",
    "unlearn_eps",
    "later_advantages",
    *WEIGHTS,
)
DEBUG = "debug"  # hash θ and the optimizer's state around every unlearning step, and stop the run if a bit changed


def default_section() -> dict[str, Any]:
    """What `eepo.*` holds when the user says nothing: the paper's EEPO."""
    defaults = AlgorithmConfig()
    return {name: getattr(defaults, name) for name in KNOBS} | {DEBUG: False}


def read_options(config: Mapping[str, Any]) -> AlgorithmConfig:
    """The knobs of a resolved verl config (plain dictionaries), or a `UserError` for the first thing that is wrong."""
    section = dict(config.get("eepo") or {})
    for name, value in section.items():
        if name not in (*KNOBS, DEBUG):
            raise UserError(
                f"unknown key eepo.{name} = {value}; allowed: {', '.join((*KNOBS, DEBUG))}"
            )
    if not isinstance(section.pop(DEBUG, False), bool):
        raise UserError(f"eepo.{DEBUG} = {config['eepo'][DEBUG]} must be true or false")
    rollout = config["actor_rollout_ref"]["rollout"]
    sampling = {"group_size": rollout["n"], "temperature": rollout["temperature"]}
    options: AlgorithmConfig = read_section(
        AlgorithmConfig, section | sampling, "verl's command line", "eepo."
    )
    if options.num_stages > 1:
        check_host(config, options)
        if options.later_advantages != "all" and options.gate == "never":
            raise UserError(
                "eepo.later_advantages = positive must be all with eepo.gate = never: it has no stages here"
            )
    if weighs(options):
        _check(config, WEIGHED)
    if options.rare_weight > 0:
        _check(config, RANKED)
    return options


def weighs(options: AlgorithmConfig) -> bool:
    """Whether advantages do not stay as verl computes them."""
    later = options.num_stages > 1 and options.later_advantages != "all"
    return later or options.failure_weight != 1 or options.rare_weight != 0


def check_host(config: Mapping[str, Any], options: AlgorithmConfig) -> None:
    """Refuse the first of verl's settings with which EEPO would be impossible or, worse, silently wrong."""
    stages, size = options.num_stages, options.group_size
    if size % stages:
        raise UserError(
            f"actor_rollout_ref.rollout.n = {size} must be a multiple of eepo.num_stages = {stages}"
        )
    if options.unlearn_on == "zero_variance" and size == stages:
        raise UserError(
            f"actor_rollout_ref.rollout.n = {size} must be more than eepo.num_stages = {stages} "
            "with eepo.unlearn_on = stuck: one completion is always zero_variance"
        )
    _check(config, REQUIRED)
    if options.unlearn_on != "all" and _find(config, "reward.reward_model.enable"):
        raise UserError(
            f"eepo.unlearn_on = {options.unlearn_on} needs rewards before stage 2: set reward.reward_model.enable=false"
        )


# key, what it may be (None: absent), why. Lines end in the reason, so that nobody has to look it up.
Requirements = tuple[tuple[str, tuple[Any, ...], str], ...]
WEIGHED: Requirements = (
    ("trainer.use_v1", (True,), "advantages are weighed in verl's V1 trainer"),
    ("trainer.v1.trainer_mode", ("sync",), "advantages are weighed in the synchronous trainer"),
    (
        "algorithm.adv_estimator",
        ("grpo",),
        "eepo's weights are for one advantage of a whole completion",
    ),
)
RANKED: Requirements = (
    (
        "actor_rollout_ref.rollout.calculate_log_probs",
        (True,),
        "eepo.rare_weight ranks completions by them",
    ),
)
REQUIRED: Requirements = (
    ("trainer.use_v1", (True,), "EEPO builds on verl's V1 trainer"),
    (
        "trainer.v1.trainer_mode",
        ("sync",),
        "asynchronous trainers have no moment between two stages",
    ),
    (
        "trainer.v1.sync.parameter_sync_step",
        (None, 1),
        "a step's stages are sampled and trained on together",
    ),
    ("actor_rollout_ref.hybrid_engine", (None, True), "θ′ is pushed from the actor's own workers"),
    (
        "actor_rollout_ref.actor.strategy",
        ("fsdp2",),
        "Megatron keeps gradients on their owner's shard alone, FSDP1 flattens weights; only FSDP2 was shown to work",
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.model_dtype",
        ("fp32", "float32", None),
        "a small step on lower precision is rounded away",
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
        (None, "bf16", "bfloat16", "fp32", "float32"),
        "loss scaling would scale the unlearning step",
    ),
    ("actor_rollout_ref.actor.fsdp_config.qat.enable", (None, False), "not shown to work"),
    ("actor_rollout_ref.model.lora_rank", (None, 0), "EEPO with LoRA was not shown to work"),
    ("actor_rollout_ref.model.lora.rank", (None, 0), "EEPO with LoRA was not shown to work"),
    ("actor_rollout_ref.model.lora_adapter_path", (None,), "EEPO with LoRA was not shown to work"),
    (
        "algorithm.rollout_correction.bypass_mode",
        (True,),
        "otherwise verl computes the denominators of both stages under θ, and stage 2 was sampled from θ′",
    ),
    (
        "algorithm.rollout_correction.rollout_is",
        (None,),
        "the ratio already weighs by the weights that sampled",
    ),
    (
        "algorithm.rollout_correction.rollout_rs",
        (None,),
        "the ratio already weighs by the weights that sampled",
    ),
    ("actor_rollout_ref.rollout.calculate_log_probs", (True,), "they are the denominators"),
    (
        "actor_rollout_ref.rollout.logprobs_mode",
        (None, "processed_logprobs"),
        "ratios need the sampling temperature",
    ),
    (
        "algorithm.filter_groups.enable",
        (None, False),
        "groups are refilled in one piece, without stages",
    ),
    (
        "trainer.v1.sampler.sync_refill_failed_groups",
        (None, False),
        "groups are refilled in one piece, without stages",
    ),
    ("skip.rollout_tq.enable", (None, False), "skipped rollouts have no stages"),
)


def _check(config: Mapping[str, Any], requirements: Requirements) -> None:
    for key, allowed, why in requirements:
        value = _find(config, key)
        if value not in allowed:
            raise UserError(f"{key} = {value} must be {' or '.join(map(str, allowed))}: {why}")


def _find(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None where it, or a section on the way, is absent."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
