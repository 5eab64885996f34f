"""Pipelines: orders that differ between processes, sources and seeds."""

# Tests: hvdx/keras/fit/agreement/shares.py

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hvdx.errors import ConfigError
from hvdx.keras.fit.agreement import pipeline, shares


@pytest.fixture(autouse=True)
def unseeded(monkeypatch):
    """Forget the seed that an earlier test has set for the whole process."""
    monkeypatch.setattr(context.context(), "_seed", None)


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (lambda d: d.shuffle(9), "shuffle"),
        (lambda d: d.shuffle(9).map(lambda i: i + 1).cache().batch(2).prefetch(1), "shuffle"),
        (lambda d: d.batch(3).flat_map(lambda b: tf.data.Dataset.from_tensor_slices(b).shuffle(3)), "shuffle"),
        (lambda d: tf.data.Dataset.zip((d, d.shuffle(9))), "shuffle"),
        (lambda d: tf.data.Dataset.list_files(__file__), "shuffle"),
        (lambda d: tf.data.Dataset.sample_from_datasets([d, d]), "sample_from_datasets"),
        (lambda d: d.map(lambda i: i, num_parallel_calls=2, deterministic=False), "deterministic"),
        (lambda d: d.map(lambda i: i, num_parallel_calls=2).with_options(_free()), "deterministic"),
        (lambda d: d.shuffle(9, seed=1), None),
        (lambda d: tf.data.Dataset.list_files(__file__, shuffle=False), None),
        (lambda d: tf.data.Dataset.list_files(__file__, seed=4), None),
        (lambda d: d.map(lambda i: i).batch(2).with_options(_free()), None),
        (lambda d: d.map(lambda i: i + tf.random.uniform((), 0, 9, tf.int64)), None),
    ],
)
def test_order_that_differs_between_processes_is_found(made, cause):
    dataset = made(tf.data.Dataset.range(9))
    found = pipeline.cause_of_other_order(dataset)
    assert found is None if cause is None else cause in found
    if cause is None:
        shares.check_order(dataset)
    else:
        with pytest.raises(ConfigError, match=cause):
            shares.check_order(dataset)


def _free():
    options = tf.data.Options()
    options.deterministic = False
    return options


def test_global_seed_makes_the_order_the_same():
    tf.random.set_seed(4)
    assert pipeline.cause_of_other_order(tf.data.Dataset.range(9).shuffle(9)) is None


def test_sources_of_pipelines_are_compared():
    def order(names, seed=1):
        return pipeline.order_of(tf.data.TextLineDataset(names).shuffle(9, seed=seed).batch(2))

    first = order(["/disk-1/a", "/disk-1/b"])
    assert pipeline.same_order(first, order(["/disk-2/a", "/disk-2/b"])) is None
    assert pipeline.same_order(first, order(["/disk-1/b", "/disk-1/a"])) == "sources"
    assert pipeline.same_order(first, order(["/disk-1/a", "/disk-1/b"], 2)) == "seeds"
    assert pipeline.same_order(first, pipeline.order_of(tf.data.Dataset.range(3))) == "sources"
