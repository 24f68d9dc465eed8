"""Builds the completions browser: the rows as JSON, and the only script of the report.

The page's policy allows this script by its hash, so that no other script can run. The JSON is
escaped so that it cannot close its HTML element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eepo.reports.records import Row, Run, by_method, thin_steps
from eepo.reports.run_files import is_finite
from eepo.reports.samples import replace_unprintable, samples_section

# Rows on a page, characters of a text: small enough to mail the page.
MAX_ROWS, MAX_CHARACTERS = 3000, 1200
SCRIPT = Path(__file__).with_name("browser.js").read_text(encoding="utf-8")

FILTERS = """<div class="filters" role="search">
<label>run <select id="filter-run"><option value="">all</option></select></label>
<label>step <select id="filter-step"><option value="">all</option></select></label>
<label>stage <select id="filter-stage"><option value="">all</option></select></label>
<label>reward <select id="filter-reward"><option value="">all</option>
<option value="1">correct</option><option value="0">wrong</option></select></label>
<label>text
<input id="filter-text" type="search" placeholder="in completion, prompt or reason"></label>
</div>"""


def script_policy() -> str:
    """Return the script part of the Content-Security-Policy: this script and no other."""
    digest = hashlib.sha256(SCRIPT.encode("utf-8")).digest()
    return f"script-src 'sha256-{base64.b64encode(digest).decode('ascii')}'"


def browser_section(runs: Sequence[Run]) -> str:
    """Return HTML. Without scripts, the page shows a few groups of completions instead."""
    ordered = [run for seeds in by_method(runs).values() for run in seeds]
    kept = [thin_steps(run.completions, MAX_ROWS // len(runs)) for run in ordered]
    if not any(kept):
        return "<p>No completions were logged.</p>"
    data = json_for_html(browser_data(ordered, kept))
    return f"""<noscript>
{samples_section(runs)}
</noscript>
<div id="completions-browser" hidden>
{FILTERS}
<p class="caption" role="status"><span id="completions-count"></span>.
{_coverage(ordered, kept)}</p>
<div id="completions"></div>
<button id="completions-more" type="button" hidden>Show more</button>
</div>
<script type="application/json" id="completions-data">{data}</script>
<script>{SCRIPT}</script>"""


def browser_data(runs: Sequence[Run], kept: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Return the data of the script. `kept` holds the rows of each run.

    Each prompt is stored once, and rows refer to it by index.
    """
    prompts: dict[str, int] = {}
    rows = [
        {
            "run": run_index,
            "step": int(row["step"]),
            "stage": int(row["stage"]),
            "reward": _finite_or_none(row["reward"]),
            "reason": cut_text(str(row.get("reason", ""))),
            "prompt": prompts.setdefault(cut_text(str(row["prompt"])), len(prompts)),
            "text": cut_text(str(row["text"])),
            "finished": bool(row["finished"]),
            "logprob": _finite_or_none(row.get("logprob")),
            "logprob_after": _finite_or_none(row.get("logprob_after")),
        }
        for run_index, run_rows in enumerate(kept)
        for row in run_rows
    ]
    names = [{"method": replace_unprintable(run.name), "seed": run.seed} for run in runs]
    return {"runs": names, "prompts": list(prompts), "rows": rows}


def json_for_html(data: Any) -> str:
    """Return ASCII JSON without <, > and &: it cannot close its element or open another one."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def cut_text(text: str) -> str:
    """Keep the beginning and the end of a long text, and replace unprintable characters."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n… ({len(text) - 2 * half:,} characters left out) …\n{text[-half:]}"
    return replace_unprintable(text)


def _finite_or_none(value: Any) -> float | None:
    """Return None for NaN and infinity: JSON has neither."""
    return float(value) if is_finite(value) else None


def _coverage(runs: Sequence[Run], kept: Sequence[Sequence[Row]]) -> str:
    num_kept, num_logged = sum(map(len, kept)), sum(run.num_logged for run in runs)
    if num_kept == num_logged:
        return f"All {num_logged:,} logged completions are on this page."
    return (
        f"{num_kept:,} of {num_logged:,} logged completions are on this page, from steps spread "
        "over each run; the others are in the run folders."
    )
