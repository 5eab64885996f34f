"""Network of arrays, for tests without files."""

from pathlib import Path

import numpy as np

from hvdx.averaging.mean import Mean, resolve_weights
from hvdx.averaging.network import Network, Tensor


class Arrays(Network):
    """Network of arrays in memory."""

    format = "arrays"
    suffixes = (".arrays",)

    def __init__(self, path="a.arrays", architecture=None, **arrays):
        self.path, self.architecture = Path(path), architecture
        self.tensors = {name: tensor(name, np.asarray(array)) for name, array in arrays.items()}

    @classmethod
    def recognises(cls, path, head):
        return False

    @classmethod
    def open(cls, path):
        raise NotImplementedError

    def write(self, out, values):
        raise NotImplementedError


def tensor(name, array):
    flat = np.ascontiguousarray(array).reshape(-1)

    def read(start, out):
        assert out.dtype == array.dtype
        out[...] = flat[start : start + out.size]

    return Tensor(name, array.shape, array.dtype, read)


def mean_of(arrays, weights=None, integers="equal", progress=None):
    """Return the mean of arrays, in the dtype of the first, and the `Mean` that computed it."""
    networks = [Arrays(f"{i}.arrays", w=array) for i, array in enumerate(arrays)]
    mean = Mean(networks, resolve_weights(len(arrays), weights), integers, progress)
    try:
        first = networks[0].tensors["w"]
        blocks = list(mean.values(first))
    finally:
        mean.close()
    assert all(block.ndim == 1 and block.dtype == first.dtype for block in blocks)
    # np.concatenate would convert to the byte order of this machine.
    return np.frombuffer(b"".join(b.tobytes() for b in blocks), first.dtype).reshape(first.shape), mean
