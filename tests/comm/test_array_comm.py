"""Collectives of arrays, on virtual ranks."""

import numpy as np
import pytest

from hvdx.comm.array_comm import ArrayComm
from hvdx.comm.interfaces import Reduction
from hvdx.errors import ReplicaError
from tests.strategies.virtual import on_all


@pytest.mark.parametrize(("average", "factor"), [(True, 1.5), (False, 3.0)])
def test_sums_and_means_keep_shapes_and_dtypes(average, factor):
    def work(comm):
        mine = comm.rank + 1
        given = [np.full((2, 3), mine, "float32"), np.float64(mine), np.full(2, mine, "bfloat16")]
        return ArrayComm(comm).all_reduce(given, Reduction(average=average, predivide=2.0 if average else 1.0), "g")

    for found in on_all(2, work):
        assert [(f.shape, f.dtype.name) for f in found] == [((2, 3), "float32"), ((), "float64"), ((2,), "bfloat16")]
        assert all((np.asarray(f, "float64") == factor).all() for f in found)


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
