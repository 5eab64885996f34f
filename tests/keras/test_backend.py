"""Other backends of Keras are refused when hvdx is imported; JAX and PyTorch are not, see tests/test_backends.py."""

import sys

import keras
import pytest

from hvdx.errors import ConfigError
from hvdx.keras import backend
from tests.launch import run_command


def test_other_backend_is_refused_also_if_it_is_not_installed():
    done = run_command([sys.executable, "-c", "import hvdx; hvdx.init()"], 60, {"KERAS_BACKEND": "openvino"})
    assert done.code == 1
    assert "ConfigError: Keras: expected one of the backends tensorflow, jax, torch, on which hvdx trains" in done.out
    assert "No module named" not in done.out


def test_backend_of_keras_json_is_refused(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    assert backend.name.__wrapped__() == "tensorflow"
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(ConfigError, match="got numpy"):
        backend.name.__wrapped__()


def test_what_needs_tensorflow_is_refused_elsewhere(monkeypatch):
    backend.needs_tensorflow("a tape")
    monkeypatch.setattr(backend, "name", lambda: "jax")
    with pytest.raises(ConfigError, match="a tape: expected Keras on TensorFlow, got the backend jax"):
        backend.needs_tensorflow("a tape")
