"""Other backends of Keras are refused when hvdx is imported."""

import sys

import keras
import pytest

from hvdx.errors import ConfigError
from hvdx.keras import backend
from tests.launch import run_command


def test_other_backend_is_refused_also_if_it_is_not_installed():
    done = run_command([sys.executable, "-c", "import hvdx; hvdx.init()"], 60, {"KERAS_BACKEND": "jax"})
    assert done.code == 1
    assert "ConfigError: Keras: expected the backend tensorflow, on which alone hvdx trains, got jax. Do: " in done.out
    assert "No module named" not in done.out


def test_backend_of_keras_json_is_refused(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    backend.check()
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ConfigError, match="got torch"):
        backend.check()
