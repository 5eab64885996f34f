"""Trainings with Keras on JAX and on PyTorch, on two ranks; tests/backend_battery.py has the checks."""

# Tests: hvdx/keras/backends/jax.py, hvdx/keras/backends/torch.py
# Tests: hvdx/keras/adapters/stepped.py, hvdx/keras/adapters/stepped_updates.py
# Tests: hvdx/keras/adapters/stepped_averages.py, hvdx/keras/fit/stepped_attachment.py

import pytest

from tests.backend_battery import CHECKS, saved
from tests.launch import run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(1, str(folder / "tensorflow"))
    return folder


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_check_holds_on(backend, checkpoints):
    pytest.importorskip(backend)
    of_torch = (checkpoints / "torch").exists()
    # Half of the time is that of XLA's compiler.
    env = {"KERAS_BACKEND": backend, "CHECKPOINTS": str(checkpoints), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = run(2, ["-m", "tests.backend_battery"], 240, env, fresh=True)
    assert done.code == 0, done
    for check in CHECKS:
        assert f"held: {check.__name__}\n" in done.out, done
    if backend == "jax" and of_torch:
        assert "random generators of another backend of Keras: they are not restored" in done.out
        assert "resuming after epoch 3" in done.out
