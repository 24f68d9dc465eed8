"""The report of runs, live: a page on this machine's own address that follows the folders as steps arrive.

It reads folders and nothing else, so runs may stop, go back to a checkpoint, or begin after it. Nothing that a browser
sends is used but the path, which is one of three; there is no folder to list and nothing to change. What a web page of
someone else could do is to send a browser here under another name: the Host header is checked for that.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import tempfile
import threading
import time
import tomllib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eepo.reports import run_folders, write_report
from eepo.runs.alarm import standing
from eepo.runs.jsonl import read_records
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS
from eepo.types import UserError

ADDRESS = "127.0.0.1"
OURS = re.compile(
    r"(localhost|127\.0\.0\.1)(:\d{1,5})?"
)  # any port: through ssh -L it is another one
FILES = ("recipe.toml", METRICS, EVALUATIONS, COMPLETIONS, ALARMS)
REST = 4  # seconds of rest for one of drawing: the run beside it needs the processor
LONG = 60.0  # seconds without a step, beyond five steps' time, until a run is said to stand still

SCRIPT = """
"use strict";
const line = document.getElementById("line"), alarms = document.getElementById("alarms");
let frame = null, version = null, loading = false;

function busy(page) {
  const used = page.document.activeElement;
  return (used && /^(INPUT|SELECT)$/.test(used.tagName)) || page.getSelection().toString() !== "";
}

function swap(next) {
  if (frame) {
    const before = [...frame.contentDocument.querySelectorAll("details[open] > summary")];
    const opened = new Set(before.map(summary => summary.textContent));
    for (const summary of next.contentDocument.querySelectorAll("details > summary"))
      if (opened.has(summary.textContent)) summary.parentNode.open = true;
    next.contentWindow.scrollTo(0, frame.contentWindow.scrollY);
    frame.remove();
  }
  frame = next;
  frame.className = "";
  document.title = frame.contentDocument.title + " (live)";
}

function load(wanted) {
  const next = document.createElement("iframe");
  next.title = "report";
  next.className = "next";
  next.src = "/report" + (frame ? frame.contentWindow.location.hash : location.hash);
  next.onload = () => {
    loading = false;
    if (!next.contentDocument) return next.remove(); // the server went away in between
    version = wanted;
    swap(next);
  };
  loading = true;
  document.body.append(next);
}

async function look() {
  try {
    const status = await (await fetch("/status", { cache: "no-store" })).json();
    const later = frame && status.version !== version && busy(frame.contentWindow);
    line.textContent = status.line + (later ? " \\u00b7 new steps wait while a filter or a selection is in use" : "");
    alarms.textContent = status.alarms.join(" \\u00b7 ");
    if (status.version !== version && !loading && !later) load(status.version);
  } catch (error) {
    line.textContent = "eepo watch has ended; this is the last it saw";
  }
  setTimeout(look, 1000 * Number(document.body.dataset.interval));
}
look();
"""

CSS = """
:root { color-scheme: light dark; }
html, body { height: 100%; margin: 0; } body { display: flex; flex-direction: column; position: relative; }
header { padding: .4rem 1rem; border-bottom: 1px solid #8888; font: 14px/1.5 system-ui, sans-serif; }
#alarms { color: #d55e00; font-weight: 600; } iframe { flex: 1; width: 100%; border: 0; }
iframe.next { position: absolute; visibility: hidden; inset: 0; height: 100%; }
"""


def content_policy() -> str:
    """For the outer page: its one script by hash, and nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "frame-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def outer_page(interval: float) -> str:
    """A line on how far the runs are, and the report below it, in a frame that is changed for a newer one."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>eepo watch</title><style>{CSS}</style></head>
<body data-interval="{interval:g}"><header><span id="line" role="status">…</span> <span id="alarms" role="alert"></span>
<noscript>Without scripts nothing here is live: <a href="/report">the report as it is now</a>.</noscript></header>
<script>{SCRIPT}</script></body></html>
"""


def waiting_page(reason: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>waiting</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>:root {{ color-scheme: light dark; }} body {{ font: 16px/1.5 system-ui, sans-serif; padding: 1rem; }}</style>
</head><body><h1>Waiting</h1><p>{escape(reason)}</p></body></html>
"""


class Watched:
    """The folders, and their report as last drawn: again only when files have changed and someone looks."""

    def __init__(self, folders: Sequence[Path], clock: Any = time.time) -> None:
        for folder in folders:
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder}: is a file; give the folder of a run")
        self.folders, self.clock = list(folders), clock
        self._lock = threading.Lock()  # one drawing at a time, however many windows are open
        self._version, self._page, self._rests_until = "", b"", 0.0
        self._places: dict[Path, tuple[Any, Place]] = {}

    def run_folders(self) -> list[Path]:
        """Runs; and of a comparison's or a sweep's folder the runs that it has begun."""
        return [found for folder in self.folders for found in run_folders(folder)]

    def version(self) -> str:
        """Changes when a file does, but not faster than the report may be drawn."""
        return (
            self._version if self._version and self.clock() < self._rests_until else self._newest()
        )

    def page(self) -> bytes:
        with self._lock:
            newest = self._newest()
            if newest != self._version and (not self._version or self.clock() >= self._rests_until):
                started = self.clock()
                self._page, self._version = self._draw().encode("utf-8", errors="replace"), newest
                self._rests_until = self.clock() + REST * (self.clock() - started)
            return self._page

    def status(self) -> dict[str, Any]:
        """What the page asks for every few seconds."""
        places = {folder: self._place(folder) for folder in self.run_folders()}
        named = len(places) > 1
        lines = [
            f"{_label(folder)}: " * named + place.line(self.clock())
            for folder, place in places.items()
        ]
        alarms = [
            f"{_label(folder)}: " * named + one
            for folder, place in places.items()
            for one in place.alarms
        ]
        return {"version": self.version(), "line": " · ".join(lines), "alarms": alarms}

    def _newest(self) -> str:
        facts = [_fact(folder / name) for folder in self.run_folders() for name in FILES]
        return hashlib.sha256(repr(facts).encode("utf-8", errors="surrogateescape")).hexdigest()[
            :16
        ]

    def _draw(self) -> str:
        """Whatever a folder holds at this moment: a run may be stopping, or going back to its checkpoint."""
        ready = [
            folder
            for folder in self.run_folders()
            if all((folder / name).is_file() for name in FILES[:2])
        ]
        if not ready:
            return waiting_page(
                f"{', '.join(map(str, self.folders))}: no step has been finished yet."
            )
        try:
            with tempfile.TemporaryDirectory() as aside:
                return write_report(ready, Path(aside) / "report.html").read_text(encoding="utf-8")
        except (UserError, OSError) as error:
            return waiting_page(f"The report cannot be drawn now: {error}")

    def _place(self, folder: Path) -> Place:
        """Read again only when its files changed."""
        facts = tuple(_fact(folder / name) for name in FILES)
        if folder not in self._places or self._places[folder][0] != facts:
            self._places[folder] = facts, read_place(folder)
        return self._places[folder][1]


@dataclass(frozen=True)
class Place:
    """How far a run is."""

    step: int = 0  # 0: none is finished yet
    num_steps: int = 0
    seconds: float = 0.0  # that a step takes, lately
    written: float = 0.0  # when the last one was, on the clock of the files
    finished: bool = False
    alarms: tuple[str, ...] = ()  # that are on

    def line(self, now: float) -> str:
        if not self.step:
            return "no step yet"
        line = f"step {self.step} of {self.num_steps}"
        if self.finished:
            return f"{line}, finished"
        age = max(0.0, now - self.written)
        return f"{line}, {_ago(age)} ago{': no new step for a while' if age > LONG + 5 * self.seconds else ''}"


def read_place(folder: Path) -> Place:
    """Of a folder in any state; one that is damaged is told of by the report."""
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
        rows = deque(read_records(folder / METRICS), maxlen=5)
        evaluations = (
            list(read_records(folder / EVALUATIONS)) if (folder / EVALUATIONS).exists() else []
        )
        alarms = standing(read_records(folder / ALARMS)) if (folder / ALARMS).exists() else {}
        written = (folder / METRICS).stat().st_mtime
    except (OSError, ValueError):
        return Place()
    if not rows:
        return Place()
    step = rows[-1]["step"]
    return Place(
        step,
        recipe.get("training", {}).get("num_steps", 0),
        sum(row.get("seconds/total", 0.0) for row in rows) / len(rows),
        written,
        any(row["kind"] == "full" and row["step"] == step for row in evaluations),
        tuple(f"alarm: {name}, said at step {row['step']}" for name, row in alarms.items()),
    )


def _label(folder: Path) -> str:
    """A comparison's runs are method/seed-N."""
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("seed-") else folder.name


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _fact(path: Path) -> tuple[str, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_mtime_ns, found.st_size


class Handler(BaseHTTPRequestHandler):
    """GET /, /report and /status, for a browser that asked for this machine by name. All else is refused."""

    server: WatchServer
    server_version, sys_version, timeout = "eepo", "", 30

    def do_GET(self) -> None:
        if not OURS.fullmatch(self.headers.get("Host", "")):
            self._send(403, "text/plain", b"only as localhost\n")
        elif self.path == "/":
            self._send(
                200, "text/html", outer_page(self.server.interval).encode("utf-8"), content_policy()
            )
        elif self.path == "/report":
            self._send(200, "text/html", self.server.watched.page(), "frame-ancestors 'self'")
        elif self.path == "/status":
            self._send(
                200, "application/json", json.dumps(self.server.watched.status()).encode("utf-8")
            )
        else:
            self._send(404, "text/plain", b"nothing here\n")

    def _send(self, code: int, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        """The report's own policy stands in its head; one header more cannot loosen it."""
        self.send_response(code)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Nothing: the terminal is the user's."""


class WatchServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watched: Watched, port: int, interval: float) -> None:
        self.watched, self.interval = watched, interval
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UserError(
                f"--port {port} cannot be used: {error.strerror}; give another, or 0 for any"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle is no news; anything else is a bug, and shows."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)
