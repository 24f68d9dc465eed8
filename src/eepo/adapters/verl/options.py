"""Reads the `eepo.*` section of a verl command line and checks verl's settings.

All checks run before Ray starts, so a wrong setting costs seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from eepo.config import AlgorithmConfig
from eepo.recipe import read_section
from eepo.types import UserError

ADVANTAGE_KNOBS = ("failure_weight",)  # these also apply with one stage
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
    "saturation",
    "credit",
    "stage2_negative_advantages",
    *ADVANTAGE_KNOBS,
)
VERL_KEYS = {  # of knobs that are not in the section `eepo`
    "group_size": "actor_rollout_ref.rollout.n",
    "temperature": "actor_rollout_ref.rollout.temperature",
}
DEBUG = "debug"  # compare θ and the optimizer's state before and after every unlearning step


class Requirement(NamedTuple):
    key: str  # of verl's config
    allowed: tuple[Any, ...]  # None: absent
    reason: str  # the end of the error line


LORA = "EEPO with LoRA is untested"
NO_REFILL = "groups are refilled as a whole, without stages"
NO_CORRECTION = (
    "it corrects for differences between old_log_probs and rollout_log_probs; with "
    "eepo.credit = importance there are none, with full credit they are intended"
)
STAGES_NEED = (
    Requirement("trainer.use_v1", (True,), "EEPO is built on verl's V1 trainer"),
    Requirement(
        "trainer.v1.trainer_mode", ("sync",), "asynchronous trainers cannot unlearn between stages"
    ),
    Requirement(
        "trainer.v1.sync.parameter_sync_step",
        (None, 1),
        "all stages of a step are trained on together",
    ),
    Requirement(
        "actor_rollout_ref.hybrid_engine", (None, True), "the actor's workers push θ′ to rollout"
    ),
    Requirement(
        "actor_rollout_ref.actor.strategy",
        ("fsdp2",),
        "Megatron keeps gradients only on the shard of their owner, FSDP1 flattens weights; "
        "only FSDP2 is tested",
    ),
    Requirement(
        "actor_rollout_ref.actor.fsdp_config.model_dtype",
        ("fp32", "float32", None),
        "lower precision rounds the unlearning step away",
    ),
    Requirement(
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
        (None, "bf16", "bfloat16", "fp32", "float32"),
        "loss scaling would scale the unlearning step",
    ),
    Requirement("actor_rollout_ref.actor.fsdp_config.qat.enable", (None, False), "untested"),
    Requirement("actor_rollout_ref.model.lora_rank", (None, 0), LORA),
    Requirement("actor_rollout_ref.model.lora.rank", (None, 0), LORA),
    Requirement("actor_rollout_ref.model.lora_adapter_path", (None,), LORA),
    Requirement("algorithm.rollout_correction.rollout_is", (None,), NO_CORRECTION),
    Requirement("algorithm.rollout_correction.rollout_rs", (None,), NO_CORRECTION),
    Requirement(
        "actor_rollout_ref.rollout.calculate_log_probs",
        (True,),
        "they are the denominators with eepo.credit = importance, and the entropies of the stages",
    ),
    Requirement(
        "actor_rollout_ref.rollout.logprobs_mode",
        (None, "processed_logprobs"),
        "the ratio needs log-probabilities at the sampling temperature",
    ),
    Requirement("algorithm.filter_groups.enable", (None, False), NO_REFILL),
    Requirement("trainer.v1.sampler.sync_refill_failed_groups", (None, False), NO_REFILL),
    Requirement("skip.rollout_tq.enable", (None, False), "skipped rollouts have no stages"),
)
BYPASS_MODE = "algorithm.rollout_correction.bypass_mode"
CREDIT_NEEDS = {
    "importance": Requirement(
        BYPASS_MODE,
        (True,),
        "eepo.credit = importance divides by the probabilities under the weights that sampled, "
        "but verl would compute all denominators under θ; or set eepo.credit=full",
    ),
    "full": Requirement(
        BYPASS_MODE,
        (False, None),
        "eepo.credit = full needs denominators that verl computes under θ",
    ),
}
EXACT_NEEDS = (
    Requirement(
        "actor_rollout_ref.model.use_fused_kernels",
        (False, None),
        "eepo.saturation = exact needs logits, which fused kernels do not return",
    ),
)
ADVANTAGE_WEIGHTS_NEED = (
    Requirement("trainer.use_v1", (True,), "advantage weights need verl's V1 trainer"),
    Requirement(
        "trainer.v1.trainer_mode", ("sync",), "advantage weights need the synchronous trainer"
    ),
    Requirement(
        "algorithm.adv_estimator",
        ("grpo",),
        "advantage weights need one advantage per completion",
    ),
)


def default_section() -> dict[str, Any]:
    """Return the default `eepo.*` section: the paper's EEPO."""
    defaults = AlgorithmConfig()
    return {name: getattr(defaults, name) for name in KNOBS} | {DEBUG: False}


def read_options(config: Mapping[str, Any]) -> AlgorithmConfig:
    """Read the knobs from a resolved verl config, or raise a `UserError` for the first mistake."""
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
    options = _read(section | sampling)
    if options.num_stages > 1:
        _check_stages(config, options)
    if has_advantage_weights(options):
        _check(config, ADVANTAGE_WEIGHTS_NEED)
    return options


def _read(section: dict[str, Any]) -> AlgorithmConfig:
    """Convert the knobs. Errors name the keys that the user has set."""
    try:
        options: AlgorithmConfig = read_section(
            AlgorithmConfig, section, "verl's command line", "eepo."
        )
    except UserError as error:
        line = str(error)
        for knob, key in VERL_KEYS.items():
            line = line.replace(f"eepo.{knob} ", f"{key} ")
        raise UserError(line) from None
    return options


def has_advantage_weights(options: AlgorithmConfig) -> bool:
    """Return whether the knobs change the advantages that verl computes."""
    drops_negative = options.num_stages > 1 and not options.stage2_negative_advantages
    return drops_negative or options.failure_weight != 1


def _check_stages(config: Mapping[str, Any], options: AlgorithmConfig) -> None:
    """Reject settings with which stages would be impossible or give wrong results."""
    stages, size = options.num_stages, options.group_size
    if size % stages:
        raise UserError(
            f"actor_rollout_ref.rollout.n = {size} must be a multiple of eepo.num_stages = {stages}"
        )
    if options.unlearn_on == "zero_variance" and size == stages:
        raise UserError(
            f"actor_rollout_ref.rollout.n = {size} must be more than eepo.num_stages = {stages} "
            "with eepo.unlearn_on = zero_variance: a single completion always has zero variance"
        )
    _check(config, (*STAGES_NEED, CREDIT_NEEDS[options.credit]))
    if options.saturation == "exact" and options.gate != "never":
        _check(config, EXACT_NEEDS)
    if options.unlearn_on != "all" and _value_at(config, "reward.reward_model.enable"):
        raise UserError(
            f"eepo.unlearn_on = {options.unlearn_on} needs rewards before stage 2: "
            "set reward.reward_model.enable=false"
        )
    if options.gate == "never" and not options.stage2_negative_advantages:
        raise UserError(
            "eepo.stage2_negative_advantages = false must be true with eepo.gate = never: "
            "verl then samples without stages"
        )


def _check(config: Mapping[str, Any], requirements: tuple[Requirement, ...]) -> None:
    for key, allowed, reason in requirements:
        value = _value_at(config, key)
        if value not in allowed:
            raise UserError(f"{key} = {value} must be {' or '.join(map(str, allowed))}: {reason}")


def _value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key; None if the key or a section of it is absent."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
