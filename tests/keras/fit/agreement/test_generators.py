"""The first elements of generators, recorded while they pass."""

import numpy as np
import tensorflow as tf

from hvdx.keras.fit.agreement import generators


def test_first_elements_of_a_generator_are_recorded_while_they_pass():
    read = []

    def yielding(order, noise=0.0):
        def generator():
            for i in order:
                read.append(i)
                yield np.float32(i + noise), i

        return generator

    def elements(order, noise=0.0):
        signature = (tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
        dataset = tf.data.Dataset.from_generator(yielding(order, noise), output_signature=signature)
        generators.record(dataset)
        generators.record(dataset)
        whole = dataset.take(30).map(lambda x, i: i).batch(5)
        read.clear()
        assert generators.recorded(whole) == [[]]
        for _ in range(2):
            assert [i for batch in whole for i in batch.numpy()] == list(order)
        assert read == [*order, *order]
        return generators.recorded(whole)

    first, other = elements(range(20)), elements(range(19, -1, -1))
    assert len(first[0]) == 16
    assert generators.differing([first, first, other, elements(range(20), 0.5)]) == [2]
    assert generators.differing([first, [first[0][:3]], [[]]]) == []


def test_generators_may_yield_lists_of_different_lengths():
    words = [([3, 17, 9], 0), ([4, 4, 8, 1, 2], 1), ([5], 0)]
    spec = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)

    def elements(order):
        dataset = tf.data.Dataset.from_generator(lambda: (words[i] for i in order), output_signature=spec)
        generators.record(dataset)
        assert len(list(dataset)) == 3
        return generators.recorded(dataset)

    assert generators.differing([elements([0, 1, 2]), elements([0, 1, 2]), elements([1, 2, 0])]) == [2]
