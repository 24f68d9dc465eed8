"""Tests the live page: it follows a run that stops and resumes, and answers only local requests."""

from __future__ import annotations

import base64
import gc
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from eepo.reports import watch
from eepo.reports.watch import (
    STALL_SECONDS,
    LiveReport,
    RunStatus,
    WatchServer,
    outer_page,
    read_run_status,
)
from eepo.runs.runlog import ALARMS, COMPLETIONS, EVALUATIONS, METRICS, RunLog
from eepo.types import UserError


def metrics(step: int) -> dict[str, Any]:
    return {
        "step": step, "reward": 0.25, "entropy": 0.5, "length": 9.0, "zero_advantage_share": 0.5,
        "stage1/reward": 0.25, "stage1/entropy": 0.5, "stage1/length": 9.0,
        "seconds/stage1": 1.0, "seconds/total": 2.0,
    }  # fmt: skip


def start_run(folder: Path, name: str = "grpo", num_steps: int = 9) -> RunLog:
    log = RunLog(folder)
    log.write_recipe(f'name = "{name}"\n[training]\nnum_steps = {num_steps}\nseed = 0\n')
    return log


@pytest.fixture
def serve() -> Iterator[Callable[..., WatchServer]]:
    servers = []

    def start(
        *folders: Path,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> WatchServer:
        server = WatchServer(LiveReport(folders, clock, timer), 0, 5.0)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(
    server: WatchServer, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    body = response.read().decode("utf-8")
    connection.close()
    return response.status, {key.lower(): value for key, value in response.getheaders()}, body


def status(server: WatchServer) -> dict[str, Any]:
    return json.loads(get(server, "/status")[2])


# ---- following a run


@pytest.mark.slow
def test_a_run_is_followed_from_before_its_folder_exists_to_its_end(
    tmp_path: Path, serve: Callable[..., WatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PAUSE_RATIO", 0)
    folder = tmp_path / "run"
    server = serve(folder)
    versions = [status(server)["version"]]
    assert status(server)["line"] == "no step finished yet"
    assert "no step is finished yet" in get(server, "/report")[2]
    log = start_run(folder)
    log.append(METRICS, metrics(1))
    versions.append(status(server)["version"])
    assert status(server)["line"].startswith("step 1 of 9, 0 s ago")
    assert "seed 0, 1 steps" in get(server, "/report")[2]
    log.append(METRICS, metrics(2))
    versions.append(status(server)["version"])
    assert "seed 0, 2 steps" in get(server, "/report")[2]
    scores = {"greedy": 1.0, "mean": 1.0, "distinct": 1.0, "length": 1.0, "pass@k": {"1": 1.0}}
    counts = {"num_problems": 1, "num_samples": 1}
    log.append(EVALUATIONS, {"step": 2, "kind": "full", "set": "x"} | counts | scores)
    versions.append(status(server)["version"])
    assert status(server)["line"] == "step 2 of 9, finished"
    assert len(set(versions)) == 4


def test_a_run_that_goes_back_to_its_checkpoint_is_followed(
    tmp_path: Path, serve: Callable[..., WatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PAUSE_RATIO", 0)
    log = start_run(tmp_path)
    log.append(METRICS, *map(metrics, (1, 2, 3)))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "rew')  # killed while writing
    server = serve(tmp_path)
    assert "seed 0, 3 steps" in get(server, "/report")[2]
    before = status(server)
    assert before["line"].startswith("step 3 ")
    log.rewind(1)
    after = status(server)
    assert after["version"] != before["version"]
    assert after["line"].startswith("step 1 ")
    assert "seed 0, 1 steps" in get(server, "/report")[2]
    shutil.rmtree(tmp_path)
    assert status(server)["line"] == "no step finished yet"
    assert "no step is finished yet" in get(server, "/report")[2]


@pytest.mark.parametrize("name", [METRICS, EVALUATIONS, COMPLETIONS, "recipe.toml"])
def test_a_damaged_file_is_reported_and_does_not_stop_the_server(
    name: str, tmp_path: Path, serve: Callable[..., WatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PAUSE_RATIO", 0)
    start_run(tmp_path).append(METRICS, metrics(1))
    kept = (tmp_path / name).read_text() if (tmp_path / name).exists() else ""
    (tmp_path / name).write_text("not <json>\n" + kept)
    server = serve(tmp_path)
    code, _, page = get(server, "/report")
    note = "cannot be drawn now" if name == "recipe.toml" else f"{name}: 1 damaged line skipped"
    assert (code, note in page, name in page) == (200, True, True)
    assert get(server, "/status")[0] == 200
    (tmp_path / name).write_text(kept)
    assert "seed 0, 1 steps" in get(server, "/report")[2]


def test_the_runs_of_a_comparison_appear_when_they_start(
    tmp_path: Path, serve: Callable[..., WatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PAUSE_RATIO", 0)
    server = serve(tmp_path)
    start_run(tmp_path / "grpo" / "seed-0").append(METRICS, metrics(1))
    start_run(tmp_path / "eepo" / "seed-0", name="eepo")
    line = status(server)["line"]
    assert "eepo/seed-0: no step finished yet" in line
    assert "grpo/seed-0: step 1 of 9" in line
    page = get(server, "/report")[2]
    assert "grpo: seed 0, 1 steps" in page
    assert "eepo: seed" not in page
    (RunLog(tmp_path / "eepo" / "seed-0")).append(METRICS, metrics(1), metrics(2))
    assert "eepo: seed 0, 2 steps" in get(server, "/report")[2]


def test_the_folder_of_a_sweep_is_read_as_its_runs(tmp_path: Path) -> None:
    """It has a recipe, but no steps."""
    start_run(tmp_path)
    assert LiveReport([tmp_path]).run_folders() == [tmp_path]
    start_run(tmp_path / "gate=step" / "seed-0")
    assert LiveReport([tmp_path]).run_folders() == [tmp_path / "gate=step" / "seed-0"]


def test_active_alarms_are_shown(tmp_path: Path, serve: Callable[..., WatchServer]) -> None:
    log = start_run(tmp_path)
    log.append(METRICS, metrics(1))
    log.append(ALARMS, {"step": 1, "alarm": "entropy_below", "state": "on"})
    server = serve(tmp_path)
    assert status(server)["alarms"] == ["alarm: entropy_below, reported at step 1"]
    log.append(ALARMS, {"step": 1, "alarm": "entropy_below", "state": "off"})
    assert status(server)["alarms"] == []


def test_a_stalled_run_is_reported() -> None:
    run_status = RunStatus(step=3, num_steps=9, step_seconds=10.0, modified=1000.0)
    assert "no new step" not in run_status.line(1000.0 + STALL_SECONDS + 49)
    assert (
        run_status.line(1000.0 + STALL_SECONDS + 51)
        == "step 3 of 9, 111 s ago (no new step for a while)"
    )
    assert "2 h ago" in run_status.line(1000.0 + 7300)
    assert "0 s ago" in run_status.line(900.0), "the clock of a file server may be ahead"


def test_the_page_follows_a_run_although_the_clock_goes_back(
    tmp_path: Path, serve: Callable[..., WatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    day = 24 * 3600.0
    clock, timer = [time.time()], [0.0]

    def slow(folders: Any) -> str:
        clock[0] += 2.0
        timer[0] += 2.0
        return f"drawn at {timer[0]:g}"

    monkeypatch.setattr(watch, "report_page", slow)
    log = start_run(tmp_path)
    log.append(METRICS, metrics(1))
    server = serve(tmp_path, clock=lambda: clock[0], timer=lambda: timer[0])
    assert get(server, "/report")[2] == "drawn at 2"
    clock[0] -= day
    timer[0] += 2.0 * watch.PAUSE_RATIO + 1
    log.append(METRICS, metrics(2))
    assert get(server, "/report")[2] == "drawn at 13"
    assert status(server)["line"] == "step 2 of 9, 0 s ago"
    timer[0] += 1000.0
    clock[0] += 1000.0
    assert status(server)["line"] == "step 2 of 9, 17 min ago (no new step for a while)"


def test_damaged_lines_are_skipped_and_counted(
    tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    log = start_run(tmp_path)
    log.append(METRICS, metrics(1))
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"step": 2, "rew\n' + bytes(20) + b"\n[]\n")
    log.append(METRICS, metrics(3))
    server = serve(tmp_path)
    assert status(server)["line"] == "step 3 of 9, 0 s ago, 3 damaged lines skipped"
    assert "grpo seed 0: metrics.jsonl: 3 damaged lines skipped" in get(server, "/report")[2]


def test_an_empty_metrics_file_means_no_finished_step(tmp_path: Path) -> None:
    start_run(tmp_path)
    (tmp_path / METRICS).touch()
    assert read_run_status(tmp_path) == RunStatus()


# ---- cost


def test_one_thread_draws_for_all_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib keeps the fonts of each thread open, so new threads would use up descriptors."""
    drawing_threads = []

    def record(folders: Any) -> str:
        drawing_threads.append(threading.get_ident())
        return "drawing"

    monkeypatch.setattr(watch, "report_page", record)
    log, done = start_run(tmp_path), threading.Event()
    report = LiveReport([tmp_path], timer=lambda: 0.0)
    pages: list[bytes] = []

    def request() -> None:
        pages.append(report.page())
        done.wait()  # a thread that lives on keeps its id

    for step in (1, 2, 3):
        log.append(METRICS, metrics(step))
        threading.Thread(target=request).start()
        deadline = time.monotonic() + 30
        while len(pages) < step and time.monotonic() < deadline:
            time.sleep(0.001)
    done.set()
    assert pages == [b"drawing"] * 3
    assert len(drawing_threads) == 3
    assert len(set(drawing_threads)) == 1


def test_figures_are_freed_after_each_drawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory would add up: Python collects cycles of old objects seldom."""
    figures: list[weakref.ref[Figure]] = []

    def draw(folders: Any) -> str:
        figure = Figure()
        figure.add_subplot().plot([1, 2])
        figures.append(weakref.ref(figure))
        return "drawing"

    monkeypatch.setattr(watch, "report_page", draw)
    start_run(tmp_path).append(METRICS, metrics(1))
    gc.disable()
    try:
        LiveReport([tmp_path]).page()
        assert [figure() for figure in figures] == [None]
    finally:
        gc.enable()


def test_the_report_is_drawn_only_after_files_changed_and_then_pauses(
    tmp_path: Path, serve: Callable[..., WatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, draws = [1000.0], []

    def slow(folders: Any) -> str:
        draws.append(now[0])
        now[0] += 2.0  # the time to draw
        return f"drawing {len(draws)}"

    monkeypatch.setattr(watch, "report_page", slow)
    log = start_run(tmp_path)
    log.append(METRICS, metrics(1))
    server = serve(tmp_path, timer=lambda: now[0])
    assert [get(server, "/report")[2] for _ in range(3)] == ["drawing 1"] * 3
    first = status(server)["version"]
    log.append(METRICS, metrics(2))
    assert status(server)["version"] == first, "paused"
    assert get(server, "/report")[2] == "drawing 1"
    now[0] += 2.0 * watch.PAUSE_RATIO + 0.1
    assert status(server)["version"] != first
    assert get(server, "/report")[2] == "drawing 2"
    assert len(draws) == 2


# ---- security


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "127.0.0.1:8642"])
def test_requests_for_a_local_host_name_are_answered(
    host: str, tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    assert get(serve(tmp_path), "/status", host)[0] == 200


@pytest.mark.parametrize("path", ["/", "/report", "/status"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8642",
        "a@localhost",
        "[::1",
        "192.168.0.2",
    ],
)
def test_requests_for_another_host_name_are_refused(
    host: str, path: str, tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    code, headers, body = get(serve(tmp_path), path, host)
    assert (code, body) == (403, "the host must be localhost or 127.0.0.1\n")
    assert "access-control-allow-origin" not in headers


def test_a_request_without_a_host_header_is_refused(
    tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    with socket.create_connection(
        ("127.0.0.1", serve(tmp_path).server_address[1]), timeout=30
    ) as connection:
        connection.sendall(b"GET /status HTTP/1.0\r\n\r\n")
        assert b" 403 " in connection.recv(1000).splitlines()[0]


@pytest.mark.parametrize(
    "path",
    [
        "/recipe.toml",
        "/metrics.jsonl",
        "/../recipe.toml",
        "/report/",
        "/report?x=1",
        "/%2e%2e/",
        "/.",
    ],
)
def test_other_paths_are_not_found(
    path: str, tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    start_run(tmp_path).append(METRICS, metrics(1))
    assert get(serve(tmp_path), path)[::2] == (404, "not found\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_not_supported(
    method: str, tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    assert get(serve(tmp_path), "/", method=method)[0] == 501


def test_the_server_listens_only_on_the_loopback_address(
    tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    server = serve(tmp_path)
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url.startswith("http://127.0.0.1:")


def test_headers_prevent_caching_and_other_scripts(
    tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    server = serve(tmp_path)
    for path in ("/", "/report", "/status", "/nothing"):
        headers = get(server, path)[1]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert "content-security-policy" in headers
        assert "Python" not in headers["server"]
    policy, page = get(server, "/")[1]["content-security-policy"], get(server, "/")[2]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert 'data-interval="5"' in page
    assert get(server, "/report")[1]["content-security-policy"] == "frame-ancestors 'self'"


def test_the_name_of_a_folder_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    assert "<script>" not in LiveReport([folder]).page().decode()
    assert outer_page(0.5).count("<script>") == 1


# ---- the command


def test_errors_for_a_file_and_a_used_port_are_one_line(
    tmp_path: Path, serve: Callable[..., WatchServer]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        LiveReport([tmp_path / "file"])
    port = serve(tmp_path).server_address[1]
    with pytest.raises(UserError, match=f"--port {port} cannot be used") as caught:
        WatchServer(LiveReport([tmp_path]), port, 5.0)
    assert len(str(caught.value).splitlines()) == 1


def test_ctrl_c_ends_the_command_without_an_error(tmp_path: Path) -> None:
    start_run(tmp_path).append(METRICS, metrics(1))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "eepo", "watch", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
        # A test in the background would ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        output = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert re.search(r"at http://127\.0\.0\.1:\d+/", output)
    assert (process.returncode, errors) == (0, "")
