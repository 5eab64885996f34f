"""Tests of the argument checks of `cpu`, and of their error messages."""

# Tests: kernels/pieces.py

import platform
import sys

import numpy as np
import pytest

from hvdx.kernels import cpu, pieces
from hvdx.kernels.tiles import Runs
from tests.kernels.strategies import make_runs

RUNS = make_runs((4, 0.5))


def floats(n=4):
    return np.zeros(n, np.float32)


def read_only():
    array = floats()
    array.flags.writeable = False
    return array


def misaligned():
    return np.zeros(17, np.uint8)[1:].view(np.float32)


BAD_ARRAYS = [
    ([0.0] * 4, TypeError, "expected a NumPy array, got list"),
    (np.zeros(4), TypeError, "expected float32, got float64"),
    (np.zeros(4, ">f4"), TypeError, "expected float32, got >f4"),
    (np.zeros(8, np.float32)[::2], ValueError, "expected contiguous memory"),
    (np.zeros(4, np.float32)[::-1], ValueError, "expected contiguous memory"),
    (np.zeros((2, 2), np.float32, "F"), ValueError, "expected contiguous memory"),
    (misaligned(), ValueError, "expected contiguous memory"),
]


@pytest.mark.parametrize(("array", "error", "text"), BAD_ARRAYS, ids=range(len(BAD_ARRAYS)))
def test_cpu_refuses_arrays(array, error, text):
    for name, call in {
        "update[1]": lambda: cpu.encode([floats(0), array], floats(), RUNS),
        "residual[0]": lambda: cpu.encode([floats()], array, RUNS),
        "out[1]": lambda: cpu.decode([], 1.0, [floats(0), array]),
    }.items():
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"{name}: ")
        assert text in str(caught.value)
    with pytest.raises(error, match=text):
        cpu.check([array], RUNS)
    with pytest.raises(error, match=text):
        cpu.sample([array], floats(), np.arange(1))
    with pytest.raises(error, match=text):
        cpu.sample([floats()], array, np.arange(1))


def test_cpu_refuses_read_only_outputs():
    with pytest.raises(ValueError, match=r"residual\[0\]: it is read-only"):
        cpu.encode([floats()], read_only(), RUNS)
    with pytest.raises(ValueError, match=r"out\[0\]: it is read-only"):
        cpu.decode([], 1.0, [read_only()])
    assert cpu.check([read_only()], RUNS) == -1
    assert cpu.encode([read_only()], floats(), RUNS, threads=1).fault == -1


BAD_RUNS = [
    make_runs((3, 0.5)),
    make_runs((5, 0.5)),
    make_runs((4, 0.5), (0, 0.5)),
    make_runs((5, 0.5), (-1, 0.5)),
    make_runs((2**62, 0.5), (2**62, 0.5), (2**62, 0.5), (2**62, 0.5), (4, 0.5)),
    make_runs((4, 0)),
    make_runs((4, -0.5)),
    make_runs((4, 2.0**-127)),
    make_runs((4, np.inf)),
    make_runs((4, np.nan)),
    make_runs(),
    Runs(np.array([4], np.int32), np.ones(1, np.float32)),
    Runs(np.array([4]), np.ones(1)),
    Runs(np.array([2, 2]), np.ones(1, np.float32)),
    Runs(np.array([[4]]), np.ones((1, 1), np.float32)),
]


@pytest.mark.parametrize("runs", BAD_RUNS, ids=range(len(BAD_RUNS)))
def test_cpu_refuses_runs(runs):
    with pytest.raises(ValueError, match="expected"):
        cpu.encode([floats()], floats(), runs)
    with pytest.raises(ValueError, match="expected"):
        cpu.decode([(np.zeros(0, np.uint8), runs)], 1.0, [floats()])
    with pytest.raises(ValueError, match="expected"):
        cpu.check([floats()], runs)


def test_encode_refuses_a_residual_of_another_size():
    with pytest.raises(ValueError, match="residual: expected the 4 elements of the update, got 5"):
        cpu.encode([floats()], floats(5), RUNS)


BAD_MESSAGES = [bytes(5), np.zeros(5, np.int64), np.zeros(10, np.uint8)[::2], np.zeros(5, np.uint8)[::-1]]


@pytest.mark.parametrize("message", BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_cpu_refuses_messages_that_are_no_bytes(message):
    """The compiled loops read memory by its address and ignore dtype and stride."""
    with pytest.raises((TypeError, ValueError), match="uint8"):
        cpu.inspect(message, 4, threads=1)
    with pytest.raises((TypeError, ValueError), match="uint8"):
        cpu.decode([(message, RUNS)], 1.0, [floats()], threads=1)


def test_messages_may_be_read_only():
    update, out = np.array([0, 1, -1, 0], np.float32), floats()
    tiles = cpu.encode([update], floats(), RUNS, threads=1).tiles
    cpu.decode([(np.frombuffer(tiles.tobytes(), np.uint8), RUNS)], 1.0, [out], threads=1)
    assert out.tolist() == update.tolist()


class Named(np.ndarray):
    """Array of a subclass, whose header is not read."""


def test_locate_reads_arrays_of_every_kind():
    """Arrays whose headers are read, and others between them: a subclass, another object of the same dtype."""
    alike = np.dtype(np.float32, metadata={"unit": "m"})
    arrays = [floats(), floats(6).view(Named), np.zeros((), np.float32), np.zeros((2, 3), alike), floats(0)]
    arrays += [np.zeros((1, 5, 2), np.float32), read_only()]
    for located in (pieces.locate(arrays, "update"), pieces.locate(tuple(arrays), "update")):
        assert located.sizes == [4, 6, 1, 6, 0, 10, 4]
        assert located.table[:, pieces.PLACE].tolist() == [a.ctypes.data for a in arrays]


def test_locate_looks_at_the_arrays_again_only_to_write_to_them():
    located = pieces.locate([read_only()], "out")
    assert pieces.locate(located, "out") is located
    with pytest.raises(ValueError, match="read-only"):
        pieces.locate(located, "out", writable=True)


def test_locate_takes_no_python_for_each_array(monkeypatch):
    if not pieces._HEADERS_ARE_KNOWN:
        pytest.skip("this interpreter's arrays have another header")
    monkeypatch.setattr(pieces, "_check_array", None)
    assert pieces.locate([floats()] * 3, "update", writable=True).sizes == [4, 4, 4]


def test_locate_knows_the_headers_of_cpython():
    is_cpython = platform.python_implementation() == "CPython" and sys.maxsize > 2**32
    assert pieces._HEADERS_ARE_KNOWN is is_cpython


def test_locate_without_known_headers(monkeypatch):
    monkeypatch.setattr(pieces, "_HEADERS_ARE_KNOWN", False)
    arrays = [floats(), floats(3)]
    assert pieces.locate(arrays, "update").table[:, pieces.PLACE].tolist() == [a.ctypes.data for a in arrays]
    with pytest.raises(TypeError, match=r"update\[1\]: expected float32"):
        pieces.locate([floats(), np.zeros(3)], "update")
