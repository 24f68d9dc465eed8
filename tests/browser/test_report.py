"""The report in a real browser: it renders, the filter works, and nothing that was planted in it runs."""

from __future__ import annotations

import html
import re
from urllib.parse import urlencode

import numpy as np
import pytest
from matplotlib.image import imread

from eepo.reports.figure_list import PICTURES

NUM_ROWS = 2 * 3 * 16  # runs, steps, completions of a step


@pytest.fixture(scope="module")
def whole(open_page, report):
    return open_page(report)


def test_it_renders_without_a_word_on_the_console(whole):
    assert whole.console == []
    assert [picture.name for picture in PICTURES] == re.findall(r'<figure id="(\w+)">', whole.dom)
    assert whole.dom.count("data:image/svg+xml;base64,") == len(PICTURES)
    assert whole.count == f"50 shown of {NUM_ROWS} that match"
    assert len(whole.texts("article")) == 50
    assert '<button id="completions-more" type="button">' in whole.dom


def test_nothing_planted_runs_and_all_of_it_is_shown(whole, open_page, report, planted):
    hostile = open_page(report, urlencode({"run": f"{planted[1]}/0"}))
    assert hostile.count == "48 shown of 48 that match"
    for opened in (whole, hostile):
        assert html.unescape(opened.texts("title")[0]).endswith("against grpo")
        assert '<b id="ran"' not in opened.dom
        assert not re.search(r"<(iframe|svg|a|img src=.?x)\b", opened.dom)
        assert opened.dom.count("<script") == 2
    shown = [html.unescape(text) for text in hostile.texts("pre")]
    for text in planted:
        assert f"{text} = ?" in shown
        assert any(one.startswith(f"{text} #") for one in shown)


@pytest.mark.parametrize(
    ("fragment", "number"),
    [
        ("step=3&stage=2", 16),
        ("reward=0&stage=1&run=grpo/0", 21),
        ("text=REASON+1%2B2", 48),
        ("step=3&stage=2&reward=1&text=1%2B2", 1),
    ],
)
def test_the_address_is_the_filter(open_page, report, fragment, number):
    opened = open_page(report, fragment)
    assert opened.count == f"{min(number, 50)} shown of {number} that match"
    assert len(opened.texts("article")) == min(number, 50)
    for part in ("step", "stage"):
        asked = re.search(rf"{part}=(\d)", fragment)
        if asked:
            facts = [re.search(rf"{part} (\d)", text)[1] for text in opened.texts("article")]
            assert set(facts) == {asked[1]}
    assert opened.console == []


def test_what_the_address_asks_for_in_vain_is_said(open_page, report):
    opened = open_page(report, "step=77&stage=%3Cscript%3E")
    assert (
        opened.count
        == f"50 shown of {NUM_ROWS} that match (not on this page: step 77, stage &lt;script&gt;)"
    )


def test_without_script_there_are_completions_to_read(report, tmp_path, open_page):
    """The same page, its script not the one its policy names: what a browser without scripts shows."""
    source = report.read_text(encoding="utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(source.replace('"use strict";', '"use strict"; '), encoding="utf-8")
    opened = open_page(changed)
    assert any("Content Security Policy" in line for line in opened.console), (
        "the policy holds off any other script"
    )
    assert '<div id="completions-browser" hidden="">' in opened.dom
    noscript = re.search(r"<noscript>(.*?)</noscript>", source, re.DOTALL)[1]
    assert "1+2 #3.0" in noscript


@pytest.fixture
def with_script(report, tmp_path):
    """with_script("..."): the page with one more script at its end, and without the policy that would hold it off."""

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


def test_a_choice_changes_rows_and_address(with_script, open_page):
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
    assert opened.count == "6 shown of 6 that match"  # 2.10 to 2.15
    assert opened.console == []


def test_a_changed_address_changes_rows_and_more_can_be_shown(with_script, open_page):
    page = with_script("""
      addEventListener("hashchange", () => document.getElementById("completions-more").click());
      location.hash = "stage=1&run=grpo/0";
    """)
    assert open_page(page).count == "24 shown of 24 that match"
    page = with_script('document.getElementById("completions-more").click();')
    assert open_page(page).count == f"{NUM_ROWS} shown of {NUM_ROWS} that match"


def test_a_phone_need_not_scroll_sideways(with_script, open_page, tmp_path):
    """In a frame, because a window is never as narrow as a phone."""
    page = with_script(
        "parent.postMessage(`${document.documentElement.scrollWidth} of ${innerWidth}`, '*');"
    )
    framed = tmp_path / "framed.html"
    told = (
        "<script>addEventListener('message', (event) => { document.title = event.data; });</script>"
    )
    framed.write_text(
        f'<title></title>{told}<iframe width="390" height="800" src="{page.as_uri()}"></iframe>'
    )
    needed, there = open_page(framed).texts("title")[0].split(" of ")
    assert int(needed) <= int(there) == 390


@pytest.mark.parametrize(
    ("flags", "dark"), [((), False), (("--blink-settings=preferredColorScheme=0",), True)]
)
def test_light_and_dark(open_page, report, tmp_path, flags, dark):
    picture = tmp_path / "page.png"
    open_page(report, "", *flags, f"--screenshot={picture}", "--window-size=900,700")
    corner = imread(picture)[:8, :8, :3]
    assert (np.median(corner) < 0.2) == dark
    assert imread(picture)[..., :3].std() > 0.05  # something is written on it
