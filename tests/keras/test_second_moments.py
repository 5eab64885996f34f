"""The correction of updates for the second moment by which an optimiser divides them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdx.keras.adapters import second_moments


class OwnStep(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


class SameStep(keras.optimizers.Adam):
    pass


def factor(signal, noise, steps, contributors=((0, 4),), kind=keras.optimizers.Adam):
    """Return the factor on an update of 1 after some steps with gradients signal + noise * (a normal variable)."""
    optimizer, variable, random = kind(0.01), keras.Variable(np.zeros(4000, "float32")), np.random.default_rng(1)
    for _ in range(steps):
        gradient = signal + noise * random.normal(size=4000)
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
    # The correction runs before the optimiser counts the step.
    optimizer._iterations.assign_sub(1)
    (update,) = second_moments.corrected(optimizer, [tf.ones(4000)], [variable], [contributors])
    assert len(set(update.numpy().tolist())) == 1
    return float(update[0])


@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.Nadam])
def test_factor_is_the_root_of_the_ratio_of_second_moments(kind):
    assert factor(0.0, 1.0, 12, kind=kind) == pytest.approx(2.0, rel=0.05)
    assert factor(1.0, 0.0, 12, kind=kind) == pytest.approx(1.0, abs=1e-3)
    # Signal and noise are equal: 2 / (1 + 1/4).
    assert factor(1.0, 1.0, 12, kind=kind) == pytest.approx(1.6**0.5, rel=0.05)


def test_factor_is_one_without_knowledge():
    assert factor(0.0, 1.0, 1) == 1.0
    assert factor(0.0, 0.0, 3) == 1.0


def test_factor_depends_on_the_ranks_that_count():
    assert factor(0.0, 1.0, 12, ((0, 1),)) == pytest.approx(1.0, abs=1e-6)
    assert factor(0.0, 1.0, 12, ((0, 1), (11, 16))) == pytest.approx(4.0, rel=0.1)
    assert factor(0.0, 1.0, 12, ((0, 4), (12, 16))) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "divides"),
    [
        (keras.optimizers.Adam(), True),
        (keras.optimizers.AdamW(), True),
        (keras.optimizers.Nadam(), True),
        (SameStep(), True),
        (OwnStep(), False),
        (keras.optimizers.SGD(0.1, momentum=0.9), False),
        (keras.optimizers.RMSprop(), False),
        (keras.optimizers.Adagrad(), False),
        (keras.optimizers.Lamb(), False),
        (keras.optimizers.Lion(), False),
    ],
)
def test_only_optimizers_that_divide_by_their_second_moment_are_corrected(optimizer, divides):
    assert second_moments.divides(optimizer) is divides
