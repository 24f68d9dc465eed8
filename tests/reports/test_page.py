from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from eepo.reports import read_run, write_report
from eepo.reports.figure_list import FIGURES
from eepo.reports.page import page
from eepo.types import UserError

VOID = {"meta", "img", "br", "link", "input"}


class Tags(HTMLParser):
    """Collects tags, and fails if they are not nested correctly."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [
            value or ""
            for key, value in attrs
            if key in ("src", "href", "srcset", "data", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read_page(path):
    tags = Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    assert tags.open == []
    return tags


def without_figures(folder):
    """Remove the data of figures: drawing them takes most of the time."""
    (folder / "metrics.jsonl").write_text('{"step": 30}\n')
    (folder / "evaluations.jsonl").unlink()
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "report.html"


def test_the_page_is_complete_and_needs_no_network(write_run, out):
    folders = [write_run(name, seed) for name in ("grpo", "eepo") for seed in (0, 1, 2)]
    assert write_report(folders, out) == out
    tags, source = read_page(out), out.read_text(encoding="utf-8")
    assert tags.tags.count("img") == 7
    assert all(url.startswith("data:image/svg+xml;base64,") for url in tags.sources)
    assert not {"link", "iframe", "object", "form"} & set(tags.tags)
    assert tags.tags.count("script") == 2  # the data, and the completions browser
    assert not re.search(r"""(?i)(src|href|url\(|@import)[\s="'(]*(https?:)?//""", source)
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    assert f"{policy}script-src 'sha256-{digest}'; " in source
    assert 'name="viewport"' in source
    assert "prefers-color-scheme: dark" in source
    for text in (
        "eepo against grpo",
        "paired over 3 seeds",
        "algorithm.num_stages",
        "torch 2.10",
        "the highest seed",
    ):
        assert text in tags.text
    figures = sorted(path.name for path in (out.parent / "report_figures").iterdir())
    assert out.stat().st_size < 5e6
    names = (
        "collapse",
        "cost",
        "exploration",
        "pass_at_k",
        "second_half_recovery",
        "unlearning",
        "unlearning_examples",
    )
    assert figures == sorted(f"{name}.{suffix}" for name in names for suffix in ("png", "svg"))


def test_a_report_of_one_seed_says_so(write_run):
    runs = [read_run(write_run("grpo")), read_run(write_run("eepo"))]
    text = page(runs, [(FIGURES[2], 5.5, b"<svg/>")])
    assert "One seed cannot show a difference" in text
    assert "problems of ONE seed, which is not evidence about methods" in text
    assert "95 % intervals over the problems of that seed" in text
    assert "the highest seed" not in text


def test_model_output_cannot_run_as_code(write_run, out):
    hostile = (
        "</pre></td><script>alert(1)</script><img src=x onerror=alert(1)> \ud800 \u202e \x1b[31m"
    )
    source = write_report([without_figures(write_run("eepo", text=hostile))], out).read_text(
        encoding="utf-8"
    )
    assert source.count("<script") == source.count("</script") == 2
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in source
    assert "<img src=x" not in source
    assert "\u202e" not in source
    assert "\x1b" not in source
    assert "<script>alert(1)</script>" in read_page(out).text  # shown, as text


def test_names_and_settings_are_escaped(write_run, out):
    folder = write_run("a<b>", settings='gate = "<script>"')
    (folder / "environment.json").write_text(json.dumps({"device": "<script>"}))
    source = write_report(
        [without_figures(folder), without_figures(write_run("grpo"))], out
    ).read_text(encoding="utf-8")
    assert source.count("<script") == 2
    assert "<b>a" not in source
    assert "a<b>" not in source


def test_samples_are_from_early_and_late_steps(write_run, out):
    tags = read_page(write_report([without_figures(write_run("eepo"))], out))
    assert "eepo (seed 0), step 1" in tags.text
    assert "eepo (seed 0), step 30" in tags.text
    assert "1 + 2 @1" in tags.text
    assert "1 + 2 @30" in tags.text


def test_figures_of_an_earlier_report_are_deleted(write_run, out):
    folder = out.parent / "report_figures"
    folder.mkdir()
    (folder / "unlearning.png").touch()
    (folder / "unlearning.svg").touch()
    (folder / "mine.png").touch()
    write_report([without_figures(write_run("grpo"))], out)
    assert [path.name for path in folder.iterdir()] == ["mine.png"]


def test_a_run_with_only_metrics_has_a_page(write_run, out):
    folder = write_run("grpo")
    for name in ("environment.json", "evaluations.jsonl", "completions.jsonl"):
        (folder / name).unlink()
    tags = read_page(write_report([folder], out))
    assert "No completions were logged." in tags.text
    assert "not recorded" in tags.text


def test_missing_runs_and_a_folder_as_output_are_refused(tmp_path, write_run):
    with pytest.raises(UserError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="is a folder"):
        write_report([write_run()], tmp_path)


def test_a_run_killed_in_its_first_step_has_a_page(write_run, out):
    """The run wrote its recipe and half a line of completions."""
    folder = write_run("eepo")
    for name in ("evaluations.jsonl", "environment.json"):
        (folder / name).unlink()
    (folder / "metrics.jsonl").write_text("")
    (folder / "completions.jsonl").write_text('{"step": 1, "prom')
    text = read_page(write_report([folder], out)).text
    assert "recorded up to step 0 of 30" in text
    assert "no data for figures yet" in text
    assert "No completions were logged." in text


def test_a_run_killed_after_one_step_has_a_page(write_run, out):
    folder = write_run("eepo")
    for name in ("metrics", "completions"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text(
            "".join(line for line in lines if '"step": 1,' in line)
        )
    (folder / "evaluations.jsonl").unlink()
    tags = read_page(write_report([folder], out))
    assert tags.tags.count("img") == 5  # no evaluation: no collapse, no pass@k
    assert "recorded up to step 1 of 30" in tags.text


@pytest.mark.slow
def test_many_methods_fit_on_a_page(write_run, out):
    names = ("grpo", "eepo", *(f"method_{number}" for number in range(7)))
    tags = read_page(write_report([write_run(name) for name in names], out))
    assert tags.tags.count("img") == 7
    assert out.stat().st_size < 5e6


def test_alarms_are_listed_and_escaped(write_run, tmp_path) -> None:
    folder = write_run("eepo")
    quiet = write_report([folder], tmp_path / "quiet.html").read_text()
    assert "<h2>Alarms</h2>" not in quiet
    rows = [
        {
            "step": 7,
            "state": "on",
            "alarm": "dead_stage_above",
            "value": 0.45333569716002164,
            "bound": 0.05,
            "action": "warn",
        },
        {
            "step": 9,
            "state": "off",
            "alarm": "<script>",
            "value": 0.3,
            "bound": 0.05,
            "action": "warn",
        },
    ]
    (folder / "alarms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 30))
    page = write_report([folder], tmp_path / "loud.html").read_text()
    assert (
        "eepo seed 0: dead_stage_above began at step 7 (value 0.453, bound 0.05, action warn)"
        in page
    )
    assert "&lt;script&gt; ended at step 9" in page
    assert "and 10 more" in page
