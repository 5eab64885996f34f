"""Trainings with Keras on JAX and on PyTorch, on two ranks; tests/backend_battery.py has the checks."""

# Tests: hvdx/keras/backends/jax.py, hvdx/keras/backends/torch.py
# Tests: hvdx/keras/adapters/stepped.py, hvdx/keras/fit/stepped_attachment.py

import pytest

from tests.backend_battery import CHECKS
from tests.launch import run


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_every_check_holds_on(backend):
    pytest.importorskip(backend)
    done = run(2, ["-m", "tests.backend_battery"], 240, {"KERAS_BACKEND": backend}, fresh=True)
    assert done.code == 0, done
    for check in CHECKS:
        assert f"held: {check.__name__}\n" in done.out, done


def test_a_checkpoint_of_pytorch_resumes_on_jax(tmp_path):
    for backend, epochs in (("torch", 1), ("jax", 2)):
        pytest.importorskip(backend)
        code = f"from tests.backend_battery import saved; saved({epochs}, {str(tmp_path / 'c')!r})"
        done = run(2, ["-c", code], 120, {"KERAS_BACKEND": backend}, fresh=True)
        assert done.code == 0, done
    assert "random generators of another backend of Keras: they are not restored" in done.out
    assert "resuming after epoch 1" in done.out
