"""Tests of wrong plans: each is refused in one line before anything runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from eepo.experiments.plan_file import read_plan
from eepo.types import UserError

EVERY_RATE = {"tune": "training.learning_rate", "values": ["1e-5"], "every_value": True}
WRONG = {
    "unknown key": ({"speed": 3}, "unknown key speed = 3; allowed: recipe, set,"),
    "unknown key of a method": (
        {"methods__eepo__knobs": ["a"]},
        'unknown key methods.eepo.knobs = ["a"]; allowed: recipe',
    ),
    "wrong type": ({"set": "a=b"}, 'set = "a=b" must be a list of strings'),
    "method that is no table": ({"methods__eepo": 3}, "methods.eepo = 3 must be a table"),
    "empty list of seeds": (
        {"phases__report__seeds": []},
        "phases.report.seeds = [] must be a list of one or more different seeds",
    ),
    "seed that is no number": (
        {"phases__report__seeds": ["1"]},
        'phases.report.seeds = ["1"] must be a list of whole numbers',
    ),
    "no seeds": ({"phases": {}, "seeds": []}, "give seeds = [0, 1], or a table [phases.NAME]"),
    "unknown base": (
        {"methods__eepo__base": ["gpro"]},
        'methods.eepo.base = "gpro" is no method of this plan; allowed: grpo, wide, eepo',
    ),
    "method that builds on itself": (
        {"methods__grpo__base": ["eepo"]},
        "methods.grpo builds on itself: grpo -> eepo -> grpo",
    ),
    "unknown regime": (
        {"methods__eepo__regimes": ["dence"]},
        'methods.eepo.regimes = "dence" is no regime of this plan; allowed: dense, finite',
    ),
    "unknown phase": (
        {"tables": [{"phases": ["fresh"]}]},
        'tables[0].phases = "fresh" is no phase of this plan; allowed: tune, report',
    ),
    "unknown figure": (
        {"figures": [{"figure": "pie"}]},
        'figures[0].figure = "pie" must be one of "exploration", "pass_at_k"',
    ),
    "values without a knob": (
        {"methods__eepo__values": [1]},
        "methods.eepo: tune and values belong together",
    ),
    "seconds are no list": (
        {"tables": [{"seconds": 60}]},
        "seconds = 60 must be a list of numbers > 0",
    ),
    "no values": ({"methods__grpo__values": []}, "methods.grpo.values = [] must be a list of one"),
    "the same value twice": (
        {"methods__grpo__values": ["1e-5", "0.00001"]},
        "methods.grpo with 0.00001 in regimes.dense: the same as 1e-5",
    ),
    "values of a method that has none": (
        {"regimes__finite__values": {"eepo": [1]}},
        "regimes.finite.values.eepo = [1]: eepo is no method with values; allowed: grpo, wide",
    ),
    "wrong value of a knob": (
        {"methods__wide__values": [16, 33]},
        "methods.wide with 33 in regimes.dense: ",
    ),
    "unknown knob": (
        {"methods__eepo__set": ["algorithm.stages=2"]},
        "methods.eepo in regimes.dense: unknown key algorithm.stages = 2",
    ),
    "unknown recipe": (
        {"regimes__dense__recipe": "countdown/gpro"},
        "methods.grpo with 1e-5 in regimes.dense: countdown/gpro: no such recipe",
    ),
    "no recipe": ({"regimes__dense": {}}, "methods.grpo has no recipe; give recipe in the method"),
    "against without every value": (
        {"methods__eepo__against": "grpo"},
        "methods.eepo.against = 'grpo' needs every_value = true in both methods",
    ),
    "weights of a method that trains nothing": (
        {"methods__first": {"train": False}, "methods__second": {"weights": "first"}},
        "methods.second.weights = 'first' is no method that trains; allowed: grpo, wide, eepo",
    ),
    "base with every value": (
        {"methods__rates": EVERY_RATE, "methods__other": {"base": ["rates"]}},
        "methods.other builds on 'rates', which has every_value = true",
    ),
    "temperature without samples": (
        {"benchmarks": {"names": ["math500"], "temperature": 0.6}},
        "benchmarks.temperature = 0.6 must be used with samples",
    ),
    "sample limit without samples": (
        {"benchmarks": {"names": ["math500"], "sample_limit": 5}},
        "benchmarks.sample_limit = 5 must be used with samples",
    ),
    "tuned without an objective": ({"objective": []}, "give objective = "),
    "tuned without seeds to tune": (
        {"phases": {"report": {"seeds": [0]}}},
        "methods.grpo has values to choose from, so the plan needs seeds in [phases.tune]",
    ),
    "name that is no folder": ({"methods__a/b": {}}, "the name 'a/b' in [methods]"),
    "shares of a value that is no whole number": (
        {"methods__grpo__shares": {"training.prompts_per_step": 8}},
        "methods.grpo.shares = ",
    ),
    "equal to nothing": ({"equal": "steps"}, 'equal = "steps" must be one of "rollouts", "time"'),
    "equal time without a baseline": (
        {"equal": "time", "methods": {"base": {"train": False}, "rates": EVERY_RATE}},
        'equal = "time": the first method that trains sets the time of the others',
    ),
    "benchmarks without names": ({"benchmarks": {}}, "benchmarks.names = null must be a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_a_one_line_error(name: str, plans: SimpleNamespace) -> None:
    changes, fragment = WRONG[name]
    with pytest.raises(UserError, match=r"^plan.toml: ") as error:
        plans.parse(**changes)
    assert fragment in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_plan_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.toml: No such file"):
        read_plan(tmp_path / "nothing.toml")
    (tmp_path / "wrong.toml").write_text("methods = [")
    with pytest.raises(UserError, match=r"wrong.toml: not valid TOML"):
        read_plan(tmp_path / "wrong.toml")
