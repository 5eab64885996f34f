"""Trainings with Keras on JAX and on PyTorch whose updates stay on a GPU, on two ranks; tests/gpu_battery.py has them.

`make gpu` runs them where there is a GPU, which both ranks share. Elsewhere Numba's simulator takes its place for small
networks, on tensors of the CPU.
"""

# Tests: hvdx/keras/backends/jax.py, hvdx/keras/backends/torch.py

import importlib.util
import os
import shutil

import pytest

from hvdx.cli.common.mpi_tools import find_mpi
from tests.launch import run

THERE = shutil.which("nvidia-smi") is not None


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("where", [pytest.param("simulator", marks=pytest.mark.long), "gpu"])
def test_trainings_keep_their_updates_on(where, backend):
    missing = [name for name in (backend, "keras", "numba_cuda", "mpi4py") if importlib.util.find_spec(name) is None]
    if missing or find_mpi().mpirun is None:
        pytest.skip(f"not installed: {', '.join(missing) or 'MPI'}")
    if (where == "gpu") != THERE:
        pytest.skip("there is a GPU" if THERE else "no GPU")
    environ = {"KERAS_BACKEND": backend, "HVDX_CUDA_SIMULATOR": "1"}
    if THERE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        # JAX would take most of the GPU's memory for the first rank.
        more = {"CUDA_VISIBLE_DEVICES": visible, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environ = {"KERAS_BACKEND": backend, **more}
    done = run(2, ["-m", "tests.gpu_battery"], 400, environ, fresh=True)
    assert done.code == 0, done
    assert done.out.count("DONE") == 2, done
