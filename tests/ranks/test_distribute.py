"""`Distribute` besides gradients: metrics, files, comparison of replicas."""

# Tests: hvdx/keras/distribute.py, hvdx/keras/fit/metrics.py, hvdx/keras/fit/replicas.py
# Tests: hvdx/keras/fit/attachment.py, hvdx/keras/fit/attachment.py, hvdx/report/counters.py

import copy
import json
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError, NotDistributedError, ReplicaError
from hvdx.jobs.benchmarks.harness import memory
from hvdx.keras.fit import data as shards
from hvdx.keras.fit import replicas
from tests.ranks import models


def _agreed(value):
    everyone = world.start().all_gather_object(value, "test")
    assert all(v == everyone[0] for v in everyone), everyone
    return value


def _shared_folder(tmp_path):
    """Return rank 0's folder on all ranks."""
    return hvd.broadcast_object(tmp_path, 0)


@pytest.mark.sizes(1, 2, 4)
def test_metrics_cover_all_samples():
    """An AUC is not a mean of AUCs, and ranks with more validation samples weigh more."""

    def binary(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((models.FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5, name="f1")]
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
        return model

    x, y = models.data()
    y = (y > 1).astype("float32")[:, None]
    own = slice(0, 8) if hvdx.rank() == 0 else slice(8 + 16 * (hvdx.rank() - 1), 8 + 16 * hvdx.rank())
    union = slice(0, 8 + 16 * (hvdx.size() - 1))
    model = binary(hvdx.rank())
    got = model.fit(
        hvdx.shard((x, y), 4),
        validation_data=(x[own], y[own]),
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[hvd.Distribute()],
    ).history
    reference = binary(0)
    expected = reference.fit(
        hvdx.shard((x, y), 4 * hvdx.size(), rank=0, size=1),
        validation_data=(x[union], y[union]),
        epochs=2,
        verbose=0,
        shuffle=False,
    ).history
    _agreed(got)
    assert set(got) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.sizes(2, 4)
def test_batch_normalisation_statistics_are_averaged():
    model = models.compiled(
        models.network(lambda: keras.layers.Dense(5), keras.layers.BatchNormalization, seed=hvdx.rank()), "adam"
    )
    models.fit(model, [hvd.Distribute()], validation_data=models.data(16))
    models.assert_identical(model)


@pytest.mark.sizes(2, 4)
def test_weights_without_gradient_become_the_mean():
    model = models.network(keras.layers.BatchNormalization, seed=0)
    mean = model.layers[0].moving_mean
    mean.assign(np.full(mean.shape, float(hvdx.rank()), "float32"))
    replicas.average_state(model, world.start())
    np.testing.assert_allclose(mean.numpy(), (hvdx.size() - 1) / 2, rtol=1e-6)


class Chatty(keras.Sequential):
    """Model whose train_step returns plain tensors, one under the name of a metric."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return {"loss": loss, "rank": float(hvdx.rank())}


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("reducer", [hvd.Distribute, hvd.callbacks.MetricAverageCallback])
@pytest.mark.parametrize("validate", [True, False])
def test_values_of_a_custom_train_step_become_the_mean_over_ranks(validate, reducer):
    keras.utils.set_random_seed(0)
    model = Chatty([keras.Input((models.FEATURES,)), keras.layers.Dense(models.CLASSES)])
    models.compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    options = {"validation_data": models.data(8)} if validate else {}
    logs = models.fit(model, [reducer()], **options).history
    assert logs["rank"] == pytest.approx([(hvdx.size() - 1) / 2] * 2)
    assert min(logs["loss"]) > 0.1
    _agreed(logs)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.sizes(2, 4)
def test_fits_end_as_those_of_one_process(capfd):
    """`steps_per_epoch` that does not divide the batches of a pass, and `TerminateOnNaN`."""
    model = models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1))
    data = hvdx.shard(models.data(), models.BATCH)
    options = {"epochs": 4, "steps_per_epoch": models.STEPS - 1, "verbose": 0, "shuffle": False}
    model.fit(data, callbacks=[hvd.Distribute()], **options)
    assert int(model.optimizer.iterations.numpy()) == 2 * models.STEPS
    models.assert_identical(model)

    x, y = models.data(models.BATCH * models.STEPS)
    x += hvdx.rank()
    if hvdx.rank() == hvdx.size() - 1:
        x[models.BATCH, 1] = np.nan  # in the second step, in the loss of this rank only
    taken = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: taken.append(batch))
    callbacks = [hvd.Distribute(), keras.callbacks.TerminateOnNaN(), count]
    history = model.fit(x, y, batch_size=models.BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert (history.epoch, taken) == ([0], [0, 1])
    assert np.isnan(history.history["loss"]).all()
    assert ("the weights hold NaN or infinity after epoch 1" in capfd.readouterr().err) == (hvdx.rank() == 0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("kind", [keras.Sequential, Chatty])
def test_ranks_without_validation_batches_receive_the_metrics_of_the_others(kind):
    keras.utils.set_random_seed(0)
    model = kind([keras.Input((models.FEATURES,)), keras.layers.Dense(models.CLASSES)])
    model.test_step = (lambda batch: {"mine": 3.0}) if kind is Chatty else model.test_step
    models.compiled(model, "sgd", **({} if kind is Chatty else {"metrics": ["accuracy"]}))
    whole = tf.data.Dataset.from_tensor_slices(models.data(8)).batch(8)
    # One batch, which is rank 0's.
    share = hvdx.shard(whole, shuffle=False, drop_remainder=False)
    logs = _agreed(models.fit(model, [hvd.Distribute()], epochs=2, validation_data=share).history)
    if kind is Chatty:
        assert logs["val_mine"] == [3.0, 3.0]
    else:
        expected = model.evaluate(whole, return_dict=True, verbose=0)
        assert (logs["val_loss"][1], logs["val_accuracy"][1]) == pytest.approx((expected["loss"], expected["accuracy"]))


def test_two_reducers_do_not_count_twice():
    def binary():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((models.FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
        counts = [keras.metrics.TruePositives(), keras.metrics.FalsePositives()]
        counts += [keras.metrics.TrueNegatives(), keras.metrics.FalseNegatives()]
        model.compile("sgd", "binary_crossentropy", metrics=counts)
        return model

    x, y = models.data()
    share = hvdx.shard((x, (y > 1).astype("float32")[:, None]), 4)
    callbacks = [hvd.callbacks.MetricAverageCallback(), hvd.Distribute()]
    logs = binary().fit(share, epochs=1, verbose=0, shuffle=False, callbacks=callbacks).history
    assert sum(v[0] for k, v in logs.items() if k != "loss") == models.samples()
    if hvdx.size() > 1:
        with pytest.raises(ConfigError, match="twice"):
            models.fit(binary(), [hvd.Distribute(), hvd.Distribute()])


def test_validation_on_one_rank_only_is_an_error_and_no_deadlock():
    model = models.compiled(models.network(seed=0), "sgd")
    options = {"validation_data": models.data(8)} if hvdx.rank() == 0 else {}
    if hvdx.size() == 1:
        models.fit(model, [hvd.Distribute()], **options)
    else:
        with pytest.raises(ReplicaError, match=r"rank 0 is at validation.*rank 1 is at the end of epoch 1"):
            models.fit(model, [hvd.Distribute()], **options)


def test_optimizer_that_a_script_distributed_stays_distributed():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = models.compiled(models.network(seed=hvdx.rank()), optimizer)
    models.fit(model, [hvd.Distribute()])
    models.fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    models.assert_identical(model)


def test_fit_after_an_exception_starts_afresh(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("as planned")

    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    model = models.compiled(models.network(seed=0), "sgd", jit_compile=True)
    with pytest.raises(RuntimeError, match="as planned"):
        models.fit(model, [hvd.Distribute(), checkpoint, Fail()])
    models.fit(model, [hvd.Distribute("all_reduce:compression=bf16")])
    models.assert_identical(model)
    assert model.jit_compile is True
    alone = models.compiled(models.network(seed=0), "sgd")
    models.fit(alone, [checkpoint])
    assert (tmp_path / "model.keras").exists()


def test_callback_inside_another_still_agrees():
    """If `Distribute` does not find the list of callbacks, only their order is lost."""

    class Delegate(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.inner = hvd.Distribute()

        def set_model(self, model):
            super().set_model(model)
            self.inner.set_model(model)

        def set_params(self, params):
            self.inner.set_params(params)

        def on_train_begin(self, logs=None):
            self.inner.on_train_begin(logs)

        def on_train_batch_end(self, batch, logs=None):
            self.inner.on_train_batch_end(batch, logs)

        def on_epoch_begin(self, epoch, logs=None):
            self.inner.on_epoch_begin(epoch, logs)

        def on_epoch_end(self, epoch, logs=None):
            self.inner.on_epoch_end(epoch, logs)

        def on_train_end(self, logs=None):
            self.inner.on_train_end(logs)

    x, y = models.data()
    samples = 4 * (3 + hvdx.rank())
    model = models.compiled(models.network(seed=hvdx.rank()), "sgd")
    model.fit(x[:samples], y[:samples], batch_size=4, epochs=2, verbose=0, callbacks=[Delegate()])
    models.assert_identical(model)
    assert int(model.optimizer.iterations) == 2 * (3 + hvdx.size() - 1)


@pytest.mark.sizes(2, 4)
def test_shards_stay_disjoint_after_one_rank_has_read_ahead():
    numbers = np.arange(32)
    share = hvdx.shard((numbers[:, None].astype("float32"), numbers), 4)
    if hvdx.rank() == 0:
        next(iter(share))
    seen = []

    class Note(keras.Sequential):
        def train_step(self, batch):
            seen.extend(batch[1].numpy().tolist())
            return super().train_step(batch)

    model = Note([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(share, epochs=1, verbose=0, shuffle=False, callbacks=[hvd.Distribute()])
    everyone = [i for part in world.start().all_gather_object(seen, "test") for i in part]
    assert sorted(everyone) == list(range(32))


def test_datasets_shuffled_with_different_global_seeds_are_refused():
    dataset = tf.data.Dataset.from_tensor_slices(models.data())
    tf.random.set_seed(hvdx.rank())
    share = hvdx.shard(dataset, 4)
    tf.random.set_seed(0)
    model = models.compiled(models.network(seed=0), "sgd")
    try:
        if hvdx.size() == 1:
            model.fit(share, verbose=0, shuffle=False, callbacks=[hvd.Distribute()])
        else:
            with pytest.raises(ReplicaError, match="different seeds"):
                model.fit(share, verbose=0, shuffle=False, callbacks=[hvd.Distribute()])
    finally:
        shards._seeds.clear()


@pytest.mark.sizes(1, 2)
def test_files_are_written_by_rank_0_only_and_are_plain_keras(tmp_path):
    own = tmp_path / f"rank{hvdx.rank()}"
    own.mkdir()
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(own / "checkpoint.keras"), verbose=1),
        keras.callbacks.CSVLogger(str(own / "log.csv")),
        hvd.Distribute(),
        keras.callbacks.TensorBoard(str(own / "board")),
    ]
    model = models.compiled(models.network(seed=0), keras.optimizers.Adam(0.01))
    models.fit(model, callbacks)
    written = sorted(path.name for path in own.iterdir())
    assert written == (["board", "checkpoint.keras", "log.csv"] if hvdx.rank() == 0 else [])
    if hvdx.rank() == 0:
        plain = models.compiled(models.network(seed=0), keras.optimizers.Adam(0.01))
        models.fit(plain, [])
        plain.save(own / "plain.keras")
        assert _optimizer_config(own / "checkpoint.keras") == _optimizer_config(own / "plain.keras")
        loaded = keras.models.load_model(own / "checkpoint.keras")
        assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
        models.assert_close(loaded, model, 0)


@pytest.mark.sizes(2)
def test_tensorboard_groups_the_figures_of_the_strategy(tmp_path):
    board = keras.callbacks.TensorBoard(str(tmp_path), write_graph=False)
    model = models.compiled(models.network(seed=0), "sgd")
    models.fit(model, [hvd.Distribute(hvdx.Threshold()), board], validation_data=models.data(8))
    found = (tf.compat.v1.train.summary_iterator(str(path)) for path in tmp_path.rglob("*.tfevents.*"))
    tags = {value.tag for events in found for event in events for value in event.summary.value}
    if hvdx.rank() == 0:
        assert {"hvdx/density", "hvdx/tau", "hvdx/MB_sent", "hvdx/ms_encoding", "epoch_loss"} <= tags
        assert not {"epoch_density", "epoch_tau", "epoch_MB_sent"} & tags
    assert "_log_epoch_metrics" not in vars(board)


@pytest.mark.sizes(1, 2)
def test_callbacks_of_mlflow_and_wandb_run_on_rank_0():
    class Logger(keras.callbacks.Callback):
        """Stand-in for WandbMetricsLogger and MlflowCallback."""

        __module__ = "wandb.integration.keras.callbacks.metrics_logger"
        logs = ()

        def on_epoch_end(self, epoch, logs=None):
            self.logs = (*self.logs, *logs)

    class Own(Logger):
        __module__ = __name__

    loggers = [Logger(), Own()]
    models.fit(models.compiled(models.network(seed=0), "sgd"), [*loggers, hvd.Distribute()], epochs=1)
    assert ["loss" in logger.logs for logger in loggers] == [hvdx.rank() == 0] * 2


def _optimizer_config(path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))["compile_config"]["optimizer"]
    config["config"].pop("name")
    return config


def test_backup_and_restore_on_rank_0_restarts_all_ranks(tmp_path):
    folder = _shared_folder(tmp_path) / "backup"

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def build(seed):
        return models.compiled(models.network(seed=seed), keras.optimizers.SGD(0.1, momentum=0.9))

    model = build(hvdx.rank())
    with pytest.raises(KeyboardInterrupt):
        models.fit(model, [keras.callbacks.BackupAndRestore(str(folder)), hvd.Distribute(), Stop()], epochs=4)
    second = build(50 + hvdx.rank())
    history = models.fit(second, [hvd.Distribute(), keras.callbacks.BackupAndRestore(str(folder))], epochs=4).history
    assert len(history["loss"]) == 2  # epochs 0 and 1 were saved
    models.assert_identical(second)
    assert int(second.optimizer.iterations) == 4 * models.STEPS


def test_early_stopping_stops_all_ranks_together():
    class StopOnLast(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvdx.rank() == hvdx.size() - 1 and self.epoch == 1 and batch == 1:
                self.model.stop_training = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    model = models.compiled(models.network(seed=0), "sgd")
    history = models.fit(model, [StopOnLast(), hvd.Distribute()], epochs=5).history["loss"]
    assert len(_agreed(history)) == 2
    models.assert_identical(model)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=1e9)
    history = models.fit(model, [hvd.Distribute(), stopping], epochs=5, validation_data=models.data(8)).history
    assert len(_agreed(history["loss"])) == 2


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("every", ["epoch", 3])
def test_guard_names_the_variable_that_was_changed_on_one_rank(every):
    class Meddle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvdx.rank() == hvdx.size() - 1:
                kernel = self.model.layers[-1].kernel
                kernel.assign(kernel + 1e-6)

    model = models.compiled(models.network(seed=0), "sgd")
    callbacks = [Meddle(), hvd.Distribute(check_every=every)]
    if hvdx.size() == 1:
        models.fit(model, callbacks)
        return
    # The comparison at the end of the epoch would find it too.
    when = {"epoch": "epoch 1", 3: "step 3"}[every]
    with pytest.raises(ReplicaError, match=rf"replicas differ after {when}\b.*kernel") as caught:
        models.fit(model, callbacks)
    assert f"ranks {hvdx.size() - 1}" in str(caught.value)


def test_guard_can_be_switched_off():
    class Meddle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            bias = self.model.layers[-1].bias
            bias.assign(bias + float(hvdx.rank()))

    model = models.compiled(models.network(seed=0), "sgd")
    models.fit(model, [Meddle(), hvd.Distribute(check_every=None)])
    with pytest.raises(ConfigError, match="check_every"):
        hvd.Distribute(check_every=0)


def compile_again(model):
    model.compile("adam", "mse")


def compile_and_trace(model):
    model.compile("adam", "mse")
    model.make_train_function()


def assign(model):
    model.optimizer = keras.optimizers.SGD(0.2)
    model.make_train_function(force=True)


@pytest.mark.parametrize(
    ("change", "hook"), [(compile_again, "epoch_begin"), (compile_and_trace, "epoch_end"), (assign, "train_batch_end")]
)
def test_another_optimizer_within_a_fit_is_refused(change, hook):
    """The ranks would train it separately, and an error about replicas that differ would name no remedy."""
    model = models.compiled(models.network(seed=0), "sgd")
    first = model.optimizer

    def once(number, logs):
        if number == 1:
            change(model)

    callback = keras.callbacks.LambdaCallback(**{f"on_{hook}": once})
    with pytest.raises(NotDistributedError, match=r"fit: expected the optimizer .*initial_epoch=E"):
        models.fit(model, [hvd.Distribute(), callback], epochs=3)
    models.fit(models.compiled(model, first), [hvd.Distribute()], epochs=1)
    models.assert_identical(model)


@pytest.mark.graph
def test_train_step_that_bypasses_the_optimizer_is_refused():
    class Bypass(keras.Sequential):
        def train_step(self, batch):
            for variable in self.trainable_variables:
                variable.assign_sub(0.1 * variable)
            return {"loss": 0.0}

    keras.utils.set_random_seed(0)
    model = Bypass([keras.Input((models.FEATURES,)), keras.layers.Dense(models.CLASSES)])
    models.compiled(model, "sgd")
    if hvdx.size() == 1:
        models.fit(model, [hvd.Distribute()])
    else:
        with pytest.raises(NotDistributedError, match=r"optimizer\.apply"):
            models.fit(model, [hvd.Distribute()])


def test_models_of_different_shapes_are_refused():
    model = models.compiled(models.network(lambda: keras.layers.Dense(5 + hvdx.rank())), "sgd")
    if hvdx.size() == 1:
        models.fit(model, [hvd.Distribute()])
    else:
        with pytest.raises(ReplicaError, match=r"float32\(6, 5\) on rank 0, float32\(6, 6\) on rank 1"):
            models.fit(model, [hvd.Distribute()])


def test_epochs_that_differ_are_refused():
    model = models.compiled(models.network(), "sgd")
    if hvdx.size() > 1:
        with pytest.raises(ReplicaError, match="epochs differs"):
            models.fit(model, [hvd.Distribute()], epochs=1 + hvdx.rank())


@pytest.mark.sizes(1, 2)
def test_counters_count_steps_exchanges_and_bytes():
    callback = hvd.Distribute()
    model = models.compiled(models.network(seed=0), "sgd")
    models.fit(model, [callback])
    size, counters = hvdx.size(), callback.counters
    assert counters.steps == 2 * models.STEPS
    assert counters.exchanges == (counters.steps if size > 1 else 0)
    assert counters.bytes_per_exchange == round(4 * model.count_params() * 2 * (size - 1) / size)
    assert 0 <= counters.exchange_seconds < counters.seconds


@pytest.mark.sizes(1, 2)
def test_strategy_from_the_environment(monkeypatch):
    monkeypatch.setenv("HVDX_STRATEGY", "all_reduce:compression=fp16")
    assert repr(hvd.Distribute().strategy) == "AllReduce(compression='fp16')"
    assert repr(hvd.Distribute(hvdx.AllReduce()).strategy) == "AllReduce()"
    monkeypatch.setenv("HVDX_STRATEGY", "ring")
    with pytest.raises(ConfigError, match="all_reduce"):
        hvd.Distribute()


@pytest.mark.graph
def test_step_of_an_optimizer_without_variables_is_traced_once():
    traced = []

    class Count(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    model = models.network(Count)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    traced.clear()
    models.fit(model, [hvd.Distribute()], epochs=1)
    assert len(traced) == 1
    models.assert_identical(model)


class _Count(keras.layers.Layer):
    """Layer that counts its traces."""

    traces = 0

    def call(self, x):
        self.traces += 1
        return x


def _counting():
    model = models.network(_Count, lambda: keras.layers.Dense(4))
    return models.compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))


def _traces(model, *strategies):
    """Train once under each strategy, None for a fit alone; return the number of traces in each fit."""
    counts = [model.layers[0].traces]
    for strategy in strategies:
        models.fit(model, [] if strategy is None else [hvd.Distribute(strategy)], epochs=1)
        counts.append(model.layers[0].traces)
    return np.diff(counts).tolist()


@pytest.mark.graph(every=True)
@pytest.mark.parametrize("strategy", ["all_reduce", "threshold:tau=0.001", "parameter_averaging:period=3"])
def test_a_later_fit_uses_the_trace_of_the_first(strategy):
    model, again = _counting(), _counting()
    assert _traces(model, strategy, strategy) == [1, 0]
    for _ in range(2):
        again.train_function = None
        assert _traces(again, strategy) == [1]
    for mine, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    models.assert_identical(model, optimizer=False)


@pytest.mark.graph
def test_a_changed_training_is_traced_again(monkeypatch):
    model, strategy = _counting(), "threshold:tau=0.001"
    # Asynchronous workers trace each fit.
    assert _traces(model, "parameter_server:servers=colocated", strategy) == [1, 1]
    if hvdx.rank() == 0:  # the other ranks trace again, too
        model.train_function = None
    assert _traces(model, strategy) == [1]
    model.layers[-1].trainable = False
    assert _traces(model, strategy) == [1]
    model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    assert _traces(model, strategy) == [1]
    models.compiled(model, keras.optimizers.SGD(0.1))
    assert _traces(model, strategy, "all_reduce") == [1, 1]
    monkeypatch.setenv("HVDX_ALLOW_SEPARATE", "1")
    assert _traces(model, None) == [1]
    assert replicas.differing(model.weights, world.start())
    assert _traces(model, "all_reduce") == [1]
    models.assert_identical(model, optimizer=False)


@pytest.mark.sizes(1, 2)
def test_copy_is_a_fresh_callback_with_the_same_arguments():
    """Tuners of hyperparameters copy the callbacks of each trial, also after a fit."""
    model = models.compiled(models.network(lambda: keras.layers.Dense(3), seed=0), "sgd")
    original = hvd.Distribute("parameter_averaging:period=2", check_every=3)
    models.fit(model, [original])
    for made in (copy.deepcopy([original])[0], copy.copy(original)):
        assert made is not original
        assert (str(made.strategy), made.check_every) == (str(original.strategy), 3)
        assert not {id(part) for part in made.parts} & {id(part) for part in original.parts}
        model = models.compiled(models.network(lambda: keras.layers.Dense(3), seed=hvdx.rank()), "sgd")
        models.fit(model, [made])
        models.assert_identical(model)


@pytest.mark.sizes(1)
def test_model_of_keras_2_is_refused():
    with pytest.raises(ConfigError, match=r"expected a model of Keras 3, got tests.*\.Keras2\. Do: "):
        hvd.Distribute().set_model(type("Keras2", (), {"__module__": "tests.tf_keras", "__qualname__": "Keras2"})())


@pytest.mark.sizes(2, 4)
def test_variables_are_broadcast_in_blocks(monkeypatch):
    """Of every dtype, in groups and by rows, also where rows are larger than a block or do not fill the last one."""
    monkeypatch.setattr(replicas, "_BLOCK_BYTES", 64)
    draw, variables = np.random.default_rng(hvdx.rank()), []
    for dtype in ("float32", "bfloat16", "float16", "int64", "bool"):
        for shape in ((), (3,), (7, 5), (2, 100), (50,), (1, 99), (4, 0)):
            values = (draw.random(shape) * 2).astype("int64" if dtype == "bool" else "float64")
            variables.append(keras.Variable(values, dtype=dtype, trainable=False))
    before = replicas.digests(variables)
    replicas.broadcast([*variables, tf.Variable(hvdx.rank())], 1, world.start())
    assert _agreed(replicas.digests(variables)) == hvd.broadcast_object(before, 1)


@pytest.mark.graph(every=True)
@pytest.mark.parametrize(
    ("layer", "strategy"),
    [
        ("dense", "all_reduce:engine=mpi"),
        # Each epoch ends within a period.
        ("dense", "threshold:target_density=0.001,period=3"),
        ("table", "all_reduce:engine=mpi"),
        ("table", "parameter_averaging:period=2"),
    ],
)
def test_nothing_has_the_size_of_the_model(layer, strategy):
    """A variable of 100 MB: its broadcast, sum, mean, comparison and check need much less memory than a copy of it.

    Under `Threshold`, only the residual and the shared weights have that size.
    """
    shape = (5000,) if layer == "dense" else (8,)
    inputs = keras.Input(shape, dtype="float32" if layer == "dense" else "int32")
    hidden = keras.layers.Dense(5000) if layer == "dense" else keras.layers.Embedding(400_000, 64)
    outputs = hidden(inputs) if layer == "dense" else keras.layers.Flatten()(hidden(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile("sgd", "mse")
    data = hvdx.shard((np.full((8, *shape), 1e-3).astype(inputs.dtype), np.ones((8, 1), np.float32)), 2)
    # TensorFlow keeps the memory that the training itself needs.
    model.fit(data, verbose=0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    callback = hvd.Distribute(strategy)
    model.fit(data, epochs=2, verbose=0, callbacks=[callback])
    # Threshold keeps a residual and the shared weights.
    kept = 220e6 if strategy.startswith("threshold") else 0.0
    assert memory("VmHWM") - before < kept + 60e6
    if layer == "table" and strategy.startswith("all_reduce"):
        assert 0 < callback.counters.bytes_sent < 1e6, "rows travel, not the table"
