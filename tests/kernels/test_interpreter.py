"""Run the interpreted tests in a new process: TRITON_INTERPRET must be set before the import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


# Small tests of sampling, attention and the LM head, for the fast lane.
SMALL_TESTS = "empty_slots or more_rows_than_the_query or requested_dtype"


def test_small_inputs_run_in_the_interpreter() -> None:
    run_interpreted("interpreted.py", "-k", SMALL_TESTS)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("interpreted*.py")))
def test_kernels_equal_their_plain_versions_in_the_interpreter(file: str) -> None:
    run_interpreted(file)


def run_interpreted(file: str, *options: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-x", str(HERE / file), *options]
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE.parent.parent,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
