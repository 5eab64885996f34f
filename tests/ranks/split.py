"""Groups of ranks for the tests of split layers: a world can have one split, and the tests need several."""

import contextlib

import keras
import numpy as np

from hvdx import comm as world
from hvdx.comm import mesh
from hvdx.comm.interfaces import Mesh
from tests.ranks.models import CLASSES, FEATURES

_meshes: dict[int, Mesh | None] = {}


@contextlib.contextmanager
def split(ranks):
    """Let layers that are built here be split over groups of some ranks; 1 means that they are not split."""
    joined = world.start()
    if ranks not in _meshes:
        _meshes[ranks] = mesh.make(joined, ranks)
    before, joined.mesh = joined.mesh, _meshes[ranks]
    try:
        yield joined.mesh
    finally:
        joined.mesh = before


def splits():
    """Return the splits of this world: all ranks, and pairs on four ranks."""
    size = world.start().size
    return [m for m in (2, 4) if m <= size]


def network(make_dense, *, hidden=7, seed=0):
    """Build a network of a shared layer and split ones."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, activation="tanh"), *make_dense(hidden), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def whole(model):
    """Return the whole weights of a model. Collective."""
    from hvdx.keras.weight_parts import whole_values

    joined = world.start()
    group = joined.mesh.group if joined.mesh is not None else joined
    return whole_values(model.weights, group)


def assert_close(got, expected, tolerance):
    """Assert that arrays are close, relative to the largest element of each."""
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max() + 1e-12)
