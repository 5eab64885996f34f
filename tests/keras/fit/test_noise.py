"""Random numbers of each rank, and the seed of all ranks, in one process."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras.fit import noise


def drawn():
    """Draw numbers from the generators of Python, NumPy, TensorFlow and Keras, and initial weights."""
    weights = keras.layers.Dense(2)
    weights.build((None, 2))
    return (
        random.random(),
        np.random.rand(),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
        weights.get_weights()[0].tolist(),
    )


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_init_seeds_all_generators(by, monkeypatch):
    if by == "environment":
        monkeypatch.setenv("HVDX_SEED", "7")

    def seeded():
        hvdx.init(seed=7 if by == "argument" else None)
        return drawn()

    first, second = seeded(), seeded()
    assert first == second
    hvdx.init(seed=8)
    assert all(a != b for a, b in zip(first, drawn(), strict=True))


def test_init_without_a_seed_seeds_nothing(monkeypatch):
    monkeypatch.delenv("HVDX_SEED", raising=False)
    keras.utils.set_random_seed(1)
    first = drawn()
    hvdx.init()
    assert drawn() != first


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "x"])
def test_bad_seeds_are_named(seed, monkeypatch):
    with pytest.raises(ConfigError, match="init: seed: expected an integer"):
        hvdx.init(seed=seed)
    monkeypatch.setenv("HVDX_SEED", str(seed))
    with pytest.raises(ConfigError, match="HVDX_SEED: expected an integer"):
        hvdx.init()


def masks(model, rank, count=3):
    """Return the noise of some steps of a fit on one of some ranks with the same seeds."""
    keras.utils.set_random_seed(3)
    for state in noise.generators(model):
        state.assign([11, 0])
    fits = []
    for _ in range(2):
        noise.differ(model, rank)
        steps = [model(np.ones((1, 16), "float32"), training=True).numpy().tolist() for _ in range(count)]
        fits.append([(step, keras.random.uniform([4]).numpy().tolist()) for step in steps])
        noise.agree(model)
    after = (
        keras.random.uniform([4]).numpy().tolist(),
        model(np.ones((1, 16), "float32"), training=True).numpy().tolist(),
    )
    return fits, after


def test_ranks_draw_different_noise_in_fit_and_the_same_after_it():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dropout(0.5)])
    (fits, after), (others, after_others) = masks(model, 0), masks(model, 1)
    assert after == after_others
    everything = [number for fit in (*fits, *others) for step in fit for number in map(str, step)]
    assert len(set(everything)) == len(everything)
    assert masks(model, 1) == (others, after_others)


def test_making_the_common_generator_leaves_the_numbers_of_python_alone():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dropout(0.5)])
    keras.utils.set_random_seed(3)
    state = random.getstate()
    noise.differ(model, 1)
    assert random.getstate() == state


def test_a_layer_that_has_its_rank_keeps_its_state():
    state = noise.of_rank(np.array([7, 3]), 5)
    assert noise.of_rank(state, 5).tolist() == state.tolist()
    assert noise.of_rank(state, 2).tolist() == noise.of_rank(np.array([7, 3]), 2).tolist()
    assert (noise.of_rank(state, 0).tolist(), noise.of_rank(np.array([7, 3]), 0).tolist()) == ([7, 3], [7, 3])
