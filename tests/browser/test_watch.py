"""Tests the live page in a browser: it loads the report, and again after a new step."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from eepo.reports import watch
from eepo.reports.watch import LiveReport, WatchServer
from eepo.runs.runlog import METRICS, RunLog

pytestmark = pytest.mark.slow  # each test starts a browser


class AdvancingReport(LiveReport):
    """Appends a second step to the run after the first report was fetched."""

    num_fetched = 0

    def page(self) -> bytes:
        page = super().page()
        self.num_fetched += 1
        if self.num_fetched == 1:
            RunLog(self.folders[0]).append(METRICS, {"step": 2, "reward": 0.5})
        return page


class Address:
    def __init__(self, url: str) -> None:
        self.url = url

    def as_uri(self) -> str:
        return self.url


@pytest.mark.parametrize(
    "name", ["grpo", "</title><script>document.title='ran'</script>"], ids=["plain", "hostile"]
)
def test_a_new_step_replaces_the_report_in_the_frame(
    name, open_page, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(watch, "PAUSE_RATIO", 0)
    log = RunLog(tmp_path)
    log.write_recipe(f"name = {json.dumps(name)}\n[training]\nnum_steps = 9\n")
    log.append(METRICS, {"step": 1, "reward": 0.25})
    report = AdvancingReport([tmp_path])
    with WatchServer(report, 0, 0.5) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        opened = open_page(Address(server.url), "stage=2", "--virtual-time-budget=8000")
        server.shutdown()
    assert opened.console == []
    assert report.num_fetched == 2
    assert re.search(r'id="line" role="status">step 2 of 9, \d+ s ago<', opened.dom)
    (frame,) = re.findall(r"<iframe[^>]*>", opened.dom)
    assert 'class=""' in frame, "the visible frame, not the one being loaded"
    assert 'src="/report#stage=2"' in frame
    assert opened.texts("title")[0].endswith("(live)")
    assert "ran (live)" not in opened.dom
