"""What the jobs of these tests run: the main job on the digits, slowed down, so that there is time to interrupt it.

    python train_digits.py FOLDER EPOCHS SECONDS_A_STEP

Leaves a digest of the final weights in FOLDER/weights-RANK.txt, and how many steps it took in FOLDER/steps-RANK.txt.
"""

import hashlib
import sys
import time
from pathlib import Path

import keras

import hvdx
from hvdx.jobs.data import load
from hvdx.jobs.fashion_mnist import build

folder, epochs, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
hvdx.init()


class Slow(keras.callbacks.Callback):
    """Takes its time, and says how far it is."""

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
