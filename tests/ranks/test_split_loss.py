"""`SplitSparseCategoricalCrossentropy` and its metric: those of whole logits, whose classes no rank holds whole."""

# Tests: hvdx/keras/layers/replacements.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras.layers import SplitSparseCategoricalAccuracy, SplitSparseCategoricalCrossentropy
from tests.ranks.split import split

# Not a multiple of the ranks.
CLASSES = 7


def batch(rank, shape, labels=(0, CLASSES)):
    """Return the logits, labels and sample weights of one rank's batch."""
    random = np.random.default_rng(rank)
    logits = (5 * random.normal(size=(*shape, CLASSES))).astype("float32")
    return logits, random.integers(*labels, size=shape), random.uniform(0.5, 2, size=shape).astype("float32")


CASES = {
    "rows": ([(2,), (3,), (1,), (4,)], {}),
    "one rank without rows": ([(2,), (0,), (1,), (0,)], {}),
    "sequences": ([(2, 3), (1, 3), (4, 3), (1, 3)], {"reduction": "sum"}),
    "ignored": ([(2, 3), (1, 3), (4, 3), (1, 3)], {"ignore_class": -1}),
}


@pytest.mark.sizes(2)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_whole_logits(case):
    shapes, options = CASES[case]
    size, rank = hvdx.size(), hvdx.rank()
    batches = [batch(r, shapes[r], (options.get("ignore_class", 0), CLASSES)) for r in range(size)]
    # A rank whose classes are all masked.
    for logits, *_ in batches:
        logits[..., : CLASSES // size] = -np.inf
    batches = [(logits, np.where(y < 0, y, np.maximum(y, CLASSES // size)), w) for logits, y, w in batches]
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    expected, gradients = [], []
    for logits, labels, weights in batches:
        with tf.GradientTape() as tape:
            scores = tf.constant(logits)
            tape.watch(scores)
            value = tf.reduce_sum(plain(labels, scores, weights))
        expected.append(value.numpy())
        gradients.append(tape.gradient(value, scores).numpy())
    with split(size):
        mine = slice(rank * CLASSES // size, (rank + 1) * CLASSES // size)
        columns = tf.constant(np.concatenate([logits for logits, *_ in batches])[..., mine])
        _, labels, weights = batches[rank]
        loss = SplitSparseCategoricalCrossentropy(**options)
        assert loss.get_config() == plain.get_config()
        with tf.GradientTape() as tape:
            tape.watch(columns)
            value = tf.reduce_sum(loss(labels[..., None], columns, weights))
        gradient = tape.gradient(value, columns).numpy()
        metric, whole = SplitSparseCategoricalAccuracy(), keras.metrics.SparseCategoricalAccuracy()
        metric.update_state(labels, columns, weights)
        whole.update_state(labels, batches[rank][0], weights)
    np.testing.assert_allclose(value.numpy(), expected[rank], rtol=1e-6)
    np.testing.assert_allclose(gradient, np.concatenate(gradients)[..., mine], rtol=1e-5, atol=1e-7)
    assert float(metric.result()) == pytest.approx(float(whole.result()))


@pytest.mark.sizes(2)
def test_loss_refuses_other_labels_and_logits_on_all_ranks():
    with pytest.raises(ConfigError, match="from_logits: expected True"):
        SplitSparseCategoricalCrossentropy(from_logits=False)
    loss, rank = SplitSparseCategoricalCrossentropy(), hvdx.rank()
    with split(2):
        columns = tf.zeros([4, 3])
        with pytest.raises(ConfigError, match=r"labels from 0 to 5, got 6.*ignore_class"):
            loss(np.array([0, 6 if rank else 1]), columns)
        with pytest.raises(ConfigError, match=r"the 4 rows of the group, got .*gather_output=False"):
            loss(np.array([0, 1]), columns[: 2 + 2 * rank])
        assert float(loss(np.array([0, 1]), columns)) == pytest.approx(np.log(6))
