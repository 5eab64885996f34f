"""Keras script for Horovod that runs under hvdx with one changed import.

Horovod's own scripts begin with

    import horovod.tensorflow.keras as hvd

Under Keras 3, such a script ends without an error, but its workers never average their gradients. Here the line reads

    import hvdx.keras as hvd

and the rest follows Horovod's documentation: `init`, one GPU per process, the learning rate times the number of
workers, `DistributedOptimizer`, the callbacks, and checkpoints and output on rank 0 only. The data are scikit-learn's
images of handwritten digits, which need no download (pip install scikit-learn).

    python jobs/horovod_keras_digits.py
    mpirun -n 2 python jobs/horovod_keras_digits.py
    horovodrun -np 2 python jobs/horovod_keras_digits.py

Open MPI 5 needs `horovodrun --binding-args="--bind-to none --map-by slot" -np 2 ...`. A new script needs only one line
for all of this: see jobs/fashion_mnist.py.
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
    epilog="For two workers, start it with mpirun -n 2 or horovodrun -np 2.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--epochs", type=int, default=8, help="passes over the data by all workers together")
parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker")
parser.add_argument(
    "--learning-rate", type=float, default=0.01, help="learning rate of one worker; multiplied by the number of workers"
)
parser.add_argument("--warmup-epochs", type=int, default=2, help="epochs over which the learning rate rises")
parser.add_argument("--checkpoints", metavar="FOLDER", help="folder in which rank 0 writes a model after every epoch")
arguments = parser.parse_args()

hvd.init()

# One GPU for each process on a host, if there are GPUs.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# All ranks use the same split. Each rank shuffles the whole training part itself, and takes its share of the steps.
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
    # This callback stands before any other that reads the metrics.
    hvd.callbacks.MetricAverageCallback(),
    # A warm-up avoids divergence in the first epochs, which the full learning rate of a large batch can cause.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_rate, warmup_epochs=arguments.warmup_epochs, verbose=1),
]
# Only on rank 0, since all ranks would write the same files.
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
# Not part of a Horovod script: check that all ranks have the same weights.
weights = np.concatenate([w.ravel() for w in model.get_weights()])
gathered = np.stack(hvd.allgather_object(weights))
if hvd.rank() == 0:
    result = "the same" if (gathered == gathered[0]).all() else "NOT the same"
    print(f"test accuracy {accuracy:.4f} on {len(test)} images, {hvd.size()} worker{'s' * (hvd.size() > 1)}")
    print(f"the weights are {result} on all ranks")
