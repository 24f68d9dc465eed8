"""Writes the report: one HTML page with all figures inside, which needs no network.

The page can be mailed or archived. Its only script is the completions browser; everything else
works without scripts.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eepo.reports.browser import browser_section, script_policy
from eepo.reports.figure_list import FIGURES, FigureSpec, draw_figures, image_bytes
from eepo.reports.measures import comparison_rows
from eepo.reports.panels import WIDTH
from eepo.reports.records import Run, by_method, read_runs
from eepo.reports.settings import settings_table
from eepo.reports.summary import summary_sentences
from eepo.reports.tables import html_table
from eepo.runs.writing import writing
from eepo.types import UserError

# Figures keep a white background in dark mode: their colours were chosen for it.
CSS = """
:root { color-scheme: light dark;
  --ink: #1c1c1c; --soft: #5a5a5a; --paper: #fdfdfc; --line: #d9d9d6; --block: #f1f1ee; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e3; --soft: #b3b0aa; --paper: #181818; --line: #3c3c3c; --block: #242424; }
}
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; white-space: nowrap; }
.samples td { white-space: normal; }
figcaption { margin-top: .5rem; }
.caption, figcaption { color: var(--soft); font-size: .875rem; }
figure { margin: 1rem 0 2rem; }
.figure { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
.figure img { display: block; margin: 0 auto; height: auto; width: calc(var(--share) * 100%);
  min-width: calc(var(--share) * 40rem); }
pre { margin: 0; padding: .3rem .5rem; background: var(--block); border-radius: 4px;
  font-size: .8125rem; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  direction: ltr; }
summary { cursor: pointer; padding: .3rem 0; } details { border-bottom: 1px solid var(--line); }
.filters { display: flex; flex-wrap: wrap; gap: .5rem 1rem; }
.filters label { color: var(--soft); font-size: .875rem; max-width: 100%; }
.filters select, .filters input, button { font: inherit; color: var(--ink);
  background: var(--block); border: 1px solid var(--line); border-radius: 4px;
  padding: .3rem .5rem; }
.filters select { max-width: 15rem; }
#filter-text { width: 17rem; max-width: 100%; box-sizing: border-box; }
article { margin: .8rem 0; padding-left: .7rem; border-left: 3px solid var(--line); }
article p { margin: 0 0 .25rem; }
article.correct { border-color: #009e73; } article.wrong { border-color: #d55e00; }
pre.prompt { background: none; color: var(--soft); max-height: 7.5rem; overflow-y: auto; }
"""

MAX_ALARMS = 50  # lines in the list of alarms

CONTENT_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; {script_policy()}; "
    "base-uri 'none'; form-action 'none'"
)


def write_report(run_folders: Sequence[Path | str], out: Path) -> Path:
    """Write the page to `out`, and its figures as PNG and SVG to `<out stem>_figures/` beside it.

    Return `out`.
    """
    if not run_folders:
        raise UserError("a report needs at least one run folder")
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file name such as {out / 'report.html'}")
    runs = read_runs(run_folders)
    figures_folder = out.with_name(f"{out.stem}_figures")
    figures_folder.mkdir(parents=True, exist_ok=True)  # fail now, not after drawing
    drawn = _draw(runs)
    text = page(runs, [(spec, figure.get_figwidth(), svg) for spec, figure, svg in drawn])
    _write_figures(drawn, figures_folder)
    with writing(out):
        # A name may contain characters that UTF-8 cannot encode.
        out.write_text(text, encoding="utf-8", errors="replace")
    return out


def report_page(run_folders: Sequence[Path | str]) -> str:
    """Return the page as HTML, and write no file."""
    runs = read_runs(run_folders)
    return page(runs, [(spec, figure.get_figwidth(), svg) for spec, figure, svg in _draw(runs)])


def _draw(runs: Sequence[Run]) -> list[tuple[FigureSpec, Figure, bytes]]:
    """Draw the figures, also as SVG."""
    return [(spec, figure, image_bytes(figure, "svg")) for spec, figure in draw_figures(runs)]


def page(runs: Sequence[Run], figures: Sequence[tuple[FigureSpec, float, bytes]]) -> str:
    """Return the page as HTML. `figures` holds specs, widths in inches, and SVG."""
    methods = list(by_method(runs))
    title = " against ".join(reversed(methods)) if len(methods) == 2 else ", ".join(methods)
    sentences = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in summary_sentences(runs))
    figures_html = "\n".join(_figure(spec, width, svg, runs) for spec, width, svg in figures)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="caption">{escape(_seeds_and_steps(runs))}</p>
<h2>Summary</h2>
<ul>
{sentences}
</ul>
{_notes(runs)}{_alarms(runs)}<h2>Results at the end of training</h2>
{html_table(comparison_rows(runs))}
<h2>Figures</h2>
{figures_html or "<p>The runs have no data for figures yet.</p>"}
<h2>Settings that differ</h2>
{settings_table(runs)}
<h2>Completions</h2>
{browser_section(runs)}
<h2>Environment</h2>
{_environments(runs)}
</body>
</html>
"""


def environment_line(environment: dict[str, Any]) -> str:
    """Format the environment without the command, which may contain private folder names."""
    keys = ("eepo", "commit", "python", "platform", "device")
    parts = [f"{key} {environment[key]}" for key in keys if environment.get(key)]
    if environment.get("num_cores"):
        parts.append(f"{environment['num_cores']} cores")
    packages = environment.get("packages") or {}
    parts += [f"{name} {version}" for name, version in packages.items() if version]
    return ", ".join(parts)


def _seeds_and_steps(runs: Sequence[Run]) -> str:
    methods = [
        f"{name}: seed{'s' if len(seeds) > 1 else ''} {', '.join(str(run.seed) for run in seeds)}, "
        f"{_steps(seeds)}"
        for name, seeds in by_method(runs).items()
    ]
    return ". ".join(methods) + "."


def _notes(runs: Sequence[Run]) -> str:
    """List the damaged records; return an empty text if there are none."""
    lines = [f"{run.name} seed {run.seed}: {note}" for run in runs for note in run.notes]
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f"<h2>Damaged records</h2>\n<ul>\n{items}</ul>\n" if lines else ""


def _steps(seeds: Sequence[Run]) -> str:
    if all(run.is_evaluation for run in seeds):
        return "evaluated only"
    return f"{max(run.last_step for run in seeds)} steps"


def _alarms(runs: Sequence[Run]) -> str:
    """List each start and end of an alarm; return an empty text if there was none."""
    verbs = {"on": "began", "still": "continued", "off": "ended"}
    lines = [
        f"{run.name} seed {run.seed}: {row.get('alarm')} "
        f"{verbs.get(str(row.get('state')), 'was reported')} at step {row.get('step')} "
        f"(value {_rounded(row.get('value'))}, bound {_rounded(row.get('bound'))}, "
        f"action {row.get('action')})"
        for run in runs
        for row in run.alarms
    ]
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines[:MAX_ALARMS])
    more = f"<li>and {len(lines) - MAX_ALARMS} more</li>\n" if len(lines) > MAX_ALARMS else ""
    return f"<h2>Alarms</h2>\n<ul>\n{items}{more}</ul>\n" if lines else ""


def _rounded(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)


def _figure(spec: FigureSpec, width: float, svg: bytes, runs: Sequence[Run]) -> str:
    source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
    title, caption = escape(spec.title), escape(spec.full_caption(runs))
    return (
        f'<figure id="{spec.name}">\n<div class="figure" style="--share: {width / WIDTH:.2f}">'
        f'<img alt="{title}" src="{source}"></div>\n'
        f"<figcaption><b>{title}.</b> {caption}</figcaption>\n</figure>"
    )


def _environments(runs: Sequence[Run]) -> str:
    """Give runs on the same machine with the same versions one line."""
    names: dict[str, list[str]] = {}
    for run in runs:
        line = environment_line(run.environment) or "not recorded"
        names.setdefault(line, []).append(f"{run.name} {run.seed}")
    if len(names) == 1:
        return f"<p>{escape(next(iter(names)))}.</p>"
    return "\n".join(
        f"<p>{escape(', '.join(run_names))}: {escape(line)}.</p>"
        for line, run_names in names.items()
    )


def _write_figures(drawn: Sequence[tuple[FigureSpec, Figure, bytes]], folder: Path) -> None:
    """Write the figures, and delete figures of an earlier report that these runs do not have."""
    for spec in FIGURES:
        for suffix in ("png", "svg"):
            (folder / f"{spec.name}.{suffix}").unlink(missing_ok=True)
    for spec, figure, svg in drawn:
        with writing(folder / spec.name):
            (folder / f"{spec.name}.png").write_bytes(image_bytes(figure, "png"))
            (folder / f"{spec.name}.svg").write_bytes(svg)
