"""Dynamic sampling: which groups are replaced, by which prompts, and what is counted."""

from __future__ import annotations

from concurrent.futures import Future

from eepo.algorithm import StepMetrics
from eepo.algorithm.dynamic_sampling import collect_groups
from eepo.types import Completion, Prompt, Rollout, Sampling, Verdict

SAMPLING = Sampling(1.0, 8, seed=3, stream="train/5")


class Collector:
    """Returns groups with the rewards that the id of a prompt spells, such as `0101`."""

    def __init__(self, unlearned: tuple[bool, ...] = (False, False, False, False)) -> None:
        self.calls: list[tuple[list[str], str]] = []
        self.unlearned = unlearned

    def __call__(self, prompts: list[Prompt], sampling: Sampling, metrics: StepMetrics) -> Rollout:
        rollout = Rollout(prompts)
        for stage in (1, 2):
            columns = slice(0, 2) if stage == 1 else slice(2, 4)
            verdicts: Future[list[Verdict]] = Future()
            rewards = [float(digit) for prompt in prompts for digit in prompt.text[columns]]
            verdicts.set_result([Verdict(reward, str(reward)) for reward in rewards])
            groups = [
                [Completion((5, 1), (-0.1, -0.1), prompt.id, True) for _ in range(2)]
                for prompt in prompts
            ]
            rollout.add_stage(stage, groups, verdicts)
            if stage == 1 and self.unlearned[len(self.calls)]:
                rollout.record_unlearning({0: -1.0, len(rollout.stages): -2.0})
        self.calls.append(([prompt.id for prompt in prompts], sampling.stream))
        return rollout


def prompts_of(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{number}", text, (1,)) for number, text in enumerate(texts)]


def texts(rollout: Rollout) -> list[str]:
    return [prompt.text for prompt in rollout.prompts]


def test_groups_with_equal_rewards_are_replaced_by_groups_of_new_prompts() -> None:
    prompts = prompts_of("0000", "0100", "1111", "0010", "0000", "0001", "1110", "1010", "0011")
    collector = Collector()
    rollout = collect_groups(collector, prompts, SAMPLING, StepMetrics(), num_rounds=2)
    assert collector.calls == [
        (["p0", "p1", "p2"], "train/5"),
        (["p3", "p4"], "train/5/round1"),
        (["p5"], "train/5/round2"),
    ]
    assert texts(rollout) == ["0010", "0100", "0001"]
    assert rollout.rewards == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert [group[0].text for group in rollout.groups] == ["p3", "p1", "p5"]
    assert [group[0].text for group in rollout.dropped] == ["p0", "p4", "p2"]
    assert [v.reward for v in rollout.verdicts[0]] == [0, 0, 1, 0]


def test_groups_that_stay_without_a_signal_are_kept_after_the_last_round() -> None:
    prompts = prompts_of("0000", "0100", "1111", "0000")
    rollout = collect_groups(Collector(), prompts, SAMPLING, StepMetrics(), num_rounds=1)
    assert texts(rollout) == ["0000", "0100"]
    assert len(rollout.prompts) + len(rollout.dropped) == 3  # the fourth prompt comes next


def test_without_rounds_nothing_is_resampled() -> None:
    collector = Collector()
    prompts = prompts_of("0000", "1111")
    rollout = collect_groups(collector, prompts, SAMPLING, StepMetrics(), num_rounds=0)
    assert texts(rollout) == ["0000", "1111"]
    assert len(collector.calls) == 1
    assert rollout.first_round is None
    assert len(rollout.pending) == 2  # it does not wait for the grader


def test_if_all_groups_have_a_signal_no_round_is_sampled() -> None:
    collector = Collector()
    prompts = prompts_of("0100", "0111", "0000", "0000")
    rollout = collect_groups(collector, prompts, SAMPLING, StepMetrics(), num_rounds=1)
    assert len(collector.calls) == 1
    assert rollout.dropped == []


def test_metrics_describe_the_groups_before_any_was_replaced() -> None:
    """The reward then means the same as without dynamic sampling."""
    prompts = prompts_of("1111", "0100", "0010", "0000")
    metrics = StepMetrics()
    rollout = collect_groups(Collector(), prompts, SAMPLING, metrics, num_rounds=1)
    rollout.advantages = [[1.0, 0, 0, 0], [0.0, 0, 0, 0]]
    metrics.record_rollout(rollout)
    row = metrics.result()
    assert row["reward"] == 5 / 8
    assert row["stage2/reward"] == 2 / 4
    assert row["zero_advantage_share"] == 0.5
    assert row["dropped_groups"] == 1
    assert row["tokens_per_second"] > 0


def test_a_completion_counts_as_unlearned_if_it_was_in_any_round() -> None:
    """The rest of a column is then divided by the same probability, up to rounding."""
    prompts = prompts_of("0000", "0100", "0010", "0000")
    rollout = collect_groups(Collector((False, True)), prompts, SAMPLING, StepMetrics(), 1)
    assert rollout.from_policy == [True, True, False, False]


def test_probed_logprobs_follow_their_group() -> None:
    prompts = prompts_of("0000", "0100", "0010", "0000")
    rollout = collect_groups(Collector((True, True)), prompts, SAMPLING, StepMetrics(), 1)
    # Row 0 now has the group of the first prompt of the second round; row 1 is as before.
    assert rollout.logprobs_after == {(0, 0): -1.0, (1, 0): -2.0}
    assert rollout.first_round is not None
    assert texts(rollout.first_round) == ["0000", "0100"]
