"""A small training of `make matrix`: `python -m tests.matrix_training KIND`, on several ranks.

The kinds are `arrays`, `py_dataset`, `resume` and `split`.
Each checks that the loss falls; `Distribute` itself compares the replicas after each epoch.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import hvdx
from hvdx.keras import Checkpoint, Distribute

KIND = sys.argv[1]
EPOCHS = 4

hvdx.init(seed=1)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)


class Batches(keras.utils.PyDataset):
    """The samples of this rank, in batches of 16."""

    def __init__(self):
        super().__init__()
        self.x, self.y = x[hvdx.rank() :: hvdx.size()], y[hvdx.rank() :: hvdx.size()]

    def __len__(self):
        return len(self.x) // 16

    def __getitem__(self, index):
        return self.x[index * 16 : index * 16 + 16], self.y[index * 16 : index * 16 + 16]


class Stop(keras.callbacks.Callback):
    """End the first training in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        """Stop at step 11."""
        if int(self.model.optimizer.iterations) == 11:
            raise KeyboardInterrupt


def model():
    """Return a compiled model."""
    dense = hvdx.keras.layers.SplitDense if KIND == "split" else keras.layers.Dense
    made = keras.Sequential([keras.Input((8,)), dense(16, activation="relu"), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def fit(*callbacks):
    """Train a new model; return it and its losses."""
    made = model()
    data = Batches() if KIND == "py_dataset" else hvdx.shard((x, y), batch_size=16)
    fitted = made.fit(
        data,
        epochs=EPOCHS,
        validation_data=None if KIND == "resume" else hvdx.shard((x, y), batch_size=16, shuffle=False),
        callbacks=[Distribute(), *callbacks],
        verbose=0,
    )
    return made, fitted.history["loss"]


if KIND == "resume":
    folder = Path(tempfile.gettempdir()) / f"hvdx-matrix-{os.getppid()}"
    with contextlib.suppress(KeyboardInterrupt):
        fit(Checkpoint(folder, every="5 steps"), Stop())
    trained, losses = fit(Checkpoint(folder, every="5 steps"))
    # 256 samples make 8 steps an epoch on each of two ranks.
    assert int(trained.optimizer.iterations) == 8 * EPOCHS, int(trained.optimizer.iterations)
    assert len(losses) == EPOCHS - 1, losses
    if hvdx.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
else:
    _, losses = fit()
assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
print(f"trained: {losses}", flush=True)
