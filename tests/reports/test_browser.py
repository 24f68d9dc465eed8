"""Tests the data of the completions browser. tests/browser tests it in a real browser."""

from __future__ import annotations

import json
import re

import pytest

from eepo.reports.browser import (
    MAX_CHARACTERS,
    MAX_ROWS,
    browser_data,
    browser_section,
    cut_text,
    json_for_html,
)
from eepo.reports.records import read_run

HOSTILE = "</script><script>alert(1)</script><!-- &lt; \u2028 \u2029 \ud800"


def read_data(section):
    return json.loads(re.search(r'id="completions-data">(.*?)</script>', section, re.DOTALL)[1])


def test_every_completion_is_included_with_its_prompt_and_run(write_run):
    runs = [read_run(write_run("grpo", 1)), read_run(write_run("eepo", 0))]
    data = read_data(browser_section(runs))
    assert data["runs"] == [{"method": "grpo", "seed": 1}, {"method": "eepo", "seed": 0}]
    assert data["prompts"] == ["1 2 = 3 :"]
    assert len(data["rows"]) == sum(len(run.completions) for run in runs)
    row = next(row for row in data["rows"] if row["run"] == 1 and row["step"] == 2)
    assert row == {
        "run": 1, "step": 2, "stage": 1, "reward": 1.0, "reason": "right", "prompt": 0,
        "text": "1 + 2 @2", "finished": True, "logprob": -1.0, "logprob_after": -1.5,
    }  # fmt: skip


def test_json_cannot_close_its_element_and_parses_back():
    text = json_for_html({"text": HOSTILE})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"text": HOSTILE}


def test_rewards_that_are_not_numbers_do_not_break_the_page(write_run):
    run = read_run(write_run("grpo"))
    run.completions[0]["reward"] = float("nan")
    assert browser_data([run], [run.completions])["rows"][0]["reward"] is None


def test_the_number_of_rows_is_limited_and_reported(write_run):
    runs = []
    for seed in range(4):
        folder = write_run("grpo", seed)
        line = json.loads((folder / "completions.jsonl").read_text().splitlines()[0])
        rows = [line | {"step": 1 + number // 4, "text": "y" * 9000} for number in range(1200)]
        (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(read_run(folder))
    section = browser_section(runs)
    data = read_data(section)
    assert MAX_ROWS / 2 < len(data["rows"]) <= MAX_ROWS + 16
    assert f"{len(data['rows']):,} of 4,800 logged completions" in section
    assert len(section) < 5e6


def test_a_long_text_keeps_its_end():
    cut = cut_text("a" * 5000 + "the answer")
    assert cut.endswith("the answer")
    assert "3,810 characters left out" in cut
    assert len(cut) < MAX_CHARACTERS + 50
    assert cut_text("short \x1b") == "short \ufffd"


@pytest.mark.parametrize("missing", ["reason", "logprob"])
def test_rows_without_optional_fields_are_read(write_run, missing):
    run = read_run(write_run("grpo"))
    for row in run.completions:
        del row[missing]
    assert read_data(browser_section([run]))["rows"][0][missing] in ("", None)
