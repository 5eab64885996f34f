"""Recalibration of batch normalisation: statistics equal those computed by hand, and nothing else changes."""

import contextlib
import shutil

import keras
import numpy as np
import pytest
from keras import layers

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.averaging.recalibrate import read_inputs, recalibrate, recalibrate_archive, shuffled
from hvdx.errors import AverageError
from tests.averaging.keras_models import MODELS, OwnClass, assert_same, data_for, listing, mlp, trained


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Function that returns two archives of a kind of model, trained separately."""
    folder, made = tmp_path_factory.mktemp("archives"), {}

    def save(kind):
        if kind not in made:
            made[kind] = [folder / f"{kind}{i}.keras" for i in range(2)]
            for i, path in enumerate(made[kind]):
                trained(kind, i).save(path)
        return made[kind]

    return save


def write(path, inputs):
    """Write inputs for a model to a file; return its path."""
    if isinstance(inputs, list):
        np.savez(path, left=inputs[0], right=inputs[1])
    else:
        np.savez(path, x=inputs)
    return path


def tensors(path):
    """Return all tensors of an archive."""
    network = open_network(path)
    content = {name: tensor.array() for name, tensor in network.tensors.items()}
    network.close()
    return content


def input_of_norm(model, x):
    """Return the input of the batch normalisation of `mlp`."""
    return np.asarray(model.layers[0](x), np.float64)


@pytest.mark.parametrize("batch_size", [256, 24, 10, 7])
def test_statistics_are_means_over_batches(batch_size):
    model, x = trained("mlp", 0), data_for("mlp", 5)
    recalibrate(model, x, batch_size)
    count = -(-len(x) // batch_size)
    edges = [len(x) * i // count for i in range(1, count)]
    pieces = np.split(input_of_norm(model, x)[shuffled(len(x))], edges)
    norm = model.layers[1]
    np.testing.assert_allclose(norm.moving_mean, np.mean([p.mean(0) for p in pieces], 0), rtol=1e-5, atol=1e-6)
    variance = np.mean([p.var(0, ddof=1) for p in pieces], 0)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-5, atol=1e-6)
    assert norm.momentum == 0.99


def test_second_layer_has_statistics_of_normalised_values():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), *(layers.BatchNormalization() for _ in range(2))])
    x = np.random.default_rng(0).normal(3, 5, (64, 4)).astype(np.float32)
    recalibrate(model, x)
    np.testing.assert_allclose(model.layers[0].moving_mean, x.mean(0), rtol=1e-4)
    np.testing.assert_allclose(model.layers[0].moving_variance, x.var(0, ddof=1), rtol=1e-4)
    np.testing.assert_allclose(model.layers[1].moving_mean, np.zeros(4), atol=1e-5)
    np.testing.assert_allclose(model.layers[1].moving_variance, np.full(4, 64 / 63), rtol=1e-3)


def test_order_of_the_data_does_not_matter():
    """Batches of one class each would have about a hundredth of the variance of the data."""
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization()])
    x = np.random.default_rng(0).normal(0, 1, (400, 4)) + np.repeat([0, 20], 200)[:, None]
    recalibrate(model, x.astype(np.float32), 40)
    np.testing.assert_allclose(model.layers[0].moving_variance, x.var(0, ddof=1), rtol=0.05)


def test_variance_of_images_counts_every_pixel():
    model = keras.Sequential([keras.Input((2, 2, 3)), layers.BatchNormalization()])
    x = np.random.default_rng(0).normal(0, 1, (2, 2, 2, 3)).astype(np.float32)
    recalibrate(model, x)
    np.testing.assert_allclose(model.layers[0].moving_variance, x.reshape(8, 3).var(0, ddof=1), rtol=1e-4)


def test_masked_values_do_not_count():
    model = keras.Sequential([keras.Input((4, 3)), layers.Masking(), layers.BatchNormalization()])
    x = np.random.default_rng(0).normal(5, 1, (2, 4, 3)).astype(np.float32)
    x[:, 2:] = 0
    recalibrate(model, x)
    np.testing.assert_allclose(model.layers[1].moving_variance, x[:, :2].reshape(4, 3).var(0, ddof=1), rtol=1e-3)


@pytest.mark.parametrize(
    ("x", "batch_size", "message"),
    [
        (np.ones((1, 4)), 256, "expected 2 examples or more, got 1"),
        (np.ones((4, 4)), 1, "batch_norm.*: expected 2 values or more of a channel in a batch, got 1"),
        (np.array([[1, 2, 3, np.nan]] * 4), 256, "batch_norm.*: expected finite means and variances, got NaN"),
        (np.array([[1, 2, 3, np.inf]] * 4), 256, "batch_norm.*: expected finite means and variances, got NaN"),
    ],
)
def test_data_without_a_variance_are_refused(x, batch_size, message):
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization()])
    with pytest.raises(AverageError, match=message):
        recalibrate(model, x.astype(np.float32), batch_size)


def test_layer_that_is_used_twice_has_statistics_of_both_uses():
    a = keras.Input((3,))
    norm = layers.BatchNormalization()
    model = keras.Model(a, layers.Concatenate()([norm(a), norm(a * 3.0)]))
    x = np.random.default_rng(0).normal(2, 1, (32, 3)).astype(np.float32)
    recalibrate(model, x)
    np.testing.assert_allclose(norm.moving_mean, x.mean(0) * 2, rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, x.var(0, ddof=1) * 5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "two_inputs", "own_class"])
def test_archive_changes_in_its_statistics_only(saved, tmp_path, kind):
    data, out = write(tmp_path / "data.npz", data_for(kind)), tmp_path / "mean.keras"
    average(saved(kind), tmp_path / "plain.keras")
    average(saved(kind), out, recalibrate=data)
    plain, new = tensors(tmp_path / "plain.keras"), tensors(out)
    assert list(plain) == list(new)
    changed = [name for name in plain if plain[name].tobytes() != new[name].tobytes()]
    assert len(changed) == 2
    assert len({name.rsplit("/", 1)[0] for name in changed}) == 1
    assert any(name.startswith("optimizer/") for name in plain)
    assert int(keras.saving.load_model(out).optimizer.iterations) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.npz", "mean.keras", "plain.keras"]
    model = keras.saving.load_model(tmp_path / "plain.keras")
    recalibrate(model, dict(np.load(data)) if kind == "two_inputs" else data_for(kind))
    x = data_for(kind, 3)
    np.testing.assert_allclose(keras.saving.load_model(out)(x), model(x), rtol=1e-5, atol=1e-6)


def test_no_warning_of_stale_statistics(saved, tmp_path, recwarn):
    data = write(tmp_path / "data.npz", data_for("mlp"))
    average(saved("mlp"), tmp_path / "mean.keras", recalibrate=data)
    assert not [w for w in recwarn if "batch normalisation" in str(w.message)]


def test_other_variables_that_change_in_training_are_restored():
    class Counting(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.count.assign_add(1.0)
            return x

    model = keras.Sequential([keras.Input((4,)), Counting(), layers.Dropout(0.5), layers.BatchNormalization()])
    before = [v.numpy().copy() for v in model.variables]
    recalibrate(model, data_for("mlp"), 5)
    moved = [v.path for v, b in zip(model.variables, before, strict=True) if v.numpy().tobytes() != b.tobytes()]
    assert [path.rsplit("/", 1)[1] for path in moved] == ["moving_mean", "moving_variance"]


@pytest.mark.parametrize("fails", [False, True])
def test_statistics_without_new_values_are_restored(fails):
    """A layer that the model holds and does not call; and all layers, if the pass ends early."""

    class Spare(layers.Layer):
        def __init__(self):
            super().__init__()
            self.spare = layers.BatchNormalization()
            self.spare.build((None, 4))
            self.spare.moving_mean.assign([3.0] * 4)

        def call(self, x, training=False):
            if fails and training:
                raise ValueError("no such image")
            return x

    used = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), used, Spare()])
    with contextlib.suppress(ValueError):
        recalibrate(model, data_for("mlp"))
    assert model.layers[1].spare.moving_mean.numpy().tolist() == [3.0] * 4
    assert model.layers[1].spare.moving_variance.numpy().tolist() == [1.0] * 4
    assert used.moving_mean.numpy().any() != fails
    assert used.moving_variance.numpy().any()


def test_frozen_layers_keep_their_statistics():
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.BatchNormalization()])
    model.layers[0].trainable = False
    recalibrate(model, data_for("mlp"))
    assert model.layers[0].moving_mean.numpy().tolist() == [0.0] * 4
    assert model.layers[1].moving_mean.numpy().any()
    model.layers[1].trainable = False
    with pytest.raises(AverageError, match="not frozen, found none"):
        recalibrate(model, data_for("mlp"))


def test_recalibration_restores_the_accuracy_of_an_average(tmp_path):
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 1, (3, 8))
    labels = rng.integers(0, 3, 600)
    x = (50 + 20 * (centres[labels] + 0.4 * rng.standard_normal((600, 8)))).astype(np.float32)
    keras.utils.set_random_seed(1)

    def network():
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.BatchNormalization(),
                layers.Dense(16, activation="relu"),
                layers.BatchNormalization(),
                layers.Dense(3, activation="softmax"),
            ]
        )

    start, paths = network(), []
    for i in range(2):
        model = network()
        model.set_weights(start.get_weights())
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
        # The models are trained on data in different units, so the mean of their statistics fits neither.
        model.fit(x[i::2] * (1 + 9 * i), labels[i::2], epochs=8, batch_size=50, verbose=0)
        paths.append(tmp_path / f"{i}.keras")
        model.save(paths[-1])
    np.savez(tmp_path / "data.npz", x_train=x, y_train=labels)
    with pytest.warns(UserWarning, match="batch normalisation"):
        average(paths, tmp_path / "stale.keras")
    average(paths, tmp_path / "fresh.keras", recalibrate=tmp_path / "data.npz")

    def accuracy(name):
        model = keras.saving.load_model(tmp_path / name)
        return float(np.mean(np.argmax(np.asarray(model(x)), 1) == labels))

    assert accuracy("fresh.keras") > 0.95
    assert accuracy("fresh.keras") > accuracy("stale.keras") + 0.05


def test_file_without_the_usual_ending(saved, tmp_path):
    path = shutil.copy(saved("mlp")[0], tmp_path / "partial")
    recalibrate_archive(tmp_path / "partial", write(tmp_path / "data.npz", data_for("mlp")))
    assert tensors(path).keys() == tensors(saved("mlp")[0]).keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.npz", "partial"]


def test_data_under_every_accepted_name(saved, tmp_path):
    x, results = data_for("mlp"), []
    inputs = keras.saving.load_model(saved("mlp")[0]).inputs[0].name
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "b.npz", x=x, y=np.zeros(3))
    np.savez(tmp_path / "c.npz", x_train=x, x_test=x[:3])
    np.savez_compressed(tmp_path / "d.npz", anything=x)
    np.savez(tmp_path / "e.npz", **{inputs: x, "other": x[:3]})
    for name in ("a.npy", "b.npz", "c.npz", "d.npz", "e.npz"):
        average(saved("mlp"), tmp_path / "mean.keras", recalibrate=tmp_path / name, force=True)
        results.append(tensors(tmp_path / "mean.keras"))
    for result in results[1:]:
        for name in result:
            assert_same(result[name], results[0][name], name)


X = np.zeros((5, 4), np.float32)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("mlp", {"a": X, "b": X}, r"expected an array called x, x_train or \S+, got a, b\. Name it x"),
        ("mlp", {"x": X[:, :3]}, r"x: expected the shape \['n', 4\], which the model takes, got \[5, 3\]"),
        ("mlp", {"x": X[:, :, None]}, r"x: expected the shape \['n', 4\]"),
        ("mlp", {"x": X[:0]}, r"x: expected examples, got the shape \[0, 4\]"),
        ("mlp", {"x": np.float32(3)}, r"x: expected examples, got the shape \[\]"),
        ("mlp", {}, "expected one array or more, found none"),
        ("two_inputs", {"left": X}, r"right: is missing; expected one array per input \(left, right\), got left"),
        ("two_inputs", {"left": X, "right": X[:4]}, "expected the same number of examples for each input, got"),
        ("two_inputs", {"left": X, "right": X[:, :2]}, r"right: expected the shape \['n', 4\]"),
        ("own_class", {"x": X[:, :2]}, "the model does not run on it"),
        ("own_class", {"x": np.array(["a"] * 5)}, "the model does not run on it"),
        ("mlp", {"x": np.array([{}] * 5)}, "expected a .npz or .npy file of numbers"),
    ],
)
def test_data_that_do_not_fit_are_refused(saved, tmp_path, kind, content, message):
    np.savez(tmp_path / "data.npz", **content)
    before = listing(tmp_path)
    with pytest.raises(AverageError, match=rf"data\.npz: {message}"):
        average(saved(kind), tmp_path / "mean.keras", recalibrate=tmp_path / "data.npz")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x93NUMPY\x01\x00"])
def test_damaged_data_file_is_refused(tmp_path, content):
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(AverageError, match=r"data\.npz: expected a \.npz or \.npy file"):
        read_inputs(tmp_path / "data.npz")
    with pytest.raises(AverageError, match=r"none\.npz: there is no such file"):
        read_inputs(tmp_path / "none.npz")


def test_model_without_batch_normalisation_is_refused(tmp_path):
    for i in range(2):
        keras.Sequential([keras.Input((4,)), layers.Dense(2)]).save(tmp_path / f"{i}.keras")
    write(tmp_path / "data.npz", X)
    with pytest.raises(AverageError, match="expected a model with batch normalisation"):
        average([tmp_path / "0.keras", tmp_path / "1.keras"], tmp_path / "m.keras", recalibrate=tmp_path / "data.npz")
    assert not (tmp_path / "m.keras").exists()


def test_class_that_is_not_registered_is_refused(tmp_path):
    @keras.saving.register_keras_serializable("hvdx-tests")
    class Unknown(OwnClass):
        pass

    for i in range(2):
        model = Unknown()
        model(X)
        model.save(tmp_path / f"{i}.keras")
    keras.saving.get_custom_objects().pop("hvdx-tests>Unknown")
    write(tmp_path / "data.npz", X)
    with pytest.raises(
        AverageError, match=r"recalibrate: expected a model that Keras can load, got .*Register custom classes"
    ):
        average([tmp_path / "0.keras", tmp_path / "1.keras"], tmp_path / "m.keras", recalibrate=tmp_path / "data.npz")
    assert not (tmp_path / "m.keras").exists()


def test_models_of_the_other_tests_have_the_expected_kinds():
    assert set(MODELS) >= {"mlp", "cnn", "two_inputs", "own_class"}
    assert mlp().layers[1].__class__ is layers.BatchNormalization
