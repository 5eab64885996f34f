"""Samples of data: what they see, and what they ignore."""

import numpy as np
import pytest
import tensorflow as tf

from hvdx.keras.fit.agreement.sample import alike, sample


def _rows(dtype, count=200):
    numbers = np.random.default_rng(3).integers(0, 100, (count, 7))
    return numbers.astype("U3").astype(object) if dtype == "string" else tf.cast(numbers, dtype).numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64", "string"])
def test_sample_sees_another_order_of_rows_or_of_columns(dtype):
    rows = _rows(dtype)
    assert alike(sample(rows), sample(tf.constant(rows)))
    order = np.random.default_rng(1).permutation(len(rows))
    assert not alike(sample(rows), sample(rows[order]))
    if dtype != "bool":  # with few bits a row may be equal to its reverse; all sampled rows are not
        assert not alike(sample(rows), sample(rows[:, ::-1]))


def test_sample_ignores_rounding_and_sees_types_shapes_and_the_last_row():
    rows = _rows("float32")
    assert alike(sample(rows), sample(rows * np.float32(1 + 1e-7)))
    assert not alike(sample(rows), sample(rows.astype("float64")))
    assert not alike(sample(rows), sample(rows[:-1]))
    last = rows.copy()
    last[-1, 2] += 1
    assert not alike(sample(rows), sample(last))
    nan = rows.copy()
    nan[0] = np.nan
    assert alike(sample(nan), sample(nan))
    assert not alike(sample(rows), sample(nan))


def test_sample_takes_scalars_empty_ragged_and_missing_arrays():
    given = {"a": np.float32(3), "b": np.zeros((0, 4)), "c": tf.ragged.constant([[1, 2], [3]]), "d": None}
    assert alike(sample(given), sample(given))
    assert not alike(sample(given), sample(given | {"c": tf.ragged.constant([[1], [2, 3]])}))


@pytest.mark.parametrize(
    ("rows", "particular"),
    [
        (np.arange(32) % 10, True),
        (np.arange(8.0) ** 2, True),
        (np.arange(32), False),
        (np.ones(32), False),
        (np.tile([[1, 2, 3]], (32, 1)), False),
        (np.arange(4) % 2, False),
        (np.float64(3), False),
    ],
    ids=["classes", "targets", "positions", "constant", "one row", "short", "scalar"],
)
def test_arrays_that_can_be_equal_by_chance_have_no_digest(rows, particular):
    digest, none = sample([rows, rows[:0] if rows.ndim else rows]).digests()
    assert (digest is not None) == particular
    assert none is None
