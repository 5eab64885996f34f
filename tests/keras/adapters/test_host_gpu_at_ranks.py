"""Training with Threshold(device="cuda") through TensorFlow's operation and DLPack, simulated or on a GPU."""

import importlib.util
import os
import shutil

import pytest

from tests.launch import run

PROGRAM = """
import keras, numpy as np, tensorflow as tf
import hvdx, hvdx.keras as hvd
from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import adapter_of
hvdx.init()
x = np.random.default_rng(hvdx.rank()).normal(size=(8, 5)).astype("f4")
y = x[:, :1].copy()

def train(device, eager=False, adam=False, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    # With Adam the ranks exchange samples of their gradients.
    optimizer = keras.optimizers.Adam(0.05) if adam else keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", run_eagerly=eager)
    strategy = hvdx.Threshold(target_density=0.2, device=device, **options)
    exchanges = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: exchanges.append(adapter_of(model.optimizer).exchange)
    )
    callbacks = [hvd.Distribute(strategy), look]
    losses = model.fit(x, y, 4, 2, verbose=0, shuffle=False, callbacks=callbacks).history["loss"]
    exchange = exchanges[0]
    assert (type(exchange.encoder.state.residual) is np.ndarray) == (device == "cpu")
    assert losses[-1] < losses[0], losses
    return [array.tobytes() for array in (*model.get_weights(), *exchange.residuals)]

for options in ({"adam": True}, {"eager": True}, {"placement": "gradient"}):
    assert train("cpu", **options) == train("cuda", **options), options
print("DONE")
"""


@pytest.mark.long
def test_training_on_a_gpu_has_the_weights_of_the_host():
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed: pip install 'hvdx[cuda]'")
    pytest.importorskip("tensorflow")
    done = run(2, ["-c", PROGRAM], timeout=150, env={"HVDX_CUDA_SIMULATOR": "1"})
    assert done.code == 0, str(done)
    assert done.out.count("DONE") == 2


def test_training_on_the_gpu_of_this_machine_has_the_weights_of_the_host():
    """Two ranks share a GPU. `make gpu` runs this where there is one."""
    if importlib.util.find_spec("numba_cuda") is None or shutil.which("nvidia-smi") is None:
        pytest.skip("no GPU, or no numba-cuda")
    pytest.importorskip("tensorflow")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    env = {"CUDA_VISIBLE_DEVICES": visible, "TF_DETERMINISTIC_OPS": "1"}
    done = run(2, ["-c", PROGRAM], timeout=300, env=env, fresh=True)
    assert done.code == 0, str(done)
    assert done.out.count("DONE") == 2
