"""Collectives of arrays, on virtual ranks."""

import numpy as np
import pytest

from hvdx.comm.array_comm import ArrayComm
from hvdx.comm.interfaces import Reduction
from hvdx.errors import ExchangeError, ReplicaError
from tests.strategies.virtual import on_all, on_hosts


@pytest.mark.parametrize(("average", "factor"), [(True, 1.5), (False, 3.0)])
def test_sums_and_means_keep_shapes_and_dtypes(average, factor):
    def work(comm):
        mine = comm.rank + 1
        given = [np.full((2, 3), mine, "float32"), np.float64(mine), np.full(2, mine, "bfloat16")]
        return ArrayComm(comm).all_reduce(given, Reduction(average=average, predivide=2.0 if average else 1.0), "g")

    for found in on_all(2, work):
        assert [(f.shape, f.dtype.name) for f in found] == [((2, 3), "float32"), ((), "float64"), ((2,), "bfloat16")]
        assert all((np.asarray(f, "float64") == factor).all() for f in found)


@pytest.mark.parametrize(("wire", "predivide"), [("none", 2.0), ("fp16", 1.0), ("bf16", 1.0)])
def test_arrays_that_are_given_one_by_one_have_the_sums_of_all_at_once(wire, predivide):
    sizes = 300_000, 400_000, 1, 700_000

    def work(comm):
        random, both = np.random.default_rng(comm.rank), ArrayComm(comm)
        how = Reduction(wire=wire, predivide=predivide, sizes=sizes, of_step=True)
        given = both.given_sums(how, "g")
        for _ in range(2):
            arrays = [random.normal(size=n).astype("float32") for n in sizes]
            expected = both.all_reduce([a.copy() for a in arrays], how, "g")
            for i in random.permutation(len(sizes)):
                given.give(i, arrays[i])
            for sums, e in zip(given.take(), expected, strict=True):
                np.testing.assert_array_equal(sums.astype("float32"), e)
        given.give(0, arrays[0])
        with pytest.raises(ExchangeError, match="computed twice in one step"):
            given.give(0, arrays[0])
        both.close()
        return both.given_sums(Reduction(sizes=(1, 1)), "g")

    assert on_hosts("ab", work) == [None, None]


def test_rows_travel():
    def work(comm):
        both = ArrayComm(comm)
        rows = np.arange(4.0).reshape(2, 2) + 10 * comm.rank
        return both.all_gather(rows, "rows"), both.all_to_all(rows, np.array([1, 1], np.int32), "rows")

    (first, (mine, counts)), (second, _) = on_all(2, work)
    assert first.tolist() == second.tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert mine.tolist() == [[0, 1], [10, 11]]
    assert counts.tolist() == [1, 1]


def test_rows_that_do_not_fit_are_refused_on_all_ranks():
    def work(comm):
        with pytest.raises(ReplicaError, match="splits: expected 2 numbers"):
            ArrayComm(comm).all_to_all(np.zeros((2, 1)), np.array([1, comm.rank], np.int32), "rows")

    on_all(2, work)
