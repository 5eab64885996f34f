"""The order in which the parts of a fit run, and what they tell each other, without training."""

# Tests: hvdx/keras/fit/attachment.py, hvdx/keras/fit/sync_callback.py

import keras

import hvdx.keras as hvd
from hvdx.comm.local import virtual_world
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.part import Part, Parts
from hvdx.keras.fit.recording import Recording
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.strategies import resolve


class Notes(Part):
    """Part that writes its hooks to a list."""

    steps_done = 7

    def __init__(self, name, seen):
        super().__init__()
        self._name, self._seen = name, seen

    def offer(self):
        return self._name

    def agree(self, offered):
        self._seen.append(f"{self._name} agrees on {offered}")

    def end_steps(self):
        self._seen.append(f"{self._name} steps")

    def on_train_batch_end(self, batch, logs=None):
        self._seen.append(f"{self._name} {batch}")

    def end_first_step(self):
        self._seen.append(f"{self._name} first")

    def on_test_begin(self, logs=None):
        self._seen.append(f"{self._name} test")

    def on_epoch_end(self, epoch, logs=None):
        self._seen.append(f"{self._name} epoch")

    def on_train_end(self, logs=None):
        self._seen.append(f"{self._name} end")


def test_each_part_gets_its_own_offers_of_all_ranks():
    seen = []
    parts = Parts([Notes("a", seen), Notes("b", seen)])
    assert parts.offer() == ["a", "b"]
    parts.agree([["a0", "b0"], ["a1", "b1"]])
    assert seen == ["a agrees on ['a0', 'a1']", "b agrees on ['b0', 'b1']"]


def test_steps_end_once_in_an_epoch_and_parts_end_in_the_reverse_order():
    seen, fit = [], hvd.Distribute()
    fit.parts = fit.called = [Notes("a", seen), Notes("b", seen)]
    fit.on_epoch_begin(0)
    fit.on_test_begin()
    fit.on_epoch_end(0)
    fit.on_train_end()
    assert seen == ["a steps", "b steps", "a test", "b test", "a epoch", "b epoch", "b end", "a end"]


def test_first_step_of_each_fit_ends_in_each_part_in_turn():
    seen = []
    parts = Parts([Notes("a", seen), Notes("b", seen)])
    for first in (3, 0):
        seen.clear()
        parts.on_train_begin()
        parts.on_train_batch_end(first)
        parts.on_train_batch_end(first + 1)
        assert seen == [f"a {first}", "a first", f"b {first}", "b first", f"a {first + 1}", f"b {first + 1}"]


def test_sync_callback_reads_other_parts_in_the_list():
    """As `Checkpoint` is one, which resumes in mid-epoch."""
    seen, (comm,), recording = [], virtual_world(1), Recording()
    strategy = resolve("all_reduce")
    parts, attachment = Parts([Notes("a", seen)]), Attachment(comm, strategy, recording)
    sync = SyncCallback(comm, Counting(comm, attachment, recording), attachment, parts)
    assert issubclass(hvd.Checkpoint, Part)
    assert sync.steps_done == 0
    keras.callbacks.CallbackList([Notes("saver", seen), sync]).on_train_begin()
    assert sync.steps_done == 7
    assert seen == ["a agrees on ['a']"]
