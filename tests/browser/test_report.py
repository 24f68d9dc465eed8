"""Tests the report in a browser: it renders, filters work, and injected code does not run."""

from __future__ import annotations

import html
import re
from urllib.parse import urlencode

import numpy as np
import pytest
from matplotlib.image import imread

from eepo.reports.figure_list import FIGURES

pytestmark = pytest.mark.slow  # each test starts a browser

NUM_ROWS = 2 * 3 * 16  # runs, steps, completions of a step


@pytest.fixture(scope="module")
def opened_report(open_page, report):
    return open_page(report)


def test_the_report_renders_without_console_messages(opened_report):
    assert opened_report.console == []
    assert [spec.name for spec in FIGURES] == re.findall(r'<figure id="(\w+)">', opened_report.dom)
    assert opened_report.dom.count("data:image/svg+xml;base64,") == len(FIGURES)
    assert opened_report.count == f"50 shown of {NUM_ROWS} matching"
    assert len(opened_report.texts("article")) == 50
    assert '<button id="completions-more" type="button">' in opened_report.dom


def test_injected_code_is_shown_as_text_and_does_not_run(
    opened_report, open_page, report, injected
):
    hostile = open_page(report, urlencode({"run": f"{injected[1]}/0"}))
    assert hostile.count == "48 shown of 48 matching"
    for opened in (opened_report, hostile):
        assert html.unescape(opened.texts("title")[0]).endswith("against grpo")
        assert '<b id="ran"' not in opened.dom
        assert not re.search(r"<(iframe|svg|a|img src=.?x)\b", opened.dom)
        assert opened.dom.count("<script") == 2
    shown = [html.unescape(text) for text in hostile.texts("pre")]
    for text in injected:
        assert f"{text} = ?" in shown
        assert any(item.startswith(f"{text} #") for item in shown)


@pytest.mark.parametrize(
    ("fragment", "number"),
    [
        ("step=3&stage=2", 16),
        ("reward=0&stage=1&run=grpo/0", 21),
        ("text=REASON+1%2B2", 48),
        ("step=3&stage=2&reward=1&text=1%2B2", 1),
    ],
)
def test_the_address_sets_the_filter(open_page, report, fragment, number):
    opened = open_page(report, fragment)
    assert opened.count == f"{min(number, 50)} shown of {number} matching"
    assert len(opened.texts("article")) == min(number, 50)
    for part in ("step", "stage"):
        filtered = re.search(rf"{part}=(\d)", fragment)
        if filtered:
            facts = [re.search(rf"{part} (\d)", text)[1] for text in opened.texts("article")]
            assert set(facts) == {filtered[1]}
    assert opened.console == []


def test_unknown_filter_values_in_the_address_are_reported(open_page, report):
    opened = open_page(report, "step=77&stage=%3Cscript%3E")
    unknown = "step 77, stage &lt;script&gt;"
    assert opened.count == f"50 shown of {NUM_ROWS} matching (not on this page: {unknown})"


def test_completions_are_readable_without_scripts(report, tmp_path, open_page):
    """Change the script, so that its hash is wrong and the policy blocks it."""
    source = report.read_text(encoding="utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(source.replace('"use strict";', '"use strict"; '), encoding="utf-8")
    opened = open_page(changed)
    assert any("Content Security Policy" in line for line in opened.console), (
        "the policy blocks any other script"
    )
    assert '<div id="completions-browser" hidden="">' in opened.dom
    noscript = re.search(r"<noscript>(.*?)</noscript>", source, re.DOTALL)[1]
    assert "1+2 #3.0" in noscript


@pytest.fixture
def with_script(report, tmp_path):
    """Return with_script(script): it adds a script to the page and removes the policy."""

    def write(script):
        source = re.sub(
            r'<meta http-equiv="Content-Security-Policy"[^>]*>',
            "",
            report.read_text(encoding="utf-8"),
        )
        changed = tmp_path / "scripted.html"
        changed.write_text(
            source.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8"
        )
        return changed

    return write


def test_changing_a_filter_changes_rows_and_address(with_script, open_page):
    page = with_script("""
      const choose = (key, value) => {
        const control = document.getElementById(`filter-${key}`);
        control.value = value;
        control.dispatchEvent(new Event("input"));
      };
      choose("step", "2");
      choose("text", "1+2 #2.1");
      document.title = location.hash;
    """)
    opened = open_page(page, "stage=2")
    assert html.unescape(opened.texts("title")[0]) == "#step=2&stage=2&text=1%2B2+%232.1"
    assert opened.count == "6 shown of 6 matching"  # 2.10 to 2.15
    assert opened.console == []


def test_changing_the_address_changes_rows_and_more_can_be_shown(with_script, open_page):
    page = with_script("""
      addEventListener("hashchange", () => document.getElementById("completions-more").click());
      location.hash = "stage=1&run=grpo/0";
    """)
    assert open_page(page).count == "24 shown of 24 matching"
    page = with_script('document.getElementById("completions-more").click();')
    assert open_page(page).count == f"{NUM_ROWS} shown of {NUM_ROWS} matching"


def test_the_page_fits_the_width_of_a_phone(with_script, open_page, tmp_path):
    """Use a frame, because a window cannot be as narrow as a phone."""
    page = with_script(
        "parent.postMessage(`${document.documentElement.scrollWidth} of ${innerWidth}`, '*');"
    )
    framed = tmp_path / "framed.html"
    script = (
        "<script>addEventListener('message', (event) => { document.title = event.data; });</script>"
    )
    framed.write_text(
        f'<title></title>{script}<iframe width="390" height="800" src="{page.as_uri()}"></iframe>'
    )
    needed, available = open_page(framed).texts("title")[0].split(" of ")
    assert int(needed) <= int(available) == 390


@pytest.mark.parametrize(
    ("flags", "dark"), [((), False), (("--blink-settings=preferredColorScheme=0",), True)]
)
def test_light_and_dark_mode(open_page, report, tmp_path, flags, dark):
    screenshot = tmp_path / "page.png"
    open_page(report, "", *flags, f"--screenshot={screenshot}", "--window-size=900,700")
    corner = imread(screenshot)[:8, :8, :3]
    assert (np.median(corner) < 0.2) == dark
    assert imread(screenshot)[..., :3].std() > 0.05  # the page is not blank
