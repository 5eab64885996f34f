import pytest

from hvdx.comm import LocalComm
from hvdx.comm.local import virtual_world
from hvdx.errors import ConfigError
from hvdx.strategies import AllReduce, ParameterAveraging, TensorSpec

SPECS = [TensorSpec("kernel", (784, 10), 4), TensorSpec("bias", (10,), 4), TensorSpec("scale", (), 4)]


@pytest.mark.parametrize(("compression", "itemsize"), [("none", 4), ("fp16", 2), ("bf16", 2)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_sent_are_those_of_a_ring(compression, itemsize, size):
    elements = 784 * 10 + 10 + 1
    expected = round(elements * itemsize * 2 * (size - 1) / size)
    assert AllReduce(compression=compression).open(virtual_world(size)[0], SPECS).sent == expected


def test_world_of_one_returns_its_tensors():
    tensors = [object(), object()]
    assert AllReduce().open(LocalComm(), [], name="step").step(tensors) == tensors


@pytest.mark.parametrize("strategy", [AllReduce, ParameterAveraging])
def test_unknown_engine_is_refused(strategy):
    with pytest.raises(ConfigError, match="engine: expected one of 'auto', 'horovod', 'mpi', got 'nccl'"):
        strategy(engine="nccl")


def test_repr_is_the_call_that_makes_it():
    strategy = AllReduce(op="sum", compression="bf16", groups=[[1], [0, 2]])
    assert repr(eval(repr(strategy))) == repr(strategy)
