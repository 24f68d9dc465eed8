"""The completions browser: rows as JSON that cannot end its own element, and the one script that may run on the page.

The script is named to the browser by its hash, so anything else that looks like a script stays text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eepo.reports.records import Row, Run, by_method, spread_steps
from eepo.reports.samples import printable, samples_section

MOST_ROWS, MOST_CHARACTERS = 3000, 1200  # on a page, of a text: a page that can still be mailed
SCRIPT = Path(__file__).with_name("browser.js").read_text(encoding="utf-8")

FILTERS = """<div class="filters" role="search">
<label>run <select id="filter-run"><option value="">all</option></select></label>
<label>step <select id="filter-step"><option value="">all</option></select></label>
<label>stage <select id="filter-stage"><option value="">all</option></select></label>
<label>reward <select id="filter-reward"><option value="">all</option><option value="1">right</option>
<option value="0">wrong</option></select></label>
<label>text <input id="filter-text" type="search" placeholder="in completion, prompt or reason"></label>
</div>"""


def script_policy() -> str:
    """For the page's Content-Security-Policy: this script and no other."""
    digest = hashlib.sha256(SCRIPT.encode("utf-8")).digest()
    return f"script-src 'sha256-{base64.b64encode(digest).decode('ascii')}'"


def browser_section(runs: Sequence[Run]) -> str:
    """As HTML. Where no script runs, the page shows a few groups of completions instead."""
    ordered = [run for seeds in by_method(runs).values() for run in seeds]
    kept = [spread_steps(run.completions, MOST_ROWS // len(runs)) for run in ordered]
    if not any(kept):
        return "<p>The runs kept no completions.</p>"
    return f"""<noscript>
{samples_section(runs)}
</noscript>
<div id="completions-browser" hidden>
{FILTERS}
<p class="caption" role="status"><span id="completions-count"></span>. {_left_out(ordered, kept)}</p>
<div id="completions"></div>
<button id="completions-more" type="button" hidden>Show more</button>
</div>
<script type="application/json" id="completions-data">{harmless_json(browser_data(ordered, kept))}</script>
<script>{SCRIPT}</script>"""


def browser_data(runs: Sequence[Run], kept: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """`kept`: rows of each run. A prompt stands there once, however many completions it has."""
    prompts: dict[str, int] = {}
    rows = [
        {
            "run": place,
            "step": int(row["step"]),
            "stage": int(row["stage"]),
            "reward": _finite(row["reward"]),
            "reason": cut_text(str(row.get("reason", ""))),
            "prompt": prompts.setdefault(cut_text(str(row["prompt"])), len(prompts)),
            "text": cut_text(str(row["text"])),
            "finished": bool(row["finished"]),
            "logprob": _finite(row.get("logprob")),
            "logprob_after": _finite(row.get("logprob_after")),
        }
        for place, found in enumerate(kept)
        for row in found
    ]
    named = [{"method": printable(run.name), "seed": run.seed} for run in runs]
    return {"runs": named, "prompts": list(prompts), "rows": rows}


def harmless_json(data: Any) -> str:
    """ASCII without <, > and &: nothing in it can end the element it stands in, or begin another."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def cut_text(text: str) -> str:
    """Printable; of a long text the beginning and the end, where the answer stands."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n… ({len(text) - 2 * half:,} characters left out) …\n{text[-half:]}"
    return printable(text)


def _finite(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _left_out(runs: Sequence[Run], kept: Sequence[Sequence[Row]]) -> str:
    here, logged = sum(map(len, kept)), sum(run.num_logged for run in runs)
    if here == logged:
        return f"All {logged:,} completions that were written down are on this page."
    return (
        f"{here:,} of {logged:,} completions that were written down are on this page, from steps spread over each run; "
        "the others are in the run folders."
    )
