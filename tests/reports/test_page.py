from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from eepo.reports import read_run, write_report
from eepo.reports.page import page
from eepo.reports.pictures import PICTURES
from eepo.types import UserError

VOID = {"meta", "img", "br", "link", "input"}


class Tags(HTMLParser):
    """Collects tags, and notes any that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]
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


def bare(folder):
    """Without figures, which take most of a page's time."""
    (folder / "metrics.jsonl").write_text('{"step": 30}\n')
    (folder / "evaluations.jsonl").unlink()
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "report.html"


def test_the_page_is_whole_and_needs_no_network(write_run, out):
    folders = [write_run(name, seed) for name in ("grpo", "eepo") for seed in (0, 1)]
    assert write_report(folders, out) == out
    tags, source = read_page(out), out.read_text(encoding="utf-8")
    assert tags.tags.count("img") == 5
    assert all(found.startswith("data:image/svg+xml;base64,") for found in tags.sources)
    assert not {"script", "link", "iframe", "object"} & set(tags.tags)
    assert not re.search(r"""(?i)(src|href|url\(|@import)[\s="'(]*(https?:)?//""", source)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in source
    assert 'name="viewport"' in source
    assert "prefers-color-scheme: dark" in source
    for words in (
        "eepo against grpo",
        "paired over 2 seeds",
        "algorithm.num_stages",
        "torch 2.10",
        "the highest seed",
    ):
        assert words in tags.text
    figures = sorted(path.name for path in (out.parent / "report_figures").iterdir())
    assert figures == ["collapse.png", "cost.png", "exploration.png", "pass_at_k.png", "unlearning.png"]


def test_a_report_of_one_seed_says_so(write_run):
    runs = [read_run(write_run("grpo")), read_run(write_run("eepo"))]
    text = page(runs, [(PICTURES[2], PICTURES[2].figure(runs))])
    assert "One seed cannot show a difference" in text
    assert "problems of ONE seed, which is not evidence about methods" in text
    assert "95 % intervals over the problems of that seed" in text
    assert "the highest seed" not in text


def test_what_a_model_wrote_cannot_act(write_run, out):
    hostile = "</pre></td><script>alert(1)</script><img src=x onerror=alert(1)> \ud800 \u202e \x1b[31m"
    source = write_report([bare(write_run("eepo", text=hostile))], out).read_text(encoding="utf-8")
    assert "<script" not in source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in source
    assert "<img src=x" not in source
    assert "\u202e" not in source
    assert "\x1b" not in source
    assert "<script>alert(1)</script>" in read_page(out).text  # shown, as text


def test_names_and_settings_are_escaped_as_well(write_run, out):
    folder = write_run("a<b>", settings='gate = "<script>"')
    (folder / "environment.json").write_text(json.dumps({"device": "<script>"}))
    source = write_report([bare(folder), bare(write_run("grpo"))], out).read_text(encoding="utf-8")
    assert "<script" not in source
    assert "<b>a" not in source
    assert "a<b>" not in source


def test_sampled_completions_are_of_early_and_late_steps(write_run, out):
    tags = read_page(write_report([bare(write_run("eepo"))], out))
    assert "eepo (seed 0), step 1" in tags.text
    assert "eepo (seed 0), step 30" in tags.text
    assert "1 + 2 @1" in tags.text
    assert "1 + 2 @30" in tags.text


def test_figures_of_an_earlier_report_do_not_stay(write_run, out):
    folder = out.parent / "report_figures"
    folder.mkdir()
    (folder / "unlearning.png").touch()
    (folder / "mine.png").touch()
    write_report([bare(write_run("grpo"))], out)
    assert [path.name for path in folder.iterdir()] == ["mine.png"]


def test_a_run_with_nothing_but_metrics_has_a_page(write_run, out):
    folder = write_run("grpo")
    for name in ("environment.json", "evaluations.jsonl", "completions.jsonl"):
        (folder / name).unlink()
    tags = read_page(write_report([folder], out))
    assert "The runs kept no completions." in tags.text
    assert "not recorded" in tags.text


def test_mistakes_are_one_line(tmp_path, write_run):
    with pytest.raises(UserError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="is a folder"):
        write_report([write_run()], tmp_path)
