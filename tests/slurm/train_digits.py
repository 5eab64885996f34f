"""Training of the Slurm tests: the main job's network on the digits, slowed down so that tests can interrupt it.

    python train_digits.py FOLDER EPOCHS SECONDS_A_STEP

It writes a digest of the final weights to FOLDER/weights-RANK.txt, and a line for each step to FOLDER/steps-RANK.txt.
FOLDER/begun-PID.txt says that a rank runs and has not imported anything slow.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

(Path(sys.argv[1]) / f"begun-{os.getpid()}.txt").touch()

import keras  # noqa: E402

import hvdx  # noqa: E402
from hvdx.jobs.data import load  # noqa: E402
from hvdx.jobs.fashion_mnist import build  # noqa: E402

folder, epochs, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
hvdx.init()


class Slow(keras.callbacks.Callback):
    """Callback that sleeps after each step, and records it."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(seconds)
        with (folder / f"steps-{hvdx.rank()}.txt").open("a") as file:
            file.write("step\n")


data = load("digits", None)
keras.utils.set_random_seed(0)
model = build(data, "mlp", None, "sgd", None)
model.fit(
    hvdx.shard((data.train_x, data.train_y), 64),
    epochs=epochs,
    shuffle=False,
    verbose=0,
    callbacks=[hvdx.keras.Distribute(), Slow(), hvdx.keras.Checkpoint(folder / "ckpt", every="20 steps")],
)
bits = b"".join(weight.tobytes() for weight in model.get_weights())
(folder / f"weights-{hvdx.rank()}.txt").write_text(hashlib.sha256(bits).hexdigest())
