"""The first batch of a dataset, recorded while it passes."""

import numpy as np
import tensorflow as tf

from hvdx.keras.fit.comparison import FirstBatch


def test_first_batch_is_that_of_the_first_pass_in_any_structure():
    batches = tf.data.Dataset.from_tensor_slices(
        ({"a": tf.ragged.constant([[1, 2], [3], [4]]), "b": ["x", "y", "z"]}, np.arange(3))
    ).batch(2)
    first, same, other = FirstBatch(batches), FirstBatch(batches), FirstBatch(batches.skip(1))
    assert first.digest is None
    assert first.dataset.element_spec == batches.element_spec
    for _ in range(2):
        assert [y.numpy().tolist() for _, y in first.dataset] == [[0, 1], [2]]
    list(same.dataset), list(other.dataset)
    assert first.digest == same.digest != other.digest
    single = tf.data.Dataset.from_tensor_slices((np.arange(3),)).batch(2)
    assert FirstBatch(single).dataset.element_spec == single.element_spec
