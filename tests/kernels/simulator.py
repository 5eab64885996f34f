"""Runs of a test file in a process with Numba's simulator, which must be chosen before numba.cuda is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check_in_simulator(file: str, limit: float) -> None:
    """Run the tests of a file in the simulator, within a time limit in seconds; skip without numba-cuda."""
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed: pip install 'hvdx[cuda]'")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", file]
    environment = os.environ | {"HVDX_CUDA_SIMULATOR": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=limit, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
