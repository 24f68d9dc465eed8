"""The kernels' own tests, in a process whose Triton interprets: it must know before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("interpreted*.py")))
def test_kernels_equal_their_plain_forms_in_tritons_interpreter(file: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-x", str(HERE / file)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
