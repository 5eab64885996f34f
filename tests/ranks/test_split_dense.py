"""`SplitDense`: the same training as `Dense`, with a part of the weights on each rank."""

# Tests: hvdx/keras/adapters/optimizer.py, hvdx/keras/distribute.py, hvdx/keras/layers/replacements.py
# Tests: hvdx/keras/layers/split_layer.py, hvdx/keras/weight_parts.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx import comm as world
from hvdx.errors import ConfigError
from hvdx.keras import Distribute
from hvdx.keras.layers import SplitDense
from tests.ranks import models
from tests.ranks.split import assert_close, network, split, splits, whole


def one(units):
    return [SplitDense(units, activation="relu")]


def pair(units):
    return [
        SplitDense(8, activation="relu", gather_output=False),
        SplitDense(6, activation="tanh", input_is_split=True),
    ]


def row(units):
    return [SplitDense(units), SplitDense(4, use_bias=False), SplitDense(5, activation="softmax")]


NETWORKS = {"one": one, "pair": pair, "row": row}


def trained(ranks, make_dense, optimizer, strategy="all_reduce:engine=mpi", epochs=4, **options):
    """Train; return the losses of all steps and the whole weights."""
    losses = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])

    with split(ranks):
        model = models.compiled(network(make_dense), optimizer(), **options)
        models.fit(model, [Distribute(strategy), Record()], epochs=epochs)
        return losses, whole(model)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "adamw_ema": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}
CASES = [("one", o) for o in OPTIMIZERS] + [("pair", "momentum"), ("row", "adam")]


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(("layers", "optimizer"), CASES)
def test_training_is_that_of_whole_layers(layers, optimizer):
    # A traced step takes a fraction of the time: 100 steps then.
    epochs = 8 // hvdx.size() if tf.config.functions_run_eagerly() else 25
    losses, weights = trained(1, NETWORKS[layers], OPTIMIZERS[optimizer], epochs=epochs)
    for ranks in splits():
        got, found = trained(ranks, NETWORKS[layers], OPTIMIZERS[optimizer], epochs=epochs)
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        assert_close(found, weights, 1e-5)


@pytest.mark.sizes(2)
def test_rank_holds_its_part_of_weights_and_momenta():
    ranks = hvdx.size()
    with split(ranks):
        model = models.compiled(network(lambda units: [SplitDense(8)]), keras.optimizers.Adam())
    layer = model.layers[1]
    assert layer.kernel.shape == (5, 8 // ranks)
    assert layer.bias.shape == (8 // ranks,)
    assert [tuple(v.shape) for v in model.optimizer.variables].count((5, 8 // ranks)) == 2
    assert layer.name.startswith("dense_")


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("dims", [2, 3])
def test_gradients_are_finite_differences_of_the_mean_loss(dims):
    """Perturb single weights of the whole model, on all ranks, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        size, rank = hvdx.size(), hvdx.rank()
        with split(size) as mesh:
            keras.utils.set_random_seed(0)
            make = [
                keras.layers.Dense(3, activation="tanh"),
                SplitDense(5, activation="tanh"),
                SplitDense(4, gather_output=False, activation="tanh"),
                SplitDense(3, input_is_split=True),
            ]
            model = keras.Sequential([keras.Input((2, 4)[: dims - 2] + (4,)), *make])
            # Batches of different sizes: 1, 2, ...
            x = tf.constant(np.random.default_rng(rank).normal(size=(1 + rank, *model.input_shape[1:])))

            def loss():
                return tf.reduce_mean(tf.sin(3 * model(x)))

            with tf.GradientTape() as tape:
                mine = loss()
            gradients = tape.gradient(mine, [v.value for v in model.trainable_weights])
            joined, compared = world.start(), []
            for variable, gradient in zip(model.trainable_weights, gradients, strict=True):
                part = getattr(variable, "_hvdx_part", None)
                for holder in range(size if part is not None else 1):
                    held = part is None or holder == mesh.position
                    step = np.zeros(variable.shape)
                    step.flat[min(1, step.size - 1)] = 1e-5
                    sums = []
                    for sign in (1, -1):
                        before = variable.numpy()
                        variable.assign(before + sign * step * held)
                        sums.append(float(joined.all_reduce_sum(np.array([float(loss())]), "loss")[0]) / size)
                        variable.assign(before)
                    expected = (sums[0] - sums[1]) / 2e-5
                    got = gradient.numpy().flat[min(1, step.size - 1)]
                    if part is None:
                        # The strategy averages the gradients of shared weights.
                        got = float(joined.all_reduce_sum(np.array([got]), "gradient")[0]) / size
                    if held:
                        compared.append((variable.path, got, expected))
            # Ranks that fail within the loop would leave the others waiting.
            for path, got, expected in compared:
                assert got == pytest.approx(expected, rel=1e-5, abs=1e-8), path
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
def test_loss_scale_and_validation_with_different_numbers_of_batches():
    """An overflow on one rank skips the step on all; a rank with fewer batches takes part in those of its group."""
    ranks, rank = hvdx.size(), hvdx.rank()
    keras.config.set_dtype_policy("mixed_float16")
    with split(ranks):
        model = models.compiled(network(one), keras.optimizers.SGD(0.05), metrics=["accuracy"])
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        x, y = models.data()
        # The number of validation samples, and of batches, differs between ranks.
        mine = slice(0, 3 + 5 * rank)
        history = models.fit(
            model, [Distribute("all_reduce:engine=mpi")], validation_data=(x[mine], y[mine]), validation_batch_size=2
        ).history
        skipped = int(model.optimizer.inner_optimizer.iterations)
        assert world.start().all_gather_object(skipped, "steps") == [skipped] * ranks
        # The mean over all samples of all ranks.
        hits, count = 0.0, 0
        for other in range(ranks):
            some = slice(0, 3 + 5 * other)
            hits += float(np.sum(np.argmax(model.predict_on_batch(x[some]), axis=1) == y[some]))
            count += 3 + 5 * other
    assert history["val_accuracy"][-1] == pytest.approx(hits / count, abs=1e-6)
    assert np.isfinite(history["val_loss"]).all()


@pytest.mark.sizes(2)
def test_regularizers_and_constraints():
    def layers(units):
        return [
            SplitDense(
                units,
                kernel_regularizer=keras.regularizers.L2(0.1),
                bias_regularizer="l1",
                kernel_constraint=keras.constraints.MaxNorm(0.5, axis=0),
                bias_constraint="non_neg",
            )
        ]

    losses, weights = trained(1, layers, OPTIMIZERS["momentum"], epochs=2)
    got, found = trained(hvdx.size(), layers, OPTIMIZERS["momentum"], epochs=2)
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_close(found, weights, 1e-5)


@pytest.mark.sizes(2)
def test_layer_refuses_arguments_that_need_whole_weights(tmp_path):
    wrong = [
        (SplitDense(1), "at least 2 units"),
        (SplitDense(3, gather_output=False), "multiple of 2 units, got 3. Give 4"),
        (SplitDense(4, gather_output=False, input_is_split=True), "got both"),
        (SplitDense(4, kernel_constraint=keras.constraints.MaxNorm(1, axis=1)), "each column"),
        (SplitDense(4, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()), "L1, L2 or L1L2"),
        (SplitDense(4, lora_rank=2), "LoRA"),
        (SplitDense(4, kernel_initializer="orthogonal", draw="shard"), "independent values"),
        (SplitDense(4, draw="part"), "'whole' or 'shard'"),
    ]
    with split(2):
        for layer, said in wrong:
            with pytest.raises(ConfigError, match=said):
                layer.build((None, 6))
        with pytest.raises(ConfigError, match="gather_output=False"):
            SplitDense(4, input_is_split=True)(np.ones((2, 3), "float32"))
        model = models.compiled(network(one), keras.optimizers.Lamb())
        with pytest.raises(ConfigError, match="Lamb: it needs norms"):
            models.fit(model, [Distribute("all_reduce:engine=mpi")])
        model = models.compiled(network(one), keras.optimizers.SGD())
        with pytest.raises(ConfigError, match="measures whole gradients"):
            models.fit(model, [Distribute("auto")])


@pytest.mark.sizes(2)
def test_parts_drawn_alone_have_the_variance_of_the_whole():
    with split(hvdx.size()) as mesh:
        keras.utils.set_random_seed(1)
        layer = SplitDense(4096, draw="shard")
        layer.build((None, 64))
        parts = mesh.group.all_gather_object(layer.kernel.numpy(), "parts")
    whole = np.concatenate(parts, axis=1)
    expected = keras.initializers.GlorotUniform(seed=1)((64, 4096))
    assert whole.std() == pytest.approx(float(np.std(expected)), rel=0.02)
    assert np.abs(whole).max() <= np.abs(expected).max() * 1.01
    assert not np.array_equal(parts[0], parts[-1])
