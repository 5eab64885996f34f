"""Averages of models in memory, compared with means of `get_weights`."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers

from hvdx.averaging import average_weights
from hvdx.errors import AverageError, ConfigError
from tests.averaging.keras_models import MODELS, assert_same, data_for, exact_mean, mlp, trained


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("weights", [None, [3, 1]])
def test_mean_of_models(kind, weights):
    models = [trained(kind, seed) for seed in range(2)]
    expected = [exact_mean(arrays, weights) for arrays in zip(*(m.get_weights() for m in models), strict=True)]
    means = average_weights(models, weights)
    for got, mean in zip(means, expected, strict=True):
        assert_same(got, mean)
    from_lists = average_weights([m.get_weights() for m in models], weights)
    for got, mean in zip(from_lists, expected, strict=True):
        assert_same(got, mean)
    models[0].set_weights(means)
    assert np.isfinite(np.asarray(models[0](data_for(kind)), np.float64)).all()


def test_models_with_dropout_of_different_seeds():
    def network(seed):
        keras.utils.set_random_seed(seed)
        x = inputs = keras.Input((4,))
        for layer in (layers.Dropout(0.1), layers.GaussianNoise(0.5), layers.RandomFlip(), layers.BatchNormalization()):
            x = layer(layers.Reshape((2, 2, 1))(x) if isinstance(layer, layers.RandomFlip) else x)
        return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))

    models = [network(0), network(1)]
    for got, *arrays in zip(average_weights(models), *(m.get_weights() for m in models), strict=True):
        assert_same(got, exact_mean(arrays))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_dtype_is_kept(dtype):
    arrays = [np.random.default_rng(i).standard_normal((3, 4)).astype(dtype) for i in range(3)]
    (got,) = average_weights([[a] for a in arrays])
    assert_same(got, exact_mean(arrays))


def test_arrays_of_any_shape_and_layout():
    base = np.arange(24.0).reshape(2, 3, 4)
    arrays = [np.float32(2.0), np.empty((0, 3)), base.transpose(2, 0, 1), base[:, ::-1, ::2], [1.0, 2.0]]
    for got, array in zip(average_weights([arrays, arrays]), arrays, strict=True):
        assert_same(got, np.ascontiguousarray(array).reshape(np.shape(array)))


def test_arguments_are_not_changed():
    arrays = [np.ones(3), np.zeros(3)]
    (got,) = average_weights([[a] for a in arrays])
    got[:] = 9
    assert arrays[0].tolist() == [1, 1, 1]
    assert arrays[1].tolist() == [0, 0, 0]
    (alone,) = average_weights([[arrays[0]]])
    alone[:] = 9
    assert arrays[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([np.ones((3, 2)), np.ones(2)], r"model 1: weight 0: expected the shape \[2, 3\], as in model 0, got \[3, 2\]"),
        ([np.ones((2, 3), np.float32), np.ones(2)], "model 1: weight 0: expected float64, as in model 0, got float32"),
        ([np.ones((2, 3))], "model 1: weight 1: is in model 0, and missing here"),
        ([np.ones((2, 3)), np.ones(2), np.ones(1)], "model 0: weight 2: is in model 1, and missing here"),
    ],
)
def test_different_lists_are_refused(other, message):
    with pytest.raises(AverageError, match=message):
        average_weights([[np.ones((2, 3)), np.ones(2)], other])


def test_models_that_compute_different_things_are_refused():
    with pytest.raises(
        AverageError, match=r"model 1: config\.layers\[1\]\.config\.activation: expected 'relu'.*'tanh'"
    ):
        average_weights([mlp("relu"), mlp("tanh")])


def test_integers_have_to_agree():
    (got,) = average_weights([[np.array([1, 2])]] * 2)
    assert_same(got, np.array([1, 2]))
    with pytest.raises(AverageError, match=r"model 1: weight 0: expected 2, as in model 0, got 3 at \[1\]"):
        average_weights([[np.array([1, 2])], [np.array([1, 3])]])


def test_wrong_numbers_of_models_and_weights():
    with pytest.raises(AverageError, match="expected one model or more, got none"):
        average_weights([])
    with pytest.raises(ConfigError, match="weights: expected 2 numbers, one per network, got 1"):
        average_weights([[np.ones(1)]] * 2, [1.0])
