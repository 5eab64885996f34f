"""Metrics over all ranks, beside one process with the samples of all of them."""

# Tests: hvdx/keras/fit/metrics.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd

# The public metrics by the labels that they take: 0 or 1, one of CLASSES hot, and the number of a class.
CLASSES = 3
METRICS = {
    "binary": {
        "AUC": {"num_thresholds": 20},
        "BinaryAccuracy": {},
        "BinaryCrossentropy": {},
        "BinaryIoU": {"threshold": 0.5},
        "FalseNegatives": {},
        "FalsePositives": {"thresholds": [0.3, 0.6]},
        "TrueNegatives": {},
        "TruePositives": {},
        "Hinge": {},
        "SquaredHinge": {},
        "IoU": {"num_classes": 2, "target_class_ids": [0]},
        "MeanIoU": {"num_classes": 2},
        "Precision": {},
        "Recall": {},
        "PrecisionAtRecall": {"recall": 0.5, "num_thresholds": 20},
        "RecallAtPrecision": {"precision": 0.5, "num_thresholds": 20},
        "SensitivityAtSpecificity": {"specificity": 0.5, "num_thresholds": 20},
        "SpecificityAtSensitivity": {"sensitivity": 0.5, "num_thresholds": 20},
        "MeanMetricWrapper": {"fn": lambda y, p: p[:, 0] * (1 + y[:, 0])},
    },
    "one-hot": {
        "Accuracy": {},
        "ConcordanceCorrelation": {},
        "CosineSimilarity": {},
        "KLDivergence": {},
        "LogCoshError": {},
        "MeanAbsoluteError": {},
        "MeanAbsolutePercentageError": {},
        "MeanSquaredError": {},
        "MeanSquaredLogarithmicError": {},
        "PearsonCorrelation": {},
        "Poisson": {},
        "RootMeanSquaredError": {},
        "AUC": {"num_thresholds": 20, "multi_label": True, "num_labels": CLASSES},
        "CategoricalAccuracy": {},
        "CategoricalCrossentropy": {},
        "CategoricalHinge": {},
        "F1Score": {"average": None},
        "FBetaScore": {"average": "weighted"},
        "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
        "OneHotMeanIoU": {"num_classes": CLASSES},
        "R2Score": {"class_aggregation": "variance_weighted_average"},
        "TopKCategoricalAccuracy": {"k": 2},
    },
    "number": {
        "SparseCategoricalAccuracy": {},
        "SparseCategoricalCrossentropy": {},
        "SparseTopKCategoricalAccuracy": {"k": 2},
    },
}


def samples(kind, count):
    """Return predictions, labels and weights of samples."""
    random = np.random.default_rng(3)
    x = random.uniform(0.05, 1, size=(count, 1 if kind == "binary" else CLASSES)).astype("float32")
    x /= x.sum(1, keepdims=True) if kind != "binary" else 1
    number = random.integers(CLASSES, size=count)
    labels = {"binary": (number > 0)[:, None], "one-hot": np.eye(CLASSES)[number], "number": number}[kind]
    return x, labels.astype("int64" if kind == "number" else "float32"), (1 + number).astype("float32")


def batches(arrays, own):
    """Return rank 0's 7 samples in batches of 3, or 12 in batches of 4 of another rank; or those of all ranks."""
    begin, end = (0, 7 + 12 * (hvdx.size() - 1)) if not own else (7 + 12 * (hvdx.rank() - 1), 7 + 12 * hvdx.rank())
    part = tf.nest.map_structure(lambda a: a[max(begin, 0) : end], arrays)
    return tf.data.Dataset.from_tensor_slices(part).batch(3 if own and hvdx.rank() == 0 else 4 if own else 5)


def assert_close(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(value), rtol=1e-5, atol=1e-7, err_msg=name)


class Identity(keras.layers.Layer):
    """Layer that returns its input times a weight of 1, and measures it."""

    def __init__(self):
        super().__init__()
        self.mean, self.sum = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="sum")
        self.one = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.mean.update_state(x)
        self.sum.update_state(x)
        return x * self.one


def model_of(width, **options):
    model = keras.Sequential([keras.Input((width,)), Identity()])
    model.compile(keras.optimizers.SGD(0.0), options.pop("loss", "mse"), **options)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", METRICS)
def test_every_metric_of_keras_covers_the_samples_of_all_ranks(kind):
    """Rank 0 has 7 samples in batches of 3, 3 and 1, the others 12 in batches of 4."""
    table = {name: options for name, options in METRICS[kind].items() if hasattr(keras.metrics, name)}
    width = 1 if kind == "binary" else CLASSES
    arrays = samples(kind, 7 + 12 * (hvdx.size() - 1))

    def make():
        measured = [getattr(keras.metrics, name)(name=name, **options) for name, options in table.items()]
        loss = "sparse_categorical_crossentropy" if kind == "number" else "mse"
        return model_of(width, loss=loss, weighted_metrics=measured)

    data = batches(arrays, True)
    found = make().fit(data, verbose=0, validation_data=data, callbacks=[hvd.Distribute()]).history
    expected = make().evaluate(batches(arrays, False), verbose=0, return_dict=True)
    every = {prefix + name: [value] for name, value in expected.items() for prefix in ("", "val_")}
    assert_close(found, every)


def test_the_table_has_every_metric_of_keras():
    public = {name for name in dir(keras.metrics) if isinstance(getattr(keras.metrics, name), type)}
    assert public - {name for table in METRICS.values() for name in table} == {"Mean", "Metric", "Sum"}


class Counter(keras.metrics.Metric):
    """Counts of samples, summed, of rank 0, and as a mean of the ranks."""

    def __init__(self, name, form):
        super().__init__(name=name)
        self.form = form
        self.count = self.add_variable((), "zeros")
        self.first = self.add_variable((), "ones", aggregation="only_first_replica")
        self.mean = self.add_variable((2,), "ones", aggregation="mean")

    def update_state(self, y, p, sample_weight=None):
        self.count.assign_add(tf.cast(tf.shape(y)[0], "float32"))
        self.first.assign_add(1.0)
        self.mean.assign_add([float(hvdx.rank()), 1.0])

    def result(self):
        return self.form(self)


class Kept(Counter):
    """Counts of a whole fit."""

    def reset_state(self):
        pass


def _counters():
    return [
        Counter("counts", lambda m: {"count": m.count + 0, "deeper": {"twice": 2 * m.count}}),
        Counter("array", lambda m: tf.stack([m.count + 0, m.first + 0])),
        Kept("kept", lambda m: {"all": m.count + 0, "first": m.first + 0, "average": m.mean[0], "steps": m.mean[1]}),
    ]


@pytest.mark.graph
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.sizes(2, 4)
def test_results_in_dictionaries_and_states_that_are_not_reset_are_summed_once():
    arrays = samples("binary", 7 + 12 * (hvdx.size() - 1))[:2]
    count, size = len(arrays[0]), hvdx.size()
    metrics = [*_counters(), keras.metrics.FalsePositives(name="fp")]
    model = model_of(1, metrics=metrics)
    data = batches(arrays, True)
    logs = model.fit(data, epochs=3, verbose=0, validation_data=data, callbacks=[hvd.Distribute()]).history
    for prefix in ("", "val_"):
        assert logs[f"{prefix}count"] == [count] * 3
        assert logs[f"{prefix}twice"] == [2 * count] * 3
        # A reset gives 0; before the first one, the variable holds what it was made with.
        np.testing.assert_array_equal(logs[f"{prefix}array"], [[count, 3 + (not prefix)], [count, 3], [count, 3]])
        # Of 3 steps on each rank in training, and as many in validation.
        passes = np.arange(1, 7)[prefix == "val_" :: 2]
        assert logs[f"{prefix}all"] == (passes * count).tolist()
        assert logs[f"{prefix}first"] == logs[f"{prefix}steps"] == (1 + 3 * passes).tolist()
        assert logs[f"{prefix}average"] == pytest.approx((1 + 3 * passes * (size - 1) / 2).tolist())
        assert logs[f"{prefix}fp"] == [logs["fp"][0]] * 3
    # Compiled again: Keras shows the counts only after the first step.
    model.compile("sgd", "mse", metrics=metrics)
    assert model.fit(data, verbose=0, callbacks=[hvd.Distribute()]).history["all"] == [7 * count]
    found = hvd.evaluate(model, arrays, 4)
    assert (found["all"], found["count"], found["fp"]) == (8 * count, count, logs["fp"][0])
    assert metrics[2].count.numpy() == 8 * count
