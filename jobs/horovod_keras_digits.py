"""A Keras script written for Horovod, run by hvdx: one import differs.

Horovod's own scripts begin with

    import horovod.tensorflow.keras as hvd

Under Keras 3 such a script ends without an error and its workers never average anything. Here the line reads

    import hvdx.keras as hvd

and everything below it is as Horovod's documentation teaches it: `init`, a GPU a process, the learning rate times the
number of workers, `DistributedOptimizer`, the callbacks, checkpoints and output on rank 0 only. The data are
scikit-learn's pictures of handwritten digits, which need no download (pip install scikit-learn).

    python jobs/horovod_keras_digits.py
    mpirun -n 2 python jobs/horovod_keras_digits.py
    horovodrun -np 2 python jobs/horovod_keras_digits.py

Open MPI 5 wants `horovodrun --binding-args="--bind-to none --map-by slot" -np 2 ...`. A new script says the same in
one line, see jobs/fashion_mnist.py.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdx.keras as hvd

parser = argparse.ArgumentParser(
    description="Handwritten digits with a small convolutional network, in the style of a Horovod script.",
    epilog="Start it with mpirun -n 2 (or horovodrun -np 2) in front for two workers.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--epochs", type=int, default=8, help="passes over the data, by all workers together")
parser.add_argument("--batch-size", type=int, default=32, help="pictures a step on each worker")
parser.add_argument(
    "--learning-rate", type=float, default=0.01, help="for one worker; it is multiplied by their number"
)
parser.add_argument("--warmup-epochs", type=int, default=2, help="epochs over which the learning rate rises")
parser.add_argument("--checkpoints", metavar="FOLDER", help="where rank 0 writes a model after every epoch")
arguments = parser.parse_args()

hvd.init()

# One GPU for each process on a host; nothing to do where there is none.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# The same split on every rank; of the training part each rank shuffles for itself, and takes its share of steps.
digits = load_digits()
images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
labels = digits.target.astype(np.int64)
order = np.random.default_rng(0).permutation(len(labels))
train, test = order[:1500], order[1500:]
dataset = (
    tf.data.Dataset.from_tensor_slices((images[train], labels[train]))
    .shuffle(len(train), seed=1000 + hvd.rank())
    .repeat()
    .batch(arguments.batch_size)
)
steps_per_epoch = max(1, len(train) // (arguments.batch_size * hvd.size()))

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

scaled_rate = arguments.learning_rate * hvd.size()
optimizer = keras.optimizers.SGD(scaled_rate, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    # All ranks start from rank 0's weights.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Before any callback that reads the metrics.
    hvd.callbacks.MetricAverageCallback(),
    # Large batches diverge at their full learning rate in the first epochs.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_rate, warmup_epochs=arguments.warmup_epochs, verbose=1),
]
# Other ranks would write over the same files.
if hvd.rank() == 0 and arguments.checkpoints:
    path = os.path.join(arguments.checkpoints, "digits-{epoch}.keras")
    callbacks.append(keras.callbacks.ModelCheckpoint(path))

model.fit(
    dataset,
    steps_per_epoch=steps_per_epoch,
    epochs=arguments.epochs,
    callbacks=callbacks,
    shuffle=False,
    verbose=2 if hvd.rank() == 0 else 0,
)

_, accuracy = model.evaluate(images[test], labels[test], verbose=0)
# Not part of a Horovod script: show that it did what it says. All weights of each rank.
weights = np.concatenate([w.ravel() for w in model.get_weights()])
everyone = np.stack(hvd.allgather_object(weights))
if hvd.rank() == 0:
    alike = "the same" if (everyone == everyone[0]).all() else "NOT the same"
    print(f"test accuracy {accuracy:.4f} on {len(test)} pictures, {hvd.size()} worker{'s' * (hvd.size() > 1)}")
    print(f"the weights are {alike} on all ranks")
