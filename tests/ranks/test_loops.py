"""Training loops of a script's own: `prepare`, `flush` and `combine`."""

# Tests: hvdx/keras/loops.py

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import loops
from tests.ranks import models

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"
STRATEGIES = ["all_reduce", "threshold", "parameter_averaging:period=3", "parameter_server:servers=colocated"]


def loop_of_the_guide():
    section = GUIDE.read_text().partition("\n## Without the callback\n")[2]
    return re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.graph(every=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loop_of_the_guide_trains_one_model(strategy, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HVDX_STRATEGY", strategy)
    monkeypatch.chdir(tmp_path)
    x, y = models.data()
    names = {"x": x, "y": y}
    exec(loop_of_the_guide(), names)
    models.assert_identical(names["model"], optimizer=False)
    out, said = capfd.readouterr()
    assert "of their own" not in said
    losses = [float(line.split()[1]) for line in out.splitlines()]
    assert len(losses) == (3 if hvdx.rank() == 0 else 0)
    assert losses == sorted(losses, reverse=True)
    assert (tmp_path / "model.keras").exists() == (hvdx.rank() == 0)


def take_steps(model, optimizer, count=2):
    x, _ = models.data(models.BATCH)
    for _ in range(count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x + hvdx.rank(), training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[2]])
def test_weights_are_saved_after_a_flush_only(strategy, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = models.network(keras.layers.BatchNormalization, seed=hvdx.rank())
    optimizer = hvd.prepare(model, keras.optimizers.Adam(), strategy)
    models.assert_identical(model, optimizer=False)
    model.save(tmp_path / f"{hvdx.rank()}.keras")
    take_steps(model, optimizer)
    for save in (
        lambda: model.save(tmp_path / "m.keras"),
        lambda: keras.saving.save_model(model, tmp_path / "m.keras"),
    ):
        with pytest.raises(ConfigError, match=r"2 steps after the last flush of optimizer adam\w*\. Do: hvdx"):
            save()
    loops._tell_unflushed()
    said = f"the script ended 2 steps after the last flush of optimizer {optimizer.name}, with other weights on"
    assert (said in capfd.readouterr().err) == (hvdx.rank() == 0 and strategy != "all_reduce")
    hvd.flush(optimizer)
    loops._tell_unflushed()
    assert "the script ended" not in capfd.readouterr().err
    models.assert_identical(model, optimizer=False)  # the statistics of the batches too
    model.save(tmp_path / f"{hvdx.rank()}.keras")
    take_steps(model, optimizer)
    model.compile(loss="mse")
    x, _ = models.data(8)
    value = hvd.evaluate(model, (x, np.zeros((8, models.CLASSES), "float32")))["loss"]  # flushes
    model.save(tmp_path / f"{hvdx.rank()}.keras")
    assert value == hvd.broadcast_object(value, 0)


def test_fit_of_a_prepared_optimizer_flushes(tmp_path):
    model = models.network()
    models.compiled(model, hvd.prepare(model, keras.optimizers.SGD(0.1), STRATEGIES[2]))
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "m.weights.h5", save_weights_only=True, save_freq=3)
    models.fit(model, [hvd.Distribute(STRATEGIES[2]), saver], epochs=1)
    model.save(tmp_path / f"{hvdx.rank()}.keras")


def test_state_of_rank_0_is_that_of_all():
    model = models.network()
    optimizer = keras.optimizers.Adam()
    if hvdx.rank() == 0:
        optimizer.build(model.trainable_variables)
        optimizer.learning_rate = 0.5
    hvd.prepare(model, optimizer)
    assert float(optimizer.learning_rate) == 0.5


def test_model_without_weights_is_refused():
    with pytest.raises(ConfigError, match="prepare: expected a built model"):
        hvd.prepare(keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD())


@pytest.mark.sizes(1, 2, 4)
def test_combine_covers_all_ranks():
    rank, size = hvdx.rank(), hvdx.size()
    mean, auc = keras.metrics.Mean(), keras.metrics.AUC()
    mean.update_state(np.arange(rank + 1.0))
    labels, scores = np.random.default_rng(3).integers(0, 2, 8 * size), np.random.default_rng(4).random(8 * size)
    auc.update_state(labels[rank::size], scores[rank::size])
    whole = keras.metrics.AUC()
    whole.update_state(labels, scores)
    everything = np.concatenate([np.arange(r + 1.0) for r in range(size)])
    for _ in range(2):  # the metrics keep the samples of this rank
        got = hvd.combine({"mean": mean, "auc": auc, "rank": rank, "more": [tf.constant([1.0, rank])]})
        assert got["mean"] == pytest.approx(everything.mean())
        assert got["auc"] == pytest.approx(float(whole.result()))
        assert got["rank"] == (size - 1) / 2
        np.testing.assert_allclose(got["more"][0], [1, (size - 1) / 2])
    assert float(mean.result()) == pytest.approx(rank / 2)


def test_combine_refuses_what_has_no_mean():
    with pytest.raises(ConfigError, match="combine: expected a metric of Keras, a number or an array"):
        hvd.combine("text")
    with pytest.raises(ReplicaError, match=r"combine: expected one shape on all ranks, got \[\(1,\), \(2,\)\]"):
        hvd.combine(np.ones(1 + hvdx.rank()))
    assert world.start().all_gather_object(0, "end") == [0, 0]


@pytest.mark.graph(every=True)
def test_error_in_a_graph_is_the_message_alone():
    """Without the lines of AutoGraph."""

    @tf.function
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), strategy="threshold") as tape:
            return tape.gradient(x, x)

    with pytest.raises(ConfigError, match=r"^DistributedGradientTape: expected a strategy that combines gradients in"):
        step(tf.constant(1.0))
