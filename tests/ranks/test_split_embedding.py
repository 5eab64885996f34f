"""`SplitEmbedding`: the same training as `Embedding`, with a part of the rows on each rank."""

# Tests: hvdx/keras/layers/replacements.py, hvdx/keras/layers/split_layer.py, hvdx/keras/gathering.py

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx import comm as world
from hvdx.errors import ConfigError
from hvdx.keras import Distribute, gather
from hvdx.keras.layers import (
    SplitDense,
    SplitEmbedding,
    SplitSparseCategoricalAccuracy,
    SplitSparseCategoricalCrossentropy,
)
from hvdx.keras.weight_parts import part_of
from tests.ranks.split import assert_close, split, splits, whole

# Rows of the table, not a multiple of the ranks; ids of a sample; classes.
ROWS, LENGTH, CLASSES = 11, 3, 8
STEPS = 3


def samples(rank):
    """Return ids and labels of a rank; the batches of the ranks differ in size, and ids occur often."""
    random = np.random.default_rng(rank)
    ids = random.integers(0, ROWS, size=(STEPS * (2 + rank), LENGTH))
    ids[:, 1] = ids[:, 0]
    ids[::2, 2] = 4
    return ids, random.integers(0, CLASSES, size=len(ids))


def network(make_embedding, dense, **last):
    keras.utils.set_random_seed(0)
    body = [make_embedding(ROWS, 4), keras.layers.Flatten(), keras.layers.Dense(5, activation="tanh")]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *body, dense(CLASSES, **last)])


def whole_network(make_embedding=keras.layers.Embedding):
    model = network(make_embedding, keras.layers.Dense)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, keras.metrics.SparseCategoricalAccuracy()


def split_network(make_embedding=SplitEmbedding):
    model = network(make_embedding, SplitDense, gather_output=False)
    return model, SplitSparseCategoricalCrossentropy(), SplitSparseCategoricalAccuracy()


def trained(model, loss, metric, optimizer, **options):
    """Train on this rank's samples; return the losses and accuracies of all steps, and of the validation."""
    seen = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append([logs["loss"], logs["sparse_categorical_accuracy"]])

    model.compile(optimizer, loss, metrics=[metric])
    x, y = samples(hvdx.rank())
    callbacks = [Distribute("all_reduce:engine=mpi"), Record()]
    options = {"epochs": 4 if hvdx.size() == 2 else 2, "class_weight": {2: 3.0}, **options}
    # Each rank has another number of batches for validation.
    options["validation_data"] = (x[: 1 + 4 * hvdx.rank()], y[: 1 + 4 * hvdx.rank()])
    found = model.fit(x, y, batch_size=2 + hvdx.rank(), shuffle=False, verbose=0, callbacks=callbacks, **options)
    return [*seen, *zip(found.history["val_loss"], found.history["val_sparse_categorical_accuracy"], strict=True)]


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
}


@pytest.mark.graph
@pytest.mark.sizes(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_a_whole_table_and_softmax(optimizer):
    with split(1):
        model, *options = whole_network()
        seen = trained(model, *options, OPTIMIZERS[optimizer]())
        weights = whole(model)
    for ranks in splits():
        with split(ranks) as mesh:
            model, *options = split_network()
            got = trained(model, *options, OPTIMIZERS[optimizer]())
            part = model.layers[0].embeddings.shape[0]
            assert part == ROWS * (mesh.position + 1) // ranks - ROWS * mesh.position // ranks
            np.testing.assert_allclose(got, seen, rtol=1e-5)
            assert_close(whole(model), weights, 1e-5)
            plain = gather(model)
            assert type(plain.loss) is keras.losses.SparseCategoricalCrossentropy
            x, y = samples(9)
            assert plain.evaluate(x, y, verbose=0)[0] > 0


@pytest.mark.sizes(4)
def test_training_on_four_ranks():
    test_training_is_that_of_a_whole_table_and_softmax("adam")


@pytest.mark.sizes(2)
def test_regularizers_and_constraints():
    def embedding(kind):
        return lambda *args: kind(
            *args,
            embeddings_initializer="glorot_uniform",
            embeddings_regularizer=keras.regularizers.L1L2(0.1, 0.1),
            embeddings_constraint=keras.constraints.MaxNorm(0.5, axis=1),
        )

    optimizer = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    with split(1):
        model, *options = whole_network(embedding(keras.layers.Embedding))
        seen, weights = trained(model, *options, optimizer(), epochs=2), whole(model)
    with split(hvdx.size()):
        model, *options = split_network(embedding(SplitEmbedding))
        np.testing.assert_allclose(trained(model, *options, optimizer(), epochs=2), seen, rtol=1e-5)
        assert_close(whole(model), weights, 1e-5)


@pytest.mark.sizes(2)
def test_gradients_are_finite_differences_of_the_mean_loss():
    """Perturb single weights of the whole model, on all ranks, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        size, rank, joined = hvdx.size(), hvdx.rank(), world.start()
        with split(size) as mesh:
            model, loss_of, _ = split_network()
            x, y = samples(rank)
            weights = tf.constant(np.random.default_rng(rank).uniform(0.5, 2, len(y)))

            def loss():
                return loss_of(y, model(x), weights)

            with tf.GradientTape() as tape:
                mine = loss()
            gradients = tape.gradient(mine, [v.value for v in model.trainable_weights])
            assert isinstance(gradients[0], tf.IndexedSlices)
            # Compared at the end, because the ranks perturb weights in turn.
            found, expected = [], []
            for variable, gradient in zip(model.trainable_weights, gradients, strict=True):
                part, got = part_of(variable), tf.convert_to_tensor(gradient).numpy().flat[1]
                if part is None:
                    # The strategy averages the gradients of shared weights.
                    got = float(joined.all_reduce_sum(np.array([got]), "gradient")[0]) / size
                for holder in range(size if part is not None else 1):
                    step = np.zeros(variable.shape)
                    step.flat[1] = 1e-5 if part is None or holder == mesh.position else 0
                    sums, before = [], variable.numpy()
                    for sign in (1, -1):
                        variable.assign(before + sign * step)
                        sums.append(float(joined.all_reduce_sum(np.array([float(loss())]), "loss")[0]) / size)
                    variable.assign(before)
                    if step.any():
                        found.append(got)
                        expected.append((sums[0] - sums[1]) / 2e-5)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.sizes(2, 4)
def test_outputs_are_those_of_a_whole_table():
    """Ids of any rank, with a mask, in half precision; one rank has none."""
    table = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    arguments = {"mask_zero": True, "weights": table, "dtype": "mixed_float16"}
    plain, rank = keras.layers.Embedding(ROWS, 4, **arguments), hvdx.rank()
    with split(hvdx.size()):
        layer = SplitEmbedding(ROWS, 4, **arguments)
        assert layer.name.startswith("embedding")
        for rows, *inner in ((5,), (0, 3), (2, 1, 3)):
            shape = (0 if rank == 1 else rows, *inner)
            ids = tf.constant(np.random.default_rng(rank).integers(-2, ROWS, size=shape))
            got, expected = layer(ids), plain(ids)
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got.numpy(), expected.numpy())
            np.testing.assert_array_equal(got._keras_mask.numpy(), expected._keras_mask.numpy())
        ragged = tf.RaggedTensor.from_row_lengths([3, 0, 3, 10], [1, 0, 3])
        np.testing.assert_array_equal(layer(ragged).flat_values.numpy(), plain(ragged).flat_values.numpy())


@pytest.mark.sizes(2)
def test_layer_refuses_what_does_not_fit_a_split_table():
    wrong = [
        ({"input_dim": 1}, "at least 2 rows .*Use keras.layers.Embedding"),
        ({"lora_rank": 2}, "LoRA"),
        ({"embeddings_constraint": keras.constraints.MaxNorm(1, axis=0)}, r"each row \(axis=1\)"),
        ({"embeddings_regularizer": keras.regularizers.OrthogonalRegularizer()}, "L1, L2 or L1L2"),
        ({"embeddings_initializer": "orthogonal", "draw": "shard"}, "independent values"),
    ]
    with split(2):
        for arguments, said in wrong:
            with pytest.raises(ConfigError, match=said):
                SplitEmbedding(**{"input_dim": ROWS, "output_dim": 2, **arguments}).build()
        layer = SplitEmbedding(ROWS, 2)
        layer.build()
        for arguments in ((), (2,)):
            with pytest.raises(ConfigError, match=r"hvdx\.keras\.gather|LoRA"):
                layer.enable_lora(*arguments) if arguments else layer.save_own_variables({})
        with pytest.raises(ConfigError, match="Make it dense"):
            layer.call(tf.sparse.from_dense([[1, 2]]))
        # All ranks are told of the ids of one.
        with pytest.raises(ConfigError, match=r"ids from 0 to 10, got 11 on rank 1 .*input_dim"):
            layer(np.array([3, 11 if hvdx.rank() else 5]))
        assert layer(np.array([3])).shape == (1, 2)


@pytest.mark.sizes(2)
def test_parts_drawn_alone_have_the_variance_of_the_whole():
    with split(hvdx.size()) as mesh:
        keras.utils.set_random_seed(1)
        layer = SplitEmbedding(4096, 32, embeddings_initializer="glorot_uniform", draw="shard")
        layer.build()
        parts = mesh.group.all_gather_object(layer.embeddings.numpy(), "parts")
    expected = keras.initializers.GlorotUniform(seed=1)((4096, 32))
    assert np.concatenate(parts).std() == pytest.approx(float(np.std(expected)), rel=0.02)
    assert not np.array_equal(parts[0], parts[-1])


@pytest.mark.sizes(2)
def test_whole_weights_are_cut_when_they_are_loaded(tmp_path):
    with split(1):
        plain = whole_network()[0]
    path = tmp_path / "whole.weights.h5"
    plain.save_weights(path)
    table = plain.get_weights()[0]
    with split(2) as mesh:
        model = split_network()[0]
        model.layers[0].embeddings.assign(tf.zeros_like(model.layers[0].embeddings))
        model.load_weights(path)
        expected = part_of(model.layers[0].embeddings).cut(table)
        np.testing.assert_array_equal(model.layers[0].embeddings.numpy(), expected)
        assert len(expected) == 5 + mesh.position
