"""Options, spelling and exchange of `ParameterAveraging`."""

import numpy as np
import pytest

from hvdx import ParameterAveraging
from hvdx.comm.local import virtual_world
from hvdx.errors import ConfigError, ReplicaError
from hvdx.strategies import TensorSpec, parse
from tests.strategies.virtual import on_all


def test_period_may_be_a_number_or_a_schedule():
    assert ParameterAveraging().schedule == ((0, 16),)
    assert ParameterAveraging(4).schedule == ((0, 4),)
    schedule = ((0, 1), (500, 4), (2000, 16))
    assert ParameterAveraging(schedule).schedule == schedule
    assert ParameterAveraging([list(pair) for pair in schedule]).schedule == schedule
    assert ParameterAveraging("1@0/4@500/16@2000").schedule == schedule


@pytest.mark.parametrize(
    "period", [0, -1, 1.5, True, None, "", "x", "4@5", "1@0/4", "1@0/4@9/5@9", [], [(1, 4)], [(0, 0)], [(0, 1, 2)], "0"]
)
def test_other_periods_are_refused(period):
    with pytest.raises(ConfigError, match="period: expected a positive number"):
        ParameterAveraging(period)


@pytest.mark.parametrize(
    "text",
    [
        "parameter_averaging",
        "parameter_averaging:period=8",
        "parameter_averaging:period=1@0/16@300,average_optimizer=false",
        "parameter_averaging:weighted=true",
    ],
)
def test_one_line_spelling_and_repr_agree(text):
    strategy = parse(text)
    again = eval(repr(strategy), {"ParameterAveraging": ParameterAveraging})
    assert (again.schedule, again.average_optimizer, again.weighted) == (
        strategy.schedule,
        strategy.average_optimizer,
        strategy.weighted,
    )


def test_spelling_mistakes_are_explained():
    with pytest.raises(ConfigError, match="did you mean average_optimizer"):
        parse("parameter_averaging:average_optimiser=false")
    with pytest.raises(ConfigError, match="true or false"):
        parse("parameter_averaging:weighted=maybe")


def test_flags_are_flags():
    with pytest.raises(ConfigError, match="average_optimizer: expected one of True, False, got 'false'"):
        ParameterAveraging(average_optimizer="false")


def test_bytes_are_those_of_a_ring():
    specs = [TensorSpec("a", (10, 10), 4), TensorSpec("b", (), 4)]
    for size, sent in ((4, round(404 * 1.5)), (1, 0)):
        assert ParameterAveraging(8).open(virtual_world(size)[0], specs).sent == sent


def opened(comm, arrays):
    """Open an exchange of arrays on a virtual rank, whose channel stands in for Horovod's all-reduce."""
    channel = comm.channel("the weights")

    def all_reduce(tensors, how, name):
        assert not how.average
        flat = np.concatenate([np.ravel(t) for t in tensors])
        channel.all_reduce(flat)
        ends = np.cumsum([t.size for t in tensors])
        return [flat[end - t.size : end].reshape(t.shape) for t, end in zip(tensors, ends, strict=True)]

    comm.all_reduce = all_reduce
    return ParameterAveraging(8).open(comm, [TensorSpec("w", a.shape, a.itemsize) for a in arrays], name="test")


@pytest.mark.parametrize("size", [1, 3])
def test_means_are_weighted_and_each_is_of_its_dtype(size):
    def run(comm):
        arrays = [np.full(shape, comm.rank, dtype) for shape, dtype in (((2, 3), "f4"), ((), "f8"), ((4,), "f4"))]
        weights = {a.dtype: np.full((), comm.rank + 1, a.dtype) for a in arrays}
        return opened(comm, arrays).mean([a * weights[a.dtype] for a in arrays], weights)

    mean = sum(rank * (rank + 1) for rank in range(size)) / sum(rank + 1 for rank in range(size))
    for means in on_all(size, run):
        assert [(m.shape, m.dtype.name) for m in means] == [((2, 3), "float32"), ((), "float64"), ((4,), "float32")]
        for array in means:
            np.testing.assert_allclose(array, mean, rtol=1e-6)


def test_different_numbers_of_steps_are_an_error_on_all_ranks():
    def run(comm):
        with pytest.raises(ReplicaError, match=r"have taken \[7, 8\] steps"):
            opened(comm, [np.zeros(1, np.float32)]).agree(7 + comm.rank)

    on_all(2, run)
