"""Averages of hundreds of networks, all of which are open at the same time."""

import resource
import subprocess
import sys

import numpy as np
import pytest

from hvdx.averaging.formats import open_network
from hvdx.averaging.safetensors import save
from tests.launch import ROOT


@pytest.mark.parametrize(("hard", "code"), [(1000, 0), (64, 2)])
def test_more_inputs_than_descriptors(hard, code, tmp_path):
    for i in range(2):
        save(tmp_path / f"{i}.safetensors", {"w": np.full(3, i, "f4")})
    out = tmp_path / "mean.safetensors"
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"] * 100
    done = subprocess.run(
        [sys.executable, "-m", "hvdx", "average", *paths, "-o", out, "--quiet"],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.count("\n") == 1
        assert "expected a limit of" in done.stderr
        assert "ulimit -n" in done.stderr
    else:
        assert open_network(out).tensors["w"].array().tolist() == [0.5] * 3
