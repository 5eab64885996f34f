"""Samples of the gradients of optimisers that divide by their second moment."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdx.keras.adapters import second_moments
from hvdx.keras.weight_parts import WeightPart, mark
from hvdx.strategies.threshold.gradient_noise import SAMPLE


class OwnStep(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


class SameStep(keras.optimizers.Adam):
    pass


@pytest.mark.parametrize(
    ("optimizer", "divides"),
    [
        (keras.optimizers.Adam(), True),
        (keras.optimizers.AdamW(), True),
        (keras.optimizers.Nadam(), True),
        (keras.optimizers.RMSprop(), True),
        (SameStep(), True),
        (OwnStep(), False),
        (keras.optimizers.RMSprop(centered=True), False),
        (keras.optimizers.SGD(0.1, momentum=0.9), False),
        (keras.optimizers.Adagrad(), False),
        (keras.optimizers.Lamb(), False),
        (keras.optimizers.Lion(), False),
    ],
)
def test_only_optimizers_that_divide_by_their_second_moment_are_sampled(optimizer, divides):
    assert second_moments.divides(optimizer) is divides


def sampled(optimizer, shapes, steps, gradient_of):
    """Take steps, and return the sample of the last one."""
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    for step in range(steps):
        gradients = [gradient_of(step, shape) for shape in shapes]
        optimizer.apply(gradients, variables)
    # The sample is taken before the optimiser counts the step.
    optimizer._iterations.assign_sub(1)
    return [s.numpy() for s in second_moments.sample(optimizer, gradients, variables)]


@pytest.mark.parametrize("moves", [True, False])
def test_elements_move_from_step_to_step_unless_ranks_compare_different_steps(moves):
    """The values of the gradient tell where they come from."""
    gradient = np.arange(1, 5001, dtype="float32")
    optimizer, variable = keras.optimizers.RMSprop(0.01), keras.Variable(np.zeros(5000, "float32"))
    seen = []
    for step in range(2):
        optimizer.apply([gradient * (1.0, 3.0)[step]], [variable])
        optimizer._iterations.assign_sub(1)
        optimizer._velocities[0].assign(np.ones(5000))
        (sample,) = second_moments.sample(optimizer, [tf.constant(gradient)], [variable], moves=moves)
        optimizer._iterations.assign_add(1)
        seen.append(np.argsort(sample.numpy()).tolist() + [float(np.min(sample) / np.max(sample))])
    assert (seen[0] == seen[1]) is not moves


@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.RMSprop])
def test_sample_is_divided_by_the_root_of_the_second_moment(kind):
    sample = sampled(kind(0.01), [(30, 20), (20,)], 3, lambda step, shape: tf.fill(shape, 7.0 * (-1) ** step))
    np.testing.assert_allclose(np.concatenate(sample), 1.0, rtol=1e-3)
    # Each variable has its share of the elements.
    assert [s.size for s in sample] == [62, 3]


def test_sample_visits_other_positions_in_every_step():
    optimizer, variable, seen = keras.optimizers.RMSprop(rho=0.0), keras.Variable(np.zeros(500, "float32")), set()
    optimizer.build([variable])
    optimizer._velocities[0].assign(np.ones(500))
    for step in range(8):
        optimizer._iterations.assign(step)
        # The value of each element is its position.
        (sample,) = second_moments.sample(optimizer, [tf.range(500.0)], [variable])
        positions = set(sample.numpy().tolist())
        assert len(positions) == SAMPLE
        seen |= positions
    assert len(seen) > 4 * SAMPLE


def test_sample_leaves_out_rows_of_embeddings_and_small_variables():
    rows = tf.IndexedSlices(tf.ones((1, 4)), tf.constant([2]), tf.constant([900, 4]))
    shapes = [(900, 4), *[(50 + i,) for i in range(9)], (0, 3)]
    sample = sampled(keras.optimizers.Adam(), shapes, 1, lambda _, shape: rows if shape == (900, 4) else tf.ones(shape))
    sizes = [s.size for s in sample]
    assert sizes[0] == sizes[1] == sizes[-1] == 0
    assert all(size in (8, 9) for size in sizes[2:-1])


def test_sample_of_zeros_is_zero():
    assert not np.concatenate(sampled(keras.optimizers.Adam(), [(9,)], 1, lambda _, shape: tf.zeros(shape))).any()


@pytest.mark.parametrize("part", [3, 5000])
def test_sample_of_whole_variables_does_not_depend_on_the_sizes_of_parts(part):
    """Ranks that exchange whole variables may hold parts of different sizes, and their samples have one size."""
    optimizer = keras.optimizers.Adam()
    variables = [keras.Variable(np.zeros(n, "float32")) for n in (300, part, 100)]
    mark(variables[1], WeightPart((8,), 0, (0, 3, 8), 0))
    optimizer.build(variables)
    sample = second_moments.sample(optimizer, [tf.zeros(v.shape) for v in variables], variables)
    assert [len(s) for s in sample] == [48, min(part, SAMPLE), 16]
