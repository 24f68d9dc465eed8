"""Tests of the tables and figures of plans: from lines that are computed by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from eepo.cli import app
from eepo.experiments.experiment import Experiment
from eepo.experiments.plan import Selection
from eepo.experiments.plan_file import read_plan
from eepo.experiments.plan_reports import _figure_data, plan_tables, write_plan_figures
from eepo.experiments.toml_tables import dump_tables
from eepo.reports.frontier import FrontierPanel, frontier_figure, interval_arms
from eepo.reports.plan_figures import FIGURES, FigureData, draw_frontier, length_measures
from eepo.reports.run_lines import line_sets
from eepo.reports.steps_to_reward import regime_number, steps_by_method_figure
from eepo.types import UserError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
EVERY_RATE = {
    "tune": "training.learning_rate",
    "values": ["1e-5", "1e-4"],
    "every_value": True,
}


def tables(experiment: Experiment, against: str = "", **selected: Any) -> str:
    return plan_tables(experiment, Selection(**selected), against)


def figure_names(experiment: Experiment, into: Path, *kinds: str, **selected: Any) -> list[str]:
    files = write_plan_figures(experiment, Selection(**selected), kinds, into)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    return [file.name for file in files]


def test_tables_are_paired_by_seed(plans: SimpleNamespace, tmp_path: Path) -> None:
    experiment, line = plans.tuned(tmp_path), plans.line
    reported = [line("grpo", "1e-5", seed, greedy) for seed, greedy in enumerate((0.5, 0.7, 0.9))]
    reported += [line("eepo", "", seed, greedy) for seed, greedy in enumerate((0.6, 0.8, 0.7))]
    plans.write(tmp_path / "report.jsonl", reported[::-1])
    text = tables(experiment)
    assert "### dense, in range" in text
    training, row = [row for row in text.splitlines() if row.startswith("| eepo |")]
    # Differences .1, .1, -.2: mean 0, standard error .1, times 4.303. The mean is half of greedy.
    assert row.startswith(
        "| eepo | 0.350<br>+0.000 [-0.215, +0.215] | 0.700<br>+0.000 [-0.430, +0.430] |"
    )
    # The entropy of stage 1 at the last step, and only columns that some run has.
    assert training == "| eepo | 3 | 0.25 | 0.7 | 1 |"
    assert "|  | seeds | of stage 1 | of stage 1 | seconds |" in text
    names = figure_names(experiment, tmp_path / "figures")
    assert names == [f"plan_dense_{kind}.png" for kind in ("exploration", "pass_at_k", "frontier")]


def test_a_significant_difference_is_bold(plans: SimpleNamespace, tmp_path: Path) -> None:
    line = plans.line
    reported = [line("grpo", "1e-5", seed, greedy) for seed, greedy in enumerate((0.3, 0.5, 0.4))]
    reported += [line("eepo", "", seed, greedy) for seed, greedy in enumerate((0.5, 0.71, 0.6))]
    plans.write(tmp_path / "report.jsonl", reported)
    assert "0.603<br>**+0.203 [+0.189, +0.218]**" in tables(plans.tuned(tmp_path))


def with_benchmarks(line: dict[str, Any], *greedy: str) -> dict[str, Any]:
    """Add two benchmarks to a line. A digit says whether the greedy completion is correct."""
    rows = [
        {
            "step": 10,
            "kind": "full",
            "set": name,
            "num_problems": len(digits),
            "num_samples": 2,
            "greedy": digits.count("1") / len(digits),
            "mean": 0.5,
            "pass@k": {"1": 0.5, "2": 0.75},
            "outcomes": {"greedy": digits, "correct": [1]},
        }
        for name, digits in zip(("amc23", "aime24"), greedy, strict=True)
    ]
    return line | {"evaluations": line["evaluations"] + rows}


def test_intervals_are_over_seeds_and_problems_if_outcomes_are_recorded(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    line = plans.line
    reported = [with_benchmarks(line("grpo", "1e-5", seed, 0.3), "0000", "00") for seed in (0, 1)]
    reported += [with_benchmarks(line("eepo", "", seed, 0.3), "1010", "10") for seed in (0, 1)]
    plans.write(tmp_path / "report.jsonl", reported)
    # A problem file is a set with the name of the file.
    benchmarks = {"names": ["data/amc23.jsonl", "aime24"], "samples": 2, "sample_limit": 1}
    text = tables(plans.tuned(tmp_path, benchmarks=benchmarks))
    first, second, average = (
        text.partition(f"### dense, {title}\n")[2].partition("###")[0]
        for title in ("AMC 23", "AIME 24", "average of the benchmarks")
    )
    # No spread over seeds; over problems 3.182 * .577 / 2 and 12.706 * .707 / 1.414.
    assert "0.500<br>+0.500 [-0.419, +1.419]" in first
    assert "0.500<br>+0.500 [-5.853, +6.853]" in second
    assert "0.500<br>+0.500 [-2.710, +3.710]" in average
    assert "|  | mean | greedy | pass@2 |" in first, "distinct answers are not recorded"
    assert "|  | mean | greedy | pass@8 | pass@32 | distinct |" in text, (
        "other sets have other samples"
    )


def test_benchmarks_with_greedy_completions_only(plans: SimpleNamespace, tmp_path: Path) -> None:
    def line(method: str, value: str, seed: int, digits: str) -> dict[str, Any]:
        line = with_benchmarks(plans.line(method, value, seed, 0.3), digits, "01")
        for row in line["evaluations"][1:]:  # as `eepo eval` without --samples
            del row["mean"], row["pass@k"]
            row["num_samples"] = 0
            row["outcomes"]["correct"] = [0] * row["num_problems"]
        return line

    reported = [line("grpo", "1e-5", seed, "0000") for seed in (0, 1)]
    reported += [line("eepo", "", seed, "1010") for seed in (0, 1)]
    plans.write(tmp_path / "report.jsonl", reported)
    text = tables(plans.tuned(tmp_path, benchmarks={"names": ["amc23", "aime24"]}))
    table = text.partition("### dense, AMC 23\n")[2].partition("###")[0]
    assert "|  | mean | greedy |\n" in table
    assert "| eepo |  | 0.500<br>+0.500 [-0.419, +1.419] |" in table


def test_seeds_with_other_numbers_of_problems_have_intervals_over_seeds(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    line = plans.line
    reported = [
        with_benchmarks(line(method, value, seed, 0.3), "01" * (seed + 1), "01")
        for method, value in (("grpo", "1e-5"), ("eepo", ""))
        for seed in (0, 1)
    ]
    plans.write(tmp_path / "report.jsonl", reported)
    table = tables(plans.tuned(tmp_path)).partition("### dense, AMC 23\n")[2]
    assert "0.500<br>+0.000 [+0.000, +0.000] |" in table.partition("###")[0]


def test_figures_may_show_some_sets(
    plans: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def record(data: FigureData) -> None:
        drawn.append(line_sets(data.lines))

    monkeypatch.setitem(FIGURES, "pass_at_k", record)
    line = with_benchmarks(plans.line("grpo", "1e-5", 0, 0.3), "0011", "01")
    plans.write(tmp_path / "report.jsonl", [line])
    for sets in ([], ["aime24", "amc23"]):
        entry = {"figure": "pass_at_k", "sets": sets}
        with pytest.raises(UserError, match="no finished run for these figures"):
            write_plan_figures(
                plans.tuned(tmp_path, figures=[entry]), Selection(), ["pass_at_k"], tmp_path
            )
    assert drawn == [["in_range", "amc23", "aime24"], ["aime24", "amc23"]]
    entry = {"figure": "pass_at_k", "sets": ["amc24"]}
    with pytest.raises(UserError, match=r"figures\.sets has 'amc24'; evaluated: in_range"):
        write_plan_figures(plans.tuned(tmp_path, figures=[entry]), Selection(), [], tmp_path)


def test_differences_to_another_method(plans: SimpleNamespace, tmp_path: Path) -> None:
    line, experiment = plans.line, plans.tuned(tmp_path)
    reported = [line("grpo", "1e-5", seed, 0.3) for seed in range(3)]
    reported += [line("eepo", "", seed, 0.5) for seed in range(3)]
    plans.write(tmp_path / "report.jsonl", reported)
    text = tables(experiment, "eepo", methods=("grpo",))
    (row,) = [row for row in text.splitlines() if "(to eepo)" in row]
    assert row.startswith("| grpo 1e-5 (to eepo) |")
    assert "0.300<br>**-0.200 [-0.200, -0.200]**" in row
    with pytest.raises(UserError, match="--against 'wide' has no finished run"):
        tables(experiment, "wide")


def test_a_comparison_uses_the_seeds_that_both_have(plans: SimpleNamespace, tmp_path: Path) -> None:
    line, experiment = plans.line, plans.tuned(tmp_path)
    reported = [line("grpo", "1e-5", seed, 0.3) for seed in (0, 1)]
    reported += [line("eepo", "", seed, 0.5 if seed else 0.9) for seed in (1, 2, 0)]
    reported += [line("wide", "32", 2, 0.4)]
    plans.write(tmp_path / "report.jsonl", reported)
    text = tables(experiment, "grpo")
    assert "| eepo | 0.350<br>" in text, "the mean of .45 and .25"
    assert "wide" not in text, "it has no seed of grpo"
    assert "| wide 32 |" in tables(experiment)


def test_every_seed_is_compared_with_a_model_without_training(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    line = plans.line
    experiment = plans.tuned(tmp_path, methods__start={"train": False})
    start = line("start", "", 0, 0.4) | {"metrics": [], "knobs": ["training.num_steps=0"]}
    trained = [line("grpo", "1e-5", seed, greedy) for seed, greedy in ((0, 0.5), (1, 0.7))]
    plans.write(tmp_path / "report.jsonl", [*trained, start])
    (row,) = [row for row in tables(experiment, "start").splitlines() if "0.600<br>" in row]
    assert "0.600<br>+0.200 [-1.071, +1.471]" in row, ".1 and .3: 12.706 * .1"


def test_a_regime_without_the_method_to_compare_with_is_left_out(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    line = plans.line
    tune = [line("grpo", "1e-5", 100, 0.3, regime=name) for name in ("dense", "finite")]
    reported = [line("grpo", "1e-5", 0, 0.3, regime=name) for name in ("dense", "finite")]
    plans.write(tmp_path / "tune.jsonl", tune)
    plans.write(tmp_path / "report.jsonl", [*reported, line("eepo", "", 0, 0.3)])
    experiment = Experiment(plans.parse(), tmp_path)
    assert "### finite" in tables(experiment)
    assert "### finite" not in tables(experiment, "eepo")


def test_lines_with_outdated_chosen_values_are_ignored(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    line = plans.line
    stale = [line("grpo", "1e-4", seed, 0.1) for seed in range(3)]
    reported = [line("grpo", "1e-5", seed, 0.5) for seed in range(3)]
    reported += [line("eepo", "", seed, 0.5) for seed in range(3)]
    reported += [line("eepo", "", 0, 0.9, inherited="1e-4")]
    plans.write(tmp_path / "report.jsonl", [*stale, *reported])
    text = tables(plans.tuned(tmp_path))
    assert "grpo 1e-4" not in text
    assert "0.500<br>+0.000 [+0.000, +0.000]" in text


def test_the_newest_line_of_a_run_counts(plans: SimpleNamespace, tmp_path: Path) -> None:
    lines = [plans.line("grpo", "1e-5", 0, greedy) for greedy in (0.1, 0.7)]
    plans.write(tmp_path / "report.jsonl", lines)
    assert "| grpo 1e-5 | 0.350 | 0.700 |" in tables(plans.tuned(tmp_path))


def test_other_phases_are_tabulated_alone_or_together(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    experiment = plans.tuned(tmp_path, phases__fresh={"seeds": [7, 8]})
    plans.write(tmp_path / "report.jsonl", [plans.line("grpo", "1e-5", 0, 0.5)])
    fresh = [plans.line("grpo", "1e-5", seed, 0.9) for seed in (7, 8)]
    plans.write(tmp_path / "fresh.jsonl", fresh)
    assert "| grpo 1e-5 | 0.450 | 0.900 |" in tables(experiment, phases=("fresh",))
    assert "| grpo 1e-5 | 0.250 | 0.500 |" in tables(experiment)
    both = tables(experiment, phases=("report", "fresh"))
    assert "| grpo 1e-5 | 3 |" in both
    assert "| grpo 1e-5 | 0.383 | 0.767 |" in both


def test_a_plan_lists_its_tables(plans: SimpleNamespace, tmp_path: Path) -> None:
    listed = [{"phases": ["report"]}, {"heading": "To EEPO", "against": "eepo"}]
    experiment = plans.tuned(tmp_path, tables=listed)
    reported = [plans.line("grpo", "1e-5", 0, 0.5), plans.line("eepo", "", 0, 0.5)]
    plans.write(tmp_path / "report.jsonl", reported)
    first, second = tables(experiment).split("## To EEPO")
    assert "(to eepo)" not in first
    assert "| grpo 1e-5 (to eepo) |" in second


def test_against_compares_methods_at_the_same_value(plans: SimpleNamespace, tmp_path: Path) -> None:
    """As grpo is the first method, all would be compared with its first value otherwise."""
    line = plans.line
    methods = {"grpo": EVERY_RATE, "other": EVERY_RATE | {"against": "grpo"}}
    experiment = plans.tuned(tmp_path, methods=methods)
    reported = [line("grpo", "1e-4", seed, 0.1) for seed in range(3)]
    reported += [line("grpo", "1e-5", seed, 0.5) for seed in range(3)]
    reported += [line("grpo", "1e-4", seed, 0.3) | {"method": "other"} for seed in range(3)]
    plans.write(tmp_path / "report.jsonl", reported)
    rows = [row for row in tables(experiment).splitlines() if row.startswith(("| grpo", "| other"))]
    assert [row.split(" | ")[0] for row in rows[-3:]] == [
        "| grpo 1e-5",
        "| grpo 1e-4",
        "| other 1e-4 (to grpo 1e-4)",
    ]
    assert "| 0.300<br>**+0.200 [+0.200, +0.200]** |" in rows[-1], "greedy"
    figure = draw_frontier(_figure_data(experiment, experiment.done("report")))
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["in range"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["grpo", "other"]
    text = tables(experiment, "grpo 1e-4")
    assert "| grpo 1e-5 (to grpo 1e-4) |" in text
    with pytest.raises(UserError, match="'grpo 1e-3' has no finished run; allowed: grpo 1e-4"):
        tables(experiment, "grpo 1e-3")


def test_methods_that_differ_only_in_steps_are_one_line(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    line, five = plans.line, "training.num_steps=5"
    longer_methods = {
        f"methods__{name}_5": {"base": [name], "set": [five]} for name in ("grpo", "eepo")
    }
    experiment = plans.tuned(tmp_path, **longer_methods)

    def longer(name: str, *rest: Any) -> dict[str, Any]:
        found = line(name, *rest)
        return found | {"method": f"{name}_5", "value": "", "knobs": [*found["knobs"], five]}

    def measured() -> dict[str, Any]:
        fresh = Experiment(experiment.plan, tmp_path)
        return length_measures(_figure_data(fresh, fresh.done("report")))

    short = [line("grpo", "1e-5", 0, 0.4), line("eepo", "", 0, 0.6), line("wide", "32", 0, 0.6)]
    grown = [longer("grpo", "1e-5", seed, 0.8) for seed in (0, 1)]
    plans.write(tmp_path / "report.jsonl", [*short, *grown])
    assert measured() == {}, "only one method has several numbers of steps"
    plans.write(tmp_path / "report.jsonl", [*short, *grown, longer("eepo", "", 1, 0.2)])
    assert list(measured()) == ["mean, in range", "pass@32, in range"]
    assert measured()["mean, in range"] == {
        "grpo": {2: [0.2], 5: [0.4, 0.4]},
        "eepo": {2: [0.3], 5: [0.1]},
    }
    names = figure_names(experiment, tmp_path / "figures", "lengths")
    assert names == ["plan_dense_lengths.png"]


def test_values_are_labelled_once_and_at_the_ends_of_coloured_lines() -> None:
    lines = {
        name: {value: [(float(i), float(i))] for i, value in enumerate("abc")}
        for name in ("first", "second")
    }
    lines["other"] = {"d": [(3.0, 3.0)]}
    for points, labels in (({}, [*"abc", *"ac", "d"]), ({"grpo": [(1.0, 1.0)]}, [*"abc", "d"])):
        figure = frontier_figure([FrontierPanel("dense", lines, points)], "pass@32")
        assert figure is not None
        assert [text.get_text() for text in figure.axes[0].texts] == labels


def test_many_methods_have_numbers_and_the_first_lies_on_top() -> None:
    methods = {f"method {n}": [(n / 20, n / 20)] for n in range(1, 20)}
    figure = frontier_figure([FrontierPanel("dense", {}, methods)], "pass@32")
    assert figure is not None
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["1 method 1", "2 method 2"]
    texts = figure.axes[0].texts
    assert [text.get_text() for text in texts] == [*map(str, range(1, 20))]
    assert [text.get_position() for text in texts][:2] == [(0.05, 0.05), (0.1, 0.1)]
    heights = [text.get_zorder() for text in texts]
    assert heights == sorted(heights, reverse=True)
    few = frontier_figure([FrontierPanel("dense", {}, dict([*methods.items()][:2]))], "pass@32")
    assert few is not None
    assert not few.axes[0].texts


def test_intervals_end_where_shares_end() -> None:
    (low,), (high,) = interval_arms([0.9, 1.0])
    assert (low, high) == (pytest.approx(0.635, abs=1e-3), pytest.approx(0.05))
    assert interval_arms([0.1, 0.0])[0] == [pytest.approx(0.05)]


def test_steps_of_every_run_are_drawn_and_failures_are_apart() -> None:
    def line(method: str, steps: int | None) -> dict[str, Any]:
        return {"method": method, "steps_to_90": steps, "num_steps": 100}

    slow = [line("slow", 80), line("slow", None), line("slow", None)]
    figure = steps_by_method_figure([*slow, line("fast", 20), line("fast", 30)])
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fast", "slow"]
    drawn = {each.get_marker(): [] for each in axes.lines}
    for each in axes.lines:
        drawn[each.get_marker()] += [*zip(each.get_xdata(), each.get_ydata(), strict=True)]
    assert drawn["o"] == [(20, 0), (30, 0), (80, 1)]
    assert drawn["|"] == [(25, 0)], "the median of slow is a failure"
    assert [(x > 100, row) for x, row in drawn["x"]] == [(True, 1), (True, 1)]


def test_an_unknown_figure_is_an_error(plans: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--figure pie must be one of exploration, pass_at_k"):
        write_plan_figures(plans.tuned(tmp_path), Selection(), ["pie"], tmp_path)
    with pytest.raises(UserError, match="no finished run for these figures"):
        write_plan_figures(plans.tuned(tmp_path), Selection(), [], tmp_path)
    with pytest.raises(UserError, match=r"has no finished run of plan.toml"):
        tables(plans.tuned(tmp_path))


def test_the_figure_over_regimes_needs_numbers_in_their_names() -> None:
    assert regime_number("p_1e-5") == 1e-5
    with pytest.raises(UserError, match="regime dense: the figure steps_to_reward needs names"):
        regime_number("dense")


def test_the_commands_print_tables_and_status_and_write_figures(
    plans: SimpleNamespace, tmp_path: Path
) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(dump_tables(plans.tables()))
    out.mkdir()
    plans.tuned(out)
    plans.write(out / "report.jsonl", [plans.line("grpo", "1e-5", 0, 0.5)])

    def call(command: str, *options: str) -> str:
        words = ["plan", command, str(plan), "--out", str(out), *options]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert "| grpo 1e-5 | 0.250 | 0.500 |" in call("tables")
    assert "1 done, 0 running, 0 failed, 8 left" in call(
        "show", "--phase", "report", "--regime", "dense"
    )
    commands = call("show", "--commands", "--phase", "report", "--regime", "dense")
    assert commands.count("eepo train countdown/grpo --out") == 8
    call("figures", "--into", str(tmp_path / "figures"), "--figure", "pass_at_k")
    assert (tmp_path / "figures" / "plan_dense_pass_at_k.png").is_file()


# --- the results in docs/


@pytest.mark.parametrize("name", ["countdown", "maths", "methods", "reason", "shortcut", "smollm2"])
def test_the_tables_in_the_docs_are_those_of_the_recorded_lines(name: str) -> None:
    experiment = Experiment(read_plan(ROOT / "studies" / f"{name}.toml"), RESULTS / name)
    text = (RESULTS / f"{name}_tables.md").read_text()
    assert text[text.index("### ") :] == tables(experiment)


FIGURE_STUDIES = (
    "countdown", "maths", "methods", "reason", "smollm2", "smollm2_shortcut", "smollm2_two_dtypes",
    "shortcut", "shortcut_rates",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURE_STUDIES)
def test_every_figure_of_a_study_is_drawn_from_its_lines(name: str, tmp_path: Path) -> None:
    experiment = Experiment(read_plan(ROOT / "studies" / f"{name}.toml"), RESULTS / name)
    drawn = set(figure_names(experiment, tmp_path))
    folders = (RESULTS / "figures", ROOT / "docs" / "figures")
    kept = {path.name for folder in folders for path in folder.glob(f"{name}*.png")}
    longer = tuple(other for other in FIGURE_STUDIES if other.startswith(f"{name}_"))
    assert drawn == {file for file in kept if not file.startswith(longer)}


@pytest.mark.parametrize(
    ("name", "phases", "against", "rows"),
    [
        ("countdown", ("pilots",), "grpo", {"ratio_1", "new_answers", "shared_advantage"}),
        (
            "countdown",
            ("pilots", "low_temperature"),
            "downweight_failures_at_0.6",
            {"extra_failures_at_0.6 8 (to downweight_failures_at_0.6)"},
        ),
    ],
)
def test_recorded_runs_of_removed_code_are_compared_on_common_seeds(
    name: str, phases: tuple[str, ...], against: str, rows: set[str]
) -> None:
    experiment = Experiment(read_plan(ROOT / "studies" / f"{name}.toml"), RESULTS / name)
    text = tables(experiment, against, phases=phases)
    assert rows <= {row.split(" | ")[0].removeprefix("| ") for row in text.splitlines()}
