"""`Channel.sum_in_order` between virtual ranks."""

import ml_dtypes
import numpy as np
import pytest

from tests.strategies.virtual import on_all

WIRES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def vector(rank, elements, dtype=np.float32):
    return (np.random.default_rng(rank).normal(size=elements) * 10.0 ** (rank % 3)).astype(dtype)


def total(channel, mine, scale=1.0):
    """Return the sum, as a new array."""
    result = mine.copy()
    channel.sum_in_order(result, scale)
    return result


def sums(size, elements, dtype=np.float32, scale=1.0):
    return on_all(size, lambda comm: total(comm.channel("a sum"), vector(comm.rank, elements, dtype), scale))


def in_rank_order(size, elements, dtype, scale=1.0):
    """Return the sum as a single process computes it."""
    total = vector(0, elements, dtype).astype(np.promote_types(dtype, np.float32))
    for rank in range(1, size):
        total = total + vector(rank, elements, dtype).astype(total.dtype)
    return (total * scale).astype(dtype)


@pytest.mark.parametrize("dtype", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("elements", [0, 1, 2, 5, 1001])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sum_in_rank_order_has_the_same_bits_on_all_ranks(size, elements, dtype):
    expected = in_rank_order(size, elements, dtype, 1 / size)
    for got in sums(size, elements, dtype, 1 / size):
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes()


def test_float16_sum_overflows_to_infinity_and_its_mean_does_not():
    def run(comm, scale):
        return total(comm.channel("a sum"), np.full(3, 6e4, np.float16), scale)

    assert np.isinf(on_all(2, lambda comm: run(comm, 1.0))[0]).all()
    np.testing.assert_array_equal(on_all(2, lambda comm: run(comm, 0.5))[1], np.full(3, 6e4, np.float16))


def test_nan_of_one_rank_reaches_all_ranks():
    def run(comm):
        return total(comm.channel("a sum"), np.array([1, np.nan if comm.rank == 1 else 1, 1], np.float32))

    for got in on_all(3, run):
        np.testing.assert_array_equal(got, [3, np.nan, 3])
