"""Serves a live report: a local page that follows run folders as steps arrive.

It only reads folders, so runs may start later, stop, or go back to a checkpoint.

Security: the server listens on the loopback address. It uses nothing from a request but the path,
which must be one of three; it lists no folder and changes nothing. A foreign web page could make a
browser send requests here under another host name (DNS rebinding), so the Host header is checked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eepo.reports import report_page, run_folders
from eepo.reports.freed_memory import return_freed_memory
from eepo.reports.run_files import RunFiles, damage, read_recipe
from eepo.runs.alarm import active_alarms
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS
from eepo.types import UserError

ADDRESS = "127.0.0.1"
# Any port: `ssh -L` may use another one.
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1)(:\d{1,5})?")
REQUIRED_FILES = ("recipe.toml", METRICS)
RUN_FILES = (*REQUIRED_FILES, EVALUATIONS, COMPLETIONS, ALARMS)
PAUSE_RATIO = 4  # seconds of pause after each second of drawing: training needs the CPU
STALL_SECONDS = 60.0  # without a new step, in addition to the time of five steps

SCRIPT = """
"use strict";
const statusLine = document.getElementById("line"), alarms = document.getElementById("alarms");
let frame = null, version = null, loading = false;

function isInUse(page) {
  const active = page.document.activeElement;
  const hasFocus = active && /^(INPUT|SELECT)$/.test(active.tagName);
  return hasFocus || page.getSelection().toString() !== "";
}

function replaceFrame(next) {
  if (frame) {
    const summaries = [...frame.contentDocument.querySelectorAll("details[open] > summary")];
    const opened = new Set(summaries.map(summary => summary.textContent));
    for (const summary of next.contentDocument.querySelectorAll("details > summary"))
      if (opened.has(summary.textContent)) summary.parentNode.open = true;
    next.contentWindow.scrollTo(0, frame.contentWindow.scrollY);
    frame.remove();
  }
  frame = next;
  frame.className = "";
  document.title = frame.contentDocument.title + " (live)";
}

function loadReport(newVersion) {
  const next = document.createElement("iframe");
  next.title = "report";
  next.className = "next";
  next.src = "/report" + (frame ? frame.contentWindow.location.hash : location.hash);
  next.onload = () => {
    loading = false;
    if (!next.contentDocument) return next.remove(); // the server has stopped
    version = newVersion;
    replaceFrame(next);
  };
  loading = true;
  document.body.append(next);
}

async function poll() {
  try {
    const status = await (await fetch("/status", { cache: "no-store" })).json();
    const isNew = status.version !== version;
    const isPaused = isNew && frame && isInUse(frame.contentWindow);
    const note = " \\u00b7 update paused while a filter or a selection is in use";
    statusLine.textContent = status.line + (isPaused ? note : "");
    alarms.textContent = status.alarms.join(" \\u00b7 ");
    if (isNew && !loading && !isPaused) loadReport(status.version);
  } catch (error) {
    statusLine.textContent = "eepo watch has stopped; this is the last report";
  }
  setTimeout(poll, 1000 * Number(document.body.dataset.interval));
}
poll();
"""

CSS = """
:root { color-scheme: light dark; }
html, body { height: 100%; margin: 0; }
body { display: flex; flex-direction: column; position: relative; }
header { padding: .4rem 1rem; border-bottom: 1px solid #8888;
  font: 14px/1.5 system-ui, sans-serif; }
#alarms { color: #d55e00; font-weight: 600; } iframe { flex: 1; width: 100%; border: 0; }
iframe.next { position: absolute; visibility: hidden; inset: 0; height: 100%; }
"""


def content_policy() -> str:
    """Return the policy of the outer page: its script is allowed by hash, and nothing external."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
        "form-action 'none'"
    )


def outer_page(interval: float) -> str:
    """Return a page with a status line and a frame, which its script fills with the report."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>eepo watch</title><style>{CSS}</style></head>
<body data-interval="{interval:g}">
<header><span id="line" role="status">…</span> <span id="alarms" role="alert"></span>
<noscript>Live updates need scripts. <a href="/report">The report as it is now</a>.</noscript>
</header>
<script>{SCRIPT}</script></body></html>
"""


def waiting_page(reason: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>waiting</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; padding: 1rem; }}</style>
</head><body><h1>Waiting</h1><p>{escape(reason)}</p></body></html>
"""


class LiveReport:
    """Keeps the report of some folders, and draws it again on request after files changed.

    `clock` gives the time of day, as file times do. It may go back, so `timer` measures durations.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        for folder in folders:
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder} is a file; give the folder of a run")
        self.folders, self.clock, self.timer = list(folders), clock, timer
        self._lock = threading.Lock()  # draws once, however many windows are open
        # Matplotlib opens its fonts again in every thread, and each request has its own thread.
        self._drawer = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._version, self._page, self._paused_until = "", b"", 0.0
        # for each run, the time on `timer` at which its files were first seen as they are now
        self._statuses: dict[Path, tuple[FileStamps, RunStatus, float]] = {}

    def run_folders(self) -> list[Path]:
        """Return the runs, and the runs inside folders of comparisons and sweeps."""
        return [run for folder in self.folders for run in run_folders(folder)]

    def version(self) -> str:
        """Return a hash that changes with the files, but not while drawing is paused."""
        is_paused = self._version and self.timer() < self._paused_until
        return self._version if is_paused else self._current_version()

    def page(self) -> bytes:
        with self._lock:
            version, started = self._current_version(), self.timer()
            is_paused = self._version and started < self._paused_until
            if version != self._version and not is_paused:
                page = self._drawer.submit(self._draw).result()
                self._page = page.encode("utf-8", errors="replace")
                del page
                return_freed_memory()
                self._version = version
                finished = self.timer()
                self._paused_until = finished + PAUSE_RATIO * (finished - started)
            return self._page

    def status(self) -> dict[str, Any]:
        """Return what the page polls every few seconds."""
        statuses = {folder: self._run_status(folder) for folder in self.run_folders()}
        lines, alarms = [], []
        for folder, status in statuses.items():
            prefix = f"{_run_label(folder)}: " if len(statuses) > 1 else ""
            unchanged_for = self.timer() - self._statuses[folder][2]
            lines.append(prefix + status.line(self.clock(), unchanged_for))
            alarms += [prefix + alarm for alarm in status.alarms]
        return {"version": self.version(), "line": " · ".join(lines), "alarms": alarms}

    def _current_version(self) -> str:
        stamps = [_file_stamps(folder) for folder in self.run_folders()]
        text = repr(stamps).encode("utf-8", errors="surrogateescape")
        return hashlib.sha256(text).hexdigest()[:16]

    def _draw(self) -> str:
        """Draw a report in any state of the folders: a run may be stopping or going back."""
        ready = [
            folder
            for folder in self.run_folders()
            if all((folder / name).is_file() for name in REQUIRED_FILES)
        ]
        if not ready:
            return waiting_page(f"{', '.join(map(str, self.folders))}: no step is finished yet.")
        try:
            return report_page(ready)
        except (UserError, OSError) as error:
            return waiting_page(f"The report cannot be drawn now: {error}")

    def _run_status(self, folder: Path) -> RunStatus:
        """Read the folder again only if its files changed."""
        stamps = _file_stamps(folder)
        if folder not in self._statuses or self._statuses[folder][0] != stamps:
            self._statuses[folder] = stamps, read_run_status(folder), self.timer()
        return self._statuses[folder][1]


@dataclass(frozen=True)
class RunStatus:
    """Describes how far a run is."""

    step: int = 0  # 0 if no step is finished
    num_steps: int = 0
    step_seconds: float = 0.0  # mean of the last steps
    modified: float = 0.0  # when the metrics were last written
    finished: bool = False
    alarms: tuple[str, ...] = ()  # that are on
    num_damaged: int = 0  # lines of its records

    def line(self, now: float, unchanged_for: float = 0.0) -> str:
        """Describe the run at the time `now`. Its files are known for `unchanged_for` seconds.

        If the clock went back, the metrics seem to be from the future.
        """
        notes = f", {damage(self.num_damaged)}" if self.num_damaged else ""
        if not self.step:
            return f"no step finished yet{notes}"
        line = f"step {self.step} of {self.num_steps}"
        if self.finished:
            return f"{line}, finished{notes}"
        age = max(unchanged_for, now - self.modified)
        stalled = age > STALL_SECONDS + 5 * self.step_seconds
        return f"{line}, {_duration(age)} ago{' (no new step for a while)' * stalled}{notes}"


def read_run_status(folder: Path) -> RunStatus:
    """Read a folder in any state. The report says which files are damaged."""
    files = RunFiles(folder)
    try:
        recipe = read_recipe(folder / "recipe.toml")
        rows = deque(files.rows(METRICS), maxlen=5)
        evaluations = list(files.rows(EVALUATIONS))
        alarms = active_alarms(files.rows(ALARMS))
        modified = (folder / METRICS).stat().st_mtime
    except (OSError, UserError):
        return RunStatus()
    num_damaged = files.num_damaged.total()
    if not rows:
        return RunStatus(num_damaged=num_damaged)
    step, seconds = rows[-1]["step"], [row.get("seconds/total") for row in rows]
    return RunStatus(
        step,
        recipe.get("training", {}).get("num_steps", 0),
        sum(value for value in seconds if isinstance(value, int | float)) / len(rows),
        modified,
        any(row["kind"] == "full" and row["step"] == step for row in evaluations),
        tuple(f"alarm: {name}, reported at step {row['step']}" for name, row in alarms.items()),
        num_damaged,
    )


def _run_label(folder: Path) -> str:
    """Return METHOD/seed-N for a run of a comparison."""
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("seed-") else folder.name


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


FileStamps = tuple[tuple[str, int, int] | None, ...]


def _file_stamps(folder: Path) -> FileStamps:
    """Return name, time and size of each file of a run; None for a missing file."""
    stamps: list[tuple[str, int, int] | None] = []
    for name in RUN_FILES:
        try:
            stat = (folder / name).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((str(folder / name), stat.st_mtime_ns, stat.st_size))
    return tuple(stamps)


class Handler(BaseHTTPRequestHandler):
    """Answers GET /, /report and /status for a local host name, and refuses everything else."""

    server: WatchServer
    server_version, sys_version, timeout = "eepo", "", 30

    def do_GET(self) -> None:
        if not LOCAL_HOST.fullmatch(self.headers.get("Host", "")):
            self._send(403, "text/plain", b"the host must be localhost or 127.0.0.1\n")
        elif self.path == "/":
            page = outer_page(self.server.interval).encode("utf-8")
            self._send(200, "text/html", page, content_policy())
        elif self.path == "/report":
            self._send(200, "text/html", self.server.report.page(), "frame-ancestors 'self'")
        elif self.path == "/status":
            status = json.dumps(self.server.report.status()).encode("utf-8")
            self._send(200, "application/json", status)
        else:
            self._send(404, "text/plain", b"not found\n")

    def _send(
        self, code: int, content_type: str, body: bytes, policy: str = "default-src 'none'"
    ) -> None:
        """Send a response. The report has another policy in its head; headers only add to it."""
        headers = {
            "Content-Type": f"{content_type}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: the terminal is the user's."""


class WatchServer(ThreadingHTTPServer):
    """Serves a live report on the loopback address."""

    daemon_threads = True

    def __init__(self, report: LiveReport, port: int, interval: float) -> None:
        self.report, self.interval = report, interval
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UserError(
                f"--port {port} cannot be used: {error.strerror}; "
                "choose another port, or 0 for any free one"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections; print every other error, because it is a bug."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)
