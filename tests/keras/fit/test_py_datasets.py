"""`keras.utils.PyDataset` in epochs that are no passes through the data."""

# Tests: hvdx/keras/fit/callback_list.py

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.epoch_iterator import EpochIterator

from hvdx.keras.fit import callback_list, py_datasets
from hvdx.keras.seams.frames import epoch_iterator

LENGTH, STEPS = 5, 3


class Numbers(keras.utils.PyDataset):
    """Batch i holds the number i; `hooks` lists the calls of the hooks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hooks = []

    def __len__(self):
        return LENGTH

    def __getitem__(self, i):
        return np.full((1, 1), float(i), "float32")

    def on_epoch_begin(self):
        self.hooks.append("begin")

    def on_epoch_end(self):
        self.hooks.append("end")


class Recorder(keras.Model):
    """Model that trains nothing and records the batches of each epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.compile(run_eagerly=True)

    def train_step(self, data):
        self.epochs[-1].append(int(keras.utils.unpack_x_y_sample_weight(data)[0][0, 0]))
        return {"loss": 0.0}


class Cut(keras.callbacks.Callback):
    """End each epoch after STEPS steps, as on ranks that have more batches than others."""

    def __init__(self, repeats):
        super().__init__()
        self.repeats = repeats

    def on_train_begin(self, logs=None):
        if self.repeats:
            self.finish = callback_list.extend_epochs(self, 100)

    def on_epoch_begin(self, epoch, logs=None):
        self.model.epochs.append([])

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == STEPS:
            self.model.stop_training = True
            if not self.repeats:
                py_datasets.end_epoch(epoch_iterator(self))

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = False

    def on_train_end(self, logs=None):
        if self.repeats:
            self.finish()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("repeats", [False, True])
def test_epoch_that_ends_early(repeats, workers):
    model, data = Recorder(), Numbers(workers=workers)
    model.fit(data, epochs=4, verbose=0, shuffle=False, callbacks=[Cut(repeats)])
    assert data.hooks[0] == "end"  # Keras resets the data before it trains
    assert data.hooks[1:] == ["begin", "end"] * (len(data.hooks) // 2)
    if repeats:
        assert [i for epoch in model.epochs for i in epoch] == [i % LENGTH for i in range(4 * STEPS)]
        assert len(data.hooks) // 2 == 3  # passes
    else:
        assert model.epochs == [[0, 1, 2]] * 4
        assert len(data.hooks) // 2 == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_of_python_code_begin_and_end(workers):
    data = Numbers(workers=workers)
    iterator = EpochIterator(data)
    finish = py_datasets.begin_passes(iterator, 100)
    steps = getattr(iterator, "_enumerate_iterator", None) or iterator.enumerate_epoch
    numbers = [int(next(item[-1])[0][0, 0]) for _ in range(4) for item in itertools.islice(steps(), STEPS)]
    finish()
    assert numbers == [i % LENGTH for i in range(4 * STEPS)]
    assert data.hooks == ["begin", "end"] * 3


def test_other_data_are_left_alone():
    class Repeating(Cut):
        def on_train_begin(self, logs=None):
            super().on_train_begin()
            assert self.finish() is None

    model = Recorder()
    data = tf.data.Dataset.range(LENGTH).map(lambda i: tf.cast([[i]], tf.float32))
    for callback in (Repeating(True), Cut(False)):
        model.epochs = []
        model.fit(data, epochs=2, verbose=0, callbacks=[callback])
        later = [3, 4, 0] if callback.repeats else [0, 1, 2]
        assert model.epochs == [[0, 1, 2], later]
