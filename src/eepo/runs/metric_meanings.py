"""Says what every metric of a run means. The documentation is generated from here.

The texts are Markdown. In a name, `N` is the number of a stage, and `NAME` is any label. In a
meaning, a name in braces stands for the default of this knob of `[alarm]`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A group of metrics, with an optional text before and after their table."""

    title: str
    metrics: dict[tuple[str, ...], str]  # names with one meaning
    before: str = ""
    after: str = ""


COMPLETIONS = Section(
    "Completions",
    {
        ("step",): "from 1",
        ("reward", "stageN/reward"): (
            "mean reward. If stage 2 earns less than half of stage 1's, lower the KL target. "
            "Alarm: a stage earns less than a twentieth of another stage, which earns more than "
            "{dead_stage_above}"
        ),
        ("entropy", "stageN/entropy"): (
            "mean entropy of the next-token distributions that were sampled from (θ in stage 1, θ′ "
            "later), in nats per token. Stage 2's may be higher or lower than stage 1's: lower if "
            "stage 2 moves to a more certain strategy. Alarm: `stage1/entropy` below "
            "{entropy_below}"
        ),
        ("length", "stageN/length"): "mean tokens per completion",
        ("truncated_share", "stageN/truncated_share"): (
            "share of completions cut off at `max_new_tokens`. Alarm: above "
            "{truncated_share_above} in any stage"
        ),
        ("no_answer_share",): (
            "share of completions in which the grader found no answer. If it falls while reward "
            "rises, part of the gain is formatting"
        ),
        ("stageN/label/NAME",): (
            "share of completions to which the grader gave the label NAME; only for graders that "
            "set `Verdict.label` ([grading](grader.md))"
        ),
        ("zero_advantage_share",): (
            "share of groups whose rewards are all equal: nothing is learned from them. Alarm: "
            "above {zero_advantage_share_above}"
        ),
        ("dropped_groups",): (
            "groups that `dynamic_sampling` replaced or could not use; only with it. All other "
            "metrics of completions but `zero_advantage_share` then describe the groups before any "
            "was replaced"
        ),
        ("missed_share",): "share of groups whose first half earned no reward",
        ("second_half_recovery",): (
            "share of all groups whose first half earned no reward and whose second half did"
        ),
    },
    after=(
        "The halves of a GRPO group differ only by chance, so GRPO's `second_half_recovery / "
        "missed_share` is the chance baseline. The baseline depends on the policy: compare EEPO "
        "with the same recipe without unlearning."
    ),
)

UNLEARNING = Section(
    "Unlearning",
    {
        ("gate_share",): (
            "share of unlearned tokens among those that the gate chose from; 0 if the gate stays "
            "shut"
        ),
        ("unlearn/lr",): 'η, as set (or halved by an alarm), or as chosen by `"auto"`',
        ("unlearn/loss_before", "unlearn/loss_after"): (
            "unlearning loss under θ and under θ′, on up to `probe_completions` completions of "
            "stage 1"
        ),
        ("unlearn/kl",): (
            "KL(θ‖θ′) per token on the same completions (k3 estimate), minus `unlearn/kl_floor`. "
            "θ′ are the rollout weights as loaded, rounded to `rollout.dtype`. The pass has "
            "`model.compute_dtype`. Below 1e-4 unlearning has [hardly any "
            "effect](howto/kl-stays-zero.md). No alarm"
        ),
        ("unlearn/kl_floor",): (
            'KL that rounding alone causes, measured with `unlearn_lr = "auto"` by a step of a '
            "hundredth of η; 0 in fp32, and 0 with a fixed rate, where it is not measured"
        ),
        ("unlearn/weights_changed_share",): (
            "share of rollout weights that differ from θ after rounding to `rollout.dtype`: near 1 "
            "in fp32, .003 to .7 in bf16"
        ),
    },
    before=(
        "The `unlearn/…` metrics are absent in steps without unlearning. With more than two stages "
        "they describe the last unlearning step."
    ),
)

UPDATE = Section(
    "Update",
    {
        ("stageN/ratio_mean", "stageN/ratio_max"): (
            "token ratio: π_θ over its denominator (`algorithm.credit`)"
        ),
        ("stageN/rewarded_ratio_mean",): (
            "mean token ratio of the completions with a positive advantage; absent if there are "
            "none"
        ),
        ("stageN/rewarded_ratio_min",): (
            "over the same completions, the mean of each completion's smallest token ratio"
        ),
        ("stageN/lost_share",): (
            "over the same completions, the share whose smallest token ratio is below .01. The "
            "update almost ignores such tokens ([credit](credit.md)). Alarm: above "
            "{lost_share_above} in stage 2 or later"
        ),
        ("stageN/clip_share",): (
            "share of tokens whose ratio is clipped, so that they have no gradient. With "
            '`loss = "gspo"` the ratio is that of the completion; with `"cispo"` it is the share '
            'of capped weights; with `"clip_cov"` the selected tokens count, too'
        ),
        ("entropy_coef",): ("weight of the entropy bonus in this step; only with `entropy_target`"),
        ("mismatch_kl",): (
            "KL per token (k3 estimate) between the engine and the policy on stage 1, before the "
            "first update of the step. Both are θ, so it measures rounding. [Why it "
            "matters](engines.md#one-dtype). Alarm: above {mismatch_kl_above}"
        ),
        ("policy_entropy",): "mean entropy under θ at the update, over all completions",
        ("grad_norm",): "before clipping; mean over the mini-batches of the step",
    },
    after="""Typical values of `mismatch_kl`:

| dtypes | `mismatch_kl` |
|---|---|
| fp32 | about 1e-10 |
| bf16 on a GPU, the small countdown policy | 1e-4 |
| bf16 on a GPU, SmolLM2 on countdown | 3e-4 |
| bf16 on a GPU, SmolLM2 on sums | mostly .001 to .003 |""",
)

PHASES = ("sync", "stageN", "reward", "unlearn", "reference", "update", "total")
TIME = Section(
    "Time and memory",
    {
        tuple(f"seconds/{phase}" for phase in PHASES): (
            "seconds per phase: CUDA events on a GPU, wall-clock time elsewhere. `seconds/reward` "
            "is only the time that the step waited for grading, which runs in the background"
        ),
        ("tokens_per_second",): "sampled tokens over `seconds/total`",
        ("memory/peak", "memory/held"): (
            "on a GPU, in GB: the most memory that the step allocated at one time, and the most "
            "that torch reserved"
        ),
    },
)

STEP_METRICS = (COMPLETIONS, UNLEARNING, UPDATE, TIME)
EVALUATION_METRICS = Section(
    "`evaluations.jsonl`",
    {
        ("greedy",): "accuracy without sampling",
        ("mean",): "accuracy of `num_samples` samples per problem",
        ("pass@k",): "unbiased estimate for k = 1, 2, 4, …",
        ("distinct",): "mean number of different correct answers among the samples of a problem",
        ("length",): "mean tokens per sample",
        ("truncated_share",): "share of samples cut off at the length limit",
        ("no_answer_share",): "share of samples in which the grader found no answer",
        ("problems",): "counts for each problem, only in `full` lines",
    },
    before=(
        "Each line also has the `step`, the `kind` (`quick` or `full`), the `set`, its "
        "`num_problems` and `num_samples`, and the `seconds` that it took."
    ),
)
