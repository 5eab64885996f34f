"""A preempted job saves at the end of a step on all ranks, and resumes as the uninterrupted one."""

# Tests: hvdx/keras/checkpoint/callback.py, hvdx/keras/checkpoint/contents.py, hvdx/keras/checkpoint/callback.py
# Tests: hvdx/keras/fit/sync_callback.py

import gc
import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.comm.preemption import REQUEUE_CODE, acknowledge
from hvdx.errors import ConfigError
from hvdx.keras.checkpoint import callback, files, owner
from hvdx.keras.fit import data as shards
from hvdx.keras.fit import noise
from tests.ranks import models
from tests.ranks.checkpoints import of_other_ranks
from tests.ranks.models import BATCH, STEPS

SPARSE = {"target_density": 0.05}
STRATEGIES = {
    "all_reduce": lambda: hvdx.AllReduce(),
    "threshold": lambda: hvdx.Threshold(**SPARSE),
    "averaging": lambda: hvdx.ParameterAveraging(5),
    "averaging, own momenta": lambda: hvdx.ParameterAveraging(5, average_optimizer=False),
}


@pytest.fixture
def folder(tmp_path):
    """Return one folder for all ranks."""
    return hvd.broadcast_object(tmp_path, 0) / "ckpt"


@pytest.fixture(autouse=True)
def _asked_at_every_step(monkeypatch):
    monkeypatch.setattr(callback, "_SECONDS_BETWEEN_POLLS", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    acknowledge()
    for number, handler in before.items():
        signal.signal(number, handler)


def everyone(value):
    return world.start().all_gather_object(value, "test")


def names(folder):
    return everyone(sorted(p.name for p in folder.iterdir()) if hvdx.rank() == 0 else None)[0]


class End(keras.callbacks.Callback):
    """Callback that sends the signal of a batch system to one rank, in a given step."""

    def __init__(self, at, number=signal.SIGUSR1):
        super().__init__()
        self.at, self.number, self.taken, self.batches = at, number, 0, []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)
        self.taken += 1
        if self.taken == self.at and hvdx.rank() == hvdx.size() - 1:
            os.kill(os.getpid(), self.number)


def built(seed=0, **options):
    body = [lambda: keras.layers.Dense(8), keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.3)]
    model = models.network(*body, seed=seed)
    return models.compiled(model, keras.optimizers.SGD(0.1, momentum=0.9), metrics=["accuracy"], **options)


def plain(seed=0):
    """Build a model without special layers, whose step takes half the time."""
    return models.compiled(models.network(lambda: keras.layers.Dropout(0.3), seed=seed), "sgd", metrics=["accuracy"])


def train(model, folder=None, *callbacks, strategy="all_reduce", epochs=2, batches=None, every=1, **options):
    """Fit; return the history."""
    saving = [] if folder is None else [hvd.Checkpoint(folder, every=every)]
    batches = hvdx.shard(models.data(), BATCH) if batches is None else batches
    callbacks = [hvd.Distribute(STRATEGIES[strategy]()), *saving, *callbacks]
    return model.fit(batches, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks, **options).history


def interrupted(model, folder, at, *callbacks, number=signal.SIGUSR1, **options):
    """Fit until the signal, and assert that it ends the training."""
    with pytest.raises(SystemExit) as ended:
        train(model, folder, End(at, number), *callbacks, **options)
    assert ended.value.code == REQUEUE_CODE == 75
    return model


def assert_same(model, other):
    """Assert that two models have the same bits, rank-local variables included."""
    for mine, its in ((model.weights, other.weights), (model.optimizer.variables, other.optimizer.variables)):
        for a, b in zip(mine, its, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    for a, b in zip(noise.generators(model), noise.generators(other), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.graph
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_stopped_within_an_epoch_equals_the_uninterrupted_one_bit_for_bit(folder, strategy):
    straight = built()
    history = train(straight, strategy=strategy)
    at = STEPS + STEPS // 2
    interrupted(built(), folder, at, strategy=strategy)
    assert names(folder) == ["epoch-0001", f"epoch-0001-step-{STEPS // 2:08d}"]
    resumed, look = built(seed=100 + hvdx.rank()), End(0)
    later = train(resumed, folder, look, strategy=strategy)
    assert_same(resumed, straight)
    # Metrics too cover the whole epoch, and the step numbers continue.
    assert later["loss"] == history["loss"][1:]
    assert later["accuracy"] == history["accuracy"][1:]
    assert look.batches == [*range(STEPS // 2, STEPS)]
    assert names(folder) == [f"epoch-0001-step-{STEPS // 2:08d}", "epoch-0002"]


def test_training_that_is_stopped_several_times(folder):
    straight = plain()
    train(straight)
    for seed, at in enumerate((2, 1, 2)):
        interrupted(plain(seed), folder, at)
    resumed = plain(seed=7)
    train(resumed, folder)
    assert_same(resumed, straight)


@pytest.mark.sizes(1, 2)
def test_sigterm_saves_too(folder):
    interrupted(plain(), folder, 2, number=signal.SIGTERM)
    assert names(folder) == ["epoch-0000-step-00000002"]


def test_signal_in_the_last_step_of_an_epoch_saves_at_its_end(folder):
    interrupted(plain(), folder, STEPS)
    assert names(folder) == ["epoch-0001"]


def test_signal_in_the_last_step_does_not_exit(folder):
    model = plain()
    train(model, folder, End(2 * STEPS))
    assert names(folder) == ["epoch-0001", "epoch-0002"]


@pytest.mark.sizes(1, 2)
def test_signal_handlers_are_restored(folder):
    gc.collect()  # callbacks of other tests, whose fits did not end
    before = [signal.SIG_DFL, signal.SIG_DFL]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    train(plain(), folder, epochs=1)
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before
    callback = hvd.Checkpoint(folder, on_signal=False)
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before
    del callback


def test_signal_after_one_fit_ends_the_next(folder):
    train(plain(), folder / "a", End(STEPS), epochs=1)
    assert names(folder / "a") == ["epoch-0001"]
    with pytest.raises(SystemExit):
        train(plain(), folder / "b", epochs=1)
    assert names(folder / "b") == ["epoch-0000-step-00000001"]


@pytest.mark.graph
def test_steps_of_one_execution_are_not_separated(folder):
    straight = built(steps_per_execution=2)
    train(straight)
    interrupted(built(steps_per_execution=2), folder, 1)
    assert names(folder) == ["epoch-0000-step-00000002"]
    resumed = built(seed=1, steps_per_execution=2)
    train(resumed, folder)
    assert_same(resumed, straight)


@pytest.mark.parametrize("after", ["in an epoch", "between two"])
def test_position_in_passes_that_are_not_epochs_is_resumed(folder, after):
    def repeated():
        return hvdx.shard(models.data(), BATCH).repeat()

    length = STEPS // 2 + 1
    straight = plain()
    train(straight, batches=repeated(), steps_per_epoch=length, epochs=4)
    # The first pass is over by then.
    interrupted(plain(), folder, 2 * length + (2 if after == "in an epoch" else 0), batches=repeated(),
                steps_per_epoch=length, epochs=4)  # fmt: skip
    resumed = plain(seed=1)
    train(resumed, folder, batches=repeated(), steps_per_epoch=length, epochs=4)
    assert_same(resumed, straight)


def test_generators_of_numpy_and_python_are_resumed(folder):
    import random

    drawn = []

    class Draw(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            drawn.append((random.random(), random.gauss(0, 1), np.random.normal()))

    keras.utils.set_random_seed(5)
    model = models.compiled(models.network(seed=5), "sgd")
    train(model, None, Draw())
    straight, drawn[:] = list(drawn), []
    model = models.compiled(models.network(seed=5), "sgd")
    with pytest.raises(SystemExit):
        train(model, folder, Draw(), End(2))
    model = models.compiled(models.network(seed=6), "sgd")
    train(model, folder, Draw())
    assert drawn == straight


def test_order_drawn_at_the_start_of_a_pass_is_resumed(folder):
    seen = []

    def batches():
        x, y = models.data()
        for sample in np.random.permutation(STEPS * BATCH).reshape(-1, BATCH):
            seen.append(sample.tolist())
            yield x[sample], y[sample]

    def run(*callbacks, save=folder, seed=5):
        np.random.seed(seed)
        model = models.compiled(models.network(seed=5), "sgd")
        np.random.seed(seed)
        shape = (tf.TensorSpec((BATCH, models.FEATURES)), tf.TensorSpec((BATCH,), tf.int64))
        dataset = tf.data.Dataset.from_generator(batches, output_signature=shape)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(STEPS))
        train(model, save, *callbacks, batches=dataset, epochs=2)

    run(save=None)
    straight, seen[:] = list(seen), []
    with pytest.raises(SystemExit):
        run(End(3))
    seen.clear()
    run(seed=9)
    # The interrupted pass is read again; TensorFlow may have drawn ahead in earlier passes.
    assert seen[:STEPS] == straight[-2 * STEPS : -STEPS]


def test_files_of_metrics_are_appended_to(folder):
    def log():
        return keras.callbacks.CSVLogger(str(folder.parent / "log.csv"))

    interrupted(plain(), folder, STEPS + 2, log())
    train(plain(), folder, log())
    rows = everyone((folder.parent / "log.csv").read_text().split() if hvdx.rank() == 0 else None)[0]
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1"]


# -- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.sizes(1, 2)
def test_every_n_steps(folder):
    train(plain(), folder, epochs=2, every=f"{STEPS - 1} steps")
    # The second interval ends in the last step but one of the second epoch; then the training ends.
    assert names(folder) == [f"epoch-0001-step-{STEPS - 2:08d}", "epoch-0002"]


def test_every_n_minutes_by_the_clock_of_rank_0(folder):
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                time.sleep(0.3)

    train(plain(), folder, Slow(), epochs=1, every="0.004 minutes")
    assert names(folder)[0].startswith("epoch-0000-step-")
    train(plain(), folder / "seldom", Slow(), epochs=2, every="9 minutes")
    # Training also saves at its end, so nothing is trained twice.
    assert names(folder / "seldom") == ["epoch-0002"]


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(("ranks", "at", "begins"), [(2, 3, 3), (1, 3, 1), (4, 1, 2), (8, 2, None)])
def test_another_number_of_ranks_resumes_after_the_same_number_of_samples(folder, ranks, at, begins):
    if hvdx.size() != 2:
        return
    interrupted(plain(), folder, at)
    of_other_ranks(next(folder.glob("epoch-*")), ranks)
    resumed, look = plain(seed=1), End(0)
    history = train(resumed, folder, look)
    models.assert_identical(resumed)
    # The rest of the epoch; or the next epoch, if an epoch now has fewer steps than were taken.
    assert look.batches == [*(range(begins, STEPS) if begins else ()), *range(STEPS)]
    assert len(history["loss"]) == (2 if begins else 1)


def test_another_batch_size_resumes_after_the_same_number_of_samples(folder):
    at, half = STEPS - 3, hvdx.shard(models.data(), BATCH // 2)
    interrupted(plain(), folder, at)
    resumed, look = plain(seed=1), End(0)
    train(resumed, folder, look, batches=half, epochs=1)
    assert look.batches == list(range(2 * at, 2 * STEPS))


def test_epoch_shorter_than_its_trained_part_is_over(folder):
    def repeated():
        return hvdx.shard(models.data(), BATCH).repeat()

    interrupted(plain(), folder, 5, batches=repeated(), steps_per_epoch=8)
    resumed, look = plain(seed=1), End(0)
    history = train(resumed, folder, look, batches=repeated(), steps_per_epoch=4)
    assert look.batches == [*range(4)]
    assert len(history["loss"]) == 1


def test_checkpoints_after_another_batch_size_are_the_newest(folder):
    interrupted(plain(), folder, STEPS - 3)
    interrupted(plain(seed=1), folder, 2, batches=hvdx.shard(models.data(), BATCH // 2))
    assert names(folder) == [f"epoch-0000-step-{step:08d}" for step in (STEPS - 3, 2 * STEPS - 4)]
    interrupted(plain(seed=2), folder, 1)
    assert names(folder) == [f"epoch-0000-step-{step:08d}" for step in (STEPS - 3, STEPS - 1)]


def test_signal_after_a_stop_does_not_exit(folder):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.stop_training = True

    history = train(plain(), folder, Stop(), End(3), epochs=3)
    assert len(history["loss"]) == 1
    assert names(folder)[-1] == "epoch-0001"


def test_shuffled_validation_share_does_not_hide_the_training_share(folder):
    def run(model, *callbacks, save=folder):
        share = hvdx.shard(models.data(), BATCH).repeat()
        more = {"steps_per_epoch": STEPS // 2 + 1, "validation_data": hvdx.shard(models.data(), BATCH)}
        return train(model, save, *callbacks, batches=share, epochs=3, **more)

    straight = plain()
    run(straight, save=None)
    with pytest.raises(SystemExit):
        run(plain(), End(STEPS + 3))
    resumed = plain(seed=1)
    run(resumed)
    assert_same(resumed, straight)


def test_fit_ended_by_an_exception_leaves_nothing_behind(folder):
    train(plain(), folder, epochs=1)
    model = plain(seed=1)

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        train(model, folder, Break(), epochs=2)
    assert model._initial_epoch is None


def test_signal_is_received_by_a_callback_that_was_not_created_last(folder):
    first, second = hvd.Checkpoint(folder / "a"), hvd.Checkpoint(folder / "b")
    model = plain()
    with pytest.raises(SystemExit):
        model.fit(
            hvdx.shard(models.data(), BATCH), epochs=2, verbose=0, shuffle=False,
            callbacks=[hvd.Distribute(), first, End(2)],
        )  # fmt: skip
    assert names(folder) == ["a"]
    del second


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_training_waits_for_the_copy_and_not_for_the_disk(folder, monkeypatch):
    disk, waited = threading.Event(), []
    write = files.write

    def slow(contents):
        waited.append(disk.wait(60))
        write(contents)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 3:
                assert not list(folder.glob("epoch-*"))
                disk.set()

    monkeypatch.setattr(files, "write", slow)
    train(plain(), folder, Watch(), epochs=1, every="2 steps")
    assert waited
    assert all(waited)
    assert names(folder)[-1] == "epoch-0001"


def test_full_disk_stops_all_ranks_soon(folder, monkeypatch):
    def full(contents):
        raise OSError(28, "No space left on device")

    taken = End(0)
    train(plain(), folder, epochs=1)
    if hvdx.rank() == hvdx.size() - 1:
        monkeypatch.setattr(files, "write", full)

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05)

    with pytest.raises(Exception, match=rf"rank {hvdx.size() - 1}: OSError.*No space.*are unchanged"):
        train(plain(), folder, taken, Slow(), epochs=200, every="3 steps")
    assert taken.taken < 100
    # This process still owns the directory.
    assert names(folder) == [owner.NAME, "epoch-0001"]


# -- a parameter server -----------------------------------------------------------------------------------------------


@pytest.mark.sizes(2, 4)
def test_parameter_server_stops_and_takes_the_remaining_steps(folder):
    if hvdx.size() == 1:
        return
    strategy = hvdx.ParameterServer("colocated")

    def run(*callbacks):
        look = End(0)
        x, y = models.data()
        model = models.compiled(models.network(), keras.optimizers.SGD(0.1))
        callbacks = [hvd.Distribute(strategy), hvd.Checkpoint(folder), look, *callbacks]
        try:
            model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        finally:
            taken.append(sum(everyone(look.taken)))
            models.assert_identical(model, optimizer=False)

    taken = []
    with pytest.raises(SystemExit):
        run(End(5))
    run()
    # If the rank with the signal began late, the others may be in the second epoch.
    epoch = STEPS * hvdx.size() ** 2
    assert 0 < taken[0] < 2 * epoch
    # Each worker takes its first step without a request, even if fewer steps than workers are left of an epoch.
    left = -taken[0] % epoch
    beyond = max(hvdx.size() - left, 0) if left else 0
    assert sum(taken) == 2 * epoch + beyond


def test_parameter_server_refuses_checkpoints_every_n_steps(folder):
    if hvdx.size() == 1:
        return
    model = models.compiled(models.network(), "sgd")
    callbacks = [hvd.Distribute(hvdx.ParameterServer("colocated")), hvd.Checkpoint(folder, every="5 steps")]
    with pytest.raises(ConfigError, match="not at the same step"):
        model.fit(*models.data(), epochs=1, verbose=0, callbacks=callbacks)


# -- position in the data ---------------------------------------------------------------------------------------------


def test_position_in_a_share_after_several_passes():
    held = hvdx.shard(models.data(), BATCH, rank=0, size=1)
    other = hvdx.shard(models.data(), BATCH, rank=0, size=1)
    drawn = shards.state()[0]
    assert shards.started_share(drawn) is None
    assert shards.position_after(drawn, 30, None) == (drawn, 0)
    iterator = iter(held.repeat())
    for _ in range(STEPS * hvdx.size() + 3):
        batch = next(iterator)
    assert shards.started_share(drawn) == len(drawn) - 2
    begun, rest = shards.position_after(drawn, STEPS * hvdx.size() + 3, len(drawn) - 2)
    assert (begun[-2:], rest) == ([0, -1], 3)
    shards.set_orders(begun)
    again = list(held)[rest - 1]
    np.testing.assert_array_equal(again[0], batch[0])
    del other
