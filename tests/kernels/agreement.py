"""Comparisons of `cpu` with `reference`, to the byte."""

import numpy as np

from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import Encoded
from tests.kernels.strategies import Case


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two float32 arrays have the same bits: -0.0 differs from 0.0."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def check_encoded(got: Encoded, want: Encoded) -> None:
    """Check that two results agree in every field, the tiles to the byte."""
    assert got.fault == want.fault
    np.testing.assert_array_equal(got.sent, want.sent)
    assert got.tiles.tobytes() == want.tiles.tobytes()


def encode_like_reference(case: Case, threads: int | None = 1, lookahead: float = 0.0) -> tuple[Encoded, np.ndarray]:
    """Encode with `cpu`, and check that `reference` agrees; return the result and the new residual."""
    got_residual, want_residual = case.residual.copy(), case.residual.copy()
    options = {"rice": case.rice, "layout": case.layout, "lookahead": lookahead}
    got = cpu.encode(case.update, got_residual, case.runs, **options, threads=threads)
    want = reference.encode(case.update, want_residual, case.runs, **options)
    check_encoded(got, want)
    if want.fault < 0:
        assert same_bits(got_residual, want_residual)
    else:
        check_restored(got_residual, case.residual, case.update, lookahead)
    return got, got_residual


def check_restored(residual: np.ndarray, before: np.ndarray, update: list[np.ndarray], lookahead: float = 0.0) -> None:
    """Check that an update was taken back from the residual, to the rounding that `cpu.encode` promises."""
    added = np.abs(reference.vector(update).astype(np.float64) * (1 + lookahead))
    most = np.maximum(np.abs(before), np.where(np.isfinite(added), added, 0))
    assert (np.abs(residual.astype(np.float64) - before) <= 2.0**-20 * most).all()


def sent_by(case: Case, tiles: np.ndarray) -> np.ndarray:
    """Return the values that tiles send, read by the specification: float32[n]."""
    index, negative, m = reference.read(tiles, case.n, case.rice)
    sent = np.zeros(case.n, np.float32)
    value = reference.amount(m, case.tau[index])
    sent[index] = np.where(negative, -value, value)
    return sent
